"""Spark's JVM: its class path and options, the jar of its own classes, and the archive of its classes."""

from __future__ import annotations

import os
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from balance_service.errors import ConfigurationError
from balance_service.process.java import java_executable
from balance_service.process.package import resource
from balance_service.settings import load_settings
from balance_service.spark import jvm as module
from balance_service.spark.jvm import (
    MODULE_OPTIONS,
    archive_of,
    base_archive_of,
    class_archive_options,
    class_path,
    is_stale,
    own_jar,
    spark_jars,
    spark_java,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_JARS = Path(pyspark.__file__).parent / "jars"
_SMALL = "package parts.code.balance; public class Small { public int one() { return 1; } }"


def test_the_class_path_lists_the_connectors_then_the_own_jar_then_the_needed_jars_of_spark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BALANCE_SPARK_JARS", "z.jar,a.jar")

    jars = class_path(load_settings())

    assert jars[:3] == ["z.jar", "a.jar", str(own_jar())]
    names = [Path(jar).name for jar in jars[3:]]
    assert names == sorted(set(names))
    assert any(name.startswith("spark-sql_") for name in names)
    assert any(name.startswith("hive-storage-api-") for name in names)
    assert not any(name.startswith(("hive-exec-", "kubernetes-", "spark-mllib")) for name in names)


def test_every_pattern_of_omitted_jars_matches_a_jar() -> None:
    lines = resource("deploy/spark-jars-left-out.txt").read_text().splitlines()

    assert [line for line in lines if line and not line.startswith("#") and not any(_JARS.glob(line))] == []


def test_the_options_are_those_of_sparks_launcher_without_the_vector_module(tmp_path: Path) -> None:
    (launcher,) = _JARS.glob("spark-launcher_*.jar")
    with zipfile.ZipFile(launcher) as jar:
        assert "org/apache/spark/launcher/JavaModuleOptions.class" in jar.namelist()
    source = tmp_path / "Show.java"
    source.write_text(
        "class Show { public static void main(String[] a) { "
        "System.out.print(org.apache.spark.launcher.JavaModuleOptions.defaultModuleOptions()); } }"
    )
    shown = subprocess.run(
        [spark_java(), "-cp", launcher, source], capture_output=True, text=True, check=True, timeout=60
    )

    assert set(MODULE_OPTIONS) == set(shown.stdout.split()) - {"--add-modules=jdk.incubator.vector"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small class that replaces the package's own, because it compiles faster."""
    file = tmp_path / "java" / "Small.java"
    file.parent.mkdir()
    file.write_text(_SMALL)
    monkeypatch.setattr(module, "_SOURCES", file.parent)
    return file


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes any later compilation fail."""

    def run(*_: object, **__: object) -> None:
        raise AssertionError("the jar is compiled again")

    return lambda: monkeypatch.setattr(subprocess, "run", run)


def test_the_jar_is_compiled_without_a_jdk(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "jre" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f'#!/bin/sh\nexec {java_executable()} --limit-modules java.se "$@"\n')
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(java.parent.parent))
    assert java_executable() == java

    jar = own_jar()

    assert jar.is_relative_to(cache)
    with zipfile.ZipFile(jar) as archive:
        names = {name.rpartition("/")[2] for name in archive.namelist()}
        assert names >= {f"{source.stem}.class" for source in module._SOURCES.glob("*.java")}
        assert archive.testzip() is None


def test_the_oldest_supported_java_loads_classes_compiled_by_any_other(cache: Path) -> None:
    java_17 = 61

    with zipfile.ZipFile(own_jar()) as archive:
        versions = [int.from_bytes(archive.read(name)[6:8], "big") for name in archive.namelist()]

    assert versions
    assert max(versions) <= java_17


def test_equal_sources_make_equal_jars_of_equal_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jars = []
    for home in ("one", "another"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        jars.append(own_jar())
        source.touch()

    one, another = jars
    assert one != another
    assert (one.name, one.read_bytes()) == (another.name, another.read_bytes())
    # A timestamp would differ a few seconds later.
    with zipfile.ZipFile(one) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_a_cached_jar_is_not_compiled_again(cache: Path, source: Path, no_compiler: Callable[[], None]) -> None:
    jar = own_jar()
    no_compiler()

    assert own_jar() == jar


def test_another_source_makes_another_jar(cache: Path, source: Path) -> None:
    before = own_jar()
    source.write_text(_SMALL.replace("one", "two"))

    assert own_jar() != before
    assert before.is_file()


def test_one_more_source_makes_another_jar(cache: Path, source: Path) -> None:
    before = own_jar()
    source.with_name("Other.java").write_text(_SMALL.replace("Small", "Other"))

    with zipfile.ZipFile(own_jar()) as archive:
        assert archive.namelist() == ["parts/code/balance/Other.class", "parts/code/balance/Small.class"]
    assert own_jar() != before


def test_another_version_of_spark_makes_another_jar(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = own_jar()
    jars = tmp_path / "jars"
    jars.mkdir()
    for jar in spark_jars().glob("*.jar"):
        (jars / jar.name.replace("spark-core_2.13-", "spark-core_2.13-9.")).symlink_to(jar)
    monkeypatch.setattr(module, "spark_jars", lambda: jars)

    assert own_jar().name != before.name


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
    ids=["a flipped bit", "truncated", "missing", "a missing digest", "an invalid digest"],
)
def test_a_damaged_jar_is_compiled_again(
    cache: Path, source: Path, no_compiler: Callable[[], None], suffix: str, damage: Callable[[Path], None]
) -> None:
    jar = own_jar()
    whole = jar.read_bytes()
    damage(jar.with_name(jar.name + suffix))

    assert own_jar().read_bytes() == whole
    no_compiler()
    assert own_jar() == jar


def test_only_one_of_several_concurrent_threads_compiles(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_it, compiled = module._make, []

    def make(jar: Path, jars: Path) -> None:
        compiled.append(jar)
        compile_it(jar, jars)

    monkeypatch.setattr(module, "_make", make)
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(lambda _: own_jar(), range(4)))

    assert [*found] == compiled


def test_the_error_for_a_source_that_does_not_compile_quotes_the_compiler(cache: Path, source: Path) -> None:
    source.write_text(_SMALL.replace("return 1", "return nothing"))

    with pytest.raises(
        ConfigurationError, match=r"(?s)^java/\*.java do not compile against the installed pyspark: .*nothing"
    ):
        own_jar()

    assert [file.suffix for file in cache.rglob("*") if file.is_file()] == [".lock"]


def test_the_error_names_a_class_that_spark_no_longer_has(cache: Path, source: Path) -> None:
    gone = "org.apache.spark.sql.execution.python.streaming.GoneForeachWriter"
    source.write_text(f"import {gone}; class Small extends GoneForeachWriter {{}}")

    with pytest.raises(ConfigurationError, match="GoneForeachWriter"):
        own_jar()


def test_the_error_for_an_unwritable_cache_names_the_variable_to_set(cache: Path, source: Path) -> None:
    cache.write_text("a file")

    with pytest.raises(ConfigurationError, match="set XDG_CACHE_HOME"):
        own_jar()


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = tmp_path / "jdk"
    for folder in ("bin", "lib/server"):
        (home / folder).mkdir(parents=True)
    (home / "release").write_text("17.0.15")
    (home / "lib/server/classes.jsa").touch()
    return home / "bin" / "java"


def test_the_archive_depends_on_class_path_and_jvm(java: Path) -> None:
    first = archive_of(java, ["a.jar", "b.jar"])

    assert first == archive_of(java, ["a.jar", "b.jar"])
    assert first != archive_of(java, ["a.jar"])
    (java.parent.parent / "release").write_text("17.0.16")
    assert first != archive_of(java, ["a.jar", "b.jar"])


def test_without_an_archive_the_jvm_gets_no_options(java: Path) -> None:
    assert class_archive_options(java, ["a.jar"]) == []


def test_an_existing_archive_is_used(java: Path) -> None:
    archive = archive_of(java, ["a.jar"])
    archive.parent.mkdir(parents=True)
    archive.touch()

    assert f"-XX:SharedArchiveFile={archive}" in class_archive_options(java, ["a.jar"])


def test_a_runtime_without_an_archive_of_its_own_classes_gets_one_for_each_release(java: Path) -> None:
    assert base_archive_of(java) is None

    (java.parent.parent / "lib/server/classes.jsa").unlink()
    base, archive = base_archive_of(java), archive_of(java, ["a.jar"])
    assert base is not None
    archive.parent.mkdir(parents=True)
    archive.touch()
    assert class_archive_options(java, ["a.jar"]) == []
    base.touch()
    assert f"-XX:SharedArchiveFile={base}:{archive}" in class_archive_options(java, ["a.jar"])

    (java.parent.parent / "release").write_text("21.0.9")
    assert base_archive_of(java) not in (None, base)


def test_a_newer_jar_makes_an_archive_stale(tmp_path: Path) -> None:
    archive, jars = tmp_path / "classes.jsa", [tmp_path / "a.jar", tmp_path / "b.jar"]
    for jar in jars:
        jar.touch()
    assert is_stale(archive, [*map(str, jars)])
    archive.touch()
    assert not is_stale(archive, [*map(str, jars)])

    later = archive.stat().st_mtime + 1
    os.utime(jars[1], (later, later))

    assert is_stale(archive, [*map(str, jars)])
