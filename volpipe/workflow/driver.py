"""The driver: opens the volume, makes the plan, starts the site, measures, runs the loop, and closes the run.

Not here: printing (cli), the order of work (schedule), or the work (worker). Notebooks call `execute` as the command
line does.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from volpipe.blockwise.failures import Missing, last_line
from volpipe.blockwise.heartbeat import listening
from volpipe.blockwise.journal import Journal, Totals, read_records
from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.loop import TOLERATED_SHARE, Loop, Progress
from volpipe.blockwise.pace import Prospect
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.blockwise.stage import SingleStage, Stage
from volpipe.blockwise.usage import peak_bytes
from volpipe.errors import PlanError, RunError, VolpipeError
from volpipe.estimation.calibrate import OnTry, unheard
from volpipe.estimation.estimate import Estimate
from volpipe.estimation.forecast import Forecast, forecast, forecast_calibrated, forecast_run
from volpipe.estimation.limits import check_access, check_apart
from volpipe.geometry.grid import Box
from volpipe.inference.intensity import ALL_FINITE, Affine, Nonfinite
from volpipe.inference.output import check_name, create_output, remove_leftovers, write_displays
from volpipe.inference.plan import Plan, check_thickness, make_plan
from volpipe.inference.scratch import Tensors
from volpipe.inference.selection import Selection
from volpipe.nets.facts import check_trained, with_normalisation
from volpipe.nets.load import check_geometry, check_shapes, describe
from volpipe.recipes.inference import Recipe
from volpipe.runs.prepasses import Passes, done_in, normalisation, scan_stage, scanned
from volpipe.runs.presence import Driver, Presence, StageNote, find_driver, present
from volpipe.runs.provenance import begin_session, is_sealed, origin, recognise, seal
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.schedule import Schedule
from volpipe.runs.seams import Score, seam_scores
from volpipe.runs.verify import check_present, load_run_record, shards_of
from volpipe.runs.worker import PLAN_FILE, RESULTS, Inferred, Job, Written, submitter
from volpipe.volumes.identity import Identity, store_identities
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.object_store import Remote, try_writing
from volpipe.volumes.storage.paths import Location, delete
from volpipe.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

NEEDS_FAILED = "needs a part that failed"


@dataclass
class Report:
    """How a run ended.

    Attributes:
        missing: what failed, and then what cannot be done without that.
        num_held: blocks that were to be left alone in this session.
        clipped: voxels of the output, of all sessions, that were clipped to its type, and their share of it.
        normalise: how grey levels were mapped; None where nothing was done.
        asked: when the site was asked for workers, seconds since 1970.
        first_task: when the first of them began its first task.
    """

    plan: Plan
    folder: Path
    missing: list[Missing] = field(default_factory=list)
    num_held: int = 0
    totals: dict[str, Totals] = field(default_factory=dict)
    seconds: float = 0.0
    asked: float = 0.0
    first_task: float = 0.0
    most_scratch_bytes: int = 0
    estimate: Estimate | None = None
    driver_peak_bytes: int = 0
    was_complete: bool = False
    kept: Nonfinite = ALL_FINITE
    clipped: tuple[int, float] = (0, 0.0)
    normalise: Affine | None = None
    seams: list[Score] = field(default_factory=list)


@dataclass(frozen=True)
class Listener:
    """Whom the driver tells: of the plan and of what it will take, before anything runs, and of progress."""

    on_plan: Callable[[Plan, RunFolder], None] = lambda plan, folder: None
    on_estimate: Callable[[Forecast], None] = lambda forecast: None
    on_progress: Callable[[Progress], None] = lambda progress: None


SILENT = Listener()


def prepare(location: str, recipe: Recipe, out: str | Location, search_path: Path) -> Plan:
    """Return the plan for `location`; everything that can be refused before the start is refused here."""
    volume = open_volume(location, recipe.input.key, recipe.input.level, view=recipe.input.view)
    plan = prepare_for(volume, recipe, out, search_path)
    check_access(paths.locate(volume.path), paths.locate(out))
    return plan


def prepare_for(volume: Volume, recipe: Recipe, out: str | Location, search_path: Path) -> Plan:
    """Return the plan for `volume`, which need not exist yet; all that can be refused without it is refused here."""
    check_name(out)
    net = describe(recipe.net, str(search_path))
    check_trained(recipe.net, net)
    recipe = with_normalisation(recipe, net)
    mask = _open_mask(recipe.input.mask, search_path)
    target = paths.locate(out)
    plan = make_plan(recipe, volume, net, out=target, search_path=str(search_path), mask=mask)
    check_thickness(volume, net)
    check_apart(target, volume, "volume")
    if mask is not None:
        check_apart(target, mask, "mask")
    check_shapes(recipe.net, net, plan.window, str(search_path))
    check_geometry(recipe.net, net, plan.window, str(search_path))
    return plan


def _open_mask(location: str | None, search_path: Path) -> Volume | None:
    if location is None:
        return None
    return open_volume(location if "://" in location else search_path / Path(location).expanduser())


def execute(
    plan: Plan,
    start: Start,
    *,
    fresh: bool = False,
    keep_tensors: bool = False,
    listener: Listener = SILENT,
    site: str = "",
    only: Box | None = None,
    tolerated: float = TOLERATED_SHARE,
    same_input: bool = False,
    is_outside: bool = True,
) -> Report:
    """Run `plan`, or resume it, until its output is whole or what is left cannot be done; return how it ended.

    Args:
        plan: as `prepare` made it.
        start: starts the workers, and stops them on every way out; it is given a folder for their files.
        fresh: delete the output and the run that made it, and start over.
        keep_tensors: keep window tensors and block tensors.
        listener: whom to tell.
        site: what the output says of where it was made.
        only: box of the output (z, y, x); what other shards need is left for another session.
        tolerated: share of units that may fail; see `Loop`.
        same_input: go on with an input whose files have other times or sizes, if the voxels that are compared agree.
        is_outside: whether others may change the volume: not that of a stage which an earlier one writes.

    Raises:
        RunError: another run's folder or output is in the way, or too much fails.
        SiteError: the site cannot be used.
    """
    folder = RunFolder.from_output(paths.locate(plan.out))
    with folder.locked() as session:
        _claim(folder, plan, fresh=fresh)
        inputs = recognise(folder, _inputs(plan), plan.out, same_input=same_input, is_outside=is_outside)
        _agree_on_tensors(folder, keep_tensors)
        with (
            logging_to(folder.log),
            present(folder.path, session) as presence,
            Journal(folder.journal, RESULTS) as journal,
        ):
            selection = folder.load_selection(plan)
            if selection is not None and _schedule(selection, journal, keep_tensors).is_complete:
                check_present(plan.out, list(shards_of(load_run_record(folder))))
                return _close(selection, folder, journal, keep_tensors)
            _announce(plan, folder, listener)
            asked = time.time()
            with start(folder.parsl) as pool, listening(folder.path, wanted=pool.is_here) as beats:
                _begin(folder, plan, inputs, site)
                job = Job(str(folder.path), plan.identity, session=session)
                stages = Passes(pool, job, _heard(listener, presence))
                selection = selection or scanned(stages, folder)
                schedule = _schedule(selection, journal, keep_tensors)
                _limit(schedule, only, selection)
                forecast = _forecast(selection, folder, pool, schedule, listener)
                prospect = Prospect(forecast.estimate.seconds_per_unit, selection.num_windows, beats)
                normalise = normalisation(stages, journal, selection)
                create_output(plan, origin(selection, normalise, inputs["volume"].fingerprint))
                report = _work(selection, stages, journal, schedule, normalise, prospect, tolerated=tolerated)
                report.estimate, report.asked = forecast.estimate, asked
                report.first_task = min(filter(None, (forecast.first_task, stages.first_task)), default=0.0)
            if schedule.is_complete:
                _clean(plan, folder, keep_tensors)
            return _sealed(report, selection, folder, is_complete=schedule.is_complete)


def _announce(plan: Plan, folder: RunFolder, listener: Listener) -> None:
    """Say what is about to run, and note in the log what a user should know of net and volume."""
    for caution in plan.warnings():
        log.warning("%s", caution)
    listener.on_plan(plan, folder)
    for note in plan.notes:
        log.info("input %s: %s", plan.source.path, note)


def _begin(folder: RunFolder, plan: Plan, inputs: Mapping[str, Identity], site: str) -> None:
    """Note what workers and later sessions need to know of this run."""
    folder.store_plan(plan)
    store_identities(folder.inputs, inputs)
    begin_session(folder, plan, site)


def _forecast(
    selection: Selection, folder: RunFolder, pool: WorkerPool, schedule: Schedule, listener: Listener
) -> Forecast:
    """Return the forecast of the work that is left, shown to the listener first; refuse more than there is."""
    forecast = forecast_run(selection, folder, pool, schedule.share_left)
    listener.on_estimate(forecast)
    forecast.check(schedule.share_left)
    return forecast


def _limit(schedule: Schedule, only: Box | None, selection: Selection) -> None:
    """Leave out of `schedule` what the box `only` of the output does not need, if there is one."""
    if only is None:
        return
    if not selection.touches(only):
        raise PlanError(
            f"nothing in --only {only} is wanted: mask or empty space leave it out of the output "
            f"{Box.from_shape(selection.plan.out_shape)}; give another box, or leave --only out"
        )
    schedule.limit(only)


def _sealed(report: Report, selection: Selection, folder: RunFolder, *, is_complete: bool) -> Report:
    """Return `report`, after the output was given what it says of how its run ended."""
    if is_complete:
        report.seams = _seams(selection)
        _write_displays(selection.plan)
    seal(folder, selection.plan, _findings(report))
    return report


def _inputs(plan: Plan) -> dict[str, Volume]:
    """Return what `plan` reads, by what it is."""
    inputs = {"volume": plan.source.volume()}
    return inputs if plan.mask is None else inputs | {"mask": open_volume(plan.mask.path, plan.mask.key)}


def _heard(listener: Listener, presence: Presence) -> Callable[[Progress], None]:
    """Return what reports progress: to the listener at once, to the run's folder now and then."""

    def hear(progress: Progress) -> None:
        listener.on_progress(progress)
        presence.tell(
            {
                stage.name: StageNote(stage.num_done, stage.num_units, progress.running[stage.name], len(stage.failed))
                for stage in progress.stages
            },
            progress.part,
            progress.seconds_left,
        )

    return hear


