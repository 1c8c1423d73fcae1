"""Checks the forms of keys that a declaration names: of its source, of the tables that it joins, and of its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.avro.schemas import simple_name, without_null
from balance_service.model.record_keys import KEY_FORMATS, NO_KEYS, RecordKey, is_record_key
from balance_service.model.stream import By, Join

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.model.events import Emit
    from balance_service.model.keys import KeyType
    from balance_service.model.stream import Stream

_OF_TABLES: Mapping[str, Sequence[str]] = {
    "string": ("string", "int", "long"),
    "int": ("int",),
    "long": ("int", "long"),
}
"""The forms that the keys of tables may have, and the Avro types of the columns that they are joined on."""


def form_misfit(model: Any, source: Stream) -> str:
    """Returns why the forms of the keys of a class's source, and of its tables, are refused; empty if they are not."""
    has_record_key = is_record_key(getattr(model, "key", None))
    is_rekeyed = any(isinstance(step, By) for step in source.steps)
    form, topic = source.key_format, source.topic
    if has_record_key and is_rekeyed:
        return "has the key RECORD_KEY, and a source that is re-keyed: the key is the column of the `.by`"
    if form is not None and form not in (*KEY_FORMATS, *NO_KEYS):
        return (
            f"has '{topic}' with the key_format {form!r}: it must be one of {', '.join(KEY_FORMATS)}; or of "
            f"{' and '.join(NO_KEYS)}, before a `.by`"
        )
    if form in NO_KEYS and not is_rekeyed:
        return (
            f"has '{topic}' with key_format=\"{form}\": such a key {NO_KEYS[form]}, so that no query could find its "
            'state: re-key the source by the columns that the key repeats, such as `.by("customerId")`'
        )
    if form is not None and hasattr(model, "state") and not has_record_key and not is_rekeyed:
        return (
            f"has '{topic}' with a key_format, and the key {getattr(model, 'key', None)!r}: without a `.by`, a "
            "key_format is that of `key = RECORD_KEY`"
        )
    for table in [step.table for step in source.steps if isinstance(step, Join)]:
        if table.key_format not in _OF_TABLES:
            return (
                f"joins the table '{table.topic}', which has the key_format {table.key_format!r}: it must be one of "
                f"{', '.join(_OF_TABLES)}; a UUID is text"
            )
    return ""


def join_key_misfit(join: Join, kind: Any) -> str:
    """Returns why a column of an Avro type, None if there is no such column, cannot be joined on; empty if it can."""
    allowed = _OF_TABLES[join.table.key_format]
    if kind is not None and simple_name(without_null(kind)[0]) in allowed:
        return ""
    listed = " or ".join(filter(None, [", ".join(allowed[:-1]), allowed[-1]]))
    return f"which has {join.table.key_format} keys, on '{join.on}', which is no {listed}"


def sent_misfit(outputs: Sequence[Emit], key: KeyType | None) -> str:
    """Returns why the keys of an output cannot have the form that it names; empty if they can.

    Args:
        key: the type of the states' keys, or of the events' that are sent on; None if these may be anything.
    """
    for output in outputs:
        form = output.key_format
        if isinstance(key, RecordKey):
            fits, why = form in (None, key.key_format), f"its keys are sent as its source has them: {key.key_format}"
        elif key is None:
            fits, why = form is None, "its keys may be anything: name the `key_format` of its source, too"
        else:
            fits = form is None or (form == "long" and key.is_number)
            why = f"its keys are {' and '.join(key.columns)}: only a number may be written as a long"
        if not fits:
            return f"emits to '{output.topic}' with the key_format {form!r}, and {why}"
    return ""
