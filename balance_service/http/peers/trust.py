"""Trust between peers: the allow-list of addresses, and proofs that both sides of a forwarded query are peers.

A forwarded query carries a mark. With a shared secret, the mark contains a proof: an HMAC over the sender's address and
run, the number of marks that this run has made, the receiver's run, the time, and the query. A mark is valid once, at
its receiver, for a short time. The answer carries a proof too: an HMAC over the mark and the answer, so that it answers
only that query. Another HMAC over the mark names the client, so that each has a share of its own at the receiver.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import itertools
import re
import time
import uuid
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from balance_service import api
from balance_service.cluster.signatures import CLOCKS_AGREE_SECONDS
from balance_service.http.answer import Problem
from balance_service.kafka.signing import SharedSecret
from balance_service.settings.network import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from balance_service.http.answer import Answer

FORWARDED_HEADER = "Balance-Forwarded"
PROOF_HEADER = "Balance-Proof"
CLIENT_HEADER = "Balance-Client"
PASSED_ON = (
    api.APPLICATION_SERVER,
    api.ROLE,
    api.POSITION,
    api.LAG,
    api.AGE,
    api.EPOCH,
    api.GENERATION,
    api.RETRY_AFTER,
)
"""The headers of a peer's answer that are read and covered by its proof."""
_QUERY, _ANSWER = b"balance-service forwarded query 2", b"balance-service answer 2"
_CLIENT = b"balance-service client of a forwarded query 1"
_MESSAGE_TO_OWNER, _MESSAGE_FROM_OWNER = b"balance-service message to owner 1", b"balance-service message from owner 1"
_PROOF_LENGTH = 64
_TO = r";to=(?P<to>[^;\s]{1,64})"
_NAMED = re.compile(_TO)
_PROVEN = re.compile(
    r"(?P<signed>(?P<address>[^;\s]{1,300});run=(?P<run>[0-9a-f]{32});n=(?P<number>[0-9]{1,15})"
    rf"{_TO};t=(?P<t>[0-9]{{1,12}}));hmac=(?P<hmac>[0-9a-f]{{64}})"
)
_PROVEN_CLIENT = re.compile(r"(?P<client>[0-9a-f]{32});hmac=(?P<hmac>[0-9a-f]{64})")

