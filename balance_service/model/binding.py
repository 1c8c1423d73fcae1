"""Binds read models to their schemas: those in files, then those in the schema registry."""

from __future__ import annotations

import re
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.resolution import with_fields_of
from balance_service.avro.schemas import full_name, load_schema, subject_of
from balance_service.errors import ConfigurationError
from balance_service.model.schemas import Schemas
from balance_service.model.sources import has_several, sources_of
from balance_service.model.stage import FROM, model_and_generation, rekeyed_topics
from balance_service.model.stream import Join

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.events import Emit
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stream import Stream, Table
    from balance_service.settings import Settings


def require_registry(models: Iterable[ReadModel | type[ReadModel]], settings: Settings) -> None:
    """Raises ConfigurationError if a read model has an Avro topic, and no registry is set."""
    for model in models if settings.schema_registry_url is None else ():
        if topics := avro_topics(model):
            raise ConfigurationError(
                f"the read model '{model.name}' has Avro on topic {', '.join(map(repr, topics))}, and "
                "BALANCE_SCHEMA_REGISTRY_URL is not set: set it to the address of the schema registry, or, if the "
                'topic has JSON, declare it with format="json"'
            )


def avro_topics(model: ReadModel | type[ReadModel]) -> list[str]:
    """Returns the topics of a read model that are declared to have Avro: sources, joined tables and outputs."""
    sources = sources_of(model)
    joined = [step.table for source in sources for step in source.steps if isinstance(step, Join)]
    emits = getattr(model, "emits", ())
    outputs = emits if isinstance(emits, tuple | list) else (emits,)
    # A record that is sent unchanged keeps its source's format.
    kept = sources[0].format if not model.has_states() else "avro"
    sent = [one for one in outputs if one.format == "avro" and (one.record or kept == "avro")]
    declared: list[Stream | Table | Emit] = [*sources, *joined, *sent]
    return [*dict.fromkeys(one.topic for one in declared if one.format == "avro")]


def bind_models(models: Iterable[ReadModel | type[ReadModel]], settings: Settings) -> list[ReadModel]:
    """Returns the read models bound to their schemas; a model that is bound already is returned unchanged.

    The first schema that the registry returns for a record is recorded there under a subject that names the
    application, the model, its version and the record. Every instance and every rebuild then uses the same schema,
    even if the registry has a newer one by then.

    Raises:
        ConfigurationError: a declaration is not valid, or a schema is neither in a file nor in the registry.
        RetriableError: the registry does not respond.
    """
    with closing(SchemaRegistry.from_settings(settings)) as registry:
        return [
            model(Schemas.beside(model, partial(_in_registry, registry, settings, model), settings))
            if isinstance(model, type)
            else model
            for model in models
        ]


def _in_registry(
    registry: SchemaRegistry, settings: Settings, model: type[ReadModel], topic: str, name: str
) -> Schema | str:
    """Returns the schema of a record, or a sentence that says where the registry has none."""
    read = settings.topic_of(topic)
    among = [source.topic for source in sources_of(model) if name in source.records] if has_several(model) else []
    # Each source has its own: they may differ, and other ones may be added later.
    suffix = f"{FROM}{topic}" if topic in among else ""
    subject = f"{_recorded(settings.application_id, model.name)}{model.version}-{name}{suffix}"
    found = registry.recorded(subject, partial(registry.newest, read, name))
    if found is not None:
        return found
    return (
        f"the schema registry at {registry.url} has no record {name} under the subjects {read}-NAMESPACE.{name}, "
        f"{read}-value or NAMESPACE.{name}"
    )


def with_producers_fields(registry: SchemaRegistry, topic: str, schema: Schema) -> tuple[Schema, bool]:
    """Returns the schema of an event that a dataclass declares, as it may become the newest one of its topic.

    It has all fields of the newest one of its producers, so that they keep them.

    Args:
        schema: of the dataclass.

    Returns:
        The schema, and whether the registry lacks it.

    Raises:
        ConfigurationError: the producers' record has another namespace, or a field of another type.
        RetriableError: the registry does not respond.
    """
    theirs = registry.newest(topic, schema["name"])
    if theirs is None:
        return schema, True
    known = f"topic '{topic}' has the record {full_name(theirs)} in the schema registry at {registry.url}, and the "
    if full_name(theirs) != full_name(schema):
        space = full_name(theirs).rpartition(".")[0]
        raise ConfigurationError(
            f"{known}dataclass {schema['name']} declares {full_name(schema)}, so no event would be read: write "
            f'`__namespace__ = "{space}"` in the class'
        )
    try:
        whole = with_fields_of(theirs, schema)
    except ValueError as error:
        raise ConfigurationError(f"{known}dataclass does not fit it: {error}; correct the class") from None
    return whole, whole is not theirs


def recorded_subjects(application_id: str, model: str) -> re.Pattern[str]:
    """Returns which subjects a read model's schemas are recorded under, in all its versions."""
    return re.compile(rf"{re.escape(_recorded(application_id, model))}[0-9]+-\w+(?:-from-.+)?")


def subjects_of_others(subjects: Sequence[str], settings: Settings) -> list[str]:
    """Returns the subjects that are neither of a topic of this application, nor its record of what a model reads."""
    mark = subject_of("-changelog", load_schema("Position"))
    stages = [one.removesuffix(mark) for one in subjects if one.endswith(mark)]
    stages = [stage for stage in stages if stage.startswith(f"{settings.application_id}-")]
    topics = [settings.application_servers_topic, settings.dead_letter_decisions_topic, settings.generations_topic]
    topics += [f"{stage}-changelog" for stage in stages]
    models = {model_and_generation(stage)[0] for stage in stages}
    topics += {topic for stage in stages for model in models for topic in rekeyed_topics(stage, model)}
    names = "|".join(map(re.escape, models))
    own = re.compile(rf"(?:{'|'.join(map(re.escape, topics))})-.+|(?:{names})-v[0-9]+-\w+(?:-from-.+)?")
    return [subject for subject in subjects if not own.fullmatch(subject)]


def _recorded(application_id: str, model: str) -> str:
    return f"{application_id}-{model}-v"
