"""The kind of stages that make labels: their plan among other stages, and what they take.

Not here: the segmentation (driver), or its plan by itself (plan).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import Steps
from volpipe.estimation.limits import check_access
from volpipe.estimation.memory import WORKER_BYTES
from volpipe.inference.output import check_output, suffix_of
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.recipes.workflow import FlowStage
from volpipe.segmentation.driver import SegmentWork, check_memory, plan_segmentation
from volpipe.segmentation.estimate import SegmentTrial, calibrate_segmentation
from volpipe.segmentation.plan import SegmentPlan, check_offsets, fit
from volpipe.stages.kind import Planning, StageCost, StagePlan, fed, voxel_bytes
from volpipe.stages.needs import ResourceNeeds
from volpipe.units import count, size
from volpipe.volumes.formats.container import array_folders

INTENSITIES = {"same": "grey levels of its input", "raw": "numbers of its own"}  # of a net that is no sigmoid
METADATA_FILES = 2  # of labels, beside that of each level: their group, and the group of what changes from run to run


class LabelStage(StagePlan):
    """A segmentation."""

    kind = "label"
    about = "a segmentation."
    keys = SegmentRecipe
    shown = "labels"
    maker = SegmentWork
    plan_type = SegmentPlan
    plan: SegmentPlan

    @classmethod
    def planned(cls, stage: FlowStage, among: Planning) -> LabelStage:
        recipe: SegmentRecipe = stage.choice
        feed = among.feed(stage)
        out, fresh = among.folder / f"{stage.name}{suffix_of(recipe.output.format)}", among.sizing.fresh
        if feed is None:
            plan = plan_segmentation(among.location, recipe, out, among.search_path, fresh=fresh)
            return cls(stage.name, stage.reads, plan.source.volume(), out, plan, beside=stage.beside)
        given = fed(feed, stage.array, recipe.input)
        check_offsets(given, recipe, feed.offsets(stage.array))
        plan = fit(given, recipe, out, among.search_path, fresh=fresh)
        check_output(plan)
        check_access(None, out)
        is_probabilities = recipe.input.range is None and not plan.method.is_anchored
        if (intensity := feed.intensity(stage.array)) in INTENSITIES and is_probabilities:
            note = (
                f"the net of stage {feed.name} gives {INTENSITIES[intensity]}, and {recipe.input.kind} are "
                "probabilities: set net.intensity=unit there if it gives 0 to 1, or input.range here to the values "
                "that mean 0 and 1"
            )
            plan = plan.changed(value_notes=(note,))
        return cls(stage.name, stage.reads, given, out, plan, stage.array, stage.beside)

    @property
    def summary(self) -> str:
        return plan_line(self.plan)

    def needs(self) -> tuple[ResourceNeeds, float | None]:
        return label_needs(self.plan, voxel_bytes(self.given)), None

    def cost_steps(
        self, earlier: Sequence[StageCost], pool: WorkerPool | None, trials: Path | None
    ) -> Steps[StageCost]:
        """Return the needs of the segmentation, and its times where blocks are tried."""
        pending, times = self.pending_input(earlier), None
        if pool is not None:
            check_memory(self.plan, pool.worker_bytes)  # before the stages that come first
        if pool is not None and trials is not None:
            trial = SegmentTrial(self.plan, self.given, pending is None, str(trials))
            times = yield from calibrate_segmentation(trial, pool)
            times = replace(times, memory_bytes=WORKER_BYTES + self.plan.task_bytes)
        per_voxel = voxel_bytes(self.given) if pending is None else pending.voxel_bytes
        needs = label_needs(self.plan, per_voxel)
        return StageCost(self, needs, None, 0.0 if self.is_complete else 1.0, times)


def label_needs(plan: SegmentPlan, voxel_bytes: float) -> ResourceNeeds:
    """Return the needs of a labelling; two of its passes read the volume, of `voxel_bytes` per voxel, or one."""
    halo, num_passes = (plan.method.halo(plan.recipe), 1) if plan.method.is_anchored else (plan.reach, 2)
    seen = num_passes * math.prod(b + 2 * r for b, r in zip(plan.block, halo, strict=True)) / math.prod(plan.block)
    num_levels = len(plan.factors)
    levels = [float(math.prod(plan.level_shape(i)) * plan.dtype.itemsize) for i in range(num_levels)]
    return ResourceNeeds(
        seen * voxel_bytes * math.prod(plan.shape) + plan.scratch_bytes + sum(levels[:-1]),
        sum(levels) + plan.scratch_bytes,
        sum(levels),
        sum(len(plan.shards(i)) for i in range(num_levels)) + num_levels + METADATA_FILES,
        plan.num_folders,
        plan.scratch_bytes,
        3 * len(plan.blocks),
        2 + array_folders("zarr3").scheme.count_folders(plan.blocks.counts),
        is_measured=False,
    )


def plan_line(plan: SegmentPlan) -> str:
    """Return the output, memory and scratch of `plan` in one line."""
    shape, need = " × ".join(map(str, plan.shape)), label_needs(plan, 0.0)
    return (
        f"{shape} voxels in {count(len(plan.blocks), 'block')} of {' × '.join(map(str, plan.block))}: writes up to "
        f"{size(need.output_bytes)} in {count(need.output_files, 'file')}, takes up to {size(plan.task_bytes)} of "
        f"memory per task, {size(plan.scratch_bytes)} of scratch, and {plan.recipe.output.graph_gib:g} GiB for the "
        f"graph of a box of them; {count(len(plan.factors), 'level')}"
    )
