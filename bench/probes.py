"""Sends single records, and measures the time from acknowledgement to visibility."""

from __future__ import annotations

import http.client
import random
import time
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import numpy as np
from confluent_kafka import Producer

from balance_service.errors import BalanceServiceError
from balance_service.kafka.partitioner import partition_of
from bench.events import customer_id, encoded
from bench.load import PRODUCER
from bench.sides import PATH, amount_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.devtools.local.stack import LocalStack
    from bench.load import Load
    from bench.sides import Instance

PAUSE_SECONDS = 0.05
_LOOK_EVERY_SECONDS = 0.001
_VISIBLE_SECONDS = 180.0
_ANSWER_SECONDS = 10.0
_PROBE_CENTS = 1


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
            BalanceServiceError: the record is not acknowledged, or not visible within three minutes.
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


class Prober:
    """Appends events for customers outside the load, one in each partition, and polls until they are visible."""

    def __init__(self, stack: LocalStack, load: Load, instance: Instance) -> None:
        self._load = load
        address = urlsplit(instance.url)
        self._http = http.client.HTTPConnection(str(address.hostname), address.port, timeout=_ANSWER_SECONDS)
        self._probes = Probes(stack, load.topic)
        # Numbers outside the load.
        beyond = range(load.customers, load.customers + 1_000)
        partitions = len(load.ends)
        self._customers = [
            next(n for n in beyond if partition_of(customer_id(n).encode(), partitions) == p) for p in range(partitions)
        ]
        self._added: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def customers(self) -> list[str]:
        """The customers of its events, by partition."""
        return [customer_id(number) for number in self._customers]

    def cents(self, partition: int) -> int:
        """The sum added for the customer of a partition."""
        return self._added[self._customers[partition]]

    def take(self, probes: int, pause: float = 0.0) -> list[float]:
        """Seconds from acknowledgement to visibility of each probe, with at least the pause between probes."""
        taken = []
        for number in range(probes):
            # Random, so that probes have no fixed phase relative to commits.
            time.sleep(pause + random.uniform(0, 2 * PAUSE_SECONDS))  # noqa: S311  (no secret)
            taken.append(self.once(number % len(self._customers)))
        return taken

    def once(self, partition: int = 0, form: Callable[[bytes], bytes] = bytes) -> float:
        """Seconds from acknowledgement to visibility of one event, sent at once.

        Args:
            form: frame by the load's schema → the frame that is sent.
        """
        customer = self._customers[partition]
        ((key, frame),) = encoded(self._load.header, np.array([customer]), np.array([_PROBE_CENTS]))
        self._added[customer] = added = self._added.get(customer, 0) + _PROBE_CENTS
        return self._probes.seconds(key, form(frame), lambda: self._cents(customer) == added)

    def _cents(self, customer: int) -> int | None:
        try:
            answer, body = self._get(customer)
        except (OSError, http.client.HTTPException):
            # The server can close an idle connection.
            self._http.close()
            answer, body = self._get(customer)
        return int(amount_of(body).scaleb(2)) if answer.status == http.client.OK else None

    def _get(self, customer: int) -> tuple[http.client.HTTPResponse, bytes]:
        self._http.request("GET", f"{PATH}?customerId={customer_id(customer)}")
        answer = self._http.getresponse()
        return answer, answer.read()
