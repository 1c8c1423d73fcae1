"""Metrics are expensive to collect, so the instance collects them at most once a second."""

from __future__ import annotations

import asyncio
from typing import Any

from balance_service.http.operations import Operations
from tests.support.fakes import IdleInstance


class Counted(IdleInstance):
    """An instance whose metrics are the number of times that they were collected."""

    def __init__(self) -> None:
        super().__init__({})
        self.made = 0

    def metrics(self) -> bytes:
        self.made += 1
        return str(self.made).encode()


def test_metrics_are_collected_at_most_once_a_second() -> None:
    now = [100.0]
    operations, nothing = Operations(Counted(), lambda: now[0]), None

    def scraped(at: float) -> Any:
        now[0] = at
        return asyncio.run(operations.metrics(nothing)).body  # type: ignore[arg-type]  # the handler ignores the request

    assert [scraped(at) for at in (100.0, 100.5, 100.999, 101.0, 101.5, 109.0)] == [b"1", b"1", b"1", b"2", b"2", b"3"]
