"""The command `balance-service try`: folds files of events by a read model, without a broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from balance_service.errors import ConfigurationError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from balance_service.avro.schemas import Schema
    from balance_service.model.read_model import ReadModel
    from balance_service.testing.driver import Driver
    from balance_service.testing.rows import InputEvent, TableRow

_POLL_SECONDS = 0.2
_BATCH_EVENTS = 4_000
_DEFAULT_SEPARATOR = "|"
_PIPE_WIDTH = 10_000
_JOIN_MISSING = "join-missing"


@click.command("try")
@click.argument("model")
@click.option(
    "--events",
    "given",
    required=True,
    multiple=True,
    metavar="[RECORD=]FILE",
    help="One record per line, `[key S] JSON`, as for `produce`. Of several records, one file each, with its name. The "
    "joined record: begin after the joins.",
)
@click.option(
    "--key-separator",
    metavar="S",
    help=f"Separates key and JSON. Default: '{_DEFAULT_SEPARATOR}' on lines that do not begin with '{{'.",
)
@click.option(
    "--rows",
    "tables",
    multiple=True,
    metavar="TOPIC=FILE",
    help="The rows of a table that the model joins with: a file of lines `key S JSON`. Repeat it for each table.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    metavar="N",
    help="Print at most N rows of each table.",
)
@click.option("--watch", is_flag=True, help="Run again when the events, the model or its schemas are saved.")
def try_model(
    *,
    model: str,
    given: Sequence[str],
    key_separator: str | None,
    tables: Sequence[str],
    limit: int,
    watch: bool,
) -> None:
    """Fold files of events by MODEL, one after the other, and print states, emitted records and dead letters.

    MODEL is as in BALANCE_MODELS: `package.module:Class`, `package.module`, or a shipped name. Joins, re-keys, fold,
    commit and store are the service's, without a broker; with a JVM only for a `transform`. Rows are in their
    tables before the first event. The key of a line without one is taken from the event. Exit codes: 1 if the model's
    own code fails, 2 if a line is not a record.
    """
    _check_settings()
    if key_separator == "":
        raise click.UsageError("--key-separator must not be empty; omit it if lines have no key")
    files, rows = [*map(_record_and_file, given)], dict(map(_table_and_file, tables))
    if watch:
        _watch(model, [*(file for _, file in files), *rows.values()])
        return
    _run(_Input(_model(model), files, key_separator), rows, limit)


def _check_settings() -> None:
    """Refuses misspelt settings. None is needed here, but what works is then run with the same environment."""
    if any(name.upper().startswith("BALANCE_") for name in os.environ):
        # Takes as long as the rest of the command.
        from balance_service.settings.settings import misspelt_variables

        if misspelt := misspelt_variables(os.environ):
            raise ConfigurationError("; ".join(misspelt))


def _record_and_file(given: str) -> tuple[str | None, Path]:
    if Path(given).is_file():
        return None, Path(given)
    record, _, name = given.rpartition("=")
    if not record or not Path(name).is_file():
        raise click.UsageError(f"--events {given}: there is no file '{name}'")
    return record, Path(name)


def _table_and_file(given: str) -> tuple[str, Path]:
    topic, _, name = given.partition("=")
    if not topic or not name:
        raise click.UsageError(f"--rows {given}: give topic and file, such as --rows customers=customers.jsonl")
    if not Path(name).is_file():
        raise click.UsageError(f"--rows {given}: there is no file '{name}'")
    return topic, Path(name)


def _model(name: str) -> ReadModel:
    from balance_service.model.loading import load_models
    from balance_service.read_models import SHIPPED

    models = load_models([name], SHIPPED, setting="MODEL")
    if len(models) > 1:
        module = name.partition(":")[0]
        choices = ", ".join(f"{module}:{model.__name__}" for model in models)
        raise InvalidInputError(f"{name} has {len(models)} read models; name one: {choices}")
    return models[0]()


def _run(given: _Input, tables: Mapping[str, Path], limit: int) -> None:
    """Fold and print. Raises ClickException if the model's own code fails."""
    from rich.console import Console

    # Programs that read a pipe need whole lines.
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, emoji=False, markup=False)
    rows = [row for topic, path in tables.items() for row in given.rows(topic, path)]
    events = [*given.events()]
    trial = _Trial.from_input(given, rows, events)
    try:
        for section in _sections(trial, limit):
            _print_section(console, *section)
        console.print(trial.summary)
        if trial.failure is not None:
            at = f"{events[trial.taken].file}, line {events[trial.taken].line}"
            raise click.ClickException(f"{at}: {trial.failure}; this line and those after it are not applied")
        if without := [topic for topic in given.tables if topic not in tables and trial.misses_rows]:
            click.echo(f"no rows of {', '.join(without)}: give them by --rows {without[0]}=FILE", err=True)
    finally:
        trial.driver.close()


