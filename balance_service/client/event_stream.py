"""A parser of server-sent events, by the WHATWG's specification (HTML, section 9.2).

It also returns comments. It ignores `retry`: the client has a back-off of its own.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_LINE_END = re.compile("\r\n|\r|\n")


class ServerEvent(NamedTuple):
    """An event. `id` is the last event ID as of this event, which may be that of an earlier one."""

    name: str
    data: str
    id: str


class Comment(NamedTuple):
    text: str


class EventParser:
    """Parses one connection's bytes. An event that has not ended is lost with the connection."""

    def __init__(self, last_event_id: str = "") -> None:
        """Args:
        last_event_id: of the previous connection.
        """
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_at_start = True
        self._ended_by_cr = False
        self._incomplete: list[str] = []
        self._name = ""
        self._data: list[str] = []
        self._id = last_event_id

    def feed(self, content: bytes) -> Iterator[ServerEvent | Comment]:
        """Parses the next bytes."""
        for line in self._lines(self._decoder.decode(content)):
            if line.startswith(":"):
                yield Comment(line[1:].strip())
            elif line:
                self._field(line)
            elif (event := self._event()) is not None:
                yield event

    def _lines(self, text: str) -> list[str]:
        """Returns the lines that end in the next part of the text."""
        if self._is_at_start and text:
            text, self._is_at_start = text.removeprefix("\ufeff"), False
        if self._ended_by_cr and text:
            # CR and LF are one line end, which two parts may share.
            text, self._ended_by_cr = text.removeprefix("\n"), False
        if not text:
            return []
        self._ended_by_cr = text.endswith("\r")
        *lines, rest = _LINE_END.split(text)
        if lines:
            lines[0] = "".join([*self._incomplete, lines[0]])
            self._incomplete = []
        self._incomplete.append(rest)
        return lines

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "event":
                self._name = value
            case "data":
                self._data.append(value)
            case "id" if "\0" not in value:
                self._id = value

    def _event(self) -> ServerEvent | None:
        name, data = self._name or "message", self._data
        self._name, self._data = "", []
        return ServerEvent(name, "\n".join(data), self._id) if data else None
