"""Loads the read models that BALANCE_MODELS names: shipped ones, those of installed packages, and a user's own."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import sysconfig
import traceback
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from balance_service.errors import ConfigurationError
from balance_service.model.class_checks import check_names
from balance_service.model.conditions import FOR_SPARK
from balance_service.model.read_model import ReadModel
from balance_service.process.package import remedy_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

SETTING = "BALANCE_MODELS"
ENTRY_POINTS = "balance_service.read_models"
"""The entry point group for read models of installed packages."""

_PART = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*(?::[^\W\d]\w*)?")
_PLAIN = re.compile(r"[\w-]+")
_PACKAGE = str(Path(__file__).parents[1])


def load_models(
    names: Sequence[str], shipped: Mapping[str, type[ReadModel]], *, setting: str = SETTING
) -> list[type[ReadModel]]:
    """Returns the named read models, in that order, each once.

    A name is that of a shipped model or an entry point, `package.module` for every read model that the module defines,
    or `package.module:Class`. Modules are searched on `sys.path`, then in the working directory.

    Args:
        shipped: the models that ship with the service, by name.
        setting: the setting or argument that holds the names, for messages.

    Raises:
        ConfigurationError: a name cannot be loaded, or two models have one name. The message names it and the remedy.
    """
    loader = _Loader(shipped, setting)
    with _working_directory_last():
        models = [*dict.fromkeys(model for name in names for model in loader.load(name.strip()))]
    check_names(models, setting)
    return models


def raised_at(error: BaseException) -> str | None:
    """Returns `file:line` of the innermost frame in the user's code; None if the error passed through none."""
    frames = _frames(error)
    return f"{(frame := _innermost(frames)).filename}:{frame.lineno}" if frames else None


def files_beside(name: str) -> list[Path]:
    """Returns the Python files in the folder of a model's module, and the schemas in that folder and its parent.

    Imports nothing. The list is empty for a shipped model, and for a module that is not found.
    """
    if _PLAIN.fullmatch(name) and "." not in name:
        return []
    module = name.partition(":")[0].replace(".", "/")
    for root in (*map(Path, sys.path), Path.cwd()):
        path = root / module
        folder = path if path.is_dir() else path.parent
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            schemas = (file for at in (folder, folder.parent) for file in (at / "schemas").glob("*.avsc"))
            return sorted({*folder.glob("*.py"), *schemas})
    return []


