"""Troubles of brokers and instances become a few causes: each once, with its remedy and its consequences."""

from __future__ import annotations

import pytest

from balance_service.hosting.causes import Cause, Kind, Urgency
from tests.unit.hosting.statuses import (
    HEALS,
    NOW_MS,
    PEER,
    STANDS,
    THIRD,
    WAITS,
    causes,
    model,
    only,
    section,
    server,
    status,
    task,
)

PLAIN_503 = "Here, plain queries get 503; those with `maxAge` get an old answer"


def refused() -> Cause:
    return Cause(Kind.REFUSED, Urgency.NOW, "grant this user Read", "Do what it says")


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


def test_a_reason_why_the_instance_is_not_ready_is_a_cause_if_no_other_explains_it() -> None:
    stopping = ["this instance is stopping"]
    found = causes(status(task(0, dead_letters=[WAITS]), reasons=stopping))

    assert [cause.kind for cause in found] == ["letters", "not-ready"]
    assert found[1].what == "This instance is not ready: this instance is stopping"
    explained = causes(status(task(0, "HALTED", reason="x"), reasons=["m_0 is HALTED: x"]))
    assert [cause.kind for cause in explained] == ["halted"]


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


def test_the_most_urgent_cause_comes_first() -> None:
    known = status(
        task(0, dead_letters=[WAITS]), task(1, "HALTED", reason="x"), models=[model(), model("m.g2", "building")]
    )

    assert [cause.urgency for cause in causes(known)] == [Urgency.NOW, Urgency.SOON, Urgency.NONE]
