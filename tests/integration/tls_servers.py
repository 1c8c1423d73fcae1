"""Small TLS servers: a reverse proxy that requires credentials, and an OAuth token endpoint."""

from __future__ import annotations

import base64
import http.server
import json
import ssl
import threading
import time
import urllib.parse
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from balance_service.devtools.local.processes import HOST

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TOKEN_SECONDS = 600


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Logs nothing."""

    def answer(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))


@contextmanager
def _serving(handler: type[_Handler], certificate: tuple[Path, Path]) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server = http.server.ThreadingHTTPServer((HOST, 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that distrusts the server hangs up
    # The handshake runs in the connection's thread, so that a silent client does not block others.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"https://{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def protected(url: str, credentials: set[str], readers: set[str], certificate: tuple[Path, Path]) -> Iterator[str]:
    """Serves the registry at `url` over TLS; requires one of the credentials, and refuses registrations by readers."""
    base = urllib.parse.urlsplit(url)
    origin = httpx.Client(base_url=f"{base.scheme}://{base.netloc}", timeout=30, trust_env=False)

    class Handler(_Handler):
        def _forward(self) -> None:
            body = self.body()
            who = self.headers.get("Authorization")
            if who not in credentials | readers:
                self.answer(401, b'{"error_code": 40101, "message": "Unauthorized"}')
                return
            if (
                who in readers
                and self.command == "POST"
                and urllib.parse.urlsplit(self.path).path.endswith("/versions")
            ):
                self.answer(403, b'{"error_code": 40301, "message": "Forbidden"}')
                return
            kept = {"Content-Type", "Accept"}
            headers = {name: value for name, value in self.headers.items() if name in kept}
            answer = origin.request(self.command, self.path, content=body, headers=headers)
            self.answer(answer.status_code, answer.content, answer.headers.get("Content-Type", "application/json"))

        def do_GET(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

    with origin, _serving(Handler, certificate) as here:
        yield here + base.path


@contextmanager
def token_endpoint(
    client_id: str, client_secret: str, certificate: tuple[Path, Path], keys_file: Path
) -> Iterator[str]:
    """Runs an OAuth server with one client; yields its token URL and writes its public keys to a file."""
    key = rsa.generate_private_key(65537, 2048)
    numbers = key.public_key().public_numbers()
    keys = {
        "keys": [
            {
                "kty": "RSA",
                "kid": "k1",
                "alg": "RS256",
                "use": "sig",
                "n": _base64(numbers.n.to_bytes(256, "big")),
                "e": _base64(numbers.e.to_bytes(3, "big")),
            }
        ]
    }

    keys_file.write_text(json.dumps(keys))

    def token() -> str:
        now = int(time.time())
        claims = {"sub": client_id, "iat": now, "exp": now + _TOKEN_SECONDS, "aud": "kafka", "jti": uuid.uuid4().hex}
        parts = [{"alg": "RS256", "typ": "JWT", "kid": "k1"}, claims]
        signed = ".".join(_base64(json.dumps(part).encode()) for part in parts)
        return f"{signed}.{_base64(key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    wanted = "Basic " + base64.b64encode(f"{client_id}:{client_secret}".encode()).decode()

    class Handler(_Handler):
        def do_POST(self) -> None:
            form = urllib.parse.parse_qs(self.body().decode())
            if self.headers.get("Authorization") != wanted or form.get("grant_type") != ["client_credentials"]:
                self.answer(401, b'{"error": "invalid_client"}')
                return
            granted: dict[str, Any] = {"access_token": token(), "token_type": "Bearer", "expires_in": _TOKEN_SECONDS}
            self.answer(200, json.dumps(granted).encode())

    with _serving(Handler, certificate) as here:
        yield f"{here}/token"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
