"""The folder of one generation, on a local disk or in a file system of many machines, by Arrow's file systems."""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from balance_service.bulk.manifest import MANIFEST, Manifest, RecordFile
from balance_service.errors import ConfigurationError, FatalError, InvalidInputError, RetriableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any, Self

RECORDS = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary(), nullable=False)])
"""The columns of a file: a changelog record's key and value."""

# What a loader writes between two of its commits.
_GROUP_RECORDS = 20_000
# A file is read as a whole, because its digest is checked before its first record is used.
_FILE_BYTES = 64 << 20
_SPLIT = re.compile(r"-?[0-9]+(?:_-?[0-9]+){4}")
_HADOOP = re.compile(r"^s3[an]://")


class Split(NamedTuple):
    """Records of a partition that one task has read, by their first and last offset.

    `records` is how many there are, `kept` how many of them may change a state, and `stream_time_ms` the greatest
    timestamp of those with an idempotency key, as in `engine.records.Position`.
    """

    partition: int
    first: int
    last: int
    records: int
    kept: int
    stream_time_ms: int


def stream_time_of(splits: Sequence[Split]) -> int:
    """The greatest time of the records of some splits, in ms since 1970; -1 if there is none."""
    return max((split.stream_time_ms for split in splits), default=-1)


@dataclass(frozen=True, slots=True)
class Folder:
    """`path` is that of the folder in the file system that `uri` names."""

    uri: str

    @classmethod
    def of(cls, files: str, application_id: str, model: str, generation: int) -> Self:
        """Returns the folder of a generation.

        Args:
            files: a path, absolute, or a URI such as `s3://bucket/rebuilds`, as the command has it.
        """
        return cls(f"{_HADOOP.sub('s3://', files).rstrip('/')}/{application_id}/{model}.g{generation}")

    def check(self) -> None:
        """Checks that this process can write, read and delete there.

        Raises ConfigurationError.
        """
        system, path = self._opened()
        name = f"{path}/check"
        try:
            system.create_dir(path, recursive=True)
            with system.open_output_stream(name) as stream:
                stream.write(b"check")
            with system.open_input_stream(name) as stream:
                stream.read()
            system.delete_file(name)
        except (OSError, pa.ArrowException) as error:
            raise ConfigurationError(f"--files: {self.uri} cannot be used: {error}") from error

    def check_found(self) -> None:
        """Checks that this process sees the folder, which another one has made.

        Raises:
            ConfigurationError: it does not, or the file system is not known here.
        """
        system, path = self._opened()
        try:
            found = system.get_file_info(path).type
        except (OSError, pa.ArrowException) as error:
            raise ConfigurationError(f"--files: {self.uri} cannot be read: {error}") from error
        if found is not fs.FileType.Directory:
            raise ConfigurationError(
                f"--files: {self.uri}, which the command has made, is not there: name a place that all instances share"
            )

    def write_manifest(self, manifest: Manifest) -> None:
        """Completes the folder. Raises as `write`."""
        self._write(MANIFEST, manifest.encoded())

    def manifest(self) -> Manifest | None:
        """Returns the manifest; None if the folder is not complete.

        Raises:
            RetriableError: the file system does not respond.
            InvalidInputError, ConfigurationError: as `Manifest.decoded`.
        """
        content = self._read(MANIFEST)
        return None if content is None else Manifest.decoded(content)

    def write(self, partition: int, name: str, records: Iterable[pa.Table]) -> list[RecordFile]:
        """Writes the records of a partition, which are sorted, as one or more files; none without records.

        Args:
            name: of the files, unique among those of all attempts.

        Raises:
            RetriableError: a file cannot be written.
        """
        written: list[RecordFile] = []
        sink: Any = None
        for table in (part for some in records for part in _parts(some)):
            if sink is None:
                sink, count = pa.BufferOutputStream(), 0
                writer = pq.ParquetWriter(sink, RECORDS, compression="zstd", use_dictionary=False)
            writer.write_table(table.cast(RECORDS), row_group_size=_GROUP_RECORDS)
            count += table.num_rows
            if sink.tell() >= _FILE_BYTES:
                written.append(self._finished(partition, f"{name}-{len(written)}", writer, sink, count))
                sink = None
        if sink is not None:
            written.append(self._finished(partition, f"{name}-{len(written)}", writer, sink, count))
        return written

    def _finished(self, partition: int, name: str, writer: Any, sink: Any, count: int) -> RecordFile:
        writer.close()
        content = sink.getvalue().to_pybytes()
        path = f"partition-{partition:05}/{name}.parquet"
        self._write(path, content)
        return RecordFile(name=path, size=len(content), sha256=hashlib.sha256(content).hexdigest(), records=count)

    def records(self, file: RecordFile) -> Iterator[pa.Table]:
        """Yields the records of a file in parts of at most 20,000, in order, once all of its bytes are verified.

        Raises:
            InvalidInputError: the file is missing, cut or altered.
            RetriableError: the file system does not respond.
        """
        content = self._read(file.name)
        if content is None:
            raise InvalidInputError(f"{self.uri}/{file.name} is missing: run the rebuild again")
        if len(content) != file.size or hashlib.sha256(content).hexdigest() != file.sha256:
            raise InvalidInputError(f"{self.uri}/{file.name} is cut or altered: run the rebuild again")
        for batch in pq.ParquetFile(pa.BufferReader(content)).iter_batches(_GROUP_RECORDS):
            yield pa.Table.from_batches([batch])

    def mark(self, split: Split) -> None:
        """Notes that a split was read. Another attempt at the same split makes the same mark. Raises RetriableError."""
        self._write(f"splits-{split.partition:05}/{'_'.join(map(str, split[1:]))}", b"")

    def splits(self, partition: int) -> list[Split]:
        """Returns the splits of a partition that were read, in order.

        Raises:
            RetriableError: the file system does not respond.
            FatalError: two of them have an offset in common, or one was read twice, with other records.
        """
        system, path = self._opened()
        try:
            found = system.get_file_info(fs.FileSelector(f"{path}/splits-{partition:05}", allow_not_found=True))
        except (OSError, pa.ArrowException) as error:
            raise RetriableError(f"{self.uri} cannot be read: {error}") from error
        names = [one.base_name for one in found if _SPLIT.fullmatch(one.base_name)]
        splits = sorted(Split(partition, *map(int, name.split("_"))) for name in names)
        for one, later in itertools.pairwise(splits):
            if later.first <= one.last:
                raise FatalError(
                    f"offset {later.first} of partition {partition} was read twice, once as one of {one.first} to "
                    f"{one.last}, so its records would count twice: run the rebuild again"
                )
        return splits

    def delete(self) -> None:
        """Deletes the folder, if there is one. Raises RetriableError: the file system does not respond."""
        system, path = self._opened()
        try:
            if system.get_file_info(path).type is not fs.FileType.NotFound:
                system.delete_dir(path)
        except (OSError, pa.ArrowException) as error:
            raise RetriableError(f"{self.uri} cannot be deleted: {error}") from error

    def _opened(self) -> tuple[fs.FileSystem, str]:
        try:
            system, path = fs.FileSystem.from_uri(self.uri)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ConfigurationError(
                f"--files: {self.uri} is neither an absolute path nor a URI of a file system that is known "
                f"(file, s3, gs, abfs, hdfs): {error}"
            ) from error
        return system, path

    def _write(self, name: str, content: bytes) -> None:
        system, path = self._opened()
        whole = f"{path}/{name}"
        try:
            system.create_dir(whole.rpartition("/")[0], recursive=True)
            # By another name first: a local file would be seen while it is written.
            with system.open_output_stream(f"{whole}.part") as stream:
                stream.write(content)
            system.move(f"{whole}.part", whole)
        except (OSError, pa.ArrowException) as error:
            raise RetriableError(f"{self.uri}/{name} cannot be written: {error}") from error

    def _read(self, name: str) -> bytes | None:
        system, path = self._opened()
        try:
            if system.get_file_info(f"{path}/{name}").type is fs.FileType.NotFound:
                return None
            with system.open_input_stream(f"{path}/{name}") as stream:
                content: bytes = stream.read()
        except (OSError, pa.ArrowException) as error:
            raise RetriableError(f"{self.uri}/{name} cannot be read: {error}") from error
        return content


def _parts(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, _GROUP_RECORDS):
        yield table.slice(start, _GROUP_RECORDS)
