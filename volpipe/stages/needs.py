"""What a stage of a flow needs: bytes, files and folders, which add up over stages.

Not here: the estimates that they come from (estimation.estimate), or limits of disks (estimation.limits).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from volpipe.estimation.estimate import Estimate


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


NOTHING = ResourceNeeds(0.0, 0.0, 0.0, 0, 0, 0.0, 0, 0, is_measured=True)
