"""The manifest of a folder that a batch job fills for one generation of a read model.

    FILES/APPLICATION-ID/MODEL.gN/manifest.json
    FILES/APPLICATION-ID/MODEL.gN/partition-00003/NAME.parquet

The manifest is written last, so a folder without one is not complete. Each file has changelog records, in the two
columns `key` and `value`, sorted by key: states, markers of idempotency keys, and dead letters with their index. No key
is in two files of a partition; the ranges of the files' keys may overlap. What a partition's position has besides is in
the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from balance_service.errors import ConfigurationError, InvalidInputError
from balance_service.model.stream import Partitioner
from balance_service.structs import Struct

if TYPE_CHECKING:
    from typing import Any

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile(Struct):
    """A file of changelog records, sorted by key.

    Attributes:
        name: its path below the folder.
        size: in bytes.
        sha256: of its bytes, in hexadecimal digits.
        records: how many it has.
    """

    name: str
    size: int
    sha256: str
    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFiles(Struct, names={"stream_time_ms": "streamTime"}):
    """What a partition's states are at a position of its source.

    Attributes:
        begins: the first offset that the source had, where the job began to read.
        position: the offset after the last one that is applied; with no events, the same as `begins`.
        events: how many records of the source lie in between, dead letters and ignored ones included.
        stream_time_ms, keys, letters: as in `engine.records.Position`; `letters` tell of misplaced keys, too.
        files: in the order in which they are loaded.
    """

    partition: int
    begins: int
    position: int
    events: int
    stream_time_ms: int
    keys: int
    letters: Mapping[str, int]
    files: tuple[RecordFile, ...]

    @property
    def records(self) -> int:
        return sum(file.records for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeWith(Struct):
    """What the values depend on besides the declaration; the loader refuses files that were made with anything else.

    Attributes:
        package: the version of this package.
        spark: that of Spark.
        decoder_rules: `Declaration.decoder_rules`.
        sql: the settings of Spark SQL on which values depend.
        idempotency_window_ms: BALANCE_IDEMPOTENCY_WINDOW.
    """

    package: str
    spark: str
    decoder_rules: int
    sql: Mapping[str, str]
    idempotency_window_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Struct):
    """Attributes:
    application_id, model, generation, version, fingerprint: whose states these are, as in the topic of generations.
    owner: the `Stage.mark` of the stage of that generation.
    source, source_topic_id, partitioner: as in `engine.records.Position`, the source without a partition.
    state_schema_id: under which the states are framed, in the registry of the application.
    partitions: one for each of the source, in order.
    """

    format: int = _FORMAT
    application_id: str
    model: str
    generation: int
    version: int
    fingerprint: str
    owner: str
    source: str
    source_topic_id: str
    partitioner: Partitioner
    state_schema_id: int
    made_with: MadeWith
    partitions: tuple[PartitionFiles, ...]

    @property
    def events(self) -> int:
        return sum(one.events for one in self.partitions)

    @property
    def keys(self) -> int:
        return sum(one.keys for one in self.partitions)

    def encoded(self) -> bytes:
        """Returns the bytes of `manifest.json`, always the same for equal manifests."""
        return json.dumps(self.record(), indent=1, sort_keys=True).encode()

    @property
    def digest(self) -> str:
        """The SHA-256 of `manifest.json`, in hexadecimal digits."""
        return hashlib.sha256(self.encoded()).hexdigest()

    @classmethod
    def decoded(cls, content: bytes) -> Self:
        """Returns the manifest in the bytes of a `manifest.json`.

        Raises:
            InvalidInputError: the bytes are cut or altered.
            ConfigurationError: another version wrote it.
        """
        try:
            record: dict[str, Any] = json.loads(content)
            if (found := record["format"]) != _FORMAT:
                raise ConfigurationError(
                    f"{MANIFEST} has format {found}, this version knows {_FORMAT}; run the version that wrote it"
                )
            manifest = cls.of(record)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(f"{MANIFEST} is cut or altered ({error!r}): run the rebuild again") from error
        if manifest.encoded() != content:
            raise InvalidInputError(f"{MANIFEST} is altered: run the rebuild again")
        return manifest
