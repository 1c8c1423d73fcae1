"""Whether a compacted topic still has every tombstone that a store of it has not seen.

A store that was away for longer than they are kept would hold for ever what was deleted meanwhile: a dead letter that
was applied could be applied again. It is read anew from the topic's start instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.errors import StoreCorruptedError
from balance_service.kafka.topic_policies import is_compacted, tombstones_kept_ms
from balance_service.process.runtime import now_ms

if TYPE_CHECKING:
    from balance_service.kafka.topics import Topic, Topics


def check_by_offset(topics: Topics, changelog: Topic, partition: int, offset: int) -> None:
    """Check a store of a changelog by the offset up to which it has seen it, 0 if it holds nothing.

    All that comes then has to be younger than tombstones are kept for. The broker's clock tells how old records are,
    and this instance's what time it is now: they may differ by the changelog's `min.compaction.lag.ms`.

    Raises:
        StoreCorruptedError: tombstones may be gone.
        RetriableError: the broker does not answer.
    """
    if offset == 0:
        return
    kept_ms = tombstones_kept_ms(topics.config(changelog.name))
    # At the offset itself the last transaction ends.
    if offset + 1 < (young := topics.first_since(changelog.name, partition, now_ms() - kept_ms)):
        raise _may_be_gone(f"{changelog.name}-{partition} from {offset} to {young}", kept_ms)


def check_by_time(topics: Topics, table: Topic, partition: int, seen_to_ms: int | None) -> None:
    """Check a store of a table by the time up to which it has seen all. The table's records may have any timestamps.

    Args:
        seen_to_ms: by this instance's clock; None if it has never seen all.

    Raises:
        StoreCorruptedError: tombstones may be gone.
        RetriableError: the broker does not answer.
    """
    config = topics.config(table.name)
    kept_ms = tombstones_kept_ms(config)
    if is_compacted(config) and (seen_to_ms is None or seen_to_ms < now_ms() - kept_ms):
        raise _may_be_gone(f"{table.name}-{partition}", kept_ms)


def _may_be_gone(what: str, kept_ms: int) -> StoreCorruptedError:
    return StoreCorruptedError(
        f"the store has not seen {what} for longer than the {kept_ms / 3_600_000:g} h for which tombstones are kept: "
        "some may be gone"
    )
