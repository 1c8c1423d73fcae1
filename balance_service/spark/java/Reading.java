package parts.code.balance;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.IdentityHashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import org.apache.avro.LogicalType;
import org.apache.avro.LogicalTypes;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.EncoderFactory;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.util.ArrayBasedMapData;
import org.apache.spark.sql.catalyst.util.GenericArrayData;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Reads the values of a written type as those of a wanted type, in Spark's form. Has no state, so any thread may use it.
 *
 * Types resolve as Avro's specification and its Java library do, except that a decimal of any scale is read exactly;
 * that a logical type of the writer is never ignored; and that a value which does not resolve concerns its record only.
 * Fields that the reader lacks are read too, because damage in them may be damage of the next field. Values whose type
 * takes no bytes are passed over unread, because a record of a few bytes can hold any number of them; an array of them
 * that the reader wants does not resolve.
 */
abstract class Reading {
  static final String INCOMPATIBLE = "schema-incompatible";
  static final String BODY = "body-undecodable";
  private static final int DIGITS = 38;
  private static final int LONG_DIGITS = 18;
  // Bounds the time that a forged decimal takes; those with more digits do not fit.
  private static final int MOST_BYTES = 512;
  private static final int MOST_DIGITS = 1234;
  // The years 1 to 9999, which Python's times have, in microseconds since 1970.
  private static final long DAY = 86400000000L, FIRST = -719162 * DAY, END = 2932897 * DAY;
  // A time that is not checked may be any number.
  private static final long FARTHEST = 1000000000000000000L;
  private static final int MOST_LEVELS = 500;
  private static final int MOST_SAID = 400;
  private static final Reading NOTHING = new Fields(new Reading[0], new int[0], null);

  /** @param level how many values this one is nested in. */
  abstract Object read(Body in, int level);

  /** Returns Spark's type for the values of a wanted type. */
  static DataType typeOf(Schema wanted) {
    String name = nameOf(nonNull(wanted));
    Schema kind = nonNull(wanted);
    if (kind.getLogicalType() instanceof LogicalTypes.Decimal) {
      return DataTypes.createDecimalType(DIGITS, ((LogicalTypes.Decimal) kind.getLogicalType()).getScale());
    }
    switch (kind.getType()) {
      case BOOLEAN:
        return DataTypes.BooleanType;
      case INT:
        return name.equals("date") ? DataTypes.DateType : DataTypes.IntegerType;
      case LONG:
        return name.equals("long") ? DataTypes.LongType
          : name.startsWith("local-") ? DataTypes.TimestampNTZType
          : name.startsWith("timestamp-") ? DataTypes.TimestampType : DataTypes.LongType;
      case FLOAT:
        return DataTypes.FloatType;
      case DOUBLE:
        return DataTypes.DoubleType;
      case BYTES:
      case FIXED:
        return isUuid(kind) ? DataTypes.StringType : DataTypes.BinaryType;
      case ARRAY:
        return DataTypes.createArrayType(typeOf(kind.getElementType()));
      case MAP:
        return DataTypes.createMapType(DataTypes.StringType, typeOf(kind.getValueType()));
      case RECORD:
        StructType type = new StructType();
        for (Object field : kind.getFields()) {
          type = type.add(((Schema.Field) field).name(), typeOf(((Schema.Field) field).schema()));
        }
        return type;
      default:
        return DataTypes.StringType;
    }
  }

  static int index(Body in, int count, String of) {
    long index = in.readLong();
    if (index < 0 || index >= count) {
      throw new Unreadable(BODY, of + " has no member " + index);
    }
    return (int) index;
  }

  static Schema nonNull(Schema kind) {
    boolean isNullable = kind.getType() == Schema.Type.UNION;
    int other = isNullable && ((Schema) kind.getTypes().get(0)).getType() == Schema.Type.NULL ? 1 : 0;
    return isNullable ? (Schema) kind.getTypes().get(other) : kind;
  }

  /** Returns the logical type, if Avro knows it and it is valid, else the type. A UUID is its text or its bytes. */
  static String nameOf(Schema kind) {
    LogicalType logical = kind.getLogicalType();
    return logical == null || logical.getName().equals("uuid") ? kind.getType().getName() : logical.getName();
  }

