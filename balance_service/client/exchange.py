"""Requests and responses as values, and retries. Nothing here does input or output: `clients.py` does.

A call is a generator. It yields attempts, gets the reply to each, and returns its result.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeVar

from balance_service import api
from balance_service.client.errors import (
    ClosedError,
    InvalidCallError,
    NotAllowedError,
    NotAnInstanceError,
    ServerFailedError,
    UnavailableError,
)
from balance_service.process.runtime import elapsed

log = logging.getLogger("balance_service.client")

_OK, _REDIRECTIONS, _NOT_FOUND = 200, 300, 404
_ERRORS, _SERVER_ERRORS = 400, 500
_NOT_ALLOWED = (401, 403)
# A limit of the instance or of a proxy; an instance or a proxy that is unavailable.
_UNAVAILABLE = (429, 502, 503, 504)
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_MOST_DOUBLINGS = 10
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request. `path` is percent-encoded, and below the URL of the client."""

    path: str
    method: str = "GET"
    parameters: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request to send after a pause, unless the pause ends after a time of `elapsed`."""

    request: Request
    pause_seconds: float = 0.0
    not_after: float = math.inf

    def too_late(self) -> NoReply | None:
        """Returns what takes the place of a response if the pause has ended too late."""
        return NoReply("the last pause has outlasted the time for attempts") if elapsed() > self.not_after else None


@dataclass(frozen=True, slots=True)
class Reply:
    """A response. The names of `headers` are case-insensitive."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class NoReply:
    """A request without a response."""

    reason: str
    is_untrusted: bool = False
    """Whether the client does not trust the server's certificate."""
    is_closed: bool = False
    """Whether the program has closed the client."""
    is_late: bool = False
    """Whether the time for the response is over."""


T = TypeVar("T")
Call = Generator[Attempt, Reply | NoReply, T]


@dataclass(frozen=True, slots=True)
class Server:
    """The other side of requests, as errors name it."""

    address: str
    """Host and port."""

    def exchange(self, request: Request, retry_seconds: float) -> Call[Reply]:
        """Sends a request, and sends it again while no instance can answer. Returns and raises as `outcome`.

        Args:
            retry_seconds: the last attempt begins at most that long after the first. Its error is raised.
        """
        until, failures, pause, not_after = elapsed() + retry_seconds, 0, 0.0, math.inf
        while True:
            outcome = self.outcome((yield Attempt(request, pause, not_after)))
            if isinstance(outcome, Reply):
                return outcome
            failures += 1
            pause, not_after = pause_after(failures, outcome.retry_after), until
            if elapsed() + pause >= until:
                raise outcome
            log.info("%s; the next attempt is in %.1f s", outcome, pause)

    def outcome(self, reply: Reply | NoReply) -> Reply | UnavailableError:
        """Returns a success, or the 404 of an instance that found no state; the error if the request can be retried.

        Raises:
            ClientError: the response is another error.
        """
        if isinstance(reply, NoReply):
            if reply.is_closed:
                raise ClosedError(reply.reason)
            if reply.is_untrusted:
                raise self.not_an_instance(f"its certificate is not trusted ({reply.reason})")
            return UnavailableError(
                f"the instance at {self.address} does not answer ({reply.reason})", is_late=reply.is_late
            )
        status = reply.status
        if status in _UNAVAILABLE:
            retry_after = reply.headers.get(api.RETRY_AFTER, "")
            return UnavailableError(_detail(reply), status, float(retry_after) if retry_after.isdecimal() else None)
        if status in _NOT_ALLOWED:
            raise NotAllowedError(_detail(reply), status)
        if status >= _SERVER_ERRORS:
            raise ServerFailedError(_detail(reply), status)
        if status >= _ERRORS and not has_no_state(reply):
            raise InvalidCallError(_detail(reply), status)
        if status < _OK or _REDIRECTIONS <= status < _ERRORS:
            raise self.other(reply)
        return reply

    def content(self, reply: Reply, *names: str) -> dict[str, Any]:
        """Returns the JSON object in a success, with `Decimal` for every number that has a fraction.

        Args:
            names: fields that the object must have, which tell an instance from another server.

        Raises:
            NotAnInstanceError: the response is not such an object.
        """
        content = self.json(reply)
        if not isinstance(content, dict):
            raise self.other(reply, "a JSON object")
        for name in names:
            if name not in content:
                raise self.other(reply, f"'{name}'")
        return content

    def json(self, reply: Reply) -> Any:
        """Returns the JSON value in a success. Raises NotAnInstanceError."""
        try:
            return exact(reply.body)
        except ValueError:
            raise self.other(reply, "JSON") from None

    def header(self, reply: Reply, name: str) -> str:
        """Returns a header. Raises NotAnInstanceError if it is missing."""
        value = reply.headers.get(name)
        if value is None:
            raise self.other(reply, name)
        return value

    def other(self, reply: Reply, lacking: str = "") -> NotAnInstanceError:
        """Returns the error of a response that no instance gives."""
        without = f" without {lacking}" if lacking else ""
        return self.not_an_instance(f"it answers {reply.status} {reply.reason}{without}", reply.status)

    def not_an_instance(self, evidence: str, status: int | None = None) -> NotAnInstanceError:
        return NotAnInstanceError(f"the server at {self.address} is not an instance: {evidence}", status)


def has_no_state(reply: Reply) -> bool:
    """Whether an instance has looked for a key and found no state: a 404 for another reason has no position."""
    return reply.status == _NOT_FOUND and api.POSITION in reply.headers


def exact(text: bytes | str) -> Any:
    """Parses JSON; numbers with a fraction become `Decimal`. Raises ValueError."""
    return json.loads(text, parse_float=Decimal)


def pause_after(failures: int, retry_after: float | None = None) -> float:
    """Returns the seconds until the next attempt: `Retry-After`, and a back-off that is random, to spread clients."""
    longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(failures - 1, _MOST_DOUBLINGS))
    return (retry_after or 0.0) + random.uniform(longest / 2, longest)  # noqa: S311


def _detail(reply: Reply) -> str:
    """Returns what a problem says (RFC 9457); the start of any other body."""
    try:
        content = exact(reply.body)
    except ValueError:
        content = None
    if isinstance(content, dict) and "detail" in content:
        return str(content["detail"])
    return f"{reply.status}: {reply.body[:_SHOWN_CHARACTERS].decode(errors='replace')}"
