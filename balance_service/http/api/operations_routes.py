"""The routes for people and orchestrators: health, metrics, status, and the description of all routes."""

from __future__ import annotations

from balance_service.http.access.clients import Scope
from balance_service.http.api.answers import ok, unavailable
from balance_service.http.api.declarations import Answer, Content
from balance_service.http.api.openapi import answer_with_document
from balance_service.http.api.route import OPERATIONS, Route
from balance_service.http.api.schemas import exactly
from balance_service.http.api.status_schema import STATUS, STATUS_EXAMPLE

_LIVE = Route(
    name="getLiveness",
    method="GET",
    path="/health/live",
    answer=lambda handlers, request: handlers.operations.live(request),
    tag=OPERATIONS,
    scopes=frozenset(),
    is_never_refused=True,
    summary="Is the process alive?",
    description="200 while the process answers at all. Restart an instance that does not.",
    answers=(ok("Alive.", exactly({"status": {"const": "live"}}), {"status": "live"}),),
)
_READY = Route(
    name="getReadiness",
    method="GET",
    path="/health/ready",
    answer=lambda handlers, request: handlers.operations.ready(request),
    tag=OPERATIONS,
    scopes=frozenset(),
    is_never_refused=True,
    summary="Is the instance ready for queries?",
    description="200 when this instance has joined its group and can answer for at least one of its read models. Send "
    "it queries only then.",
    answers=(
        ok(
            "Ready; `problems` says what is wrong with a read model meanwhile.",
            exactly({"status": {"const": "ready"}, "problems": {"type": "array", "items": {"type": "string"}}}),
            {"status": "ready", "problems": []},
        ),
        unavailable(
            "Not ready; `detail` has the reasons, separated by semicolons.",
            {
                "starting": ("Just started", "this instance is starting"),
                "restoring": ("A store is being restored", "balance_0 is RESTORING"),
            },
        ),
    ),
)
_METRICS = Route(
    name="getMetrics",
    method="GET",
    path="/metrics",
    answer=lambda handlers, request: handlers.operations.metrics(request),
    tag=OPERATIONS,
    scopes=frozenset({Scope.OPERATIONS}),
    is_never_refused=True,
    summary="Metrics of this instance",
    description="Prometheus' text format, version 0.0.4. Metrics of tasks carry the labels `read_model` and "
    "`partition`; those that show a task as it is now, `role` too.",
    answers=(
        Answer(
            status=200,
            description="All metrics.",
            content=Content(
                schema={"type": "string"},
                example="# HELP balance_position Next source offset to apply.\n# TYPE balance_position gauge\n"
                'balance_position{partition="0",read_model="balance",role="active"} 42.0\n',
                media_type="text/plain",
            ),
        ),
    ),
)
_STATUS = Route(
    name="getStatus",
    method="GET",
    path="/api/status",
    answer=lambda handlers, request: handlers.operations.status(request),
    tag=OPERATIONS,
    scopes=frozenset({Scope.OPERATIONS}),
    summary="How this instance sees itself and the others",
    description="Its own tasks, exactly; those of all instances as they last published them, at most about a second "
    "ago unless `suspect`.",
    answers=(ok("The view of the instance asked.", STATUS, STATUS_EXAMPLE),),
)
_OPENAPI = Route(
    name="getOpenApi",
    method="GET",
    path="/openapi.json",
    answer=lambda _handlers, request: answer_with_document(request),
    tag=OPERATIONS,
    # How to ask is for every client that may ask for anything.
    scopes=frozenset(Scope),
    summary="This document",
    description="The version in it is that of the running service.",
    answers=(
        ok(
            "OpenAPI 3.1.",
            {
                "type": "object",
                "required": ["openapi", "info", "paths"],
                "properties": {
                    "openapi": {"type": "string", "pattern": "^3\\.1\\."},
                    "info": {"type": "object"},
                    "paths": {"type": "object"},
                },
            },
        ),
    ),
)

OPERATIONS_ROUTES = (_LIVE, _READY, _METRICS, _STATUS, _OPENAPI)