  /** Returns whether a type is a UUID of 16 bytes. */
  static boolean isUuid(Schema kind) {
    return kind.getType() == Schema.Type.FIXED && kind.getLogicalType() != null
      && kind.getLogicalType().getName().equals("uuid");
  }

  /**
   * Returns the name that Kafka Connect or Debezium gives a time; null if it gives none. Such a time is a number to a reader
   * of numbers, and has no zone.
   */
  private static String connectName(Schema kind) {
    String name = kind.getProp("connect.name");
    boolean isNumber = kind.getType() == Schema.Type.INT || kind.getType() == Schema.Type.LONG;
    boolean isTime = name != null && (name.startsWith("io.debezium.time.") || name.startsWith("org.apache.kafka.connect.data."));
    return isNumber && isTime ? name : null;
  }

  static String said(Schema kind) {
    return kind.getLogicalType() == null ? kind.getFullName() : kind.getLogicalType().getName();
  }

  private static UTF8String text(Body in, String malformed, String path) {
    byte[] data = in.readBytes();
    UTF8String text = UTF8String.fromBytes(data);
    if (malformed != null) {
      for (int i = 0; i < data.length; i++) {
        if (data[i] < 0) {
          if (!text.isValid()) {
            throw new Unreadable(malformed, path + " is not UTF-8");
          }
          break;
        }
      }
    }
    return text;
  }

  /** A record that cannot be read. Has no stack trace, because many records may be so. */
  static final class Unreadable extends RuntimeException {
    final UTF8String cause;

    Unreadable(String cause, String detail) {
      // A message of Avro may contain the schema.
      super(detail == null || detail.length() <= MOST_SAID ? detail : detail.substring(0, MOST_SAID), null, false, false);
      this.cause = UTF8String.fromString(cause);
    }
  }

  /** Makes the readings of one schema. */
  static final class Resolution {
    // Readings of skipped records by type. They may contain themselves.
    private final IdentityHashMap skipped = new IdentityHashMap();
    private final IdentityHashMap least = new IdentityHashMap();
    // What was found for records and enums of a type, by path. A schema may name one type any number of times.
    private final IdentityHashMap resolved = new IdentityHashMap();

    /**
     * @param malformed as for `Resolving`; null if neither text nor times are checked.
     * @throws Unreadable if no value resolves
     */
    Reading of(Schema written, Schema wanted, String path, String malformed) {
      if (written.getType() == Schema.Type.UNION) {
        return this.ofUnion(written, wanted, path, malformed);
      }
      if (written.getType() == Schema.Type.NULL && wanted.getType() == Schema.Type.UNION) {
        return NOTHING;
      }
      Schema ours = nonNull(wanted);
      String theirName = nameOf(written), ourName = nameOf(ours);
      Schema.Type their = written.getType();
      String unit = connectName(written);
      if (unit != null) {
        boolean isNumber = ours.getLogicalType() == null || ourName.equals("decimal");
        theirName = isNumber ? their.getName() : written.getLogicalType() == null ? unit
          : ourName.startsWith("local-") ? "local-" + theirName : theirName;
      }
      // Only a type that says nothing else is read as what the reader says.
      boolean isPlain = theirName.equals(ourName) || theirName.equals(their.getName());
      switch (ours.getType()) {
        case LONG:
          if (their == Schema.Type.LONG && withoutUnit(theirName).equals(withoutUnit(ourName))) {
            return new Single(their, ours.getType(), theirName, malformed, path);
          }
          // As for the other numbers.
        case BOOLEAN:
        case INT:
        case FLOAT:
        case DOUBLE:
          if (isPlain && isPromoted(their, ours.getType())) {
            return new Single(their, ours.getType(), ourName, malformed, path);
          }
          break;
        case STRING:
          if (isUuid(written)) {
            return new Fixed(written.getFixedSize(), true);
          }
          if (isPlain && (their == Schema.Type.STRING || their == Schema.Type.BYTES)) {
            return new Single(their, ours.getType(), ourName, malformed, path);
          }
          break;
        case BYTES:
        case FIXED:
          if (isUuid(ours)) {
            if (isPlain && their == Schema.Type.STRING) {
              return new Single(their, their, theirName, malformed, path);
            }
            if (isUuid(written) || isPlain && isNamedSo(written, ours) && written.getFixedSize() == ours.getFixedSize()) {
              return new Fixed(written.getFixedSize(), true);
            }
          } else if (ourName.equals("decimal")) {
            if (theirName.equals("decimal") || theirName.equals("int") || theirName.equals("long")) {
              return new Exact(written, ((LogicalTypes.Decimal) ours.getLogicalType()).getScale(), path);
            }
          } else if (isPlain && ours.getType() == Schema.Type.BYTES && (their == Schema.Type.STRING || their == ours.getType())) {
            return new Single(their, ours.getType(), ourName, malformed, path);
          } else if (isPlain && isNamedSo(written, ours) && written.getFixedSize() == ours.getFixedSize()) {
            return new Fixed(written.getFixedSize(), false);
          }
          break;
        case ENUM:
          if (isNamedSo(written, ours)) {
            return this.ofSymbols(written, ours, path);
          }
          break;
        case ARRAY:
          if (their == Schema.Type.ARRAY) {
            long leastBytes = this.leastBytes(written.getElementType());
            if (leastBytes == 0) {
              throw new Unreadable(INCOMPATIBLE, path + " is written as an array of items without bytes, which is not read");
            }
            Reading item = this.of(written.getElementType(), ours.getElementType(), path + "[]", malformed);
            return new Items(false, item, leastBytes, true, malformed, path);
          }
          break;
        case MAP:
          if (their == Schema.Type.MAP) {
            Reading value = this.of(written.getValueType(), ours.getValueType(), path + "{}", malformed);
            return new Items(true, value, this.leastBytes(written.getValueType()), true, malformed, path);
          }
          break;
        default:
          if (their == Schema.Type.RECORD) {
            return this.ofRecord(written, ours, path, malformed);
          }
      }
      throw notRead(written, ours, path);
    }

