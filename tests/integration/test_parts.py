"""Writes in parts of a few records: no reader ever sees a part alone, and an interrupted write counts once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from balance_service.errors import RetriableError
from balance_service.process.failpoints import arm
from tests.integration.engines import (
    balance,
    catch_up,
    observed,
    running_engine,
    settings_for,
    standing_by,
    tasks_of,
)
from tests.support.kafka import Writer
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.store import StoreView
    from balance_service.hosting.engine import Engine

_CUSTOMERS = [f"c{n}" for n in range(40)]
_ROUNDS = 60
# Interrupts a commit between its parts, and the next commit too.
_CUT_AT = (60, 62)
_PAUSE_SECONDS = 0.05


@pytest.fixture(autouse=True)
def _small_parts() -> Iterator[None]:
    arm("parts=2")
    yield
    arm("")


@pytest.mark.shows("equal-copies")
def test_a_standby_never_answers_from_part_of_a_transaction(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with (
        running_engine(settings) as engine,
        Writer(stack, settings.topic) as writer,
        standing_by(engine, tmp_path / "standby") as standby,
    ):
        # Starts Spark's reads before the bulk of the events.
        _send(writer, 1)
        catch_up(engine)
        with observed(engine, _CUSTOMERS, lambda: standby.view) as seen:
            _send(writer, _ROUNDS - 1)
            catch_up(engine)
            eventually(lambda: standby.position == _ROUNDS * len(_CUSTOMERS), "the standby has caught up")
        assert seen, "the standby never answered"


@pytest.mark.shows("equal-copies")
def test_a_write_interrupted_between_two_parts_is_never_visible_and_counts_once(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    reached: list[str] = []

    def cut_off(point: str) -> None:
        reached.append(point)
        if len(reached) in _CUT_AT:
            raise RetriableError("the disk refuses the next write")

    monkeypatch.setattr("balance_service.engine.store.failpoint", cut_off)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        # Starts Spark's reads before the bulk of the events.
        _send(writer, 1)
        catch_up(engine)
        with observed(engine, _CUSTOMERS, lambda: _view(engine)) as seen:
            _send(writer, _ROUNDS - 1)
            catch_up(engine)
        assert seen, "the task never answered"
        assert len(reached) >= max(_CUT_AT), "no write was interrupted"
        assert {balance(engine, customer) for customer in _CUSTOMERS} == {_ROUNDS}


def _view(engine: Engine) -> StoreView | None:
    task = tasks_of(engine).task(0)
    return None if task is None else task.view


def _send(writer: Writer, rounds: int) -> None:
    frames = {customer: writer.frame(customer, "1.00") for customer in _CUSTOMERS}
    for _ in range(rounds):
        for customer in _CUSTOMERS:
            writer.send(customer, frames[customer])
        writer.producer.flush(10)
        # Spreads the events over many commits with pauses between them.
        time.sleep(_PAUSE_SECONDS)
