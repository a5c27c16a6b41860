"""A course: a training from its recipe to its weights, on the workers of a site; interrupted, it goes on where it was.

Not here: what a worker does (lesson), or how workers are started (apps.start).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRunning
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from volpipe.errors import RunError, RunStopped, TaskLost
from volpipe.folder import RunFolder
from volpipe.journal import Record
from volpipe.lesson import Training, learn
from volpipe.run import last_line
from volpipe.training import CHECKPOINTS, LOSSES, WEIGHTS, TrainRecipe, check_same

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
ATTEMPTS = 3  # without a new checkpoint between them


class Senders(Protocol):
    """Workers that take a function by its name."""

    def send(self, label: str, function: Callable[..., Any], *arguments: Any) -> Future[Any]:  # Any: the function's own
        """Return what `function` will give on a worker for "cpu" or "gpu" stages."""
        ...


Start = Callable[[Path], AbstractContextManager[Senders]]
OnStep = Callable[[int], None]


@dataclass(frozen=True)
class Learnt:
    """How a training ended.

    Attributes:
        weights: the file with the averaged weights.
        steps: how many were taken, over all sessions.
        was_complete: whether nothing was left to do.
    """

    weights: Path
    steps: int
    was_complete: bool = False


def follow(
    recipe: TrainRecipe,
    out: Path,
    start: Start,
    *,
    search_path: Path,
    fresh: bool = False,
    on_step: OnStep = lambda step: None,
) -> Learnt:
    """Train by `recipe` in the folder `out`, from its newest checkpoint on if it has one, and return how that ended.

    Args:
        recipe: what to do.
        out: the training's folder; made where it is missing.
        start: starts the workers, and stops them on every way out; it is given a folder for their files.
        search_path: folder that the recipe's relative names count from.
        fresh: delete what is in the folder, and start over.
        on_step: told now and then how many steps were taken.

    Raises:
        RecipeError: the folder holds a training by another recipe.
        RunStopped: the training failed.
    """
    folder = RunFolder(out.absolute())
    training = Training(recipe=recipe, search_path=str(search_path))
    with folder.locked() as session:
        _claim(folder, training, fresh)
        weights = folder.path / WEIGHTS
        if weights.is_file() and newest(folder.path) >= recipe.train.steps:
            return Learnt(weights, newest(folder.path), was_complete=True)
        training.store(folder.path)
        with start(folder.parsl) as workers:
            _attend(folder, workers, session, on_step)
        return Learnt(weights, newest(folder.path))


def newest(folder: Path) -> int:
    """Return after how many steps the newest checkpoint in `folder` was written; 0 where there is none."""
    return max((int(path.stem) for path in (folder / CHECKPOINTS).glob("[0-9]*.pt")), default=0)


def _claim(folder: RunFolder, training: Training, fresh: bool) -> None:
    """Refuse a folder of another training, or clear it."""
    if fresh:
        folder.clear()
    old = Training.load(folder.path)
    if old is None:
        others = [entry.name for entry in folder.path.iterdir() if entry.name not in ("lock", "parsl")]
        if others:
            raise RunError(
                f"{folder.path} holds {others[0]} and no training; choose another --out, or use --fresh to delete it"
            )
        return
    check_same(old.recipe, training.recipe, newest(folder.path))


def _attend(folder: RunFolder, workers: Senders, session: str, on_step: OnStep) -> None:
    """Send lessons until one ends well: a worker that is lost costs the steps since the last checkpoint."""
    reached, attempts = newest(folder.path), 0
    while True:
        try:
            record = _wait(workers.send("gpu", learn, str(folder.path), session), folder, on_step)
        except TaskLost as error:
            now = newest(folder.path)
            attempts = 1 if now > reached else attempts + 1
            if attempts >= ATTEMPTS:
                raise RunStopped(
                    f"{attempts} workers were lost after step {now}, so the training stops: {error}"
                ) from error
            log.warning("a worker was lost after step %d: %s", now, error)
            reached = now
            continue
        if record.failed:
            reason = record.failed[0][1]
            raise RunStopped(f"the training stops after step {newest(folder.path)}: {last_line(reason)}", reason)
        return


def _wait(future: Future[Record], folder: RunFolder, on_step: OnStep) -> Record:
    """Return what the lesson gives; meanwhile tell how far it is."""
    while True:
        try:
            return future.result(TICK_SECONDS)
        except StillRunning:
            if future.done():  # a task's own time-out
                raise
            on_step(last_step(folder.path / LOSSES))


def last_step(path: Path) -> int:
    """Return the last step that is logged at `path`, 0 where there is none."""
    import json

    if not path.is_file():
        return 0
    with path.open("rb") as lines:
        lines.seek(max(0, path.stat().st_size - 4096))
        whole = [line for line in lines.read().split(b"\n")[:-1] if line.startswith(b"{") and line.endswith(b"}")]
    return int(json.loads(whole[-1])["step"]) if whole else 0
