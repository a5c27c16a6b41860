"""The driver of a training: from its recipe to its weights, on the workers of a site, resumed after an interrupt.

Not here: a worker's task (task), or starting workers (apps.pool).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import volpipe
from volpipe.blockwise.failures import message_of
from volpipe.blockwise.journal import Record
from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.errors import RecipeError, RunError, RunStopped, SiteError, TaskLost
from volpipe.nets.files import PACKAGE, is_program, kind_of
from volpipe.nets.load import describe
from volpipe.recipes.inference import NetChoice
from volpipe.recipes.toml import Section
from volpipe.recipes.training import CHECKPOINTS, STOP, WEIGHTS, TrainRecipe, check_same
from volpipe.runs.presence import FILE as NOTE_FILE
from volpipe.runs.presence import StageNote, present
from volpipe.runs.run_folder import RunFolder
from volpipe.training.data.volumes import check_data
from volpipe.training.logs import last_step
from volpipe.training.rank_info import ABANDONED, RankInfo
from volpipe.training.task import RankResult, Training

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
ATTEMPTS = 3  # without a new checkpoint between them
BOOKKEEPING = ("lock", "parsl", "volpipe.log", NOTE_FILE)  # files of a folder in which no training has begun


OnStep = Callable[[int], None]


@dataclass(frozen=True)
class TrainingResult:
    """The end of a training's session.

    Attributes:
        weights: file of the averaged weights.
        steps: number of steps taken, over all sessions.
        was_complete: whether the training was complete before.
        was_stopped: whether a file "stop" ended it before its last step; there are no weights yet.
        summary: losses and scores, a line each; `volpipe.train` fills in this and what follows.
        curve: picture of losses and scores over the steps; None without a log.
        run_command: command that runs the weights.
    """

    weights: Path
    steps: int
    was_complete: bool = False
    was_stopped: bool = False
    summary: tuple[str, ...] = ()
    curve: Path | None = None
    run_command: str = ""


def run_training(
    recipe: TrainRecipe,
    out: Path,
    start: Start,
    *,
    search_path: Path,
    fresh: bool = False,
    on_step: OnStep = lambda step: None,
) -> TrainingResult:
    """Train by `recipe` in the folder `out`, from its newest checkpoint on, and return the result.

    Args:
        recipe: the training's recipe.
        out: the training's folder; created if missing.
        start: context manager of the workers, called with a folder for their files.
        search_path: folder that the recipe's relative names count from.
        fresh: delete the folder's contents, and start over.
        on_step: called now and then with the number of steps taken.

    Raises:
        RecipeError: the net cannot be trained, or the folder holds a training by another recipe.
        VolpipeError: a volume is missing, or does not fit the recipe or the net.
        RunStopped: the training failed.
    """
    check_trainable(recipe.net)
    folder = RunFolder(out.absolute())
    if fresh or not is_complete(folder.path, recipe):  # a complete training needs no volume
        check_data(recipe, describe(recipe.net, str(search_path)), str(search_path))
    training = Training(recipe=recipe, search_path=str(search_path))
    with folder.locked() as session:
        claim(folder, training, fresh=fresh)
        with log_session(folder, "train", recipe), present(folder.path, session) as presence:
            if is_complete(folder.path, recipe):
                log.info("nothing to do: all %d steps are taken", newest_step(folder.path))
                return TrainingResult(folder.path / WEIGHTS, newest_step(folder.path), was_complete=True)
            with start(folder.parsl) as workers:
                run = TrainingRun(folder, training, workers, session)
                while not run.poll():
                    wait(run.futures, TICK_SECONDS, FIRST_COMPLETED)
                    step = last_step(folder.path)
                    on_step(step)
                    presence.tell({"train": StageNote(step, recipe.train.steps)})
            stopped = not is_complete(folder.path, recipe)
            log.info("%s after step %d", "stopped, as was asked," if stopped else "done", newest_step(folder.path))
            return TrainingResult(folder.path / WEIGHTS, newest_step(folder.path), was_stopped=stopped)


@contextmanager
def log_session(folder: RunFolder, command: str, recipe: Section) -> Iterator[None]:
    """Log the context to the log in `folder`: version, recipe, interrupts and errors with their tracebacks."""
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


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in `folder`, 0 without any."""
    return max((int(path.stem) for path in (folder / CHECKPOINTS).glob("[0-9]*.pt")), default=0)


def is_complete(folder: Path, recipe: TrainRecipe) -> bool:
    """Return whether the training in `folder` has all steps of `recipe`."""
    return (folder / WEIGHTS).is_file() and newest_step(folder) >= recipe.train.steps


def claim(folder: RunFolder, training: Training, *, fresh: bool = False) -> None:
    """Refuse a folder of another training, or clear it.

    Raises:
        RecipeError: the folder holds a training by another recipe.
        RunError: the folder holds other files.
    """
    if fresh:
        folder.clear()
    old = Training.load(folder.path)
    if old is None:
        others = [entry.name for entry in folder.path.iterdir() if entry.name not in BOOKKEEPING]
        if others:
            raise RunError(
                f"{folder.path} holds {others[0]} and no training; choose another --out, or use --fresh to delete it"
            )
        return
    check_same(old.recipe, training.recipe, newest_step(folder.path))


