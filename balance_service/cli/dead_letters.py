"""`balance-service dead-letters …`: what could not be applied, and what is to become of it."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from balance_service.cli.client import AnsweredError, ask, at_url
from balance_service.engine.decisions import MOST_IDS, LetterId
from balance_service.errors import BalanceServiceError, InvalidInputError
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PATH = "/api/deadLetters"
_PAGE = 500
# A body may have 16 KiB, the reason in it.
_MOST_ID_BYTES = 12 << 10
_QUOTED = len('"", ')
_SHOWN_KEY = 32
# What a request is answered if nothing can be done about any of its letters; the reason is that of the first.
_NONE_DONE = (404, 409, 503)
_COLUMNS = ("ID", "KEY", "CAUSE", "STATUS", "TRIED", "DUE")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one dead letter a line, for programs.")


def _filters(command: Callable[..., None]) -> Callable[..., None]:
    for name, what in (("--status", "status"), ("--cause", "cause"), ("--model", "read model")):
        command = click.option(name, help=f"Those of one {what}.")(command)
    return command


@click.group("dead-letters")
def dead_letters() -> None:
    """Look at records that could not be applied, try them again, discard them.

    The instance at BALANCE_APPLICATION_SERVER is asked; with tokens, BALANCE_TOKEN needs the scope balance:operate.
    """


@dead_letters.command("list")
@_filters
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="How many at most.")
@at_url
@as_json
def list_them(
    *, model: str | None, cause: str | None, status: str | None, limit: int, url: str | None, as_json: bool
) -> None:
    """List them: open ones, and those that were closed in the last seven days."""
    rows: list[dict[str, Any]] = []
    more = False
    for letter in _letters(url, model, cause, status):
        if len(rows) == limit:
            more = True
            break
        rows.append(letter)
    if as_json:
        for letter in rows:
            click.echo(json.dumps(letter))
        return
    _print_table([_row(letter) for letter in rows])
    if more:
        click.echo(f"There are more than {limit}; ask for more with --limit, or for fewer with --model or --cause.")


@dead_letters.command()
@click.argument("letter_id", metavar="ID")
@at_url
@as_json
def show(letter_id: str, url: str | None, *, as_json: bool) -> None:
    """Show one, with the record as its producer sent it."""
    path = f"{_PATH}/{quote(str(LetterId.parse(letter_id)), safe='')}"
    letter = ask(load_settings(), url, path, {}, names=["id", "valueBase64"]).json()
    if as_json:
        click.echo(json.dumps(letter))
        return
    value, headers = letter.pop("valueBase64"), letter.pop("headers")
    letter["key"] = _key(letter)
    letter.pop("keyBase64", None)
    width = max(map(len, [*letter, "headers"]))
    for name, shown in letter.items():
        click.echo(f"{name:<{width}}  {_dash(shown)}")
    for n, header in enumerate(headers or [None]):
        click.echo(f"{'' if n else 'headers':<{width}}  {'-' if header is None else json.dumps(header)}")
    if value is not None:
        content = base64.b64decode(value)
        click.echo(f"{'value':<{width}}  {len(content)} bytes")
        for line in _dump(content):
            click.echo(f"{'':<{width}}  {line}")


@dead_letters.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@_filters
@click.option("--reason", required=True, help="Why; it is kept.")
@at_url
def redrive(ids: tuple[str, ...], **given: Any) -> None:
    """Have dead letters tried again at once: these, or all that the options name."""
    _decide("redrive", ids, **given)


@dead_letters.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@_filters
@click.option("--reason", required=True, help="Why; it is kept.")
@at_url
def discard(ids: tuple[str, ...], **given: Any) -> None:
    """Have records never applied: these, or all that the options name. It cannot be undone."""
    _decide("discard", ids, **given)


def _decide(
    decision: str,
    ids: Sequence[str],
    *,
    model: str | None,
    cause: str | None,
    status: str | None,
    reason: str,
    url: str | None,
) -> None:
    is_filtered = any((model, cause, status))
    if bool(ids) == is_filtered:
        raise InvalidInputError("name dead letters by their ids, or by --model, --cause or --status")
    wanted = ids or [
        letter["id"] for letter in _letters(url, model, cause, status) if letter["status"] in _DECIDED_BY[decision]
    ]
    done = "to be tried again" if decision == "redrive" else "discarded"
    accepted = refused = refused_whole = 0
    requests = [*_fitting(wanted)]
    for some in requests:
        try:
            body = ask(
                load_settings(),
                url,
                f"{_PATH}.{decision}",
                {},
                names=["accepted", "refused"],
                body={"ids": some, "reason": reason},
            ).json()
        except BalanceServiceError as error:
            if isinstance(error, AnsweredError) and error.status in _NONE_DONE and len(requests) > 1:
                # It is about these letters alone: others may still be decided about.
                click.echo(f"none of {len(some)} done: {error}", err=True)
                refused += len(some)
                refused_whole += 1
                continue
            if accepted:
                click.echo(f"{accepted} {done}, {refused} refused before this error:", err=True)
            raise
        accepted, refused = accepted + len(body["accepted"]), refused + len(body["refused"])
        for one in body["refused"]:
            click.echo(f"{one['id']}: not done: {one['reason']}", err=True)
    click.echo(f"{accepted} {done}, {refused} refused")
    if refused_whole:
        raise BalanceServiceError(f"{refused_whole} of {len(requests)} requests were refused whole; see above")


def _fitting(ids: Sequence[str]) -> Iterator[list[str]]:
    """Some ids at a time, as many as fit into a request."""
    some: list[str] = []
    for letter_id in ids:
        size = sum(map(len, some)) + len(letter_id) + _QUOTED * len(some)
        if len(some) == MOST_IDS or size > _MOST_ID_BYTES:
            yield some
            some = []
        some.append(letter_id)
    if some:
        yield some


# Of those that a filter finds: what waits behind another is tried after that by itself.
_DECIDED_BY = {
    "redrive": ("scheduled", "waiting", "parked"),
    "discard": ("scheduled", "waiting", "parked", "behind"),
}


def _letters(url: str | None, model: str | None, cause: str | None, status: str | None) -> Iterator[dict[str, Any]]:
    settings = load_settings()
    given = {"model": model, "cause": cause, "status": status, "limit": str(_PAGE)}
    parameters = {name: value for name, value in given.items() if value is not None}
    while True:
        page = ask(settings, url, _PATH, parameters, names=["deadLetters", "next"]).json()
        yield from page["deadLetters"]
        if page["next"] is None:
            return
        parameters["after"] = page["next"]


def _row(letter: dict[str, Any]) -> tuple[str, ...]:
    key = _key(letter)
    shown = key if len(key) <= _SHOWN_KEY else f"{key[: _SHOWN_KEY - 1]}…"
    return (letter["id"], shown, letter["cause"], letter["status"], str(letter["attempt"]), _dash(letter["dueAt"]))


def _key(letter: dict[str, Any]) -> str:
    return f"base64:{letter['keyBase64']}" if "keyBase64" in letter else _dash(letter["key"])


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        click.echo("There are none.")
        return
    widths = [max(len(row[n]) for row in (_COLUMNS, *rows)) for n in range(len(_COLUMNS))]
    for row in (_COLUMNS, *rows):
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _dump(content: bytes) -> Iterator[str]:
    for start in range(0, len(content), 16):
        some = content[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in some)
        yield f"{start:06x}  {some.hex(' '):<47}  {text}"


def _dash(value: object) -> str:
    # A key is whatever a producer has sent; on a terminal it must not do anything.
    return "-" if value is None else "".join(sign if sign.isprintable() else "\ufffd" for sign in str(value))
