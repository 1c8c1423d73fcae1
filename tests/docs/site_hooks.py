"""Hooks of MkDocs: folders in the navigation, and links to files of the repository outside docs/.

The documents at the top of the repository are pages of the site. Other files that a page links to are copied to
`repository/`, and a folder becomes a list of its files.
"""

from __future__ import annotations

import posixpath
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[2]
_DOCS = "docs/"
_COPIES = "repository/"
# MkDocs makes `README.md` the index of its folder.
_TOP = {"ARCHITECTURE.md": "ARCHITECTURE.md", "CHANGELOG.md": "CHANGELOG.md", "README.md": "readme.md"}
"""The path in the repository of a document at its top → its path in the site."""
_LINK = re.compile(r"(?<=]\()(?![a-z]+:|#|/)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> None:
    """Puts the pages of folders into the navigation."""
    config.nav = _with_pages(config.nav)


def _with_pages(entries: Any) -> list[Any]:
    pages: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and entry.endswith("/"):
            pages += sorted(str(file.relative_to(_ROOT / _DOCS)) for file in (_ROOT / _DOCS / entry).glob("*.md"))
        elif isinstance(entry, dict):
            pages += [
                {title: value if isinstance(value, str) else _with_pages(value)} for title, value in entry.items()
            ]
        else:
            pages.append(entry)
    return pages


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the documents at the top of the repository, and all files outside docs/ that a page links to."""
    for path, to in _TOP.items():
        files.append(File.generated(config, to, abs_src_path=str(_ROOT / path)))
    waiting = [_source_of(file) for file in files.documentation_pages()]
    while waiting:
        path = waiting.pop()
        text = _listing(path) if (_ROOT / path).is_dir() else (_ROOT / path).read_text(encoding="utf-8")
        for target in map(partial(_target, path), _LINK.findall(text)):
            to = _in_site(target)
            if not to.startswith(_COPIES) or not (_ROOT / target).exists() or files.get_file_from_path(to) is not None:
                continue
            if (_ROOT / target).is_dir():
                made = File.generated(config, to, content=_listing(target), inclusion=InclusionLevel.NOT_IN_NAV)
            else:
                source = str(_ROOT / target)
                made = File.generated(config, to, abs_src_path=source, inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(made)
            if made.is_documentation_page():
                waiting.append(target)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces paths in the repository by paths in the site."""
    source, folder = _source_of(page.file), posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        target = _target(source, link[1])
        return posixpath.relpath(_in_site(target), folder or ".") if (_ROOT / target).exists() else link[1]

    return _LINK.sub(replaced, markdown)


def _target(source: str, link: str) -> str:
    """Returns the path in the repository that a link of a document means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _in_site(path: str) -> str:
    """Returns the path in the site of a file or folder of the repository."""
    if path in _TOP:
        return _TOP[path]
    if (_ROOT / path).is_dir():
        path = f"{path}/README.md"
    return path.removeprefix(_DOCS) if path.startswith(_DOCS) else _COPIES + path


def _source_of(file: File) -> str:
    """Returns the path in the repository of a page, or of the folder that it lists."""
    by_site = {to: path for path, to in _TOP.items()}
    if file.src_uri in by_site:
        return by_site[file.src_uri]
    if not file.src_uri.startswith(_COPIES):
        return _DOCS + file.src_uri
    path = file.src_uri.removeprefix(_COPIES)
    return path if (_ROOT / path).is_file() else posixpath.dirname(path)


def _listing(folder: str) -> str:
    files = sorted(file.name for file in (_ROOT / folder).iterdir() if file.is_file())
    return f"# {folder}\n\n" + "".join(f"- [{name}]({posixpath.basename(folder)}/{name})\n" for name in files)