class _Loader:
    def __init__(self, shipped: Mapping[str, type[ReadModel]], setting: str) -> None:
        self._shipped = shipped
        self._setting = setting

    def load(self, part: str) -> list[type[ReadModel]]:
        if part in self._shipped:
            return [self._shipped[part]]
        if _PART.fullmatch(part) and ("." in part or ":" in part):
            return self._defined(part, part)
        if _PLAIN.fullmatch(part):
            return self._installed(part)
        raise self._error(
            part, "is not the name of a read model; write `package.module:Class`, with dots and without `.py`"
        )

    def _installed(self, name: str) -> list[type[ReadModel]]:
        """Returns the models that an entry point names."""
        from importlib.metadata import entry_points

        found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        values = sorted({point.value for point in entry_points(group=ENTRY_POINTS) if point.name == name})
        if len(values) > 1:
            raise self._error(
                name,
                f"is an entry point of two installed packages, for {' and for '.join(values)}; name one of these "
                "instead",
            )
        if values:
            return self._defined(name, values[0].replace(" ", ""))
        known = (
            f"shipped models: {', '.join(sorted(self._shipped))}; entry points: {', '.join(sorted(found)) or 'none'}"
        )
        raise self._error(name, f"is unknown ({known}); write the name of a model of your own as `{_class_hint(name)}`")

    def _defined(self, part: str, place: str) -> list[type[ReadModel]]:
        """Returns the models at `package.module` or `package.module:Class`."""
        name, _, wanted = place.partition(":")
        module = self._imported(part, name)
        if not wanted:
            if models := [*_models_of(module)]:
                return models
            raise self._error(
                part,
                f"defines no read model: {_file(module)} has no subclass of ReadModel; add one, or name the module "
                "that has it",
            )
        found = getattr(module, wanted, None)
        if found is None:
            there = ", ".join(model.__name__ for model in _models_of(module))
            remedy = f"it defines {there}" if there else "it defines no read model"
            raise self._error(part, f"is not found: {_file(module)} has no class {wanted}; {remedy}")
        if not (isinstance(found, type) and issubclass(found, ReadModel)) or found is ReadModel:
            what = wanted if isinstance(found, type) else f"{wanted}, of type {type(found).__name__},"
            raise self._error(
                part,
                f"is not a read model: {what} in {_file(module)} is not a subclass of ReadModel; name another class",
            )
        return [found]

    def _imported(self, part: str, name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not _frames(error):
                raise self._error(part, _not_found(name)) from error
            remedy = remedy_for(error) or "install it, or correct the import"
            raise self._error(
                part, f"cannot be imported: {raised_at(error)} imports {error.name}, which is not installed; {remedy}"
            ) from error
        except SyntaxError as error:
            at = f"{error.filename}:{error.lineno}"
            raise self._error(part, f"cannot be imported: {at}: {error.msg}; correct the file") from error
        except (Exception, SystemExit) as error:
            at = raised_at(error) or name
            if isinstance(error, ConfigurationError):
                place = "" if at in str(error) else f"{at}: "
                raise self._error(part, f"cannot be used: {place}{error}") from error
            if _lacks_spark(error):
                raise self._error(
                    part, f"cannot be imported: {at} has an expression of PySpark, and no Spark runs there: {FOR_SPARK}"
                ) from error
            text = next(iter(str(error).splitlines()), "")
            cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
            raise self._error(part, f"cannot be imported: {at} raises {cause}; correct the file") from error

    def _error(self, part: str, why: str) -> ConfigurationError:
        return ConfigurationError(f"{self._setting}: '{part}' {why}")


@contextmanager
def _working_directory_last() -> Iterator[None]:
    """Puts the working directory at the end of `sys.path`, unless it is there; removes it afterwards.

    At the front, a file in it would hide a module of Python, of the service or of a package that has its name.
    """
    here = str(Path.cwd())
    importlib.invalidate_caches()
    if here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        # A module may have changed the path itself.
        with suppress(ValueError):
            sys.path.remove(here)


def _models_of(module: ModuleType) -> Iterator[type[ReadModel]]:
    below = f"{module.__name__}." if hasattr(module, "__path__") else None
    for found in dict.fromkeys(value for value in vars(module).values() if isinstance(value, type)):
        is_there = found.__module__ == module.__name__ or (below and found.__module__.startswith(below))
        if is_there and issubclass(found, ReadModel):
            yield found


def _not_found(name: str) -> str:
    """Explains why a module is not found; lists the modules of the innermost package that exists."""
    parent, _, _ = name.rpartition(".")
    while parent:
        known: Any = sys.modules.get(parent)
        if known is not None:
            if not hasattr(known, "__path__"):
                remedy = f"write `{parent}:Class` for a class in it"
                return f"is not found: {parent} ({_file(known)}) is a module, not a package; {remedy}"
            there = sorted(module.name for module in pkgutil.iter_modules(known.__path__))
            listed = f", which has {', '.join(there)}" if there else ", which has no modules"
            return f"is not found: there is no {name.removeprefix(f'{parent}.')} in {known.__path__[0]}{listed}"
        parent, _, _ = parent.rpartition(".")
    top = name.partition(".")[0]
    return (
        f"is not found: there is no module {top} on sys.path or in {Path.cwd()}; change to the folder that "
        "contains it, or install its package"
    )


def _class_hint(name: str) -> str:
    """Shows how to name a class: in the module of that name, if there is one."""
    try:
        is_module = name.isidentifier() and find_spec(name) is not None
    except ValueError:
        is_module = False
    return f"{name}:Class" if is_module else "package.module:Class"


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error's traceback, except those of this file and of Python's import system."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename != __file__ and not _is_machinery(frame.filename)]


def _lacks_spark(error: BaseException) -> bool:
    """Whether PySpark has refused to make an expression, because no session runs in this process."""
    is_of_spark = "/pyspark/sql/" in traceback.extract_tb(error.__traceback__)[-1].filename
    return is_of_spark and (isinstance(error, AssertionError) or "SESSION_OR_CONTEXT_NOT_EXISTS" in str(error))


def _is_machinery(file: str) -> bool:
    return file.startswith("<frozen importlib") or Path(file).parent == Path(importlib.__file__).parent


def _innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """The innermost frame in the user's code; an error that surfaces in a library usually starts there."""
    libraries = (_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    # The user's code may be installed too.
    return (own or [frame for frame in frames if frame.filename == frames[0].filename])[-1]


def _file(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or next(iter(_paths(module)), module.__name__))


def _paths(module: ModuleType) -> Iterable[str]:
    return getattr(module, "__path__", ())
