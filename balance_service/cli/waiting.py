"""Commands that wait for a server say so."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from balance_service.settings import Settings

TELL_AFTER_SECONDS = 2.0
"""A command that has waited for that long says so."""


@contextmanager
def telling(server: str) -> Iterator[Callable[[], None]]:
    """Prints on standard error which server a command waits for, once it has waited for 2 s.

    Yields a function that ends the wait, for a command that goes on with something else.
    """
    timer = threading.Timer(TELL_AFTER_SECONDS, click.echo, (f"waiting for {server} …",), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def servers_of(settings: Settings) -> str:
    """Returns what a command asks that asks no instance, in words."""
    registry = "" if settings.schema_registry_url is None else " or the schema registry"
    return f"Kafka at {settings.bootstrap_servers}{registry}"
