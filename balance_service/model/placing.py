"""Places the stages of read models in an application: gives them topics and names, and draws them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.model.declaration import check_names
from balance_service.model.stage import Stage
from balance_service.model.stream import Global

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stream import Join, Partitioner
    from balance_service.settings import Settings

_MOST_NAME = 249
# Shapes of Mermaid.
_TOPIC, _STATES = '[("{}")]', '[["{}"]]'


def stages_of(model: ReadModel, settings: Settings) -> list[Stage]:
    """Returns a read model's stages, in order, in the application that the settings name.

    Raises:
        ConfigurationError: BALANCE_PARTITIONER contradicts the model.
    """
    first, *rest = place_stages(model.stages, settings.application_id, settings.topic_of)
    return [replace(first, partitioner=_partitioner_of(model, settings)), *rest]


def written_by(topic: str, models: Iterable[type[ReadModel]], settings: Settings) -> Partitioner:
    """Returns the partitioner of this service's tools for a topic: the one that the first model declares for it.

    Raises:
        ConfigurationError: BALANCE_PARTITIONER contradicts a model.
    """
    for model in models:
        if settings.topic_of(model.source.topic) == topic:
            declared = _partitioner_of(model, settings)
            return "murmur2" if declared == "any" else declared
    return "murmur2"


def _partitioner_of(model: ReadModel | type[ReadModel], settings: Settings) -> Partitioner:
    """Returns the partitioner of a model's source; for `balance`, BALANCE_PARTITIONER replaces the default."""
    topic, declared = model.source.topic, model.source.partitioner
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

    Each stage after the first reads the topic that the previous one writes.

    Args:
        topic_of: the read model's name of a source → its topic.
    """
    done: list[Stage] = []
    written_to = ""
    for stage in stages:
        source = done[-1].rekeyed if stage.reads_rekeyed else topic_of(stage.source)
        written_to = written_to or source
        done.append(replace(stage, application_id=application_id, source=source, written_to=written_to))
        if stage.makes is not None:
            written_to = done[-1].rekeyed
    return done


def hosted_stages(models: Iterable[ReadModel], settings: Settings) -> list[Stage]:
    """Returns the stages of the read models that an instance hosts.

    Raises:
        ConfigurationError: two models, or two of their stages, have one name.
    """
    models = [*models]
    check_names(map(type, models), "BALANCE_MODELS")
    stages = [stage for model in models for stage in stages_of(model, settings)]
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
            written_to=topic,
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


@dataclass(frozen=True, slots=True)
class TopicRecords:
    """Records by simple name, whether records without a value are valid, and the function that places keys."""

    records: Mapping[str, Schema]
    tombstones: bool
    partitioner: Partitioner


def records_of_topic(topic: str, models: Iterable[ReadModel], settings: Settings) -> TopicRecords:
    """Returns the records that read models declare to read from a topic. The first of them names its partitioner.

    Raises:
        ConfigurationError: no read model reads the topic.
    """
    records: dict[str, dict[str, Schema]] = {}
    partitioners: dict[str, Partitioner] = {}
    with_tombstones = set()
    for model in models:
        for stage in stages_of(model, settings):
            if not stage.reads_rekeyed:
                records.setdefault(stage.source, {}).update(stage.schemas)
                partitioners.setdefault(stage.source, stage.partitioner)
                if model.source.tombstones:
                    with_tombstones.add(stage.source)
            for join in stage.joins:
                table = settings.topic_of(join.table.topic)
                records.setdefault(table, {})[join.table.record] = stage.rows[join.table.record]
                partitioners.setdefault(table, join.table.partitioner)
                with_tombstones.add(table)
    if topic not in records:
        raise ConfigurationError(f"no read model reads topic '{topic}'; name one of {', '.join(sorted(records))}")
    return TopicRecords(records[topic], topic in with_tombstones, partitioners[topic])


def flowchart(model: ReadModel, stages: Sequence[Stage]) -> str:
    """Returns the flowchart of a read model's stages, in order. Source: Mermaid, "Flowcharts - Basic Syntax"."""
    nodes: dict[str, str] = {}
    lines = ["flowchart LR"]

    def node(form: str, name: str) -> str:
        shape = form.format(name)
        if shape not in nodes:
            nodes[shape] = f"n{len(nodes)}"
            lines.append(f"    {nodes[shape]}{shape}")
        return nodes[shape]

    for stage in stages:
        source, work = node(_TOPIC, stage.source), node('["{}"]', stage.name)
        lines.append(f"    {source} -->{_arrow_label(stage.conditions)} {work}")
        tables = [(node(_TOPIC, join.table.topic), join) for join in stage.joins]
        lines += [f'    {table} -. "{_join_label(join)}" .-> {work}' for table, join in tables]
        if stage.by is not None:
            lines.append(f'    {work} -->|"by {stage.by}"| {node(_TOPIC, stage.rekeyed)}')
            continue
        if model.has_states():
            lines.append(f"    {work} --- {node(_STATES, model.state_schema['name'])}")
        for output in model.outputs:
            where = () if output.where is None else (output.where,)
            lines.append(f"    {work} -->{_arrow_label(where, output.record or '')} {node(_TOPIC, output.topic)}")
    return "\n".join(lines)


def _join_label(join: Join) -> str:
    return f"{'global, ' if isinstance(join.table, Global) else ''}by {join.on}"


def _arrow_label(conditions: Iterable[Condition], record: str = "") -> str:
    # A quote ends Mermaid's text.
    said = "; ".join(filter(None, [record, *map(str, conditions)])).replace('"', "#quot;")
    return f'|"{said}"|' if said else ""
