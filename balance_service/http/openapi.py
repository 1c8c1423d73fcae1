"""The OpenAPI document as this instance serves it: what is in the package, and what its settings add to that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from balance_service import __version__
from balance_service.http.authorization import OPEN, SCOPES

OPENAPI_FILE = Path(__file__).with_name("openapi.json")
_CHALLENGE = {
    "WWW-Authenticate": {
        "required": True,
        "description": "What was wrong with the token; RFC 6750.",
        "schema": {"type": "string", "pattern": "^Bearer "},
    }
}
_PAUSE = {"Retry-After": {"$ref": "#/components/headers/Retry-After"}}
_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token that the operator of this service has issued, or a JWT of the identity provider it trusts.",
}


def document(*, authorises: bool = False, limits_rate: bool = False) -> str:
    """The document, as JSON.

    Args:
        authorises: clients need tokens.
        limits_rate: clients may ask only so often.
    """
    openapi = json.loads(OPENAPI_FILE.read_bytes())
    openapi["info"]["version"] = __version__
    if authorises:
        openapi["components"]["securitySchemes"] = {"bearer": _SCHEME}
    for path, methods in openapi["paths"].items():
        for operation in methods.values() if path not in OPEN else ():
            if authorises:
                _needs_a_token(operation, path)
            if limits_rate:
                _add(operation, 429, "This client asks too often. Nothing was begun.", _PAUSE)
    return json.dumps(openapi, ensure_ascii=False)


def _needs_a_token(operation: dict[str, Any], path: str) -> None:
    scopes = sorted(SCOPES[path])
    operation["security"] = [{"bearer": [scope]} for scope in scopes]
    _add(operation, 400, "There is more than one token.", {})
    _add(operation, 401, "There is no token, or none that is accepted.", _CHALLENGE)
    _add(operation, 403, f"The token does not grant {' or '.join(f'`{scope}`' for scope in scopes)}.", {})


def _add(operation: dict[str, Any], status: int, what: str, headers: dict[str, Any]) -> None:
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    answer = operation["responses"].setdefault(str(status), {"description": "", "content": content})
    answer["description"] = f"{answer['description']} {what}".strip()
    if headers:
        answer["headers"] = answer.get("headers", {}) | headers
