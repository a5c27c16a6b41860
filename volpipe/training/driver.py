"""The driver of a training: from its recipe to its weights, on the workers of a site, resumed after an interrupt.

Not here: a worker's task (task), whether a failed attempt is followed by another (blockwise.phase), or starting workers
(apps.pool).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import volpipe
from volpipe.blockwise.failures import last_line, message_of
from volpipe.blockwise.interrupts import INTERRUPTS
from volpipe.blockwise.journal import Attempt, Journal, Record
from volpipe.blockwise.notes import DRIVER, WORKERS, StageNote
from volpipe.blockwise.phase import Phase, Progress
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.blockwise.stage import Schedule, Stage
from volpipe.blockwise.usage import Usage
from volpipe.blockwise.work import POOL, RELEASED, Steps, numbered
from volpipe.errors import NOTICE, RecipeError, RunError, RunStopped, SiteError, VolumeError
from volpipe.nets.files import file_kind
from volpipe.nets.load import describe
from volpipe.recipes.inference import NetChoice
from volpipe.recipes.toml import Section
from volpipe.recipes.training import LOSSES, STOP, WEIGHTS, TrainRecipe
from volpipe.reporting.page import REPORT
from volpipe.runs.held_work import Counts, HeldWork
from volpipe.runs.presence import Presence
from volpipe.runs.report import Ending
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.standing import Act, Asked, Standing, WorkState
from volpipe.tables import html_facts
from volpipe.training.data.volumes import check_data, identities
from volpipe.training.logs import last_step
from volpipe.training.pages import training_page
from volpipe.training.rank_info import ABANDONED, RankInfo
from volpipe.training.task import STAGE, TRAINING_FILE, RankResult, Training, newest_step
from volpipe.units import count
from volpipe.volumes.identity import Identity, check_same_inputs, input_changes, store_identities
from volpipe.volumes.storage.paths import shown
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

# files where no training has begun
BOOKKEEPING = ("lock", "parsl", "volpipe.log", "inputs.json", REPORT, DRIVER, WORKERS)

OnStep = Callable[[int, int], None]  # the number of steps taken, and of all
Task = Future[Record[RankResult]]  # of a rank, or of all of an attempt


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

    @property
    def ending(self) -> Ending:
        """How it ended."""
        stopped = f'a file "stop" ended it after {self.steps:,} steps'
        return Ending.of(None, stopped, is_complete=not self.was_stopped)

    def _repr_html_(self) -> str:
        facts: dict[str, object] = {"steps": f"{self.steps:,}"}
        if self.was_stopped:
            facts["stopped"] = 'by a file "stop"; there are no weights yet'
        else:
            facts["weights"] = shown(self.weights)
        if self.curve is not None:
            facts["curve"] = shown(self.curve)
        if self.run_command:
            facts["use them"] = self.run_command
        return html_facts(facts) + "".join(f"<p>{escape(line)}</p>" for line in self.summary)


def run_training(
    recipe: TrainRecipe,
    out: Path,
    start: Start,
    *,
    search_path: Path,
    fresh: bool = False,
    same_input: bool = False,
    on_step: OnStep = lambda step, steps: None,
) -> TrainingResult:
    """Train by `recipe` in the folder `out`, from its newest checkpoint on, and return the result.

    Args:
        out: the training's folder; created if missing.
        start: context manager of the workers, called with a folder for their files.
        search_path: folder that the recipe's relative names count from.
        fresh: delete the folder's contents, and start over.
        same_input: go on with volumes that were copied or touched, not changed.
        on_step: called now and then with the number of steps taken, and of all.

    Raises:
        RecipeError: the net cannot be trained, or the folder holds a training by another recipe.
        RunError: the folder is in use, or a volume has changed since the training was begun.
        VolpipeError: a volume is missing, or does not fit the recipe or the net.
        RunStopped: the training failed.
    """
    check_trainable(recipe.net)
    folder = RunFolder(out.absolute())
    if fresh or not is_complete(folder.path, recipe):  # a complete training needs no volume
        check_recipes([recipe], search_path)
    training = Training.begin(recipe, search_path)
    return training_work(folder, training, fresh=fresh, same_input=same_input, on_step=on_step).run(start)


def check_recipes(recipes: Iterable[TrainRecipe], search_path: Path) -> None:
    """Refuse recipes whose volumes do not fit them or their nets; each volume is sampled once for all.

    Raises:
        RecipeError: a net does not give what is learnt, or cannot be trained.
        VolpipeError: a volume is missing, or does not fit.
    """
    sampled: set[str] = set()
    for recipe in {each.model_dump_json(exclude={"train"}): each for each in recipes}.values():
        check_trainable(recipe.net)
        check_data(recipe, describe(recipe.net, str(search_path)), str(search_path), sampled)


def log_beginning(folder: RunFolder, command: str, recipe: Section) -> None:
    """Log which version begins which `command` in `folder`, and by what recipe."""
    log.info("volpipe %s %s begins in %s", volpipe.__version__, command, folder.path)
    log.info("recipe: %s", recipe.model_dump_json(exclude_defaults=True))


def is_complete(folder: Path, recipe: TrainRecipe) -> bool:
    """Return whether the training in `folder` has all steps of `recipe`."""
    return (folder / WEIGHTS).is_file() and newest_step(folder) >= recipe.train.steps


def claim_folder(folder: RunFolder, file: str, *, fresh: bool) -> None:
    """Clear the folder of one training or many if the user asked for a fresh start, and refuse one with other files.

    Args:
        file: by which it is known.

    Raises:
        RunError: with one of the files.
    """
    if fresh:
        folder.clear()
    if occupied := others_in(folder.path, file):
        raise occupied


def others_in(path: Path, file: str) -> RunError | None:
    """Return the refusal of a folder that holds other files than a training's, and no `file`, by which it is known."""
    others = [entry.name for entry in path.iterdir() if entry.name not in BOOKKEEPING]
    if not others or (path / file).is_file():
        return None
    return RunError(f"{path} holds {others[0]} and no {file}; choose another --out, or use --fresh to delete it")


