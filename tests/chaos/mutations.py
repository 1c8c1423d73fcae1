"""Bugs that the chaos suite must find: each is one replacement in one file, with the faults of the round that finds it.

`pinpoint` has the bugs that a round would not find.
"""

from __future__ import annotations

from typing import NamedTuple

QUIET = "none"
BALANCES, SYSTEMS = "tests/chaos/test_chaos.py", "tests/chaos/test_systems.py"
# Test that plays rounds → faults of its round without a bug.
CONTROLS = {
    BALANCES: "kill,kill-at-begun,kill-at-committed,kill-at-part-stored,pause",
    SYSTEMS: "kill-at-begun,kill-at-committed,kill-at-part-stored",
}
WRONG = ("wrong", "lost", "doubled", "digest")


class Mutation(NamedTuple):
    """A planted bug. `old` must occur exactly once in the file."""

    name: str
    file: str
    old: str
    new: str
    faults: str
    kinds: tuple[str, ...]
    """The acceptable kinds of the first violation; any other kind would be found by chance.

    For other tests: the names of the tests that must fail.
    """
    test: str = BALANCES
    """The test file that must find the bug."""


MUTATIONS = (
    Mutation(
        "the position is committed in its own transaction before the states",
        "balance_service/engine/commit.py",
        "        changelog_offset = writer.commit(records(), dead_letters, frame, store.changelog_offset, outputs)\n",
        "        writer.commit([], [], frame, store.changelog_offset)\n"
        "        changelog_offset = writer.commit(records(), dead_letters, frame, store.changelog_offset, outputs)\n",
        "kill-at-begun=3,kill-at-committed=3",
        WRONG,
    ),
    Mutation(
        "aborted records are read",
        "balance_service/spark/session.py",
        '"kafka.isolation.level": "read_committed"',
        '"kafka.isolation.level": "read_uncommitted"',
        QUIET,
        WRONG,
    ),
    Mutation(
        "a batch is applied twice",
        "balance_service/spark/task_runner.py",
        "                    committed = self._commit(part, start, frozenset(left_out), task, gathering)\n",
        "                    committed = self._commit(part, start, frozenset(left_out), task, gathering)\n"
        "                    self._commit(part, part.end, frozenset(left_out), task, gathering)\n",
        QUIET,
        WRONG,
    ),
    Mutation(
        # The first offset after a batch usually belongs to a control record.
        "rows are dropped when a query restarts",
        "balance_service/spark/shared_queries.py",
        "positions = {m.partition: at for m in group",
        "positions = {m.partition: at + 4 * (at > 0) for m in group",
        "kill=3",
        WRONG,
    ),
    Mutation(
        # Without a new query, the later rows would still be counted.
        "a position skips records, because the task does not check for them",
        "balance_service/spark/task_runner.py",
        "                elif began - looked_at > _LOOK_EVERY_SECONDS:\n"
        "                    passed = self._pass_over(start, frozenset(left_out), task, interrupted)\n"
        "                    task.note_seen()\n"
        "                    looked_at = time.monotonic()\n"
        "                    start, is_unread = start if passed is None else passed, passed is None\n",
        "                elif (ends := self._topics.offsets(self._source, [partition], committed=True)) and (\n"
        "                    ends[partition] > start\n"
        "                ):\n"
        "                    task.process(TaskBatch(start, PartitionUpdates(ends[partition])))\n"
        '                    raise _AnotherQueryError("a planted bug")\n',
        QUIET,
        WRONG,
    ),
    Mutation(
        "the first of several rows between two pulls is dropped",
        "balance_service/spark/row_query.py",
        "        return rows\n",
        "        return rows.slice(1) if rows.num_rows > 1 else rows\n",
        QUIET,
        WRONG,
    ),
    Mutation(
        "a new task starts at the end of the source",
        "balance_service/engine/opening.py",
        "return first_position(hosted, partition, start, least_epoch, changelog_topic_id)",
        "return first_position(hosted, partition, end, least_epoch, changelog_topic_id)",
        QUIET,
        WRONG,
    ),
    Mutation(
        "predecessors are not fenced, because every task has its own transactional id",
        "balance_service/model/stage.py",
        'f"{self.full_name}-{partition}"',
        "f\"{self.full_name}-{partition}-{__import__('time').monotonic_ns()}\"",
        "pause-at-begun=4",
        (*WRONG, "backwards"),
    ),
    Mutation(
        "the lease always holds",
        "balance_service/kafka/lease.py",
        "        return self._clock() < self._expires\n",
        "        return True\n",
        "silence=3,pause=6",
        ("stale", "wrong owner"),
    ),
    Mutation(
        "a standby answers as the owner",
        "balance_service/http/routing.py",
        "        role = self.role_of(copy)\n",
        "        role = ACTIVE\n",
        QUIET,
        ("stale", "wrong owner"),
    ),
    Mutation(
        "a standby answers queries for owners only",
        "balance_service/http/queries.py",
        "            if local is not None and may_answer and _is_recent_enough(local, query):\n",
        "            if local is not None and _is_recent_enough(local, query):\n",
        QUIET,
        ("unflagged",),
    ),
    Mutation(
        "maxLag is ignored",
        "balance_service/http/queries.py",
        "    is_near = query.max_lag is None or (local.lag is not None and local.lag <= query.max_lag)\n",
        "    is_near = True\n",
        QUIET,
        ("bound",),
    ),
    Mutation(
        "minPosition is ignored",
        "balance_service/http/queries.py",
        "    return local.position.offset >= _wanted(query)\n",
        "    return True\n",
        QUIET,
        # Below the wanted position the state is not read, so the answer may also be a 404.
        ("bound", "wrong"),
    ),
    Mutation(
        "the replay drops the first record of every read",
        "balance_service/engine/changelog_reader.py",
        "        for message in messages:\n",
        "        for message in messages[1:] or messages:\n",
        QUIET,
        WRONG,
    ),
    Mutation(
        "a standby writes the position before the states",
        "balance_service/engine/changelog_reader.py",
        "            if answers and key == POSITION_KEY:\n",
        "            if answers and key == POSITION_KEY:\n"
        "                yield Part(self._batch[-1:], offset_of(message) + 1, True)\n"
        "                time.sleep(0.05)\n",
        QUIET,
        WRONG,
    ),
    Mutation(
        "money is added as binary floats",
        "balance_service/model/folds.py",
        "    return _EXACT.add(one, other)\n",
        '    return Decimal(f"{float(one) + float(other):.2f}")\n',
        QUIET,
        WRONG,
    ),
    Mutation(
        "amounts added in columns are cut to 32 bits",
        "balance_service/model/addition.py",
        "        totals = numbers + low[rows]\n",
        "        totals = numbers + low[rows].astype(np.int32)\n",
        QUIET,
        WRONG,
    ),
    Mutation(
        "dead letters are committed in their own transaction before the states",
        "balance_service/engine/changelog_writer.py",
        "        producer.begin_transaction()\n",
        "        producer.begin_transaction()\n"
        "        for letter in dead_letters:\n"
        "            key, value, headers = self._envelope.of(letter)\n"
        "            producer.produce(self._dead_letters, value, key, self._partition, headers=headers)\n"
        "        producer.commit_transaction(_COMMIT_TIMEOUT_SECONDS)\n"
        "        dead_letters = ()\n"
        "        producer.begin_transaction()\n",
        "kill-at-begun=4,kill-at-produced=2",
        ("doubled",),
    ),
    Mutation(
        "idempotency keys are forgotten after each batch",
        "balance_service/engine/idempotency.py",
        "        return [*removed, *records]\n",
        "        return removed\n",
        QUIET,
        WRONG,
    ),
    Mutation(
        "the store is written before the transaction is committed",
        "balance_service/engine/commit.py",
        "        changelog_offset = writer.commit(records(), dead_letters, frame, store.changelog_offset, outputs)\n",
        "        store.write((*records(), (POSITION_KEY, frame)), store.changelog_offset)\n"
        "        changelog_offset = writer.commit(records(), dead_letters, frame, store.changelog_offset, outputs)\n",
        "kill-at-begun=3,kill-at-produced=3",
        (*WRONG, "stale", "backwards"),
    ),
    Mutation(
        "a dead letter stays open after its record is applied",
        "balance_service/engine/dead_letters.py",
        "                self._change(changes, offset, before, before.closed(Status.APPLIED, now))\n",
        "                self._change(changes, offset, before, before.due_at_once(now))\n",
        QUIET,
        (*WRONG, "stuck"),
    ),
    Mutation(
        "partitions are computed by CRC32",
        "balance_service/kafka/partitioner.py",
        '_MURMUR2 = _Function("murmur2", ',
        '_MURMUR2 = _Function("consistent", ',
        QUIET,
        (*WRONG, "silent", "stuck"),
    ),
    Mutation(
        "an opened task takes no new epoch",
        "balance_service/engine/opening.py",
        "epoch = max(stored.epoch + 1, least_epoch)",
        "epoch = max(stored.epoch, least_epoch)",
        "kill=3",
        # Peers that cannot tell the new owner's claim from the old one's ask neither.
        ("wrong owner", "backwards", "silent"),
    ),
    Mutation(
        "a command's Idempotency-Key is dropped",
        "balance_service/read_models/add_funds.py",
        "        if idempotency_key is not None:\n",
        "        if False:\n",
        QUIET,
        ("lost",),
    ),
    Mutation(
        "an instance that does not own a partition answers too late",
        "balance_service/http/queries.py",
        "        refusal: Problem | None = None\n",
        "        await asyncio.sleep(4)\n        refusal: Problem | None = None\n",
        QUIET,
        ("silent",),
    ),
    Mutation(
        "a standby never answers",
        "balance_service/http/queries.py",
        "    return is_near and is_young and _is_reached(local, query)\n",
        "    return is_near and is_young and _is_reached(local, query) and local.role == ACTIVE\n",
        QUIET,
        ("silent",),
    ),
    Mutation(
        "an instance ends when it loses its partitions",
        "balance_service/cluster/membership.py",
        "        gone = _numbers(lost)\n",
        '        raise RuntimeError("lost")\n',
        "pause=2",
        ("crash",),
    ),
    Mutation(
        "dead letters are stored without their value",
        "balance_service/engine/changelog_writer.py",
        "        key, value = letter.key, letter.value\n",
        "        key, value = letter.key, None\n",
        QUIET,
        ("lost",),
    ),
    Mutation(
        "an outdated end of the source is used",
        "balance_service/http/routing.py",
        "_WATERMARK_SECONDS = 3.0\n",
        "_WATERMARK_SECONDS = 1e9\n",
        "silence=3",
        ("bound",),
    ),
    # Combining, committing and storing in parts, publishing, and expiry; found with small parts and a short window.
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
        "_aggregated(rows.filter(pc.invert(apart)), combine), self.single_updates",
        "_aggregated(rows, combine), self.single_updates",
        QUIET,
        WRONG,
    ),
    Mutation(
        # The position is then taken for the end of the store's contents.
        "the first part of a large commit stores its end offset",
        "balance_service/engine/store.py",
        "[*last, (_WRITTEN_UP_TO_KEY, changelog_offset",
        "[*last, (_CHANGELOG_OFFSET_KEY, changelog_offset",
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
    # Emitting, joining and answering of models with several stages. Spark delivers an event later than a table is read,
    # so that a join before the end of its table is in `pinpoint`.
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
        "balance_service/engine/opening.py",
        "            yield replace(position, emitted_up_to=sent_up_to, inherited=since), changes\n",
        "            yield replace(position, inherited=since), changes\n",
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
    # Generations: an operator rebuilds, switches and drops in each round.
    Mutation(
        "the changelog of a dropped generation stays",
        "balance_service/hosting/dropped_changelogs.py",
        "                    topics.delete(stage.changelog)\n",
        "",
        QUIET,
        ("generation",),
    ),
    Mutation(
        "the old generation goes on sending after a switch",
        "balance_service/engine/task.py",
        "self._sends, self._following.limit = since is not None, position.offset",
        "self._sends, self._following.limit = True, position.offset",
        "kill-at-begun",
        ("doubled",),
        SYSTEMS,
    ),
    Mutation(
        "the new generation skips outputs at a switch",
        "balance_service/engine/task.py",
        "moved = replace(position, emitted_up_to=sent_up_to, inherited=since)",
        "moved = replace(position, emitted_up_to=sent_up_to + 5, inherited=since)",
        "kill-at-begun",
        ("lost",),
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
    # Transforms: of each invoice, `item_sales` makes none, one or several rows, or fails.
    Mutation(
        "a row that a filter drops does not move the position",
        "balance_service/spark/decode.py",
        "        rows: DataFrame = made.records.withColumns(judged)\n",
        "        rows: DataFrame = made.records.withColumns(judged).where(~F.col(_CAUSE).eqNullSafe(IGNORED))\n",
        QUIET,
        ("stuck",),
        SYSTEMS,
    ),
    Mutation(
        "an event with several rows is passed on with the first one",
        "balance_service/engine/stateless.py",
        "outputs = [builder.build(offset, timestamp_ms, key, frame, own) for (key, frame), own in each]\n",
        "outputs = [builder.build(offset, timestamp_ms, key, frame, own) for (key, frame), own in each][:1]\n",
        QUIET,
        ("lost",),
        SYSTEMS,
    ),
    Mutation(
        "an event at which an expression fails takes the next one along",
        "balance_service/spark/combine.py",
        '        others = self.notes["offset"].filter(pc.is_valid(self.notes["cause"]))\n',
        '        others = self.notes["offset"].filter(pc.is_valid(self.notes["cause"]))\n'
        '        failed = self.notes["offset"].filter(pc.equal(self.notes["cause"], "transform-failed"))\n'
        "        others = pa.chunked_array([*others.chunks, *pc.add(failed, 1).chunks], pa.int64())\n",
        QUIET,
        ("lost",),
        SYSTEMS,
    ),
    Mutation(
        "an event under a new schema id has no row yet, and is taken for one that a filter drops",
        "balance_service/spark/decode.py",
        "judged = {_CAUSE: F.coalesce(_CAUSE, cause), ",
        "judged = {_CAUSE: F.coalesce(cause, _CAUSE), ",
        QUIET,
        ("lost",),
        SYSTEMS,
    ),
)
