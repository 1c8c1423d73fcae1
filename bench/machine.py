"""What the figures were taken on: the machine and the versions. No host name and no path."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil

from balance_service.jars import resolve_jars
from balance_service.java import java_executable

_PACKAGES = ("pyspark", "confluent-kafka", "rocksdict", "aiohttp", "pyarrow")
_JAVA = 17
_JAR = re.compile(r"(kafka_2\.13|kafka-streams)-([0-9.]+)\.jar")


def facts() -> dict[str, str]:
    """By what they are called in the report."""
    known = {
        "cores": str(os.cpu_count()),
        "processor": _processor(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "Java": _java(),
    }
    jars = (_JAR.fullmatch(path.name) for conf in ("kafka", "bench") for path in resolve_jars(conf))
    known |= {match[1]: match[2] for match in jars if match}
    return known | {package: version(package) for package in _PACKAGES}


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
