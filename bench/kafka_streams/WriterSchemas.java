import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.avro.Schema;

/** Schemas of the registry, each requested once. */
final class WriterSchemas {
    private final String url;
    private final HttpClient client = HttpClient.newHttpClient();
    private final Map<Integer, Schema> known = new ConcurrentHashMap<>();

    WriterSchemas(String url) {
        this.url = url;
    }

    Schema get(int id) {
        return known.computeIfAbsent(id, this::ask);
    }

    private Schema ask(int id) {
        URI address = URI.create(url + "/schemas/ids/" + id);
        try {
            HttpResponse<String> answer = client.send(HttpRequest.newBuilder(address).build(), BodyHandlers.ofString());
            if (answer.statusCode() != 200) {
                throw new IllegalStateException(address + " was answered " + answer.statusCode());
            }
            return new Schema.Parser().parse(new ObjectMapper().readTree(answer.body()).get("schema").asText());
        } catch (IOException error) {
            throw new IllegalStateException(address + " cannot be asked", error);
        } catch (InterruptedException stopping) {
            Thread.currentThread().interrupt();
            throw new IllegalStateException(stopping);
        }
    }
}
