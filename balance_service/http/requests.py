"""Parameters and bodies of requests, as models of pydantic.

The models validate requests, and describe routes in the OpenAPI document.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlencode

from pydantic import BaseModel, Field, PlainValidator, ValidationError, create_model
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from balance_service.errors import InvalidInputError
from balance_service.model.keys import CONTROL_CHARACTERS, MAX_KEY_BYTES, checked_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from aiohttp import web

    from balance_service.model.keys import KeyType

_MAX_PARAMETERS = 16
_MOST_NAME = 100
# JSON Schema takes 1.0 for an integer.
_WHOLE = re.compile(r"([0-9]{1,18})(?:\.0{1,18})?")
POSITION_PATTERN = "[0-9]{1,10}:[0-9]{1,18}"


def formed(pattern: str, form: str, read: Callable[[str], Any] = str) -> PlainValidator:
    """A validator for text that matches `pattern`. Its error says "<name> must be <form>"."""

    def parse(text: str) -> Any:
        if not re.fullmatch(pattern, text):
            raise PydanticCustomError("form", "must be {form}", {"form": form})
        return read(text)

    return PlainValidator(parse, json_schema_input_type=Annotated[str, Field(pattern=f"^(?:{pattern})$")])


def _position(text: str) -> tuple[int, int]:
    partition, _, offset = text.partition(":")
    return int(partition), int(offset)


def numbers(most_digits: int, example: str) -> PlainValidator:
    """A validator for a list of numbers, separated by commas."""
    number = f"[0-9]{{1,{most_digits}}}"
    form = f"numbers separated by commas, such as {example}"
    return formed(f"{number}(?:,{number})*", form, lambda text: [int(one) for one in text.split(",")])


Position = Annotated[
    tuple[int, int], formed(POSITION_PATTERN, "partition:offset, such as 0:42", _position), Field(examples=["1:42"])
]
"""Partition and offset."""
MaxLag = Annotated[
    int,
    formed("[0-9]{1,18}", "a number of records, such as 100", int),
    Field(
        description="Bounds staleness: answer only from a state at most this many records behind the end of the "
        "partition, by a reading of that end at most 3 s old. A standby may answer, and so may an owner that is still "
        "catching up. If no instance is that close, the answer is 503.",
        examples=["100"],
    ),
]
MaxAge = Annotated[
    float,
    formed("[0-9]{1,9}(?:\\.[0-9]{1,20})?", "a number of seconds, such as 60", float),
    Field(
        description="Bounds staleness in seconds: any copy may answer that is known to have included all events so "
        "long ago or later, also while the broker is away; `Balance-Age` has its age. The end of the topic is read "
        "every second. An old copy without the key says nothing of newer ones, so the answer is 503 then, not 404.",
        examples=["60"],
    ),
]
Limit = Annotated[
    int,
    formed("[1-9][0-9]{0,2}|1000", "a number from 1 to 1000", int),
    Field(
        description="The maximum number of entries to list, at most 1000; by default 100, of a top 10.",
        examples=["100"],
    ),
]
GenerationNumber = Annotated[
    int,
    formed("[1-9][0-9]{0,8}", "the number of a generation, such as 2", int),
    Field(description="The generation of the read model that answers; by default the one that serves.", examples=["2"]),
]
Partial = Annotated[bool, formed("true|false", "true or false", lambda text: text == "true"), Field(examples=["true"])]
Partitions = Annotated[list[int], numbers(5, "0,3")]
Key = TypeAliasType(
    "Key",
    Annotated[
        str,
        Field(
            description=f"1 to {MAX_KEY_BYTES} bytes of UTF-8 without control characters (U+0000 to U+001F, U+007F to "
            "U+009F). The limit is in bytes, not characters: 128 two-byte characters fit, 129 do not.",
            min_length=1,
            max_length=MAX_KEY_BYTES,
            pattern=f"^[^{CONTROL_CHARACTERS}]+$",
            examples=["c1", "Zoë/42"],
        ),
    ],
)


def key_text(name: str) -> PlainValidator:
    """A validator for a key that is text; `name` is the parameter's."""
    return PlainValidator(lambda text: checked_key(text, name), json_schema_input_type=Key)


def _text_of_columns(texts: Mapping[str, str]) -> str:
    return urlencode(texts, quote_via=quote, safe="")


CompositeText = Annotated[str, PlainValidator(_text_of_columns, json_schema_input_type=dict[str, str])]
"""The text of a composite key, given as its columns. The key's type has to parse it."""


def key_of_type(key_type: KeyType) -> PlainValidator:
    """A validator for a key of one type of a read model; leaves it as text."""

    def parse(text: str) -> str:
        key_type.parse(text)
        return text

    return PlainValidator(parse, json_schema_input_type=text_type(key_type))


