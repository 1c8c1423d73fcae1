"""The troubles of a service become a few causes: each once, with its remedy and its consequences."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.processor import OWN_CODE
from balance_service.hosting.causes import Cause, Kind, Urgency, starting, unknown_settings
from balance_service.hosting.diagnosis import Known, causes_of
from balance_service.http.operations import ApplicationServer, HostedModel, OpenDeadLetters, PublishedTask
from balance_service.model.versions import LACKS_VERSION
from balance_service.process.package import resource
from balance_service.process.runtime import iso_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE, PEER, THIRD = "a:1", "b:1", "c:1"
NOW_MS = 1_767_225_600_000
WAITS = OpenDeadLetters(cause="key-null", status="waiting", needs_decision=True, count=3)
HEALS = OpenDeadLetters(cause="schema-id-unknown", status="scheduled", needs_decision=False, count=2)
STANDS = "partition {0} has been at position 5{0} since 2026-01-01T00:00:00Z, and is 7 records behind"
LONG_AGO = 3600.0
PLAIN_503 = "Here, plain queries get 503; those with `maxAge` get an old answer"


def task(partition: int = 0, state: str = "RUNNING", *, seconds: float = 3600, stage: str = "m", **more: Any) -> Any:
    """A task as a status has it. `seconds`: how long it has been in its state."""
    usual: dict[str, Any] = {
        "task": f"{stage}_{partition}",
        "read_model": stage,
        "partition": partition,
        "role": "active",
        "state": state,
        "answers": True,
        "epoch": 1,
        "position": 5,
        "lag": 0,
        "lag_seconds": 0,
        "lag_seconds_is_least": False,
        "reason": "",
        "since": iso_time(NOW_MS - int(1000 * seconds)),
        "restored": 0,
        "to_restore": 0,
        "seconds_left": None,
        "dead_letters": [],
    }
    return PublishedTask(**{**usual, **more})


def server(address: str, *tasks: Any, silent: int | None = 0, is_shared: bool = False) -> Any:
    return ApplicationServer(
        application_server=address,
        incarnation="i",
        suspect=silent != 0,
        silent_seconds=silent,
        shared=is_shared,
        models=["m"],
        tasks=[*tasks],
    )


def model(name: str = "m", status: Any = "serving", *, seconds: float = 60, rules: Sequence[int] = ()) -> Any:
    since = iso_time(NOW_MS - int(1000 * seconds))
    return HostedModel(
        name=name,
        model=name.partition(".g")[0],
        status=status,
        since=since,
        read_otherwise=[*rules],
        source="t",
        partitions=2,
        standby_replicas=0,
    )


def status(*own: Any, **more: Any) -> dict[str, Any]:
    """The status of an instance, which hears itself."""
    usual: dict[str, Any] = {"reasons": [], "models": [model()], "unhosted": [], "endsAgeSeconds": 0, "peers": []}
    usual |= more
    servers = [server(HERE, *own, silent=usual.pop("silent_here", 0)), *usual.pop("peers")]
    return {"applicationServer": HERE, "tasks": [*own], "applicationServers": servers, **usual}


def causes(
    known: dict[str, Any],
    *,
    without_broker: float | None = None,
    answers: float | None = LONG_AGO,
    heard: float | None = LONG_AGO,
    unowned: Mapping[str, float] | None = None,
    session: int = 10,
    **more: Any,
) -> list[Cause]:
    """Returns the causes of a status. Times are seconds ago."""

    def ms(seconds: float | None) -> int | None:
        return None if seconds is None else NOW_MS - int(1000 * seconds)

    since = {name: NOW_MS - int(1000 * seconds) for name, seconds in (unowned or {}).items()}
    silent = {one.application_server: one.silent_seconds for one in known["applicationServers"]}
    here: dict[str, Any] = {"brokers": "k:9092", "now_ms": NOW_MS, "session_timeout_ms": 1000 * session}
    here |= {"silent_ms": ms(without_broker), "settled_ms": ms(answers), "heard_ms": ms(heard)}
    here["heard"] = {address: NOW_MS - 1000 * seconds for address, seconds in silent.items() if seconds is not None}
    return causes_of(known, Known(**here, unowned=since, **more))


def section(cause: Cause) -> str:
    return cause.shown().section


def refused() -> Cause:
    return Cause(Kind.REFUSED, Urgency.NOW, "grant this user Read", "Do what it says")


def only(found: Sequence[Cause]) -> Cause:
    assert len(found) == 1, [cause.what for cause in found]
    return found[0]


def test_a_healthy_service_has_no_cause() -> None:
    known = status(
        task(0, dead_letters=[HEALS]), task(1, role="standby", state="TAILING"), peers=[server(PEER, task(1))]
    )

    assert causes(known) == []


def test_a_broker_that_is_away_is_the_only_cause_and_what_follows_is_folded_away() -> None:
    opened_again = task(1, "RESTORING", reason="Kafka at k:9092 does not answer")
    known = status(
        task(0),
        opened_again,
        reasons=["the group of t has not confirmed this instance lately"],
        unhosted=["m_0", "m_1"],
        endsAgeSeconds=70,
        silent_here=70,
        peers=[server(PEER, task(1), silent=70), server(THIRD, silent=70)],
    )

    cause = only(
        causes(known, without_broker=70, own=[Cause(kind=Kind.UNHEARD, urgency=Urgency.NOW, what="x", action="y")])
    )

    assert (cause.kind, cause.urgency, cause.heals) == ("broker", Urgency.NOW, False)
    assert cause.what == "Kafka at k:9092 does not answer this instance. " + PLAIN_503
    assert cause.action.startswith("Restore it, or the network to it: nothing is lost")
    assert cause.since_ms == NOW_MS - 70_000
    assert cause.tasks == ("m_0", "m_1")
    assert cause.follows == (
        "nothing is known about b:1, c:1 any more",
        "m_1 is RESTORING, and is opened by itself",
        "lags are not known",
    )


@pytest.mark.parametrize(("seconds", "urgency", "heals"), [(4, Urgency.NONE, True), (10, Urgency.NOW, False)])
def test_a_broker_that_is_away_for_seconds_is_not_urgent(seconds: float, urgency: Urgency, *, heals: bool) -> None:
    cause = only(causes(status(task()), without_broker=seconds))

    assert (cause.urgency, cause.heals) == (urgency, heals)


def test_brokers_that_refuse_the_connection_are_no_network_to_restore() -> None:
    cause = only(causes(status(task()), without_broker=70, refusal="SSL handshake failed: certificate has expired"))

    assert cause.kind == "broker"
    assert cause.what == (
        "Kafka at k:9092 and this instance do not accept each other: SSL handshake failed: certificate has expired. "
        + PLAIN_503
    )
    assert cause.action.startswith("Correct certificates and passwords")


def test_a_missing_grant_stays_a_cause_of_its_own_without_a_broker() -> None:
    known = status(task(), reasons=["grant this user Read", "this instance joins the group of t"])

    broker, grant = causes(known, without_broker=70, own=[refused()])

    assert grant == refused()
    assert broker.follows == ("lags are not known",)


def test_a_process_that_was_suspended_has_time_to_hear_from_the_broker_again() -> None:
    resumed = only(causes(status(task(), silent_here=70), without_broker=70, answers=1))

    assert (resumed.kind, resumed.urgency, resumed.heals) == ("broker", Urgency.NONE, True)


def test_a_task_that_is_halted_here_is_a_cause_of_its_own_although_the_broker_is_away() -> None:
    halted = task(1, "HALTED", reason="topic t was recreated")

    found = causes(
        status(task(0), halted, peers=[server(PEER, task(2, "HALTED", reason="as heard"))]), without_broker=70
    )

    assert [cause.kind for cause in found] == ["broker", "halted"]


def test_an_instance_never_reports_that_it_is_silent_itself() -> None:
    assert causes(status(task(), silent_here=70)) == []


def test_a_killed_instance_is_one_cause_with_its_partitions_without_an_answering_instance() -> None:
    left = server(PEER, task(1), task(2), task(3), task(4), silent=5)
    opened = [task(2, "RESTORING", seconds=2, epoch=2, seconds_left=3.4), task(4, "CLOSED", seconds=2, epoch=2)]
    known = status(task(0), *opened, peers=[left], unhosted=["m_1"])

    cause = only(causes(known, unowned={"m_1": 2}))

    assert (cause.kind, cause.urgency, section(cause)) == ("silent", Urgency.SOON, "BalanceInstanceDown")
    assert cause.what == "b:1 is not heard of; 3 of its partitions have no owner yet that answers"
    assert cause.action.startswith("Look whether its process runs, and start it again, unless it was removed. The")
    assert cause.since_ms == NOW_MS - 5000
    assert (cause.tasks, cause.servers) == (("m_1", "m_2", "m_4"), (PEER,))
    assert cause.follows == (
        "m_1 has no owner: queries for its keys get 503, unless a standby may answer",
        "m_2 is opened at a:1, about 3 s left",
        "m_4 is opened at a:1",
    )


def test_a_killed_instance_whose_partitions_have_other_owners_leaves_nothing_to_wait_for() -> None:
    known = status(task(0), task(1), peers=[server(PEER, task(1), silent=40)])

    cause = only(causes(known))

    assert (cause.tasks, cause.action.rpartition(". ")[2]) == ((), "The others have taken its partitions over")
    known = status(task(0), peers=[server(PEER, task(1), silent=90)], unhosted=["m_1"])
    (_, never) = causes(known, unowned={"m_1": 85})
    assert "The others" not in never.action


@pytest.mark.parametrize(("peer", "is_told"), [(4, False), (5, True)])
def test_an_instance_that_loses_the_broker_does_not_call_others_silent(peer: int, *, is_told: bool) -> None:
    found = causes(status(task(), silent_here=3, peers=[server(PEER, task(1), silent=peer)], unhosted=["m_1"]))

    assert [cause.kind for cause in found] == ["silent"] * is_told


@pytest.mark.parametrize(("seconds", "is_told"), [(9, False), (10, True)])
def test_an_instance_that_starts_has_time_to_hear_of_others(seconds: float, *, is_told: bool) -> None:
    found = causes(status(task(), peers=[server(PEER, silent=None)]), heard=seconds)

    assert bool(found) == is_told


def test_an_instance_that_ended_before_this_one_started_is_mentioned_only() -> None:
    cause = only(causes(status(task(), peers=[server(PEER, task(0), silent=None)])))

    assert (cause.urgency, cause.since_ms) == (Urgency.NONE, None)
    assert cause.what == "b:1 is not heard of since this instance was started"


def test_a_partition_that_moves_is_not_urgent_before_it_has_had_no_owner_for_long() -> None:
    known = status(task(0), unhosted=["m_1"])

    young, old = only(causes(known, unowned={"m_1": 29})), only(causes(known, unowned={"m_1": 30}))

    assert (young.urgency, young.heals, young.action[:4]) == (Urgency.NONE, True, "Wait")
    assert (old.urgency, old.heals, section(old)) == (Urgency.NOW, False, "BalancePartitionUnanswered")
    assert old.what == "m_1 is at no instance, and queries for its keys get 503"
    # As seen for the first time.
    assert only(causes(known)).urgency is Urgency.NONE


def test_plain_queries_are_answered_until_the_session_has_timed_out() -> None:
    assert PLAIN_503 not in only(causes(status(task()), without_broker=50, session=60)).what
    assert PLAIN_503 in only(causes(status(task()), without_broker=60, session=60)).what


def test_partitions_move_after_the_timeout_of_the_session() -> None:
    known = status(task(0), peers=[server(PEER, task(1), silent=70)], unhosted=["m_1"])

    moving = only(causes(known, unowned={"m_1": 67}, session=60))
    assert (moving.kind, moving.tasks) == ("silent", ("m_1",))
    assert "take its partitions over within 80 s" in moving.action
    assert [cause.kind for cause in causes(known, unowned={"m_1": 80}, session=60)] == ["unowned", "silent"]


@pytest.mark.parametrize(
    ("heard", "kinds"), [(None, []), (2, ["unowned"]), (29, ["unowned"]), (30, ["unowned", "silent"])]
)
def test_after_an_outage_other_instances_and_their_partitions_have_time_to_be_heard_again(
    heard: float | None, kinds: list[str]
) -> None:
    peers = [server(PEER, task(1), silent=300), server(THIRD, task(2), silent=300)]
    known = status(task(0), peers=peers, unhosted=["m_1", "m_2"])

    found = causes(known, heard=heard, unowned={} if heard is None else {"m_1": heard, "m_2": heard})

    assert list(dict.fromkeys(cause.kind for cause in found)) == kinds
    assert not any(cause.urgency for cause in found) or heard == 30
    # One that became silent later has no excuse.
    later = status(task(0), peers=[server(PEER, silent=5)])
    assert [cause.kind for cause in causes(later, heard=heard)] == (["silent"] if (heard or 0) > 5 else [])


@pytest.mark.parametrize(
    ("answers", "urgency"), [(2, Urgency.NONE), (10, Urgency.SOON), (30, Urgency.NOW), (None, Urgency.NOW)]
)
def test_what_an_outage_has_caused_has_time_to_heal_after_it(answers: float | None, urgency: Urgency) -> None:
    failed = task(0, "CLOSED", seconds=300, reason="Kafka at k:9092 does not answer")
    still = task(1, seconds=300, reason=f"m_1 stands still: {STANDS.format(1)}")
    waits = task(2, "WAITING", seconds=300, reason="Kafka at k:9092 does not answer")

    found = {cause.kind: cause.urgency for cause in causes(status(failed, still, waits), answers=answers)}

    stands, waiting = (Urgency.NONE, Urgency.NONE) if not urgency else (Urgency.NOW, Urgency.SOON)
    assert found == {"restoring": urgency, "stands-still": stands, "waiting": waiting}


def test_a_partition_of_a_read_model_that_only_others_host_ages_too() -> None:
    known = status(task(0), peers=[server(PEER, task(0, stage="n"), silent=90)])

    old = causes(known, unowned={"n_0": 85})[0]

    assert (old.kind, old.urgency, old.tasks) == ("unowned", Urgency.NOW, ("n_0",))


def test_a_killed_instance_does_not_excuse_a_partition_that_has_had_no_owner_for_long() -> None:
    known = status(task(0), peers=[server(PEER, task(1), silent=90)], unhosted=["m_1"])

    found = causes(known, unowned={"m_1": 85})

    assert [(cause.kind, cause.urgency) for cause in found] == [("unowned", Urgency.NOW), ("silent", Urgency.SOON)]


def test_a_dropped_generation_of_a_silent_instance_is_not_missed() -> None:
    known = status(task(0), peers=[server(PEER, task(0, stage="m.g2"), silent=9)])

    assert only(causes(known)).follows == ()


def test_tasks_that_halt_for_one_reason_are_one_cause_that_names_them() -> None:
    at = OWN_CODE + "m fails at offset {0} of t:{0} with KeyError; correct it, and restart the instance"
    here = [task(n, "HALTED", seconds=60 - n, reason=at.format(n)) for n in range(2)]
    known = status(
        *here, peers=[server(PEER, *[task(n, "HALTED", seconds=9, reason=at.format(n)) for n in range(2, 6)])]
    )

    cause = only(causes(known))

    assert (cause.kind, cause.urgency, section(cause)) == ("halted", Urgency.NOW, "BalanceTaskHalted")
    assert cause.what == f"m_0, m_1, m_2, m_3 and 2 more at a:1, b:1 are halted: {at.format(0)}"
    assert cause.action == "Release a corrected version on all instances, or have another generation serve"
    assert cause.since_ms == NOW_MS - 60_000
    assert (cause.tasks, cause.servers) == (tuple(f"m_{n}" for n in range(6)), (HERE, PEER))
    assert cause.follows[0] == f"m_1 at a:1 is halted: {at.format(1)}"


def test_tasks_that_halt_for_different_reasons_are_different_causes() -> None:
    known = status(task(0, "HALTED", reason="topic t was recreated"), task(1, "HALTED", reason="a store is gone"))

    assert [cause.what for cause in causes(known)] == [
        "m_0 at a:1 is halted: topic t was recreated",
        "m_1 at a:1 is halted: a store is gone",
    ]
    assert causes(known)[0].action.startswith("Keep its state directory, and act by the reason")


def test_a_halted_standby_is_less_urgent_and_told_only_if_its_owner_is_not_halted() -> None:
    standby = task(0, "HALTED", role="standby", reason="its log is gone")
    alone, both = status(task(0), peers=[server(PEER, standby)]), task(0, "HALTED", reason="its log is gone")

    cause = only(causes(alone))

    assert (cause.urgency, cause.what) == (Urgency.SOON, "The standby m_0 at b:1 is halted: its log is gone")
    assert only(causes(status(both, peers=[server(PEER, standby)]))).urgency is Urgency.NOW


@pytest.mark.parametrize(("seconds", "urgency"), [(2, Urgency.NONE), (29, Urgency.NONE), (30, Urgency.SOON)])
@pytest.mark.parametrize("reason", ["", "the store was damaged"])
def test_a_restore_that_goes_on_has_its_time_for_any_end_of_the_task_before(
    seconds: float, urgency: Urgency, reason: str
) -> None:
    cause = only(causes(status(task(0, "RESTORING", seconds=seconds, reason=reason, seconds_left=4.0))))

    assert (cause.urgency, cause.heals, cause.action, section(cause)) == (urgency, True, "Wait", "BalanceRestoring")
    assert cause.what == "m_0 at a:1 is being restored, about 4 s left, and queries for its keys get 503"


@pytest.mark.parametrize("state", ["CREATED", "RESTORING", "CLOSED"])
@pytest.mark.parametrize(("seconds", "urgency"), [(2, Urgency.NONE), (15, Urgency.SOON), (60, Urgency.NOW)])
def test_a_task_that_is_opened_again_and_again_becomes_urgent_in_any_state(
    state: str, seconds: float, urgency: Urgency
) -> None:
    reason = "the brokers do not allow the transactional id"

    cause = only(causes(status(task(0, state, seconds=seconds, reason=reason))))

    assert (cause.kind, cause.urgency, cause.heals) == ("restoring", urgency, urgency is Urgency.NONE)
    is_told = "opened again and again" if urgency else "being restored"
    assert cause.what == f"m_0 at a:1 is {is_told}, and queries for its keys get 503: {reason}"


def test_a_standby_that_cannot_follow_its_owner_is_a_cause_once_it_lasts() -> None:
    full = {"role": "standby", "reason": "make room on the disk"}
    for state in ("RESTORING", "WAITING", "CLOSED"):
        standbys = [task(n, state, seconds=15, **full) for n in range(2)]
        cause = only(causes(status(task(0), task(1), peers=[server(PEER, *standbys)])))

        assert (cause.kind, cause.urgency, section(cause)) == ("standby", Urgency.SOON, "BalanceStandbyBehind")
        assert cause.what == "The standby m_0, m_1 at b:1 are not ready to take over: make room on the disk"
    goes_on = task(0, "RESTORING", seconds=900, seconds_left=9.0, **full)
    young = task(0, "CLOSED", seconds=5, **full)
    assert causes(status(task(0), peers=[server(PEER, goes_on), server(THIRD, young)])) == []


def test_a_reason_why_the_instance_is_not_ready_is_a_cause_if_no_other_explains_it() -> None:
    stopping = ["this instance is stopping"]
    found = causes(status(task(0, dead_letters=[WAITS]), reasons=stopping))

    assert [cause.kind for cause in found] == ["letters", "not-ready"]
    assert found[1].what == "This instance is not ready: this instance is stopping"
    explained = causes(status(task(0, "HALTED", reason="x"), reasons=["m_0 is HALTED: x"]))
    assert [cause.kind for cause in explained] == ["halted"]


@pytest.mark.parametrize(("seconds", "urgency"), [(9, Urgency.NONE), (10, Urgency.SOON)])
def test_a_task_that_waits_for_seconds_is_not_urgent(seconds: float, urgency: Urgency) -> None:
    waiting = [task(n, "WAITING", seconds=seconds, reason="make room") for n in range(2)]

    cause = only(causes(status(*waiting)))

    assert (cause.urgency, section(cause)) == (urgency, "BalanceTaskWaiting")
    assert cause.what == "m_0, m_1 at a:1 are waiting, and no event is applied: make room"


def test_a_task_whose_version_is_missing_needs_a_decision_and_a_kept_one_does_not() -> None:
    reason = f"generation 2 of 'm' has version 1, and {LACKS_VERSION} 2 here"
    lacks, kept = task(0, "WAITING", reason=reason), task(0, "WAITING", reason=reason, stage="m.g2", read_model="m.g2")

    cause = only(causes(status(lacks)))
    assert cause.action.startswith("Switch to a generation whose version is here")
    spare = only(causes(status(task(0), kept, models=[model(), model("m.g2", "kept")])))
    assert (cause.urgency, spare.urgency) == (Urgency.SOON, Urgency.NONE)


def test_partitions_that_stand_still_for_one_error_are_one_cause() -> None:
    still = [task(n, seconds=90, reason=f"m_{n} stands still: {STANDS.format(n)}: boom") for n in range(2)]

    cause = only(causes(status(*still)))

    assert (cause.urgency, section(cause), cause.since_ms) == (Urgency.NOW, "BalanceFoldingStopped", NOW_MS - 90_000)
    assert cause.what == f"m_0, m_1 at a:1 are standing still: {STANDS.format(0)}: boom"
    assert cause.follows == (f"m_1 at a:1 is standing still: {STANDS.format(1)}: boom",)


@pytest.mark.parametrize(("lag", "kinds"), [(59.9, []), (60, ["behind"]), (None, [])])
def test_a_task_that_is_a_minute_behind_is_a_cause(lag: float | None, kinds: list[str]) -> None:
    assert [cause.kind for cause in causes(status(task(0, lag_seconds=lag)))] == kinds


def test_a_cause_that_only_the_instance_knows_appears_once() -> None:
    failing = Cause(kind=Kind.NOT_FOLDED, urgency=Urgency.SOON, what="its query failed", action="wait", tasks=("m_0",))

    assert causes(status(task(0, lag_seconds=99)), own=[failing]) == [failing]
    # It does not hide what is worse.
    halted = causes(status(task(0, "HALTED", reason="topic t was recreated")), own=[failing])
    assert [cause.kind for cause in halted] == ["halted", "not-folded"]


@pytest.mark.parametrize("kind", [Kind.NOT_FOLDED, Kind.ENDS_UNKNOWN])
def test_what_halts_a_task_is_not_told_by_the_instance_again(kind: Kind) -> None:
    reason = "topic t was recreated"
    own = Cause(kind, Urgency.SOON, f"m, n are not folded: {reason}", "Restore it", follows=(reason,))

    assert [cause.kind for cause in causes(status(task(0, "HALTED", reason=reason)), own=[own])] == ["halted"]
    assert [cause.kind for cause in causes(status(task(0)), own=[own])] == [kind]


def test_two_instances_with_one_address_are_urgent() -> None:
    known = status(task(0), peers=[server(PEER, is_shared=True)])

    cause = only(causes(known))

    assert (cause.urgency, section(cause)) == (Urgency.NOW, "BalanceAddressShared")
    assert cause.what.startswith("Several instances run as b:1")


def test_a_generation_that_is_built_asks_for_nothing_and_its_tasks_have_no_part_in_the_verdict() -> None:
    building = [task(n, "RESTORING", stage="m.g2", lag_seconds=9000, read_model="m.g2") for n in range(2)]
    known = status(task(0), task(1), *building, models=[model(), model("m.g2", "building", seconds=30)])

    cause = only(causes(known))

    assert (cause.kind, cause.urgency, cause.heals) == ("building", Urgency.NONE, True)
    assert section(cause) == "GenerationBuilding"
    assert (cause.what, cause.since_ms) == ("Generation 2 of m is being built; generation 1 answers", NOW_MS - 30_000)


@pytest.mark.parametrize(
    ("state", "told"),
    [("HALTED", "halted"), ("CLOSED", "opened again and again"), ("WAITING", "waiting, and no event is applied")],
)
def test_a_generation_that_cannot_be_built_is_one_cause_and_less_urgent_than_one_that_serves(
    state: str, told: str
) -> None:
    fails = task(0, state, stage="m.g2", read_model="m.g2", reason="the disk is full")
    known = status(task(0), fails, models=[model(), model("m.g2", "building")])

    cause = only(causes(known))

    assert (cause.urgency, cause.what) == (Urgency.SOON, f"m.g2_0 at a:1 is {told}: the disk is full")
    assert state == "WAITING" or "drop this generation" in cause.action


def test_a_generation_that_is_ready_needs_an_operator() -> None:
    cause = only(causes(status(task(0), models=[model("m.g3"), model("m.g4", "ready")])))

    assert section(cause) == "GenerationReady"
    assert (cause.kind, cause.urgency, cause.what) == (
        "ready",
        Urgency.SOON,
        "Generation 4 of m is ready and needs you",
    )


def test_dead_letters_that_need_a_decision_are_one_cause_for_all_read_models() -> None:
    own = [task(0, dead_letters=[WAITS, HEALS]), task(0, stage="n", dead_letters=[replace(WAITS, count=1)])]
    known = status(*own, models=[model(), model("n")], peers=[server(PEER, task(1, dead_letters=[WAITS]))])

    cause = only(causes(known))

    assert (cause.kind, cause.urgency) == ("letters", Urgency.SOON)
    assert cause.what == "7 dead letters need you"
    assert cause.follows == ("m: 6 with the cause key-null", "n: 1 with the cause key-null")
    assert only(causes(status(task(0, dead_letters=[replace(WAITS, count=1)])))).what == "1 dead letter needs you"


@pytest.mark.parametrize(
    ("given", "action"),
    [
        (["key-null"], "Correct what their producer sends, and discard them"),
        (
            ["key-not-of-this-partition"],
            "If the cause is key-not-of-this-partition, discard it only if its event was produced again",
        ),
        (["key-null", "schema-incompatible"], "Redrive those that can be applied now"),
    ],
)
def test_what_to_do_about_dead_letters_depends_on_whether_a_redrive_can_apply_them(
    given: Sequence[str], action: str
) -> None:
    cause = only(causes(status(task(0, dead_letters=[replace(WAITS, cause=one) for one in given]))))

    assert cause.action.startswith(action)
    assert "`balance-service dead-letters list`" in cause.action


def test_a_generation_under_older_rules_names_the_schemas_and_the_command() -> None:
    cause = only(causes(status(task(0), models=[model("m.g2", rules=[7, 8, 9, 10, 11, 12])])))

    assert cause.urgency is Urgency.NONE
    assert cause.what == (
        "m.g2 began under older rules of the decoder: its states may have other values than today's of events under "
        "schema 7, 8, 9, 10 and 2 more"
    )
    assert cause.action == "Rebuild it: `balance-service rebuild m`"


def test_the_most_urgent_cause_comes_first() -> None:
    known = status(
        task(0, dead_letters=[WAITS]), task(1, "HALTED", reason="x"), models=[model(), model("m.g2", "building")]
    )

    assert [cause.urgency for cause in causes(known)] == [Urgency.NOW, Urgency.SOON, Urgency.NONE]


def test_an_instance_that_starts_says_what_it_waits_for_and_since_when() -> None:
    plain, waits = starting("", NOW_MS), starting("Kafka at k:9092 does not answer", NOW_MS)

    assert (plain.what, plain.urgency, plain.heals) == ("This instance is starting", Urgency.NONE, True)
    assert waits.what == "This instance is starting, and waits: Kafka at k:9092 does not answer"
    assert (waits.urgency, waits.heals, waits.since_ms) == (Urgency.SOON, False, NOW_MS)


def test_variables_that_are_no_settings_are_one_cause() -> None:
    assert [*unknown_settings([])] == []
    (one,), (two,) = unknown_settings(["BALANCE_X"]), unknown_settings(["BALANCE_X", "BALANCE_Y"])

    assert one.what == "BALANCE_X begins like a setting and is none: ignored"
    assert two.what == "BALANCE_X, BALANCE_Y begin like settings and are none: ignored"


def test_a_cause_in_json_has_the_time_and_at_most_twenty_consequences() -> None:
    follows = tuple(str(n) for n in range(30))
    cause = Cause(
        kind=Kind.HALTED, urgency=Urgency.SOON, what="w", action="a", since_ms=NOW_MS, tasks=("m_0",), follows=follows
    )

    assert cause.shown().record() == {
        "kind": "halted",
        "urgency": "soon",
        "what": "w",
        "since": "2026-01-01T00:00:00.000Z",
        "action": "a",
        "heals": False,
        "section": "BalanceTaskHalted",
        "tasks": ["m_0"],
        "servers": [],
        "follows": [*follows[:20]],
    }


def test_each_cause_leads_to_a_section_of_the_runbook() -> None:
    text = resource("docs/runbook.md").read_text()

    assert [kind.section for kind in Kind if kind.section and f"## {kind.section}\n" not in text] == []
