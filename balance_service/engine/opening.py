"""Opens a task: its store, its position, and the checks that its source is still the log that was folded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from balance_service.engine.changelog_writer import ChangelogWriter, Envelope
from balance_service.engine.database import Database
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.outputs import START_ANEW, sent_of, sent_up_to
from balance_service.engine.records import POSITION_KEY, SILENT, Position
from balance_service.engine.state_directory import FORMAT
from balance_service.engine.store import StateStore, StoreIdentity
from balance_service.errors import RetriableError, TaskHaltedError
from balance_service.kafka.clients import reader_config, transactional_config
from balance_service.kafka.log_reader import LogReader, reader_to_end
from balance_service.kafka.topic_specs import dead_letter_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.dead_letters import LetterChanges
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import TaskId
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Partitioner
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

# A commit of one state, and its marker.
_LAST_RECORDS = 4


def check_same_log(ours: Topic, now: Topic | None, changelog: Topic | None = None) -> None:
    """Checks that the source is the same topic as when the instance started, with the same number of partitions.

    Args:
        ours: the source when the instance started.
        now: the source now; None if it was deleted.
        changelog: if given, must have the same number of partitions too.

    Raises:
        TaskHaltedError: the source was replaced or repartitioned; the message says what to do.
    """
    if now is None or now.topic_id != ours.topic_id:
        raise TaskHaltedError(_recreated(ours.name))
    for before, after in ((ours, now), (changelog, now)):
        if before is not None and before.partitions != after.partitions:
            raise TaskHaltedError(was_repartitioned(ours.name, before.partitions, after.partitions))


def check_still_there(source: str, partition: int, position: int, start: int, end: int) -> None:
    """Checks that a position is between the source's first offset and its end.

    Raises:
        TaskHaltedError: the position is outside, so continuing would skip events or apply wrong ones.
    """
    if position < start:
        raise TaskHaltedError(
            f"events {position} to {start - 1} of {source}-{partition} are gone and were never applied; copy all "
            "events to a new topic and start again with it, or run `balance-service rebuild --offline`, which folds "
            "only the events that are left"
        )
    if position > end:
        raise TaskHaltedError(
            f"the store stands at {position}, beyond the end {end} of {source}-{partition}; "
            "run `balance-service rebuild --offline`"
        )


def open_store(task_id: TaskId, hosted: HostedStage, changelog: Topic) -> StateStore:
    """Opens the task's store, which is a copy of this changelog or new.

    Raises:
        TaskHaltedError: the store was made from another source, or by another partitioner; or the changelog was lost,
            and the source no longer has all events, so the store cannot be rebuilt.
        RetriableError: the store cannot be opened now.
        StoreCorruptedError: the store is damaged.
    """
    path = hosted.state_directory.store_path(task_id)
    identity = StoreIdentity(
        FORMAT,
        hosted.settings.application_id,
        task_id.stage,
        task_id.partition,
        hosted.source.partitions,
        hosted.source.topic_id,
        changelog.topic_id,
        hosted.partitioner,
    )
    store = StateStore(path, hosted.processor.position_codec)
    stored = store.identity
    # The states have the partitioner of their position. The identity of a store that was restored while another one was
    # declared was written before its states were known.
    known = hosted.partitioner if store.position is None else store.position.partitioner
    if stored is not None and replace(stored, partitioner=known) != replace(identity, partitioner=known):
        store.close()
        if stored.changelog_topic_id == changelog.topic_id:
            raise TaskHaltedError(_recreated(hosted.source.name))
        _check_can_be_folded_again(hosted, task_id.partition, changelog)
        log.warning("the changelog was recreated; restoring the store from it", task=str(task_id))
        Database.wipe(path)
        store = StateStore(path, hosted.processor.position_codec)
    elif known != hosted.partitioner:
        store.close()
        check_same_partitioner(hosted, known)
    if stored != identity:
        store.identity = identity
    return store


def last_position(
    settings: Settings, topics: Topics, codec: AvroCodec, changelog: str, partition: int
) -> Position | None:
    """Returns the position at the end of a changelog partition, which each commit writes last; None if there is none.

    Raises:
        RetriableError: the broker does not respond.
    """
    first = topics.offsets(changelog, [partition], earliest=True)[partition]
    end = topics.offsets(changelog, [partition], committed=True)[partition]
    span, found = _LAST_RECORDS, None
    # Markers of transactions, and records of aborted ones, have offsets too.
    while found is None and first < end:
        start = max(first, end - span)
        with LogReader(reader_config(settings), changelog, {partition: start}, {partition: end}) as reader:
            for message in reader:
                if message.key() == POSITION_KEY and (value := message.value()) is not None:
                    found = Position.of(codec.decode(value))
        if start == first:
            break
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
    """Returns the marks of the stages that the partitions of a changelog belong to. Raises as `last_position`."""
    found = (last_position(settings, topics, codec, changelog.name, number) for number in range(changelog.partitions))
    return {position.owner for position in found if position is not None}


def _check_can_be_folded_again(hosted: HostedStage, partition: int, changelog: Topic) -> None:
    """Checks that no state is lost if the store, which is a copy of a former changelog, is removed.

    If the present changelog has records, for example those that a rebuild starts with, they replace the store.
    """
    start = hosted.topics.offsets(hosted.source.name, [partition], earliest=True)[partition]
    if start == 0 or hosted.stage.retries:
        return
    with reader_to_end(hosted.settings, hosted.topics, changelog, [partition]) as reader:
        if next(iter(reader), None) is not None:
            return
    if hosted.stage.reads_rekeyed:
        raise TaskHaltedError(was_purged(hosted.source.name, partition, start))
    raise TaskHaltedError(
        f"the changelog '{changelog.name}' was deleted or recreated, and the first {start} offsets of "
        f"{hosted.source.name}-{partition} are gone, so the local store cannot be folded again; the store is kept; "
        "`balance-service rebuild --offline` folds the events that the topic still has"
    )


def open_writer(task_id: TaskId, settings: Settings, stage: Stage, topics: Topics, source: Topic) -> ChangelogWriter:
    """Returns the writer of a task's changelog partition, before it fences. Raises as `Topics`."""
    config = transactional_config(settings, stage.transactional_id(task_id.partition))
    largest = int(str(config["message.max.bytes"]))
    if not stage.retries:
        largest = min(dead_letter_bytes(topics, stage, source), largest)
    envelope = Envelope(stage.identity, source.name, task_id.partition, settings.application_id, largest)
    return ChangelogWriter(config, task_id, stage.changelog, stage.dead_letters, envelope)


