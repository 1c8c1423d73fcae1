"""Packs what the Python workers of a Spark cluster import into an archive that Spark unpacks on each executor.

The archive has packages alone, in its root: the executors have Python, of the same minor version, and Spark.
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
from importlib.metadata import Distribution, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.process.package import resource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NAME = "balance-read-models"
_PACKAGE = "balance_service"
# What an instance needs, apart from Java: executors fold as an instance does.
_EXTRA = re.compile(r"""\s*extra\s*==\s*['"]service['"]\s*""")
# Spark's jars and its examples: the executors have Spark.
_LEFT_OUT = ("pyspark/jars/", "pyspark/examples/", "pyspark/data/", "pyspark/python/lib/")
_RESOURCES = ("samples", "schemas", "deploy/ivy.xml", "deploy/jars.sha256", "deploy/log4j2.properties")


def pack(archive: Path, modules: Sequence[str]) -> int:
    """Writes the archive, a compressed tar file; returns how many files it has.

    Args:
        archive: its path, which is replaced once the archive is complete.
        modules: those of read models, such as `shop.spending`.

    Raises:
        ConfigurationError: a module is not found, a package is not installed, or the file cannot be written.
    """
    partial, names = archive.with_name(f"{archive.name}.partial"), set[str]()
    try:
        with tarfile.open(partial, "w:gz", compresslevel=1) as packed:
            for name, file in _files(modules):
                if name in names or "__pycache__" in name or name.startswith(_LEFT_OUT):
                    continue
                names.add(name)
                packed.add(file, name, recursive=False)
            note = f"Python {sys.version_info.major}.{sys.version_info.minor}\n".encode()
            described = tarfile.TarInfo("PYTHON")
            described.size = len(note)
            packed.addfile(described, io.BytesIO(note))
        partial.replace(archive)
    except OSError as error:
        raise ConfigurationError(f"{archive} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return len(names)


def _files(modules: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yields the files of this package, of those that it requires, and of the models: name in the archive, and path."""
    yield from _tree(Path(__file__).parents[1], _PACKAGE)
    for name in _RESOURCES:
        path = resource(name)
        yield from _tree(path, f"{_PACKAGE}/_resources/{name}")
    for one in _required(distribution(_NAME)):
        for file in one.files or ():
            # Scripts lie outside of the packages.
            if ".." not in file.parts and (path := Path(str(file.locate()))).is_file():
                yield str(file), path
    for module in dict.fromkeys(name.partition(".")[0] for name in modules):
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ConfigurationError(f"there is no module '{module}': run the command where the read models are found")
        origin = Path(spec.origin)
        yield from _tree(origin.parent, module) if spec.submodule_search_locations else [(origin.name, origin)]


def _tree(path: Path, name: str) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        yield name, path
        return
    for file in sorted(path.rglob("*")):
        if file.is_file():
            yield f"{name}/{file.relative_to(path).as_posix()}", file


def _required(of: Distribution) -> Iterator[Distribution]:
    """Yields the distributions that one requires for instances, and those that they require without extras."""
    known, waiting = {_normal(_NAME)}, [of]
    while waiting:
        by = waiting.pop()
        for requirement in by.requires or ():
            told, _, condition = requirement.partition(";")
            if by is of:
                condition = _EXTRA.sub("", condition)
            name = _normal(_name_in(told))
            if name in known or "extra" in condition:
                continue
            known.add(name)
            try:
                found = distribution(name)
            except ModuleNotFoundError:
                # For another system, or another version of Python.
                if condition:
                    continue
                raise ConfigurationError(f"the package '{name}' is not installed: install the service again") from None
            waiting.append(found)
            yield found


def _name_in(requirement: str) -> str:
    end = next((at for at, one in enumerate(requirement) if not (one.isalnum() or one in "-_.")), len(requirement))
    return requirement[:end].rstrip(".")


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
