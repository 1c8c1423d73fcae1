"""Opens a task: its store, its position, and the checks that its source is still the log that was folded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from balance_service.engine.database import Database
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.deletions import again_up_to
from balance_service.engine.inheritance import inherit
from balance_service.engine.records import NEVER, Position
from balance_service.engine.sent import START_ANEW, sent_of
from balance_service.engine.state_directory import FORMAT
from balance_service.engine.store import StateStore, StoreIdentity
from balance_service.errors import RetriableError, TaskHaltedError, TaskMigratedError
from balance_service.kafka.log_reader import reader_to_end
from balance_service.process.runtime import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from balance_service.engine.dead_letters import LetterChanges
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import TaskId
    from balance_service.kafka.topics import Topic
    from balance_service.model.stream import Partitioner

log = structlog.get_logger(__name__)


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
            "events to a new topic and start again with it, or run `balance-service rebuild --offline` with "
            "BALANCE_ALLOW_FINITE_RETENTION=true, which folds only the events that are left"
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
    stands_at = store.position or store.loading
    known = hosted.partitioner if stands_at is None else stands_at.partitioner
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


def _check_can_be_folded_again(hosted: HostedStage, partition: int, changelog: Topic) -> None:
    """Checks that no state is lost if the store, which is a copy of a former changelog, is removed.

    If the present changelog has records, those of another owner, they replace the store.
    """
    start = hosted.topics.offsets(hosted.source.name, [partition], earliest=True)[partition]
    if start == 0 or hosted.stage.retries:
        return
    with reader_to_end(hosted.settings, hosted.topics, changelog, [partition]) as reader:
        if next(iter(reader), None) is not None:
            return
    if hosted.stage.reads_rekeyed:
        raise TaskHaltedError(rekeyed_was_cut(hosted.source.name, partition, start))
    raise TaskHaltedError(
        f"the changelog '{changelog.name}' was deleted or recreated, and the first {start} offsets of "
        f"{hosted.source.name}-{partition} are gone, so the local store cannot be folded again; the store is kept; "
        "`balance-service rebuild --offline` with BALANCE_ALLOW_FINITE_RETENTION=true folds the events that the topic "
        "still has"
    )


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
            raise TaskHaltedError(rekeyed_was_cut(source.name, partition, start))
        if start > 0 and not (hosted.settings.allow_finite_retention or hosted.stage.retries):
            raise TaskHaltedError(was_cut(source.name, partition, start))
        return first_position(hosted, partition, start, least_epoch, changelog_topic_id)
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


def first_position(hosted: HostedStage, partition: int, offset: int, epoch: int, changelog_topic_id: str) -> Position:
    """Returns the position of a task whose store has no states."""
    source = hosted.source
    return Position(
        offset,
        epoch,
        source.topic_id,
        changelog_topic_id=changelog_topic_id,
        source=f"{source.name}:{partition}",
        partitioner=hosted.partitioner,
        owner=hosted.stage.mark,
        seen_to_ms=now_ms() if hosted.stage.compacted else NEVER,
    )


def starting_changes(
    store: StateStore,
    hosted: HostedStage,
    partition: int,
    position: Position,
    since: int | None,
    should_stop: Callable[[], bool],
) -> Iterator[tuple[Position, LetterChanges]]:
    """Yields what a task writes before it runs, at least once: its position, and the changes of its dead letters.

    Each is for the store at that moment. The task has fenced its predecessor.

    Args:
        position: as `starting_position` returns it.
        since: the number of the state of the generations, read after the fencing, since which this one serves; None if
            another one does.
        should_stop: as in `ChangelogWriter.fence`.

    Raises:
        BalanceServiceError: as `inherit`.
    """
    letters, stage = hosted.processor.letters, hosted.stage
    inherits = since is not None and position.inherited < since
    if store.position is None:
        decided = _decided(hosted, partition)
        if stage.retries:
            # Retries are sent when they are due, not in offset order.
            yield replace(position, inherited=since or 0), letters.carry_over(_retried(hosted, partition, decided))
        elif since is not None:
            sent_up_to, changes = inherit(hosted, partition, store, position.offset, decided, should_stop)
            yield replace(position, emitted_up_to=sent_up_to, inherited=since), changes
        else:
            yield position, letters.carry_over(decided.values())
        return
    yield position, letters.on_open(store)
    # Of records that are folded again, discarded dead letters may be forgotten.
    if (again_up_to(stage, position) or hosted.generations.others(stage)) and (decided := _decided(hosted, partition)):
        if since is not None and not inherits:
            # Redriven dead letters were retried before. Another retry would need another decision.
            decided = {at: letter for at, letter in decided.items() if letter.status is Status.DISCARDED}
        if (changes := letters.on_decision_elsewhere(store, decided)).records:
            yield _required(store), changes
    if since is not None and inherits:
        sent_up_to, changes = inherit(hosted, partition, store, position.offset, {}, should_stop)
        yield replace(_required(store), emitted_up_to=sent_up_to, inherited=since), changes


def _required(store: StateStore) -> Position:
    if store.position is None:
        raise TaskMigratedError("the store has no position")
    return store.position


def _decided(hosted: HostedStage, partition: int) -> Mapping[int, Letter]:
    """Returns the dead letters of a partition that earlier runs, or other generations, have decided about."""
    now_ms = hosted.processor.letters.now_ms()
    return hosted.decisions.decided_letters(hosted.settings, hosted.topics, [partition], now_ms)[partition]


def _retried(hosted: HostedStage, partition: int, decided: Mapping[int, Letter]) -> Iterable[Letter]:
    """Returns the dead letters that a task of retries starts with: of decisions, and of the records already sent."""
    topics, source, now_ms = hosted.topics, hosted.source, hosted.processor.letters.now_ms()
    skipped = {at: letter for at, letter in decided.items() if letter.status is not Status.APPLIED}
    start = topics.offsets(source.name, [partition], earliest=True)[partition]
    sent = sent_of(hosted.settings, topics, hosted.stage, source, partition)
    return (skipped | {at: Letter.sent_before(at, now_ms) for at in sent if at >= start}).values()


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


def rekeyed_was_cut(source: str, partition: int, start: int) -> str:
    """Returns the message for a stage whose source, a topic between two stages, has lost its first records."""
    return f"the first {start} offsets of {source}-{partition} are gone, and are not made again; {START_ANEW}"


def was_cut(source: str, partition: int, start: int) -> str:
    """Returns the message for a source whose first records are gone."""
    return (
        f"the first {start} offsets of {source}-{partition} are gone, so the model cannot be built in full; set "
        "BALANCE_ALLOW_FINITE_RETENTION=true to start from what is left"
    )


def _recreated(source: str) -> str:
    return (
        f"topic '{source}' was deleted or recreated, and the states are of events that it no longer has; restore the "
        "topic, or give those events up: stop all instances and run `balance-service rebuild --offline`, or, for a "
        "stage without states, start again with another BALANCE_APPLICATION_ID"
    )
