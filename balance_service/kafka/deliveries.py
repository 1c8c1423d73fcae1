"""Waiting for what becomes of the records that a producer was given."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from confluent_kafka import Producer

# A poll of 0.2 s or more takes all of its time, whatever it has met.
_POLL_SECONDS = 0.1


def undelivered(producer: Producer, seconds: float) -> int:
    """Wait, within a bound, until each record is delivered or refused; returns how many are neither.

    Not by `flush`, which goes on with reports once a fatal error is raised: out comes a SystemError.

    Raises:
        KafkaException: the producer has failed for ever. It is raised once, by whichever call polls first; reports that
            are left come with the next.
    """
    deadline = time.monotonic() + seconds
    while (unsent := len(producer)) and time.monotonic() < deadline:
        producer.poll(_POLL_SECONDS)
    return unsent
