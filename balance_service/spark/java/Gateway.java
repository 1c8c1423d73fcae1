package parts.code.balance;

import java.io.IOException;
import org.apache.spark.api.python.PythonGatewayServer;

/**
 * Starts PySpark's gateway, and ends the JVM with the process that started it.
 *
 * The standard input is a pipe that only this process holds open, so that its end shows the end of the process, however
 * that comes. PySpark's gateway then ends the JVM in an orderly way, which waits for Spark to stop: for ever, if a thread
 * of Spark hangs. This class waits for some seconds only.
 */
public class Gateway implements Runnable {
  private static final long MOST_MILLIS = 2000;

  public static void main(String[] arguments) {
    Thread thread = new Thread(new Gateway(), "parent");
    thread.setDaemon(true);
    thread.start();
    PythonGatewayServer.main(arguments);
  }

  public void run() {
    try {
      while (System.in.read() >= 0) {
        // Nothing is sent.
      }
      Thread.sleep(MOST_MILLIS);
    } catch (IOException e) {
      // The pipe has ended too.
    } catch (InterruptedException e) {
      // Nobody interrupts this thread.
    }
    // `System.exit` would wait for the shutdown hooks.
    Runtime.getRuntime().halt(1);
  }
}
