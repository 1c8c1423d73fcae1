"""Generated requests, valid and invalid, against the OpenAPI document of the running service."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from balance_service.cli.models import with_shipped
from balance_service.http.app import routes_of
from balance_service.http.openapi import document
from balance_service.model.keys import MAX_KEY_BYTES
from balance_service.process.package import __version__
from balance_service.read_models.add_funds import ADD_FUNDS

_EXAMPLES = 40
# On a machine that stalls, the group may reassign the partitions.
_A_MOVE_SECONDS = 30
_DOCUMENT = json.loads(json.dumps(document(routes_of(with_shipped(()), [ADD_FUNDS]))))

_CONFIG = schemathesis.Config.from_dict(
    {
        "seed": 5051,
        "generation": {"deterministic": True},
        "phases": {"coverage": {"generate-duplicate-query-parameters": True}},
        "checks": {
            # 503 is part of the contract; the test below checks where it is allowed.
            "not_a_server_error": {"expected-statuses": ["2xx", "4xx", 503]},
            # The dead letter of the example may exist, left by another test, and be final.
            "positive_data_acceptance": {"expected-statuses": ["2xx", 404, 409]},
            "negative_data_rejection": {"expected-statuses": ["4xx"]},
        },
    }
)
schema = schemathesis.openapi.from_dict(_DOCUMENT, config=_CONFIG)


@schema.hook
def filter_query(_context: Any, query: Any) -> bool:
    """Drops ids that exceed the byte limit: JSON Schema counts characters, the service counts bytes."""
    return all(_fits((query or {}).get(name)) for name in ("customerId", "from", "to", "prefix", "after"))


@schema.hook
def filter_path_parameters(_context: Any, parameters: Any) -> bool:
    """Drops keys that exceed the byte limit."""
    return _fits((parameters or {}).get("key"))


@schema.hook
def filter_body(_context: Any, body: Any) -> bool:
    """Drops oversized ids, and products of binary floats such as 35 * 0.01, which `multipleOf` accepts."""
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


# A stream has no end, and the other path is for instances.
@pytest.mark.shows("no-500")
@schema.exclude(operation_id=["followModel", "followPeer"]).parametrize()
@settings(max_examples=_EXAMPLES, derandomize=True, database=None, deadline=None)
def test_every_response_conforms_to_the_document(case: Any, service: str) -> None:
    # A valid position may be of another partition (400) or never be reached (503); a lag or an age may be too small.
    waits = case.operation.method == "get" and not {"minPosition", "maxLag", "maxAge"}.isdisjoint(case.query or {})
    # The schema does not list the fields of each read model, nor the columns of its key.
    named = {one["name"] for one in _DOCUMENT["paths"][case.path][case.operation.method].get("parameters", ())}
    may_be_no_field = case.path.endswith(("/top", "/keys")) or not {*(case.query or {})} <= named
    response = _asked(case, service, may_wait=waits)
    excluded = [positive_data_acceptance] if waits or may_be_no_field else []
    case.validate_response(response, excluded_checks=excluded)
    assert waits or response.status_code != 503


def test_streams_have_the_media_type_of_the_document(service: str) -> None:
    paths = {"/api/models/{model}/changes": {}, "/api/models/{model}/keys/{key}": {"Accept": "text/event-stream"}}
    for path, headers in paths.items():
        described = _DOCUMENT["paths"][path]["get"]["responses"]["200"]["content"]
        url = service + path.format(model="balance", key="c1")
        with httpx.stream("GET", url, headers={**headers, "Last-Event-ID": ""}) as answer:
            assert answer.status_code == 200
            assert answer.headers["Content-Type"] in described
            assert next(answer.iter_lines()).startswith((": partition", "event: snapshot-begin"))


def test_the_served_document_matches_the_routes_and_the_version(service: str) -> None:
    served = httpx.get(f"{service}/openapi.json").json()

    assert served == _DOCUMENT
    assert served["info"]["version"] == __version__


def _asked(case: Any, service: str, *, may_wait: bool) -> Any:
    """Returns the response; retries on 503 after Retry-After unless `may_wait`."""
    response = case.call(base_url=service)
    deadline = time.monotonic() + _A_MOVE_SECONDS
    while response.status_code == 503 and not may_wait and time.monotonic() < deadline:
        time.sleep(float(response.headers["retry-after"][0]))
        response = case.call(base_url=service)
    return response


def _fits(customer_id: Any) -> bool:
    said_by_schema = not isinstance(customer_id, str) or len(customer_id) > MAX_KEY_BYTES
    return said_by_schema or len(customer_id.encode(errors="replace")) <= MAX_KEY_BYTES
