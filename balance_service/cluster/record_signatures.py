"""Signatures of the directory's records: whoever may write to the topic is not for that reason an instance.

A record's header `signature` signs the topic, the instance's address, the time, and the record's value, a farewell's
too. A record is good for a short time and comes after the one before it of the same run, so one that is written again
says nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from balance_service.cluster.shared_secret import CLOCKS_AGREE_SECONDS
from balance_service.process.runtime import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.cluster.shared_secret import SharedSecret

HEADER = "signature"
REASONS = UNSIGNED, WRONGLY_SIGNED, NOT_OF_NOW, REPEATED = "unsigned", "wrongly signed", "not of now", "repeated"
"""Why a record is refused."""
FAREWELL = ""
_PURPOSE = b"balance-service directory record 1"
_SIGNATURE = re.compile(rb"t=(?P<t>[0-9]{1,15});hmac=(?P<hmac>[0-9a-f]{64})")
# Far longer than a record is good for, should a clock be set back meanwhile.
_REMEMBER_SECONDS = 600


class UntrustedRecordError(Exception):
    """A record that is not of the instance that it names, or not of now. `reason` is one of `REASONS`."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"it is {reason}; {remedy}")
        self.reason = reason


class RecordSignatures:
    """Signs the records of one instance and judges those of all. Without a secret none is signed, and all pass.

    Belongs to one thread.
    """

    def __init__(self, secret: SharedSecret | None, topic: str, now_ms: Callable[[], int] = now_ms) -> None:
        self._secret = secret
        self._topic = topic.encode()
        self._now_ms = now_ms
        self._signed_ms = 0
        self._latest_ms: dict[tuple[str, str], int] = {}

    def sign(self, address: str, value: bytes | None) -> dict[str, bytes]:
        """The headers of a record of ours.

        Args:
            value: None is the farewell.
        """
        if self._secret is None:
            return {}
        # Each is later than the one before, even if the clock was set back.
        self._signed_ms = max(self._now_ms(), self._signed_ms + 1)
        t = b"%d" % self._signed_ms
        signature = self._secret.sign(_PURPOSE, self._topic, address.encode(), t, value or b"")
        return {HEADER: b"t=%b;hmac=%b" % (t, signature.encode())}

    def check(self, address: str, value: bytes | None, signature: str | bytes | None) -> int | None:
        """Refuse a record that no instance has written lately under this address.

        Args:
            signature: what the record has as its header of that name.

        Returns:
            When it was signed, in milliseconds, for `check_order`; None without a secret.

        Raises:
            UntrustedRecordError: it is not signed, or not so, or not of now.
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
        if abs(now - t) > CLOCKS_AGREE_SECONDS * 1000:
            agree = f"the clocks of all instances must agree within {CLOCKS_AGREE_SECONDS} s"
            raise UntrustedRecordError(NOT_OF_NOW, agree)
        return t

    def check_order(self, address: str, incarnation: str, signed_ms: int | None) -> None:
        """Refuse a record that a run of an instance wrote before another one that was taken, or before a farewell.

        Two runs are not compared: where two instances share an address, their clocks may differ.

        Args:
            incarnation: the run's; `FAREWELL` for a farewell, which names none.
            signed_ms: what `check` returned.

        Raises:
            UntrustedRecordError: it is written again.
        """
        if signed_ms is None:
            return
        runs = (address, incarnation), (address, FAREWELL)
        if signed_ms <= max(self._latest_ms.get(run, 0) for run in runs):
            raise UntrustedRecordError(REPEATED, "the instance has said something else since")
        oldest = self._now_ms() - _REMEMBER_SECONDS * 1000
        recent = {run: ms for run, ms in self._latest_ms.items() if ms > oldest}
        self._latest_ms = recent | {(address, incarnation): signed_ms}
