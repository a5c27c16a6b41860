"""Windows of a net, timed on one GPU worker of a site, which is started for that and stopped again.

Not here: the timing (volpipe.estimation.gpu_times), or what plans make of it (volpipe.estimation.window_choice).
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.executors.base import ParslExecutor

from volpipe.apps.capacity import asked_of, executors_for_nets, is_local
from volpipe.apps.pool import start_pool
from volpipe.apps.site_check import LOOK_SECONDS, WAIT_SECONDS, limit, place_in, trouble_of, why_late
from volpipe.blockwise.failures import message_of
from volpipe.errors import NetError, SiteError
from volpipe.estimation.gpu_times import GpuTimes, check_can_keep, keep_times
from volpipe.nets.facts import NetFacts
from volpipe.recipes.inference import Recipe
from volpipe.sites.find import try_site
from volpipe.sites.gpus import remember_gpu

ELSEWHERE = "give the command in a folder that you and the workers can write"


def check_site(site: str) -> None:
    """Refuse a site on whose GPUs no net can be timed; it takes no time, and starts nothing.

    Raises:
        SiteError: no such site, or one that has no GPUs or those of this machine.
        RunError: nothing can be written in this folder.
    """
    with place_in(Path.cwd(), ELSEWHERE) as place:
        _executor_with_gpus(site, try_site(site, place))


def time_at_site(site: str, recipe: Recipe, facts: NetFacts, *, wait_seconds: float = WAIT_SECONDS) -> GpuTimes:
    """Return what windows of the net of `recipe` cost on a GPU of `site`; plans for the site choose by it from now on.

    Args:
        facts: of the net.
        wait_seconds: for a worker to start, and to answer.

    Raises:
        SiteError: no such site, one that has no GPUs or those of this machine, or whose worker does not start in time.
        NetError: the worker sees no GPU, or the net cannot be timed there, or nothing of it can be remembered.
    """
    search_path = str(Path.cwd())
    check_can_keep(recipe, search_path)
    with place_in(Path.cwd(), ELSEWHERE) as place:
        config = try_site(site, place)
        executor, asked = _executor_with_gpus(site, config)
        limit(executor)
        # The strategy starts the one block, and no other whatever becomes of it.
        alone = Config([executor], run_dir=config.run_dir, strategy="none", initialize_logging=False, usage_tracking=0)
        with start_pool(alone) as pool:
            future = pool.submit("time_net", recipe.net, recipe.normalise, facts, search_path)
            _await(future, executor, wait_seconds)
            record = future.result()
    if record.result is None:
        raise NetError(message_of(record.failed[0][1]))
    times: GpuTimes = record.result
    if not keep_times(recipe, facts, search_path, times):
        raise SiteError(
            "the times cannot be kept: your cache cannot be written; set XDG_CACHE_HOME to a folder of yours"
        )
    remember_gpu(asked, times.gpu)
    return times


def _executor_with_gpus(site: str, config: Config) -> tuple[ParslExecutor, str]:
    """Return the executor of `site` that runs nets, and what it asks for.

    Raises:
        SiteError: it asks for no GPU, or for more than one kind, or runs on this machine.
    """
    chosen = executors_for_nets(config.executors)
    asked = {asked_of(executor) for executor in chosen}
    if any(map(is_local, chosen)):
        raise SiteError(f"the workers of site {site} are on this machine, where plans time windows themselves")
    if "" in asked:
        raise SiteError(f"site {site} asks for no GPU for nets; plans choose windows on cores by themselves")
    if len(asked) > 1:
        raise SiteError(
            f"site {site} asks for GPUs in {len(asked)} ways, so that plans keep the net's own windows; give "
            "windows.shape yourself"
        )
    return chosen[0], asked.pop()


def _await(future: Future[Any], executor: ParslExecutor, wait_seconds: float) -> None:
    """Return once the only worker of `executor` has answered.

    Raises:
        SiteError: none can answer any more, or none has within `wait_seconds`.
    """
    until, trouble = time.monotonic() + wait_seconds, ""
    while not wait([future], LOOK_SECONDS).done:
        if trouble:  # since the last look: an answer might have been on its way
            raise SiteError(f"executor {executor.label}: {trouble}")
        trouble = trouble_of(executor)
        if time.monotonic() > until:
            is_at_work = isinstance(executor, HighThroughputExecutor) and executor.connected_managers()
            slow = f"its worker has not timed the net within {wait_seconds:g} s; wait longer with --wait"
            raise SiteError(f"executor {executor.label}: {slow if is_at_work else why_late(executor, wait_seconds)}")
