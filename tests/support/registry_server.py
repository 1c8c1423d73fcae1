"""A real HTTP server in the place of the schema registry."""

from __future__ import annotations

from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from balance_service.avro.registry import SchemaRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class RegistryReply(NamedTuple):
    """A reply; its body is sent part by part, and ends with the connection."""

    status: int
    parts: Iterable[bytes]
    headers: Mapping[str, str]


@contextmanager
def registry_that(replies: Callable[[str], RegistryReply]) -> Iterator[SchemaRegistry]:
    """A registry's client, and a server that gives the reply to each path; it has no query."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply = replies(self.path.partition("?")[0])
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for part in reply.parts:
                    self.wfile.write(part)
            except ConnectionError:
                pass

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with closing(SchemaRegistry(f"http://127.0.0.1:{server.server_port}")) as registry:
                yield registry
        finally:
            server.shutdown()
            thread.join()
