"""Where the schemas come from that a read model names: files beside it, ours, and, for what it reads, the registry."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.avro.schemas import full_name, load_schema
from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from balance_service.avro.schemas import Schema

_OURS = "balance_service"
_RECORD = "record"

InRegistry = Callable[[str, str], "Schema | str"]
"""Topic and simple name → the schema, or the sentence that says what the registry was asked for."""


@dataclass(frozen=True, slots=True)
class Schemas:
    """Finds schemas by the simple names of their records."""

    folders: tuple[Path, ...]
    """Those that are looked into before ours."""
    in_registry: InRegistry | None = None

    @classmethod
    def beside(cls, model: type, in_registry: InRegistry | None = None) -> Schemas:
        """For a class: the folders `schemas` beside its module and beside each package that the module lies in."""
        module = sys.modules.get(model.__module__)
        package, _, _ = model.__module__.partition(".")
        if package == _OURS:
            return cls(())
        file = getattr(module, "__file__", None)
        here = Path(file).resolve().parent if file else Path.cwd()
        packages = model.__module__.count(".") + hasattr(module, "__path__")
        return cls(tuple(folder / "schemas" for folder in (here, *here.parents)[: packages + 1]), in_registry)

    def find(self, name: str, topic: str | None = None) -> Schema:
        """The schema of a record.

        Args:
            topic: that the record is read from; only then the registry is asked.

        Raises:
            ConfigurationError: there is none, or its file is no schema; the message says what was looked for.
            RetriableError: the registry does not answer.
        """
        for folder in self.folders:
            if (file := folder / f"{name}.avsc").is_file():
                return read_schema(file, name)
        try:
            return load_schema(name)
        except FileNotFoundError:
            pass
        looked_for = f"there is no {name}.avsc in {' or '.join(map(str, self.folders)) or 'schemas'}"
        if topic is None:
            raise ConfigurationError(f"{looked_for}; write that file")
        if self.in_registry is None:
            raise ConfigurationError(
                f"{looked_for}; write that file, or have `balance-service schemas pull {topic}` write it"
            )
        found = self.in_registry(topic, name)
        if isinstance(found, str):
            raise ConfigurationError(f"{looked_for}, and {found}; write that file, or register the schema")
        return found


def read_schema(file: Path, name: str) -> Schema:
    """The schema in a file. Raises ConfigurationError: it holds none, or that of another record."""
    try:
        schema: Schema = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{file}:{error.lineno}: {error.msg}; correct the JSON") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None
    if not isinstance(schema, dict) or schema.get("type") != _RECORD:
        raise ConfigurationError(f"{file} is no Avro record; a schema file holds one record")
    if full_name(schema).rpartition(".")[2] != name:
        raise ConfigurationError(f"{file} holds the record {full_name(schema)}; name the file after its record")
    return schema