    private static Unreadable notRead(Schema written, Schema wanted, String path) {
      return new Unreadable(INCOMPATIBLE, path + " is written as " + said(written) + ", which is not read as " + said(wanted));
    }

    private static String withoutUnit(String name) {
      return name.replace("micros", "millis").replace("nanos", "millis");
    }

    // Source: Avro 1.12 specification, "Schema Resolution": the names without their namespaces match.
    private static boolean isNamedSo(Schema written, Schema wanted) {
      boolean isNamed = written.getType() == wanted.getType() && written.getName().equals(wanted.getName());
      for (Object alias : written.getType() == wanted.getType() ? wanted.getAliases() : Collections.emptySet()) {
        String name = (String) alias;
        isNamed = isNamed || written.getName().equals(name.substring(name.lastIndexOf('.') + 1));
      }
      return isNamed;
    }

    // Source: Avro 1.12 specification, "Schema Resolution".
    private static boolean isPromoted(Schema.Type written, Schema.Type wanted) {
      int from = "int long float double".indexOf(written.getName());
      int to = "int long float double".indexOf(wanted.getName());
      return written == wanted || 0 <= from && from < to;
    }

    private Reading ofUnion(Schema written, Schema wanted, String path, String malformed) {
      Reading[] members = new Reading[written.getTypes().size()];
      Unreadable problem = null;
      boolean isReadable = false;
      Schema ours = nonNull(wanted);
      int records = 0;
      for (Object member : written.getTypes()) {
        records += ((Schema) member).getType() == Schema.Type.RECORD ? 1 : 0;
      }
      // Records of one union differ by name alone.
      boolean isByName = records > 1 && ours.getType() == Schema.Type.RECORD;
      for (int i = 0; i < members.length; i++) {
        Schema member = (Schema) written.getTypes().get(i);
        try {
          if (isByName && member.getType() == Schema.Type.RECORD && !isNamedSo(member, ours)) {
            throw notRead(member, ours, path);
          }
          if (member.getType() == Schema.Type.NULL && wanted.getType() != Schema.Type.UNION) {
            members[i] = new Refused(new Unreadable("field-null", path + " is null"));
          } else {
            members[i] = this.of(member, wanted, path, malformed);
            isReadable = true;
          }
        } catch (Unreadable e) {
          problem = e;
          members[i] = new Refused(e);
        }
      }
      if (problem != null && !isReadable) {
        throw problem;
      }
      return new Union(members, path);
    }

    private Reading ofSymbols(Schema written, Schema wanted, String path) {
      Map found = this.resolvedOf(written);
      if (!found.containsKey(path)) {
        found.put(path, new Symbols(written, wanted, path));
      }
      return (Reading) found.get(path);
    }

