"""What a route declares besides its handler: parameters, body and answers, in OpenAPI's terms.

Schemas are JSON Schema as plain mappings. What several routes share is a `Component`: it can stand anywhere within a
schema, and the document holds it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Component:
    """A definition under a name, in the section `kind` of the document's components."""

    kind: Literal["headers", "schemas"]
    name: str
    definition: Mapping[str, Any]


Schema = Component | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Generic[T]):
    """A parameter of a request. `parse` raises InvalidInputError for what its schema does not allow."""

    name: str
    description: str
    schema: Schema
    parse: Callable[[str], T]
    example: str
    place: Literal["header", "path", "query"] = "query"
    is_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The form of a body. `examples` are by name, each with its summary."""

    schema: Schema
    example: Any = None
    examples: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    media_type: str = JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The body that a request must have."""

    description: str
    content: Content


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A header of an answer. `component` tells headers of the same name apart that do not mean the same."""

    name: str
    description: str
    schema: Schema
    example: Any = None
    is_required: bool = True
    component: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One of the answers of a route; without content, its body is empty."""

    status: int
    description: str
    headers: tuple[Header, ...] = ()
    content: Content | None = None
