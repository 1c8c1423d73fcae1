"""What the driver of a batch job tells the Python workers of its executors, and what they tell it.

A worker has neither a JVM nor the registry: it makes the service's own processor of the answers that the driver got.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from balance_service import errors
from balance_service.avro.own_schemas import OwnSchemas
from balance_service.engine.assembly import StageServices, processor_of
from balance_service.engine.dead_letter import Status
from balance_service.engine.fold import FoldProcessor
from balance_service.errors import (
    BalanceServiceError,
    ConfigurationError,
    FatalError,
    InvalidInputError,
    RetriableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.bulk.folder import Folder
    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.joined_tables import JoinedTables
    from balance_service.engine.records import DeadLetter
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Partitioner

# Without this, the text of a Python error comes with its traceback, and Spark's own sentences around it.
_BEGIN, _END = "<balance-service ", " balance-service>"
_TOLD = re.compile(f"{_BEGIN}(.*?){_END}", re.DOTALL)
_ID = "id:"
_MOST_TOLD = 3


class Asked(NamedTuple):
    """Whom the driver asks: the registry, and by the names of topics the brokers."""

    registry: SchemaRegistry
    partitions: Callable[[str], int]
    topic_id: Callable[[str], str]
    config: Callable[[str], Mapping[str, str]]


@dataclass(slots=True, kw_only=True)
class Answers:
    """What the registry and the brokers said while the driver made the processor, for workers, which ask neither.

    Attributes:
        asked: of the driver; None in a worker.
        is_set: whether the application has a registry.
        has_fingerprints: as of `OwnSchemas`.
        known: by kind and name.
    """

    largest_bytes: int
    retry_every_ms: int
    idempotency_window_ms: int
    asked: Asked | None
    is_set: bool
    has_fingerprints: bool
    known: dict[tuple[str, str], Any] = field(default_factory=dict)

    url = ""

    def register(self, subject: str, schema: Schema) -> int:
        """As `SchemaRegistry.register`."""
        name = f"{subject}\0{json.dumps(schema, sort_keys=True, default=str)}"
        found: int = self._answer("schema", name, lambda asked: asked.registry.register(subject, schema))
        return found

    def writer_schema(self, schema_id: int) -> NoReturn:
        """Refuses a schema of another writer: the states of one job are of the schema that it registered."""
        raise RetriableError(f"schema {schema_id} is not one that this job registered")

    def services(self) -> StageServices:
        """Returns services of these answers. In the driver, they ask for those that are not known yet."""
        schemas = OwnSchemas(cast("SchemaRegistry", self))
        schemas.has_fingerprints = self.has_fingerprints
        return StageServices(
            schemas=schemas,
            partitions=lambda name: self._answer("partitions", name, lambda asked: asked.partitions(name)),
            topic_id=lambda name: self._answer("topic id", name, lambda asked: asked.topic_id(name)),
            config=lambda name: self._answer("config", name, lambda asked: asked.config(name)),
            joined=no_tables,
            largest_bytes=self.largest_bytes,
            retry_every_ms=self.retry_every_ms,
            idempotency_window_ms=self.idempotency_window_ms,
        )

    def _answer(self, kind: str, name: str, ask: Callable[[Asked], Any]) -> Any:
        if (kind, name) not in self.known:
            if self.asked is None:
                raise FatalError(f"the driver of the job has not asked for the {kind} of {name!r}")
            self.known[kind, name] = ask(self.asked)
        return self.known[kind, name]


def code_of(read_model: ReadModel) -> dict[str, str]:
    """Returns the SHA-256 of the source of each module that is loaded here: of this package and the read model's."""
    bases = (one.__module__ for one in type(read_model).__mro__)
    packages = {name.partition(".")[0] for name in (__name__, *bases)}
    # The classes of a script are sent as a whole.
    packages -= {*sys.stdlib_module_names, "__main__"}
    found = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or name.partition(".")[0] not in packages or not hasattr(spec.loader, "get_source"):
            continue
        source = None
        with suppress(ImportError, OSError):  # there is no source here
            source = spec.loader.get_source(spec.name)
        if source is not None:
            found[name] = hashlib.sha256(source.encode()).hexdigest()
    return found


