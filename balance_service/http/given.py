"""Reads what a request gives for its parameters, each as it is declared."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

from balance_service.errors import InvalidInputError
from balance_service.http.api.declarations import Parameter

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

T = TypeVar("T")
_MAX_PARAMETERS = 16


def formed(name: str, pattern: str, form: str, read: Callable[[str], T], **declared: Any) -> Parameter[T]:
    """A parameter of the query, of a form that a pattern tells, and a sentence: "<name> must be <form>"."""

    def parse(text: str) -> T:
        if not re.fullmatch(pattern, text):
            raise InvalidInputError(f"{name} must be {form}")
        return read(text)

    schema = {"type": "string", "pattern": f"^(?:{pattern})$"}
    return Parameter(name=name, schema=schema, parse=parse, **declared)


def position_of(text: str) -> tuple[int, int]:
    """Partition and offset in `partition:offset`."""
    partition, _, offset = text.partition(":")
    return int(partition), int(offset)


def numbers(name: str, most_digits: int, description: str, example: str) -> Parameter[list[int]]:
    """A required parameter of the query that lists numbers."""
    number = f"[0-9]{{1,{most_digits}}}"
    return formed(
        name,
        f"{number}(?:,{number})*",
        f"numbers separated by commas, such as {example}",
        lambda text: [int(one) for one in text.split(",")],
        description=description,
        example=example,
        is_required=True,
    )


class Given:
    """The parameters that a request gives. Every reading raises InvalidInputError for what is not as declared."""

    def __init__(self, request: web.Request) -> None:
        self._request = request

    def required(self, parameter: Parameter[T]) -> T:
        """The value of a parameter that must be given."""
        values = self._values(parameter)
        if not values:
            raise InvalidInputError(f"{parameter.name} is missing")
        return _parsed(parameter, values)

    def optional(self, parameter: Parameter[T]) -> T | None:
        """The value of a parameter; None if it is not given."""
        values = self._values(parameter)
        return _parsed(parameter, values) if values else None

    def _values(self, parameter: Parameter[T]) -> list[str]:
        if parameter.place == "header":
            return self._request.headers.getall(parameter.name, [])
        if parameter.place == "path":
            return [self._of_path(parameter.name)]
        return [value for name, value in self._query if name == parameter.name]

    def _of_path(self, name: str) -> str:
        # aiohttp leaves what is no UTF-8 as it was escaped, so that two keys would be one.
        resource = self._request.match_info.route.resource
        place = "" if resource is None else resource.canonical
        raw = self._request.rel_url.raw_path.split("/")[place.split("/").index(f"{{{name}}}")]
        try:
            return unquote_to_bytes(raw).decode()
        except UnicodeError:
            raise InvalidInputError(f"{name} is not UTF-8") from None

    @cached_property
    def _query(self) -> list[tuple[str, str]]:
        raw = self._request.rel_url.raw_query_string
        try:
            # One of aiohttp's parsers lets bytes through that are no UTF-8, as surrogates.
            raw.encode()
            return parse_qsl(
                raw,
                keep_blank_values=True,
                errors="strict",
                max_num_fields=_MAX_PARAMETERS,
            )
        except UnicodeError:
            raise InvalidInputError("the query is not UTF-8") from None
        except ValueError:
            raise InvalidInputError(f"the query has more than {_MAX_PARAMETERS} parameters") from None


def _parsed(parameter: Parameter[T], values: list[str]) -> T:
    if len(values) > 1:
        raise InvalidInputError(f"{parameter.name} is given more than once")
    return parameter.parse(values[0])
