package parts.code.balance;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.atomic.AtomicReference;
import java.util.regex.Pattern;
import org.apache.spark.sql.catalyst.expressions.AesEncrypt;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.And;
import org.apache.spark.sql.catalyst.expressions.ArrayFilter;
import org.apache.spark.sql.catalyst.expressions.AttributeReference;
import org.apache.spark.sql.catalyst.expressions.Cast;
import org.apache.spark.sql.catalyst.expressions.CommonExpressionId;
import org.apache.spark.sql.catalyst.expressions.CreateArray;
import org.apache.spark.sql.catalyst.expressions.CreateNamedStruct;
import org.apache.spark.sql.catalyst.expressions.EvalMode$;
import org.apache.spark.sql.catalyst.expressions.Explode;
import org.apache.spark.sql.catalyst.expressions.ExprId;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.Flatten;
import org.apache.spark.sql.catalyst.expressions.FormatString;
import org.apache.spark.sql.catalyst.expressions.Generator;
import org.apache.spark.sql.catalyst.expressions.GetStructField;
import org.apache.spark.sql.catalyst.expressions.GreaterThan;
import org.apache.spark.sql.catalyst.expressions.If;
import org.apache.spark.sql.catalyst.expressions.Inline;
import org.apache.spark.sql.catalyst.expressions.IsNotNull;
import org.apache.spark.sql.catalyst.expressions.IsNull;
import org.apache.spark.sql.catalyst.expressions.LambdaFunction;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.MapEntries;
import org.apache.spark.sql.catalyst.expressions.NamedExpression;
import org.apache.spark.sql.catalyst.expressions.NamedExpression$;
import org.apache.spark.sql.catalyst.expressions.NamedLambdaVariable;
import org.apache.spark.sql.catalyst.expressions.PlanExpression;
import org.apache.spark.sql.catalyst.expressions.PosExplode;
import org.apache.spark.sql.catalyst.expressions.RuntimeReplaceable;
import org.apache.spark.sql.catalyst.expressions.Size;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.Generate;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.SubqueryAlias;
import org.apache.spark.sql.catalyst.trees.TreePattern;
import org.apache.spark.sql.classic.Dataset;
import org.apache.spark.sql.classic.ExpressionUtils;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.ByteType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.DatetimeType;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.ShortType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;
import scala.None$;
import scala.Option;
import scala.Product;
import scala.collection.Iterable;
import scala.jdk.javaapi.CollectionConverters;

/**
 * What a model's `transform` makes of one record, as expressions of the record's columns.
 *
 * Spark analyses the DataFrame that the model's code returns. Its projections, filters and generators become steps, each
 * a column of a struct with `failure` and `value` (see `Attempt`) that reads the columns of the steps before it. So a plan
 * keeps one row for each record, whatever the code drops, multiplies or fails at. A generator makes an array of the
 * record's rows; what follows it is applied to the items.
 */
public final class Transform {
  private static final String STEP = "#step ";
  private static final int DIGITS = 38;
  private static final Option NOTHING = None$.MODULE$;
  // Expressions that depend on the session, the machine or the JVM, though Spark calls them deterministic.
  private static final Set OF_SURROUNDINGS = new HashSet(Arrays.asList(new String[] {
    "CallMethodViaReflection", "TryReflect", "ScalaUDF", "ScalaUDAF", "HiveSimpleUDF", "HiveGenericUDF",
    "ApplyFunctionExpression", "SparkVersion", "CurrentTimeZone", "CurrentUser", "CurrentDatabase", "CurrentCatalog",
    "InputFileName", "InputFileBlockStart", "InputFileBlockLength", "GetVariable", "VariableReference", "AiQuery"}));
  // Their builders keep the entries of an event at which they failed, and add them to the next event's map.
  private static final Set OF_BUILDERS = new HashSet(Arrays.asList(new String[] {
    "CreateMap", "MapFromArrays", "MapFromEntries", "MapConcat", "StringToMap", "TransformKeys"}));
  private static final Pattern MOMENT = Pattern.compile("(?is)\\s*(now|today|tomorrow|yesterday)\\b.*");
  private static final Map INSTEAD = instead();

