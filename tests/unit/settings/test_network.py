"""Proxies of the environment: an unusable one is refused with its variable and without its password."""

from __future__ import annotations

import httpx
import pytest
from click.testing import CliRunner

from balance_service.avro.registry import SchemaRegistry
from balance_service.cli.main import cli
from balance_service.errors import ConfigurationError
from balance_service.settings import load_settings
from tests.support.scripted_server import BY_KEY

pytestmark = pytest.mark.usefixtures("no_environment", "no_proxies")

UNUSABLE = ["socks://me:hunter2@proxy:1080", "socks5://me:hunter2@proxy:1080", "ftp://me:hunter2@proxy"]


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def refusal_of(variable: str) -> str:
    return f"{variable} names a proxy that cannot be used; set one with http://, or unset it"


@pytest.mark.parametrize("proxy", UNUSABLE)
def test_a_command_refuses_an_unusable_proxy(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", "proxy:3128")
    monkeypatch.setenv("https_proxy", proxy)

    failed = CliRunner().invoke(cli, ["status", "--url", "http://balances.example"]).exception

    assert isinstance(failed, ConfigurationError)
    assert str(failed) == refusal_of("HTTPS_PROXY")


@pytest.mark.parametrize("proxy", UNUSABLE)
def test_the_registry_client_refuses_an_unusable_proxy(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)

    with pytest.raises(ConfigurationError) as caught:
        SchemaRegistry.from_settings(load_settings(schema_registry_url="http://registry.example"))

    assert str(caught.value) == refusal_of("ALL_PROXY")


def test_another_error_is_not_attributed_to_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://proxy:3128")

    with pytest.raises(ValueError, match="url"):
        SchemaRegistry("ftp://registry")


def test_requests_to_the_default_address_use_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", UNUSABLE[0])
    answer = httpx.Response(200, text='{"amount": 1}', headers=BY_KEY)
    monkeypatch.setattr("httpx.Client.send", lambda _client, _request, *, stream: answer)

    assert CliRunner().invoke(cli, ["get-balance", "c1"]).exit_code == 0
