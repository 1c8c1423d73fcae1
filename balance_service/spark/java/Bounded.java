package parts.code.balance;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.ArrayAggregate;
import org.apache.spark.sql.catalyst.expressions.ArrayInsert;
import org.apache.spark.sql.catalyst.expressions.ArrayJoin;
import org.apache.spark.sql.catalyst.expressions.ArrayRepeat;
import org.apache.spark.sql.catalyst.expressions.ArrayTransform;
import org.apache.spark.sql.catalyst.expressions.BinaryPad;
import org.apache.spark.sql.catalyst.expressions.Coalesce;
import org.apache.spark.sql.catalyst.expressions.ConcatWs;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.FormatNumber;
import org.apache.spark.sql.catalyst.expressions.If;
import org.apache.spark.sql.catalyst.expressions.LambdaFunction;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.NamedLambdaVariable;
import org.apache.spark.sql.catalyst.expressions.OctetLength;
import org.apache.spark.sql.catalyst.expressions.RegExpReplace;
import org.apache.spark.sql.catalyst.expressions.Sequence;
import org.apache.spark.sql.catalyst.expressions.Size;
import org.apache.spark.sql.catalyst.expressions.StringLPad;
import org.apache.spark.sql.catalyst.expressions.StringRPad;
import org.apache.spark.sql.catalyst.expressions.StringRepeat;
import org.apache.spark.sql.catalyst.expressions.StringReplace;
import org.apache.spark.sql.catalyst.expressions.StringSpace;
import org.apache.spark.sql.catalyst.expressions.TryEval;
import org.apache.spark.sql.catalyst.expressions.codegen.CodegenContext;
import org.apache.spark.sql.catalyst.expressions.codegen.ExprCode;
import org.apache.spark.sql.catalyst.expressions.objects.StaticInvoke;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.catalyst.util.GenericArrayData;
import org.apache.spark.sql.catalyst.util.MapData;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.DateType;
import org.apache.spark.sql.types.IntegralType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.types.YearMonthIntervalType;
import org.apache.spark.unsafe.types.CalendarInterval;
import org.apache.spark.unsafe.types.UTF8String;
import scala.None$;

/**
 * Bounds the values that a small event can make large, such as `sequence(1, n)` and `repeat(text, n)` of its `n`.
 *
 * They would end the JVM, and with it the work of all partitions. Here they fail, before the value is made, at their
 * event alone: a condition in front of the function throws.
 */
public final class Bounded {
  /** How what is too large begins; `spark/decode.py` has it too. */
  static final String MARK = "[TRANSFORM_TOO_LARGE]";
  private static final long MOST_BYTES = 16 << 20;
  private static final long MOST_DIGITS = 1000;
  // Of a value in an array or a row, at least.
  private static final int SLOT_BYTES = 16;
  private static final long DAY = 86400000000L;
  private static final long MONTH = 28 * DAY;

  /** Returns an expression that fails instead of making too large a value. Its children are bounded already. */
  static Expression of(Expression one) {
    List children = Transform.list(one.children());
    if (one instanceof Sequence) {
      return ofSequence(one, children);
    }
    if (one instanceof StringRepeat || one instanceof ArrayRepeat) {
      return guarded(one, "times", new Expression[] {child(children, 1), size(child(children, 0))});
    }
    if (one instanceof StringSpace) {
      return guarded(one, "times", new Expression[] {child(children, 0), number(1)});
    }
    if (one instanceof StringLPad || one instanceof StringRPad || one instanceof BinaryPad) {
      Expression length = child(children, 1);
      // A character has four bytes at most.
      return isSmall(length) ? one : guarded(one, "times", new Expression[] {length, number(4)});
    }
    if (one instanceof ArrayInsert) {
      return guarded(one, "position", new Expression[] {child(children, 1)});
    }
    if (one instanceof FormatNumber && child(children, 1).dataType() instanceof IntegralType) {
      return guarded(one, "digits", new Expression[] {child(children, 1)});
    }
    // Of a constant, the value grows by a factor that the code has.
    if (one instanceof StringReplace && !child(children, 2).foldable()) {
      return guarded(one, "replaced", new Expression[] {
        new OctetLength(child(children, 0)), new OctetLength(child(children, 1)), new OctetLength(child(children, 2))});
    }
    if (one instanceof RegExpReplace && !child(children, 2).foldable()) {
      return guarded(one, "replaced", new Expression[] {
        new OctetLength(child(children, 0)), number(0), new OctetLength(child(children, 2))});
    }
    if (one instanceof ArrayJoin) {
      Expression bounded = one;
      for (int i = 1; i < children.size(); i++) {
        if (!child(children, i).foldable()) {
          bounded = guarded(bounded, one, "times", new Expression[] {
            new Size(child(children, 0), false), new OctetLength(child(children, i))});
        }
      }
      return bounded;
    }
    if (one instanceof ConcatWs && !children.isEmpty() && !child(children, 0).foldable()) {
      Expression bounded = one;
      for (int i = 1; i < children.size(); i++) {
        if (child(children, i).dataType() instanceof ArrayType) {
          bounded = guarded(bounded, one, "times", new Expression[] {
            orNothing(new Size(child(children, i), false)), orNothing(new OctetLength(child(children, 0)))});
        }
      }
      return bounded;
    }
    if (one instanceof ArrayTransform) {
      return new Items(child(children, 0), child(children, 1));
    }
    if (one instanceof ArrayAggregate) {
      LambdaFunction merge = (LambdaFunction) child(children, 2);
      children.set(2, new LambdaFunction(new Sized(merge.function()), merge.arguments(), merge.hidden()));
      return (Expression) one.withNewChildren(Attempt.seq(children));
    }
    return one;
  }

