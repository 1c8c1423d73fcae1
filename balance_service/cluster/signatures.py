"""Signed records of the directory of instances.

A user that may write to the directory's topic is not necessarily an instance. The record header `signature` signs the
topic, the instance's address, the time and the record's value; a farewell has an empty one. A record is valid for a
short time and only after the previous record of its run, so that a replayed record is refused.
Source: RFC 2104, HMAC; with SHA-256.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from balance_service.kafka.signing import HEADER
from balance_service.process.runtime import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.kafka.signing import SharedSecret

CLOCKS_AGREE_SECONDS = 30
"""A signature holds a time, and is valid this long before and after it."""
_AGREE_MS = CLOCKS_AGREE_SECONDS * 1000
REASONS = UNSIGNED, WRONGLY_SIGNED, NOT_OF_NOW, REPEATED = "unsigned", "wrongly signed", "not of now", "repeated"
"""Why a record is refused."""
FAREWELL = ""
_PURPOSE = b"balance-service directory record 1"
_PURPOSE_OF_TEXT = b"balance-service schema text 1"
_SIGNATURE = re.compile(rb"t=(?P<t>[0-9]{1,15});hmac=(?P<hmac>[0-9a-f]{64})")
# Far longer than a record is valid, in case a clock is set back.
_REMEMBER_SECONDS = 600


class UntrustedRecordError(Exception):
    """The instance that a record names did not write it just now. `reason` is one of `REASONS`."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"it is {reason}; {remedy}")
        self.reason = reason


class RecordSignatures:
    """Signs the directory records of one instance and verifies those of all. For one thread.

    Without a secret, no record is signed and every record is accepted.
    """

    def __init__(self, secret: SharedSecret | None, topic: str, now_ms: Callable[[], int] = now_ms) -> None:
        self._secret = secret
        self._topic = topic.encode()
        self._now_ms = now_ms
        self._signed_ms = 0
        self._latest_ms: dict[tuple[str, str], int] = {}

    def sign(self, address: str, value: bytes | None) -> dict[str, bytes]:
        """The headers of this instance's next record.

        Args:
            value: None for the farewell.
        """
        if self._secret is None:
            return {}
        # The time increases with each record, even if the clock was set back; not if it was far ahead, because peers
        # accept no time that is.
        now = self._now_ms()
        self._signed_ms = now if self._signed_ms > now + _AGREE_MS else max(now, self._signed_ms + 1)
        t = b"%d" % self._signed_ms
        signature = self._secret.sign(_PURPOSE, self._topic, address.encode(), t, value or b"")
        return {HEADER: b"t=%b;hmac=%b" % (t, signature.encode())}

    def check(self, address: str, value: bytes | None, signature: str | bytes | None) -> int | None:
        """Refuses a record that no instance with this address wrote just now.

        Args:
            signature: the record's header of that name.

        Returns:
            When it was signed, in milliseconds, for `check_order`; None without a secret.

        Raises:
            UntrustedRecordError: the signature is missing, wrong, or too old or new.
        """
        if self._secret is None:
            return None
        match = _SIGNATURE.fullmatch(signature) if isinstance(signature, bytes) else None
        same = "give all instances the same BALANCE_PEER_SECRET"
        if match is None:
            raise UntrustedRecordError(UNSIGNED, same)
        key = address.encode("utf-8", "surrogatepass")
        if not self._secret.has_signed(match["hmac"].decode(), _PURPOSE, self._topic, key, match["t"], value or b""):
            raise UntrustedRecordError(WRONGLY_SIGNED, same)
        t, now = int(match["t"]), self._now_ms()
        if abs(now - t) > _AGREE_MS:
            agree = f"the clocks of all instances must agree within {CLOCKS_AGREE_SECONDS} s"
            raise UntrustedRecordError(NOT_OF_NOW, agree)
        return t

    def sign_text(self, key: bytes, text: bytes) -> dict[str, bytes]:
        """Returns the headers of the record with the text of a schema. It has no time: the text never changes."""
        if self._secret is None:
            return {}
        return {HEADER: self._secret.sign(_PURPOSE_OF_TEXT, self._topic, key, text).encode()}

    def has_signed_text(self, key: bytes, text: bytes, signature: str | bytes | None) -> bool:
        """Returns whether an instance wrote the text of a schema; always true without a secret."""
        if self._secret is None:
            return True
        given = signature.decode("ascii", "replace") if isinstance(signature, bytes) else ""
        return self._secret.has_signed(given, _PURPOSE_OF_TEXT, self._topic, key, text)

    def check_order(self, address: str, incarnation: str, signed_ms: int | None) -> None:
        """Refuses a record that its run signed before an accepted one, or before a farewell.

        Two runs are not compared: if two instances share an address, their clocks may differ.

        Args:
            incarnation: of the run; `FAREWELL` for a farewell, which names none.
            signed_ms: as `check` returned it.

        Raises:
            UntrustedRecordError: the record is a repetition.
        """
        if signed_ms is None:
            return
        runs, now = ((address, incarnation), (address, FAREWELL)), self._now_ms()
        # A time that lies ahead is of a clock that was set back since.
        known = [ms for run in runs if (ms := self._latest_ms.get(run, 0)) <= now + _AGREE_MS]
        if known and signed_ms <= max(known):
            raise UntrustedRecordError(REPEATED, "the instance has published a newer record since")
        oldest = now - _REMEMBER_SECONDS * 1000
        recent = {run: ms for run, ms in self._latest_ms.items() if ms > oldest}
        self._latest_ms = recent | {(address, incarnation): signed_ms}
