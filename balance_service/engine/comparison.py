"""Compares two generations of a partition: brings their tasks to one position, and merges the states of both."""

from __future__ import annotations

import time
from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from balance_service.engine.records import RESERVED_PREFIX, Compared, Difference
from balance_service.engine.store import offset_of
from balance_service.errors import RetriableError, StoreCorruptedError
from balance_service.model.generations import Comparison

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.store import StoreView
    from balance_service.engine.task import StopAt, Task
    from balance_service.engine.tasks import Tasks
    from balance_service.model.events import State

_PAGE = 500
_ALIGN_SECONDS = 5.0
_LOOK_SECONDS = 0.002
_key = itemgetter(0)
MOST_DIFFERENCES = 20


def aligned(serving: Task, building: Task) -> tuple[StoreView, StoreView]:
    """Returns a view of each task's states, both after the same events of the source.

     1. The task that is built stops at its position p, or beyond it by the events that it has in hand.
     2. The serving one never stops. Once it is at p or beyond, it gives a view, at q.
     3. The other one goes on to q, stops there, and gives a view too.

    Raises:
        RetriableError: a task did not get there in time, or does not answer.
    """
    until = time.monotonic() + _ALIGN_SECONDS
    try:
        _wait(building.stop_at(building.position), building, until)
        while serving.position < building.position:
            if time.monotonic() > until:
                raise RetriableError(f"{serving.task_id} did not reach position {building.position} in time")
            time.sleep(_LOOK_SECONDS)
        view = _view_of(serving)
        _wait(building.stop_at(offset_of(view)), building, until)
        other = _view_of(building)
    finally:
        building.go_on()
    if offset_of(other) > offset_of(view):
        raise RetriableError(f"{building.task_id} went beyond position {offset_of(view)}")
    return view, other


def _wait(stop: StopAt, task: Task, until: float) -> None:
    if not stop.reached.wait(max(0.0, until - time.monotonic())):
        raise RetriableError(f"{task.task_id} did not reach position {stop.offset} in time")


def compare(serving: Tasks, building: Tasks, tasks: tuple[Task, Task]) -> Generator[None, None, Compared]:
    """Compares the states of two tasks of one partition, page by page.

    The caller may wait between the pages, so that queries get the processor. Two states are equal if they are the same
    bytes, or the same when decoded: they may be encoded by two versions of one schema.

    Raises:
        RetriableError: as `aligned`; or a task was closed, whose store cannot be opened again before the views end.
        StoreCorruptedError: a store is damaged; its task restores it.
    """
    before, after = aligned(*tasks)
    counts, differences = Comparison(), list[Difference]()
    one, other = serving.hosted, building.hosted
    for ours, theirs in _ranges(_pages(before, tasks[0], serving), _pages(after, tasks[1], building)):
        equal = different = only_serving = only_building = 0
        if ours == theirs:
            equal, keys = len(ours), []
        else:
            of_serving, of_building = dict(ours), dict(theirs)
            keys = sorted(of_serving.keys() | of_building.keys())
        for key in keys:
            left, right = of_serving.get(key), of_building.get(key)
            if left is None:
                only_building += 1
            elif right is None:
                only_serving += 1
            elif left == right or _state(left, tasks[0], serving) == _state(right, tasks[1], building):
                equal += 1
                continue
            else:
                different += 1
            if len(differences) < MOST_DIFFERENCES:
                views = (None if left is None else _shown(one, left), None if right is None else _shown(other, right))
                differences.append(Difference(key, *views))
        counts += Comparison(equal, different, only_serving, only_building)
        if any(task.view is None for task in tasks):
            raise RetriableError("a task was closed during the comparison")
        yield
    return Compared(offset_of(before), counts, tuple(differences))


def _shown(hosted: HostedStage, frame: bytes) -> Any:
    # Without its class, a generation may have no view.
    return hosted.state(frame) if hosted.stands_still else hosted.view(frame)


def _state(frame: bytes, task: Task, tasks: Tasks) -> State:
    try:
        return tasks.hosted.state(frame)
    except StoreCorruptedError as error:
        tasks.failed(task, error)
        raise


def _view_of(task: Task) -> StoreView:
    view = task.view
    if view is None:
        raise RetriableError(f"{task.task_id} does not answer now")
    return view


def _pages(view: StoreView, task: Task, tasks: Tasks) -> Callable[[bytes], _Page]:
    def page(start: bytes) -> _Page:
        try:
            return view.scan(start, RESERVED_PREFIX, _PAGE)
        except StoreCorruptedError as error:
            tasks.failed(task, error)
            raise

    return page


_Page = list[tuple[bytes, bytes]]


def _ranges(left: Callable[[bytes], _Page], right: Callable[[bytes], _Page]) -> Iterator[tuple[_Page, _Page]]:
    """Yields the states of both sides, one range of keys after the other."""
    start = b""
    while True:
        ours, theirs = left(start), right(start)
        # A side that has more beyond its page says nothing about keys after the page's last one.
        ends = [page[-1][0] for page in (ours, theirs) if len(page) == _PAGE]
        if not ends:
            yield ours, theirs
            return
        end = min(ends)
        yield ours[: bisect_right(ours, end, key=_key)], theirs[: bisect_right(theirs, end, key=_key)]
        start = end + b"\0"
