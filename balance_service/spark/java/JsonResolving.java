package parts.code.balance;

import com.fasterxml.jackson.core.JsonToken;
import java.io.IOException;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import org.apache.avro.Schema;
import org.apache.spark.sql.Column;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.objects.Invoke;
import org.apache.spark.sql.classic.ExpressionUtils;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;
import scala.jdk.javaapi.CollectionConverters;

/** Decodes JSON documents as records of the reader's schemas, as `Resolving` does frames. Any thread may use it. */
public final class JsonResolving implements Serializable {
  // The columns before those of the records: cause, detail, schema id.
  private static final int FIRST_RECORD = 3;
  // As `formats/json_values.py` has them: the name, the fields that such a record has, and those that it may have.
  private static final String[][][] NO_ROWS = {
    {{"Heartbeat"}, {"ts_ms"}, {"ts_us", "ts_ns"}},
    {{"MessageValue"}, {"op", "source", "message"}, {"ts_ms", "ts_us", "ts_ns", "transaction"}},
    {{"TransactionMetadataValue"}, {"status", "id", "event_count", "data_collections"}, {"ts_ms"}}
  };

  private final ArrayList texts;
  private final String typeField;
  private final String dataField;
  private final String schemaField;
  private transient StructType type;
  private transient JsonValues.Fields[] records;
  private transient ConnectSchema[] schemas;
  private transient HashMap kinds;

  /**
   * @param texts the schemas of the reader's records.
   * @param typeField the field of a document that names its record; empty if there is only one record, or if a header
   *     names it.
   * @param dataField the field of a document that holds the record, if no header names it; empty if the document is it.
   * @param schemaField the only other field of a document that holds the record, as Kafka Connect's may; a document with
   *     other fields is the record. Empty if `dataField` tells.
   */
  public JsonResolving(List texts, String typeField, String dataField, String schemaField) {
    this.texts = new ArrayList(texts);
    this.typeField = typeField;
    this.dataField = dataField;
    this.schemaField = schemaField;
    this.make();
  }

  private void make() {
    StructType type = new StructType().add("cause", "string").add("detail", "string").add("schema_id", "bigint");
    this.records = new JsonValues.Fields[this.texts.size()];
    this.schemas = new ConnectSchema[this.records.length];
    this.kinds = new HashMap();
    for (int i = 0; i < this.records.length; i++) {
      Schema wanted = Resolving.parsed((String) this.texts.get(i));
      type = type.add(wanted.getName(), Reading.typeOf(wanted));
      this.records[i] = new JsonValues.Fields(wanted, "");
      this.schemas[i] = new ConnectSchema(wanted);
      Integer column = Integer.valueOf(i);
      if (wanted.getProp("kind") == null) {
        this.kinds.put(wanted.getName(), column);
        this.kinds.put(wanted.getFullName(), column);
      } else {
        this.kinds.put(wanted.getProp("kind"), column);
      }
    }
    this.type = type;
  }

  /** Returns the type of what `read` makes of a value. The last columns are those of the records. */
  public StructType type() {
    return this.type;
  }

  /** Returns the struct that `read` makes of a value and the header that names its record. */
  public Column of(Column value, Column kind) {
    List arguments = new ArrayList();
    arguments.add(ExpressionUtils.expression(value));
    arguments.add(ExpressionUtils.expression(kind));
    List types = new ArrayList();
    return ExpressionUtils.column(new Invoke(
      Literal.fromObject(this), "read", this.type, CollectionConverters.asScala(arguments).toSeq(),
      CollectionConverters.asScala(types).toSeq(), true, true, true));
  }

  /**
   * Decodes a value. A null `cause` means that one of the records is set. Else `detail` says why; of a record of another
   * type, it is the name.
   *
   * @param kind the value of the header that names the record; empty if there is none.
   */
  public InternalRow read(byte[] value, byte[] kind) {
    Object[] row = new Object[FIRST_RECORD + this.records.length];
    Json in = null;
    try {
      try {
        String name = kind.length == 0 ? null : UTF8String.fromBytes(kind).toString();
        boolean isWrapped = this.schemaField.isEmpty() ? name == null && !this.dataField.isEmpty() : this.isEnvelope(value);
        int column = 0;
        if (name != null || !this.typeField.isEmpty()) {
          name = name == null ? this.kindOf(value) : name;
          if (!this.kinds.containsKey(name)) {
            throw new Reading.Unreadable("ignored", name);
          }
          column = ((Integer) this.kinds.get(name)).intValue();
        }
        in = new Json(value);
        JsonToken first = in.needed();
        row[FIRST_RECORD + column] = isWrapped ? this.inside(in, value, column) : this.records[column].read(in, first);
        in.finish();
      } catch (Reading.Unreadable e) {
        // What is wrong with the document goes before what is wrong with a value.
        if (in != null && !e.cause.toString().equals(Json.MALFORMED)) {
          in.finish();
        }
        if (!this.schemaField.isEmpty() && e.cause.toString().equals("field-missing")) {
          this.ignoreNoRow(value);
        }
        throw e;
      }
    } catch (IOException e) {
      refuse(row, new Reading.Unreadable(Json.MALFORMED, "it is not JSON: " + e.getMessage()));
    } catch (Reading.Unreadable e) {
      refuse(row, e);
    }
    return new GenericInternalRow(row);
  }

