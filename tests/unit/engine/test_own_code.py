"""Own code of a read model that fails: a new event halts the task, or becomes a dead letter, as a retried one does."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.processor import failed_at
from balance_service.errors import ConfigurationError, PoisonRecordError, TaskHaltedError
from balance_service.model.events import ANY, DEAD_LETTER, LAST, Emit
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.testing import Driver, event
from tests.support.models import ship

if TYPE_CHECKING:
    from balance_service.model.events import Event, State

UNKNOWN = "schema-id-unknown"
FAILED = "own-code-failed"
TOLD = ship("WordSaid", {"id": "string", "word": "string"})
KEPT = ship("WordsKept", {"id": "string", "words": {"type": "array", "items": "string"}})
# The models below fail at these words.
bugs: set[str] = set()


def checked(word: str) -> str:
    if word in bugs:
        raise KeyError(word)
    return word


class Words(ReadModel):
    """Keeps all words in order."""

    name = "test-words"
    source = Stream("test-words", TOLD)
    key = "id"
    state = KEPT

    def fold(self, state: State | None, said: Event) -> State:
        if said["word"] == UNKNOWN:
            raise PoisonRecordError(UNKNOWN, "a cause that is not its own")
        return {"id": said["id"], "words": [*(state["words"] if state else []), checked(said["word"])]}


class WordsInAnyOrder(Words):
    """As `Words`, in any order."""

    name = "test-words-any"
    source = Stream("test-words-any", TOLD)
    order = ANY


class WordsSent(ReadModel):
    """As `Words`, emitted once per commit."""

    name = "test-words-sent"
    source = Stream("test-words-sent", TOLD)
    key = "id"
    state = KEPT
    emits = Emit("test-words-out", ship("WordsOut", {"words": {"type": "array", "items": "string"}}), each=LAST)

    def fold(self, state: State | None, said: Event) -> State:
        if said["word"] == "unsaid":
            raise PoisonRecordError("word-unsaid", "it was not said")
        return {"id": said["id"], "words": [*(state["words"] if state else []), said["word"]]}

    def emit(self, state: State, _said: Event | None) -> Any:
        # A generator fails only when it is iterated.
        yield {"words": [checked(word) for word in state["words"]]}


class WordsMade(ReadModel):
    """Emits a record for each word, without a state."""

    name = "test-words-made"
    source = Stream("test-words-made", TOLD)
    emits = (Emit("test-words-made-out", ship("WordMade", {"word": "string"}), make=lambda said: made_of(said)),)


def made_of(said: Event) -> dict[str, Any]:
    return {"word": checked(said["word"])}


@pytest.fixture(autouse=True)
def a_bug() -> Any:
    bugs.add("boom")
    yield
    bugs.clear()


def said(word: str, key: str = "a", unreadable: str | None = None) -> Any:
    return event("WordSaid", {"id": key, "word": word}, record_key=key, unreadable=unreadable)


def told(driver: Driver) -> list[tuple[str, str]]:
    return [(letter.cause, letter.status.value) for letter in driver.letters()]


def test_a_dead_letter_says_with_which_error_own_code_fails() -> None:
    with Driver(Words()) as driver:
        driver.given(said("boom", unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=5)

        assert [letter.detail for letter in driver.letters()] == ["KeyError: 'boom'"]


def test_a_dead_letter_says_that_own_code_names_a_reserved_cause() -> None:
    with Driver(Words()) as driver:
        driver.given(said(UNKNOWN, unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=5)

        (letter,) = driver.letters()
        assert f"the cause '{UNKNOWN}' is reserved" in letter.detail


@pytest.mark.shows("own-code")
def test_a_dead_letter_at_which_own_code_fails_keeps_its_cause_and_blocks_no_others() -> None:
    with Driver(WordsInAnyOrder()) as driver:
        driver.given(said("x"), said("boom", unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=5)
        assert told(driver) == [(FAILED, "waiting")]

        driver.given(said("y"), said("z", "b")).restart()
        assert (driver.view("a"), driver.view("b")) == ({"words": ["x", "y"]}, {"words": ["z"]})

        bugs.clear()
        assert driver.redrive(1).view("a") == {"words": ["x", "y", "boom"]}


def test_with_order_per_key_its_key_waits_until_the_code_is_corrected() -> None:
    with Driver(Words()) as driver:
        driver.given(said("x"), said("boom", unreadable=UNKNOWN), said("y"), said("z", "b"))
        driver.mend(UNKNOWN).advance(minutes=5).given(said("w"))
        assert told(driver) == [(FAILED, "waiting"), ("behind-another", "behind"), ("behind-another", "behind")]
        assert (driver.view("a"), driver.view("b")) == ({"words": ["x"]}, {"words": ["z"]})

        bugs.clear()
        driver.redrive(1)
        assert driver.view("a") == {"words": ["x", "boom", "y", "w"]}
        assert driver.rebuild().view("a") == {"words": ["x", "boom", "y", "w"]}


def test_dead_letters_retried_in_the_same_batch_wait_too() -> None:
    with Driver(Words()) as driver:
        driver.given(said("x", unreadable=UNKNOWN), said("boom"), said("y")).mend(UNKNOWN).advance(minutes=5)

        assert driver.view("a") == {"words": ["x"]}
        assert told(driver)[1:] == [(FAILED, "waiting"), ("behind-another", "behind")]
        assert driver.letters()[2].detail == "the event of this key at offset 1 could not be applied yet"


def test_discarding_it_releases_the_records_behind_it() -> None:
    with Driver(Words()) as driver:
        driver.given(said("boom", unreadable=UNKNOWN), said("y")).mend(UNKNOWN).advance(minutes=5)

        assert driver.discard(0).view("a") == {"words": ["y"]}


def test_a_failing_emit_leaves_the_state_unchanged_and_emits_once_the_code_is_corrected() -> None:
    with Driver(WordsSent()) as driver:
        driver.given(said("x"), said("boom", unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=5)
        assert (told(driver), driver.view("a")) == ([(FAILED, "waiting")], {"words": ["x"]})

        bugs.clear()
        assert driver.redrive(1).view("a") == {"words": ["x", "boom"]}
        assert driver.emitted("test-words-out") == [{"words": ["x"]}, {"words": ["x", "boom"]}]


def test_a_failing_make_of_a_model_without_states_waits_too() -> None:
    with Driver(WordsMade()) as driver:
        driver.given(said("boom", unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=5).given(said("y"))
        assert told(driver) == [(FAILED, "waiting")]

        bugs.clear()
        assert driver.redrive(0).emitted("test-words-made-out") == [{"word": "y"}, {"word": "boom"}]


def test_dead_letters_of_one_batch_keep_their_own_causes() -> None:
    with Driver(WordsSent()) as driver:
        driver.given(said("boom", unreadable=UNKNOWN), said("unsaid", unreadable=UNKNOWN)).mend(UNKNOWN)
        driver.advance(minutes=5)

        assert told(driver) == [(FAILED, "waiting"), ("word-unsaid", "waiting")]


def test_a_fold_cannot_use_the_cause_of_an_unreadable_record() -> None:
    with Driver(Words()) as driver, pytest.raises(TaskHaltedError, match="with ConfigurationError"):
        driver.given(said(UNKNOWN))


@pytest.mark.shows("own-code")
@pytest.mark.parametrize("model", [Words, WordsSent, WordsMade])
def test_own_code_that_fails_at_a_new_event_still_halts_the_task(model: type[ReadModel]) -> None:
    with Driver(model()) as driver:
        driver.given(said("x"))
        with pytest.raises(TaskHaltedError, match=r"fails at offset 1 of \S+ with KeyError"):
            driver.given(said("boom"))


class WordsThatMayFail(Words):
    """As `Words`; an event at which the fold fails becomes a dead letter."""

    name = "test-words-may-fail"
    source = Stream("test-words-may-fail", TOLD)
    on_failure = DEAD_LETTER


class WordsMadeThatMayFail(WordsMade):
    name = "test-words-made-may-fail"
    source = Stream("test-words-made-may-fail", TOLD)
    on_failure = DEAD_LETTER


class WordsSentThatMayFail(WordsSent):
    name = "test-words-sent-may-fail"
    source = Stream("test-words-sent-may-fail", TOLD)
    on_failure = DEAD_LETTER


@pytest.mark.shows("own-code")
def test_an_event_at_which_own_code_fails_becomes_a_dead_letter_if_the_model_says_so() -> None:
    with Driver(WordsThatMayFail()) as driver:
        driver.given(said("x"), said("boom"), said("y"), said("z", "b"))

        assert told(driver) == [(FAILED, "waiting"), ("behind-another", "behind")]
        assert (driver.view("a"), driver.view("b")) == ({"words": ["x"]}, {"words": ["z"]})
        bugs.clear()
        assert driver.redrive(1).view("a") == {"words": ["x", "boom", "y"]}


def test_an_event_without_a_state_becomes_a_dead_letter_too() -> None:
    with Driver(WordsMadeThatMayFail()) as driver:
        driver.given(said("x"), said("boom"), said("y"))

        assert told(driver) == [(FAILED, "waiting")]
        assert driver.emitted("test-words-made-out") == [{"word": "x"}, {"word": "y"}]


@pytest.mark.shows("own-code")
@pytest.mark.parametrize("model", [WordsThatMayFail, WordsMadeThatMayFail])
def test_code_that_fails_at_the_first_events_after_a_start_halts_the_task(model: type[ReadModel]) -> None:
    with Driver(model()) as driver:
        for key in "abcd":
            driver.given(said("boom", key))
        with pytest.raises(TaskHaltedError, match="KeyError, as at the first 5 events since the start; correct it"):
            driver.given(said("boom", "e"))

        assert len(told(driver)) == 4


@pytest.mark.shows("own-code")
@pytest.mark.parametrize("model", [WordsThatMayFail, WordsMadeThatMayFail])
def test_code_that_fails_at_many_events_halts_the_task(model: type[ReadModel]) -> None:
    with Driver(model()) as driver:
        driver.given(said("x", "first"), *(said("boom", f"k{number}") for number in range(20)))
        assert len(told(driver)) == 20

        with pytest.raises(TaskHaltedError, match="KeyError, as at 20 of the 1,000 records before; correct it"):
            driver.given(said("boom", "last"))


def test_failures_that_are_far_apart_halt_no_task() -> None:
    with Driver(WordsThatMayFail()) as driver:
        driver.given(said("x", "first"))
        for number in range(30):
            driver.given(said("boom", f"k{number}"), *[said("y", f"other{number}")] * 49)

        assert len(told(driver)) == 30


@pytest.mark.parametrize("error", [MemoryError(), ImportError("no module")])
def test_what_is_no_single_events_fault_halts_the_task(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(_word: str) -> str:
        raise error

    with Driver(WordsThatMayFail()) as driver:
        driver.given(said("x"))
        monkeypatch.setitem(globals(), "checked", fails)
        with pytest.raises(TaskHaltedError, match=f"fails at offset 1 of .* with {type(error).__name__}; correct it"):
            driver.given(said("y"))


def test_an_output_of_several_events_halts_the_task() -> None:
    with Driver(WordsSentThatMayFail()) as driver, pytest.raises(TaskHaltedError, match="with KeyError; correct it"):
        driver.given(said("x"), said("boom"))


def test_what_happens_on_failure_is_one_of_two() -> None:
    class Skips(Words):
        name = "test-words-skips"
        on_failure = "skip"  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match=r"`on_failure = 'skip'`, which is neither HALT nor DEAD_LETTER"):
        Skips()


@pytest.mark.parametrize("model", [Words, WordsSent, WordsMade])
def test_a_halt_knows_the_key_of_the_event_and_the_line_of_the_models_code(model: type[ReadModel]) -> None:
    with Driver(model()) as driver, pytest.raises(TaskHaltedError) as halted:
        driver.given(said("x"), said("boom", "Zoë"))

    at = failed_at(halted.value)

    assert at is not None
    assert (at.key, at.error) == ("Zoë".encode(), "KeyError: 'boom'")
    assert re.fullmatch(r".*/test_own_code\.py:\d+, in checked: raise KeyError\(word\)", at.line)
    # Probes read the reason without a token.
    assert "boom" not in str(halted.value)
    assert "Zoë" not in str(halted.value)


def test_a_halt_in_a_library_names_the_line_of_the_models_code_that_calls_it() -> None:
    class Parsing(Words):
        name = "test-words-parsing"
        source = Stream("test-words-parsing", TOLD)

        def fold(self, state: State | None, said: Event) -> State:
            return {"id": said["id"], "words": json.loads(said["word"])}

    with Driver(Parsing()) as driver, pytest.raises(TaskHaltedError) as halted:
        driver.given(said("no JSON"))

    at = failed_at(halted.value)
    assert at is not None
    assert at.line.endswith('in fold: return {"id": said["id"], "words": json.loads(said["word"])}')


def test_a_halt_for_another_reason_has_no_line() -> None:
    assert failed_at(TaskHaltedError("topic t was recreated")) is None