class _Input:
    """The files of a trial, as events and rows of a read model."""

    def __init__(self, model: ReadModel, files: Sequence[tuple[str | None, Path]], separator: str | None) -> None:
        """Args:
        files: of events, with the record of their lines, or None for the only one.

        Raises:
            InvalidInputError: a file's record must be named, or the model reads no such record.
        """
        from balance_service.model.sources import sources_of
        from balance_service.testing.rows import driven_stages, given_schemas

        read, joined = (given_schemas(model, after_joins=after) for after in (False, True))
        names = {record for record, _ in files if record is not None}
        self.after_joins = any(name not in read for name in names)
        self._schemas = joined if self.after_joins else read
        if unknown := sorted(names - self._schemas.keys()):
            after = "" if joined.keys() <= read.keys() else f", and after its joins {', '.join(joined)}"
            raise InvalidInputError(f"{model.name} reads no record {unknown[0]}; it reads {', '.join(read)}{after}")
        # Each document of a JSON topic tells which record it is.
        tells = not self.after_joins and model.stages[0].format != "avro" and len(sources_of(model)) == 1
        if len(self._schemas) > 1 and not tells and (unnamed := [file for record, file in files if record is None]):
            raise InvalidInputError(
                f"{model.name} reads several records; name that of the file, such as "
                f"--events {next(iter(self._schemas))}={unnamed[0]}: {', '.join(self._schemas)}"
            )
        self._files = [(record or next(iter(self._schemas)), file) for record, file in files]
        self.model = model
        self.tables = {
            join.table.topic: stage.rows[join.table.record]
            for stage in driven_stages(model, after_joins=self.after_joins)
            for join in stage.joins
        }
        self._key_of = {
            join.table.topic: str if join.table.key_format == "string" else int
            for stage in driven_stages(model, after_joins=self.after_joins)
            for join in stage.joins
        }
        self._separator = separator
        self._now_ms = time.time_ns() // 1_000_000

    def events(self) -> Iterator[InputEvent]:
        """Raises InvalidInputError, with the number, if a line is not a record; so does `rows`."""
        from balance_service.testing.rows import InputEvent, tombstone

        first = self.model.stages[0]
        if not self.after_joins and first.format != "avro":
            yield from self._documents()
            return
        for name, file in self._files:
            for number, text, fields in self._records(file, self._schemas[name], takes_tombstones=first.tombstones):
                key = text
                if text is not None and first.own_key is not None:
                    with _told(file, number):
                        key = first.own_key.record_key(text.decode())
                given = InputEvent(name, fields or {}, key, timestamp_ms=self._now_ms)
                if fields is None:
                    given = tombstone(key or b"", timestamp_ms=self._now_ms)
                yield replace(given, line=number, file=str(file))

    def _documents(self) -> Iterator[InputEvent]:
        """The lines of a JSON topic are its records as they are: what the service refuses is a dead letter here too."""
        from balance_service.testing.rows import InputEvent, tombstone

        first = self.model.stages[0]
        topics = {record: stage.source for stage in self.model.stages for record in stage.schemas}
        for name, file in self._files:
            for number, separator, line in self._lines(file):
                key, document = None, line
                if separator is not None:
                    before, found, document = line.partition(separator.encode())
                    if not found or not before:
                        raise InvalidInputError(f"{file}, line {number}: no key before '{separator}'")
                    key = before
                    if first.own_key is not None:
                        with _told(file, number):
                            key = first.own_key.record_key(before.decode())
                given = InputEvent("", {}, key, timestamp_ms=self._now_ms, body=document.strip(), topic=topics[name])
                if key is not None and first.tombstones and document.strip() == b"null":
                    given = tombstone(key, timestamp_ms=self._now_ms)
                yield replace(given, line=number, file=str(file))

    def rows(self, topic: str, file: Path) -> Iterator[TableRow]:
        from balance_service.testing.rows import TableRow

        if topic not in self.tables:
            known = ", ".join(self.tables) or "no table"
            raise InvalidInputError(f"--rows {topic}={file}: {self.model.name} joins with {known}")
        for number, key, fields in self._records(file, self.tables[topic], takes_tombstones=True):
            if key is None:
                raise InvalidInputError(
                    f"{file}, line {number}: a row needs its key, such as `ada{_DEFAULT_SEPARATOR}{{…}}`"
                )
            with _told(file, number):
                row = TableRow(topic, self._key_of[topic](key.decode()), fields, self._now_ms)
            yield row

    def _records(
        self, file: Path, schema: Schema, *, takes_tombstones: bool
    ) -> Iterator[tuple[int, bytes | None, dict[str, Any] | None]]:
        """Line numbers, keys and records."""
        from balance_service.avro.from_json import record_line

        for number, separator, line in self._lines(file):
            with _told(file, number):
                yield number, *record_line(line, schema, separator, takes_tombstones=takes_tombstones)

    def _lines(self, file: Path) -> Iterator[tuple[int, str | None, bytes]]:
        """Number, separator of its key, and text of each line that is not blank."""
        with file.open("rb") as content:
            for number, line in enumerate(content, start=1):
                if not line.strip():
                    continue
                separator = self._separator
                if separator is None and not line.lstrip().startswith(b"{") and _DEFAULT_SEPARATOR.encode() in line:
                    separator = _DEFAULT_SEPARATOR
                yield number, separator, line


