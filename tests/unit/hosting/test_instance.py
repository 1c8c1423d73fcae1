"""The readiness of an instance and the problems that it reports."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from balance_service.cluster.directory import ServerTable
from balance_service.engine.processor import OWN_CODE
from balance_service.engine.progress import Progress, Seen
from balance_service.engine.records import Role, TaskSnapshot
from balance_service.engine.task import ANSWERING, TaskState
from balance_service.engine.tasks import Tasks
from balance_service.errors import RetriableError
from balance_service.hosting.engine import StartupRetries
from balance_service.hosting.instance import Instance, Since, forget_left, noted_now
from balance_service.kafka.topics import Watermarks
from balance_service.process.runtime import elapsed
from tests.support.fakes import Clock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


NO_BROKER = (
    "Kafka at k:9092 does not answer this instance. Here, plain queries get 503; those with `maxAge` get an old answer"
)
HALTED = "activity_0 is HALTED: its fold failed"
FAILED = "org.apache.spark.SparkException: Job aborted. At 10.1.2.3"
ENDED = "balance_0 is not folded: its query has ended and is started again; /api/status and the log say why"
SINCE = "partition 0 has been at position 90 since 2026-01-01T00:00:00Z, and is 10 records behind"
SINCE_MS = 1_767_225_600_000


def stage(
    model: str,
    state: str = "RUNNING",
    reason: str = "",
    failed: str = "",
    unlooked: str = "",
    misplaced: str = "",
    letters: Mapping[str, int] | None = None,
    still_seconds: float = 0,
    ends_age: float = 0,
    topic: str = "",
    epoch: int = 1,
    *,
    answers_when_halted: bool = False,
    holds: bool = True,
) -> Any:
    answers = TaskState(state) in ANSWERING
    clock = Clock()
    progress = Progress(clock, lambda: SINCE_MS)
    progress.look({0: Seen(90, 10, restores=False)})
    if failed:
        progress.failed(0, 90, failed)
    clock.now += still_seconds
    task = TaskSnapshot(model, 0, Role.ACTIVE, state, epoch, 90, reason, dead_letters=letters or {}, answers=answers)
    now = Clock(elapsed() - (ends_age if ends_age < float("inf") else 0))
    watermarks = Watermarks("balance", lambda: {0: 100}, now)
    if ends_age < float("inf"):
        watermarks.refresh()
        now.now += ends_age
    hosted: Any = SimpleNamespace(
        name=model,
        stage=SimpleNamespace(owner=model),
        is_last=True,
        source=SimpleNamespace(name=topic or model, partitions=1),
        misplaced=misplaced,
        watermarks=watermarks,
        folds=None,
        progress=progress,
        lease=SimpleNamespace(holds=holds),
        answers_when_halted=answers_when_halted,
    )
    tasks = Tasks(hosted, SimpleNamespace(), lambda: None)
    one: Any = SimpleNamespace(task_id=task.task_id, snapshot=lambda: task)
    tasks.all = lambda: [one]  # type: ignore[method-assign]
    tasks.source_problem = unlooked
    return tasks


def running(
    *stages: Any,
    shared: str = "",
    has_begun: bool = True,
    joining: Sequence[str] = (),
    unconfirmed: Sequence[str] = (),
    refused: Sequence[str] = (),
    hears: bool = True,
    age: float = 3600,
    after_outage: bool = False,
) -> Instance:
    """An instance that has run for `age` seconds. `after_outage`: Kafka answers just now."""
    memberships = SimpleNamespace(joining=joining, problems=refused, own_some=True, unconfirmed=unconfirmed)
    engine = SimpleNamespace(
        memberships=memberships,
        models={s.name: s for s in stages},
        stages={s.name: s for s in stages},
        serving_stages=stages,
        stages_of=lambda name: [s for s in stages if s.name == name],
        tables=SimpleNamespace(snapshots=list),
        has_begun=has_begun,
        watermarks={s.hosted.source.name: s.hosted.watermarks for s in stages},
        settings=SimpleNamespace(
            num_standby_replicas=1,
            bootstrap_servers="k:9092",
            session_timeout_ms=10_000,
            application_servers_topic="app-application-servers",
        ),
        topics=SimpleNamespace(refusal=""),
        read_otherwise=lambda _stage: [],
        control_records=(),
    )
    table = ServerTable(elapsed)
    directory = SimpleNamespace(problem="", shared_address_problem=shared, table=table, address="here:1")
    rebuilds = SimpleNamespace(status_of=lambda _stage: "serving", since_of=lambda _stage: None)
    parts: Any = {"engine": engine, "directory": directory, "rebuilds": rebuilds, "commands": {}}
    began_at = elapsed() - age
    now = Clock(began_at)
    noted = Since(now)
    long_ago = [*["here:1"] * hears, *(f"source/{s.name}" for s in stages if s.source_problem)]
    noted.note([*["Kafka"] * (not after_outage), *long_ago])
    now.now = elapsed()
    noted.note(["Kafka", *long_ago])
    engine.awake = SimpleNamespace(since=began_at)
    return Instance(noted=noted, began_at=began_at, **parts)


def causes(instance: Instance) -> list[tuple[str, str, str]]:
    """The causes of an instance: their kinds, urgencies and sentences."""
    status = {"applicationServer": "here:1", "reasons": instance.unready(), **instance.status()}
    status |= {"unhosted": []}
    return [(cause.kind, cause.urgency.name, cause.what) for cause in instance.causes(status)]


def test_the_status_says_which_dead_letters_need_an_operator() -> None:
    letters = {"schema-id-unknown/scheduled": 2, "key-null/waiting": 1, "key-null/discarded": 7}
    (task,) = running(stage("balance", letters=letters)).status()["tasks"]

    assert [one.record() for one in task.dead_letters] == [
        {"cause": "key-null", "status": "waiting", "needsDecision": True, "count": 1},
        {"cause": "schema-id-unknown", "status": "scheduled", "needsDecision": False, "count": 2},
    ]


def test_the_status_has_the_tasks_of_peers_as_they_published_them() -> None:
    instance = running(stage("balance"))
    published = TaskSnapshot(
        "balance",
        0,
        Role.ACTIVE,
        "HALTED",
        2,
        70,
        "its fold failed",
        5,
        9,
        1.5,
        {"a/parked": 1, "b/of-another-version": 1},
    )
    record = {"incarnation": "i", "models": [], "tasks": [published.record(), {**published.record(), "readModel": "x"}]}
    instance.directory.table.hear("peer:1", record, live=True)

    (server,) = instance.status()["applicationServers"]

    assert (server.suspect, server.silent_seconds) == (False, 0)
    here, elsewhere = server.tasks
    assert (here.lag, here.lag_seconds, here.lag_seconds_is_least) == (30, 0.0, True)
    assert (here.reason, here.seconds_left) == ("its fold failed", 1.5)
    assert [one.record() for one in here.dead_letters] == [
        {"cause": "a", "status": "parked", "needsDecision": True, "count": 1}
    ]
    # This instance does not read the ends of a stage that it does not host.
    assert (elsewhere.read_model, elsewhere.lag, elsewhere.lag_seconds) == ("x", None, None)


def test_misplaced_keys_are_a_problem_and_leave_the_instance_ready() -> None:
    instance = running(stage("balance", misplaced="keys are misplaced"))

    assert (instance.unready(), instance.problems()) == ([], ["keys are misplaced"])
    assert instance.status()["problems"] == ["balance: keys are misplaced"]


@pytest.mark.shows("lossy-topics")
def test_a_topic_that_may_lose_records_is_a_problem_and_leaves_the_instance_ready() -> None:
    lossy = stage("balance")
    lossy.losses = ["the source is compacted"]
    instance = running(lossy)

    assert (instance.unready(), instance.problems()) == ([], ["the source is compacted"])
    assert instance.status()["problems"] == ["balance: the source is compacted"]


def test_an_instance_that_starts_joins_its_groups_and_is_not_called_cut_off() -> None:
    instance = running(stage("balance"), joining=["balance", "orders"], unconfirmed=["balance"])

    assert instance.unready() == ["this instance joins the group of balance, orders"]


def test_an_instance_that_its_group_no_longer_confirms_is_called_cut_off() -> None:
    instance = running(stage("balance"), unconfirmed=["balance"])

    assert instance.unready() == [
        "the group of balance has not confirmed this instance lately: it cannot reach Kafka, or was suspended"
    ]


def test_a_healthy_instance_has_no_problems() -> None:
    instance = running(stage("balance"), stage("activity"))

    assert (instance.unready(), instance.problems()) == ([], [])


def test_an_instance_is_not_ready_until_it_has_begun_to_read() -> None:
    instance = running(stage("balance"), has_begun=False)

    assert (instance.unready(), instance.problems()) == (["Spark begins to read"], [])


def test_an_instance_with_another_instances_address_is_not_ready() -> None:
    assert running(stage("balance"), shared="another has it").unready() == ["another has it"]


def test_an_instance_with_one_halted_read_model_stays_ready_and_reports_it() -> None:
    instance = running(stage("balance"), stage("activity", "HALTED", "its fold failed"))

    assert (instance.unready(), instance.problems()) == ([], [HALTED])


def test_an_instance_without_an_answering_read_model_is_not_ready() -> None:
    instance = running(stage("balance", unlooked="the broker is away"), stage("activity", "HALTED", "its fold failed"))

    assert instance.unready() == instance.problems() == ["a partition is not folded: the broker is away", HALTED]


def test_readiness_hides_sparks_messages_and_the_status_shows_them() -> None:
    instance = running(stage("balance", failed=FAILED))

    assert instance.unready() == instance.problems() == [ENDED]
    assert instance.status()["problems"] == [f"balance: balance_0 is not folded: {FAILED}"]


def test_a_task_that_stands_still_for_a_minute_is_a_problem_of_an_instance_that_stays_ready() -> None:
    moves, stands = running(stage("balance", still_seconds=59)), running(stage("balance", still_seconds=60))
    told = f"balance_0 stands still: {SINCE}"

    assert (moves.unready(), moves.problems(), moves.status()["problems"]) == ([], [], [])
    assert stands.unready() == []
    assert stands.problems() == [f"{told}: /api/status and the log say why, if an error is the reason"]
    assert stands.status()["problems"] == [f"balance: {told}"]
    assert [task.reason for task in stands.status()["tasks"]] == [told]


def test_a_task_that_stands_still_names_the_last_error_in_the_status_alone() -> None:
    instance = running(stage("balance", failed=FAILED, still_seconds=60), stage("activity"))

    assert instance.status()["problems"] == [f"balance: balance_0 stands still: {SINCE}: {FAILED}"]
    assert FAILED not in str(instance.problems())


def test_a_task_that_waits_for_a_minute_is_a_problem_with_the_reason_of_its_wait() -> None:
    instance = running(stage("balance", "WAITING", "make room", still_seconds=60))

    assert instance.problems() == ["balance_0 is WAITING: make room"]
    assert instance.status()["problems"] == [f"balance: balance_0 stands still: {SINCE}: make room"]
    assert instance.status()["tasks"][0].reason == "make room"


def test_an_instance_with_a_waiting_task_stays_ready_and_reports_the_reason() -> None:
    instance = running(stage("balance", "WAITING", "make room"))

    assert (instance.unready(), instance.problems()) == ([], ["balance_0 is WAITING: make room"])


def test_an_instance_whose_only_task_restores_is_not_ready() -> None:
    instance = running(stage("balance", "RESTORING"))

    assert instance.unready() == instance.problems() == ["balance_0 is RESTORING"]


def test_the_reason_of_a_wait_is_cleared_when_the_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("balance_service.hosting.engine._RETRY_SECONDS", 0.0)
    told: list[str] = []
    outages = [RetriableError("the broker is down"), RetriableError("the registry is down")]

    def attempt() -> str:
        if outages:
            raise outages.pop(0)
        return "up"

    assert StartupRetries(threading.Event(), told.append).until_up(attempt) == "up"
    assert told == ["the broker is down", "the registry is down", ""]


def test_a_wait_for_a_broker_is_logged_once_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("balance_service.hosting.engine._RETRY_SECONDS", 0.0)
    outages = [RetriableError("the broker is down") for _ in range(9)] + [RetriableError("the registry is down")]

    def attempt() -> None:
        if outages:
            raise outages.pop(0)

    with capture_logs() as logs:
        StartupRetries(threading.Event(), lambda _reason: None).until_up(attempt)

    assert [(line["event"], line.get("error")) for line in logs] == [
        ("waiting", "the broker is down"),
        ("waiting", "the registry is down"),
        ("the wait is over", None),
    ]


def test_a_healthy_instance_has_no_cause() -> None:
    assert causes(running(stage("balance"))) == []


def test_a_partition_that_is_folded_again_is_a_cause_that_heals_and_not_that_of_a_task_that_stands_still() -> None:
    again = stage("rows")
    (task,) = again.all()
    before = task.snapshot()
    task.snapshot = lambda: replace(before, again_up_to=120)

    instance = running(again)

    ((kind, urgency, what),) = causes(instance)
    assert (kind, urgency) == ("begun-again", "SOON")
    assert "rows_0 is folded again from its beginning" in what
    assert "it is at 90 of 120" in what
    assert instance.problems() == []


def test_an_instance_that_nothing_answers_reports_the_broker_alone() -> None:
    instance = running(stage("balance", ends_age=60), unconfirmed=["balance"])

    assert causes(instance) == [("broker", "NOW", NO_BROKER)]


def test_an_instance_that_one_topic_answers_has_a_broker() -> None:
    instance = running(stage("balance", ends_age=60), stage("activity"))

    assert causes(instance) == [
        (
            "ends-unknown",
            "SOON",
            "The ends of balance cannot be read: lags are not known, and no query with `maxLag` is answered",
        )
    ]


def test_a_topic_without_a_leader_is_one_cause_with_what_follows_for_its_stages() -> None:
    without = [stage(name, topic="t", unlooked="reading the offsets of t", ends_age=60) for name in ("m", "n")]
    instance = running(*without, stage("activity"))
    status = {"applicationServer": "here:1", "reasons": [], **instance.status(), "unhosted": []}

    (cause,) = instance.causes(status)

    # The lag of a topic whose end is not read any more grows.
    assert [task.lag_seconds for task in status["tasks"]] == [60.0, 60.0, 0.0]
    assert (cause.kind, cause.tasks) == ("ends-unknown", ("m_0", "n_0"))
    assert cause.follows == ("reading the offsets of t",)


def test_what_an_outage_has_left_is_no_cause_before_it_had_time_to_heal() -> None:
    stages = [stage("balance", ends_age=12), stage("activity", unlooked="broker handle destroyed")]

    assert [kind for kind, _, _ in causes(running(*stages))] == ["ends-unknown", "not-folded"]
    assert causes(running(*stages, after_outage=True)) == []


@pytest.mark.parametrize(("age", "kinds"), [(5, []), (15, [("ends-unknown", "SOON")])])
def test_ends_that_were_never_read_are_a_cause_once_the_instance_has_run_for_a_while(
    age: float, kinds: list[tuple[str, str]]
) -> None:
    instance = running(stage("balance", ends_age=float("inf")), stage("activity"), age=age)

    assert [(kind, urgency) for kind, urgency, _ in causes(instance)] == kinds


@pytest.mark.parametrize(("age", "is_told"), [(5, False), (15, True)])
def test_an_instance_that_does_not_hear_itself_for_long_says_that_it_does_not_know_others(
    age: float, *, is_told: bool
) -> None:
    told = "This instance does not know what the others do: it receives no records of the topic app-application-servers"

    assert causes(running(stage("balance"), hears=False, age=age)) == [("unheard", "SOON", told)] * is_told


def test_an_instance_notes_itself_and_what_no_instance_runs_while_it_hears_itself() -> None:
    clock = Clock()
    table, stages = ServerTable(clock), {"balance": stage("balance", ends_age=60)}
    assert noted_now(stages, table, "here:1") == []

    def hear(address: str, *tasks: TaskSnapshot) -> None:
        table.hear(address, {"incarnation": "i", "models": [], "tasks": [one.record() for one in tasks]}, live=True)

    hear(
        "peer:1",
        TaskSnapshot("balance", 0, Role.ACTIVE, "RUNNING", 1, 7),
        TaskSnapshot("n", 3, Role.ACTIVE, "RUNNING", 1, 7),
    )
    hear("here:1")
    assert noted_now(stages, table, "here:1") == ["Kafka", "here:1"]
    clock.now += 5
    # Its own record is outdated, too.
    assert noted_now(stages, table, "here:1") == []
    hear("here:1")
    assert noted_now(stages, table, "here:1") == ["Kafka", "here:1", "balance_0", "n_3"]


@pytest.mark.parametrize(("age", "noted"), [(9, ["Kafka"]), (11, [])])
def test_an_instance_notes_that_kafka_answers_if_that_is_no_more_than_slow(age: float, noted: list[str]) -> None:
    stages = {"activity": stage("activity", ends_age=60), "balance": stage("balance", ends_age=age)}

    assert noted_now(stages, ServerTable(), "here:1") == noted


def test_since_keeps_the_first_time_of_what_lasts_and_forgets_what_has_ended() -> None:
    clock = Clock(100.0)
    since = Since(clock)

    since.note(["x", "y"])
    clock.now = 200.0
    since.note(["y", "z"])

    assert since.of == {"y": since.time_of(100.0), "z": since.time_of(200.0)}


def test_what_is_left_of_a_lost_partition_stays_until_another_instance_answers() -> None:
    table, asked = ServerTable(), []
    tasks: Any = SimpleNamespace(forget_left=lambda is_answered: asked.append(is_answered(0)))

    def hear(address: str, epoch: int) -> None:
        running = TaskSnapshot("balance", 0, Role.ACTIVE, "RUNNING", epoch, 7)
        table.hear(address, {"incarnation": "i", "models": [], "tasks": [running.record()]}, live=True)

    # It is from before this instance lost the partition.
    hear("here:1", 1)
    forget_left({"balance": tasks}, table, "here:1")
    hear("peer:1", 2)
    forget_left({"balance": tasks}, table, "here:1")

    assert asked == [False, True]


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ({"state": "RUNNING"}, True),
        ({"state": "WAITING"}, True),
        ({"state": "RUNNING", "holds": False}, False),
        ({"state": "RESTORING"}, False),
        ({"state": "HALTED", "reason": OWN_CODE, "answers_when_halted": True}, True),
        ({"state": "HALTED", "reason": OWN_CODE}, False),
        ({"state": "HALTED", "reason": "topic t was recreated", "answers_when_halted": True}, False),
        # It halted while it was opened.
        ({"state": "HALTED", "reason": OWN_CODE, "answers_when_halted": True, "epoch": 0}, False),
    ],
)
def test_the_status_says_which_tasks_answer_plain_queries(task: dict[str, Any], *, answers: bool) -> None:
    (told,) = running(stage("balance", **task)).status()["tasks"]

    assert told.answers is answers


def test_the_connection_that_brokers_refuse_is_reported_with_their_reason() -> None:
    instance = running(stage("balance", ends_age=60))
    instance.engine.topics.refusal = "SSL handshake failed"  # type: ignore[misc]

    ((_, _, told),) = causes(instance)

    assert "do not accept each other: SSL handshake failed." in told


def test_an_instance_that_starts_heals_by_itself() -> None:
    joining = running(stage("balance"), joining=["balance"], unconfirmed=["balance"], has_begun=False, age=1)

    assert causes(joining) == [("joining", "NONE", "This instance joins the group of balance")]
    late = running(stage("balance"), joining=["balance"], unconfirmed=["balance"], age=31)
    assert causes(late) == [("joining", "SOON", "This instance joins the group of balance")]
    # It will not join before.
    refused = running(stage("balance"), joining=["balance"], refused=["grant this user Read"])
    assert causes(refused) == [("refused", "NOW", "grant this user Read")]
    assert causes(running(stage("balance"), has_begun=False, age=1)) == [
        ("joining", "NONE", "Spark begins to read at this instance")
    ]


def test_an_instance_that_is_cut_off_and_one_without_a_grant_say_so() -> None:
    refused = running(stage("balance"), refused=["grant this user Read"])

    assert causes(refused) == [("refused", "NOW", "grant this user Read")]
    ((kind, urgency, what),) = causes(running(stage("balance"), unconfirmed=["balance"]))
    assert (kind, urgency) == ("unconfirmed", "SOON")
    assert what.startswith("The group of balance has not confirmed this instance lately")
    # After an outage it will soon.
    recovers = running(stage("balance"), unconfirmed=["balance"], after_outage=True)
    assert [urgency for _, urgency, _ in causes(recovers)] == ["NONE"]


def test_a_topic_that_may_lose_records_is_urgent_and_misplaced_keys_are_less_so() -> None:
    lossy = stage("balance", misplaced="keys are misplaced")
    lossy.losses = ["the source is compacted"]

    assert causes(running(lossy)) == [
        ("losing-records", "NOW", "balance: the source is compacted"),
        ("misplaced", "SOON", "balance: keys are misplaced"),
    ]


def test_a_query_that_fails_is_reported_with_its_error_and_once() -> None:
    instance = running(stage("balance", failed=FAILED), stage("activity", unlooked="the topic is gone"))

    assert causes(instance) == [
        ("not-folded", "SOON", f"balance_0 is not folded: {FAILED}"),
        ("not-folded", "SOON", "activity is not folded: the topic is gone"),
    ]


def test_stages_that_have_one_problem_are_one_cause() -> None:
    both = [
        stage(name, unlooked="the topic is gone", misplaced="keys are misplaced") for name in ("balance", "activity")
    ]
    for one in both:
        one.losses = ["the source is compacted"]

    assert [what for _, _, what in causes(running(*both))] == [
        "balance, activity: the source is compacted",
        "balance, activity: keys are misplaced",
        "balance, activity are not folded: the topic is gone",
    ]
    failing = running(stage("balance", failed=FAILED), stage("activity", failed=FAILED))
    assert [what for _, _, what in causes(failing)] == [f"balance_0, activity_0 are not folded: {FAILED}"]


def test_a_task_that_stands_still_does_so_since_its_position_moved_last() -> None:
    instance = running(stage("balance", still_seconds=60))
    (task,) = instance.status()["tasks"]

    assert task.since == "2026-01-01T00:00:00.000Z"
    assert causes(instance) == [("stands-still", "NOW", f"balance_0 at here:1 is standing still: {SINCE}")]
