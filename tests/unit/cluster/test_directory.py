"""The table of application servers: owners, standbys and suspects; publishing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import pytest
from structlog.testing import capture_logs

from balance_service.avro.codec import AvroCodec
from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import NoRegistry
from balance_service.avro.schemas import load_schema
from balance_service.cluster.directory import (
    SUSPECT_AFTER_SECONDS,
    ApplicationServer,
    Directory,
    PublishedModel,
    ServerTable,
    key_columns,
)
from balance_service.cluster.signatures import RecordSignatures
from balance_service.engine.records import Role, TaskSnapshot
from balance_service.kafka.signing import HEADER, SharedSecret
from balance_service.model.keys import ColumnKey, CompositeKey
from tests.support.fakes import Clock, FakeRegistry
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confluent_kafka import Message

ANSWERING = frozenset({"RUNNING", "WAITING"})


def task(partition: int = 0, epoch: int = 1, **changed: Any) -> Mapping[str, Any]:
    return {**TaskSnapshot("balance", partition, Role.ACTIVE, "RUNNING", epoch, 7).record(), **changed}


def record(address: str, *tasks: Mapping[str, Any], incarnation: str = "i1", problem: str = "") -> Mapping[str, Any]:
    models = [
        {
            "name": "balance",
            "partitions": 4,
            "partitioner": "crc32",
            "numberKeys": False,
            "keyColumns": [],
            "keyFormat": "",
            "versions": [1],
            "problem": problem,
        }
    ]
    return {"address": address, "incarnation": incarnation, "models": models, "tasks": list(tasks)}


class Listener:
    """A server table with its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.table = ServerTable(self.clock)

    def hear(self, address: str, *tasks: Mapping[str, Any], live: bool = True) -> None:
        self.table.hear(address, record(address, *tasks), live=live)

    def hear_runs(self, *runs: str, seconds: float = 0.5) -> list[bool]:
        """Adds a record of each of these runs of `a:1`; returns after each whether the address is shared."""
        found = []
        for run in runs:
            self.clock.now += seconds
            self.table.hear("a:1", record("a:1", incarnation=run), live=True)
            found.append(self.table.is_shared("a:1"))
        return found

    def owner(self, partition: int = 0, read_model: str = "balance") -> str | None:
        """The address of the first owner."""
        return next(iter(self.owners(partition, read_model)), None)

    def owners(self, partition: int = 0, read_model: str = "balance") -> list[str]:
        return [server.address for server in self.table.owners(read_model, partition, ANSWERING)]

    def standbys(self) -> list[str]:
        return [server.address for server in self.table.standbys("balance", 0, ANSWERING)]

    def assigned(self) -> str | None:
        server = self.table.assigned("balance", 0)
        return None if server is None else server.address

    def only(self) -> ApplicationServer:
        (server,) = self.table.servers()
        return server


@pytest.fixture
def listener() -> Listener:
    return Listener()


def test_a_partition_without_records_has_no_owner(listener: Listener) -> None:
    listener.hear("a:1", task(partition=0))

    assert listener.owner(1) is None


def test_a_servers_record_is_kept_completely(listener: Listener) -> None:
    listener.hear("a:1", task(3, epoch=2))

    server = listener.only()

    assert (server.address, server.incarnation) == ("a:1", "i1")
    assert server.models == (PublishedModel("balance", 4, "crc32", versions=(1,)),)
    assert server.tasks == (TaskSnapshot("balance", 3, Role.ACTIVE, "RUNNING", 2, 7),)


def test_the_columns_of_composite_keys_are_published_and_read() -> None:
    key = CompositeKey((ColumnKey("card", is_number=False), ColumnKey("day", is_number=True)))
    models = (
        PublishedModel("spent-per-day", 4, "murmur2", key_columns=key_columns(key)),
        PublishedModel("balance", 4, "crc32", key_columns=key_columns(ColumnKey("customerId", is_number=False))),
    )
    codec, table = AvroCodec(FakeRegistry(), "servers", load_schema("ApplicationServer")), ServerTable(Clock())

    frame = codec.encode(ApplicationServer("a:1", "i1", models, ()).record())
    table.hear("a:1", codec.decode(frame), live=True)

    (server,) = table.servers()
    assert server.models == models
    assert [one.key_type for one in server.models] == [key, ColumnKey("the key", is_number=False)]


