"""The table of application servers: who may be routed to, and who owns what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema
from balance_service.cluster.directory import Directory
from balance_service.cluster.record_signatures import RecordSignatures
from balance_service.cluster.server_table import SUSPECT_AFTER_SECONDS, PublishedModel, PublishedTask, ServerTable
from tests.support.fakes import Clock, FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.cluster.server_table import ApplicationServer

ANSWERING = frozenset({"RUNNING", "WAITING"})


def task(partition: int = 0, epoch: int = 1, **changed: Any) -> Mapping[str, Any]:
    return {
        "readModel": "balance",
        "partition": partition,
        "role": "ACTIVE",
        "state": "RUNNING",
        "epoch": epoch,
        "position": 7,
        **changed,
    }


def record(address: str, *tasks: Mapping[str, Any], incarnation: str = "i1") -> Mapping[str, Any]:
    models = [{"name": "balance", "partitions": 4}]
    return {"address": address, "incarnation": incarnation, "models": models, "tasks": list(tasks)}


class Listener:
    """A table and the clock by which it listens."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.table = ServerTable(self.clock)

    def hear(self, address: str, *tasks: Mapping[str, Any], live: bool = True) -> None:
        self.table.hear(address, record(address, *tasks), live=live)

    def hear_runs(self, *runs: str, seconds: float = 0.5) -> list[bool]:
        """A record of each of these runs of `a:1`, one after the other; whether the address is shared after each."""
        found = []
        for run in runs:
            self.clock.now += seconds
            self.table.hear("a:1", record("a:1", incarnation=run), live=True)
            found.append(self.table.is_shared("a:1"))
        return found

    def owner(self, partition: int = 0, read_model: str = "balance") -> str | None:
        """The first that would be asked."""
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


def test_nobody_owns_a_partition_nobody_spoke_of(listener: Listener) -> None:
    listener.hear("a:1", task(partition=0))

    assert listener.owner(1) is None


def test_what_a_server_said_is_kept_whole(listener: Listener) -> None:
    listener.hear("a:1", task(3, epoch=2))

    server = listener.only()

    assert (server.address, server.incarnation) == ("a:1", "i1")
    assert server.models == (PublishedModel("balance", 4),)
    assert server.tasks == (PublishedTask("balance", 3, "ACTIVE", "RUNNING", 2, 7),)


def test_a_server_hosts_what_it_says_whether_it_has_tasks_of_that_or_not(listener: Listener) -> None:
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


def test_of_several_standbys_the_one_that_is_furthest_comes_first(listener: Listener) -> None:
    for address, position in (("a:1", 8), ("b:1", 10), ("c:1", 9)):
        listener.hear(address, task(0, role="STANDBY", position=position))
    listener.hear("d:1", task(0, position=11))

    assert listener.standbys() == ["b:1", "c:1", "a:1"]


def test_a_standby_that_is_suspect_is_not_asked(listener: Listener) -> None:
    listener.hear("silent:1", task(0, role="STANDBY"))
    listener.clock.now += SUSPECT_AFTER_SECONDS + 0.001
    listener.hear("a:1", task(0, role="STANDBY"))

    assert listener.standbys() == ["a:1"]


def test_the_task_of_another_read_model_owns_nothing_here(listener: Listener) -> None:
    listener.hear("a:1", task(0, readModel="leaderboard"))

    assert listener.owner(0) is None
    assert listener.owner(0, "leaderboard") == "a:1"


def test_the_highest_epoch_is_the_owner(listener: Listener) -> None:
    listener.hear("a:1", task(0, epoch=3))
    listener.hear("b:1", task(0, epoch=4))
    listener.hear("c:1", task(0, epoch=2))

    assert listener.owner(0) == "b:1"


def test_older_epochs_come_after_the_highest(listener: Listener) -> None:
    listener.hear("a:1", task(0, epoch=3))
    listener.hear("b:1", task(0, epoch=4))
    listener.hear("c:1", task(0, epoch=2))

    assert listener.owners(0) == ["b:1", "a:1", "c:1"]


def test_a_claim_that_is_not_renewed_keeps_nobody_out_once_its_server_is_suspect(listener: Listener) -> None:
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
def test_a_task_that_does_not_answer_is_not_routed_to(listener: Listener, state: str) -> None:
    listener.hear("a:1", task(0, state=state))

    assert listener.owner(0) is None


@pytest.mark.parametrize("state", sorted(ANSWERING))
def test_a_task_that_answers_is_routed_to(listener: Listener, state: str) -> None:
    listener.hear("a:1", task(0, state=state))

    assert listener.owner(0) == "a:1"


def test_a_task_without_an_epoch_claims_nothing(listener: Listener) -> None:
    listener.hear("old:1", task(0, epoch=1))
    listener.hear("opening:1", task(0, epoch=0, state="RESTORING"))

    assert listener.owner(0) == "old:1"


def test_whoever_opens_a_partition_has_it_unless_another_claims_it(listener: Listener) -> None:
    listener.hear("opening:1", task(0, epoch=0, state="RESTORING"))
    listener.hear("standby:1", task(0, role="STANDBY", epoch=0, state="TAILING"))
    while_opening = listener.assigned()
    listener.hear("z-owner:1", task(0, epoch=1))

    assert (while_opening, listener.assigned()) == ("opening:1", "z-owner:1")


def test_a_silent_server_opens_nothing(listener: Listener) -> None:
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