  // Of an attribute of the events: its name.
  private final Map names = new HashMap();
  // From the events up.
  private final List nodes = new ArrayList();
  private final List made;

  /**
   * @param events the DataFrame that the model's code received.
   * @param made the DataFrame that it returned.
   * @throws IllegalArgumentException a part of it cannot be applied to single records; the message is the rest of a
   *     sentence about `transform`.
   */
  public Transform(Dataset events, Dataset made) {
    List attributes = list(events.queryExecution().analyzed().output());
    for (int i = 0; i < attributes.size(); i++) {
      AttributeReference one = (AttributeReference) attributes.get(i);
      this.names.put(one.exprId(), one.name());
    }
    LogicalPlan plan = made.queryExecution().analyzed();
    this.visit(plan);
    this.made = list(plan.output());
  }

  private void visit(LogicalPlan plan) {
    List children = list(plan.children());
    if (children.isEmpty()) {
      List output = list(plan.output());
      // A literal row has no columns.
      boolean isOther = output.isEmpty();
      for (int i = 0; i < output.size(); i++) {
        isOther = isOther || !this.names.containsKey(((NamedExpression) output.get(i)).exprId());
      }
      if (isOther) {
        throw new IllegalArgumentException(
          "reads another DataFrame than the one that it receives: join events with the rows of a `Table`");
      }
      return;
    }
    if (plan instanceof Project || plan instanceof Filter || plan instanceof Generate) {
      this.visit((LogicalPlan) children.get(0));
      if (plan instanceof Generate) {
        checkGenerator(((Generate) plan).generator());
      }
      List expressions = list(plan.expressions());
      for (int i = 0; i < expressions.size(); i++) {
        check((Expression) expressions.get(i));
      }
      this.nodes.add(plan);
    } else if (plan instanceof SubqueryAlias) {
      this.visit((LogicalPlan) children.get(0));
    } else {
      String name = plan.nodeName();
      Object instead = INSTEAD.get(name);
      throw new IllegalArgumentException(
        "uses " + name + ", which is not an operation on single rows: " + (instead == null ? "use projections, filters"
        + " and `explode` only" : instead));
    }
  }

  private static Map instead() {
    Map map = new HashMap();
    map.put("Aggregate", "declare folds, such as `total = RunningSum(\"points\")`, and a key");
    map.put("Join", "use `Stream.join` with a `Table` or a `Global`");
    map.put("Union", "declare several `sources`");
    String distinct = "the key of the model names what is counted once, by a fold such as `Earliest` or `Distinct`";
    map.put("Distinct", distinct);
    map.put("Deduplicate", distinct);
    map.put("DeduplicateWithinWatermark", distinct);
    map.put("DropDuplicates", distinct);
    String order = "a query of the model sorts, and the fold `Top` keeps the greatest values";
    map.put("Sort", order);
    map.put("GlobalLimit", order);
    map.put("LocalLimit", order);
    map.put("Tail", order);
    map.put("Offset", order);
    map.put("Window", "a window is a part of a computed key, such as `key = (\"card\", \"day\")`");
    String python = "Spark's real-time mode runs no Python functions: use Spark's built-in functions, or a `fold`";
    String[] ofPython = {"ArrowEvalPython", "BatchEvalPython", "MapInPandas", "MapInArrow", "PythonMapInArrow",
      "FlatMapGroupsInPandas", "MapPartitions", "MapElements", "DeserializeToObject", "SerializeFromObject"};
    for (int i = 0; i < ofPython.length; i++) {
      map.put(ofPython[i], python);
    }
    map.put("Sample", "it would drop other events in each rebuild: use a filter");
    return map;
  }

  private static void checkGenerator(Generator one) {
    if (!(one instanceof Explode || one instanceof PosExplode || one instanceof Inline)) {
      throw new IllegalArgumentException("uses " + ((Expression) one).prettyName() + ", which makes rows in a way that"
        + " is not supported: use `explode` of an array");
    }
  }

