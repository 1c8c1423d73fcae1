package parts.code.balance;

import java.io.Serializable;
import java.lang.ref.SoftReference;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.avro.NameValidator;
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

/**
 * Decodes framed Avro records by the writer's schema, which the id in the frame names, as records of the reader's schemas.
 *
 * The process tells the schemas of the ids at any time; a plan does not depend on them. Any thread may use the object, and
 * all of Spark's tasks share it.
 */
public final class Resolving implements Serializable {
  // A stage that is gone leaves its object to the garbage collector.
  private static final HashMap ALL = new HashMap();
  private static final AtomicInteger MADE = new AtomicInteger();
  private static final String IGNORED = "ignored";
  private static final int HEADER_BYTES = 5;
  // Avro's single-object encoding: C3 01, and 8 bytes of the schema's fingerprint.
  private static final int FINGERPRINT_HEADER_BYTES = 10;
  // The columns before those of the records: cause, detail, schema id.
  private static final int FIRST_RECORD = 3;
  // Each reading of a schema takes some kilobytes. One that is not kept is made again.
  private static final int MOST_KEPT = 2000;

  private final int number;
  // The JVM of an executor makes the object of these.
  private final ArrayList texts;
  private final ConcurrentHashMap told = new ConcurrentHashMap();
  private final transient Schema[] wanted;
  private final transient StructType type;
  private final boolean takesFingerprints;
  private final transient ConcurrentHashMap kept = new ConcurrentHashMap();

  /**
   * @param texts the schemas of the reader's records. The property `malformed` of a field is the cause for text in it that
   *     is not UTF-8; without that property, neither its text nor its times are checked.
   * @param takesFingerprints whether a frame may name its schema by a fingerprint, as the service's own records do; it is
   *     an id then as any other
   */
  public Resolving(List texts, boolean takesFingerprints) {
    this(new ArrayList(texts), takesFingerprints, MADE.incrementAndGet());
    synchronized (ALL) {
      ALL.put(Integer.valueOf(this.number), new SoftReference(this));
    }
  }

  private Resolving(ArrayList texts, boolean takesFingerprints, int number) {
    this.number = number;
    this.texts = texts;
    this.takesFingerprints = takesFingerprints;
    this.wanted = new Schema[texts.size()];
    StructType type = new StructType().add("cause", "string").add("detail", "string").add("schema_id", "bigint");
    for (int i = 0; i < this.wanted.length; i++) {
      this.wanted[i] = parsed((String) texts.get(i));
      type = type.add(this.wanted[i].getName(), Reading.typeOf(this.wanted[i]));
    }
    this.type = type;
  }

  /** Returns the type of what `read` makes of a frame. The last columns are those of the records. */
  public StructType type() {
    return this.type;
  }

  /** Returns the struct that `read` makes of a frame, with a struct for each record. */
  public Column of(Column frame) {
    List arguments = Collections.singletonList(ExpressionUtils.expression(frame));
    List types = new ArrayList();
    return ExpressionUtils.column(new Invoke(
      Literal.fromObject(this), "read", this.type, CollectionConverters.asScala(arguments).toSeq(),
      CollectionConverters.asScala(types).toSeq(), true, true, true));
  }

  /**
   * Tells the schema of an id.
   *
   * @param records the full names of its records; they decide about a schema that Avro does not parse.
   * @return why a record of the reader cannot be read under the schema; null if it can, or if the schema has none.
   */
  public String tell(long id, String text, List records) {
    Told schema = new Told(text, records, null);
    String reason = this.branches(schema).reason;
    this.told.put(Long.valueOf(id), schema);
    return reason;
  }

  /**
   * Tells why no value under a schema can be read.
   *
   * @param records the names of its records that are known, with a namespace or without.
   * @return whether it may be the schema of one of the reader's records; those of others are ignored.
   */
  public boolean refuse(long id, List records, String cause, String reason) {
    Told schema = new Told(null, records, new Reading.Unreadable(cause, reason));
    this.told.put(Long.valueOf(id), schema);
    return this.branches(schema).reason != null;
  }

