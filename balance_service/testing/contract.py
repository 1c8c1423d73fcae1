"""The contract of read models: properties that hold for every model and all events, as checks for property tests.

A check feeds batches of events to the engine, and raises AssertionError if the result differs from folding one event
after the other. `balance_service.testing.strategies` generates batches.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from balance_service.engine.state_frames import STATE_UNFIT
from balance_service.errors import PoisonRecordError
from balance_service.model.events import Each
from balance_service.model.read_model import ReadModel
from balance_service.model.record_folds import IGNORED
from balance_service.spark.combine import PartitionRows
from balance_service.testing.driver import Driver, Refused
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.rows import InputEvent, driven_stages, encoded, letter_of, passed_on, rows_of, way_of

if TYPE_CHECKING:
    from balance_service.avro.codec import AvroCodec
    from balance_service.model.stage import Stage

Batches = Sequence[Sequence[InputEvent]]
Check = Callable[[ReadModel, Batches], None]


class Outcome(NamedTuple):
    """The result of a history: framed states, rejected events with causes, and the number of deleted states.

    `counted` is the number of states according to the commits.
    """

    states: dict[bytes, bytes]
    refused: list[Refused]
    deleted: int
    counted: int


def combined_equals_single(read_model: ReadModel, batches: Batches) -> None:
    """Combining all events in one batch has the same result as folding them one by one."""
    whole = [[event for batch in batches for event in batch]]
    with Driver(read_model, after_joins=True, combines_few=True, is_accelerated=False) as driver:
        _check("combined", _driven(driver, whole), _folded(read_model, whole, driver.state_codec), driver.state_codec)


def cuts_do_not_matter(read_model: ReadModel, batches: Batches) -> None:
    """The result does not depend on how the events are cut into batches."""
    with Driver(read_model, after_joins=True, combines_few=True) as driver:
        _check(
            "cut into batches",
            _driven(driver, batches),
            _folded(read_model, batches, driver.state_codec),
            driver.state_codec,
        )


def redelivery_changes_nothing(read_model: ReadModel, batches: Batches) -> None:
    """A batch that is delivered twice counts once."""
    with Driver(read_model, after_joins=True) as driver:
        expected = _folded(read_model, batches, driver.state_codec)
        _check("delivered twice", _driven(driver, batches, after_each=driver.redeliver), expected, driver.state_codec)


def acceleration_equals_fold(read_model: ReadModel, batches: Batches) -> None:
    """An accelerated fold makes the same states as the fold, byte for byte."""
    with (
        Driver(read_model, after_joins=True, combines_few=True) as accelerated,
        Driver(read_model, after_joins=True, combines_few=True, is_accelerated=False) as folded,
    ):
        _check("accelerated", _driven(accelerated, batches), _driven(folded, batches), None)


def deleted_keys_come_back(read_model: ReadModel, batches: Batches) -> None:
    """A state that the fold deletes is gone from store and changelog; the key's next event starts a new one."""
    history = [*batches, *batches]
    with Driver(read_model, after_joins=True) as driver:
        expected = _folded(read_model, history, driver.state_codec)
        _check(
            "deleted and restored", _driven(driver, history, after_each=driver.restart), expected, driver.state_codec
        )


def outputs_are_of_events(read_model: ReadModel, batches: Batches) -> None:
    """Records that are emitted for each event do not depend on batches; nor does the last record of each key."""
    whole = [[event for batch in batches for event in batch]]
    with Driver(read_model, after_joins=True) as cut, Driver(read_model, after_joins=True) as uncut:
        _driven(cut, batches, after_each=cut.redeliver)
        _driven(uncut, whole)
        for output in read_model.outputs:
            emitted = Driver.last_emitted if output.each is Each.LAST else Driver.emitted
            found, expected = emitted(cut, output.topic), emitted(uncut, output.topic)
            if found != expected:
                raise AssertionError(f"cut into batches, '{output.topic}' gets {found}, and in one batch {expected}")


