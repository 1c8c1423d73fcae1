"""Who is let in: tokens of the file, JWTs of the provider, and all that only looks like them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import aiohttp
import jwt
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import RSAAlgorithm

from balance_service.errors import ConfigurationError
from balance_service.http import commands, queries
from balance_service.http.app import Handlers, make_app
from balance_service.http.authorization import SCOPES, Access, Authenticator
from balance_service.http.clients import InvalidTokenError, Scope
from balance_service.http.jwts import LEEWAY_SECONDS, Jwts, load_jwts
from balance_service.http.openapi import document
from balance_service.http.operations import Operations
from balance_service.http.peers import PeerTrust
from balance_service.http.proxy import FORWARDED_HEADER
from balance_service.http.rate_limit import RateLimit
from balance_service.http.reloaded import Reloaded
from balance_service.http.tokens import load_tokens
from tests.unit.fakes import Nobody
from tests.unit.signing import AUDIENCE, ED_KEY, ISSUER, RSA_KEY, public_keys, token, write_jwks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

SECRET = "a secret of all instances"
QUESTION = f"{queries.PATH}?customerId=c1"
READER, WRITER, OPERATOR = "reader-token", "writer-token", "operator-token"


@pytest.fixture
def jwts(tmp_path: Path) -> Jwts:
    return load_jwts(write_jwks(tmp_path / "jwks.json"), ISSUER, AUDIENCE)


def refusal(jwts: Jwts, text: str) -> str:
    with pytest.raises(InvalidTokenError) as caught:
        jwts.client_of(text)
    return str(caught.value)


# --- JWTs


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_token_of_the_provider_is_its_subjects(jwts: Jwts, algorithm: str) -> None:
    for _ in range(2):  # the second time from memory
        client = jwts.client_of(token(algorithm))

        assert (client.name, client.scopes) == ("jwt:billing", frozenset({Scope.READ}))


@pytest.mark.parametrize(
    ("changed", "scopes"),
    [
        ({"scope": "balance:read balance:add"}, {Scope.READ, Scope.ADD}),
        ({"scope": None, "scp": ["balance:operations", "x"]}, {Scope.OPERATIONS}),
        ({"scope": None, "scp": "balance:add"}, {Scope.ADD}),
        ({"scope": None}, set()),
        ({"scope": "balance:readx xbalance:read BALANCE:READ"}, set()),
        ({"scope": 7}, set()),
        ({"scope": {"balance:read": 1}}, set()),
    ],
)
def test_the_scopes_are_those_that_the_token_names(jwts: Jwts, changed: dict[str, Any], scopes: set[Scope]) -> None:
    assert jwts.client_of(token(**changed)).scopes == scopes


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"exp": -timedelta(seconds=LEEWAY_SECONDS + 5)}, "expired"),
        ({"exp": None}, "lacks"),
        ({"exp": "tomorrow"}, "cannot be verified|can be verified"),
        ({"nbf": timedelta(seconds=LEEWAY_SECONDS + 300)}, "not valid yet"),
        ({"aud": "others"}, "another audience"),
        ({"aud": ["others", "more"]}, "another audience"),
        ({"aud": None}, "lacks|another audience"),
        ({"iss": "https://evil.example.org/"}, "another issuer"),
        ({"iss": ISSUER.rstrip("/")}, "another issuer"),
        ({"iss": None}, "lacks|another issuer"),
        ({"sub": None}, "lacks"),
        ({"sub": ""}, "subject"),
        ({"sub": "x" * 257}, "subject"),
    ],
)
def test_a_token_for_another_time_place_or_of_nobody_is_refused(
    jwts: Jwts, changed: dict[str, Any], reason: str
) -> None:
    said = refusal(jwts, token(**changed))

    assert any(part in said for part in reason.split("|")), said


def test_clocks_may_differ_a_little(jwts: Jwts) -> None:
    jwts.client_of(token(exp=-timedelta(seconds=LEEWAY_SECONDS // 2)))
    jwts.client_of(token(nbf=timedelta(seconds=LEEWAY_SECONDS // 2)))


def test_a_token_is_good_for_one_of_several_audiences(jwts: Jwts) -> None:
    jwts.client_of(token(aud=["others", AUDIENCE]))


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", ""])
def test_a_token_that_nobody_signed_is_refused(jwts: Jwts, algorithm: str) -> None:
    _, payload, signature = token().split(".")
    head = encoded({"alg": algorithm, "typ": "JWT", "kid": "RS256"})

    for text in (f"{head}.{payload}.", f"{head}.{payload}.{signature}"):
        refusal(jwts, text)


@pytest.mark.parametrize("form", [PublicFormat.SubjectPublicKeyInfo, PublicFormat.PKCS1])
@pytest.mark.parametrize("algorithm", ["HS256", "HS512"])
def test_a_public_key_is_not_taken_for_the_secret_of_an_hmac(jwts: Jwts, form: PublicFormat, algorithm: str) -> None:
    key = RSA_KEY.public_key().public_bytes(Encoding.PEM, form)
    signed = encoded({"alg": algorithm, "kid": "RS256"}) + "." + token().split(".")[1]
    digest = hmac.new(key, signed.encode(), hashlib.sha256 if algorithm == "HS256" else hashlib.sha512).digest()

    assert "algorithm" in refusal(jwts, signed + "." + base64.urlsafe_b64encode(digest).rstrip(b"=").decode())


@pytest.mark.parametrize("kid", [None, "", "unknown", "../../etc/passwd", "RS256\x00", "' OR 1=1", "https://evil/jwks"])
def test_a_token_whose_key_is_not_one_of_the_files_is_refused(jwts: Jwts, kid: str | None) -> None:
    assert "key that is known" in refusal(jwts, token(header={"kid": kid}))


@pytest.mark.parametrize("kid", [7, ["RS256"], {"RS256": 1}, True])
def test_a_kid_that_is_no_text_is_refused(jwts: Jwts, kid: Any) -> None:
    head = encoded({"alg": "RS256", "kid": kid})

    refusal(jwts, ".".join([head, *token().split(".")[1:]]))


def test_where_there_is_one_key_a_token_need_not_name_it(tmp_path: Path) -> None:
    jwts = load_jwts(write_jwks(tmp_path / "jwks.json", public_keys()[:1]), ISSUER, AUDIENCE)

    jwts.client_of(token(header={"kid": None}))
    refusal(jwts, token("ES256", header={"kid": None}))


def test_a_key_that_a_token_brings_along_counts_for_nothing(jwts: Jwts) -> None:
    own = rsa.generate_private_key(65537, 2048)
    jwk = RSAAlgorithm.to_jwk(own.public_key(), as_dict=True)
    for header in ({"jwk": jwk}, {"jku": "https://evil.example.org/jwks"}, {"x5u": "file:///etc/passwd"}):
        text = jwt.encode({"sub": "x"}, own, algorithm="RS256", headers={"kid": "RS256", **header})

        assert "signature" in refusal(jwts, text)


def test_a_key_of_another_algorithm_is_refused(jwts: Jwts) -> None:
    text = jwt.encode({"sub": "x"}, ED_KEY, algorithm="EdDSA", headers={"kid": "RS256"})

    assert "algorithm" in refusal(jwts, text)


def test_critical_headers_are_not_passed_over(jwts: Jwts) -> None:
    refusal(jwts, token(header={"crit": ["exp"]}))


def test_a_token_that_was_changed_is_refused(jwts: Jwts) -> None:
    head, payload, signature = token().split(".")
    changed = json.loads(base64.urlsafe_b64decode(payload + "==")) | {"scope": "balance:operations"}

    assert "signature" in refusal(jwts, f"{head}.{encoded(changed)}.{signature}")
    refusal(jwts, f"{head}.{payload}.")


@pytest.mark.parametrize(
    "text", ["", ".", "..", "a.b.c", "...", "x" * 8000, "eyJ9.eyJ9.eyJ9", f"{'A' * 4000}.{'A' * 4000}.", "\u00e9.b.c"]
)
def test_what_is_no_token_is_refused(jwts: Jwts, text: str) -> None:
    refusal(jwts, text)


@pytest.mark.parametrize("payload", [b"[" * 5000, b"null", b"[]", b"7", b'"x"', b'{"exp": 1e999}', b'{"exp": NaN}'])
def test_a_signed_token_with_senseless_claims_is_refused(jwts: Jwts, payload: bytes) -> None:
    signed = encoded({"alg": "EdDSA", "kid": "EdDSA"}) + "." + base64.urlsafe_b64encode(payload).rstrip(b"=").decode()
    signature = base64.urlsafe_b64encode(ED_KEY.sign(signed.encode())).rstrip(b"=").decode()

    refusal(jwts, f"{signed}.{signature}")


def test_a_token_is_not_remembered_beyond_its_time(tmp_path: Path) -> None:
    jwts = load_jwts(write_jwks(tmp_path / "jwks.json"), ISSUER, AUDIENCE)
    text = token(exp=timedelta(seconds=1 - LEEWAY_SECONDS))
    jwts.client_of(text)

    time.sleep(1.5)

    assert "expired" in refusal(jwts, text)


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


# --- files


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("junk", "is no JWKS"),
        ("[]", "is no JWKS"),
        ('{"keys": {}}', "is no JWKS"),
        ('{"keys": []}', "no public key"),
        ('{"keys": [7]}', "key 1 is not an object"),
        ('{"keys": [{"kty": "oct", "k": "aHVudGVyMg"}]}', "no public key"),
        ('{"keys": [{"kty": "RSA", "n": "AQAB", "e": "x"}]}', "key 1 "),
        ('{"keys": [{"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}]}', "key 1 is not a public key for ES256"),
    ],
)
def test_a_jwks_file_that_cannot_be_used_is_named(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "jwks.json"
    file.write_text(content)

    with pytest.raises(ConfigurationError, match=f"^BALANCE_JWKS_FILE: {file}.*{said}"):
        load_jwts(file, ISSUER, AUDIENCE)


def test_private_and_short_and_ambiguous_keys_are_refused(tmp_path: Path) -> None:
    short = rsa.generate_private_key(65537, 1024)
    key = public_keys()[0]
    for keys, said in (
        ([RSAAlgorithm.to_jwk(RSA_KEY, as_dict=True)], "private key"),
        ([RSAAlgorithm.to_jwk(short.public_key(), as_dict=True)], "1024 bits"),
        ([key, key], "same kid"),
        ([key, {**public_keys()[1], "kid": None}], "without kid|not a public key"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            load_jwts(write_jwks(tmp_path / "jwks.json", keys), ISSUER, AUDIENCE)


def test_keys_for_other_purposes_are_passed_over(tmp_path: Path) -> None:
    others = [{**public_keys()[0], "kid": "enc", "use": "enc"}, {**public_keys()[0], "kid": "ps", "alg": "PS256"}]
    jwts = load_jwts(write_jwks(tmp_path / "jwks.json", [*others, public_keys()[1]]), ISSUER, AUDIENCE)

    jwts.client_of(token("ES256"))
    refusal(jwts, token(header={"kid": "enc"}))


def write_tokens(file: Path, **scopes: Sequence[str]) -> Path:
    entries = [
        {"name": name, "sha256": hashlib.sha256(f"{name}-token".encode()).hexdigest(), "scopes": list(granted)}
        for name, granted in scopes.items()
    ]
    file.write_text(json.dumps({"tokens": entries}))
    return file


GOOD = {"name": "a", "sha256": "0" * 64, "scopes": ["balance:read"]}


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        {},
        [7],
        [{**GOOD, "name": ""}],
        [{**GOOD, "name": 7}],
        [{**GOOD, "sha256": "hunter2"}],
        [{**GOOD, "sha256": "A" * 64}],
        [{**GOOD, "scopes": []}],
        [{**GOOD, "scopes": "balance:read"}],
        [{**GOOD, "scopes": ["balance:everything"]}],
        [GOOD, {**GOOD, "name": "b"}],
        [GOOD, {**GOOD, "sha256": "1" * 64}],
    ],
)
def test_a_file_of_tokens_that_cannot_be_used_is_named_and_no_hash_is_told(tmp_path: Path, tokens: Any) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"tokens": tokens}))

    with pytest.raises(ConfigurationError, match=f"^BALANCE_TOKENS_FILE: {file}") as caught:
        load_tokens(file)

    assert "0" * 64 not in str(caught.value)
    assert "hunter2" not in str(caught.value)


# --- routes


class Answering(Handlers):
    """Answers both routes of the API at once."""

    async def get_balance(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def add_funds(self, request: web.Request) -> web.Response:
        return web.Response(status=202)


@asynccontextmanager
async def serving(
    folder: Path, rate_limit: RateLimit | None = None, *, authorises: bool = True
) -> AsyncIterator[aiohttp.ClientSession]:
    file = write_tokens(
        folder / "tokens.json",
        reader=["balance:read"],
        writer=["balance:add", "balance:read"],
        operator=["balance:operations"],
    )
    jwks = write_jwks(folder / "jwks.json")
    authenticator = Reloaded([file], lambda: Authenticator(load_tokens(file), load_jwts(jwks, ISSUER, AUDIENCE)))
    access = Access(authenticator if authorises else None, rate_limit)
    app = make_app(Answering(Operations(Nobody())), trust=PeerTrust(SECRET), access=access)
    async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as client:
        yield client


def statuses(
    folder: Path, method: str, path: str, *headers: Mapping[str, str] | Sequence[tuple[str, str]]
) -> list[int]:
    async def run() -> list[int]:
        found = []
        async with serving(folder) as client:
            for given in headers:
                async with client.request(method, path, headers=given) as answer:
                    found.append(answer.status)
                    if answer.status >= 400:
                        assert answer.content_type == "application/problem+json"
                    if answer.status in (401, 403) and FORWARDED_HEADER not in given:
                        assert answer.headers["WWW-Authenticate"].startswith("Bearer "), path
        return found

    return asyncio.run(run())


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", QUESTION, [401, 200, 200, 403]),
        ("POST", commands.PATH, [401, 403, 202, 403]),
        ("GET", "/metrics", [401, 403, 403, 200]),
        ("GET", "/api/status", [401, 403, 403, 200]),
        ("GET", "/openapi.json", [401, 200, 200, 200]),
        ("GET", "/health/live", [200, 200, 200, 200]),
        ("GET", "/health/ready", [200, 200, 200, 200]),
        ("GET", "/nothing-there", [401, 404, 404, 404]),
        ("GET", commands.PATH, [401, 405, 405, 405]),
        ("GET", "/%61pi/status", [401, 403, 403, 200]),
        ("GET", "/health/../api/status", [401, 403, 403, 200]),
    ],
)
def test_each_route_asks_for_its_scope(tmp_path: Path, method: str, path: str, expected: list[int]) -> None:
    tokens = [{}, bearer(READER), bearer(WRITER), bearer(OPERATOR)]

    assert statuses(tmp_path, method, path, *tokens) == expected


def test_what_is_not_one_good_token_is_refused(tmp_path: Path) -> None:
    good = f"Bearer {READER}"
    refused = ["", "Bearer", "Bearer ", "Basic cmVhZGVyOnRva2Vu", READER, f"Bearer {READER}x", f"Bearer {READER},x"]
    refused += ["Bearer \udcff", f"Bearer {READER} {READER}", f"Token {READER}", "Bearer " + "x" * 7000]
    refused += ["Bearer " + hashlib.sha256(READER.encode()).hexdigest()]

    found = statuses(tmp_path, "GET", QUESTION, *[{"Authorization": value} for value in refused])
    assert dict(zip(refused, found, strict=True)) == dict.fromkeys(refused, 401)

    several = [("Authorization", good), ("Authorization", good)]
    accepted = [{"Authorization": v} for v in (good, f"bearer {READER}", f"BEARER  {READER}", f"Bearer {token()}")]
    assert statuses(tmp_path, "GET", QUESTION, several, *accepted) == [400, 200, 200, 200, 200]
    assert statuses(tmp_path, "GET", f"{QUESTION}&access_token={READER}", {}) == [401]


def test_a_refusal_says_what_is_wrong_and_what_is_needed(tmp_path: Path) -> None:
    async def run() -> tuple[str, str, str, str]:
        async with serving(tmp_path) as client:
            async with client.get(QUESTION) as answer:
                nothing = answer.headers["WWW-Authenticate"]
            async with client.get(QUESTION, headers=bearer(token(aud="others"))) as answer:
                wrong, detail = answer.headers["WWW-Authenticate"], (await answer.json())["detail"]
            async with client.get("/metrics", headers=bearer(READER)) as answer:
                return nothing, wrong, detail, answer.headers["WWW-Authenticate"]

    nothing, wrong, detail, insufficient = asyncio.run(run())

    assert nothing == 'Bearer realm="balance-service"'
    assert 'error="invalid_token", error_description="the token is for another audience"' in wrong
    assert detail == "the token is for another audience"
    assert 'error="insufficient_scope"' in insufficient
    assert 'scope="balance:operations"' in insufficient


def test_a_query_that_a_peer_proves_is_let_in_and_nothing_else_that_is_marked(tmp_path: Path) -> None:
    def mark(path: str, secret: str = SECRET) -> dict[str, str]:
        return {FORWARDED_HEADER: PeerTrust(secret).mark("peer:1", path)}

    marks = mark(QUESTION), mark(QUESTION, SECRET + "x"), mark("/x")
    assert statuses(tmp_path, "GET", QUESTION, *marks) == [200, 403, 403]
    assert statuses(tmp_path, "GET", "/api/status", mark("/api/status")) == [401]
    assert statuses(tmp_path, "POST", commands.PATH, mark(commands.PATH)) == [401]


def test_a_mark_without_proof_lets_nobody_in(tmp_path: Path) -> None:
    async def run() -> int:
        tokens = write_tokens(tmp_path / "tokens.json", reader=["balance:read"])
        access = Access(Reloaded([tokens], lambda: Authenticator(load_tokens(tokens), None)))
        app = make_app(Answering(Operations(Nobody())), trust=PeerTrust(), access=access)
        async with (
            TestServer(app) as server,
            aiohttp.ClientSession(server.make_url("/")) as client,
            client.get(QUESTION, headers={FORWARDED_HEADER: "peer:1"}) as answer,
        ):
            return answer.status

    assert asyncio.run(run()) == 401


def test_a_client_that_asks_too_often_is_told_when_to_come_back_and_others_are_served(tmp_path: Path) -> None:
    async def run() -> tuple[list[int], str, list[int]]:
        async with serving(tmp_path, RateLimit(0.1, burst=2)) as client:
            found = []
            for _ in range(3):
                async with client.get(QUESTION, headers=bearer(READER)) as answer:
                    found.append(answer.status)
            pause = answer.headers["Retry-After"]
            others = []
            marked = {FORWARDED_HEADER: PeerTrust(SECRET).mark("peer:1", QUESTION)}
            for headers in (bearer(WRITER), {}, bearer("junk"), {}, *[marked] * 4):
                async with client.get(QUESTION, headers=headers) as answer:
                    others.append(answer.status)
            for _ in range(3):
                async with client.get("/health/live") as answer:
                    others.append(answer.status)
        return found, pause, others

    found, pause, others = asyncio.run(run())

    assert found == [200, 200, 429]
    assert 1 <= int(pause) <= 10
    assert others == [200, 401, 401, 429, *[200] * 7]


def test_without_authorisation_clients_are_told_apart_by_their_addresses(tmp_path: Path) -> None:
    async def run() -> list[int]:
        found = []
        async with serving(tmp_path, RateLimit(0.1, burst=2), authorises=False) as client:
            for headers in (bearer("a"), bearer("b"), bearer("c")):
                async with client.get(QUESTION, headers=headers) as answer:
                    found.append(answer.status)
        return found

    assert asyncio.run(run()) == [200, 200, 429]


# --- the document


def test_the_document_says_which_scopes_are_needed_and_what_is_answered_without() -> None:
    secured = json.loads(document(authorises=True, limits_rate=True))

    assert secured["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for path, methods in secured["paths"].items():
        for operation in methods.values():
            is_open = path.startswith("/health/")
            assert ("security" in operation) != is_open
            assert {"401", "403", "429"}.isdisjoint(operation["responses"]) == is_open, path
    asked = secured["paths"][queries.PATH]["get"]
    assert asked["security"] == [{"bearer": ["balance:read"]}]
    assert "Balance-Forwarded" in asked["responses"]["403"]["description"]


def test_every_route_of_the_document_has_a_scope_or_is_open() -> None:
    plain = json.loads(document())

    assert set(plain["paths"]) - {"/health/live", "/health/ready"} == set(SCOPES)
    assert "securitySchemes" not in plain["components"]
