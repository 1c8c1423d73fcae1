"""What the class of a read model says before a schema is known, and how an invalid one is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from balance_service import api
from balance_service.errors import ConfigurationError
from balance_service.model.events import DeclaredRecord
from balance_service.model.key_forms import form_misfit
from balance_service.model.record_folds import Upsert
from balance_service.model.record_keys import is_record_key
from balance_service.model.sources import sources_misfit, sources_of
from balance_service.model.standard_fold import StandardFold
from balance_service.model.stream import PARTITIONERS, By, Global, Join, Stream, Table
from balance_service.model.value_types import located

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NAME = re.compile(r"[a-z][a-z0-9-]*")
_MOST_VERSION = 2**31 - 1
_COPY = "balance-service topics copy"


def refuse(model: Any, why: str) -> NoReturn:
    """Raises ConfigurationError for the declaration of a read model or of its class."""
    raise ConfigurationError(f"the read model {located(model if isinstance(model, type) else type(model))} {why}")


def check_names(models: Iterable[Any], setting: str) -> None:
    """Raises ConfigurationError if two model classes have the same name and version; `setting` lists the models."""
    known: dict[tuple[str, int], Any] = {}
    for model in models:
        if (other := known.setdefault((model.name, model.version), model)) is not model:
            raise ConfigurationError(
                f"{setting}: {located(other)} and {located(model)} both have the name '{model.name}' and the version "
                f"{model.version}; rename one of them, give the newer one a higher version, or remove one"
            )


def check_class(model: Any) -> None:
    """Checks the parts of a class that need no schema. Raises ConfigurationError."""
    if not hasattr(model, "name"):
        refuse(model, "has no `name`")
    name, why = model.name, sources_misfit(model)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        refuse(model, f"has the name '{name}': a name consists of lower-case letters, digits and hyphens")
    if why:
        refuse(model, why)
    if isinstance(model.version, bool) or not isinstance(model.version, int) or not 1 <= model.version <= _MOST_VERSION:
        refuse(model, f"has the version {model.version!r}: it must be a whole number from 1 to {_MOST_VERSION}")
    sources = sources_of(model)
    for source in sources:
        _check_compacted(model, source)
        _check_steps(model, source)
        _check_partitioners(model, source)
        if why := form_misfit(model, source):
            refuse(model, why)
    check_owners(model, [record for source in sources for record in source.records])
    steps = [step for source in sources for step in source.steps]
    check_owners(model, [step.table.record for step in steps if isinstance(step, Join)])


def transforms(model: Any) -> bool:
    """Whether a model, or a class of models, makes rows of its events."""
    declared: Any = model if isinstance(model, type) else type(model)
    is_own: bool = declared.transform is not declared.__mro__[-2].transform
    return is_own


def declared_key(model: Any) -> tuple[str, ...]:
    """Returns the columns of the key that a model names; none if it names none, or the records' own key."""
    key = getattr(model, "key", None)
    if key is None or is_record_key(key):
        return ()
    columns = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(column, str) for column in columns):
        refuse(model, f"has the key {key!r}: name a column, or a tuple of columns")
    check_columns(model, "has the key", columns)
    return columns


def declared_folds(model: Any) -> dict[str, StandardFold]:
    """Returns the standard folds by field, from attributes and from `folds`."""
    declared = type(model)
    attributes = {name: fold for name in dir(declared) if isinstance(fold := getattr(declared, name), StandardFold)}
    if isinstance(declared.fold, Upsert):
        del attributes["fold"]
    contract = declared.__mro__[-2]
    if taken := attributes.keys() & {*dir(contract), *contract.__annotations__}:
        refuse(model, f"has a fold as its `{min(taken)}`, which has another meaning: name it in `folds` instead")
    folds = {**getattr(declared, "folds", {}), **attributes}
    for name, fold in folds.items():
        if isinstance(fold, Upsert):
            refuse(model, f"folds {fold.column} into '{name}': name {type(fold).__name__} as the model's `fold`")
    return folds


def check_columns(model: Any, says: str, columns: Sequence[str]) -> None:
    """Checks the names of the columns of a key."""
    if not columns:
        refuse(model, f"{says} no column")
    if len({*columns}) < len(columns):
        refuse(model, f"{says} {column_names(columns)}: name each column once")
    if len(columns) > 1 and (taken := api.NO_PART_NAMES & {*columns}):
        refuse(
            model, f"{says} {column_names(columns)}, but '{min(taken)}' is a parameter of queries: rename the column"
        )


