// Prints the partition of each key by Java's producer: as main.go. Needs kafka-clients on the class path.
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.util.HexFormat;
import org.apache.kafka.clients.producer.internals.BuiltInPartitioner;

public class Partitions {
    public static void main(String[] arguments) throws IOException {
        int partitions = Integer.parseInt(arguments[0]);
        BufferedReader keys = new BufferedReader(new InputStreamReader(System.in));
        StringBuilder out = new StringBuilder("Java\n");
        for (String key = keys.readLine(); key != null; key = keys.readLine()) {
            out.append(BuiltInPartitioner.partitionForKey(HexFormat.of().parseHex(key), partitions)).append('\n');
        }
        System.out.print(out);
    }
}