def test_a_refused_rebuild_names_the_running_instances_that_stop_it(listener: Listener) -> None:
    for address, problem in (("c:1", "no room"), ("a:1", "no room"), ("b:1", ""), ("d:1", "the view raised")):
        listener.table.hear(address, record(address, problem=problem), live=True)

    assert listener.table.problem("balance") == "no room (at a:1, c:1); the view raised (at d:1)"
    assert listener.table.problem("activity") == ""

    listener.clock.now += SUSPECT_AFTER_SECONDS + 1
    assert listener.table.problem("balance") == ""


def test_a_server_hosts_its_published_models_with_or_without_tasks(listener: Listener) -> None:
    listener.hear("a:1", task(0, readModel="leaderboard"))

    assert listener.only().hosts("balance")
    assert not listener.only().hosts("leaderboard")


def test_the_active_task_makes_its_server_the_owner(listener: Listener) -> None:
    listener.hear("a:1", task(0))
    listener.hear("b:1", task(1))

    assert (listener.owner(0), listener.owner(1)) == ("a:1", "b:1")


def test_a_standby_is_not_the_owner(listener: Listener) -> None:
    listener.hear("a:1", task(0, role="STANDBY", epoch=9))

    assert listener.owner(0) is None


def test_standbys_are_ordered_by_descending_position(listener: Listener) -> None:
    for address, position in (("a:1", 8), ("b:1", 10), ("c:1", 9)):
        listener.hear(address, task(0, role="STANDBY", position=position))
    listener.hear("d:1", task(0, position=11))

    assert listener.standbys() == ["b:1", "c:1", "a:1"]


def test_a_suspect_standby_is_not_listed(listener: Listener) -> None:
    listener.hear("silent:1", task(0, role="STANDBY"))
    listener.clock.now += SUSPECT_AFTER_SECONDS + 0.001
    listener.hear("a:1", task(0, role="STANDBY"))

    assert listener.standbys() == ["a:1"]


def test_a_task_of_another_read_model_is_no_owner(listener: Listener) -> None:
    listener.hear("a:1", task(0, readModel="leaderboard"))

    assert listener.owner(0) is None
    assert listener.owner(0, "leaderboard") == "a:1"


def test_the_highest_epoch_is_the_owner(listener: Listener) -> None:
    listener.hear("a:1", task(0, epoch=3))
    listener.hear("b:1", task(0, epoch=4))
    listener.hear("c:1", task(0, epoch=2))

    assert listener.owner(0) == "b:1"


def test_owners_are_ordered_by_descending_epoch(listener: Listener) -> None:
    listener.hear("a:1", task(0, epoch=3))
    listener.hear("b:1", task(0, epoch=4))
    listener.hear("c:1", task(0, epoch=2))

    assert listener.owners(0) == ["b:1", "a:1", "c:1"]


def test_a_claim_is_ignored_once_its_server_is_suspect(listener: Listener) -> None:
    listener.hear("real:1", task(0, epoch=3))
    listener.hear("forged:1", task(0, epoch=10**15))
    assert listener.owner(0) == "forged:1"

    listener.clock.now += SUSPECT_AFTER_SECONDS + 0.1
    listener.hear("real:1", task(0, epoch=3))

    assert listener.owners(0) == ["real:1"]
    assert [server.address for server, _ in listener.table.claims("balance", 0)] == ["real:1"]


def test_a_successor_owns_the_partition_of_a_silent_server(listener: Listener) -> None:
    listener.hear("old:1", task(0, epoch=4))
    listener.clock.now += SUSPECT_AFTER_SECONDS + 0.1
    listener.hear("new:1", task(0, epoch=5))

    assert listener.owner(0) == "new:1"


@pytest.mark.parametrize("state", ["CREATED", "RESTORING", "HALTED", "CLOSED"])
def test_a_task_in_a_state_without_answers_is_no_owner(listener: Listener, state: str) -> None:
    listener.hear("a:1", task(0, state=state))

    assert listener.owner(0) is None


@pytest.mark.parametrize("state", sorted(ANSWERING))
def test_a_task_in_an_answering_state_is_the_owner(listener: Listener, state: str) -> None:
    listener.hear("a:1", task(0, state=state))

    assert listener.owner(0) == "a:1"


def test_a_task_without_an_epoch_claims_nothing(listener: Listener) -> None:
    listener.hear("old:1", task(0, epoch=1))
    listener.hear("opening:1", task(0, epoch=0, state="RESTORING"))

    assert listener.owner(0) == "old:1"


