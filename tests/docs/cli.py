"""The reference of commands, from the parsers of `balance-service`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from balance_service.cli.main import cli
from tests.docs.markdown import bullets, joined, section, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HEAD = """\
# Commands

`balance-service COMMAND`; `-h` after any command prints its help. [Settings](settings.md) are environment variables.
Exit codes: 0 success, 1 failure, 2 wrong configuration or usage. With the stack of `balance-service local`, the
commands `add-funds`, `load`, `produce`, `tail`, `rebuild`, `drop --all`, `schemas …` and `topics copy` need
`BALANCE_SCHEMA_REGISTRY_URL=http://127.0.0.1:8081/apis/ccompat/v7`.

"""


def commands(group: click.Group = cli, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yields every command with its name, such as `topics copy`; of groups, those that do something by themselves."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and getattr(command, "invoke_without_command", True):
            yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


def page() -> str:
    described = [(name, command, _options(command)) for name, command in commands()]
    uses = Counter(option for *_, options in described for option in options)
    shared = [option for option, times in uses.items() if times > 1]
    parts = []
    for name, command, options in described:
        items = [f"`{option}`: {text}" for option, text in options if (option, text) not in shared]
        if also := [f"`{option}`" for option, text in options if (option, text) in shared]:
            items.append(f"[also](#options-of-several-commands) {', '.join(also)}")
        parts.append(section(f"`{_usage(name, command)}`", f"{_help(command)}\n\n", bullets(items)))
    rows = [(f"`{option}`", text) for option, text in shared]
    return joined([_HEAD, *parts, section("Options of several commands", table(("option", "meaning"), rows))])


def _usage(name: str, command: click.Command) -> str:
    context = click.Context(command)
    arguments = [
        parameter.make_metavar(context) for parameter in command.params if isinstance(parameter, click.Argument)
    ]
    return " ".join([name, *arguments])


def _help(command: click.Command) -> str:
    return " ".join((command.help or "").split())


def _options(command: click.Command) -> Sequence[tuple[str, str]]:
    return [_option(parameter) for parameter in command.params if isinstance(parameter, click.Option)]


def _option(option: click.Option) -> tuple[str, str]:
    context = click.Context(click.Command(""))
    value = "" if option.is_flag else f" {_value(option, context)}"
    notes = []
    if option.required:
        notes.append("Required.")
    if option.show_default and option.default is not None:
        notes.append(f"Default: `{option.default}`.")
    return f"{option.opts[0]}{value}", " ".join([*filter(None, [option.help]), *notes])


def _value(option: click.Option, context: click.Context) -> str:
    if option.metavar is not None or isinstance(option.type, click.Choice):
        return option.make_metavar(context)
    match option.type:
        case click.IntRange() | click.types.IntParamType():
            return "N"
        case click.FloatRange() | click.types.FloatParamType():
            return "X"
        case click.Path() | click.File():
            return "PATH"
        case _:
            return "TEXT"
