"""Labels from affinities, and outputs scored against references.

Not here: the work (segmentation, evaluation), or printing (cli).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from volpipe.api.arguments import Named, default_name, load, site_of
from volpipe.api.progress import progress_shown
from volpipe.blockwise.phase import Show
from volpipe.blockwise.pool import WorkerPool
from volpipe.errors import RunError, VolpipeError
from volpipe.estimation.estimate import StageTimes
from volpipe.evaluation.driver import evaluation_work, finish
from volpipe.evaluation.evaluate import evaluation_of, plan_evaluation
from volpipe.evaluation.keys import kind_of
from volpipe.evaluation.results import SCORES_PAGE, EvaluationResult
from volpipe.geometry.labels import Ignore
from volpipe.inference.output import suffix_of, with_format
from volpipe.monitoring.exposition import monitored
from volpipe.monitoring.results import results_of
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.reporting.page import REPORT
from volpipe.reporting.render import WRITER
from volpipe.resolve import homes_known
from volpipe.runs.options import RunOptions
from volpipe.runs.provenance import read_origin
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.stage_work import Listener
from volpipe.segmentation import driver as segmentation
from volpipe.segmentation.driver import SegmentationResult, plan_segmentation
from volpipe.segmentation.plan import SegmentPlan
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.result_file import ResultFile, generator
from volpipe.volumes.volume import open_volume
from volpipe.workflow.driver import Report
from volpipe.workflow.entries import location_of


@homes_known
def segment(
    affinities: str | Path | Report,
    recipe: SegmentRecipe | Named | Mapping[str, Any] = None,  # Any: TOML values
    *,
    out: str | Path | None = None,
    site: str | Path | WorkerPool = "local",
    settings: Sequence[str] = (),
    fresh: bool = False,
    tolerate: float = 0.1,
    same_input: bool = False,
    update: bool = False,
    search_path: str | Path | None = None,
    on_plan: Callable[[SegmentPlan], None] = lambda plan: None,
    on_estimate: Callable[[StageTimes], None] | None = None,
    progress: bool | None = None,
    on_progress: Show | None = None,
    metrics: str | int | Path | None = None,
) -> SegmentationResult:
    """Make objects of affinities, the same whatever the blocks; call it again to continue.

    Args:
        affinities: affinities, a channel per offset; or one map, of foreground or membranes. Also the report of the run
            that made it.
        recipe: how, as a TOML file; without one, the defaults. Also a shipped name, a recipe, or its sections.
        out: the labels, .zarr or .precomputed, also s3://; by default NAME_labels.zarr here.
        site, tolerate, same_input, search_path, progress, on_progress, metrics: as of `run`.
        settings: ``key=value``, on top of the recipe.
        fresh: delete these labels and what made them, and start over.
        update: compute again what rests on voxels of the input that changed, and no more. Fragments are kept for the
            next update.
        on_plan: called with the plan, before the site starts.
        on_estimate: called with the times that blocks tried on the site predict; without it, none are tried.

    Returns:
        How it ended; its `missing` names the boxes that could not be done.

    Raises:
        RecipeError: no such recipe, or an invalid one.
        VolpipeError: the volume does not fit, `out` is in use or no place for labels, or the site cannot be used.
        RunStopped: too many blocks fail.
    """
    affinities, chosen = location_of(affinities, "affinities"), load(SegmentRecipe, recipe, settings)
    target = str(out or default_name(affinities, f"labels{suffix_of(chosen.output.format)}"))
    chosen = with_format(chosen, target)
    open_volume(affinities, chosen.input.key, chosen.input.level, view=chosen.input.view)  # refused before the site is
    start, name = site_of(site, RunFolder.from_output(paths.locate(target)))
    plan = plan_segmentation(affinities, chosen, target, Path(search_path or Path.cwd()), fresh=fresh)
    on_plan(plan)
    with monitored(metrics, "segment", recipe), progress_shown(progress, on_progress) as show:
        listener = Listener(on_estimate=on_estimate, on_progress=show)
        options = RunOptions(fresh=fresh, site=name, tolerated=tolerate, same_input=same_input, update=update)
        return segmentation.segment(plan, start, options, listener)


@homes_known
def evaluate(
    output: str | Path | Report | SegmentationResult,
    reference: str | Path | None = None,
    *,
    labels: bool = False,
    classes: bool = False,
    skeletons: str | Path | None = None,
    given: str | Path | None = None,
    roi: str | None = None,
    margin: tuple[int, int, int] = (0, 0, 0),
    data_range: float | None = None,
    ignore: Ignore = None,
    annotated: Sequence[str] = (),
    any_place: bool = False,
    incomplete: bool = False,
    site: str | Path | WorkerPool = "local",
    tolerate: float = 0.1,
    report: str | Path | None = None,
    progress: bool | None = None,
    on_progress: Show | None = None,
    metrics: str | int | Path | None = None,
) -> EvaluationResult:
    """Score a volume against a reference, block by block on the site's workers.

    Where the output has more voxels than its input, interpolations of the input are scored beside it.

    Args:
        output: the volume that is judged, such as an output of `volpipe run`. Also the report of a run or a
            segmentation; of one channel, as the reference.
        reference: the volume to score it against, or a part of it, where voxel sizes and origins say which; None where
            skeletons in files stand in for it.
        labels: both hold labels; 0 is none.
        classes: both hold classes, by their numbers: Dice and IoU of each. Of several channels of the output, the
            largest is the class.
        skeletons: score labels by skeletons of neurons at this path, or by those of the reference (labels). The path is
            an SWC file or a folder of them, a CSV, nodes.csv and edges.csv, or Neuroglancer's precomputed skeletons.
        given: the input of the output, if that does not name it; it is interpolated.
        roi: box z0:z1,y0:y1,x0:x1 of the reference that is compared.
        margin: voxels at each face of the box that are left out.
        data_range: greatest value less least; by default of the type.
        ignore: with `labels` or `classes`: numbers such as 5,7 of which nothing is known: voxels with them in
            `reference` are left out; by default -1 to -3 and the last three of 32 and 64 bits; none leaves none out. In
            Python () does.
        annotated: with `classes`: the names of all classes that `reference` annotates, where it leaves others out;
            found in the output, these count as the first class.
        any_place: score voxel by voxel though voxel sizes or origins say they lie elsewhere.
        incomplete: read outputs of volpipe that are not complete as they are; what is missing is zeros.
        site, tolerate, progress, on_progress, metrics: as of `run`.
        report: write the report of the evaluation to this file. Without it, it stays in the work's folder. No other
            file than one that this argument named before is replaced.

    Returns:
        How it ended; where blocks could not be scored, its `missing` names them, and there are no scores. The same call
        again goes on with those.

    Raises:
        VolpipeError: the volumes do not fit each other, or the site cannot be used.
        RunStopped: too many blocks cannot be scored.
    """
    output, truth = location_of(output, "output"), None if reference is None else location_of(reference, "reference")
    page = None if report is None else ResultFile.named("report", report, SCORES_PAGE)
    if page is not None:
        page.check()
    kind = kind_of(truth, labels=labels, classes=classes, skeletons=str(skeletons or ""))
    own = _input_of(output) if given is None and evaluation_of(kind).interpolates else None
    source = own if given is None else location_of(given, "given")
    evaluation = plan_evaluation(
        output, truth, given=source, roi=roi, margin=margin, kind=kind, data_range=data_range, ignore=ignore,
        skeletons=str(skeletons or ""), annotated=annotated, any_place=any_place, incomplete=incomplete,
    )  # fmt: skip
    start, _ = site_of(site)
    name = "_".join(["volpipe", Path(output).stem, Path(truth or str(skeletons)).stem, "scores.run"])
    with monitored(metrics, "evaluate"), results_of(page), progress_shown(progress, on_progress) as show:
        options, listener = RunOptions(tolerated=tolerate), Listener(on_progress=show)
        work = evaluation_work(evaluation, RunFolder(Path.cwd() / name), options, listener)

        def keep_report(result: EvaluationResult) -> None:
            if page is not None and (result.folder / REPORT).is_file():
                own, named = generator(WRITER), generator(SCORES_PAGE.writer)
                page.write((result.folder / REPORT).read_bytes().replace(own, named, 1))

        return finish(work, start, keep_report)


def _input_of(output: str) -> str | None:
    """Return the input of a run's output; None where it is not known, gone, or only a part was computed."""
    try:
        origin = read_origin(output)
        if origin.recipe.input.roi is not None:
            return None
        open_volume(origin.volume)
    except (VolpipeError, RunError):
        return None
    return origin.volume
