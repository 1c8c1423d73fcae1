"""The fenced code blocks of the documents, and the checks of those that no test runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import click
import yaml

from balance_service.cli.init import TEMPLATES
from balance_service.cli.main import cli
from balance_service.http.openapi import document
from tests.docs.pages import ROOT
from tests.support.shipped import ROUTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_OF_DRAWINGS = re.compile("[│▲▼►◄]")
_LOCAL = ("127.0.0.1", "localhost")
# Commands of other programs.
_OTHERS = {
    *(".", "cd", "echo", "export", "git", "kill", "printf", "sha256sum", "pip", "pytest", "python", "python3"),
    *("docker", "docker-compose", "kafka-acls.sh", "kafka-consumer-groups.sh", "kafka-topics.sh", "kubectl", "openssl"),
}
# Of composite keys, which are parameters of the routes of any model: the end of the path → the columns.
_KEY_COLUMNS = {end: {"customerId"} for end in ("keys", "entries", "changes")}
_COMMENT = re.compile(r"""(?<!\S)#(?:[^'"]|'[^']*'|"[^"]*")*$|(?<!\S)# .*$""")
_SUBSTITUTION = re.compile(r"\$\([^()]*\)")
_ENDS = frozenset("|&;\n")
"""Characters of words that end a command."""


@dataclass(frozen=True, slots=True)
class CodeBlock:
    document: str
    line: int
    language: str
    text: str

    @property
    def is_drawing(self) -> bool:
        return not self.language and _OF_DRAWINGS.search(self.text) is not None

    def __str__(self) -> str:
        return f"{self.document}:{self.line} ({self.language or 'no language'})"


def blocks_of(document: str) -> Iterator[CodeBlock]:
    text = (ROOT / document).read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        yield CodeBlock(document, line, found["language"], found["text"])


def check_shell(text: str) -> None:
    """Raises ValueError with a sentence if a command of a block is not one that the block's reader can run.

    Of a script, which begins with the name of its shell, only the syntax is checked.
    """
    if text.startswith("#!"):
        if error := subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, check=False).stderr:
            raise ValueError(error)
        return
    for command in _commands(text):
        _check_command(command)


def _commands(text: str) -> Iterator[list[str]]:
    """Yields each command without its environment and redirections."""
    lines = [_COMMENT.sub("", line) for line in re.sub(r"\\\n *", " ", text).splitlines()]
    lexer = shlex.shlex(_SUBSTITUTION.sub("SUBSTITUTED", "\n".join(lines)), posix=False, punctuation_chars="|&;<>\n")
    lexer.commenters = ""
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if _ENDS.issuperset(word):
            if bare := _bare(words):
                yield bare
            words = []
        else:
            words.append(word)


def _bare(words: Sequence[str]) -> list[str]:
    bare: list[str] = []
    redirected = False
    for word in words:
        if redirected or (not bare and re.match(r"\w+=", word)):
            redirected = False
        elif set(word) <= {"<", ">"}:
            redirected = True
        else:
            bare += shlex.split(word)
    return bare


def _check_command(words: Sequence[str]) -> None:
    name, *arguments = words
    match name.removeprefix(".venv/bin/"):
        case "balance-service":
            _check_ours(arguments)
        case "make":
            _check_make(arguments)
        case "curl":
            _check_curl(arguments)
        case other if other not in _OTHERS:
            raise ValueError(f"'{other}' is not known to tests/docs/code_blocks.py; correct it, or add it there")


def _check_ours(arguments: Sequence[str]) -> None:
    try:
        _parse(cli, click.Context(cli, **cli.context_settings), [*arguments])
    except click.exceptions.Exit:  # by -h or --version
        return
    except click.BadParameter as error:
        # Its reader has the file.
        if "does not exist" not in error.message:
            raise ValueError(f"balance-service {' '.join(arguments)}: {error.format_message()}") from error
    except click.ClickException as error:
        raise ValueError(f"balance-service {' '.join(arguments)}: {error.format_message()}") from error


def _parse(group: click.Group, context: click.Context, arguments: list[str]) -> None:
    """Parses arguments without running the command."""
    if not arguments or arguments[0].startswith("-"):
        group.parse_args(context, arguments)
        return
    name, command, rest = group.resolve_command(context, arguments)
    if isinstance(command, click.Group) and not command.invoke_without_command:
        _parse(command, click.Context(command, parent=context), rest)
    elif command is not None:
        # A command remembers the names of its help option, which it has from its parent.
        command.make_context(name, rest, context)


def _check_make(arguments: Sequence[str]) -> None:
    for before, target in zip(["", *arguments], arguments, strict=False):
        if "=" not in target and "-C" not in (before, target) and target not in _targets():
            raise ValueError(f"the Makefile has no target '{target}'")


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def _check_curl(arguments: Sequence[str]) -> None:
    method = "POST" if {"-d", "--data", "--data-binary"} & {*arguments} else "GET"
    if "-X" in arguments:
        method = arguments[arguments.index("-X") + 1]
    for argument in arguments:
        url = urlsplit(argument)
        names = {name for name, _ in parse_qsl(url.query, keep_blank_values=True)}
        if url.scheme not in ("http", "https") or url.hostname not in _LOCAL or not url.path.strip("/"):
            continue
        columns = _KEY_COLUMNS.get(url.path.rpartition("/")[2], set()) if "/models/" in url.path else set()
        if not any(
            method == route.method and re.fullmatch(route.path, url.path) and names - columns <= route.parameters
            for route in _routes()
        ):
            raise ValueError(f"no route answers {method} {url.path} with {', '.join(sorted(names)) or 'no parameters'}")


@dataclass(frozen=True, slots=True)
class _Served:
    method: str
    path: str
    parameters: frozenset[str]


@cache
def _routes() -> Sequence[_Served]:
    """Returns the routes of the shipped read models, and of the read model that `balance-service init` writes."""
    served = []
    for path, methods in document(ROUTES)["paths"].items():
        for method, operation in methods.items():
            names = frozenset(parameter["name"] for parameter in operation.get("parameters", ()))
            served.append(_Served(method.upper(), re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path)), names))
    template = next(TEMPLATES.rglob("orders.py.tmpl")).read_text(encoding="utf-8")
    for path, key in re.findall(r'Routes\("([^"]+)", key="(\w+)"', template):
        served.append(_Served("GET", re.escape(path), frozenset({key, "minPosition", "maxLag"})))
    return served


def _check_properties(text: str) -> None:
    for line in text.splitlines():
        if line.strip() and not line.startswith("#") and not re.fullmatch(r"[\w.-]+=.*", line):
            raise ValueError(f"'{line}' is no property")


CHECKS: Mapping[str, Callable[[str], object]] = {
    "json": json.loads,
    "properties": _check_properties,
    "sh": check_shell,
    "yaml": lambda text: [*yaml.safe_load_all(text)],
}
"""By language, the checks that raise ValueError if a block is wrong. A test runs blocks of other languages."""
