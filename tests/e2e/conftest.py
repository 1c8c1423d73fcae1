"""One warm instance for all tests that only ask and add."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.letters import Unread
from tests.support.service import application, new_instance, running, wait_until_spread, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

READ_TIMEOUT_SECONDS = 2


@pytest.fixture(scope="package")
def warm_instance(stack: LocalStack) -> Iterator[LocalInstance]:
    """One warm instance with a topic of its own, shared: name customers that nobody else names."""
    # A minPosition that is never reached costs the read timeout, each time one is generated.
    settings = application(BALANCE_READ_TIMEOUT=str(READ_TIMEOUT_SECONDS))
    with running(new_instance(stack, settings)) as (instance,):
        warm_up(instance.url)
        yield instance


@pytest.fixture(scope="package")
def service(warm_instance: LocalInstance) -> str:
    """Its address."""
    return warm_instance.url


@pytest.fixture(scope="module")
def pair(stack: LocalStack, settings: dict[str, str]) -> Iterator[tuple[LocalInstance, LocalInstance]]:
    """Two instances of what the module's `settings` say; each owns a partition."""
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first, second):
        wait_until_spread((first, second))
        yield first, second


@pytest.fixture(scope="module")
def unread(stack: LocalStack, settings: dict[str, str], pair: object) -> Iterator[Unread]:
    """Writes to the topic of the module's `settings` what cannot be read."""
    with Unread(stack, settings) as writer:
        yield writer


@pytest.fixture
def http(service: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service, timeout=10) as client:
        yield client


@pytest.fixture
def customer() -> str:
    """A customer nobody has named yet."""
    return f"customer-{uuid.uuid4()}"
