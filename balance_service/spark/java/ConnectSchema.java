package parts.code.balance;

import com.fasterxml.jackson.core.JsonToken;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import org.apache.avro.LogicalTypes;
import org.apache.avro.Schema;

/**
 * Whether the schema in a document of Kafka Connect says another unit, or another scale, than the reader's.
 *
 * `formats/connect_schema.py` compares the same. Most documents of a topic have one schema, so the last one's bytes and
 * verdict are kept. Any thread may use it.
 */
final class ConnectSchema {
  private static final String CONNECT = "org.apache.kafka.connect.data.", DEBEZIUM = "io.debezium.time.";
  private static final String[][] TIMES = {
    {"epoch-millis", "Timestamp"}, {"epoch-micros", "MicroTimestamp"}, {"epoch-days", "Date"}
  };

  private final Schema wanted;
  // Replaced as a whole: the bytes, and the contradiction or null.
  private volatile Object[] last = {new byte[0], null};

  ConnectSchema(Schema wanted) {
    this.wanted = wanted;
  }

  /** Reads a schema that begins with a token. Returns what it says otherwise than the reader's; null if nothing. */
  String contradiction(Json in, JsonToken token, byte[] value) throws IOException {
    if (token != JsonToken.START_OBJECT) {
      in.skip(token);
      return null;
    }
    int start = in.tokenStart();
    Object[] last = this.last;
    byte[] known = (byte[]) last[0];
    int end = start + known.length;
    if (end > start && end <= value.length && Arrays.equals(known, 0, known.length, value, start, end)) {
      in.skip(token);
      return (String) last[1];
    }
    String found = contradiction(this.wanted, tree(in, token), "");
    this.last = new Object[] {Arrays.copyOfRange(value, start, in.tokenEnd()), found};
    return found;
  }

  /** Returns objects as maps, arrays as lists, and texts; null for all else. */
  private static Object tree(Json in, JsonToken token) throws IOException {
    if (token == JsonToken.START_OBJECT) {
      Map members = new HashMap();
      for (JsonToken next = in.needed(); next != JsonToken.END_OBJECT; next = in.needed()) {
        String name = in.name();
        members.put(name, tree(in, in.needed()));
      }
      return members;
    }
    if (token == JsonToken.START_ARRAY) {
      List items = new ArrayList();
      for (JsonToken next = in.needed(); next != JsonToken.END_ARRAY; next = in.needed()) {
        items.add(tree(in, next));
      }
      return items;
    }
    return token == JsonToken.VALUE_STRING ? in.text() : null;
  }

  private static String contradiction(Schema wanted, Object schema, String path) {
    if (!(schema instanceof Map)) {
      return null;
    }
    Map said = (Map) schema;
    Schema kind = wanted.getType() == Schema.Type.UNION ? Reading.nonNull(wanted) : wanted;
    switch (kind.getType()) {
      case RECORD:
        return ofFields(kind, said.get("fields"), path.isEmpty() ? "" : path + ".");
      case ARRAY:
        return contradiction(kind.getElementType(), said.get("items"), path + "[]");
      case MAP:
        return contradiction(kind.getValueType(), said.get("values"), path + "{}");
      default:
        return kind.getProp("json") == null ? null : ofSingle(kind, kind.getProp("json"), said, path);
    }
  }

  private static String ofFields(Schema wanted, Object fields, String inside) {
    if (!(fields instanceof List)) {
      return null;
    }
    for (Iterator all = ((List) fields).iterator(); all.hasNext();) {
      Object field = all.next();
      Object name = field instanceof Map ? ((Map) field).get("field") : null;
      Schema.Field known = name instanceof String ? wanted.getField((String) name) : null;
      String found = known == null ? null : contradiction(known.schema(), field, inside + name);
      if (found != null) {
        return found;
      }
    }
    return null;
  }

  private static String ofSingle(Schema wanted, String form, Map said, String path) {
    if (!(said.get("name") instanceof String)) {
      return null;
    }
    String name = (String) said.get("name");
    for (int i = 0; i < TIMES.length; i++) {
      boolean isOfTimes = name.startsWith(CONNECT) || name.startsWith(DEBEZIUM);
      if (form.equals(TIMES[i][0]) && isOfTimes && !name.substring(name.lastIndexOf('.') + 1).equals(TIMES[i][1])) {
        return path + " is of " + name + " by the document's schema, and the reader has " + form;
      }
    }
    Object parameters = said.get("parameters");
    Object scale = parameters instanceof Map ? ((Map) parameters).get("scale") : null;
    if (form.equals("base64") && name.equals(CONNECT + "Decimal") && scale instanceof String) {
      String own = String.valueOf(((LogicalTypes.Decimal) wanted.getLogicalType()).getScale());
      if (!scale.equals(own)) {
        return path + " is a decimal of scale " + scale + " by the document's schema, and the reader has " + own;
      }
    }
    return null;
  }
}
