"""A broker and a registry with TLS and a login: the whole path, and refused logins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader
from balance_service.kafka.topics import Topics
from balance_service.settings import load_settings
from balance_service.spark.row_query import RowQuery
from balance_service.spark.session import read_source, start_spark
from tests.integration import secured as planted
from tests.integration.engines import prepare
from tests.integration.secured import listed
from tests.support.commands import run
from tests.support.service import (
    add,
    amount_of,
    application,
    ask,
    ask_again,
    new_instance,
    process_of,
    running,
    warm_up,
)
from tests.support.shipped import jvm_scratch
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from confluent_kafka import Message
    from pyspark.sql import DataFrame, SparkSession

    from balance_service.devtools.local.stack import LocalInstance, LocalStack
    from balance_service.settings import Settings
    from tests.integration.secured import SecuredStack

_SPARK_SECONDS = 60.0
_NEEDED = {"every instance", "adding funds", "creating what is missing"}
# Makes Spark log all it can about its plans.
_SPARK_DEFAULTS = """\
spark.eventLog.enabled true
spark.eventLog.compress false
spark.eventLog.rolling.enabled false
spark.eventLog.dir {folder}
spark.sql.ui.explainMode extended
"""


# The whole path


@pytest.fixture(scope="module")
def names() -> dict[str, str]:
    settings = application()
    names = {"topic": settings["BALANCE_TOPIC"], "application id": settings["BALANCE_APPLICATION_ID"]}
    return {**names, "stage": "balance"}


@pytest.fixture(scope="module")
def settings(secured: SecuredStack, names: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings of an instance with a canary in every secret."""
    folder = tmp_path_factory.mktemp("instance")
    (folder / "events").mkdir()
    (folder / "spark-defaults.conf").write_text(_SPARK_DEFAULTS.format(folder=(folder / "events").as_uri()))
    (folder / "kafka.properties").write_text(
        "".join(f"{name}={value}\n" for name, value in secured.sasl_properties("SCRAM-SHA-512").items())
    )
    return {
        "BALANCE_TOPIC": names["topic"],
        "BALANCE_APPLICATION_ID": names["application id"],
        "BALANCE_SESSION_TIMEOUT_MS": "6000",
        "BALANCE_BOOTSTRAP_SERVERS": secured.sasl,
        "BALANCE_KAFKA_CONFIG_FILE": str(folder / "kafka.properties"),
        "BALANCE_KAFKA_CONFIG": '{"client.rack": "r1"}',
        "BALANCE_SCHEMA_REGISTRY_URL": secured.registry_url,
        "BALANCE_SCHEMA_REGISTRY_USER": planted.REGISTRY_USER,
        "BALANCE_SCHEMA_REGISTRY_PASSWORD": planted.REGISTRY_PASSWORD,
        "BALANCE_SCHEMA_REGISTRY_CA_FILE": str(secured.ca),
        "BALANCE_PEER_SECRET": planted.PEER_SECRET,
        "BALANCE_LOG_LEVEL": "DEBUG",
        "SPARK_CONF_DIR": str(folder),
    }


@pytest.fixture(scope="module")
def instance(
    secured: SecuredStack, stack: LocalStack, names: dict[str, str], settings: dict[str, str]
) -> Iterator[LocalInstance]:
    """An instance with only the grants that docs/how-to/secure.md lists for it."""
    secured.grant(grant.binding(names) for grant in listed() if grant.needed_for in _NEEDED)
    with running(new_instance(stack, settings)) as (one,):
        yield one


def test_the_listed_grants_suffice_to_add_and_query_funds(
    instance: LocalInstance, secured: SecuredStack, names: dict[str, str]
) -> None:
    warm_up(instance.url)
    _append(secured, names["topic"], b"poison", b"\x00")

    position = add(instance.url, "c1", "12.34")

    assert str(amount_of(ask(instance.url, "c1", position))) == "12.34"
    eventually(lambda: _dead_lettered(instance) == 1, "there is one dead letter")


def test_a_revoked_grant_shows_in_readiness_status_and_log_until_it_is_restored(
    instance: LocalInstance, secured: SecuredStack, names: dict[str, str]
) -> None:
    warm_up(instance.url)
    (read,) = (g for g in listed() if (g.name, g.operation) == ("<topic>", "Read") and g.needed_for in _NEEDED)
    wanted = f"Read on group '{names['application id']}/{names['topic']}' and on topic '{names['topic']}'"

    secured.revoke(read.binding(names))
    try:
        eventually(lambda: wanted in _get(instance, "/health/ready"), "readiness names the grant")
        _append(secured, names["topic"], b"poison", b"\x00")
        eventually(
            lambda: "Not authorized to access topics" in _get(instance, "/api/status"), "the status quotes Spark"
        )
    finally:
        secured.grant([read.binding(names)])

    eventually(instance.is_ready, "the instance is ready again", 90)
    assert wanted in instance.log.read_text()
    assert str(amount_of(ask_again(instance.url, "c2", add(instance.url, "c2", "1.00")))) == "1.00"


