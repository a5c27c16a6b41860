"""Runs: a plan, what it takes, and the run itself, of one net or of a recipe of several stages.

Not here: the work (workflow, runs), or printing (cli).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from volpipe.api.arguments import capacity_of, site_of
from volpipe.api.progress import both, stages_shown
from volpipe.api.requests import RecipeLike, Request, check, request
from volpipe.blockwise.phase import Progress, Show
from volpipe.blockwise.pool import Site, WorkerPool
from volpipe.errors import VolpipeError
from volpipe.estimation.calibrate import OnTry
from volpipe.estimation.forecast import Forecast
from volpipe.estimation.limits import check_access, check_window
from volpipe.geometry.grid import Box
from volpipe.monitoring.exposition import monitored
from volpipe.recipes.workflow import Flow
from volpipe.resolve import homes_known
from volpipe.runs.options import RunOptions
from volpipe.stages.kind import StagePlan
from volpipe.stages.sizing import UNSIZED, Sizing
from volpipe.volumes.storage import paths
from volpipe.volumes.volume import Volume
from volpipe.workflow.cost import FlowCost
from volpipe.workflow.driver import Listener, Report
from volpipe.workflow.execute import FlowListener, FlowReport
from volpipe.workflow.plan import plan_flow
from volpipe.workflow.prepare import check_opened, prepare, prepare_for, sample_for
from volpipe.workflow.work_plan import HeldPlan, RunPlan, StagesPlan, WorkPlan, execute, find_work_plan, preview


def plan_request(asked: Request, sizing: Sizing = UNSIZED) -> WorkPlan:
    """Return the plan of what is `asked` for, open sizes by `sizing`; what can be refused is refused here."""
    if isinstance(asked.work, Flow):
        return StagesPlan(plan_flow(asked.work, str(asked.volume), asked.out, asked.search_path, sizing))
    if isinstance(asked.volume, Volume):
        check_opened(asked.volume, asked.work.input)
        sample = sample_for(asked.work, asked.volume)
        plan = prepare_for(asked.volume, asked.work, asked.out, asked.search_path, sizing, sample)
        check_access(paths.locate(asked.volume.path), paths.locate(asked.out))
    else:
        plan = prepare(asked.volume, asked.work, asked.out, asked.search_path, sizing)
    check_window(plan)
    return RunPlan(plan)


@homes_known
def plan(
    volume: str | Path | Volume,
    recipe: RecipeLike = None,
    *,
    out: str | Path | None = None,
    settings: Sequence[str] = (),
    roi: str | None = None,
    mask: str | None = None,
    trust_model: bool = False,
    search_path: Path | None = None,
    site: str | Path | WorkerPool | Site | None = "local",
    fresh: bool = False,
) -> HeldPlan:
    """Return the plan of a run over `volume`, before anything runs; what cannot work is refused.

    Args:
        volume: the volume: N5, Zarr, HDF5, TIFF, NIfTI …, or an array inside; also s3://, https://. One that is open is
            it; the recipe's [input] chooses no other array.
        recipe: what to do: a shipped recipe (see `volpipe recipes`) or a TOML file; without one, the default recipe.
            Also a `Recipe`, or sections as a dictionary. A file with stages gives the plan of all of them.
        out: output: NAME.zarr, NAME.n5 or NAME.precomputed, also s3://; by default NAME_NET.zarr here. Of stages it is
            a folder.
        settings: ``key=value`` on top of the recipe, such as "windows.blend=hann".
        roi: box z0:z1,y0:y1,x0:x1 to compute, in voxels or as 100nm:900nm; a bare : is all.
        mask: volume of any resolution, nonzero where voxels are to be computed.
        trust_model: load a net's file that is code, TorchScript or torch.export.
        search_path: folder that relative names in the recipe count from; the current one where None.
        site: where to run: a shipped site (see `volpipe sites`) or a Python file. A pool that is started stays up.
            Windows that the recipe leaves open are chosen by the memory of its workers; None: the net's own windows.
        fresh: the run will start over; else a run that was begun keeps its windows, on whatever site it goes on.

    Raises:
        SiteError: the site cannot be used.
        RecipeError: an unknown key or a value that does not fit.
        VolumeError: the volume is not there, or is not what the recipe says.
        PlanError: volume, net and recipe do not fit each other; the message says what would.
    """
    asked = request(
        volume, recipe, out=out, settings=settings, roi=roi, mask=mask, trust_model=trust_model, search_path=search_path
    )
    check(asked)
    planned: HeldPlan = plan_request(asked, Sizing(capacity_of(site, asked.folder), fresh)).plan
    return planned


@homes_known
def estimate(
    plan: HeldPlan, *, site: str | Path | WorkerPool | None = None, on_try: OnTry = lambda seconds, most: None
) -> Forecast | FlowCost:
    """Return the bytes, files and memory that `plan` takes, and its time where blocks are tried on a site.

    Args:
        plan: as `plan` returns it.
        site: a shipped name, a Python file, or a pool that is started; None: no block is tried, bytes are bounds.
        on_try: called now and then with the seconds for which blocks have been tried, and their most.

    Raises:
        SiteError: the site cannot be used.
        RunStopped: a block cannot be computed.
    """
    planned = find_work_plan(plan)
    if planned is None:
        raise VolpipeError(f"{type(plan).__name__} is no plan; give what vp.plan returned")
    planned.check_volume()
    found: Forecast | FlowCost = preview(planned, None if site is None else site_of(site, planned.folder)[0], on_try)
    return found


@homes_known
def run(
    volume: str | Path | Volume | HeldPlan,
    recipe: RecipeLike = None,
    *,
    out: str | Path | None = None,
    site: str | Path | WorkerPool | Site = "local",
    settings: Sequence[str] = (),
    fresh: bool = False,
    keep_tensors: bool = False,
    only: str | Box | None = None,
    tolerate: float = 0.1,
    same_input: bool = False,
    update: bool = False,
    measure_again: bool = False,
    follow: float | None = None,
    search_path: Path | None = None,
    progress: bool | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    listener: Listener | FlowListener | None = None,
    metrics: str | int | Path | None = None,
) -> Report | FlowReport:
    """Run a net over `volume`, or the stages of a recipe; call it again to continue an interrupted run.

    Args:
        volume: as of `plan`; or the plan that it returned.
        recipe, out, settings, search_path: as of `plan`; of no use with a plan.
        site: as of `plan`.
        fresh: delete this output and its run, and start over.
        keep_tensors: keep window tensors and block tensors.
        only: box z0:z1,y0:y1,x0:x1 of the output, in voxels: compute what it needs, and no more. Also a `Box`.
        tolerate: share of the blocks begun that may fail before the work stops. With 0 the first stops it.
        same_input: go on with a volume that was copied or touched, not changed. Some of its voxels are compared.
        update: compute again what rests on voxels of the input that changed, and no more; make stages of another recipe
            anew.
        measure_again: with `update`: measure `volume` again, and compute everything.
        follow: as `update`, and so long after each end once more, until Ctrl-C or a file `stop` in the run's folder.
        progress: show how far it is; None: in a notebook, below its cell, unless you listen yourself.
        on_progress: called at every change and every half second; of several stages, for each.
        listener: called with the plan and its forecast as well, in place of `on_progress` and of what is shown.
        metrics: a port, "HOST:PORT" or a file NAME.prom at which Prometheus reads how far it is (docs/runs.md).

    Returns: how the run ended; its `missing` names the boxes that could not be computed.

    Raises:
        RunError, RunStopped, SiteError: another run's output is in the way; too much fails; no such site.
    """
    planned = find_work_plan(volume)
    if planned is None:
        location = cast("str | Path | Volume", volume)
        asked = request(location, recipe, out=out, settings=settings, search_path=search_path)
        check(asked)
        planned = plan_request(asked, Sizing(capacity_of(site, asked.folder), fresh))
    start, name = site_of(site)
    options = RunOptions(
        fresh=fresh, keep_tensors=keep_tensors, site=name, tolerated=tolerate, same_input=same_input,
        update=update or follow is not None, measure_again=measure_again, follow=follow,
    )  # fmt: skip
    with monitored(metrics, "run", recipe), _telling_stages(progress, on_progress, listener) as hears:
        report: Report | FlowReport = execute(planned, start, planned.limited(options, only), hears)
        return report


@contextmanager
def _telling_stages(
    progress: bool | None, on_progress: Show | None, listener: Listener | FlowListener | None
) -> Iterator[FlowListener | Listener]:
    """Give whom to tell of stages: the `listener`, or of each `on_progress` and a display."""
    if listener is not None:
        yield listener
        return
    with stages_shown(progress, has_listener=on_progress is not None) as show:

        def of_stage(stage: StagePlan) -> Listener:
            shown = show(stage.name, stage.voxels_per_block)
            return Listener(on_progress=shown if on_progress is None else both(on_progress, shown))

        yield FlowListener(of_stage=of_stage)
