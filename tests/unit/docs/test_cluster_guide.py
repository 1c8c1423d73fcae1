"""The files and the sentence that the guide about clusters shows are those of the folder of a batch job."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from balance_service.bulk.folder import RECORDS, Folder, Split
from balance_service.bulk.manifest import MANIFEST
from balance_service.errors import InvalidInputError

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "cluster.md"
ONE = pa.table([pa.array([b"key"], pa.binary())] * 2, schema=RECORDS)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder.of(str(tmp_path / "files"), "app", "balance", 2)
    made.check()
    return made


def test_the_guide_names_the_files_of_a_folder(folder: Folder) -> None:
    folder.write(3, "a", [ONE])
    folder.mark(Split(3, 0, 1, 2, 2, -1))
    (Path(folder.uri) / MANIFEST).write_bytes(b"{}")
    told = GUIDE.read_text(encoding="utf-8").split("FILES/APPLICATION-ID/MODEL.gN/")[1:]

    root = Path(folder.uri)
    found = {path.relative_to(root).parent.as_posix() for path in root.rglob("*") if path.is_file()}
    assert found == {Path(line.split()[0]).parent.as_posix() for line in told}
    assert (root / told[0].split()[0]).is_file()


def test_the_guide_has_the_sentence_about_altered_files(folder: Folder) -> None:
    (file,) = folder.write(3, "a", [ONE])
    path = Path(folder.uri) / file.name
    path.write_bytes(path.read_bytes() + b"1")

    with pytest.raises(InvalidInputError) as caught:
        [*folder.records(file)]

    guide = GUIDE.read_text(encoding="utf-8")
    assert str(caught.value).partition(".parquet")[2] in guide