def starting_position(
    stored: Position | None, hosted: HostedStage, partition: int, changelog_topic_id: str, least_epoch: int
) -> Position:
    """Returns the position that a task starts to fold at, with an epoch above all earlier ones.

    Args:
        least_epoch: one above this instance's last epoch, which a recreated changelog does not have.

    Raises:
        TaskHaltedError: the source was replaced, or no longer has the next events; or its partitioner has changed.
        RetriableError: the position was read from another changelog.
    """
    source = hosted.source
    start = hosted.topics.offsets(source.name, [partition], earliest=True)[partition]
    end = hosted.topics.offsets(source.name, [partition])[partition]
    if stored is None:
        if start > 0 and hosted.stage.reads_rekeyed:
            raise TaskHaltedError(was_purged(source.name, partition, start))
        if start > 0 and not (hosted.settings.allow_finite_retention or hosted.stage.retries):
            raise TaskHaltedError(
                f"the first {start} offsets of {source.name}-{partition} are gone, so the model cannot be built in "
                "full; set BALANCE_ALLOW_FINITE_RETENTION=true to start from what is left"
            )
        return Position(
            start,
            least_epoch,
            source.topic_id,
            changelog_topic_id=changelog_topic_id,
            source=f"{source.name}:{partition}",
            emitted_up_to=_starting_to_send(hosted, partition),
            partitioner=hosted.partitioner,
            owner=hosted.stage.mark,
        )
    if stored.source_topic_id != source.topic_id:
        raise TaskHaltedError(_recreated(source.name))
    check_same_partitioner(hosted, stored.partitioner)
    if hosted.stage.retries and stored.offset < start:
        log.warning("records expired before they were read", source=stored.source, first=stored.offset, end=start)
        stored = replace(stored, offset=start)
    check_still_there(source.name, partition, stored.offset, start, end)
    check_same_changelog(changelog_topic_id, stored.changelog_topic_id)
    epoch = max(stored.epoch + 1, least_epoch)
    return replace(stored, epoch=epoch, changelog_topic_id=changelog_topic_id, owner=hosted.stage.mark)


def _starting_to_send(hosted: HostedStage, partition: int) -> int:
    """Returns `emitted_up_to` of a task without a position. Raises RetriableError: another generation opens first."""
    stage = hosted.stage
    if stage.retries:
        # Retries are sent when they are due, not in offset order: see `starting_letters`.
        return 0
    if hosted.siblings.starts_silent(stage, partition):
        return SILENT
    return sent_up_to(hosted.settings, hosted.topics, stage, hosted.source, partition)


def found_sent(hosted: HostedStage, partition: int, open_letters: Collection[int]) -> tuple[int, set[int]]:
    """Returns the end of the source records whose outputs the topics have, and which open dead letters are among them.

    Reads the topics of the outputs from first to last. Raises as `sent_of`.
    """
    end, sent = 0, set[int]()
    for offset in sent_of(hosted.settings, hosted.topics, hosted.stage, hosted.source, partition):
        end = max(end, offset + 1)
        if offset in open_letters:
            sent.add(offset)
    return end, sent


