"""A client that is made before `fork`, as by servers that load a program once for all their workers."""

from __future__ import annotations

import subprocess
import sys

from tests.support.scripted_server import answer, scripted, stream
from tests.unit.client.test_changes import HANGS, state

_SECONDS = 60
# Parent and child write one line each, the child first.
_FORKED = """
import asyncio, os, sys
from balance_service.client import AsyncClient, Client

def in_both(show):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
    print(show(), flush=True)
    if not child:
        os._exit(0)

url = sys.argv[1]
"""


def _output(program: str, url: str) -> list[str]:
    command = [sys.executable, "-c", _FORKED + program, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_child_opens_connections_of_its_own() -> None:
    program = """
client = Client(url)
assert client.get("balance", "c1").value == 1
in_both(lambda: client.get("balance", "c1").value)
"""
    of_key = [answer(f'{{"key":"c1","value":{value}}}') for value in (1, 2, 3)]
    with scripted(*of_key) as (url, received):
        assert _output(program, url) == ["2", "3"]
        first, of_child, of_parent = (request.port for request in received)

    assert first == of_parent != of_child


def test_a_child_uses_an_asynchronous_client_in_a_loop_of_its_own() -> None:
    program = """
client, loop = AsyncClient(url), asyncio.new_event_loop()
async def value():
    return (await client.get("balance", "c1")).value
assert loop.run_until_complete(value()) == 1
parent = os.getpid()
in_both(lambda: loop.run_until_complete(value()) if os.getpid() == parent else asyncio.run(value()))
"""
    of_key = [answer(f'{{"key":"c1","value":{value}}}') for value in (1, 2, 3)]
    with scripted(*of_key) as (url, received):
        assert _output(program, url) == ["2", "3"]
        first, of_child, of_parent = (request.port for request in received)

    assert first == of_parent != of_child


def test_a_child_follows_changes_on_a_connection_of_its_own() -> None:
    program = """
client = Client(url)
changes = client.changes("balance", key="c1")
assert next(changes).value == 1
in_both(lambda: next(changes).value)
"""
    of_parent = stream(state("1", "1/1:1"), 1.0, state("2", "1/1:2"), *HANGS)
    of_child = stream(state("3", "1/1:3"), *HANGS)
    with scripted(of_parent, of_child) as (url, received):
        assert _output(program, url) == ["3", "2"]

    assert [request.headers.get("last-event-id") for request in received] == [None, "1/1:1"]
