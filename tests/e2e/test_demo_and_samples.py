"""`balance-service demo`, and `local --sample-events` as docs/how-to/shipped-models.md shows it."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.commands import Command, run, started
from tests.support.waiting import eventually


# Takes three minutes on an idle machine; each step has its own time limit.
@pytest.mark.timeout(900)
def test_the_demo_completes() -> None:
    done = run({}, "demo", seconds=860)

    assert done.code == 0, done


# Few stages at a time and a single instance keep the start short. Each value lists suggested commands.
SYMBOLS = "produce symbols --key-separator '|' < samples/symbols.txt"
TOGETHER = {
    ("symbols", "rewards"): (SYMBOLS, "tail notifications --from-beginning"),
    ("leaderboard",): ("produce score-events < samples/score-events.txt", "tail high-scores --from-beginning"),
}
SYSTEMS = (Path(__file__).parents[2] / "docs/how-to/shipped-models.md").read_text(encoding="utf-8")
_TRANSCRIPT = re.compile(
    r"^```sh\ncurl 'http://127.0.0.1:\d+([^']+)'\n```\n```json\n(.*?)^```", re.DOTALL | re.MULTILINE
)
# The time limit that `local` sets for starting an instance and showing its samples.
_READY_SECONDS = 240.0


def transcripts(model: str) -> dict[str, str]:
    """Returns the transcripts of a read model in docs/how-to/shipped-models.md: query → body."""
    found = re.search(rf"^## `{model}`$(.*?)(?=^## |\Z)", SYSTEMS, re.DOTALL | re.MULTILINE)
    return dict(_TRANSCRIPT.findall(found[1])) if found else {}


def is_answered(url: str, body: str) -> bool:
    """Whether a query returns this body, digit for digit."""
    return exactly(get(url).text) == exactly(body)


def has_ended(command: Command) -> bool:
    return command.process.poll() is not None


def exactly(body: str) -> object:
    return json.loads(body, parse_float=str)


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=30, trust_env=False)


@pytest.mark.timeout(420)
@pytest.mark.parametrize("models", TOGETHER, ids="-".join)
def test_sample_queries_return_what_the_documents_show(models: tuple[str, ...], tmp_path: Path) -> None:
    ports = ["--kafka-port", "0", "--registry-port", "0", "--http-port", "0", "--data-dir", str(tmp_path / "data")]
    shown = {path: body for model in models for path, body in transcripts(model).items()}
    assert shown
    with started({"BALANCE_MODELS": ",".join(models)}, "local", "--instances", "1", "--sample-events", *ports) as local:
        eventually(lambda: has_ended(local) or "ready; Ctrl-C" in local.stdout, lambda: local.stdout, _READY_SECONDS)
        assert not has_ended(local), local.wait(1)

        printed = re.findall(r"curl -i '([^']*)'", local.stdout)
        statuses = {url: get(url).status_code for url in printed}
        (instance,) = re.findall(r"instance-1 +(\S+) +log: ", local.stdout)
        for path, body in shown.items():
            eventually(partial(is_answered, instance + path, body), f"{path} is answered as shown")
        local.interrupt()
        done = local.wait(60)

    assert done.code == 0, done
    assert statuses == dict.fromkeys(printed, 200)
    for told in TOGETHER[models]:
        assert told in done.stdout