class TrainingFailed(RunStopped):
    """One training cannot go on; others may."""


class TrainingRun:
    """The running tasks of a training, one for each rank, sent again after the loss of a worker. Nothing here waits.

    Args:
        folder: the training's folder, claimed for `session`.
        training: recipe and search path.
        workers: of the site.
        session: content of the folder's lock while this driver holds it.

    Raises:
        SiteError: fewer workers than ranks.
    """

    def __init__(self, folder: RunFolder, training: Training, workers: WorkerPool, session: str) -> None:
        check_slots(training.recipe, workers.slots)
        self.folder, self.training, self.session = folder.path, training, session
        self._workers, self._sent, self._lost, self._reached = workers, 0, 0, newest_step(folder.path)
        (folder.path / STOP).unlink(missing_ok=True)
        (folder.path / WEIGHTS).unlink(missing_ok=True)  # of fewer steps: they would pass for the last
        training.store(folder.path)
        self._send()

    @property
    def futures(self) -> list[Future[Record[RankResult]]]:
        """Futures of the running tasks."""
        return [future for future in self._futures if not future.done()]

    def poll(self) -> bool:
        """Return whether the training is done; after the loss of a worker, retry from the newest checkpoint.

        Raises:
            TrainingFailed: a rank failed by itself, or workers are lost again and again.
        """
        if self.futures:
            if any(map(_has_failed, self._done())):  # the other ranks end; waiting ones do not begin
                (self.folder / ABANDONED).write_text(self._attempt, encoding="utf-8")
            return False
        lost = next(filter(None, map(_lost_worker, self._futures)), None)
        for rank, reason in enumerate(map(_reason, self._futures)):
            if reason:
                log.warning("%s: rank %d of %d failed: %s", self.folder.name, rank, len(self._futures), reason)
        failed = [record for record in map(_record, self._futures) if record is not None and record.failed]
        own = [record for record in failed if record.result is None or not record.result.peer_lost]
        if own:
            reason = own[0].failed[0][1]
            raise TrainingFailed(
                f"the training stops after step {newest_step(self.folder)}: {message_of(reason)}", reason
            )  # fmt: skip
        if lost is None and not failed:
            return True
        self._retry(lost or RunError(message_of(failed[0].failed[0][1])))
        return False

    def _done(self) -> list[Future[Record[RankResult]]]:
        return [future for future in self._futures if future.done()]

    def _retry(self, error: Exception) -> None:
        """Begin another attempt, unless too many workers were lost after the same checkpoint."""
        step = newest_step(self.folder)
        self._lost = 1 if step > self._reached else self._lost + 1
        if self._lost >= ATTEMPTS:
            raise TrainingFailed(
                f"{self._lost} workers were lost after step {step}, so the training stops: {error}"
            ) from error
        log.warning("%s: lost after step %d (%d of %d times): %s", self.folder.name, step, self._lost, ATTEMPTS, error)
        self._reached = step
        self._send()

    def _send(self) -> None:
        self._sent += 1
        self._attempt = f"attempt {self._sent} of {self.session}"
        ranks, step = self.training.recipe.train.ranks, newest_step(self.folder)
        beginning = f"goes on from the checkpoint after step {step}" if step else "begins at step 0"
        log.info("%s: attempt %d with train.ranks=%d %s", self.folder.name, self._sent, ranks, beginning)
        self._futures = [
            self._workers.submit(
                "train", str(self.folder), self.session, RankInfo(rank, ranks, self._attempt, self._workers.address)
            )
            for rank in range(ranks)
        ]


def check_trainable(choice: NetChoice) -> None:
    """Refuse a net from a file: torch trains none of TorchScript, torch.export and ONNX.

    A package with code could be trained, but no run could load its new weights.

    Raises:
        RecipeError: with the kind of the file.
    """
    if is_program(choice.name):
        kind = kind_of(choice.name)
        kind = kind if kind == PACKAGE else f"a file of {kind}"
        raise RecipeError(
            f"net {choice.name} is {kind}, which can be run but not trained; "
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


def _lost_worker(future: Future[Record[RankResult]]) -> TaskLost | None:
    """Return the loss of an ended task's worker, None if it answered; raise any other error."""
    error = future.exception()
    if error is None or isinstance(error, TaskLost):
        return error
    raise error


def _record(future: Future[Record[RankResult]]) -> Record[RankResult] | None:
    return None if future.exception() is not None else future.result()


def _reason(future: Future[Record[RankResult]]) -> str:
    """Return why an ended task failed, in a line; "" where it succeeded."""
    record = _record(future)
    if record is None:
        return str(future.exception())
    return message_of(record.failed[0][1]) if record.failed else ""


def _has_failed(future: Future[Record[RankResult]]) -> bool:
    record = _record(future)
    return record is None or bool(record.failed)
