"""Sends single records, and measures the time from acknowledgement to visibility."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from balance_service.errors import BalanceServiceError
from bench.load import PRODUCER

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.devtools.local.stack import LocalStack

_LOOK_EVERY_SECONDS = 0.001
_VISIBLE_SECONDS = 60.0


class Probes:
    """Sends records to one topic. For one thread."""

    def __init__(self, stack: LocalStack, topic: str) -> None:
        self._topic = topic
        self._producer = Producer(
            {"bootstrap.servers": stack.bootstrap_servers, "log_level": 0, **PRODUCER, "linger.ms": 0}
        )
        self._acknowledged = 0.0

    def seconds(self, key: bytes | None, frame: bytes, is_visible: Callable[[], bool]) -> float:
        """Send a record and poll every millisecond; returns the seconds from acknowledgement to visibility.

        Raises:
            BalanceServiceError: the record is not acknowledged, or not visible within a minute.
        """
        self._acknowledged = 0.0
        self._producer.produce(self._topic, frame, key, on_delivery=self._delivered)
        self._producer.flush(_VISIBLE_SECONDS)
        acknowledged = self._acknowledged
        if not acknowledged:
            raise BalanceServiceError("a probe was not acknowledged: is the broker still up?")
        while not is_visible():
            if time.monotonic() - acknowledged > _VISIBLE_SECONDS:
                raise BalanceServiceError(f"an event is not visible {_VISIBLE_SECONDS:.0f} s after it was acknowledged")
            time.sleep(_LOOK_EVERY_SECONDS)
        return time.monotonic() - acknowledged

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is None:
            self._acknowledged = time.monotonic()
