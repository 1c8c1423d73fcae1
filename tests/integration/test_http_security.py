"""The HTTP side of two secured instances: TLS, certificates and tokens, with a hop between them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiohttp
import pytest
from click.testing import CliRunner

from balance_service.cli.main import cli
from balance_service.errors import ConfigurationError
from balance_service.http.app import HttpServer
from balance_service.http.server.tls import TlsFiles, client_context
from balance_service.read_models.add_funds import ADD_FUNDS
from balance_service.settings import load_settings
from tests.support.api import GET_BALANCE as PATH
from tests.support.credentials import AUDIENCE, ISSUER, Authority, token, write_jwks
from tests.support.fakes import IdleInstance
from tests.support.querying import CUSTOMER, Instance
from tests.support.shipped import MODELS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

HOST = "127.0.0.1"
TOKEN = "a-token-of-an-operator"
LOOK_SECONDS = 0.05
_READ_TIMEOUT_SECONDS = 10.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def secured(tmp_path: Path, authority: Authority) -> dict[str, Any]:
    """Settings of an instance with every security feature."""
    certificate, key = authority.issue("instance", password="open sesame")
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    tokens = tmp_path / "tokens.json"
    tokens.write_text(
        json.dumps({"tokens": [{"name": "ops", "sha256": digest, "scopes": ["balance:operations", "balance:read"]}]})
    )
    return {
        "http_host": HOST,
        "http_port": 0,
        "health_port": 0,
        "tls_certificate": certificate,
        "tls_key": key,
        "tls_key_password": "open sesame",
        "tls_ca": authority.certificate,
        "tls_client_ca": authority.certificate,
        "tokens_file": tokens,
        "jwks_file": write_jwks(tmp_path / "jwks.json"),
        "jwt_issuer": ISSUER,
        "jwt_audience": AUDIENCE,
        "peer_secret": "a secret of all instances",
    }


@asynccontextmanager
async def running(instance: Instance, settings: Mapping[str, Any]) -> AsyncIterator[HttpServer]:
    status = {
        "applicationServer": "x:1",
        "ready": True,
        "reasons": [],
        "causes": [],
        "tasks": [],
        "problems": [],
        "applicationServers": [],
        "models": [],
    }
    front = HttpServer(load_settings(**settings), IdleInstance(status), MODELS, [ADD_FUNDS], LOOK_SECONDS)
    proxy = await front.open()
    instance.address = f"{HOST}:{front.port}"
    front.handlers.add(instance.models(proxy))
    try:
        yield front
    finally:
        await front.close()


async def get(
    url: str, ca: Path, certificate: tuple[Path, Path] | None = None, bearer: str | None = None
) -> tuple[int, str, Mapping[str, str]]:
    """Sends a GET on its own connection; returns status, text and headers."""
    context = client_context(ca, None if certificate is None else TlsFiles(*certificate))
    headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url, ssl=context) as answer:
        return answer.status, await answer.text(), answer.headers


def question(front: HttpServer) -> str:
    return f"https://{HOST}:{front.port}{PATH}?customerId={quote(CUSTOMER)}"


def operated(front: HttpServer, path: str = "/api/status") -> str:
    return f"https://{HOST}:{front.port}{path}"


def two(tmp_path: Path) -> tuple[Instance, Instance]:
    """Returns an instance to query, and the owner of the customer's partition."""
    asked = Instance(tmp_path / "asked", owns=False, timeout_seconds=_READ_TIMEOUT_SECONDS)
    owner = Instance(tmp_path / "owner", timeout_seconds=_READ_TIMEOUT_SECONDS)
    owner.put("12.34")
    return asked, owner


@pytest.mark.shows("tokens")
def test_a_query_is_forwarded_to_the_owner_over_mutual_tls_with_the_peers_proof_instead_of_the_clients_token(
    tmp_path: Path, secured: dict[str, Any], authority: Authority
) -> None:
    asked, owner = two(tmp_path)

    certificate = authority.issue("client")

    async def run() -> tuple[int, str, bool, int]:
        async with running(owner, secured) as far, running(asked, secured) as near:
            asked.hear_of_owner(owner.address, incarnation=far.trust.incarnation)
            status, text, headers = await get(question(near), authority.certificate, certificate, token())
            without_token, *_ = await get(question(near), authority.certificate, certificate)
            return status, text, headers["Balance-Application-Server"] == f"{HOST}:{far.port}", without_token

    assert asyncio.run(run()) == (200, '{"amount":12.34}', True, 401)


