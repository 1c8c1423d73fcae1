"""The Python client of the service: `Client`, and `AsyncClient` for asyncio.

It needs neither Java nor Kafka; see docs/how-to/client.md.
"""

from __future__ import annotations

from balance_service.client.clients import AsyncClient, Client
from balance_service.client.errors import (
    ClientError,
    ClosedError,
    InvalidCallError,
    NotAllowedError,
    NotAnInstanceError,
    ServerFailedError,
    UnavailableError,
)
from balance_service.client.results import (
    Balance,
    Change,
    Decided,
    Entry,
    FundsAdded,
    KeyCount,
    PartitionAnswer,
    Position,
    Readiness,
    Scan,
    SnapshotBegin,
    SnapshotEnd,
    Source,
    State,
    Top,
)

__all__ = [
    "AsyncClient",
    "Balance",
    "Change",
    "Client",
    "ClientError",
    "ClosedError",
    "Decided",
    "Entry",
    "FundsAdded",
    "InvalidCallError",
    "KeyCount",
    "NotAllowedError",
    "NotAnInstanceError",
    "PartitionAnswer",
    "Position",
    "Readiness",
    "Scan",
    "ServerFailedError",
    "SnapshotBegin",
    "SnapshotEnd",
    "Source",
    "State",
    "Top",
    "UnavailableError",
]
