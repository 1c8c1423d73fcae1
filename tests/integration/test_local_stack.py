"""The local stack: topics, schemas and child processes. Starts processes, so each test takes seconds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from balance_service.devtools.local.guard import GRACE_SECONDS
from balance_service.devtools.local.processes import HOST, ChildProcess, free_port
from balance_service.devtools.local.stack import LocalStack
from balance_service.errors import ConfigurationError
from tests.support.commands import assert_refused, started
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCHEMA = '{"type": "record", "name": "Fact", "fields": [{"name": "id", "type": "string"}]}'

_PARENT_OF_A_CHILD = """
import sys, time
from pathlib import Path
from balance_service.devtools.local.processes import ChildProcess
folder = Path(sys.argv[1])
child = ChildProcess("server", folder, folder / "server.log")
child.run(["/bin/sh", "-c", "echo up; exec sleep 120"])
child.wait_until(lambda: "up" in child.log.read_text())
print("ready", flush=True)
time.sleep(120)
"""

_PARENT_OF_A_STACK = """
import sys, time
from pathlib import Path
from balance_service.devtools.local.stack import LocalStack
with LocalStack(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(120)
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.mark.shows("local-users")
def test_topics_records_and_schemas_survive_a_restart_on_other_ports(tmp_path: Path) -> None:
    data = tmp_path / "local" / "data"
    with LocalStack(data) as first:
        _create_topic(first, "facts", partitions=3)
        _commit(first, "facts", [b"a", b"b"])
        schema_id = _register(first, "facts-value")

    of_stack = [data, *(data / name for name in ("kafka", "registry", "logs"))]
    assert [folder.stat().st_mode & 0o777 for folder in of_stack] == [0o700] * 4
    # As a former version left them.
    for folder in of_stack:
        folder.chmod(0o755)

    with LocalStack(data) as second:
        assert [folder.stat().st_mode & 0o777 for folder in of_stack] == [0o700] * 4
        assert second.bootstrap_servers != first.bootstrap_servers
        assert second.schema_registry_url != first.schema_registry_url
        topics = AdminClient({"bootstrap.servers": second.bootstrap_servers}).list_topics(timeout=10).topics
        assert len(topics["facts"].partitions) == 3
        assert _read_committed(second, "facts", 2) == [b"a", b"b"]
        assert _latest_id(second, "facts-value") == schema_id


def test_an_aborted_transaction_is_never_read(stack: LocalStack) -> None:
    _create_topic(stack, "transactions")

    producer = _transactional_producer(stack)
    producer.begin_transaction()
    producer.produce("transactions", value=b"aborted", partition=0)
    producer.abort_transaction(10)
    _commit(stack, "transactions", [b"committed"])

    assert _read_committed(stack, "transactions", 1) == [b"committed"]


def test_committed_records_survive_a_broker_kill(stack: LocalStack) -> None:
    _create_topic(stack, "broker-killed")
    _commit(stack, "broker-killed", [b"kept"])
    address = stack.bootstrap_servers

    stack.broker.kill()
    stack.broker.start()

    assert stack.bootstrap_servers == address
    assert _read_committed(stack, "broker-killed", 1) == [b"kept"]


def test_a_registered_schema_survives_a_registry_kill(stack: LocalStack) -> None:
    schema_id = _register(stack, "registry-killed")
    address = stack.schema_registry_url

    stack.registry.kill()
    stack.registry.start()

    assert stack.schema_registry_url == address
    assert _latest_id(stack, "registry-killed") == schema_id


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_does_not_outlive_its_parent(tmp_path: Path, sent: signal.Signals) -> None:
    _assert_children_end(_PARENT_OF_A_CHILD, tmp_path, sent, processes=2)


def test_the_stack_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    _assert_children_end(_PARENT_OF_A_STACK, tmp_path, signal.SIGKILL, processes=4)


@pytest.mark.parametrize(("setting", "flag"), [("kafka_port", "--kafka-port"), ("registry_port", "--registry-port")])
def test_a_port_in_use_is_named_with_its_flag_and_no_process_is_left(tmp_path: Path, setting: str, flag: str) -> None:
    before = psutil.Process().children(recursive=True)
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"port {port} .* {flag} "):
            LocalStack(tmp_path, **{setting: port}).start()
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []


