"""The checks of `make soak`: what levels off passes, and what grows beyond its bound is found."""

from __future__ import annotations

import logging
import random
import socket
import ssl
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from balance_service.client import Client, ClientError
from tests.chaos.mutants import mutated
from tests.soak.__main__ import _PROJECT, LEAK
from tests.soak.load import Silences, Work
from tests.soak.plot import plot
from tests.soak.slopes import HORIZON_HOURS, judged, slope_of, windows
from tests.support.credentials import Authority
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.soak.slopes import Verdict

_STEP = 1 / 720


def verdict_of(an_hour: float, *, noise: float = 0.0, saw: float = 0.0, hours: float = 1.0) -> Verdict:
    """The verdict about 400 MiB that grow, with noise and a garbage collector; the capacity is 568 MiB."""
    chooser = random.Random(7)
    samples = []
    for number in range(round(hours / _STEP)):
        at = number * _STEP
        garbage = saw * (number % 17) / 17
        samples.append((at, 400 + an_hour * at + garbage + abs(chooser.gauss(0, noise))))
    return judged("memory", "MiB", samples, 568.0, hours / 24, hours / 3)


def test_a_level_with_noise_and_garbage_levels_off() -> None:
    verdict = verdict_of(0.0, noise=5.0, saw=80.0)

    assert verdict.levels_off
    assert verdict.bound == pytest.approx((568.0 - verdict.level) / HORIZON_HOURS)
    assert verdict.line().endswith("levels off")


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_a_leak_beyond_the_bound_is_found_below_noise_and_garbage(noise: float) -> None:
    verdict = verdict_of(20.0, noise=noise, saw=80.0)

    assert not verdict.levels_off
    assert verdict.slope.least > verdict.bound
    assert verdict.line().endswith("GROWS")


def test_growth_within_the_bound_levels_off() -> None:
    assert verdict_of(0.5).levels_off
    assert not verdict_of(1.5).levels_off


def test_what_may_fill_its_capacity_must_stay_within_it() -> None:
    samples = [(n * _STEP, 10.0 + n / 10) for n in range(720)]

    assert judged("memtables", "MiB", samples, 77.0, 1 / 24, 1 / 3, fills=True).levels_off
    beyond = judged("memtables", "MiB", samples, 75.0, 1 / 24, 1 / 3, fills=True)
    assert not beyond.levels_off
    assert beyond.line().endswith("76.0 of 75.0: GROWS")


def test_what_grows_while_it_warms_up_does_not_count() -> None:
    samples = [(n * _STEP, 400.0 + min(n, 200)) for n in range(720)]

    assert judged("memory", "MiB", samples, 700.0, 1 / 24, 1 / 3).levels_off
    assert judged("memory", "MiB", samples, 700.0, 1 / 24, 0.0).slope.most > 0.0


def test_a_window_has_its_least_sample_and_the_last_one_is_left_out() -> None:
    samples = [(0.0, 5.0), (0.5, 3.0), (1.0, 9.0), (1.9, 8.0), (2.0, 1.0)]

    assert windows(samples, 1.0) == [(0.5, 3.0), (1.5, 8.0)]


def test_the_interval_of_a_slope_holds_it_and_too_few_points_are_refused() -> None:
    least, middle, most = slope_of([(0, 0.0), (1, 1.1), (2, 1.9), (3, 3.2), (4, 3.9), (5, 5.1)])

    assert least < middle < most
    assert middle == pytest.approx(1.0, abs=0.05)
    with pytest.raises(ValueError, match="2 windows are too few"):
        slope_of([(0, 0.0), (1, 1.0)])


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
def test_a_silent_stream_is_counted_and_an_instance_that_is_away_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_tls: bool
) -> None:
    authority, tls = Authority(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*map(str, authority.issue("server")))
    context = ssl.create_default_context(cafile=str(authority.certificate))
    logger, work, is_over = logging.getLogger("balance_service.client"), Work(), threading.Event()
    counting = Silences(work)

    def serve(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        listener.close()  # further connections are refused
        with tls.wrap_socket(accepted, server_side=True) if is_tls else accepted as connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n: alive\n\n")
            is_over.wait(20)

    def follow(client: Client) -> None:
        with suppress(ClientError):
            list(client.changes("balance", key="c"))

    logger.addHandler(counting)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http{'s' * is_tls}://127.0.0.1:{listener.getsockname()[1]}"
        threads = [threading.Thread(target=serve, args=[listener], daemon=True)]
        with Client(url, tls=context, trust_env=False, silence_seconds=0.3) as client:
            threads.append(threading.Thread(target=follow, args=[client], daemon=True))
            for thread in threads:
                thread.start()
            eventually(lambda: caplog.text.count("is interrupted") >= 2, "the client has tried again")
    is_over.set()
    for thread in threads:
        thread.join(10)
    logger.removeHandler(counting)

    assert work.done["silent streams"] == 1


def test_the_plot_has_a_panel_for_each_measure() -> None:
    verdict = verdict_of(20.0)

    drawn = plot({"memory": [(0.0, 400.0), (1.0, 420.0)]}, [verdict])

    assert "memory, MiB: +20.00 an hour" in drawn
    assert drawn.count("<polyline") == 1


def test_the_leak_that_must_be_found_can_be_planted() -> None:
    assert "kept" in mutated(LEAK, _PROJECT / LEAK.file)
