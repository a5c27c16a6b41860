"""Windows of a net, timed on one GPU worker of a site, which is started for that and stopped again, or on a core here.

Not here: the timing (volpipe.estimation.measure), or what plans make of it (window_choice, there too).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.executors.base import ParslExecutor

from volpipe.apps.capacity import asked_of, executors_for_nets, has_gpu, is_local
from volpipe.apps.pool import start_pool
from volpipe.apps.site_check import LOOK_SECONDS, limit, place_in, trouble_of, why_late
from volpipe.blockwise.failures import message_of
from volpipe.errors import NetError, SiteError
from volpipe.estimation.measure import GpuTimes, processor, thorough_speeds
from volpipe.nets.cache import can_store_measured, keep_speeds
from volpipe.nets.facts import NetFacts, NetSpeeds
from volpipe.recipes.inference import Recipe
from volpipe.sites.find import try_site
from volpipe.sites.gpus import remember_gpu
from volpipe.units import size

ELSEWHERE = "give the command in a folder that you and the workers can write"
UNKEPT = "the times cannot be kept: your cache cannot be written; set XDG_CACHE_HOME to a folder of yours"


def check_site(site: str) -> None:
    """Refuse a site on whose workers no net can be timed; it takes no time, and starts nothing.

    Raises:
        SiteError: no such site, a cluster without GPUs, or GPUs of this machine.
        RunError: nothing can be written in this folder.
    """
    with place_in(Path.cwd(), ELSEWHERE) as place:
        chosen = executors_for_nets(try_site(site, place).executors)
        if not _are_cores_here(chosen):
            _executor_with_gpus(site, chosen)


def time_at_site(site: str, recipe: Recipe, facts: NetFacts, *, wait_seconds: float = 300.0) -> tuple[NetSpeeds, str]:
    """Return what windows of the net of `recipe` cost a worker of `site`, and on what it computes, in words.

    Plans for the site choose by it from now on.

    Args:
        facts: of the net.
        wait_seconds: for a worker of a cluster to start, and to answer.

    Raises:
        SiteError: as `check_site`, a worker that does not start in time, or a cache that cannot be written.
        NetError: the worker sees no GPU, or the net cannot be timed there, or nothing of it can be remembered.
    """
    search_path = str(Path.cwd())
    if not can_store_measured(recipe.net, search_path):
        raise NetError(
            f"net {recipe.net.name} is code of a package, which may change unseen, so that its times are not kept; put "
            "it into a file, and name it file.py:function"
        )
    with place_in(Path.cwd(), ELSEWHERE) as place:
        config = try_site(site, place)
        chosen = executors_for_nets(config.executors)
        if _are_cores_here(chosen):
            speeds = thorough_speeds(recipe.net, facts, search_path)
            if not keep_speeds(recipe.net, facts, search_path, speeds):
                raise SiteError(UNKEPT)
            return speeds, f"one core of {processor()}"
        executor, asked = _executor_with_gpus(site, chosen)
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
    if not times.keep(recipe.net, recipe.normalise, facts, search_path):
        raise SiteError(UNKEPT)
    remember_gpu(asked, times.gpu)
    return times.speeds, f"{times.gpu.name}, {size(times.gpu.num_bytes)}"


def _are_cores_here(executors: Sequence[ParslExecutor]) -> bool:
    """Return whether nets of `executors` are computed on cores of this machine."""
    return all(is_local(executor) and not has_gpu(executor) for executor in executors)


def _executor_with_gpus(site: str, chosen: Sequence[ParslExecutor]) -> tuple[ParslExecutor, str]:
    """Return the one of `chosen` of `site` that runs nets, and what it asks for.

    Raises:
        SiteError: it asks for no GPU, or for more than one kind, or runs on this machine.
    """
    asked = {asked_of(executor) for executor in chosen}
    if any(map(is_local, chosen)):
        raise SiteError(f"the GPUs of site {site} are of this machine, where plans time windows themselves")
    if "" in asked:
        raise SiteError(
            f"site {site} asks for no GPU for nets; on its cores plans choose windows as on those of the machine that "
            "plans, which --config local times"
        )
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
