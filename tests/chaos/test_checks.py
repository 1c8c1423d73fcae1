"""The checks find each kind of fault and accept correct runs; a passing chaos run shows only the latter."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from balance_service.process.failpoints import arm, failpoint
from tests.chaos.checks import (
    PROGRESS_SECONDS,
    WATERMARK_SECONDS,
    by_kind,
    check_answers,
    check_movement,
    check_promises,
    check_served,
    check_staleness,
    check_starts,
    check_successions,
    check_undisturbed,
    successions,
)
from tests.chaos.clients import Answer, Promise
from tests.chaos.cluster import UNEXPECTED_EVENTS, Strike
from tests.chaos.mutants import ALL_MUTATIONS, mutated
from tests.chaos.mutations import CONTROLS
from tests.chaos.plan import FAULTS, POINTS, Offers, plan_from_environment
from tests.chaos.rebuilder import Rebuilder
from tests.chaos.recount import History, Recount
from tests.chaos.report import Entry, Start
from tests.chaos.workload import HEALING
from tests.support.scripted_server import Scripted, scripted
from tests.support.waiting import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.chaos.mutations import Mutation

_ROOT = Path(__file__).parents[2]
_RIGHT = Answer(
    sent=1.0,
    received=1.1,
    asked="a",
    customer="c",
    max_lag=None,
    min_position=None,
    status=200,
    server="a",
    role="active",
    generation=1,
    partition=0,
    position=5,
    epoch=3,
    lag=0,
    cents=100,
    retry_after=False,
    detail="",
)
_BUSY = replace(
    _RIGHT, status=503, role="", server="", position=-1, epoch=-1, cents=None, retry_after=True, detail="starting"
)
_LATER = replace(_RIGHT, sent=2.0, received=2.1, position=9, cents=300)


@pytest.fixture
def recount() -> Recount:
    """One customer with 1.00 from offset 4 on, and 3.00 from offset 8 on."""
    counted = Recount("", "", "topic", 1, {b"c": 0}, 20_000)
    counted.histories[b"c"] = history = History()
    history.add(4, 100)
    history.add(8, 200)
    counted.events[0, 8] = b"c", 200, b"t"
    return counted


def test_right_answers_pass(recount: Recount) -> None:
    unknown = replace(_RIGHT, status=404, position=4, cents=None, sent=0.5, received=0.6)
    busy = replace(_RIGHT, status=503, role="", server="", position=-1, epoch=-1, cents=None, retry_after=True)
    standby = replace(_RIGHT, role="standby", max_lag=5, lag=4, sent=3.0, received=3.1, server="b")
    assert check_answers([unknown, _RIGHT, busy, _LATER, standby], recount) == []


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("wrong", {"cents": 101}),
        ("wrong", {"status": 404, "cents": None}),
        ("wrong", {"position": 4}),
        ("wrong", {"partition": 1}),
        ("unflagged", {"role": "standby"}),
        ("unflagged", {"role": ""}),
        ("unflagged", {"generation": -1}),
        ("bound", {"max_lag": 2, "lag": 3}),
        ("bound", {"max_lag": 2, "lag": None}),
        ("bound", {"min_position": 6}),
        ("status", {"status": 500, "position": -1}),
        ("status", {"status": 503, "position": -1}),
    ],
)
def test_a_wrong_answer_is_found(recount: Recount, kind: str, change: Mapping[str, object]) -> None:
    answer = replace(_RIGHT, **change)  # type: ignore[arg-type]
    assert by_kind(check_answers([answer], recount)) == {kind: 1}


@pytest.mark.parametrize(
    ("kinds", "change"),
    [
        ({"backwards", "stale"}, {}),
        ({"stale"}, {"asked": "b"}),
        ({"stale"}, {"epoch": 4}),
        ({"stale", "wrong owner"}, {"epoch": 2}),
        ({"backwards"}, {"role": "standby", "max_lag": 9, "server": "b"}),
    ],
)
def test_an_answer_that_goes_back_is_found(recount: Recount, kinds: set[str], change: Mapping[str, object]) -> None:
    after = replace(_RIGHT, sent=3.0, received=3.1, **change)  # type: ignore[arg-type]
    before = replace(_LATER, role=after.role, server=after.server, max_lag=after.max_lag)
    assert by_kind(check_answers([before, after], recount)).keys() == kinds


def test_two_owners_under_one_epoch_are_found(recount: Recount) -> None:
    assert by_kind(check_answers([_RIGHT, replace(_LATER, server="b")], recount)) == {"wrong owner": 1}


def test_each_generation_has_its_own_positions_and_epochs(recount: Recount) -> None:
    other = replace(_RIGHT, sent=3.0, received=3.1, generation=2, epoch=1, server="b")
    assert check_answers([_LATER, other], recount) == []


def test_an_answer_of_a_generation_that_has_never_served_is_found() -> None:
    built = replace(_RIGHT, generation=2)
    refused = replace(_BUSY, generation=-1)
    assert list(check_served([_RIGHT, refused, built, built], {1})) == [
        ("generation", f"only [1] have served: {built}")
    ]


def test_an_answer_may_be_older_if_its_query_overlaps_a_later_one(recount: Recount) -> None:
    overlapping = replace(_RIGHT, sent=2.0, received=3.0, epoch=2)
    assert check_answers([_LATER, overlapping], recount) == []


def test_an_answer_with_an_unknown_lag_beyond_the_bound_is_found() -> None:
    acks = [(1.0, 0, 10), (2.0, 0, 8), (3.0, 1, 99), (9.0, 0, 50)]
    known = 2.0 + WATERMARK_SECONDS + 0.1
    near = replace(_RIGHT, sent=known, received=known, position=5, max_lag=5)
    far = replace(near, max_lag=4)
    assert [v.detail for v in check_staleness([near, far, _RIGHT], acks)] == [
        f"the source ended at 10 {WATERMARK_SECONDS:.0f} s before, and maxLag was 4: {far}"
    ]


def test_an_accepted_command_missing_in_the_source_is_found(recount: Recount) -> None:
    kept, lost, keyless = Promise("c", 200, 0, 9, "t"), Promise("c", 200, 0, 10, "t"), Promise("c", 200, 0, 9, None)
    assert [violation.kind for violation in check_promises([kept], recount)] == []
    assert [violation.kind for violation in check_promises([lost, keyless], recount)] == ["lost", "lost"]


class Sent:
    """A consumed record of one customer with an idempotency key."""

    def __init__(self, token: str, timestamp_ms: int) -> None:
        self._token = token.encode()
        self._timestamp_ms = timestamp_ms

    def key(self) -> bytes:
        return b"c"

    def value(self) -> bytes:
        return b""

    def headers(self) -> list[tuple[str, bytes]]:
        return [("idempotency-key", self._token)]

    def timestamp(self) -> tuple[int, int]:
        return 1, self._timestamp_ms


class RecountOfValidEvents(Recount):
    """Takes every record for a valid event of one cent."""

    def judge(self, partition: int, key: bytes | None, value: bytes | None) -> tuple[str, int]:
        return "", 1


def test_the_recount_expires_idempotency_keys_by_stream_time() -> None:
    recount = RecountOfValidEvents("", "", "topic", 1, {b"c": 0}, 1_000)
    (count,) = recount.partitions

    # A key is known for the window after the stream time of the event that counted, however late that event came.
    sent = [("a", 5_000), ("a", 5_999), ("b", 6_000), ("a", 5_500), ("a", 5_999), ("d", 5_000), ("d", 5_000)]
    counted = []
    for offset, (token, timestamp_ms) in enumerate(sent):
        recount.count(0, count, offset, Sent(token, timestamp_ms))
        counted.append(count.applied)

    assert counted == [1, 1, 2, 3, 3, 4, 4]
    assert count.living(1_000) == {(b"c", b"a"), (b"c", b"b"), (b"c", b"d")}


def test_a_seed_reproduces_a_plan_and_the_short_plan_has_each_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHAOS_MINUTES", "CHAOS_FAULTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CHAOS_SEED", "7")
    plan = plan_from_environment()
    assert plan == plan_from_environment()
    counts = plan.counts
    assert counts["kill"] == 5
    assert all(counts[f"kill-at-{point}"] == 1 for point in POINTS)
    assert min(counts["pause-at-begun"], counts["restart-broker"], counts["silence"]) == 1
    assert min(counts["delete-store"], counts["damage-store"]) == 1


def test_the_long_plan_has_enough_of_each_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAOS_FAULTS", raising=False)
    monkeypatch.setenv("CHAOS_MINUTES", "30")
    counts = plan_from_environment().counts
    assert counts.keys() == set(FAULTS)
    assert counts["kill"] >= 100
    assert all(counts[f"kill-at-{point}"] >= 10 for point in POINTS)
    assert counts["pause"] + counts["pause-at-begun"] + counts["pause-at-produced"] >= 20
    assert counts["restart-broker"] >= 20
    assert counts["delete-store"] + counts["damage-store"] >= 20
    assert counts["kill-broker-long"] == 1


def test_unexpected_log_events_exist_in_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (_ROOT / "balance_service").rglob("*.py"))

    assert [detail for detail in UNEXPECTED_EVENTS if f'"{detail}"' not in code] == []


def test_an_unknown_fault_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAOS_MINUTES", raising=False)
    monkeypatch.setenv("CHAOS_FAULTS", "kill,flood")
    with pytest.raises(ValueError, match="flood"):
        plan_from_environment()


@pytest.mark.parametrize("mutation", ALL_MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_planted_bug_can_be_planted_and_its_test_exists(mutation: Mutation) -> None:
    text = mutated(mutation, _ROOT / mutation.file)
    if mutation.file.endswith(".py"):
        compile(text, mutation.file, "exec")
    if mutation.test not in CONTROLS:
        file, _, one = mutation.test.partition("::")
        tests = re.findall(r"^ *(?:async )?def (test_\w+)", (_ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert {*mutation.kinds, *filter(None, [one])} <= {*tests}


@pytest.mark.parametrize(("refused", "is_found"), [(0, False), (1, False), (60, True), (100, True)])
def test_refusals_without_a_fault_are_found(refused: int, is_found: bool) -> None:
    answers = [replace(_BUSY if n < refused else _RIGHT, sent=n / 100, received=n / 100) for n in range(100)]

    found = list(check_undisturbed(answers, [(0.0, 1.0)]))

    assert ([violation.kind for violation in found] == ["silent"]) is is_found


def test_a_window_without_answers_is_found_and_refusals_of_bounded_queries_are_accepted() -> None:
    bounded = [replace(_BUSY, sent=n / 100, received=n / 100, max_lag=0) for n in range(100)]
    plain = [replace(_RIGHT, sent=n / 100, received=n / 100) for n in range(100)]

    assert by_kind(check_undisturbed(bounded, [(0.0, 1.0)])) == {"silent": 1}
    assert not list(check_undisturbed([*bounded, *plain], [(0.0, 1.0)]))


@pytest.mark.parametrize(("stands_for", "is_found"), [(PROGRESS_SECONDS, False), (600.0, True)])
def test_an_owner_that_does_not_apply_committed_events_is_found(stands_for: float, is_found: bool) -> None:
    answers = [replace(_RIGHT, sent=10.0 + second, received=10.0 + second) for second in range(int(stands_for))]

    found = list(check_movement(answers, [(1.0, 0, 5), (10.0, 0, 9)]))

    assert ([violation.kind for violation in found] == ["stuck"]) is is_found
    assert not list(check_movement([replace(answer, position=9) for answer in answers], [(10.0, 0, 9)]))


@pytest.mark.parametrize(("without_broker", "is_found"), [(100.0, True), (500.0, False)])
def test_a_standstill_excludes_the_time_without_a_broker(without_broker: float, is_found: bool) -> None:
    late = replace(_RIGHT, sent=600.0, received=600.0)

    found = list(check_movement([late], [(1.0, 0, 5), (10.0, 0, 9)], [(50.0, 50.0 + without_broker)]))

    assert ([violation.kind for violation in found] == ["stuck"]) is is_found


@pytest.mark.parametrize(
    ("stood_by", "seconds", "is_found"),
    [
        ((0,), 1.0, False),
        ((0,), PROGRESS_SECONDS / 2, True),
        ((), PROGRESS_SECONDS / 2, False),
        ((1,), PROGRESS_SECONDS / 2, False),
        ((), PROGRESS_SECONDS + 1, True),
    ],
)
def test_a_late_answer_of_a_tailing_standby_is_found(stood_by: tuple[int, ...], seconds: float, is_found: bool) -> None:
    at = 100.0
    kill = Entry(at, "kill", "a", frozenset({0}), frozenset(stood_by))
    owner = replace(_RIGHT, sent=at + 0.4, received=at + 0.5, server="c")
    after = replace(_RIGHT, sent=at + seconds - 0.1, received=at + seconds, server="b", role="standby", max_lag=200)

    found = list(check_successions(successions([owner, after], [kill])))

    assert ([violation.kind for violation in found] == ["silent"]) is is_found


@pytest.mark.parametrize(("behind", "is_found"), [("6,120", False), ("an unknown number of", True)])
def test_a_standby_that_is_too_far_behind_is_not_silent(behind: str, is_found: bool) -> None:
    at = 100.0
    kill = Entry(at, "kill", "a", frozenset({0}), frozenset({0}))
    before = replace(_RIGHT, sent=at - 1, received=at - 0.9)
    reason = f"the copy at b is {behind.replace(',', '')} records behind, and maxLag is 5000"
    refused = replace(before, sent=at + 1, received=at + 1.1, status=503, position=-1, max_lag=5_000, detail=reason)
    owner = replace(_RIGHT, sent=at + 0.4, received=at + 0.5, server="c")
    late = replace(owner, sent=at + PROGRESS_SECONDS / 2, received=at + PROGRESS_SECONDS / 2, max_lag=5_000)

    found = list(check_successions(successions([before, owner, refused, late], [kill])))

    assert ([violation.kind for violation in found] == ["silent"]) is is_found
    assert all(reason in violation.detail for violation in found)


@pytest.mark.parametrize(
    ("fault", "seconds", "others", "is_found"),
    [
        ("kill", 7.0, (), False),
        ("kill", PROGRESS_SECONDS + 1, (), True),
        ("kill", PROGRESS_SECONDS + 1, (5.0,), False),
        ("remove", PROGRESS_SECONDS / 2, (), True),
    ],
)
def test_a_late_new_owner_is_found(fault: str, seconds: float, others: tuple[float, ...], is_found: bool) -> None:
    at = 100.0
    entries = [
        Entry(at, fault, "a", frozenset({0})),
        *(Entry(at + after, "kill", "b", frozenset()) for after in others),
    ]
    before = replace(_RIGHT, sent=at - 1, received=at - 0.9)
    standby = replace(_RIGHT, sent=at + 0.4, received=at + 0.5, server="b", role="standby", max_lag=200)
    after = replace(_RIGHT, sent=at + seconds - 0.1, received=at + seconds, server="b", epoch=4)

    found = list(check_successions(successions([before, standby, after], entries)))

    assert ([violation.kind for violation in found] == ["silent"]) is is_found


@pytest.mark.parametrize(
    ("fault", "asked_seconds", "is_found"),
    [
        ("kill", PROGRESS_SECONDS, True),
        ("remove", PROGRESS_SECONDS, True),
        # The readers stopped too early to tell.
        ("kill", 1.0, False),
        ("pause", PROGRESS_SECONDS, False),
    ],
)
def test_a_missing_new_owner_is_found(fault: str, asked_seconds: float, is_found: bool) -> None:
    at = 100.0
    before = replace(_RIGHT, sent=at - 1, received=at - 0.9)
    refused = replace(before, status=503, sent=at + asked_seconds - 0.1, received=at + asked_seconds)

    found = list(check_successions(successions([before, refused], [Entry(at, fault, "a", frozenset({0}))])))

    assert [violation.kind for violation in found] == ["silent", "silent"] * is_found


@pytest.mark.parametrize(
    ("seconds", "broker_down_at", "is_found"),
    [(10.0, None, False), (300.0, None, True), (300.0, 40.0, False), (300.0, 150.0, False), (300.0, 450.0, True)],
)
def test_an_instance_that_is_ready_too_late_is_found(
    seconds: float, broker_down_at: float | None, is_found: bool
) -> None:
    outages = [] if broker_down_at is None else [(broker_down_at, broker_down_at + 70.0)]

    found = list(check_starts([Start(100.0, "a", seconds)], outages))

    assert ([violation.kind for violation in found] == ["silent"]) is is_found


@pytest.mark.parametrize(
    ("different", "key", "is_found"),
    [(0, "", False), (1, "early-1", True), (1, f"{HEALING.decode()}1", False), (1, "", False)],
)
def test_a_difference_between_two_generations_is_found_unless_a_dead_letter_explains_it(
    different: int, key: str, is_found: bool
) -> None:
    compared = {"equal": 5, "different": different, "onlyServing": 0, "onlyBuilding": 0}
    shown = [{"key": key, "serving": 1, "building": 2}] if key else []
    replies = [
        _generations("compare", compared, {1: "serving", 3: "ready"}),
        *([_json({"differences": shown})] if different else []),
        _json({}, 202),
        _generations("settle", None, {1: "kept", 3: "serving"}),
    ]
    with scripted(*replies) as (url, received):
        rebuilder = Rebuilder("balance", lambda: [url], 1, HEALING.decode())
        rebuilder.settle(PATIENCE_SECONDS)

    assert [one.target for one in received if one.method == "POST"] == ["/api/models.switch"]
    assert ([violation.kind for violation in rebuilder.take_violations()] == ["generation"]) is is_found


def test_a_request_for_a_generation_that_fails_is_found_and_a_refused_one_is_accepted() -> None:
    with scripted(*(_json({}, status) for status in (409, 503, 500))) as (url, _):
        rebuilder = Rebuilder("balance", lambda: [url], 1)
        assert [rebuilder.post("drop", generation=2) for _ in range(3)] == [409, 503, 500]

    assert by_kind(rebuilder.take_violations()) == {"status": 1}


def _generations(action: str, comparison: Mapping[str, int] | None, statuses: Mapping[int, str]) -> Scripted:
    generations = [{"generation": number, "status": status} for number, status in statuses.items()]
    return _json({"generations": generations, "comparison": comparison, "action": action})


def _json(body: object, status: int = 200) -> Scripted:
    return Scripted(status, json.dumps(body).encode())


def test_points_are_offered_one_at_a_time_in_the_order_of_the_round(tmp_path: Path) -> None:
    offers, found = _offers(tmp_path, ["stored", "begun", "begun"]), []
    for struck in ("stored", "begun", "begun"):
        offers.offer()
        offers.offer()
        found.append(_offered(tmp_path))
        (tmp_path / "offers" / struck).unlink()
        # An instance that starts before the strike is noticed must not bring the point back.
        offers.offer()
        found.append(_offered(tmp_path))
        offers.taken(Strike(struck, 0.0))

    offers.offer()
    assert [*found, _offered(tmp_path)] == [{"stored"}, set(), {"begun"}, set(), {"begun"}, set(), set()]
    assert offers.left == []


def test_instances_use_small_parts_until_the_point_between_two_parts_has_struck(tmp_path: Path) -> None:
    offers = _offers(tmp_path, ["begun", "part-stored"])

    for struck, in_parts in (("begun", True), ("part-stored", True)):
        offers.offer()
        assert offers.in_parts is in_parts
        offers.taken(Strike(struck, 0.0))
    assert not offers.in_parts


@pytest.mark.parametrize("point", POINTS)
def test_an_instance_that_reaches_an_offered_point_dies_there_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    struck: list[int] = []
    monkeypatch.setattr("os.kill", lambda _pid, number: struck.append(number))
    offers = _offers(tmp_path, [point])
    arm(offers.specification())
    try:
        for _ in range(16):
            failpoint(point)
        assert not struck
        offers.offer()
        failpoint(point)
    finally:
        arm("")

    assert len(struck) == 1
    assert _offered(tmp_path) == set()


def _offers(folder: Path, points: Sequence[str]) -> Offers:
    return Offers(folder / "offers", points, random.Random(1))


def _offered(folder: Path) -> set[str]:
    return {file.name for file in (folder / "offers").iterdir()}