def _close(selection: Selection, folder: RunFolder, journal: Journal, keep_tensors: bool) -> Report:
    """Return the report of a run that was complete, closed now if its driver was killed before it could."""
    plan = selection.plan
    _clean(plan, folder, keep_tensors)
    if not is_sealed(folder):
        report = Report(plan, folder.path, kept=kept_in(journal), clipped=clipped_in(journal, selection))
        _sealed(report, selection, folder, is_complete=True)
    return Report(plan, folder.path, was_complete=True)


def preview(plan: Plan, start: Start | None, on_try: OnTry = unheard) -> Forecast:
    """Return what `plan` will take on the workers that `start` starts; without, no block is tried.

    `on_try` is called now and then with the seconds for which blocks have been tried, and the most there may be.

    Raises:
        PlanError: a worker cannot hold a block.
        RunStopped: a block cannot be computed.
    """
    folder = RunFolder.from_output(paths.locate(plan.out))
    if start is None:
        return forecast(plan, folder)
    with folder.locked(), logging_to(folder.log), start(folder.parsl) as pool:
        return forecast_calibrated(plan, folder, pool, on_try=on_try)


def _schedule(selection: Selection, journal: Journal, keep_tensors: bool) -> Schedule:
    """Return what is to be done, less what the journal has."""
    schedule = Schedule(selection.plan, selection, keep_tensors=keep_tensors)
    schedule.resume(done_in(journal))
    return schedule


