"""How often one client may ask: a token bucket for each, kept as one number.

The bucket of a client is the time at which it will be full again (the generic cell rate algorithm, ITU-T I.371): each
request moves that time on by one interval, and is refused where the bucket would have to hold less than nothing.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from balance_service.http.answer import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

# About 10 MB. The one that asked longest ago is forgotten first: its bucket is the likeliest to be full.
_MAX_CLIENTS = 50_000
_TOO_MANY = 429
# Less than any interval: sums of intervals are not exact.
_TOLERANCE_SECONDS = 1e-7


class RateLimit:
    """Buckets of all clients. Belongs to the event loop."""

    def __init__(self, per_second: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        """Args:
        burst: how many requests a bucket holds.
        """
        self._per_second = per_second
        self._interval = 1.0 / per_second
        self._depth = (burst - 1) * self._interval + _TOLERANCE_SECONDS
        self._now = now
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        """How many clients are remembered."""
        return len(self._full_at)

    def take(self, client: str) -> None:
        """Count a request of a client.

        Raises:
            Problem: 429, the client's bucket is empty; says when it is no longer.
        """
        full_at, early = self._bucket(client)
        if early > 0:
            raise Problem(
                _TOO_MANY,
                f"a client may make {self._per_second:g} requests a second here; this one was certainly not begun",
                retry_after=max(1, math.ceil(early)),
            )
        self._full_at[client] = full_at + self._interval
        self._full_at.move_to_end(client)
        if len(self._full_at) > _MAX_CLIENTS:
            self._full_at.popitem(last=False)

    def has_room(self, client: str) -> bool:
        """Whether `take` would count a request of a client now."""
        return self._bucket(client)[1] <= 0

    def _bucket(self, client: str) -> tuple[float, float]:
        """When a client's bucket is full again, and how many seconds too early a request is."""
        now = self._now()
        full_at = max(self._full_at.get(client, now), now)
        return full_at, full_at - now - self._depth
