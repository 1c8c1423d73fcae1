"""Names of the HTTP API that instances and clients share: paths, headers and limits."""

from __future__ import annotations

from typing import Final

ADD_FUNDS: Final = "/api/balance.addFunds"
GET_BALANCE: Final = "/api/customers.getBalance"
MODELS: Final = "/api/models"
TABLES: Final = "/api/tables"
DEAD_LETTERS: Final = "/api/deadLetters"
STATUS: Final = "/api/status"
INSTANCE: Final = "/api/instance"
HISTORY: Final = "/api/history"
READY: Final = "/health/ready"

APPLICATION_SERVER: Final = "Balance-Application-Server"
ROLE: Final = "Balance-Role"
POSITION: Final = "Balance-Position"
EPOCH: Final = "Balance-Epoch"
LAG: Final = "Balance-Lag"
AGE: Final = "Balance-Age"
GENERATION: Final = "Balance-Generation"
MISSING: Final = "Balance-Missing"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
RETRY_AFTER: Final = "Retry-After"
LAST_EVENT_ID: Final = "Last-Event-ID"

NO_PART_NAMES: Final = frozenset(
    (
        *("model", "key", "from", "to", "prefix", "after", "limit", "by", "partial", "partitions", "generation"),
        *("minPosition", "maxLag", "maxAge"),
    )
)
"""The parameters of queries beside the columns of a composite key, which may not have these names."""

EVENT_STREAM: Final = "text/event-stream"
ALIVE_SECONDS: Final = 15.0
"""An event stream sends a comment after this time without an event, so that both ends notice a dead connection."""
IDEMPOTENCY_KEY_PATTERN: Final = r"[!-~]{1,128}"
IDEMPOTENCY_WINDOW_SECONDS: Final = 86_400
"""The default of BALANCE_IDEMPOTENCY_WINDOW."""
KEEP_OLD_SECONDS: Final = 86_400
"""How long a read model's former generation is kept after a switch, by default."""
