"""A commit as part of the first event's trace, linked to the others': an event's trace ends where it is committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind

from balance_service.observability.tracing import TRACEPARENT_HEADER, W3C, links_to, open_span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.trace import Tracer

    from balance_service.engine.commit import Committed
    from balance_service.engine.records import TaskBatch
    from balance_service.engine.task import Task


def commit_traced(tracer: Tracer, task: Task, batch: TaskBatch, traces: Sequence[str]) -> Committed:
    """Commit within a span. Raises as `Task.process`.

    Args:
        traces: what names the spans of the batch's events; there is at least one.
    """
    attributes: dict[str, str | int] = {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.operation.name": "commit",
        "messaging.destination.partition.id": str(task.task_id.partition),
        "messaging.batch.message_count": batch.applied,
        "balance.batch.start": batch.start,
        "balance.batch.end": batch.end,
    }
    name = f"commit {task.task_id}"
    parent = W3C.extract({TRACEPARENT_HEADER: traces[0]})
    with open_span(tracer, name, SpanKind.CONSUMER, attributes, parent=parent, links=links_to(traces)) as span:
        done = task.process(batch)
        span.set_attribute("balance.batch.applied", done.applied)
        span.set_attribute("balance.batch.dead_lettered", done.dead_lettered)
        return done
