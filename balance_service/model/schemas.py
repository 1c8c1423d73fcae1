"""Finds the schemas that a read model names: files next to it, files of this package, and, for events, the registry."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.avro.logical_types import with_times
from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import full_name, load_schema
from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from balance_service.avro.schemas import Schema
    from balance_service.settings import Settings

_OURS = "balance_service"
_RECORD = "record"

InRegistry = Callable[[str, str], "Schema | str"]
"""(topic, simple name) → the schema, or a sentence that says what the registry was asked for."""


@dataclass(frozen=True, slots=True)
class Schemas:
    folders: tuple[Path, ...]
    """Searched before this package's schemas."""
    in_registry: InRegistry | None = None
    settings: Settings | None = None
    """Those of the instance that hosts the model; None if none does."""

    @classmethod
    def beside(cls, model: type, in_registry: InRegistry | None = None, settings: Settings | None = None) -> Schemas:
        """For a class: the folders `schemas` next to its module, and next to each package that contains the module."""
        module = sys.modules.get(model.__module__)
        package, _, _ = model.__module__.partition(".")
        if package == _OURS:
            return cls((), settings=settings)
        file = getattr(module, "__file__", None)
        here = Path(file).resolve().parent if file else Path.cwd()
        packages = model.__module__.count(".") + hasattr(module, "__path__")
        folders = tuple(folder / "schemas" for folder in (here, *here.parents)[: packages + 1])
        return cls(folders, in_registry, settings)

    def find(self, name: str, topic: str | None = None) -> Schema:
        """Returns the schema of a record, by its simple name.

        Args:
            topic: the topic that the record is read from. Without one, the registry is not asked.

        Returns:
            The schema with each named type in full at each use, and times as `logicalType` has them.

        Raises:
            ConfigurationError: the schema is not found, or is invalid; the message says what was searched.
            RetriableError: the registry does not answer.
        """
        found, where = self._found(name, topic)
        try:
            whole: Schema = expanded(with_times(found))
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"the schema {name} {where} cannot be used: {error}; correct it") from None
        return whole

    def _found(self, name: str, topic: str | None) -> tuple[Schema, str]:
        """Returns a schema, and where it is."""
        for folder in self.folders:
            if (file := folder / f"{name}.avsc").is_file():
                return read_schema(file, name), f"in {file}"
        try:
            return load_schema(name), "of this package"
        except FileNotFoundError:
            pass
        looked_for = f"there is no {name}.avsc in {' or '.join(map(str, self.folders)) or 'schemas'}"
        if topic is None:
            raise ConfigurationError(f"{looked_for}; write that file")
        if self.in_registry is None:
            raise ConfigurationError(
                f"{looked_for}; write that file, or let `balance-service schemas pull {topic}` write it"
            )
        found = self.in_registry(topic, name)
        if isinstance(found, str):
            raise ConfigurationError(f"{looked_for}, and {found}; write that file, or register the schema")
        return found, "in the schema registry"


def read_schema(file: Path, name: str) -> Schema:
    """Returns the schema in a file. Raises ConfigurationError if it holds no schema, or that of another record."""
    try:
        schema: Schema = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{file}:{error.lineno}: {error.msg}; correct the JSON") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None
    if not isinstance(schema, dict) or schema.get("type") != _RECORD:
        raise ConfigurationError(f"{file} is not an Avro record; a schema file holds one record")
    if full_name(schema).rpartition(".")[2] != name:
        raise ConfigurationError(f"{file} holds the record {full_name(schema)}; name the file after its record")
    return schema
