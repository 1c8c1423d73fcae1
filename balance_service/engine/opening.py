"""Opening a task: its store, and whether the source still is the log that the store was folded from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from balance_service.engine.changelog_writer import ChangelogWriter, Envelope
from balance_service.engine.database import Database
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.outputs import START_ANEW, sent_of, sent_up_to
from balance_service.engine.records import Position
from balance_service.engine.state_directory import FORMAT
from balance_service.engine.store import StateStore, StoreIdentity
from balance_service.errors import RetriableError, TaskHaltedError
from balance_service.kafka.clients import transactional_config
from balance_service.kafka.log_reader import reader_to_end
from balance_service.kafka.topic_specs import dead_letter_bytes

if TYPE_CHECKING:
    from balance_service.engine.dead_letter import LetterChanges
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import TaskId
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)


def check_same_log(ours: Topic, now: Topic | None, changelog: Topic | None = None) -> None:
    """Check that the source is still the topic it was, with as many partitions.

    Args:
        ours: the source as it was when the instance started.
        now: as it is; None if it is gone.
        changelog: where given, must have as many partitions.

    Raises:
        TaskHaltedError: it is not; the message says the way out.
    """
    if now is None or now.topic_id != ours.topic_id:
        raise TaskHaltedError(_made_anew(ours.name))
    for before, after in ((ours, now), (changelog, now)):
        if before is not None and before.partitions != after.partitions:
            raise TaskHaltedError(
                f"topic '{ours.name}' had {before.partitions} partitions and has {after.partitions}: its keys now hash "
                "elsewhere than their history lies; copy the events to a new topic with `balance-service topics copy "
                f"{ours.name} NEW`, and start anew with it as BALANCE_TOPIC and another BALANCE_APPLICATION_ID"
            )


def check_still_there(source: str, partition: int, position: int, start: int, end: int) -> None:
    """Check that a position lies within what the source holds, `start` to `end`.

    Raises:
        TaskHaltedError: it does not, so that going on would skip events or apply others.
    """
    if position < start:
        raise TaskHaltedError(
            f"events {position} to {start - 1} of {source}-{partition} are gone and were never applied"
        )
    if position > end:
        raise TaskHaltedError(
            f"the store stands at {position}, beyond the end {end} of {source}-{partition}; "
            "run `balance-service rebuild`"
        )


def open_store(task_id: TaskId, hosted: HostedStage, changelog: Topic) -> StateStore:
    """The task's store: a copy of this changelog, or new.

    Raises:
        TaskHaltedError: it is a copy of this changelog, but of another source; or of a lost one, and its source has
            lost events too.
        RetriableError: it cannot be opened now.
        StoreCorruptedError: it is damaged.
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
    )
    store = StateStore(path, hosted.processor.position_codec)
    stored = store.identity
    if stored == identity:
        return store
    if stored is not None:
        store.close()
        if stored.changelog_topic_id == changelog.topic_id:
            raise TaskHaltedError(_made_anew(hosted.source.name))
        _check_can_be_folded_again(hosted, task_id.partition, changelog)
        log.warning("the changelog was made anew: the store is restored from it", task=str(task_id))
        Database.wipe(path)
        store = StateStore(path, hosted.processor.position_codec)
    store.identity = identity
    return store


def _check_can_be_folded_again(hosted: HostedStage, partition: int, changelog: Topic) -> None:
    """Check that all that a store holds, which is a copy of another changelog, comes back once it is given up.

    Where something stands in the changelog already, such as what a rebuild begins with, that is what counts.
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
        f"the changelog '{changelog.name}' was deleted or made anew, and the first {start} offsets of "
        f"{hosted.source.name}-{partition} are gone, so that what is in the local store cannot be folded again; it is "
        "left as it is; `balance-service rebuild` folds what the topic still has"
    )


def open_writer(task_id: TaskId, settings: Settings, stage: Stage, topics: Topics, source: Topic) -> ChangelogWriter:
    """The writer of a task's changelog partition, which has fenced nobody yet. Raises as `Topics` does."""
    config = transactional_config(settings, stage.transactional_id(task_id.partition))
    largest = int(str(config["message.max.bytes"]))
    if not stage.retries:
        largest = min(dead_letter_bytes(topics, stage, source), largest)
    envelope = Envelope(task_id.stage, source.name, task_id.partition, settings.application_id, largest)
    return ChangelogWriter(config, task_id, stage.changelog, stage.dead_letters, envelope)


def starting_position(
    stored: Position | None, hosted: HostedStage, partition: int, changelog_topic_id: str, least_epoch: int
) -> Position:
    """Where a task begins to fold, with an epoch higher than any before.

    Args:
        least_epoch: one higher than what this instance was in before, which a changelog made anew does not say.

    Raises:
        TaskHaltedError: the source is another, or no longer holds what comes next.
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
            # Retries are not sent in the order of their source: see `starting_letters`.
            emitted_up_to=0
            if hosted.stage.retries
            else sent_up_to(hosted.settings, hosted.topics, hosted.stage, source, partition),
        )
    if stored.source_topic_id != source.topic_id:
        raise TaskHaltedError(_made_anew(source.name))
    if hosted.stage.retries and stored.offset < start:
        log.warning("records were dropped before they came here", source=stored.source, first=stored.offset, end=start)
        stored = replace(stored, offset=start)
    check_still_there(source.name, partition, stored.offset, start, end)
    check_same_changelog(changelog_topic_id, stored.changelog_topic_id)
    return replace(stored, epoch=max(stored.epoch + 1, least_epoch), changelog_topic_id=changelog_topic_id)


def starting_letters(store: StateStore, hosted: HostedStage, partition: int) -> LetterChanges:
    """What becomes of dead letters as a task is opened.

    One that has no position yet learns which were decided about before; of retries, which of them were sent, too.

    Raises:
        RetriableError: the broker does not answer.
    """
    letters, now_ms = hosted.processor.letters, hosted.processor.letters.now_ms()
    if store.position is not None:
        return letters.at_opening(store)
    settings, topics, stage, source = hosted.settings, hosted.topics, hosted.stage, hosted.source
    known = hosted.decisions.letters_before(settings, topics, [partition], now_ms)[partition]
    if stage.retries:
        discarded = {at: letter for at, letter in known.items() if letter.status is Status.DISCARDED}
        start = topics.offsets(source.name, [partition], earliest=True)[partition]
        sent = {at for at in sent_of(settings, topics, stage, source, partition) if at >= start}
        known = discarded | {at: Letter.sent_before(at, now_ms) for at in sent}
    return letters.carried(known.values())


def check_same_changelog(ours: str, topic_id: str | None) -> None:
    """Check that the changelog is the one that the store is a copy of.

    Args:
        ours: the id of that one.
        topic_id: of the one there is, None if there is none; or what a position names, empty where it names none.

    Raises:
        RetriableError: another topic has taken its name, and some of that may have been passed over; `open_store` says
            what becomes of the store.
    """
    if topic_id not in ("", ours):
        raise RetriableError("the changelog was made anew")


def was_purged(source: str, partition: int, start: int) -> str:
    """Why a stage cannot begin anew with a topic between two stages, of which a partition begins at `start`."""
    return (
        f"the first {start} offsets of {source}-{partition} were deleted once they were applied "
        f"(BALANCE_PURGE_REKEYED), so that they cannot be applied again; {START_ANEW}"
    )


def _made_anew(source: str) -> str:
    return (
        f"topic '{source}' was deleted or made anew, so what was made of it is no longer its fold; "
        "run `balance-service rebuild`, or, for a stage without states, start anew with another BALANCE_APPLICATION_ID"
    )
