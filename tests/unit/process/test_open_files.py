"""The limit of open files, and its division."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.errors import ConfigurationError
from balance_service.process.open_files import divided, need_of

TASKS = st.integers(0, 20_000)
BROKERS = st.integers(1, 200)


def run(limits: str, code: str) -> str:
    """Output of a separate process with these limits."""
    script = f'ulimit {limits}; exec "{sys.executable}" -c "from balance_service.process.open_files import *; {code}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    assert run("-Sn 300; ulimit -Hn 700", "print(limit(), raise_limit(), limit())") == "300 700 700"


def test_a_raised_limit_stays() -> None:
    assert run("-n 700", "print(raise_limit())") == "700"


def test_too_few_open_files_are_rejected_with_the_number_the_tasks_and_the_remedy() -> None:
    need = need_of(100)

    with pytest.raises(ConfigurationError, match=rf"needs {need} open files for the 100 tasks .* allows 600: raise"):
        divided(100, 1, 600)
    with pytest.raises(ConfigurationError):
        divided(100, 1, need - 1)
    assert divided(100, 1, need).need == need


@given(TASKS, BROKERS)
def test_more_tasks_or_brokers_never_need_fewer_files(tasks: int, brokers: int) -> None:
    assert need_of(tasks, brokers) <= need_of(tasks + 1, brokers)
    assert need_of(tasks, brokers) <= need_of(tasks, brokers + 1)


@given(TASKS, BROKERS, st.integers(0, 1 << 20))
def test_the_division_never_exceeds_the_limit(tasks: int, brokers: int, more: int) -> None:
    most = need_of(tasks, brokers) + more

    files = divided(tasks, brokers, most)

    assert files.connections >= 64
    assert 20 <= files.per_store <= 512
    assert 1 <= files.openings <= max(1, tasks)
    spent = files.connections + (files.per_store - 20) * tasks + max(0, files.openings - 6) * 10
    assert spent <= more + 64


def test_a_generous_limit_restricts_neither_openings_nor_stores() -> None:
    files = divided(100, 3, 524_288)

    assert (files.openings, files.per_store) == (100, 512)
    assert files.connections > 100_000