    private Map resolvedOf(Schema written) {
      if (!this.resolved.containsKey(written)) {
        this.resolved.put(written, new HashMap());
      }
      return (Map) this.resolved.get(written);
    }

    private Reading ofRecord(Schema written, Schema wanted, String path, String malformed) {
      Map found = this.resolvedOf(written);
      if (!found.containsKey(path)) {
        try {
          found.put(path, this.ofFields(written, wanted, path, malformed));
        } catch (Unreadable e) {
          found.put(path, e);
        }
      }
      if (found.get(path) instanceof Unreadable) {
        throw (Unreadable) found.get(path);
      }
      return (Reading) found.get(path);
    }

    private Reading ofFields(Schema written, Schema wanted, String path, String malformed) {
      Schema.Field[] read = new Schema.Field[written.getFields().size()];
      Object[] defaults = new Object[wanted.getFields().size()];
      for (int i = 0; i < defaults.length; i++) {
        Schema.Field ours = (Schema.Field) wanted.getFields().get(i);
        Schema.Field theirs = fieldOf(written, wanted, ours);
        // Of two fields with one alias, the first has the value.
        if (theirs == null || read[theirs.pos()] != null) {
          defaults[i] = this.defaultOf(ours, path + "." + ours.name());
        } else {
          read[theirs.pos()] = ours;
        }
      }
      Reading[] parts = new Reading[read.length];
      int[] columns = new int[read.length];
      for (int i = 0; i < read.length; i++) {
        Schema theirs = ((Schema.Field) written.getFields().get(i)).schema();
        columns[i] = read[i] == null ? -1 : read[i].pos();
        if (read[i] == null) {
          parts[i] = this.skipped(theirs);
        } else {
          String cause = malformed == null ? read[i].getProp("malformed") : malformed;
          parts[i] = this.of(theirs, read[i].schema(), path + "." + read[i].name(), cause);
        }
      }
      return new Fields(parts, columns, defaults);
    }

    /** Returns the written field of a wanted one: of its name, or of an alias that no other wanted field has as name. */
    private static Schema.Field fieldOf(Schema written, Schema wanted, Schema.Field field) {
      Schema.Field found = written.getField(field.name());
      for (Object alias : field.aliases()) {
        if (found == null && wanted.getField((String) alias) == null) {
          found = written.getField((String) alias);
        }
      }
      return found;
    }

    Object defaultOf(Schema.Field field, String path) {
      if (!field.hasDefaultValue()) {
        throw new Unreadable(INCOMPATIBLE, path + " is missing, and has no default");
      }
      try {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        BinaryEncoder out = EncoderFactory.get().directBinaryEncoder(bytes, null);
        new GenericDatumWriter(field.schema()).write(GenericData.get().getDefaultValue(field), out);
        return this.of(field.schema(), field.schema(), path, null).read(new Body(bytes.toByteArray(), 0), 0);
      } catch (Unreadable e) {
        throw e;
      } catch (Exception e) {
        // Avro raises many types of errors for a default that is not of its type.
        throw new Unreadable(INCOMPATIBLE, path + " is missing, and its default cannot be used: " + e);
      }
    }

    private Reading skipped(Schema kind) {
      switch (kind.getType()) {
        case NULL:
          return NOTHING;
        case BYTES:
        case STRING:
          return new Skipped(-1);
        case FIXED:
          return kind.getFixedSize() == 0 ? NOTHING : new Skipped(kind.getFixedSize());
        case FLOAT:
          return new Skipped(4);
        case DOUBLE:
          return new Skipped(8);
        case ENUM:
          return new Symbol(kind.getEnumSymbols().size(), kind.getName());
        case ARRAY:
          return new Items(
            false, this.skipped(kind.getElementType()), this.leastBytes(kind.getElementType()), false, null, null);
        case MAP:
          return new Items(true, this.skipped(kind.getValueType()), this.leastBytes(kind.getValueType()), false, null, null);
        case UNION:
          Reading[] members = new Reading[kind.getTypes().size()];
          for (int i = 0; i < members.length; i++) {
            members[i] = this.skipped((Schema) kind.getTypes().get(i));
          }
          return new Union(members, "a union");
        case RECORD:
          return this.skippedRecord(kind);
        default:
          return new Single(kind.getType(), kind.getType(), kind.getType().getName(), null, null);
      }
    }