_WINDOW_BYTES = 1 << 14
WINDOW = 8 * (_WINDOW_BYTES - 1)
"""How many later marks may overtake one: six seconds' worth at 20,000 marks a second."""
MAX_ASKERS = 1_000
"""Runs of instances whose marks are tracked at once. Only instances that know the secret count."""
# Far longer than a mark is valid, in case a clock is set back.
_FORGET_SECONDS = 600.0

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Peer(NamedTuple):
    """Another instance: its address, and the run that is meant. Each start of a process is a new run."""

    address: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A proven mark: the run that made it, and how many marks that run had made before."""

    run: str
    number: int


class UnprovenError(Exception):
    """A message of a connection between peers is not the next one that the peer has sent."""


class ProofChain:
    """Proves the messages that one side of a connection sends. Each proof covers the one before.

    Hence no message can be left out, added, repeated or moved to another connection. Without a secret, messages have no
    proof.
    """

    def __init__(self, secret: SharedSecret | None, purpose: bytes, mark: str) -> None:
        """Args:
        mark: of the request that opened the connection; the first proof covers it.
        """
        self._secret = secret
        self._purpose = purpose
        self._last = mark

    def sent(self, message: str) -> str:
        """The next message as sent, after its proof."""
        if self._secret is None:
            return message
        self._last = self._next(message)
        return self._last + message

    def received(self, sent: str) -> str:
        """The message of what `sent` has returned at the peer. Raises UnprovenError."""
        if self._secret is None:
            return sent
        proof, message = sent[:_PROOF_LENGTH], sent[_PROOF_LENGTH:]
        expected = self._next(message)
        if not hmac.compare_digest(_bytes(proof), _bytes(expected)):
            raise UnprovenError
        self._last = expected
        return message

    def _next(self, message: str) -> str:
        if self._secret is None:
            return ""
        return self._secret.sign(self._purpose, _bytes(self._last), _bytes(message))


class PeerTrust:
    """Checks addresses, marks and answers of peers. Not thread-safe.

    Without a secret, every answer is accepted, and every mark that names no other run; with an empty allow-list, every
    host.
    """

    def __init__(
        self, secret: str | None = None, allow_list: Iterable[str] = (), now: Callable[[], float] = time.time
    ) -> None:
        """Args:
        allow_list: host names, `*.domain` for every name below it, IP addresses, networks.
        now: seconds since 1970.
        """
        self.incarnation = uuid.uuid4().hex
        """Identifies this run of this instance."""
        self.secret = None if secret is None else SharedSecret(secret)
        self._now = now
        self._numbers = itertools.count()
        self._used = UsedMarks()
        self._names: set[str] = set()
        self._domains: list[str] = []
        self._networks: list[_Network] = []
        self._allows_all = True
        for entry in allow_list:
            self._allows_all = False
            self._allow(entry)

    @property
    def demands_proof(self) -> bool:
        """Whether an accepted mark comes from a peer; otherwise any client can have written it."""
        return self.secret is not None

    def mark(self, from_address: str, to: Peer, query: str) -> str:
        """Makes the mark of a forwarded query, with a secret valid once.

        Args:
            query: method, path and query string, exactly as sent.
        """
        if self.secret is None:
            return f"{from_address};to={to.incarnation}"
        signed = (
            f"{from_address};run={self.incarnation};n={next(self._numbers)};to={to.incarnation};t={int(self._now())}"
        )
        return f"{signed};hmac={self.secret.sign(_QUERY, _bytes(signed), _bytes(query))}"

    def client_proof(self, client: str, mark: str) -> str | None:
        """Says on whose behalf the query with this mark is forwarded; None without a secret."""
        if self.secret is None:
            return None
        digest = digest_of(client)
        return f"{digest};hmac={self.secret.sign(_CLIENT, _bytes(mark), _bytes(digest))}"

    def client_of(self, proof: str | None, mark: str) -> str | None:
        """Returns the name of the client on whose behalf the query with this mark is forwarded.

        None if the peer names none, as one of an earlier version does, and without a secret: anybody could name one.

        Raises:
            Problem: 403, the proof is wrong.
        """
        if self.secret is None or proof is None:
            return None
        match = _PROVEN_CLIENT.fullmatch(proof)
        if match is None or not self.secret.has_signed(match["hmac"], _CLIENT, _bytes(mark), _bytes(match["client"])):
            raise Problem(403, "the proof of the client of a forwarded query is wrong")
        return match["client"]

    def check(self, mark: str, query: str) -> None:
        """Verifies a mark and uses it up.

        Raises:
            Problem: 403, as `verified` and `use`.
        """
        self.use(self.verified(mark, query))

    def verified(self, mark: str, query: str) -> Mark | None:
        """Returns a mark whose proof is right, without using it up; None without a secret.

        Args:
            query: method, path and query string, exactly as received.

        Raises:
            Problem: 403, the proof is missing, wrong, expired, or for another query or instance; without a secret 421,
                the mark names another run, perhaps of another application's instance.
        """
        if self.secret is None:
            if (named := _NAMED.search(mark)) is not None and named["to"] != self.incarnation:
                raise Problem(421, "the query is for another run of an instance at this address")
            return None
        match = _PROVEN.fullmatch(mark)
        if match is None:
            raise Problem(403, "a forwarded query needs a proof; give all instances the same BALANCE_PEER_SECRET")
        if not self.secret.has_signed(match["hmac"], _QUERY, _bytes(match["signed"]), _bytes(query)):
            raise Problem(403, "the forwarded query's proof is wrong; give all instances the same BALANCE_PEER_SECRET")
        if match["to"] != self.incarnation:
            raise Problem(
                403,
                "the forwarded query's proof by BALANCE_PEER_SECRET is for another instance, or an earlier run of this",
            )
        if abs(self._now() - int(match["t"])) > CLOCKS_AGREE_SECONDS:
            raise Problem(
                403,
                "the forwarded query's proof by BALANCE_PEER_SECRET has expired, or lies in the future; "
                f"the clocks of all instances must agree within {CLOCKS_AGREE_SECONDS} s",
            )
        return Mark(match["run"], int(match["number"]))

    def use(self, mark: Mark | None) -> None:
        """Uses up a mark.

        Raises:
            Problem: 403, it was used before.
        """
        if mark is not None and not self._used.take(mark.run, mark.number, self._now()):
            raise Problem(403, "the forwarded query's proof by BALANCE_PEER_SECRET was used before")

    def proof_of(self, answer: Answer, mark: str) -> str | None:
        """Signs an answer for the peer that made the mark; None without a secret."""
        return None if self.secret is None else self.secret.sign(_ANSWER, _bytes(mark), *_parts(answer))

    def is_proven(self, answer: Answer, mark: str, proof: str) -> bool:
        """Verifies the signature of a peer's answer to the query with this mark."""
        return self.secret is None or self.secret.has_signed(proof, _ANSWER, _bytes(mark), *_parts(answer))

    def chains(self, mark: str) -> tuple[ProofChain, ProofChain]:
        """The proofs of a connection that a request with this mark has opened: to its owner, and from it."""
        return ProofChain(self.secret, _MESSAGE_TO_OWNER, mark), ProofChain(self.secret, _MESSAGE_FROM_OWNER, mark)

    def allows(self, address: str) -> bool:
        """Whether an address is a plain `host:port` whose host is on the allow-list.

        A network allows IP addresses only: the addresses of a name are not known before it is resolved.
        """
        try:
            host = _normalized(address_of(address).host)
        except ValueError:
            return False
        if self._allows_all:
            return True
        ip = _ip(host)
        if ip is not None:
            return any(ip in network for network in self._networks)
        return host in self._names or any(host.endswith(domain) for domain in self._domains)

    def _allow(self, entry: str) -> None:
        try:
            self._networks.append(ipaddress.ip_network(entry.strip("[]")))
        except ValueError:
            if entry.startswith("*."):
                self._domains.append(_normalized(entry[1:]))
            else:
                self._names.add(_normalized(entry))


