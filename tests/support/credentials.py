"""A certificate authority and an identity provider for tests."""

from __future__ import annotations

import datetime
import ipaddress
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from balance_service.devtools.local.processes import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes


class Authority:
    """A certificate authority: signs certificates for loopback servers and clients, as PEM files in `folder`."""

    def __init__(self, folder: Path, name: str = "test-ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        certificate = (
            _builder(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = folder / f"{name}.pem"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, password: str | None = None) -> tuple[Path, Path]:
        """Returns the files of a server and client certificate and of its key, encrypted if `password` is set."""
        key = rsa.generate_private_key(65537, 2048)
        certificate = (
            _builder(_named(name), self._name, key)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        encryption = (
            serialization.NoEncryption()
            if password is None
            else serialization.BestAvailableEncryption(password.encode())
        )
        key_file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        )
        return cert_file, key_file


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: CertificateIssuerPrivateKeyTypes) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


ISSUER, AUDIENCE = "https://identity.example.org/", "balances"
RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
SIGNING: dict[str, Any] = {"RS256": RSA_KEY, "ES256": EC_KEY, "EdDSA": ED_KEY}


def public_keys() -> list[dict[str, Any]]:
    """Returns the public keys as JWKs; the kid of each is its algorithm."""
    found = {
        "RS256": RSAAlgorithm.to_jwk(RSA_KEY.public_key(), as_dict=True),
        "ES256": ECAlgorithm.to_jwk(EC_KEY.public_key(), as_dict=True),
        "EdDSA": OKPAlgorithm.to_jwk(ED_KEY.public_key(), as_dict=True),
    }
    return [{**key, "kid": algorithm, "use": "sig"} for algorithm, key in found.items()]


def write_jwks(file: Path, keys: Sequence[Mapping[str, Any]] | None = None) -> Path:
    """Writes a JWKS file with `keys`, or with all keys."""
    file.write_text(json.dumps({"keys": public_keys() if keys is None else list(keys)}))
    return file


def claims(**changed: Any) -> dict[str, Any]:
    """Returns valid claims with changes: None removes a claim, a timedelta becomes a time from now."""
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
    """Returns a valid token with changed claims or headers; None removes a header."""
    headers = {"kid": algorithm, **(header or {})}
    kept = {name: value for name, value in headers.items() if value is not None}
    return jwt.encode(claims(**changed), SIGNING[algorithm], algorithm=algorithm, headers=kept)