def test_a_partition_is_assigned_to_its_opener_unless_another_instance_claims_it(listener: Listener) -> None:
    listener.hear("opening:1", task(0, epoch=0, state="RESTORING"))
    listener.hear("standby:1", task(0, role="STANDBY", epoch=0, state="TAILING"))
    while_opening = listener.assigned()
    listener.hear("z-owner:1", task(0, epoch=1))

    assert (while_opening, listener.assigned()) == ("opening:1", "z-owner:1")


def test_a_silent_server_has_no_partition_assigned(listener: Listener) -> None:
    listener.hear("opening:1", task(0, epoch=0, state="RESTORING"))
    listener.clock.now += SUSPECT_AFTER_SECONDS + 0.1

    assert listener.assigned() is None


def test_a_server_is_suspect_only_after_three_seconds_of_silence(listener: Listener) -> None:
    listener.hear("a:1", task(0))

    listener.clock.now += SUSPECT_AFTER_SECONDS
    assert listener.owner(0) == "a:1"
    listener.clock.now += 0.001
    assert listener.owner(0) is None
    assert listener.only().is_suspect(listener.clock.now)


def test_a_suspect_that_publishes_again_is_routed_to_again(listener: Listener) -> None:
    listener.hear("a:1", task(0))
    listener.clock.now += 60
    listener.hear("a:1", task(0))

    assert listener.owner(0) == "a:1"
    assert not listener.only().is_suspect(listener.clock.now)


def test_a_record_from_before_the_start_proves_nothing(listener: Listener) -> None:
    listener.hear("a:1", task(0), live=False)

    assert listener.only().is_suspect(listener.clock.now)
    assert listener.owner(0) is None


def test_a_server_from_before_the_start_is_routed_to_once_it_publishes(listener: Listener) -> None:
    listener.hear("a:1", task(0), live=False)
    listener.hear("a:1", task(0))

    assert listener.owner(0) == "a:1"


def test_a_dead_server_from_before_the_start_does_not_hide_a_live_owner(listener: Listener) -> None:
    # After a rebuild epochs begin again at 1, while a killed instance's record stays in the topic forever.
    listener.hear("dead:1", task(0, epoch=9), live=False)
    listener.hear("a:1", task(0, epoch=1))

    assert listener.owner(0) == "a:1"


def test_a_silent_server_from_before_the_start_is_forgotten_after_a_minute(listener: Listener) -> None:
    listener.hear("silent:1", task(0), live=False)
    listener.hear("a:1", task(1))

    listener.clock.now += 59
    listener.hear("a:1", task(1))
    known = [server.address for server in listener.table.servers()]
    listener.clock.now += 2
    listener.hear("a:1", task(1))

    assert known == ["a:1", "silent:1"]
    assert [server.address for server in listener.table.servers()] == ["a:1"]


def test_a_farewell_removes_its_server(listener: Listener) -> None:
    listener.hear("a:1", task(0))
    listener.hear("b:1", task(1))

    listener.table.hear("a:1", None, live=True)

    assert [server.address for server in listener.table.servers()] == ["b:1"]
    assert listener.owner(0) is None


def test_read_models_whose_instances_have_left_are_known_for_an_hour(listener: Listener) -> None:
    """A query for one is 503, which may be repeated, and not 404."""
    listener.hear("a:1", task(0))
    listener.table.hear("a:1", None, live=True)
    listener.clock.now += 3_599
    listener.table.hear("b:1", {**record("b:1"), "models": []}, live=True)
    known = set(listener.table.models())
    listener.clock.now += 2
    listener.table.hear("b:1", {**record("b:1"), "models": []}, live=True)

    assert (known, set(listener.table.models())) == ({"balance"}, set())


def test_a_generation_that_only_a_former_instance_hosted_is_unknown_once_another_hosts_the_read_model(
    listener: Listener,
) -> None:
    first = record("a:1")
    listener.table.hear("a:1", {**first, "models": [{**first["models"][0], "name": "balance.g7"}]}, live=True)
    listener.table.hear("a:1", None, live=True)
    between = set(listener.table.models())
    listener.hear("b:1")

    assert (between, set(listener.table.models())) == ({"balance.g7"}, {"balance"})


