"""The jars that Java runs.

`deploy/ivy.xml` lists the jars by Ivy configuration. Those of `spark` lie in this package, in `spark/jars`, so that an
instance starts without a download. Each other configuration, of the local stack and of the benchmark, is downloaded at
first need into a cache that all processes of a user share, below XDG_CACHE_HOME or ~/.cache:

    balance-service/jars/<hash of ivy.xml>/
        <configuration>/            the jars; complete, or absent
        <configuration>.log         Ivy's output
        <configuration>.lock        locked by the process that downloads
        <archive>.unpacked/         contents of a tar.gz
        own-<hash>.jar              the compiled classes of spark/java
        base-<hash>.jsa             the class archive of a runtime that lacks its own
        classes-<hash>.jsa          the class archive of spark/class_archive.py

A folder gets its final name by a rename, so readers need no lock. The files must match the digests in
`deploy/jars.sha256`. `python -m balance_service.process.jars` downloads all, replaces those in this package, and prints
new digests.
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
from balance_service.process.package import resource, with_extra

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DOWNLOAD_TIMEOUT_SECONDS = 900

_CONNECTORS = Path(__file__).parents[1] / "spark" / "jars"
_CONFIGURATIONS = {
    "spark": "Spark's connectors",
    "kafka": "the Kafka broker",
    "registry": "the schema registry",
    "bench": "Kafka Streams",
}
_DIGESTS = "deploy/jars.sha256"
_DIGESTS_HEAD = "# SHA-256 of every file of each configuration of ivy.xml; `make jar-digests` renews it.\n"
_PROBLEMS = ("::::", "FAILED", "not found", "rror", "xception", "UNRESOLVED")


def connectors() -> list[Path]:
    """Spark's connectors, which this package carries, sorted."""
    return sorted(_CONNECTORS.glob("*.jar"))


def resolve_jars(configuration: str) -> list[Path]:
    """Files of one Ivy configuration (`kafka`, `registry` or `bench`), sorted; downloaded if not cached.

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


def renew() -> str:
    """Downloads every configuration again, replaces the connectors in this package, and returns the new digests.

    These are the contents of deploy/jars.sha256 for the present deploy/ivy.xml.

    Raises:
        ConfigurationError: as `resolve_jars`, except that digests are not compared.
    """
    lines = [_DIGESTS_HEAD]
    with tempfile.TemporaryDirectory(prefix="balance-jars-") as folder:
        for configuration in _CONFIGURATIONS:
            partial = _download(configuration, Path(folder) / configuration)
            if configuration == "spark":
                shutil.rmtree(_CONNECTORS, ignore_errors=True)
                shutil.copytree(partial, _CONNECTORS)
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
            "check the network (behind a proxy, JAVA_TOOL_OPTIONS with -Dhttps.proxyHost and -Dhttps.proxyPort, and "
            f"with -Djavax.net.ssl.trustStore if it has a certificate authority of its own) and read {log}"
        )
    return partial


def _ivy() -> Path:
    # find_spec does not import pyspark, which takes most of a second.
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigurationError(f"pyspark, which downloads the jars, is not installed: install {with_extra('local')}")
    folder = Path(spec.origin).parent / "jars"
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
    sys.stdout.write(renew())
