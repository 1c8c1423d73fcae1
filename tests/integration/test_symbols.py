"""`symbols` and an `Upsert` on a broker: the latest values and deletions, also after a restore."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.frames import frame_header
from balance_service.engine.dead_letter import Status
from balance_service.model.read_model import ReadModel
from balance_service.model.record_folds import Upsert
from balance_service.model.stream import Stream
from tests.integration.engines import catch_up, hosted, running_engine, settings_for, tasks_of
from tests.support.kafka import Rows, read_topic
from tests.support.shipped import KNOWN

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine

UNKNOWN = frame_header(2**31 - 1) + b"x"


class Securities(ReadModel):
    """All securities, with their newest records."""

    name = "test-securities"
    source = Stream("symbols", "Symbol")
    key = "symbol"
    state = "Symbol"
    fold = Upsert("Symbol")


def put(writer: Rows, ticker: str, name: str | None) -> None:
    """Upserts a symbol, or sends a tombstone if `name` is None."""
    fields = {"symbol": ticker, "name": name, "price": Decimal("1.5000"), "currency": "INR", "exchange": "XNSE"}
    writer.put(ticker, None if name is None else fields)


def known(engine: Engine) -> dict[str, Any]:
    """Returns the name of every symbol in the stores of the engine."""
    model = hosted(engine)
    found: dict[str, Any] = {}
    for task in tasks_of(engine).all():
        view = task.view
        assert view is not None
        found |= {key.decode(): model.view(frame)["name"] for key, frame in view.scan(b"", b"\xff", 100)}
    return found


def test_upserts_tombstones_and_filtered_rows_are_restored_correctly(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "first", models="symbols")
    with Rows(stack, "symbols", "Symbol") as writer:
        with running_engine(settings) as engine:
            for ticker, name in [("TCS", "Tata"), ("INFY", "Infosys"), ("HDFC", "Bank"), ("GONE", None)]:
                put(writer, ticker, name)
            writer.flush()
            catch_up(engine)
            assert known(engine) == {"TCS": "Tata", "INFY": "Infosys", "HDFC": "Bank"}

            for ticker, told in [("TCS", None), ("INFY", ""), ("HDFC", "HDFC Bank"), ("not plain", "never listed")]:
                put(writer, ticker, told)
            writer.flush()
            catch_up(engine)
            assert known(engine) == {"HDFC": "HDFC Bank"}
        with running_engine(settings.model_copy(update={"state_dir": tmp_path / "second"})) as restored:
            catch_up(restored)
            assert known(restored) == {"HDFC": "HDFC Bank"}
            put(writer, "TCS", "back")
            writer.flush()
            catch_up(restored)
            assert known(restored) == {"HDFC": "HDFC Bank", "TCS": "back"}


@pytest.mark.shows("newest")
def test_a_dead_letter_is_superseded_by_a_later_record(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN, Securities.name, Securities())
    settings = settings_for(stack, names, tmp_path / "first", models=(Securities.name,))
    keys = {"OLD.S", "LATE.S", "GONE.S"}
    with Rows(stack, "symbols", "Symbol") as writer:
        with running_engine(settings) as engine:
            for ticker in (*keys, "OLD.S"):
                put(writer, ticker, "first")
            put(writer, "GONE.S", None)
            for ticker in keys:
                writer.put_raw(ticker, UNKNOWN)
            writer.flush()
            catch_up(engine)
            assert {ticker: name for ticker, name in known(engine).items() if ticker in keys} == {
                "OLD.S": "first",
                "LATE.S": "first",
            }
            assert letters_of(engine, keys) == {key: {Status.SCHEDULED} for key in keys}
            put(writer, "OLD.S", "newest")
            put(writer, "GONE.S", None)
            writer.flush()
            catch_up(engine)
            expected = {"OLD.S": {Status.SUPERSEDED}, "GONE.S": {Status.SUPERSEDED}, "LATE.S": {Status.SCHEDULED}}
            assert letters_of(engine, keys) == expected
        with running_engine(settings.model_copy(update={"state_dir": tmp_path / "second"})) as restored:
            catch_up(restored)
            assert letters_of(restored, keys) == expected
            assert known(restored)["OLD.S"] == "newest"
            for ticker in keys:
                put(writer, ticker, None)
            writer.flush()
            catch_up(restored)
            assert not keys & {*known(restored)}


def letters_of(engine: Engine, keys: set[str]) -> dict[str, set[Status]]:
    """Returns the statuses of the dead letters of some symbols."""
    found: dict[str, set[Status]] = {}
    for task in tasks_of(engine).all():
        assert task.view is not None
        for letter in hosted(engine).processor.letters.page(task.view, 0, 1_000):
            key = (letter.key or b"").decode()
            if key in keys:
                found.setdefault(key, set()).add(letter.status)
    return found


def test_a_symbol_that_exceeds_the_changelogs_limit_is_a_dead_letter_and_stops_nothing(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", models="symbols")
    compressed = {"compression.type": "gzip", "message.max.bytes": 8 << 20}
    with Rows(stack, "symbols", "Symbol", **compressed) as writer, running_engine(settings) as engine:
        for ticker, name in [("LARGE", "before"), ("LARGE", "x" * (2 << 20)), ("SMALL", "told")]:
            put(writer, ticker, name)
        writer.flush()
        catch_up(engine)

        assert {ticker: name for ticker, name in known(engine).items() if ticker in ("LARGE", "SMALL")} == {
            "LARGE": "before",
            "SMALL": "told",
        }
        (letter,) = [found for found in read_topic(stack, "symbols-dead-letters") if found.key() == b"LARGE"]
        assert ("dead-letter-cause", b"state-does-not-fit") in (letter.headers() or [])
        # Other tests use the same topic.
        for ticker in ("LARGE", "SMALL"):
            put(writer, ticker, None)
