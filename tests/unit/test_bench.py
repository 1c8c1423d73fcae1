"""What the benchmark's figures rest on: valid events, right medians, ratios and goals, the right checkout in turn."""

from __future__ import annotations

import io
import subprocess
from decimal import Decimal
from typing import TYPE_CHECKING

import fastavro
import numpy as np
import pytest

from balance_service.avro.schemas import load_schema
from balance_service.tools.local.stack import LocalStack
from bench import run as bench_run
from bench.events import MAX_CENTS, customer_id, encoded
from bench.figures import NAMES, Figures, Key
from bench.goals import goal_of
from bench.machine import commit_of
from bench.plan import FULL, PAIRS
from bench.replay import Replay
from bench.run import Run
from bench.sides import BEFORE, OURS, THEIRS, OurSide
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

HEADER = b"\x00\x00\x00\x00\x07"
RATE = Key("replay", "100,000 customers", NAMES["rate"])


def test_events_encoded_in_bulk_are_what_the_schema_says() -> None:
    customers, cents = np.array([0, 63, 1_000_009, 5]), np.array([1, 127, 128, MAX_CENTS - 1])
    schema = fastavro.parse_schema(load_schema("FundsAdded"))
    ids = set()
    for number, amount, (key, frame) in zip(customers, cents, encoded(HEADER, customers, cents), strict=True):
        body = io.BytesIO(frame.removeprefix(HEADER))
        event = fastavro.schemaless_reader(body, schema, None)
        assert isinstance(event, dict)
        assert not body.read()
        assert key.decode() == event["customerId"] == customer_id(number)
        assert event["amount"] == Decimal(int(amount)).scaleb(-2)
        ids.add(event["id"])
    assert len(ids) == len(customers)


def test_a_ratio_is_that_of_the_medians() -> None:
    figures = Figures()
    for rate in (100.0, 900.0, 300.0):
        figures.add(OURS, "replay", RATE.case, rate=rate)
    figures.add(THEIRS, "replay", RATE.case, rate=150.0, evenness=None)
    assert figures.ratio(RATE) == 2.0
    assert figures.measured() == [RATE]


@pytest.mark.parametrize(("ours", "met"), [(299.0, False), (300.0, True)])
def test_a_goal_of_a_ratio_is_met_from_its_bound_on(ours: float, met: bool) -> None:
    figures = Figures()
    figures.add(OURS, "replay", RATE.case, rate=ours)
    figures.add(THEIRS, "replay", RATE.case, rate=100.0)
    goal = goal_of(RATE, THEIRS)
    assert goal is not None
    assert goal.is_met(figures, RATE) is met


def test_beside_an_earlier_checkout_the_ratio_is_to_that() -> None:
    key = Key("freshness", "1,000 events/s", NAMES["cpu_event"])
    figures = Figures(BEFORE)
    figures.add(OURS, key.measure, key.case, cpu_event=70.0)
    figures.add(BEFORE, key.measure, key.case, cpu_event=99.0)
    goal = goal_of(key, BEFORE)
    assert goal is not None
    assert goal.is_met(figures, key) is False
    figures.add(BEFORE, key.measure, key.case, cpu_event=103.0)
    assert goal.is_met(figures, key) is True
    assert goal_of(key, THEIRS) is None


@pytest.mark.parametrize(
    ("peer", "customers", "rates"), [(THEIRS, FULL.customers, FULL.rates), (BEFORE, PAIRS.customers, PAIRS.rates)]
)
def test_each_replay_and_each_rate_that_is_measured_has_a_goal(
    peer: str, customers: tuple[int, ...], rates: tuple[int, ...]
) -> None:
    name = NAMES["rate" if peer == THEIRS else "rate_with_start"]
    assert all(goal_of(Key("replay", f"{n:,} customers", name), peer) for n in customers)
    cases = [f"{rate:,} event{'s' if rate > 1 else ''}/s" for rate in rates]
    assert all(goal_of(Key("freshness", case, NAMES["p99"]), peer) for case in cases)


def test_the_sides_of_a_pair_take_turns_to_be_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(bench_run, "generate", lambda *_, **__: None)
    monkeypatch.setattr(bench_run, "measure_freshness", lambda _, side, *__: measured.append(side.name))
    run = Run(LocalStack(tmp_path), PAIRS, Figures(BEFORE), tmp_path)
    assert run.measure(["freshness"]) == []
    assert measured == [OURS, BEFORE, BEFORE, OURS, OURS, BEFORE]


def test_an_earlier_checkout_runs_in_its_folder_with_its_own_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "earlier/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "logs").mkdir()
    instance = OurSide(LocalStack(tmp_path), tmp_path / "earlier").instance(1, "topic", "application")
    instance.launch()
    log = tmp_path / "logs/instance-1.log"
    eventually(lambda: log.read_text().endswith("\n"), "it has said where it runs")
    instance.stop()
    assert log.read_text() == f"{tmp_path / 'earlier'} -m balance_service serve\n"


def test_a_changed_checkout_is_dirty_but_for_new_results(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        told = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return told.stdout.strip()

    assert commit_of(tmp_path / "none") == "unknown"
    git("init")
    git("commit", "--allow-empty", "--message", "first")
    head = git("rev-parse", "HEAD")
    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "bench/results/new.json").touch()
    assert commit_of(tmp_path) == head
    (tmp_path / "new.py").touch()
    assert commit_of(tmp_path) == f"{head}-dirty"


def test_a_replay_that_slows_down_is_uneven() -> None:
    commits = [(2.0, 100), (3.0, 200), (4.0, 300), (8.0, 500)]
    run = Replay(0.0, 1.0, 8.0, commits, 500, 10.0, 4.0, 1, [(float(t), 10 if t < 6 else 20) for t in range(9)])
    assert run.rate == pytest.approx(500 / 7)
    assert run.rate_with_start == pytest.approx(500 / 8)
    assert run.rate_after_commit == pytest.approx(400 / 6)
    assert run.evenness == pytest.approx(0.5)
    assert run.memory_growth == pytest.approx(2.0)
