"""Answers to clients and peers, and errors as problem details (RFC 9457)."""

from __future__ import annotations

import http
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from aiohttp import web

from balance_service import api
from balance_service.errors import InvalidInputError
from balance_service.model.json_view import exact_json
from balance_service.structs import Struct

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

log = structlog.get_logger(__name__)

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
RETRY_AFTER_SECONDS = 1
# Without these, proxies and browsers store answers and serve a balance after it has changed.
ON_EVERY_ANSWER: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n" for s in http.HTTPStatus}
_DETAILS = {
    404: "there is nothing at this path; /openapi.json lists all paths",
    405: "this path does not accept this method; the Allow header names the methods it accepts",
}


def _record_of(value: object) -> dict[str, Any]:
    if isinstance(value, Struct):
        return value.record()
    raise TypeError(f"JSON cannot represent {value!r}")


compact_json = json.JSONEncoder(separators=(",", ":"), default=_record_of).encode
"""Encodes a value, which may hold dataclasses of the service, as JSON without white space."""


def by_partition(values: Mapping[int, object]) -> str:
    """Values of partitions as headers and ids of events list them: `0:12,1:40`."""
    return ",".join(f"{partition}:{value}" for partition, value in sorted(values.items()))


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.json_response(value, status=status, dumps=compact_json)


def exact_json_response(value: Any, status: int = 200) -> web.Response:
    """Returns a response with all digits of decimals; see `exact_json`."""
    return web.json_response(value, status=status, dumps=exact_json)


class SharedHeaders(dict[str, str]):
    """Headers that many answers have in common, with the lines that they are sent as."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self.lines = _lines(headers)


def _lines(headers: Mapping[str, str]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


_LINES_OF_EVERY_ANSWER = _lines(ON_EVERY_ANSWER)


class Answer(NamedTuple):
    """A response before it becomes aiohttp's. `headers` are those of this API."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str]

    def response(self) -> web.Response:
        headers = {**self.headers, "Content-Type": self.content_type, **ON_EVERY_ANSWER}
        return web.Response(status=self.status, body=self.body, headers=headers)

    def raw(self, more: bytes) -> bytes:
        """Returns the bytes to send; `more` holds further header lines."""
        headers = self.headers
        fields = headers.lines if isinstance(headers, SharedHeaders) else _lines(headers)
        head = (
            f"{_STATUS_LINES[self.status]}{fields}Content-Type: {self.content_type}\r\n"
            f"{_LINES_OF_EVERY_ANSWER}Content-Length: {len(self.body)}\r\n"
        )
        return b"".join((head.encode(), more, b"\r\n", self.body))


class Problem(Exception):
    """An error response. `detail` is one sentence for the client."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers[api.RETRY_AFTER] = str(retry_after)

    @property
    def body(self) -> dict[str, Any]:
        title = http.HTTPStatus(self.status).phrase
        return {"type": "about:blank", "title": title, "status": self.status, "detail": self.detail}

    def answer(self) -> Answer:
        body = compact_json(self.body).encode()
        return Answer(self.status, body, f"{PROBLEM_JSON}; charset=utf-8", self.headers)


MALFORMED = (ArithmeticError, AttributeError, InvalidInputError, LookupError, RecursionError, TypeError, ValueError)
"""The exceptions of parsing a peer's answer that does not have the form of this version."""


def malformed_answer() -> Problem:
    """503 for one of `MALFORMED`."""
    return unavailable("a peer's answer does not have the form of this version")


def unavailable(detail: str) -> Problem:
    """Returns a 503 that the client may retry."""
    return Problem(503, detail, retry_after=RETRY_AFTER_SECONDS)


def unexpected(path: str) -> Problem:
    """Logs the exception being handled and returns a 500."""
    log.exception("a request failed", path=path)
    return Problem(500, "an internal error occurred; the service's log has the details")


@web.middleware
async def problems(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turns every exception into a problem response; logs those that are not deliberate."""
    try:
        return await handler(request)
    except Problem as problem:
        return problem.answer().response()
    except InvalidInputError as error:
        return Problem(400, str(error)).answer().response()
    except web.HTTPException as error:
        kept = {name: value for name, value in error.headers.items() if name in ("Allow", "Location")}
        detail = _DETAILS.get(error.status) or error.text or error.reason
        return Problem(error.status, detail, headers=kept).answer().response()
    except Exception:
        return unexpected(request.path).answer().response()
