"""Authentication of clients by bearer tokens (RFC 6750): opaque tokens from a file, and JSON Web Tokens.

Opaque tokens are listed in BALANCE_TOKENS_FILE by their SHA-256, so that a reader of the file cannot use them:

    {"tokens": [{"name": "billing", "sha256": "<64 hex digits>", "scopes": ["balance:read", "balance:add"]}]}

Tokens are long random values, so a plain hash is enough. The lookup may leak the digest by its timing: an attacker
cannot choose a token's digest, and a digest reveals nothing about its token.

JSON Web Tokens (RFC 7519) are verified with the public keys in BALANCE_JWKS_FILE. As RFC 8725 advises, nothing in a
token selects how it is verified: `kid` selects a key from the file, and the key determines the algorithm. This excludes
`alg: none` and a public key used as an HMAC secret.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jwt
from aiohttp import hdrs
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from balance_service.errors import ConfigurationError
from balance_service.http.access.clients import Client, Scope, scopes_of
from balance_service.http.answer import Problem
from balance_service.http.server.reloading import read

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from multidict import CIMultiDictProxy

    from balance_service.http.server.reloading import Reloaded

_TOKENS_SETTING, _JWKS_SETTING = "BALANCE_TOKENS_FILE", "BALANCE_JWKS_FILE"
AUTHENTICATOR_FILES = ("tokens", "jwks")
_BEARER = re.compile(r"(?i:bearer) +([A-Za-z0-9._~+/-]+=*)")  # RFC 6750, section 2.1
_REALM = "balance-service"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[!-~]{1,100}")
_TOKENS_FORM = 'of the form {"tokens": [{"name": …, "sha256": …, "scopes": […]}, …]}'
_JWKS_FORM = 'a JWKS of the form {"keys": […]}'

LEEWAY_SECONDS = 30
"""Tolerated difference between the clocks of the identity provider and this instance."""
# About 5 MB.
_MAX_VERIFIED = 10_000
_MIN_RSA_BITS = 2048
# In UTF-8. Source: OpenID Connect Core 1.0, section 2, which allows 255 ASCII characters.
_MAX_SUBJECT_BYTES = 256
_PUBLIC_KEYS = (rsa.RSAPublicKey, ec.EllipticCurvePublicKey, ed25519.Ed25519PublicKey)
_ALGORITHMS = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
_UNVERIFIABLE = "the token cannot be verified"
_REFUSALS: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.ExpiredSignatureError, "the token has expired"),
    (jwt.ImmatureSignatureError, "the token is not valid yet"),
    (jwt.InvalidAudienceError, "the token is for another audience"),
    (jwt.InvalidIssuerError, "the token is from another issuer"),
    (jwt.MissingRequiredClaimError, "the token lacks one of the claims exp, iss, aud and sub"),
    (jwt.InvalidSignatureError, "the token's signature is wrong"),
)

Tokens = Mapping[bytes, Client]
"""SHA-256 of a token → its client."""


class InvalidTokenError(Exception):
    """The token is not accepted. The message says why, and contains nothing from the token."""


class Authenticator:
    """Finds the client of a request by its bearer token."""

    def __init__(self, tokens: Reloaded[Tokens] | None = None, jwts: Reloaded[Jwts] | None = None) -> None:
        self._tokens = tokens
        self._jwts = jwts

    @property
    def files(self) -> Mapping[str, Reloaded[Any]]:
        files: tuple[Reloaded[Any] | None, ...] = (self._tokens, self._jwts)
        return {name: file for name, file in zip(AUTHENTICATOR_FILES, files, strict=True) if file is not None}

    def remembered(self, headers: CIMultiDictProxy[str]) -> Client | None:
        """Returns the client if its token is in the file or was verified before; never verifies a signature."""
        given = headers.getall(hdrs.AUTHORIZATION, ())
        match = _BEARER.fullmatch(given[0]) if len(given) == 1 else None
        return None if match is None else self._remembered(match[1])

    def client_of(self, headers: CIMultiDictProxy[str]) -> Client:
        """Returns the client that sends a request with these headers.

        Raises:
            Problem: 401 without an accepted token; 400 with several.
        """
        given = headers.getall(hdrs.AUTHORIZATION, ())
        if not given:
            raise unauthenticated()
        if len(given) > 1:
            reason = "the header Authorization is given more than once"
            raise Problem(400, reason, headers=_challenge("invalid_request", reason))
        if given[0][:7].lower() != "bearer ":
            raise unauthenticated()
        match = _BEARER.fullmatch(given[0])
        if match is None:
            raise _invalid_token("the header Authorization does not contain a bearer token")
        token = match[1]
        client = self._remembered(token)
        if client is not None:
            return client
        is_jwt = token.count(".") == 2  # header, payload and signature
        if self._jwts is None or not is_jwt:
            raise _invalid_token("the token is not known")
        try:
            return self._jwts.value.client_of(token)
        except InvalidTokenError as error:
            raise _invalid_token(str(error)) from None

    def _remembered(self, token: str) -> Client | None:
        digest = hashlib.sha256(token.encode()).digest()
        client = None if self._tokens is None else self._tokens.value.get(digest)
        if client is None and self._jwts is not None:
            return self._jwts.value.remembered(digest)
        return client


def unauthenticated() -> Problem:
    """401 without an error code. Source: RFC 6750, section 3.1."""
    return Problem(
        401,
        "a bearer token is required; send it in the header Authorization",
        headers={"WWW-Authenticate": f'Bearer realm="{_REALM}"'},
    )


def insufficient_scope(needed: frozenset[Scope]) -> Problem:
    """403. Source: RFC 6750, section 3.1."""
    names = sorted(needed)
    reason = f"the token does not grant this request; it needs the scope {' or '.join(names)}"
    headers = _challenge("insufficient_scope", reason, f', scope="{" ".join(names)}"')
    return Problem(403, reason, headers=headers)


def _invalid_token(reason: str) -> Problem:
    return Problem(401, reason, headers=_challenge("invalid_token", reason))


def _challenge(error: str, reason: str, more: str = "") -> dict[str, str]:
    return {"WWW-Authenticate": f'Bearer realm="{_REALM}", error="{error}", error_description="{reason}"{more}'}


def load_tokens(file: Path) -> Tokens:
    """Reads a file of opaque tokens. An empty list is valid and admits no client.

    Raises:
        ConfigurationError: the file cannot be read or is malformed. The message contains no hash.
    """
    entries = _entries(file, _TOKENS_SETTING, "tokens", _TOKENS_FORM)
    clients = [_listed(entry, f"{_TOKENS_SETTING}: {file}: token {number}") for number, entry in enumerate(entries, 1)]
    for name, values in (("name", [c.name for _, c in clients]), ("sha256", [digest for digest, _ in clients])):
        if len(set(values)) < len(values):
            raise ConfigurationError(f"{_TOKENS_SETTING}: {file} has a {name} more than once; each token needs its own")
    return dict(clients)


def _entries(file: Path, setting: str, name: str, form: str) -> list[Any]:
    """Returns the list of this name in a JSON file. Raises ConfigurationError."""
    text = read(file, setting)
    try:
        entries = json.loads(text)[name]
    except (ValueError, TypeError, KeyError, RecursionError):
        entries = None
    if not isinstance(entries, list):
        raise ConfigurationError(f"{setting}: {file} is not {form}")
    return entries


def _listed(entry: Any, where: str) -> tuple[bytes, Client]:
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where} is not an object; the file must be {_TOKENS_FORM}")
    name, digest, scopes = entry.get("name"), entry.get("sha256"), entry.get("scopes")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(f"{where} needs a name of 1 to 100 visible ASCII characters")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ConfigurationError(f"{where} ({name}) needs a sha256 of 64 lower-case hexadecimal digits")
    known = scopes_of(scopes)
    if not isinstance(scopes, list) or not known or len(known) != len(scopes):
        raise ConfigurationError(f"{where} ({name}) needs scopes, each once, from {', '.join(Scope)}")
    return bytes.fromhex(digest), Client(f"token:{name}", known)


class Jwts:
    """Verifies JSON Web Tokens with the keys of one JWKS file. Not thread-safe.

    It caches verified tokens until they expire, so that each later request costs one hash.
    """

    def __init__(
        self,
        keys: Mapping[str | None, jwt.PyJWK],
        issuer: str,
        audience: str,
        now: Callable[[], float],
    ) -> None:
        """Args:
        keys: by `kid`.
        now: decides until when a token is cached, in seconds since 1970.
        """
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._now = now
        self._verified: OrderedDict[bytes, tuple[Client, int]] = OrderedDict()

    def client_of(self, token: str) -> Client:
        """Verifies a token and returns its client.

        Raises:
            InvalidTokenError: the token is malformed, wrongly signed, expired, or for another service.
        """
        digest = hashlib.sha256(token.encode()).digest()
        known = self.remembered(digest)
        if known is not None:
            return known
        claims = self._claims(token)
        client = _subject(claims)
        # An int, as PyJWT reads it: a float cannot represent every number that a claim may have.
        self._verified[digest] = client, int(claims["exp"])
        self._verified.move_to_end(digest)
        if len(self._verified) > _MAX_VERIFIED:
            self._verified.popitem(last=False)
        return client

    def remembered(self, digest: bytes) -> Client | None:
        """Returns the client of a verified token that has not expired, by the token's SHA-256."""
        known = self._verified.get(digest)
        return known[0] if known is not None and self._now() < known[1] else None

    def _claims(self, token: str) -> dict[str, Any]:
        try:
            key = self._key(jwt.get_unverified_header(token))
            return jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            reason = next((reason for kind, reason in _REFUSALS if isinstance(error, kind)), _UNVERIFIABLE)
            raise InvalidTokenError(reason) from None
        except (ValueError, TypeError, OverflowError, RecursionError):
            # PyJWT does not wrap these errors about claims and headers of unexpected types.
            raise InvalidTokenError(_UNVERIFIABLE) from None

    def _key(self, header: Mapping[str, Any]) -> jwt.PyJWK:
        kid = header.get("kid")
        if kid is None and len(self._keys) == 1:
            (key,) = self._keys.values()
        else:
            found = self._keys.get(kid) if isinstance(kid, str) else None
            if found is None:
                raise InvalidTokenError("the token is not signed by a known key")
            key = found
        if header.get("alg") != key.algorithm_name:
            raise InvalidTokenError("the token is not signed with the algorithm of its key")
        if "crit" in header:
            raise InvalidTokenError("the token has critical headers, which are not supported")
        return key


