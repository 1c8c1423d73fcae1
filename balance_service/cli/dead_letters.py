"""The commands `balance-service dead-letters …`, which list, show, redrive, discard and make dead letters."""

from __future__ import annotations

import base64
import json
import shlex
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from balance_service.cli.client import as_json, at_url, client_of, of_url
from balance_service.client import ClientError
from balance_service.engine.dead_letter import Status
from balance_service.engine.decisions import MAX_IDS, LetterId
from balance_service.errors import BalanceServiceError, InvalidInputError
from balance_service.model.json_view import exact_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# A request body may have 16 KiB, including the reason.
_MOST_ID_BYTES = 12 << 10
_QUOTED = len('"", ')
_MOST_KEY_CHARACTERS = 32
# The status of a request if none of its dead letters can be redriven or discarded; the detail is about the first one.
_NONE_DONE = (404, 409, 503)
_STATUSES = {
    "redrive": ("scheduled", "waiting", "parked"),
    "discard": ("scheduled", "waiting", "parked", "behind"),
}
"""The statuses that a filter selects for a command. A dead letter behind another is retried after that one."""
_UNDECIDED = frozenset(status.value for status in Status if status.needs_decision)
_LEFT_OUT_IF_EMPTY = frozenset({"detail", "discardWarning", "redriveRefused"})
_CLOSED = frozenset(status.value for status in Status if not status.is_open)
_COLUMNS = ("ID", "KEY", "CAUSE", "STATUS", "SINCE", "TRIED", "DUE")
_MOST_NAMED = 10


def _filters(command: Callable[..., None]) -> Callable[..., None]:
    for option, subject in (("--status", "status"), ("--cause", "cause"), ("--model", "read model")):
        command = click.option(option, help=f"Select dead letters by {subject}.")(command)
    return command


@click.group("dead-letters")
def dead_letters() -> None:
    """List, show, redrive and discard dead letters: records that could not be applied.

    If the instance requires tokens, BALANCE_TOKEN needs the scope balance:operate.
    """


@dead_letters.command("list")
@_filters
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, metavar="N", help="Print at most N dead letters."
)
@at_url
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one dead letter per line, for programs.")
def list_dead_letters(
    *, model: str | None, cause: str | None, status: str | None, limit: int, url: str | None, as_json: bool
) -> None:
    """List open dead letters, those closed in the last seven days, and commands for those that wait for a decision.

    If some cannot be read, the exit code is 1.
    """
    missing: dict[str, None] = {}
    with client_of(url) as client:
        found = client.dead_letters(
            model=model, cause=cause, status=status, on_missing=lambda some: missing.update(dict.fromkeys(some))
        )
        rows = [*islice(found, limit + 1)]
    rows, more = rows[:limit], len(rows) > limit
    if as_json:
        for letter in rows:
            click.echo(json.dumps(letter))
    elif rows or not missing:
        _print_table(rows)
        _print_next(rows, url)
    if more and not as_json:
        click.echo(f"There are more than {limit}; print more with --limit, or select by --model, --cause or --status.")
    if missing:
        raise BalanceServiceError(
            f"no instance could read the dead letters of {', '.join(missing)}; `balance-service status` says why"
        )


@dead_letters.command()
@click.argument("letter_id", metavar="ID")
@at_url
@as_json
def show(letter_id: str, url: str | None, *, as_json: bool) -> None:
    """Show a dead letter, with the record as its producer sent it."""
    with client_of(url) as client:
        letter = client.dead_letter(str(LetterId.parse(letter_id)))
    if as_json:
        click.echo(exact_json(letter))
        return
    if (decoded := letter.pop("decoded", None)) is not None:
        letter["decoded"] = f"{decoded['record']} {exact_json(decoded['value'])}"
    if not letter.get("problem"):
        letter.pop("problem", None)
    value, headers = letter.pop("valueBase64"), letter.pop("headers")
    letter["key"] = _key(letter)
    letter.pop("keyBase64", None)
    told = {name: shown for name, shown in letter.items() if shown or name not in _LEFT_OUT_IF_EMPTY}
    width = max(map(len, [*told, "headers"]))
    for name, shown in told.items():
        click.echo(f"{name:<{width}}  {_dash(shown)}")
    for n, header in enumerate(headers or [None]):
        click.echo(f"{'' if n else 'headers':<{width}}  {'-' if header is None else json.dumps(header)}")
    if value is not None:
        content = base64.b64decode(value)
        click.echo(f"{'value':<{width}}  {len(content)} bytes")
        for line in _dump(content):
            click.echo(f"{'':<{width}}  {line}")
    _print_next([letter], url, is_shown=True)


@dead_letters.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@_filters
@click.option("--reason", required=True, help="The reason, which is stored.")
@at_url
def redrive(ids: tuple[str, ...], **options: Any) -> None:
    """Retry dead letters now: by id, or all that the options select."""
    _decide("redrive", ids, **options)


@dead_letters.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@_filters
@click.option("--reason", required=True, help="The reason, which is stored.")
@at_url
def discard(ids: tuple[str, ...], **options: Any) -> None:
    """Discard records permanently: by id, or all that the options select. This cannot be undone.

    The options select no record that a rebuild may still apply; its id does.
    """
    _decide("discard", ids, **options)