@pytest.mark.parametrize("trusts_the_owner", [True, False])
def test_instances_of_different_authorities_do_not_answer_each_other(
    tmp_path: Path, secured: dict[str, Any], authority: Authority, *, trusts_the_owner: bool
) -> None:
    asked, owner = two(tmp_path)
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "other-ca")
    certificate, key = stranger.issue("stranger")
    strange = secured | {
        "tls_certificate": certificate,
        "tls_key": key,
        "tls_key_password": None,
        "tls_client_ca": None,
    }

    strange |= {"tls_ca": authority.certificate if trusts_the_owner else stranger.certificate}

    async def run() -> tuple[int, str]:
        async with running(owner, secured) as far, running(asked, strange) as near:
            asked.hear_of_owner(f"{HOST}:{far.port}")
            status, text, _ = await get(question(near), stranger.certificate, None, token())
            return status, json.loads(text)["detail"]

    status, detail = asyncio.run(run())

    assert (status, "cannot be reached" in detail) == (503, True)
    assert ("BALANCE_TLS_CLIENT_CA" if trusts_the_owner else "BALANCE_TLS_CA") in detail


def test_a_client_without_a_certificate_reaches_only_the_probe_port(
    tmp_path: Path, secured: dict[str, Any], authority: Authority
) -> None:
    certificate = authority.issue("client")

    async def run() -> list[int]:
        async with running(Instance(tmp_path / "store"), secured) as front:
            with pytest.raises(aiohttp.ClientError):
                await get(operated(front, "/health/live"), authority.certificate, None, TOKEN)
            for_probes = f"http://{HOST}:{front.health_port}"
            urls = [operated(front)]
            urls += [for_probes + path for path in ("/health/live", "/health/ready", "/api/status", PATH)]
            return [(await get(url, authority.certificate, certificate, TOKEN))[0] for url in urls]

    assert asyncio.run(run()) == [200, 200, 200, 404, 404]


def test_old_tls_versions_and_plain_http_are_refused(
    tmp_path: Path, secured: dict[str, Any], authority: Authority
) -> None:
    settings = secured | {"tls_client_ca": None}

    def shake(port: int, version: ssl.TLSVersion) -> str | None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(authority.certificate)
        context.set_alpn_protocols(["h2", "http/1.1"])
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = version
        with (
            socket.create_connection((HOST, port), 10) as plain,
            context.wrap_socket(plain, server_hostname=HOST) as connection,
        ):
            return f"{connection.version()} {connection.selected_alpn_protocol()}"

    async def run() -> list[str | None]:
        async with running(Instance(tmp_path / "store"), settings) as front:
            with pytest.warns(DeprecationWarning, match="TLSv1_1"), pytest.raises(ssl.SSLError):
                await asyncio.to_thread(shake, front.port, ssl.TLSVersion.TLSv1_1)
            with pytest.raises(aiohttp.ClientError):
                await get(f"http://{HOST}:{front.port}/health/live", authority.certificate)
            versions = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
            return [await asyncio.to_thread(shake, front.port, version) for version in versions]

    assert asyncio.run(run()) == ["TLSv1.2 http/1.1", "TLSv1.3 http/1.1"]


@pytest.mark.shows("reload")
def test_a_renewed_certificate_is_used_and_a_broken_one_is_not_without_interruption(
    tmp_path: Path, secured: dict[str, Any], authority: Authority
) -> None:
    certificate, key = authority.issue("renewed")
    settings = secured | {"tls_client_ca": None, "tls_key_password": None}
    settings |= {"tls_certificate": certificate, "tls_key": key}

    def is_shown(port: int) -> bool:
        shown = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((HOST, port)))
        return shown == ssl.PEM_cert_to_DER_cert(certificate.read_text())

    async def run() -> tuple[list[int], int]:
        found: list[int] = []
        knocked: list[str] = []
        is_over = asyncio.Event()
        context = client_context(authority.certificate)
        kept = aiohttp.TCPConnector(ssl=context)
        async with (
            running(Instance(tmp_path / "store"), settings) as front,
            aiohttp.ClientSession(connector=kept) as session,
        ):

            async def probe() -> None:
                async with session.get(operated(front, "/health/live")) as answer:
                    found.append(answer.status)

            await probe()
            certificate.write_text("spoilt")
            await asyncio.sleep(4 * LOOK_SECONDS)
            await probe()
            found.append((await get(operated(front, "/health/live"), authority.certificate))[0])

            async def knock() -> None:
                while not is_over.is_set():
                    try:
                        _, writer = await asyncio.open_connection(HOST, front.port, ssl=context)
                    except OSError as error:
                        knocked.append(repr(error))
                    else:
                        writer.close()
                        await writer.wait_closed()
                        knocked.append("let in")

            knocking = asyncio.create_task(knock())
            authority.issue("renewed")
            for _ in range(200):
                if await asyncio.to_thread(is_shown, front.port):
                    break
                await asyncio.sleep(LOOK_SECONDS)
            is_over.set()
            await knocking
            assert set(knocked) == {"let in"}
            await probe()
            connections = len(kept._conns)
            found.append((await get(operated(front, "/health/live"), authority.certificate))[0])
            assert await asyncio.to_thread(is_shown, front.port)
        return found, connections

    found, connections = asyncio.run(run())
    assert (found, connections) == ([200] * 5, 1)


