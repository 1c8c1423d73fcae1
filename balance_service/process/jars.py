"""Jars: resolved once from deploy/ivy.xml into a cache that all processes of a user share.

Layout, below XDG_CACHE_HOME or ~/.cache:

    balance-service/jars/<hash of ivy.xml>/
        <configuration>/            the jars; there whole, or not at all
        <configuration>.log         what Ivy said
        <configuration>.lock        held by the process that resolves
        <archive>.unpacked/         contents of a tar.gz
        handover-<hash>.jar         our own class for Spark, see spark/handover_jar.py
        classes-<hash>.jsa          classes of Spark's JVM, see spark/class_archive.py

A folder appears under its final name by a rename, so a reader needs no lock. Downloaded files must have the digests
of deploy/jars.sha256; `python -m balance_service.process.jars` renews them.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.process.java import java_executable
from balance_service.process.resources import resource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RESOLVE_TIMEOUT_SECONDS = 900

_WHAT = {
    "spark": "Spark's connectors",
    "kafka": "the Kafka broker",
    "registry": "the schema registry",
    "bench": "Kafka Streams",
}
_DIGESTS = "deploy/jars.sha256"
_DIGESTS_HEAD = "# SHA-256 of every file of each configuration of ivy.xml; `make jar-digests` renews it.\n"
_PROBLEMS = ("::::", "FAILED", "not found", "rror", "xception", "UNRESOLVED")


def resolve_jars(configuration: str) -> list[Path]:
    """Files of one Ivy configuration (`spark`, `kafka`, `registry` or `bench`), sorted; downloaded if not cached.

    Instant when cached; otherwise takes up to a minute and says so on stderr.

    Raises:
        ConfigurationError: no Java, no network, or an artifact is missing; names the log. Or a file is another than
            deploy/jars.sha256 says.
    """
    folder = cache_folder() / configuration
    if not folder.is_dir():
        with locked(folder):
            if not folder.is_dir():
                _download(configuration, folder)
    return sorted(folder.iterdir())


def unpack(archive: Path) -> Path:
    """Folder with the contents of a tar.gz that `resolve_jars` returned; unpacked once.

    Raises:
        ConfigurationError: the archive is damaged, or the disk is full.
    """
    folder = archive.parent.with_name(archive.name.removesuffix(".tar.gz") + ".unpacked")
    if not folder.is_dir():
        with locked(folder):
            if not folder.is_dir():
                fresh = fresh_folder(folder)
                try:
                    with tarfile.open(archive) as tar:
                        tar.extractall(fresh, filter="data")
                except (OSError, tarfile.TarError) as error:
                    raise ConfigurationError(f"{archive} cannot be unpacked: {error}") from error
                fresh.rename(folder)
    return folder


def cache_folder() -> Path:
    """Where this version's jars, and what is made from them, are kept."""
    contents = resource("deploy/ivy.xml").read_bytes()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "balance-service" / "jars" / hashlib.sha256(contents).hexdigest()[:16]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the one process that makes a folder or file of the cache.

    Raises:
        ConfigurationError: the cache cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(folder.name + ".lock").open("w")
    except OSError as error:
        raise ConfigurationError(
            f"the cache folder {folder.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fresh_folder(folder: Path) -> Path:
    """An empty folder to rename to `folder` when complete; what a killed process left is removed."""
    fresh = folder.with_name(folder.name + ".partial")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    return fresh


def _download(configuration: str, folder: Path) -> None:
    fresh = _retrieve(configuration, folder)
    wrong = _differing(fresh, _expected().get(configuration, {}))
    if wrong:
        shutil.rmtree(fresh)
        raise ConfigurationError(
            f"{', '.join(wrong)}: not as deploy/jars.sha256 says, so none is used; "
            "where the network is trusted and deploy/ivy.xml was changed on purpose, run `make jar-digests`"
        )
    fresh.rename(folder)


def _expected() -> dict[str, dict[str, str]]:
    """Configuration → file name → SHA-256, in hexadecimal."""
    expected: dict[str, dict[str, str]] = {}
    for line in resource(_DIGESTS).read_text(encoding="ascii").splitlines():
        if not line.startswith("#"):
            digest, path = line.split()
            configuration, name = path.split("/")
            expected.setdefault(configuration, {})[name] = digest
    return expected


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _differing(folder: Path, expected: Mapping[str, str]) -> list[str]:
    """Names of the files that are missing, not expected, or have other contents."""
    found = _digests(folder)
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def renewed_digests() -> str:
    """The contents of deploy/jars.sha256 for the present deploy/ivy.xml; downloads every configuration again.

    Raises:
        ConfigurationError: as of `resolve_jars`, except that digests are not compared.
    """
    lines = [_DIGESTS_HEAD]
    with tempfile.TemporaryDirectory(prefix="balance-jars-") as folder:
        for configuration in _WHAT:
            fresh = _retrieve(configuration, Path(folder) / configuration)
            lines += [f"{digest}  {configuration}/{name}\n" for name, digest in _digests(fresh).items()]
    return "".join(lines)


def _retrieve(configuration: str, folder: Path) -> Path:
    """Have Ivy download a configuration; returns the new folder, to be renamed to `folder`.

    Raises:
        ConfigurationError: it could not.
    """
    java = java_executable()
    what = _WHAT.get(configuration, configuration)
    sys.stderr.write(f"resolving {what}, once (about a minute)…\n")
    sys.stderr.flush()
    fresh = fresh_folder(folder)
    log = folder.with_name(configuration + ".log")
    # Ivy's own cache holds a second copy of every jar, so it goes once they are retrieved.
    ivy_cache = fresh_folder(folder.with_name(configuration + ".ivy"))
    command = [
        str(java),
        "-Dsun.net.client.defaultConnectTimeout=30000", "-Dsun.net.client.defaultReadTimeout=60000",
        "-jar", str(_ivy()), "-cache", str(ivy_cache), "-ivy", str(resource("deploy/ivy.xml")),
        "-confs", configuration, "-types", "jar", "bundle", "tar.gz",
        "-retrieve", f"{fresh}/[artifact]-[revision](-[classifier]).[ext]",
    ]  # fmt: skip
    try:
        with log.open("wb") as output:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=RESOLVE_TIMEOUT_SECONDS,
                check=False,
            ).returncode
        failure = f"Ivy ended with code {code}" if code else ""
    except subprocess.TimeoutExpired:
        failure = f"it took longer than {RESOLVE_TIMEOUT_SECONDS} s"
    finally:
        shutil.rmtree(ivy_cache, ignore_errors=True)
    if failure or not any(fresh.iterdir()):
        raise ConfigurationError(
            f"{what} could not be downloaded ({failure or 'nothing was retrieved'}): {_problems(log)}; "
            f"check the network (behind a proxy, JAVA_TOOL_OPTIONS with -Dhttps.proxyHost and "
            f"-Dhttps.proxyPort) and read {log}"
        )
    return fresh


def _ivy() -> Path:
    # find_spec does not import pyspark, which would take most of a second.
    spec = importlib.util.find_spec("pyspark")
    folder = Path(spec.origin).parent / "jars" if spec and spec.origin else Path("pyspark/jars")
    found = sorted(folder.glob("ivy-*.jar"))
    if not found:
        raise ConfigurationError(f"{folder} holds no Ivy, with which jars are downloaded: reinstall pyspark")
    return found[-1]


def _problems(log: Path) -> str:
    """The last line of Ivy's log that tells a person what failed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    told = [line.strip(": ") for line in lines if any(word in line for word in _PROBLEMS)]
    return next((line for line in reversed(told) if line), "its log says nothing more")


if __name__ == "__main__":
    sys.stdout.write(renewed_digests())
