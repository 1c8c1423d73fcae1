"""TLS contexts of an instance, as server and as client of its peers: one certificate for both.

TLS 1.2 at least, HTTP/1.1 only.
"""

from __future__ import annotations

import ssl
from asyncio import sslproto
from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.http.server.reloading import Reloaded, read

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.settings.http_security import HttpSecuritySettings

_CERTIFICATE, _KEY = "BALANCE_TLS_CERTIFICATE", "BALANCE_TLS_KEY"
_KEY_PASSWORD = "BALANCE_TLS_KEY_PASSWORD"  # noqa: S105  # its name
_CA, _CLIENT_CA = "BALANCE_TLS_CA", "BALANCE_TLS_CLIENT_CA"
# OpenSSL's reasons for a key that is not the certificate's: of another pair, or of another algorithm.
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")
# Two records. asyncio allocates as much for each connection when it is accepted, so that its own 256 KiB would be a
# gigabyte for the connections that an instance accepts from clients which send nothing.
_READ_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. With `client_ca`, every client must present a certificate."""

    certificate: Path
    key: Path
    key_password: str | None = None
    ca: Path | None = None
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class Tls:
    """The contexts for connections from clients and to peers."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def tls_of(settings: HttpSecuritySettings) -> Reloaded[Tls] | None:
    """Loads TLS as configured; None without TLS.

    Raises:
        ConfigurationError: a file cannot be used. The message names the setting.
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
    """Loads contexts, and bounds the memory of each TLS connection of this process.

    Raises:
        ConfigurationError: a file cannot be used. The message names the setting.
    """
    sslproto.SSLProtocol.max_size = _READ_BYTES
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = ssl.TLSVersion.TLSv1_2
    server.options |= ssl.OP_NO_RENEGOTIATION
    server.set_alpn_protocols(["http/1.1"])
    _present(server, files)
    if files.client_ca is not None:
        _load_certificates(server, files.client_ca, _CLIENT_CA)
        server.verify_mode = ssl.CERT_REQUIRED
    return Tls(server, client_context(files.ca, files))


def client_context(ca: Path | None, certificate: TlsFiles | None = None) -> ssl.SSLContext:
    """A context that trusts these CAs, or the system's, and presents the certificate if one is given.

    Raises:
        ConfigurationError: a file cannot be used. The message names the setting.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.minimum_version = ssl.TLSVersion.TLSv1_2
    client.set_alpn_protocols(["http/1.1"])
    if ca is None:
        client.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _load_certificates(client, ca, _CA)
    if certificate is not None:
        _present(client, certificate)
    return client


def _load_certificates(context: ssl.SSLContext, file: Path, setting: str) -> None:
    """Has a context trust the certificates in a file."""
    read(file, setting)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError:
        raise ConfigurationError(f"{setting}: {file} holds no certificate in PEM; name a file that does") from None


def _present(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Has a context present a certificate. OpenSSL does not say which file it rejects, so each is checked alone."""
    _load_certificates(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files.certificate, _CERTIFICATE)
    is_encrypted = b"ENCRYPTED" in read(files.key, _KEY)
    if is_encrypted and files.key_password is None:
        raise ConfigurationError(f"{_KEY}: {files.key} is encrypted; set {_KEY_PASSWORD}")
    try:
        # Without a password, OpenSSL would ask for one at the terminal.
        context.load_cert_chain(files.certificate, files.key, files.key_password or "")
    except ssl.SSLError as error:
        if error.reason in _MISMATCHES:
            reason = (
                f"{_KEY}: {files.key} is not the key of {_CERTIFICATE} {files.certificate}; name the file with its key"
            )
        elif is_encrypted:
            reason = f"{_KEY_PASSWORD} does not decrypt {files.key}; set the key's password"
        else:
            reason = f"{_KEY}: {files.key} holds no private key in PEM; name a file that does"
        raise ConfigurationError(reason) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{_CERTIFICATE} {files.certificate} and {_KEY} {files.key} cannot be used: {error}"
        ) from None
