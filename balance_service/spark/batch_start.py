"""Where a batch job ends in each partition, and which dead letters a generation takes over that it fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.schemas import load_schema
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.dead_letters import letter_offset
from balance_service.engine.decisions import letters_for_a_fold
from balance_service.engine.inheritance import check_owner, last_positions
from balance_service.engine.records import POSITION_KEY, Position
from balance_service.errors import ConfigurationError, TaskHaltedError
from balance_service.kafka.log_reader import reader_to_end

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Attributes:
    ends: the offset after the last one to read, by partition.
    letters: by partition and offset, the dead letters with decisions, and those that are open, or never count, in the
        generation that sends.
    """

    ends: Mapping[int, int]
    letters: Mapping[int, Mapping[int, Letter]]


def starting_point(
    settings: Settings, topics: Topics, registry: SchemaRegistry, sending: Stage, source: Topic
) -> StartingPoint:
    """Returns how far a new generation may be folded now.

    A silent generation does not go beyond the one that sends (decision 72), so a partition ends at its position;
    without one, at the last stable offset.

    Args:
        sending: the last stage of the read model, in the generation that serves.

    Raises:
        ConfigurationError: the changelog belongs to another application, its states are of a former source, or a
            decision cannot be verified.
        RetriableError: the broker or the registry does not respond.
    """
    partitions = range(source.partitions)
    ends = topics.offsets(source.name, partitions, committed=True)
    schemas = OwnSchemas(registry)
    letters = letters_for_a_fold(settings, topics, schemas, sending, source)
    changelog = topics.find(sending.changelog)
    if changelog is None:
        return StartingPoint(ends, letters)
    codec = schemas.codec(changelog.name, load_schema("Position"))
    positions = last_positions(settings, topics, codec, changelog.name, range(changelog.partitions))
    try:
        for position in positions.values():
            check_owner(sending, position)
    except TaskHaltedError as error:
        raise ConfigurationError(str(error)) from error
    for partition, position in positions.items():
        if position.source_topic_id != source.topic_id:
            raise ConfigurationError(
                f"topic '{source.name}' was deleted or recreated since '{sending.name}' was folded: an online rebuild "
                "follows a generation that can go on; stop all instances and run `balance-service rebuild --offline`"
            )
        found = position, dict[int, Letter]()
        if position.letters:
            found = _read(settings, topics, schemas, changelog, partition, codec, position)
        end, theirs = found
        ends[partition] = end.offset
        for offset, letter in theirs.items():
            known = letters[partition].get(offset)
            # As `Letters.on_following`.
            is_followed = offset < end.offset and letter.status is not Status.APPLIED
            if is_followed and (known is None or known.status is Status.APPLIED):
                letters[partition][offset] = letter
    return StartingPoint(ends, letters)


def _read(
    settings: Settings,
    topics: Topics,
    schemas: OwnSchemas,
    changelog: Topic,
    partition: int,
    codec: AvroCodec,
    position: Position,
) -> tuple[Position, dict[int, Letter]]:
    """Returns the position at the end of a changelog's partition, and the dead letters at that position."""
    of_letters = schemas.codec(changelog.name, load_schema("Letter"))
    letters: dict[int, Letter] = {}
    with reader_to_end(settings, topics, changelog, [partition]) as reader:
        for message in reader:
            key, value = message.key() or b"", message.value()
            codec.learn(key, value)
            if key == POSITION_KEY and value is not None:
                position = Position.of(codec.decode(value))
            elif (offset := letter_offset(key)) is not None:
                letters.pop(offset, None)
                if value is not None:
                    letters[offset] = Letter.of(of_letters.decode(value), offset=offset)
    return position, letters
