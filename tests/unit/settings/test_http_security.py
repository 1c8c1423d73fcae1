"""Security settings of HTTP: incomplete combinations are refused in one sentence that names the settings."""

from __future__ import annotations

import pytest

from balance_service.settings import load_settings
from tests.support.fakes import refusal

SECRET = "sixteen letters and more"


pytestmark = pytest.mark.usefixtures("no_environment")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"TLS_CERTIFICATE": "c.pem"}, ["TLS_CERTIFICATE", "TLS_KEY"]),
        ({"TLS_KEY": "k.pem"}, ["TLS_CERTIFICATE", "TLS_KEY"]),
        ({"TLS_CLIENT_CA": "ca.pem"}, ["TLS_CLIENT_CA", "TLS_CERTIFICATE"]),
        ({"TLS_KEY_PASSWORD": SECRET}, ["TLS_KEY_PASSWORD", "TLS_KEY"]),
        ({"HEALTH_PORT": "70000"}, ["HEALTH_PORT"]),
        ({"TOKENS_FILE": "t.json"}, ["TOKENS_FILE", "PEER_SECRET"]),
        ({"TLS_CERTIFICATE": "c", "TLS_KEY": "k", "TLS_CLIENT_CA": "ca"}, ["TLS_CLIENT_CA", "PEER_SECRET"]),
        ({"JWKS_FILE": "j.json", "PEER_SECRET": SECRET}, ["JWKS_FILE", "JWT_ISSUER", "JWT_AUDIENCE"]),
        ({"JWKS_FILE": "j", "JWT_ISSUER": "i", "PEER_SECRET": SECRET}, ["JWT_AUDIENCE must"]),
        ({"JWT_ISSUER": "i", "JWT_AUDIENCE": "a"}, ["JWKS_FILE must"]),
        ({"JWKS_FILE": "j", "JWT_ISSUER": "i", "JWT_AUDIENCE": "a"}, ["JWKS_FILE", "PEER_SECRET"]),
        ({"JWKS_FILE": "j", "JWT_ISSUER": "", "JWT_AUDIENCE": "a"}, ["JWT_ISSUER"]),
        ({"RATE_LIMIT": "5"}, ["RATE_LIMIT", "PEER_SECRET"]),
        ({"RATE_LIMIT": "0", "PEER_SECRET": SECRET}, ["RATE_LIMIT"]),
        ({"RATE_LIMIT": "nan", "PEER_SECRET": SECRET}, ["RATE_LIMIT"]),
        ({"TOKEN": SECRET}, ["TOKEN: is no bearer token"]),
        ({"TOKEN": SECRET.replace(" ", "-") + "\n"}, ["TOKEN: is no bearer token"]),
        ({"RATE_LIMIT_BURST": "5"}, ["RATE_LIMIT_BURST", "RATE_LIMIT;"]),
        ({"RATE_LIMIT": "5", "RATE_LIMIT_BURST": "0", "PEER_SECRET": SECRET}, ["RATE_LIMIT_BURST"]),
    ],
)
def test_a_wrong_or_incomplete_security_setting_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], named: list[str]
) -> None:
    message = refusal(monkeypatch, **{f"BALANCE_{name}": value for name, value in given.items()})

    assert all(f"BALANCE_{name}" in message for name in named), message
    assert "\n" not in message
    assert SECRET not in message


def test_security_is_off_by_default() -> None:
    settings = load_settings()

    assert not settings.speaks_tls
    assert (settings.tokens_file, settings.jwks_file) == (None, None)
    assert (settings.rate_limit, settings.health_port) == (None, None)
    assert settings.http_host == "127.0.0.1"


@pytest.mark.parametrize(("rate", "burst", "expected"), [(5.0, None, 5), (0.2, None, 1), (2.5, None, 3), (5.0, 1, 1)])
def test_the_default_burst_is_the_requests_of_one_second(rate: float, burst: int | None, expected: int) -> None:
    assert load_settings(rate_limit=rate, rate_limit_burst=burst, peer_secret=SECRET).burst == expected


def test_secrets_are_never_printed() -> None:
    settings = load_settings(tls_certificate="c", tls_key="k", tls_key_password="hunter2", token="hunter2")

    assert "hunter2" not in str(settings.printable()) + repr(settings)