  /**
   * Decodes a frame. A null `cause` means that one of the records is set. Else `detail` says why; of a record of another
   * type, it is the name.
   */
  public InternalRow read(byte[] frame) {
    Object[] row = new Object[FIRST_RECORD + this.wanted.length];
    try {
      boolean isOwn = this.takesFingerprints && frame.length >= FINGERPRINT_HEADER_BYTES
        && frame[0] == (byte) 0xC3 && frame[1] == 1;
      if (!isOwn && (frame.length < HEADER_BYTES || frame[0] != 0)) {
        throw withoutFrame(frame);
      }
      long id = isOwn ? fingerprint(frame)
        : (frame[1] & 255L) << 24 | (frame[2] & 255) << 16 | (frame[3] & 255) << 8 | frame[4] & 255;
      Branches schema = this.schema(Long.valueOf(id));
      if (schema == null) {
        row[2] = Long.valueOf(id);
        throw new Reading.Unreadable("unresolved", null);
      }
      Body in = new Body(frame, isOwn ? FINGERPRINT_HEADER_BYTES : HEADER_BYTES);
      int branch = schema.isUnion ? Reading.index(in, schema.readings.length, "the union") : 0;
      row[schema.columns[branch]] = schema.readings[branch].read(in, 0);
    } catch (Reading.Unreadable e) {
      refuse(row, e);
    } catch (StackOverflowError e) {
      refuse(row, new Reading.Unreadable(Reading.BODY, "its values are nested too deeply"));
    }
    return new GenericInternalRow(row);
  }

  private static long fingerprint(byte[] frame) {
    long found = 0;
    for (int i = FINGERPRINT_HEADER_BYTES - 1; i > 1; i--) {
      found = found << 8 | frame[i] & 255;
    }
    return found;
  }

  // The sentences are those of `avro/frames.py`.
  private static Reading.Unreadable withoutFrame(byte[] value) {
    int start = 0;
    int end = value.length;
    while (start < end && isJsonSpace(value[start])) {
      start++;
    }
    while (end > start && isJsonSpace(value[end - 1])) {
      end--;
    }
    boolean isObject = end - start > 1 && value[start] == '{' && value[end - 1] == '}';
    boolean isArray = end - start > 1 && value[start] == '[' && value[end - 1] == ']';
    String json = isObject || isArray ? "the value is a JSON document, and not an Avro record under a schema of the"
      + " registry: declare format=\"json\" for the topic, or let its producer use an Avro serializer" : null;
    if (value.length < HEADER_BYTES) {
      return new Reading.Unreadable(
        "frame-missing", json != null ? json : "a record of " + value.length + " bytes has no frame");
    }
    return new Reading.Unreadable(
      "magic-byte-unknown", json != null ? json : "a record's frame starts with " + (value[0] & 255) + ", not 0");
  }

  private static boolean isJsonSpace(byte one) {
    return one == ' ' || one == '\t' || one == '\r' || one == '\n';
  }

  private static void refuse(Object[] row, Reading.Unreadable why) {
    row[0] = why.cause;
    row[1] = why.getMessage() == null ? null : UTF8String.fromString(why.getMessage());
  }

  private Branches schema(Long id) {
    Branches found = (Branches) this.kept.get(id);
    Told schema = found == null ? (Told) this.told.get(id) : null;
    if (schema != null) {
      found = this.branches(schema);
      if (this.kept.size() >= MOST_KEPT) {
        this.kept.clear();
      }
      this.kept.put(id, found);
    }
    return found;
  }

  private Branches branches(Told told) {
    if (told.problem != null) {
      return this.unreadable(told, told.problem);
    }
    try {
      return this.resolved(parsed(told.text));
    } catch (RuntimeException e) {
      String reason = "the schema is not valid Avro: " + e.getMessage();
      return this.unreadable(told, new Reading.Unreadable(Reading.INCOMPATIBLE, reason));
    } catch (StackOverflowError e) {
      String reason = "the schema is nested too deeply";
      return this.unreadable(told, new Reading.Unreadable(Reading.INCOMPATIBLE, reason));
    }
  }

