"""The internals of Spark that the service uses, although Spark does not guarantee them. The list is complete.

A test fails for each one that a new version of Spark lacks, and names the module to change.
"""

from __future__ import annotations

import inspect
import re
from contextlib import closing
from pathlib import Path
from pydoc import locate
from typing import TYPE_CHECKING, Any

import pyspark
import pytest

from balance_service import spark
from balance_service.settings import load_settings
from balance_service.settings.spark import OWN_SETTINGS, PREFERRED_SETTINGS, SETTINGS_WITHOUT_UI, VALUE_SETTINGS
from balance_service.spark.batch_session import OF_BATCHES, OF_CLUSTERS
from balance_service.spark.jvm import class_path
from tests.unit.spark.class_files import Jars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SPARK = Path(spark.__file__).parent
_STREAMING = "org.apache.spark.sql.execution.streaming"
_PYTHON_WRITER = "org.apache.spark.sql.execution.python.streaming.PythonForeachWriter"
_REAL_TIME = "org.apache.spark.sql.connector.read.streaming.SupportsRealTimeMode"
_ALLOWED = f"{_STREAMING}.runtime.RealTimeModeAllowlist$"

# Module → class → methods and constructors that are called or overridden.
JAVA: dict[str, dict[str, list[str]]] = {
    "jvm.py": {
        # The service copies these options for the JVM.
        "org.apache.spark.launcher.JavaModuleOptions": ["static defaultModuleOptions()"],
        "org.codehaus.commons.compiler.samples.CompilerDemo": ["static main(String[])"],
    },
    "java/Gateway.java": {"org.apache.spark.api.python.PythonGatewayServer": ["static main(String[])"]},
    "java/Handover.java": {
        _PYTHON_WRITER: [
            "PythonForeachWriter(PythonFunction, StructType)",
            "open(long, long)",
            "process(UnsafeRow)",
            "close(Throwable)",
        ],
        "org.apache.spark.sql.ForeachWriter": ["process(Object)"],
        "org.apache.spark.sql.catalyst.expressions.UnsafeRow": ["getSizeInBytes()"],
        "org.apache.spark.sql.execution.arrow.ArrowWriter": [
            "static create(VectorSchemaRoot)",
            "write(InternalRow)",
            "finish()",
            "reset()",
        ],
        "org.apache.spark.sql.util.ArrowUtils": [
            "static toArrowSchema(StructType, String, boolean, boolean)",
            "static rootAllocator()",
        ],
        "org.apache.spark.sql.types.StructType": [],
        "org.apache.arrow.vector.VectorSchemaRoot": ["static create(Schema, BufferAllocator)"],
        "org.apache.arrow.vector.VectorUnloader": ["VectorUnloader(VectorSchemaRoot)", "getRecordBatch()"],
        "org.apache.arrow.vector.ipc.WriteChannel": ["WriteChannel(WritableByteChannel)"],
        "org.apache.arrow.vector.ipc.message.ArrowRecordBatch": ["close()"],
        "org.apache.arrow.vector.ipc.message.MessageSerializer": [
            "static serialize(WriteChannel, Schema)",
            "static serialize(WriteChannel, ArrowRecordBatch)",
        ],
    },
    "java/Resolving.java": {
        "org.apache.avro.NameValidator": [],
        "org.apache.avro.Schema": ["static applyAliases(Schema, Schema)"],
        "org.apache.avro.io.BinaryDecoder": [],
        "org.apache.avro.io.DecoderFactory": ["binaryDecoder(byte[], int, int, BinaryDecoder)"],
        "org.apache.spark.sql.Column": [],
        "org.apache.spark.sql.catalyst.InternalRow": [],
        "org.apache.spark.sql.catalyst.expressions.GenericInternalRow": ["GenericInternalRow(Object[])"],
        "org.apache.spark.sql.catalyst.expressions.Literal": ["static fromObject(Object)"],
        "org.apache.spark.sql.catalyst.expressions.objects.Invoke": [
            "Invoke(Expression, String, DataType, Seq, Seq, boolean, boolean, boolean)"
        ],
        "org.apache.spark.sql.classic.ExpressionUtils": ["static column(Expression)", "static expression(Column)"],
        "org.apache.spark.sql.types.StructType": ["add(String, String)", "add(String, DataType)"],
        "org.apache.spark.unsafe.types.UTF8String": ["static fromString(String)"],
        "scala.jdk.javaapi.CollectionConverters": ["static asScala(List)"],
    },
    "java/Reading.java": {
        "org.apache.avro.AvroRuntimeException": [],
        "org.apache.avro.LogicalType": [],
        "org.apache.avro.LogicalTypes": [],
        "org.apache.avro.Schema": [],
        "org.apache.avro.generic.GenericData": ["getDefaultValue(Schema$Field)"],
        "org.apache.avro.generic.GenericDatumWriter": [],
        "org.apache.avro.io.BinaryDecoder": ["readBytes(ByteBuffer)", "readArrayStart()", "readMapStart()"],
        "org.apache.avro.io.BinaryEncoder": [],
        "org.apache.avro.io.DecoderFactory": ["binaryDecoder(byte[], BinaryDecoder)"],
        "org.apache.avro.io.EncoderFactory": ["directBinaryEncoder(OutputStream, BinaryEncoder)"],
        "org.apache.spark.sql.catalyst.expressions.GenericInternalRow": ["GenericInternalRow(Object[])"],
        "org.apache.spark.sql.catalyst.util.ArrayBasedMapData": ["ArrayBasedMapData(ArrayData, ArrayData)"],
        "org.apache.spark.sql.catalyst.util.GenericArrayData": ["GenericArrayData(Object[])"],
        "org.apache.spark.sql.types.DataType": [],
        "org.apache.spark.sql.types.DataTypes": ["static createDecimalType(int, int)"],
        "org.apache.spark.sql.types.Decimal": ["set(long, int, int)", "static apply(BigDecimal, int, int)"],
        "org.apache.spark.sql.types.StructType": ["add(String, DataType)"],
        "org.apache.spark.unsafe.types.UTF8String": ["static fromBytes(byte[])", "isValid()"],
    },
    "java/Json.java": {
        "org.apache.spark.unsafe.types.UTF8String": ["static fromBytes(byte[], int, int)", "isValid()"],
    },
    "java/ConnectSchema.java": {
        "org.apache.avro.LogicalTypes": [],
        "org.apache.avro.Schema": ["getProp(String)", "getField(String)", "getElementType()", "getValueType()"],
    },
    "java/JsonValues.java": {
        "org.apache.avro.LogicalTypes": [],
        "org.apache.avro.Schema": ["getProp(String)", "getEnumDefault()", "getFixedSize()"],
        "org.apache.spark.sql.catalyst.expressions.GenericInternalRow": ["GenericInternalRow(Object[])"],
        "org.apache.spark.sql.catalyst.util.ArrayBasedMapData": ["ArrayBasedMapData(ArrayData, ArrayData)"],
        "org.apache.spark.sql.catalyst.util.GenericArrayData": ["GenericArrayData(Object[])"],
        "org.apache.spark.sql.types.Decimal": ["set(long, int, int)", "static apply(BigDecimal, int, int)"],
        "org.apache.spark.unsafe.types.UTF8String": ["static fromString(String)"],
    },
    "java/JsonResolving.java": {
        "org.apache.avro.Schema": ["getProp(String)"],
        "org.apache.spark.sql.Column": [],
        "org.apache.spark.sql.catalyst.InternalRow": [],
        "org.apache.spark.sql.catalyst.expressions.GenericInternalRow": ["GenericInternalRow(Object[])"],
        "org.apache.spark.sql.catalyst.expressions.Literal": ["static fromObject(Object)"],
        "org.apache.spark.sql.catalyst.expressions.objects.Invoke": [
            "Invoke(Expression, String, DataType, Seq, Seq, boolean, boolean, boolean)"
        ],
        "org.apache.spark.sql.classic.ExpressionUtils": ["static expression(Column)", "static column(Expression)"],
        "org.apache.spark.sql.types.StructType": ["add(String, String)"],
        "org.apache.spark.unsafe.types.UTF8String": ["static fromBytes(byte[])", "static fromString(String)"],
        "scala.jdk.javaapi.CollectionConverters": [],
    },
    "java/Attempt.java": {
        "org.apache.spark.TaskKilledException": [],
        "org.apache.spark.sql.catalyst.InternalRow": [],
        "org.apache.spark.sql.catalyst.expressions.ConditionalExpression": [],
        "org.apache.spark.sql.catalyst.expressions.Expression": [],
        "org.apache.spark.sql.catalyst.expressions.GenericInternalRow": ["GenericInternalRow(Object[])"],
        "org.apache.spark.sql.catalyst.expressions.TryEval": ["TryEval(Expression)"],
        "org.apache.spark.sql.catalyst.expressions.codegen.CodeBlock": ["CodeBlock(Seq, Seq)"],
        "org.apache.spark.sql.catalyst.expressions.codegen.CodegenContext": [],
        "org.apache.spark.sql.catalyst.expressions.codegen.ExprCode": [],
        "org.apache.spark.sql.catalyst.expressions.codegen.FalseLiteral": [],
        "org.apache.spark.sql.catalyst.util.ArrayData": [],
        "org.apache.spark.sql.catalyst.util.MapData": [],
        "org.apache.spark.sql.types.ArrayType": [],
        "org.apache.spark.sql.types.DataType": [],
        "org.apache.spark.sql.types.DateType": [],
        "org.apache.spark.sql.types.MapType": [],
        "org.apache.spark.sql.types.StringType": [],
        "org.apache.spark.sql.types.StructType": [],
        "org.apache.spark.sql.types.TimestampNTZType": [],
        "org.apache.spark.sql.types.TimestampType": [],
        "org.apache.spark.unsafe.types.UTF8String": [],
        "scala.collection.immutable.Seq": [],
        "scala.jdk.javaapi.CollectionConverters": [],
    },
    "java/Bounded.java": {
        "org.apache.spark.sql.catalyst.InternalRow": ["static copyValue(Object)"],
        "org.apache.spark.sql.catalyst.expressions.ArrayAggregate": [],
        "org.apache.spark.sql.catalyst.expressions.ArrayInsert": [],
        "org.apache.spark.sql.catalyst.expressions.ArrayJoin": [],
        "org.apache.spark.sql.catalyst.expressions.ArrayRepeat": [],
        "org.apache.spark.sql.catalyst.expressions.ArrayTransform": [
            "ArrayTransform(Expression, Expression)",
            "nullSafeEval(InternalRow, Object)",
            "functionForEval()",
        ],
        "org.apache.spark.sql.catalyst.expressions.BinaryPad": [],
        "org.apache.spark.sql.catalyst.expressions.Coalesce": [],
        "org.apache.spark.sql.catalyst.expressions.ConcatWs": [],
        "org.apache.spark.sql.catalyst.expressions.Expression": [],
        "org.apache.spark.sql.catalyst.expressions.FormatNumber": [],
        "org.apache.spark.sql.catalyst.expressions.If": [],
        "org.apache.spark.sql.catalyst.expressions.LambdaFunction": [
            "LambdaFunction(Expression, Seq, boolean)",
            "arguments()",
            "hidden()",
        ],
        "org.apache.spark.sql.catalyst.expressions.Literal": ["static fromObject(Object)"],
        "org.apache.spark.sql.catalyst.expressions.NamedLambdaVariable": ["value()"],
        "org.apache.spark.sql.catalyst.expressions.OctetLength": ["OctetLength(Expression)"],
        "org.apache.spark.sql.catalyst.expressions.RegExpReplace": [],
        "org.apache.spark.sql.catalyst.expressions.Sequence": [],
        "org.apache.spark.sql.catalyst.expressions.Size": ["Size(Expression, boolean)"],
        "org.apache.spark.sql.catalyst.expressions.StringLPad": [],
        "org.apache.spark.sql.catalyst.expressions.StringRPad": [],
        "org.apache.spark.sql.catalyst.expressions.StringRepeat": [],
        "org.apache.spark.sql.catalyst.expressions.StringReplace": [],
        "org.apache.spark.sql.catalyst.expressions.StringSpace": [],
        "org.apache.spark.sql.catalyst.expressions.TryEval": ["TryEval(Expression)"],
        "org.apache.spark.sql.catalyst.expressions.codegen.CodegenContext": [],
        "org.apache.spark.sql.catalyst.expressions.codegen.ExprCode": [],
        "org.apache.spark.sql.catalyst.expressions.objects.StaticInvoke": [
            "StaticInvoke(Class, DataType, String, Seq, Seq, boolean, boolean, boolean, Option)"
        ],
        "org.apache.spark.sql.catalyst.util.ArrayData": [],
        "org.apache.spark.sql.catalyst.util.GenericArrayData": [],
        "org.apache.spark.sql.catalyst.util.MapData": [],
        "org.apache.spark.sql.types.ArrayType": [],
        "org.apache.spark.sql.types.BinaryType": [],
        "org.apache.spark.sql.types.DataType": [],
        "org.apache.spark.sql.types.DataTypes": [],
        "org.apache.spark.sql.types.DateType": [],
        "org.apache.spark.sql.types.IntegralType": [],
        "org.apache.spark.sql.types.MapType": [],
        "org.apache.spark.sql.types.StringType": [],
        "org.apache.spark.sql.types.StructType": [],
        "org.apache.spark.sql.types.YearMonthIntervalType": [],
        "org.apache.spark.unsafe.types.CalendarInterval": [],
        "org.apache.spark.unsafe.types.UTF8String": [],
        "scala.None": [],
    },
    "java/Transform.java": {
        "org.apache.spark.sql.catalyst.expressions.AesEncrypt": [],
        "org.apache.spark.sql.catalyst.expressions.Alias": [],
        "org.apache.spark.sql.catalyst.expressions.And": [],
        "org.apache.spark.sql.catalyst.expressions.ArrayFilter": ["ArrayFilter(Expression, Expression)"],
        "org.apache.spark.sql.catalyst.expressions.AttributeReference": [],
        "org.apache.spark.sql.catalyst.expressions.Cast": [],
        "org.apache.spark.sql.catalyst.expressions.CommonExpressionId": [],
        "org.apache.spark.sql.catalyst.expressions.CreateArray": [],
        "org.apache.spark.sql.catalyst.expressions.CreateNamedStruct": ["CreateNamedStruct(Seq)"],
        "org.apache.spark.sql.catalyst.expressions.EvalMode": [],
        "org.apache.spark.sql.catalyst.expressions.Explode": [],
        "org.apache.spark.sql.catalyst.expressions.ExprId": [],
        "org.apache.spark.sql.catalyst.expressions.Expression": [],
        "org.apache.spark.sql.catalyst.expressions.Flatten": [],
        "org.apache.spark.sql.catalyst.expressions.FormatString": [],
        "org.apache.spark.sql.catalyst.expressions.Generator": [],
        "org.apache.spark.sql.catalyst.expressions.GetStructField": ["GetStructField(Expression, int, Option)"],
        "org.apache.spark.sql.catalyst.expressions.GreaterThan": [],
        "org.apache.spark.sql.catalyst.expressions.If": [],
        "org.apache.spark.sql.catalyst.expressions.Inline": [],
        "org.apache.spark.sql.catalyst.expressions.IsNotNull": [],
        "org.apache.spark.sql.catalyst.expressions.IsNull": [],
        "org.apache.spark.sql.catalyst.expressions.LambdaFunction": ["LambdaFunction(Expression, Seq, boolean)"],
        "org.apache.spark.sql.catalyst.expressions.Literal": [],
        "org.apache.spark.sql.catalyst.expressions.MapEntries": [],
        "org.apache.spark.sql.catalyst.expressions.NamedExpression": [],
        "org.apache.spark.sql.catalyst.expressions.NamedLambdaVariable": [
            "NamedLambdaVariable(String, DataType, boolean, ExprId, AtomicReference)"
        ],
        "org.apache.spark.sql.catalyst.expressions.PlanExpression": [],
        "org.apache.spark.sql.catalyst.expressions.PosExplode": [],
        "org.apache.spark.sql.catalyst.expressions.RuntimeReplaceable": [],
        "org.apache.spark.sql.catalyst.expressions.Size": [],
        "org.apache.spark.sql.catalyst.plans.logical.Filter": [],
        "org.apache.spark.sql.catalyst.plans.logical.Generate": [],
        "org.apache.spark.sql.catalyst.plans.logical.LogicalPlan": [],
        "org.apache.spark.sql.catalyst.plans.logical.Project": [],
        "org.apache.spark.sql.catalyst.plans.logical.SubqueryAlias": [],
        "org.apache.spark.sql.catalyst.trees.TreePattern": [],
        "org.apache.spark.sql.classic.Dataset": [],
        "org.apache.spark.sql.classic.ExpressionUtils": ["static column(Expression)", "static expression(Column)"],
        "org.apache.spark.sql.types.ArrayType": [],
        "org.apache.spark.sql.types.ByteType": [],
        "org.apache.spark.sql.types.DataType": [],
        "org.apache.spark.sql.types.DataTypes": [],
        "org.apache.spark.sql.types.DatetimeType": [],
        "org.apache.spark.sql.types.DecimalType": [],
        "org.apache.spark.sql.types.MapType": [],
        "org.apache.spark.sql.types.ShortType": [],
        "org.apache.spark.sql.types.StringType": [],
        "org.apache.spark.sql.types.StructType": [],
        "org.apache.spark.unsafe.types.UTF8String": [],
        "scala.collection.Iterable": [],
        "scala.collection.Seq": [],
        "scala.jdk.javaapi.CollectionConverters": [],
    },
    "java/Writing.java": {
        "org.apache.avro.LogicalTypes": [],
        "org.apache.avro.NameValidator": [],
        "org.apache.avro.Schema": [],
        "org.apache.avro.generic.GenericData": [],
        "org.apache.avro.generic.GenericDatumWriter": [],
        "org.apache.avro.io.BinaryEncoder": [],
        "org.apache.avro.io.EncoderFactory": [],
        "org.apache.spark.sql.Column": [],
        "org.apache.spark.sql.catalyst.InternalRow": [],
        "org.apache.spark.sql.catalyst.expressions.GenericInternalRow": ["GenericInternalRow(Object[])"],
        "org.apache.spark.sql.catalyst.expressions.Literal": [],
        "org.apache.spark.sql.catalyst.expressions.SpecializedGetters": [],
        "org.apache.spark.sql.catalyst.expressions.objects.Invoke": [
            "Invoke(Expression, String, DataType, Seq, Seq, boolean, boolean, boolean)"
        ],
        "org.apache.spark.sql.catalyst.util.ArrayData": [],
        "org.apache.spark.sql.catalyst.util.GenericArrayData": [],
        "org.apache.spark.sql.catalyst.util.MapData": [],
        "org.apache.spark.sql.classic.ExpressionUtils": ["static column(Expression)", "static expression(Column)"],
        "org.apache.spark.sql.types.ArrayType": [],
        "org.apache.spark.sql.types.DataType": [],
        "org.apache.spark.sql.types.DataTypes": [],
        "org.apache.spark.sql.types.Decimal": [],
        "org.apache.spark.sql.types.DecimalType": [],
        "org.apache.spark.sql.types.MapType": [],
        "org.apache.spark.sql.types.StructType": [],
        "org.apache.spark.unsafe.types.UTF8String": [],
        "scala.jdk.javaapi.CollectionConverters": [],
    },
    "row_query.py": {
        "org.apache.spark.sql.classic.Dataset": ["schema()"],
        "org.apache.spark.sql.classic.DataStreamWriter": ["foreach(ForeachWriter)"],
    },
    "session.py": {
        "org.apache.spark.sql.classic.SparkSession": ["sparkContext()"],
        "org.apache.spark.SparkContext": ["isStopped()"],
        "org.apache.hadoop.security.UserGroupInformation": [
            "static createRemoteUser(String)",
            "static setLoginUser(UserGroupInformation)",
        ],
        f"{_STREAMING}.sources.LowLatencyMemoryStream": [
            "static singlePartition(SparkSession, Encoder)",
            "addData(Seq)",
            "toDF()",
        ],
        "org.apache.spark.sql.Encoders": ["static INT()"],
        "scala.jdk.javaapi.CollectionConverters": ["static asScala(List)"],
    },
    "../settings/spark.py": {
        "org.apache.spark.sql.catalyst.optimizer.ConvertToLocalRelation": [],
        "org.apache.spark.sql.catalyst.optimizer.PushFoldableIntoBranches": [],
        f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager": [
            "FileSystemBasedCheckpointFileManager(Path, Configuration)"
        ],
        "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem": ["BareLocalFileSystem()"],
    },
    "batch_session.py": {
        "org.apache.spark.sql.classic.Dataset": ["mapInArrow(Column, boolean, ResourceProfile)"],
    },
    "class_archive.py": {
        "org.apache.spark.sql.kafka010.KafkaSourceProvider": [],
        "org.apache.spark.sql.kafka010.KafkaMicroBatchStream": [],
        "org.apache.spark.sql.kafka010.KafkaBatchReaderFactory": [],
        "org.apache.spark.sql.kafka010.KafkaBatchPartitionReader": [],
        "org.apache.spark.sql.kafka010.KafkaOffsetReaderAdmin": [],
        "org.apache.spark.sql.kafka010.consumer.KafkaDataConsumer": [],
        "org.apache.kafka.clients.admin.AdminClient": ["static create(Properties)"],
        "org.apache.kafka.clients.consumer.KafkaConsumer": ["KafkaConsumer(Properties)"],
        "org.apache.kafka.common.serialization.ByteArrayDeserializer": [],
    },
}

