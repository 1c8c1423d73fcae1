"""A generation that does not serve sends nothing; from the moment that it sends, nothing is sent twice or never."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.commit import Committed, commit, write_position
from balance_service.model.events import LAST, Emit
from balance_service.read_models.purchases import Purchases
from balance_service.read_models.rewards import Rewards
from balance_service.testing import Driver, event
from tests.support.models import SCORED, Noted
from tests.unit.model.test_events import LINE, Paid, Picky, Totals, sold

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.model.read_model import ReadModel
    from balance_service.testing import InputEvent
    from balance_service.testing.driver import DrivenTask

    Made = Callable[[str], InputEvent]

LATE = "schema-id-unknown"


def sends_from(driver: Driver, offset: int | None) -> None:
    """Has the outputs sent from an offset on; None: another generation sends them."""
    stage = driver.last_stage
    stage.deliver = partial(deliver, stage, is_silent=offset is None)  # type: ignore[method-assign]
    if offset is not None:
        position = stage.store.position
        assert position is not None
        moved = replace(position, emitted_up_to=offset)
        write_position(moved, stage.processor.position_codec, stage.store, stage.writer)


def deliver(stage: DrivenTask, batch: TaskBatch, *, is_silent: bool) -> Committed:
    return commit(replace(batch, is_silent=is_silent), 0, stage.processor, stage.store, stage.writer)


def sent(driver: Driver) -> list[int]:
    """The offsets of the events whose outputs were sent, in the order of sending."""
    return [output.offset for output in driver.last_stage.writer.sent]


def late(made: InputEvent) -> InputEvent:
    """An event that becomes readable later."""
    return replace(made, unreadable=LATE)


def bought(amount: str) -> InputEvent:
    return sold(amount, deliveryType="TAKEAWAY", lines=[LINE])


def paid(amount: str) -> InputEvent:
    return event(SCORED, {"id": "g", "paid": Decimal(amount), "tags": []})


class LastPaid(Paid):
    """Emits the last state of each commit."""

    name = "test-last-paid"
    emits = Emit("paid", each=LAST)


HEALING = [(Paid, paid), (LastPaid, paid), (Noted, paid), (Purchases, bought)]


@given(st.integers(0))
def test_no_offset_is_sent_by_a_silent_task_not_even_one_that_was_never_sent(offset: int) -> None:
    assert (
        TaskBatch(offset, PartitionUpdates(offset + 1), unsent=frozenset([offset]), is_silent=True).is_to_be_sent(
            offset, 0
        )
        is False
    )
    assert TaskBatch(offset, PartitionUpdates(offset + 1), is_silent=True).is_to_be_sent(offset, 0) is False


def test_the_last_state_is_sent_though_a_batch_that_begins_with_sent_events_leads_back_to_the_state_before_it() -> None:
    with Driver(LastPaid()) as driver:
        driver.given(paid("1.00"))
        # Another generation has sent the state after one more event.
        sends_from(driver, 2)

        driver.given(paid("2.00"), paid("-2.00"))

        assert sent(driver) == [0, 2]


@pytest.mark.parametrize("model", [Rewards, Totals, Picky, Purchases])
def test_a_silent_task_sends_nothing_and_makes_the_same_states(model: type[ReadModel]) -> None:
    events = [bought("1.00"), bought("5.00"), bought("9.00"), bought("2.00")]
    with Driver(model()) as serving, Driver(model()) as building:
        serving.given(*events)
        sends_from(building, None)
        building.given(*events[:2]).given(*events[2:])

        assert sent(serving) != []
        assert sent(building) == []
        assert building.states() == serving.states()
        # The serving generation has written them.
        assert building.dead_letters() == []


@pytest.mark.parametrize(("model", "made"), HEALING)
def test_a_dead_letter_that_a_silent_task_heals_sends_nothing(model: type[ReadModel], made: Made) -> None:
    with Driver(model()) as driver:
        sends_from(driver, None)
        driver.given(made("5.00"), late(made("6.00")), made("9.00"))
        assert driver.dead_letters() == []

        driver.mend(LATE).redrive(1)

        assert [letter.status.value for letter in driver.letters()] == ["applied"]
        assert sent(driver) == []


@pytest.mark.parametrize(("model", "made"), HEALING)
def test_a_silent_task_whose_redrive_fails_sends_nothing(model: type[ReadModel], made: Made) -> None:
    with Driver(model()) as driver:
        sends_from(driver, None)

        driver.given(late(made("6.00"))).redrive(0)

        assert [letter.status.value for letter in driver.letters()] == ["scheduled"]
        assert sent(driver) == []


@pytest.mark.parametrize(("model", "made"), HEALING)
def test_a_task_that_begins_to_send_sends_the_dead_letters_that_heal_from_then_on_once(
    model: type[ReadModel], made: Made
) -> None:
    with Driver(model()) as driver:
        sends_from(driver, None)
        driver.given(made("5.00"), late(made("6.00")), made("9.00"))

        sends_from(driver, 3)
        driver.given(made("8.00"))
        before = set(sent(driver))
        driver.mend(LATE).redrive(1).redrive(1)
        driver.given(made("7.00"))

        assert (before, set(sent(driver))) == ({3}, {3, 1, 4})
        times = [sent(driver).count(offset) for offset in (1, 3, 4)]
        assert len(set(times)) == 1


def test_an_output_is_sent_though_the_keys_last_event_of_the_batch_was_sent_before_it_failed() -> None:
    with Driver(LastPaid()) as driver:
        driver.given(late(paid("5.00")))
        # The outputs of a later event were sent, which cannot be read now.
        sends_from(driver, 2)
        driver.given(late(paid("6.00")))
        assert [letter.is_sent for letter in driver.letters()] == [False, True]

        driver.mend(LATE).redrive(0, 1)

        assert [letter.status.value for letter in driver.letters()] == ["applied", "applied"]
        (output,) = driver.last_stage.writer.sent
        state = driver.view("g")
        assert state is not None
        assert state["paid"] == Decimal("11.00")
        assert (output.offset, output.value) == (0, driver.states()[b"g"])


@pytest.mark.parametrize("model", [Rewards, Totals, Picky, Purchases])
def test_two_generations_of_which_one_sends_at_a_time_send_what_one_would(model: type[ReadModel]) -> None:
    events = [bought(f"{n}.00") for n in (5, 6, 8, 9, 11, 12)]
    with Driver(model()) as alone, Driver(model()) as old, Driver(model()) as new:
        for one in events:
            alone.given(one)
        sends_from(new, None)
        for one in events[:3]:
            old.given(one)
            new.given(one)
        # The switch at offset 3, and the way back at offset 5.
        sends_from(old, None)
        sends_from(new, 3)
        for one in events[3:5]:
            old.given(one)
            new.given(one)
        sends_from(new, None)
        sends_from(old, 5)
        old.given(events[5])
        new.given(events[5])

        def told(*drivers: Driver) -> list[tuple[int, bytes | None, bytes | None]]:
            outputs = [output for driver in drivers for output in driver.last_stage.writer.sent]
            return sorted((output.offset, output.key, output.value) for output in outputs)

        assert told(old, new) == told(alone)
        assert {offset for offset, *_ in told(new)} == {3, 4}
        assert old.states() == new.states() == alone.states()
