"""The HTTP server accepts connections from other machines only with access control, or if anonymous access is set."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from balance_service.errors import ConfigurationError
from balance_service.http.answer import Problem
from balance_service.http.app import HttpServer
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.route import Handlers, Route
from balance_service.settings import load_settings
from tests.support.credentials import AUDIENCE, ISSUER, Authority, write_jwks
from tests.support.fakes import IdleInstance
from tests.support.shipped import ROUTES

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "a secret of all instances"

pytestmark = pytest.mark.usefixtures("no_environment")


def server(**given: Any) -> HttpServer:
    return HttpServer(
        load_settings(**{"http_host": "0.0.0.0", "http_port": 0, **given}),
        IdleInstance(),
        (),
    )


@pytest.fixture
def secured(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Settings by the access control that they set."""
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"tokens": []}))
    authority = Authority(tmp_path)
    certificate, key = authority.issue("instance")
    tls = {"tls_certificate": certificate, "tls_key": key}
    return {
        "tokens": {"tokens_file": tokens, "peer_secret": SECRET},
        "jwts": {
            "jwks_file": write_jwks(tmp_path / "jwks.json"),
            "jwt_issuer": ISSUER,
            "jwt_audience": AUDIENCE,
            "peer_secret": SECRET,
        },
        "client certificates": {**tls, "tls_client_ca": authority.certificate, "peer_secret": SECRET},
        "anonymous": {"allow_anonymous": True},
        "certificate": tls,
        "rate": {"rate_limit": 5, "peer_secret": SECRET},
        "nothing": {},
    }


def addresses(**given: Any) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses that a server with these settings is bound to."""
    bound = server(**given)
    try:
        return [ipaddress.ip_address(host) for host, _ in bound.addresses]
    finally:
        asyncio.run(bound.close())


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("how", ["nothing", "certificate", "rate"])
def test_a_server_for_other_machines_does_not_start_without_access_control(
    secured: dict[str, dict[str, Any]], how: str, host: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^BALANCE_HTTP_HOST {host} .*BALANCE_ALLOW_ANONYMOUS=true$"):
        server(http_host=host, **secured[how])


@pytest.mark.parametrize("how", ["tokens", "jwts", "client certificates", "anonymous"])
def test_a_server_for_other_machines_starts_with_access_control_or_explicit_anonymous_access(
    secured: dict[str, dict[str, Any]], how: str
) -> None:
    (address,) = addresses(**secured[how])

    assert address.is_unspecified


def test_the_health_port_may_accept_other_machines_on_its_own() -> None:
    bound = addresses(http_host="127.0.0.1", health_port=0, health_host="0.0.0.0")

    assert [str(address) for address in bound] == ["127.0.0.1", "0.0.0.0"]


def test_an_address_of_the_health_port_that_is_not_local_is_reported_with_its_setting() -> None:
    with pytest.raises(ConfigurationError, match=r"^BALANCE_HEALTH_HOST 192\.0\.2\.1 "):
        server(http_host="127.0.0.1", health_port=0, health_host="192.0.2.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_a_server_for_this_machine_alone_needs_no_access_control(host: str) -> None:
    (address,) = addresses(http_host=host)

    assert address.is_loopback


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("/api/status?verbose=1", "the query has 'verbose', which is not known here; it may have none"),
        (
            "/api/deadLetters?models=balance",
            "the query has 'models', which is not known here; it may have after, cause, limit, model, partial, status",
        ),
        (
            "/api/models/balance/keys/ada?minposition=0:4",
            "the query has 'minposition', which is not known here; it may have generation, maxAge, maxLag, ",
        ),
        ("/api/models/balance/keys/ada?key=bob", "the query has 'key', which is not known here; it may have "),
        ("/openapi.json?" + "x" * 300, f"the query has '{'x' * 100}', which is not known here; it may have none"),
    ],
)
def test_a_parameter_that_a_route_does_not_know_is_refused_with_those_that_it_knows(path: str, detail: str) -> None:
    ((status, body),) = answers(path)

    assert (status, body["detail"][: len(detail)]) == (400, detail)


def test_probes_the_console_and_peers_may_add_parameters() -> None:
    found = answers("/health/live?x=1", "/health/ready?x=1", "/?x=1")
    ((of_peer, _),) = answers("/api/status?x=1", headers={FORWARDED_HEADER: "127.0.0.1:5051"})

    assert [status for status, _ in found] == [200, 200, 200]
    assert of_peer == 200


def answers(*paths: str, headers: dict[str, str] | None = None) -> list[tuple[int, Any]]:
    """Returns status and body of requests."""

    async def ask() -> list[tuple[int, Any]]:
        asked = server(http_host="127.0.0.1")
        await asked.open()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{asked.port}") as session:
                found = []
                for path in paths:
                    async with session.get(path, headers=headers or {}) as response:
                        is_json = response.content_type.endswith("json")
                        found.append((response.status, await response.json(content_type=None) if is_json else None))
                return found
        finally:
            await asked.close()

    return asyncio.run(ask())


NEED_NO_ENGINE = {"getLiveness", "getReadiness", "getMetrics", "getStatus", "getOpenApi", "getInstance"}


@pytest.mark.parametrize("route", [r for r in ROUTES if r.name not in NEED_NO_ENGINE], ids=lambda route: route.name)
def test_a_starting_instance_answers_503_where_it_needs_its_engine(route: Route) -> None:
    async def ask() -> None:
        await route.handle(Handlers(), make_mocked_request(route.method, route.path))

    with pytest.raises(Problem, match="this instance is starting") as refused:
        asyncio.run(ask())

    assert refused.value.status == 503
