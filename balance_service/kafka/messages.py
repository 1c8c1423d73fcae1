"""Typed access to consumed messages."""

from __future__ import annotations

import base64
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from balance_service.errors import FatalError, PoisonRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from confluent_kafka import Message

    Headers = Sequence[tuple[str, bytes | None]]

IDEMPOTENCY_HEADER = "idempotency-key"
"""Name of the record header that identifies an event. Of several events with one header value and one key, the service
applies the first."""

TRACEPARENT_HEADER = "traceparent"
"""The header of a request or of a Kafka record that names its parent span. Source: W3C Trace Context."""

# A direct call that the interpreter has specialized would not notice that the client raised SystemError.
_headers_of: Callable[[Message], Headers | None] = methodcaller("headers")


def headers_of(message: Message) -> Headers:
    """A record's headers. Call this once per message: the client's second answer is wrong.

    Raises:
        PoisonRecordError: a header's name is not UTF-8, so that the client cannot read any header of the record.
    """
    try:
        return _headers_of(message) or ()
    except SystemError as error:
        raise PoisonRecordError("header-malformed", "a record has a header whose name is not UTF-8") from error


def readable_headers(message: Message) -> Headers | None:
    """A record's headers; None if the client cannot read them. Call this once per message, as `headers_of`."""
    try:
        return headers_of(message)
    except PoisonRecordError:
        return None


def shown_headers(headers: Headers | None) -> list[dict[str, Any]] | None:
    """Headers as JSON, in order and with every repetition; None for None.

    Each has a `name` and the value in the form of `text_or_base64`.
    """
    if headers is None:
        return None
    return [{"name": name, **text_or_base64("value", content)} for name, content in headers]


def text_or_base64(name: str, content: bytes | str | None) -> dict[str, Any]:
    """Returns `{name: text}` for UTF-8 or None, otherwise `{nameBase64: text}`."""
    if not isinstance(content, bytes):
        return {name: content}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {f"{name}Base64": base64.b64encode(content).decode()}


def place_of(message: Message) -> tuple[int, int]:
    """Partition and offset of a consumed record."""
    partition, offset = message.partition(), message.offset()
    if partition is None or offset is None:
        raise FatalError("the broker delivered a record without a partition or an offset")
    return partition, offset


def offset_of(message: Message) -> int:
    return place_of(message)[1]
