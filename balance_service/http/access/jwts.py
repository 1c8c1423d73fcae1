"""JSON Web Tokens that clients have from an identity provider, verified by its public keys (RFC 7519, RFC 8725).

What a token says of how to verify it is not believed: its key is one of the file's, found by `kid` and nothing else,
and the key, not the token, says which algorithm counts. So neither `alg: none` nor a public key taken for an HMAC's
secret gets anywhere.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from balance_service.errors import ConfigurationError
from balance_service.http.access.clients import Client, InvalidTokenError, scopes_of
from balance_service.http.server.reloading import read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

SETTING = "BALANCE_JWKS_FILE"
# How far the provider's clock may be off.
LEEWAY_SECONDS = 30
# About 5 MB.
MAX_VERIFIED = 10_000
_MIN_RSA_BITS = 2048
# Of UTF-8. Source: OpenID Connect Core 1.0, section 2, which allows 255 characters of ASCII.
_MAX_SUBJECT_BYTES = 256
_PUBLIC_KEYS = (rsa.RSAPublicKey, ec.EllipticCurvePublicKey, ed25519.Ed25519PublicKey)
_ALGORITHMS = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
_REFUSALS: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.ExpiredSignatureError, "the token has expired"),
    (jwt.ImmatureSignatureError, "the token is not valid yet"),
    (jwt.InvalidAudienceError, "the token is for another audience"),
    (jwt.InvalidIssuerError, "the token is of another issuer"),
    (jwt.MissingRequiredClaimError, "the token lacks one of the claims exp, iss, aud and sub"),
    (jwt.InvalidSignatureError, "the token's signature is wrong"),
)


class Jwts:
    """Verifies tokens by the keys of one file as it was read. Belongs to the event loop.

    A token that was verified is remembered until it expires, so that it costs a hash the next time.
    """

    def __init__(
        self,
        keys: Mapping[str | None, jwt.PyJWK],
        issuer: str,
        audience: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        keys: by `kid`.
        """
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._now = now
        self._verified: OrderedDict[bytes, tuple[Client, int]] = OrderedDict()

    def client_of(self, token: str) -> Client:
        """Whose token it is.

        Raises:
            InvalidTokenError: it is none, or not one for this service and this moment.
        """
        digest = hashlib.sha256(token.encode()).digest()
        known = self.remembered(digest)
        if known is not None:
            return known
        claims = self._claims(token)
        client = _client(claims)
        # As PyJWT reads it: a float would not hold every number that a claim may be.
        self._verified[digest] = client, int(claims["exp"])
        self._verified.move_to_end(digest)
        if len(self._verified) > MAX_VERIFIED:
            self._verified.popitem(last=False)
        return client

    def remembered(self, digest: bytes) -> Client | None:
        """Whose token has this SHA-256, if it was verified before and has not expired."""
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
            for kind, reason in _REFUSALS:
                if isinstance(error, kind):
                    raise InvalidTokenError(reason) from None
            raise InvalidTokenError("the token is not one that can be verified here") from None
        except (ValueError, TypeError, OverflowError, RecursionError):
            # Of claims and headers of a kind that nobody expects.
            raise InvalidTokenError("the token is not one that can be verified here") from None

    def _key(self, header: Mapping[str, Any]) -> jwt.PyJWK:
        kid = header.get("kid")
        if kid is None and len(self._keys) == 1:
            (key,) = self._keys.values()
        else:
            found = self._keys.get(kid) if isinstance(kid, str) else None
            if found is None:
                raise InvalidTokenError("the token is not signed by a key that is known here")
            key = found
        if header.get("alg") != key.algorithm_name:
            raise InvalidTokenError("the token is not signed by the algorithm of its key")
        if "crit" in header:
            raise InvalidTokenError("the token has critical headers, which are not understood here")
        return key


def load_jwts(file: Path, issuer: str, audience: str) -> Jwts:
    """Tokens of this issuer for this audience, by the public keys of a JWKS file (RFC 7517).

    Keys that are not for signatures, and of other kinds than RS256, ES256 and EdDSA, are passed over.

    Raises:
        ConfigurationError: the file cannot be read, is no JWKS, or has no key that can be used.
    """
    text = read(file, SETTING)
    try:
        entries = json.loads(text)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        entries = None
    if not isinstance(entries, list):
        raise ConfigurationError(f'{SETTING}: {file} is no JWKS; it must be of the form {{"keys": […]}}')
    keys: dict[str | None, jwt.PyJWK] = {}
    for number, entry in enumerate(entries, 1):
        key = _usable(entry, f"{SETTING}: {file}: key {number}")
        if key is None:
            continue
        if key.key_id in keys:
            raise ConfigurationError(f"{SETTING}: {file} has more than one key with the same kid; give each its own")
        keys[key.key_id] = key
    if not keys:
        raise ConfigurationError(f"{SETTING}: {file} has no public key for RS256, ES256 or EdDSA; add one")
    if len(keys) > 1 and None in keys:
        raise ConfigurationError(f"{SETTING}: {file} has several keys, one of them without kid; give each its own")
    return Jwts(keys, issuer, audience)


def _usable(entry: Any, where: str) -> jwt.PyJWK | None:
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where} is not an object")
    algorithm = _ALGORITHMS.get((str(entry.get("kty")), entry.get("crv")))
    if algorithm is None or entry.get("use", "sig") != "sig" or entry.get("alg", algorithm) != algorithm:
        return None
    if "d" in entry:
        raise ConfigurationError(f"{where} is a private key; leave that with the issuer, and give the public one")
    try:
        key = jwt.PyJWK(entry, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        raise ConfigurationError(
            f"{where} is not a public key for {algorithm}; take it from the issuer again"
        ) from None
    if not isinstance(key.key, _PUBLIC_KEYS) or not isinstance(key.key_id, str | None):
        raise ConfigurationError(f"{where} is not a public key for {algorithm}; take it from the issuer again")
    if isinstance(key.key, rsa.RSAPublicKey) and key.key.key_size < _MIN_RSA_BITS:
        raise ConfigurationError(f"{where} has {key.key.key_size} bits; use an RSA key of at least {_MIN_RSA_BITS}")
    return key


def _client(claims: Mapping[str, Any]) -> Client:
    subject = claims["sub"]
    try:
        size = len(subject.encode()) if isinstance(subject, str) else 0
    except UnicodeEncodeError:
        # JSON can escape halves of characters, which no text can hold that is passed on, logged or kept.
        size = 0
    if not 0 < size <= _MAX_SUBJECT_BYTES:
        raise InvalidTokenError(f"the token's subject is not a text of 1 to {_MAX_SUBJECT_BYTES} bytes of UTF-8")
    # RFC 9068 has `scope`; some providers have `scp`, as text or as a list.
    granted = claims.get("scope", claims.get("scp"))
    return Client(f"jwt:{subject}", scopes_of(granted.split() if isinstance(granted, str) else granted))
