"""Bugs in what models on several stages send, join and answer, that the chaos suite has to find.

That a table is read to its end before a batch is joined, it cannot show: a table is read faster than an event comes
through Spark. A bug of `pinpoint_mutations` has it found by a test that holds the table up.
"""

from __future__ import annotations

from tests.chaos.mutations import QUIET, SYSTEMS, WRONG, Mutation

SYSTEM_MUTATIONS = (
    Mutation(
        "what is sent is committed in a transaction of its own, before the position",
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
        "a rebuild sends everything again",
        "balance_service/hosting/rebuild.py",
        "emitted_up_to=self._up_to.get(partition, 0) if self._stage.outputs else 0",
        "emitted_up_to=0",
        QUIET,
        ("doubled",),
        SYSTEMS,
    ),
    Mutation(
        "a row is looked up as it is now, not as of the event's time",
        "balance_service/engine/table_store.py",
        "        if newest.timestamp_ms <= latest:\n",
        "        if newest.timestamp_ms:\n",
        "kill-at-begun=2,kill-at-fenced=2",
        WRONG,
        SYSTEMS,
    ),
    Mutation(
        "a question about all keys forgets a partition",
        "balance_service/http/scatter.py",
        "range(self.routing.partitions) if partitions is None else partitions",
        "range(1, self.routing.partitions) if partitions is None else partitions",
        QUIET,
        ("wrong",),
        SYSTEMS,
    ),
)
