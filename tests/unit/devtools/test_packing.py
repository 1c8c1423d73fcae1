"""The archive for executors: packages alone, from which a Python without any others imports what a worker needs."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING

import pytest

from balance_service.devtools.packing import _name_in, pack
from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

_IMPORTS = """
import balance_service.spark.batch_share, balance_service.spark.batch_split, shop.spending
from balance_service.avro.schemas import load_schema
load_schema("Position")
print(balance_service.__file__, shop.spending.__file__)
"""


def test_a_python_without_packages_imports_from_the_archive_what_a_worker_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = tmp_path / "project" / "shop"
    shop.mkdir(parents=True)
    (shop / "__init__.py").write_text("")
    (shop / "spending.py").write_text("SPENT = 1\n")
    monkeypatch.syspath_prepend(shop.parent)
    archive, unpacked = tmp_path / "environment.tar.gz", tmp_path / "unpacked"

    files = pack(archive, ["shop.spending"])

    with tarfile.open(archive) as packed:
        names = packed.getnames()
        packed.extractall(unpacked, filter="data")
    assert files + 1 == len(names) == len(set(names))
    assert not [name for name in names if name.startswith("pyspark/jars/") or "__pycache__" in name]
    done = subprocess.run(
        # Neither packages of this Python nor of its user.
        [sys.executable, "-S", "-s", "-c", _IMPORTS],
        env={"PYTHONPATH": str(unpacked)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(unpacked / "balance_service" / "__init__.py"),
        str(unpacked / "shop" / "spending.py"),
    ]
    assert [one.name for one in tmp_path.glob("*.partial")] == []


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no module 'nowhere'"):
        pack(tmp_path / "environment.tar.gz", ["nowhere.models"])
    with pytest.raises(ConfigurationError, match=r"gone/environment\.tar\.gz cannot be written: No such file"):
        pack(tmp_path / "gone" / "environment.tar.gz", [])
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("told", "name"),
    [("aiohttp<3.15,>=3.14.5", "aiohttp"), ("confluent-kafka[avro]>=2.13", "confluent-kafka"), ("a.b (>=1)", "a.b")],
)
def test_a_requirement_names_a_package(told: str, name: str) -> None:
    assert _name_in(told) == name
