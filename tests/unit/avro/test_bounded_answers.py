"""Answers of the registry, or of something in its place, that are too large or never end."""

from __future__ import annotations

import gzip
import json
import time
from typing import TYPE_CHECKING

import pytest

from balance_service.avro import bounded_answers
from balance_service.errors import RetriableError
from tests.support.registry_server import RegistryReply, registry_that

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from balance_service.avro.registry import SchemaRegistry

SCHEMA = json.dumps({"schema": '"long"'}).encode()
LARGE = json.dumps({"schema": json.dumps({"type": "string", "doc": "x" * (5 << 20)})}).encode()


def answering(parts: Iterable[bytes], *, status: int = 200, **headers: str) -> AbstractContextManager[SchemaRegistry]:
    """A registry whose every answer has these parts."""
    reply = RegistryReply(status, parts, {name.replace("_", "-"): value for name, value in headers.items()})
    return registry_that(lambda _: reply)


def test_a_schema_that_is_too_large_is_no_outage() -> None:
    with answering([LARGE]) as registry:
        found = registry.writer_schema(1)

    assert found is not None
    assert found.problem == "takes more than 4 MiB, with those that it refers to"
    assert (found.cause, found.records) == ("schema-incompatible", ())


def test_a_compressed_answer_is_as_large_as_what_it_becomes() -> None:
    with answering([gzip.compress(LARGE)], Content_Encoding="gzip") as registry:
        found = registry.writer_schema(1)

    assert found is not None
    assert found.problem.startswith("takes more than 4 MiB")


@pytest.mark.parametrize(
    ("status", "answer"), [(200, b"<html>"), (500, b'{"schema": "'), (404, b'{"error_code": 40403')]
)
def test_another_large_answer_is_no_verdict(status: int, answer: bytes) -> None:
    large = [answer, b"x" * (5 << 20)]

    with answering(large, status=status) as registry, pytest.raises(RetriableError, match="has more than 4 MiB"):
        registry.writer_schema(1)


def test_an_answer_without_an_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_answers, "MOST_SECONDS", 0.5)
    began = time.monotonic()

    def slowly() -> Iterator[bytes]:
        for byte in SCHEMA:
            time.sleep(0.2)
            yield bytes([byte])

    with answering(slowly()) as registry, pytest.raises(RetriableError, match="does not end within"):
        registry.writer_schema(1)

    assert time.monotonic() - began < 3


def test_an_answer_within_the_bounds_is_read() -> None:
    with answering([gzip.compress(SCHEMA)], Content_Encoding="gzip") as registry:
        found = registry.writer_schema(1)

    assert found is not None
    assert (found.text, found.problem) == ('"long"', "")
