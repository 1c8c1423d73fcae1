"""The sources of a read model: one stream, or several, which are re-keyed into one topic.

Each of several sources is a first stage of its own, which ends with a re-key by the model's key. All of them pass their
records on to one topic, which the last stage folds. The order of records there is the order of events permanently.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from balance_service.model.events import FORMAT_NAMES
from balance_service.model.record_keys import is_record_key
from balance_service.model.stage import FROM, Stage, stages_of_stream
from balance_service.model.stream import By, Join, Select, Stream, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.transform import Transform


def has_several(model: Any) -> bool:
    """Whether a read model, or its class, declares `sources` and not `source`; the nearest declaration counts."""
    declared = model if isinstance(model, type) else type(model)
    names = (vars(one).keys() & {"source", "sources"} for one in declared.__mro__)
    return "sources" in next(filter(None, names), ())


def sources_of(model: Any) -> tuple[Stream, ...]:
    """Returns the streams that a read model, or its class, reads: several end with a re-key by the same columns."""
    if not has_several(model):
        return (model.source,)
    key = getattr(model, "key", ())
    by = key if isinstance(key, tuple) else (key,)
    return tuple(stream if _re_key(stream) or not by else stream.by(*by) for stream in model.sources)


def sources_misfit(model: type) -> str:
    """Returns why the sources of a class are refused; empty if they are not."""
    if any(vars(one).keys() >= {"source", "sources"} for one in model.__mro__):
        return "has both `source` and `sources`: declare one of them"
    if not has_several(model):
        source = getattr(model, "source", None)
        if source is None:
            return "has no `source`"
        return (
            _format_misfit(source)
            if _is_stream(source)
            else "has a source that is not a Stream of a topic and one or more records"
        )
    declared: Any = model.sources  # type: ignore[attr-defined]
    if not isinstance(declared, tuple | list) or not declared or not all(map(_is_stream, declared)):
        return "has `sources` that are not streams, each of a topic and one or more records: (Stream(…), Stream(…))"
    sources = sources_of(model)
    topics = [stream.topic for stream in sources]
    if twice := sorted({topic for topic in topics if topics.count(topic) > 1}):
        return f"reads '{twice[0]}' twice: name all of its records in one Stream"
    if is_record_key(getattr(model, "key", None)):
        return "has `sources` and the key RECORD_KEY: these are re-keyed by a column, so name that as the key"
    for stream in sources:
        if stream.tombstones:
            return (
                f"reads '{stream.topic}' with tombstones and has `sources`: these are re-keyed by a column, which a "
                "record without a value does not have"
            )
    if why := next(filter(None, map(_format_misfit, sources)), ""):
        return why
    chosen, *more = sources
    if unlike := next((one for one in more if (one.format, one.type) != (chosen.format, chosen.type)), None):
        return (
            f"reads '{chosen.topic}' and '{unlike.topic}', whose records are told in different ways: the topic that "
            "both are re-keyed into has one `format` and one `type`"
        )
    if chosen.format == "connect" and more:
        return "reads several topics of Kafka Connect, whose records nothing tells: fold them by two models"
    if chosen.format == "json" and more and chosen.type is None:
        return "reads JSON of several topics: name the `type`, the field or the header that tells the records"
    re_keys = {stream.topic: _re_key(stream) for stream in sources}
    if lacking := [topic for topic, by in re_keys.items() if by is None]:
        return f"reads '{lacking[0]}' without a key: name the `key`, by which all `sources` are re-keyed"
    (first, by), *others = re_keys.items()
    for topic, other in others:
        if other != by:
            return (
                f"re-keys '{first}' by {_listed(by)} and '{topic}' by {_listed(other)}: all `sources` end with a `.by` "
                "of the same columns, or with none, for the `key`"
            )
    for stream in sources:
        steps = [step for step in stream.steps if not isinstance(step, Select)]
        if not isinstance(steps[-1], By):
            return (
                f"has a step after the last `.by` of '{stream.topic}', where the records of all `sources` are on one "
                "topic: put it before that `.by`"
            )
    selecting = [stream.topic for stream in sources if any(isinstance(step, Select) for step in stream.steps)]
    if lacking := [topic for topic in topics if selecting and topic not in selecting]:
        return f"selects columns of '{selecting[0]}' and none of '{lacking[0]}': select some of each source, or of none"
    return ""


def declared_stages(
    name: str,
    sources: Sequence[Stream],
    outputs: Iterable[str],
    needed: Iterable[str],
    schema_of: Callable[[str, str | None], Schema],
    *,
    several: bool = False,
    transforms: Sequence[Transform] = (),
) -> tuple[Stage, ...]:
    """Returns the stages of a read model, each after those that write its topic; not yet placed in an application.

    Args:
        outputs: the topics that the model emits to.
        needed: columns that are read even if they are not selected.
        schema_of: (simple name, topic that it is read from or None) → schema.
        several: whether the sources, even a single one, are re-keyed into one topic.
        transforms: the rows that each source's first stage makes of its events; empty if the model has no `transform`.
    """
    done: list[Stage] = []
    ends: list[Stage] = []
    of_sources: Sequence[Transform | None] = transforms or [None] * len(sources)
    for source, transform in zip(sources, of_sources, strict=True):
        suffix = f"{FROM}{source.topic}" if several else ""
        *earlier, end = stages_of_stream(name, source, schema_of, suffix, transform)
        if several:
            # Not after the source: another one may be added later.
            shared = f"{name}-by-{'-'.join(earlier[-1].by or ())}"
            earlier[-1], end = replace(earlier[-1], passes_to=shared), replace(end, source=shared)
        done += earlier
        ends.append(end)
    schemas = {record: schema for end in ends for record, schema in end.schemas.items()}
    stages = [*done, replace(ends[0], schemas=schemas, outputs=tuple(outputs))]
    selected = [step.columns for source in sources for step in source.steps if isinstance(step, Select)]
    if not selected:
        return tuple(stages)
    # All stages read the same columns, so a record that the last one cannot decode becomes a dead letter in the first.
    columns = frozenset(needed).union(*selected, *(stage.used for stage in stages))
    return tuple(replace(stage, columns=columns) for stage in stages)


def _format_misfit(source: Stream) -> str:
    tables = [step.table for step in source.steps if isinstance(step, Join) and isinstance(step.table, Table)]
    read: list[Stream | Table] = [source, *tables]
    for one in read:
        if one.format not in FORMAT_NAMES:
            return f"has '{one.topic}' with the format {one.format!r}: it must be one of {', '.join(FORMAT_NAMES)}"
    if source.format == "connect" and len(source.records) > 1:
        return f"reads {' and '.join(source.records)} of '{source.topic}': a topic of Kafka Connect has one record"
    if any(table.format == "cloudevents" for table in tables):
        return 'joins a table of CloudEvents: the rows of a table have one record, so write format="json"'
    if source.type is not None and source.format != "json":
        return f"names the type '{source.type}' of '{source.topic}', which only a JSON topic has"
    if source.format == "json" and source.type is None and len(source.records) > 1:
        return (
            f"reads {' and '.join(source.records)} of the JSON topic '{source.topic}': name the `type`, the field or "
            'the header that tells them, such as type="kind" or type="header:kind"'
        )
    return ""


def _is_stream(source: object) -> bool:
    return isinstance(source, Stream) and bool(source.records)


def _listed(columns: Iterable[str] | None) -> str:
    return " and ".join(map(repr, columns or ()))


def _re_key(stream: Stream) -> tuple[str, ...] | None:
    """Returns the columns of the last re-key; None if there is none."""
    return next((step.columns for step in reversed(stream.steps) if isinstance(step, By)), None)
