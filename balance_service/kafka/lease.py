"""How long an instance may answer as the owner of partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.process.runtime import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable

_MARGIN_SECONDS = 1.0


class Lease:
    """How long an instance may answer as owner without hearing from the group.

    A lease begins just before the last request that the coordinator verified against this membership. It lasts for
    the session timeout less a margin: until then, no other instance can own the partitions.
    Source: Gray & Cheriton, "Leases" (1989).
    """

    def __init__(self, session_timeout_ms: int, clock: Callable[[], float] = elapsed) -> None:
        self._length = session_timeout_ms / 1000 - _MARGIN_SECONDS
        self._clock = clock
        self._expires = float("-inf")
        self.was_confirmed = False
        """Whether it was renewed since the instance started."""

    def renew(self, sent_at: float) -> None:
        """Extends the lease: the coordinator confirmed a request that was sent at this time of the clock."""
        self._expires = max(self._expires, sent_at + self._length)
        self.was_confirmed = True

    def revoke(self) -> None:
        """Ends the lease until the next renewal."""
        self._expires = float("-inf")

    @property
    def holds(self) -> bool:
        return self._clock() < self._expires


class AlwaysHeld(Lease):
    """The lease for copies of which each minds its own."""

    def __init__(self) -> None:
        super().__init__(0)

    @property
    def holds(self) -> bool:
        return True