@contextmanager
def _told(file: Path, number: int) -> Iterator[None]:
    """Adds the place to an error of a line."""
    try:
        yield
    except (InvalidInputError, ValueError) as error:
        raise InvalidInputError(f"{file}, line {number}: {error}") from None


@dataclass(slots=True)
class _Trial:
    """The result of folding a file's events."""

    driver: Driver
    model: ReadModel
    taken: int = 0
    """The number of committed events: all, unless the model's own code failed at the next one."""
    applied: int = 0
    duplicates: int = 0
    failure: str | None = None

    @classmethod
    def from_input(cls, given: _Input, rows: Sequence[TableRow], events: Sequence[InputEvent]) -> _Trial:
        """Commit events in batches, up to the first event at which the model's own code fails."""
        from balance_service.errors import TaskHaltedError
        from balance_service.testing.driver import Driver

        def begun() -> _Trial:
            return cls(Driver(given.model, after_joins=given.after_joins).given(*rows), given.model)

        trial = begun()
        try:
            trial._take(events, _BATCH_EVENTS)
        except TaskHaltedError:
            # The whole batch was rolled back; commits of one event each find the one that fails.
            trial.driver.close()
            whole = trial.taken
            trial = begun()
            trial._take(events[:whole], _BATCH_EVENTS)
            try:
                trial._take(events[whole:], 1)
            except TaskHaltedError as error:
                trial.failure = _failure(error)
        return trial

    def _take(self, events: Sequence[InputEvent], most: int) -> None:
        for start in range(0, len(events), most):
            batch = events[start : start + most]
            done = self.driver.commit(batch)
            self.applied += done.applied
            self.duplicates += done.duplicates
            self.taken += len(batch)

    @property
    def misses_rows(self) -> bool:
        return any(one.cause == _JOIN_MISSING for one in self.driver.dead_letters())

    @property
    def summary(self) -> str:
        """Counts of events by outcome."""
        dead = len(self.driver.dead_letters())
        counts = {
            "applied": self.applied,
            "ignored": self.taken - self.applied - self.duplicates - dead,
            "duplicates": self.duplicates,
            "dead letter" if dead == 1 else "dead letters": dead,
        }
        shown = [f"{count:,} {name}" for name, count in counts.items() if count or name == "applied"]
        return f"{_counted(self.taken, 'event')}: {', '.join(shown)}"


