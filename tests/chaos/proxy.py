"""A proxy in front of the broker that stops forwarding right after a request to end a transaction.

It parses just enough of Kafka's protocol: four bytes of length, two of api key, the rest. After it has forwarded an
EndTxn request, it forwards nothing on any connection for the given time, then closes all connections and forwards
again. So the broker has committed, and the client cannot know.

Runs an event loop in its own thread; `silence` and `stop` may be called from any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from typing import Self

HOST = "127.0.0.1"
_END_TXN = 26
_CHUNK = 1 << 16


class SilentProxy:
    """Forwards `port` to `upstream_port`."""

    def __init__(self, port: int, upstream_port: int) -> None:
        self.port = port
        self._upstream_port = upstream_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="silent-proxy", daemon=True)
        self._started = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._speaking = asyncio.Event()
        self._armed: float | None = None
        self._struck = threading.Event()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def silence(self, seconds: float, patience_seconds: float) -> bool:
        """Waits for an EndTxn request and the end of the silence that follows it.

        Returns:
            Whether there was such a request within `patience_seconds`.
        """
        self._struck.clear()
        self._over.clear()
        self._armed = seconds
        if not self._struck.wait(patience_seconds):
            self._armed = None
            return False
        assert self._over.wait(seconds + 10)
        return True

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._speaking.set()
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, HOST, self.port))
        self._started.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._shut_down())
        self._loop.close()

    async def _shut_down(self) -> None:
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_all()
        await asyncio.sleep(0.05)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        mine = [writer]
        self._writers.add(writer)
        try:
            await self._speaking.wait()
            up_reader, up_writer = await asyncio.open_connection(HOST, self._upstream_port)
            mine.append(up_writer)
            self._writers.add(up_writer)
            await asyncio.gather(self._requests(reader, up_writer), self._replies(up_reader, writer))
        except (OSError, EOFError):
            pass
        finally:
            for each in mine:
                each.close()
                self._writers.discard(each)
            self._tasks.discard(task)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = await reader.readexactly(6)
                size, api_key = struct.unpack(">ih", head)
                body = await reader.readexactly(size - 2)
                await self._speaking.wait()
                writer.write(head + body)
                if api_key == _END_TXN and self._armed is not None:
                    self._fall_silent()
                await writer.drain()
        writer.close()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                await self._speaking.wait()
                writer.write(chunk)
                await writer.drain()
        writer.close()

    def _fall_silent(self) -> None:
        assert self._armed is not None
        seconds, self._armed = self._armed, None
        self._speaking.clear()
        self._struck.set()
        self._loop.call_later(seconds, self._speak)

    def _speak(self) -> None:
        # Closing the connections drops the data held back.
        self._close_all()
        self._speaking.set()
        self._over.set()

    def _close_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
