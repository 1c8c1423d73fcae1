"""Tracing: which spans there are, and how the context of one is handed on to another process.

Off unless `BALANCE_TRACING_ENDPOINT` is set, and then nothing is loaded, added to a request or added to Spark's plan.
`otlp_tracing` is the one module that imports OpenTelemetry. Any thread or event loop may open a span.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from balance_service.settings import Settings

TRACEPARENT_HEADER = "traceparent"
"""Header of a request, and of a record in Kafka, that names the span it comes from. Source: W3C Trace Context."""


class SpanKind(Enum):
    """On which side of a hop a span is, in OpenTelemetry's words."""

    SERVER = "SERVER"
    CLIENT = "CLIENT"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"


class Span(Protocol):
    """Some work that is being done."""

    def context(self) -> Mapping[str, str]:
        """The headers by which whoever is asked next knows what it is part of."""

    def tell(self, name: str, value: str | int) -> None:
        """Say something of it. Names are OpenTelemetry's where it has one; never a customer or an amount."""

    def fail(self, why: str) -> None:
        """It came to nothing; `why` is a kind of error, not a message."""


class Tracing(Protocol):
    """Where spans go."""

    @property
    def is_on(self) -> bool:
        """Whether they go anywhere."""

    def span(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, str | int],
        came_with: Mapping[str, str] | None = None,
        links: Sequence[str] = (),
    ) -> AbstractContextManager[Span]:
        """A span for as long as the context is open; an exception that leaves it makes it a failed one.

        Args:
            came_with: headers that name the span it is part of; without them, the one that is open here, if any.
            links: the traceparents of other spans that led to it.
        """

    def stop(self, timeout_seconds: float) -> None:
        """Hand over what is still here, within the bound."""


class _Untraced:
    """Both the tracing and the span that are not there."""

    is_on = False

    @contextmanager
    def span(
        self,
        name: str,  # noqa: ARG002
        kind: SpanKind,  # noqa: ARG002
        attributes: Mapping[str, str | int],  # noqa: ARG002
        came_with: Mapping[str, str] | None = None,  # noqa: ARG002
        links: Sequence[str] = (),  # noqa: ARG002
    ) -> Iterator[Span]:
        yield self

    def stop(self, timeout_seconds: float) -> None:
        pass

    def context(self) -> Mapping[str, str]:
        return {}

    def tell(self, name: str, value: str | int) -> None:
        pass

    def fail(self, why: str) -> None:
        pass


UNTRACED: Tracing = _Untraced()


def start_tracing(settings: Settings) -> Tracing:
    """Tracing as the settings want it.

    Raises:
        ConfigurationError: it is wanted, and OpenTelemetry is not installed or refuses one of its own variables.
    """
    if settings.tracing_endpoint is None:
        return UNTRACED
    try:
        from balance_service.otlp_tracing import OtlpTracing
    except ImportError as error:
        raise ConfigurationError(
            "BALANCE_TRACING_ENDPOINT asks for traces, and OpenTelemetry is not installed; "
            "run pip install 'balance-service[tracing]', or unset it"
        ) from error
    try:
        return OtlpTracing(settings.tracing_endpoint, settings.application_id, settings.application_server)
    except ValueError as error:
        raise ConfigurationError(f"OpenTelemetry refuses one of its OTEL_* variables: {error}") from error
