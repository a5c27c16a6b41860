"""A run of a net: measures, runs the net over the blocks, and closes the output.

Not here: the plan (prepare), printing (cli), the order of work (schedule), or the work (worker).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from volpipe.blockwise.journal import Kinds, read_records
from volpipe.blockwise.logs import warned
from volpipe.blockwise.pace import Prospect
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.stage import Schedule
from volpipe.blockwise.usage import peak_bytes
from volpipe.blockwise.work import Steps
from volpipe.errors import PlanError, RunError
from volpipe.estimation.estimate import Estimate
from volpipe.estimation.forecast import forecast_run
from volpipe.geometry.grid import Box, Grid
from volpipe.inference.intensity import ALL_FINITE, Affine, Nonfinite
from volpipe.inference.output import write_displays
from volpipe.inference.plan import Plan
from volpipe.inference.runner import load_runner, loaded_runner
from volpipe.inference.scratch import ScratchTensors
from volpipe.inference.selection import Selection
from volpipe.reporting.comparison import ShownOutput
from volpipe.reporting.page import Draft, Item, Sentence
from volpipe.reporting.slices import middle_of_done, voxel_at
from volpipe.runs.growth import follow, grown_from
from volpipe.runs.input_comparison import InputComparison, compare
from volpipe.runs.options import written
from volpipe.runs.output_work import OutputWork
from volpipe.runs.pages import findings_facts
from volpipe.runs.planned import Planned
from volpipe.runs.prepasses import known_normalisation, measured, rescanned, scan_stage, scanned
from volpipe.runs.provenance import changes, is_sealed, origin, read_origin, seal
from volpipe.runs.report import WorkReport, clipped_in, kept_in
from volpipe.runs.schedule import RunSchedule
from volpipe.runs.seams import SeamScore, Squares, profile_items, seam_squares, worst_scores
from volpipe.runs.stage_work import Listener
from volpipe.runs.unit_records import WorkSession, file_mark
from volpipe.runs.update import Update, take_selection, with_due
from volpipe.runs.update_records import Updated
from volpipe.runs.verify import Recomputed, Shard, recompute
from volpipe.runs.worker import RESULTS, Job, submitter
from volpipe.units import count, shape
from volpipe.volumes.storage import paths
from volpipe.volumes.volume import Volume, open_volume

__all__ = ["Listener", "Report", "RunWork"]

log = logging.getLogger(__name__)

CLIPPED = ("clipped_shards", "clipped_blocks")  # keys of a journal's lines that count clipped voxels


@dataclass(repr=False)
class Report(WorkReport):
    """How a run ended.

    Attributes:
        num_held: blocks that were to be left alone in this session.
        clipped: voxels of the output, of all sessions, that were clipped to its type, and their share of it.
        normalise: how grey levels were mapped; None where nothing was done.
    """

    makes_volume: ClassVar[bool] = True
    computing: ClassVar[str] = "infer"
    num_held: int = 0
    most_scratch_bytes: int = 0
    estimate: Estimate | None = None
    kept: Nonfinite = ALL_FINITE
    clipped: tuple[int, float] = (0, 0.0)
    normalise: Affine | None = None
    seams: list[SeamScore] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete: nothing is missing, and no block was left for another session."""
        return super().is_complete and not self.num_held

    @property
    def open_reason(self) -> str:
        """Why the output is not complete; "" if it is."""
        held = f"{count(self.num_held, 'block')} beyond --only left for another session" if self.num_held else ""
        return "; ".join(filter(None, (super().open_reason, held)))

    def facts(self) -> dict[str, object]:
        """Return how it ended in numbers, for people."""
        seams = ", ".join(f"{score.axis} {score.value:.2f}" for score in self.seams)
        grey = {"clipped voxels": f"{self.clipped[0]:,}"} if self.clipped[0] else {}
        return {"output": paths.shown(self.plan.out), **super().facts(), **({"seams": seams} if seams else {}), **grey}


