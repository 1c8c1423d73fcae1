"""The parameters of requests: each is declared once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from balance_service.errors import InvalidInputError
from balance_service.http.api.declarations import Parameter
from balance_service.http.api.schemas import KEY as KEY_SCHEMA
from balance_service.http.api.schemas import POSITION_PATTERN
from balance_service.http.given import Given, formed, numbers, position_of
from balance_service.model.keys import TEXT, checked_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp import web

    from balance_service.model.keys import KeyType

MIN_POSITION = formed(
    "minPosition",
    POSITION_PATTERN,
    "partition:offset, such as 0:42",
    position_of,
    description="Read your writes: answer only once the key's partition has been applied up to this position, as "
    "`partition:offset`. The `Balance-Position` of a command's answer fits. Waits up to the service's "
    "`BALANCE_READ_TIMEOUT` (5 s unless configured), then answers 503. A partition other than the key's is an error "
    "(400).",
    example="1:42",
)
MAX_LAG = formed(
    "maxLag",
    "[0-9]{1,18}",
    "a number of records, such as 100",
    int,
    description="Bounds staleness: answer only from a state at most so many records behind the end of the key's "
    "partition, by a reading of that end at most 3 s old. A standby may answer, and so may an owner that is still "
    "catching up. If none is that near, 503.",
    example="100",
)
_IDEMPOTENCY_KEY = r"[!-~]{1,128}"


def idempotency_key_of(text: str) -> bytes:
    """The key by which a repeated command is recognised.

    Raises:
        InvalidInputError: the text cannot be one.
    """
    if not re.fullmatch(_IDEMPOTENCY_KEY, text):
        raise InvalidInputError("Idempotency-Key must have 1 to 128 visible ASCII characters")
    return text.encode()


IDEMPOTENCY_KEY = Parameter(
    name="Idempotency-Key",
    place="header",
    description="A name for this addition. Of several additions to one customer with the same name within "
    "`BALANCE_IDEMPOTENCY_WINDOW` (24 h unless configured), the first is applied; one with another amount goes to the "
    "dead letters. Every retry is answered 202, with the position of the retry. Given at most once.",
    schema={"type": "string", "pattern": f"^{_IDEMPOTENCY_KEY}$"},
    parse=idempotency_key_of,
    example="9b2f0c1e-order-1041",
)


MODEL = Parameter(
    name="model",
    place="path",
    description="The read model; `/api/models` lists them.",
    schema={"type": "string"},
    parse=str,
    example="balance",
    is_required=True,
)
KEY = Parameter(
    name="key",
    place="path",
    description="The key, percent-encoded.",
    schema=KEY_SCHEMA,
    parse=partial(checked_key, name="key"),
    example="c1",
    is_required=True,
)


def _bound(name: str, description: str) -> Parameter[str]:
    return Parameter(
        name=name,
        description=description,
        schema=KEY_SCHEMA,
        parse=partial(checked_key, name=name),
        example="c1",
    )


FROM = _bound("from", "The least key to be listed.")
TO = _bound("to", "The greatest key to be listed.")
PREFIX = _bound("prefix", "What every key that is listed begins with.")
AFTER = _bound("after", "The key after which the list begins: `next` of the page before.")
LIMIT = formed(
    "limit",
    "[1-9][0-9]{0,2}|1000",
    "a number from 1 to 1000",
    int,
    description="Most entries to be listed, at most 1000.",
    example="100",
)
BY = Parameter(
    name="by",
    description="The field whose greatest values are listed.",
    schema={"type": "string"},
    parse=str,
    example="amount",
    is_required=True,
)
PARTIAL = formed(
    "partial",
    "true|false",
    "true or false",
    lambda text: text == "true",
    description="`true`: answer although some partitions cannot be read; `Balance-Missing` names them.",
    example="true",
)
PARTITIONS = numbers("partitions", 5, "Only between instances: the partitions that are asked about.", example="0,3")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyQuery:
    """A checked query for one key: where it is asked, the position to wait for, and how stale its answer may be.

    `path` and `parameters` are what a peer is asked with; `noun` is what the key is called. `told_as` is the key beside
    the value in the answer; None: the answer is the value alone.
    """

    key: bytes
    path: str
    parameters: Mapping[str, str]
    noun: str
    told_as: str | None = None
    min_position: tuple[int, int] | None = None
    max_lag: int | None = None

    @property
    def takes_standbys(self) -> bool:
        """Whether a standby may answer: only if the query says how recent is recent enough."""
        return self.min_position is not None or self.max_lag is not None


def key_query(
    request: web.Request, key: Parameter[str], path_of: Callable[[str], str], noun: str, key_type: KeyType = TEXT
) -> KeyQuery:
    """The query for the key that a parameter names. Raises InvalidInputError.

    Args:
        path_of: the key → where a peer is asked for it.
    """
    given = Given(request)
    value, min_position, max_lag = given.required(key), given.optional(MIN_POSITION), given.optional(MAX_LAG)
    parameters = {key.name: value} if key.place == "query" else {}
    if min_position is not None:
        parameters[MIN_POSITION.name] = f"{min_position[0]}:{min_position[1]}"
    if max_lag is not None:
        parameters[MAX_LAG.name] = str(max_lag)
    return KeyQuery(
        key=key_type.parse(value),
        path=path_of(value),
        parameters=parameters,
        noun=noun,
        told_as=value if key.place == "path" else None,
        min_position=min_position,
        max_lag=max_lag,
    )
