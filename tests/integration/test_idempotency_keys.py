"""Idempotency keys from record headers to balances, also after a restore."""

from __future__ import annotations

import shutil
from decimal import Decimal
from typing import TYPE_CHECKING

from balance_service.engine.idempotency import REUSED
from tests.integration.engines import balance, balance_stage, catch_up, counted, running_engine, settings_for
from tests.support.kafka import Writer, read_topic

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack


def test_an_event_sent_again_counts_once_also_after_the_store_was_lost(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with Writer(stack, settings.topic) as writer:

        def send(amount: str, *keys: bytes) -> None:
            headers = [("trace", b"t"), *(("idempotency-key", key) for key in keys)]
            writer.send("c", writer.frame("c", amount), headers=headers)
            writer.producer.flush(10)

        with running_engine(settings) as engine:
            send("1.00", b"k1")
            send("1.00", b"k1")
            send("2.00", b"k2", b"k1")
            send("4.00")
            send("4.00", b"")
            writer.add("c", "8.00")
            catch_up(engine)
            assert balance(engine, "c") == Decimal("19.00")
            assert counted(engine, "duplicates") == 1
        shutil.rmtree(settings.state_dir)
        with running_engine(settings) as engine:
            send("1.00", b"k1")
            send("3.00", b"k1")
            catch_up(engine)
            assert balance(engine, "c") == Decimal("19.00")
            assert (counted(engine, "duplicates"), counted(engine, "dead_lettered")) == (1, 1)
        (letter,) = read_topic(stack, balance_stage(settings).dead_letters)
        assert dict(letter.headers())["dead-letter-cause"] == REUSED.encode()
        assert letter.key() == b"c"
