"""The kinds of stages that look at volumes and write what they find into a file: scores, comparisons and measurements.

Not here: their work (driver), or their plans by themselves (evaluate, compare, measurements). All are cheap: made anew
rather than refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.stage import Schedule
from volpipe.blockwise.work import Steps
from volpipe.errors import PlanError
from volpipe.evaluation.compare import ComparisonPlan, plan_comparison
from volpipe.evaluation.driver import (
    BlockWork,
    calibrate_evaluation,
    comparison_work,
    evaluation_work,
    measurement_work,
)
from volpipe.evaluation.evaluate import check_part, evaluation_of, plan_evaluation
from volpipe.evaluation.evaluation import Evaluation
from volpipe.evaluation.keys import Measuring, OutputComparison, Scoring
from volpipe.evaluation.measurements import Measurement, plan_measurement
from volpipe.evaluation.results import evaluation_parts, stored_sheets
from volpipe.evaluation.subject import RESULTS
from volpipe.recipes.toml import Section
from volpipe.recipes.workflow import FlowStage, Link, Tree
from volpipe.reporting.page import Item, Page
from volpipe.runs.options import PLAIN, RunOptions
from volpipe.runs.pages import Taken, page_of
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.stage_work import SILENT, Listener
from volpipe.stages.entry import Entry
from volpipe.stages.kind import Planning, StageCost, StagePlan, Truth
from volpipe.stages.status import Looker, Status, noted_stages
from volpipe.volumes.identity import fingerprint
from volpipe.volumes.places import Paired, check_same_place
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import read_json
from volpipe.volumes.volume import Volume, open_volume


class ScoreStage(StagePlan):
    """An evaluation, which is cheap: made anew rather than refused."""

    kind = "evaluate"
    about = "scores."
    keys: ClassVar[type[Section]] = Scoring
    has_recipe = False
    makes = "scores"
    shown = "evaluation"
    mark: ClassVar[str] = Evaluation.mark  # by which a folder is known that is no stage's; "" where none is looked at
    suffix: ClassVar[str] = ".json"  # of its output
    make: ClassVar[Callable[..., BlockWork[Any]]] = staticmethod(evaluation_work)
    plan: Any  # an Evaluation, a comparison or a Measurement

    @classmethod
    def planned(cls, stage: FlowStage, among: Planning) -> ScoreStage:
        made = among.given(stage)
        plan, out = cls.plan_of(stage, among, made), among.folder / f"{stage.name}{cls.suffix}"
        return cls(stage.name, stage.reads, made, out, plan, stage.array, stage.beside)

    @classmethod
    def plan_of(cls, stage: FlowStage, among: Planning, made: Volume) -> Any:
        """Return the plan of `stage`, which reads the volume `made`."""
        choice: Scoring = stage.choice
        feed, given = among.feed(stage), None
        if choice.given is not None:
            given = open_volume(choice.given)
        elif feed is not None and evaluation_of(choice.kind).interpolates:
            given = feed.interpolated
        truth = _truth(stage, choice, among)
        evaluation = plan_evaluation(
            made, truth.labels, given, roi=truth.box, margin=choice.margin, kind=choice.kind,
            data_range=choice.data_range, ignore=truth.ignore, skeletons=choice.skeletons, annotated=choice.annotated,
            any_place=choice.any_place,
        )  # fmt: skip
        if truth.left_out and not choice.annotated:
            evaluation = evaluation.leaving_out(truth.left_out, truth.first)
        evaluation = replace(evaluation, notes=(*evaluation.notes, *filter(None, [truth.note])))
        while feed is not None:  # no output need exist yet that says of what part it is
            if feed.roi is not None:
                check_part(evaluation.output, feed.roi, evaluation.reference)
            feed = among.earlier.get(feed.reads)
        return evaluation

    @classmethod
    def links(cls, tree: Tree) -> Iterator[Link]:
        """Yield the training whose labels are compared with."""
        if isinstance(tree.get("reference"), str):
            yield Link("reference", tree["reference"], "weights")

    @classmethod
    def status(cls, folder: RunFolder, looker: Looker) -> Status | None:
        """Return how far the scores are that no flow makes; their folder goes when all is scored."""
        if not cls.mark or not (folder.path / cls.mark).is_file():
            return None
        driver = looker.driver(folder.path, folder.journal)
        return Status(cls.shown, "", False, driver, noted_stages(driver), folder=folder.path, goes=True)

    @classmethod
    def page(cls, folder: RunFolder) -> Page | None:
        described = read_json(folder.path / cls.mark) if cls.mark else None
        if described is None:
            return None
        scores = folder.path.with_name(folder.path.name.removesuffix(".run"))
        tree = read_json(scores) if scores.is_file() else None
        taken, is_complete = Taken.read(folder, Schedule, RESULTS), bool((tree or {}).get("scores"))
        return page_of(folder, taken, evaluation_parts(described, tree), is_complete=is_complete)

    @classmethod
    def scores(cls, entry: Entry) -> list[Item]:
        tree = read_json(paths.locate(entry.out)) if cls.suffix == ".json" else None
        return [*stored_sheets(tree)]

    def work(self, options: RunOptions = PLAIN, listener: Listener = SILENT) -> BlockWork[Any]:
        return self.make(self.plan, self.folder, options, listener, to=self.out)

    def warnings(self) -> list[str]:
        """Return what a user should know of the volumes."""
        return list(self.plan.notes)

    def others(self) -> Iterator[tuple[Volume, str]]:
        """Yield what the volume is compared with."""
        inputs = self.plan.inputs()
        yield from ((inputs[name], name) for name in self.plan.outside if name in inputs)

    def cost_steps(
        self, earlier: Sequence[StageCost], pool: WorkerPool | None, trials: Path | None
    ) -> Steps[StageCost]:
        """Return the time of the evaluation, where blocks are tried."""
        if pool is None or trials is None:
            return StageCost(self)
        missing = {str(cost.stage.out) for cost in earlier if not cost.stage.is_complete}
        return StageCost(self, times=(yield from calibrate_evaluation(self.plan, missing, pool, trials)))


class CompareStage(ScoreStage):
    """A comparison of two outputs: made anew rather than refused, as an evaluation."""

    kind = "compare"
    about = "how much two outputs differ."
    keys = OutputComparison
    mark = ""
    make = staticmethod(comparison_work)
    plan: ComparisonPlan

    @classmethod
    def links(cls, tree: Tree) -> Iterator[Link]:
        return _other_link(tree)

    @classmethod
    def plan_of(cls, stage: FlowStage, among: Planning, made: Volume) -> ComparisonPlan:
        choice: OutputComparison = stage.choice
        other, is_outside = among.volume(choice.other)
        comparison = plan_comparison(
            made, other, labels=choice.labels, roi=choice.roi, data_range=choice.data_range, any_input=True,
            is_planned=True,
        )  # fmt: skip
        advice, notes = "set any_place = true to compare them voxel by voxel all the same", comparison.notes
        if not choice.any_place:
            notes += tuple(check_same_place(Paired("A", made), Paired("B", other), advice))
        stamp = fingerprint(other) if is_outside else ""
        return replace(comparison, fingerprint=stamp, notes=notes)

    def others(self) -> Iterator[tuple[Volume, str]]:
        if self.plan.fingerprint:
            yield self.plan.b, "other"


class MeasureStage(ScoreStage):
    """A table of measurements: made anew rather than refused, as an evaluation."""

    kind = "measure"
    about = "a table, by a Python function over blocks."
    keys = Measuring
    mark = ""
    suffix = ".csv"
    make = staticmethod(measurement_work)
    plan: Measurement

    @classmethod
    def links(cls, tree: Tree) -> Iterator[Link]:
        return _other_link(tree)

    @classmethod
    def plan_of(cls, stage: FlowStage, among: Planning, made: Volume) -> Measurement:
        choice: Measuring = stage.choice
        other, is_outside = (None, False) if choice.other is None else among.volume(choice.other)
        return plan_measurement(made, other, choice, str(among.search_path.absolute()), is_outside=is_outside)

    def reading(self, given: Volume) -> MeasureStage:
        return replace(self, given=given, plan=self.plan.over(given))


def _other_link(tree: Tree) -> Iterator[Link]:
    """Yield the second volume."""
    if "other" in tree:
        yield Link("other", str(tree["other"]))


def _truth(stage: FlowStage, choice: Scoring, among: Planning) -> Truth:
    """Return what an evaluation compares with: a volume, or what a training learned from and held out."""
    if choice.reference is None:
        return Truth(None, choice.roi, choice.ignore)
    if choice.reference not in stage.beside:
        return Truth(open_volume(choice.reference), choice.roi, choice.ignore)
    truth = among.earlier[choice.reference].truth()
    if choice.roi is None and truth.box is None:
        raise PlanError(
            f"stage {choice.reference} holds out no part of its labels, and scores of what a net learned from say "
            "nothing; give data.test or data.held_out there, or roi here"
        )
    ignore = truth.ignore if choice.ignore is None else choice.ignore
    note = "" if choice.roi else truth.note
    return replace(truth, box=choice.roi or truth.box, ignore=ignore, note=note)
