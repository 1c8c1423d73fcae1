"""Proxies that the environment names: one that cannot be used is told by its variable, and without its password."""

from __future__ import annotations

import httpx
import pytest
from click.testing import CliRunner

from balance_service.avro.registry import SchemaRegistry
from balance_service.cli.main import cli
from balance_service.errors import ConfigurationError
from balance_service.settings import load_settings

pytestmark = pytest.mark.usefixtures("no_environment", "no_proxies")

UNUSABLE = ["socks://me:hunter2@proxy:1080", "socks5://me:hunter2@proxy:1080", "ftp://me:hunter2@proxy"]


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def told_of(variable: str) -> str:
    return f"{variable} names a proxy that cannot be used here; give one with http://, or unset it"


@pytest.mark.parametrize("proxy", UNUSABLE)
def test_a_command_tells_a_proxy_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", "proxy:3128")
    monkeypatch.setenv("https_proxy", proxy)

    failed = CliRunner().invoke(cli, ["status", "--url", "http://balances.example"]).exception

    assert isinstance(failed, ConfigurationError)
    assert str(failed) == told_of("HTTPS_PROXY")


@pytest.mark.parametrize("proxy", UNUSABLE)
def test_whoever_asks_the_registry_tells_a_proxy_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)

    with pytest.raises(ConfigurationError) as caught:
        SchemaRegistry.from_settings(load_settings())

    assert str(caught.value) == told_of("ALL_PROXY")


def test_what_is_not_a_proxys_fault_is_not_laid_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://proxy:3128")

    with pytest.raises(ValueError, match="url"):
        SchemaRegistry("ftp://registry")


def test_an_instances_own_address_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", UNUSABLE[0])
    monkeypatch.setattr("httpx.Client.send", lambda _client, _request: httpx.Response(200, text='{"amount": 1}'))

    assert CliRunner().invoke(cli, ["get-balance", "c1"]).exit_code == 0