def beginning_to_send(
    store: StateStore, others: Sequence[StateStore], hosted: HostedStage, found: tuple[int, set[int]]
) -> tuple[int, LetterChanges]:
    """Returns `emitted_up_to`, and the changes of dead letters, of a silent task if no generation sends.

    No generation has applied a record that the lost sender had not: what lies below any position was sent, but the
    outputs of dead letters. The rest is as for a task without a position: the topics of the outputs show it.

    Args:
        others: the stores of the other generations.
        found: as `found_sent` returns it.
    """
    letters, (end, sent) = hosted.processor.letters, found
    is_open = letters.open_in_any(store, others if hosted.stage.outputs else ())
    # The lost sender has applied what another generation has applied.
    applied = {at for at in is_open if others and all(letters.has_applied(other, at) for other in others)}
    end = max(end, *(one.position.offset for one in (store, *others) if one.position is not None))
    return end, letters.on_begin_to_send(store, is_open, sent | applied)


def starting_letters(store: StateStore, hosted: HostedStage, partition: int) -> Iterator[LetterChanges]:
    """Yields the changes of dead letters that a task starts with, at least one. Each is of the store as it is then.

    A task without a position reads the decisions of earlier runs; a task of retries also the records already sent.

    Raises:
        RetriableError: the broker does not respond.
    """
    letters, now_ms = hosted.processor.letters, hosted.processor.letters.now_ms()
    if store.position is not None:
        decided = hosted.siblings.decided(hosted, partition)
        if store.position.emitted_up_to != SILENT:
            # What was redriven here was retried then. Once more would need another decision.
            decided = {at: letter for at, letter in decided.items() if letter.status is Status.DISCARDED}
        yield letters.on_open(store)
        if (changes := letters.on_decision_elsewhere(store, decided)).records:
            yield changes
        return
    settings, topics, stage, source = hosted.settings, hosted.topics, hosted.stage, hosted.source
    known = hosted.decisions.decided_letters(settings, topics, [partition], now_ms)[partition]
    if stage.retries:
        skipped = {at: letter for at, letter in known.items() if letter.status is not Status.APPLIED}
        start = topics.offsets(source.name, [partition], earliest=True)[partition]
        sent = {at for at in sent_of(settings, topics, stage, source, partition) if at >= start}
        known = skipped | {at: Letter.sent_before(at, now_ms) for at in sent}
    yield letters.carry_over(known.values())


def check_same_changelog(ours: str, topic_id: str | None) -> None:
    """Checks that the changelog is the topic that the store is a copy of.

    Args:
        ours: the topic id of the store's changelog.
        topic_id: the id of the present topic, None if there is none; or the id in a position, which may be empty.

    Raises:
        RetriableError: another topic has the changelog's name now. The task must be opened again; `open_store` handles
            that case.
    """
    if topic_id not in ("", ours):
        raise RetriableError("the changelog was recreated")


def check_same_partitioner(hosted: HostedStage, known: Partitioner) -> None:
    """Checks that keys are looked for on the partitions where the states were folded.

    Only keys without a state are checked for their partition, so a key that the function assigns to another partition
    than before would get a second state there.

    Args:
        known: the partitioner of a store or of a position.

    Raises:
        TaskHaltedError: the stage has another partitioner now.
    """
    if known != hosted.partitioner:
        name = hosted.source.name
        raise TaskHaltedError(
            f"the states of '{name}' were folded with partitioner {known}, and it is {hosted.partitioner} now; declare "
            f"{known} again; or stop all instances and run `balance-service rebuild --offline`, which folds every "
            "event again, those with dead letters of keys on other partitions too; or start from scratch with another "
            "BALANCE_APPLICATION_ID"
        )


def was_repartitioned(source: str, before: int, now: int) -> str:
    """Returns the message for a source whose number of partitions has changed."""
    return (
        f"topic '{source}' had {before} partitions and has {now}, so its keys are in other partitions than their "
        "history; stop all instances, move the producers to a new topic, copy the events to it with `balance-service "
        f"topics copy {source} NEW`, and start again with that topic as the source and another BALANCE_APPLICATION_ID"
    )


def was_purged(source: str, partition: int, start: int) -> str:
    """Returns the message for a stage that would have to read purged records again."""
    return (
        f"the first {start} offsets of {source}-{partition} were deleted after they were applied "
        f"(BALANCE_PURGE_REKEYED), so they cannot be applied again; {START_ANEW}"
    )


def _recreated(source: str) -> str:
    return (
        f"topic '{source}' was deleted or recreated, and the states are of events that it no longer has; restore the "
        "topic, or give those events up: stop all instances and run `balance-service rebuild --offline`, or, for a "
        "stage without states, start again with another BALANCE_APPLICATION_ID"
    )
