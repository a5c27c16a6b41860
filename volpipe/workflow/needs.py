"""What a stage of a flow needs: bytes, files and folders, which add up over stages.

Not here: the estimates that they come from (estimation.estimate), or limits of disks (estimation.limits).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from volpipe.estimation.estimate import Estimate
from volpipe.segmentation.plan import SegmentPlan
from volpipe.volumes.formats.container import array_folders

METADATA_FILES = 2  # of labels, beside that of each level: their group, and the group of what changes from run to run


@dataclass(frozen=True)
class ResourceNeeds:
    """Bytes, files and folders of one stage, scratch at its highest.

    Bytes that were not measured are upper bounds.
    """

    read_bytes: float
    written_bytes: float
    output_bytes: float
    output_files: int
    output_folders: int
    scratch_bytes: float
    scratch_files: int
    scratch_folders: int
    is_measured: bool

    @property
    def most_bytes(self) -> float:
        """Bytes on the disk at their highest."""
        return self.output_bytes + self.scratch_bytes

    @property
    def most_inodes(self) -> int:
        """Files and folders on the disk at their highest."""
        return self.output_files + self.output_folders + self.scratch_files + self.scratch_folders

    def __add__(self, other: ResourceNeeds) -> ResourceNeeds:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return ResourceNeeds(**sums | {"is_measured": self.is_measured and other.is_measured})

    @classmethod
    def from_estimate(cls, result: Estimate) -> ResourceNeeds:
        return cls(**{field.name: getattr(result, field.name) for field in fields(cls)})

    @classmethod
    def from_labels(cls, plan: SegmentPlan, voxel_bytes: float) -> ResourceNeeds:
        """Return the needs of a labelling; two of its passes read the volume, of `voxel_bytes` per voxel."""
        seen = math.prod(b + 2 * r for b, r in zip(plan.block, plan.reach, strict=True)) / math.prod(plan.block)
        num_levels = len(plan.factors)
        levels = [float(math.prod(plan.level_shape(i)) * plan.dtype.itemsize) for i in range(num_levels)]
        return cls(
            2 * seen * voxel_bytes * math.prod(plan.shape) + plan.scratch_bytes + sum(levels[:-1]),
            sum(levels) + plan.scratch_bytes,
            sum(levels),
            sum(len(plan.shards(i)) for i in range(num_levels)) + num_levels + METADATA_FILES,
            plan.num_folders,
            plan.scratch_bytes,
            3 * len(plan.blocks),
            2 + array_folders("zarr3").scheme.count_folders(plan.blocks.counts),
            is_measured=False,
        )


NOTHING = ResourceNeeds(0.0, 0.0, 0.0, 0, 0, 0.0, 0, 0, is_measured=True)
