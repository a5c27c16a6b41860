"""The choice of windows, layout of tensors and precision: the fastest, as measured, for which workers have the memory.

Not here: how windows and precisions are measured (measure), or where a plan cuts windows (inference.tiling). It rests
on sizes, on facts of the net and on what the site gives its workers, so that the same command makes the same plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from volpipe.blockwise.pool import Capacity
from volpipe.errors import NOTICE, PlanError
from volpipe.estimation.measure import (
    GPU_PRECISIONS,
    difference_here,
    difference_key,
    has_bfloat16,
    is_quick_to_compare,
    processor,
    speeds_here,
)
from volpipe.estimation.memory import gpu_bytes, memory_bytes, net_bytes
from volpipe.estimation.window_search import LAYOUTS
from volpipe.inference.plan import OWN_SIZES, NetSizes, Plan
from volpipe.inference.tiling import own_window
from volpipe.inference.windows import windows_along
from volpipe.nets.cache import (
    can_store_measured,
    keep_speeds,
    kept_speeds,
    known_speeds,
    load_measured,
    store_measured,
)
from volpipe.nets.facts import (
    FLOAT32,
    NetSpeeds,
    PrecisionDifference,
    shipped_difference,
    shipped_speeds,
)
from volpipe.nets.tta import forms
from volpipe.recipes.inference import Precision
from volpipe.units import shape, size

WORTH_MEASURING = 400**3  # voxels that are computed; fewer take a minute or so, and are not worth ten seconds
WORTH_MEASURING_ON_GPU = 1200**3
TASK_SECONDS = 720.0  # of a core for a block, as measured; the sites of clusters give a task twice as long
GPU_TIMES = 10.0  # as fast as a core that a GPU is at least, where nothing was measured on it; an H100 is 180 times
UNKNOWN_ON_GPU = 512**3  # voxels of a block on a GPU, of a net of which nothing was measured: 0.2 million a second
NOTABLE = 1.03  # times as fast: less is no reason for larger windows, or to speak of
WORTH_ROUNDING = 1.2  # times as fast: less is no reason to speak of another precision
MOST_LEVELS = 1  # of 8 bits by which an output may differ
MOST_RELATIVE = 1e-3  # share of an output's range by which numbers that are not rounded may differ

UNTIMED = "the net's own; `volpipe net NAME --config SITE` times others on the site's GPUs, once for all plans"
SHIPPED = "as timed on another machine; `volpipe net NAME --config local` times windows on this one, once for all plans"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Candidate:
    """A plan with some sizes: seconds of its net on the workers of a site, and the memory of one, or of its GPU."""

    plan: Plan
    seconds: float
    num_bytes: float

    @property
    def voxels(self) -> int:
        return math.prod(self.plan.window)


def fastest_plan(make: Callable[[NetSizes], Plan], capacity: Capacity | None) -> Plan:
    """Return the plan with the fastest sizes, of those that `make` takes, for which workers have the memory.

    The net's own where nobody knows the memory of workers, or which GPU they have, or where nothing was measured.
    Windows that are not cropped to their core by the net's halo stay: another size would change the output by more than
    last bits. A large block takes a core, or a GPU, no longer than TASK_SECONDS.
    """
    own = make(OWN_SIZES)
    if capacity is None:
        return own
    # The memory in which a net computes: of a worker, or of its GPU; None where that is not known.
    most_bytes = capacity.worker_bytes
    if capacity.on_gpu:
        most_bytes = None if capacity.gpu is None else capacity.gpu.num_bytes
    is_open = most_bytes is not None and _is_open(own)
    is_asked = (is_open or own.has_slabs) and (capacity.gpu is not None or not capacity.on_gpu)
    speeds = _speeds(own, capacity) if is_asked else None
    is_untimed = capacity.on_gpu and not capacity.is_here and speeds is None
    plan = own
    if is_untimed and _is_open(own) and _is_large(own, on_gpu=True):
        plan = own.changed(notes=replace(own.notes, windows=UNTIMED))
    if most_bytes is not None and is_open and speeds is not None:
        plan = _fastest_measured(make, own, speeds, capacity, most_bytes)
    return _in_short_tasks(make, plan, speeds, on_gpu=capacity.on_gpu)


def _fastest_measured(
    make: Callable[[NetSizes], Plan], own: Plan, speeds: NetSpeeds, capacity: Capacity, most_bytes: int
) -> Plan:
    allowed = _allowed(own, speeds, capacity)
    candidates = list(_candidates(make, own, speeds, capacity, allowed))
    fitting = [each for each in candidates if each.num_bytes <= most_bytes and _fits_worker(each.plan, capacity)]
    is_auto = own.recipe.infer.precision == "auto"
    chosen = _fastest(fitting if is_auto else _in_precision(fitting, own.precision))
    if chosen is None:
        return own  # and is refused where the run begins
    before = _rated(own.changed(precision=chosen.plan.precision), speeds, capacity)
    same = _in_precision(candidates, chosen.plan.precision)
    note = _gain_note(chosen, same, before, most_bytes, "a GPU" if capacity.on_gpu else "a worker")
    if note and _is_large(own, on_gpu=capacity.on_gpu) and speeds == shipped_speeds(own.recipe.net):
        note = f"{note}; {SHIPPED}"
    return chosen.plan.changed(
        notes=replace(own.notes, windows=note, precision=_precision_note(chosen.plan, fitting, allowed))
    )


def _fits_worker(plan: Plan, capacity: Capacity) -> bool:
    """Return whether a worker whose net is on a GPU has the memory for the rest."""
    if not capacity.on_gpu or capacity.worker_bytes is None:
        return True
    return memory_bytes(plan, None, on_gpu=True) <= capacity.worker_bytes


def _in_short_tasks(make: Callable[[NetSizes], Plan], plan: Plan, speeds: NetSpeeds | None, *, on_gpu: bool) -> Plan:
    """Return `plan` with blocks that are computed in TASK_SECONDS, small ones where nobody knows how long it takes.

    A lost worker begins its block again, and a job of a cluster that takes less time than a block never ends one.
    """
    if not plan.has_slabs or not plan.net.num_parameters:
        return plan
    seconds = _window_seconds(plan, speeds)
    if seconds is None and on_gpu:
        of_core = _window_seconds(plan, known_speeds(plan.recipe.net, plan.net, plan.search_path, processor()))
        seconds = None if of_core is None else of_core / GPU_TIMES
    block_voxels = UNKNOWN_ON_GPU if on_gpu else 0
    if seconds is not None:
        calls = math.prod(plan.block) * len(list(forms(plan.recipe.infer.augment)))
        block_voxels = int(math.prod(plan.shard) * TASK_SECONDS / (calls * seconds))
    if math.prod(plan.shard) <= block_voxels:
        return plan
    smaller = make(replace(plan.sizes, block_voxels=block_voxels))
    return plan.changed(block=smaller.block, shard=smaller.shard, chunk=smaller.chunk)


def _window_seconds(plan: Plan, speeds: NetSpeeds | None) -> float | None:
    """Return the seconds of the net for a window of `plan`, in float32 where its precision was not measured."""
    known = None if speeds is None else speeds.of(plan.arithmetic) or speeds.of(FLOAT32)
    return None if known is None else known.seconds(math.prod(plan.window))


def _fastest(candidates: Sequence[_Candidate]) -> _Candidate | None:
    """Return the smallest windows of those that are about as fast as the fastest; None where there are none."""
    best = min((candidate.seconds for candidate in candidates), default=0.0)
    nearly = [candidate for candidate in candidates if candidate.seconds <= NOTABLE * best]
    return min(nearly, key=lambda candidate: candidate.voxels, default=None)


def _in_precision(candidates: Iterable[_Candidate], precision: Precision) -> list[_Candidate]:
    return [candidate for candidate in candidates if candidate.plan.precision == precision]


def _is_open(plan: Plan) -> bool:
    """Return whether something is left to choose for a net that computes as it was measured."""
    choice = plan.recipe.infer
    is_plain = not (choice.exact or choice.compile)
    return is_plain and "auto" in (choice.channels_last, choice.precision, plan.recipe.windows.shape)


def _is_large(plan: Plan, *, on_gpu: bool) -> bool:
    """Return whether the net computes long enough that it is worth measuring."""
    least = WORTH_MEASURING_ON_GPU if on_gpu else WORTH_MEASURING
    return _num_windows(plan) * math.prod(plan.window) >= least


def _num_windows(plan: Plan) -> int:
    return math.prod(len(windows_along(plan, axis)) for axis in range(3))


def _speeds(plan: Plan, capacity: Capacity) -> NetSpeeds | None:
    """Return what windows of the net cost here, or on the site's GPU; if unknown, measured here where it pays."""
    choice, folder, gpu = plan.recipe.net, plan.search_path, capacity.gpu
    name, is_away = _processor(capacity), gpu is not None and not capacity.is_here
    known = (known_speeds if gpu is None else kept_speeds)(choice, plan.net, folder, name)
    if known is not None or is_away or not _is_large(plan, on_gpu=gpu is not None):
        return known
    if not can_store_measured(choice, folder):
        return None
    log.info("times windows of net %s, once", plan.net.label, extra=NOTICE)
    measured = speeds_here(choice, plan.net, folder, gpu="" if gpu is None else gpu.name)
    if measured is None:
        log.warning("windows of net %s could not be timed on %s; the net's own are taken", plan.net.label, name)
    if measured is not None or gpu is None:  # a GPU may have been in use
        keep_speeds(choice, plan.net, folder, measured or NetSpeeds(processor=name))  # so that no plan tries it again
    return measured


