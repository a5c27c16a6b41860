"""The driver: opens the volume, makes the plan, starts the site, measures, runs the loop, and closes the run.

Not here: printing (cli), the order of work (schedule), or the work (worker). Notebooks call `execute` as the command
line does.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

import volpipe
from volpipe.errors import PlanError, RunError, RunStopped
from volpipe.folder import RunFolder
from volpipe.formats import files
from volpipe.formats.files import Location
from volpipe.formats.remote import Remote, check_writable, try_writing
from volpipe.grid import Box
from volpipe.journal import Journal, read_records
from volpipe.measure import Statistics, affine, join, needs_histogram, needs_measuring
from volpipe.nets import check_shapes, describe
from volpipe.ops import Affine
from volpipe.output import create_output, sweep
from volpipe.plan import Plan, make_plan
from volpipe.recipe import Recipe
from volpipe.run import Executors, Loop, Progress, Totals
from volpipe.schedule import Schedule, SingleStage, Stage
from volpipe.tensors import Tensors, delete
from volpipe.volume import open_volume
from volpipe.worker import PLAN_FILE, Job, peak_bytes

log = logging.getLogger(__name__)

PACKAGES = ("volpipe", "numpy", "parsl", "tensorstore", "torch", "z5py", "zarr")


@dataclass(frozen=True)
class Missing:
    """A unit that could not be done: which stage, which box of the output (z, y, x), and why."""

    stage: str
    unit: int
    box: Box
    reason: str


@dataclass
class Report:
    """How a run ended."""

    plan: Plan
    folder: Path
    missing: list[Missing] = field(default_factory=list)
    totals: dict[str, Totals] = field(default_factory=dict)
    seconds: float = 0.0
    first_task: float = 0.0  # seconds since 1970
    driver_peak_bytes: int = 0
    was_complete: bool = False


@dataclass(frozen=True)
class Listener:
    """Whom the driver tells: of the plan before anything runs, and of progress."""

    on_plan: Callable[[Plan, RunFolder], None] = lambda plan, folder: None
    on_progress: Callable[[Progress], None] = lambda progress: None


SILENT = Listener()


def prepare(location: str, recipe: Recipe, out: str | Path, search_path: Path) -> Plan:
    """Return the plan for `location`; everything that can be refused before the start is refused here."""
    volume = open_volume(location, recipe.input.key, recipe.input.level)
    net = describe(recipe.net, str(search_path))
    target = files.locate(out)
    plan = make_plan(recipe, volume, net, out=target, search_path=str(search_path))
    _check_apart(files.locate(volume.path), target)
    check_shapes(recipe.net, net, plan.window, str(search_path))
    return plan


def _check_apart(volume: Location, out: Location) -> None:
    """Raise unless the output can be written, and neither holds the other."""
    if isinstance(out, Remote):
        check_writable(out)
    source, target = _resolved(volume), _resolved(out)
    if target == source or target in source.parents:
        raise PlanError(f"the output {out} would overwrite the volume {volume}; choose another --out")
    if source in target.parents:
        raise PlanError(f"the output {out} would lie inside the volume {volume}; choose another --out")


def _resolved(place: Location) -> Location:
    return place.resolve() if isinstance(place, Path) else place


Start = Callable[[Path], AbstractContextManager[Executors]]


def execute(
    plan: Plan,
    start: Start,
    *,
    fresh: bool = False,
    keep_tensors: bool = False,
    listener: Listener = SILENT,
) -> Report:
    """Run `plan` until its output is whole or what is left cannot be done, and return how it ended.

    An interrupted run of the same plan is resumed from its journal.

    Args:
        plan: as `prepare` made it.
        start: starts the workers, and stops them on every way out; it is given a folder for their files.
        fresh: delete the output and the run that made it, and start over.
        keep_tensors: keep window tensors and block tensors.
        listener: whom to tell.

    Raises:
        RunError: another run's folder or output is in the way, or every task fails alike.
        SiteError: the site cannot be used.
    """
    folder = RunFolder.of_output(files.locate(plan.out))
    with folder.locked() as session:
        _claim(folder, plan, fresh)
        _agree_on_tensors(folder, keep_tensors)
        with _logging_to(folder.log), Journal(folder.journal) as journal:
            schedule = Schedule(plan, keep_tensors=keep_tensors)
            schedule.resume(_done(journal))
            if schedule.is_complete:
                _clean(plan, folder, keep_tensors)
                return Report(plan, folder.path, was_complete=True)
            listener.on_plan(plan, folder)
            with start(folder.parsl) as executors:
                folder.store_plan(plan)
                job = Job(str(folder.path), plan.identity, session=session)
                report = _work(plan, executors, job, journal, schedule, listener)
            if schedule.is_complete:
                _clean(plan, folder, keep_tensors)
            return report


def _clean(plan: Plan, folder: RunFolder, keep_tensors: bool) -> None:
    """Delete the scratch of a complete run, and what killed writers left in its output."""
    for path in sweep(files.locate(plan.out)):
        log.info("deleted %s, which a killed writer left", path)
    if not keep_tensors:
        Tensors(plan, folder.path).remove()


def _work(
    plan: Plan, executors: Executors, job: Job, journal: Journal, schedule: Schedule, listener: Listener
) -> Report:
    normalise = _normalisation(plan, executors, job, journal, listener)
    job = dataclasses.replace(job, shift=normalise.shift, scale=normalise.scale)
    create_output(plan, provenance(plan, normalise))
    job.tensors.create()
    loop = Loop(schedule, executors.submitter(job), executors.slots, journal, listener.on_progress)
    loop.run()
    missing = [Missing(stage, unit, box, loop.reasons[stage, unit]) for stage, unit, box in schedule.missing()]
    return Report(
        plan,
        Path(job.folder),
        missing,
        {name: t for name, t in loop.progress.totals.items() if t.tasks},
        loop.progress.seconds,
        loop.progress.first_task,
        peak_bytes(),
    )


@dataclass(frozen=True)
class Standing:
    """How far a run is, as its journal says."""

    plan: Plan
    folder: Path
    stages: list[Stage]
    totals: dict[str, Totals]
    is_complete: bool


def inspect_run(output: str | Path) -> Standing:
    """Return the standing of the run that writes `output`, or whose folder it is.

    Raises:
        RunError: no run was started there.
    """
    place = files.locate(output) if "://" in str(output) else Path(output)
    folder = RunFolder.of_output(place)
    if isinstance(place, Path) and (place / PLAN_FILE).is_file():
        folder = RunFolder(place)
    plan = folder.load_plan()
    if plan is None:
        raise RunError(f"no run of {output} was started: {folder.path} holds no plan")
    totals: dict[str, Totals] = {}
    schedule = Schedule(plan)
    for record in read_records(folder.journal):
        totals.setdefault(record.stage, Totals()).add(record)
        schedule.resume((record.stage, unit) for unit in record.done)
    return Standing(plan, folder.path, schedule.shown, totals, schedule.is_complete)


def provenance(plan: Plan, normalise: Affine) -> dict[str, object]:
    """Return what the output says of its origin."""
    return {
        "version": volpipe.__version__,
        "recipe": plan.recipe.model_dump(mode="json"),
        "net": plan.net.model_dump(mode="json"),
        "input": plan.source.model_dump(mode="json"),
        "windows": {"shape": plan.window, "overlap": plan.overlap, "block": plan.block},
        "normalise": {"shift": normalise.shift, "scale": normalise.scale},
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _claim(folder: RunFolder, plan: Plan, fresh: bool) -> None:
    """Make sure that folder and output are this plan's to write, emptied if the user asked for a fresh run."""
    out = files.locate(plan.out)
    if isinstance(out, Remote):
        try_writing(out)
    if fresh:
        if files.exists(out) and not folder.plan_file.is_file():
            raise RunError(
                f"{out} was not made by a run in {folder.path}; move it away yourself, or choose another --out"
            )
        delete(out)  # first: without its run's folder, nobody would know any more whose it is
        folder.clear()
        return
    folder.check_same(plan)
    started = folder.journal.is_file() and folder.plan_file.is_file()
    if files.exists(out) and not started:
        raise RunError(f"{out} exists and no run in {folder.path} made it; choose another --out")
    if started and not files.exists(out) and any(r.stage != "measure" for r in read_records(folder.journal)):
        raise RunError(f"the journal in {folder.path} speaks of an output that is gone; use --fresh to start over")