@dead_letters.command("set-aside")
@click.argument("model", metavar="MODEL")
@click.argument("partition", type=click.IntRange(0))
@click.argument("offset", type=click.IntRange(0))
@click.option("--reason", required=True, help="The reason, which is stored.")
@at_url
def set_aside(model: str, partition: int, offset: int, reason: str, url: str | None) -> None:
    """Make a dead letter of the record that a partition stands still at.

    The partition goes on behind it. `balance-service status` has its position.
    """
    letter_id = str(LetterId(model, partition, offset))
    with client_of(url, changes=True) as client:
        client.set_aside([letter_id], reason=reason)
    click.echo(f"{letter_id} is a dead letter now: redrive or discard it later")


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
        raise InvalidInputError("select dead letters either by ids or by --model, --cause or --status")
    done = "to be tried again" if decision == "redrive" else "discarded"
    accepted = refused = failed_requests = 0
    with client_of(url, changes=True) as client:
        selected = ids or _selected(decision, client.dead_letters(model=model, cause=cause, status=status))
        batches = [*_batches(selected)]
        for batch in batches:
            try:
                decided = (client.redrive if decision == "redrive" else client.discard)(batch, reason=reason)
            except ClientError as error:
                if error.status in _NONE_DONE and len(batches) > 1:
                    # The error is about these dead letters only; the next requests can succeed.
                    click.echo(f"none of {len(batch)} done: {error}", err=True)
                    refused += len(batch)
                    failed_requests += 1
                    continue
                if accepted:
                    click.echo(f"{accepted} {done}, {refused} refused before this error:", err=True)
                raise
            accepted, refused = accepted + len(decided.accepted), refused + len(decided.refused)
            for letter_id, why in decided.refused.items():
                click.echo(f"{letter_id}: not done: {why}", err=True)
    click.echo(f"{accepted} {done}, {refused} refused")
    if failed_requests:
        raise BalanceServiceError(f"{failed_requests} of {len(batches)} requests were refused entirely; see above")


def _selected(decision: str, letters: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the ids of those that a filter selects for a command, and prints what it skips."""
    open_ones = [letter for letter in letters if letter["status"] in _STATUSES[decision]]
    if decision != "discard":
        return [letter["id"] for letter in open_ones]
    warnings = [letter["discardWarning"] for letter in open_ones]
    for warning, count in Counter(filter(None, warnings)).items():
        click.echo(f"{count} skipped, which can be discarded by id only: {warning}", err=True)
    return [letter["id"] for letter, warning in zip(open_ones, warnings, strict=True) if not warning]


def _batches(ids: Sequence[str]) -> Iterator[list[str]]:
    """Ids in batches that fit into a request."""
    batch: list[str] = []
    for letter_id in ids:
        size = sum(map(len, batch)) + len(letter_id) + _QUOTED * len(batch)
        if len(batch) == MAX_IDS or size > _MOST_ID_BYTES:
            yield batch
            batch = []
        batch.append(letter_id)
    if batch:
        yield batch


def _row(letter: dict[str, Any]) -> tuple[str, ...]:
    key = _key(letter)
    shown = key if len(key) <= _MOST_KEY_CHARACTERS else f"{key[: _MOST_KEY_CHARACTERS - 1]}…"
    since, due = (_second(letter[name]) for name in ("failedAt", "dueAt"))
    return (letter["id"], shown, letter["cause"], letter["status"], since, str(letter["attempt"]), due)


def _second(time: str | None) -> str:
    return "-" if time is None else f"{time[:19]}Z"


def _key(letter: dict[str, Any]) -> str:
    return f"base64:{letter['keyBase64']}" if "keyBase64" in letter else _dash(letter["key"])


def _print_table(letters: Sequence[dict[str, Any]]) -> None:
    """Prints a line for each, and below it what is wrong with the record, and why no redrive or discard helps."""
    if not letters:
        click.echo("There are none.")
        return
    rows = [_COLUMNS, *map(_row, letters)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_COLUMNS))]
    for row, letter in zip(rows, [None, *letters], strict=True):
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        if letter is not None and letter["detail"]:
            click.echo(f"    {_dash(letter['detail'])}")
        # The status of a closed one says enough.
        if letter is not None and letter["redriveRefused"] and letter["status"] not in _CLOSED:
            click.echo(f"    no redrive: {letter['redriveRefused']}")
        if letter is not None and letter["discardWarning"]:
            click.echo(f"    warning: {letter['discardWarning']}")


def _print_next(letters: Sequence[dict[str, Any]], url: str | None, *, is_shown: bool = False) -> None:
    """Prints the commands for those that wait for a decision."""
    undecided = [letter for letter in letters if letter["status"] in _UNDECIDED]
    if undecided and not is_shown:
        click.echo(f"\nLook at a record:\n  balance-service dead-letters show {undecided[0]['id']}{of_url(url)}")
    refused = [one for one in undecided if one["redriveRefused"]]
    for decision, when, chosen in (
        ("redrive", "Retry, once the cause is removed", [one for one in undecided if not one["redriveRefused"]]),
        (
            "discard",
            "Exclude permanently, as no redrive is possible",
            [one for one in refused if not one["discardWarning"]],
        ),
    ):
        if chosen:
            click.echo(f"{when}:")
        for selection in _selections(chosen):
            click.echo(f"  balance-service dead-letters {decision} {selection} --reason R{of_url(url)}")


def _selections(letters: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the arguments that select dead letters: their ids, or of many, their models and causes."""
    if len(letters) <= _MOST_NAMED:
        return [" ".join(letter["id"] for letter in letters)] if letters else []
    kinds = dict.fromkeys((letter["model"], letter["cause"]) for letter in letters)
    return [f"--model {shlex.quote(model)} --cause {shlex.quote(_dash(cause))}" for model, cause in kinds]


def _dump(content: bytes) -> Iterator[str]:
    for start in range(0, len(content), 16):
        row = content[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"{start:06x}  {row.hex(' '):<47}  {text}"


def _dash(value: object) -> str:
    # A key may contain any characters, such as control sequences of a terminal.
    return "-" if value is None else "".join(c if c.isprintable() else "\ufffd" for c in str(value))