def _processor(capacity: Capacity) -> str:
    """Return the name of what computes, by which its speeds are remembered."""
    return processor() if capacity.gpu is None else capacity.gpu.name


def _allowed(plan: Plan, speeds: NetSpeeds, capacity: Capacity) -> dict[Precision, PrecisionDifference]:
    """Return what the other precisions change in the output of `plan`; none where it is too much, not known, or of no
    use.

    Where they are not asked for, it is of use to speak of them for a large volume.
    """
    precision, has_gpu = plan.recipe.infer.precision, capacity.gpu is not None
    if precision != "auto" and (precision != "float32" or not _is_large(plan, on_gpu=has_gpu)):
        return {}
    others = GPU_PRECISIONS if has_gpu else ("bfloat16",) if has_bfloat16() else ()
    timed = [each for each in others if speeds.of(FLOAT32._replace(precision=each)) is not None]
    measured = {each: _precision_difference(plan, each, speeds, capacity) for each in timed}
    return {each: found for each, found in measured.items() if found is not None and is_allowed(plan, found)}


def _precision_difference(
    plan: Plan, precision: Precision, speeds: NetSpeeds, capacity: Capacity
) -> PrecisionDifference | None:
    """Return how the net's output differs in `precision`, measured now where nobody knows and it does not take long."""
    choice, net, normalise = plan.recipe.net, plan.net, plan.recipe.normalise
    known = shipped_difference(choice)
    if precision == "bfloat16" and known is not None and known.normalise == normalise:
        return known
    what, folder = difference_key(precision, normalise, net, _processor(capacity)), plan.search_path
    known = load_measured(choice, folder, what, PrecisionDifference)
    if known is not None or (capacity.gpu is not None and not capacity.is_here):
        return known
    is_worth_it = is_quick_to_compare(net, speeds) and _is_large(plan, on_gpu=capacity.gpu is not None)
    if not is_worth_it or not can_store_measured(choice, folder):
        return None
    device = "cpu" if capacity.gpu is None else "cuda"
    measured = difference_here(choice, normalise, net, folder, precision=precision, device=device)
    store_measured(choice, folder, what, measured)
    return measured


