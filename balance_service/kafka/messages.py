"""Messages of a client: what has come, and what each is sure to have, though its type does not say so."""

from __future__ import annotations

import base64
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from balance_service.errors import FatalError, PoisonRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from confluent_kafka import Message

    Headers = Sequence[tuple[str, bytes | None]]

# Not by a call that the interpreter makes faster once it is frequent: that would not see that the client has failed.
_headers_of: Callable[[Message], Headers | None] = methodcaller("headers")


def headers_of(message: Message) -> Headers:
    """A record's headers. To be asked once of a message: the client's second answer is not what the record has.

    Raises:
        PoisonRecordError: a name is no UTF-8, as programs in C may write; the client fails to read any of them then.
    """
    try:
        return _headers_of(message) or ()
    except SystemError as error:
        raise PoisonRecordError("header-malformed", "a record has a header whose name is no UTF-8") from error


def shown_headers(message: Message) -> list[dict[str, Any]] | None:
    """A record's headers for people, in order and with every repetition; None if the client cannot read them.

    Each has its `name`, and its value as `text_or_base64` gives it. To be asked once of a message, as `headers_of`.
    """
    try:
        headers = headers_of(message)
    except PoisonRecordError:
        return None
    return [{"name": name, **text_or_base64("value", content)} for name, content in headers]


def text_or_base64(name: str, content: bytes | str | None) -> dict[str, Any]:
    """Content under its name where it is UTF-8 or missing, else base64 under a name with `Base64` at its end."""
    if not isinstance(content, bytes):
        return {name: content}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {f"{name}Base64": base64.b64encode(content).decode()}


def place_of(message: Message) -> tuple[int, int]:
    """Partition and offset of a record that was delivered."""
    partition, offset = message.partition(), message.offset()
    if partition is None or offset is None:
        raise FatalError("the broker delivered a record without a partition or an offset")
    return partition, offset


def offset_of(message: Message) -> int:
    """The offset of a record that was delivered."""
    return place_of(message)[1]
