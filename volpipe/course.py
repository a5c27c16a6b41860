"""A course: a training from its recipe to its weights, on the workers of a site; interrupted, it goes on where it was.

Not here: what a worker does (lesson), or how workers are started (apps.start).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import volpipe
from volpipe.driver import logging_to
from volpipe.errors import RecipeError, RunError, RunStopped, SiteError, TaskLost
from volpipe.folder import RunFolder
from volpipe.journal import Record
from volpipe.lesson import Training, train_task
from volpipe.nets import describe
from volpipe.presence import FILE as NOTE_FILE
from volpipe.presence import StageNote, present
from volpipe.programs import PACKAGE, is_program, kind_of
from volpipe.recipe import NetChoice, Section
from volpipe.run import told_in
from volpipe.seats import ABANDONED, PEER_LOST, RankInfo
from volpipe.training import CHECKPOINTS, STOP, WEIGHTS, TrainRecipe, check_same
from volpipe.training_data import check_data
from volpipe.training_logs import last_step

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
ATTEMPTS = 3  # without a new checkpoint between them
OURS = ("lock", "parsl", "volpipe.log", NOTE_FILE)  # in a folder in which nothing has begun


class Senders(Protocol):
    """Workers that take a function by its name.

    Attributes:
        slots: how many tasks of "cpu" and of "gpu" stages run at once.
        address: where the driver hears its workers, and so where ranks can hear each other.
    """

    @property
    def slots(self) -> Any: ...  # Any: a mapping, of a field or of a property

    @property
    def address(self) -> str: ...

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
        was_stopped: whether it was asked to stop before its last step, so that there are no weights yet.
    """

    weights: Path
    steps: int
    was_complete: bool = False
    was_stopped: bool = False


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
        RecipeError: the net cannot be trained, or the folder holds a training by another recipe.
        VolpipeError: the volumes are not there, or do not fit the recipe or the net.
        RunStopped: the training failed.
    """
    check_trainable(recipe.net)
    folder = RunFolder(out.absolute())
    if fresh or not is_complete(folder.path, recipe):  # else nothing is left that a volume is needed for
        check_data(recipe, describe(recipe.net, str(search_path)), str(search_path))
    training = Training(recipe=recipe, search_path=str(search_path))
    with folder.locked() as session:
        claim(folder, training, fresh=fresh)
        with logged(folder, "train", recipe), present(folder.path, session) as presence:
            if is_complete(folder.path, recipe):
                log.info("nothing to do: all %d steps are taken", newest(folder.path))
                return Learnt(folder.path / WEIGHTS, newest(folder.path), was_complete=True)
            with start(folder.parsl) as workers:
                course = Course(folder, training, workers, session)
                while not course.look():
                    wait(course.futures, TICK_SECONDS, FIRST_COMPLETED)
                    step = last_step(folder.path)
                    on_step(step)
                    presence.tell({"train": StageNote(step, recipe.train.steps)})
            stopped = not is_complete(folder.path, recipe)
            log.info("%s after step %d", "stopped, as was asked," if stopped else "done", newest(folder.path))
            return Learnt(folder.path / WEIGHTS, newest(folder.path), was_stopped=stopped)


@contextmanager
def logged(folder: RunFolder, command: str, recipe: Section) -> Iterator[None]:
    """Write what happens meanwhile to the log in `folder`: who begins what, what goes wrong, and how it ends."""
    with logging_to(folder.log):
        log.info("volpipe %s %s begins in %s", volpipe.__version__, command, folder.path)
        log.info("recipe: %s", recipe.model_dump_json(exclude_defaults=True))
        try:
            yield
        except KeyboardInterrupt:
            log.warning("interrupted; the same command again goes on")
            raise
        except RunStopped as error:
            if error.detail:
                log.error("what the worker said:\n%s", error.detail)
            raise


def newest(folder: Path) -> int:
    """Return after how many steps the newest checkpoint in `folder` was written; 0 where there is none."""
    return max((int(path.stem) for path in (folder / CHECKPOINTS).glob("[0-9]*.pt")), default=0)


def is_complete(folder: Path, recipe: TrainRecipe) -> bool:
    """Return whether the training in `folder` has taken all steps of `recipe`."""
    return (folder / WEIGHTS).is_file() and newest(folder) >= recipe.train.steps


def claim(folder: RunFolder, training: Training, *, fresh: bool = False) -> None:
    """Refuse a folder of another training, or clear it.

    Raises:
        RecipeError: the folder holds a training by another recipe.
        RunError: it holds something else.
    """
    if fresh:
        folder.clear()
    old = Training.load(folder.path)
    if old is None:
        others = [entry.name for entry in folder.path.iterdir() if entry.name not in OURS]
        if others:
            raise RunError(
                f"{folder.path} holds {others[0]} and no training; choose another --out, or use --fresh to delete it"
            )
        return
    check_same(old.recipe, training.recipe, newest(folder.path))


class TrainingFailed(RunStopped):
    """One training cannot go on; others may."""


class Course:
    """A training under way: its tasks, one for each rank, and how often workers of it were lost. Nothing here waits.

    Args:
        folder: of the training, claimed for `session`.
        training: what is done.
        workers: that do it.
        session: what the folder's lock says while this driver holds it.

    Raises:
        SiteError: fewer workers than ranks.
    """

    def __init__(self, folder: RunFolder, training: Training, workers: Senders, session: str) -> None:
        check_slots(training.recipe, workers.slots)
        self.folder, self.training, self.session = folder.path, training, session
        self._workers, self._sent, self._lost, self._reached = workers, 0, 0, newest(folder.path)
        (folder.path / STOP).unlink(missing_ok=True)
        (folder.path / WEIGHTS).unlink(missing_ok=True)  # of fewer steps: they would pass for those of all
        training.store(folder.path)
        self._send()

    @property
    def futures(self) -> list[Future[Record]]:
        """What the tasks under way will give."""
        return [future for future in self._futures if not future.done()]

    def look(self) -> bool:
        """Return whether the training ended well; where a worker was lost, go on from the newest checkpoint.

        Raises:
            TrainingFailed: it cannot go on.
        """
        if self.futures:
            if any(map(_is_bad, self._done())):  # the other ranks end, and those that still wait do not begin
                (self.folder / ABANDONED).write_text(self._attempt, encoding="utf-8")
            return False
        lost = next(filter(None, map(_loss, self._futures)), None)
        for rank, reason in enumerate(map(_reason, self._futures)):
            if reason:
                log.warning("%s: rank %d of %d failed: %s", self.folder.name, rank, len(self._futures), reason)
        failed = [record for record in map(_record, self._futures) if record is not None and record.failed]
        own = [record for record in failed if PEER_LOST not in record.result]
        if own:
            reason = own[0].failed[0][1]
            raise TrainingFailed(
                f"the training stops after step {newest(self.folder)}: {told_in(reason)}", reason
            )  # fmt: skip
        if lost is None and not failed:
            return True
        self._go_on(lost or RunError(told_in(failed[0].failed[0][1])))
        return False

    def _done(self) -> list[Future[Record]]:
        return [future for future in self._futures if future.done()]

    def _go_on(self, error: Exception) -> None:
        """Begin another attempt, unless too many workers were lost after the same checkpoint."""
        now = newest(self.folder)
        self._lost = 1 if now > self._reached else self._lost + 1
        if self._lost >= ATTEMPTS:
            raise TrainingFailed(
                f"{self._lost} workers were lost after step {now}, so the training stops: {error}"
            ) from error
        log.warning("%s: lost after step %d (%d of %d times): %s", self.folder.name, now, self._lost, ATTEMPTS, error)
        self._reached = now
        self._send()

    def _send(self) -> None:
        self._sent += 1
        self._attempt = f"attempt {self._sent} of {self.session}"
        ranks, step = self.training.recipe.train.ranks, newest(self.folder)
        place = f"goes on from the checkpoint after step {step}" if step else "begins at step 0"
        log.info("%s: attempt %d with train.ranks=%d %s", self.folder.name, self._sent, ranks, place)
        self._futures = [
            self._workers.send(
                "gpu",
                train_task,
                str(self.folder),
                self.session,
                RankInfo(rank, ranks, self._attempt, self._workers.address),
            )
            for rank in range(ranks)
        ]


def check_trainable(choice: NetChoice) -> None:
    """Refuse a net that comes as a file: torch trains none of TorchScript, torch.export and ONNX.

    Of a package with code the weights that it would come to could not be given to a run.

    Raises:
        RecipeError: with what the file is.
    """
    if is_program(choice.name):
        kind = kind_of(choice.name)
        what = kind if kind == PACKAGE else f"a file of {kind}"
        raise RecipeError(
            f"net {choice.name} is {what}, which can be run but not trained; "
            "give a net as code, such as net.name = file.py:function, and weights to start from as net.weights"
        )


def check_slots(recipe: TrainRecipe, slots: Mapping[str, int]) -> None:
    """Refuse a training whose ranks cannot all run at once.

    Raises:
        SiteError: with both numbers.
    """
    ranks, most = recipe.train.ranks, slots["gpu"]
    if ranks > most:
        raise SiteError(
            f"train.ranks is {ranks}, and the site runs {most} tasks of gpu stages at once; all ranks must run "
            f"together: give train.ranks={most}, or a site with more workers"
        )


def _loss(future: Future[Record]) -> TaskLost | None:
    """Return how the worker of an ended task was lost, None if it was not; raise what else kept it from answering."""
    error = future.exception()
    if error is None or isinstance(error, TaskLost):
        return error
    raise error


def _record(future: Future[Record]) -> Record | None:
    return None if future.exception() is not None else future.result()


def _reason(future: Future[Record]) -> str:
    """Return in a line why an ended task has not done its part, "" where it has."""
    record = _record(future)
    if record is None:
        return str(future.exception())
    return told_in(record.failed[0][1]) if record.failed else ""


def _is_bad(future: Future[Record]) -> bool:
    record = _record(future)
    return record is None or bool(record.failed)
