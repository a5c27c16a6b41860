"""Labels from affinities, and outputs scored against references.

Not here: the work (segmentation, evaluation), or printing (cli).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from volpipe.api.arguments import Named, load, site_of
from volpipe.blockwise.pool import WorkerPool
from volpipe.errors import RunError, VolpipeError
from volpipe.inference.output import check_name
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.formats.container import locate
from volpipe.volumes.storage import paths
from volpipe.volumes.volume import open_volume

if TYPE_CHECKING:
    from volpipe.evaluation.evaluate import Evaluation, Scores
    from volpipe.segmentation.driver import SegmentationResult, SegmentPlan
    from volpipe.segmentation.estimate import SegmentTimes

OnStage = Callable[[str, int, int], None]


def segment(
    affinities: str | Path,
    recipe: SegmentRecipe | Named | Mapping[str, Any] = None,  # Any: TOML values
    *,
    out: str | Path | None = None,
    site: str | Path | WorkerPool = "local",
    settings: Sequence[str] = (),
    fresh: bool = False,
    same_input: bool = False,
    search_path: str | Path | None = None,
    on_plan: Callable[[SegmentPlan], None] = lambda plan: None,
    on_estimate: Callable[[SegmentTimes], None] | None = None,
    on_progress: OnStage = lambda stage, done, total: None,
) -> SegmentationResult:
    """Make objects of affinities, the same whatever the blocks; the same call again goes on where it stopped.

    Args:
        affinities: volume with a channel per offset; or one map, of foreground or membranes.
        recipe: one that is loaded, a shipped name, a path, or its sections; None for the defaults.
        out: the labels, also s3://; by default NAME_labels.zarr here.
        site: a shipped name, a Python file, or a pool that is started.
        settings: ``key=value``, on top of the recipe.
        fresh: delete these labels and the folder of their run, and start over.
        same_input: go on with a volume that was copied or touched, not changed.
        search_path: the folder that relative names count from; by default the current one.
        on_plan: called with the plan, before the site starts.
        on_estimate: called with the times that blocks tried on the site predict; without it, none are tried.
        on_progress: called with a stage, the number of its finished tasks, and the number of its tasks.

    Raises:
        RecipeError: no such recipe, or an invalid one.
        VolpipeError: the volume does not fit, `out` is in use or no place for labels, or the site cannot be used.
        RunStopped: a block fails.
    """
    target, chosen = str(out or _default_output(str(affinities))), load(SegmentRecipe, recipe, settings)
    check_name(target)
    if locate(target)[0].suffix.lower() == ".n5":
        raise VolpipeError(f"--out {target}: labels are written as OME-Zarr; give a name that ends in .zarr")
    open_volume(affinities, chosen.input.key, chosen.input.level, view=chosen.input.view)  # before heavy imports
    start, name = site_of(site, RunFolder.from_output(paths.locate(target)))
    from volpipe.segmentation import driver
    from volpipe.segmentation.estimate import forecast_labels

    plan = driver.plan_segmentation(str(affinities), chosen, target, Path(search_path or Path.cwd()))
    on_plan(plan)

    def on_begin(workers: WorkerPool) -> None:
        if on_estimate is not None:
            for times in forecast_labels(plan, workers):
                on_estimate(times)

    return driver.segment(
        plan, start, fresh=fresh, on_progress=on_progress, on_begin=on_begin, site=name, same_input=same_input
    )


def _default_output(volume: str) -> str:
    """Return CONTAINER_KEY_labels.zarr, in this folder."""
    container, key = locate(volume)
    return f"{'_'.join([container.stem, *filter(None, key.split('/')), 'labels'])}.zarr"


@dataclass(frozen=True)
class EvaluationResult:
    """The scores of an output against a reference.

    Attributes:
        evaluation: volumes and box that were compared.
        scores: of labels; or of an image and of interpolations of its input, by name.
    """

    evaluation: Evaluation
    scores: Scores

    def to_json(self) -> dict[str, object]:
        """Return the scores and their volumes as JSON values; infinite numbers are None."""
        from volpipe.evaluation.evaluate import describe_scores

        return describe_scores(self.evaluation, self.scores)

    def draw(self, path: str | Path) -> None:
        """Write slices and errors of images to the PNG at `path`."""
        from volpipe.evaluation.panels import draw

        draw(Path(path), self.evaluation)


def evaluate(
    output: str | Path,
    reference: str | Path,
    *,
    labels: bool = False,
    given: str | Path | None = None,
    roi: str | None = None,
    margin: tuple[int, int, int] = (0, 0, 0),
    data_range: float | None = None,
    site: str | Path | WorkerPool = "local",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvaluationResult:
    """Score a volume against a reference, block by block on the site's workers.

    Where the output has more voxels than its input, interpolations of the input are scored beside it.

    Args:
        output, reference: the volumes, of one channel.
        labels: whether both hold labels; 0 is none.
        given: the input of `output`; by default as its attributes say.
        roi: box z0:z1,y0:y1,x0:x1 of both that is compared.
        margin: voxels (z, y, x) at each face of the box that are left out.
        data_range: greatest value less least; by default of the type.
        site: a shipped name, a Python file, or a pool that is started.
        on_progress: called with the number of finished blocks and of all.

    Raises:
        VolpipeError: the volumes do not fit each other, or the site cannot be used.
        RunStopped: a block cannot be scored.
    """
    from volpipe.evaluation import evaluate as evaluating

    source = str(given) if given is not None else _input_of(str(output))
    evaluation = evaluating.plan_evaluation(
        str(output), str(reference), given=source, roi=roi, margin=margin,
        kind="labels" if labels else "image", data_range=data_range,
    )  # fmt: skip
    start, _ = site_of(site)
    with tempfile.TemporaryDirectory(prefix="volpipe-evaluate-", dir=Path.cwd()) as folder:
        scores = evaluating.evaluate(evaluation, start, Path(folder), on_progress)
    return EvaluationResult(evaluation, scores)


def _input_of(output: str) -> str | None:
    """Return the input of a run's output; None where it is not known, gone, or only a part was computed."""
    from volpipe.runs.provenance import read_origin

    try:
        origin = read_origin(output)
        if origin.recipe.input.roi is not None:
            return None
        open_volume(origin.volume)
    except (VolpipeError, RunError):
        return None
    return origin.volume
