"""The jar of our Java class: compiled where it is needed, by what ships with Spark, and the same wherever that is."""

from __future__ import annotations

import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from balance_service.errors import ConfigurationError
from balance_service.process.jars import java_executable
from balance_service.spark import handover_jar as module
from balance_service.spark.handover_jar import handover_jar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SMALL = "package parts.code.balance; public class Small { public int one() { return 1; } }"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A class that is compiled instead of ours, sooner."""
    file = tmp_path / "Small.java"
    file.write_text(_SMALL)
    monkeypatch.setattr(module, "_SOURCE", file)
    return file


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has whoever compiles fail from then on."""

    def run(*_: object, **__: object) -> None:
        raise AssertionError("it is compiled")

    return lambda: monkeypatch.setattr(subprocess, "run", run)


def test_it_is_compiled_without_the_compiler_of_a_jdk(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "jre" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f'#!/bin/sh\nexec {java_executable()} --limit-modules java.se "$@"\n')
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(java.parent.parent))
    assert java_executable() == java

    jar = handover_jar()

    assert jar.is_relative_to(cache)
    with zipfile.ZipFile(jar) as archive:
        assert "parts/code/balance/Handover.class" in archive.namelist()
        assert archive.testzip() is None


def test_the_oldest_java_that_will_do_can_load_what_any_other_compiled(cache: Path) -> None:
    java_17 = 61

    with zipfile.ZipFile(handover_jar()) as archive:
        versions = [int.from_bytes(archive.read(name)[6:8], "big") for name in archive.namelist()]

    assert versions
    assert max(versions) <= java_17


def test_equal_sources_give_equal_bytes_under_an_equal_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jars = []
    for home in ("one", "another"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        jars.append(handover_jar())
        source.touch()

    one, another = jars
    assert one != another
    assert (one.name, one.read_bytes()) == (another.name, another.read_bytes())
    # A time would be another a few seconds later.
    with zipfile.ZipFile(one) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_a_jar_that_is_there_is_not_compiled_again(cache: Path, source: Path, no_compiler: Callable[[], None]) -> None:
    jar = handover_jar()
    no_compiler()

    assert handover_jar() == jar


def test_another_source_has_another_jar(cache: Path, source: Path) -> None:
    before = handover_jar()
    source.write_text(_SMALL.replace("one", "two"))

    assert handover_jar() != before
    assert before.is_file()


def test_another_version_of_spark_has_another_jar(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = handover_jar()
    jars = tmp_path / "jars"
    jars.mkdir()
    for jar in module.spark_jars().glob("*.jar"):
        (jars / jar.name.replace("spark-core_2.13-", "spark-core_2.13-9.")).symlink_to(jar)
    monkeypatch.setattr(module, "spark_jars", lambda: jars)

    assert handover_jar().name != before.name


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        ("", _flip),
        ("", _cut),
        ("", lambda jar: jar.unlink()),
        (".sha256", lambda digest: digest.unlink()),
        (".sha256", lambda digest: digest.write_bytes(b"\xff\x00")),
    ],
    ids=["a bit is another", "cut short", "gone", "its digest gone", "its digest garbage"],
)
def test_a_damaged_jar_is_made_anew(
    cache: Path, source: Path, no_compiler: Callable[[], None], suffix: str, damage: Callable[[Path], None]
) -> None:
    jar = handover_jar()
    whole = jar.read_bytes()
    damage(jar.with_name(jar.name + suffix))

    assert handover_jar().read_bytes() == whole
    no_compiler()
    assert handover_jar() == jar


def test_of_many_that_need_it_at_once_one_compiles(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_it, compiled = module._make, []

    def make(jar: Path, jars: Path) -> None:
        compiled.append(jar)
        compile_it(jar, jars)

    monkeypatch.setattr(module, "_make", make)
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(lambda _: handover_jar(), range(4)))

    assert [*found] == compiled


def test_a_source_that_does_not_compile_is_refused_in_the_compilers_words(cache: Path, source: Path) -> None:
    source.write_text(_SMALL.replace("return 1", "return nothing"))

    with pytest.raises(
        ConfigurationError, match=r"(?s)^Small.java does not compile against the installed pyspark: .*nothing"
    ):
        handover_jar()

    assert [file.suffix for file in cache.rglob("*") if file.is_file()] == [".lock"]


def test_a_class_that_spark_no_longer_has_is_named(cache: Path, source: Path) -> None:
    gone = "org.apache.spark.sql.execution.python.streaming.GoneForeachWriter"
    source.write_text(f"import {gone}; class Small extends GoneForeachWriter {{}}")

    with pytest.raises(ConfigurationError, match="GoneForeachWriter"):
        handover_jar()


def test_a_cache_that_cannot_be_written_is_refused_with_what_to_set(cache: Path, source: Path) -> None:
    cache.write_text("a file")

    with pytest.raises(ConfigurationError, match="set XDG_CACHE_HOME"):
        handover_jar()
