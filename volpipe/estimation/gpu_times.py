"""A net on a GPU of a site: timed by one of its workers, and remembered for plans that are made elsewhere.

Not here: the measuring (net_speeds, precision), how a worker is started (apps.net_times), or the choice of windows by
what is remembered (window_choice).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from volpipe.blockwise.journal import Record
from volpipe.blockwise.pool import Gpu
from volpipe.blockwise.task import work_once
from volpipe.errors import NetError
from volpipe.estimation.net_speeds import GPU_PRECISIONS, measure_speeds_on_gpu
from volpipe.estimation.precision import difference_key, measure_difference
from volpipe.estimation.window_choice import MEASURE_SECONDS_ON_GPU, is_quick_to_compare
from volpipe.nets.cache import can_keep_speeds, keep_difference, keep_speeds
from volpipe.nets.facts import Difference, NetFacts, NetSpeeds
from volpipe.recipes.inference import NetChoice, Normalise, Precision, Recipe


@dataclass(frozen=True)
class GpuTimes:
    """What a worker found of a net on its GPU: speeds of windows, and what other precisions change in the output."""

    gpu: Gpu
    speeds: NetSpeeds
    differences: Mapping[Precision, Difference]


def time_net(choice: NetChoice, normalise: Normalise, facts: NetFacts, search_path: str) -> Record[GpuTimes]:
    """Return what windows of a net cost on this worker's GPU; the record of a task of one unit."""
    return work_once("time", 0, lambda: _time(choice, normalise, facts, search_path))


def _time(choice: NetChoice, normalise: Normalise, facts: NetFacts, search_path: str) -> GpuTimes:
    import torch

    if not torch.cuda.is_available():
        raise NetError(f"the worker on {socket.gethostname()} sees no GPU; `volpipe sites check` says why")
    gpu = Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    speeds = measure_speeds_on_gpu(choice, facts, gpu.name, search_path, most_seconds=MEASURE_SECONDS_ON_GPU)
    compared = GPU_PRECISIONS if is_quick_to_compare(facts, speeds) else ()
    return GpuTimes(
        gpu,
        speeds,
        {
            each: measure_difference(choice, normalise, facts, search_path, precision=each, device="cuda")
            for each in compared
        },
    )


def check_can_keep(recipe: Recipe, search_path: str) -> None:
    """Refuse a net of which nothing could be remembered.

    Raises:
        NetError: with what would do.
    """
    if not can_keep_speeds(recipe.net, search_path):
        raise NetError(
            f"net {recipe.net.name} is code of a package, which may change unseen, so that its times are not kept; put "
            "it into a file, and name it file.py:function"
        )


def keep_times(recipe: Recipe, facts: NetFacts, search_path: str, times: GpuTimes) -> bool:
    """Remember `times` of the net of `recipe` for plans; return whether that can be."""
    for precision, difference in times.differences.items():
        key = difference_key(precision, recipe.normalise, facts, times.gpu.name)
        keep_difference(recipe.net, search_path, key, difference)
    return keep_speeds(recipe.net, search_path, times.speeds)
