"""Listening beyond this machine: only with access control, or where it is said that everybody may ask."""

from __future__ import annotations

import ipaddress
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.errors import ConfigurationError
from balance_service.http.handlers import Handlers
from balance_service.http.operations import Operations
from balance_service.http.wiring import Front
from balance_service.settings import load_settings
from tests.support.credentials import AUDIENCE, ISSUER, Authority, write_jwks
from tests.support.fakes import Nobody

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "a secret of all instances"

pytestmark = pytest.mark.usefixtures("no_environment")


def front(**given: Any) -> Front:
    return Front(load_settings(**{"http_host": "0.0.0.0", "http_port": 0, **given}), Handlers(Operations(Nobody())), ())


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
        "client certificates": {**tls, "tls_client_ca": authority.certificate},
        "anonymous": {"allow_anonymous": True},
        "certificate": tls,
        "rate": {"rate_limit": 5, "peer_secret": SECRET},
        "nothing": {},
    }


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("how", ["nothing", "certificate", "rate"])
def test_without_access_control_it_ends_the_start_with_a_sentence(
    secured: dict[str, dict[str, Any]], how: str, host: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^BALANCE_HTTP_HOST {host} .*BALANCE_ALLOW_ANONYMOUS=true$"):
        front(http_host=host, **secured[how])


@pytest.mark.parametrize("how", ["tokens", "jwts", "client certificates", "anonymous"])
def test_with_access_control_or_where_it_is_said_openly_it_listens(
    secured: dict[str, dict[str, Any]], how: str
) -> None:
    listening = front(**secured[how])

    assert ipaddress.ip_address(listening._listener.getsockname()[0]).is_unspecified
    listening._listener.close()


def test_the_port_for_probes_may_listen_beyond_this_machine_by_itself() -> None:
    listening = front(http_host="127.0.0.1", health_port=0, health_host="0.0.0.0")
    probed = listening._health_listener
    assert probed is not None

    assert [at.getsockname()[0] for at in (listening._listener, probed)] == ["127.0.0.1", "0.0.0.0"]
    probed.close()
    listening._listener.close()


def test_an_address_of_the_port_for_probes_that_is_not_ours_is_named_by_its_setting() -> None:
    with pytest.raises(ConfigurationError, match=r"^BALANCE_HEALTH_HOST 192\.0\.2\.1 "):
        front(http_host="127.0.0.1", health_port=0, health_host="192.0.2.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_on_this_machine_alone_nothing_is_needed(host: str) -> None:
    listening = front(http_host=host)

    assert listening._listener.family == socket.AF_INET or host == "localhost"
    listening._listener.close()
