"""The schema of `/api/status`: this instance's tasks, and all instances as they are known here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.http.api.declarations import Component
from balance_service.http.api.schemas import count, exactly, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.http.api.declarations import Schema

_TASK_STATE = Component(
    "schemas",
    "TaskState",
    text(
        "RESTORING replays the changelog and answers nothing. RUNNING folds and answers. TAILING, a standby's state, "
        "applies what the owner commits and answers queries that accept stale reads. WAITING answers as before, but "
        "applies nothing until something outside is back, such as the registry or room on the disk. HALTED does "
        "neither until a person has looked.",
        enum=["CREATED", "RESTORING", "RUNNING", "TAILING", "WAITING", "HALTED", "CLOSED"],
    ),
)
_PUBLISHED: Mapping[str, Schema] = {
    "task": text("Read model and partition.", pattern="^.+_[0-9]+$", examples=["balance_0"]),
    "partition": count("Partition of the source topic."),
    "role": text(
        "`active` folds the source and owns the partition; `standby` follows its changelog.",
        enum=["active", "standby"],
    ),
    "state": _TASK_STATE,
    "epoch": count("Fencing number: one higher each time the task is opened as active; 0 before it is known."),
    "position": count(
        "Next source offset to apply: everything below it is in the store; -1 while there is no store.", minimum=-1
    ),
}
_TASK = Component(
    "schemas",
    "Task",
    exactly(
        {
            **_PUBLISHED,
            "readModel": {"type": "string", "examples": ["balance"]},
            "lag": {
                "type": ["integer", "null"],
                "minimum": 0,
                "description": "Records between position and the source's end; null while the end is not known.",
            },
            "reason": text("Why the task waits or is halted; empty otherwise."),
            "restored": count("Changelog records applied since the restore began; a standby also counts later ones."),
            "toRestore": count("Changelog offsets to restore, as counted when the restore began."),
            "secondsLeft": {
                "type": ["number", "null"],
                "minimum": 0,
                "description": "How long the restore will take at the pace so far; null unless the task is RESTORING "
                "and has begun.",
            },
            "storeBytes": count("Size of the state store on disk."),
        },
        description="The work of one read model on one partition, on this instance.",
    ),
)
_PUBLISHED_TASK = Component(
    "schemas", "PublishedTask", exactly(_PUBLISHED, description="A task as its instance last published it.")
)
_APPLICATION_SERVER = Component(
    "schemas",
    "ApplicationServer",
    exactly(
        {
            "applicationServer": text("`host:port` under which peers reach it."),
            "incarnation": text("Random for each start of the process."),
            "suspect": {
                "type": "boolean",
                "description": "Not heard of for 3 s; nothing is routed to it until it is heard of again.",
            },
            "shared": {
                "type": "boolean",
                "description": "Two instances run with this address, so that many queries are answered 503: give each "
                "its own `BALANCE_APPLICATION_SERVER`.",
            },
            "models": {"type": "array", "items": {"type": "string"}, "description": "The read models that it hosts."},
            "tasks": {"type": "array", "items": _PUBLISHED_TASK},
        },
        description="An instance, as far as it is known here.",
    ),
)
_MODEL = Component(
    "schemas",
    "HostedModel",
    exactly(
        {
            "name": text("The read model.", examples=["balance"]),
            "source": text("The topic that it folds.", examples=["balance"]),
            "partitions": count("Partitions of that topic.", minimum=1),
        }
    ),
)
_TABLE = Component(
    "schemas",
    "TablePartition",
    exactly(
        {
            "table": text("The topic of its rows.", examples=["players"]),
            "partition": count("Of that topic."),
            "position": count("Next offset of the topic to read; -1 while that is not known.", minimum=-1),
            "whole": {"type": "boolean", "description": "Whether it was read to its end since it was opened."},
            "reason": text("Why it is not followed now; empty while it is."),
            "skipped": {
                "type": "object",
                "additionalProperties": count("Records."),
                "description": "Records that are no rows, by cause, since the instance started.",
            },
            "late": count("Rows earlier than an event that was joined before they came, since the instance started."),
            "storeBytes": count("Size of its store on disk."),
        },
        description="A partition of a table, as this instance follows it.",
    ),
)
STATUS = Component(
    "schemas",
    "Status",
    exactly(
        {
            "applicationServer": text("`host:port` under which peers reach the instance asked."),
            "ready": {"type": "boolean", "description": "As `/health/ready` answers."},
            "reasons": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Why it is not ready; empty while it is.",
            },
            "partitions": {
                "type": ["integer", "null"],
                "minimum": 1,
                "description": "Most partitions that a source topic has; null while the instance is starting.",
            },
            "models": {"type": "array", "items": _MODEL, "description": "The read models that the instance hosts."},
            "unhosted": {
                "type": "array",
                "items": {"type": "string", "examples": ["activity_1"]},
                "description": "Tasks of these read models that no instance has: whichever owns the partition does "
                "not host the model, or the partition is changing hands.",
            },
            "problems": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Why partitions are not folded now, as Spark and the broker say it, by read model.",
            },
            "leaseHolds": {
                "type": "boolean",
                "description": "Whether the group has confirmed this instance lately, so that it may answer as owner; "
                "absent while the instance is starting.",
            },
            "tasks": {"type": "array", "items": _TASK},
            "tables": {"type": "array", "items": _TABLE, "description": "The tables that its read models join with."},
            "applicationServers": {
                "type": "array",
                "description": "All known instances, this one included.",
                "items": _APPLICATION_SERVER,
            },
        },
        optional=frozenset({"leaseHolds"}),
    ),
)
_TASK_EXAMPLE = {"task": "balance_0", "partition": 0, "role": "active", "state": "RUNNING", "epoch": 3, "position": 42}
STATUS_EXAMPLE = {
    "applicationServer": "localhost:5051",
    "ready": True,
    "reasons": [],
    "partitions": 2,
    "models": [{"name": "balance", "source": "balance", "partitions": 2}],
    "unhosted": [],
    "problems": [],
    "leaseHolds": True,
    "tasks": [
        {
            **_TASK_EXAMPLE,
            "readModel": "balance",
            "lag": 0,
            "reason": "",
            "restored": 12,
            "toRestore": 12,
            "secondsLeft": None,
            "storeBytes": 73_400,
        }
    ],
    "tables": [],
    "applicationServers": [
        {
            "applicationServer": "localhost:5051",
            "incarnation": "5f0c6a1e",
            "suspect": False,
            "shared": False,
            "models": ["balance"],
            "tasks": [_TASK_EXAMPLE],
        }
    ],
}
