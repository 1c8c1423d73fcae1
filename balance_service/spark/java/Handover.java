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
 * Spark reads each Kafka partition in a Spark partition of its own, whose number says nothing about Kafka's. The last
 * column of a row, `partition`, does: with the first row, this class connects to the socket of that Kafka partition, at
 * `path` with a dot and the number appended. That column is not sent. A connection to `path` itself, closed at once,
 * tells the process that a Spark partition has been opened.
 *
 * The process sends a byte to request rows. As soon as there are any, it receives all that have arrived: the number of
 * rows before them, eight bytes, then one record batch. Without that number, the data is a stream in Arrow's IPC format:
 * the schema, then the record batches. When Spark has completed the batch and all rows are sent, -1 takes the place of
 * the number: a connection that ends without it has failed.
 *
 * Spark's task thread adds rows; a thread of this class sends them. At the bound the task thread waits, so that further
 * events stay in Kafka. Once the process has closed the connection, it never takes rows of this query again: the task
 * thread waits until Spark stops the query, and the other partitions go on. The class extends PySpark's writer because
 * Spark passes it unconverted rows; for any other writer, Spark converts each row to an object.
 */
public class Handover extends PythonForeachWriter implements Runnable {
  private static final long KEPT_BYTES = 64 << 10;
  private final String path;
  private final int mostRows;
  private final long mostBytes;
  private final StructType sentType;
  private transient SocketChannel channel;
  private transient Rows filling;
  private transient boolean connected;
  private transient boolean left;
  private transient boolean ended;
  private transient boolean completed;
  private transient Throwable failure;
  private transient Thread sender;

  public Handover(String path, int mostRows, long mostBytes, StructType rowType, StructType sentType) {
    super(null, rowType);
    this.path = path;
    this.mostRows = mostRows;
    this.mostBytes = mostBytes;
    this.sentType = sentType;
  }

  public boolean open(long partition, long epoch) {
    if (epoch > 0) {
      throw new IllegalStateException("a query runs one batch only");
    }
    this.connected = false;
    this.left = false;
    this.ended = false;
    this.completed = false;
    this.failure = null;
    this.sender = null;
    try {
      SocketChannel.open(UnixDomainSocketAddress.of(this.path)).close();
    } catch (IOException e) {
      throw new RuntimeException(e);
    }
    return true;
  }

  public void process(Object row) {
    this.process((UnsafeRow) row);
  }

  public void process(UnsafeRow row) {
    if (!this.connected) {
      this.connect(row.getInt(row.numFields() - 1));
    }
    synchronized (this) {
      try {
        while (this.left
            || this.failure == null && (this.filling.count >= this.mostRows || this.filling.bytes >= this.mostBytes)) {
          this.wait();
        }
      } catch (InterruptedException e) {
        throw new RuntimeException(e);
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

  private void connect(int partition) {
    this.connected = true;
    try {
      this.channel = SocketChannel.open(UnixDomainSocketAddress.of(this.path + "." + partition));
    } catch (IOException e) {
      // The process has given the partition up before its first row.
      this.left = true;
      return;
    }
    this.filling = new Rows(this.sentType, 0);
    this.sender = new Thread(this, "handover-" + partition);
    this.sender.setDaemon(true);
    this.sender.start();
  }

  public void close(Throwable error) {
    if (this.sender == null) {
      return;
    }
    synchronized (this) {
      this.ended = true;
      this.completed = error == null;
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
      this.disconnect();
    }
  }

  public void run() {
    Rows sending = null;
    try {
      sending = new Rows(this.sentType, 0);
      WriteChannel out = new WriteChannel(this.channel);
      ByteBuffer ask = ByteBuffer.allocate(1);
      ByteBuffer number = ByteBuffer.allocate(8);
      MessageSerializer.serialize(out, sending.root.getSchema());
      while (true) {
        ask.clear();
        if (this.channel.read(ask) < 0) {
          synchronized (this) {
            this.left = true;
          }
          return;
        }
        synchronized (this) {
          while (this.filling.count == 0 && !this.ended) {
            this.wait();
          }
          if (this.filling.count == 0) {
            break;
          }
          Rows full = this.filling;
          sending.before = full.before + full.count;
          this.filling = sending;
          sending = full;
          this.notifyAll();
        }
        this.send(number, sending.before);
        sending.moveTo(out);
        if (sending.isMostlyUnused) {
          sending.free();
          sending = new Rows(this.sentType, 0);
        }
      }
      if (this.completed) {
        this.send(number, -1);
      }
    } catch (IOException e) {
      // The process has closed the connection while it was sent rows.
      synchronized (this) {
        this.left = true;
      }
    } catch (Throwable e) {
      this.fail(e);
    } finally {
      // Immediately: Spark's thread detects the failure with the next row only, and the process would wait until then.
      this.disconnect();
      synchronized (this) {
        if (sending != null) {
          sending.free();
        }
        this.filling.free();
      }
    }
  }

  private void send(ByteBuffer buffer, long number) throws IOException {
    buffer.clear();
    buffer.putLong(number);
    buffer.flip();
    while (buffer.hasRemaining()) {
      this.channel.write(buffer);
    }
  }

  private void disconnect() {
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
    long before;
    int count = 0;
    long bytes = 0;
    long most = 0;
    /** Whether the last batch was small, and an earlier one large, as after a replay. */
    boolean isMostlyUnused = false;

    Rows(StructType type, long before) {
      this.root = VectorSchemaRoot.create(ArrowUtils.toArrowSchema(type, "UTC", true, false), ArrowUtils.rootAllocator());
      this.writer = ArrowWriter.create(this.root);
      this.before = before;
    }

    void add(UnsafeRow row) {
      // Writes as many columns as the writer has.
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
      // Vectors that are reset keep their memory.
      this.writer.reset();
      this.most = Math.max(this.most, this.bytes);
      this.isMostlyUnused = this.most > KEPT_BYTES && this.bytes < this.most / 8;
      this.count = 0;
      this.bytes = 0;
    }

    void free() {
      this.root.close();
    }
  }
}
