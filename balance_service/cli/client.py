"""The client of commands, and the commands `get-balance` and `status`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from balance_service.client import Client, ClientError, NotAllowedError, NotAnInstanceError, Position, UnavailableError
from balance_service.errors import BalanceServiceError
from balance_service.http.server.tls import TlsFiles, client_context
from balance_service.model.json_view import exact_json
from balance_service.settings import load_settings
from balance_service.settings.network import environment_proxies

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping

    from balance_service.settings import Settings

_URGENCIES = {"now": "NOW: ", "soon": "soon: ", "none": ""}
_WITHOUT_REASON = {
    "CREATED": "it waits for its turn to open its store",
    "CLOSED": "its instance has closed it, and opens another or gives the partition away",
    "HALTED": "the log of its instance says why",
    "WAITING": "the log of its instance says why",
}

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
@click.option(
    "--max-age", type=click.FloatRange(0), help="Accept an answer that is at most N seconds old, also without a broker."
)
@at_url
@as_json
def get_balance(
    customer: str,
    min_position: str | None,
    max_lag: int | None,
    max_age: float | None,
    url: str | None,
    *,
    as_json: bool,
) -> None:
    """Print the balance of a customer."""
    with client_of(url) as client:
        wanted = None if min_position is None else Position.parse(min_position)
        balance = client.get_balance(customer, min_position=wanted, max_lag=max_lag, max_age=max_age)
    if balance.amount is None:
        raise BalanceServiceError("no such customer")
    if as_json:
        click.echo(exact_json({"amount": balance.amount}))
    else:
        click.echo(f"{balance.amount:f}  (from {balance.application_server})")


@click.command()
@at_url
@as_json
def status(url: str | None, *, as_json: bool) -> None:
    """Print the instances and tasks that an instance knows."""
    with client_of(url) as client:
        known = client.status()
    if as_json:
        click.echo(exact_json(known))
        return
    click.echo(f"{known['applicationServer']} is {'ready' if known['ready'] else 'not ready'}")
    for cause in known["causes"]:
        click.echo(f"  {_URGENCIES[cause['urgency']]}{cause['what']}.{_since(cause['since'])}")
        click.echo(f"    {cause['action']}.{' Waiting suffices.' if cause['heals'] else ''}")
        for told in cause["follows"]:
            click.echo(f"      {told}")
    for server in known["applicationServers"]:
        # An instance that hears nothing from Kafka does not hear itself either.
        is_silent = server["suspect"] and server["applicationServer"] != known["applicationServer"]
        marks = " (suspect)" * is_silent + " (shared)" * server["shared"]
        click.echo(f"  {server['applicationServer']}{marks}")
        for task in server["tasks"]:
            click.echo(
                f"    {task['task']}  {task['role']} {task['state']}  "
                f"epoch {task['epoch']}  position {task['position']}"
            )
            if why := _why(task):
                click.echo(f"      {why}")


def _since(time: str | None) -> str:
    return "" if time is None else f" Since {time[:19]}Z."


def _why(task: Mapping[str, Any]) -> str:
    """Returns why a task does not run, or does not move; empty if it does what it should."""
    state, reason = task["state"], str(task["reason"])
    if state == "RESTORING":
        left = "" if task["secondsLeft"] is None else f", about {task['secondsLeft']:.0f} s left"
        reads = f"it reads its changelog: {task['restored']} of {task['toRestore']} records{left}"
        return f"{reads}; {reason}" if reason else reads
    return reason or _WITHOUT_REASON.get(state, "")


@contextmanager
def client_of(url: str | None) -> Iterator[Client]:
    """A client of the instance at `--url` or BALANCE_APPLICATION_SERVER, which does not retry.

    Sends BALANCE_TOKEN if it is set, and presents BALANCE_TLS_CERTIFICATE to a server that requests a certificate.

    Raises:
        ConfigurationError: a file, an address or a proxy cannot be used; names the setting.
        BalanceServiceError: a call within the context failed; names the setting that can be wrong.
    """
    settings = load_settings()
    is_https = settings.speaks_tls or settings.tls_ca is not None
    address = url or f"{'https' if is_https else 'http'}://{settings.application_server}"
    with environment_proxies():
        client = Client(
            address,
            token=None if settings.token is None else settings.token.get_secret_value(),
            tls=_context(settings) if address.lower().startswith("https:") else None,
            # Instances connect to each other's addresses without a proxy; a URL for clients may be behind one.
            trust_env=bool(url),
            retry_seconds=0,
        )
    try:
        with client:
            yield client
    except ClientError as error:
        raise BalanceServiceError(
            f"{error}{_remedy(error, '--url' if url else 'BALANCE_APPLICATION_SERVER')}"
        ) from error


def _remedy(error: ClientError, setting: str) -> str:
    match error:
        case NotAnInstanceError(status=None):
            return f"; correct {setting} or BALANCE_TLS_CA"
        case NotAnInstanceError():
            return f"; correct {setting}"
        case NotAllowedError():
            return " (BALANCE_TOKEN)"
        case UnavailableError(status=None):
            return f"; start it, or correct {setting}"
    return ""


def _context(settings: Settings) -> ssl.SSLContext:
    own = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        password = settings.tls_key_password
        own = TlsFiles(
            settings.tls_certificate, settings.tls_key, None if password is None else password.get_secret_value()
        )
    return client_context(settings.tls_ca, own)
