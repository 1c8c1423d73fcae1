"""Bugs that faults at random would not find within minutes; each names the test that has to find it.

Most of them show only where two things happen at the same moment, or where something is longer ago, or larger, than
anything in a round.
"""

from __future__ import annotations

from tests.chaos.mutations import QUIET, Mutation


def _pinpoint(name: str, file: str, old: str, new: str, test: str, found_by: str) -> Mutation:
    return Mutation(name, f"balance_service/{file}", old, new, QUIET, (found_by,), f"tests/{test}.py")


PINPOINT_MUTATIONS = (
    _pinpoint(
        "a batch is joined with what is read of its tables so far",
        "events/feed.py",
        "        if self._joined is not None:\n            try:\n",
        "        if self._joined is None:\n            try:\n",
        "integration/test_leaderboard",
        "test_a_table_that_is_not_read_makes_what_joins_with_it_wait_and_nothing_else",
    ),
    _pinpoint(
        "the lease is looked at before the read",
        "http/routing.py",
        "        frame = copy.view.get(key)\n"
        "        return LocalAnswer(frame, copy.position, self.lag_of(copy), self.is_owned(copy))\n",
        "        is_owned = self.is_owned(copy)\n"
        "        return LocalAnswer(copy.view.get(key), copy.position, self.lag_of(copy), is_owned)\n",
        "unit/test_moves_during_reads",
        "test_what_was_read_before_is_no_owners_answer",
    ),
    _pinpoint(
        "a partition that moved during the read is still owned",
        "http/routing.py",
        " and copy.task.view is not None\n",
        "\n",
        "unit/test_moves_during_reads",
        "test_what_was_read_before_is_no_owners_answer",
    ),
    _pinpoint(
        "a request is answered ahead of one that aiohttp is about to answer",
        "http/server/ahead_of_aiohttp.py",
        "waiter is None or waiter.done():\n",
        "waiter is None:\n",
        "unit/test_ahead_of_aiohttp",
        "test_two_that_come_within_one_turn_of_the_event_loop_are_answered_in_order",
    ),
    _pinpoint(
        "of two requests that come together, the first alone is answered",
        "http/server/ahead_of_aiohttp.py",
        "len(self._messages) > 1 or body is not",
        "body is not",
        "unit/test_ahead_of_aiohttp",
        "test_answers_are_sent_in_the_order_of_requests",
    ),
    _pinpoint(
        "a revoked partition's task is closed once another may have the partition",
        "cluster/membership.py",
        "        self._listener.revoked(gone)\n        consumer.incremental_unassign(revoked)\n",
        "        consumer.incremental_unassign(revoked)\n        self._listener.revoked(gone)\n",
        "unit/test_moves_during_reads",
        "test_a_member_lets_go_of_a_partition_only_after_its_task_is_closed",
    ),
    _pinpoint(
        "a batch need not start at the position",
        "state/commit.py",
        "batch.start != stands_at.offset",
        "batch.start < 0",
        "unit/test_commit",
        "test_a_batch_that_does_not_start_at_the_position_is_refused",
    ),
    _pinpoint(
        "Spark may hand over what it has handed over before",
        "events/spark/row_query.py",
        "        if first < self._next:\n",
        "        if first < 0:\n",
        "unit/test_row_query",
        "test_a_batch_that_is_handed_over_twice_ends_the_query",
    ),
    _pinpoint(
        "parts are combined though their sum may wrap around",
        "events/combine.py",
        "            if _may_overflow(both, combine) or any(",
        "            if any(",
        "unit/test_and_then",
        "test_what_depends_on_the_order_of_events_is_committed_batch_by_batch",
    ),
    _pinpoint(
        "a sum hides that the balance overflowed on the way to it",
        "events/combine.py",
        "        alone = [*_swinging_keys(rows, combine), *self._keys_of_once()]\n",
        "        alone = self._keys_of_once()\n",
        "unit/test_combine",
        "test_amounts_of_both_signs_stay_single_for_their_sum_would_hide_the_way_to_it",
    ),
    _pinpoint(
        "a standby believes for ever that it sees all of a compacted changelog",
        "state/completeness.py",
        "        return self._clock() - self._as_of < WHOLE_FOR_SECONDS\n",
        "        return True\n",
        "unit/test_wholeness",
        "test_nothing_is_known_to_be_whole_before_the_end_was_met",
    ),
    _pinpoint(
        "a standby knows by an end that it asked for more than was so when it asked",
        "state/completeness.py",
        "            self._as_of, self._asked = self._asked[0], None\n",
        "            self._as_of, self._asked = self._clock(), None\n",
        "unit/test_wholeness",
        "test_being_past_it_says_something_about_when_it_was_asked_for_only",
    ),
    _pinpoint(
        "an owner under an older epoch is asked",
        "cluster/server_table.py",
        "        return sorted(claims, key=lambda claim: claim[1].epoch, reverse=True)\n",
        "        return claims\n",
        "unit/test_directory",
        "test_the_highest_epoch_is_the_owner",
    ),
    _pinpoint(
        "a standby answers from part of a transaction",
        "state/task.py",
        "        if self._state is TaskState.TAILING and not will_be_complete:\n",
        "        if False:\n",
        "unit/test_replica",
        "test_a_standby_that_reads_part_of_a_commit_answers_nobody_until_it_has_read_the_rest",
    ),
    _pinpoint(
        "a standby answers though it has not read all of the changelog",
        "state/task.py",
        "        if self._state is TaskState.RESTORING and self._replica.is_complete:\n",
        "        if self._state is TaskState.RESTORING:\n",
        "unit/test_replica",
        "test_a_standby_that_restores_answers_only_once_it_is_complete",
    ),
    _pinpoint(
        "a store that reaches beyond the changelog is kept",
        "state/replica.py",
        "        if store.reaches > end:\n",
        "        if store.changelog_offset > end:\n",
        "unit/test_replica",
        "test_a_store_that_reaches_beyond_the_changelog_is_no_copy_of_it",
    ),
    _pinpoint(
        "an idempotency key that has expired counts until it is removed",
        "state/idempotency.py",
        "marker is None or marker.timestamp_ms + self.window_ms <= self.times[update.record.offset]:\n",
        "marker is None:\n",
        "unit/test_idempotency",
        "test_after_the_window_an_idempotency_key_is_new_again",
    ),
    _pinpoint(
        "a store goes on, however long it was away",
        "state/replica.py",
        "        tombstones.check_by_offset(topics, changelog, partition, self.store.changelog_offset)\n",
        "        assert tombstones\n",
        "integration/test_compacted_changelog",
        "test_a_store_that_was_away_while_tombstones_came_and_went_keeps_nothing_that_was_deleted",
    ),
    _pinpoint(
        "a table goes on, however long it was away",
        "state/tables/partition.py",
        "                tombstones.check_by_time(context.topics, context.topic, self._partition, store.seen_to_ms)\n",
        "                assert tombstones\n",
        "integration/test_tables",
        "test_a_store_that_was_away_while_a_tombstone_came_and_went_is_read_anew",
    ),
    _pinpoint(
        "a standby goes on after hours without the changelog",
        "state/replica.py",
        "        if self._wholeness.was_away:\n",
        "        if False:\n",
        "unit/test_replica",
        "test_what_was_read_after_an_hour_without_the_changelog_is_not_applied_though_it_is_all_there_is",
    ),
    _pinpoint(
        "whatever is written to the directory is believed",
        "cluster/directory.py",
        "            self._signatures.check(address, value, dict(headers_of(message)).get(HEADER))\n",
        "            assert HEADER\n",
        "e2e/test_hostile_peers",
        "test_forged_records_are_ignored_and_told_of_while_queries_go_on",
    ),
    _pinpoint(
        "a record of the directory counts again when it is written again",
        "cluster/record_signatures.py",
        "        if t <= self._latest_ms.get(address, 0):\n",
        "        if t < self._latest_ms.get(address, 0):\n",
        "unit/test_record_signatures",
        "test_a_record_that_is_written_again_is_refused",
    ),
    _pinpoint(
        "a peer's answer needs no proof",
        "http/peers/proxy.py",
        "        if not self._trust.is_proven(answer, mark, proof):\n",
        "        if False:\n",
        "e2e/test_hostile_peers",
        "test_what_a_peer_has_not_answered_reaches_nobody_in_whichever_way_peers_are_asked",
    ),
    _pinpoint(
        "a mark is good more than once",
        "http/peers/trust.py",
        "        if mark is not None and not self._used.take(mark.run, mark.number, self._now()):\n",
        "        if False:\n",
        "unit/test_peers",
        "test_a_mark_of_a_peer_is_accepted_once",
    ),
    _pinpoint(
        "the highest claim counts, however long its server is silent",
        "cluster/server_table.py",
        "            if task.role == ACTIVE and task.epoch > 0 and not server.is_suspect(now)\n",
        "            if task.role == ACTIVE and task.epoch > 0\n",
        "unit/test_directory",
        "test_a_claim_that_is_not_renewed_keeps_nobody_out_once_its_server_is_suspect",
    ),
)
