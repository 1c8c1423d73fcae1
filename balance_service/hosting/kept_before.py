"""What a read model keeps over a rebuild: up to where it has sent, and its dead letters.

Neither can be told from the source: what was sent is not sent again, what was discarded does not count, and no dead
letter is written twice.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.engine.dead_letters import Letters, letter_offset
from balance_service.engine.decisions import Decisions
from balance_service.engine.opening import open_writer
from balance_service.engine.outputs import sent_up_to
from balance_service.engine.records import POSITION_KEY, Position, TaskId
from balance_service.kafka.log_reader import reader_to_end

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.engine.changelog_writer import ChangelogWriter
    from balance_service.engine.dead_letter import Letter, LetterChanges
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings


class KeptBefore:
    """What the changelog of a stage, and the decisions about its dead letters, say that it has sent and must know."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        registry: SchemaRegistry,
        stage: Stage,
        source: Topic,
        *,
        keeps_order: bool,
    ) -> None:
        """Read it. Raises RetriableError if a broker or the registry does not answer."""
        self._settings = settings
        self._topics = topics
        self._stage = stage
        self._source = source
        position, letter, decision = (load_schema(name) for name in ("Position", "Letter", "DeadLetterDecision"))
        self._codec = AvroCodec(registry, subject_of(stage.changelog, position), position)
        codec = AvroCodec(registry, subject_of(stage.changelog, letter), letter)
        self._letters = Letters(codec=codec, every_ms=0, keeps_order=keeps_order)
        decided = settings.dead_letter_decisions_topic
        self._decisions = Decisions(
            topic=decided,
            codec=AvroCodec(registry, subject_of(decided, decision), decision),
            stage=stage.name,
            source_topic_id=source.topic_id,
        )
        self._fence()
        self._up_to: dict[int, int] = {}
        self._known: dict[int, dict[int, Letter]] = defaultdict(dict)
        self._read()

    def keep(self, changelog: Topic) -> None:
        """Write it to the changelog that was made anew, as where each partition begins.

        Of each partition, all of it or nothing. Interrupted before, what was sent is found from what is in the topics
        that it was sent to, and what was decided from the decisions; other dead letters are written once more.

        Raises:
            BalanceServiceError: some of it may not be written.
        """
        partitions = range(self._source.partitions)
        starts = self._topics.offsets(self._source.name, partitions, earliest=True)
        for partition in partitions:
            letters = self._letters.carried(self._known[partition].values())
            position = self._beginning(partition, starts[partition], changelog, letters)
            with self._fenced(partition) as writer:
                writer.commit(letters.records, (), self._codec.encode(position.record()), 0)

    def _fence(self) -> None:
        """End what an instance that is cut off may have left open: committed later, it would be sent a second time."""
        for partition in range(self._source.partitions):
            with self._fenced(partition):
                pass

    @contextmanager
    def _fenced(self, partition: int) -> Iterator[ChangelogWriter]:
        task_id = TaskId(self._stage.name, partition)
        with closing(open_writer(task_id, self._settings, self._stage, self._topics, self._source)) as writer:
            writer.fence()
            yield writer

    def _beginning(self, partition: int, start: int, changelog: Topic, letters: LetterChanges) -> Position:
        # Not from the first that is left, unless that is allowed: the task says then what is gone.
        return Position(
            start if self._settings.allow_finite_retention else 0,
            0,
            self._source.topic_id,
            changelog_topic_id=changelog.topic_id,
            source=f"{self._source.name}:{partition}",
            emitted_up_to=self._up_to.get(partition, 0) if self._stage.outputs else 0,
            letters=letters.counted,
        )

    def _read(self) -> None:
        partitions = range(self._source.partitions)
        now_ms = self._letters.now_ms()
        # A letter that is forgotten is gone from the changelog; what was decided about it holds all the same.
        self._known |= self._decisions.letters_before(self._settings, self._topics, partitions, now_ms)
        changelog = self._topics.find(self._stage.changelog)
        positions, letters = ({}, {}) if changelog is None else self._read_changelog(changelog)
        for partition in partitions:
            position = positions.get(partition)
            if position is None and self._stage.outputs:
                # An earlier rebuild may have ended here.
                self._up_to[partition] = sent_up_to(self._settings, self._topics, self._stage, self._source, partition)
            # Of a source that was made anew, nothing was sent.
            elif position is not None and position.source_topic_id == self._source.topic_id:
                self._up_to[partition] = max(position.offset, position.emitted_up_to)
                self._known[partition] |= letters.get(partition, {})

    def _read_changelog(self, changelog: Topic) -> tuple[dict[int, Position], dict[int, dict[int, Letter]]]:
        """By partition, the position and the letters."""
        positions: dict[int, Position] = {}
        letters: dict[int, dict[int, Letter]] = defaultdict(dict)
        with reader_to_end(self._settings, self._topics, changelog) as reader:
            for message in reader:
                key, partition, value = message.key() or b"", message.partition(), message.value()
                if partition is None:
                    continue
                if key == POSITION_KEY and value is not None:
                    positions[partition] = Position.of(self._codec.decode(value))
                elif (offset := letter_offset(key)) is not None:
                    letters[partition].pop(offset, None)
                    if value is not None:
                        letters[partition][offset] = self._letters.read(offset, value)
        return positions, letters
