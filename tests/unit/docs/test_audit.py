"""The output of `make audit` with advisories, without advisories, and without network."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest

from tests import audit

if TYPE_CHECKING:
    from collections.abc import Callable


def client(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def database(*vulnerable: str) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        queries = json.loads(request.content)["queries"]
        named = [query["package"]["name"] in vulnerable for query in queries]
        return httpx.Response(200, json={"results": [{"vulns": [{"id": "GHSA-1"}]} if n else {} for n in named]})

    return answer


def test_packages_and_jars_are_looked_up_by_their_locked_versions() -> None:
    locked = audit.locked()

    names = {name: (ecosystem, version) for ecosystem, name, version in locked}
    assert names["pyspark"][0] == "PyPI"
    assert names["pyspark"][1].startswith("4.2.")
    assert names["org.apache.kafka:kafka-clients"][0] == "Maven"
    assert all(version and "\\" not in version for _, _, version in locked)
    assert len(locked) > 100


def test_an_advisory_is_printed_with_its_package_and_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(client(database("aiohttp", "org.apache.kafka:kafka-clients"))) == 1

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["aiohttp", "org.apache.kafka:kafka-clients"]
    assert all(line.endswith(": GHSA-1") for line in lines[:2])
    assert lines[2].endswith("locked versions checked, 2 with advisories")


def test_the_audit_succeeds_without_advisories(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(client(database())) == 0
    assert capsys.readouterr().out.endswith("locked versions checked, 0 with advisories\n")


def test_without_network_the_audit_reports_that_nothing_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    def away(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route to host")

    assert audit.main(client(away)) == 0
    assert capsys.readouterr().out == "not checked: no network (no route to host)\n"

    assert audit.main(client(lambda _: httpx.Response(403))) == 0
    assert capsys.readouterr().out.startswith("not checked: no network (the response of ")


def test_an_invalid_response_is_a_failure() -> None:
    with pytest.raises(httpx.HTTPStatusError):
        audit.main(client(lambda _: httpx.Response(400)))
    with pytest.raises(ValueError, match="shorter"):
        audit.main(client(lambda _: httpx.Response(200, json={"results": []})))
