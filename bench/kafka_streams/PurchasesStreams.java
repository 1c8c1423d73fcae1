import com.sun.net.httpserver.HttpServer;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.EncoderFactory;
import org.apache.avro.util.Utf8;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.CloseOptions;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Produced;

/**
 * The purchases as a Kafka Streams program, written to be fast: each branch reads only the fields that it needs.
 * Invoices with home delivery are sent on without being re-encoded; a masked record is sent for each line.
 */
public final class PurchasesStreams {
    private static final String HOME_DELIVERY = "home-delivery";
    private static final int SHOWN_DIGITS = 4;
    private static final Duration CLOSE_TIMEOUT = Duration.ofSeconds(6);

    private final Options options;
    private final WriterSchemas schemas;
    private final KafkaStreams streams;

    private PurchasesStreams(Options options) {
        this.options = options;
        schemas = new WriterSchemas(options.get("schema-registry-url"));
        streams = new KafkaStreams(topology(), options.properties());
        streams.setStateListener((now, before) -> {
            if (now == KafkaStreams.State.ERROR) {
                Runtime.getRuntime().halt(1);
            }
        });
        streams.setUncaughtExceptionHandler(error -> {
            error.printStackTrace();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
    }

    public static void main(String[] args) throws IOException {
        new PurchasesStreams(Options.of(args)).run();
    }

    private void run() throws IOException {
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", options.number("http-port")), 1024);
        server.createContext("/status", exchange -> {
            byte[] body = ("{\"state\":\"" + streams.state() + "\"}").getBytes(StandardCharsets.UTF_8);
            exchange.sendResponseHeaders(200, body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        });
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            server.stop(0);
            streams.close(CloseOptions.timeout(CLOSE_TIMEOUT)
                    .withGroupMembershipOperation(CloseOptions.GroupMembershipOperation.LEAVE_GROUP));
        }));
        server.start();
        streams.start();
    }

    private Topology topology() {
        Serde<byte[]> bytes = Serdes.ByteArray();
        StreamsBuilder builder = new StreamsBuilder();
        KStream<byte[], byte[]> invoices = builder.stream(options.get("topic"), Consumed.with(bytes, bytes));
        var deliveries = ThreadLocal.withInitial(() -> new InvoiceReader(schemas, "deliveryType"));
        invoices.filter((store, invoice) -> isDelivered(deliveries.get(), invoice))
                .to(options.get("shipments-topic"), Produced.with(bytes, bytes));
        int schemaId = options.number("line-schema-id");
        var lines = ThreadLocal.withInitial(() -> new Lines(schemas, schemaId));
        invoices.flatMapValues(invoice -> lines.get().of(invoice))
                .to(options.get("lines-topic"), Produced.with(bytes, bytes));
        return builder.build();
    }

    private static boolean isDelivered(InvoiceReader reader, byte[] invoice) {
        try {
            return HOME_DELIVERY.equalsIgnoreCase(reader.read(invoice).get(0).toString());
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    /** Makes the masked records of an invoice's lines. For one thread. */
    private static final class Lines {
        private final InvoiceReader invoices;
        private final byte[] header;
        private final ByteArrayOutputStream frame = new ByteArrayOutputStream();
        private BinaryEncoder encoder;

        Lines(WriterSchemas schemas, int schemaId) {
            invoices = new InvoiceReader(schemas, "invoiceNumber", "storeId", "customerCardNo", "customerType",
                    "deliveryType", "lines");
            header = ByteBuffer.allocate(5).put((byte) 0).putInt(schemaId).array();
        }

        List<byte[]> of(byte[] value) {
            try {
                GenericRecord invoice = invoices.read(value);
                List<byte[]> made = new ArrayList<>();
                for (Object line : (List<?>) invoice.get(5)) {
                    made.add(masked(invoice, (GenericRecord) line));
                }
                return made;
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }

        private byte[] masked(GenericRecord invoice, GenericRecord line) throws IOException {
            frame.reset();
            frame.write(header);
            encoder = EncoderFactory.get().directBinaryEncoder(frame, encoder);
            encoder.writeString((Utf8) invoice.get(0));
            encoder.writeString((Utf8) invoice.get(1));
            // Digits, so each is one byte.
            Utf8 card = (Utf8) invoice.get(2);
            int from = Math.max(0, card.getByteLength() - SHOWN_DIGITS);
            encoder.writeBytes(card.getBytes(), from, card.getByteLength() - from);
            encoder.writeString((Utf8) invoice.get(3));
            encoder.writeString((Utf8) invoice.get(4));
            encoder.writeString((Utf8) line.get("itemCode"));
            encoder.writeString((Utf8) line.get("description"));
            encoder.writeInt((Integer) line.get("quantity"));
            // Hundredths, as they are read.
            encoder.writeBytes((ByteBuffer) line.get("unitPrice"));
            encoder.writeBytes((ByteBuffer) line.get("amount"));
            return frame.toByteArray();
        }
    }
}