  private static Expression ofSequence(Expression one, List children) {
    DataType type = one.dataType() instanceof ArrayType ? ((ArrayType) one.dataType()).elementType() : null;
    boolean isOfTimes = !(type instanceof IntegralType);
    // In microseconds, or in whole numbers.
    long unit = type instanceof DateType ? DAY : 1;
    Expression step = children.size() > 2 ? child(children, 2) : number(isOfTimes ? DAY : 1);
    long stepUnit = step.dataType() instanceof YearMonthIntervalType ? MONTH : 1;
    return guarded(one, "steps", new Expression[] {
      child(children, 0), child(children, 1), number(unit), step, number(stepUnit)});
  }

  private static Expression child(List children, int number) {
    return (Expression) children.get(number);
  }

  private static Expression number(long value) {
    return new Literal(Long.valueOf(value), DataTypes.LongType);
  }

  private static boolean isSmall(Expression count) {
    if (!count.foldable()) {
      return false;
    }
    try {
      Object value = count.eval(null);
      return value == null || ((Number) value).longValue() <= MOST_DIGITS;
    } catch (RuntimeException e) {
      return false;
    }
  }

  private static Expression orNothing(Expression size) {
    return new Coalesce(Attempt.seq(Arrays.asList(new Object[] {size, new Literal(Integer.valueOf(0), DataTypes.IntegerType)})));
  }

  /** Returns the bytes of a value, about. */
  private static Expression size(Expression value) {
    DataType type = value.dataType();
    if (type instanceof StringType || type instanceof BinaryType) {
      return orNothing(new OctetLength(value));
    }
    if (type instanceof StructType || type instanceof ArrayType || type instanceof MapType) {
      return orNothing(invoked("size", DataTypes.IntegerType, new Expression[] {value, Literal.fromObject(type)}));
    }
    return number(SLOT_BYTES);
  }

  private static Expression guarded(Expression one, String check, Expression[] arguments) {
    return guarded(one, one, check, arguments);
  }

  private static Expression guarded(Expression value, Expression named, String check, Expression[] arguments) {
    List all = new ArrayList(Arrays.asList(arguments));
    all.add(new Literal(UTF8String.fromString(named.prettyName()), DataTypes.StringType));
    Expression condition = invoked(check, DataTypes.BooleanType, (Expression[]) all.toArray(new Expression[0]));
    // Null if an argument is, as the value.
    return new If(condition, value, new Literal(null, value.dataType()));
  }

  private static Expression invoked(String method, DataType made, Expression[] arguments) {
    return new StaticInvoke(
      Bounded.class, made, method, Attempt.seq(Arrays.asList(arguments)), Attempt.seq(new ArrayList()), true, true, true,
      None$.MODULE$);
  }

  /** Is public for Spark's code, as the ones below. */
  public static boolean times(long count, long size, UTF8String name) {
    return require((double) count * Math.max(size, 1), name);
  }

  public static boolean position(long position, UTF8String name) {
    return require((double) Math.abs((double) position) * SLOT_BYTES, name);
  }

  public static boolean digits(long count, UTF8String name) {
    return count <= MOST_DIGITS || require(Double.POSITIVE_INFINITY, name);
  }

  public static boolean replaced(long size, long searched, long by, UTF8String name) {
    return by <= searched || require(((double) size / Math.max(searched, 1) + 1) * by, name);
  }

  public static boolean steps(long start, long stop, long unit, long step, long stepUnit, UTF8String name) {
    double items = ((double) stop - start) * unit / ((double) step * stepUnit);
    // Of the wrong sign, or no step: Spark says so.
    return Double.isNaN(items) || step == 0 || require(Math.abs(items) * SLOT_BYTES, name);
  }

  public static boolean steps(long start, long stop, long unit, CalendarInterval step, long stepUnit, UTF8String name) {
    return steps(start, stop, unit, step.months * MONTH + step.days * DAY + step.microseconds, stepUnit, name);
  }

