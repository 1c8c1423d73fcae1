"""Read models bound to their schemas: those of files, or else those that the registry has for what they read."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from balance_service.avro.registry import SchemaRegistry
from balance_service.model.schemas import Schemas

if TYPE_CHECKING:
    from collections.abc import Iterable

    from balance_service.avro.schemas import Schema
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings


def bound(models: Iterable[ReadModel | type[ReadModel]], settings: Settings) -> list[ReadModel]:
    """The read models, each with the schemas that it names; one that is bound already stays as it is.

    The schema that the registry is asked for first is recorded there, under a subject of the application, the model,
    its version and the record: all instances, and all rebuilds, come to the same one, whatever is registered later.

    Raises:
        ConfigurationError: a model cannot be as it is declared, or a schema is nowhere.
        RetriableError: the registry is asked, and does not answer.
    """
    with closing(SchemaRegistry.from_settings(settings)) as registry:
        return [
            model(Schemas.beside(model, partial(_in_registry, registry, settings, model)))
            if isinstance(model, type)
            else model
            for model in models
        ]


def _in_registry(
    registry: SchemaRegistry, settings: Settings, model: type[ReadModel], topic: str, name: str
) -> Schema | str:
    """The schema of a record, or that there is none."""
    read = settings.topic_of(topic)
    subject = f"{settings.application_id}-{model.name}-v{model.version}-{name}"
    found = registry.recorded(subject, partial(registry.newest, read, name))
    if found is not None:
        return found
    return (
        f"the schema registry at {registry.url} has no record {name} under the subjects {read}-NAMESPACE.{name}, "
        f"{read}-value or NAMESPACE.{name}"
    )