def _clean(plan: Plan, folder: RunFolder, keep_tensors: bool) -> None:
    """Delete the scratch of a complete run, and what killed writers left in its output."""
    for path in remove_leftovers(paths.locate(plan.out)):
        log.info("deleted %s, which a killed writer left", path)
    if not keep_tensors:
        Tensors(plan, folder.path).remove()


def _work(
    selection: Selection,
    passes: Passes,
    journal: Journal,
    schedule: Schedule,
    normalise: Affine,
    prospect: Prospect,
    *,
    tolerated: float,
) -> Report:
    plan, pool = selection.plan, passes.pool
    job = dataclasses.replace(passes.job, shift=normalise.shift, scale=normalise.scale, cells=selection.fingerprint)
    job.tensors.create()
    submit = submitter(pool, job)
    loop = Loop(
        schedule, submit, pool.slots, journal, passes.show,
        tolerated=tolerated, reported=passes.reported, prospect=prospect,
    )  # fmt: skip
    loop.run()
    passes.first_task = passes.first_task or loop.progress.first_task
    return Report(
        plan,
        Path(job.folder),
        _missing(schedule, loop.reasons),
        schedule.infer.num_held,
        {name: t for name, t in (passes.totals | loop.progress.totals).items() if t.tasks},
        loop.progress.seconds,
        most_scratch_bytes=loop.progress.most_scratch_bytes,
        driver_peak_bytes=peak_bytes(),
        kept=kept_in(journal),
        clipped=clipped_in(journal, selection),
        normalise=normalise,
    )


def _seams(selection: Selection) -> list[Score]:
    """Return the seam scores of a complete output; none where it cannot be read, which is no reason to fail."""
    try:
        return seam_scores(selection)
    except VolpipeError as error:
        log.warning("no seam score: %s", error)
        return []


def _write_displays(plan: Plan) -> None:
    """Note how viewers may show a complete output; one that cannot be read is left as it is, without an error."""
    try:
        write_displays(plan)
    except VolpipeError as error:
        log.warning("no windows of channels for viewers: %s", error)