  private static void check(Expression one) {
    String type = one.getClass().getSimpleName();
    if (type.startsWith("Python")) {
      throw new IllegalArgumentException("uses a Python function: " + INSTEAD.get("MapInPandas"));
    }
    if (OF_SURROUNDINGS.contains(type) || type.endsWith("UDF")) {
      throw new IllegalArgumentException("uses " + one.prettyName() + ", which does not depend on the event alone: use"
        + " Spark's built-in functions of the event's columns, or a `fold`");
    }
    if (OF_BUILDERS.contains(type)) {
      throw new IllegalArgumentException("uses " + one.prettyName() + ", which fails at the events after one with a key"
        + " that is null or occurs twice: use an array of structs");
    }
    if (one instanceof FormatString && !((Expression) list(one.children()).get(0)).foldable()) {
      throw new IllegalArgumentException("uses " + one.prettyName() + " with a format that an event has, and such a"
        + " format makes texts of any length: write a constant");
    }
    if (one instanceof PlanExpression) {
      throw new IllegalArgumentException("has a subquery: join events with the rows of a `Table`");
    }
    List children = list(one.children());
    for (int i = 0; i < children.size(); i++) {
      check((Expression) children.get(i));
    }
    if (one instanceof RuntimeReplaceable) {
      check(((RuntimeReplaceable) one).replacement());
    }
    if (isMoment(one) || isRandom(one) || one.containsPattern(TreePattern.CURRENT_LIKE()) || !one.deterministic()) {
      throw new IllegalArgumentException("uses " + one.prettyName() + ", whose value would be another in each rebuild: "
        + "use the columns of the event, such as `_timestamp`, the time of its record");
    }
  }

  /** Returns whether a text is read as a moment of the day on which Spark plans the code. */
  private static boolean isMoment(Expression one) {
    if (!(one instanceof Cast) || !(one.dataType() instanceof DatetimeType)) {
      return false;
    }
    Expression child = ((Cast) one).child();
    if (!child.foldable() || !(child.dataType() instanceof StringType)) {
      return false;
    }
    try {
      Object text = child.eval(null);
      return text != null && MOMENT.matcher(text.toString()).matches();
    } catch (RuntimeException e) {
      // It fails for each event, which says so.
      return false;
    }
  }

  /** Returns whether an encryption makes an initialization vector of its own, though Spark calls it deterministic. */
  private static boolean isRandom(Expression one) {
    if (!(one instanceof AesEncrypt)) {
      return false;
    }
    Expression vector = ((AesEncrypt) one).iv();
    vector = vector instanceof Cast ? ((Cast) vector).child() : vector;
    return vector instanceof Literal && String.valueOf(((Literal) vector).value()).isEmpty();
  }

  /** Returns whether a record may become several rows. */
  public boolean multiplies() {
    for (int i = 0; i < this.nodes.size(); i++) {
      if (this.nodes.get(i) instanceof Generate) {
        return true;
      }
    }
    return false;
  }

  /** Returns the name of the events' column that a column is, untouched; null if it is computed. */
  public String untouched(String name) {
    ExprId id = this.outputNamed(name).exprId();
    for (int i = this.nodes.size() - 1; i >= 0; i--) {
      if (this.nodes.get(i) instanceof Project) {
        Expression of = definition((Project) this.nodes.get(i), id);
        if (of instanceof AttributeReference) {
          id = ((AttributeReference) of).exprId();
        } else if (of != null) {
          return null;
        }
      }
    }
    return (String) this.names.get(id);
  }

  private static Expression definition(Project project, ExprId id) {
    List list = list(project.projectList());
    for (int i = 0; i < list.size(); i++) {
      NamedExpression one = (NamedExpression) list.get(i);
      if (one.exprId().equals(id)) {
        return one instanceof Alias ? ((Alias) one).child() : (Expression) one;
      }
    }
    return null;
  }

  private NamedExpression outputNamed(String name) {
    NamedExpression found = null;
    for (int i = 0; i < this.made.size(); i++) {
      NamedExpression one = (NamedExpression) this.made.get(i);
      if (one.name().equals(name)) {
        if (found != null) {
          throw new IllegalArgumentException("returns two columns '" + name + "': rename or drop one of them");
        }
        found = one;
      }
    }
    return found;
  }

