"""The archive of Spark's classes: one for each JVM and class path, and not needed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from balance_service.spark.class_archive import archive_of, is_stale, jvm_options

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = tmp_path / "jdk"
    (home / "bin").mkdir(parents=True)
    (home / "release").write_text("17.0.15")
    return home / "bin" / "java"


def test_another_class_path_or_another_jvm_has_another_archive(java: Path) -> None:
    first = archive_of(java, ["a.jar", "b.jar"])

    assert first == archive_of(java, ["a.jar", "b.jar"])
    assert first != archive_of(java, ["a.jar"])
    (java.parent.parent / "release").write_text("17.0.16")
    assert first != archive_of(java, ["a.jar", "b.jar"])


def test_without_an_archive_the_jvm_gets_no_options(java: Path) -> None:
    assert jvm_options(java, ["a.jar"]) == []


def test_an_archive_that_is_there_is_used(java: Path) -> None:
    archive = archive_of(java, ["a.jar"])
    archive.parent.mkdir(parents=True)
    archive.touch()

    assert f"-XX:SharedArchiveFile={archive}" in jvm_options(java, ["a.jar"])


def test_jars_that_are_installed_anew_make_an_archive_stale(tmp_path: Path) -> None:
    archive, jars = tmp_path / "classes.jsa", [tmp_path / "a.jar", tmp_path / "b.jar"]
    for jar in jars:
        jar.touch()
    assert is_stale(archive, [*map(str, jars)])
    archive.touch()
    assert not is_stale(archive, [*map(str, jars)])

    later = archive.stat().st_mtime + 1
    os.utime(jars[1], (later, later))

    assert is_stale(archive, [*map(str, jars)])
