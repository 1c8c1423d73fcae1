"""Addition in columns: the same bytes as the read model's fold, or left to the fold."""

from __future__ import annotations

import copy
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec
from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import NoRegistry
from balance_service.avro.schemas import load_schema
from balance_service.kafka.partitioner import Partitioning, partition_of
from balance_service.model.folds import RunningSum
from balance_service.read_models.activity import Activity
from balance_service.read_models.balance import Balance
from tests.support.fakes import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.model.addition import Addition
    from balance_service.model.events import State

REGISTRY = FakeRegistry()
CODEC = AvroCodec(REGISTRY, "states", load_schema("BalanceState"))
MONEY = pa.decimal128(38, 2)

around_powers = st.builds(
    lambda power, delta, sign: sign * (2**power + delta),
    st.integers(0, 70),
    st.integers(-2, 2),
    st.sampled_from((1, -1)),
)
cents = st.one_of(st.integers(-(10**6), 10**6), around_powers, st.integers(-(10**30), 10**30))
names = st.one_of(st.text(min_size=1, max_size=12), st.integers(1, 256).map("c".__mul__))


@pytest.fixture(autouse=True, scope="module", params=["id", "fingerprint"])
def _codec(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives the states the header of each frame in turn."""
    global CODEC
    of_registry = CODEC
    if request.param == "fingerprint":
        CODEC = OwnSchemas(NoRegistry()).codec("states", load_schema("BalanceState"))
    yield
    CODEC = of_registry


def adder() -> Addition:
    addition = Balance().acceleration(CODEC)
    assert addition is not None
    return addition


def money(unscaled: int) -> Decimal:
    return Decimal(unscaled).scaleb(-2)


def frame(name: str, unscaled: int) -> bytes:
    return CODEC.encode({"customerId": name, "amount": money(unscaled)})


def folded(before: State | None, unscaled: int, key: bytes = b"") -> bytes:
    after = Balance().next_state(before, key, {"amount": money(unscaled)})
    assert after is not None
    return CODEC.encode(after)


@given(st.lists(st.tuples(names, st.none() | cents, cents), max_size=30))
def test_states_added_in_columns_equal_those_of_the_fold(rows: list[tuple[str, int | None, int]]) -> None:
    frames = [None if before is None else frame(name, before) for name, before, _ in rows]

    added = adder().add(frames, pa.array([money(amount) for _, _, amount in rows], MONEY))

    assert len(added) == len(rows)
    for before, after, (_, _, amount) in zip(frames, added, rows, strict=True):
        if after is not None:
            assert before is not None
            assert after == folded(CODEC.decode(before), amount)


@pytest.mark.parametrize(("before", "amount"), [(100, 1), (-100, -1), (127, -1), (2**61, 1), (12_345, 0), (-5, 9)])
def test_a_sum_of_the_same_width_is_added_in_columns(before: int, amount: int) -> None:
    assert adder().add([frame("c1", before)], pa.array([money(amount)], MONEY)) == [frame("c1", before + amount)]


@pytest.mark.parametrize(
    ("before", "amount"),
    [(127, 1), (128, -1), (2**62, 1), (1, 2**62), (2**63 - 1, 1), (-(2**63) + 1, -1), (10**25, 1), (1, 10**25)],
    ids=str,
)
def test_a_sum_of_another_width_or_beyond_64_bits_is_left_to_the_fold(before: int, amount: int) -> None:
    assert adder().add([frame("c1", before)], pa.array([money(amount)], MONEY)) == [None]


def begun(keys: list[bytes], amounts: list[int], partition: int = 0, partitions: int = 1) -> list[bytes | None]:
    return adder().begin(
        pa.array(keys, pa.binary()),
        pa.array([money(amount) for amount in amounts], MONEY),
        lambda rows: Partitioning(partitions, "murmur2").of_rows(rows) == partition,
    )


@given(st.lists(st.tuples(st.one_of(names.map(str.encode), st.binary(max_size=70)), cents), max_size=30))
def test_first_states_made_in_columns_equal_those_of_the_fold(rows: list[tuple[bytes, int]]) -> None:
    frames = begun([key for key, _ in rows], [amount for _, amount in rows])

    for (key, amount), begun_as in zip(rows, frames, strict=True):
        if begun_as is not None:
            assert begun_as == folded(None, amount, key)


@pytest.mark.parametrize("amount", [0, 1, -1, 127, 128, -128, -129, 2**62 - 1])
@pytest.mark.parametrize("key", [b"c", b"c 1~", b"c" * 63])
def test_the_first_state_of_a_plain_text_key_is_made_in_columns(key: bytes, amount: int) -> None:
    assert begun([key], [amount]) == [frame(key.decode(), amount)]


@pytest.mark.parametrize("key", [b"", b"c" * 64, "é".encode(), b"\xff", b"c\x7f", b"a\nb"])
def test_the_first_state_of_any_other_key_is_left_to_the_fold(key: bytes) -> None:
    assert begun([key, b"c1"], [1, 1]) == [None, frame("c1", 1)]


def test_a_key_of_another_partition_is_left_to_the_fold() -> None:
    keys = [b"c%d" % number for number in range(50)]

    frames = begun(keys, [1] * 50, partition=2, partitions=3)

    assert [frame is not None for frame in frames] == [partition_of(key, 3) == 2 for key in keys]


def test_first_states_are_made_from_a_slice_of_keys() -> None:
    keys = pa.array([b"aa", b"b", b"ccc", b"d"], pa.binary()).slice(1, 2)
    amounts = pa.array([money(n) for n in range(4)], MONEY).slice(1, 2)

    assert adder().begin(keys, amounts, lambda rows: Partitioning(1, "murmur2").of_rows(rows) == 0) == [
        frame("b", 1),
        frame("ccc", 2),
    ]


def test_states_of_other_schemas_are_left_to_the_fold() -> None:
    earlier = b"\x00\x00\x00\x00\x63" + frame("c1", 5)[5:]

    assert adder().add([earlier, None], pa.array([money(1)] * 2, MONEY)) == [None, None]


def test_amounts_of_another_scale_are_left_to_the_fold() -> None:
    assert adder().add([frame("c1", 5)], pa.array([Decimal("0.001")], pa.decimal128(38, 3))) == [None]


def test_a_slice_of_a_column_is_added() -> None:
    amounts = pa.array([money(n) for n in (7, 8, 9)], MONEY).slice(1, 2)

    assert adder().add([frame("a", 1), frame("b", 1)], amounts) == [frame("a", 9), frame("b", 10)]


def test_an_empty_batch_adds_nothing() -> None:
    assert adder().add([], pa.array([], MONEY)) == []


def test_old_and_new_keys_are_added_together() -> None:
    keys = [b"a", b"b", "é".encode()]
    updates = pa.RecordBatch.from_arrays([pa.array([money(n) for n in (1, 2, 3)], MONEY)], ["amount"])

    after = adder().next_states(
        pa.array(keys, pa.binary()),
        updates,
        [frame("a", 5), None, None],
        lambda rows: Partitioning(1, "murmur2").of_rows(rows) == 0,
    )

    assert after == [frame("a", 6), frame("b", 2), None]


def test_a_read_model_with_other_folds_has_no_acceleration() -> None:
    assert Activity().acceleration(CODEC) is None


def test_amounts_of_a_fixed_size_are_left_to_the_fold() -> None:
    state = copy.deepcopy(load_schema("BalanceState"))
    amount = state["fields"][1]["type"]
    state["fields"][1]["type"] = {**amount, "type": "fixed", "name": "Money", "size": 16}

    assert RunningSum("FundsAdded.amount").acceleration("amount", state, AvroCodec(REGISTRY, "s", state)) is None
