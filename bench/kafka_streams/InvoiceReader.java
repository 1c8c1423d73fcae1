import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.avro.LogicalTypes;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.BinaryDecoder;
import org.apache.avro.io.DecoderFactory;

/**
 * Reads some fields of a `PosInvoice` by its writer's schema, and skips all others. For one thread, because it reuses
 * its buffers and the record that it returns.
 */
final class InvoiceReader {
    private static final String POS_INVOICE = "parts.code.balance.events.PosInvoice";
    private static final int HEADER_BYTES = 5;

    private final WriterSchemas schemas;
    private final List<String> fields;
    private final Map<Integer, GenericDatumReader<GenericRecord>> readers = new HashMap<>();
    private BinaryDecoder decoder;
    private GenericRecord invoice;

    InvoiceReader(WriterSchemas schemas, String... fields) {
        this.schemas = schemas;
        this.fields = List.of(fields);
    }

    /** The wanted fields of the invoice in a Confluent frame, in the wanted order. */
    GenericRecord read(byte[] frame) throws IOException {
        if (frame == null || frame.length < HEADER_BYTES || frame[0] != 0) {
            throw new IOException("a value that is not in Confluent's format");
        }
        var reader = readers.computeIfAbsent(ByteBuffer.wrap(frame).getInt(1), id -> readerOf(schemas.get(id)));
        decoder = DecoderFactory.get().binaryDecoder(frame, HEADER_BYTES, frame.length - HEADER_BYTES, decoder);
        invoice = reader.read(invoice, decoder);
        return invoice;
    }

    private GenericDatumReader<GenericRecord> readerOf(Schema written) {
        if (!written.getFullName().equals(POS_INVOICE)) {
            throw new IllegalArgumentException("a record that is no PosInvoice: " + written.getFullName());
        }
        List<Schema.Field> wanted = new ArrayList<>();
        for (String field : fields) {
            Schema type = written.getField(field).schema();
            if (type.getLogicalType() instanceof LogicalTypes.Decimal decimal && decimal.getScale() != 2) {
                throw new IllegalArgumentException(field + " is not in hundredths");
            }
            wanted.add(new Schema.Field(field, type));
        }
        GenericData generic = new GenericData();
        generic.setFastReaderEnabled(true);
        Schema reader = Schema.createRecord(written.getName(), null, written.getNamespace(), false, wanted);
        return new GenericDatumReader<>(written, reader, generic);
    }
}
