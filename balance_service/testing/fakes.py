"""Replacements for the schema registry, a changelog partition, and the tables that a stage joins with."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from balance_service.avro.writer_schema import WriterSchema
from balance_service.engine.changelog_writer import ChangelogWriter
from balance_service.engine.table_partition import TablePartition
from balance_service.engine.table_store import TableStore, Version
from balance_service.engine.tables import JoinedTables, Tables
from balance_service.errors import RetriableError, StoreCorruptedError, TaskMigratedError
from balance_service.formats.known import FORMATS
from balance_service.testing.rows import body_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from balance_service.avro.registry import Place, SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.engine.records import DeadLetter, Output, Record
    from balance_service.engine.table_store import TableView
    from balance_service.engine.tables import TableId
    from balance_service.errors import BalanceServiceError
    from balance_service.formats.format import RecordCodec
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Table
    from balance_service.testing.rows import TableRow
else:
    # Importing its client takes longer than folding a thousand events.
    SchemaRegistry = object


class FakeRegistry(SchemaRegistry):
    def __init__(self) -> None:
        self.url = "http://registry"
        self.is_set, self.has_fingerprints = True, False
        self.schemas: list[Schema] = []
        self.is_up = True

    @property
    def of_producers(self) -> SchemaRegistry:
        return self

    def register(self, subject: str, schema: Schema) -> int:  # noqa: ARG002  (ids belong to schemas, not to subjects)
        """Returns ids from 1; equal schemas have the same id."""
        self._ask()
        if schema not in self.schemas:
            self.schemas.append(schema)
        return self.schemas.index(schema) + 1

    def writer_schema(self, schema_id: int) -> WriterSchema | None:
        self._ask()
        if not 1 <= schema_id <= len(self.schemas):
            return None
        return WriterSchema.from_schema(self.schemas[schema_id - 1])

    def id_of(self, guid: str) -> int | None:
        """Knows the GUIDs whose last bytes are the id of a schema."""
        self._ask()
        schema_id = int(guid.replace("-", ""), 16)
        return schema_id if 1 <= schema_id <= len(self.schemas) else None

    def ask_anew(self) -> None: ...

    def look_in(self, place: Place) -> None: ...

    def learn(self, key: bytes, value: bytes | None) -> bool:  # noqa: ARG002
        return False

    def _ask(self) -> None:
        if not self.is_up:
            raise RetriableError("the registry is down")


class FakeWriter(ChangelogWriter):
    """A changelog partition in memory. A commit takes one offset for each record, and one for its marker."""

    def __init__(self, fails_with: BalanceServiceError | None = None) -> None:
        self.fails_with = fails_with
        self.commits: list[tuple[list[Record], list[DeadLetter], bytes]] = []
        self.sent: list[Output] = []
        self.held: list[int] = []
        self.end = 0
        self.is_closed = False

    def commit(
        self,
        states: Iterable[Record],
        dead_letters: Iterable[DeadLetter],
        position: bytes,
        holds_up_to: int,
        outputs: Iterable[Output] = (),
    ) -> int:
        if self.is_closed:
            raise TaskMigratedError("the task is closed")
        if self.fails_with is not None:
            raise self.fails_with
        self.held.append(holds_up_to)
        records = list(states)
        self.commits.append((records, list(dead_letters), position))
        self.sent += outputs
        after_position = self.end + len(records) + 1
        self.end = after_position + 1
        return after_position

    def close(self) -> None:
        self.is_closed = True


class FakeTable(TablePartition):
    """The only partition of a table, in a store on disk."""

    def __init__(self, table: Table, schema: Schema, codec: RecordCodec, path: Path, history_ms: int) -> None:
        self.table = table
        self.schema = schema
        self.codec = codec
        self.store = TableStore(path, history_ms)
        self._offset = 0

    @property
    def view(self) -> TableView:
        view = self.store.view
        if view is None:
            raise RetriableError("the table is closed")
        return view

    def note_joined(self, timestamp_ms: int) -> None: ...

    def report_damage(self, error: StoreCorruptedError) -> None:
        raise error

    def put(self, row: TableRow) -> None:
        fields = row.fields
        frame = None if fields is None else self.codec.frame(body_of(fields, self.schema))
        # A file has text.
        key = self.table.key_of(row.key if self.table.key_format == "string" else int(row.key))
        self.store.apply([(key, Version(row.timestamp_ms, self._offset, frame))], self._offset + 1)
        self._offset += 1


class FakeTables(Tables):
    """The tables that the stages of a read model join with. A row is in its table once `put` returns."""

    def __init__(self, read_model: str, stages: Iterable[Stage], registry: FakeRegistry, folder: Path) -> None:
        self._read_model = read_model
        self._tables: dict[str, FakeTable] = {}
        declared: dict[str, list[tuple[Schema, Table]]] = {}
        for stage in stages:
            for join in stage.joins:
                of_join = stage.rows[join.table.record], join.table
                declared.setdefault(join.table.topic, []).append(of_join)
        for topic, of_topic in declared.items():
            (schema, table), history = of_topic[0], max(table.history for _, table in of_topic)
            codec = FORMATS[table.format].codec(registry, topic, schema)
            history_ms = history // timedelta(milliseconds=1)
            self._tables[topic] = FakeTable(table, schema, codec, folder / f"table-{len(self._tables)}", history_ms)

    def joined(self, stage: Stage) -> JoinedTables:
        # Asked only for the ends of topics.
        topics: Any = None
        return JoinedTables(joins=stage.joins, tables=self, topics=topics)

    def put(self, rows: Sequence[TableRow]) -> None:
        """Raises ValueError if the model joins with no such table, or if a row does not fit its schema."""
        for row in rows:
            if row.topic not in self._tables:
                known = ", ".join(self._tables) or "no table"
                raise ValueError(f"{self._read_model} joins with no table '{row.topic}'; it joins with {known}")
            self._tables[row.topic].put(row)

    def partitions(self, topic: str) -> int:  # noqa: ARG002  (each has one)
        return 1

    def partition_of(self, topic: str, key: bytes) -> int:  # noqa: ARG002
        return 0

    def reader(self, topic: str) -> RecordCodec:
        return self._tables[topic].codec

    def partition(self, table: TableId) -> FakeTable:
        return self._tables[table.topic]

    def close(self) -> None:
        for table in self._tables.values():
            table.store.close()
