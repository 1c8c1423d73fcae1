"""Bodies of requests: JSON whose numbers keep their digits."""

from __future__ import annotations

import json
from typing import Any

from balance_service.engine.decisions import MOST_IDS, LetterId, reason_of
from balance_service.errors import InvalidInputError

_DECISION_EXAMPLE = '{"ids": ["balance/1:42"], "reason": "a test event"}'


def decision(body: bytes) -> tuple[list[LetterId], str]:
    """Which dead letters a decision is about, each once, and its reason. Raises InvalidInputError."""
    parsed = json_object(body, _DECISION_EXAMPLE)
    # What is discarded is gone, so nothing that was meant to narrow it may be passed over.
    if unknown := parsed.keys() - {"ids", "reason"}:
        raise InvalidInputError(f"the body has '{min(unknown)}', which is not known here; send {_DECISION_EXAMPLE}")
    ids, reason = parsed.get("ids"), parsed.get("reason")
    if not isinstance(ids, list) or not 1 <= len(ids) <= MOST_IDS or not all(type(one) is str for one in ids):
        raise InvalidInputError(f"ids must be a list of 1 to {MOST_IDS} ids of dead letters; send {_DECISION_EXAMPLE}")
    return [*dict.fromkeys(LetterId.parse(one) for one in ids)], reason_of(reason)


def json_object(body: bytes, example: str) -> dict[str, Any]:
    """A body that is a JSON object, its numbers as `JsonNumber`. Raises InvalidInputError."""
    try:
        parsed = json.loads(
            body,
            parse_float=JsonNumber,
            parse_int=JsonNumber,
            parse_constant=_no_constant,
            object_pairs_hook=_object,
        )
    except (ValueError, RecursionError):
        raise InvalidInputError(f"the body is not JSON; send {example}") from None
    if not isinstance(parsed, dict):
        raise InvalidInputError(f"the body is not a JSON object; send {example}")
    return parsed


class JsonNumber(str):
    """A JSON number's own digits: it never passes through a binary float."""

    __slots__ = ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON leaves it open which of two values counts; where they are money, neither does.
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InvalidInputError("the body has a name more than once in an object")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
