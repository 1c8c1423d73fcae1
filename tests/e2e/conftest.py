"""Instances that the tests of a module or of the package share."""

from __future__ import annotations

import subprocess
import sys
import uuid
import zipfile
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.dead_letters import PoisonWriter
from tests.support.documents import ROOT
from tests.support.service import application, new_instance, running, wait_until_spread, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

READ_TIMEOUT_SECONDS = 2


@pytest.fixture(scope="package")
def warm_instance(stack: LocalStack) -> Iterator[LocalInstance]:
    """An instance with its own topic that all modules share. Tests use unique customers."""
    # Generated requests often name a minPosition that is never reached; each costs a read timeout.
    settings = application(BALANCE_READ_TIMEOUT=str(READ_TIMEOUT_SECONDS))
    with running(new_instance(stack, settings)) as (instance,):
        warm_up(instance.url)
        yield instance


@pytest.fixture(scope="package")
def service(warm_instance: LocalInstance) -> str:
    """The URL of the shared instance."""
    return warm_instance.url


@pytest.fixture(scope="module")
def pair(stack: LocalStack, settings: dict[str, str]) -> Iterator[tuple[LocalInstance, LocalInstance]]:
    """Two instances with the module's `settings`; each owns a partition."""
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first, second):
        wait_until_spread((first, second))
        yield first, second


@pytest.fixture(scope="module")
def poison(stack: LocalStack, settings: dict[str, str], pair: object) -> Iterator[PoisonWriter]:
    """Writes unreadable records to the topic of the module's `settings`."""
    with PoisonWriter(stack, settings) as writer:
        yield writer


@pytest.fixture
def http(service: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service, timeout=10) as client:
        yield client


@pytest.fixture
def customer() -> str:
    """A new customer."""
    return f"customer-{uuid.uuid4()}"


@pytest.fixture(scope="package")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the wheel, as they are in `site-packages`."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("balance_read_models-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"
