"""The client of commands, and the commands `get-balance` and `status`."""

from __future__ import annotations

import shlex
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click

from balance_service.cli.waiting import telling
from balance_service.client import Client, ClientError, NotAllowedError, NotAnInstanceError, Position, UnavailableError
from balance_service.errors import BalanceServiceError
from balance_service.http.server.tls import TlsFiles, client_context
from balance_service.model.json_view import exact_json
from balance_service.settings import load_settings
from balance_service.settings.network import environment_proxies

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping

    from balance_service.client.exchange import Call
    from balance_service.settings import Settings

T = TypeVar("T")
ANSWER_SECONDS = 10.0
CHANGE_SECONDS = 30.0
"""A step of generations is a transaction, which may wait for one that a killed instance has left open."""
_SHARED = " (shared)"
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
    """Print the instances and tasks that an instance knows.

    Silent instances come last, with the tasks that no other one has.
    """
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
    generations = _generations(known["models"])
    live: list[Mapping[str, Any]] = []
    silent: list[Mapping[str, Any]] = []
    for server in known["applicationServers"]:
        # An instance that hears nothing from Kafka does not hear itself either.
        is_silent = server["suspect"] and server["applicationServer"] != known["applicationServer"]
        (silent if is_silent else live).append(server)
    for server in live:
        click.echo(f"  {server['applicationServer']}{_SHARED * server['shared']}")
        for task in server["tasks"]:
            click.echo(f"    {_line(task, generations)}")
            if why := _why(task):
                click.echo(f"      {why}")
    taken = {(task["task"], task["role"]) for server in live for task in server["tasks"]}
    for server in silent:
        click.echo(f"  {server['applicationServer']} ({_silence(server)}){_SHARED * server['shared']}")
        left = [task for task in server["tasks"] if (task["task"], task["role"]) not in taken]
        for task in left:
            click.echo(f"    {_line(task, generations)}  (silent)")
        if others := len(server["tasks"]) - len(left):
            click.echo(f"    {others} {'task' if others == 1 else 'tasks'} that it had: at the instances above")


def _generations(hosted: list[Mapping[str, Any]]) -> dict[str, str]:
    """Returns what each generation is for, by its name, of read models that have several."""
    live = Counter(one["model"] for one in hosted)
    return {one["name"]: one["status"] for one in hosted if live[one["model"]] > 1}


def _line(task: Mapping[str, Any], generations: Mapping[str, str]) -> str:
    # A stage that passes events on has no generation.
    purpose = generations.get(task["task"].rpartition("_")[0])
    # Neither is known before its store is open.
    epoch, position = task["epoch"] or "-", "-" if task["position"] < 0 else task["position"]
    told = f"{task['task']}  {task['role']} {task['state']}  epoch {epoch}  position {position}"
    return told if purpose is None else f"{told}  {purpose}"


def _silence(server: Mapping[str, Any]) -> str:
    seconds = server["silentSeconds"]
    return "silent, not heard of by this instance" if seconds is None else f"silent for {seconds} s"


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


class _TellingClient(Client):
    """A client that says on standard error what it waits for."""

    def __init__(self, url: str, *, timeout_seconds: float, **options: Any) -> None:
        super().__init__(url, timeout_seconds=timeout_seconds, **options)
        address = urlsplit(url).netloc.rpartition("@")[2]
        self._server = f"the instance at {address}, up to {timeout_seconds:g} s"

    def _run(self, call: Call[T]) -> T:
        with telling(self._server):
            return super()._run(call)


@contextmanager
def client_of(url: str | None, *, changes: bool = False) -> Iterator[Client]:
    """A client of the instance at `--url` or BALANCE_APPLICATION_SERVER, which does not retry.

    Sends BALANCE_TOKEN if it is set, and presents BALANCE_TLS_CERTIFICATE to a server that requests a certificate.

    Args:
        changes: whether requests change something, so that they may take longer, and be carried out without an answer.

    Raises:
        ConfigurationError: a file, an address or a proxy cannot be used; names the setting.
        BalanceServiceError: a call within the context failed; names the setting that can be wrong.
    """
    settings = load_settings()
    is_https = settings.speaks_tls or settings.tls_ca is not None
    address = url or f"{'https' if is_https else 'http'}://{settings.application_server}"
    seconds = max(CHANGE_SECONDS if changes else ANSWER_SECONDS, 2 * settings.read_timeout_seconds)
    with environment_proxies():
        client = _TellingClient(
            address,
            timeout_seconds=seconds,
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
        if isinstance(error, UnavailableError) and error.is_late:
            remedy = _remedy_of_silence(seconds, changes=changes)
        else:
            remedy = _remedy(error, "--url" if url else "BALANCE_APPLICATION_SERVER")
        raise BalanceServiceError(f"{error}{remedy}") from error


def of_url(url: str | None) -> str:
    """Returns the end of a command that asks the same instance."""
    return f" --url {shlex.quote(url)}" if url else ""


def _remedy_of_silence(seconds: float, *, changes: bool) -> str:
    unknown = "; the request may be carried out all the same: look before you repeat it" if changes else ""
    return (
        f"; it had {seconds:g} s: look whether its process is suspended (state T in `ps`) or its machine overloaded, "
        f"or ask another instance with --url{unknown}"
    )


def _remedy(error: ClientError, setting: str) -> str:
    match error:
        case NotAnInstanceError(status=None):
            return f"; correct {setting} or BALANCE_TLS_CA"
        case NotAnInstanceError():
            return f"; correct {setting}"
        case NotAllowedError():
            return " (BALANCE_TOKEN)"
        case UnavailableError(status=None):
            return f"; start it, ask another instance with --url, or correct {setting}"
    return ""


def _context(settings: Settings) -> ssl.SSLContext:
    own = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        password = settings.tls_key_password
        own = TlsFiles(
            settings.tls_certificate, settings.tls_key, None if password is None else password.get_secret_value()
        )
    return client_context(settings.tls_ca, own)