  /** Returns the attributes that rows with these columns are computed from, in all steps. */
  private Set needed(List wanted) {
    Set needed = new LinkedHashSet();
    for (int i = 0; i < wanted.size(); i++) {
      needed.add(this.outputNamed((String) wanted.get(i)).exprId());
    }
    for (int i = this.nodes.size() - 1; i >= 0; i--) {
      Object node = this.nodes.get(i);
      if (node instanceof Project) {
        List list = list(((Project) node).projectList());
        for (int j = 0; j < list.size(); j++) {
          NamedExpression one = (NamedExpression) list.get(j);
          if (needed.contains(one.exprId())) {
            addReferences((Expression) one, needed);
          }
        }
      } else {
        List expressions = list(((LogicalPlan) node).expressions());
        for (int j = 0; j < expressions.size(); j++) {
          addReferences((Expression) expressions.get(j), needed);
        }
      }
    }
    return needed;
  }

  private static void addReferences(Expression of, Set ids) {
    List references = list(of.references().toSeq());
    for (int i = 0; i < references.size(); i++) {
      ids.add(((NamedExpression) references.get(i)).exprId());
    }
  }

  /** Returns the names of the events' columns that rows with these columns are computed from. */
  public List used(List wanted) {
    List used = new ArrayList();
    Set needed = this.needed(wanted);
    for (Object id : needed) {
      if (this.names.containsKey(id)) {
        used.add(this.names.get(id));
      }
    }
    return used;
  }

  /**
   * Adds the steps as columns, with the names `#step 1` and so on.
   *
   * @param records a row for each record.
   * @param wanted the names of the columns that the made rows have, in order.
   * @param columns of an event: name → the name of a column of the records, or several for a field within a struct.
   * @param topic the value of the column `_topic`.
   * @param cause the name of a column that is null if the record has an event.
   */
  public Dataset apply(Dataset records, List wanted, Map columns, String topic, String cause) {
    return new Steps(this, records, wanted, columns, topic, cause).applied();
  }

  /** Returns a text that is equal for equal computations of these columns, in every JVM. */
  public String fingerprint(List wanted) {
    return new Print(this).of(wanted);
  }

  /** Returns the type that values of a type have in rows: as in those that are decoded, decimals have all digits. */
  private static DataType typeAsRead(DataType type) {
    if (type instanceof DecimalType) {
      return DataTypes.createDecimalType(DIGITS, ((DecimalType) type).scale());
    }
    if (type instanceof ByteType || type instanceof ShortType) {
      return DataTypes.IntegerType;
    }
    if (type instanceof ArrayType) {
      return DataTypes.createArrayType(typeAsRead(((ArrayType) type).elementType()));
    }
    if (type instanceof MapType) {
      return DataTypes.createMapType(((MapType) type).keyType(), typeAsRead(((MapType) type).valueType()));
    }
    if (type instanceof StructType) {
      StructType read = new StructType();
      for (int i = 0; i < ((StructType) type).length(); i++) {
        read = read.add(((StructType) type).apply(i).name(), typeAsRead(((StructType) type).apply(i).dataType()));
      }
      return read;
    }
    return type;
  }

  static List list(Object items) {
    return new ArrayList(CollectionConverters.asJava((scala.collection.Seq) items));
  }

  /** Makes the steps. */
  private static final class Steps {
    private final Transform of;
    private final Set needed;
    private final List wanted;
    private Dataset records;
    private int count;
    // Of each attribute: the expression that reads it.
    private final Map references = new HashMap();
    // The step that is being made: its conditions, the expressions that it computes, and the attributes that read these.
    private List conditions = new ArrayList();
    private Map open = new HashMap();
    private List computed = new ArrayList();
    // After a generator: the rows, and the attributes of a row.
    private Expression rows;
    private StructType rowType;
    private List rowIds;

    Steps(Transform of, Dataset records, List wanted, Map columns, String topic, String cause) {
      this.of = of;
      this.records = records;
      this.wanted = wanted;
      this.needed = of.needed(wanted);
      for (Object entry : of.names.entrySet()) {
        Object name = ((Map.Entry) entry).getValue();
        Object id = ((Map.Entry) entry).getKey();
        if (name.equals("_topic")) {
          this.references.put(id, text(topic));
        } else if (this.needed.contains(id)) {
          this.references.put(id, this.column((List) columns.get(name)));
        }
      }
      this.conditions.add(new IsNull(this.column(Arrays.asList(new Object[] {cause}))));
    }

