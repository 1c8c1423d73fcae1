"""Serves the files of the console, from memory.

They are plain HTML, CSS and JavaScript modules: the browser gets the files of the package, without a build step. They
hold no data and need no token. The page reads everything that it shows from the API, with the token that it is given.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from balance_service.http.route import OPERATIONS, Handlers, Route
from balance_service.process.package import resource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PAGE = Path(__file__).parent / "page"
_INDEX = "index.html"
_RUNBOOK = "docs/runbook.md"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".md": "text/markdown; charset=utf-8",
    ".svg": "image/svg+xml",
}
# `require-trusted-types-for`: no text becomes HTML or code by mistake.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS: Mapping[str, str] = {
    # A browser asks each time whether its copy is current: a page and modules of two versions never mix.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}
_GZIP = re.compile(r"(?:^|[\s,])gzip\s*(?:$|,|;\s*q=(?!0(?:\.0*)?\s*(?:$|,)))", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """A file of the console, with its path on the server."""

    path: str
    media_type: str
    content: bytes
    packed: bytes
    """The content, compressed by gzip."""
    tag: str
    """Identifies the content; the same for both encodings, so it is a weak ETag."""

    @staticmethod
    def of(path: str, file: Path) -> ConsoleFile:
        content = file.read_bytes()
        tag = hashlib.sha256(content).hexdigest()[:16]
        return ConsoleFile(path, _MEDIA_TYPES[file.suffix], content, gzip.compress(content, mtime=0), tag)

    def answer(self, request: web.Request) -> web.Response:
        """Answers with the file, or with 304 if the client has it."""
        headers = {**_HEADERS, "ETag": f'W/"{self.tag}"'}
        if any(known.value in (self.tag, "*") for known in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        headers["Content-Type"] = self.media_type
        if not _GZIP.search(request.headers.get(hdrs.ACCEPT_ENCODING, "")):
            return web.Response(body=self.content, headers=headers)
        headers["Content-Encoding"] = "gzip"
        return web.Response(body=self.packed, headers=headers)


def console_files() -> Iterator[ConsoleFile]:
    """Reads the files: the page at `/`, the others below `/console/`, and the runbook, which the page quotes."""
    yield ConsoleFile.of("/", _PAGE / _INDEX)
    for file in sorted(_PAGE.iterdir()):
        if file.name != _INDEX:
            yield ConsoleFile.of(f"/console/{file.name}", file)
    yield ConsoleFile.of("/console/runbook.md", resource(_RUNBOOK))


def console_routes() -> tuple[Route, ...]:
    """The routes of the console's files."""
    return tuple(_route(file) for file in console_files())


def _route(file: ConsoleFile) -> Route:
    async def handle(_handlers: Handlers, request: web.Request) -> web.Response:
        return file.answer(request)

    return Route(
        name=file.path,
        path=file.path,
        handle=handle,
        tag=OPERATIONS,
        scopes=frozenset(),
        is_file=True,
        summary="A file of the console",
        description="",
        responses=(),
    )