# Module, class, and a class that it extends or implements.
PARENTS = [
    ("row_query.py", "org.apache.spark.sql.kafka010.KafkaMicroBatchStream", _REAL_TIME),
    ("session.py", f"{_STREAMING}.sources.LowLatencyMemoryStream", _REAL_TIME),
    ("java/Handover.java", _PYTHON_WRITER, "org.apache.spark.sql.ForeachWriter"),
    (
        "../settings/spark.py",
        "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem",
        "org.apache.hadoop.fs.LocalFileSystem",
    ),
]

# Module, class, and a text in its code: a class that it treats specially, a variable that it reads, a message.
NAMED = [
    ("jvm.py", "org.apache.spark.api.python.PythonGatewayServer$", "_PYSPARK_DRIVER_CONN_INFO_PATH"),
    ("jvm.py", "org.apache.spark.ui.WebUI", "SPARK_LOCAL_IP"),
    ("jvm.py", "org.apache.spark.ui.WebUI", "SPARK_PUBLIC_DNS"),
    # Spark passes unconverted rows to this writer, and objects to any other.
    ("java/Handover.java", f"{_STREAMING}.sources.ForeachWriterTable$", _PYTHON_WRITER),
    # The classes that real-time mode allows.
    ("row_query.py", _ALLOWED, f"{_STREAMING}.sources.ForeachWriterTable"),
    ("decode.py", _ALLOWED, "org.apache.spark.sql.execution.ProjectExec"),
    (
        "row_query.py",
        "org.apache.kafka.common.errors.TopicAuthorizationException",
        "Not authorized to access topics: ",
    ),
]