    private Reading skippedRecord(Schema kind) {
      if (this.skipped.containsKey(kind)) {
        return (Reading) this.skipped.get(kind);
      }
      Later later = new Later();
      this.skipped.put(kind, later);
      Reading[] parts = new Reading[kind.getFields().size()];
      int[] columns = new int[parts.length];
      boolean isEmpty = true;
      for (int i = 0; i < parts.length; i++) {
        columns[i] = -1;
        parts[i] = this.skipped(((Schema.Field) kind.getFields().get(i)).schema());
        isEmpty = isEmpty && parts[i] == NOTHING;
      }
      // Nested twice in each other, such records would be more than can be counted, in no bytes.
      later.record = isEmpty ? NOTHING : new Fields(parts, columns, null);
      this.skipped.put(kind, later.record);
      return later.record;
    }

    /** Returns how many bytes a value takes at least; of a record that contains itself, perhaps less. */
    private long leastBytes(Schema kind) {
      switch (kind.getType()) {
        case NULL:
          return 0;
        case FLOAT:
          return 4;
        case DOUBLE:
          return 8;
        case FIXED:
          return kind.getFixedSize();
        case RECORD:
          if (!this.least.containsKey(kind)) {
            this.least.put(kind, Long.valueOf(0));
            long sum = 0;
            for (Object field : kind.getFields()) {
              sum = Math.min(Integer.MAX_VALUE, sum + this.leastBytes(((Schema.Field) field).schema()));
            }
            this.least.put(kind, Long.valueOf(sum));
          }
          return ((Long) this.least.get(kind)).longValue();
        default:
          return 1;
      }
    }
  }

  /** A record within itself. */
  private static final class Later extends Reading {
    private Reading record;

    Object read(Body in, int level) {
      return this.record.read(in, level);
    }
  }

  static final class Refused extends Reading {
    private final Unreadable problem;

    Refused(Unreadable problem) {
      this.problem = problem;
    }

    Object read(Body in, int level) {
      throw this.problem;
    }
  }

  /** A value of a type that is not nested. */
  private static final class Single extends Reading {
    private final Schema.Type written;
    private final Schema.Type wanted;
    // In microseconds; 0 if the value is no time. Of nanoseconds, whole microseconds are read.
    private final long unit;
    private final boolean isOfNanos;
    private final String malformed;
    private final String path;

    Single(Schema.Type written, Schema.Type wanted, String name, String malformed, String path) {
      this.written = written;
      this.wanted = wanted;
      this.isOfNanos = name.endsWith("nanos");
      this.unit = name.endsWith("millis") ? 1000 : name.endsWith("micros") || this.isOfNanos ? 1 : name.equals("date") ? DAY : 0;
      this.malformed = malformed;
      this.path = path;
    }

    Object read(Body in, int level) {
      switch (this.wanted) {
        case BOOLEAN:
          return Boolean.valueOf(in.readBoolean());
        case INT:
          int day = in.readInt();
          if (this.unit > 0) {
            this.micros(day);
          }
          return Integer.valueOf(day);
        case LONG:
          long number = this.number(in);
          if (this.isOfNanos) {
            number = Math.floorDiv(number, 1000L);
          }
          return Long.valueOf(this.unit > 0 ? this.micros(number) : number);
        case FLOAT:
          return Float.valueOf(this.written == Schema.Type.FLOAT ? in.readFloat() : (float) this.number(in));
        case DOUBLE:
          return Double.valueOf(
            this.written == Schema.Type.DOUBLE ? in.readDouble()
              : this.written == Schema.Type.FLOAT ? (double) in.readFloat() : (double) this.number(in));
        case STRING:
          return text(in, this.malformed, this.path);
        default:
          return in.readBytes();
      }
    }

    private long number(Body in) {
      return this.written == Schema.Type.INT ? in.readInt() : in.readLong();
    }

    /** Returns a time in microseconds, as far as these fit into 64 bits. */
    private long micros(long number) {
      long time = Math.max(-FARTHEST / this.unit, Math.min(number, FARTHEST / this.unit)) * this.unit;
      if (this.malformed != null && (time < FIRST || time >= END)) {
        throw new Unreadable("time-out-of-range", this.path + " is not in the years 1 to 9999");
      }
      return time;
    }
  }

