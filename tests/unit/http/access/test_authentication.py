"""Authentication: tokens of a file, JSON Web Tokens, and values that only look like them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import RSAAlgorithm

from balance_service.errors import ConfigurationError
from balance_service.http.access.authentication import LEEWAY_SECONDS, InvalidTokenError, Jwts, load_jwts, load_tokens
from balance_service.http.access.clients import Scope
from tests.support.credentials import AUDIENCE, ED_KEY, ISSUER, RSA_KEY, public_keys, token, write_jwks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def jwts(tmp_path: Path) -> Jwts:
    return load_jwts(write_jwks(tmp_path / "jwks.json"), ISSUER, AUDIENCE)


def refusal(jwts: Jwts, text: str) -> str:
    with pytest.raises(InvalidTokenError) as caught:
        jwts.client_of(text)
    return str(caught.value)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_token_of_the_issuer_identifies_its_subject(jwts: Jwts, algorithm: str) -> None:
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
def test_the_token_determines_the_scopes(jwts: Jwts, changed: dict[str, Any], scopes: set[Scope]) -> None:
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
        ({"sub": "\N{BROKEN HEART}" * 65}, "subject"),
    ],
)
def test_a_token_with_wrong_claims_is_refused(jwts: Jwts, changed: dict[str, Any], reason: str) -> None:
    said = refusal(jwts, token(**changed))

    assert any(part in said for part in reason.split("|")), said


def test_clocks_may_differ_within_the_leeway(jwts: Jwts) -> None:
    jwts.client_of(token(exp=-timedelta(seconds=LEEWAY_SECONDS // 2)))
    jwts.client_of(token(nbf=timedelta(seconds=LEEWAY_SECONDS // 2)))


def test_a_token_for_several_audiences_is_accepted(jwts: Jwts) -> None:
    jwts.client_of(token(aud=["others", AUDIENCE]))


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", ""])
def test_an_unsigned_token_is_refused(jwts: Jwts, algorithm: str) -> None:
    _, payload, signature = token().split(".")
    head = encoded({"alg": algorithm, "typ": "JWT", "kid": "RS256"})

    for text in (f"{head}.{payload}.", f"{head}.{payload}.{signature}"):
        refusal(jwts, text)


@pytest.mark.parametrize("form", [PublicFormat.SubjectPublicKeyInfo, PublicFormat.PKCS1])
@pytest.mark.parametrize("algorithm", ["HS256", "HS512"])
def test_a_public_key_is_not_accepted_as_an_hmac_secret(jwts: Jwts, form: PublicFormat, algorithm: str) -> None:
    key = RSA_KEY.public_key().public_bytes(Encoding.PEM, form)
    signed = encoded({"alg": algorithm, "kid": "RS256"}) + "." + token().split(".")[1]
    digest = hmac.new(key, signed.encode(), hashlib.sha256 if algorithm == "HS256" else hashlib.sha512).digest()

    assert "algorithm" in refusal(jwts, signed + "." + base64.urlsafe_b64encode(digest).rstrip(b"=").decode())


@pytest.mark.parametrize("kid", [None, "", "unknown", "../../etc/passwd", "RS256\x00", "' OR 1=1", "https://evil/jwks"])
def test_a_token_with_an_unknown_kid_is_refused(jwts: Jwts, kid: str | None) -> None:
    assert "signed by a known key" in refusal(jwts, token(header={"kid": kid}))


@pytest.mark.parametrize("kid", [7, ["RS256"], {"RS256": 1}, True])
def test_a_kid_that_is_not_text_is_refused(jwts: Jwts, kid: Any) -> None:
    head = encoded({"alg": "RS256", "kid": kid})

    refusal(jwts, ".".join([head, *token().split(".")[1:]]))


def test_with_a_single_key_a_token_needs_no_kid(tmp_path: Path) -> None:
    jwts = load_jwts(write_jwks(tmp_path / "jwks.json", public_keys()[:1]), ISSUER, AUDIENCE)

    jwts.client_of(token(header={"kid": None}))
    refusal(jwts, token("ES256", header={"kid": None}))


def test_a_key_inside_a_token_is_ignored(jwts: Jwts) -> None:
    own = rsa.generate_private_key(65537, 2048)
    jwk = RSAAlgorithm.to_jwk(own.public_key(), as_dict=True)
    for header in ({"jwk": jwk}, {"jku": "https://evil.example.org/jwks"}, {"x5u": "file:///etc/passwd"}):
        text = jwt.encode({"sub": "x"}, own, algorithm="RS256", headers={"kid": "RS256", **header})

        assert "signature" in refusal(jwts, text)


def test_a_key_of_another_algorithm_is_refused(jwts: Jwts) -> None:
    text = jwt.encode({"sub": "x"}, ED_KEY, algorithm="EdDSA", headers={"kid": "RS256"})

    assert "algorithm" in refusal(jwts, text)


def test_critical_headers_are_refused(jwts: Jwts) -> None:
    refusal(jwts, token(header={"crit": ["exp"]}))


def test_a_modified_token_is_refused(jwts: Jwts) -> None:
    head, payload, signature = token().split(".")
    changed = json.loads(base64.urlsafe_b64decode(payload + "==")) | {"scope": "balance:operations"}

    assert "signature" in refusal(jwts, f"{head}.{encoded(changed)}.{signature}")
    refusal(jwts, f"{head}.{payload}.")


@pytest.mark.parametrize(
    "text", ["", ".", "..", "a.b.c", "...", "x" * 8000, "eyJ9.eyJ9.eyJ9", f"{'A' * 4000}.{'A' * 4000}.", "\u00e9.b.c"]
)
def test_a_malformed_token_is_refused(jwts: Jwts, text: str) -> None:
    refusal(jwts, text)


@pytest.mark.parametrize("payload", [b"[" * 5000, b"null", b"[]", b"7", b'"x"', b'{"exp": 1e999}', b'{"exp": NaN}'])
def test_a_signed_token_with_malformed_claims_is_refused(jwts: Jwts, payload: bytes) -> None:
    signed = encoded({"alg": "EdDSA", "kid": "EdDSA"}) + "." + base64.urlsafe_b64encode(payload).rstrip(b"=").decode()
    signature = base64.urlsafe_b64encode(ED_KEY.sign(signed.encode())).rstrip(b"=").decode()

    refusal(jwts, f"{signed}.{signature}")


@pytest.mark.parametrize("beyond", [10**400, str(1 << 40)], ids=["huge", "text"])
def test_the_expiration_time_may_be_any_number(jwts: Jwts, beyond: int | str) -> None:
    text = token(exp=beyond)

    assert jwts.client_of(text) == jwts.client_of(text)


def test_an_expired_token_is_not_found_in_the_cache(tmp_path: Path) -> None:
    jwts = load_jwts(write_jwks(tmp_path / "jwks.json"), ISSUER, AUDIENCE)
    text = token(exp=timedelta(seconds=1 - LEEWAY_SECONDS))
    jwts.client_of(text)

    time.sleep(1.5)

    assert "expired" in refusal(jwts, text)


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("junk", "is not a JWKS"),
        ("[]", "is not a JWKS"),
        ('{"keys": {}}', "is not a JWKS"),
        ('{"keys": []}', "no public key"),
        ('{"keys": [7]}', "key 1 is not an object"),
        ('{"keys": [{"kty": "oct", "k": "aHVudGVyMg"}]}', "no public key"),
        ('{"keys": [{"kty": "RSA", "n": "AQAB", "e": "x"}]}', "key 1 "),
        ('{"keys": [{"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}]}', "key 1 is not a public key for ES256"),
    ],
)
def test_an_unusable_jwks_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "jwks.json"
    file.write_text(content)

    with pytest.raises(ConfigurationError, match=f"^BALANCE_JWKS_FILE: {file}.*{said}"):
        load_jwts(file, ISSUER, AUDIENCE)


def test_private_short_and_ambiguous_keys_are_refused(tmp_path: Path) -> None:
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


def test_keys_for_other_purposes_are_ignored(tmp_path: Path) -> None:
    others = [{**public_keys()[0], "kid": "enc", "use": "enc"}, {**public_keys()[0], "kid": "ps", "alg": "PS256"}]
    jwts = load_jwts(write_jwks(tmp_path / "jwks.json", [*others, public_keys()[1]]), ISSUER, AUDIENCE)

    jwts.client_of(token("ES256"))
    refusal(jwts, token(header={"kid": "enc"}))


# --- tokens of a file


GOOD = {"name": "a", "sha256": "0" * 64, "scopes": ["balance:read"]}


@pytest.mark.parametrize(
    "tokens",
    [
        None,
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
def test_an_unusable_tokens_file_is_named_without_its_hashes(tmp_path: Path, tokens: Any) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"tokens": tokens}))

    with pytest.raises(ConfigurationError, match=f"^BALANCE_TOKENS_FILE: {file}") as caught:
        load_tokens(file)

    assert "0" * 64 not in str(caught.value)
    assert "hunter2" not in str(caught.value)
