"""An instance tells operators about its process, its settings and its log, and where a model's code failed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from balance_service.engine.records import FailedAt, Role, StoreSizes, TaskSnapshot
from balance_service.hosting.details import details_of
from balance_service.http.answer import compact_json
from balance_service.http.instance_details import InstanceDetails
from balance_service.model.keys import TEXT, KeyType
from balance_service.model.record_keys import RecordKey
from balance_service.process.package import __version__
from balance_service.settings import load_settings
from balance_service.spark.session import SparkSample

BEGAN_MS = 1_767_225_600_000
SECRET = "a secret of all instances"

pytestmark = pytest.mark.usefixtures("no_environment")


def details(state_dir: Path, engine: Any = None, **settings: Any) -> dict[str, Any]:
    found = details_of(load_settings(state_dir=state_dir, **settings), BEGAN_MS, engine)
    told = compact_json(found)
    TypeAdapter(InstanceDetails).validate_json(told, strict=True)
    shown: dict[str, Any] = json.loads(told)
    return shown


def engine(*tasks: TaskSnapshot, key_type: KeyType = TEXT) -> Any:
    sampler = SimpleNamespace(jvm_pid=os.getpid(), sample=SparkSample(1, 2, 3, 0.5))
    stage = SimpleNamespace(snapshots=lambda: [*tasks], hosted=SimpleNamespace(key_type=key_type))
    return SimpleNamespace(spark_sampler=sampler, stages={"m": stage})


def task(partition: int, failed_at: FailedAt | None = None) -> TaskSnapshot:
    sizes = StoreSizes(file_bytes=100)
    return TaskSnapshot(
        "m", partition, Role.ACTIVE, "HALTED", 1, 5, sizes=sizes, failed_at=failed_at, state_since_ms=BEGAN_MS
    )


def test_an_instance_that_starts_tells_its_version_its_start_and_its_disk(tmp_path: Path) -> None:
    found = details(tmp_path)

    assert (found["version"], found["startedAt"]) == (__version__, "2026-01-01T00:00:00.000Z")
    assert 0 < found["freeBytes"] <= found["diskBytes"]
    assert (found["jvm"], found["heapBytes"], found["halted"], found["storeBytes"]) == (None, None, [], 0)


def test_a_state_directory_that_does_not_exist_yet_has_no_disk(tmp_path: Path) -> None:
    assert details(tmp_path / "none")["freeBytes"] is None


def test_a_started_instance_tells_the_processor_time_and_the_memory_of_both_processes(tmp_path: Path) -> None:
    found = details(tmp_path, engine(task(0), task(1)))

    assert (found["heapBytes"], found["mostHeapBytes"], found["storeBytes"]) == (1, 3, 200)
    if Path("/proc/self/stat").exists():
        assert found["python"] is not None
        assert found["jvm"] is not None
        assert found["python"]["cpuSeconds"] > 0
        assert found["jvm"]["memoryBytes"] > 1 << 20


def test_settings_are_shown_without_secrets_and_those_that_were_given_are_marked(tmp_path: Path) -> None:
    found = details(tmp_path, peer_secret=SECRET, peer_secrets_former=f"{SECRET} of old", http_port=5055)

    by_name = {one["name"]: one for one in found["settings"]}
    assert by_name["BALANCE_HTTP_PORT"] == {"name": "BALANCE_HTTP_PORT", "value": "5055", "isSet": True}
    assert not by_name["BALANCE_LOG_LEVEL"]["isSet"]
    assert by_name["BALANCE_PEER_SECRET"]["value"] == "**********"
    assert SECRET not in str(found)


@pytest.mark.parametrize(
    ("key", "shown"),
    [(b"ada", {"key": "ada"}), (b"\xff", {"key": None, "keyBase64": "/w=="}), (None, {"key": None})],
)
def test_a_task_that_a_models_code_halted_has_the_key_of_the_event_and_the_line(
    tmp_path: Path, key: bytes | None, shown: dict[str, Any]
) -> None:
    at = FailedAt(key, "/srv/shop.py:3, in fold: 1 / 0", "ZeroDivisionError: division by zero")

    (halted,) = details(tmp_path, engine(task(0), task(1, at)))["halted"]

    assert halted == {
        "task": "m_1",
        "since": "2026-01-01T00:00:00.000Z",
        "line": "/srv/shop.py:3, in fold: 1 / 0",
        "error": "ZeroDivisionError: division by zero",
        **shown,
    }


def test_the_key_of_a_halted_task_is_shown_as_queries_name_it(tmp_path: Path) -> None:
    key_type = RecordKey.of_format("long")
    at = FailedAt(key_type.encode(-5), "", "")

    (halted,) = details(tmp_path, engine(task(0, at), key_type=key_type))["halted"]

    assert halted["key"] == "-5"