  private static final class Fixed extends Reading {
    private final int size;
    private final boolean isUuid;

    Fixed(int size, boolean isUuid) {
      this.size = size;
      this.isUuid = isUuid;
    }

    Object read(Body in, int level) {
      if (this.isUuid) {
        return UTF8String.fromString(new UUID(in.readBigEndian(), in.readBigEndian()).toString());
      }
      return in.readFixed(this.size);
    }
  }

  /** Passes over bytes: so many, or, if their number is negative, as many as the length before them says. */
  private static final class Skipped extends Reading {
    private final int size;

    Skipped(int size) {
      this.size = size;
    }

    Object read(Body in, int level) {
      if (this.size < 0) {
        in.skipBytes();
      } else {
        in.skipFixed(this.size);
      }
      return null;
    }
  }

  /** A decimal, of a decimal of any scale and precision or of an integer. */
  private static final class Exact extends Reading {
    private static final BigInteger MOST = BigInteger.TEN.pow(DIGITS);
    private final Schema written;
    private final BigInteger writtenMost;
    private final long limit;
    private final int wantedScale;
    // The digits that the wanted scale has more.
    private final int more;
    private final BigInteger power;
    private final String path;

    Exact(Schema written, int wantedScale, String path) {
      LogicalType logical = written.getLogicalType();
      LogicalTypes.Decimal decimal = logical instanceof LogicalTypes.Decimal ? (LogicalTypes.Decimal) logical : null;
      this.written = written;
      int digits = decimal == null ? DIGITS : Math.min(decimal.getPrecision(), MOST_DIGITS);
      this.writtenMost = BigInteger.TEN.pow(digits);
      this.limit = BigInteger.TEN.pow(Math.min(digits, LONG_DIGITS)).longValue();
      this.wantedScale = wantedScale;
      this.more = wantedScale - (decimal == null ? 0 : decimal.getScale());
      this.power = BigInteger.TEN.pow(Math.min(Math.abs(this.more), MOST_DIGITS));
      this.path = path;
    }

    Object read(Body in, int level) {
      byte[] data;
      switch (this.written.getType()) {
        case BYTES:
          data = in.readBytes();
          break;
        case FIXED:
          data = in.readFixed(this.written.getFixedSize());
          break;
        default:
          data = BigInteger.valueOf(in.readLong()).toByteArray();
      }
      if (data.length == 0) {
        throw new Unreadable(BODY, this.path + " is a decimal without digits");
      }
      if (data.length <= 8 && this.more == 0) {
        long number = data[0];
        for (int i = 1; i < data.length; i++) {
          number = number << 8 | data[i] & 255;
        }
        if (-this.limit < number && number < this.limit) {
          return new Decimal().set(number, DIGITS, this.wantedScale);
        }
      }
      BigDecimal exact = this.exact(data);
      if (exact == null) {
        String type = "decimal(" + DIGITS + "," + this.wantedScale + ")";
        throw new Unreadable("decimal-loses-digits", this.path + " has more digits than its type, or than " + type);
      }
      return Decimal.apply(exact, DIGITS, this.wantedScale);
    }

    /** Returns the value at the wanted scale; null if it does not fit. */
    private BigDecimal exact(byte[] data) {
      BigInteger number = new BigInteger(data);
      if (number.signum() == 0) {
        return BigDecimal.valueOf(0, this.wantedScale);
      }
      if (data.length > MOST_BYTES || -this.more > MOST_DIGITS || number.abs().compareTo(this.writtenMost) >= 0) {
        return null;
      }
      if (this.more < 0 && number.mod(this.power).signum() != 0) {
        return null;
      }
      number = this.more < 0 ? number.divide(this.power) : number.multiply(this.power);
      return number.abs().compareTo(MOST) < 0 ? new BigDecimal(number, this.wantedScale) : null;
    }
  }

  /** A symbol that is passed over. */
  private static final class Symbol extends Reading {
    private final int count;
    private final String path;

    Symbol(int count, String path) {
      this.count = count;
      this.path = path;
    }

    Object read(Body in, int level) {
      index(in, this.count, this.path);
      return null;
    }
  }

  private static final class Symbols extends Reading {
    private final Object[] symbols;
    private final List written;
    private final String path;

