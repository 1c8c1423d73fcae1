"""A real HTTP server on a local port that replies as a test says: errors, dropped connections, event streams."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

BY_KEY = {
    "Balance-Application-Server": "localhost:5051",
    "Balance-Role": "active",
    "Balance-Position": "1:4",
    "Balance-Epoch": "3",
    "Balance-Lag": "0",
}
OF_ALL = {
    "Balance-Application-Server": "localhost:5051",
    "Balance-Role": "0:active,1:standby",
    "Balance-Position": "0:12,1:40",
    "Balance-Epoch": "0:3,1:5",
    "Balance-Lag": "0:0",
}


@dataclass(frozen=True)
class Received:
    """A request as it arrived."""

    method: str
    target: str
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes
    at: float
    port: int
    """Of the client, which tells its connections apart."""

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_float=str, parse_int=str)


@dataclass(frozen=True)
class Scripted:
    """A reply. A body of several parts is sent part by part; a number among them is a pause in seconds."""

    status: int = 200
    body: bytes | Iterable[bytes | float] = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class Drop:
    """Closes the connection without a reply."""


Reply = Scripted | Drop


def answer(value: str, status: int = 200, **headers: str) -> Scripted:
    """JSON with the headers of an answer for one key; underscores in names of headers are hyphens."""
    more = {name.replace("_", "-"): text for name, text in headers.items()}
    return Scripted(status, value.encode(), {**BY_KEY, **more})


def problem(status: int, detail: str, **headers: str) -> Scripted:
    more = {name.replace("_", "-"): text for name, text in headers.items()}
    return Scripted(status, json.dumps({"status": status, "detail": detail}).encode(), more)


def stream(*parts: bytes | float) -> Scripted:
    """An event stream that ends after its parts."""
    return Scripted(200, parts, {"Content-Type": "text/event-stream"})


class ScriptedServer:
    """Gives the replies in order; repeats the last one."""

    def __init__(self, replies: Iterable[Reply | Callable[[Received], Reply]]) -> None:
        self._replies = list(replies)
        self._lock = threading.Lock()
        self.received: list[Received] = []

    def next_reply(self, request: Received) -> Reply:
        with self._lock:
            self.received.append(request)
            reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        return reply(request) if callable(reply) else reply


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: ScriptedServer

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length", "0"))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Received(
            self.command, self.path, headers, self.rfile.read(size), time.monotonic(), self.client_address[1]
        )
        reply = self.script.next_reply(request)
        if isinstance(reply, Drop):
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if isinstance(reply.body, bytes):
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)
            return
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for part in reply.body:
            if isinstance(part, bytes):
                self.wfile.write(part)
            else:
                time.sleep(part)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignores clients that close a stream."""


@contextmanager
def scripted(*replies: Reply | Callable[[Received], Reply]) -> Iterator[tuple[str, list[Received]]]:
    """The URL of a server with these replies, and the requests that it has received."""
    script = ScriptedServer(replies)
    server = _Quiet(("127.0.0.1", 0), type("Handler", (_Handler,), {"script": script}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", script.received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
