"""The commands `balance-service get-balance` and `balance-service status`, which ask a running instance."""

from __future__ import annotations

import json

import click

from balance_service.cli.client import ask, at_url
from balance_service.settings import load_settings

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@click.command("get-balance")
@click.argument("customer")
@click.option("--min-position", help="Wait until this position (P:O, as add-funds prints it) is applied.")
@click.option("--max-lag", type=click.IntRange(0), help="Take a standby's answer, at most so many records behind.")
@at_url
@as_json
def get_balance(
    customer: str, min_position: str | None, max_lag: int | None, url: str | None, *, as_json: bool
) -> None:
    """Ask the instance at BALANCE_APPLICATION_SERVER for a balance."""
    parameters = {"customerId": customer} | ({"minPosition": min_position} if min_position else {})
    parameters |= {"maxLag": str(max_lag)} if max_lag is not None else {}
    answer = ask(load_settings(), url, "/api/customers.getBalance", parameters, names=["amount"])
    if as_json:
        click.echo(answer.text)
    else:
        where = answer.headers.get("Balance-Application-Server", "?")
        click.echo(f"{json.loads(answer.text, parse_float=str)['amount']}  (from {where})")


@click.command()
@at_url
@as_json
def status(url: str | None, *, as_json: bool) -> None:
    """Show what the instance at BALANCE_APPLICATION_SERVER knows of all instances."""
    names = ["applicationServer", "ready", "reasons", "applicationServers"]
    answer = ask(load_settings(), url, "/api/status", {}, names=names)
    if as_json:
        click.echo(answer.text)
        return
    known = answer.json()
    click.echo(f"{known['applicationServer']} is {'ready' if known['ready'] else 'not ready'}")
    for reason in known["reasons"]:
        click.echo(f"  {reason}")
    for server in known["applicationServers"]:
        marks = "".join(f" ({mark})" for mark in ("suspect", "shared") if server[mark])
        click.echo(f"  {server['applicationServer']}{marks}")
        for task in server["tasks"]:
            click.echo(
                f"    {task['task']}  {task['role']} {task['state']}  "
                f"epoch {task['epoch']}  position {task['position']}"
            )
