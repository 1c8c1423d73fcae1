import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.spark.SecurityManager;
import org.apache.spark.SparkConf;
import org.apache.spark.network.TransportContext;
import org.apache.spark.network.buffer.ManagedBuffer;
import org.apache.spark.network.client.ChunkReceivedCallback;
import org.apache.spark.network.client.TransportClient;
import org.apache.spark.network.client.TransportClientBootstrap;
import org.apache.spark.network.crypto.AuthClientBootstrap;
import org.apache.spark.network.netty.SparkTransportConf;
import org.apache.spark.network.server.NoOpRpcHandler;
import org.apache.spark.network.shuffle.protocol.BlockTransferMessage;
import org.apache.spark.network.shuffle.protocol.OpenBlocks;
import org.apache.spark.network.shuffle.protocol.StreamHandle;
import org.apache.spark.network.util.TransportConf;
import org.apache.spark.rpc.RpcAddress;
import org.apache.spark.rpc.RpcEndpointRef;
import org.apache.spark.rpc.RpcEnv;
import org.apache.spark.scheduler.local.KillTask;
import org.apache.spark.scheduler.local.StopExecutor$;
import scala.Option;
import scala.reflect.ClassTag;

/**
 * Another process on this machine that requests a block from Spark's driver and tries to stop its executor.
 *
 * Arguments: the driver's port, the block manager's port, the application id, a block id, then secrets; an empty secret
 * means none. Prints one line per secret and attempt, with the outcome.
 */
public class Stranger {
  private static final String HOST = "127.0.0.1";
  private static final String ENDPOINT = "LocalSchedulerBackendEndpoint";

  public static void main(String[] args) {
    int driver = Integer.parseInt(args[0]);
    int blocks = Integer.parseInt(args[1]);
    for (int at = 4; at < args.length; at++) {
      SparkConf conf = new SparkConf(false)
        .set("spark.network.timeout", "10s")
        .set("spark.rpc.askTimeout", "10s")
        .set("spark.rpc.lookupTimeout", "10s");
      if (!args[at].isEmpty()) {
        conf.set("spark.authenticate", "true").set("spark.authenticate.secret", args[at]);
      }
      SecurityManager security =
        new SecurityManager(conf, Option.empty(), SecurityManager.$lessinit$greater$default$3());
      security.initializeAuth();
      attempt("block", () -> fetch(conf, security, blocks, args[2], args[3]));
      attempt("stop", () -> stop(conf, security, driver));
    }
    System.exit(0);
  }

  private static void attempt(String what, Callable<Object> attempted) {
    try {
      System.out.println(what + " got " + attempted.call());
    } catch (Throwable e) {
      System.out.println(what + " refused " + String.valueOf(e).split("\n")[0]);
    }
  }

  private static Object stop(SparkConf conf, SecurityManager security, int port) {
    RpcEnv env = RpcEnv.create("stranger", HOST, 0, conf, security, true);
    try {
      RpcEndpointRef endpoint = env.setupEndpointRef(new RpcAddress(HOST, port), ENDPOINT);
      endpoint.send(new KillTask(0L, true, "a stranger"));
      return endpoint.askSync(StopExecutor$.MODULE$, ClassTag.Any());
    } finally {
      env.shutdown();
    }
  }

  private static Object fetch(SparkConf conf, SecurityManager security, int port, String app, String block)
    throws Exception {
    TransportConf transport = SparkTransportConf.fromSparkConf(conf, "shuffle", 1, Option.empty(), Option.empty());
    List<TransportClientBootstrap> bootstraps = new ArrayList<>();
    if (security.isAuthenticationEnabled()) {
      bootstraps.add(new AuthClientBootstrap(transport, app, security));
    }
    try (TransportContext context = new TransportContext(transport, new NoOpRpcHandler());
        TransportClient client = context.createClientFactory(bootstraps).createClient(HOST, port)) {
      ByteBuffer opened =
        client.sendRpcSync(new OpenBlocks(app, "driver", new String[] {block}).toByteBuffer(), 10_000);
      StreamHandle handle = (StreamHandle) BlockTransferMessage.Decoder.fromByteBuffer(opened);
      CompletableFuture<Integer> bytes = new CompletableFuture<>();
      client.fetchChunk(handle.streamId, 0, new ChunkReceivedCallback() {
        public void onSuccess(int chunk, ManagedBuffer buffer) {
          try {
            bytes.complete(buffer.nioByteBuffer().remaining());
          } catch (Exception e) {
            bytes.completeExceptionally(e);
          }
        }

        public void onFailure(int chunk, Throwable error) {
          bytes.completeExceptionally(error);
        }
      });
      return bytes.get(10, TimeUnit.SECONDS) + " bytes";
    }
  }
}
