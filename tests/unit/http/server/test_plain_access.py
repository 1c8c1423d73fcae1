"""Access control of plain queries: admitted ahead of aiohttp, refused with the bytes that aiohttp sends."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import jwt
import pytest

from balance_service.http.access.authentication import Authenticator, load_jwts, load_tokens
from balance_service.http.access.authorization import Access, Browsers, RateLimit
from balance_service.http.peers.trust import Peer, PeerTrust
from balance_service.http.server.limits import Connection
from balance_service.http.server.reloading import Reloaded
from tests.support.api import GET_BALANCE
from tests.support.credentials import AUDIENCE, ED_KEY, ISSUER, claims, token, write_jwks
from tests.support.querying import PARTITION, Instance
from tests.unit.http.plain_queries import ELSEWHERE, SECRET, TARGET, both_ways, exchange, question, raw

if TYPE_CHECKING:
    from pathlib import Path

READER = "a-token-of-a-reader"
WRITER = "a-token-of-a-writer"
BROWSERS = Browsers(["balance.example.com", "*.svc"], ["https://ops.example.com"])
BROWSERS_WITH_TOKENS = Browsers()
MARK = "Balance-Forwarded: peer:1\r\n"


@pytest.fixture
def authenticator(tmp_path: Path) -> Authenticator:
    file, jwks = tmp_path / "tokens.json", write_jwks(tmp_path / "jwks.json")
    of = {READER: ("reader", "balance:read"), WRITER: ("writer", "balance:add")}
    entries = [
        {"name": name, "sha256": hashlib.sha256(secret.encode()).hexdigest(), "scopes": [scope]}
        for secret, (name, scope) in of.items()
    ]
    file.write_text(json.dumps({"tokens": entries}))
    return Authenticator(
        Reloaded([file], lambda: load_tokens(file)), Reloaded([jwks], lambda: load_jwts(jwks, ISSUER, AUDIENCE))
    )


def bearing(text: str, more: str = "") -> bytes:
    return question(headers=f"Authorization: Bearer {text}\r\n{more}")


@pytest.mark.parametrize(
    "headers",
    [
        f"Authorization: Bearer {READER}\r\n",
        f"authorization: bearer  {READER}\r\nAccept: */*\r\n",
        f"Authorization: Bearer {READER}\r\nSec-Fetch-Site: same-origin\r\nOrigin: http://x:1\r\n",
    ],
)
def test_a_client_with_an_accepted_token_is_answered_ahead_of_aiohttp(
    instance: Instance, authenticator: Authenticator, headers: str
) -> None:
    (answer,), at_once, _ = both_ways(
        instance, question(headers=headers), access=lambda: Access(authenticator, browsers=BROWSERS_WITH_TOKENS)
    )

    assert (answer[:15], at_once) == (b"HTTP/1.1 200 OK", 1)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("", 401),
        ("Authorization: \r\n", 401),
        ("Authorization: Bearer\r\n", 401),
        ("Authorization: Basic cmVhZGVyOnRva2Vu\r\n", 401),
        (f"Authorization: {READER}\r\n", 401),
        (f"Authorization: Bearer {READER}x\r\n", 401),
        (f"Authorization: Bearer {READER} {READER}\r\n", 401),
        (f"Authorization: Bearer {READER},\r\n", 401),
        (f"Authorization: Bearer {hashlib.sha256(READER.encode()).hexdigest()}\r\n", 401),
        ("Authorization: Bearer eyJ9.eyJ9.eyJ9\r\n", 401),
        (f"Authorization: Bearer {READER}\r\nAuthorization: Bearer {READER}\r\n", 400),
        (f"Authorization: Bearer {READER}\r\nAuthorization: Bearer {WRITER}\r\n", 400),
        (f"Authorization: Bearer {WRITER}\r\n", 403),
        (f"Authorization: Bearer {READER}\r\nSec-Fetch-Site: cross-site\r\n", 403),
        (f"Authorization: Bearer {READER}\r\nOrigin: https://evil.example\r\n", 403),
        (MARK, 401),
    ],
)
def test_aiohttp_refuses_a_client_without_an_accepted_token(
    instance: Instance, authenticator: Authenticator, headers: str, status: int
) -> None:
    (answer,), at_once, _ = both_ways(
        instance, question(headers=headers), access=lambda: Access(authenticator, browsers=BROWSERS_WITH_TOKENS)
    )

    assert (answer.split()[1], at_once) == (str(status).encode(), 0)
    assert b"\r\nCache-Control: no-store\r\nVary: Accept\r\nX-Content-Type-Options: nosniff\r\n" in answer


@pytest.mark.parametrize(
    "headers",
    [
        "Host: 127.0.0.1:5051\r\n",
        "Host: 10.1.2.3\r\n",
        "Host: [::1]:5051\r\n",
        "Host: LOCALHOST:5051\r\n",
        "Host: localhost.\r\n",
        "Host: balance.example.com:8443\r\n",
        "Host: a.b.svc\r\n",
        "Host: localhost\r\nSec-Fetch-Site: none\r\nOrigin: null\r\n",
        "Host: localhost\r\nSec-Fetch-Site: same-origin\r\n",
        "Host: localhost:5051\r\nOrigin: https://LOCALHOST:5051\r\n",
    ],
)
def test_without_tokens_a_request_that_no_other_site_can_send_is_answered_ahead_of_aiohttp(
    instance: Instance, headers: str
) -> None:
    (answer,), at_once, _ = both_ways(instance, raw(headers), access=lambda: Access(browsers=BROWSERS))

    assert (answer[:15], at_once) == (b"HTTP/1.1 200 OK", 1)


@pytest.mark.shows("browser")
@pytest.mark.parametrize(
    ("headers", "status", "named"),
    [
        ("Host: evil.example\r\n", 421, b"BALANCE_ALLOWED_HOSTS"),
        ("Host: \r\n", 421, b"BALANCE_ALLOWED_HOSTS"),
        ("Host: svc\r\n", 421, b"BALANCE_ALLOWED_HOSTS"),
        ("Host: localhost.evil.example\r\n", 421, b"BALANCE_ALLOWED_HOSTS"),
        ("Host: evil.example:127.0.0.1\r\n", 421, b"BALANCE_ALLOWED_HOSTS"),
        ("Host: [localhost]\r\n", 421, b"BALANCE_ALLOWED_HOSTS"),
        (f"Host: evil.example\r\n{MARK}", 421, b"BALANCE_ALLOWED_HOSTS"),
        ("Host: localhost\r\nSec-Fetch-Site: cross-site\r\n", 403, b"other sites"),
        ("Host: localhost\r\nSec-Fetch-Site: same-site\r\n", 403, b"other sites"),
        ("Host: localhost\r\nSec-Fetch-Site: \r\n", 403, b"other sites"),
        (
            "Host: localhost\r\nSec-Fetch-Site: cross-site\r\nOrigin: http://localhost\r\n",
            403,
            b"BALANCE_ALLOWED_ORIGINS",
        ),
        ("Host: localhost\r\nOrigin: http://localhost:8080\r\n", 403, b"BALANCE_ALLOWED_ORIGINS"),
        ("Host: localhost\r\nOrigin: null\r\n", 403, b"BALANCE_ALLOWED_ORIGINS"),
        ("Host: localhost\r\nOrigin: localhost\r\n", 403, b"BALANCE_ALLOWED_ORIGINS"),
        ("", 400, b"Host"),
        ("Host: localhost\r\nHost: localhost\r\n", 400, b"Host"),
    ],
)
def test_aiohttp_refuses_a_request_that_another_site_can_send_and_names_the_setting(
    instance: Instance, headers: str, status: int, named: bytes
) -> None:
    (answer,), at_once, _ = both_ways(instance, raw(headers), access=lambda: Access(browsers=BROWSERS))

    assert (answer.split()[1], at_once) == (str(status).encode(), 0)
    assert named in answer


def test_aiohttp_verifies_a_jwt_once_and_plain_queries_find_it_in_the_cache(
    instance: Instance, authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[str] = []
    decode = jwt.decode

    def counted(text: str, *arguments: Any, **more: Any) -> Any:
        verified.append(text)
        return decode(text, *arguments, **more)

    monkeypatch.setattr(jwt, "decode", counted)

    answers, at_once, _ = exchange(instance, *[bearing(token())] * 3, answers=3, access=Access(authenticator))

    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * 3
    assert (at_once, len(verified)) == (2, 1)


def test_an_expired_jwt_is_not_found_in_the_cache(instance: Instance, tmp_path: Path) -> None:
    jwks, now = write_jwks(tmp_path / "jwks.json"), [0.0]
    text = token(exp=timedelta(minutes=5))
    until = int(claims()["exp"])
    access = Access(Authenticator(None, Reloaded([jwks], lambda: load_jwts(jwks, ISSUER, AUDIENCE, lambda: now[0]))))

    assert exchange(instance, bearing(text), bearing(text), answers=2, access=access).at_once == 1
    now[0] = until + 1
    assert exchange(instance, bearing(text), access=access).at_once == 0


@pytest.mark.parametrize("subject", [7, True, 1.5, [], ["a"], {"a": 1}, "", "\ud800", "a\udfff"])
def test_a_jwt_whose_subject_is_not_text_is_refused(
    instance: Instance, authenticator: Authenticator, subject: Any
) -> None:
    def encoded(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    signed = f"{encoded({'alg': 'EdDSA', 'kid': 'EdDSA'})}.{encoded(claims() | {'sub': subject})}"
    signature = base64.urlsafe_b64encode(ED_KEY.sign(signed.encode())).rstrip(b"=").decode()

    asked = [bearing(f"{signed}.{signature}")] * 2
    (answer, _), at_once, _ = both_ways(instance, *asked, answers=2, access=lambda: Access(authenticator))

    assert (answer[:12], at_once) == (b"HTTP/1.1 401", 0)


@pytest.mark.parametrize("has_token", [True, False])
def test_a_request_with_a_mark_without_a_proof_needs_a_token(
    instance: Instance, authenticator: Authenticator, *, has_token: bool
) -> None:
    asked = bearing(READER, MARK) if has_token else question(headers=MARK)
    (answer,), at_once, _ = both_ways(instance, asked, trust=PeerTrust(), access=lambda: Access(authenticator))

    assert (answer[:12], at_once) == ((b"HTTP/1.1 200", 1) if has_token else (b"HTTP/1.1 401", 0))


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_request_with_a_proven_mark_needs_no_token_and_does_not_count_for_the_rate_limit(
    instance: Instance, authenticator: Authenticator, *, is_plain: bool
) -> None:
    trust = PeerTrust(SECRET)
    access = Access(authenticator, RateLimit(0.001, burst=1), Browsers(["nowhere.example"]))

    def marked() -> bytes:
        mark = trust.mark("peer:1", Peer("x:1", trust.incarnation), f"GET {TARGET}")
        return question(headers=f"Balance-Forwarded: {mark}\r\n")

    answers, at_once, _ = exchange(
        instance, marked(), marked(), marked(), answers=3, trust=trust, access=access, is_plain=is_plain
    )

    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * 3
    assert at_once == (3 if is_plain else 0)


@pytest.mark.parametrize(
    "first",
    [
        question(),
        question(f"{GET_BALANCE}?customerId={ELSEWHERE}"),
        question(f"{TARGET}&minPosition={PARTITION}:1"),
        question(f"{GET_BALANCE}?customerId={ELSEWHERE}", MARK),
        question("/nope"),
    ],
    ids=["at once", "asks peers", "not plain", "handed over", "no route"],
)
def test_the_rate_limit_counts_a_request_once_on_every_path_to_an_answer(instance: Instance, first: bytes) -> None:
    access = Access(None, RateLimit(0.001, burst=2))
    answers, at_once, later = exchange(instance, first, question(), question(), answers=3, access=access)

    assert [answer[:12] for answer in answers[1:]] == [b"HTTP/1.1 200", b"HTTP/1.1 429"]
    assert not answers[0].startswith(b"HTTP/1.1 429")
    assert at_once + later <= 2


def test_a_client_beyond_the_rate_limit_is_refused_with_the_bytes_of_aiohttp(
    instance: Instance, authenticator: Authenticator
) -> None:
    (first, second), at_once, _ = both_ways(
        instance,
        *[bearing(READER)] * 2,
        answers=2,
        access=lambda: Access(authenticator, RateLimit(0.001, burst=1)),
    )

    assert (first[:12], second[:12], at_once) == (b"HTTP/1.1 200", b"HTTP/1.1 429", 1)


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_connection_is_attributed_to_the_client_of_an_accepted_token(
    instance: Instance, authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch, *, is_plain: bool
) -> None:
    clients: list[str] = []
    monkeypatch.setattr(Connection, "belongs_to", lambda _self, client: clients.append(client))

    requests = bearing(READER), bearing(READER + "x"), question()
    exchange(instance, *requests, answers=3, access=Access(authenticator), is_plain=is_plain)

    assert clients == ["token:reader"]


def test_a_page_of_a_listed_origin_is_answered_by_aiohttp_which_names_the_origin(instance: Instance) -> None:
    headers = "Host: localhost:5051\r\nOrigin: https://ops.example.com\r\nSec-Fetch-Site: cross-site\r\n"
    (answer,), at_once, _ = both_ways(instance, raw(headers), access=lambda: Access(browsers=BROWSERS))

    assert (answer[:15], at_once) == (b"HTTP/1.1 200 OK", 0)
    assert b"\r\nAccess-Control-Allow-Origin: https://ops.example.com\r\n" in answer