def test_no_secret_appears_anywhere(instance: LocalInstance, settings: dict[str, str]) -> None:
    """Runs after the tests above, which produce output to search."""
    warm_up(instance.url)
    process = process_of(instance)
    commands = [process.cmdline(), *(child.cmdline() for child in process.children(recursive=True))]
    assert any("java" in command[0] for command in commands)
    seen = {f"arguments of {number} {command[0]}": " ".join(command) for number, command in enumerate(commands)}
    asked = ("/metrics", "/api/status", "/health/ready", "/openapi.json", "/api/customers.getBalance")
    seen |= {path: _get(instance, path) for path in asked}
    printed = run(instance.environment, "serve", "--print-config")
    assert printed.code == 0
    seen["--print-config"] = printed.stdout + printed.stderr

    instance.stop()

    seen["log"] = instance.log.read_text()
    events = _under(Path(settings["SPARK_CONF_DIR"]) / "events")
    assert any("SparkListenerSQLExecutionStart" in text for text in events.values()), "Spark's event log is on"
    seen |= events | _under(instance.state_dir)
    assert {where for where, text in seen.items() if planted.CANARY in text} == set()


def _append(secured: SecuredStack, topic: str, key: bytes, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": secured.bootstrap_servers})
    producer.produce(topic, value, key)
    assert producer.flush(10) == 0


def _get(instance: LocalInstance, path: str) -> str:
    return httpx.get(instance.url + path, timeout=30).text


def _dead_lettered(instance: LocalInstance) -> int:
    lines = _get(instance, "/metrics").splitlines()
    found = [line for line in lines if line.startswith("balance_events_dead_lettered_total")]
    return int(sum(float(line.rpartition(" ")[2]) for line in found))


def _under(folder: Path) -> dict[str, str]:
    return {str(path): path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file()}


# Every login of both clients


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), slots=2)
    yield session
    session.stop()


@pytest.fixture(scope="module")
def open_topic(secured: SecuredStack) -> str:
    """A topic with one record that every authenticated user may read."""
    secured.admin.create_topics([NewTopic("open", 1, 1)])["open"].result(10)
    _append(secured, "open", b"k", b"v")
    anybody = ("User:*", "*", AclOperation.READ, AclPermissionType.ALLOW)
    group = load_settings().application_id
    secured.grant(
        [
            AclBinding(ResourceType.TOPIC, "open", ResourcePatternType.LITERAL, *anybody),
            AclBinding(ResourceType.GROUP, group, ResourcePatternType.LITERAL, *anybody),
        ]
    )
    return "open"


@pytest.mark.parametrize("way", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "mTLS"])
def test_both_clients_log_in(secured: SecuredStack, spark: SparkSession, open_topic: str, way: str) -> None:
    by_name = {"OAUTHBEARER": secured.oauth_properties, "mTLS": secured.mtls_properties}
    properties = by_name[way]() if way in by_name else secured.sasl_properties(way)
    bootstrap_servers = secured.mtls if way == "mTLS" else secured.sasl
    settings = load_settings(bootstrap_servers=bootstrap_servers, kafka_config=properties, topic=open_topic)

    with LogReader(reader_config(settings), open_topic, {0: 0}, {0: 1}) as reader:
        records: list[Message] = []

        def arrived() -> bool:
            records.extend(reader.read())
            return bool(records)

        eventually(arrived, "librdkafka reads the record")

    def read(positions: Mapping[int, int]) -> DataFrame:
        return read_source(spark, settings, open_topic, positions).select("offset", "key", "value", "partition")

    with RowQuery(spark, jvm_scratch(), read, {0: 0}) as query:
        rows = query.rows[0].pull(_SPARK_SECONDS)

    assert [(r.key(), r.value()) for r in records] == [(b"k", b"v")]
    assert rows is not None
    assert rows.to_pylist() == [{"offset": 0, "key": b"k", "value": b"v"}]


# Refused logins


