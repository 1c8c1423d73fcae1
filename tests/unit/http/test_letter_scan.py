"""Pages of dead letters, as one instance tells them: each is as much as a peer may answer, and none is left out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.dead_letter import Letter
from balance_service.engine.decisions import LetterId
from balance_service.engine.records import Position
from balance_service.http.letter_scan import LetterScan
from balance_service.http.peers.connections import MAX_BODY_BYTES
from balance_service.http.routing import LocalCopy
from balance_service.model.keys import TEXT, KeyType
from tests.support.querying import read_to_its_end

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST = 64 << 10
MANY = 40
NUMBER = KeyType("n", is_number=True)


class Kept:
    """Letters, as a store gives them."""

    def __init__(self, keys: Sequence[bytes | None]) -> None:
        self._letters = [Letter.first(offset, "key-malformed", key, 0, 1) for offset, key in enumerate(keys)]

    def page(self, _view: object, start: int, limit: int) -> list[Letter]:
        return self._letters[start : start + limit]


@pytest.mark.parametrize(
    "keys",
    [MANY * [LONGEST * b"\xff"], MANY * [LONGEST * b"\0"], MANY * [LONGEST * b"k"], MANY * [b"k", LONGEST * b"\xff"]],
    ids=["no text", "control characters", "text", "some are long"],
)
def test_a_page_of_letters_with_long_keys_is_no_more_than_a_peer_may_answer(keys: Sequence[bytes]) -> None:
    kept: Any = Kept(keys)
    # Nothing of them is looked at but letters.
    nothing: Any = None
    copy = LocalCopy(0, nothing, nothing, Position(0, 1, "id"), was_owned=True)
    found: list[str] = []
    start, is_last = 0, False
    while not is_last:
        scan = LetterScan(stage="s", read_model="m", key_type=TEXT, letters=kept, start=(0, start), limit=1000)
        body = read_to_its_end(scan.read([copy], nothing, nothing))
        assert len(body) <= MAX_BODY_BYTES
        page = json.loads(body)
        found += [letter["id"] for letter in page["deadLetters"]]
        is_last = page["next"] is None
        start = 0 if is_last else LetterId.parse(page["next"]).offset + 1

    assert found == [f"s/0:{offset}" for offset in range(len(keys))]


@pytest.mark.parametrize(
    ("key_type", "key", "shown"),
    [
        (TEXT, "Zoë".encode(), {"key": "Zoë"}),
        (TEXT, b"", {"key": ""}),
        (TEXT, None, {"key": None}),
        (TEXT, "\ufffd".encode(), {"key": "\ufffd"}),
        (TEXT, bytes.fromhex("40ff00c3"), {"key": None, "keyBase64": "QP8Aww=="}),
        (NUMBER, NUMBER.encode(-7), {"key": "-7"}),
        (NUMBER, b"\xff", {"key": None, "keyBase64": "/w=="}),
    ],
)
def test_a_key_is_told_as_text_or_as_the_bytes_that_it_is(key_type: Any, key: Any, shown: dict[str, Any]) -> None:
    kept: Any = Kept([key])
    nothing: Any = None
    copy = LocalCopy(0, nothing, nothing, Position(0, 1, "id"), was_owned=True)
    scan = LetterScan(stage="s", read_model="m", key_type=key_type, letters=kept)

    (letter,) = json.loads(read_to_its_end(scan.read([copy], nothing, nothing)))["deadLetters"]

    assert {name: letter[name] for name in ("key", "keyBase64") if name in letter} == shown
