"""The parameters of requests about dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.engine.dead_letter import Status
from balance_service.engine.decisions import (
    LETTER_ID_PATTERN,
    REASON_PATTERN,
    STAGE_PATTERN,
    LetterId,
    reason_of,
)
from balance_service.http.api.declarations import Parameter
from balance_service.http.api.schemas import POSITION_PATTERN
from balance_service.http.given import formed, numbers, position_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def _of_letter(name: str, description: str, schema: Mapping[str, Any], example: str) -> Parameter[str]:
    return Parameter(
        name=name,
        place="path",
        description=description,
        schema=schema,
        parse=str,
        example=example,
        is_required=True,
    )


LETTER = _of_letter(
    "id",
    "The dead letter, as lists name it, percent-encoded.",
    {"type": "string", "pattern": LETTER_ID_PATTERN},
    "balance/1:42",
)
LETTER_STAGE = _of_letter(
    "stage",
    "What comes before the slash in the id.",
    {"type": "string", "pattern": f"^{STAGE_PATTERN}$"},
    "balance",
)
LETTER_RECORD = _of_letter(
    "record", "What comes after it.", {"type": "string", "pattern": f"^{POSITION_PATTERN}$"}, "1:42"
)
AFTER_LETTER = Parameter(
    name="after",
    description="The dead letter after which the list begins: `next` of the page before.",
    schema={"type": "string", "pattern": LETTER_ID_PATTERN},
    parse=LetterId.parse,
    example="balance/1:42",
)
LETTERS_FROM = formed(
    "from",
    POSITION_PATTERN,
    "partition:offset, such as 0:42",
    position_of,
    description="Only between instances: the record with which the list begins.",
    example="0:42",
    is_required=True,
)
STATUS = formed(
    "status",
    "|".join(status.value for status in Status),
    f"one of {', '.join(status.value for status in Status)}",
    Status,
    description="List those of one status.",
    example="waiting",
)


def _text(name: str, description: str, example: str, *, is_required: bool = False) -> Parameter[str]:
    return Parameter(
        name=name,
        description=description,
        schema={"type": "string"},
        parse=str,
        example=example,
        is_required=is_required,
    )


CAUSE = formed(
    "cause",
    # Peers are asked for it by URL.
    ".{1,200}",
    "text of 1 to 200 characters",
    str,
    description="List those of one cause.",
    example="schema-id-unknown",
)
OF_MODEL = _text("model", "List those of one read model.", "balance")
STAGE = _text("stage", "Only between instances: the stage that is asked about.", "balance", is_required=True)
VERDICT_BY = _text("by", "Only between instances: who has decided.", "alice", is_required=True)
VERDICT_REASON = Parameter(
    name="reason",
    description="Only between instances: why.",
    schema={"type": "string", "pattern": REASON_PATTERN},
    parse=reason_of,
    example="a test event",
    is_required=True,
)
OFFSETS = numbers(
    "offsets", 18, "Only between instances: the records whose dead letters are decided about.", example="42,43"
)