  private static boolean require(double bytes, UTF8String name) {
    if (bytes > MOST_BYTES) {
      throw tooLarge(name + " would make");
    }
    return true;
  }

  private static RuntimeException tooLarge(String what) {
    return new IllegalArgumentException(
      MARK + " " + what + " more than " + (MOST_BYTES >> 20) + " MiB of one event: filter such events, or limit the number");
  }

  public static int size(ArrayData value, DataType type) {
    return (int) Math.min(sizeOf(value, type), Integer.MAX_VALUE);
  }

  public static int size(MapData value, DataType type) {
    return (int) Math.min(sizeOf(value, type), Integer.MAX_VALUE);
  }

  public static int size(InternalRow value, DataType type) {
    return (int) Math.min(sizeOf(value, type), Integer.MAX_VALUE);
  }

  private static long sizeOf(Object value, DataType type) {
    if (value == null) {
      return SLOT_BYTES;
    }
    long size = SLOT_BYTES;
    if (type instanceof StringType) {
      size += ((UTF8String) value).numBytes();
    } else if (type instanceof BinaryType) {
      size += ((byte[]) value).length;
    } else if (type instanceof StructType) {
      InternalRow row = (InternalRow) value;
      for (int i = 0; i < row.numFields(); i++) {
        DataType kind = ((StructType) type).apply(i).dataType();
        size += row.isNullAt(i) ? SLOT_BYTES : sizeOf(isLarge(kind) ? row.get(i, kind) : null, kind);
      }
    } else if (type instanceof ArrayType) {
      size += sizeOfItems((ArrayData) value, ((ArrayType) type).elementType());
    } else if (type instanceof MapType) {
      size += sizeOfItems(((MapData) value).keyArray(), ((MapType) type).keyType());
      size += sizeOfItems(((MapData) value).valueArray(), ((MapType) type).valueType());
    }
    return size;
  }

  private static long sizeOfItems(ArrayData items, DataType kind) {
    long size = (long) items.numElements() * SLOT_BYTES;
    for (int i = 0; isLarge(kind) && i < items.numElements(); i++) {
      size += items.isNullAt(i) ? 0 : sizeOf(items.get(i, kind), kind);
    }
    return size;
  }

  private static boolean isLarge(DataType kind) {
    return kind instanceof StringType || kind instanceof BinaryType || kind instanceof StructType
      || kind instanceof ArrayType || kind instanceof MapType;
  }

  /** An array of what a lambda makes of each item: a small one may refer to a large value beside the array. */
  static final class Items extends ArrayTransform {
    Items(Expression items, Expression function) {
      super(items, function);
    }

    public Object nullSafeEval(InternalRow input, Object given) {
      ArrayData items = (ArrayData) given;
      List variables = Transform.list(((LambdaFunction) this.function()).arguments());
      NamedLambdaVariable item = (NamedLambdaVariable) variables.get(0);
      NamedLambdaVariable index = variables.size() > 1 ? (NamedLambdaVariable) variables.get(1) : null;
      Expression made = this.functionForEval();
      DataType kind = made.dataType();
      Object[] values = new Object[items.numElements()];
      long size = 0;
      for (int i = 0; i < values.length; i++) {
        item.value().set(items.isNullAt(i) ? null : items.get(i, item.dataType()));
        if (index != null) {
          index.value().set(Integer.valueOf(i));
        }
        values[i] = InternalRow.copyValue(made.eval(input));
        size += sizeOf(values[i], kind);
        if (size > MOST_BYTES) {
          throw tooLarge("the rows or items of an array would have");
        }
      }
      return new GenericArrayData(values);
    }

    public ArrayTransform withNewChildrenInternal(Expression items, Expression function) {
      return new Items(items, function);
    }
  }

  /** The state of an `aggregate`, which may grow with each item. */
  static final class Sized extends TryEval {
    Sized(Expression child) {
      super(child);
    }

    public DataType dataType() {
      return this.child().dataType();
    }

    public boolean nullable() {
      return this.child().nullable();
    }

    public Object eval(InternalRow input) {
      Object value = this.child().eval(input);
      if (sizeOf(value, this.child().dataType()) > MOST_BYTES) {
        throw tooLarge("an aggregate would have");
      }
      return value;
    }

    public ExprCode doGenCode(CodegenContext ctx, ExprCode ev) {
      // Spark interprets lambdas.
      throw new UnsupportedOperationException("an aggregate is interpreted");
    }

    public TryEval withNewChildInternal(Expression child) {
      return new Sized(child);
    }

    public String productPrefix() {
      return "Sized";
    }

    public boolean canEqual(Object other) {
      return other instanceof Sized;
    }
  }
}
