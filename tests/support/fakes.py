"""Hand-written stand-ins for what cannot be run without a broker or a registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema
from balance_service.engine.letters.letters import Letters
from balance_service.testing.fakes import FakeRegistry, FakeWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Clock", "FakeRegistry", "FakeWriter", "Nobody", "balance_codec", "letters", "position_codec"]


class Nobody:
    """An instance that tells nothing of itself but the status that it is given."""

    def __init__(self, status: Mapping[str, object] | None = None) -> None:
        self._status = status or {}

    def unready(self) -> Sequence[str]:
        return []

    def problems(self) -> Sequence[str]:
        return []

    def status(self) -> Mapping[str, object]:
        return self._status

    def metrics(self) -> bytes:
        return b"# nothing\n"


class Clock:
    """A clock that goes on only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def position_codec(registry: FakeRegistry | None = None) -> AvroCodec:
    """The codec of position records."""
    return AvroCodec(registry or FakeRegistry(), "positions", load_schema("Position"))


def balance_codec(registry: FakeRegistry | None = None) -> AvroCodec:
    """The codec of balances."""
    return AvroCodec(registry or FakeRegistry(), "states", load_schema("BalanceState"))


def letters(registry: FakeRegistry | None = None, *, every_ms: int = 300_000, **more: Any) -> Letters:
    """How a stage keeps its dead letters."""
    return Letters(
        codec=AvroCodec(registry or FakeRegistry(), "letters", load_schema("Letter")), every_ms=every_ms, **more
    )
