"""Runs: a plan, what it takes, and the run itself, of one net or of a recipe of several stages.

Not here: the work (workflow, runs), or printing (cli).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from volpipe.api.arguments import capacity_of, site_of
from volpipe.api.progress import both, stages_shown, voxels_per_block
from volpipe.api.requests import RecipeLike, Request, check, request
from volpipe.blockwise.phase import Progress, Show
from volpipe.blockwise.pool import Site, WorkerPool
from volpipe.errors import PlanError
from volpipe.estimation.calibrate import OnTry
from volpipe.estimation.forecast import Forecast
from volpipe.estimation.limits import check_access, check_window
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.inference.roi import find_part
from volpipe.monitoring.exposition import monitored
from volpipe.recipes.workflow import VOLUME, Flow
from volpipe.resolve import homes_known
from volpipe.runs.options import RunOptions, check_stages
from volpipe.runs.output_work import OutputWork
from volpipe.volumes.storage import paths
from volpipe.volumes.volume import Volume
from volpipe.workflow.cost import FlowCost, forecast_flow, preview_flow
from volpipe.workflow.driver import Listener, Report, execute, preview
from volpipe.workflow.execute import FlowListener, FlowReport, execute_flow
from volpipe.workflow.follow import execute_following
from volpipe.workflow.plan import FlowPlan, plan_flow, stages_of
from volpipe.workflow.prepare import UNSIZED, Sizing, check_opened, prepare, prepare_for, sample_for
from volpipe.workflow.stages import StagePlan


def plan_request(asked: Request, sizing: Sizing = UNSIZED) -> Plan | FlowPlan:
    """Return the plan of what is `asked` for, open sizes by `sizing`; what can be refused is refused here."""
    if isinstance(asked.work, Flow):
        return plan_flow(asked.work, str(asked.volume), asked.out, asked.search_path, sizing)
    if isinstance(asked.volume, Volume):
        check_opened(asked.volume, asked.work.input)
        sample = sample_for(asked.work, asked.volume)
        plan = prepare_for(asked.volume, asked.work, asked.out, asked.search_path, sizing, sample)
        check_access(paths.locate(asked.volume.path), paths.locate(asked.out))
    else:
        plan = prepare(asked.volume, asked.work, asked.out, asked.search_path, sizing)
    check_window(plan)
    return plan


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
) -> Plan | FlowPlan:
    """Return the plan of a run over `volume`, before anything runs; what cannot work is refused.

    Args:
        volume: the volume: N5, Zarr, HDF5, TIFF, MRC, .npy, or an array inside; also s3://, https://. One that is open
            is it; the recipe's [input] chooses no other array.
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
    return plan_request(asked, Sizing(capacity_of(site, asked.folder), fresh))


@homes_known
def estimate(
    plan: Plan | FlowPlan, *, site: str | Path | WorkerPool | None = None, on_try: OnTry = lambda seconds, most: None
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
    for stage in stages_of(plan):
        if stage.reads == VOLUME and isinstance(work := stage.work(), OutputWork):
            work.check_written(work.volumes())
    start = None if site is None else site_of(site, plan.folder if not isinstance(plan, Plan) else None)[0]
    if isinstance(plan, Plan):
        return preview(plan, start, on_try)
    return forecast_flow(plan) if start is None else preview_flow(plan, start)


@homes_known
def run(
    volume: str | Path | Volume | Plan | FlowPlan,
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
    planned = volume
    if not isinstance(planned, Plan | FlowPlan):
        planned = plan(planned, recipe, out=out, settings=settings, search_path=search_path, site=site, fresh=fresh)
    start, name = site_of(site)
    options = RunOptions(
        fresh=fresh, keep_tensors=keep_tensors, site=name, tolerated=tolerate, same_input=same_input,
        update=update or follow is not None, measure_again=measure_again, follow=follow,
    )  # fmt: skip
    with monitored(metrics, "run", recipe), _listening(progress, on_progress, listener) as hears:
        if isinstance(planned, FlowPlan):
            check_stages(only, follow)
            of_stages = listener if isinstance(listener, FlowListener) else FlowListener(of_stage=hears)
            return execute_flow(planned, start, options, of_stages)
        part = find_part(only, planned.out_shape) if isinstance(only, str) else only
        options = replace(options, only=part)
        if follow is None:
            return execute(planned, start, options, hears(planned))
        if not 0 < follow < math.inf:
            raise PlanError(f"follow is {follow:g} s; give the seconds from the end of one look to the next")
        return execute_following(planned, start, options, hears(planned))


@contextmanager
def _listening(
    progress: bool | None, on_progress: Show | None, listener: Listener | FlowListener | None
) -> Iterator[Callable[[Plan | StagePlan], Listener]]:
    """Give a function that returns whom to tell of a run or a stage: its listener, or `on_progress` and a display."""
    with stages_shown(progress, has_listener=listener is not None or on_progress is not None) as show:

        def hears(work: Plan | StagePlan) -> Listener:
            if isinstance(listener, Listener):
                return listener
            name, plan = ("", work) if isinstance(work, Plan) else (work.name, work.plan)
            shown = show(name, voxels_per_block(plan) if isinstance(plan, Plan) else 0.0)
            return Listener(on_progress=shown if on_progress is None else both(on_progress, shown))

        yield hears
