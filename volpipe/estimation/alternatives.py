"""Alternatives to a plan: the other mode, other block shapes; the estimate of each, and why it was not chosen.

Not here: the choice itself (inference.plan), which rests on sizes alone, so that the same command makes the same plan
everywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from volpipe.errors import PlanError
from volpipe.estimation.estimate import Estimate, Slots, UnitCosts, estimate, upper_bounds
from volpipe.estimation.memory import array_bytes
from volpipe.geometry.block_shape import BLOCKS_PER_WORKER, ENOUGH_BLOCKS
from volpipe.geometry.grid import triple
from volpipe.inference.plan import Plan, make_plan
from volpipe.volumes.storage.paths import locate
from volpipe.volumes.volume import Volume

NOTABLE = 1.05  # a ratio below says nothing


@dataclass(frozen=True)
class Alternative:
    """A plan, its estimate, and the reason for the chosen one or against this one."""

    plan: Plan
    estimate: Estimate
    why: str
    is_chosen: bool = False


def alternatives(
    plan: Plan, chosen: Estimate, volume: Volume, voxel_bytes: float, slots: Slots, share: float = 1.0
) -> list[Alternative]:
    """Return `plan` first, then those of another mode or block shape; see `estimate`."""
    others = []
    for other in _others(plan, volume):
        rates = _rates_of(other, plan, chosen.rates) if chosen.rates else None
        others.append((other, estimate(other, volume, voxel_bytes, slots, rates, share)))
    rows = [Alternative(other, result, _against(result, chosen, other.num_active, slots)) for other, result in others]
    return [Alternative(plan, chosen, _for(plan, chosen, [result for _, result in others]), is_chosen=True), *rows]


def _others(plan: Plan, volume: Volume) -> Iterator[Plan]:
    larger = triple(min(2 * n, most) for n, most in zip(plan.block, plan.lattice.counts, strict=True))
    shapes = {plan.block, larger, triple(max(1, n // 2) for n in plan.block)}
    for mode in ("streamed", "stored"):
        for block in sorted(shapes):
            if (mode, block) == (plan.mode, plan.block):
                continue
            tensors = plan.recipe.tensors.model_copy(update={"mode": mode})
            windows = plan.recipe.windows.model_copy(update={"block": block})
            recipe = plan.recipe.model_copy(update={"tensors": tensors, "windows": windows})
            try:
                out, folder = locate(plan.out), plan.search_path
                yield make_plan(recipe, volume, plan.net, out=out, search_path=folder, sizes=plan.sizes)
            except PlanError:  # a shard that the recipe gives does not fit this block
                continue


def _rates_of(other: Plan, plan: Plan, rates: UnitCosts) -> UnitCosts:
    """Return the rates of `plan` as they would be with the blocks of `other`."""
    return dataclasses.replace(
        rates,
        sum_bytes=rates.sum_bytes or upper_bounds(other).sum_bytes,
        peak_bytes=rates.peak_bytes + array_bytes(other) - array_bytes(plan),
    )


def _measures(result: Estimate) -> dict[str, float]:
    return {
        "the time": result.seconds or 0.0,
        "the bytes read and written": result.read_bytes + result.written_bytes,
        "the scratch": result.scratch_bytes,
        "the files": result.output_files + result.scratch_files,
        "the memory": result.memory_bytes,
    }


def _against(other: Estimate, chosen: Estimate, num_blocks: int, slots: Slots) -> str:
    if num_blocks < max(ENOUGH_BLOCKS, BLOCKS_PER_WORKER * slots.gpu):
        return f"too few blocks ({num_blocks}) for its workers ({slots.gpu})"
    own, least = _measures(other), _measures(chosen)
    more = {name: value for name, value in own.items() if value > NOTABLE * least[name]}
    worse = {name: value / least[name] if least[name] else math.inf for name, value in more.items()}
    if not worse:
        return "nothing much; it may be set in the recipe"
    ranked = sorted(worse, key=lambda name: -worse[name])[:2]
    return ", ".join(
        f"{worse[name]:.3g} × {name}" if math.isfinite(worse[name]) else f"needs {name[4:]}" for name in ranked
    )


def _for(plan: Plan, chosen: Estimate, others: Sequence[Estimate]) -> str:
    if plan.recipe.tensors.mode != "auto" or plan.recipe.windows.block != "auto":
        return "set in the recipe"
    own = _measures(chosen)
    best = [name for name, value in own.items() if value and all(value <= NOTABLE * _measures(o)[name] for o in others)]
    if best:
        return f"least of {', '.join(name[4:] for name in best)}"
    return "few files and fetches, and blocks enough" if plan.has_slabs else "blocks near 256 voxels an axis"
