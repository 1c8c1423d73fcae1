"""Records that one generation alone can apply are sent once, over a switch, the way back, and another switch."""

from __future__ import annotations

import time
from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.dead_letters import PoisonWriter, decide, pages, wait_for
from tests.support.kafka import read_topic
from tests.support.operator import Operator
from tests.support.service import application, new_instance, retried, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

_NOTED = """
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from balance_service import EVENT, Emit, PoisonRecordError, ReadModel, Stream, scale


@dataclass
class Total:
    customerId: str
    total: Annotated[Decimal, scale(2)]


class Noted(ReadModel):
    name = "noted"
    source = Stream("{topic}", "FundsAdded")
    key = "customerId"
    state = Total
    emits = Emit("{outputs}", each=EVENT)
    refused = Decimal("{refused_by_first}")

    def fold(self, state, event):
        if event["amount"] == self.refused and not Path("{fixed}").exists():
            raise PoisonRecordError("refused", "until the code is fixed")
        return Total(event["customerId"], (state.total if state else 0) + event["amount"])


class Corrected(Noted):
    version = 2
    refused = Decimal("{refused_by_second}")
"""
_CUSTOMERS = [f"customer-{number}" for number in range(5)]
_TAKEN, _REFUSED_BY_FIRST, _REFUSED_BY_SECOND = "1.00", "13.00", "17.00"
_SECONDS = 60.0
_LATE_SECONDS = 2.0


class _Appender:
    """Appends events for each customer, and knows what the read model should say."""

    def __init__(self, poison: PoisonWriter) -> None:
        self._poison = poison
        self._amount = Decimal(0)
        self.events = 0

    def put(self, amount: str) -> list[str]:
        """Returns the ids that the dead letters of the events have, if there are any."""
        self._amount += Decimal(amount)
        self.events += len(_CUSTOMERS)
        ids = [self._poison.put(customer, self._poison.frame(customer, amount)) for customer in _CUSTOMERS]
        return [name.replace("balance/", "noted/") for name in ids]

    @property
    def totals(self) -> dict[str, Decimal]:
        return dict.fromkeys(_CUSTOMERS, self._amount)


@pytest.mark.shows("outputs-once", "rebuild", "retried-once", "versions")
def test_a_dead_letter_that_heals_in_one_generation_alone_is_sent_once(stack: LocalStack, tmp_path: Path) -> None:
    settings = application(BALANCE_RETRY_EVERY="86400")
    outputs, fixed = f"{settings['BALANCE_APPLICATION_ID']}-notes", tmp_path / "fixed"
    module = settings["BALANCE_APPLICATION_ID"].replace("-", "_")
    # An instance's working directory.
    (stack.data_dir / f"{module}.py").write_text(
        _NOTED.format(
            topic=settings["BALANCE_TOPIC"],
            outputs=outputs,
            fixed=fixed,
            refused_by_first=_REFUSED_BY_FIRST,
            refused_by_second=_REFUSED_BY_SECOND,
        )
    )
    settings["BALANCE_MODELS"] = f"{module}:Noted"
    instance = new_instance(stack, settings)
    operator = Operator("noted", lambda: [instance.url], _SECONDS)

    def sent() -> Counter[str]:
        return Counter(str(dict(record.headers())["origin"].decode()) for record in read_topic(stack, outputs))

    def wait_sent(count: int) -> None:
        eventually(lambda: len(sent()) >= count, lambda: f"{len(sent())} of {count} events are sent", _SECONDS)
        assert sent().most_common(1)[0][1] == 1
        assert len(sent()) == count

    def switch(to: int) -> None:
        operator.ask("switch", to=to)
        operator.wait_settled()

    def answers(generation: int) -> dict[str, Decimal]:
        url = f"{instance.url}/api/models/noted/entries"
        answer = retried(lambda: httpx.get(url, params={"generation": generation}, timeout=30))
        entries: list[dict[str, Any]] = answer.json(parse_float=Decimal)["entries"]
        return {entry["key"]: entry["value"]["total"] for entry in entries}

    with running(instance), PoisonWriter(stack, settings) as poison:
        appender = _Appender(poison)
        appender.put(_TAKEN)
        letters = appender.put(_REFUSED_BY_FIRST)
        letters_of_second = appender.put(_REFUSED_BY_SECOND)
        wait_for(instance, "waiting", *letters)
        wait_sent(10)
        instance.stop()
        instance.environment["BALANCE_MODELS"] = f"{module}:Noted,{module}:Corrected"
        instance.launch()
        instance.wait_ready()
        assert operator.the("ready") == 2
        # The new code applies what the old one refused, and sends it.
        switch(2)
        wait_for(instance, "applied", *letters)
        wait_for(instance, "waiting", *letters_of_second)
        wait_sent(15)

        late_letters = appender.put(_REFUSED_BY_FIRST)
        late_letters_of_second = appender.put(_REFUSED_BY_SECOND)
        appender.put(_TAKEN)
        wait_for(instance, "waiting", *late_letters_of_second)
        wait_sent(25)
        # The old code applies what the new one refused, and sends it.
        switch(1)
        wait_for(instance, "waiting", *letters, *late_letters)
        wait_for(instance, "applied", *late_letters_of_second)
        wait_sent(30)
        # The other generation has sent these.
        fixed.touch()
        assert decide(instance, "redrive", *letters, *late_letters).status_code == 202
        wait_for(instance, "applied", *letters, *late_letters)
        switch(2)
        wait_for(instance, "applied", *letters_of_second, *late_letters_of_second)
        time.sleep(_LATE_SECONDS)

        wait_sent(appender.events)
        eventually(
            lambda: answers(1) == answers(2) == appender.totals,
            lambda: f"{answers(1)} and {answers(2)}, not {appender.totals}",
            _SECONDS,
        )
        assert pages(instance, status="waiting") == [[]]
        every = [*letters, *letters_of_second, *late_letters, *late_letters_of_second]
        assert sorted(name for name, _ in poison.written()) == sorted(
            name.replace("noted/", "balance/") for name in every
        )
