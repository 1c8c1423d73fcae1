"""Health, metrics and status: what people and orchestrators ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from balance_service.http.answer import compact_json
from balance_service.http.server.problems import RETRY_AFTER_SECONDS, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Operable(Protocol):
    """What an instance tells about itself. Called on the event loop's thread; answers without waiting."""

    def unready(self) -> Sequence[str]:
        """Why it should get no queries now; empty if it should."""

    def problems(self) -> Sequence[str]:
        """What is wrong with what it hosts, whether or not it can answer queries."""

    def status(self) -> Mapping[str, Any]:
        """Its view of itself and of the others, as JSON."""

    def metrics(self) -> bytes:
        """Prometheus' text format."""


class Operations:
    """Answers operators."""

    def __init__(self, instance: Operable) -> None:
        self._instance = instance

    async def live(self, _request: web.Request) -> web.Response:
        """200 while the process answers at all."""
        return web.json_response({"status": "live"}, dumps=compact_json)

    async def ready(self, _request: web.Request) -> web.Response:
        """200 when queries are welcome, with what is wrong besides, else 503 with the reasons."""
        reasons = list(self._instance.unready())
        if not reasons:
            ready = {"status": "ready", "problems": list(self._instance.problems())}
            return web.json_response(ready, dumps=compact_json)
        raise Problem(503, "; ".join(reasons), retry_after=RETRY_AFTER_SECONDS)

    async def metrics(self, _request: web.Request) -> web.Response:
        """Metrics for Prometheus."""
        return web.Response(
            body=self._instance.metrics(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def status(self, _request: web.Request) -> web.Response:
        """Instances, partitions, roles, epochs, positions, lags, states."""
        return web.json_response(self._instance.status(), dumps=compact_json)
