"""The folder that a batch job fills: files with digests, marks of splits, and a manifest that completes it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from balance_service.bulk import folder as module
from balance_service.bulk.folder import RECORDS, Folder, Split
from balance_service.bulk.manifest import MadeWith, Manifest, PartitionFiles
from balance_service.errors import ConfigurationError, FatalError, InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.bulk.manifest import RecordFile


def records(first: int, end: int) -> pa.Table:
    keys = [f"key-{n:08}".encode() for n in range(first, end)]
    return pa.table([pa.array(keys, pa.binary()), pa.array(keys, pa.binary())], schema=RECORDS)


def manifest(*files: RecordFile) -> Manifest:
    of_partition = PartitionFiles(
        partition=0,
        begins=0,
        position=9,
        events=8,
        stream_time_ms=-1,
        keys=3,
        letters={"key-null/waiting": 1},
        files=files,
    )
    made_with = MadeWith(package="1", spark="4.2.1", decoder_rules=1, sql={"a": "b"}, idempotency_window_ms=60_000)
    return Manifest(
        application_id="app",
        model="balance",
        generation=2,
        version=1,
        fingerprint="f",
        owner="app\0balance.g2",
        source="balance",
        source_topic_id="id",
        partitioner="murmur2",
        state_schema_id=7,
        made_with=made_with,
        partitions=(of_partition,),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder.of(str(tmp_path / "files"), "app", "balance", 2)
    made.check()
    return made


def test_files_have_what_was_written_in_order_and_are_bounded(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FILE_BYTES", 20_000)

    written = folder.write(3, "part", [records(0, 50_000), records(50_000, 120_001)])

    assert len(written) > 1
    assert sum(file.records for file in written) == 120_001
    parts = [part for file in written for part in folder.records(file)]
    assert max(part.num_rows for part in parts) <= 20_000
    assert pa.concat_tables(parts).equals(records(0, 120_001))


def test_without_records_there_is_no_file(folder: Folder) -> None:
    assert folder.write(3, "part", []) == []
    assert folder.write(3, "part", [records(0, 0)]) == []


@pytest.mark.parametrize("how", ["cut", "altered", "missing", "replaced"])
def test_a_file_that_is_not_as_written_is_refused_before_its_first_record(
    folder: Folder, tmp_path: Path, how: str
) -> None:
    (file,) = folder.write(0, "part", [records(0, 1_000)])
    path = tmp_path / "files" / "app" / "balance.g2" / file.name
    content = path.read_bytes()
    match how:
        case "cut":
            path.write_bytes(content[:-1])
        case "altered":
            path.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
        case "missing":
            path.unlink()
        case _:
            (other,) = folder.write(0, "other", [records(0, 999)])
            file = replace(other, name=file.name)

    with pytest.raises(InvalidInputError, match=r"part-0\.parquet is (cut or altered|missing): run the rebuild again"):
        next(folder.records(file))


def test_a_folder_is_complete_once_it_has_its_manifest(folder: Folder) -> None:
    assert folder.manifest() is None
    made = manifest(*folder.write(0, "part", [records(0, 3)]))

    folder.write_manifest(made)

    assert folder.manifest() == made
    assert (made.events, made.keys, made.partitions[0].records) == (8, 3, 3)
    folder.delete()
    assert folder.manifest() is None
    folder.delete()


def test_a_manifest_that_is_altered_or_of_another_version_is_refused(folder: Folder) -> None:
    content = manifest().encoded()
    assert Manifest.decoded(content).digest == manifest().digest
    assert manifest().digest != replace(manifest(), generation=3).digest

    for other in (content[:-1], content.replace(b'"keys": 3', b'"keys": 4 '), b"[]", b"{}"):
        with pytest.raises(InvalidInputError, match=r"manifest\.json is (cut or )?altered"):
            Manifest.decoded(other)
    with pytest.raises(ConfigurationError, match="has format 2, this version knows 1"):
        Manifest.decoded(content.replace(b'"format": 1', b'"format": 2'))


def test_splits_are_marked_once_and_overlaps_are_found(folder: Folder) -> None:
    splits = [Split(1, 100, 199, 90, 80, 5), Split(1, 0, 99, 100, 1, -1), Split(2, 0, 7, 8, 8, -1)]
    for split in (*splits, splits[0]):
        folder.mark(split)

    assert folder.splits(1) == [splits[1], splits[0]]
    assert (folder.splits(0), folder.splits(2)) == ([], [splits[2]])
    # The same split had other records when it was read again.
    folder.mark(Split(2, 0, 8, 9, 9, -1))
    with pytest.raises(FatalError, match="offset 0 of partition 2 was read twice, once as one of 0 to 7"):
        folder.splits(2)


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigurationError, match=r"--files: .*/file/app/balance\.g1 cannot be used"):
        Folder.of(str(tmp_path / "file"), "app", "balance", 1).check()
    with pytest.raises(ConfigurationError, match="neither an absolute path nor a URI of a file system that is known"):
        Folder.of("relative/path", "app", "balance", 1).check_found()
    assert Folder.of("s3a://bucket/rebuilds/", "app", "balance", 2).uri == "s3://bucket/rebuilds/app/balance.g2"