def is_allowed(plan: Plan, measured: PrecisionDifference) -> bool:
    """Return whether the output of `plan` may be computed with this difference, by how it is rounded.

    Labels never may. Nor may whole numbers of more than 8 bits: their levels are finer than bfloat16 and TF32 are.
    """
    if plan.is_labels or measured.normalise != plan.recipe.normalise:
        return False
    if np.issubdtype(plan.dtype, np.floating):
        return measured.relative <= MOST_RELATIVE
    # the levels of the output are those of the output of 8 bits that was measured
    is_same_range = plan.intensity == plan.net.intensity and (
        plan.intensity == "unit" or plan.source.grey_dtype == "uint8"
    )
    is_grey = plan.dtype == np.uint8 and is_same_range
    return is_grey and measured.levels is not None and measured.levels <= MOST_LEVELS


def _candidates(
    make: Callable[[NetSizes], Plan],
    own: Plan,
    speeds: NetSpeeds,
    capacity: Capacity,
    others: Iterable[Precision],
) -> Iterator[_Candidate]:
    """Yield the plans to choose from, those of smaller windows first, each also in the precisions `others`."""
    measured = {speed.window for each in speeds.speeds for speed in each.windows}
    choice, net = own.recipe.windows, own.net
    # Whether other windows can be taken, and would change last bits alone.
    is_exact = choice.blend == "crop" and net.tile_invariant and not own.recipe.net.accept_tile_variance
    has_others = choice.shape == "auto" and is_exact and not any(net.fixed)
    windows = [None, *measured] if has_others else [None]
    layouts = LAYOUTS if own.recipe.infer.channels_last == "auto" else (own.channels_last,)
    seen = set()
    for window in sorted(windows, key=lambda each: math.prod(each or own_window(own.net))):
        for channels_last in layouts:
            try:
                plan = make(NetSizes(window, channels_last))
            except PlanError:  # a shard, block or augmentation that the recipe gives does not fit this window
                continue
            for same in (plan.changed(precision=precision) for precision in (own.precision, *others)):
                timed = speeds.of(same.arithmetic)
                is_timed = timed is not None and any(speed.window == window for speed in timed.windows)
                if same.sizes in seen or not (window is None or is_timed):
                    continue
                if (candidate := _rated(same, speeds, capacity)) is not None:
                    seen.add(same.sizes)
                    yield candidate


