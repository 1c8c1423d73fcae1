"""Bugs in emitting, joining and answering of models with several stages, which the chaos suite must find.

The suite cannot show that a table is read to its end before a join, because a table is read faster than Spark delivers
an event. A bug in `pinpoint_mutations` covers this with a test that delays the table.
"""

from __future__ import annotations

from tests.chaos.mutations import QUIET, SYSTEMS, WRONG, Mutation

SYSTEM_MUTATIONS = (
    Mutation(
        "outputs are committed in their own transaction before the position",
        "balance_service/engine/changelog_writer.py",
        "        producer.begin_transaction()\n",
        "        producer.begin_transaction()\n"
        "        for o in outputs:\n"
        "            more = {'headers': o.headers, 'timestamp': o.timestamp_ms}\n"
        "            producer.produce(o.topic, o.value, o.key, o.partition, **more)\n"
        "        producer.commit_transaction(_COMMIT_TIMEOUT_SECONDS)\n"
        "        outputs = ()\n"
        "        producer.begin_transaction()\n",
        "kill-at-begun=2,kill-at-produced=2",
        WRONG,
        SYSTEMS,
    ),
    Mutation(
        "a rebuild emits everything again",
        "balance_service/hosting/rebuild.py",
        "emitted_up_to=self._up_to.get(partition, 0) if self._stage.outputs else 0",
        "emitted_up_to=0",
        QUIET,
        ("doubled",),
        SYSTEMS,
    ),
    Mutation(
        "a row is looked up as of now instead of the event's time",
        "balance_service/engine/table_store.py",
        "        if newest.timestamp_ms <= latest:\n",
        "        if newest.timestamp_ms:\n",
        "kill-at-begun=2,kill-at-fenced=2",
        WRONG,
        SYSTEMS,
    ),
    Mutation(
        "a query over all keys skips a partition",
        "balance_service/http/scatter.py",
        "range(self.routing.partitions) if partitions is None else partitions",
        "range(1, self.routing.partitions) if partitions is None else partitions",
        QUIET,
        ("wrong",),
        SYSTEMS,
    ),
)
