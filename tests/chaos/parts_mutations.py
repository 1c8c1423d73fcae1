"""Bugs in what is combined, committed and stored in parts, in what is published, and in what expires.

The chaos suite finds them because it makes parts small and the idempotency window short.
"""

from __future__ import annotations

from tests.chaos.mutations import QUIET, WRONG, Mutation

PARTS_MUTATIONS = (
    Mutation(
        "of several parts that are committed one after the other, only the last is",
        "balance_service/spark/feed.py",
        "                for part in gathered:\n",
        "                for part in gathered[-1:]:\n",
        QUIET,
        WRONG,
    ),
    Mutation(
        "events that stay single are in the sums, too",
        "balance_service/spark/combine.py",
        "_aggregated(rows.filter(pc.invert(apart)), combine), self.singly",
        "_aggregated(rows, combine), self.singly",
        QUIET,
        WRONG,
    ),
    Mutation(
        # So the position, too, is taken for that of what the store has.
        "of a large commit, the end goes to the store with the first part",
        "balance_service/engine/store.py",
        "                batch.put(_REACHES_KEY, changelog_offset",
        "                batch.put(_CHANGELOG_OFFSET_KEY, changelog_offset",
        "kill-at-part-stored=4",
        WRONG,
    ),
    Mutation(
        "an instance says what it owns only when that changes",
        "balance_service/cluster/directory.py",
        "next_publish = now + PUBLISH_EVERY_SECONDS\n",
        "next_publish = now + 1e9\n",
        QUIET,
        # Whoever lists dead letters asks all who own them.
        ("silent", "stuck"),
    ),
    Mutation(
        "idempotency keys are forgotten before the window is over",
        "balance_service/engine/idempotency.py",
        "        horizon = self.stream_time_ms - self.window_ms\n",
        "        horizon = self.stream_time_ms - self.window_ms // 4\n",
        QUIET,
        WRONG,
    ),
)