def compaction_changes_nothing(read_model: ReadModel, batches: Batches) -> None:
    """What compaction leaves of the source results in the same states.

    A key whose newest record is a dead letter may lose its state: compaction removes the one before.
    """
    if not read_model.stages[-1].compacted:
        return
    with Driver(read_model, after_joins=True) as driver:
        _driven(driver, batches)
        refused = {letter.key for letter in driver.letters()}
        before, after = driver.states(), driver.compact().rebuild().states()
        sent = read_model.key_type.sent
        lost = {key for key in before.keys() | after.keys() if sent(key) not in refused}
        if differing := [key for key in lost if before.get(key) != after.get(key)]:
            shown = sorted(map(read_model.key_type.text, differing))
            raise AssertionError(f"after compaction, the states of {shown} differ")


CONTRACT: tuple[Check, ...] = (
    combined_equals_single,
    cuts_do_not_matter,
    redelivery_changes_nothing,
    acceleration_equals_fold,
    deleted_keys_come_back,
    outputs_are_of_events,
    compaction_changes_nothing,
)


def check_contract(model: ReadModel | type[ReadModel], *, examples: int = 25, seconds: float = 10.0) -> None:
    """Runs every check of the contract on generated batches of events; for a test under pytest.

    Prints a line for each check, which pytest shows with `-s`. Needs the extra `testing`, which brings Hypothesis.

    Args:
        examples: the number of histories for each check.
        seconds: begins no further history after so long in all, so that a slow machine checks fewer.

    Raises:
        AssertionError: a check fails; the message shows the smallest batches found in time that make it fail.
        ConfigurationError: the declaration of the model is invalid.
    """
    from hypothesis import HealthCheck, given, seed, settings

    from balance_service.testing.strategies import batches

    read_model = model() if isinstance(model, type) else model
    # Shrinking opens stores again and again, which is slow on some machines.
    limits = settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    checks = CONTRACT if read_model.has_states() else (outputs_are_of_events,)
    until = time.monotonic() + seconds
    for number, check in enumerate(checks):
        began = time.monotonic()
        share = _Share(check, read_model, began + (until - began) / (len(checks) - number))
        fewer = f" of {examples}, for lack of time; give more `seconds`"
        with suppress(_TimeIsOver):
            # With a seed, it says nothing when it is ended.
            seed(random.getrandbits(64))(limits(given(batches(read_model))(share.checked)))()
            fewer = ""
        share.raise_failure()
        took = f"{time.monotonic() - began:.1f} s"
        click.echo(f"{read_model.name}: {check.__name__}: {share.histories} histories{fewer} ({took})", err=True)


class _TimeIsOver(BaseException):
    """Ends Hypothesis, which would take an Exception for a failure."""


class _Share:
    """A check on as many histories as its share of the time allows."""

    def __init__(self, check: Check, read_model: ReadModel, until: float) -> None:
        self._check = check
        self._read_model = read_model
        self._until = until
        self._smallest: tuple[str, Exception] | None = None
        self.histories = 0

    @property
    def checked(self) -> Callable[[list[list[InputEvent]]], None]:
        # Hypothesis takes functions only.
        def checked(drawn: list[list[InputEvent]]) -> None:
            if time.monotonic() > self._until:
                raise _TimeIsOver
            self.histories += 1
            try:
                self._check(self._read_model, drawn)
            except Exception as error:
                if self._smallest is None or len(repr(drawn)) <= len(self._smallest[0]):
                    self._smallest = repr(drawn), error
                raise

        return checked

    def raise_failure(self) -> None:
        """Raises what Hypothesis would have raised at the end: it had no time to look for a smaller history."""
        if self._smallest is not None:
            batches, error = self._smallest
            raise AssertionError(f"{error}; the batches: {batches}") from error


