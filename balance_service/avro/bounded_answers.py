"""Bounds the registry's answers, which may come from a proxy or from a registry that anybody may write to."""

from __future__ import annotations

import time
from typing import Any

MOST_BYTES = 4 << 20
"""The most bytes of an answer. Confluent's registry takes schemas of up to 1 MiB."""
MOST_SECONDS = 10.0
"""The most time that the body of an answer takes."""


class AnswerTooLargeError(Exception):
    """The body of an answer has more than `MOST_BYTES`."""

    def __init__(self, *, may_hold_schema: bool) -> None:
        """Args:
        may_hold_schema: whether the answer is a success and a JSON object.
        """
        super().__init__(f"its answer has more than {MOST_BYTES >> 20} MiB")
        self.may_hold_schema = may_hold_schema


class AnswerTooSlowError(Exception):
    """The body of an answer has not ended within `MOST_SECONDS`."""

    def __init__(self) -> None:
        super().__init__(f"its answer does not end within {MOST_SECONDS:.0f} s")


def bound_answers(session: Any) -> None:
    """Makes an HTTP client of httpx, of either version, raise these errors for the answers that it reads."""
    session.event_hooks["response"].append(_read)


def _read(response: Any) -> None:
    until, body = time.monotonic() + MOST_SECONDS, bytearray()
    # The parts are decompressed.
    for part in response.iter_bytes():
        body += part
        if len(body) > MOST_BYTES:
            raise AnswerTooLargeError(may_hold_schema=response.is_success and body.lstrip().startswith(b"{"))
        if time.monotonic() > until:
            raise AnswerTooSlowError
    # As `response.read()` leaves it.
    response._content = bytes(body)
