"""A broker with TLS, SASL and ACLs on extra listeners, an OAuth server, and a registry behind TLS.

The test uses the plaintext listener, where the anonymous user is the superuser.
"""

from __future__ import annotations

import base64
import http.server
import json
import re
import ssl
import threading
import time
import urllib.parse
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from balance_service.devtools.local.broker import Broker, BrokerExtras
from balance_service.devtools.local.processes import HOST, free_port
from tests.support.credentials import Authority
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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


# Part of every secret; must appear nowhere else.
CANARY = "canary-7f3a"
USER = "alice"
PASSWORD = f'{CANARY}-sasl"; \\ pass'
CLIENT, CLIENT_SECRET = "alice-oauth", f"{CANARY}-oauth-secret"
KEY_PASSWORD = f"{CANARY}-key-password"
REGISTRY_USER, REGISTRY_PASSWORD, REGISTRY_TOKEN = "alice", f"{CANARY}-registry", f"{CANARY}-registry-token"
REGISTRY_READER_TOKEN = f"{CANARY}-registry-reader-token"
PEER_SECRET = f"{CANARY}-peer-secret"

_ACL_SECONDS = 10.0


@dataclass(frozen=True)
class SecuredStack:
    """Addresses, certificates and accounts of the secured servers."""

    admin: AdminClient
    bootstrap_servers: str
    sasl: str
    """Bootstrap servers of SASL_SSL: PLAIN, SCRAM, OAUTHBEARER."""
    mtls: str
    """Bootstrap servers of SSL that requires a client certificate."""
    ca: Path
    client_certificate: Path
    client_key: Path
    """Encrypted by KEY_PASSWORD."""
    token_url: str
    registry_url: str

    def sasl_properties(self, mechanism: str) -> dict[str, str]:
        """Returns librdkafka properties for a login with a password."""
        return {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.ca),
            "sasl.mechanism": mechanism,
            "sasl.username": USER,
            "sasl.password": PASSWORD,
        }

    def oauth_properties(self) -> dict[str, str]:
        """Returns librdkafka properties for a login with a token."""
        return {
            "security.protocol": "sasl_ssl",
            "ssl.ca.location": str(self.ca),
            "https.ca.location": str(self.ca),
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": CLIENT,
            "sasl.oauthbearer.client.secret": CLIENT_SECRET,
            "sasl.oauthbearer.scope": "kafka",
            "sasl.oauthbearer.token.endpoint.url": self.token_url,
        }

    def mtls_properties(self) -> dict[str, str]:
        """Returns librdkafka properties for a login with a certificate."""
        return {
            "security.protocol": "ssl",
            "ssl.ca.location": str(self.ca),
            "ssl.certificate.location": str(self.client_certificate),
            "ssl.key.location": str(self.client_key),
            "ssl.key.password": KEY_PASSWORD,
        }

    def grant(self, bindings: Iterable[AclBinding]) -> None:
        """Creates ACLs; returns once the authorizer knows them."""
        wanted = set(bindings)
        for future in self.admin.create_acls(list(wanted)).values():
            future.result(_ACL_SECONDS)
        eventually(lambda: wanted <= self._granted(), "the broker's authorizer knows the grants")

    def revoke(self, *bindings: AclBinding) -> None:
        """Deletes ACLs; returns once the authorizer has dropped them."""
        filters = [
            AclBindingFilter(
                b.restype, b.name, b.resource_pattern_type, b.principal, b.host, b.operation, b.permission_type
            )
            for b in bindings
        ]
        for future in self.admin.delete_acls(filters).values():
            future.result(_ACL_SECONDS)
        eventually(lambda: self._granted().isdisjoint(bindings), "the broker's authorizer has dropped the grants")

    def _granted(self) -> set[AclBinding]:
        """Returns the ACLs that the broker's authorizer knows; it lags behind the controller."""
        anything: Any = None  # None matches anything, which the annotations do not allow
        everything = AclBindingFilter(
            ResourceType.ANY,
            anything,
            ResourcePatternType.ANY,
            anything,
            anything,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        return set(self.admin.describe_acls(everything).result(_ACL_SECONDS))


@contextmanager
def secured_stack(folder: Path, registry_url: str) -> Iterator[SecuredStack]:
    """Starts the broker, and a TLS proxy in front of the registry at `registry_url`."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = Authority(folder)
    server = authority.issue("server")
    client_certificate, client_key = authority.issue("alice-tls", KEY_PASSWORD)
    combined = folder / "server-both.pem"
    combined.write_text("".join(path.read_text() for path in server))
    keys = folder / "keys.json"
    with ExitStack() as stack:
        token_url = stack.enter_context(token_endpoint(CLIENT, CLIENT_SECRET, server, keys))
        registry = stack.enter_context(protected(registry_url, _registry_credentials(), _registry_readers(), server))
        sasl, mtls = free_port(), free_port()
        extras = BrokerExtras(
            (f"SASL://{HOST}:{sasl}", f"MTLS://{HOST}:{mtls}"),
            _properties(combined, authority.certificate, keys),
            (f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={keys.as_uri()}",),
        )
        broker = Broker(folder / "kafka", folder / "broker.log", extras=extras)
        stack.callback(broker.stop)
        broker.start()
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        _create_scram_user(admin)
        yield SecuredStack(
            admin,
            broker.bootstrap_servers,
            f"{HOST}:{sasl}",
            f"{HOST}:{mtls}",
            authority.certificate,
            client_certificate,
            client_key,
            token_url,
            registry,
        )


def _properties(server: Path, ca: Path, keys: Path) -> str:
    user = f'user_{USER}="{_in_jaas(PASSWORD)}"'
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    oauth = "org.apache.kafka.common.security.oauthbearer"
    lines = {
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL:SASL_SSL,MTLS:SSL",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(server),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(ca),
        "ssl.principal.mapping.rules": "RULE:^CN=(.*)$/$1/",
        "listener.name.mtls.ssl.client.auth": "required",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "listener.name.sasl.plain.sasl.jaas.config": (
            f"org.apache.kafka.common.security.plain.PlainLoginModule required {user};"
        ),
        "listener.name.sasl.scram-sha-256.sasl.jaas.config": scram,
        "listener.name.sasl.scram-sha-512.sasl.jaas.config": scram,
        "listener.name.sasl.oauthbearer.sasl.jaas.config": f"{oauth}.OAuthBearerLoginModule required;",
        "listener.name.sasl.oauthbearer.sasl.server.callback.handler.class": (
            f"{oauth}.OAuthBearerValidatorCallbackHandler"
        ),
        "sasl.oauthbearer.jwks.endpoint.url": keys.as_uri(),
        "sasl.oauthbearer.expected.audience": "kafka",
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items()).replace("\\", "\\\\")


def _in_jaas(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _create_scram_user(admin: AdminClient) -> None:
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        credential = UserScramCredentialUpsertion(USER, ScramCredentialInfo(mechanism, 4096), PASSWORD.encode())
        for future in admin.alter_user_scram_credentials([credential]).values():
            future.result(_ACL_SECONDS)


def _registry_credentials() -> set[str]:
    user_and_password = base64.b64encode(f"{REGISTRY_USER}:{REGISTRY_PASSWORD}".encode()).decode()
    return {f"Basic {user_and_password}", f"Bearer {REGISTRY_TOKEN}"}


def _registry_readers() -> set[str]:
    return {f"Bearer {REGISTRY_READER_TOKEN}"}


_DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "secure.md"
_ROW = re.compile(r"^\| (topic|group|transactional id)(, prefixed)? \| `(.+)` \| ([\w, ]+) \| (.+) \|$", re.MULTILINE)
_RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional id": ResourceType.TRANSACTIONAL_ID,
}
_OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Create": AclOperation.CREATE,
    "Delete": AclOperation.DELETE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
}


@dataclass(frozen=True)
class Grant:
    """One operation of a row of the table in docs/how-to/secure.md."""

    resource: str
    name: str
    is_prefix: bool
    operation: str
    needed_for: str

    def __str__(self) -> str:
        return f"{self.operation} on {self.resource} {self.name}"

    def filled(self, names: Mapping[str, str]) -> str:
        """Returns the resource name with its placeholders replaced."""
        return re.sub(r"<(.+?)>", lambda match: names[match[1]], self.name)

    def binding(self, names: Mapping[str, str], principal: str = f"User:{USER}") -> AclBinding:
        """Returns the grant as an ACL binding."""
        return AclBinding(
            _RESOURCES[self.resource],
            self.filled(names),
            ResourcePatternType.PREFIXED if self.is_prefix else ResourcePatternType.LITERAL,
            principal,
            "*",
            _OPERATIONS[self.operation],
            AclPermissionType.ALLOW,
        )


def listed() -> list[Grant]:
    """Returns the operations of all rows of the table."""
    return [
        Grant(resource, name, bool(prefixed), operation, needed_for)
        for resource, prefixed, names, operations, needed_for in _ROW.findall(_DOCUMENT.read_text(encoding="utf-8"))
        for name in names.split("`, `")
        for operation in operations.split(", ")
    ]