def _findings(report: Report) -> dict[str, object]:
    """Return what the output says of how its run ended."""
    return {
        "kept": dataclasses.asdict(report.kept),
        "clipped": {"voxels": report.clipped[0], "share": report.clipped[1]},
        "missing": len(report.missing),
        "seams": {score.axis: round(score.value, 4) for score in report.seams},
    }


def kept_in(journal: Journal) -> Nonfinite:
    """Return how many voxels of all sessions are not finite, and were kept."""
    entries = (entry for result in journal.results(Inferred) for entry in result.nonfinite)
    return sum((Nonfinite(nan, infinite) for _, nan, infinite in entries), ALL_FINITE)


def clipped_in(journal: Journal, selection: Selection) -> tuple[int, float]:
    """Return how many voxels of all sessions were clipped to the output's type, and their share of what is wanted."""
    num = sum(result.clipped for result in journal.results(Written))
    return num, num / (selection.num_voxels * selection.plan.net.out_channels)


def _missing(schedule: Schedule, reasons: Mapping[tuple[str, int], str]) -> list[Missing]:
    """Return what failed in `schedule`, each with the last line of its reason, and what waits for it in vain."""
    failed = [Missing(stage, unit, box, last_line(reasons[stage, unit])) for stage, unit, box in schedule.missing()]
    return failed + [Missing(stage, unit, box, NEEDS_FAILED) for stage, unit, box in schedule.kept_back()]


@dataclass(frozen=True)
class RunStatus:
    """How far a run is, as its journal says, who works on it, and what is missing because it failed when last tried."""

    plan: Plan
    folder: Path
    stages: list[Stage]
    totals: dict[str, Totals]
    is_complete: bool
    driver: Driver
    missing: list[Missing] = field(default_factory=list)


def inspect_run(output: str | Path) -> RunStatus:
    """Return the status of the run that writes `output`, or whose folder it is.

    Raises:
        RunError: no run was started there.
    """
    place = paths.locate(output) if "://" in str(output) else Path(output)
    folder = RunFolder.from_output(place)
    if isinstance(place, Path) and (place / PLAN_FILE).is_file():
        folder = RunFolder(place)
    plan = folder.load_plan()
    if plan is None:
        raise RunError(f"no run of {output} was started: {folder.path} holds no plan")
    totals: dict[str, Totals] = {}
    reasons: dict[tuple[str, int], str] = {}
    driver = find_driver(folder.path, folder.journal)
    selection = folder.load_selection(plan)
    schedule = SingleStage(scan_stage(plan)) if selection is None else Schedule(plan, selection)
    for record in read_records(folder.scan if selection is None else folder.journal, RESULTS):
        if record.done:
            totals.setdefault(record.stage, Totals()).add(record)
        schedule.resume(record.units)
        reasons |= {(record.stage, unit): reason for unit, reason in record.failed}
    if isinstance(schedule, SingleStage):
        return RunStatus(plan, folder.path, schedule.shown, totals, is_complete=False, driver=driver)
    for name, unit in reasons:
        stage = schedule.by_name.get(name)
        if stage is not None and not stage.done[unit]:
            stage.failed.add(unit)
    missing = _missing(schedule, reasons)
    return RunStatus(plan, folder.path, schedule.shown, totals, schedule.is_complete, driver, missing)


def delete_output(out: Location, folder: RunFolder, mark: str = PLAN_FILE) -> None:
    """Delete the output at `out` and the run that made it, if there is one.

    Args:
        out: the output.
        folder: of its run.
        mark: the file in that by which the run is known.

    Raises:
        RunError: somebody else made it, or a driver is at work on it.
    """
    if paths.exists(out) or folder.path.is_dir():
        with folder.locked():
            _delete_output(folder, out, mark)


def _delete_output(folder: RunFolder, out: Location, mark: str = PLAN_FILE) -> None:
    if paths.exists(out) and not (folder.path / mark).is_file():
        raise RunError(f"{out} was not made by a run in {folder.path}; move it away yourself, or choose another --out")
    if isinstance(out, Remote):
        try_writing(out)
    delete(out)  # first: without its run's folder, nobody would know any more whose it is
    folder.clear()


def _claim(folder: RunFolder, plan: Plan, *, fresh: bool) -> None:
    """Make sure that folder and output are this plan's to write, emptied if the user asked for a fresh run."""
    out = paths.locate(plan.out)
    if fresh:
        _delete_output(folder, out)
    if isinstance(out, Remote):
        try_writing(out)
    folder.check_same(plan)
    started = folder.journal.is_file() and folder.plan_file.is_file()
    if paths.exists(out) and not started:
        raise RunError(f"{out} exists and no run in {folder.path} made it; choose another --out")
    if started and not paths.exists(out) and any(r.stage != "measure" for r in read_records(folder.journal, RESULTS)):
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