    private Expression column(List path) {
      List output = list(this.records.queryExecution().analyzed().output());
      Expression found = null;
      for (int i = 0; i < output.size(); i++) {
        found = ((NamedExpression) output.get(i)).name().equals(path.get(0)) ? (Expression) output.get(i) : found;
      }
      for (int i = 1; i < path.size(); i++) {
        StructType type = (StructType) found.dataType();
        found = new GetStructField(found, type.fieldIndex((String) path.get(i)), NOTHING);
      }
      return found;
    }

    Dataset applied() {
      for (int i = 0; i < this.of.nodes.size(); i++) {
        Object node = this.of.nodes.get(i);
        if (node instanceof Filter) {
          this.filter(((Filter) node).condition());
        } else if (node instanceof Project) {
          this.project(list(((Project) node).projectList()));
        } else {
          this.generate((Generate) node);
        }
      }
      this.end();
      return this.records;
    }

    private void filter(Expression condition) {
      if (this.rows == null) {
        this.require(condition);
        this.conditions.add(this.read(condition));
      } else {
        NamedLambdaVariable row = variable("row", this.rowType);
        this.rows = new ArrayFilter(this.rows, lambda(this.inRow(condition, row), row, null));
      }
    }

    private void project(List list) {
      List later = new ArrayList();
      for (int i = 0; i < list.size(); i++) {
        NamedExpression one = (NamedExpression) list.get(i);
        if (!this.needed.contains(one.exprId()) || !(one instanceof Alias)) {
          continue;
        }
        Expression child = ((Alias) one).child();
        Object same = child instanceof AttributeReference ? ((AttributeReference) child).exprId() : null;
        if (this.references.containsKey(same)) {
          this.references.put(one.exprId(), this.references.get(same));
        } else if (this.open.containsKey(same)) {
          this.open.put(one.exprId(), this.open.get(same));
        } else {
          later.add(one);
        }
      }
      if (this.rows != null) {
        this.projectRows(list);
        return;
      }
      for (int i = 0; i < later.size(); i++) {
        this.require(((Alias) later.get(i)).child());
      }
      for (int i = 0; i < later.size(); i++) {
        Alias one = (Alias) later.get(i);
        this.compute(one.exprId(), this.read(one.child()));
      }
    }

    private void compute(ExprId id, Expression value) {
      this.open.put(id, Integer.valueOf(this.computed.size()));
      this.computed.add(value);
    }

    /** Ends the step if an expression needs what it computes. */
    private void require(Expression one) {
      Set references = new HashSet();
      addReferences(one, references);
      references.retainAll(this.open.keySet());
      if (!references.isEmpty()) {
        this.add(struct(this.computed), false);
      }
    }

    private void add(Expression value, boolean isLast) {
      Expression condition = (Expression) this.conditions.get(0);
      for (int i = 1; i < this.conditions.size(); i++) {
        condition = new And(condition, (Expression) this.conditions.get(i));
      }
      String name = STEP + ++this.count;
      Expression step = new Attempt(new If(condition, value, new Literal(null, value.dataType())), isLast);
      this.records = this.records.withColumn(name, ExpressionUtils.column(step));
      Expression made = this.column(Arrays.asList(new Object[] {name, "value"}));
      for (Object entry : this.open.entrySet()) {
        int index = ((Integer) ((Map.Entry) entry).getValue()).intValue();
        this.references.put(((Map.Entry) entry).getKey(), new GetStructField(made, index, NOTHING));
      }
      this.conditions = new ArrayList();
      this.open = new HashMap();
      this.computed = new ArrayList();
      this.conditions.add(new IsNotNull(made));
    }

