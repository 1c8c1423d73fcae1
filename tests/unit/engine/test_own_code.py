"""Own code of a read model that fails at a retried dead letter: the letter waits for an operator, and no task halts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from balance_service.errors import PoisonRecordError, TaskHaltedError
from balance_service.model.events import ANY, LAST, Emit
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
    return event("WordSaid", {"id": key, "word": word}, unreadable=unreadable)


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
