"""What a planted bug of this folder names: a place in the product, and the test that must find it."""

from __future__ import annotations

from tests.chaos.mutations import QUIET, Mutation


def pinpoint(name: str, file: str, old: str, new: str, test: str, found_by: str) -> Mutation:
    return Mutation(name, f"balance_service/{file}", old, new, QUIET, (found_by,), f"tests/{test}.py")


def in_one_test(name: str, file: str, old: str, new: str, test: str, found_by: str) -> Mutation:
    """A bug for which one test of its file is played, because the others take minutes."""
    return Mutation(name, f"balance_service/{file}", old, new, QUIET, (found_by,), f"tests/{test}.py::{found_by}")
