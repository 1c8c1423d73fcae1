"""What every read model keeps, whatever its events: checks for a property test, each of one read model.

Each takes batches of events and raises AssertionError where the engine does not come to what the fold says of one event
after the other. `balance_service.testing.strategies` makes such batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from balance_service.errors import PoisonRecordError
from balance_service.model.event import event_of
from balance_service.model.outputs import Each
from balance_service.model.read_model import ReadModel
from balance_service.spark.combine import PartitionRows
from balance_service.spark.notes import IGNORED
from balance_service.testing.driver import Driver, Refused
from balance_service.testing.rows import Given, driven_stages, letter_of, passed_on, rows_of, written

if TYPE_CHECKING:
    from balance_service.avro.codec import AvroCodec

Batches = Sequence[Sequence[Given]]
Check = Callable[[ReadModel, Batches], None]


class Outcome(NamedTuple):
    """What a history comes to: states, framed; which events became dead letters, and why; how many states went.

    `counted` is how many states there are, as the commits count them.
    """

    states: dict[bytes, bytes]
    refused: list[Refused]
    deleted: int
    counted: int


def combined_equals_single(read_model: ReadModel, batches: Batches) -> None:
    """All events combined in one batch come to what they do one after the other."""
    whole = [[event for batch in batches for event in batch]]
    with Driver(read_model, combines_few=True, is_accelerated=False) as driver:
        _check("combined", _driven(driver, whole), _folded(read_model, whole, driver.state_codec), driver.state_codec)


def cuts_do_not_matter(read_model: ReadModel, batches: Batches) -> None:
    """Cut into batches anywhere, events come to the same."""
    with Driver(read_model, combines_few=True) as driver:
        _check(
            "cut into batches",
            _driven(driver, batches),
            _folded(read_model, batches, driver.state_codec),
            driver.state_codec,
        )


def redelivery_changes_nothing(read_model: ReadModel, batches: Batches) -> None:
    """A batch that is delivered twice counts once."""
    with Driver(read_model) as driver:
        expected = _folded(read_model, batches, driver.state_codec)
        _check("delivered twice", _driven(driver, batches, after_each=driver.redeliver), expected, driver.state_codec)


def acceleration_equals_fold(read_model: ReadModel, batches: Batches) -> None:
    """What is accelerated is what the fold makes, byte for byte."""
    with (
        Driver(read_model, combines_few=True) as accelerated,
        Driver(read_model, combines_few=True, is_accelerated=False) as folded,
    ):
        _check("accelerated", _driven(accelerated, batches), _driven(folded, batches), None)


def deleted_keys_come_back(read_model: ReadModel, batches: Batches) -> None:
    """A state that the fold removes is gone, here and in the changelog; its key's next event begins a new one."""
    history = [*batches, *batches]
    with Driver(read_model) as driver:
        expected = _folded(read_model, history, driver.state_codec)
        _check(
            "deleted and restored", _driven(driver, history, after_each=driver.restart), expected, driver.state_codec
        )


def outputs_are_of_events(read_model: ReadModel, batches: Batches) -> None:
    """What is emitted for each event does not depend on cuts; of a key's last state, what is emitted last does not."""
    whole = [[event for batch in batches for event in batch]]
    with Driver(read_model) as cut, Driver(read_model) as uncut:
        _driven(cut, batches, after_each=cut.redeliver)
        _driven(uncut, whole)
        for output in read_model.outputs:
            emitted = Driver.last_emitted if output.each is Each.LAST else Driver.emitted
            found, expected = emitted(cut, output.topic), emitted(uncut, output.topic)
            if found != expected:
                raise AssertionError(f"cut into batches, '{output.topic}' gets {found}, and else {expected}")


CONTRACT: tuple[Check, ...] = (
    combined_equals_single,
    cuts_do_not_matter,
    redelivery_changes_nothing,
    acceleration_equals_fold,
    deleted_keys_come_back,
    outputs_are_of_events,
)