def test_a_data_directory_in_use_is_refused(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("balance_service.devtools.local.stack.GRACE_SECONDS", -2)
    with pytest.raises(ConfigurationError, match=rf"{stack.data_dir} is in use by another local stack"):
        LocalStack(stack.data_dir).start()


@pytest.mark.parametrize(("held", "wanted", "whose"), [(1, 3, "1 broker, not of 3"), (3, 1, "3 brokers, not of 1")])
def test_the_data_of_another_number_of_brokers_are_refused(tmp_path: Path, held: int, wanted: int, whose: str) -> None:
    for name in ("kafka", "kafka-2", "kafka-3")[:held]:
        (tmp_path / name / "data").mkdir(parents=True)

    with pytest.raises(ConfigurationError, match=rf"has the data of {whose}: start with --brokers {held}"):
        LocalStack(tmp_path, brokers=wanted).start()


@pytest.mark.parametrize("registry_port", [9092, 9094])
def test_a_registry_on_a_port_of_the_brokers_is_refused(tmp_path: Path, registry_port: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"--registry-port {registry_port} is one of the brokers' ports"):
        LocalStack(tmp_path, 9092, registry_port, brokers=3)


def test_a_child_that_ends_early_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    child = ChildProcess("server", tmp_path, tmp_path / "server.log")
    child.run(["/bin/sh", "-c", "echo no such disk >&2; exit 3"])
    with pytest.raises(ConfigurationError, match=r"(?s)server ended before it was ready.*no such disk"):
        child.wait_until(lambda: False)
    child.stop()


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    child = ChildProcess("server", tmp_path, tmp_path / "server.log")
    child.run(["/bin/sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"])
    child.wait_until(lambda: "up" in child.log.read_text())
    started = time.monotonic()
    child.stop()
    assert time.monotonic() - started < GRACE_SECONDS + 3
    assert not child.running


def test_free_ports_are_unique() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50


def _create_topic(stack: LocalStack, topic: str, partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    admin.create_topics([NewTopic(topic, num_partitions=partitions, replication_factor=1)])[topic].result(10)


def _transactional_producer(stack: LocalStack) -> Producer:
    producer = Producer({"bootstrap.servers": stack.bootstrap_servers, "transactional.id": "test"})
    producer.init_transactions(10)
    return producer


def _commit(stack: LocalStack, topic: str, values: list[bytes]) -> None:
    producer = _transactional_producer(stack)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value=value, partition=0)
    producer.commit_transaction(10)


def _read_committed(stack: LocalStack, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer(
        {"bootstrap.servers": stack.bootstrap_servers, "group.id": "test", "auto.offset.reset": "earliest"}
    )
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        return [message.value() for message in consumer.consume(count, timeout=10)]
    finally:
        consumer.close()


def _register(stack: LocalStack, subject: str) -> int:
    with SchemaRegistryClient({"url": stack.schema_registry_url}) as client:
        return int(client.register_schema(subject, Schema(_SCHEMA, "AVRO")))


def _latest_id(stack: LocalStack, subject: str) -> int:
    with SchemaRegistryClient({"url": stack.schema_registry_url}) as client:
        return int(client.get_latest_version(subject).schema_id or 0)


def _assert_children_end(program: str, folder: Path, sent: signal.Signals, processes: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == processes, "each server has a guard"

        parent.send_signal(sent)
        parent.wait(60)

    eventually(lambda: not any(map(_alive, children)), "all children have ended")


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


_STOP_SECONDS = 60.0


@pytest.mark.parametrize(
    ("program", "name", "log"),
    [("kafka.Kafka", "Kafka broker", "broker.log"), ("quarkus-run.jar", "schema registry", "registry.log")],
)
def test_a_server_that_ends_unexpectedly_is_named_and_no_process_is_left(
    tmp_path: Path, program: str, name: str, log: str
) -> None:
    ports = ["--kafka-port", "0", "--registry-port", "0", "--data-dir", str(tmp_path / "data")]
    with started({}, "local", "--instances", "0", *ports) as local:
        eventually(lambda: local.process.poll() is not None or "ready; Ctrl-C" in local.stdout, "the stack is ready")
        children = psutil.Process(local.process.pid).children(recursive=True)
        (server,) = [c for c in children if c.name() == "java" and any(program in part for part in c.cmdline())]
        server.kill()
        done = local.wait(_STOP_SECONDS)

    assert_refused(done, 1, f"{name} ended unexpectedly", str(tmp_path / "data" / "logs" / log))
    assert not any(child.is_running() for child in children)
