"""Errors over HTTP. Source: RFC 9457, Problem Details for HTTP APIs."""

from __future__ import annotations

import http
import json
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

log = structlog.get_logger(__name__)

PROBLEM_JSON = "application/problem+json"
RETRY_AFTER_SECONDS = 1
_DETAILS = {
    404: "there is nothing at this path; /openapi.json lists what there is",
    405: "this path does not take this method; the header Allow names those it takes",
}


class Problem(Exception):
    """An answer that is an error. `detail` is one sentence for whoever asked."""

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
        self.retry_after = retry_after
        self.headers = headers or {}


def unavailable(detail: str) -> Problem:
    """503: nobody can answer now; ask again."""
    return Problem(503, detail, retry_after=RETRY_AFTER_SECONDS)


def unexpected(path: str) -> Problem:
    """500 for the exception that is being handled, which nobody expected: it is logged."""
    log.exception("a request failed", path=path)
    return Problem(500, "something went wrong here; the log says what")


def response(problem: Problem, headers: dict[str, str] | None = None) -> web.Response:
    """The problem as an HTTP response."""
    extra = {**headers_of(problem), **(headers or {})}
    return web.Response(status=problem.status, text=body_of(problem), content_type=PROBLEM_JSON, headers=extra)


def headers_of(problem: Problem) -> dict[str, str]:
    """The problem's headers, other than those that say what the body is."""
    if problem.retry_after is None:
        return dict(problem.headers)
    return {**problem.headers, "Retry-After": str(problem.retry_after)}


def body_of(problem: Problem) -> str:
    """The problem as JSON."""
    body = {
        "type": "about:blank",
        "title": http.HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
    }
    return json.dumps(body)


@web.middleware
async def problems(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error as a problem; what nobody expected is logged and answered 500."""
    try:
        return await handler(request)
    except Problem as problem:
        return response(problem)
    except web.HTTPException as error:
        kept = {name: value for name, value in error.headers.items() if name in ("Allow", "Location")}
        detail = _DETAILS.get(error.status) or error.text or error.reason
        return response(Problem(error.status, detail), kept)
    except Exception:
        return response(unexpected(request.path))
