"""The environment of a run: machine, versions, commits. Without host names and paths."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from balance_service.process.jars import resolve_jars
from balance_service.process.java import java_executable

if TYPE_CHECKING:
    from collections.abc import Iterable

_PACKAGES = ("pyspark", "confluent-kafka", "rocksdict", "aiohttp", "pyarrow", "psycopg")
_JAVA = 17
_GIT_SECONDS = 20
_JAR = re.compile(r"(kafka_2\.13|kafka-streams)-([0-9.]+)\.jar")


def facts(jars: Iterable[str]) -> dict[str, str]:
    """Name in the report → value.

    Args:
        jars: Ivy configurations of the jars in use.
    """
    known = {
        "cores": str(os.cpu_count()),
        "processor": _processor(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "Java": _java(),
    }
    names = (_JAR.fullmatch(path.name) for configuration in jars for path in resolve_jars(configuration))
    known |= {match[1]: match[2] for match in names if match}
    return known | {package: version(package) for package in _PACKAGES}


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, with `-dirty` if files other than results are changed."""
    try:
        dirty = _git(checkout, "status", "--porcelain", "--", ".", ":!bench/results")
        return _git(checkout, "rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(checkout: Path, *arguments: str) -> str:
    command = [shutil.which("git") or "git", *arguments]
    told = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    return told.stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _java() -> str:
    told = subprocess.run(
        [str(java_executable(_JAVA)), "-version"], capture_output=True, text=True, timeout=30, check=False
    )
    return (told.stderr or told.stdout).partition("\n")[0]
