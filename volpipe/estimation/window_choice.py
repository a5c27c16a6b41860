"""The choice of windows and of the layout of tensors: the fastest, as measured, for which workers have the memory.

Not here: how windows are measured (window_search), or where a plan cuts them (inference.tiling). It rests on sizes,
on facts of the net and on what the site gives its workers alone, so that the same command makes the same plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from volpipe.blockwise.pool import Capacity
from volpipe.errors import NOTICE, PlanError
from volpipe.estimation.estimate import windows_along
from volpipe.estimation.memory import FULL, memory_bytes, net_bytes
from volpipe.estimation.window_search import LAYOUTS, measured_speeds, processor
from volpipe.inference.plan import OWN_SIZES, NetSizes, Plan
from volpipe.inference.tiling import own_window
from volpipe.nets.cache import can_keep_speeds, keep_speeds, known_speeds
from volpipe.nets.facts import NetSpeeds
from volpipe.units import shape, size

WORTH_MEASURING = 400**3  # voxels that are computed; fewer take a minute or so, and are not worth ten seconds
MEASURE_SECONDS = 8.0  # of calls of the net, in both layouts
NOTABLE = 1.03  # times as fast: less is no reason for larger windows, or to speak of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Candidate:
    """A plan with some sizes: seconds of its net on the workers of a site, and the memory of one of these."""

    plan: Plan
    seconds: float
    num_bytes: float

    @property
    def voxels(self) -> int:
        return math.prod(self.plan.window)


def fastest_plan(make: Callable[[NetSizes], Plan], capacity: Capacity | None) -> Plan:
    """Return the plan with the fastest sizes, of those that `make` takes, for which workers have the memory.

    The net's own where the site does not say what workers have, where their nets are on GPUs, or where nothing was
    measured. Windows that are not cropped to their core by the net's halo stay: another size would change the output
    by more than last bits.
    """
    own = make(OWN_SIZES)
    if capacity is None or capacity.on_gpu or capacity.worker_bytes is None or not _is_open(own):
        return own
    speeds = _speeds(own)
    if speeds is None or not speeds.windows:
        return own
    candidates = list(_candidates(make, own, speeds, capacity.num_workers))
    fitting = [candidate for candidate in candidates if candidate.num_bytes <= capacity.worker_bytes]
    if not fitting:
        return own  # and is refused where the run begins
    best = min(candidate.seconds for candidate in fitting)
    chosen = min((each for each in fitting if each.seconds <= NOTABLE * best), key=lambda each: each.voxels)
    before = _rated(own, speeds, capacity.num_workers)
    note = _note(chosen, candidates, before, capacity.worker_bytes)
    return chosen.plan.changed(notes=own.notes, sizes_note=note)


def _is_open(plan: Plan) -> bool:
    """Return whether something is left to choose for a net that computes as it was measured."""
    choice = plan.recipe.infer
    is_plain = not (choice.exact or choice.compile) and choice.precision in FULL
    return is_plain and (choice.channels_last == "auto" or plan.recipe.windows.shape == "auto")


def _has_windows(plan: Plan) -> bool:
    """Return whether other windows can be taken, and would change last bits alone."""
    choice, net = plan.recipe.windows, plan.net
    is_exact = choice.blend == "crop" and net.tile_invariant and not plan.recipe.net.accept_tile_variance
    return choice.shape == "auto" and is_exact and not any(net.fixed)


def _speeds(plan: Plan) -> NetSpeeds | None:
    """Return what windows of the net cost here, measured now where nobody knows and it pays."""
    choice, folder, name = plan.recipe.net, plan.search_path, processor()
    known = known_speeds(choice, folder, name)
    if known is not None or _num_windows(plan) * math.prod(plan.window) < WORTH_MEASURING:
        return known
    if not can_keep_speeds(choice, folder):
        return None
    log.info("times windows of net %s, once", plan.net.label, extra=NOTICE)
    speeds = measured_speeds(choice, plan.net, folder, most_seconds=MEASURE_SECONDS) or NetSpeeds(processor=name)
    keep_speeds(choice, folder, speeds)  # also that nothing could be: no plan tries it again
    return speeds


def _candidates(
    make: Callable[[NetSizes], Plan], own: Plan, speeds: NetSpeeds, num_workers: int
) -> Iterator[_Candidate]:
    """Yield the plans to choose from, those of smaller windows first."""
    windows = [None, *{speed.window for speed in speeds.windows}] if _has_windows(own) else [None]
    layouts = LAYOUTS if own.recipe.infer.channels_last == "auto" else (own.channels_last,)
    seen = set()
    for window in sorted(windows, key=lambda each: math.prod(each or own_window(own.net))):
        for channels_last in layouts:
            try:
                plan = make(NetSizes(window, channels_last))
            except PlanError:  # a shard, block or augmentation that the recipe gives does not fit this window
                continue
            if plan.sizes not in seen and (candidate := _rated(plan, speeds, num_workers)) is not None:
                seen.add(plan.sizes)
                yield candidate


def _rated(plan: Plan, speeds: NetSpeeds, num_workers: int) -> _Candidate | None:
    """Return `plan` with its seconds and bytes; None where they are not known."""
    seconds = speeds.seconds(plan.window, channels_last=plan.channels_last)
    if seconds is None or net_bytes(plan, speeds) is None:
        return None
    rounds = -(-plan.num_active // num_workers)
    windows = rounds * _num_windows(plan) / plan.num_active  # of a worker: blocks are not divided among them
    return _Candidate(plan, windows * seconds, memory_bytes(plan, None, speeds=speeds))


def _num_windows(plan: Plan) -> int:
    return math.prod(len(windows_along(plan, axis)) for axis in range(3))


def _note(chosen: _Candidate, candidates: Iterable[_Candidate], own: _Candidate | None, worker_bytes: int) -> str:
    """Return what the choice gains over the net's own windows, and what the next larger would need; "" for nothing."""
    parts = []
    if own is not None and chosen.plan.window != own.plan.window:
        parts.append(
            f"{own.seconds / chosen.seconds:.2g} times as fast as windows of {shape(own.plan.window)}, the net's own"
        )
    larger = [each for each in candidates if each.num_bytes > worker_bytes and chosen.seconds > NOTABLE * each.seconds]
    if larger:
        next_one = min(larger, key=lambda each: each.num_bytes)
        parts.append(
            f"{shape(next_one.plan.window)} would be {chosen.seconds / next_one.seconds:.2g} times as fast again and "
            f"need {size(next_one.num_bytes)} a worker, for which this site has {size(worker_bytes)}"
        )
    return "; ".join(parts)
