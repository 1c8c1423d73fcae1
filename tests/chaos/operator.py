"""An operator who redrives dead letters whose cause is fixed, through two instances at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx

from tests.chaos.checks import Violation
from tests.chaos.frames import HEALING
from tests.chaos.journal import unstolen_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.chaos.cluster import Member

_ASK_SECONDS = 10.0
_AGAIN_SECONDS = 0.5
_MOST_IDS = 500
_SHOWN = 3


def redrive_all(members: Sequence[Member], seconds: float) -> Iterator[Violation]:
    """Redrives all readable dead letters until none is open, or `seconds` have passed."""
    began = unstolen_time()
    with httpx.Client(timeout=_ASK_SECONDS) as client, ThreadPoolExecutor(2) as both:
        while True:
            found = _open_letters(client, members[0])
            if found == []:
                return
            if unstolen_time() - began > seconds:
                detail = (
                    "the list is unavailable" if found is None else f"{len(found)} are open, such as {found[:_SHOWN]}"
                )
                yield Violation("stuck", f"dead letters do not heal: {detail}")
                return
            ids = [letter["id"] for letter in found or ()]
            for some in (ids[at : at + _MOST_IDS] for at in range(0, len(ids), _MOST_IDS)):
                list(both.map(partial(_redrive, client, some), members[:2]))
            time.sleep(_AGAIN_SECONDS)


def _open_letters(client: httpx.Client, member: Member) -> list[dict[str, Any]] | None:
    """Returns the open dead letters of valid events; None if the list is unavailable."""
    found: list[dict[str, Any]] = []
    parameters = {"cause": "schema-id-unknown", "limit": "100"}
    while True:
        try:
            answer = client.get(f"{member.instance.url}/api/deadLetters", params=parameters)
        except httpx.HTTPError:
            return None
        if not answer.is_success:
            return None
        page = answer.json()
        found += [
            letter
            for letter in page["deadLetters"]
            if letter["status"] in ("scheduled", "parked") and (letter["key"] or "").startswith(HEALING.decode())
        ]
        if page["next"] is None:
            return found
        parameters["after"] = page["next"]


def _redrive(client: httpx.Client, ids: Sequence[str], member: Member) -> None:
    body = {"ids": ids, "reason": "their schema is registered"}
    try:
        client.post(f"{member.instance.url}/api/deadLetters.redrive", json=body)
    except httpx.HTTPError:
        return
