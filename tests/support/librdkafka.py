"""The library inside confluent-kafka's wheel, for what Python is not given of it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

# Of rdkafka.h.
_PRODUCER = 0
_END, _TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _HEADERS = 0, 1, 3, 4, 5, 7, 10
_COPY = 2
_FLUSH_MS = 20_000
# In what `confluent_kafka` keeps of a client, the handle of librdkafka comes first.
_HANDLE_AT = object.__basicsize__


def librdkafka() -> ctypes.CDLL:
    """It, as it is loaded."""
    libraries = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    found = next(iter(libraries.glob("librdkafka*.so*")), None)
    if found is None:
        pytest.skip("this confluent-kafka is not a wheel with its own librdkafka")
    return ctypes.CDLL(str(found))


def fail_for_ever(producer: Producer) -> None:
    """Plant a fatal error, and see that it is one."""
    handle = ctypes.c_void_p.from_address(id(producer) + _HANDLE_AT)
    assert librdkafka().rd_kafka_test_fatal_error(handle, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, b"planted") == 0
    with pytest.raises(KafkaException) as refused:
        producer.produce("any", b"value", b"key")
    assert refused.value.args[0].code() == KafkaError._FATAL


def append(bootstrap_servers: str, topic: str, partition: int, key: bytes, value: bytes, header_name: bytes) -> None:
    """Append a record with a header of any name, as only a program in C can."""
    library = librdkafka()
    for call in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_headers_new"):
        getattr(library, call).restype = ctypes.c_void_p
    text, size = ctypes.create_string_buffer(512), ctypes.c_size_t
    config = ctypes.c_void_p(library.rd_kafka_conf_new())
    library.rd_kafka_conf_set(config, b"bootstrap.servers", bootstrap_servers.encode(), text, size(512))
    producer = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, config, text, size(512)))
    headers = ctypes.c_void_p(library.rd_kafka_headers_new(size(1)))
    library.rd_kafka_header_add(headers, header_name, ctypes.c_ssize_t(len(header_name)), b"v", ctypes.c_ssize_t(1))
    failed = library.rd_kafka_producev(
        producer,
        *(_TOPIC, ctypes.c_char_p(topic.encode())),
        *(_PARTITION, ctypes.c_int32(partition)),
        *(_KEY, ctypes.c_char_p(key), size(len(key))),
        *(_VALUE, ctypes.c_char_p(value), size(len(value))),
        *(_FLAGS, _COPY),
        *(_HEADERS, headers),
        _END,
    )
    assert failed == 0, f"librdkafka refuses the record with error {failed}"
    assert library.rd_kafka_flush(producer, _FLUSH_MS) == 0, "the record is not written"
    library.rd_kafka_destroy(producer)