def no_tables(stage: Stage) -> JoinedTables:
    raise FatalError(f"{stage.name} joins with tables, and a stage with states does not")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Attributes:
    code: `code_of` in the driver. An archive that an executor unpacks may be older.
    begins, ends: the offsets that are read, by partition.
    letters: by partition and offset, dead letters that the generation takes over.
    failing: by partition, the records at which Spark fails, with that cause.
    unknown: names of schemas that the registry does not know, as `unresolved_name` has them.
    shares: how many shares the keys of each partition have.
    """

    stage: Stage
    read_model: ReadModel
    code: Mapping[str, str]
    answers: Answers
    folder: Folder
    source_topic_id: str
    partitioner: Partitioner
    begins: Mapping[int, int]
    ends: Mapping[int, int]
    letters: Mapping[int, Mapping[int, Letter]]
    failing: Mapping[int, Mapping[int, DeadLetter]] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()
    shares: int = 1

    def require_same_code(self) -> None:
        """Raises ConfigurationError: a module has other code here than in the driver."""
        here = code_of(self.read_model)
        if other := sorted(name for name in here.keys() & self.code.keys() if here[name] != self.code[name]):
            more = f" and {len(other) - _MOST_TOLD} more" if len(other) > _MOST_TOLD else ""
            raise ConfigurationError(
                f"an executor has other code than this process in {', '.join(other[:_MOST_TOLD])}{more}: pack its "
                "archive again (`balance-service pack-environment`), or build its image again"
            )

    def processor(self) -> FoldProcessor:
        """Returns the processor of the service, made of the answers."""
        found = processor_of(self.stage, self.read_model, self.answers.services())
        if not isinstance(found, FoldProcessor):
            raise FatalError(f"{self.stage.name} has no states")
        return found

    def left_out(self, partition: int) -> frozenset[int]:
        """Returns what is not applied in its turn, as `Letters.left_out_from`, and the offsets of `failing`."""
        letters = self.letters.get(partition, {})
        not_now = (offset for offset, letter in letters.items() if letter.status is not Status.APPLIED)
        return frozenset(not_now).union(self.failing.get(partition, ()))

    def applied(self, partition: int) -> dict[int, Letter]:
        """Returns, by offset, the dead letters that were applied; not those of `failing`, which are open again."""
        failing = self.failing.get(partition, ())
        letters = self.letters.get(partition, {}).items()
        return {at: one for at, one in letters if one.status is Status.APPLIED and at not in failing}

    def readable(self, partition: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns `[begin, end)` without the offsets of `failing`, as ranges in order, none of them empty."""
        ranges = []
        for offset in sorted(self.failing.get(partition, ())):
            if begin <= offset < end:
                ranges.append((begin, offset))
                begin = offset + 1
        return [(first, last) for first, last in (*ranges, (begin, end)) if first < last]

    def share_of(self, record_key: bytes | None) -> int:
        """Returns the share of a record's key, as `spark.batch_job` computes it for the rows."""
        own, key = self.stage.own_key, record_key or b""
        if own is not None and record_key is not None:
            try:
                key = own.stored(record_key)
            except InvalidInputError:
                key = b""
        return zlib.crc32(key) * self.shares >> 32


def unresolved_name(schema_id: int | None, header: bytes | None) -> str:
    """Returns how a worker names a schema that it lacks: by id, or by what a record's header says."""
    return f"{_ID}{schema_id}" if header is None else header.hex()


def id_named(name: str) -> int | None:
    """Returns the id in a name of `unresolved_name`; None if it is of a header."""
    return int(name.removeprefix(_ID)) if name.startswith(_ID) else None


class UnresolvedError(BalanceServiceError):
    """Records name schemas that the JVM does not know; `names` are theirs, as `unresolved_name` has them."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"{len(names)} schemas are not known")
        self.names = names


def telling(error: BalanceServiceError) -> RuntimeError:
    """Returns an error that Spark hands on to the driver, where `told` finds it."""
    names = error.names if isinstance(error, UnresolvedError) else None
    return RuntimeError(_BEGIN + json.dumps([type(error).__name__, str(error), names]) + _END)


def told(error: Exception) -> BalanceServiceError | None:
    """Returns the error that a worker told; None if none did."""
    found = _TOLD.search(str(error))
    if found is None:
        return None
    name, text, names = json.loads(found[1])
    if names is not None:
        return UnresolvedError(names)
    kind = getattr(errors, name, FatalError)
    made: BalanceServiceError = kind(text)
    return made
