"""A read model's own code that fails at a dead letter that is tried again: it waits for an operator, nothing halts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from balance_service.errors import PoisonRecordError, TaskHaltedError
from balance_service.model.flow import Stream
from balance_service.model.order import ANY
from balance_service.model.outputs import LAST, Emit
from balance_service.model.read_model import ReadModel
from balance_service.testing import Driver, event
from tests.support.models import ship

if TYPE_CHECKING:
    from balance_service.model.event import Event, State

UNKNOWN = "schema-id-unknown"
FAILED = "own-code-failed"
TOLD = ship("WordSaid", {"id": "string", "word": "string"})
KEPT = ship("WordsKept", {"id": "string", "words": {"type": "array", "items": "string"}})
# Words at which the code below fails.
bugs: set[str] = set()


def checked(word: str) -> str:
    if word in bugs:
        raise KeyError(word)
    return word


class Words(ReadModel):
    """All words, in their order."""

    name = "test-words"
    source = Stream("test-words", TOLD)
    key = "id"
    state = KEPT

    def fold(self, state: State | None, said: Event) -> State:
        if said["word"] == UNKNOWN:
            raise PoisonRecordError(UNKNOWN, "a cause that is not its own")
        return {"id": said["id"], "words": [*(state["words"] if state else []), checked(said["word"])]}


class WordsInAnyOrder(Words):
    """The same, where a word may come late."""

    name = "test-words-any"
    source = Stream("test-words-any", TOLD)
    order = ANY


class WordsSent(ReadModel):
    """The same, sent once a commit."""

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
        # A generator fails only once it is asked for what it makes.
        yield {"words": [checked(word) for word in state["words"]]}


class WordsMade(ReadModel):
    """A record of each word, without a state."""

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


def test_it_waits_with_its_cause_and_others_go_on() -> None:
    with Driver(WordsInAnyOrder()) as driver:
        driver.given(said("x"), said("boom", unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=5)
        assert told(driver) == [(FAILED, "waiting")]

        driver.given(said("y"), said("z", "b")).restart()
        assert (driver.view("a"), driver.view("b")) == ({"words": ["x", "y"]}, {"words": ["z"]})

        bugs.clear()
        assert driver.redrive(1).view("a") == {"words": ["x", "y", "boom"]}


def test_it_holds_its_key_where_order_matters_until_the_code_is_corrected() -> None:
    with Driver(Words()) as driver:
        driver.given(said("x"), said("boom", unreadable=UNKNOWN), said("y"), said("z", "b"))
        driver.mend(UNKNOWN).advance(minutes=5).given(said("w"))
        assert told(driver) == [(FAILED, "waiting"), ("behind-another", "behind"), ("behind-another", "behind")]
        assert (driver.view("a"), driver.view("b")) == ({"words": ["x"]}, {"words": ["z"]})

        bugs.clear()
        driver.redrive(1)
        assert driver.view("a") == {"words": ["x", "boom", "y", "w"]}
        assert driver.rebuild().view("a") == {"words": ["x", "boom", "y", "w"]}


def test_those_that_are_tried_with_it_wait_too() -> None:
    with Driver(Words()) as driver:
        driver.given(said("x", unreadable=UNKNOWN), said("boom"), said("y")).mend(UNKNOWN).advance(minutes=5)

        assert driver.view("a") == {"words": ["x"]}
        assert told(driver)[1:] == [(FAILED, "waiting"), ("behind-another", "behind")]


def test_once_it_is_discarded_what_waited_goes_on() -> None:
    with Driver(Words()) as driver:
        driver.given(said("boom", unreadable=UNKNOWN), said("y")).mend(UNKNOWN).advance(minutes=5)

        assert driver.discard(0).view("a") == {"words": ["y"]}


def test_what_cannot_be_sent_leaves_the_state_as_it_was_and_is_sent_once_the_code_is_corrected() -> None:
    with Driver(WordsSent()) as driver:
        driver.given(said("x"), said("boom", unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=5)
        assert (told(driver), driver.view("a")) == ([(FAILED, "waiting")], {"words": ["x"]})

        bugs.clear()
        assert driver.redrive(1).view("a") == {"words": ["x", "boom"]}
        assert driver.emitted("test-words-out") == [{"words": ["x"]}, {"words": ["x", "boom"]}]


def test_what_is_made_without_a_state_waits_too() -> None:
    with Driver(WordsMade()) as driver:
        driver.given(said("boom", unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=5).given(said("y"))
        assert told(driver) == [(FAILED, "waiting")]

        bugs.clear()
        assert driver.redrive(0).emitted("test-words-made-out") == [{"word": "y"}, {"word": "boom"}]


def test_of_letters_that_are_tried_together_each_keeps_a_cause_of_its_own() -> None:
    with Driver(WordsSent()) as driver:
        driver.given(said("boom", unreadable=UNKNOWN), said("unsaid", unreadable=UNKNOWN)).mend(UNKNOWN)
        driver.advance(minutes=5)

        assert told(driver) == [(FAILED, "waiting"), ("word-unsaid", "waiting")]


def test_a_cause_that_says_that_a_record_could_not_be_read_is_not_a_folds_to_name() -> None:
    with Driver(Words()) as driver, pytest.raises(TaskHaltedError, match="with ConfigurationError"):
        driver.given(said(UNKNOWN))


@pytest.mark.parametrize("model", [Words, WordsSent, WordsMade])
def test_an_event_that_comes_halts_the_task_still(model: type[ReadModel]) -> None:
    with Driver(model()) as driver:
        driver.given(said("x"))
        with pytest.raises(TaskHaltedError, match=r"fails at offset 1 of \S+ with KeyError"):
            driver.given(said("boom"))
