"""Class-data sharing for Spark's JVM: the classes it needs, parsed once and mapped into memory from then on.

`archiving` makes the archive; without one all works, but starts some seconds slower. Source: JEP 350, "Dynamic CDS
Archives".
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.process.jars import cache_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

QUIET = (
    "-Xshare:auto",
    "-Xlog:disable",
    "-Xlog:all=error:stderr",
    "-Xlog:cds=off",
    "-Xlog:cds+dynamic=off",
    "-Xlog:class+path=off",
)
# Mapped to another address each time, every page of it would be written to, and be this process' own.
_IN_PLACE = ("-XX:+UnlockDiagnosticVMOptions", "-XX:ArchiveRelocationMode=0")


def archive_of(java: Path, jars: Sequence[str]) -> Path:
    """Where the archive for this JVM and class path is, or would be."""
    release = java.parent.parent / "release"
    spec = importlib.util.find_spec("pyspark")
    parts = [str(java), release.read_text() if release.is_file() else "", spec.origin if spec else "", *jars]
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return cache_folder() / f"classes-{digest}.jsa"


def jvm_options(java: Path, jars: Sequence[str]) -> list[str]:
    """Options by which the JVM uses the archive; none while there is none. It passes over a stale one."""
    archive = archive_of(java, jars)
    return [f"-XX:SharedArchiveFile={archive}", *_IN_PLACE, *QUIET] if archive.is_file() else []


def is_stale(archive: Path, jars: Sequence[str]) -> bool:
    """Whether the JVM would pass over it without a word: there is none, or a jar was installed anew since."""
    if not archive.is_file():
        return True
    made = archive.stat().st_mtime
    return any(Path(jar).stat().st_mtime > made for jar in jars)
