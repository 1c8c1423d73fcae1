"""The grants that docs/security.md lists, as ACL bindings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from tests.integration.secured import USER

if TYPE_CHECKING:
    from collections.abc import Mapping

_DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
_ROW = re.compile(r"\| (topic|group|transactional id) \| `(.+)` \| (literal|prefixed) \| (\w+) \| (.+) \|")
_RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional id": ResourceType.TRANSACTIONAL_ID,
}
_OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Create": AclOperation.CREATE,
    "Delete": AclOperation.DELETE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
}


@dataclass(frozen=True)
class Grant:
    """One row of the table in docs/security.md."""

    resource: str
    name: str
    pattern: str
    operation: str
    needed_for: str

    def __str__(self) -> str:
        return f"{self.operation} on {self.resource} {self.name}"

    def filled(self, names: Mapping[str, str]) -> str:
        """Returns the resource name with its placeholders replaced."""
        return re.sub(r"<(.+?)>", lambda match: names[match[1]], self.name)

    def binding(self, names: Mapping[str, str], principal: str = f"User:{USER}") -> AclBinding:
        """Returns the grant as an ACL binding."""
        return AclBinding(
            _RESOURCES[self.resource],
            self.filled(names),
            ResourcePatternType.PREFIXED if self.pattern == "prefixed" else ResourcePatternType.LITERAL,
            principal,
            "*",
            _OPERATIONS[self.operation],
            AclPermissionType.ALLOW,
        )


def listed() -> list[Grant]:
    """Returns all rows of the table."""
    return [Grant(*match.groups()) for match in _ROW.finditer(_DOCUMENT.read_text(encoding="utf-8"))]