def test_a_read_model_is_unknown_once_its_last_instance_is_back_without_it(listener: Listener) -> None:
    listener.hear("a:1")
    listener.table.hear("a:1", None, live=True)
    listener.table.hear("a:1", {**record("a:1", incarnation="i2"), "models": []}, live=True)

    assert not listener.table.models()


def test_a_farewell_of_the_past_makes_no_read_model_known(listener: Listener) -> None:
    listener.hear("a:1", live=False)
    listener.table.hear("a:1", None, live=False)

    assert not listener.table.models()


def test_the_farewell_of_an_unknown_server_changes_nothing(listener: Listener) -> None:
    listener.hear("a:1", task(0))

    listener.table.hear("x:1", None, live=True)

    assert listener.owner(0) == "a:1"


def test_a_new_incarnation_replaces_the_tasks_of_its_predecessor(listener: Listener) -> None:
    listener.hear("a:1", task(0), task(1))

    listener.table.hear("a:1", record("a:1", incarnation="i2"), live=True)

    assert listener.only().incarnation == "i2"
    assert listener.owner(0) is None


def test_two_instances_that_publish_alternately_share_their_address(listener: Listener) -> None:
    listener.hear_runs("x", "y", "x", "y", "x", "y", "x", "y")

    assert listener.table.is_shared("a:1")
    assert not listener.table.is_shared("b:1")


@pytest.mark.shows("shared-address")
def test_a_shared_address_is_detected_within_four_seconds(listener: Listener) -> None:
    assert listener.hear_runs("x", "y", "x", "y", "x", "y", "x", "y").index(True) < 8


def test_a_restarted_instance_does_not_share_an_address_with_its_predecessor(listener: Listener) -> None:
    listener.hear("a:1", live=False)

    assert not any(listener.hear_runs(*10 * ["killed"], *10 * ["next"], *10 * ["last"]))


def test_repeated_restarts_do_not_share_an_address(listener: Listener) -> None:
    assert not any(listener.hear_runs(*(f"run {n}" for n in range(50))))


def test_in_flight_records_of_a_killed_instance_do_not_share_an_address_with_its_successor(listener: Listener) -> None:
    listener.hear_runs(*5 * ["killed"])

    at_once = listener.hear_runs("next", "killed", "next", "killed", "next", "killed", seconds=0.01)

    assert not any([*at_once, *listener.hear_runs(*10 * ["next"], seconds=1)])


def test_records_from_before_the_start_do_not_share_an_address(listener: Listener) -> None:
    for run in 5 * ("x", "y"):
        listener.clock.now += 0.5
        listener.table.hear("a:1", record("a:1", incarnation=run), live=False)

    assert not listener.table.is_shared("a:1")


def test_an_address_is_no_longer_shared_three_seconds_after_the_other_instance_stopped(listener: Listener) -> None:
    assert listener.hear_runs(*6 * ("x", "y"))[-1]

    healed = listener.hear_runs(*4 * ["y"], seconds=1)

    assert healed == [True, True, False, False]
    assert not any(listener.hear_runs(*4 * ["y"], seconds=1))


def test_an_address_stays_shared_while_no_record_arrives(listener: Listener) -> None:
    listener.hear_runs(*6 * ("x", "y"))
    listener.clock.now += 60
    listener.hear("b:1")

    assert listener.table.is_shared("a:1")


def test_an_address_is_no_longer_shared_after_the_farewell_of_the_other_instance(listener: Listener) -> None:
    listener.hear_runs(*6 * ("x", "y"))

    listener.table.hear("a:1", None, live=True)

    assert not listener.table.is_shared("a:1")
    assert not any(listener.hear_runs(*4 * ["y"]))


def test_the_number_of_remembered_runs_is_bounded(listener: Listener) -> None:
    listener.hear_runs(*(f"run {n}" for n in range(1_000)), seconds=0.001)

    assert len(listener.table._runs["a:1"]._heard_at) < 10


def test_a_server_is_forgotten_after_an_hour_of_silence(listener: Listener) -> None:
    listener.hear("a:1", task(0))
    listener.clock.now += 3601
    listener.hear("b:1", task(1))

    assert [server.address for server in listener.table.servers()] == ["b:1"]


def test_servers_are_listed_by_address(listener: Listener) -> None:
    for address in ("c:1", "a:1", "b:1"):
        listener.hear(address)

    assert [server.address for server in listener.table.servers()] == ["a:1", "b:1", "c:1"]


