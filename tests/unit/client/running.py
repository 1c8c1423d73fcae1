"""Runs a call by both clients, so that each test holds for both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from itertools import islice
from typing import Any, Protocol

from balance_service.client import AsyncClient, Client


class Run(Protocol):
    """Makes a call and returns its result; of an iterator, a list of its first `take` items."""

    def __call__(self, url: str, call: str, *arguments: Any, take: int | None = None, **more: Any) -> Any:
        """Args:
        more: named arguments of the call; `options` has those of the client.
        """


def blocking(url: str, call: str, *arguments: Any, take: int | None = None, **more: Any) -> Any:
    with Client(url, **more.pop("options", {})) as client:
        result = getattr(client, call)(*arguments, **more)
        if not isinstance(result, Generator):
            return result
        with closing(result):
            return [*islice(result, take)]


def awaited(url: str, call: str, *arguments: Any, take: int | None = None, **more: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(url, **more.pop("options", {})) as client:
            result = getattr(client, call)(*arguments, **more)
            if not isinstance(result, AsyncGenerator):
                return await result
            items = []
            async with aclosing(result):
                async for item in result:
                    items.append(item)
                    if len(items) == take:
                        break
            return items

    return asyncio.run(run())
