"""Which peers are trusted: those that this instance may ask, and how asker and asked prove that they are peers.

A query that one instance passes on to another carries a mark. With a shared secret the mark has a proof: it signs which
run of which instance asks which run of which, how many marks it had made before, the time, and the question. A mark is
good for one use, where it is meant for, within a short time. The answer then has a proof too: it signs the mark and all
that counts of the answer, so that it answers that one query and no other.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from balance_service.cluster.shared_secret import CLOCKS_AGREE_SECONDS, SharedSecret
from balance_service.http.answer import Problem
from balance_service.http.peers.answers import PASSED_ON
from balance_service.http.peers.used_marks import UsedMarks
from balance_service.settings.address import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from balance_service.http.answer import Answer

PROOF_HEADER = "Balance-Proof"
_QUESTION, _ANSWER = b"balance-service forwarded query 2", b"balance-service answer 1"
_PROVEN = re.compile(
    r"(?P<signed>(?P<address>[^;\s]{1,300});run=(?P<run>[0-9a-f]{32});n=(?P<number>[0-9]{1,15});to=(?P<to>[^;\s]{1,64});"
    r"t=(?P<t>[0-9]{1,12}));hmac=(?P<hmac>[0-9a-f]{64})"
)
_FORBIDDEN = 403

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Literal = ipaddress.IPv4Address | ipaddress.IPv6Address


class Peer(NamedTuple):
    """An instance that may be asked: where it is, and which run of it is meant."""

    address: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark that a peer has made: by which run of it, and how many it had made."""

    run: str
    number: int


class PeerTrust:
    """Judges addresses, marks and answers of peers. Without a secret every mark and answer passes; with an empty list,
    every host. Belongs to the event loop.
    """

    def __init__(
        self, secret: str | None = None, allow_list: Iterable[str] = (), now: Callable[[], float] = time.time
    ) -> None:
        """Args:
        allow_list: host names, `*.domain` for every name below it, IP addresses, networks.
        now: seconds since 1970.
        """
        self.incarnation = uuid.uuid4().hex
        """Which run of this instance this is."""
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
        """Whether a mark that passed is a peer's; otherwise anybody can have written it."""
        return self.secret is not None

    def mark(self, from_address: str, to: Peer, question: str) -> str:
        """The mark of a query passed on, for one use.

        Args:
            question: method, path and query, exactly as they go over the wire.
        """
        if self.secret is None:
            return from_address
        signed = (
            f"{from_address};run={self.incarnation};n={next(self._numbers)};to={to.incarnation};t={int(self._now())}"
        )
        return f"{signed};hmac={self.secret.sign(_QUESTION, _bytes(signed), _bytes(question))}"

    def check(self, mark: str, question: str) -> None:
        """Refuse a mark that does not come from a peer, or was used before; it is used then.

        Raises:
            Problem: 403, as `judge` and `use`.
        """
        self.use(self.judge(mark, question))

    def judge(self, mark: str, question: str) -> Mark | None:
        """A mark that comes from a peer, and is not used by this; None where none needs to be proven.

        Args:
            question: method, path and query, exactly as they came over the wire.

        Raises:
            Problem: 403, the mark has no proof, or not one for this query and this instance, or one of another time.
        """
        if self.secret is None:
            return None
        match = _PROVEN.fullmatch(mark)
        if match is None:
            raise Problem(
                _FORBIDDEN, "a forwarded query needs a proof; give all instances the same BALANCE_PEER_SECRET"
            )
        if not self.secret.has_signed(match["hmac"], _QUESTION, _bytes(match["signed"]), _bytes(question)):
            raise Problem(
                _FORBIDDEN, "the forwarded query's proof is wrong; give all instances the same BALANCE_PEER_SECRET"
            )
        if match["to"] != self.incarnation:
            raise Problem(
                _FORBIDDEN,
                "the forwarded query's proof by BALANCE_PEER_SECRET is for another instance, or an earlier run of this",
            )
        if abs(self._now() - int(match["t"])) > CLOCKS_AGREE_SECONDS:
            raise Problem(
                _FORBIDDEN,
                f"the forwarded query's proof by BALANCE_PEER_SECRET is not of now; "
                f"the clocks of all instances must agree within {CLOCKS_AGREE_SECONDS} s",
            )
        return Mark(match["run"], int(match["number"]))

    def use(self, mark: Mark | None) -> None:
        """Have a mark be of no more use.

        Raises:
            Problem: 403, it was used before.
        """
        if mark is not None and not self._used.take(mark.run, mark.number, self._now()):
            raise Problem(_FORBIDDEN, "the forwarded query's proof by BALANCE_PEER_SECRET was used before")

    def proof_of(self, answer: Answer, mark: str) -> str | None:
        """What proves to the peer that made a mark that this is the answer to its query; None without a secret."""
        return None if self.secret is None else self.secret.sign(_ANSWER, _bytes(mark), *_parts(answer))

    def is_proven(self, answer: Answer, mark: str, proof: str) -> bool:
        """Whether a peer has answered so to the query with a mark of ours."""
        return self.secret is None or self.secret.has_signed(proof, _ANSWER, _bytes(mark), *_parts(answer))

    def allows(self, address: str) -> bool:
        """Whether an address may be asked: a plain host:port whose host is on the list.

        A network allows IP addresses only, for what a name resolves to is not known before it is asked.
        """
        try:
            host = _plain(address_of(address).host)
        except ValueError:
            return False
        if self._allows_all:
            return True
        literal = _literal(host)
        if literal is not None:
            return any(literal in network for network in self._networks)
        return host in self._names or any(host.endswith(domain) for domain in self._domains)

    def _allow(self, entry: str) -> None:
        try:
            self._networks.append(ipaddress.ip_network(entry.strip("[]")))
        except ValueError:
            if entry.startswith("*."):
                self._domains.append(_plain(entry[1:]))
            else:
                self._names.add(_plain(entry))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _parts(answer: Answer) -> tuple[bytes, bytes]:
    """All that counts of an answer: its head, as an asker reads it, and its body."""
    lines = [str(answer.status), answer.content_type.partition(";")[0]]
    # No line holds a line's end; one that is missing is empty.
    lines += [answer.headers.get(name, "") for name in PASSED_ON]
    return _bytes("\n".join(lines)), answer.body


def _plain(host: str) -> str:
    """A host in the one form in which hosts are compared."""
    return host.strip("[]").removesuffix(".").lower()


def _literal(host: str) -> _Literal | None:
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(literal, "ipv4_mapped", None) or literal