    private void end() {
      List values = new ArrayList();
      NamedLambdaVariable row = this.rows == null ? null : variable("row", this.rowType);
      for (int i = 0; i < this.wanted.size(); i++) {
        NamedExpression one = this.of.outputNamed((String) this.wanted.get(i));
        Integer open = (Integer) this.open.get(one.exprId());
        Expression value = open != null ? (Expression) this.computed.get(open.intValue())
          : row == null ? this.read((Expression) one.toAttribute()) : this.inRow((Expression) one.toAttribute(), row);
        values.add(text(one.name()));
        values.add(asRead(value, ((Expression) one).dataType()));
      }
      Expression made = new CreateNamedStruct(Attempt.seq(values));
      if (row != null) {
        List rows = new ArrayList();
        rows.add(text("rows"));
        rows.add(new Bounded.Items(this.rows, lambda(made, row, null)));
        made = new CreateNamedStruct(Attempt.seq(rows));
      }
      this.add(made, true);
    }

    private static Expression asRead(Expression value, DataType type) {
      DataType read = typeAsRead(type);
      return read.sameType(type) ? value : new Cast(value, read, NOTHING, EvalMode$.MODULE$.ANSI());
    }

    private void generate(Generate node) {
      Generator generator = node.generator();
      List outputs = list(node.generatorOutput());
      if (this.rows == null) {
        if (!this.open.isEmpty()) {
          this.add(struct(this.computed), false);
        }
        this.rows = this.items(generator, node.outer(), outputs, null);
        this.rowIds = ids(outputs);
        this.rowType = typeOf(outputs);
        return;
      }
      // Each row becomes the rows of its items, with its own columns before theirs.
      NamedLambdaVariable row = variable("row", this.rowType);
      Expression items = this.items(generator, node.outer(), outputs, row);
      NamedLambdaVariable item = variable("item", typeOf(outputs));
      List values = new ArrayList();
      for (int i = 0; i < this.rowIds.size(); i++) {
        values.add(new GetStructField(row, i, NOTHING));
      }
      for (int i = 0; i < outputs.size(); i++) {
        values.add(new GetStructField(item, i, NOTHING));
      }
      Expression inner = new Bounded.Items(items, lambda(struct(values), item, null));
      this.rows = new Flatten(new ArrayFilter(
        new Bounded.Items(this.rows, lambda(inner, row, null)), isNotNull(inner.dataType())));
      this.rowIds.addAll(ids(outputs));
      StructType type = this.rowType;
      StructType more = typeOf(outputs);
      for (int i = 0; i < more.length(); i++) {
        type = type.add("c" + type.length(), more.apply(i).dataType());
      }
      this.rowType = type;
    }

    // `flatten` is null if one of the arrays is.
    private static Expression isNotNull(DataType type) {
      NamedLambdaVariable one = variable("items", type);
      return lambda(new IsNotNull(one), one, null);
    }

    private Expression items(Generator generator, boolean isOuter, List outputs, NamedLambdaVariable row) {
      Expression whole = (Expression) generator;
      List children = list(whole.children());
      Expression items;
      if (generator instanceof Explode || generator instanceof PosExplode) {
        Expression of = (Expression) children.get(0);
        boolean isMap = of.dataType() instanceof MapType;
        Expression read = row == null ? this.read(of) : this.inRow(of, row);
        read = isMap ? new MapEntries(read) : read;
        DataType type = isMap ? entry((MapType) of.dataType()) : ((ArrayType) of.dataType()).elementType();
        NamedLambdaVariable item = variable("item", type);
        NamedLambdaVariable index = generator instanceof PosExplode
          ? new NamedLambdaVariable("index", DataTypes.IntegerType, false, NamedExpression$.MODULE$.newExprId(), new AtomicReference())
          : null;
        List values = new ArrayList();
        if (index != null) {
          values.add(index);
        }
        if (isMap) {
          values.add(new GetStructField(item, 0, NOTHING));
          values.add(new GetStructField(item, 1, NOTHING));
        } else {
          values.add(item);
        }
        items = new Bounded.Items(read, lambda(struct(values), item, index));
      } else {
        Expression of = (Expression) children.get(0);
        DataType type = ((ArrayType) of.dataType()).elementType();
        NamedLambdaVariable item = variable("item", type);
        List values = new ArrayList();
        for (int i = 0; i < ((StructType) type).length(); i++) {
          values.add(new GetStructField(item, i, NOTHING));
        }
        items = new Bounded.Items(
          row == null ? this.read(of) : this.inRow(of, row), lambda(struct(values), item, null));
      }
      if (!isOuter) {
        return items;
      }
      List nothing = new ArrayList();
      for (int i = 0; i < outputs.size(); i++) {
        nothing.add(new Literal(null, ((Expression) outputs.get(i)).dataType()));
      }
      List one = new ArrayList();
      one.add(struct(nothing));
      Expression none = new CreateArray(Attempt.seq(one), false);
      return new If(new GreaterThan(new Size(items, false), new Literal(Integer.valueOf(0), DataTypes.IntegerType)), items, none);
    }

