"""The states of a fold of one's own do not depend on where batches end, whatever its code does with what it gets."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass, replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from itertools import pairwise, product
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balance_service import scale
from balance_service.avro.flat_records import FlatRecords
from balance_service.engine import own_steps
from balance_service.engine.fold import _OneByOne
from balance_service.errors import PoisonRecordError, TaskMigratedError
from balance_service.model.events import DEAD_LETTER, EVENT, Emit
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.testing import Driver, event
from tests.support.models import ship

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from balance_service.model.events import Event
    from balance_service.testing.rows import InputEvent

ship("Deed", {"id": "string", "does": "string"})
ship("DeedHeard", {"id": "string", "does": "string", "seen": "string"})
ship("DeedFlat", {"id": "string", "times": "long", "said": "string"})
ship("DeedRounded", {"share": "float", "times": "long"})
ship("DeedDeep", {"said": {"type": "array", "items": "string"}, "by": {"type": "map", "values": "long"}})
# The driver's changelog takes batches of 1 MiB.
LARGE = "x" * (1 << 20)


class Told:
    source = Stream("deeds", "Deed")
    key: str | tuple[str, ...] = "id"
    on_failure = DEAD_LETTER


@dataclass(frozen=True)
class Lasting:
    times: int = 0
    said: str = ""
    note: str | None = None


class OfLasting(Told, ReadModel):
    name = "test-own-lasting"
    state = Lasting

    def fold(self, state: Lasting | None, told: Event) -> Lasting | None:
        state = state or Lasting()
        does = told["does"]
        if does == "delete":
            return None
        if does in ("refuse", "fail"):
            # Even what is frozen can be changed.
            object.__setattr__(state, "said", "changed by an event that is not applied")
            raise PoisonRecordError("no", "refused") if does == "refuse" else ValueError("failed")
        wrong: dict[str, Any] = {"true": True, "beyond": 1 << 63, "none": None}
        if does in wrong:
            return Lasting(wrong[does], state.said)
        text = {"large": LARGE, "lone": "\ud800", "wide": "Zürich 東京" * 9}.get(does, does)
        return Lasting(state.times + 1, text if does in ("large", "lone") else (state.said + text)[-300:], told["id"])


class OfFlat(Told, ReadModel):
    """Changes the state that it gets, before it fails too, and later the one that it returned."""

    name = "test-own-flat"
    state = "DeedFlat"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._returned: list[dict[str, Any]] = []

    def fold(self, state: dict[str, Any] | None, told: Event) -> dict[str, Any] | None:
        for earlier in self._returned:
            earlier["said"] = "changed after it was returned"
        state = {"id": told["id"], "times": 0, "said": ""} if state is None else state
        does = told["does"]
        if does == "delete":
            return None
        state["times"] += 1
        state["said"] = state["said"][-100:] + does
        if does in ("refuse", "fail"):
            raise PoisonRecordError("no", "refused") if does == "refuse" else ValueError("failed")
        if does in ("true", "beyond", "none", "lone", "large"):
            wrong = {"true": True, "beyond": 1 << 63, "none": None, "lone": "\ud800", "large": LARGE}[does]
            return {**state, "said" if isinstance(wrong, str) else "times": wrong}
        self._returned.append(state)
        return state


class OfDeep(OfFlat):
    name = "test-own-deep"
    state = "DeedDeep"

    def fold(self, state: dict[str, Any] | None, told: Event) -> dict[str, Any] | None:
        for earlier in self._returned:
            earlier["said"].append("changed after it was returned")
        state = {"said": [], "by": {}} if state is None else state
        does = told["does"]
        if does == "delete":
            return None
        state["said"].append(LARGE if does == "large" else does)
        state["by"][does] = len(state["said"])
        if does in ("refuse", "fail"):
            raise PoisonRecordError("no", "refused") if does == "refuse" else ValueError("failed")
        if does in ("beyond", "none"):
            state["by"][does] = {"beyond": 1 << 63, "none": None}[does]
        self._returned.append(state)
        return state


class OfRounded(Told, ReadModel):
    """Counts what a float of 32 bits leaves of a third."""

    name = "test-own-rounded"
    state = "DeedRounded"

    def fold(self, state: dict[str, Any] | None, told: Event) -> dict[str, Any]:
        share = state["share"] if state else 0.0
        if told["does"] == "refuse":
            raise PoisonRecordError("no", "refused")
        times = (state["times"] if state else 0) + (share != 1 / 3)
        return {"share": 1 / 3, "times": times}


@dataclass
class Changing:
    """Values that are read as others: of a scale, in a time zone, and lists that can change."""

    amount: Annotated[Decimal, scale(2)] = Decimal(0)
    at: datetime = datetime(2020, 1, 1, tzinfo=UTC)
    shares: list[float] = field(default_factory=list)
    said: str = ""


class OfChanging(Told, ReadModel):
    name = "test-own-changing"
    state = Changing

    def fold(self, state: Changing | None, told: Event) -> Changing | None:
        state = state or Changing()
        does = told["does"]
        if does == "delete":
            return None
        seen = f"{state.amount}/{state.at}/{state.shares[-1:]}"
        state.shares.append(1)
        state.said = seen
        if does in ("refuse", "fail"):
            raise PoisonRecordError("no", "refused") if does == "refuse" else ValueError("failed")
        state.amount += Decimal("0.001") if does == "beyond" else 1
        state.at = (state.at + timedelta(hours=1)).astimezone(timezone(timedelta(hours=5)))
        return state


class OfOutputs(OfFlat):
    """Changes the state that it emits."""

    name = "test-own-outputs"
    emits = Emit("heard", "DeedHeard", each=EVENT)

    def emit(self, state: dict[str, Any] | None, told: Event) -> dict[str, Any]:
        seen = "" if state is None else state["said"]
        if state is not None:
            state["said"] = "changed by what emits it"
        return {"id": told["id"], "does": told["does"], "seen": seen}


class LastingOutputs(OfLasting):
    name = "test-own-lasting-outputs"
    emits = Emit("heard", "DeedHeard", each=EVENT)

    def emit(self, state: Lasting | None, told: Event) -> dict[str, Any]:
        if told["does"] == "wide":
            raise PoisonRecordError("no", "refused by what emits it")
        return {"id": told["id"], "does": told["does"], "seen": state.said if state else ""}


MODELS = [OfLasting, OfFlat, OfDeep, OfRounded, OfChanging, OfOutputs, LastingOutputs]
DEEDS = ["a", "b", "wide", "refuse", "fail", "delete", "true", "beyond", "none", "lone", "large"]


def told(does: str, key: str = "k") -> InputEvent:
    return event("Deed", {"id": key, "does": does})


def outcome(model: type[ReadModel], batches: Sequence[Sequence[InputEvent]], *, in_columns: bool = True) -> Any:
    with Driver(model, combines_few=in_columns, is_accelerated=in_columns) as driver:
        for batch in batches:
            driver.given(*batch)
        letters = [(one.event.fields, one.cause) for one in driver.dead_letters()]
        return driver.states(), driver.counted, letters, driver.emitted("heard") if hasattr(model, "emits") else None


def cuts(events: Sequence[InputEvent]) -> Iterator[list[Sequence[InputEvent]]]:
    for is_cut in product([False, True], repeat=len(events) - 1):
        ends = [0, *(at for at, cut in enumerate(is_cut, 1) if cut), len(events)]
        yield [events[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "deeds", [["a", "refuse", "a", "fail"], ["a", "b", "beyond", "a", "a"], ["a", "delete", "refuse", "a"]]
)
def test_events_that_are_not_applied_leave_no_trace_at_any_border(model: type[ReadModel], deeds: list[str]) -> None:
    events = [told(does) for does in deeds]

    defined = outcome(model, [events], in_columns=False)

    assert outcome(model, [[one] for one in events], in_columns=False) == defined
    assert all(outcome(model, batches) == defined for batches in cuts(events))


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.tuples(st.sampled_from(DEEDS), st.sampled_from("kl")), max_size=5), max_size=4))
def test_the_outcome_does_not_depend_on_batches(model: type[ReadModel], drawn: list[list[tuple[str, str]]]) -> None:
    # An instance halts after a few events that fail at its start.
    batches = [[told("a"), told("a", "l")], *([told(*one) for one in batch] for batch in drawn)]
    events = [one for batch in batches for one in batch]

    defined = outcome(model, batches, in_columns=False)
    assert outcome(model, batches) == outcome(model, [[one] for one in events]) == outcome(model, [events]) == defined


class Suit(Enum):
    HEARTS = 1
    SPADES = 2


@dataclass(frozen=True)
class Inner:
    share: float
    pages: list[str]


MONEY = Annotated[Decimal, scale(2, precision=6)]
# Of each type, values that are kept as they are, and values that are refused or read as others.
GIVEN: list[tuple[Any, list[Any]]] = [
    (int, [0, -1, 1 << 62, True, 1 << 63, 1.0]),
    (str, ["", "a", "Zürich", "\ud800", LARGE, None]),
    (bool, [True, False, 1, None]),
    (bytes, [b"", b"\xff", bytearray(b"a")]),
    (date, [date(1, 1, 1), date(2020, 1, 1), datetime(2020, 1, 1, tzinfo=UTC)]),
    (Suit, [Suit.HEARTS, "HEARTS"]),
    (float, [0.1, -0.0, float("inf"), 1, Decimal(1)]),
    (MONEY, [Decimal("1.10"), Decimal("1.1"), Decimal("-0.00"), Decimal("0.001"), Decimal("10000.00"), Decimal("NaN")]),
    (datetime, [datetime(2020, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=5)))]),
    (list[float], [[], [0.1, 1]]),
    (dict[str, int], [{}, {"a": 1}, {"a": None}]),
    (Inner, [Inner(1, ["a"]), Inner(0.5, [])]),
    (int | None, [None, 5, True]),
    (str | None, [None, "b"]),
    (MONEY | None, [None, Decimal("2.50"), Decimal(2)]),
]


@dataclass(frozen=True)
class Generated:
    """Fields and whether they can change; the values that its fold gives them, event by event."""

    kinds: list[Any]
    is_frozen: bool
    states: list[list[Any]]

    def model(self) -> type[ReadModel]:
        fields = [("seen", str), *((f"f{at}", kind) for at, kind in enumerate(self.kinds))]
        owner: Any = make_dataclass("Held", fields, frozen=self.is_frozen)
        states = self.states

        def fold(_model: ReadModel, state: Any, deed: Event) -> Any:
            does = deed["does"]
            if does in ("refuse", "fail"):
                raise PoisonRecordError("no", "refused") if does == "refuse" else ValueError("failed")
            # What was kept of the state before shows in the next one.
            return None if does == "delete" else owner(repr(state)[-200:], *states[int(does)])

        return type("OfGenerated", (Told, ReadModel), {"name": "test-own-generated", "state": owner, "fold": fold})


@st.composite
def generated(draw: st.DrawFn) -> Generated:
    fields = draw(st.lists(st.sampled_from(GIVEN), min_size=1, max_size=3))
    # Most values are kept as they are.
    ways = [st.sampled_from([*values[:1] * 4, *values]) for _, values in fields]
    states = draw(st.lists(st.tuples(*ways).map(list), min_size=3, max_size=3))
    return Generated([kind for kind, _ in fields], draw(st.booleans()), states)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    generated(),
    st.lists(
        st.tuples(st.sampled_from(["0", "1", "2", "refuse", "fail", "delete"]), st.sampled_from("kl")),
        min_size=1,
        max_size=4,
    ),
)
def test_states_of_any_type_do_not_depend_on_borders(drawn: Generated, deeds: list[tuple[str, str]]) -> None:
    model, events = drawn.model(), [told(*one) for one in deeds]

    defined = outcome(model, [events], in_columns=False)

    assert all(outcome(model, batches) == defined for batches in cuts(events))


@pytest.mark.parametrize("model", [OfFlat, OfDeep, OfChanging, OfOutputs])
def test_a_state_that_the_code_changes_once_it_has_returned_it_stays_as_it_was(model: type[ReadModel]) -> None:
    events = [told("a"), told("a", "l"), told("b"), told("b", "l")]

    assert outcome(model, [events]) == outcome(model, [[one] for one in events], in_columns=False)


class OfOneRecord(LastingOutputs):
    """Sends the same record each time, with other values."""

    name = "test-own-one-record"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._record: dict[str, Any] = {}

    def emit(self, state: Lasting | None, told: Event) -> dict[str, Any]:
        self._record |= super().emit(state, told)
        return self._record


def test_a_record_that_the_code_changes_once_it_is_sent_stays_as_it_was() -> None:
    events = [told("a"), told("b"), told("c", "l")]

    assert outcome(OfOneRecord, [events]) == outcome(LastingOutputs, [events])


def test_a_state_that_lasts_is_encoded_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with Driver(OfLasting, combines_few=True) as driver:
        processor: Any = driver.last_stage.processor
        encoded: list[int] = []
        own = FlatRecords.encode_all

        def encode_all(flat: FlatRecords, columns: Any) -> Any:
            encoded.append(len(columns[0]))
            return own(flat, columns)

        monkeypatch.setattr(FlatRecords, "encode_all", encode_all)
        driver.given(*[told("a")] * 20)

        assert processor.steps is not None
        assert encoded == [1]
        assert driver.view("k")["times"] == 20


@pytest.mark.parametrize(
    ("does", "calls"),
    [("a", 20), ("refuse", 100 + 20), ("refuse", 200 + 20)],
    ids=["in columns", "event by event", "read again"],
)
def test_a_batch_that_is_given_up_is_not_folded_to_its_end(
    does: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded: list[str] = []
    own = OfLasting.fold

    def fold(model: OfLasting, state: Lasting | None, told: Event) -> Lasting | None:
        folded.append(told["id"])
        return own(model, state, told)

    with Driver(OfLasting, combines_few=True) as driver:
        driver.given(told("a"))
        stage = driver.last_stage
        deliver = stage.deliver
        monkeypatch.setattr(own_steps, "_SLICE_EVENTS", 10)
        monkeypatch.setattr(OfLasting, "fold", fold)
        monkeypatch.setattr(
            stage, "deliver", lambda batch: deliver(replace(batch, given_up=lambda: len(folded) >= calls))
        )

        with pytest.raises(TaskMigratedError):
            driver.given(*(told(does, str(number)) for number in range(100)))

        assert len(folded) == calls
        assert driver.view("0") is None
        assert stage.last is not None
        deliver(stage.last)
        assert (driver.view("99") is None) == (does == "refuse")


def test_one_event_that_is_refused_leaves_the_other_keys_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    folded: list[bytes] = []
    own = _OneByOne.fold

    def fold(one: _OneByOne, before: Any, events: Any, **more: Any) -> bool:
        folded.append(events[0].key)
        return own(one, before, events, **more)

    monkeypatch.setattr(_OneByOne, "fold", fold)
    with Driver(LastingOutputs, combines_few=True) as driver:
        driver.given(*(told("a", key) for key in "abcde"))
        driver.given(*(told("refuse" if key == "c" else "b", key) for key in "abcde"), told("wide", "e"))

        assert set(folded) == {b"c", b"e"}
        assert [one.cause for one in driver.dead_letters()] == ["no", "no"]
        assert [driver.view(key)["times"] for key in "abcde"] == [2, 2, 1, 2, 2]
