"""A server that listens anew, as with a renewed certificate, cuts off nobody who has just been accepted."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from balance_service.http.app import serve
from balance_service.http.server.listening import bind

LINE = b"HTTP/1.1 200 OK\r\n"


async def answer(_request: web.Request) -> web.Response:
    return web.Response()


async def first_line(client: socket.socket) -> bytes:
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return await asyncio.wait_for(reader.readline(), 10)
    except (OSError, TimeoutError) as error:
        return repr(error).encode()
    finally:
        writer.close()


def test_who_was_accepted_just_before_is_answered() -> None:
    async def run() -> list[bytes]:
        app = web.Application()
        app.router.add_get("/", answer)
        listener = bind("127.0.0.1", 0)
        server = await serve(app, listener)
        lines = []
        for turns in range(40):
            # In the backlog: the loop accepts it some turns later, be it before, while or after another listens.
            client = socket.create_connection(listener.getsockname())
            client.setblocking(False)
            for _ in range(turns % 4):
                await asyncio.sleep(0)
            server.listen()
            lines.append(await first_line(client))
        await server.cleanup()
        return lines

    assert set(asyncio.run(run())) == {LINE}