    private void projectRows(List list) {
      NamedLambdaVariable row = variable("row", this.rowType);
      List values = new ArrayList(), ids = new ArrayList();
      StructType type = new StructType();
      for (int i = 0; i < list.size(); i++) {
        NamedExpression one = (NamedExpression) list.get(i);
        if (this.needed.contains(one.exprId()) && !this.references.containsKey(one.exprId())) {
          Expression of = one instanceof Alias ? ((Alias) one).child() : (Expression) one;
          values.add(this.inRow(of, row));
          type = type.add("c" + ids.size(), ((Expression) one).dataType());
          ids.add(one.exprId());
        }
      }
      this.rows = new Bounded.Items(this.rows, lambda(struct(values), row, null));
      this.rowIds = ids;
      this.rowType = type;
    }

    private Expression read(Expression one) {
      return replaced(one, this.references);
    }

    private Expression inRow(Expression one, NamedLambdaVariable row) {
      Map references = new HashMap(this.references);
      for (int i = 0; i < this.rowIds.size(); i++) {
        references.put(this.rowIds.get(i), new GetStructField(row, i, NOTHING));
      }
      return replaced(one, references);
    }

    private static Expression replaced(Expression one, Map references) {
      if (one instanceof AttributeReference) {
        Object found = references.get(((AttributeReference) one).exprId());
        if (found == null) {
          throw new IllegalArgumentException("names '" + ((AttributeReference) one).name() + "', which is not known here");
        }
        return (Expression) found;
      }
      List children = list(one.children());
      if (children.isEmpty()) {
        return one;
      }
      List replaced = new ArrayList();
      boolean isSame = true;
      for (int i = 0; i < children.size(); i++) {
        replaced.add(replaced((Expression) children.get(i), references));
        isSame = isSame && replaced.get(i) == children.get(i);
      }
      return Bounded.of(isSame ? one : (Expression) one.withNewChildren(Attempt.seq(replaced)));
    }

    private static Expression struct(List values) {
      List members = new ArrayList();
      for (int i = 0; i < values.size(); i++) {
        members.add(text("c" + i));
        members.add(values.get(i));
      }
      return new CreateNamedStruct(Attempt.seq(members));
    }

    private static Literal text(String text) {
      return new Literal(UTF8String.fromString(text), DataTypes.StringType);
    }

    private static StructType typeOf(List attributes) {
      StructType type = new StructType();
      for (int i = 0; i < attributes.size(); i++) {
        type = type.add("c" + i, ((Expression) attributes.get(i)).dataType());
      }
      return type;
    }

    private static StructType entry(MapType type) {
      return new StructType().add("key", type.keyType(), false).add("value", type.valueType(), type.valueContainsNull());
    }

    private static List ids(List attributes) {
      List ids = new ArrayList();
      for (int i = 0; i < attributes.size(); i++) {
        ids.add(((NamedExpression) attributes.get(i)).exprId());
      }
      return ids;
    }

    private static NamedLambdaVariable variable(String name, DataType type) {
      return new NamedLambdaVariable(name, type, true, NamedExpression$.MODULE$.newExprId(), new AtomicReference());
    }

    private static LambdaFunction lambda(Expression body, NamedLambdaVariable one, NamedLambdaVariable other) {
      List variables = new ArrayList();
      variables.add(one);
      if (other != null) {
        variables.add(other);
      }
      return new LambdaFunction(body, Attempt.seq(variables), false);
    }
  }

