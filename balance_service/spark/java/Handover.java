package parts.code.balance;

import java.io.IOException;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.SocketChannel;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.VectorUnloader;
import org.apache.arrow.vector.ipc.WriteChannel;
import org.apache.arrow.vector.ipc.message.ArrowRecordBatch;
import org.apache.arrow.vector.ipc.message.MessageSerializer;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.execution.arrow.ArrowWriter;
import org.apache.spark.sql.execution.python.streaming.PythonForeachWriter;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.ArrowUtils;

/**
 * Hands the rows of one Spark partition to a process that pulls them over a Unix socket.
 *
 * The process sends a byte to request rows. As soon as there are any, it receives all that have arrived, as one record
 * batch. The data is a stream in Arrow's IPC format: the schema, then the record batches.
 *
 * Spark's task thread adds rows; a thread of this class sends them. At the bound the task thread waits, so that further
 * events stay in Kafka. The class extends PySpark's writer because Spark passes it unconverted rows; for any other
 * writer, Spark converts each row to an object.
 */
public class Handover extends PythonForeachWriter implements Runnable {
  private final String path;
  private final int mostRows;
  private final long mostBytes;
  private final StructType rowType;
  private transient SocketChannel channel;
  private transient Rows filling;
  private transient boolean ended;
  private transient Throwable failure;
  private transient Thread sender;

  public Handover(String path, int mostRows, long mostBytes, StructType rowType) {
    super(null, rowType);
    this.path = path;
    this.mostRows = mostRows;
    this.mostBytes = mostBytes;
    this.rowType = rowType;
  }

  public boolean open(long partition, long epoch) {
    if (epoch > 0) {
      throw new IllegalStateException("a query runs one batch only");
    }
    try {
      this.channel = SocketChannel.open(UnixDomainSocketAddress.of(this.path));
    } catch (IOException e) {
      throw new RuntimeException(e);
    }
    this.filling = new Rows(this.rowType);
    this.ended = false;
    this.failure = null;
    this.sender = new Thread(this, "handover-" + partition + "-" + epoch);
    this.sender.setDaemon(true);
    this.sender.start();
    return true;
  }

  public void process(Object row) {
    this.process((UnsafeRow) row);
  }

  public void process(UnsafeRow row) {
    synchronized (this) {
      while (this.failure == null && (this.filling.count >= this.mostRows || this.filling.bytes >= this.mostBytes)) {
        try {
          this.wait();
        } catch (InterruptedException e) {
          throw new RuntimeException(e);
        }
      }
      if (this.failure != null) {
        throw new RuntimeException(this.failure);
      }
      this.filling.add(row);
      if (this.filling.count == 1) {
        this.notifyAll();
      }
    }
  }

  public void close(Throwable error) {
    synchronized (this) {
      this.ended = true;
      this.notifyAll();
    }
    try {
      if (error == null) {
        this.sender.join();
      }
    } catch (InterruptedException e) {
      Thread.currentThread().interrupt();
    } finally {
      // Wakes the sender, which frees the rows.
      this.leave();
    }
  }

  public void run() {
    Rows sending = null;
    try {
      sending = new Rows(this.rowType);
      WriteChannel out = new WriteChannel(this.channel);
      ByteBuffer ask = ByteBuffer.allocate(1);
      MessageSerializer.serialize(out, sending.root.getSchema());
      while (true) {
        ask.clear();
        if (this.channel.read(ask) < 0) {
          throw new IOException("the process no longer pulls rows");
        }
        synchronized (this) {
          while (this.filling.count == 0 && !this.ended) {
            this.wait();
          }
          if (this.filling.count == 0) {
            break;
          }
          Rows full = this.filling;
          this.filling = sending;
          sending = full;
          this.notifyAll();
        }
        sending.moveTo(out);
      }
      this.fail(new IOException("the rows have ended"));
    } catch (Throwable e) {
      this.fail(e);
    } finally {
      // Immediately: Spark's thread detects the failure with the next row only, and the process would wait until then.
      this.leave();
      synchronized (this) {
        if (sending != null) {
          sending.free();
        }
        this.filling.free();
      }
    }
  }

  private void leave() {
    try {
      this.channel.close();
    } catch (IOException e) {
      this.fail(e);
    }
  }

  // A block, because Janino 3.1 ignores `synchronized` on a private method.
  private void fail(Throwable cause) {
    synchronized (this) {
      this.failure = cause;
      this.notifyAll();
    }
  }

  /** Buffered rows in Arrow's memory. */
  private static class Rows {
    final VectorSchemaRoot root;
    final ArrowWriter writer;
    int count = 0;
    long bytes = 0;

    Rows(StructType rowType) {
      this.root = VectorSchemaRoot.create(
        ArrowUtils.toArrowSchema(rowType, "UTC", true, false), ArrowUtils.rootAllocator());
      this.writer = ArrowWriter.create(this.root);
    }

    void add(UnsafeRow row) {
      this.writer.write(row);
      this.count++;
      this.bytes += row.getSizeInBytes();
    }

    void moveTo(WriteChannel out) throws IOException {
      this.writer.finish();
      ArrowRecordBatch batch = new VectorUnloader(this.root).getRecordBatch();
      try {
        MessageSerializer.serialize(out, batch);
      } finally {
        batch.close();
      }
      this.writer.reset();
      this.count = 0;
      this.bytes = 0;
    }

    void free() {
      this.root.close();
    }
  }
}
