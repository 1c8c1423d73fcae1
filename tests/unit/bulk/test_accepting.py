"""A manifest is believed if it is the one that was named, and says what this process would have made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.bulk.accepting import Wanted, made_here
from balance_service.errors import InvalidInputError
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings
from tests.support.fakes import DECLARED
from tests.support.loads import folder_of, write_folder

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = load_settings()
STAGE = Balance().stages[-1].of_generation(2)
MADE = made_here(SETTINGS)
WANTED = Wanted(
    stage=STAGE,
    declaration=DECLARED,
    source_topic_id="the source",
    partitioner="murmur2",
    partitions=2,
    made_with=MADE,
)


def written(files: Path, **changed: Any) -> str:
    parts: Any = changed.pop("parts", [(5, [[(b"k", b"v")]]), (0, [])])
    given = {"source_topic_id": "the source", "state_schema_id": 1, "partitions": parts, **changed}
    return write_folder(files, STAGE, SETTINGS, DECLARED, **given).digest


def test_what_this_process_would_have_made_is_accepted(tmp_path: Path) -> None:
    digest = written(tmp_path)

    manifest = WANTED.read(folder_of(tmp_path, STAGE), digest)

    assert [one.position for one in manifest.partitions] == [5, 0]


@pytest.mark.shows("load")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"application_id": "another"}, "application id is 'another'"),
        ({"model": "rewards"}, "read model is 'rewards'"),
        ({"generation": 3}, "generation is 3, and here it is 2"),
        ({"owner": "pay\0eu-balance.g2"}, "owner is 'pay/eu-balance.g2'"),
        ({"version": 7}, "version of the read model is 7, and here it is 1"),
        ({"fingerprint": "changed"}, "fingerprint of the declaration is 'changed'"),
        ({"source": "another"}, "source is 'another'"),
        ({"source_topic_id": "anew"}, "id of the source topic is 'anew', and here it is 'the source'"),
        ({"partitioner": "crc32"}, "partitioner is 'crc32', and here it is 'murmur2'"),
        ({"parts": [(5, [])]}, r"partitions is \[0\], and here it is \[0, 1\]"),
        ({"made_with": replace(MADE, package="9.9.9")}, "version of balance-read-models is '9.9.9'"),
        ({"made_with": replace(MADE, spark="9.9.9")}, "version of Spark is '9.9.9'"),
        ({"made_with": replace(MADE, decoder_rules=99)}, "rules of the decoder is 99"),
        ({"made_with": replace(MADE, idempotency_window_ms=1)}, "BALANCE_IDEMPOTENCY_WINDOW in ms is 1, and"),
        (
            {"made_with": replace(MADE, sql={**MADE.sql, "spark.sql.ansi.enabled": "false"})},
            "its spark.sql.ansi.enabled is 'false', and here it is 'true'",
        ),
        (
            {"made_with": replace(MADE, sql={**MADE.sql, "spark.sql.new": "1"})},
            "spark.sql.new is '1', and here it is not",
        ),
    ],
)
def test_what_differs_is_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    digest = written(tmp_path, **changed)

    with pytest.raises(InvalidInputError, match=f"does not fit: .*{said}.*; run the rebuild again"):
        WANTED.read(folder_of(tmp_path, STAGE), digest)


def test_many_differences_are_counted(tmp_path: Path) -> None:
    digest = written(tmp_path, made_with=replace(MADE, sql={}))

    with pytest.raises(InvalidInputError, match=rf"; and {len(MADE.sql) - 3} more; run the rebuild again"):
        WANTED.read(folder_of(tmp_path, STAGE), digest)
