"""The Java class that hands Spark's rows to this process: compiled once into a jar of the cache.

The compiler is Janino, which ships with Spark, so no JDK is needed. The jar's name has the digest of what it is made
of. Its own digest lies beside it and is checked at each start, so a damaged jar is made anew.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

from balance_service.errors import ConfigurationError
from balance_service.process.jars import cache_folder, java_executable, locked, partial_folder

_SOURCE = Path(__file__).with_name("java") / "Handover.java"
_COMPILER = "org.codehaus.commons.compiler.samples.CompilerDemo"
_COMPILE_SECONDS = 60


def spark_jars() -> Path:
    """The folder of the jars that PySpark ships.

    Raises:
        ConfigurationError: PySpark is not installed.
    """
    # find_spec does not import pyspark, which would take most of a second.
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigurationError("pyspark is not installed: install the service with its dependencies")
    return Path(spec.origin).parent / "jars"


def handover_jar() -> Path:
    """The jar; compiled, in a second, if the cache has none that is whole.

    Raises:
        ConfigurationError: no Java, the cache cannot be written, or the source does not fit this version of Spark.
    """
    jars = spark_jars()
    made_of = _SOURCE.read_bytes() + "".join(sorted(jar.name for jar in jars.glob("spark-*.jar"))).encode()
    jar = cache_folder() / f"handover-{hashlib.sha256(made_of).hexdigest()[:16]}.jar"
    if not _is_whole(jar):
        with locked(jar):
            if not _is_whole(jar):
                _make(jar, jars)
    return jar


def _digest_of(jar: Path) -> Path:
    return jar.with_name(jar.name + ".sha256")


def _is_whole(jar: Path) -> bool:
    try:
        return _digest_of(jar).read_text(encoding="ascii") == hashlib.sha256(jar.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _make(jar: Path, jars: Path) -> None:
    folder = partial_folder(jar.with_name(jar.name + ".classes"))
    try:
        classes = _compiled(folder, jars)
        partial = jar.with_name(jar.name + ".partial")
        with zipfile.ZipFile(partial, "w") as archive:
            for found in classes:
                # An entry without a time: equal sources make equal jars.
                archive.writestr(zipfile.ZipInfo(found.relative_to(folder).as_posix()), found.read_bytes())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _digest_of(jar).write_text(hashlib.sha256(partial.read_bytes()).hexdigest(), encoding="ascii")
    partial.rename(jar)


def _compiled(folder: Path, jars: Path) -> list[Path]:
    command = [
        str(java_executable()),
        "-cp",
        os.pathsep.join(str(found) for name in ("janino", "commons-compiler") for found in jars.glob(f"{name}-*.jar")),
        _COMPILER,
        "-g:source,lines",
        "-d",
        str(folder),
        "-classpath",
        os.pathsep.join(map(str, sorted(jars.glob("*.jar")))),
        str(_SOURCE),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    classes = sorted(folder.rglob("*.class"))
    if done.returncode or not classes:
        said = (done.stderr or done.stdout).strip()
        raise ConfigurationError(f"{_SOURCE.name} does not compile against the installed pyspark: {said}")
    return classes
