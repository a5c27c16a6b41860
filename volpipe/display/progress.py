"""Progress of work: bars on a terminal and below a notebook's cell, a plain line now and then elsewhere.

Not here: progress itself (blockwise.phase), or the bars (console).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from volpipe.display.cell import Cell
from volpipe.display.console import PLAIN_LINE_SECONDS, bars, err
from volpipe.units import count, duration, voxel_rate

if TYPE_CHECKING:  # the command line answers to Tab, which nobody waits a second for
    from volpipe.blockwise.phase import Progress, Show

OF_BLOCKS = ("scan", "measure", "histogram", "factor", "infer", "pieces", "edges", "paint", "evaluate", "compare")
OTHERS = {"train": "step", "sweep": "training", "tune": "training"}  # what their units are


@contextmanager
def showing(cell: Cell | None = None) -> Iterator[Callable[..., Show]]:
    """Give a function that returns a listener of progress, which is shown in `cell`, or on standard error.

    It takes the name of the work, "" where there is no other, and the output voxels of its average block, 0 of work
    without a net.
    """
    with bars(cell) as shown:

        def listener(name: str = "", voxels_per_block: float = 0.0) -> Show:
            last, before = time.perf_counter(), f"{name}: " if name else ""

            def on_pipe(progress: Progress) -> None:
                nonlocal last
                if time.perf_counter() - last >= PLAIN_LINE_SECONDS:
                    last = time.perf_counter()
                    err.print(before + progress_line(progress, voxels_per_block))

            def on_bars(progress: Progress) -> None:
                left, is_first = progress.seconds_left, True
                for stage, done, whole, noun in bar_counts(progress):
                    own = left if is_first and done < whole else None
                    shown.show_with(before + stage, done, whole, noun, seconds_left=own, words=progress.words)
                    is_first = is_first and done >= whole

            return on_bars if cell is not None or err.is_terminal else on_pipe

        yield listener


def progress_line(progress: Progress, voxels_per_block: float) -> str:
    """Return how far a run is as one plain line; 0 voxels per block leave out how fast its net goes."""
    parts = [
        f"{stage.name} {stage.num_done}/{stage.num_units}" + (f" ({len(stage.failed)} failed)" if stage.failed else "")
        for stage in progress.stages
        if stage.num_done or progress.running[stage.name] or stage.failed
    ]
    is_of_tasks = any(stage.name not in OTHERS for stage in progress.stages)
    running = f"{count(sum(progress.running.values()), 'task')} in flight" if is_of_tasks else progress.words
    part = "" if progress.part is None or not progress.parts else f", {progress.part:.0%} of the windows"
    done = f"{', '.join(parts) or 'starting'}{part}"
    speed, left, took = 0.0, progress.seconds_left, progress.totals.get("infer")
    if took is not None and progress.first_task:
        num_blocks = took.units + progress.parts.get("infer", 0.0)  # of this session
        speed = num_blocks * voxels_per_block / max(1e-6, time.time() - progress.first_task)
    rest = (f", {voxel_rate(speed)}" if speed > 0 else "") + (f", {duration(left)} left" if left is not None else "")
    return f"{duration(progress.seconds)}: {done}{running and f'; {running}'}{rest}"


def bar_counts(progress: Progress) -> Iterator[tuple[str, float, float, str]]:
    """Yield of each stage its name, how much is done and how much there is, and of what; the net's in windows."""
    for stage in progress.stages:
        done, whole = stage.num_done + progress.parts.get(stage.name, 0.0), float(stage.num_units)
        if stage.name == "infer" and progress.num_windows and whole:
            scale = progress.num_windows / whole
            yield stage.name, done * scale, whole * scale, "window"
        else:
            yield stage.name, done, whole, "block" if stage.name in OF_BLOCKS else OTHERS.get(stage.name, "shard")
