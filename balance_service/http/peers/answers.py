"""Answers of peers, as they come over the wire: the one form in which instances answer, or refused.

A connection to a peer is used for one query after the other. If it were ever unclear where an answer ends, the next
query would be given another's. So an answer has one Content-Length, and not a byte follows it. Everything that leaves a
choice (chunks, an end by closing, interim answers, folded lines, lengths given twice) is refused: no instance sends it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from balance_service.http.answer import PROBLEM_JSON, Answer

if TYPE_CHECKING:
    from collections.abc import Mapping

# Headers may have a value for each of a thousand partitions; a page of entries comes to a mebibyte.
MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = (1 << 20) + (64 << 10)
# All that an instance may say to a peer; anything else is not from one of us.
_STATUSES = frozenset({200, 400, 401, 403, 404, 421, 429, 500, 503})
_CONTENT_TYPES = frozenset({"application/json", PROBLEM_JSON})
PASSED_ON = (
    "Balance-Application-Server",
    "Balance-Role",
    "Balance-Position",
    "Balance-Lag",
    "Balance-Epoch",
    "Retry-After",
)
"""The headers of an answer that are read; its proof aside."""
_PASSED_ON = {name.lower(): name for name in PASSED_ON}
_OF_THE_FORM = frozenset({"connection", "content-encoding", "content-length", "content-type", "transfer-encoding"})
_KNOWN = _OF_THE_FORM | _PASSED_ON.keys()

_BEGIN = b"HTTP/1.1 "
_END_OF_HEAD = b"\r\n\r\n"
_STATUS_LINE = re.compile(rb"HTTP/1\.1 (?P<status>[1-9][0-9]{2}) [ -~]*")
_FIELD = re.compile(rb"(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(?P<value>[\t -~\x80-\xff]*)")
_PROOF = re.compile(rb"\r\n(?i:Balance-Proof):[ \t]*(?P<proof>[0-9a-f]{64})[ \t]*(?=\r\n|\Z)")
_LENGTH = re.compile(r"[0-9]{1,9}")
_PASSED_ON_VALUE = re.compile(r"[!-~](?:[ -~]{0,15998}[!-~])?")


class UnexpectedAnswerError(Exception):
    """What came is no answer of an instance; the message goes on after "the owner at … ". Its connection is lost."""


class Received(NamedTuple):
    """An answer, and what came with it as the proof that a peer has given it; empty if nothing did."""

    answer: Answer
    proof: str


@dataclass(frozen=True, slots=True)
class _Head:
    status: int
    length: int
    content_type: str
    headers: Mapping[str, str]
    is_last: bool


class AnswerReader:
    """Reads one answer after the other, each from its first byte to its last, cut down to what may be passed on."""

    def __init__(self) -> None:
        self.is_last = False
        """Whether the answer that was read is the last: nothing more is to be asked there."""
        self._received = b""
        self._head: _Head | None = None
        self._proof = ""

    @property
    def is_within(self) -> bool:
        """Whether some of an answer has come, and not all."""
        return bool(self._received) or self._head is not None

    def feed(self, data: bytes) -> Received | None:
        """Take some bytes; returns the answer that they complete, if they do.

        Raises:
            UnexpectedAnswerError: this is not an answer of an instance, or more than that.
        """
        received = self._received = self._received + data if self._received else data
        head = self._head
        if head is None:
            end = received.find(_END_OF_HEAD, 0, MAX_HEAD_BYTES)
            if end < 0:
                _check_begin(received)
                return None
            told, self._proof = _cut(received[:end])
            head = self._head = _head(told)
            received = self._received = received[end + len(_END_OF_HEAD) :]
        if len(received) < head.length:
            return None
        if len(received) > head.length:
            raise UnexpectedAnswerError("answered with more bytes than it announced")
        self._received, self._head, self.is_last = b"", None, head.is_last
        return Received(Answer(head.status, received, head.content_type, head.headers), self._proof)


def _check_begin(received: bytes) -> None:
    if received[: len(_BEGIN)] != _BEGIN[: len(received)]:
        raise UnexpectedAnswerError("answered with something other than HTTP/1.1")
    if len(received) >= MAX_HEAD_BYTES:
        raise UnexpectedAnswerError(f"answered with a head of more than {MAX_HEAD_BYTES} bytes")


def _cut(head: bytes) -> tuple[bytes, str]:
    """A head without its proof, which is another one each time, and the proof."""
    found = _PROOF.search(head)
    return (head, "") if found is None else (head[: found.start()] + head[found.end() :], found["proof"].decode())


# Between two commits a peer's heads are the same for a second.
@lru_cache(maxsize=256)
def _head(head: bytes) -> _Head:
    first, *lines = head.split(b"\r\n")
    status_line = _STATUS_LINE.fullmatch(first)
    if status_line is None:
        raise UnexpectedAnswerError("answered with something other than HTTP/1.1")
    status, fields = int(status_line["status"]), _fields(lines)
    content_type = fields.get("content-type", "none").partition(";")[0].strip().lower()
    if status not in _STATUSES or content_type not in _CONTENT_TYPES or "content-encoding" in fields:
        raise UnexpectedAnswerError(f"answered {status} with {content_type[:100]}")
    length = fields.get("content-length", "")
    if "transfer-encoding" in fields or not _LENGTH.fullmatch(length):
        raise UnexpectedAnswerError("answered without saying how many bytes there are")
    if int(length) > MAX_BODY_BYTES:
        raise UnexpectedAnswerError(f"answered with more than {MAX_BODY_BYTES} bytes")
    headers = {name: fields[lower] for lower, name in _PASSED_ON.items() if lower in fields}
    if not all(_PASSED_ON_VALUE.fullmatch(value) for value in headers.values()):
        raise UnexpectedAnswerError("answered with headers that are not an instance's")
    is_last = fields.get("connection", "keep-alive").lower() != "keep-alive"
    return _Head(status, int(length), content_type, headers, is_last)


def _fields(lines: list[bytes]) -> dict[str, str]:
    """The fields that mean something here, by their names in lower case."""
    fields: dict[str, str] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise UnexpectedAnswerError("answered with headers that are not HTTP's")
        name = field["name"].decode().lower()
        if name in _KNOWN:
            if name in fields:
                raise UnexpectedAnswerError(f"answered with two headers {name}")
            fields[name] = field["value"].decode("latin-1").rstrip(" \t")
    return fields
