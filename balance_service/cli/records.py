"""The commands `balance-service produce` and `balance-service tail`."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import closing
from itertools import islice

import click

from balance_service.observability.logs import quiet_logging
from balance_service.settings import load_settings


@click.command()
@click.argument("topic")
@click.option("--key-separator", metavar="S", help="What ends a line's key, such as '|'; without it, no line has one.")
@click.option("--record", metavar="NAME", help="The lines' record, where the topic takes several.")
def produce(topic: str, key_separator: str | None, record: str | None) -> None:
    """Append a record to TOPIC for each line of standard input: `[key S] JSON`.

    A read model declares which record the topic takes. Decimals are numbers or strings, times ISO 8601, bytes base64.
    `null` after a key is a tombstone, where the topic takes such. Blank lines are passed over. At a line that is no
    such record the command ends: what is before it is sent, and nothing after it.
    """
    from balance_service.cli.models import known_models
    from balance_service.devtools.produce import produce as produce_lines

    settings = load_settings()
    quiet_logging()
    if key_separator == "":
        raise click.UsageError("--key-separator must not be empty; leave it out where lines have no key")
    sent = produce_lines(
        settings, known_models(settings), topic, sys.stdin.buffer, record=record, key_separator=key_separator
    )
    click.echo(f"{sent} records acknowledged")


@click.command()
@click.argument("topic")
@click.option("--from-beginning", is_flag=True, help="All that the topic holds, and then what comes.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="End after N records.")
def tail(topic: str, *, from_beginning: bool, limit: int | None) -> None:
    """Print TOPIC's records as they are committed, a JSON object a line, until Ctrl-C.

    Each has partition, offset, timestamp, key, headers, the record's name and its value with every digit. What is no
    text, or does not decode, is base64 under a name with `Base64` at its end.
    """
    from balance_service.devtools.tail import tail as tail_records

    settings, stopping = load_settings(), threading.Event()
    quiet_logging()
    # Not by KeyboardInterrupt, which is lost where it is raised in a callback of a client.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with closing(tail_records(settings, topic, stopping, from_beginning=from_beginning)) as lines:
        for line in islice(lines, limit):
            click.echo(line)