def training_standing(folder: Path, training: Training) -> Standing:
    """Return how the training in `folder` stands to `training`; of its volumes nothing is compared."""
    if occupied := others_in(folder, TRAINING_FILE):
        return Standing(WorkState.OCCUPIED, occupied)
    try:
        old, step = Training.load(folder), newest_step(folder)
    except RunError as error:
        return Standing(WorkState.DAMAGED, error)
    if old is None:
        return Standing(WorkState.FRESH)
    if not step:
        return Standing(WorkState.UNSTARTED if old.recipe == training.recipe else WorkState.SUPERSEDED)
    try:
        old.check_same(training, step)
    except RecipeError as error:
        return Standing(WorkState.OUTDATED, error)
    return Standing(WorkState.COMPLETE if is_complete(folder, training.recipe) else WorkState.BEGUN)


def training_work(
    folder: RunFolder, training: Training, *, fresh: bool = False, same_input: bool = False,
    on_step: OnStep = lambda step, steps: None, known: dict[Volume, Identity] | None = None,
) -> HeldWork[TrainingResult]:  # fmt: skip
    """Return the work of `training`; arguments as of `run_training`.

    Args:
        known: identities of volumes, as of `identities`.
    """

    def counts() -> Counts:
        done, steps = last_step(folder.path), training.resumed(folder.path).recipe.train.steps
        return {"training_steps": {"done": done, "left": max(0, steps - done)}}

    return HeldWork(
        "training", folder, claim=partial(_claim_training, folder, training, known, fresh=fresh, same_input=same_input),
        held_steps=partial(_take_steps, folder, training, on_step), page=partial(training_page, folder),
        witnesses=lambda: [folder.path / LOSSES, folder.journal], counts=counts,
    )  # fmt: skip