class UsedMarks:
    """The marks that an instance has accepted, so that each is accepted once. At most 16 MiB. Not thread-safe.

    Each asker numbers its marks. They arrive out of order, over many connections. A window over each asker's numbers
    records which of the latest were used; older ones are refused.
    Source: RFC 6479, "IPsec Anti-Replay Algorithm without Bit Shifting".
    """

    def __init__(self) -> None:
        self._askers: dict[str, _Window] = {}

    def take(self, run: str, number: int, now: float) -> bool:
        """Uses up a mark that has not expired; returns whether it was unused.

        Args:
            run: of the instance that made the mark.
            number: how many marks that run had made before.
        """
        window = self._askers.get(run)
        if window is None:
            self._askers = {r: w for r, w in self._askers.items() if now - w.used_at < _FORGET_SECONDS}
            if len(self._askers) >= MAX_ASKERS:
                return False
            window = self._askers[run] = _Window()
        window.used_at = max(window.used_at, now)
        return window.take(number)


class _Window:
    """The latest marks of one asker: a bit for each, in a ring of bytes."""

    __slots__ = ("_highest", "_seen", "used_at")

    def __init__(self) -> None:
        self._highest = 0
        self._seen = bytearray(_WINDOW_BYTES)
        self.used_at = 0.0

    def take(self, number: int) -> bool:
        byte, highest = number >> 3, self._highest >> 3
        if byte <= highest - _WINDOW_BYTES:
            return False
        if byte > highest:
            # Clear the bytes that the ring now reuses: their marks are too old.
            if byte - highest >= _WINDOW_BYTES:
                self._seen = bytearray(_WINDOW_BYTES)
            else:
                for reused in range(highest + 1, byte + 1):
                    self._seen[reused % _WINDOW_BYTES] = 0
        at, bit = byte % _WINDOW_BYTES, 1 << (number & 7)
        if self._seen[at] & bit:
            return False
        self._seen[at] |= bit
        self._highest = max(self._highest, number)
        return True


@lru_cache(maxsize=10_000)
def digest_of(client: str) -> str:
    """The name of a client as peers see it: it may be long, and need not be known there."""
    return hashlib.sha256(_bytes(client)).hexdigest()[:32]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _parts(answer: Answer) -> tuple[bytes, bytes]:
    """The signed parts of an answer: its head as the asker reads it, and its body."""
    lines = [str(answer.status), answer.content_type.partition(";")[0]]
    # No header contains a line break; a missing one is an empty line.
    lines += [answer.headers.get(name, "") for name in PASSED_ON]
    return _bytes("\n".join(lines)), answer.body


def _normalized(host: str) -> str:
    return host.strip("[]").removesuffix(".").lower()


def _ip(host: str) -> _Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip
