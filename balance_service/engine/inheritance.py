"""What a generation takes over from the others of its read model when it begins to send the outputs of a partition.

The topic of generations says which one serves, and so should send. `Position.inherited` says since which of its records
a generation does. One that serves and has not inherited since then does so before it sends, in these steps:

 1. It has fenced its own predecessor, and then read the topic: it serves. A generation that opens later reads that too,
    and is silent.
 2. It fences the writers of all other generations of the partition. One that sent until now commits nothing after that.
 3. It reads how far each of them is, and their dead letters, from their changelogs, whose ends are final now.
 4. It writes what was sent, and the dead letters, with its position.

It does so as a task that opens, for the first time or after it lost its changelog, or as one that runs, at a switch. An
offline rebuild is a new generation that serves at once. Where there is no other generation, the output topics say what
was sent before the changelog was lost.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from balance_service.engine.changelog_writer import ChangelogWriter, Envelope
from balance_service.engine.dead_letters import letter_offset
from balance_service.engine.outputs import sent_of
from balance_service.engine.records import MISPLACED, NEVER, POSITION_KEY, Position, TaskId
from balance_service.errors import TaskHaltedError, TaskMigratedError
from balance_service.kafka.clients import reader_config, transactional_config
from balance_service.kafka.log_reader import LogReader, reader_to_end
from balance_service.kafka.messages import place_of
from balance_service.kafka.topic_specs import dead_letter_bytes
from balance_service.process.failpoints import failpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.dead_letters import LetterChanges
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.store import StateStore
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings

# A commit of one state, and its marker.
_LAST_RECORDS = 4


class Predecessor(NamedTuple):
    """Another generation of a partition, according to its changelog."""

    stage: Stage
    position: Position
    letters: Mapping[int, Letter]
    """Its dead letters by offset."""


class Inherited(NamedTuple):
    sent_up_to: int
    """Outputs of events below it were sent, except those of open dead letters."""
    changes: LetterChanges


def inherit(
    hosted: HostedStage,
    partition: int,
    store: StateStore,
    start: int,
    decided: Mapping[int, Letter],
    should_stop: Callable[[], bool],
) -> Inherited:
    """Fences the other generations of a partition, and returns what the generation of a store takes over from them.

    Args:
        start: the next source offset of the generation.
        decided: dead letters with decisions that the store may lack.
        should_stop: as in `ChangelogWriter.fence`.

    Raises:
        RetriableError: the broker does not respond.
        TaskMigratedError: as `ChangelogWriter.fence`.
        TaskHaltedError: as `sent_of`; or another application owns one of the changelogs.
    """
    letters, generations, ours = hosted.processor.letters, hosted.generations, store.position
    others = predecessors(hosted, partition, should_stop)
    known = [one.position for one in others] + ([] if ours is None else [ours])
    # No generation goes beyond the one that sends.
    sent_up_to = max((_sent_up_to(one) for one in known), default=0)
    senders = [one for one in known if one.inherited > NEVER]
    last = max(senders, key=lambda one: (_sent_up_to(one), one.inherited), default=None)
    sender = next((one for one in others if one.position is last), None)
    theirs = {**decided, **(sender.letters if sender else {})}
    in_topic = set[int]()
    is_whole = (
        last is not None
        and last.offset >= last.emitted_up_to
        and (ours is not None or generations.is_new(hosted.stage))
        and len(others) == len(generations.others(hosted.stage))
        # One that has served, and seems to have sent nothing, may have lost its changelog since.
        and all(one.position.inherited > NEVER for one in others)
    )
    if not is_whole:
        # A changelog was lost, perhaps that of the one that sent last: the topics of the outputs show what was sent.
        is_open = {**letters.open_in(store), **theirs}.keys()
        for offset in sent_of(hosted.settings, hosted.topics, hosted.stage, hosted.source, partition):
            if should_stop():
                raise TaskMigratedError("the task was closed while it read the topics of its outputs")
            sent_up_to = max(sent_up_to, offset + 1)
            if offset in is_open:
                in_topic.add(offset)
    if sender is None:
        changes = letters.carry_over(decided.values()) if ours is None else letters.on_begin_to_send(store, in_topic)
        return Inherited(sent_up_to, changes)
    theirs = {at: replace(one, is_sent=one.is_sent or at in in_topic) for at, one in theirs.items()}
    if sender.position.partitioner != hosted.partitioner:
        # A key that was misplaced may be in its place now, so its records are applied in their turn.
        theirs = {at: _placed_anew(letter, start, letters.now_ms()) for at, letter in theirs.items()}
    is_same_code = generations.have_same_code(hosted.stage, sender.stage)
    read_up_to = sender.position.offset
    changes = letters.on_inherit(store, theirs, start, read_up_to, in_topic, is_same_code=is_same_code)
    return Inherited(sent_up_to, changes)


def _sent_up_to(position: Position) -> int:
    return max(position.offset, position.emitted_up_to)


def predecessors(hosted: HostedStage, partition: int, should_stop: Callable[[], bool]) -> list[Predecessor]:
    """Fences the other generations of a partition, and reads their changelogs. Raises as `inherit`."""
    settings, topics, codec = hosted.settings, hosted.topics, hosted.processor.position_codec
    others = hosted.generations.others(hosted.stage)
    for stage in others:
        # The task of a view has checked that.
        if hosted.generations.last_view(stage, partition) is None and topics.find(stage.changelog) is not None:
            check_owner(stage, last_positions(settings, topics, codec, stage.changelog, [partition]).get(partition))
    for stage in others:
        task_id = TaskId(stage.name, partition)
        with closing(open_writer(task_id, settings, stage, topics, hosted.source)) as writer:
            writer.fence(should_stop)
    found = []
    for stage in others:
        changelog = topics.find_patiently(stage.changelog)
        if changelog is None or partition >= changelog.partitions:
            continue
        position = last_positions(settings, topics, codec, stage.changelog, [partition]).get(partition)
        # Nothing was sent for the records of a recreated source.
        if position is not None and position.source_topic_id == hosted.source.topic_id:
            view = hosted.generations.last_view(stage, partition)
            if not position.letters:
                letters: Mapping[int, Letter] = {}
            elif view is not None and view.position == position:
                letters = hosted.processor.letters.all(view)
            else:
                letters = _letters_of(hosted, changelog, partition, should_stop)
            found.append(Predecessor(stage, position, letters))
    if others:
        failpoint("others-fenced")
    return found


def _placed_anew(letter: Letter, start: int, now_ms: int) -> Letter:
    is_replayed = letter.cause == MISPLACED and letter.status.is_open and letter.offset >= start
    return letter.to_be_replayed(now_ms) if is_replayed else letter


def _letters_of(
    hosted: HostedStage, changelog: Topic, partition: int, should_stop: Callable[[], bool]
) -> Mapping[int, Letter]:
    letters: dict[int, Letter] = {}
    with reader_to_end(hosted.settings, hosted.topics, changelog, [partition]) as reader:
        for message in reader:
            if should_stop():
                raise TaskMigratedError("the task was closed while it read the changelog of another generation")
            hosted.processor.position_codec.learn(message.key() or b"", message.value())
            if (offset := letter_offset(message.key() or b"")) is not None:
                letters.pop(offset, None)
                if (value := message.value()) is not None:
                    letters[offset] = hosted.processor.letters.decode(offset, value)
    return letters


def last_positions(
    settings: Settings, topics: Topics, codec: AvroCodec, changelog: str, partitions: Collection[int]
) -> dict[int, Position]:
    """Returns the positions at the ends of partitions of a changelog, if they have one: each commit writes it last.

    Raises:
        RetriableError: the broker does not respond.
    """
    # The text of a position's schema may be far in front of it.
    frames = last_frames(
        settings, topics, changelog, partitions, codec.learn, lambda frame: not codec.lacks_text(frame)
    )
    return {partition: Position.of(codec.decode(frame)) for partition, frame in frames.items()}


def last_frames(
    settings: Settings,
    topics: Topics,
    changelog: str,
    partitions: Collection[int],
    read: Callable[[bytes, bytes | None], object] = lambda _key, _value: None,
    suffices: Callable[[bytes], bool] = lambda _frame: True,
) -> dict[int, bytes]:
    """Returns the position records at the ends of partitions of a changelog, still framed.

    Args:
        read: called with each record that is read.
        suffices: says of a position whether records in front of it need not be read.

    Raises:
        RetriableError: the broker does not respond.
    """
    firsts = topics.offsets(changelog, partitions, earliest=True)
    ends = topics.offsets(changelog, partitions, committed=True)
    found: dict[int, bytes] = {}
    span, left = _LAST_RECORDS, {p for p in partitions if firsts[p] < ends[p]}
    # Markers of transactions, and records of aborted ones, have offsets too.
    while left:
        starts = {p: max(firsts[p], ends[p] - span) for p in left}
        with LogReader(reader_config(settings), changelog, starts, {p: ends[p] for p in left}) as reader:
            for message in reader:
                key, value = message.key() or b"", message.value()
                read(key, value)
                if key == POSITION_KEY and value is not None:
                    found[place_of(message)[0]] = value
        left = {p for p in left if starts[p] > firsts[p] and not (p in found and suffices(found[p]))}
        span *= 32
    return found


def check_owner(stage: Stage, position: Position | None) -> None:
    """Checks that a position is one of this stage, before anything is fenced or written.

    Raises:
        TaskHaltedError: another application, or another stage, has the same name for its changelog.
    """
    if position is not None and position.owner not in ("", stage.mark):
        application_id, _, name = position.owner.partition("\0")
        raise TaskHaltedError(
            f"the changelog '{stage.changelog}' belongs to '{name}' of application id '{application_id}', and "
            f"'{stage.name}' of '{stage.application_id}' has the same name for its own; choose another "
            "BALANCE_APPLICATION_ID"
        )


def owners_of(settings: Settings, topics: Topics, codec: AvroCodec, changelog: Topic) -> set[str]:
    """Returns the marks of the stages that the partitions of a changelog belong to. Raises as `last_positions`."""
    found = last_positions(settings, topics, codec, changelog.name, range(changelog.partitions))
    return {position.owner for position in found.values()}


def open_writer(task_id: TaskId, settings: Settings, stage: Stage, topics: Topics, source: Topic) -> ChangelogWriter:
    """Returns the writer of a task's changelog partition, before it fences. Raises as `Topics`."""
    config = transactional_config(settings, stage.transactional_id(task_id.partition))
    largest = int(str(config["message.max.bytes"]))
    if not stage.retries:
        largest = min(dead_letter_bytes(topics, stage, source), largest)
    envelope = Envelope(stage.identity, source.name, task_id.partition, settings.application_id, largest)
    return ChangelogWriter(config, task_id, stage.changelog, stage.dead_letters, envelope)
