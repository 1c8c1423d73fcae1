"""An identity provider of the tests' own: keys, their JWKS file, and the tokens they sign."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

ISSUER, AUDIENCE = "https://identity.example.org/", "balances"
RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
SIGNING: dict[str, Any] = {"RS256": RSA_KEY, "ES256": EC_KEY, "EdDSA": ED_KEY}


def public_keys() -> list[dict[str, Any]]:
    """The public halves, as JWKs; each has its algorithm as its kid."""
    found = {
        "RS256": RSAAlgorithm.to_jwk(RSA_KEY.public_key(), as_dict=True),
        "ES256": ECAlgorithm.to_jwk(EC_KEY.public_key(), as_dict=True),
        "EdDSA": OKPAlgorithm.to_jwk(ED_KEY.public_key(), as_dict=True),
    }
    return [{**key, "kid": algorithm, "use": "sig"} for algorithm, key in found.items()]


def write_jwks(file: Path, keys: Sequence[Mapping[str, Any]] | None = None) -> Path:
    """A JWKS file; of all keys unless told."""
    file.write_text(json.dumps({"keys": public_keys() if keys is None else list(keys)}))
    return file


def claims(**changed: Any) -> dict[str, Any]:
    """Claims that are accepted; None leaves one out, and a timedelta is a time from now."""
    whole = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "billing",
        "exp": timedelta(minutes=5),
        "scope": "openid balance:read",
        **changed,
    }
    now = int(time.time())
    return {
        name: now + int(value.total_seconds()) if isinstance(value, timedelta) else value
        for name, value in whole.items()
        if value is not None
    }


def token(algorithm: str = "RS256", header: Mapping[str, Any] | None = None, **changed: Any) -> str:
    """A token signed as it should be, but for what is changed; None leaves a header out."""
    headers = {"kid": algorithm, **(header or {})}
    kept = {name: value for name, value in headers.items() if value is not None}
    return jwt.encode(claims(**changed), SIGNING[algorithm], algorithm=algorithm, headers=kept)