def test_a_suspect_that_speaks_again_is_routed_to_again(listener: Listener) -> None:
    listener.hear("a:1", task(0))
    listener.clock.now += 60
    listener.hear("a:1", task(0))

    assert listener.owner(0) == "a:1"
    assert not listener.only().is_suspect(listener.clock.now)


def test_a_record_from_before_the_listener_started_proves_nothing(listener: Listener) -> None:
    listener.hear("a:1", task(0), live=False)

    assert listener.only().is_suspect(listener.clock.now)
    assert listener.owner(0) is None


def test_a_server_known_from_before_is_routed_to_once_it_is_heard(listener: Listener) -> None:
    listener.hear("a:1", task(0), live=False)
    listener.hear("a:1", task(0))

    assert listener.owner(0) == "a:1"


def test_a_dead_server_known_from_before_does_not_keep_a_live_owner_out(listener: Listener) -> None:
    # After a rebuild epochs begin again at 1, while a killed instance's record stays in the topic for ever.
    listener.hear("dead:1", task(0, epoch=9), live=False)
    listener.hear("a:1", task(0, epoch=1))

    assert listener.owner(0) == "a:1"


def test_a_server_known_from_before_is_known_until_it_had_time_to_speak(listener: Listener) -> None:
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


def test_the_farewell_of_a_stranger_changes_nothing(listener: Listener) -> None:
    listener.hear("a:1", task(0))

    listener.table.hear("x:1", None, live=True)

    assert listener.owner(0) == "a:1"


def test_a_new_incarnation_replaces_what_its_predecessor_said(listener: Listener) -> None:
    listener.hear("a:1", task(0), task(1))

    listener.table.hear("a:1", record("a:1", incarnation="i2"), live=True)

    assert listener.only().incarnation == "i2"
    assert listener.owner(0) is None


def test_two_instances_that_publish_in_turns_share_their_address(listener: Listener) -> None:
    listener.hear_runs("x", "y", "x", "y", "x", "y", "x", "y")

    assert listener.table.is_shared("a:1")
    assert not listener.table.is_shared("b:1")


def test_a_shared_address_is_told_within_four_seconds(listener: Listener) -> None:
    assert listener.hear_runs("x", "y", "x", "y", "x", "y", "x", "y").index(True) < 8


def test_a_restart_shares_no_address_with_its_predecessor(listener: Listener) -> None:
    listener.hear("a:1", live=False)

    assert not any(listener.hear_runs(*10 * ["killed"], *10 * ["next"], *10 * ["last"]))


def test_restarts_in_a_row_share_no_address(listener: Listener) -> None:
    assert not any(listener.hear_runs(*(f"run {n}" for n in range(50))))


def test_what_a_killed_instance_had_under_way_shares_no_address_with_its_successor(listener: Listener) -> None:
    listener.hear_runs(*5 * ["killed"])

    at_once = listener.hear_runs("next", "killed", "next", "killed", "next", "killed", seconds=0.01)

    assert not any([*at_once, *listener.hear_runs(*10 * ["next"], seconds=1)])


def test_records_from_before_the_listener_started_share_no_address(listener: Listener) -> None:
    for run in 5 * ("x", "y"):
        listener.clock.now += 0.5
        listener.table.hear("a:1", record("a:1", incarnation=run), live=False)

    assert not listener.table.is_shared("a:1")


def test_an_address_is_one_instances_again_three_seconds_after_the_other_has_gone(listener: Listener) -> None:
    assert listener.hear_runs(*6 * ("x", "y"))[-1]

    healed = listener.hear_runs(*4 * ["y"], seconds=1)

    assert healed == [True, True, False, False]
    assert not any(listener.hear_runs(*4 * ["y"], seconds=1))


def test_an_address_stays_shared_while_nothing_is_heard(listener: Listener) -> None:
    listener.hear_runs(*6 * ("x", "y"))
    listener.clock.now += 60
    listener.hear("b:1")

    assert listener.table.is_shared("a:1")


def test_an_address_is_one_instances_again_once_the_other_says_farewell(listener: Listener) -> None:
    listener.hear_runs(*6 * ("x", "y"))

    listener.table.hear("a:1", None, live=True)

    assert not listener.table.is_shared("a:1")
    assert not any(listener.hear_runs(*4 * ["y"]))


def test_runs_that_are_forged_by_the_thousand_are_not_all_kept(listener: Listener) -> None:
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


def test_a_reader_keeps_what_it_took_while_the_listener_hears_more(listener: Listener) -> None:
    listener.hear("a:1", task(0))
    taken = listener.table.servers()

    listener.hear("b:1", task(1))

    assert [server.address for server in taken] == ["a:1"]


def test_what_could_not_be_published_at_once_is_not_told_to_peers_once_it_is_old() -> None:
    nobody: dict[str, object] = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    directory = Directory(
        consumer_config={**nobody, "group.id": "any"},
        producer_config={**nobody, "message.timeout.ms": 300_000},
        topic="servers",
        address="a:1",
        incarnation="i1",
        codec=AvroCodec(FakeRegistry(), "servers", load_schema("ApplicationServer")),
        signatures=RecordSignatures(None, "servers"),
        models=[],
        tasks=list,
        table=ServerTable(),
    )
    failed: list[KafkaError | None] = []

    directory._producer.produce("servers", b"", "a:1", partition=0, on_delivery=lambda error, _: failed.append(error))
    directory._producer.flush(10.0)
    directory._consumer.close()

    assert [error and error.code() for error in failed] == [KafkaError._MSG_TIMED_OUT]