def _claim_training(
    folder: RunFolder, training: Training, known: dict[Volume, Identity] | None, *, fresh: bool, same_input: bool
) -> None:
    """Refuse the folder of another recipe's training as well, or of other volumes; clear one without a checkpoint.

    Over other volumes it continues where the recipe says so; those of a search are compared, so none of them does.

    Raises:
        RecipeError: with the keys that differ, or the net whose code does.
        RunError: with what differs of a volume.
    """
    asked, standing = Asked.FRESH if fresh else Asked.RESUME, training_standing(folder.path, training)
    act = standing.act(asked)
    if act is Act.REFUSE:
        raise standing.refusal_of(asked)
    if act is Act.CLEAR:
        folder.clear()
        standing = Standing(WorkState.FRESH)
    recipe, file, was_complete = training.recipe, folder.inputs, standing.state is WorkState.COMPLETE
    is_begun = was_complete or standing.state is WorkState.BEGUN
    may_continue = is_begun and recipe.train.continue_steps and not training.is_trial
    if was_complete and not may_continue:
        return
    try:
        inputs = identities(recipe, training.search_path, known)
    except VolumeError:
        if was_complete:  # a volume may go once its training is done
            return
        raise
    if changed := input_changes(file, inputs, accept=same_input) if may_continue else {}:
        check_recipes([recipe], Path(training.search_path))
        (folder.path / WEIGHTS).unlink(missing_ok=True)  # first, for by them it is complete
        further = training.resumed(folder.path).continued(newest_step(folder.path), changed)
        steps, last = further.recipe.train.steps, further.rounds[-1]
        log.warning("the training continues to step %d, %s", steps, last, extra=NOTICE)
        further.store(folder.path)  # before the identities: after a kill between the two, this round is begun again
    elif is_begun and not was_complete:
        check_same_inputs(file, inputs, accept=same_input, work="training")
    if changed or not is_begun or same_input or not file.is_file():
        store_identities(file, inputs)


def check_continued(folder: Path, training: Training) -> None:
    """Refuse to continue in `folder` as `training`, where it is another one; see `Training.check_same`."""
    old, step = Training.load(folder), newest_step(folder)
    if old is not None and step:
        old.check_same(training, step)


def _take_steps(
    folder: RunFolder, training: Training, on_step: OnStep, session: str, presence: Presence
) -> Steps[TrainingResult]:
    """Take the steps that are left, and return the result."""
    path = folder.path
    training = training.resumed(path)
    recipe = training.recipe
    log_beginning(folder, "train", recipe)
    if is_complete(path, recipe):
        log.info("nothing to do: all %d steps are taken", newest_step(path))
        return TrainingResult(path / WEIGHTS, newest_step(path), was_complete=True)

    def show(step: int) -> None:
        on_step(step, recipe.train.steps)
        presence.tell({STAGE: StageNote(step, recipe.train.steps)})

    yield from trained(path, training, session, show)
    yield RELEASED
    stopped = not is_complete(path, recipe)
    log.info("%s after step %d", "stopped, as was asked," if stopped else "done", newest_step(path))
    return TrainingResult(path / WEIGHTS, newest_step(path), was_stopped=stopped)


def trained(folder: Path, training: Training, session: str, on_step: Callable[[int], None]) -> Steps[None]:
    """Take the steps that are left, unless a file "stop" ends them before.

    Args:
        session: content of the folder's lock, while this driver holds it.
        on_step: called now and then with the number of steps taken.

    Raises:
        SiteError: fewer workers than ranks.
        RunStopped: the attempts fail again and again after the same checkpoint; other trainings can go on.
    """
    pool: WorkerPool = yield POOL
    ranks = training.recipe.train.ranks
    training.store(folder)  # the report of a refusal names it
    check_slots(training.recipe, pool.slots)
    (folder / STOP).unlink(missing_ok=True)
    (folder / WEIGHTS).unlink(missing_ok=True)  # of fewer steps: they would pass for the last
    attempts = _Attempts(folder, ranks, pool, session)

    def show(progress: Progress) -> None:
        if INTERRUPTS.is_asked:  # what is under way ends at its next checkpoint, not in hours
            (folder / STOP).touch()
        on_step(last_step(folder))

    stage = Stage(
        STAGE,
        1,
        label="gpu",
        marked=False,
        most=1,
        num_workers=ranks,
        forgives=attempts.came_further,
        doing="training",
    )
    phase = Phase(Schedule(stage), attempts.submit, show=show, tolerated=0, on_record=attempts.note)
    try:
        yield phase
    except RunStopped as error:
        if not (stage.failed or error.detail):  # not by the training, but by the site
            raise
        reason = error.detail or phase.reasons[STAGE, 0]
        sentence = f"the training stops after step {newest_step(folder)}: {message_of(reason)}"
        raise RunStopped(sentence, error.detail, others_go_on=True) from error


