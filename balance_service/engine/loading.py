"""Loads the store of a task from the files of a batch job, in parts that survive a kill.

The records of the files are those of a changelog, so a part is committed as any commit is: to the changelog in one
transaction, then to the store. Its position record says how far the load is, and not where the task stands, so that
nothing answers from the store, or folds onto it, before it has all. The last record is the position up to which the job
has folded, from which the task folds on.

A load that was cut off goes on if the files are the same. A store that has part of other files loses that first.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from balance_service.avro.frames import SCHEMA_PREFIX
from balance_service.bulk.accepting import AGAIN, Wanted, made_here
from balance_service.engine.commit import write_part, write_position, write_records
from balance_service.engine.dead_letter import Status
from balance_service.engine.fold import FoldProcessor
from balance_service.engine.records import Loading
from balance_service.engine.store import offset_of
from balance_service.errors import FatalError, InvalidInputError, RetriableError, TaskHaltedError
from balance_service.process.failpoints import failpoint, part_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from balance_service.bulk.folder import Folder
    from balance_service.bulk.manifest import PartitionFiles
    from balance_service.engine.changelog_writer import ChangelogWriter
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import Position, Record
    from balance_service.engine.replica import Restoration
    from balance_service.engine.store import StateStore
    from balance_service.model.generations import Load

log = structlog.get_logger(__name__)

# The most that a kill costs, and that memory holds.
_PART_RECORDS = 100_000
_PART_BYTES = 16 << 20
_DELETED = 20_000
_NO_FILES = ""
"""The digest that a position has while what was loaded is deleted: no manifest has it."""


def loads(
    hosted: HostedStage,
    partition: int,
    store: StateStore,
    writer: ChangelogWriter,
    begun: Position,
    progress: Restoration,
) -> Iterator[None] | None:
    """Returns what loads a store without a position, one part a step; None if there is nothing to load or to delete.

    Then the store has the position of the files, or none if it will be folded from the beginning.

    Args:
        writer: it has fenced its predecessor, and the store has all of the changelog.
        begun: the position of a new store, with the epoch of the task.

    Raises, at each step:
        TaskHaltedError: the files are missing, cut, altered or others than those that the rebuild began with, or do not
            fit what this instance folds.
        RetriableError: the file system does not respond; or the generation that sends has not come as far yet.
        StoreFullError: the disk has no room.
        BalanceServiceError: as `commit`.
    """
    load = hosted.generations.load_of(hosted.stage)
    if store.position is not None or (load is None and store.loading is None):
        return None
    return _steps(hosted, partition, store, writer, begun, progress, load)


def _steps(
    hosted: HostedStage,
    partition: int,
    store: StateStore,
    writer: ChangelogWriter,
    begun: Position,
    progress: Restoration,
    load: Load | None,
) -> Iterator[None]:
    codec = hosted.processor.position_codec
    if store.loading is not None and _loading(store) != (None if load is None else load.digest):
        log.warning("the task deletes its part of other files", task=f"{hosted.name}_{partition}")
        yield from _deleted(replace(begun, loading=Loading(_NO_FILES)), hosted, store, writer)
    if load is None:
        return
    # Its import takes long, and no other task needs it.
    from balance_service.bulk.folder import Folder

    folder = Folder.of(load.files, hosted.stage.application_id, hosted.stage.owner, hosted.stage.generation)
    try:
        files = _files(hosted, partition, folder, load)
        at = _reached(store, load)
        progress.begin(0, files.records)
        schemas, outputs = hosted.schemas.missing(store, begun.offset, hosted.processor.letters.now_ms())
        write_position(replace(begun, loading=at), codec, store, writer, None, schemas, outputs)
        failpoint("load-begun")
        yield
        done = sum(file.records for file in files.files[: at.file])
        for number, file in enumerate(files.files[at.file :], at.file):
            read = Read(folder.records(file), at.next_key if number == at.file else b"")
            for part in read.parts():
                store.require_room(serves=hosted.generations.serves(hosted.stage))
                after = Loading(load.digest, number, part[-1][0] + b"\0")
                write_part(part, replace(begun, loading=after), codec, store, writer)
                progress.advance(len(part), done + read.yielded)
                yield
            if read.count != file.records:
                raise InvalidInputError(
                    f"{folder.uri}/{file.name} has {read.count} records, and its manifest says {file.records}: {AGAIN}"
                )
            done += file.records
    except InvalidInputError as error:
        raise TaskHaltedError(str(error)) from error
    _check_sender(hosted, partition, store, files)
    failpoint("files-loaded")
    reached = replace(
        begun,
        offset=files.position,
        stream_time_ms=files.stream_time_ms,
        keys=files.keys,
        letters=files.letters,
    )
    write_position(reached, codec, store, writer)


def require_loaded(store: StateStore) -> None:
    """Checks that a store does not have a part of the files alone. Raises RetriableError."""
    if _loading(store):
        raise RetriableError("the store has a part of the files that it is loaded from")


def _loading(store: StateStore) -> str | None:
    """Returns the digest of the files that a store has part of; None if it has none."""
    position = store.loading
    return None if position is None or position.loading is None else position.loading.digest


def _reached(store: StateStore, load: Load) -> Loading:
    """Returns how far a store is loaded that has records of these files, or none."""
    found = None if store.loading is None else store.loading.loading
    return found if found is not None and found.digest == load.digest else Loading(load.digest)


def _files(hosted: HostedStage, partition: int, folder: Folder, load: Load) -> PartitionFiles:
    """Returns the files of a partition, after the manifest is verified. Raises InvalidInputError."""
    processor, source = hosted.processor, hosted.source
    if not isinstance(processor, FoldProcessor):
        raise FatalError(f"stage {hosted.name} has no states, and there are files for it")
    wanted = Wanted(
        stage=hosted.stage,
        declaration=hosted.generations.declaration(hosted.stage),
        source_topic_id=source.topic_id,
        partitioner=hosted.partitioner,
        partitions=source.partitions,
        made_with=made_here(hosted.settings),
    )
    manifest = wanted.read(folder, load.digest)
    if manifest.state_schema_id != processor.frames.codec.schema_id:
        raise InvalidInputError(
            f"{folder.uri} does not fit: its states are of schema {manifest.state_schema_id} of the registry, and here "
            f"they are of {processor.frames.codec.schema_id}; {AGAIN}"
        )
    return manifest.partitions[partition]


class Read:
    """The records of a file from a key on."""

    def __init__(self, tables: Iterable[pa.Table], start: bytes) -> None:
        self._tables = tables
        self._start = start
        self.count = 0
        """How many records the file has had so far."""
        self.yielded = 0
        """How many of them were in parts, or lie before the first one."""

    def parts(self) -> Iterator[list[Record]]:
        part: list[Record] = []
        most, size = part_size(_PART_RECORDS), 0
        for table in self._tables:
            keys: list[bytes] = table.column("key").to_pylist()
            skipped = bisect_left(keys, self._start) if self._start else 0
            self.count += len(keys)
            self.yielded += skipped
            part += zip(keys[skipped:], table.column("value").to_pylist()[skipped:], strict=True)
            size += table.nbytes
            while len(part) >= most or (part and size >= _PART_BYTES):
                whole, part, size = part[:most], part[most:], 0
                self.yielded += len(whole)
                yield whole
        if part:
            self.yielded += len(part)
            yield part


def _deleted(position: Position, hosted: HostedStage, store: StateStore, writer: ChangelogWriter) -> Iterator[None]:
    """Deletes all records of a store, from its changelog too, one part a step."""
    start, codec = b"", hosted.processor.position_codec
    while keys := store.recorded_keys(start, part_size(_DELETED)):
        # Its position is encoded under one of these.
        gone = [(key, None) for key in keys if not key.startswith(SCHEMA_PREFIX)]
        write_records(gone.__iter__, position, codec, store, writer)
        start = keys[-1] + b"\0"
        yield


def _check_sender(hosted: HostedStage, partition: int, store: StateStore, files: PartitionFiles) -> None:
    """Checks that the generation that sends has come as far as the files, and leaves out no record that they apply.

    None goes beyond the one that sends: the outputs of what lies above would never be sent. And a record that is a dead
    letter there is applied, or discarded, by a decision.

    Raises:
        RetriableError: it has not come as far yet, or is not open here.
        TaskHaltedError: the files apply a record that it has not.
    """
    stage, letters = hosted.stage, hosted.processor.letters
    if hosted.generations.serves(stage):
        return
    sender = hosted.generations.sender(stage, partition)
    if sender is None or offset_of(sender) < files.position:
        stands = "is not open here" if sender is None else f"stands at {offset_of(sender)}"
        raise RetriableError(
            f"{stage.name}_{partition} is loaded up to {files.position}, and waits for the generation that sends, "
            f"which {stands}"
        )
    if sender.position is None or not sender.position.letters:
        return
    closed = (Status.APPLIED, Status.SUPERSEDED)
    open_there = [at for at, one in letters.all(sender).items() if at < files.position and one.status not in closed]
    if lacking := {*open_there} - letters.at(store, open_there).keys():
        raise TaskHaltedError(
            f"offset {min(lacking)} of {hosted.source.name}-{partition} is a dead letter of the generation that sends, "
            f"and was none when the files were made: {AGAIN}"
        )
