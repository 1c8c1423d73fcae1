"""A peer that misbehaves on demand, its answers as bytes, and a client of it."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from balance_service.errors import RetriableError
from balance_service.http.peers.connections import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
)
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import Peer as TrustedPeer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence


BODY = b'{"amount": 12.34}'


def answer(*lines: str, status: str = "HTTP/1.1 200 OK", body: bytes = BODY) -> bytes:
    usual = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    return "".join(f"{line}\r\n" for line in (status, *(lines or usual), "")).encode("latin-1") + body


TYPE, LENGTH = "Content-Type: application/json", "Content-Length: 17"
REFUSED = {
    "bytes after it": (answer() + b"x", "more bytes"),
    "another answer after it": (answer() + answer(), "more bytes"),
    "a length that is too small": (answer(TYPE, "Content-Length: 16"), "more bytes"),
    "no length": (answer(TYPE), "the number of bytes"),
    "a length that is none": (answer(TYPE, "Content-Length: +17"), "the number of bytes"),
    "a list of lengths": (answer(TYPE, "Content-Length: 17, 17"), "the number of bytes"),
    "a length of many digits": (answer(TYPE, f"Content-Length: {'9' * 5000}"), "the number of bytes"),
    "two lengths": (answer(TYPE, LENGTH, "Content-Length: 3"), "two headers content-length"),
    "the same length twice": (answer(TYPE, LENGTH, "content-LENGTH: 17"), "two headers content-length"),
    "chunks": (answer(TYPE, "Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\n\r\n"), "the number of bytes"),
    "chunks and a length": (answer(TYPE, LENGTH, "Transfer-Encoding: chunked"), "the number of bytes"),
    "an encoding": (answer(TYPE, LENGTH, "Content-Encoding: gzip"), "answered 200"),
    "an interim answer": (b"HTTP/1.1 100 Continue\r\n\r\n" + answer(), "answered 100"),
    "an interim answer with a length": (answer(status="HTTP/1.1 103 Early Hints"), "answered 103"),
    "a redirect": (answer(TYPE, LENGTH, "Location: /", status="HTTP/1.1 302 Found"), "answered 302"),
    "nothing": (answer(status="HTTP/1.1 204 No Content", body=b""), "answered 204"),
    "not modified": (answer(status="HTTP/1.1 304 Not Modified"), "answered 304"),
    "another type": (answer("Content-Type: text/html", LENGTH), "answered 200 with text/html"),
    "no type": (answer(LENGTH), "answered 200 with none"),
    "two types": (answer(TYPE, LENGTH, "Content-Type: text/html"), "two headers content-type"),
    "HTTP/1.0": (answer(status="HTTP/1.0 200 OK"), "HTTP/1.1"),
    "HTTP/2": (b"\0\0\x12\x04\0\0\0\0\0", "HTTP/1.1"),
    "TLS": (b"\x15\x03\x03\0\x02\x02\x0a", "HTTP/1.1"),
    "a status of four digits": (answer(status="HTTP/1.1 2000 OK"), "HTTP/1.1"),
    "an empty line before it": (b"\r\n" + answer(), "HTTP/1.1"),
    "a folded line": (answer(TYPE, LENGTH, "X: y", " Content-Length: 3"), "not HTTP's"),
    "a space before the colon": (answer(TYPE, "Content-Length : 17", LENGTH), "not HTTP's"),
    "a bare line feed": (answer(TYPE, "X: y\nContent-Length: 3", LENGTH), "not HTTP's"),
    "a bare carriage return": (answer(TYPE, "X: y\rContent-Length: 3", LENGTH), "not HTTP's"),
    "a line without a colon": (answer(TYPE, LENGTH, "X"), "not HTTP's"),
    "a NUL": (answer(TYPE, LENGTH, "X: \0"), "not HTTP's"),
    "a long body": (answer(body=b" " * (MAX_BODY_BYTES + 1)), f"more than {MAX_BODY_BYTES} bytes"),
    "a long head": (answer(TYPE, LENGTH, f"X: {'x' * MAX_HEAD_BYTES}"), "a head of more than"),
    "a head without end": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * MAX_HEAD_BYTES, "a head of more than"),
    "a position given twice": (
        answer(TYPE, LENGTH, "Balance-Position: 0:1", "Balance-Position: 0:2"),
        "two headers balance-position",
    ),
}


PATH = "/api/customers.getBalance"
SECONDS = 5.0
# Sends bytes, waits for a number of seconds, or closes the connection (None).
Act = bytes | float | None


@dataclass
class Peer:
    """Answers each query with its customer, unless `acts` has other actions for it."""

    acts: dict[str, Sequence[Act]] = field(default_factory=dict)
    asked: list[tuple[int, str]] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    port: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close_connections(self) -> None:
        for writer in self.writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.writers.append(writer)
        number = self.connections
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(request)
                found = re.match(rb"GET \S+customerId=(\S+) HTTP/1\.1\r\n", request)
                assert found is not None
                customer = found[1].decode()
                self.asked.append((number, customer))
                for act in self.acts.pop(customer, [own(customer)]):
                    if isinstance(act, bytes):
                        writer.write(act)
                        await writer.drain()
                    elif act is None:
                        return
                    else:
                        await asyncio.sleep(act)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.open -= 1
            writer.close()


def own(customer: str) -> bytes:
    return answer(body=b'"%s"' % customer.encode())


@dataclass
class Asker:
    proxy: Proxy
    peer: Peer

    async def ask(self, customer: str, seconds: float = SECONDS, *, client: str = "", waits: bool = False) -> str:
        """Returns the customer in the answer, or the reason for the failure."""
        try:
            asked = TrustedPeer(self.peer.address, "i")
            got = await self.proxy.get(
                asked, PATH, {"customerId": customer}, "asker:1", seconds, client=client, waits=waits
            )
        except RetriableError as error:
            return str(error)
        return got.body.decode().strip('"')


@asynccontextmanager
async def asking(peer: Peer) -> AsyncIterator[Asker]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1")
    peer.port = server.sockets[0].getsockname()[1]
    proxy = Proxy()
    try:
        yield Asker(proxy, peer)
    finally:
        await proxy.close()
        server.close()
        await asyncio.sleep(0.01)


def run(peer: Peer, steps: Callable[[Asker], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asking(peer) as asker:
            await steps(asker)

    asyncio.run(main())