@pytest.mark.shows("reload")
def test_a_token_removed_from_the_file_is_refused_from_then_on(
    tmp_path: Path, secured: dict[str, Any], authority: Authority
) -> None:
    file = secured["tokens_file"]

    def take_away() -> None:
        file.write_text(file.read_text().replace(hashlib.sha256(TOKEN.encode()).hexdigest(), "0" * 64))

    async def run() -> list[int]:
        found = []
        async with running(Instance(tmp_path / "store"), secured | {"tls_client_ca": None}) as front:
            for _ in range(200):
                found.append((await get(operated(front), authority.certificate, None, TOKEN))[0])
                if found[-1] != 200:
                    break
                await asyncio.to_thread(take_away)
                await asyncio.sleep(LOOK_SECONDS)
        return found

    found = asyncio.run(run())
    assert (found[0], found[-1]) == (200, 401)


def test_commands_use_their_security_settings_and_name_the_missing_one(
    tmp_path: Path, secured: dict[str, Any], authority: Authority
) -> None:
    certificate, key = authority.issue("person")
    instance = Instance(tmp_path / "store")
    instance.put("12.34")

    def invoke(port: int, *arguments: str, **changed: str | None) -> tuple[int, str]:
        environment = {
            "BALANCE_APPLICATION_SERVER": f"{HOST}:{port}",
            "BALANCE_TLS_CA": str(authority.certificate),
            "BALANCE_TLS_CERTIFICATE": str(certificate),
            "BALANCE_TLS_KEY": str(key),
            "BALANCE_TOKEN": TOKEN,
            **changed,
        }
        result = CliRunner(env=environment).invoke(cli, arguments)
        return result.exit_code, result.output + str(result.exception or "")

    async def run() -> list[tuple[int, str]]:
        async with running(instance, secured) as front:
            port = front.port
            return [
                await asyncio.to_thread(invoke, port, "get-balance", CUSTOMER),
                await asyncio.to_thread(invoke, port, "status"),
                await asyncio.to_thread(invoke, 1, "get-balance", CUSTOMER, "--url", f"https://{HOST}:{port}"),
                await asyncio.to_thread(invoke, port, "status", BALANCE_TOKEN=None),
                await asyncio.to_thread(invoke, port, "status", BALANCE_TLS_CERTIFICATE=None, BALANCE_TLS_KEY=None),
                await asyncio.to_thread(invoke, port, "status", BALANCE_TLS_CA=str(tmp_path / "nowhere.pem")),
                await asyncio.to_thread(invoke, port, "status", BALANCE_TLS_CA=str(certificate)),
            ]

    asked, status, elsewhere, no_token, no_certificate, no_file, untrusted = asyncio.run(run())

    assert asked[0] == elsewhere[0] == status[0] == 0, (asked, elsewhere, status)
    assert asked[1].startswith("12.34 ")
    assert "is ready" in status[1]
    assert "BALANCE_TOKEN" in no_token[1]
    assert "does not answer" in no_certificate[1]
    assert no_file[1].startswith("BALANCE_TLS_CA: ")
    assert "its certificate is not trusted" in untrusted[1]
    assert untrusted[1].endswith("correct BALANCE_APPLICATION_SERVER or BALANCE_TLS_CA")
    assert TOKEN not in str((asked, status, elsewhere, no_token, no_certificate, no_file, untrusted))


def test_a_probe_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        settings = load_settings(http_host=HOST, http_port=0, health_port=taken.getsockname()[1])
        with pytest.raises(ConfigurationError, match="BALANCE_HEALTH_PORT"):
            HttpServer(settings, IdleInstance(), MODELS)


def test_an_unsecured_non_loopback_listener_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    async def run(host: str) -> str:
        settings = load_settings(http_host=host, http_port=0, allow_anonymous=True)
        front = HttpServer(settings, IdleInstance(), MODELS)
        await front.open()
        await front.close()
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert "listening beyond this machine" not in asyncio.run(run(HOST))
    warned = asyncio.run(run("0.0.0.0"))
    assert "BALANCE_TLS_CERTIFICATE" in warned
    assert "BALANCE_TOKENS_FILE" in warned
