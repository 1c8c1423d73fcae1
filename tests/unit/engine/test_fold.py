"""An event is a dead letter if the state after it does not fit its schema or the changelog."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.assembly import processor_of
from balance_service.engine.fold import FoldProcessor
from balance_service.kafka.topic_specs import prepare_topics
from balance_service.model.folds import Count, Latest
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.settings import load_settings
from balance_service.testing import Driver, event
from balance_service.testing.fakes import FakeRegistry
from tests.support.fakes import InMemoryTopics
from tests.support.models import MONEY, WHEN, WIDE_MONEY, ship
from tests.support.shipped import KNOWN, stages_in, surroundings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.model.events import Event, State
    from balance_service.testing.rows import InputEvent

TEXT = ["null", "string"]
ship("Written", {"id": "string", "text": TEXT, "paid": ["null", MONEY]})
ship("LastWritten", {"id": "string", "text": TEXT, "paid": ["null", WIDE_MONEY], "times": "long"})
ship("Pages", {"pages": {"type": "array", "items": "string"}, "at": ["null", WHEN]})
# The driver's changelog takes batches of 1 MiB.
LARGE = "x" * (1 << 20)


class LastWritten(ReadModel):
    """The last text and payment, and the number of events."""

    name = "test-last-written"
    source = Stream("writings", "Written")
    key = "id"
    state = "LastWritten"

    text = Latest("Written.text")
    paid = Latest("Written.paid")
    times = Count("Written")


class Pages(ReadModel):
    """All texts, and the time of the last one."""

    name = "test-pages"
    source = Stream("writings", "Written")
    key = "id"
    state = "Pages"

    def fold(self, state: State | None, event: Event) -> State | None:
        return {"pages": [*(state["pages"] if state else ()), event["text"] or ""], "at": event.timestamp_ms}


def written(text: str | None, key: str = "k", **more: Any) -> InputEvent:
    return event("Written", {"id": key, "text": text}, **more)


def causes(driver: Driver) -> list[tuple[str, str]]:
    return [(letter.event.fields["text"], letter.cause) for letter in driver.dead_letters()]


@pytest.mark.parametrize("at_ms", [1_700_000_000_000_000, 1 << 62])
def test_an_event_whose_state_could_not_be_decoded_again_is_a_dead_letter(at_ms: int) -> None:
    with Driver(Pages()) as driver:
        # A producer may write timestamps in microseconds.
        driver.given(written("a", timestamp_ms=1), written("b", timestamp_ms=at_ms), written("c", timestamp_ms=3))

        assert causes(driver) == [("b", "state-does-not-fit")]
        assert driver.view("k")["pages"] == ["a", "c"]


@pytest.mark.parametrize("once", [None, "same"])
@pytest.mark.parametrize("combines", [True, False])
def test_if_a_standard_folds_state_does_not_fit_its_schema_the_event_that_caused_it_is_a_dead_letter(
    monkeypatch: pytest.MonkeyPatch, combines: bool, once: str | None
) -> None:
    own, misfit = LastWritten.next_state, Decimal("0.001")

    def next_state(model: LastWritten, state: Any, key: bytes, update: Mapping[str, Any], *event: Any) -> Any:
        paid = {"b": misfit, "c": None}.get(update["text"], Decimal("1.00"))
        return own(model, state, key, {**update, "paid": paid}, *event)

    monkeypatch.setattr(LastWritten, "next_state", next_state)
    with Driver(LastWritten(), combines_few=combines) as driver:
        driver.given(
            written("a", idempotency_key=once), written("a", idempotency_key=once), written("b"), written("z", key="l")
        )

        assert causes(driver) == [("b", "state-does-not-fit")]
        assert driver.view("k") == {"text": "a", "paid": Decimal("1.00"), "times": 1 if once else 2}
        assert driver.view("l")["times"] == 1


@pytest.mark.parametrize("combines", [True, False])
def test_an_event_that_makes_a_state_too_large_for_the_changelog_is_a_dead_letter(combines: bool) -> None:
    with Driver(LastWritten(), combines_few=combines) as driver:
        driver.given(written("a"), written(LARGE), written("b", key="l")).given(written(None), written(LARGE))

        assert causes(driver) == [(LARGE, "state-does-not-fit")] * 2
        assert driver.view("k") == {"text": "a", "paid": None, "times": 2}
        assert driver.view("l") == {"text": "b", "paid": None, "times": 1}


def test_a_state_that_grows_too_large_for_the_changelog_keeps_its_earlier_content() -> None:
    page = "x" * (300 << 10)
    with Driver(Pages()) as driver:
        driver.given(*[written(page)] * 2).given(*[written(page)] * 2, written("the last"))

        assert causes(driver) == [(page, "state-does-not-fit")]
        assert driver.view("k")["pages"] == [page, page, page, "the last"]


@pytest.mark.usefixtures("no_environment")
@pytest.mark.parametrize(("takes", "largest"), [(3 << 20, 3 << 20), (64 << 20, 16 << 20)])
def test_a_state_may_be_as_large_as_both_changelog_and_producer_accept(takes: int, largest: int) -> None:
    settings, topics = load_settings(application_id="app"), InMemoryTopics(balance=2)
    stages = stages_in(settings)
    of_topics: Any = topics
    prepared = prepare_topics(of_topics, settings, stages)
    topics.configs[stages[0].changelog]["max.message.bytes"] = str(takes)

    processor = processor_of(stages[0], KNOWN["balance"], surroundings(settings, of_topics, prepared, FakeRegistry()))

    assert isinstance(processor, FoldProcessor)
    assert processor.frames.largest_bytes == largest
