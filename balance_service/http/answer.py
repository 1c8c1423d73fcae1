"""An answer to a client or a peer, before it is aiohttp's."""

from __future__ import annotations

import http
import json
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Mapping

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
PROBLEM = f"{PROBLEM_JSON}; charset=utf-8"
# Proxies and browsers store answers without these: a balance would be served after it has changed.
ON_EVERY_ANSWER: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}
_ON_EVERY_ANSWER = "".join([f"{name}: {value}\r\n" for name, value in ON_EVERY_ANSWER.items()])
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n" for s in http.HTTPStatus}


compact_json = json.JSONEncoder(separators=(",", ":")).encode
"""A value as JSON without white space."""


class Answer(NamedTuple):
    """What is answered, from the local store or by a peer; `headers` are those of this API."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str]

    def response(self) -> web.Response:
        """The same as aiohttp's."""
        headers = {**self.headers, "Content-Type": self.content_type, **ON_EVERY_ANSWER}
        return web.Response(status=self.status, body=self.body, headers=headers)

    def raw(self, more: bytes) -> bytes:
        """The same as it goes over the wire; `more` is further lines of its head."""
        fields = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items()])
        head = (
            f"{_STATUS_LINES[self.status]}{fields}Content-Type: {self.content_type}\r\n"
            f"{_ON_EVERY_ANSWER}Content-Length: {len(self.body)}\r\n"
        )
        return b"".join((head.encode(), more, b"\r\n", self.body))
