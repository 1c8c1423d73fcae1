"""Requests of commands to a running instance, and the commands `get-balance` and `status`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
import httpx

from balance_service.errors import BalanceServiceError, ConfigurationError, RetriableError
from balance_service.http.server.tls import TlsFiles, client_context
from balance_service.settings import load_settings
from balance_service.settings.network import environment_proxies

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from balance_service.settings import Settings

_TIMEOUT_SECONDS = 30.0

at_url = click.option(
    "--url",
    help="Address of the instance, such as https://balances.example.org. Default: BALANCE_APPLICATION_SERVER, by HTTPS "
    "if BALANCE_TLS_CA or BALANCE_TLS_CERTIFICATE is set.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@click.command("get-balance")
@click.argument("customer")
@click.option("--min-position", help="Wait until this position (P:O, as add-funds prints it) is applied.")
@click.option("--max-lag", type=click.IntRange(0), help="Accept an answer of a standby that lags by at most N records.")
@at_url
@as_json
def get_balance(
    customer: str, min_position: str | None, max_lag: int | None, url: str | None, *, as_json: bool
) -> None:
    """Print the balance of a customer."""
    parameters = {"customerId": customer} | ({"minPosition": min_position} if min_position else {})
    parameters |= {"maxLag": str(max_lag)} if max_lag is not None else {}
    answer = request(load_settings(), url, "/api/customers.getBalance", parameters, names=["amount"])
    if as_json:
        click.echo(answer.text)
    else:
        server = answer.headers.get("Balance-Application-Server", "?")
        click.echo(f"{json.loads(answer.text, parse_float=str)['amount']}  (from {server})")


@click.command()
@at_url
@as_json
def status(url: str | None, *, as_json: bool) -> None:
    """Print the instances and tasks that an instance knows."""
    names = ["applicationServer", "ready", "reasons", "tasks", "problems", "applicationServers"]
    answer = request(load_settings(), url, "/api/status", {}, names=names)
    if as_json:
        click.echo(answer.text)
        return
    body = answer.json()
    click.echo(f"{body['applicationServer']} is {'ready' if body['ready'] else 'not ready'}")
    for reason in body["reasons"]:
        click.echo(f"  {reason}")
    for task in body["tasks"]:
        if task["reason"]:
            click.echo(f"  {task['task']} is {task['state']}: {task['reason']}")
    for problem in body["problems"]:
        click.echo(f"  {problem}")
    for server in body["applicationServers"]:
        marks = "".join(f" ({mark})" for mark in ("suspect", "shared") if server[mark])
        click.echo(f"  {server['applicationServer']}{marks}")
        for task in server["tasks"]:
            click.echo(
                f"    {task['task']}  {task['role']} {task['state']}  "
                f"epoch {task['epoch']}  position {task['position']}"
            )


class HttpStatusError(BalanceServiceError):
    """An instance responded with an HTTP error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def request(
    settings: Settings,
    url: str | None,
    path: str,
    parameters: dict[str, str],
    *,
    names: Sequence[str],
    body: object = None,
) -> httpx.Response:
    """Send GET, or POST with a body, to an instance.

    Sends BALANCE_TOKEN if it is set, and presents BALANCE_TLS_CERTIFICATE to a server that requests a certificate.

    Args:
        names: fields of the response, which tell an instance from another server.

    Raises:
        ConfigurationError: a file, an address or a proxy cannot be used; names the setting.
        RetriableError: there is no response.
        HttpStatusError: the response is an error.
        BalanceServiceError: the response is not a JSON object with these fields.
    """
    base = _base(settings, url)
    setting = "--url" if url else "BALANCE_APPLICATION_SERVER"
    headers = {}
    if settings.token is not None:
        headers["Authorization"] = f"Bearer {settings.token.get_secret_value()}"
    verify: ssl.SSLContext | bool = _context(settings) if base.scheme == "https" else False
    # Instances connect to each other's addresses without a proxy; a URL for clients may be behind one.
    uses_proxy = url is not None
    with environment_proxies():
        client = httpx.Client(verify=verify, headers=headers, timeout=_TIMEOUT_SECONDS, trust_env=uses_proxy)
    try:
        with client:
            response = client.send(
                client.build_request("GET" if body is None else "POST", base.join(path), params=parameters, json=body)
            )
    except UnicodeError:
        raise ConfigurationError(f"{base.host} in {setting} is not a host name; correct it") from None
    except httpx.HTTPError as error:
        raise RetriableError(
            f"the instance at {base.netloc.decode()} does not answer ({error}); start it, or correct {setting}"
        ) from error
    content = _json_object(response)
    if response.is_error:
        raise HttpStatusError(response.status_code, _reason(response, content))
    missing = [] if content is None else [f"'{name}'" for name in names if name not in content]
    if not response.is_success or content is None or missing:
        without = f" without {'a JSON object' if content is None else missing[0]}" if response.is_success else ""
        raise BalanceServiceError(
            f"the server at {base.netloc.decode()} is not an instance: "
            f"it answers {response.status_code} {response.reason_phrase}{without}; correct {setting}"
        )
    return response


def _base(settings: Settings, url: str | None) -> httpx.URL:
    uses_tls = settings.speaks_tls or settings.tls_ca is not None
    try:
        base = httpx.URL(url or f"{'https' if uses_tls else 'http'}://{settings.application_server}")
    except httpx.InvalidURL:
        base = httpx.URL()
    if base.scheme not in ("http", "https") or not base.host:
        raise ConfigurationError(f"--url {url} is not an http or https URL; give one, such as https://localhost:5051")
    return base


def _context(settings: Settings) -> ssl.SSLContext:
    own = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        password = settings.tls_key_password
        own = TlsFiles(
            settings.tls_certificate, settings.tls_key, None if password is None else password.get_secret_value()
        )
    return client_context(settings.tls_ca, own)


def _json_object(response: httpx.Response) -> dict[str, Any] | None:
    try:
        content = response.json()
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _reason(response: httpx.Response, content: dict[str, Any] | None) -> str:
    if content is None or "detail" not in content:
        return f"{response.status_code}: {response.text[:200]}"
    hint = " (BALANCE_TOKEN)" if response.status_code in (401, 403) else ""
    return f"{content['detail']}{hint}"