def load_jwts(file: Path, issuer: str, audience: str, now: Callable[[], float] = time.time) -> Jwts:
    """Reads a JWKS file (RFC 7517). Ignores keys that are not for signatures by RS256, ES256 or EdDSA.

    Raises:
        ConfigurationError: the file cannot be read, is not a JWKS, or contains no usable key.
    """
    keys: dict[str | None, jwt.PyJWK] = {}
    for number, entry in enumerate(_entries(file, _JWKS_SETTING, "keys", _JWKS_FORM), 1):
        key = _usable(entry, f"{_JWKS_SETTING}: {file}: key {number}")
        if key is None:
            continue
        if key.key_id in keys:
            raise ConfigurationError(f"{_JWKS_SETTING}: {file} has more than one key with the same kid")
        keys[key.key_id] = key
    if not keys:
        raise ConfigurationError(f"{_JWKS_SETTING}: {file} has no public key for RS256, ES256 or EdDSA; add one")
    if len(keys) > 1 and None in keys:
        raise ConfigurationError(f"{_JWKS_SETTING}: {file} has several keys, one without kid; give each its own kid")
    return Jwts(keys, issuer, audience, now)


def _usable(entry: Any, where: str) -> jwt.PyJWK | None:
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where} is not an object")
    algorithm = _ALGORITHMS.get((str(entry.get("kty")), entry.get("crv")))
    if algorithm is None or entry.get("use", "sig") != "sig" or entry.get("alg", algorithm) != algorithm:
        return None
    if "d" in entry:
        raise ConfigurationError(f"{where} is a private key; leave it with the issuer, and list its public key")
    unusable = ConfigurationError(f"{where} is not a public key for {algorithm}; copy it from the issuer again")
    try:
        key = jwt.PyJWK(entry, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        raise unusable from None
    if not isinstance(key.key, _PUBLIC_KEYS) or not isinstance(key.key_id, str | None):
        raise unusable
    if isinstance(key.key, rsa.RSAPublicKey) and key.key.key_size < _MIN_RSA_BITS:
        raise ConfigurationError(f"{where} has {key.key.key_size} bits; use an RSA key of at least {_MIN_RSA_BITS}")
    return key


def _subject(claims: Mapping[str, Any]) -> Client:
    subject = claims["sub"]
    try:
        size = len(subject.encode()) if isinstance(subject, str) else 0
    except UnicodeEncodeError:
        # JSON can escape lone surrogates, which cannot be forwarded, logged or stored as text.
        size = 0
    if not 0 < size <= _MAX_SUBJECT_BYTES:
        raise InvalidTokenError(f"the token's subject is not a text of 1 to {_MAX_SUBJECT_BYTES} bytes of UTF-8")
    # RFC 9068 specifies `scope`; some providers send `scp`, as text or as a list.
    granted = claims.get("scope", claims.get("scp"))
    return Client(f"jwt:{subject}", scopes_of(granted.split() if isinstance(granted, str) else granted))
