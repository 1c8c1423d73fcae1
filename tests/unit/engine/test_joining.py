"""Events joined with rows as of their time, held to a model of plain lists; and what becomes of those without a row."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema
from balance_service.engine.outputs import Target
from balance_service.engine.records import CombinedUpdates, Position, TaskBatch
from balance_service.engine.stateless import JoinProcessor
from balance_service.engine.table_store import TableStore, Version
from balance_service.engine.tables import JoinedTables
from balance_service.kafka.partitioner import partition_of
from balance_service.model.keys import KeyType
from balance_service.model.stream import Global, Join
from balance_service.testing.fakes import FakeRegistry
from tests.support.fakes import letters
from tests.support.models import ship

if TYPE_CHECKING:
    from balance_service.engine.processor import BatchOutcome
    from balance_service.model.stream import Missing

ship("NamedScore", {"score": "double", "product_id": "long", "player_id": "long", "playerName": ["null", "string"]})
PARTITION = 1
PLAYERS = 3
A_DAY_MS = 24 * 60 * 60 * 1000
TOLD = st.tuples(st.just("row"), st.integers(0, PLAYERS), st.integers(0, 40), st.booleans())
SCORED = st.tuples(st.just("score"), st.integers(0, PLAYERS), st.integers(0, 40), st.just(False))


class Played:
    """A stage that joins scores with players, on a store of its own; rows and scores come in any order."""

    def __init__(self, folder: str, missing: Missing) -> None:
        registry = FakeRegistry()
        schema = load_schema("NamedScore")
        self.codec = AvroCodec(registry, "scores", schema)
        self.rows = AvroCodec(registry, "players", load_schema("Player"))
        self.store = TableStore(Path(folder), A_DAY_MS)
        followed = SimpleNamespace(note_joined=lambda _at: None)
        tables: Any = SimpleNamespace(
            codec=lambda _topic: self.rows, partition=lambda _table: followed, partitions=lambda _topic: 1
        )
        table = Global("players", "Player")
        joins = [Join(table=table, on="player_id", take={"name": "playerName"}, missing=missing)]
        topics: Any = None
        self._followed = followed
        self._processor = JoinProcessor(
            source="scores",
            record="ScoreEvent",
            joined=JoinedTables(joins=joins, tables=tables, topics=topics, partition_of=partition_of),
            schema=schema,
            codec=self.codec,
            key_type=KeyType("product_id", is_number=True),
            target=Target("joined", 1, 1 << 20, False, "app-joining"),
            position_codec=self.codec,
            letters=letters(registry),
        )
        self._offset = 0

    def tell(self, player: int, timestamp_ms: int, name: str | None) -> None:
        frame = None if name is None else self.rows.encode({"id": player, "name": name})
        version = Version(timestamp_ms, self._offset, frame)
        self.store.apply([(str(player).encode(), version)], self._offset + 1)
        self._offset += 1

    def score(self, *scored: tuple[int | None, int], emitted_up_to: int = 0) -> BatchOutcome:
        """Scores of players at times, in one batch from offset 0."""
        self._followed.view = self.store.view
        rows = [
            {
                "offset": offset,
                "timestamp": at,
                "value": b"score",
                "headers": None,
                "ScoreEvent": {"score": 1.0, "product_id": 7, "player_id": player},
            }
            for offset, (player, at) in enumerate(scored)
        ]
        headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        of_event = pa.struct([("score", pa.float64()), ("product_id", pa.int64()), ("player_id", pa.int64())])
        columns = {"offset": pa.int64(), "timestamp": pa.int64(), "value": pa.binary(), "headers": headers}
        batch = pa.RecordBatch.from_pylist(rows, pa.schema({**columns, "ScoreEvent": of_event}))
        keys = pa.array([b"key"] * len(rows), pa.binary())
        no_store: Any = None
        return self._processor.outcome(
            TaskBatch(0, len(rows), [CombinedUpdates(keys, batch)]),
            PARTITION,
            Position(0, 1, "id", emitted_up_to=emitted_up_to),
            no_store,
        )

    def name(self, folded: BatchOutcome) -> str | None:
        """Of the player in the one record that was made; what became of the score if there is none."""
        if folded.dead_letters:
            return folded.dead_letters[0].cause
        (made,) = folded.outputs
        assert made.value is not None
        name: str | None = self.codec.decode(made.value)["playerName"]
        return name


@given(history=st.lists(TOLD | SCORED, max_size=30))
def test_any_interleaving_of_rows_and_scores_joins_as_the_rule_says(history: list[tuple[str, int, int, bool]]) -> None:
    told: dict[int, list[tuple[int, int, str | None]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        played = Played(folder, "dead-letter")
        for number, (kind, player, at, is_tombstone) in enumerate(history):
            if kind == "row":
                name = None if is_tombstone else f"name {number}"
                played.tell(player, at, name)
                told.setdefault(player, []).append((at, number, name))
                continue
            versions = sorted(told.get(player, []), key=lambda version: version[:2])
            before = [version for version in versions if version[0] <= at]
            expected = (before[-1:] or versions[:1] or [(0, 0, None)])[0][2]
            assert played.name(played.score((player, at))) == (expected or "join-missing")
        played.store.close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "players_0")


@pytest.mark.parametrize(
    ("missing", "made", "letters"), [("dead-letter", 0, ["join-missing"]), ("drop", 0, []), ("null", 1, [])]
)
def test_what_becomes_of_an_event_without_its_row(folder: str, missing: Missing, made: int, letters: list[str]) -> None:
    played = Played(folder, missing)
    folded = played.score((1, 5))

    assert (len(folded.outputs), [letter.cause for letter in folded.dead_letters]) == (made, letters)
    if made:
        assert played.name(folded) is None
        assert {name for name, _ in folded.outputs[0].headers} == {"origin", "sent-by"}
    played.store.close()


def test_a_joined_record_names_its_origin_and_the_version_that_it_was_made_of(folder: str) -> None:
    played = Played(folder, "dead-letter")
    played.tell(1, 10, "first")
    played.tell(1, 20, "second")

    (made,) = played.score((1, 15)).outputs

    assert (made.key, made.timestamp_ms) == (KeyType("product_id", is_number=True).encode(7), 15)
    assert dict(made.headers) == {
        "playerVersion": b"0:0",
        "origin": b"scores:1:0",
        "sent-by": b"app-joining",
    }
    played.store.close()


def test_an_event_without_a_value_to_join_by_is_a_dead_letter_with_its_bytes(folder: str) -> None:
    played = Played(folder, "null")

    (letter,) = played.score((None, 5)).dead_letters

    assert (letter.cause, letter.key, letter.value, letter.timestamp_ms) == ("field-null", b"key", b"score", 5)
    played.store.close()


def test_what_was_passed_on_before_a_rebuild_is_not_joined_again(folder: str) -> None:
    played = Played(folder, "dead-letter")
    played.tell(1, 0, "known")

    folded = played.score((2, 5), (1, 5), (2, 5), (1, 5), emitted_up_to=2)

    assert [made.offset for made in folded.outputs] == [3]
    assert [letter.offset for letter in folded.dead_letters] == [2]
    played.store.close()
