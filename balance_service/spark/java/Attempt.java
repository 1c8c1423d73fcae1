package parts.code.balance;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.TaskKilledException;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.ConditionalExpression;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.expressions.TryEval;
import org.apache.spark.sql.catalyst.expressions.codegen.CodeBlock;
import org.apache.spark.sql.catalyst.expressions.codegen.CodegenContext;
import org.apache.spark.sql.catalyst.expressions.codegen.ExprCode;
import org.apache.spark.sql.catalyst.expressions.codegen.FalseLiteral$;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.catalyst.util.MapData;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DateType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.types.TimestampNTZType;
import org.apache.spark.sql.types.TimestampType;
import org.apache.spark.unsafe.types.UTF8String;
import scala.NotImplementedError;
import scala.collection.immutable.Seq;
import scala.jdk.javaapi.CollectionConverters;

/**
 * A struct that may fail at a record: `failure`, the message, and `value`, the struct, of which one at most is set.
 *
 * Without it, an exception in an expression would end the query, and all records after this one would wait.
 *
 * It is conditional, so that Spark evaluates no part of its child outside of it.
 */
public final class Attempt extends TryEval implements ConditionalExpression {
  private static final int MOST_SAID = 400;
  // The years 1 to 9999, which Python's times have, in days and in microseconds since 1970.
  private static final long FIRST_DAY = -719162, END_DAY = 2932897, DAY = 86400000000L;
  private final boolean isLast;

  /** @param isLast whether the value leaves Spark, so that Python must be able to represent it. */
  Attempt(Expression child, boolean isLast) {
    super(child);
    this.isLast = isLast;
  }

  public DataType dataType() {
    return new StructType().add("failure", "string").add("value", this.child().dataType());
  }

  public boolean nullable() {
    return false;
  }

  /** Otherwise Spark's optimizer takes a condition out of it, and evaluates that unguarded. */
  public boolean nullIntolerant() {
    return false;
  }

  public Object eval(InternalRow input) {
    try {
      return made((InternalRow) this.child().eval(input), this.checked());
    } catch (Throwable problem) {
      return failed(problem);
    }
  }

  public ExprCode doGenCode(CodegenContext ctx, ExprCode ev) {
    ExprCode child = this.child().genCode(ctx);
    String type = ctx.addReferenceObj("type", this.checked(), DataType.class.getName());
    String self = Attempt.class.getName(), problem = ctx.freshName("problem");
    List parts = new ArrayList(), inputs = new ArrayList();
    parts.add("\n" + InternalRow.class.getName() + " ");
    inputs.add(ev.value());
    parts.add(" = null;\ntry {\n");
    inputs.add(child.code());
    parts.add("\n");
    inputs.add(ev.value());
    parts.add(" = " + self + ".made(");
    inputs.add(child.isNull());
    parts.add(" ? null : ");
    inputs.add(child.value());
    parts.add(", " + type + ");\n} catch (Throwable " + problem + ") {\n");
    inputs.add(ev.value());
    parts.add(" = " + self + ".failed(" + problem + ");\n}\n");
    CodeBlock code = new CodeBlock(seq(parts), seq(inputs));
    return ev.copy(code, FalseLiteral$.MODULE$, ev.value());
  }

  /** Is public for Spark's code. */
  public static InternalRow made(InternalRow value, DataType type) {
    if (value != null && type != null) {
      check(value, (StructType) type, "");
    }
    return new GenericInternalRow(new Object[] {null, value});
  }

  /** Is public for Spark's code. A regular expression may overflow the stack at a long text. */
  public static InternalRow failed(Throwable problem) {
    boolean isOfRecord = problem instanceof StackOverflowError || problem instanceof AssertionError
      || problem instanceof NotImplementedError;
    if (problem instanceof Error && !isOfRecord) {
      throw (Error) problem;
    }
    if (problem instanceof TaskKilledException) {
      throw (TaskKilledException) problem;
    }
    String said = problem.getMessage() == null ? problem.toString() : problem.getMessage();
    // Spark appends where the expression stands in the code.
    int end = said.indexOf("\n");
    said = (end < 0 ? said : said.substring(0, end)).trim();
    said = said.length() <= MOST_SAID ? said : said.substring(0, MOST_SAID);
    return new GenericInternalRow(new Object[] {UTF8String.fromString(said), null});
  }

  private static void check(InternalRow row, StructType type, String path) {
    for (int i = 0; i < type.length(); i++) {
      DataType kind = type.apply(i).dataType();
      if (isChecked(kind) && !row.isNullAt(i)) {
        check(row.get(i, kind), kind, path + type.apply(i).name());
      }
    }
  }

  private static void check(Object value, DataType kind, String path) {
    if (value == null) {
      return;
    }
    if (kind instanceof StringType) {
      if (!((UTF8String) value).isValid()) {
        throw new IllegalArgumentException("'" + path + "' is not UTF-8");
      }
    } else if (kind instanceof DateType) {
      checkTime(((Integer) value).longValue(), 1, path);
    } else if (kind instanceof TimestampType || kind instanceof TimestampNTZType) {
      checkTime(((Long) value).longValue(), DAY, path);
    } else if (kind instanceof StructType) {
      check((InternalRow) value, (StructType) kind, path + ".");
    } else if (kind instanceof ArrayType) {
      check((ArrayData) value, ((ArrayType) kind).elementType(), path + "[]");
    } else if (kind instanceof MapType) {
      check(((MapData) value).keyArray(), ((MapType) kind).keyType(), path + "{}");
      check(((MapData) value).valueArray(), ((MapType) kind).valueType(), path + "{}");
    }
  }

  private static void check(ArrayData items, DataType kind, String path) {
    if (isChecked(kind)) {
      for (int i = 0; i < items.numElements(); i++) {
        check(items.isNullAt(i) ? null : items.get(i, kind), kind, path);
      }
    }
  }

  private static boolean isChecked(DataType kind) {
    return kind instanceof StringType || kind instanceof DateType || kind instanceof TimestampType
      || kind instanceof TimestampNTZType || kind instanceof StructType || kind instanceof ArrayType || kind instanceof MapType;
  }

  private static void checkTime(long time, long unit, String path) {
    if (time < FIRST_DAY * unit || time >= END_DAY * unit) {
      throw new IllegalArgumentException("'" + path + "' is not in the years 1 to 9999");
    }
  }

  private DataType checked() {
    return this.isLast ? this.child().dataType() : null;
  }

  public TryEval withNewChildInternal(Expression child) {
    return new Attempt(child, this.isLast);
  }

  public String productPrefix() {
    return "Attempt";
  }

  public boolean canEqual(Object other) {
    return other instanceof Attempt;
  }

  public Seq alwaysEvaluatedInputs() {
    return seq(new ArrayList());
  }

  public ConditionalExpression withNewAlwaysEvaluatedInputs(Seq inputs) {
    return this;
  }

  public Seq branchGroups() {
    return seq(new ArrayList());
  }

  static Seq seq(List items) {
    return CollectionConverters.asScala(items).toSeq();
  }
}