def _agree_on_tensors(folder: RunFolder, keep_tensors: bool) -> None:
    """Refuse to keep tensors of a run that has begun to discard them: those that are gone would read as zeros."""
    if not keep_tensors:
        folder.discards.touch()
    elif folder.discards.exists():
        raise RunError(
            f"the run in {folder.path} was started without --keep-tensors and some tensors are gone; "
            "go on without, or use --fresh to start over"
        )


def _done(journal: Journal) -> Iterator[tuple[str, int]]:
    return ((record.stage, unit) for record in journal.records() for unit in record.done)


def _normalisation(plan: Plan, executors: Executors, job: Job, journal: Journal, listener: Listener) -> Affine:
    """Return the volume's normalisation, measured by tasks where it is neither given nor known from the type."""
    choice, dtype = plan.recipe.normalise, np.dtype(plan.source.dtype)
    if not needs_measuring(choice, dtype):
        return affine(choice, dtype, None)
    found = _measured("measure", plan, executors, job, journal, listener)
    if needs_histogram(choice, dtype):
        ends = dataclasses.replace(job, bins=(found.low, found.high))
        found = _measured("histogram", plan, executors, ends, journal, listener)
    return affine(choice, dtype, found)


def _measured(
    name: str, plan: Plan, executors: Executors, job: Job, journal: Journal, listener: Listener
) -> Statistics:
    stage = Stage(name, len(plan.blocks))
    schedule = SingleStage(stage)
    schedule.resume(_done(journal))
    loop = Loop(schedule, executors.submitter(job), executors.slots, journal, listener.on_progress)
    loop.run()
    if stage.failed:
        unit = min(stage.failed)
        raise RunStopped(f"{name} of block {unit} failed: {loop.reasons[name, unit].splitlines()[-1]}")
    return join(Statistics.from_list(list(r.result)) for r in journal.records() if r.stage == name)


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Write volpipe's own log to the file at `path` meanwhile."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("volpipe")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    except Exception:
        log.exception("the run stopped")
        raise
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