  private Branches resolved(Schema schema) {
    boolean isUnion = schema.getType() == Schema.Type.UNION;
    List types = isUnion ? schema.getTypes() : Collections.singletonList(schema);
    Branches made = new Branches(isUnion, types.size());
    for (int i = 0; i < types.size(); i++) {
      Schema branch = (Schema) types.get(i);
      int column = this.columnOf(branch);
      if (column < 0) {
        made.refuse(i, new Reading.Unreadable(IGNORED, branch.getFullName()));
      } else {
        made.resolve(i, branch, this.wanted[column], FIRST_RECORD + column);
      }
    }
    return made;
  }

  /** Returns which of the reader's records a type is, by its name or by an alias of the reader's; -1 if it is none. */
  private int columnOf(Schema branch) {
    int found = -1;
    for (int column = 0; column < this.wanted.length && branch.getType() == Schema.Type.RECORD; column++) {
      if (branch.getFullName().equals(this.wanted[column].getFullName())) {
        return column;
      }
      if (this.wanted[column].getAliases().contains(branch.getFullName())) {
        found = column;
      }
    }
    return found;
  }

  private Branches unreadable(Told told, Reading.Unreadable why) {
    Branches made = new Branches(false, 1);
    String name = told.records.isEmpty() ? "no record" : (String) told.records.get(0);
    made.refuse(0, new Reading.Unreadable(IGNORED, name));
    // On a topic of several types, records without a name may be many, and are most likely none of the reader's.
    boolean isWanted = told.records.isEmpty() && this.wanted.length == 1;
    for (int column = 0; column < this.wanted.length; column++) {
      Schema record = this.wanted[column];
      isWanted = isWanted || told.records.contains(record.getFullName()) || told.records.contains(record.getName());
      for (Object alias : record.getAliases()) {
        isWanted = isWanted || told.records.contains(alias);
      }
    }
    if (isWanted) {
      made.reason = made.refuse(0, why);
    }
    return made;
  }

  // The copy in a task would lack later schemas, so all tasks in a JVM use one object. An executor has a JVM of its own,
  // which runs the tasks of one driver alone, and learns schemas by tasks. Public, because Janino makes private methods
  // static.
  public Object readResolve() {
    Integer number = Integer.valueOf(this.number);
    Resolving found;
    synchronized (ALL) {
      SoftReference reference = (SoftReference) ALL.get(number);
      found = reference == null ? null : (Resolving) reference.get();
      if (found == null) {
        found = new Resolving(this.texts, this.takesFingerprints, this.number);
        ALL.put(number, new SoftReference(found));
      }
    }
    found.told.putAll(this.told);
    return found;
  }

  static Schema parsed(String text) {
    // Other languages' libraries check neither names nor defaults.
    return new Schema.Parser(NameValidator.NO_VALIDATION).setValidateDefaults(false).parse(text);
  }

  private static final class Told implements Serializable {
    final String text;
    final List records;
    // Null if the schema can be read.
    final Reading.Unreadable problem;

    Told(String text, List records, Reading.Unreadable problem) {
      this.text = text;
      this.records = records;
      this.problem = problem;
    }
  }

  /** How records of a schema are read: by one branch, or by those of a union. */
  private static final class Branches {
    final boolean isUnion;
    final int[] columns;
    final Reading[] readings;
    String reason;

    Branches(boolean isUnion, int count) {
      this.isUnion = isUnion;
      this.columns = new int[count];
      this.readings = new Reading[count];
    }

    String refuse(int branch, Reading.Unreadable why) {
      this.readings[branch] = new Reading.Refused(why);
      return why.getMessage();
    }

    void resolve(int branch, Schema written, Schema wanted, int column) {
      try {
        this.readings[branch] = new Reading.Resolution().of(written, wanted, wanted.getName(), null);
        this.columns[branch] = column;
      } catch (Reading.Unreadable e) {
        this.reason = this.refuse(branch, e);
      }
    }
  }
}
