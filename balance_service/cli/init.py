"""The command `balance-service init`, which writes a new project from templates."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

TEMPLATES = Path(__file__).parents[1] / "devtools" / "project"
"""The templates of the files, by their paths in the project."""
_PACKAGE_NAME = re.compile(r"[a-z][a-z0-9_]*")
# Other folders of the project, and modules that the package would shadow.
_TEXTS = {
    "avro": {
        "format": "",
        "servers": "a broker, a schema registry and an instance",
        "export": "export BALANCE_SCHEMA_REGISTRY_URL=http://127.0.0.1:8081/apis/ccompat/v7\n",
        "variables": "",
    },
    "json": {
        "format": ', format="json"',
        "servers": "a broker and an instance",
        "export": "",
        "variables": '\n    # The registry of that file is not used.\n    BALANCE_SCHEMA_REGISTRY_URL: ""',
    },
}
"""Format of the topic → placeholder in the templates → its text."""
_TAKEN = frozenset({"balance_service", "samples", "tests", *sys.stdlib_module_names, *keyword.kwlist})


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "topic_format",
    type=click.Choice([*_TEXTS]),
    default="avro",
    help="Of the topic. JSON needs no schema registry.",
)
def init(folder: Path, *, topic_format: str) -> None:
    """Write a project with a read model, its events, sample events and a test into DIR.

    Its package has the folder's name. Existing files are never overwritten.
    """
    for path in write_project(folder, topic_format):
        click.echo(f"wrote {folder / path.relative_to(folder.resolve())}")
    package = folder.resolve().name
    click.echo(
        f"\nNext: cd {shlex.quote(str(folder))} && balance-service try {package}.orders:Orders --events "
        "samples/orders.jsonl\nREADME.md has the rest."
    )


def write_project(folder: Path, topic_format: str = "avro") -> list[Path]:
    """Write a project, whose package has the name of the folder, and return its files.

    Raises:
        ConfigurationError: the name is not a valid package name or a file already exists, and nothing is written; or
            the folder is not writable.
    """
    folder = folder.resolve()
    package = folder.name
    if not _PACKAGE_NAME.fullmatch(package) or package in _TAKEN:
        raise ConfigurationError(
            f"'{package}' is not a valid name for the project's package; choose a folder name of lower-case letters, "
            "digits and underscores that begins with a letter and is not a module of Python, `tests` or `samples`"
        )
    named = {"package": package, **_TEXTS[topic_format]}
    texts = {
        folder / _filled(str(path.relative_to(TEMPLATES)), named).removesuffix(".tmpl"): _filled(
            path.read_text(encoding="utf-8"), named
        )
        for path in sorted(TEMPLATES.rglob("*.tmpl"))
    }
    if there := sorted({found for path in texts if (found := _in_the_way(path, folder))}):
        names = ", ".join(str(path.relative_to(folder)) for path in there)
        raise ConfigurationError(f"{folder} already contains {names}, and nothing was written; choose another folder")
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {error.filename} ({error.strerror}); remove the files written to {folder}, and try again"
        ) from error
    return [*texts]


def _in_the_way(path: Path, folder: Path) -> Path | None:
    """The file or folder that prevents writing a file; None if there is none."""
    if path.exists() or path.is_symlink():
        return path
    above = [parent for parent in path.parents if parent == folder or folder in parent.parents]
    return next((parent for parent in above if parent.exists() and not parent.is_dir()), None)


def _filled(text: str, named: Mapping[str, str]) -> str:
    for name, part in named.items():
        text = text.replace(f"{{{{{name}}}}}", part)
    return text
