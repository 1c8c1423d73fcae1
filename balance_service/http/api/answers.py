"""Answers and headers that several routes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.http.answer import PROBLEM_JSON, Problem
from balance_service.http.api.declarations import Answer, Content, Header
from balance_service.http.api.schemas import POSITION, PROBLEM, ROLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.http.api.declarations import Schema

RETRY_AFTER = Header(
    name="Retry-After",
    description="Seconds to wait before asking again.",
    schema={"type": "integer", "minimum": 1},
    example=1,
)
PROVENANCE = (
    Header(
        name="Balance-Application-Server",
        description="`host:port` of the instance whose store gave the answer.",
        schema={"type": "string", "pattern": "^.+:[0-9]{1,5}$"},
        example="localhost:5051",
    ),
    Header(
        name="Balance-Role",
        description="Role of the task that gave the answer.",
        schema=ROLE,
        example="active",
    ),
    Header(
        name="Balance-Position",
        description="`partition:offset`: exactly the events of the partition below this offset are in the answer.",
        schema=POSITION,
        example="1:42",
    ),
    Header(
        name="Balance-Epoch",
        description="Fencing number of the task that gave the answer: a higher one is a later owner.",
        schema={"type": "integer", "minimum": 0},
        example=3,
    ),
    Header(
        name="Balance-Lag",
        description="Records of the partition that the answer has not seen yet, by a reading of the topic's end at "
        "most 3 s old; absent without such a reading.",
        schema={"type": "integer", "minimum": 0},
        example=0,
        is_required=False,
    ),
)
"""From where an answer of a state store is, and as of when."""


def ok(description: str, schema: Schema, example: object = None, headers: tuple[Header, ...] = ()) -> Answer:
    """200 with JSON."""
    return Answer(status=200, description=description, headers=headers, content=Content(schema=schema, example=example))


def problem(
    status: int,
    description: str,
    examples: Mapping[str, tuple[str, str]] | None = None,
    headers: tuple[Header, ...] = (),
) -> Answer:
    """An error.

    Args:
        examples: by name, each a summary and the problem's detail.
    """
    given = examples or {}
    content = Content(
        schema=PROBLEM,
        examples={name: (summary, Problem(status, detail).body) for name, (summary, detail) in given.items()},
        media_type=PROBLEM_JSON,
    )
    return Answer(status=status, description=description, headers=headers, content=content)


def unavailable(description: str, examples: Mapping[str, tuple[str, str]] | None = None) -> Answer:
    """503: asked again later, it may be answered."""
    return problem(503, description, examples, (RETRY_AFTER,))
