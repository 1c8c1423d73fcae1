"""The errors of the client, by what a caller does about them.

ClientError
├── UnavailableError     call again later; the client has retried for `retry_seconds`
├── InvalidCallError     correct the call: the message names the wrong part
├── NotAllowedError      give a token that is valid and has the scope that the message names
├── ClosedError          nothing: the program has closed the client, maybe in another thread
├── NotAnInstanceError   correct the URL, or the trusted CA: another server answers there
└── ServerFailedError    read the log of the service: a request failed there
"""

from __future__ import annotations

from balance_service.errors import BalanceServiceError


class ClientError(BalanceServiceError):
    """Base of the errors of the client. The message is one sentence."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status of the response; None without a response."""
        self.idempotency_key: str | None = None
        """The key of a failed `add_funds`, whose event may have been written: a call with this key adds only once."""


class UnavailableError(ClientError):
    """No instance can answer now."""

    def __init__(
        self,
        message: str,
        status: int | None = None,
        retry_after: float | None = None,
        *,
        is_late: bool = False,
    ) -> None:
        super().__init__(message, status)
        self.retry_after = retry_after
        """Seconds to wait before the next call, if the response says so."""
        self.is_late = is_late
        """Whether there was no response within `timeout_seconds`: the request may have been carried out."""


class InvalidCallError(ClientError):
    """The client or the instance refuses the call."""


class NotAllowedError(ClientError):
    """The token is missing or invalid, or lacks a scope."""


class ClosedError(ClientError):
    """The program has closed the client."""


class NotAnInstanceError(ClientError):
    """The response is not one of an instance."""


class ServerFailedError(ClientError):
    """The instance failed to process the request."""