class RunWork(OutputWork[Plan, Report]):
    """A run of a net over a volume; arguments as of `OutputWork`."""

    what: ClassVar[str] = "run"
    goes_on: ClassVar[str] = "volpipe run"
    prepasses: ClassVar[Collection[str]] = ("scan", "histogram", "measure")
    kinds: ClassVar[Kinds] = RESULTS
    _squares: Sequence[Sequence[Squares]] = ()  # of each array, read when the run was closed

    def volumes(self) -> dict[str, Volume]:
        """Return volume and mask."""
        mask = self.plan.mask
        return super().volumes() | ({} if mask is None else {"mask": open_volume(mask.path, mask.key)})

    @property
    def is_settled(self) -> bool:
        """Whether it is known what is selected; see `OutputWork`."""
        return self._selection() is not None and super().is_settled

    def marks(self) -> Sequence[object]:
        """Return the plan and what is selected; see `OutputWork`."""
        return self.plan.identity, file_mark(self.folder.selection_file)

    def facts(self) -> dict[str, str]:
        """Return net, windows and blocks."""
        plan, blend = self.plan, self.plan.recipe.windows.blend
        invariant = "" if plan.net.tile_invariant else "; not tile-invariant: overlaps are blended, not exact"
        return {
            "net": f"{plan.net.label}, {count(plan.net.num_parameters, 'parameter')}{invariant}",
            "windows": f"{shape(plan.window)} voxels, overlap {shape(plan.overlap)}, blend {blend}, {plan.mode}",
            "blocks": f"{plan.num_active:,} of {shape(plan.block)} windows",
            **findings_facts(plan),
        }

    def _selection(self) -> Selection | None:
        return self.folder.load_selection(self.plan)

    def schedule(self) -> Schedule:
        """Return the stages of the run, or that of the scan where it has still to tell what is selected."""
        selection = self._selection()
        return Schedule(scan_stage(self.plan, self.feed)) if selection is None else self._schedule(selection)

    def _schedule(self, selection: Selection) -> RunSchedule:
        keep = self.options.keep_tensors
        return RunSchedule(self.plan, selection, keep_tensors=keep, feed=self.feed, readers=self.readers)

    def shards(self) -> list[Shard]:
        """Return the shards that were written; none before it is known what is selected."""
        return [] if self._selection() is None else super().shards()

    def due(self, level: int) -> np.ndarray | None:
        """Return which shards hold something selected; see `OutputWork`."""
        return self._selected().shards(level)

    def recomputed(self, num_blocks: int, seed: int = 0) -> Iterator[Recomputed]:
        """Yield random blocks that went through the net again; see `OutputWork`."""
        normalise, runner = read_origin(self.plan.out).normalise, load_runner(self.plan)
        for array in self._selected().arrays:
            yield from recompute(array, normalise, runner, num_blocks, seed)

    def suspects(self) -> tuple[str, ...]:
        """Return what of net, input, packages and device is no longer as it was."""
        runner = loaded_runner()
        sentences = [] if runner is None else changes(read_origin(self.plan.out), runner)
        return tuple(sentences) or (
            "net, input, packages and device are as they were; the files changed after the run (see above), "
            "or the net gives other numbers each time",
        )

    def grids(self) -> dict[str, Grid]:
        """Return the blocks of the scan, or of the run."""
        selection = self._selection()
        if selection is None:
            return {"scan": self.plan.blocks}
        stages = ("factor", "infer") if self.plan.mode == "stored" else ("infer",)
        return dict.fromkeys(stages, self.plan.blocks)

    def voxel_pictures(self, schedule: Schedule) -> list[Draft]:
        """Return profiles across the faces of windows as well; see `OutputWork`."""
        return [*super().voxel_pictures(schedule), Draft("Seams", lambda: self._seams(schedule), "Seams")]

    def _seams(self, schedule: Schedule) -> Sequence[Item]:
        selection = self._selection()
        if selection is None or not schedule.is_complete:
            return [Sentence("Seams are looked for once the output is complete.")]
        samples = itertools.chain(self._squares, itertools.repeat(None))
        parts = zip(selection.arrays, samples, strict=False)
        return [item for part in parts for item in profile_items(*part)]

    def subject(self, array: Plan, schedule: Schedule) -> ShownOutput | None:
        plan = array
        if not isinstance(schedule, RunSchedule):
            return None
        middle = voxel_at(middle_of_done(plan.blocks, schedule.infer.done)).scaled(plan.net.shrink).start
        at = zip(middle, plan.roi_box.start, plan.roi_box.stop, strict=True)
        return ShownOutput(
            plan, plan.roi_box, tuple(min(max(m, a), b - 1) for m, a, b in at), plan.net.scale, plan.net.shrink,
            is_alike=plan.intensity == "same" and plan.num_channels == plan.source.num_channels == 1,
            is_missing=schedule.is_missing,
        )  # fmt: skip

    def _selected(self) -> Selection:
        selection = self._selection()
        if selection is None:
            raise RunError(
                f"the run in {self.folder.path} has not written anything yet; run `{self.goes_on}` to continue"
            )
        return selection

    @property
    def read_box(self) -> Box:
        """The part of the volume that windows see; see `OutputWork`."""
        return Selection(self.plan).seen

    def claim(self) -> None:
        super().claim()
        take_selection(self)
        self._agree_on_tensors()

    def _agree_on_tensors(self) -> None:
        """Refuse to keep tensors of a run that has begun to discard them: those that are gone would read as zeros."""
        if not self.options.keep_tensors:
            self.folder.discards.touch()
        elif self.folder.discards.exists():
            raise RunError(
                f"the run in {self.folder.path} was started without --keep-tensors and some tensors are gone; "
                "continue without it, or use --fresh to start over"
            )

    def check_update(self) -> None:
        is_measured = self.plan.grey_rule.needs_measuring
        if self.options.measure_again and not is_measured:
            why = (
                "nothing is measured in this run, the recipe or the type of the voxels says how grey levels are mapped"
            )
            raise RunError(f"{written('measure_again')}: {why}; leave it out")

    def grown(self) -> Plan | None:
        grown = grown_from(self.plan, self.folder, "roi")
        if grown is not None and grown.needs_scan:
            raise RunError(
                f"{grown.source.path} has grown, and mask or input.empty leave out parts of it, which --update cannot "
                "tell of a volume that grows: use --fresh to start over"
            )
        return grown

    def follow(self, old: Plan) -> Updated:
        return follow(self, RunWork(old, folder=self.folder))

    def compared(self) -> InputComparison:
        schedule = self.records.ledger().schedule
        assert isinstance(schedule, RunSchedule)
        return compare(self.records, self.plan.source.as_planned(), self._selected().input_box, schedule.infer.done)

    def update_steps(self, session: WorkSession) -> Steps[None]:
        selection = self._selection()
        if selection is None:
            session.journal.clear()  # of an input that may have been another: it is short, and goes again
            return
        yield from super().update_steps(session)
        if self._selected().fingerprint != selection.fingerprint and paths.exists(paths.locate(self.plan.out)):
            self.renew_metadata()

    def take_back_steps(self, session: WorkSession) -> Steps[Updated | None]:
        """Take back what rests on voxels of the volume, or on parts that are selected; see `OutputWork`."""
        selection = self._selected()
        chosen = (yield from rescanned(self, session)) if self.plan.needs_scan else selection
        return (yield from Update(self, selection, session, chosen).steps())

    def renew_metadata(self) -> None:
        """Write what the output says of its input anew, once its grey levels are known; see `OutputWork`."""
        normalise = known_normalisation(self)
        if normalise is not None:
            self._create_output(self._selected(), normalise)

    @property
    def needs_all(self) -> bool:
        """Whether it waits for all of its volume: the voxels of another grid are not those of shards."""
        return self.plan.source.resampling is not None

    def announce(self) -> None:
        """Say what is about to run, and note in the log what a user should know of the volume; see `OutputWork`."""
        super().announce()
        for note in self.plan.notes.volume:
            log.info("input %s: %s", self.plan.source.path, note)

    def phases(self, pool: WorkerPool, session: WorkSession) -> Steps[Report]:
        """Scan, measure, and run the net over the blocks that are left."""
        plan, folder, asked = self.plan, self.folder, time.time()
        job = Job(str(folder.path), plan.identity, session=session.name)
        selection = self._selection()
        if selection is None:
            selection = yield from scanned(self, session, pool, job)
        schedule = self.records.resumed()
        assert isinstance(schedule, RunSchedule)
        self._limit(schedule, selection)
        forecast = yield from forecast_run(
            selection, folder, pool, schedule.share_left, is_pending=self.feed is not None
        )
        if self.listener.on_estimate is not None:
            self.listener.on_estimate(forecast)
        forecast.check(schedule.share_left)
        forecast.warn_of_room(schedule.share_left)
        self._store_planned(forecast.estimate)
        job = dataclasses.replace(job, cells=selection.fingerprint)
        normalise = yield from measured(self, session, pool, job)
        self._create_output(selection, normalise)
        schedule.open_readers()
        _, due = with_due(selection, self, folder)
        job = dataclasses.replace(job.of(normalise), due=due)
        if not job.tensors.is_fitting:  # of a volume that has grown since, after a kill: nothing rests on them
            job.tensors.remove()
        job.tensors.create()
        job.tensors.forget_sums(schedule.infer.done)
        prospect = Prospect(forecast.estimate.seconds_per_unit, selection.num_windows, selection.num_voxels)
        phase = yield from session.finish(schedule, submitter(pool, job), prospect=prospect)
        first_tasks = filter(None, (forecast.first_task, session.first_task))
        return Report(
            plan,
            folder.path,
            schedule.missing(phase.reasons),
            session.totals,
            phase.progress.seconds,
            asked=asked,
            first_task=min(first_tasks, default=0.0),
            driver_peak_bytes=peak_bytes(),
            num_held=schedule.infer.num_held,
            most_scratch_bytes=phase.progress.most_scratch_bytes,
            estimate=forecast.estimate,
            normalise=normalise,
            updates=self.updates,
        )

    def _store_planned(self, estimate: Estimate) -> None:
        """Keep what is planned for the report, unless more was known when an earlier session began."""
        old = Planned.load(self.folder.path, self.plan.identity)
        if old is not None and (old.seconds is not None or estimate.seconds is None):
            return
        Planned(
            self.plan.identity,
            estimate.seconds,
            estimate.memory_bytes or None,
            estimate.read_bytes,
            estimate.written_bytes,
            estimate.output_bytes,
            estimate.output_files,
            estimate.scratch_bytes,
            estimate.is_measured,
            {stage.name: stage.seconds for stage in estimate.stages if stage.seconds},
        ).store(self.folder.path)

    def _limit(self, schedule: RunSchedule, selection: Selection) -> None:
        """Leave out of `schedule` what the box of the output that alone is asked for does not need."""
        only = self.options.only
        if only is None:
            return
        if not selection.touches(only):
            raise PlanError(
                f"nothing in --only {only} is selected: mask or empty space leave it out of the output "
                f"{Box.from_shape(selection.plan.out_shape)}; give another box, or leave --only out"
            )
        schedule.limit(only)

    def _create_output(self, selection: Selection, normalise: Affine) -> None:
        read = [identity.fingerprint for what, identity in self.inputs.items() if what.startswith("volume")]
        whole, *arrays = (origin(each, normalise, read) for each in (selection, *selection.arrays))
        self.files.write_metadata(whole, arrays)

    def closed(self, session: WorkSession, report: Report | None) -> Report:
        """Return the report, after scratch was deleted and the output was given what it says of how its run ended."""
        selection, was_complete = self._selected(), report is None
        report = report or Report(self.plan, self.folder.path)
        report.kept = kept_in(read_records(self.folder.journal, RESULTS, ["nonfinite"]))
        report.clipped = clipped_in(read_records(self.folder.journal, RESULTS, CLIPPED), selection)
        if report.is_complete:
            self.files.clean()
            if not self.options.keep_tensors:
                ScratchTensors(self.plan, self.folder.path).remove()
        if not (was_complete and is_sealed(self.folder)):
            if report.is_complete:
                if self.feed is not None:
                    self.know_input()
                    self.renew_metadata()
                with warned("no seam score"):
                    self._squares = list(map(seam_squares, selection.arrays))
                    report.seams = worst_scores(itertools.chain(*self._squares))
            with paths.reading_once():
                if report.is_complete:
                    with warned("no windows of channels for viewers"):
                        for array in self.plan.arrays:
                            write_displays(array)
                whole, only = report.is_complete, None if report.missing else self.options.only
                seal(self.folder, self.plan, RESULTS, _findings(report), is_complete=whole, only=only)
        return Report(self.plan, self.folder.path, was_complete=True) if was_complete else report


def _findings(report: Report) -> dict[str, object]:
    """Return what the output says of how its run ended."""
    return {
        "kept": dataclasses.asdict(report.kept),
        "clipped": {"voxels": report.clipped[0], "share": report.clipped[1]},
        "missing": len(report.missing),
        "seams": {score.axis: round(score.value, 4) for score in report.seams},
    }