def column_names(columns: Iterable[Any]) -> str:
    return " and ".join([column.__name__ if isinstance(column, type) else repr(column) for column in columns])


def check_owners(model: Any, records: Iterable[str]) -> None:
    """Refuses two classes of one name, because records are distinguished by their names."""
    owners: dict[str, type | None] = {}
    for record in records:
        owner = record.owner if isinstance(record, DeclaredRecord) else None
        if (other := owners.setdefault(record, owner)) is not owner:
            named = " and ".join("its schema" if one is None else located(one) for one in (other, owner))
            refuse(model, f"names two records {record}, by {named}: rename a class, or use one model for each")


def _check_compacted(model: Any, source: Stream) -> None:
    """Refuses a model that needs records which a compacted topic may lack."""
    if not source.compacted:
        return
    if not isinstance(getattr(model, "fold", None), Upsert):
        refuse(
            model,
            f"has '{source.topic}' with compacted=True, so it may have only the newest record of a key: that suffices "
            "for an `Upsert` or a `Debezium` as the model's `fold`, and for no other",
        )
    if source.steps:
        refuse(
            model,
            f"has '{source.topic}' with compacted=True, and a step: the records that a re-key passes on remain when "
            "the topic no longer has their deletion; read the topic by its own key",
        )


def _check_steps(model: Any, source: Stream) -> None:
    """Checks what the steps name, before a schema is looked for."""
    is_joined = False
    for step in source.steps:
        match step:
            case Join(table=table) if not isinstance(table, Table):
                refuse(
                    model,
                    f"joins {type(table).__name__}, which is neither a Table nor a Global: a stream is joined with the "
                    "newest rows of a compacted topic; events of several topics are folded by a model with `sources`",
                )
            case Join(take=take) if not isinstance(take, Mapping):
                refuse(model, f'takes {take!r} of a table: write `take={{"column": "name"}}`')
            case Join():
                is_joined = True
            case By(columns=columns):
                _check_by(model, columns, step.record, is_joined=is_joined)
                is_joined = False


def _check_by(model: Any, columns: Sequence[Any], record: str | None, *, is_joined: bool) -> None:
    named = column_names(columns)
    if record is not None and not is_joined:
        refuse(model, f"continues by {named} as `record='{record}'`: that is a joined record, and nothing is joined")
    for column in columns:
        if isinstance(column, type):
            refuse(model, f"continues by {named}: name the joined record with `record={column.__name__}`")
        if not isinstance(column, str):
            refuse(model, f'continues by {named}: `.by` takes the names of columns, such as `.by("card", "day")`')
    if is_joined and record is None and len(columns) > 1:
        refuse(model, f"continues by {named}, but joins: name the joined record, such as `record='{columns[-1]}'`")
    check_columns(model, "continues by", columns)


def _check_partitioners(model: Any, source: Stream) -> None:
    """Refuses a model that would look for a key on another partition than its producers write it to."""
    tables = [step.table for step in source.steps if isinstance(step, Join)]
    topics: list[Stream | Table] = [source, *tables]
    for topic in topics:
        if topic.partitioner not in PARTITIONERS:
            refuse(
                model,
                f"has '{topic.topic}' with the partitioner {topic.partitioner!r}: "
                f"it must be one of {', '.join(PARTITIONERS)}",
            )
    if source.partitioner == "any" and hasattr(model, "state") and not any(isinstance(s, By) for s in source.steps):
        refuse(
            model,
            f"folds '{source.topic}', which has partitioner=\"any\", so events of one key may be on several "
            "partitions: re-key them first, with a `.by` the key's column in the source",
        )
    for table in tables:
        if table.partitioner == "any":
            refuse(
                model,
                f"joins the table '{table.topic}', which has partitioner=\"any\", so rows of one key may be on several "
                f"partitions, and none is the newest: copy it with `{_COPY} {table.topic} NEW --partitioner murmur2`, "
                "and join the copy",
            )
        if not isinstance(table, Global) and table.partitioner != "murmur2":
            refuse(
                model,
                f"joins the table '{table.topic}', which has partitioner=\"{table.partitioner}\", with records that "
                "are re-keyed by murmur2, so a record and its row would be on different partitions: make it a Global; "
                f"or copy it with `{_COPY} {table.topic} NEW --partitioner murmur2`, and join the copy",
            )
