"""Read models for tests, with their own schemas."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.schemas import load_schema
from balance_service.errors import PoisonRecordError
from balance_service.model.conditions import col
from balance_service.model.events import EVENT, Emit
from balance_service.model.folds import (
    Average,
    Count,
    Distinct,
    Earliest,
    Greatest,
    Latest,
    Least,
    Range,
    RunningSum,
    Top,
)
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.model.events import Event, State

MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2}
WIDE_MONEY = {**MONEY, "precision": 38}
WHEN = {"type": "long", "logicalType": "timestamp-millis"}
PLACE = {
    "type": "record",
    "name": "Place",
    "fields": [{"name": "city", "type": "string"}, {"name": "since", "type": ["null", WHEN]}],
}
RANKED_DAY = {"type": "int", "logicalType": "date"}
KIND = {"type": "enum", "name": "Kind", "symbols": ["SMALL", "LARGE"]}


def ship(name: str, fields: Mapping[str, Any]) -> str:
    """Makes a schema loadable by its name, as if it were a shipped file."""
    schema = {
        "type": "record",
        "name": name,
        "namespace": "tests",
        "fields": [{"name": field, "type": kind} for field, kind in fields.items()],
    }
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder, "schema.avsc")
        file.write_text(json.dumps(schema))
        patch.setattr("balance_service.avro.schemas.resource", lambda _path: file)
        load_schema(name)
    return name


SCORED = ship(
    "Scored",
    {
        "id": "string",
        "score": "double",
        "level": ["null", "int"],
        "paid": MONEY,
        "at": {"type": "long", "logicalType": "timestamp-micros"},
        "day": {"type": "int", "logicalType": "date"},
        "place": PLACE,
        "kind": KIND,
        "tags": {"type": "array", "items": "string"},
        "counts": {"type": "map", "values": "long"},
        "photo": "bytes",
        "ratio": "float",
        "ref": {"type": "string", "logicalType": "uuid"},
        "serial": {"type": "fixed", "name": "Serial", "size": 16, "logicalType": "uuid"},
    },
)
ENDED = ship("Ended", {"id": "string", "reason": ["null", "string"]})

ship(
    "Summary",
    {
        "id": "string",
        "games": "long",
        "ends": "long",
        "levels": "long",
        "paid": WIDE_MONEY,
        "most": ["null", "string"],
        "last": ["null", {"type": "long", "logicalType": "timestamp-micros"}],
        "least": ["null", "int"],
        "first": ["null", PLACE],
        "latest": ["null", {"type": "map", "values": "long"}],
        "ref": ["null", {"type": "string", "logicalType": "uuid"}],
    },
)
ship(
    "Ranks",
    {
        "id": "string",
        "best": {
            "type": "array",
            "items": {
                "type": "record",
                "name": "Rank",
                "fields": [
                    {"name": "score", "type": "double"},
                    {"name": "kind", "type": KIND},
                    {"name": "paid", "type": WIDE_MONEY},
                ],
            },
        },
        "last": "float",
        "day": {"type": "int", "logicalType": "date"},
        "tags": {"type": "array", "items": "string"},
    },
)
ship("Peaks", {"id": "string", "most": ["null", "double"], "least": ["null", "float"], "games": "long"})
ship(
    "Chosen",
    {
        "id": "string",
        "large": "long",
        "unknown": "long",
        "total": WIDE_MONEY,
        "mean": ["null", {**WIDE_MONEY, "scale": 3}],
        "level": ["null", {**WIDE_MONEY, "scale": 0}],
        "levels": "long",
        "places": "long",
        "payments": "long",
        "reasons": "long",
        "span": [
            "null",
            {
                "type": "record",
                "name": "Span",
                "fields": [
                    {"name": "least", "type": {"type": "long", "logicalType": "timestamp-micros"}},
                    {"name": "greatest", "type": {"type": "long", "logicalType": "timestamp-micros"}},
                ],
            },
        ],
        "last": ["null", "string"],
        "best": {
            "type": "array",
            "items": {"type": "record", "name": "Best", "fields": [{"name": "day", "type": RANKED_DAY}]},
        },
    },
)
ship("Tally", {"id": "string", "paid": WIDE_MONEY})
ship("Note", {"id": "string", "paid": MONEY, "total": WIDE_MONEY, "tags": {"type": "array", "items": "string"}})
ship("Session", {"games": "int", "ratio": "float", "event": ["null", "string"], "day": ["null", PLACE]})


class Summary(ReadModel):
    """All folds that may start empty, over events of two record types."""

    name = "test-summary"
    source = Stream("games", "Scored", "Ended")
    key = "id"
    state = "Summary"

    games = Count("Scored")
    ends = Count("Ended")
    levels = RunningSum("Scored.level")
    paid = RunningSum("Scored.paid")
    most = Greatest("Ended.reason")
    last = Greatest("Scored.at")
    least = Least("Scored.level")
    first = Earliest("Scored.place")
    latest = Latest("Scored.counts")
    ref = Latest("Scored.ref")


LARGE = (col("kind") == "LARGE") & (col("paid") > 1)


class Chosen(ReadModel):
    """Folds of some of the events, over events of two record types."""

    name = "test-chosen"
    source = Stream("games", "Scored", "Ended")
    key = "id"
    state = "Chosen"

    large = Count("Scored", where=LARGE)
    unknown = Count("Scored", where=col("level").is_null())
    total = RunningSum("Scored.paid", where=LARGE | col("place.since").is_null())
    mean = Average("Scored.paid", where=~(col("level") == 1))
    level = Average("Scored.level")
    levels = Distinct("Scored.level", 2, where=col("kind").isin("SMALL"))
    places = Distinct("Scored.kind", 1)
    payments = Distinct("Scored.paid", 3)
    reasons = Distinct("Ended.reason", 2, where=~(col("reason") == ""))
    span = Range("Scored.at", where=col("score") > 0.0)
    last = Latest("Ended.reason", where=col("reason") >= "m")
    best = Top("Scored.day", 2, where=col("ratio") < 1.0)


class Peaks(ReadModel):
    """Folds that combine, and folds that do not."""

    name = "test-peaks"
    source = Stream("games", "Scored")
    key = "id"
    state = "Peaks"

    most = Greatest("Scored.score")
    least = Least("Scored.ratio")
    games = Count("Scored")


class Tally(ReadModel):
    """A single sum; one of the two record types does not change it."""

    name = "test-tally"
    source = Stream("games", "Scored", "Ended")
    key = "id"
    state = "Tally"

    paid = RunningSum("Scored.paid")


class Ranks(ReadModel):
    """Combined folds whose result depends on the order of events."""

    name = "test-ranks"
    source = Stream("games", "Scored")
    key = "id"
    state = "Ranks"

    best = Top("Scored.score", 3)
    last = Latest("Scored.ratio")
    day = Greatest("Scored.day")
    tags = Earliest("Scored.tags")


class Session(ReadModel):
    """A custom fold that deletes its state at the end of a session."""

    name = "test-session"
    source = Stream("games", "Scored", "Ended")
    key = "id"
    state = "Session"

    def fold(self, state: State | None, event: Event) -> State | None:
        """Deletes the state on Ended; rejects large games; counts small ones."""
        if event.record == "Ended":
            return None
        if event["kind"] == "LARGE":
            raise PoisonRecordError("game-too-large", "only small games are played")
        before = state or {"games": 0, "ratio": 0.0}
        return {
            "games": before["games"] + 1,
            "ratio": before["ratio"] / 3 + event["ratio"] / 7,
            "event": next(iter(event["tags"]), None),
            "day": event["place"],
        }


class Noted(ReadModel):
    """A standard fold that emits one record per event and selects some columns of it."""

    name = "test-noted"
    source = Stream("games", "Scored").select("paid", "tags")
    key = "id"
    state = "Tally"
    emits = Emit("notes", "Note", each=EVENT)

    paid = RunningSum("Scored.paid")

    def emit(self, state: State, event: Event) -> Event | State:
        """Returns the event with the sum that includes it."""
        return {**event, "total": state["paid"]}


MODELS = (Summary(), Chosen(), Peaks(), Tally(), Ranks(), Session(), Noted())
