"""Errors over HTTP. Source: RFC 9457, Problem Details for HTTP APIs."""

from __future__ import annotations

import http
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web

from balance_service.errors import InvalidInputError
from balance_service.http.answer import PROBLEM, Answer, compact_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

log = structlog.get_logger(__name__)

RETRY_AFTER_SECONDS = 1
_DETAILS = {
    404: "there is nothing at this path; /openapi.json lists what there is",
    405: "this path does not take this method; the header Allow names those it takes",
}


class Problem(Exception):
    """An answer that is an error. `detail` is one sentence for the client."""

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
            self.headers["Retry-After"] = str(retry_after)

    @property
    def body(self) -> dict[str, Any]:
        """What is said of it, for JSON."""
        title = http.HTTPStatus(self.status).phrase
        return {"type": "about:blank", "title": title, "status": self.status, "detail": self.detail}

    def answer(self) -> Answer:
        """It as an answer."""
        return Answer(self.status, compact_json(self.body).encode(), PROBLEM, self.headers)


def unavailable(detail: str) -> Problem:
    """503: nobody can answer now; ask again."""
    return Problem(503, detail, retry_after=RETRY_AFTER_SECONDS)


def unexpected(path: str) -> Problem:
    """500 for the exception that is being handled, which nobody expected: it is logged."""
    log.exception("a request failed", path=path)
    return Problem(500, "something went wrong here; the log says what")


@web.middleware
async def problems(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error as a problem; what nobody expected is logged and answered 500."""
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
