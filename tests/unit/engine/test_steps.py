"""Steps in columns have the result of steps one by one: states, outputs, dead letters, at every border of batches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balance_service import PER_KEY, Emit, OfState, ReadModel, RunningSum, Stream, scale
from balance_service.engine.fold import FoldProcessor
from balance_service.engine.misplaced import MisplacedKeys
from balance_service.engine.outputs import ENVELOPE_BYTES
from balance_service.engine.steps import Stepped, Steps
from balance_service.kafka.partitioner import Partitioning
from balance_service.testing import Driver, event

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from balance_service.testing import InputEvent

MONEY = 2
LARGEST_TEXT = 40
MOST = 10**36 - 1


@dataclass
class Bought:
    card: str
    amount: Annotated[Decimal, scale(MONEY)] | None
    note: str = ""


@dataclass
class Spent:
    card: str
    total: Annotated[Decimal, scale(MONEY)]


@dataclass
class Told:
    note: str
    total: Annotated[Decimal, scale(MONEY)] | None
    card: str
    again: Annotated[Decimal, scale(MONEY)]


class Telling(ReadModel):
    name = "telling"
    source = Stream("bought", Bought)
    key = "card"
    state = Spent
    emits = Emit(
        "told", Told, fields={"note": "note", "total": OfState("total"), "card": "card", "again": OfState("total")}
    )
    total = RunningSum("Bought.amount")


class InOrder(Telling):
    """Events of a key wait for an earlier one that cannot be read yet."""

    name = "in-order"
    order = PER_KEY


amounts = st.one_of(
    st.none(),
    st.decimals(-1000, 1000, places=MONEY),
    # Around the bytes that a number takes, the 64 bits that are added in columns, and the type.
    st.sampled_from([2**7, 2**15, 2**55, 2**62 - 1, 2**62, 2**63, 10**37, 10**38 - 1]).flatmap(
        lambda most: st.sampled_from([Decimal(f"{one}e-{MONEY}") for one in (most, -most, most - 1, 1 - most)])
    ),
)
cards = st.sampled_from(["a", "b", "ab", "a" * 63, "b" * 64, "\xfc", "stranger", "other"])
events = st.builds(
    lambda card, amount, note, once, at, unreadable: event(
        "Bought",
        {"card": card, "amount": amount, "note": note},
        idempotency_key=once,
        timestamp_ms=at,
        unreadable=unreadable,
    ),
    cards,
    amounts,
    st.sampled_from(["", "n", "x" * 2 * LARGEST_TEXT]),
    st.sampled_from([None] * 8 + ["once"]),
    st.integers(0, 3),
    st.sampled_from([None] * 12 + ["schema-id-unknown"]),
)


def driver_of(model: type[ReadModel], *, in_columns: bool) -> Driver:
    """Returns a driver whose partition is one of two, and whose outputs have bounded notes."""
    driver = Driver(model, combines_few=True, is_accelerated=in_columns)
    task = driver.last_stage
    assert isinstance(task.processor, FoldProcessor)
    emission = task.processor.emission
    assert emission is not None
    assert (task.processor.steps is not None) is in_columns
    target = dataclasses.replace(emission.target, largest_bytes=ENVELOPE_BYTES + 2 * LARGEST_TEXT)
    task.processor = dataclasses.replace(
        task.processor,
        emission=dataclasses.replace(emission, target=target),
        misplaced=MisplacedKeys("bought", Partitioning(2, "murmur2")),
    )
    return driver


def found(driver: Driver) -> dict[str, Any]:
    """Returns everything that a history results in."""
    task = driver.last_stage
    position = task.store.position
    assert position is not None
    return {
        "states": task.states(),
        "records": [dict(records) for records, _, _ in task.writer.commits],
        "keys": position.keys,
        "sent": task.writer.sent,
        "letters": [*task.dead_letters()],
        "open": task.letters(),
    }


def check_equal(model: type[ReadModel], batches: Sequence[Sequence[InputEvent]]) -> None:
    with driver_of(model, in_columns=True) as columns, driver_of(model, in_columns=False) as one_by_one:
        for batch in batches:
            one, other = columns.commit(batch), one_by_one.commit(batch)
            assert one == other
            assert found(columns) == found(one_by_one)
        # Nothing is sent again, but what was never sent.
        columns.rebuild()
        one_by_one.rebuild()
        assert found(columns) == found(one_by_one)


@pytest.mark.parametrize("model", [Telling, InOrder], ids=lambda model: model.name)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=st.lists(events, min_size=1, max_size=12), data=st.data())
def test_steps_in_columns_equal_steps_one_by_one(
    model: type[ReadModel], history: list[InputEvent], data: st.DataObject
) -> None:
    borders = sorted(data.draw(st.sets(st.integers(1, len(history)), max_size=3)))
    check_equal(model, [history[at:to] for at, to in zip([0, *borders], [*borders, len(history)], strict=True)])


def bought(card: str, amount: str, note: str = "", **more: Any) -> InputEvent:
    return event("Bought", {"card": card, "amount": Decimal(amount), "note": note}, **more)


HISTORY = [
    bought("a", "1.27"),
    bought("b", "0.01", timestamp_ms=7),
    bought("a", "0.01"),
    bought("a", "99999999999999999.99"),
    bought("c", "1.00", "x" * 2 * LARGEST_TEXT),
    bought("b", "-5.00", idempotency_key="one"),
    bought("c", "2.00"),
    bought("\xfc", "2.00"),
    bought("a", str(MOST)),
    bought("b", "-5.00", idempotency_key="one"),
    bought("a", str(MOST)),
    bought("a", "3.00"),
]


@pytest.mark.parametrize("border", range(len(HISTORY) + 1))
def test_the_result_is_the_same_at_every_border_of_batches(border: int) -> None:
    check_equal(Telling, [HISTORY[:border], HISTORY[border:]])


def test_plain_steps_are_made_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[int] = []
    of = Steps.of

    def counting(self: Steps, *given: Any) -> Iterator[Stepped]:
        for stepped in of(self, *given):
            rests.append(stepped.rest.num_rows)
            yield stepped

    monkeypatch.setattr(Steps, "of", counting)
    with driver_of(Telling, in_columns=True) as driver:
        driver.given(bought("a", "1.00"), bought("ab", "1.00"), bought("a", "300.00"), bought("\xfc", "1.00"))
        driver.given(bought("a", "1.00"), bought("\xfc", "1.00"))

        # Only a key that is not plain text begins one by one.
        assert [len(driver.last_stage.writer.sent), *rests] == [6, 1, 0]
