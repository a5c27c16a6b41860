"""The loop: any number of works on one pool, whose tasks go to its workers until nothing is left that can be done.

Not here: what a work is (work), or whether a unit that failed is tried again (phase). A bounded number of tasks is in
flight, whatever the size and the number of works. All works are stepped by the calling thread, which takes what tasks
gave between their steps.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from volpipe.blockwise.interrupts import INTERRUPTS
from volpipe.blockwise.journal import Record
from volpipe.blockwise.logs import speaking
from volpipe.blockwise.phase import Phase
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.stage import Stage
from volpipe.blockwise.work import (
    POOL,
    RELEASED,
    Ended,
    LoopObserver,
    Place,
    Step,
    Steps,
    Together,
    Until,
    Work,
    Works,
    observers,
)
from volpipe.errors import RunError, SiteError, VolpipeError
from volpipe.resolve import describe_error

TICK_SECONDS = 0.5

log = logging.getLogger(__name__)

R = TypeVar("R")
Arrived = tuple["_Node", Phase, Stage, list[int], "Future[Record[Any]]"]


def perform(work: Work[R], start: Callable[[], AbstractContextManager[WorkerPool]]) -> R:
    """Do `work`, and return its result.

    Args:
        start: starts the pool when a work first asks for it, and stops it on every way out.

    Raises:
        VolpipeError: the work cannot be done.
        KeyboardInterrupt: somebody asked to stop; what was under way could finish, within its time.
    """
    with ExitStack() as stack:
        ended: Ended[R] = _Loop(start, stack).run(work)
    if ended.error is not None:
        raise ended.error
    return ended.result  # type: ignore[return-value]  # without an error there is one


@dataclass(eq=False)
class _Node:
    """A work that is open.

    Attributes:
        step: what it waits for; None before it begins.
        waiting, coming: of a step `Together`, the works that are still to be opened, and the next one before them; None
            when there are no more.
        num_begun, num_open: of those works.
        is_idle: of a phase, whether nothing is under way and nothing can start.
        is_released: whether it needs no worker any more.
    """

    work: Work[Any]
    steps: Steps[Any]
    place: Place = ()
    parent: _Node | None = None
    step: Step | None = None
    waiting: Iterator[Work[Any]] = field(default_factory=lambda: iter(()))
    coming: Work[Any] | None = None
    num_begun: int = 0
    num_open: int = 0
    began: float = field(default_factory=time.monotonic)
    is_idle: bool = False
    is_released: bool = False

    @property
    def works(self) -> Works:
        """The work, and before it those that it belongs to."""
        return [*(() if self.parent is None else self.parent.works), self.work]


class _Audience:
    """The observers that listen now; one that raises is told no more."""

    def __init__(self) -> None:
        self._observers = list(observers())

    def tell(self, say: Callable[[LoopObserver], None]) -> None:
        """Call `say` with each of them."""
        for observer in list(self._observers):
            try:
                say(observer)
            except Exception:
                self._observers.remove(observer)
                log.warning("%s fails, and hears of no further task", type(observer).__name__, exc_info=True)


class _Loop:
    """One session over a work and those that belong to it; see `perform`."""

    def __init__(self, start: Callable[[], AbstractContextManager[WorkerPool]], stack: ExitStack) -> None:
        self._start, self._stack = start, stack
        self._pool: WorkerPool | None = None
        self._nodes: list[_Node] = []  # each after the one that it belongs to
        self._arrived: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self._in_flight: Counter[str] = Counter()  # workers that tasks in flight take, by label
        self._reported: set[str] = set()
        self._ended: Ended[Any] | None = None
        self._ticked = 0.0
        self._audience = _Audience()

    def run(self, work: Work[R]) -> Ended[R]:
        """Step `work` and all that belongs to it to their ends."""
        self._open_work(_Node(work, work.steps()))
        try:
            while self._nodes:
                with self._patience():
                    self._fill_workers()
                with self._patience():  # of tasks that were sent just now, too
                    self._turn()
                if INTERRUPTS.is_asked:
                    self._dismiss()
                if not self._in_flight.total() or INTERRUPTS.is_overdue:
                    INTERRUPTS.check()
        except BaseException as error:
            raised = self._leave(error)
            if raised is not error:
                raise raised from raised.__cause__
            raise
        assert self._ended is not None
        return self._ended

    def _patience(self) -> AbstractContextManager[None]:
        """Let the first signal pass meanwhile if something is under way."""
        return INTERRUPTS.patience() if self._in_flight.total() else nullcontext()

    def _turn(self) -> None:
        """Take what has arrived, and take one step; wait a moment where there is none."""
        for _ in range(self._arrived.qsize()):  # and not those that arrive meanwhile, or no work would ever go on
            self._receive()
        if time.monotonic() - self._ticked >= TICK_SECONDS:  # also where tasks come back all the time
            self._tick_together()
        if not self._in_flight.total():
            self._release()
        if not self._nodes or (not INTERRUPTS.is_asked and self._step()):
            return
        is_pausing = any(_pauses(node.step) for node in self._nodes)
        if not self._in_flight.total() and not INTERRUPTS.is_asked and not is_pausing:
            raise RuntimeError(f"works wait for each other: {[node.work.name for node in self._nodes]}")
        try:
            self._receive(TICK_SECONDS)
        except queue.Empty:
            self._tick()

    def _step(self) -> bool:
        """Let one work go on that has what it waits for; return whether there was one."""
        for node in self._by_turn():
            step = node.step
            if step is POOL:
                self._resume(node, partial(self._give_pool, node))
            elif self._is_over(node, step):
                self._resume(node, lambda node=node: node.steps.send(None))  # type: ignore[misc]
            else:
                continue
            return True
        # Last of all: those that are open may have tasks for every worker.
        return any(self._open_next(node, node.step) for node in self._by_turn() if isinstance(node.step, Together))

    def _is_over(self, node: _Node, step: Step | None) -> bool:
        """Return whether `node` has what it waits for, or waits for nothing."""
        if isinstance(step, Phase):
            return node.is_idle
        if isinstance(step, Until):  # in a pause, what is under way was sent by a look that failed, and may write yet
            return step.condition() and not (step.is_pause and self._in_flight.total())
        return not isinstance(step, Together) or (node.coming is None and not node.num_open)

    def _by_turn(self) -> list[_Node]:
        return sorted(self._nodes, key=lambda node: node.place)

    def _give_pool(self, node: _Node) -> Step:
        """Let `node` go on with the pool, or by the error that there is none."""
        node.is_released = False
        try:
            pool = self._started()
        except Exception as error:
            return node.steps.throw(error)
        return node.steps.send(pool)

    def _started(self) -> WorkerPool:
        if self._pool is None:
            pool = self._pool = self._stack.enter_context(self._start())
            self._audience.tell(lambda observer: observer.use(pool))
            self._stack.callback(lambda: self._audience.tell(lambda observer: observer.use(None)))
        return self._pool

    def _open_work(self, node: _Node) -> None:
        self._nodes.append(node)
        self._audience.tell(lambda observer: observer.begin(node.place, node.works))

    def _open_next(self, node: _Node, step: Together) -> bool:
        """Open the next work of `node` if there is room for its tasks; return whether there was one.

        Works of which later ones go first are all opened: they wait for what earlier ones make, not for workers.
        """
        work, has_room = node.coming, step.latest_first or self._has_room()
        if work is None or node.num_open >= step.at_once or not has_room:
            return False
        number = -node.num_begun if step.latest_first else node.num_begun
        node.num_begun, node.num_open = node.num_begun + 1, node.num_open + 1
        self._open_work(_Node(work, work.steps(), (*node.place, number), node))
        self._look_ahead(node)
        return True

    def _look_ahead(self, node: _Node) -> None:
        """Take the next work of `node`, so that it is known whether there is one."""
        try:
            with speaking(node.place):
                node.coming = next(node.waiting, None)
        except VolpipeError as error:
            self._throw(node, error)

    def _has_room(self) -> bool:
        if self._pool is None:
            return True
        if self._pool.shared:
            return self._in_flight.total() < 2 * max(self._pool.slots.values())
        return any(self._in_flight[kind] < 2 * n for kind, n in self._pool.slots.items())

    def _resume(self, node: _Node, go_on: Callable[[], Step]) -> None:
        """Let `node` go on to its next step, or to its end."""
        try:
            with speaking(node.place):
                step = go_on()
        except StopIteration as end:
            self._end_work(node, Ended(node.work, end.value, seconds=time.monotonic() - node.began))
        except SiteError as error:
            self._nodes.remove(node)
            self._tell_end(node, None, error)
            raise
        except (VolpipeError, OSError) as error:  # before it has a log: a folder that cannot be made, say
            described = error if isinstance(error, VolpipeError) else _system_error(error)
            self._end_work(node, Ended(node.work, error=described, seconds=time.monotonic() - node.began))
        else:
            self._wait_for(node, step)

    def _wait_for(self, node: _Node, step: Step) -> None:
        node.step, node.is_idle, node.is_released = step, False, step is RELEASED or _pauses(step)
        if isinstance(step, Phase):
            step.begin(self._started().slots, self._reported)
        elif isinstance(step, Together):
            node.waiting, node.num_begun = iter(step.works), 0
            self._look_ahead(node)

    def _release(self) -> None:
        """Stop the workers if no work needs them any more."""
        if self._pool is None:
            return
        if all(node.is_released or (isinstance(node.step, Together) and node.coming is None) for node in self._nodes):
            self._pool = None
            self._stack.close()

    def _end_work(self, node: _Node, ended: Ended[Any]) -> None:
        """Close `node`, and hand over how it ended."""
        self._nodes.remove(node)
        self._tell_end(node, ended.result, ended.error)
        if node.parent is None:
            self._ended = ended
            return
        node.parent.num_open -= 1
        assert isinstance(node.parent.step, Together)
        self._call_back(node.parent, node.parent.step.on_end, ended)

    def _throw(self, node: _Node, error: Exception) -> None:
        """Let `node` end by `error`, or take it; works that belong to it are left first."""
        for other in reversed(self._nodes):
            if len(other.place) > len(node.place) and other.place[: len(node.place)] == node.place:
                self._nodes.remove(other)
                with speaking(other.place):
                    other.steps.close()
                self._tell_end(other, None, error)
        node.num_open, node.coming = 0, None
        self._resume(node, lambda: node.steps.throw(error))

    def _call_back(
        self, node: _Node, function: Callable[..., None], *arguments: Any
    ) -> None:  # Any: the function's own
        """Call what `node` gave to be called; what it raises is the work's."""
        try:
            with speaking(node.place):
                function(*arguments)
        except Exception as error:
            self._throw(node, error)

    def _fill_workers(self) -> None:
        """Send tasks as long as there is room and something may start."""
        for node in self._by_turn():
            if isinstance(node.step, Phase) and not INTERRUPTS.is_asked:
                node.is_idle = self._send_all(node, node.step)

    def _dismiss(self) -> None:
        """Let tasks under way begin no other unit."""
        for node in self._nodes:
            if isinstance(node.step, Phase):
                node.step.dismiss()

    def _send_all(self, node: _Node, phase: Phase) -> bool:
        """Send what there is room for; return whether nothing is under way then, and nothing can start."""
        may_have_more = False
        for stage in phase.stages:
            while self._takes_more(stage):
                units = phase.take(stage)
                if not units:
                    break
                self._in_flight[stage.label] += stage.num_workers
                phase.send(stage, units).add_done_callback(
                    lambda future, stage=stage, units=units: self._arrived.put((node, phase, stage, units, future))  # type: ignore[misc]
                )
            else:
                may_have_more = True
        return phase.is_over and not may_have_more

    def _takes_more(self, stage: Stage) -> bool:
        assert self._pool is not None
        busy, most = self._in_flight[stage.label], self._pool.slots[stage.label]
        return busy < 2 * most if stage.num_workers == 1 else busy + stage.num_workers <= most

    def _receive(self, seconds: float = 0.0) -> None:
        """Take what a task gave, send others in its place, and tell of progress; a work that has ended wants no more.

        Raises:
            queue.Empty: nothing came back in time.
        """
        node, phase, stage, units, future = self._arrived.get(timeout=seconds)
        self._in_flight[stage.label] -= stage.num_workers
        if node in self._nodes and node.step is phase:
            self._call_back(node, phase.come_back, stage, units, future)
        self._fill_workers()
        if node in self._nodes and node.step is phase:
            self._tell_observers(node, phase)

    def _tick(self) -> None:
        """Tell of progress, nothing having come back for a while."""
        for node in list(self._nodes):
            if isinstance(node.step, Phase):
                self._tell_observers(node, node.step)

    def _tell_observers(self, node: _Node, phase: Phase) -> None:
        """Tell the work's own listener and observers how far `phase` is."""
        self._call_back(node, phase.tell)
        if node not in self._nodes or node.step is not phase:  # which its listener ended
            return
        self._audience.tell(lambda observer: observer.move(node.place, node.works, phase.progress))

    def _tell_end(self, node: _Node, result: object, error: BaseException | None) -> None:
        self._audience.tell(lambda observer: observer.end(node.place, node.works, result, error))

    def _tick_together(self) -> None:
        """Let works that wait for others look at them."""
        self._ticked = time.monotonic()
        for node in list(self._nodes):
            if isinstance(node.step, Together):
                self._call_back(node, node.step.on_tick)

    def _leave(self, error: BaseException) -> BaseException:
        """Let every open work end by `error`, the last one first; return what comes of that."""
        for node in reversed(self._nodes):
            try:
                with speaking(node.place):
                    node.steps.throw(error)
            except BaseException as raised:
                error = raised if node.parent is None else error
            self._tell_end(node, None, error)
        return error


def _pauses(step: Step | None) -> bool:
    return isinstance(step, Until) and step.is_pause


def _system_error(error: OSError) -> RunError:
    """Return `error` as one whose sentence is for the user."""
    described = RunError(describe_error(error))
    described.__cause__ = error
    return described
