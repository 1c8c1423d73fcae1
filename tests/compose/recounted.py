"""Compares answers with a recount of the topic."""

from __future__ import annotations

import http.client
import json
import random
import time
from contextlib import suppress
from decimal import Decimal
from typing import TYPE_CHECKING

from tests.compose.stack import HOST, Replica, Stack
from tests.compose.traffic import TOPIC, customer
from tests.support.api import Connection, query
from tests.support.recount import recount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.compose.report import Report

_CATCH_UP_SECONDS = 900.0
_ASKED = 300


def recounted(stack: Stack, report: Report, title: str, customers: int) -> None:
    """Queries each replica about a sample of customers and compares with the recount."""
    truth = recount(stack.bootstrap_servers, stack.registry_url, TOPIC)
    chooser = random.Random(title)
    asked = [customer(chooser.randrange(customers)) for _ in range(_ASKED)]
    replicas = stack.replicas()
    wrong: list[str] = []
    deadline = time.monotonic() + _CATCH_UP_SECONDS
    for replica in replicas:
        wrong += _differences(replica, asked, truth, deadline)
    report.expect(
        f"{title}: recounted",
        not wrong,
        f"{len(truth)} customers on the topic; {len(replicas)} replicas asked for {_ASKED} each, "
        + (f"{len(wrong)} wrong: {wrong[:3]}" if wrong else "all exact"),
    )


def _differences(replica: Replica, asked: Sequence[str], truth: dict[str, Decimal], deadline: float) -> list[str]:
    """Returns the answers that differ from the recount. Retries until the deadline while a replica catches up."""
    wrong = []
    connection = Connection(HOST, replica.port, 20.0)
    for name in asked:
        said = "nothing"
        while True:
            with suppress(OSError, http.client.HTTPException):
                reply = connection.ask(query(name))
                said = f"{reply.status} {reply.body.decode(errors='replace')}"
                if reply.status == 200 and json.loads(reply.body, parse_float=Decimal)["amount"] == truth[name]:
                    break
            if time.monotonic() > deadline:
                wrong.append(f"{name} at {replica.container[:12]}: {said}, not {truth[name]}")
                break
            time.sleep(0.2)
    connection.close()
    return wrong
