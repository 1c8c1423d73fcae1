"""The contract: every read model keeps it, and its checks find planted faults."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from balance_service.model.addition import Addition
from balance_service.model.folds import RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.spark import combine
from balance_service.testing.contract import (
    CONTRACT,
    acceleration_equals_fold,
    check_contract,
    combined_equals_single,
    cuts_do_not_matter,
)
from balance_service.testing.strategies import batches
from tests.support.models import MODELS, Session
from tests.support.shipped import KNOWN

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.avro.codec import AvroCodec
    from balance_service.testing import InputEvent
    from balance_service.testing.contract import Check

IN_TIME_SECONDS = 30
SHIPPED = [name for name, model in KNOWN.items() if model.has_states()]


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SHIPPED)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_read_model_keeps_the_contract(name: str, check: Check, data: st.DataObject) -> None:
    read_model = KNOWN[name]

    check(read_model, data.draw(batches(read_model)))


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("read_model", MODELS, ids=lambda read_model: read_model.name)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_fold_of_every_type_keeps_the_contract(read_model: ReadModel, check: Check, data: st.DataObject) -> None:
    check(read_model, data.draw(batches(read_model)))


# --- planted faults


class Alternating(RunningSum):
    """Claims to be a sum, but is not associative."""

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        return lambda value, update: update if value is None else update - value


class NotASum(ReadModel):
    """As `Balance`, with an invalid fold."""

    name = "planted-not-a-sum"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = "BalanceState"

    amount = Alternating("FundsAdded.amount")

    def acceleration(self, codec: AvroCodec) -> None:
        return None


class OffByOne(Addition):
    """Changes the last byte."""

    def next_states(self, *args: Any) -> list[bytes | None]:
        after = super().next_states(*args)
        return [None if frame is None else frame[:-1] + bytes([frame[-1] ^ 1]) for frame in after]


class WronglyAccelerated(ReadModel):
    """As `Balance`, with an acceleration that is wrong by a byte."""

    name = "planted-off-by-one"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = "BalanceState"

    amount = RunningSum("FundsAdded.amount")

    def acceleration(self, codec: AvroCodec) -> Addition:
        return OffByOne("amount", 2, codec.header)


def is_caught(read_model: ReadModel, check: Check) -> bool:
    """Returns whether a check fails."""

    @settings(
        max_examples=200, deadline=None, database=None, derandomize=True, phases=[Phase.generate], print_blob=False
    )
    @given(batches(read_model))
    def keeps(drawn: list[list[InputEvent]]) -> None:
        check(read_model, drawn)

    try:
        keeps()
    except AssertionError:
        return True
    return False


def test_a_fold_that_claims_to_be_a_sum_and_is_not_associative_is_caught() -> None:
    assert is_caught(NotASum(), combined_equals_single)


def test_an_acceleration_that_is_off_by_one_byte_is_caught() -> None:
    assert is_caught(WronglyAccelerated(), acceleration_equals_fold)


def test_a_combiner_that_drops_a_key_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregated = combine._aggregated
    monkeypatch.setattr(combine, "_aggregated", lambda *args: aggregated(*args).slice(1))

    assert is_caught(KNOWN["balance"], cuts_do_not_matter)


def test_the_contract_ends_in_time_and_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    class Slow(Session):
        name = "test-slow"

        def fold(self, state: Any, event: Any) -> Any:
            time.sleep(0.02)
            return super().fold(state, event)

    began = time.monotonic()
    check_contract(Slow, examples=100_000, seconds=2)

    assert time.monotonic() - began < IN_TIME_SECONDS
    printed = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in printed] == [check.__name__ for check in CONTRACT]
    assert " of 100000, for lack of time; give more `seconds`" in printed[0]


def test_a_history_that_fails_is_reported_in_time() -> None:
    class Counting(Session):
        name = "test-counting"
        calls = 0

        def fold(self, state: Any, event: Any) -> Any:
            Counting.calls += 1
            after = super().fold(state, event)
            return None if after is None else {**after, "games": Counting.calls}

    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"a fold must depend on its arguments only; the batches: \[\["):
        check_contract(Counting, examples=100_000, seconds=3)

    assert time.monotonic() - began < IN_TIME_SECONDS
