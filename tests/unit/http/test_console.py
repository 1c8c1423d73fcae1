"""The files of the console are open to all, small, revalidated by the browser, and free of inline code."""

from __future__ import annotations

import asyncio
import gzip
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from balance_service.engine import dead_letter
from balance_service.hosting import causes
from balance_service.http import console
from balance_service.http.app import HttpServer, make_health_app, routes_of
from balance_service.http.console.files import console_files, console_routes
from balance_service.http.openapi import document
from balance_service.http.operations import Operations
from balance_service.http.route import Handlers
from balance_service.http.streams.event_stream import Streams
from balance_service.process.package import resource
from balance_service.settings import load_settings
from tests.support.fakes import IdleInstance

PAGE = Path(str(console.__file__)).parent / "page"
MOST_BYTES = 80_000

pytestmark = pytest.mark.usefixtures("no_environment")


def answers(*paths: str, method: str = "GET", headers: dict[str, str] | None = None, **settings: Any) -> list[Any]:
    """Returns status, headers and body of requests to an instance with these settings."""

    async def ask() -> list[Any]:
        server = HttpServer(load_settings(http_host="127.0.0.1", http_port=0, **settings), IdleInstance(), ())
        await server.open()
        try:
            url = f"http://127.0.0.1:{server.port}"
            async with aiohttp.ClientSession(
                url, auto_decompress=False, skip_auto_headers=["Accept-Encoding"]
            ) as session:
                found = []
                for path in paths:
                    async with session.request(method, path, headers=headers or {}) as response:
                        found.append((response.status, response.headers, await response.read()))
                return found
        finally:
            await server.close()

    return asyncio.run(ask())


def test_the_page_and_its_parts_are_served_without_a_token_to_requests_of_any_site(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text('{"tokens": []}')
    settings: dict[str, Any] = {"tokens_file": tokens, "peer_secret": "a secret of all instances"}
    # A link on another site may lead to the page.
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}

    page, style, status = answers("/", "/console/style.css", "/api/status", headers=headers, **settings)

    assert (page[0], page[2]) == (200, (PAGE / "index.html").read_bytes())
    assert (style[0], style[2]) == (200, (PAGE / "style.css").read_bytes())
    assert status[0] == 403


@pytest.mark.shows("browser")
def test_every_file_forbids_inline_code_framing_and_guesses_of_its_type() -> None:
    files = [*console_files()]

    for file, (status, headers, _) in zip(files, answers(*(file.path for file in files)), strict=True):
        policy = headers["Content-Security-Policy"]
        assert status == 200, file.path
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Content-Type"] == file.media_type


def test_files_are_compressed_for_clients_that_accept_it() -> None:
    for accepted, packed in (
        ("gzip", True),
        ("br, gzip;q=0.5", True),
        ("GZIP", True),
        ("", False),
        ("gzip;q=0", False),
        ("gzip;q=0.0, br", False),
        ("x-gzip2", False),
    ):
        ((_, headers, body),) = answers("/console/main.js", headers={"Accept-Encoding": accepted})
        assert (headers.get("Content-Encoding") == "gzip") is packed, accepted
        assert (gzip.decompress(body) if packed else body) == (PAGE / "main.js").read_bytes()


def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    ((_, headers, _),) = answers("/console/main.js")
    ((status, again, body),) = answers("/console/main.js", headers={"If-None-Match": headers["ETag"]})
    ((other, _, _),) = answers("/console/main.js", headers={"If-None-Match": '"another"'})

    assert (headers["Cache-Control"], status, again["ETag"], body) == ("no-cache", 304, headers["ETag"], b"")
    assert other == 200


def test_the_page_is_answered_to_head_without_its_body() -> None:
    ((status, headers, body),) = answers("/", method="HEAD")

    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) == len((PAGE / "index.html").read_bytes())


def test_the_console_can_be_turned_off() -> None:
    assert [status for status, _, _ in answers("/", "/console/main.js", "/health/live", console=False)] == [
        404,
        404,
        200,
    ]


def test_the_files_are_no_part_of_the_api_and_no_probes() -> None:
    routes = routes_of((), (), console_routes())

    assert not [path for path in document(routes)["paths"] if path == "/" or path.startswith("/console/")]
    health = make_health_app(Handlers(Operations(IdleInstance(), Streams(10))), routes)
    assert {resource.canonical for resource in health.router.resources()} == {"/health/live", "/health/ready"}


def test_the_whole_page_is_small() -> None:
    assert sum(len(file.packed) for file in console_files()) <= MOST_BYTES


def test_the_page_names_every_module_so_that_a_browser_asks_for_all_at_once() -> None:
    page = (PAGE / "index.html").read_text()
    modules = {file.name for file in PAGE.glob("*.js")}

    assert set(re.findall(r'modulepreload" href="console/([^"]+)"', page)) == modules - {"main.js"}
    imported = {name for file in PAGE.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', file.read_text())}
    assert imported == modules - {"main.js"}


@pytest.mark.shows("browser")
def test_the_page_has_no_inline_code_or_style_and_refers_to_no_other_server() -> None:
    page = (PAGE / "index.html").read_text()

    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", page)
    for file in PAGE.iterdir():
        addresses = set(re.findall(r"https?://[^\"'\s]+", file.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name


def test_the_runbook_has_every_section_that_the_page_links_to() -> None:
    sections = set(re.findall(r"^## (\w+)$", resource("docs/runbook.md").read_text(), re.MULTILINE))
    texts = [file.read_text() for file in (*PAGE.glob("*.js"), *Path(str(causes.__file__)).parent.glob("*.py"))]
    linked = {name for text in texts for name in re.findall(r'"(Balance[A-Z]\w+)"', text)}

    assert len(linked) > 15
    assert linked - sections == set()


def test_the_runbook_says_what_to_do_for_every_cause() -> None:
    by_cause = resource("docs/runbook.md").read_text().partition("### By cause")[2].partition("\n## ")[0]
    known = {*dead_letter.FINAL, *dead_letter.TRANSIENT, *dead_letter.BLOCKING}

    assert {cause for cause in known if f"`{cause}`" not in by_cause} == set()
