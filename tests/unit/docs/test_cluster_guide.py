"""The files and the sentence that the guide about clusters shows are those of the folder of a batch job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from balance_service.bulk.folder import RECORDS, Folder, Split
from balance_service.bulk.manifest import MANIFEST
from balance_service.errors import InvalidInputError
from balance_service.spark.jvm import spark_java
from tests.support.documents import files_of

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


def _entered(folder: Path, *arguments: str) -> str:
    """Runs the entry point of the guide's image; returns what it writes."""
    script = folder / "entrypoint.sh"
    script.write_text(files_of("docs/how-to/cluster.md")[script.name], encoding="utf-8")
    of_executor = {
        "DRIVER_URL": "spark://CoarseGrainedScheduler@127.0.0.1:1",
        "EXECUTOR_ID": "1",
        "EXECUTOR_CORES": "1",
        "EXECUTOR_MEMORY": "256m",
        "EXECUTOR_POD_IP": "127.0.0.1",
        "EXECUTOR_POD_NAME": "pod",
        "APPLICATION_ID": "app",
        "RESOURCE_PROFILE_ID": "0",
        "CLASSPATH": "",
        "JAVA_OPT_0": "-Dfirst=with a space",
        "JAVA_OPT_1": "-XshowSettings:properties",
    }
    folders = [str(spark_java().parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        **os.environ,
        **{f"SPARK_{name}": value for name, value in of_executor.items()},
        "PATH": os.pathsep.join(folders),
    }
    command = ["/bin/sh", str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    return done.stdout + done.stderr


def test_the_entry_point_of_the_guide_starts_an_executor_or_a_command(tmp_path: Path) -> None:
    said = _entered(tmp_path, "executor")

    assert "first = with a space" in said
    # Spark has taken all options, and looks for the driver, which is not there.
    assert "Failed to connect to /127.0.0.1:1" in said
    assert _entered(tmp_path, "echo", "a  command") == "a  command\n"
