"""The readiness of an instance and the problems that it reports."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from balance_service.engine.records import Role, StoreSizes, TaskId, TaskSnapshot
from balance_service.engine.task import ANSWERING, TaskState
from balance_service.errors import RetriableError
from balance_service.hosting.engine import Patience
from balance_service.hosting.instance import Instance

if TYPE_CHECKING:
    import pytest

HALTED = "activity_0 is HALTED: its fold failed"
FAILED = "org.apache.spark.SparkException: Job aborted. At 10.1.2.3"
ENDED = "a partition is not folded: its query has ended and is started again; /api/status and the log say why"


def stage(
    model: str, state: str = "RUNNING", reason: str = "", failed: str = "", unlooked: str = "", misplaced: str = ""
) -> Any:
    answers = TaskState(state) in ANSWERING
    task = TaskSnapshot(TaskId(model, 0), Role.ACTIVE, state, 1, 0, reason, 0, 0, None, StoreSizes(), answers)
    return SimpleNamespace(
        name=model,
        hosted=SimpleNamespace(
            name=model,
            stage=SimpleNamespace(owner=model),
            source=SimpleNamespace(name=model, partitions=1),
            misplaced=misplaced,
            watermarks=SimpleNamespace(lag=lambda _partition, _position: 0),
        ),
        snapshots=lambda: [task],
        query_problem=failed,
        source_problem=unlooked,
        problems=[problem for problem in (failed, unlooked) if problem],
    )


def running(*stages: Any, shared: str = "", has_begun: bool = True) -> Instance:
    joined = threading.Event()
    joined.set()
    membership = SimpleNamespace(joined=joined, problem="", partitions=(0,), lease=SimpleNamespace(holds=True))
    engine = SimpleNamespace(
        membership=membership,
        models={s.name: s for s in stages},
        stages={s.name: s for s in stages},
        stages_of=lambda name: [s for s in stages if s.name == name],
        tables=SimpleNamespace(snapshots=list),
        has_begun=has_begun,
    )
    table = SimpleNamespace(assigned=lambda _model, _partition: "here")
    directory = SimpleNamespace(problem="", shared_address_problem=shared, table=table, status=list)
    return Instance(engine=engine, directory=directory, commands={})  # type: ignore[arg-type]


def test_misplaced_keys_are_a_problem_and_leave_the_instance_ready() -> None:
    instance = running(stage("balance", misplaced="keys are misplaced"))

    assert (instance.unready(), instance.problems()) == ([], ["keys are misplaced"])
    assert instance.status()["problems"] == ["balance: keys are misplaced"]


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
    assert instance.status()["problems"] == [f"balance: {FAILED}"]


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

    assert Patience(threading.Event(), told.append).until_up(attempt) == "up"
    assert told == ["the broker is down", "the registry is down", ""]