def _unacceptable(secured: SecuredStack) -> dict[str, tuple[str, dict[str, str], str]]:
    login = secured.sasl_properties("SCRAM-SHA-512")
    untrusting = {name: value for name, value in login.items() if name != "ssl.ca.location"}
    no_certificate = {"security.protocol": "SSL", "ssl.ca.location": str(secured.ca)}
    wrong = f"{planted.CANARY}-wrong"
    return {
        "a wrong password": (secured.sasl, login | {"sasl.password": wrong}, "invalid credentials"),
        "a CA that is not known": (secured.sasl, untrusting, "certificate verify failed"),
        "no client certificate": (secured.mtls, no_certificate, "certificate"),
        "TLS to a plain listener": (secured.bootstrap_servers, no_certificate, "PLAINTEXT broker listener"),
        "a wrong client secret": (
            secured.sasl,
            secured.oauth_properties() | {"sasl.oauthbearer.client.secret": wrong},
            "invalid_client",
        ),
    }


def test_a_refused_login_is_reported_with_the_settings_to_correct(secured: SecuredStack) -> None:
    def refusal(bootstrap_servers: str, properties: dict[str, str]) -> Exception:
        settings = load_settings(bootstrap_servers=bootstrap_servers, kafka_config=properties)
        topics = Topics(settings)
        with pytest.raises((ConfigurationError, RetriableError)) as caught:
            prepare(topics, settings)
        return caught.value

    wrong = _unacceptable(secured)
    with ThreadPoolExecutor(len(wrong)) as pool:
        refusals = dict(zip(wrong, pool.map(lambda case: refusal(*case[:2]), wrong.values()), strict=True))

    for what, (_, _, reason) in wrong.items():
        said = str(refusals[what])
        assert reason in said, what
        assert planted.CANARY not in said
        # A token endpoint or proxy may be down temporarily, so these errors are retried and reported.
        waits = what in ("a wrong client secret", "TLS to a plain listener")
        assert type(refusals[what]) is (RetriableError if waits else ConfigurationError), said
        assert waits or "correct the security properties in BALANCE_KAFKA_CONFIG, or the file of" in said


_USER = {"schema_registry_user": planted.REGISTRY_USER, "schema_registry_password": planted.REGISTRY_PASSWORD}
_TOKEN = {"schema_registry_token": planted.REGISTRY_TOKEN}
_WRONG = f"{planted.CANARY}-wrong"


@contextmanager
def _registry(settings: Settings) -> Iterator[SchemaRegistry]:
    registry = SchemaRegistry.from_settings(settings)
    try:
        yield registry
    finally:
        registry.close()


@pytest.mark.parametrize("login", [_USER, _TOKEN], ids=["basic", "bearer"])
def test_a_registry_behind_tls_accepts_each_login(secured: SecuredStack, login: dict[str, Any]) -> None:
    settings = load_settings(schema_registry_url=secured.registry_url, schema_registry_ca_file=secured.ca, **login)

    with _registry(settings) as registry:
        schema_id = registry.register("secured-test", load_schema("Position"))
        written = registry.writer_schema(schema_id)

    assert written is not None
    assert written.records == ("parts.code.balance.state.Position",)


def test_a_read_only_client_gets_the_ids_of_registered_schemas_and_may_not_register(secured: SecuredStack) -> None:
    at = {"schema_registry_url": secured.registry_url, "schema_registry_ca_file": secured.ca}
    reads = load_settings(**at, schema_registry_token=planted.REGISTRY_READER_TOKEN)

    with _registry(load_settings(**at, **_TOKEN)) as writer, _registry(reads) as reader:
        schema_id = writer.register("secured-by-another", load_schema("Position"))
        assert reader.register("secured-by-another", load_schema("Position")) == schema_id
        with pytest.raises(ConfigurationError, match="does not let this user register"):
            reader.register("secured-by-another", load_schema("FundsAdded"))


@pytest.mark.parametrize(
    ("login", "trusts", "named"),
    [
        (_USER | {"schema_registry_password": _WRONG}, True, "BALANCE_SCHEMA_REGISTRY_PASSWORD"),
        ({"schema_registry_token": _WRONG}, True, "BALANCE_SCHEMA_REGISTRY_TOKEN"),
        ({}, True, "BALANCE_SCHEMA_REGISTRY_USER"),
        (_USER, False, "BALANCE_SCHEMA_REGISTRY_CA_FILE"),
    ],
)
def test_an_untrusted_registry_or_a_refused_login_names_the_setting(
    secured: SecuredStack, login: dict[str, Any], trusts: bool, named: str
) -> None:
    trust = {"schema_registry_ca_file": secured.ca} if trusts else {}
    settings = load_settings(schema_registry_url=secured.registry_url, **trust, **login)

    with _registry(settings) as registry, pytest.raises(ConfigurationError, match=named) as caught:
        registry.register("secured-test", load_schema("Position"))

    assert planted.CANARY not in str(caught.value)
    assert secured.registry_url in str(caught.value)
