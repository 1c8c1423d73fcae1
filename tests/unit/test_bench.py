"""What the benchmark's figures rest on: its events are valid, its medians, ratios and goals are right."""

from __future__ import annotations

import io
from decimal import Decimal

import fastavro
import numpy as np
import pytest

from balance_service.avro.schemas import load_schema
from bench.events import MAX_CENTS, customer_id, encoded
from bench.figures import NAMES, Figures, Key
from bench.goals import goal_of
from bench.replay import Replay
from bench.sides import OURS, THEIRS

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
    goal = goal_of(RATE)
    assert goal is not None
    assert goal.is_met(figures, RATE) is met


def test_a_replay_that_slows_down_is_uneven() -> None:
    commits = [(2.0, 100), (3.0, 200), (4.0, 300), (8.0, 500)]
    run = Replay(0.0, 1.0, 8.0, commits, 500, 10.0, 4.0, 1, [(float(t), 10 if t < 6 else 20) for t in range(9)])
    assert run.rate == pytest.approx(500 / 7)
    assert run.rate_with_start == pytest.approx(500 / 8)
    assert run.rate_after_commit == pytest.approx(400 / 6)
    assert run.evenness == pytest.approx(0.5)
    assert run.memory_growth == pytest.approx(2.0)