def test_a_returned_list_of_servers_does_not_change(listener: Listener) -> None:
    listener.hear("a:1", task(0))
    taken = listener.table.servers()

    listener.hear("b:1", task(1))

    assert [server.address for server in taken] == ["a:1"]


def test_an_outdated_record_that_could_not_be_published_is_dropped() -> None:
    unreachable: dict[str, object] = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    directory = Directory(
        consumer_config={**unreachable, "group.id": "any"},
        producer_config={**unreachable, "message.timeout.ms": 300_000},
        topic="servers",
        address="a:1",
        incarnation="i1",
        codec=AvroCodec(FakeRegistry(), "servers", load_schema("ApplicationServer")),
        signatures=RecordSignatures(None, "servers"),
        models=list,
        tasks=list,
        table=ServerTable(),
    )

    def refused() -> list[str]:
        return [line["error"] for line in logs if line["event"] == "publishing to the directory failed"]

    with capture_logs() as logs:
        directory.start()
        eventually(lambda: bool(refused()), "a record is dropped")
        # Each second it publishes another record.
        time.sleep(2.5)
        directory.stop(5.0)

    (why,) = refused()
    assert "timed out" in why


def test_the_spread_counts_the_running_instances_that_host_the_read_model(listener: Listener) -> None:
    def hear(address: str, *partitions: int, role: str = "ACTIVE") -> None:
        listener.hear(address, *(task(partition, role=role) for partition in partitions))

    hear("a:1", 0, 1, 2)
    assert listener.table.spread("balance", "balance") == 0
    hear("b:1", 3)
    hear("c:1", 0, 1, 2, 3, role="STANDBY")
    assert listener.table.spread("balance", "balance") == 3
    listener.clock.now += 60
    hear("a:1", 0, 1, 2)
    hear("b:1", 3)
    assert listener.table.spread("balance", "balance") == 2
    assert listener.table.spread("other", "other") == 0


def test_servers_that_were_heard_within_a_time_are_listed() -> None:
    listener = Listener()
    listener.hear("a:1")
    listener.hear("never-heard:1", live=False)
    listener.clock.now += 4
    listener.hear("b:1")

    def heard_within(seconds: float) -> list[str]:
        return [server.address for server in listener.table.heard_within(seconds)]

    assert (heard_within(3), heard_within(4)) == (["b:1"], ["a:1", "b:1"])
    assert [server.address for server in listener.table.running()] == ["b:1"]


class _Message:
    """A record of the directory's topic."""

    def __init__(self, key: bytes, value: bytes, headers: Mapping[str, bytes]) -> None:
        self._parts = key, value, [*headers.items()]

    def key(self) -> bytes:
        return self._parts[0]

    def value(self) -> bytes:
        return self._parts[1]

    def headers(self) -> list[tuple[str, bytes]]:
        return self._parts[2]

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 0


@pytest.mark.parametrize("secret", [None, SharedSecret("a secret of all instances")])
def test_an_instance_of_another_version_is_heard_once_a_trusted_text_of_its_schema_is_read(
    secret: SharedSecret | None,
) -> None:
    unreachable: dict[str, object] = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    schema = load_schema("ApplicationServer")
    theirs = {**schema, "fields": [*schema["fields"], {"name": "new", "type": "long", "default": 0}]}
    other = OwnSchemas(NoRegistry())
    value = other.codec("servers", theirs).encode({**record("b:1"), "new": 7})
    ((key, text),) = other.records("servers").items()
    signatures, table = RecordSignatures(secret, "servers"), ServerTable()
    directory = Directory(
        consumer_config={**unreachable, "group.id": "any"},
        producer_config=unreachable,
        topic="servers",
        address="a:1",
        incarnation="i1",
        codec=OwnSchemas(NoRegistry()).codec("servers", schema),
        signatures=signatures,
        models=list,
        tasks=list,
        table=table,
    )

    def hear(key: bytes, value: bytes, headers: Mapping[str, bytes]) -> list[str]:
        directory._follow(cast("Message", _Message(key, value, headers)))
        return [server.address for server in table.servers()]

    assert hear(b"b:1", value, signatures.sign("b:1", value)) == []
    if secret is not None:
        hear(key, text, {})
        hear(key, text, {HEADER: b"\xff"})
        assert hear(b"b:1", value, signatures.sign("b:1", value)) == []
    hear(key, text, signatures.sign_text(key, text))
    assert hear(b"b:1", value, signatures.sign("b:1", value)) == ["b:1"]
