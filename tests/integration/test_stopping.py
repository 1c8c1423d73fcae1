"""Shutdown under load: an instance ends within seconds, in order, without errors."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import TYPE_CHECKING

import httpx
from structlog.testing import capture_logs

from balance_service.hosting.engine import Engine
from balance_service.model.placing import stages_of
from balance_service.observability.metrics import Metrics
from balance_service.read_models.balance import Balance
from tests.integration.engines import (
    Load,
    assert_counted_once,
    counted,
    customers_in,
    running_engine,
    settings_for,
    startup_retries,
    state_directory,
)
from tests.support.kafka import Writer
from tests.support.service import STOP_SECONDS, application, new_instance, running, terminate, warm_up
from tests.support.waiting import SHARED, eventually

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from balance_service.devtools.local.stack import LocalStack

CUSTOMERS = [*customers_in(0), *customers_in(1)]
ENGINE_STOPS_WITHIN_SECONDS = 5.0 * SHARED


def test_an_engine_stops_under_load_within_seconds_and_spark_after_the_last_task(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    at_work: list[list[str]] = []
    engine = Engine(
        settings, state_directory(settings), stages_of(Balance(), settings), [Balance()], Metrics(), startup_retries()
    )
    stop_spark = engine.spark.stop

    def recorded() -> None:
        at_work.append([t.name for t in threading.enumerate() if t.name.startswith("task-")])
        stop_spark()

    monkeypatch.setattr(engine.spark, "stop", recorded)
    engine.start()
    try:
        with Writer(stack, settings.topic) as writer, Load(writer, CUSTOMERS, per_second=1_000):
            eventually(lambda: counted(engine, "applied") > 2_000, "the engine folds")
            began = time.monotonic()
            with capture_logs() as logs:
                engine.stop()
            took = time.monotonic() - began
    except BaseException:
        engine.stop()
        raise
    assert took < ENGINE_STOPS_WITHIN_SECONDS
    assert at_work == [[]]
    assert [entry for entry in logs if entry["log_level"] not in ("debug", "info")] == []
    with running_engine(settings) as successor:
        assert_counted_once(stack, successor)


def test_a_process_terminated_under_load_logs_no_errors(stack: LocalStack) -> None:
    instance = new_instance(stack, application())
    topic = instance.environment["BALANCE_TOPIC"]
    with running(instance), Writer(stack, topic) as writer:
        warm_up(instance.url)
        with Load(writer, CUSTOMERS, per_second=1_000):
            eventually(lambda: _applied(instance.url) > 2_000, "the instance folds")
            code, seconds = terminate(instance)
    said = instance.log.read_text(encoding="utf-8")
    assert code == 0, said
    assert seconds < STOP_SECONDS
    lines = said[said.index('"event": "stopping"') :].splitlines()[1:]
    strange = [line for line in lines if not line.startswith("{") or json.loads(line)["level"] not in ("info", "debug")]
    assert strange == []


def _applied(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(float(found) for found in re.findall(r"^balance_events_applied_total\{.*\} (\S+)$", text, re.MULTILINE))
