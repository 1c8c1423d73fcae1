"""The command `balance-service try`: folds a file of events by a read model, without a broker and without a JVM."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from balance_service.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console

    from balance_service.avro.schemas import Schema
    from balance_service.model.read_model import ReadModel
    from balance_service.testing.driver import Driver
    from balance_service.testing.rows import Given

_FAILED = 1
_POLL_SECONDS = 0.2
_BATCH_EVENTS = 4_000
_USUAL_SEPARATOR = "|"
_WIDE = 10_000


@click.command("try")
@click.argument("model")
@click.option(
    "--events",
    "file",
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="One record per line, `[key S] JSON`, as for `produce`.",
)
@click.option(
    "--key-separator",
    metavar="S",
    help=f"Ends a line's key. Default: '{_USUAL_SEPARATOR}', on lines that do not begin with '{{'.",
)
@click.option("--record", metavar="NAME", help="The lines' record, where the model reads several.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="How many rows of each table.")
@click.option("--watch", is_flag=True, help="Run again whenever the events, the model or its schemas are saved.")
def try_model(
    *, model: str, file: Path, key_separator: str | None, record: str | None, limit: int, watch: bool
) -> None:
    """Fold a file of events by MODEL and print the states, what is emitted, and dead letters.

    MODEL is named as in BALANCE_MODELS: `package.module:Class`, `package.module`, or a shipped name. Fold, commit and
    store are the service's own; neither a broker nor a JVM is needed. A line without a key takes it
    from the event. Exit codes: 1 if the model's own code fails, 2 if a line is not a record.
    """
    if key_separator == "":
        raise click.UsageError("--key-separator must not be empty; leave it out where lines have no key")
    if watch:
        _watch(model, file)
        return
    if not _run(_model(model), file, key_separator, record, limit):
        sys.exit(_FAILED)


def _model(name: str) -> ReadModel:
    from balance_service.model.loading import load_models
    from balance_service.read_models.shipped import SHIPPED

    models = load_models([name], SHIPPED, setting="MODEL")
    if len(models) > 1:
        module = name.partition(":")[0]
        choices = ", ".join(f"{module}:{model.__name__}" for model in models)
        raise InvalidInputError(f"{name} has {len(models)} read models; name one: {choices}")
    return models[0]()


def _run(model: ReadModel, file: Path, separator: str | None, record: str | None, limit: int) -> bool:
    """Fold and print; return whether the model's own code succeeded."""
    from rich.console import Console

    # A pipe has no width; a program that reads it needs whole lines.
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False, emoji=False, markup=False)
    lines = [*_lines(model, file, separator, record)]
    tried = _Tried.of(model, [line.event for line in lines])
    try:
        _print_states(console, tried, limit)
        _print_emitted(console, tried, limit)
        _print_dead_letters(console, tried, lines, limit)
        console.print(tried.summary)
        if tried.failure is not None:
            at = lines[tried.taken]
            click.echo(
                f"error: {file}, line {at.number}: {tried.failure}; this line and those after it are not applied",
                err=True,
            )
    finally:
        tried.driver.close()
    return tried.failure is None


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    event: Given


def _lines(model: ReadModel, file: Path, separator: str | None, record: str | None) -> Iterator[_Line]:
    """The events of a file.

    Raises:
        InvalidInputError: a line is not a record; the message names the file and the line.
    """
    from balance_service.testing.rows import driven_stages

    schemas = driven_stages(model)[0].schemas
    if record is None and len(schemas) > 1:
        raise InvalidInputError(f"{model.name} reads several records; choose one by --record: {', '.join(schemas)}")
    name = next(iter(schemas)) if record is None else record
    if name not in schemas:
        raise InvalidInputError(f"{model.name} reads no record {name}; it reads {', '.join(schemas)}")
    now_ms = time.time_ns() // 1_000_000
    with file.open("rb") as content:
        for number, line in enumerate(content, start=1):
            if not line.strip():
                continue
            try:
                yield _Line(number, _event(model, schemas[name], line, separator, now_ms))
            except (InvalidInputError, ValueError) as error:
                raise InvalidInputError(f"{file}, line {number}: {error}") from None


def _event(model: ReadModel, schema: Schema, line: bytes, separator: str | None, now_ms: int) -> Given:
    from balance_service.avro.from_json import parsed_json, record_of
    from balance_service.testing.rows import Given, tombstone

    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"no UTF-8 from byte {error.start + 1} on") from None
    key = None
    if separator is None and not text.lstrip().startswith("{") and _USUAL_SEPARATOR in text:
        separator = _USUAL_SEPARATOR
    if separator is not None:
        key, found, text = text.partition(separator)
        if not found or not key:
            raise InvalidInputError(f"no key before '{separator}'" if found else f"no key separator '{separator}'")
    value = parsed_json(text)
    if value is None and key is not None and model.source.tombstones:
        return tombstone(key, timestamp_ms=now_ms)
    record_key = None if key is None else key.encode()
    return Given(str(schema["name"]), record_of(schema, value), record_key, timestamp_ms=now_ms)