def _driven(driver: Driver, batches: Batches, after_each: Callable[[], object] = lambda: None) -> Outcome:
    """Returns the result of the engine."""
    deleted = 0
    for batch in batches:
        deleted += driver.commit(batch).deleted
        if batch:
            after_each()
    # What is wrong with an event may be said differently by a combined update.
    refused = [one._replace(detail="") for one in driver.dead_letters()]
    return Outcome(driver.states(), refused, deleted, driver.counted)


def _folded(read_model: ReadModel, batches: Batches, codec: AvroCodec) -> Outcome:
    """Returns the result of the fold, event by event: the definition."""
    states: dict[bytes, bytes] = {}
    *earlier, stage = driven_stages(read_model, after_joins=True)
    # By stage, as the driver tells them.
    refused: dict[str, list[Refused]] = {one.name: [] for one in (*earlier, stage)}
    deleted = 0
    for batch in filter(None, batches):
        before = set(states)
        came = _arrived([*earlier, stage], batch, refused)
        if not came:
            continue
        rows = PartitionRows(rows_of(read_model, stage, dict(enumerate(came)), FakeRegistry()))
        causes = {letter.offset: letter.cause for letter in rows.combined(None).dead_letters}
        letters = {offset: letter_of(read_model, stage, event, offset) for offset, event in enumerate(came)}
        for update in rows.single_updates(rows.updates, letters):
            frame = states.pop(update.key, None)
            try:
                before_it = None if frame is None else codec.decode(frame)
                event = read_model.told(update.update, update.timestamp_ms)
                state = read_model.next_state(before_it, update.key, update.update, event)
                after = None if state is None else _encoded(codec, state)
            except PoisonRecordError as error:
                causes[update.record.offset if update.record else -1] = error.cause
                after = frame
            if after is not None:
                states[update.key] = after
        refused[stage.name] += [Refused(came[offset], causes[offset]) for offset in sorted(causes)]
        deleted += len(before - states.keys())
    return Outcome(states, [one for of_stage in refused.values() for one in of_stage], deleted, len(states))


def _encoded(codec: AvroCodec, state: Any) -> bytes:
    """Raises PoisonRecordError: the state does not fit its schema, such as a sum of more than 64 bits."""
    try:
        return codec.encode(state)
    except Exception as error:  # fastavro raises errors of many types
        raise PoisonRecordError(STATE_UNFIT, str(error)) from error


def _arrived(
    stages: Sequence[Stage], batch: Sequence[InputEvent], refused: Mapping[str, list[Refused]]
) -> list[InputEvent]:
    """Returns the events of a batch that reach the last stage; adds those that an earlier stage rejects."""
    came = []
    for sent in batch:
        first, *_ = way = way_of(stages, sent)
        given: InputEvent | None = encoded(sent, first)
        for stage in way[:-1]:
            if given is None:
                break
            key, cause = passed_on(stage, given)
            if cause not in (None, IGNORED):
                refused[stage.name].append(Refused(given, str(cause)))
            given = None if cause else replace(given, record_key=key)
        came += [given] if given is not None else []
    return came


def _check(how: str, found: Outcome, expected: Outcome, codec: AvroCodec | None) -> None:
    if found != expected:
        raise AssertionError(
            f"{how}, the events result in {_difference(found, expected, codec)}, and by the fold in "
            f"{_difference(expected, found, codec)}; a fold must depend on its arguments only"
        )


def _difference(outcome: Outcome, other: Outcome, codec: AvroCodec | None) -> str:
    """Describes the part of an outcome that differs from another."""
    states = {
        key.decode(errors="replace"): frame if codec is None else codec.decode(frame)
        for key, frame in outcome.states.items()
        if other.states.get(key) != frame
    }
    refused = [letter for letter in outcome.refused if letter not in other.refused]
    return f"states {states}, dead letters {refused}, {outcome.counted} keys, {outcome.deleted} deletions"
