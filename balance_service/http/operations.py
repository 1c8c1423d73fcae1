"""Health, metrics and status: what people and orchestrators ask."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from balance_service.http.answer import RETRY_AFTER_SECONDS, Problem, compact_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_METRICS_SECONDS = 1.0


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

    def __init__(self, instance: Operable, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        clock: seconds.
        """
        self._instance = instance
        self._clock = clock
        self._metrics = b""
        self._metrics_at = float("-inf")

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
        """Metrics for Prometheus, made at most once a second: that takes the event loop's time."""
        if self._clock() - self._metrics_at >= _METRICS_SECONDS:
            self._metrics, self._metrics_at = self._instance.metrics(), self._clock()
        return web.Response(
            body=self._metrics,
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def status(self, _request: web.Request) -> web.Response:
        """Instances, partitions, roles, epochs, positions, lags, states."""
        return web.json_response(self._instance.status(), dumps=compact_json)