# The classes that declare Spark's settings. Spark ignores undeclared settings silently.
SETTINGS_OF = [
    "org.apache.spark.internal.config.Network$",
    "org.apache.spark.internal.config.package$",
    "org.apache.spark.internal.config.Status$",
    "org.apache.spark.internal.config.UI$",
    "org.apache.spark.sql.internal.SQLConf$",
    "org.apache.spark.sql.internal.StaticSQLConf$",
    "org.apache.spark.sql.internal.SqlApiConfHelper$",
    "org.apache.spark.sql.kafka010.package$",
    # Folders that are not declared as settings.
    "org.apache.spark.util.Utils$",
]


def _has(owner: Any, attribute: str) -> bool:
    return hasattr(owner, attribute)


def _sets(owner: Any, attribute: str) -> bool:
    """Whether the constructor sets it."""
    return attribute in inspect.unwrap(owner.__init__).__code__.co_names


def _names(function: Any, attribute: str) -> bool:
    return attribute in inspect.unwrap(function).__code__.co_names


def _takes(function: Any, parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def _reads(function: Any, variable: str) -> bool:
    return f'os.environ["{variable}"]' in inspect.getsource(function)


# Module, an object of PySpark, and a condition that must hold for it.
PYTHON: list[tuple[str, str, Callable[[Any, str], bool], str]] = [
    ("session.py", "pyspark.SparkContext", _has, "_gateway"),
    ("session.py", "pyspark.SparkContext", _has, "_jvm"),
    ("session.py", "pyspark.sql.SparkSession", _sets, "_jsparkSession"),
    ("session.py", "pyspark.SparkContext", _has, "_ensure_initialized"),
    ("session.py", "pyspark.SparkContext._ensure_initialized", _takes, "gateway"),
    ("session.py", "py4j.clientserver.JavaClient.__init__", _takes, "java_parameters"),
    ("session.py", "py4j.java_gateway.JavaGateway.set_gateway_client", _names, "_gateway_client"),
    ("session.py", "py4j.clientserver.JavaClient", _has, "get_thread_connection"),
    ("session.py", "py4j.clientserver.ClientServerConnection.connect_to_java_server", _names, "read_timeout"),
    ("session.py", "pyspark.java_gateway.launch_gateway", _reads, "PYSPARK_GATEWAY_PORT"),
    ("session.py", "pyspark.java_gateway.launch_gateway", _reads, "PYSPARK_GATEWAY_SECRET"),
    ("row_query.py", "pyspark.sql.SparkSession", _sets, "_jvm"),
    ("row_query.py", "pyspark.sql.classic.dataframe.DataFrame", _sets, "_jdf"),
    ("row_query.py", "pyspark.sql.streaming.DataStreamWriter", _sets, "_jwrite"),
    ("row_query.py", "pyspark.sql.streaming.DataStreamWriter.trigger", _takes, "realTime"),
    ("session.py", "pyspark.SparkContext._do_init", _names, "_accumulatorServer"),
    ("decode.py", "pyspark.sql.SparkSession", _sets, "_jvm"),
    ("decode.py", "pyspark.sql.classic.column.Column", _sets, "_jc"),
    ("session.py", "pyspark.sql.SparkSession", _sets, "_jvm"),
    ("session.py", "pyspark.sql.classic.dataframe.DataFrame.__init__", _takes, "jdf"),
    ("session.py", "pyspark.sql.SparkSession", _has, "_instantiatedSession"),
    ("transform.py", "pyspark.sql.classic.dataframe.DataFrame", _sets, "_jdf"),
    ("transform.py", "pyspark.sql.SparkSession", _sets, "_jvm"),
    ("made_records.py", "pyspark.sql.SparkSession", _sets, "_jvm"),
    ("made_records.py", "pyspark.sql.classic.column.Column", _sets, "_jc"),
    # It builds the function as `mapInArrow` does, without asking for pandas.
    ("batch_session.py", "pyspark.sql.udf.UserDefinedFunction.__init__", _takes, "evalType"),
    ("batch_session.py", "pyspark.util.PythonEvalType", _has, "SQL_MAP_ARROW_ITER_UDF"),
    ("batch_session.py", "pyspark.sql.classic.dataframe.DataFrame", _sets, "_jdf"),
    ("batch_session.py", "pyspark.sql.classic.column.Column", _sets, "_jc"),
    ("batch_session.py", "pyspark.SparkContext._do_init", _names, "pythonExec"),
    ("batch_session.py", "pyspark.SparkContext._do_init", _names, "environment"),
    ("class_archive.py", "pyspark.sql.SparkSession", _sets, "_jvm"),
    ("class_archive.py", "pyspark.SparkContext", _has, "_gateway"),
]


@pytest.fixture(scope="module")
def jars() -> Iterator[Jars]:
    """The class path that the service gives the JVM."""
    with closing(Jars(class_path(load_settings()))) as found:
        yield found


def _broken(module: str, what: str) -> str:
    return f"spark/{module} uses {what}, which pyspark {pyspark.__version__} and its connectors do not have"


def _members() -> Iterator[tuple[str, str, str]]:
    for module, classes in JAVA.items():
        for name, members in classes.items():
            yield from ((module, name, member) for member in members or [""])


@pytest.mark.parametrize(("module", "name", "member"), list(_members()))
def test_a_jvm_class_has_the_method_that_is_called(jars: Jars, module: str, name: str, member: str) -> None:
    assert jars.read(name) is not None, _broken(module, name)
    if member:
        called = member.partition("(")[0]
        like_it = sorted(method for method in jars.methods(name) if method.partition("(")[0] == called)
        assert member in like_it, f"{_broken(module, f'{name}: {member}')}; there is {like_it or 'none of that name'}"


@pytest.mark.parametrize(("module", "name", "parent"), PARENTS)
def test_a_jvm_class_has_the_expected_parent(jars: Jars, module: str, name: str, parent: str) -> None:
    found = jars.read(name)

    assert found is not None, _broken(module, name)
    assert parent in found.parents, _broken(module, f"{name} as a {parent}")


@pytest.mark.parametrize(("module", "name", "text"), NAMED)
def test_a_jvm_class_contains_the_expected_text(jars: Jars, module: str, name: str, text: str) -> None:
    found = jars.read(name)

    assert found is not None, _broken(module, name)
    assert text in found.texts, _broken(module, f"{name} and that it names {text!r}")


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name in {
            **VALUE_SETTINGS,
            **OWN_SETTINGS,
            **PREFERRED_SETTINGS,
            **SETTINGS_WITHOUT_UI,
            **OF_BATCHES,
            **OF_CLUSTERS,
        }
        if not name.startswith("spark.hadoop.")
    ),
)
def test_spark_declares_a_setting(jars: Jars, name: str) -> None:
    declared = {text for owner in SETTINGS_OF if (found := jars.read(owner)) for text in found.texts}

    assert name in declared, _broken("../settings/spark.py", f"the setting {name}")