@dataclass
class _Attempts:
    """The attempts of a session at a training, each a task for every rank; `reached`: before its last failure."""

    folder: Path
    ranks: int
    pool: WorkerPool
    session: str
    num_sent: int = 0
    sent: float = 0.0  # when the newest was, seconds since 1970
    reached: int = 0
    tasks: Sequence[Task] = ()

    def submit(self, stage: str, units: Sequence[int]) -> Task:
        """Send a task for each rank, and return what comes of all."""
        self.num_sent, self.sent = self.num_sent + 1, time.time()
        attempt, step = f"attempt {self.num_sent} of {self.session}", newest_step(self.folder)
        beginning = f"continues from the checkpoint after step {step}" if step else "begins at step 0"
        log.info("%s: attempt %d with train.ranks=%d %s", self.folder.name, self.num_sent, self.ranks, beginning)
        infos = [RankInfo(rank, self.ranks, attempt, self.pool.address) for rank in range(self.ranks)]
        self.tasks = [self.pool.submit("train", str(self.folder), self.session, info) for info in infos]
        return joined(self.tasks, partial(self._abandon, attempt))

    def came_further(self, unit: int) -> bool:
        """Return whether there is a newer checkpoint than when this was asked before."""
        before, self.reached = self.reached, newest_step(self.folder)
        return self.reached > before

    def note(self, units: Sequence[int], record: Record[RankResult]) -> None:
        """Note what ranks of the newest attempt took, in a journal, and log why they failed, a line each."""
        try:
            with Journal(RunFolder(self.folder).journal, (RankResult,)) as journal:
                for rank, task in enumerate(self.tasks):
                    journal.append(self._line_of(rank, task))
        except OSError as error:  # nothing rests on it but the report
            log.warning("%s: what its tasks took cannot be noted: %s", self.folder.name, error)
        for rank, task in enumerate(self.tasks):
            if _blame(task):
                reason = task.exception() or message_of(task.result().failed[0][1])
                log.warning("%s: rank %d of %d failed: %s", self.folder.name, rank, self.ranks, reason)

    def _line_of(self, rank: int, task: Task) -> Record[Any]:  # Any: a result, or an attempt
        """Return the record of a rank's newest attempt for the journal."""
        error = task.exception()
        if error is not None:  # its worker ended
            usage, reason = (
                Usage(started=self.sent, seconds=time.time() - self.sent),
                f"{type(error).__name__}: {error}",
            )
        elif task.result().done:
            return task.result()
        else:
            usage, reason = task.result().usage, last_line(task.result().failed[0][1])
        return Record(STAGE, (), result=Attempt((rank,), reason, self.num_sent), usage=usage)

    def _abandon(self, attempt: str) -> None:
        """Write the file that ends the running ranks of `attempt`, and keeps waiting ones from beginning."""
        try:
            (self.folder / ABANDONED).write_text(attempt, encoding="utf-8")
        except OSError as error:  # they notice by themselves, later
            log.warning("%s: its other ranks cannot learn that one failed: %s", self.folder.name, error)


def joined(tasks: Sequence[Task], on_failure: Callable[[], None]) -> Task:
    """Return a task with the outcome of all ranks: that of the rank which is to blame.

    `on_failure` is called as one fails while others run.
    """
    whole, lock, running = Task(), threading.Lock(), list(tasks)

    def end(task: Task) -> None:
        with lock:
            running.remove(task)
            if running and _blame(task):
                on_failure()
            is_last = not running
        if is_last:
            worst = max(tasks, key=_blame)
            error = worst.exception()
            if error is None:
                whole.set_result(numbered(STAGE, 0, worst.result()))
            else:
                whole.set_exception(error)

    for task in tasks:
        task.add_done_callback(end)
    return whole


def _blame(task: Task) -> int:
    """Return a rank's blame for the end of its attempt: 0 none, 1 another ended, 2 its worker ended, 3 or 4 failed."""
    if task.exception() is not None:
        return 2
    record = task.result()
    if not record.failed:
        return 0
    return 1 if record.result is not None and record.result.peer_lost else 3 + record.fatal


def check_trainable(choice: NetChoice) -> None:
    """Refuse an ensemble, and a net from a file: torch trains none of TorchScript, torch.export and ONNX.

    A package with code could be trained, but no run could load its new weights.

    Raises:
        RecipeError: with the kind of the file.
    """
    if choice.ensemble is not None:
        raise RecipeError("net.ensemble is of nets that are trained; train each by itself, and leave it out here")
    if (kind := file_kind(choice.name)) is not None:
        raise RecipeError(
            f"net {choice.name} is {kind.what}, which can be run but not trained; "
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
            f"train.ranks is {ranks}, and the site runs {count(most, 'task')} of gpu stages at once; all ranks must "
            f"run together: give train.ranks={most}, or a site with more workers"
        )
