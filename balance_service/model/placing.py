"""Places the stages of read models in an application: gives them topics and names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from balance_service.avro.named_types import expanded
from balance_service.avro.resolution import with_fields_of
from balance_service.errors import ConfigurationError
from balance_service.model.class_checks import check_names
from balance_service.model.events import DeclaredRecord
from balance_service.model.sources import sources_of
from balance_service.model.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from balance_service.avro.schemas import Schema
    from balance_service.model.events import FormatName
    from balance_service.model.read_model import ReadModel
    from balance_service.model.record_keys import KeyFormat
    from balance_service.model.stream import Partitioner
    from balance_service.settings import Settings

_MOST_NAME = 249


def stages_of(model: ReadModel, settings: Settings) -> list[Stage]:
    """Returns a read model's stages, in order, in the application that the settings name.

    Raises:
        ConfigurationError: BALANCE_PARTITIONER contradicts the model, or the name of a topic is too long.
    """
    placed = place_stages(model.stages, settings.application_id, settings.topic_of)
    if too_long := [stage.changelog for stage in placed if len(stage.changelog) > _MOST_NAME]:
        raise ConfigurationError(
            f"the read model '{model.name}' would have the topic '{too_long[0]}', and a topic name has at most "
            f"{_MOST_NAME} characters; shorten BALANCE_APPLICATION_ID, or the name of the model"
        )
    return [
        stage
        if stage.reads_rekeyed
        else replace(stage, partitioner=_partitioner_of(model, declared.source, declared.partitioner, settings))
        for declared, stage in zip(model.stages, placed, strict=True)
    ]


def written_by(topic: str, models: Iterable[type[ReadModel]], settings: Settings) -> Partitioner:
    """Returns the partitioner of this service's tools for a topic: the one that the first model declares for it.

    Raises:
        ConfigurationError: BALANCE_PARTITIONER contradicts a model.
    """
    for model in models:
        for source in sources_of(model):
            if settings.topic_of(source.topic) == topic:
                declared = _partitioner_of(model, source.topic, source.partitioner, settings)
                return "murmur2" if declared == "any" else declared
    return "murmur2"


def _partitioner_of(
    model: ReadModel | type[ReadModel], topic: str, declared: Partitioner, settings: Settings
) -> Partitioner:
    """Returns the partitioner of a source; for that of `balance`, BALANCE_PARTITIONER replaces the default."""
    if not settings.is_own(topic) or declared == settings.partitioner:
        return declared
    if declared == "murmur2":
        return settings.partitioner
    raise ConfigurationError(
        f"BALANCE_PARTITIONER is {settings.partitioner}, and the read model '{model.name}' declares the topic "
        f"'{topic}' with partitioner=\"{declared}\"; a topic has one: set BALANCE_PARTITIONER={declared}, or "
        "correct the declaration"
    )


def place_stages(stages: Iterable[Stage], application_id: str, topic_of: Callable[[str], str]) -> list[Stage]:
    """Returns a read model's stages with the names that an application gives them.

    Args:
        stages: each after those that write its topic.
        topic_of: the read model's name of a source → its topic.
    """
    done: list[Stage] = []
    # By re-keyed topic: the topics that its records were first written to, and their names.
    first: dict[str, dict[str, tuple[str, ...]]] = {}
    for stage in stages:
        source = f"{application_id}-{stage.source}" if stage.reads_rekeyed else topic_of(stage.source)
        written_to = first.get(source, {source: stage.records})
        placed = replace(stage, application_id=application_id, source=source, written_to=written_to)
        done.append(placed)
        if placed.passes_on:
            here = first.setdefault(placed.rekeyed, {})
            made = None if placed.makes is None else {placed.rekeyed: (placed.makes["name"],)}
            for topic, records in (made or written_to).items():
                here[topic] = tuple(dict.fromkeys((*here.get(topic, ()), *records)))
    return done


def newest(models: Iterable[ReadModel]) -> list[ReadModel]:
    """Returns, of the models of each name, the one with the highest version."""
    found: dict[str, ReadModel] = {}
    for model in models:
        if found.setdefault(model.name, model).version < model.version:
            found[model.name] = model
    return [*found.values()]


def hosted_stages(models: Iterable[ReadModel], settings: Settings) -> list[Stage]:
    """Returns the stages of the read models that an instance hosts, in their newest versions.

    Raises:
        ConfigurationError: two models of one version, or two stages of different models, have one name.
    """
    models = [*models]
    check_names(map(type, models), "BALANCE_MODELS")
    stages = [stage for model in newest(models) for stage in stages_of(model, settings)]
    by_name = {stage.name: stage.owner for stage in stages}
    for stage in stages:
        if (other := by_name[stage.name]) != stage.owner:
            raise ConfigurationError(
                f"BALANCE_MODELS: '{stage.owner}' and '{other}' both have a stage '{stage.name}'; rename one of them"
            )
    return stages


def stages_of_retries(known: Iterable[ReadModel], settings: Settings) -> list[Stage]:
    """Returns the stages that retry other consumers' dead letters, one for each topic. They have no read model.

    Args:
        known: the read models that this application may host.

    Raises:
        ConfigurationError: a topic belongs to this application, or a name is taken or too long.
    """
    of_models = [stage for model in known for stage in stages_of(model, settings)]
    ours = {stage.dead_letters: stage.owner for stage in of_models}
    taken = {stage.name: stage.owner for stage in of_models}
    stages: list[Stage] = []
    for topic in settings.retry_topics:
        name = f"retries-{topic}"
        stage = Stage(
            name=name,
            owner=name,
            source=topic,
            application_id=settings.application_id,
            partitioner="any",
            outputs=(settings.retries_topic,),
            retries=True,
        )
        if topic == settings.retries_topic:
            raise ConfigurationError(
                f"BALANCE_RETRY_TOPICS: '{topic}' is the topic that retries are sent to, so each would be sent again "
                "and again; name the topic where the consumer keeps its dead letters"
            )
        if topic in ours:
            raise ConfigurationError(
                f"BALANCE_RETRY_TOPICS: '{topic}' has dead letters of the read model '{ours[topic]}', which are "
                "retried in place; remove it, and see `balance-service dead-letters`"
            )
        if name in taken:
            raise ConfigurationError(
                f"BALANCE_RETRY_TOPICS: the stage for '{topic}' is called '{name}', like a stage of the read model "
                f"'{taken[name]}'; rename the read model"
            )
        if len(stage.changelog) > _MOST_NAME:
            raise ConfigurationError(
                f"BALANCE_RETRY_TOPICS: '{topic}' is too long: a topic name has at most {_MOST_NAME} characters, and "
                f"'{stage.changelog}' has more; shorten BALANCE_APPLICATION_ID"
            )
        stages.append(stage)
    return stages


def read_by_all(topic: str, known: Schema | None, schema: Schema) -> Schema:
    """Returns the schema of events that several read models read, each by a dataclass of its own.

    Args:
        known: that of the classes before; None for the first one.
        schema: that of the next class.

    Raises:
        ConfigurationError: the classes differ in the type of a field.
    """
    try:
        return schema if known is None else expanded(with_fields_of(known, schema))
    except ValueError as error:
        raise ConfigurationError(
            f"BALANCE_MODELS: read models declare {schema['name']} of topic '{topic}' by classes that no event fits: "
            f"{error}; import one class in all of them"
        ) from None


@dataclass(frozen=True, slots=True)
class TopicRecords:
    """Records by simple name, whether a record without a value is valid, the function that places keys, their form.

    `format` and `type` are as those of `Stage`.
    """

    records: Mapping[str, Schema]
    tombstones: bool
    partitioner: Partitioner
    key_format: KeyFormat
    format: FormatName
    type: str | None


def topics_read(models: Iterable[ReadModel], settings: Settings) -> set[str]:
    """Returns the topics that read models read, apart from those of their own re-keys."""
    stages = [stage for model in models for stage in stages_of(model, settings)]
    tables = {settings.topic_of(join.table.topic) for stage in stages for join in stage.joins}
    return tables | {stage.source for stage in stages if not stage.reads_rekeyed}


def records_of_topic(topic: str, models: Iterable[ReadModel], settings: Settings) -> TopicRecords:
    """Returns the records that read models declare to read from a topic. The first of them names its partitioner.

    The form of its keys is text, unless one of them names another.

    A record that several dataclasses declare has the fields of all of them.

    Raises:
        ConfigurationError: no read model reads the topic, or classes differ in the type of a field.
    """
    records: dict[str, dict[str, Schema]] = {}
    partitioners: dict[str, Partitioner] = {}
    formats: dict[str, tuple[FormatName, str | None]] = {}
    forms: dict[str, KeyFormat] = {}
    with_tombstones = set()

    def add(to: str, found: Mapping[str, Schema]) -> None:
        known = records.setdefault(to, {})
        for record, schema in found.items():
            before = known.get(record) if to == topic and isinstance(record, DeclaredRecord) else None
            known[record] = read_by_all(to, before, schema)

    for model in models:
        for stage in stages_of(model, settings):
            if not stage.reads_rekeyed:
                add(stage.source, stage.schemas)
                partitioners.setdefault(stage.source, stage.partitioner)
                formats.setdefault(stage.source, (stage.format, stage.type))
                if stage.own_key is not None:
                    forms.setdefault(stage.source, stage.key_format)
                if stage.tombstones:
                    with_tombstones.add(stage.source)
            for join in stage.joins:
                table = settings.topic_of(join.table.topic)
                add(table, {join.table.record: stage.rows[join.table.record]})
                partitioners.setdefault(table, join.table.partitioner)
                formats.setdefault(table, (join.table.format, None))
                forms.setdefault(table, join.table.key_format)
                with_tombstones.add(table)
    if topic not in records:
        raise ConfigurationError(f"no read model reads topic '{topic}'; name one of {', '.join(sorted(records))}")
    form = forms.get(topic, "string")
    return TopicRecords(records[topic], topic in with_tombstones, partitioners[topic], form, *formats[topic])
