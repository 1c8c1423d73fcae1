"""A peer that does with each query what it is told, and somebody who asks it."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from balance_service.errors import RetriableError
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import Peer as TrustedPeer
from tests.unit.http.peer_answers import answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence


PATH = "/api/customers.getBalance"
SECONDS = 5.0
# What a peer does when it is asked: sends bytes, waits for so many seconds, closes the connection (None).
Act = bytes | float | None


@dataclass
class Peer:
    """Answers each query with its customer, unless it is told to do something else with it."""

    acts: dict[str, Sequence[Act]] = field(default_factory=dict)
    asked: list[tuple[int, str]] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
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
            writer.close()


def own(customer: str) -> bytes:
    return answer(body=b'"%s"' % customer.encode())


@dataclass
class Asker:
    proxy: Proxy
    peer: Peer

    async def ask(self, customer: str, seconds: float = SECONDS, *, waits: bool = False) -> str:
        """The customer whose answer it got, or why it got none."""
        try:
            asked = TrustedPeer(self.peer.address, "i")
            got = await self.proxy.get(asked, PATH, {"customerId": customer}, "asker:1", seconds, waits=waits)
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