def _rated(plan: Plan, speeds: NetSpeeds, capacity: Capacity) -> _Candidate | None:
    """Return `plan` with its seconds and bytes; None where they are not known."""
    known = speeds.of(plan.arithmetic)
    seconds = None if known is None else known.seconds(math.prod(plan.window))
    if seconds is None or net_bytes(plan, speeds) is None:
        return None
    rounds = -(-plan.num_active // capacity.num_workers)
    windows = rounds * _num_windows(plan) / plan.num_active  # of a worker: blocks are not divided among them
    num_bytes = gpu_bytes(plan, speeds) if capacity.on_gpu else memory_bytes(plan, None, speeds=speeds)
    return _Candidate(plan, windows * seconds, num_bytes)


def _precision_note(
    chosen: Plan, fitting: Sequence[_Candidate], allowed: Mapping[Precision, PrecisionDifference]
) -> str:
    """Return what another precision gains or would gain, and what it changes; "" where it gains little."""
    float32, other = _fastest(_in_precision(fitting, "float32")), _fastest(fitting)
    if float32 is None or other is None or float32.seconds < WORTH_ROUNDING * other.seconds:
        return ""
    precision = other.plan.precision
    measured = allowed[precision]
    if np.issubdtype(chosen.dtype, np.floating):
        change = f"voxels by at most {measured.relative:.1g} of the output's range"
    else:
        change = f"{measured.share:.2g} of the voxels by one grey level" if measured.levels else "no voxel"
    would = "" if precision == chosen.precision else "float32; infer.precision=auto would take "
    return (
        f"{would}{precision}, {float32.seconds / other.seconds:.2g} times as fast as float32; over an invented volume "
        f"it changes {change}"
    )


def _gain_note(
    chosen: _Candidate, candidates: Iterable[_Candidate], own: _Candidate | None, most_bytes: int, owner: str
) -> str:
    """Return what the choice gains over the net's own windows, and what the next larger would need; "" for nothing."""
    parts = []
    if own is not None and chosen.plan.window != own.plan.window:
        parts.append(
            f"{own.seconds / chosen.seconds:.2g} times as fast as windows of {shape(own.plan.window)}, the net's own"
        )
    larger = [each for each in candidates if each.num_bytes > most_bytes and chosen.seconds > NOTABLE * each.seconds]
    if larger:
        next_one = min(larger, key=lambda each: each.num_bytes)
        parts.append(
            f"{shape(next_one.plan.window)} would be {chosen.seconds / next_one.seconds:.2g} times as fast again and "
            f"need {size(next_one.num_bytes)} {owner}, for which this site has {size(most_bytes)}"
        )
    return "; ".join(parts)