def check_contract(model: ReadModel | type[ReadModel], *, examples: int = 25) -> None:
    """Run every check of the contract on batches of events that Hypothesis makes up; for a test under pytest.

    Needs the extra `testing`.

    Args:
        examples: how many batches each check is given.

    Raises:
        AssertionError: a check fails; the message shows the smallest batches for which it does.
        ConfigurationError: the model cannot be as it is declared.
    """
    from hypothesis import HealthCheck, given, settings

    from balance_service.testing.strategies import batches

    read_model = model() if isinstance(model, type) else model
    # Shrinking opens stores again and again, which takes long wherever it is.
    limits = settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    for check in CONTRACT if read_model.has_states() else (outputs_are_of_events,):
        limits(given(batches(read_model))(_keeps(check, read_model)))()


def _keeps(check: Check, read_model: ReadModel) -> Callable[[list[list[Given]]], None]:
    def keeps(drawn: list[list[Given]]) -> None:
        check(read_model, drawn)

    return keeps


def _driven(driver: Driver, batches: Batches, after_each: Callable[[], object] = lambda: None) -> Outcome:
    """What the engine comes to."""
    deleted = 0
    for batch in batches:
        deleted += driver.commit(batch).deleted
        if batch:
            after_each()
    return Outcome(driver.states(), driver.dead_letters(), deleted, driver.counted)


def _folded(read_model: ReadModel, batches: Batches, codec: AvroCodec) -> Outcome:
    """What the fold comes to, event by event: the definition."""
    states: dict[bytes, bytes] = {}
    refused: list[Refused] = []
    deleted = 0
    for batch in filter(None, batches):
        before = set(states)
        came, passed_over = _arrived(read_model, batch)
        refused += passed_over
        if not came:
            continue
        stage = driven_stages(read_model)[-1]
        rows = PartitionRows(rows_of(read_model, stage, dict(enumerate(came))))
        causes = {letter.offset: letter.cause for letter in rows.combined(None).dead_letters}
        letters = {offset: letter_of(read_model, stage, event, offset) for offset, event in enumerate(came)}
        for update in rows.singly(rows.updates, letters):
            frame = states.pop(update.key, None)
            try:
                before_it = None if frame is None else codec.decode(frame)
                event = event_of(stage.records, update.update, update.timestamp_ms)
                state = read_model.next_state(before_it, update.key, update.update, event)
                after = None if state is None else codec.encode(state)
            except PoisonRecordError as error:
                causes[update.record.offset if update.record else -1] = error.cause
                after = frame
            if after is not None:
                states[update.key] = after
        refused += [Refused(came[offset], causes[offset]) for offset in sorted(causes)]
        deleted += len(before - states.keys())
    return Outcome(states, refused, deleted, len(states))


def _arrived(read_model: ReadModel, batch: Sequence[Given]) -> tuple[list[Given], list[Refused]]:
    """What of a batch the last stage reads, and what cannot be passed on to it."""
    first, *_ = driven_stages(read_model)
    came, refused = [written(given, first) for given in batch], []
    for stage in driven_stages(read_model)[:-1]:
        ways = [(given, *passed_on(stage, given)) for given in came]
        refused += [Refused(given, cause) for given, _, cause in ways if cause not in (None, IGNORED)]
        came = [replace(given, record_key=key) for given, key, cause in ways if cause is None]
    return came, refused


def _check(how: str, found: Outcome, expected: Outcome, codec: AvroCodec | None) -> None:
    if found != expected:
        raise AssertionError(
            f"{how}, the events come to {_told(found, expected, codec)}, and by the fold to "
            f"{_told(expected, found, codec)}; a fold must depend on nothing but its arguments"
        )


def _told(outcome: Outcome, other: Outcome, codec: AvroCodec | None) -> str:
    """What an outcome has that another has not."""
    states = {
        key.decode(errors="replace"): frame if codec is None else codec.decode(frame)
        for key, frame in outcome.states.items()
        if other.states.get(key) != frame
    }
    refused = [letter for letter in outcome.refused if letter not in other.refused]
    return f"states {states}, dead letters {refused}, {outcome.counted} keys, {outcome.deleted} deletions"