@dataclass(slots=True)
class _Tried:
    """The result of folding a file's events."""

    driver: Driver
    model: ReadModel
    taken: int = 0
    """How many events were committed: all, unless the model's own code failed at the next one."""
    applied: int = 0
    duplicates: int = 0
    failure: str | None = None

    @classmethod
    def of(cls, model: ReadModel, events: Sequence[Given]) -> _Tried:
        """Commit events in batches, up to the first event at which the model's own code fails."""
        from balance_service.errors import TaskHaltedError
        from balance_service.testing.driver import Driver

        tried = cls(Driver(model), model)
        try:
            tried._take(events, _BATCH_EVENTS)
        except TaskHaltedError:
            # The whole batch was rolled back; commits of one event each find the one that fails.
            tried.driver.close()
            whole = tried.taken
            tried = cls(Driver(model), model)
            tried._take(events[:whole], _BATCH_EVENTS)
            try:
                tried._take(events[whole:], 1)
            except TaskHaltedError as error:
                tried.failure = _failure(error)
        return tried

    def _take(self, events: Sequence[Given], most: int) -> None:
        for start in range(0, len(events), most):
            batch = events[start : start + most]
            done = self.driver.commit(batch)
            self.applied += done.applied
            self.duplicates += done.duplicates
            self.taken += len(batch)

    @property
    def summary(self) -> str:
        """Counts of events by outcome."""
        refused = len(self.driver.dead_letters())
        counts = {
            "applied": self.applied,
            "ignored": self.taken - self.applied - self.duplicates - refused,
            "duplicates": self.duplicates,
            "dead letter" if refused == 1 else "dead letters": refused,
        }
        told = [f"{count:,} {what}" for what, count in counts.items() if count or what == "applied"]
        return f"{_counted(self.taken, 'event')}: {', '.join(told)}"


def _failure(error: Exception) -> str:
    """The exception of the model's own code, and its place."""
    from balance_service.model.loading import raised_at

    cause = error.__cause__ or error
    text = next(iter(str(cause).splitlines()), "")
    at = raised_at(cause)
    raised = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    return f"the read model's own code raises {raised}{f' at {at}' if at else ''}"


def _print_states(console: Console, tried: _Tried, limit: int) -> None:
    from balance_service.model.json_view import exact_json

    if not tried.model.has_states():
        return
    driver, key_type = tried.driver, tried.model.key_type
    states = sorted(driver.states().items())
    rows: list[Mapping[str, Any]] = []
    for key, frame in states[:limit]:
        view = tried.model.told(driver.state_codec.decode(frame))
        of_key = {key_type.column: key_type.text(key)}
        rows.append(of_key | (view if isinstance(view, dict) else {"value": view}))
    console.print(f"{tried.model.name}: {_counted(len(states), 'key')}")
    _print_table(console, [{name: _cell(value, exact_json) for name, value in row.items()} for row in rows])
    _print_more(console, len(states), limit)


def _print_emitted(console: Console, tried: _Tried, limit: int) -> None:
    from balance_service.model.json_view import exact_json

    for output in tried.model.outputs:
        records = tried.driver.emitted(output.topic)
        console.print(f"emitted to {output.topic}: {_counted(len(records), 'record')}")
        # A record without a value deletes its key.
        shown = [{"value": None} if record is None else record for record in records[:limit]]
        _print_table(console, [{name: _cell(value, exact_json) for name, value in row.items()} for row in shown])
        _print_more(console, len(records), limit)


def _print_dead_letters(console: Console, tried: _Tried, lines: Sequence[_Line], limit: int) -> None:
    from balance_service.model.json_view import exact_json

    letters = tried.driver.dead_letters()
    if not letters:
        return
    # A re-keyed event is a new object with the same fields.
    numbers = {id(line.event.fields): line.number for line in lines}
    console.print(_counted(len(letters), "dead letter"))
    rows = [
        {"line": str(numbers.get(id(event.fields), "")), "cause": cause, "event": exact_json(event.fields)}
        for event, cause in letters[:limit]
    ]
    _print_table(console, rows)
    _print_more(console, len(letters), limit)


def _print_table(console: Console, rows: Sequence[Mapping[str, str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    columns = dict.fromkeys(name for row in rows for name in row)
    if columns:
        table = Table(*columns, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for row in rows:
            table.add_row(*(row.get(name, "") for name in columns))
        console.print(table)
    console.print()


def _print_more(console: Console, count: int, limit: int) -> None:
    if count > limit:
        console.print(f"… and {count - limit:,} more; --limit shows more\n")


def _cell(value: Any, as_json: Callable[[Any], str]) -> str:
    """A value as JSON, without the quotation marks of strings and times."""
    return value if isinstance(value, str) else as_json(value).strip('"')


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _watch(model: str, file: Path) -> None:
    """Run this command at each save until Ctrl-C, in a new process each time, which imports the changed code."""
    # A shell that starts it in the background has it ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "balance_service", *(given for given in sys.argv[1:] if given != "--watch")]
    try:
        while True:
            seen = _saved(model, file)
            # In its own process group, so that Ctrl-C reaches only this process, which ends the child.
            with subprocess.Popen(command, process_group=0) as child:
                try:
                    child.wait()
                except KeyboardInterrupt:
                    child.terminate()
                    raise
            click.echo(f"watching {file} and {model}; Ctrl-C ends", err=True)
            while _saved(model, file) == seen:
                time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        return


def _saved(model: str, file: Path) -> dict[Path, tuple[int, int]]:
    """Modification time and size of each file that a run depends on."""
    from balance_service.model.loading import files_beside

    found = {}
    for path in (file, *files_beside(model)):
        # An editor may replace a file by deleting it first.
        with suppress(OSError):
            status = path.stat()
            found[path] = status.st_mtime_ns, status.st_size
    return found
