"""One hop to the instance that owns the key, over one pooled session.

A peer's address comes from a topic, so it is not trusted: hosts by allow-list, fixed path, re-encoded parameters, no
redirects, capped size, headers by allow-list. What it is asked carries a mark, so that it does not pass it on again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from balance_service.errors import RetriableError
from balance_service.http.peers import PeerTrust
from balance_service.http.problems import PROBLEM_JSON
from balance_service.tracing import UNTRACED, SpanKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.http.reloaded import Reloaded
    from balance_service.http.tls import Tls
    from balance_service.tracing import Tracing

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
# Well below the time after which a peer closes an idle connection, so that no query meets a closing one.
_IDLE_SECONDS = 15.0
_FORBIDDEN = 403
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]{0,298}[!-~])?")


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What a peer answered, cut down to what may be passed on."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str]


class Proxy:
    """Asks peers. Belongs to the event loop."""

    def __init__(
        self, trust: PeerTrust | None = None, tls: Reloaded[Tls] | None = None, tracing: Tracing = UNTRACED
    ) -> None:
        """Args:
        trust: whom to ask, and how to prove that it is us who asks; without it anyone, without proof.
        tls: peers are asked by HTTPS with this; without it, by HTTP.
        """
        self._trust = PeerTrust() if trust is None else trust
        self._tls = tls
        self._tracing = tracing
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, limit_per_host=_MAX_CONNECTIONS_PER_PEER, keepalive_timeout=_IDLE_SECONDS
            ),
            auto_decompress=False,
            # A peer answers JSON as it is, whatever would be accepted.
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
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
            RetriableError: the peer may not be asked, refuses our proof, or did not answer in time or not sensibly.
        """
        attributes = {"http.request.method": "GET", "server.address": address, "url.path": path}
        with self._tracing.span(f"GET {path}", SpanKind.CLIENT, attributes) as span:
            answer = await self._get(address, path, parameters, from_address, timeout_seconds, span.context())
            span.tell("http.response.status_code", answer.status)
            return answer

    async def _get(
        self,
        address: str,
        path: str,
        parameters: Mapping[str, str],
        from_address: str,
        timeout_seconds: float,
        trace_context: Mapping[str, str],
    ) -> PeerAnswer:
        if not self._trust.allows(address):
            raise RetriableError(
                f"the owner's address, {address[:300]!r}, is not one that may be asked; see BALANCE_PEER_ALLOW_LIST"
            )
        if self._session.closed:
            raise RetriableError("this instance is stopping")
        try:
            scheme = "http" if self._tls is None else "https"
            url = _url(scheme, address, path).with_query(parameters)
            async with self._session.get(
                url,
                headers={FORWARDED_HEADER: self._trust.mark(from_address, url.raw_path_qs), **trace_context},
                allow_redirects=False,
                # Asked anew each time: connections under a renewed certificate are new ones.
                ssl=True if self._tls is None else self._tls.value.client,
                timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            ) as answer:
                if answer.status == _FORBIDDEN:
                    raise RetriableError(
                        f"the owner at {address} does not accept the proof that this instance is its peer; give all "
                        "instances the same BALANCE_PEER_SECRET, and clocks that agree"
                    )
                is_ours = answer.status in _STATUSES and answer.content_type in _CONTENT_TYPES
                if not is_ours or "Content-Encoding" in answer.headers:
                    raise RetriableError(f"the owner at {address} answered {answer.status} with {answer.content_type}")
                body = await answer.content.read(_MAX_ANSWER_BYTES + 1)
                while len(body) <= _MAX_ANSWER_BYTES and (more := await answer.content.readany()):
                    body += more
                if len(body) > _MAX_ANSWER_BYTES:
                    raise RetriableError(f"the owner at {address} answered with more than {_MAX_ANSWER_BYTES} bytes")
                headers = {name: answer.headers[name] for name in ANSWER_HEADERS if name in answer.headers}
                if not all(_HEADER_VALUE.fullmatch(value) for value in headers.values()):
                    raise RetriableError(f"the owner at {address} answered with headers that are not an instance's")
                return PeerAnswer(answer.status, body, answer.content_type, headers)
        except aiohttp.ClientSSLError as error:
            raise RetriableError(
                f"the owner at {address} cannot be reached by TLS: {error}; its certificate must name that host and be "
                "signed by a CA in BALANCE_TLS_CA"
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise RetriableError(f"the owner at {address} cannot be reached: {reason}") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


@lru_cache(maxsize=100)
def _url(scheme: str, address: str, path: str) -> URL:
    return URL(f"{scheme}://{address}").with_path(path)
