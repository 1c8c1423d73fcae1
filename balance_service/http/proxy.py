"""One hop to the instance that owns the key, over one pooled session.

A peer's address comes from a topic, so it is not trusted: fixed path, re-encoded parameters, no redirects,
capped size, headers by allow-list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from balance_service.errors import RetriableError
from balance_service.http.problems import PROBLEM_JSON

if TYPE_CHECKING:
    from collections.abc import Mapping

FORWARDED_HEADER = "Balance-Forwarded"
ANSWER_HEADERS = (
    "Balance-Application-Server",
    "Balance-Role",
    "Balance-Position",
    "Balance-Lag",
    "Balance-Epoch",
    "Retry-After",
)
# What an owner answers, as far as it may be passed on; anything else is not from one of us.
_STATUSES = frozenset({200, 400, 404, 421, 500, 503})
_CONTENT_TYPES = frozenset({"application/json", PROBLEM_JSON})
_MAX_ANSWER_BYTES = 64 << 10
_MAX_CONNECTIONS_PER_PEER = 64


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What a peer answered, cut down to what may be passed on."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str]


class Proxy:
    """Asks peers. Belongs to the event loop."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=_MAX_CONNECTIONS_PER_PEER),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def get(
        self,
        address: str,
        path: str,
        parameters: Mapping[str, str],
        from_address: str,
        timeout_seconds: float,
    ) -> PeerAnswer:
        """GET a fixed path of a peer.

        Raises:
            RetriableError: the peer did not answer in time, or not sensibly.
        """
        try:
            url = URL(f"http://{address}").with_path(path).with_query(parameters)
            async with self._session.get(
                url,
                headers={FORWARDED_HEADER: from_address},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            ) as answer:
                is_ours = answer.status in _STATUSES and answer.content_type in _CONTENT_TYPES
                if not is_ours or "Content-Encoding" in answer.headers:
                    raise RetriableError(f"the owner at {address} answered {answer.status} with {answer.content_type}")
                body = await answer.content.read(_MAX_ANSWER_BYTES + 1)
                while len(body) <= _MAX_ANSWER_BYTES and (more := await answer.content.readany()):
                    body += more
                if len(body) > _MAX_ANSWER_BYTES:
                    raise RetriableError(f"the owner at {address} answered with more than {_MAX_ANSWER_BYTES} bytes")
                headers = {name: answer.headers[name] for name in ANSWER_HEADERS if name in answer.headers}
                return PeerAnswer(answer.status, body, answer.content_type, headers)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise RetriableError(f"the owner at {address} cannot be reached: {reason}") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
