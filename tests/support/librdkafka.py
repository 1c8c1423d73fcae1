"""The library inside confluent-kafka's wheel, for what Python is not given of it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import confluent_kafka
import pytest


def librdkafka() -> ctypes.CDLL:
    """It, as it is loaded."""
    libraries = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    found = next(iter(libraries.glob("librdkafka*.so*")), None)
    if found is None:
        pytest.skip("this confluent-kafka is not a wheel with its own librdkafka")
    return ctypes.CDLL(str(found))
