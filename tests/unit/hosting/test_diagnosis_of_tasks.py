"""Troubles of tasks, generations and dead letters become a few causes: those with one reason are one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from balance_service.engine.processor import OWN_CODE
from balance_service.hosting.causes import Urgency
from balance_service.model.versions import LACKS_VERSION, OTHER_TRANSFORM
from tests.unit.hosting.statuses import (
    HEALS,
    HERE,
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

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def test_a_task_whose_transform_is_another_one_needs_a_decision() -> None:
    waiting = task(0, "WAITING", reason=f"version 1 of 'm' {OTHER_TRANSFORM} here")

    assert only(causes(status(waiting))).action.startswith("Release the `transform` that it had")


def test_partitions_that_stand_still_for_one_error_are_one_cause() -> None:
    still = [task(n, seconds=90, reason=f"m_{n} stands still: {STANDS.format(n)}: boom") for n in range(2)]

    cause = only(causes(status(*still)))

    assert (cause.urgency, section(cause), cause.since_ms) == (Urgency.NOW, "BalanceFoldingStopped", NOW_MS - 90_000)
    assert cause.what == f"m_0, m_1 at a:1 are standing still: {STANDS.format(0)}: boom"
    assert cause.follows == (f"m_1 at a:1 is standing still: {STANDS.format(1)}: boom",)


@pytest.mark.parametrize(("lag", "kinds"), [(59.9, []), (60, ["behind"]), (None, [])])
def test_a_task_that_is_a_minute_behind_is_a_cause(lag: float | None, kinds: list[str]) -> None:
    assert [cause.kind for cause in causes(status(task(0, lag_seconds=lag)))] == kinds


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
