"""The instance that plain queries ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.http.plain_queries import CUSTOMER

if TYPE_CHECKING:
    from tests.support.querying import Instance


@pytest.fixture
def instance(instance: Instance) -> Instance:
    """Has the state of CUSTOMER."""
    instance.put("12.34", CUSTOMER)
    return instance