  /** Writes the computations of some columns as a text. */
  private static final class Print {
    private final Transform of;
    private final Map numbers = new HashMap();
    // Of a column that is another one under a new name: what that one is called.
    private final Map renamed = new HashMap();

    Print(Transform of) {
      this.of = of;
    }

    String of(List wanted) {
      Set needed = this.of.needed(wanted);
      StringBuilder text = new StringBuilder();
      for (int i = 0; i < this.of.nodes.size(); i++) {
        LogicalPlan node = (LogicalPlan) this.of.nodes.get(i);
        if (node instanceof Project) {
          List list = list(((Project) node).projectList());
          for (int j = 0; j < list.size(); j++) {
            if (list.get(j) instanceof Alias && needed.contains(((Alias) list.get(j)).exprId())) {
              Alias one = (Alias) list.get(j);
              if (one.child() instanceof AttributeReference) {
                this.renamed.put(one.exprId(), this.print(one.child()));
                continue;
              }
              text.append(this.print(one.child()));
              text.append(" as ").append(this.named(one.exprId())).append('\n');
            }
          }
        } else if (node instanceof Filter) {
          text.append("where ").append(this.print(((Filter) node).condition())).append('\n');
        } else {
          Generate generate = (Generate) node;
          text.append(generate.outer() ? "outer " : "each ").append(this.print((Expression) generate.generator()));
          List outputs = list(generate.generatorOutput());
          for (int j = 0; j < outputs.size(); j++) {
            text.append(" as ").append(this.named(((NamedExpression) outputs.get(j)).exprId()));
          }
          text.append('\n');
        }
      }
      for (int i = 0; i < wanted.size(); i++) {
        NamedExpression one = this.of.outputNamed((String) wanted.get(i));
        text.append(one.name()).append(" = ").append(this.named(one.exprId())).append('\n');
      }
      return text.toString();
    }

    private String named(Object id) {
      if (this.renamed.containsKey(id)) {
        return (String) this.renamed.get(id);
      }
      Object name = this.of.names.get(id);
      if (name != null) {
        return "[" + name + "]";
      }
      if (!this.numbers.containsKey(id)) {
        this.numbers.put(id, Integer.valueOf(this.numbers.size() + 1));
      }
      return "#" + this.numbers.get(id);
    }

    private String print(Object part) {
      if (part instanceof AttributeReference) {
        return this.named(((AttributeReference) part).exprId());
      }
      if (part instanceof NamedLambdaVariable) {
        return this.named(((NamedLambdaVariable) part).exprId());
      }
      if (part instanceof CommonExpressionId) {
        return this.named(part);
      }
      if (part instanceof Literal) {
        return this.print((Literal) part);
      }
      if (part instanceof Expression) {
        return part.getClass().getSimpleName() + this.printAll(CollectionConverters.asJava(((Product) part).productIterator()));
      }
      if (part instanceof DataType) {
        return ((DataType) part).json();
      }
      if (part instanceof Iterable) {
        return this.printAll(CollectionConverters.asJava(((Iterable) part).iterator()));
      }
      if (part instanceof Product) {
        // Such as the branches of a `case when`, which are pairs.
        return ((Product) part).productPrefix() + this.printAll(CollectionConverters.asJava(((Product) part).productIterator()));
      }
      String text = String.valueOf(part);
      // The name of an object without a text of its own has its address.
      return text.indexOf('@') < 0 || part instanceof String ? text : part.getClass().getName();
    }

    // Its own text depends on the time zone of the thread.
    private String print(Literal one) {
      Object value = one.value();
      String text = value instanceof byte[] ? Arrays.toString((byte[]) value) : String.valueOf(value);
      if (one.dataType() instanceof StringType) {
        text = text.length() + ":" + text;
      } else if (value != null && text.indexOf('@') >= 0) {
        text = value.getClass().getName();
      }
      return one.dataType().json() + ":" + text;
    }

    private String printAll(java.util.Iterator parts) {
      StringBuilder text = new StringBuilder("(");
      while (parts.hasNext()) {
        text.append(text.length() > 1 ? ", " : "").append(this.print(parts.next()));
      }
      return text.append(")").toString();
    }
  }
}
