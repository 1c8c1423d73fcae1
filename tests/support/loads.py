"""Folders as a batch job leaves them, written by its own module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from balance_service.bulk.accepting import made_here
from balance_service.bulk.folder import RECORDS, Folder
from balance_service.bulk.manifest import Manifest, PartitionFiles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from balance_service.engine.records import Record
    from balance_service.model.generations import Declaration
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Partitioner
    from balance_service.settings import Settings


def folder_of(files: Path, stage: Stage) -> Folder:
    return Folder.of(str(files), stage.application_id, stage.owner, stage.generation)


def write_folder(
    files: Path,
    stage: Stage,
    settings: Settings,
    declaration: Declaration,
    source_topic_id: str,
    state_schema_id: int,
    partitions: Sequence[tuple[int, Sequence[Sequence[Record]]]],
    *,
    keys: Sequence[int] | None = None,
    letters: Mapping[int, Mapping[str, int]] | None = None,
    partitioner: Partitioner = "murmur2",
    **changed: Any,
) -> Manifest:
    """Writes the folder of a generation.

    Args:
        partitions: position, and the records of each file, which are sorted, of each partition.
        keys: how many states each partition has; by default, as many as records.
        letters: counts of dead letters by partition.
        changed: other values in the manifest.
    """
    folder, found = folder_of(files, stage), []
    for number, (position, of_files) in enumerate(partitions):
        written = [
            file
            for at, records in enumerate(of_files)
            for file in folder.write(number, f"part-{at}", [table_of(records)] if records else [])
        ]
        found.append(
            PartitionFiles(
                partition=number,
                begins=0,
                position=position,
                events=position,
                stream_time_ms=-1,
                keys=sum(map(len, of_files)) if keys is None else keys[number],
                letters=dict((letters or {}).get(number, {})),
                files=tuple(written),
            )
        )
    given = {
        "application_id": stage.application_id,
        "model": stage.owner,
        "generation": stage.generation,
        "version": declaration.version,
        "fingerprint": declaration.fingerprint,
        "owner": stage.mark,
        "source": stage.source,
        "source_topic_id": source_topic_id,
        "partitioner": partitioner,
        "state_schema_id": state_schema_id,
        "made_with": made_here(settings),
        "partitions": tuple(found),
    }
    manifest = Manifest(**{**given, **changed})
    folder.write_manifest(manifest)
    return manifest


def table_of(records: Sequence[Record]) -> pa.Table:
    return pa.table([[key for key, _ in records], [value for _, value in records]], schema=RECORDS)