    Symbols(Schema written, Schema wanted, String path) {
      this.written = written.getEnumSymbols();
      this.symbols = new Object[this.written.size()];
      this.path = path;
      for (int i = 0; i < this.symbols.length; i++) {
        String symbol = (String) this.written.get(i);
        String known = wanted.hasEnumSymbol(symbol) ? symbol : wanted.getEnumDefault();
        this.symbols[i] = known == null ? null : UTF8String.fromString(known);
      }
    }

    Object read(Body in, int level) {
      int index = index(in, this.symbols.length, this.path);
      if (this.symbols[index] == null) {
        throw new Unreadable(INCOMPATIBLE, this.path + " is " + this.written.get(index) + ", a symbol that is not read");
      }
      return this.symbols[index];
    }
  }

  private static final class Union extends Reading {
    private final Reading[] members;
    private final String path;

    Union(Reading[] members, String path) {
      this.members = members;
      this.path = path;
    }

    Object read(Body in, int level) {
      return this.members[index(in, this.members.length, this.path)].read(in, level);
    }
  }

  /** An array or a map. */
  private static final class Items extends Reading {
    private final boolean isMap;
    private final Reading item;
    private final long leastBytes;
    private final boolean isWanted;
    private final String malformed;
    private final String path;

    /** @param leastBytes how many bytes an item takes at least, without its key. */
    Items(boolean isMap, Reading item, long leastBytes, boolean isWanted, String malformed, String path) {
      this.isMap = isMap;
      this.item = item;
      this.leastBytes = isMap ? leastBytes + 1 : leastBytes;
      this.isWanted = isWanted;
      this.malformed = malformed;
      this.path = path;
    }

    Object read(Body in, int level) {
      if (!this.isWanted) {
        return this.skip(in, level);
      }
      List items = new ArrayList();
      // Of two entries with one key, the later holds.
      Map entries = new LinkedHashMap();
      for (long count = in.items(this.leastBytes); count > 0; count = in.items(this.leastBytes)) {
        in.spend(count);
        for (long i = 0; i < count; i++) {
          if (this.isMap) {
            UTF8String key = text(in, this.malformed, this.path);
            entries.put(key, this.item.read(in, level + 1));
          } else {
            items.add(this.item.read(in, level + 1));
          }
        }
      }
      return !this.isMap ? new GenericArrayData(items.toArray()) : new ArrayBasedMapData(
        new GenericArrayData(entries.keySet().toArray()), new GenericArrayData(entries.values().toArray()));
    }

    private Object skip(Body in, int level) {
      for (long count = in.items(this.leastBytes); count > 0; count = in.items(this.leastBytes)) {
        for (long i = 0; i < count && (this.isMap || this.item != NOTHING); i++) {
          if (this.isMap) {
            in.skipBytes();
          }
          this.item.read(in, level + 1);
        }
      }
      return null;
    }
  }

  private static final class Fields extends Reading {
    private final Reading[] parts;
    // The column of each part; -1 if it is skipped.
    private final int[] columns;
    // Null if the record is skipped.
    private final Object[] defaults;
    private final int cost;

    /** Leaves out the parts without bytes: any number of them would be read in no bytes. */
    Fields(Reading[] parts, int[] columns, Object[] defaults) {
      int count = 0;
      for (int i = 0; i < parts.length; i++) {
        if (parts[i] != NOTHING) {
          count++;
        }
      }
      this.parts = new Reading[count];
      this.columns = new int[count];
      count = 0;
      for (int i = 0; i < parts.length; i++) {
        if (parts[i] != NOTHING) {
          this.parts[count] = parts[i];
          this.columns[count++] = columns[i];
        }
      }
      this.defaults = defaults;
      this.cost = defaults == null ? 1 : 2 + defaults.length;
    }

    Object read(Body in, int level) {
      if (level > MOST_LEVELS) {
        throw new Unreadable(BODY, "its values are nested more than " + MOST_LEVELS + " levels deep");
      }
      in.spend(this.cost);
      Object[] row = this.defaults == null ? null : (Object[]) this.defaults.clone();
      for (int i = 0; i < this.parts.length; i++) {
        Object value = this.parts[i].read(in, level + 1);
        if (this.columns[i] >= 0) {
          row[this.columns[i]] = value;
        }
      }
      return row == null ? null : new GenericInternalRow(row);
    }
  }
}
