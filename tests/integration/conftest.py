"""Servers that several integration tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.secured import SecuredStack, secured_stack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalStack


@pytest.fixture(scope="package")
def secured(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredStack]:
    """A secured broker, and the registry of the stack behind TLS."""
    with secured_stack(tmp_path_factory.mktemp("secured"), stack.schema_registry_url) as running:
        yield running
