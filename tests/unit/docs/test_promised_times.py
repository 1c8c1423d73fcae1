"""Times in documents equal the constants of the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from balance_service.application import STOP_SECONDS
from balance_service.cluster.directory import SUSPECT_AFTER_SECONDS
from balance_service.cluster.signatures import CLOCKS_AGREE_SECONDS
from balance_service.devtools.local.guard import GRACE_SECONDS
from balance_service.engine.dead_letter import KEPT_CLOSED_MS
from balance_service.hosting.engine import CHECK_EVERY_SECONDS
from balance_service.http.access.authentication import LEEWAY_SECONDS
from balance_service.http.server.reloading import LOOK_SECONDS
from balance_service.process.open_files import need_of

_DOCS = Path(__file__).parents[3] / "docs"
_DAY_MS = 24 * 60 * 60 * 1000


@pytest.mark.parametrize(
    ("document", "sentence", "is_so"),
    [
        ("../ARCHITECTURE.md", "A server that is silent for 3 s is suspect", SUSPECT_AFTER_SECONDS == 3),
        ("guarantees.md", "nothing is skipped | after ≤ 5 s", CHECK_EVERY_SECONDS == 5),
        ("guarantees.md", "no connection is cut | 5 s", LOOK_SECONDS == 5),
        ("how-to/secure.md", "older than 30 s", CLOCKS_AGREE_SECONDS == 30),
        ("how-to/secure.md", "clocks may differ by 30 s", LEEWAY_SECONDS == 30),
        ("how-to/deploy.md", "220 files, 28 for each task and 8 for", need_of(100, 1, 5) == 220 + 28 * 100 + 8 * 5),
        ("how-to/deploy.md", "400 files and 12 for each task", need_of(6) == 400 + 12 * 6),
        (
            "how-to/deploy.md",
            "more for each task and source topic, and 18",
            need_of(99, 2) - need_of(99) == 3 * 100 + 18,
        ),
        ("how-to/operate.md", "seven days", KEPT_CLOSED_MS == 7 * _DAY_MS),
    ],
)
def test_a_documented_time_is_correct(document: str, sentence: str, *, is_so: bool) -> None:
    text = " ".join((_DOCS / document).read_text(encoding="utf-8").split())

    assert sentence in text
    assert is_so


def test_an_instance_stops_before_it_is_killed() -> None:
    assert STOP_SECONDS < 10 < GRACE_SECONDS