@pytest.mark.parametrize(
    ("module", "name", "is_so", "what"), PYTHON, ids=[f"{module}-{name}-{what}" for module, name, _, what in PYTHON]
)
def test_pyspark_has_an_internal(module: str, name: str, is_so: Callable[[Any, str], bool], what: str) -> None:
    found = locate(name)

    assert found is not None, _broken(module, name)
    assert is_so(found, what), _broken(module, f"{what} of {name}")


def test_the_failure_for_a_missing_class_names_the_module_that_uses_it(jars: Jars) -> None:
    name, lacking = "org.apache.spark.sql.util.ArrowUtils", "static toArrowSchema(StructType, String)"

    with pytest.raises(AssertionError) as caught:
        test_a_jvm_class_has_the_method_that_is_called(jars, "java/Handover.java", name, lacking)

    (line, *_) = str(caught.value).splitlines()
    assert line.startswith(f"spark/java/Handover.java uses {name}: {lacking}, which pyspark {pyspark.__version__}")
    assert "static toArrowSchema(StructType, String, boolean, boolean)" in line
    with pytest.raises(AssertionError, match=r"uses org\.apache\.spark\.Gone, which"):
        test_a_jvm_class_has_the_method_that_is_called(jars, "java/Handover.java", "org.apache.spark.Gone", "")


def test_the_list_contains_every_jvm_class_that_the_code_names() -> None:
    named = {
        (module, name)
        for module, text in _sources()
        for name in re.findall(r"\b(?:org|scala|com\.globalmentor)\.(?:[a-z]\w*\.)+[A-Z]\w*", text)
    }

    assert len(named) > 20
    assert named - {(module, name) for module, classes in JAVA.items() for name in classes} == set()


def test_the_list_contains_every_private_attribute_of_pyspark_that_the_code_uses() -> None:
    used = {
        (module, attribute)
        for module, text in _sources()
        for attribute in re.findall(r"(?<!\bself)(?<!\bcls)\.(_[a-z]\w*)", text)
    }

    assert used
    assert used - {(module, what) for module, _, _, what in PYTHON} == set()


def _sources() -> Iterator[tuple[str, str]]:
    for file in sorted(_SPARK.rglob("*")):
        if file.suffix in (".py", ".java"):
            yield file.relative_to(_SPARK).as_posix(), file.read_text(encoding="utf-8")
