"""In-memory replacements for the schema registry and a changelog partition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.avro.writer_schema import WriterSchema
from balance_service.engine.changelog_writer import ChangelogWriter
from balance_service.errors import RetriableError, TaskMigratedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.engine.records import DeadLetter, Output, Record
    from balance_service.errors import BalanceServiceError
else:
    # Importing its client takes longer than folding a thousand events.
    SchemaRegistry = object


class FakeRegistry(SchemaRegistry):
    def __init__(self) -> None:
        self.url = "http://registry"
        self.schemas: list[Schema] = []
        self.is_up = True

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
        return WriterSchema.of(self.schemas[schema_id - 1])

    def id_of(self, guid: str) -> int | None:
        """Knows the GUIDs whose last bytes are the id of a schema."""
        self._ask()
        schema_id = int(guid.replace("-", ""), 16)
        return schema_id if 1 <= schema_id <= len(self.schemas) else None

    def ask_anew(self) -> None: ...

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
