"""Bugs in combining, committing and storing in parts, in publishing, and in expiry.

The chaos suite finds them because it uses small parts and a short idempotency window.
"""

from __future__ import annotations

from tests.chaos.mutations import QUIET, WRONG, Mutation

PARTS_MUTATIONS = (
    Mutation(
        "only the last of several consecutive parts is committed",
        "balance_service/spark/task_runner.py",
        "                for part in gathered:\n",
        "                for part in gathered[-1:]:\n",
        QUIET,
        WRONG,
    ),
    Mutation(
        "single events are also in the sums",
        "balance_service/spark/combine.py",
        "_aggregated(rows.filter(pc.invert(apart)), combine), self.singly",
        "_aggregated(rows, combine), self.singly",
        QUIET,
        WRONG,
    ),
    Mutation(
        # The position is then taken for the end of the store's contents.
        "the first part of a large commit stores its end offset",
        "balance_service/engine/store.py",
        "                batch.put(_REACHES_KEY, changelog_offset",
        "                batch.put(_CHANGELOG_OFFSET_KEY, changelog_offset",
        "kill-at-part-stored=4",
        WRONG,
    ),
    Mutation(
        "an instance publishes its partitions only when they change",
        "balance_service/cluster/directory.py",
        "next_publish = now + PUBLISH_EVERY_SECONDS\n",
        "next_publish = now + 1e9\n",
        QUIET,
        # Lists of dead letters ask all owners.
        ("silent", "stuck"),
    ),
    Mutation(
        "idempotency keys expire before the end of the window",
        "balance_service/engine/idempotency.py",
        "        horizon = self.stream_time_ms - self.window_ms\n",
        "        horizon = self.stream_time_ms - self.window_ms // 4\n",
        QUIET,
        WRONG,
    ),
)
