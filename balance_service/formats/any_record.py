"""Reads records of topics whose format is not declared, for people: a frame of the registry, or a JSON document."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from balance_service.avro.codec import FrameReader, UndecodableError
from balance_service.formats.json_document import MalformedJsonError, Number, parsed
from balance_service.model.json_view import AsWritten

if TYPE_CHECKING:
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.formats.format import Headers

_JSON_SPACE = b" \t\r\n"


class AnyRecordReader:
    """For one thread."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._frames = FrameReader(registry)

    def read(self, value: bytes, headers: Headers) -> tuple[str, Any]:
        """Returns the full name of a record, and its value. The name is empty if it is not known.

        Raises:
            UndecodableError: it is neither a frame that decodes, nor a document.
            RetriableError: the registry does not answer.
        """
        frame = self._frames.framed(value, headers)
        if frame is value and value.lstrip(_JSON_SPACE)[:1] in (b"{", b"["):
            try:
                return "", _shown(parsed(value))
            except MalformedJsonError as error:
                raise UndecodableError(str(error)) from None
        record = ""
        try:
            record = self._frames.record(frame)
            return record, self._frames.value(frame)
        except UndecodableError:
            # Confluent's serializer of JSON Schema has the same frame as that of Avro.
            with suppress(MalformedJsonError):
                return record, _shown(parsed(frame))
            raise


def _shown(value: Any) -> Any:
    """Returns a parsed document for `exact_json`, with its numbers as they are written."""
    match value:
        case dict():
            return {name: _shown(member) for name, member in value.items()}
        case list():
            return [_shown(member) for member in value]
        case Number():
            return AsWritten(value.text)
    return value
