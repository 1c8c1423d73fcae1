"""Bugs that the chaos suite has to find, each as one replacement in one file, and the round that should find it."""

from __future__ import annotations

from typing import NamedTuple

CONTROL = "kill,kill-at-begun,kill-at-committed,pause"
QUIET = "none"


class Mutation(NamedTuple):
    """One planted bug. `old` must be there exactly once, or the mutation is out of date."""

    name: str
    file: str
    old: str
    new: str
    faults: str


MUTATIONS = (
    Mutation(
        "position committed in a transaction of its own, before the states",
        "balance_service/state/commit.py",
        "    changelog_offset = writer.commit(folded.records(), letters, position, holds_up_to)\n",
        "    writer.commit([], [], position, store.changelog_offset)\n"
        "    changelog_offset = writer.commit(folded.records(), letters, position, holds_up_to)\n",
        "kill-at-begun=3,kill-at-committed=3",
    ),
    Mutation(
        "aborted records are read",
        "balance_service/events/spark.py",
        '"kafka.isolation.level": "read_committed"',
        '"kafka.isolation.level": "read_uncommitted"',
        QUIET,
    ),
    Mutation(
        "a new task starts at the source's end",
        "balance_service/state/opening.py",
        "        return Position(start, least_epoch, source.topic_id, changelog_topic_id=changelog_topic_id)\n",
        "        return Position(end, 1, source.topic_id)\n",
        QUIET,
    ),
    Mutation(
        "predecessors are not fenced: every task has a transactional id of its own",
        "balance_service/state/opening.py",
        'f"{settings.application_id}-{task_id.read_model}-{task_id.partition}"',
        "f\"{settings.application_id}-{task_id.read_model}-{task_id.partition}-{__import__('time').monotonic_ns()}\"",
        "pause-at-begun=4",
    ),
    Mutation(
        "the lease always holds",
        "balance_service/cluster/membership.py",
        "        return self._clock() < self._expires\n",
        "        return True\n",
        "pause=3",
    ),
    Mutation(
        "a standby answers as the owner",
        "balance_service/http/routing.py",
        "        is_owner = role is Role.ACTIVE and self._membership.lease.holds\n",
        "        is_owner = True\n",
        QUIET,
    ),
    Mutation(
        "a standby answers what only the owner may",
        "balance_service/http/queries.py",
        "    return is_near and _is_reached(local, query) and (local.is_owner or query.takes_standbys)\n",
        "    return is_near and _is_reached(local, query)\n",
        QUIET,
    ),
    Mutation(
        "maxLag is not looked at",
        "balance_service/http/queries.py",
        "    is_near = query.max_lag is None or (local.lag is not None and local.lag <= query.max_lag)\n",
        "    is_near = True\n",
        QUIET,
    ),
    Mutation(
        "minPosition is not waited for",
        "balance_service/http/queries.py",
        "    return local.position.offset >= _wanted(query)\n",
        "    return True\n",
        QUIET,
    ),
    Mutation(
        "the replay drops the first record of every read",
        "balance_service/state/changelog_reader.py",
        "        for message in messages:\n",
        "        for message in messages[1:] or messages:\n",
        QUIET,
    ),
    Mutation(
        "a standby writes the position before the states",
        "balance_service/state/changelog_reader.py",
        "            if answers and key == POSITION_KEY:\n",
        "            if answers and key == POSITION_KEY:\n"
        "                ahead = StoreBatch()\n"
        "                ahead.put(key, value or b'')\n"
        "                self._apply(ahead, offset_of(message) + 1, True)\n"
        "                time.sleep(0.2)\n",
        QUIET,
    ),
    Mutation(
        "money is added as binary floats",
        "balance_service/read_models/balance.py",
        'amount = state["customerId"], _EXACT.add(state["amount"], amount)\n',
        'amount = state["customerId"], Decimal(f"{float(state[\'amount\']) + float(amount):.2f}")\n',
        QUIET,
    ),
    Mutation(
        "amounts added in columns are cut to 32 bits",
        "balance_service/state/addition.py",
        "        totals = numbers + low[rows]\n",
        "        totals = numbers + low[rows].astype(np.int32)\n",
        QUIET,
    ),
    Mutation(
        "dead letters are committed in a transaction of their own, before the states",
        "balance_service/state/changelog.py",
        "        producer.begin_transaction()\n",
        "        producer.begin_transaction()\n"
        "        for letter in dead_letters:\n"
        "            producer.produce(\n"
        "                self._dead_letters, letter.value, letter.key, self._partition, headers=self._headers(letter)\n"
        "            )\n"
        "        producer.commit_transaction(_COMMIT_TIMEOUT_SECONDS)\n"
        "        dead_letters = ()\n"
        "        producer.begin_transaction()\n",
        "kill-at-begun=4,kill-at-produced=2",
    ),
    Mutation(
        "idempotency keys are forgotten after each batch",
        "balance_service/state/idempotency.py",
        "        return [*self._expired(store), *records]\n",
        "        return self._expired(store)\n",
        QUIET,
    ),
    Mutation(
        "the store is written before the transaction is committed",
        "balance_service/state/commit.py",
        "    changelog_offset = writer.commit(folded.records(), letters, position, holds_up_to)\n",
        "    store.write((*folded.records(), (POSITION_KEY, position)), store.changelog_offset)\n"
        "    changelog_offset = writer.commit(folded.records(), letters, position, holds_up_to)\n",
        "kill-at-begun=3,kill-at-produced=3",
    ),
    Mutation(
        "partitions are found by CRC32",
        "balance_service/cluster/partitioner.py",
        "    return (murmur2(key) & 0x7FFFFFFF) % partitions\n",
        '    return __import__("zlib").crc32(key) % partitions\n',
        QUIET,
    ),
)