def text_type(key_type: KeyType) -> Any:
    """The type of the texts of keys, for the OpenAPI document; any text for composite keys, whose text is a query."""
    if key_type.is_composite:
        return str
    (column,) = key_type.parts
    return Annotated[str, Field(pattern=column.pattern)] if column.pattern else Key


class Validated(BaseModel):
    """A model whose validation errors are sentences for clients."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Raises InvalidInputError: a value is missing or malformed; the message names the value and the rule."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            name = ".".join(map(str, first["loc"]))
            match first["type"]:
                case "missing":
                    message = f"{name} is missing"
                case "extra_forbidden":
                    known = ", ".join(field.alias or name for name, field in cls.model_fields.items())
                    message = f"the body has '{name}', which is not known here; it may have {known}"
                case _:
                    message = f"{name} {first['msg']}"
            raise InvalidInputError(message) from None


class Parameters(Validated):
    """The parameters of a route. A field's alias is the parameter's name.

    A parameter is in the path if the route's path names it, in a header if `in_header` names it, else in the query.
    """

    of_columns: ClassVar[str] = ""
    """The parameter that is made of the columns of a composite key: in requests, each column is one of its own."""
    columns: ClassVar[Mapping[str, Any]] = {}
    """Their names and types; none if only the read model knows them."""
    in_header: ClassVar[frozenset[str]] = frozenset()
    not_in_header: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        names = {field.alias or name for name, field in cls.model_fields.items()}
        cls.not_in_header = frozenset(names - cls.in_header)

    @classmethod
    def check_names(cls, request: web.Request, columns: Iterable[str] = ()) -> None:
        """Checks that a request's query has no parameter of another name.

        Args:
            columns: of a composite key, which the query may have too.

        Raises:
            InvalidInputError: it has one.
        """
        named = cls.not_in_header.union(columns, cls.columns) - {cls.of_columns}
        known = sorted(named - request.match_info.keys())
        for name, _ in _query(request):
            if name not in known:
                told = f"it may have {', '.join(known)}" if known else "it may have none"
                raise InvalidInputError(f"the query has '{name[:_MOST_NAME]}', which is not known here; {told}")

    @classmethod
    def of(cls, request: web.Request, columns: Collection[str] | None = None) -> Self:
        """Validates the parameters of a request.

        Args:
            columns: those of a composite key; the query's other parameters are ignored, since a peer may know more. By
                default, every parameter that is not known is a column.

        Raises:
            InvalidInputError: a parameter is missing, malformed or repeated.
        """
        in_path = _from_path(request)
        values = dict(in_path)
        given = [(name, value) for name in cls.in_header for value in request.headers.getall(name, ())]
        query = _query(request)
        wanted = own = cls.not_in_header - {cls.of_columns}
        if cls.of_columns:
            wanted = own.union({name for name, _ in query} - cls.in_header if columns is None else columns)
        given += [pair for pair in query if pair[0] in wanted and pair[0] not in in_path]
        for name, value in given:
            if name in values:
                raise InvalidInputError(f"{name} is given more than once")
            values[name] = value
        if not cls.of_columns:
            return cls.parse(values)
        found = {name: value for name, value in values.items() if name not in own | cls.in_header}
        for name in cls.columns:
            if name not in found:
                raise InvalidInputError(f"{name} is missing")
        return cls.parse({**values, cls.of_columns: found})


class _OfGeneration(Parameters):
    generation: GenerationNumber | None = None


def generation_of(request: web.Request) -> int | None:
    """Returns the generation that a request names, if any. Raises InvalidInputError: that is no number."""
    return _OfGeneration.of(request).generation


def _from_path(request: web.Request) -> dict[str, str]:
    resource = request.match_info.route.resource
    if resource is None or "{" not in resource.canonical:
        return {}
    values = {}
    raw_path = request.rel_url.raw_path
    for segment, raw in zip(resource.canonical.split("/"), raw_path.split("/"), strict=False):
        if segment.startswith("{"):
            name = segment[1:-1]
            # aiohttp leaves escapes that are not UTF-8 undecoded, so two different keys would become the same text.
            try:
                values[name] = unquote_to_bytes(raw).decode()
            except UnicodeError:
                raise InvalidInputError(f"{name} is not UTF-8") from None
    return values


def _query(request: web.Request) -> list[tuple[str, str]]:
    raw = request.rel_url.raw_query_string
    try:
        # aiohttp's parser in Python passes bytes that are not UTF-8 on as surrogates.
        raw.encode()
        return parse_qsl(raw, keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARAMETERS)
    except UnicodeError:
        raise InvalidInputError("the query is not UTF-8") from None
    except ValueError:
        raise InvalidInputError(f"the query has more than {_MAX_PARAMETERS} parameters") from None


class JsonNumber(str):
    """The digits of a JSON number. A number never passes through a binary float."""

    __slots__ = ()


def whole_number(least: int, most: int) -> PlainValidator:
    """A validator for a number in a `JsonBody`."""

    def parse(given: object) -> int:
        match = _WHOLE.fullmatch(given) if isinstance(given, JsonNumber) else None
        if match is not None and least <= int(match[1]) <= most:
            return int(match[1])
        raise PydanticCustomError(
            "form", "must be a whole number from {least} to {most}", {"least": least, "most": most}
        )

    return PlainValidator(parse, json_schema_input_type=Annotated[int, Field(ge=least, le=most)])


def true_or_false() -> PlainValidator:
    """A validator for a boolean in a `JsonBody`."""

    def parse(given: object) -> bool:
        if isinstance(given, bool):
            return given
        raise PydanticCustomError("form", "must be true or false")

    return PlainValidator(parse, json_schema_input_type=bool)


class JsonBody(Validated):
    """A body of JSON."""

    example: ClassVar[str]

    @classmethod
    def of_json(cls, body: bytes) -> Self:
        """Validates a body, which must be a JSON object; its numbers become `JsonNumber`. Raises InvalidInputError."""
        try:
            parsed = json.loads(
                body,
                parse_float=JsonNumber,
                parse_int=JsonNumber,
                parse_constant=_refuse_constant,
                object_pairs_hook=_without_duplicates,
            )
        except (ValueError, RecursionError):
            raise InvalidInputError(f"the body is not JSON; send {cls.example}") from None
        if not isinstance(parsed, dict):
            raise InvalidInputError(f"the body is not a JSON object; send {cls.example}")
        return cls.parse(parsed)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON does not define which of two values counts. For money, guessing is not an option.
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InvalidInputError("the body has a name more than once in an object")
    return fields


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class CopyParameters(Parameters):
    """A query for one key, of states or of rows: the key, and how recent the answer must be."""

    key: Annotated[str, key_text("key")] = Field(description="The key, percent-encoded.", examples=["c1"])
    min_position: Position | None = Field(
        None,
        alias="minPosition",
        description="Read your writes: answer only once the key's partition has been applied up to this position, as "
        "`partition:offset`. The `Balance-Position` of a command's answer fits; of a produced record, it is the offset "
        "+ 1. Waits up to the service's `BALANCE_READ_TIMEOUT` (5 s by default), then answers 503. A partition other "
        "than the key's is an error (400).",
    )
    max_lag: MaxLag | None = Field(None, alias="maxLag")
    max_age: MaxAge | None = Field(None, alias="maxAge")

    def passed_on(self) -> dict[str, str]:
        """The parameters except the key that change the answer, as a peer gets them."""
        parameters = {}
        if self.min_position is not None:
            parameters["minPosition"] = f"{self.min_position[0]}:{self.min_position[1]}"
        if self.max_lag is not None:
            parameters["maxLag"] = str(self.max_lag)
        if self.max_age is not None:
            parameters["maxAge"] = f"{self.max_age:.3f}"
        return parameters


class KeyParameters(CopyParameters):
    """A query for one key of a read model."""

    generation: GenerationNumber | None = None

    def passed_on(self) -> dict[str, str]:
        of_generation = {} if self.generation is None else {"generation": str(self.generation)}
        return {**super().passed_on(), **of_generation}


def key_parameters(names: str | tuple[str, ...], key_type: KeyType, description: str) -> type[KeyParameters]:
    """`KeyParameters` whose key has names, a type and a description of its own.

    Args:
        names: of the parameter, or of those with the columns of a composite key.
    """
    if not isinstance(names, str):
        return _composite_key_parameters(names, key_type, description)
    name = names
    kind = Annotated[str, key_text(name) if key_type.is_text else key_of_type(key_type)]
    (column,) = key_type.parts
    field = Field(alias=name, description=description, examples=[column.example])
    return create_model("KeyParameters", __base__=KeyParameters, key=(kind, field))


def _composite_key_parameters(names: Sequence[str], key_type: KeyType, description: str) -> type[KeyParameters]:
    def text_of(given: Mapping[str, str]) -> str:
        # A peer may know more parameters.
        of_columns = {part.column: given[name] for name, part in zip(names, key_type.parts, strict=True)}
        text = _text_of_columns(of_columns)
        key_type.parse(text)
        return text

    kind = Annotated[str, PlainValidator(text_of, json_schema_input_type=dict[str, str])]
    made = create_model("KeyParameters", __base__=KeyParameters, key=(kind, Field(description=description)))
    made.of_columns = "key"
    made.columns = {name: text_type(part) for name, part in zip(names, key_type.parts, strict=True)}
    return made


class ScanParameters(Parameters):
    """A query for all keys of a read model."""

    max_lag: MaxLag | None = Field(None, alias="maxLag")
    partial: Partial = Field(
        False,
        description="`true`: answer even if some partitions cannot be read; `Balance-Missing` names them.",
    )
    generation: GenerationNumber | None = None
