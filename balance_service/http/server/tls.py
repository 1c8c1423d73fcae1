"""TLS of the HTTP server, and of what it asks of peers: one certificate for both, read again when it is renewed.

TLS 1.2 at least, HTTP/1.1 only. Certificates and keys are checked one by one before they are used, because OpenSSL does
not say which of them it dislikes.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from balance_service.errors import ConfigurationError
from balance_service.http.server.reloading import Reloaded, read

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes, PublicKeyTypes

    from balance_service.settings.http_security import HttpSecuritySettings

_CERTIFICATE, _KEY = "BALANCE_TLS_CERTIFICATE", "BALANCE_TLS_KEY"
_KEY_PASSWORD = "BALANCE_TLS_KEY_PASSWORD"  # noqa: S105  # its name
_CA, _CLIENT_CA = "BALANCE_TLS_CA", "BALANCE_TLS_CLIENT_CA"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the parts are; `client_ca` makes every client present a certificate."""

    certificate: Path
    key: Path
    key_password: str | None = None
    ca: Path | None = None
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class Tls:
    """Both ends of an instance's TLS."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def tls_of(settings: HttpSecuritySettings) -> Reloaded[Tls] | None:
    """TLS as the settings want it; None if they want none.

    Raises:
        ConfigurationError: a file cannot be used; names the setting.
    """
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    password = settings.tls_key_password
    files = TlsFiles(
        settings.tls_certificate,
        settings.tls_key,
        None if password is None else password.get_secret_value(),
        settings.tls_ca,
        settings.tls_client_ca,
    )
    watched = [f for f in (files.certificate, files.key, files.ca, files.client_ca) if f is not None]
    return Reloaded(watched, lambda: load_tls(files))


def load_tls(files: TlsFiles) -> Tls:
    """Contexts of what the files hold now.

    Raises:
        ConfigurationError: a file cannot be used; names the setting.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = ssl.TLSVersion.TLSv1_2
    server.options |= ssl.OP_NO_RENEGOTIATION
    server.set_alpn_protocols(["http/1.1"])
    _present(server, files)
    if files.client_ca is not None:
        _trust(server, files.client_ca, _CLIENT_CA)
        server.verify_mode = ssl.CERT_REQUIRED
    return Tls(server, client_context(files.ca, files))


def client_context(ca: Path | None, certificate: TlsFiles | None = None) -> ssl.SSLContext:
    """For clients of an instance: it trusts these CAs, or the system's, and presents the certificate if there is one.

    Raises:
        ConfigurationError: a file cannot be used; names the setting.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.minimum_version = ssl.TLSVersion.TLSv1_2
    client.set_alpn_protocols(["http/1.1"])
    if ca is None:
        client.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _trust(client, ca, _CA)
    if certificate is not None:
        _present(client, certificate)
    return client


def _trust(context: ssl.SSLContext, ca: Path, setting: str) -> None:
    text = read(ca, setting)
    try:
        authorities = x509.load_pem_x509_certificates(text)
        context.load_verify_locations(cadata=b"".join(a.public_bytes(Encoding.DER) for a in authorities))
    except (ValueError, ssl.SSLError):
        raise ConfigurationError(f"{setting}: {ca} holds no certificates in PEM; name a file that does") from None


def _present(context: ssl.SSLContext, files: TlsFiles) -> None:
    _check_pair(files)
    try:
        # A password that is always given keeps OpenSSL from asking for one at the terminal.
        context.load_cert_chain(files.certificate, files.key, files.key_password or "")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{_CERTIFICATE} {files.certificate} and {_KEY} {files.key} cannot be used: {error}"
        ) from None


def _check_pair(files: TlsFiles) -> None:
    text = read(files.certificate, _CERTIFICATE)
    try:
        certificate = x509.load_pem_x509_certificates(text)[0]
    except ValueError:
        raise ConfigurationError(
            f"{_CERTIFICATE}: {files.certificate} holds no certificate in PEM; name a file that does"
        ) from None
    password = None if files.key_password is None else files.key_password.encode()
    text = read(files.key, _KEY)
    is_encrypted = b"ENCRYPTED" in text
    if is_encrypted and password is None:
        raise ConfigurationError(f"{_KEY}: {files.key} is encrypted; set {_KEY_PASSWORD}")
    try:
        key = load_pem_private_key(text, password if is_encrypted else None)
    except (ValueError, TypeError):
        if is_encrypted:
            raise ConfigurationError(f"{_KEY_PASSWORD} does not open {files.key}; give the key's password") from None
        raise ConfigurationError(f"{_KEY}: {files.key} holds no private key in PEM; name a file that does") from None
    if _public(key.public_key()) != _public(certificate.public_key()):
        raise ConfigurationError(
            f"{_KEY}: {files.key} is not the key of {_CERTIFICATE} {files.certificate}; name the one that is"
        )


def _public(key: PublicKeyTypes | CertificatePublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