def _failure(error: Exception) -> str:
    """The exception of the model's own code, and its place."""
    from balance_service.model.loading import raised_at

    cause = error.__cause__ or error
    text = next(iter(str(cause).splitlines()), "")
    at = raised_at(cause)
    raised = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    return f"the read model's own code raises {raised}{f' at {at}' if at else ''}"


def _sections(trial: _Trial, limit: int) -> Iterator[tuple[str, int, Sequence[Mapping[str, Any]]]]:
    """Title, number of rows, and the first rows, of states, emitted records and dead letters."""
    driver, model = trial.driver, trial.model
    if model.has_states():
        states = sorted(driver.states().items())
        rows = []
        for key, frame in states[:limit]:
            view = model.view_of(driver.state_codec.decode(frame))
            of_key = model.key_type.shown(model.key_type.text(key))
            key_columns = of_key if isinstance(of_key, dict) else {model.key_columns[0]: of_key}
            rows.append(key_columns | (view if isinstance(view, dict) else {"value": view}))
        yield f"{model.name}: {_counted(len(states), 'key')}", len(states), rows
    for output in model.outputs:
        records = driver.emitted(output.topic)
        # A record without a value deletes its key.
        shown = [{"value": None} if record is None else record for record in records[:limit]]
        yield f"emitted to {output.topic}: {_counted(len(records), 'record')}", len(records), shown
    if letters := driver.dead_letters():
        files = {one.event.file for one in letters}
        shown = [
            ({"file": one.event.file} if len(files) > 1 else {})
            | {"line": one.event.line, "cause": one.cause, "detail": one.detail, "event": _shown(one.event)}
            for one in letters[:limit]
        ]
        yield _counted(len(letters), "dead letter"), len(letters), shown


def _shown(event: InputEvent) -> Any:
    """The fields of an event, or its text if it has none."""
    return event.fields or (event.body or b"").decode(errors="replace")


def _print_section(console: Console, title: str, count: int, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console.print(title)
    columns = dict.fromkeys(name for row in rows for name in row)
    if columns:
        table = Table(*columns, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for row in rows:
            table.add_row(*(_cell(row[name]) if name in row else "" for name in columns))
        console.print(table)
    console.print()
    if count > len(rows):
        console.print(f"… and {count - len(rows):,} more; --limit shows more\n")


def _cell(value: Any) -> str:
    """A value as JSON, without the quotation marks of strings and times."""
    from balance_service.model.json_view import exact_json

    return value if isinstance(value, str) else exact_json(value).strip('"')


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _watch(model: str, files: Sequence[Path]) -> None:
    """Run this command at each save until Ctrl-C, in a new process each time, which imports the changed code."""
    # A shell starts background processes with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [
        sys.executable,
        "-m",
        "balance_service",
        *(word for word in sys.argv[1:] if word != "--watch"),
    ]
    try:
        while True:
            seen = _saved(model, files)
            # In its own process group, so that Ctrl-C reaches only this process, which ends the child.
            with subprocess.Popen(command, process_group=0) as child:
                try:
                    child.wait()
                except KeyboardInterrupt:
                    child.terminate()
                    raise
            click.echo(f"watching {', '.join(map(str, files))} and {model}; Ctrl-C ends", err=True)
            while _saved(model, files) == seen:
                time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        return


def _saved(model: str, files: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Modification time and size of each file that a run depends on."""
    from balance_service.model.loading import files_beside

    found = {}
    for path in (*files, *files_beside(model)):
        # Some editors delete a file before they write it again.
        with suppress(OSError):
            status = path.stat()
            found[path] = status.st_mtime_ns, status.st_size
    return found