  private static void refuse(Object[] row, Reading.Unreadable why) {
    for (int i = FIRST_RECORD; i < row.length; i++) {
      row[i] = null;
    }
    row[0] = why.cause;
    row[1] = UTF8String.fromString(why.getMessage());
  }

  /** Returns the kind that a document names. Reads the whole document. */
  private String kindOf(byte[] value) throws IOException {
    Json in = new Json(value);
    JsonToken token = in.needed();
    String kind = null;
    String problem = this.typeField + " is missing, which names the record";
    if (token != JsonToken.START_OBJECT) {
      in.skip(token);
      problem = "it is no object";
    } else {
      for (JsonToken next = in.needed(); next != JsonToken.END_OBJECT; next = in.needed()) {
        boolean isKind = in.name().equals(this.typeField);
        next = in.needed();
        if (isKind && next == JsonToken.VALUE_STRING) {
          kind = in.text();
        } else if (isKind) {
          problem = this.typeField + " is no string, but names the record";
        }
        in.skip(next);
      }
    }
    in.finish();
    if (kind == null) {
      throw new Reading.Unreadable(JsonValues.MISFIT, problem);
    }
    return kind;
  }

  /** Whether a document is an object of the fields of schema and data, and no other. */
  private boolean isEnvelope(byte[] value) throws IOException {
    Json in = new Json(value);
    JsonToken token = in.needed();
    if (token != JsonToken.START_OBJECT) {
      return false;
    }
    int names = 0;
    for (JsonToken next = in.needed(); next != JsonToken.END_OBJECT; next = in.needed()) {
      if (!in.name().equals(this.schemaField) && !in.name().equals(this.dataField)) {
        return false;
      }
      names++;
      in.skip(in.needed());
    }
    return names == 2;
  }

  /** Raises, if the record of a document is one of Debezium that is no change of a row. */
  private void ignoreNoRow(byte[] value) throws IOException {
    boolean isWrapped = this.isEnvelope(value);
    Json in = new Json(value);
    JsonToken token = in.needed();
    while (isWrapped && in.needed() == JsonToken.FIELD_NAME) {
      boolean isData = in.name().equals(this.dataField);
      token = in.needed();
      if (isData) {
        break;
      }
      in.skip(token);
    }
    HashSet names = new HashSet();
    if (token == JsonToken.START_OBJECT) {
      for (JsonToken next = in.needed(); next != JsonToken.END_OBJECT; next = in.needed()) {
        names.add(in.name());
        in.skip(in.needed());
      }
    }
    for (int i = 0; i < NO_ROWS.length; i++) {
      if (isOf(names, NO_ROWS[i][1], NO_ROWS[i][2])) {
        throw new Reading.Unreadable("ignored", NO_ROWS[i][0][0]);
      }
    }
  }

  private static boolean isOf(HashSet names, String[] has, String[] may) {
    int known = 0;
    for (int i = 0; i < has.length; i++) {
      if (!names.contains(has[i])) {
        return false;
      }
      known++;
    }
    for (int i = 0; i < may.length; i++) {
      known += names.contains(may[i]) ? 1 : 0;
    }
    return known == names.size();
  }

  private Object inside(Json in, byte[] value, int column) throws IOException {
    Object found = null;
    for (JsonToken next = in.needed(); next != JsonToken.END_OBJECT; next = in.needed()) {
      String name = in.name();
      next = in.needed();
      if (name.equals(this.dataField)) {
        found = this.records[column].read(in, next);
      } else if (!this.schemaField.isEmpty() && name.equals(this.schemaField)) {
        String contradiction = this.schemas[column].contradiction(in, next, value);
        if (contradiction != null) {
          throw new Reading.Unreadable(JsonValues.MISFIT, contradiction);
        }
      } else {
        in.skip(next);
      }
    }
    if (found == null) {
      throw new Reading.Unreadable("field-missing", this.dataField + " is missing, and holds the record");
    }
    return found;
  }

  // Public, because Janino makes private methods static.
  public Object readResolve() {
    return new JsonResolving(this.texts, this.typeField, this.dataField, this.schemaField);
  }
}
