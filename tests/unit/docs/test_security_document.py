"""The ACLs in docs/security.md cover the stages and topics of all shipped read models."""

from __future__ import annotations

import re
from pathlib import Path

from balance_service.devtools.local.samples import SAMPLES
from balance_service.model.placing import stages_of
from balance_service.settings import load_settings
from tests.support.shipped import KNOWN

DOCUMENT = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|(.*)\|$", re.MULTILINE)


def told(name: str) -> str:
    """The name of a topic in the document."""
    return name.replace("the-application", "<application id>").replace("the-source", "BALANCE_TOPIC")


def test_every_stage_is_listed_with_the_topics_that_it_reads_and_writes() -> None:
    settings = load_settings(application_id="the-application", topic="the-source")
    shipped = sorted(SAMPLES.keys() & KNOWN.keys())
    stages = [(model, stage) for model in shipped for stage in stages_of(KNOWN[model], settings)]

    rows = [
        (model, stage, topic, re.findall("`([^`]+)`", sends)) for model, stage, topic, sends in _ROW.findall(DOCUMENT)
    ]

    assert rows == [
        (model, stage.name, told(stage.source), [told(target) for target in stage.targets]) for model, stage in stages
    ]
