"""The OpenAPI document is true: generated requests, sensible and not, against the running service."""

from __future__ import annotations

import json
import math
import time
import uuid
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from hypothesis import settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from balance_service import __version__
from balance_service.http import commands, queries
from balance_service.http.operations import OPENAPI_FILE
from balance_service.local.instances import LocalInstance
from balance_service.read_models.balance import MAX_CUSTOMER_ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.local.stack import LocalStack

_WARM_UP_SECONDS = 60
_EXAMPLES = 40

_CONFIG = schemathesis.Config.from_dict(
    {
        "seed": 5051,
        "generation": {"deterministic": True},
        "phases": {"coverage": {"generate-duplicate-query-parameters": True}},
        "checks": {
            # 503 is an answer of the contract, not a fault; where it may be given is checked below.
            "not_a_server_error": {"expected-statuses": ["2xx", "4xx", 503]},
            "positive_data_acceptance": {"expected-statuses": ["2xx", 404]},
            "negative_data_rejection": {"expected-statuses": ["4xx"]},
        },
    }
)
schema = schemathesis.openapi.from_path(OPENAPI_FILE, config=_CONFIG)


@schema.hook
def filter_query(_context: Any, query: Any) -> bool:
    """Only ids as long as the document's prose allows: JSON Schema counts characters, the service bytes."""
    return _fits((query or {}).get("customerId"))


@schema.hook
def filter_body(_context: Any, body: Any) -> bool:
    """The same, and no products of binary floats such as 35 * 0.01, which `multipleOf` lets through."""
    if not isinstance(body, dict):
        return True
    amount = body.get("amount")
    is_near_miss = (
        isinstance(amount, float)
        and math.isfinite(amount)
        and amount != round(amount, 2)
        and math.isclose(amount, round(amount, 2))
    )
    return _fits(body.get("customerId")) and not is_near_miss


@pytest.fixture(scope="module")
def service(stack: LocalStack) -> Iterator[str]:
    """The address of one warm instance with a topic of its own."""
    name = f"openapi-{uuid.uuid4().hex[:8]}"
    # A minPosition that is never reached costs this much, each time one is generated.
    environment = {"BALANCE_TOPIC": name, "BALANCE_APPLICATION_ID": name, "BALANCE_READ_TIMEOUT": "2"}
    instance = LocalInstance(70, stack, environment=environment)
    try:
        instance.launch()
        instance.wait_ready()
        _warm_up(instance.url)
        yield instance.url
    finally:
        instance.stop()


@schema.parametrize()
@settings(max_examples=_EXAMPLES, derandomize=True, database=None, deadline=None)
def test_every_answer_is_as_documented(case: Any, service: str) -> None:
    # A well-formed position may be of another partition (400) or never be reached (503).
    waits = case.path == queries.PATH and "minPosition" in (case.query or {})
    response = case.call(base_url=service)
    case.validate_response(response, excluded_checks=[positive_data_acceptance] if waits else [])
    assert waits or response.status_code != 503


def test_the_document_served_is_the_one_in_the_package_with_its_version(service: str) -> None:
    document = json.loads(OPENAPI_FILE.read_bytes())
    document["info"]["version"] = __version__

    assert httpx.get(f"{service}/openapi.json").json() == document


def _fits(customer_id: Any) -> bool:
    said_by_schema = not isinstance(customer_id, str) or len(customer_id) > MAX_CUSTOMER_ID_BYTES
    return said_by_schema or len(customer_id.encode(errors="replace")) <= MAX_CUSTOMER_ID_BYTES


def _warm_up(url: str) -> None:
    """The first micro-batch of a process takes seconds; so that no test waits for it."""
    body = {"customerId": "warm-up", "amount": 1}
    deadline = time.monotonic() + _WARM_UP_SECONDS
    while time.monotonic() < deadline:
        appended = httpx.post(url + commands.PATH, json=body)
        if appended.status_code == 202:
            parameters = {"customerId": "warm-up", "minPosition": appended.headers["Balance-Position"]}
            if httpx.get(url + queries.PATH, params=parameters).status_code == 200:
                return
    raise TimeoutError(f"{url} is not warm after {_WARM_UP_SECONDS} s")
