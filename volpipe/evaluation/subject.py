"""Volumes that are looked at block by block on workers; what blocks give adds up.

Not here: what is made of the sums (evaluate, compare, measurements), or the work in its folder (driver). No process
holds more than a block of both, with a margin for SSIM and interpolation; a block gives a few numbers, or a table.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from volpipe.blockwise.journal import Record
from volpipe.blockwise.notes import Reporter
from volpipe.blockwise.task import work_each
from volpipe.errors import PlanError
from volpipe.evaluation.differences import PlainDifference
from volpipe.evaluation.label_scores import PlainOverlaps
from volpipe.evaluation.shell_correlation import CUBE
from volpipe.geometry.grid import Box, Grid, Index, Triple
from volpipe.volumes.values import image_share, take_sample
from volpipe.volumes.volume import Volume

BLOCK = (2 * CUBE,) * 3  # voxels: whole cubes of the Fourier shell correlation
CACHE_BYTES = 1 << 27
FINGERPRINT = "reference_fingerprint"  # the key of what is known of a reference that others may change


@dataclass(frozen=True)
class BlockSums:
    """Sums of blocks by their numbers, as plain values.

    Attributes:
        scores: those of each candidate, by its name and those of the scores that took them.
        differences: of images, those of each channel.
        tables: of labels, the voxels that each pair of them has.
        nodes: the label at each node of the skeletons that lie there.
        rows: of measurements, columns by their names.
    """

    scores: dict[int, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    differences: dict[int, list[PlainDifference]] = field(default_factory=dict)
    tables: dict[int, PlainOverlaps] = field(default_factory=dict)
    nodes: dict[int, list[int]] = field(default_factory=dict)
    rows: dict[int, dict[str, list[int | float]]] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Return all `parts` as one."""
        whole = cls()
        for part in parts:
            for name, entries in vars(whole).items():
                entries |= vars(part)[name]
        return whole


RESULTS = (BlockSums,)
Results = Callable[[], Iterable[BlockSums]]  # of all blocks, in any order, as often as it is called


@dataclass(frozen=True, kw_only=True)
class Subject(ABC):
    """Two volumes, and the box in which both are looked at.

    Attributes:
        a, b: the volumes, which may be one.
        a_start: the voxel of B at which the first of A lies.
        box: the part, in voxels (z, y, x) of B.
        data_range: of images, the greatest value less the least that there may be; None where nobody knows.
        block: voxels (z, y, x) that are read at once.
        notes: what a user should know of the volumes, in sentences.
        kind: what is looked at, for its description: "image", "labels" of objects, whose numbers mean nothing,
            "classes", whose numbers do, "skeletons" of such objects, or "rows".
        stage, mark: name of the stage, and of the file in the folder of the work that says what is looked at.
        doing: what a progress bar says.
        checks_labels: whether voxels are looked at before the first block: they must be labels, and no image.
        other_stands_in: whether a forecast looks at one of both twice where the other is not there yet: zeros, which
            stand in elsewhere, take no time in tables of labels.
    """

    a: Volume
    b: Volume
    box: Box
    data_range: float | None
    block: Triple
    notes: tuple[str, ...] = field(default=(), compare=False)
    a_start: Index = (0, 0, 0)
    kind: ClassVar[str]
    stage: ClassVar[str]
    mark: ClassVar[str]
    doing: ClassVar[str] = "comparing voxels"
    checks_labels: ClassVar[bool] = False
    other_stands_in: ClassVar[bool] = False

    @property
    def blocks(self) -> Grid:
        return Grid(self.box.shape, self.block)

    def own_box(self, block: int) -> Box:
        """Return the voxels of B that belong to `block`."""
        return self.blocks.box(block).shift(self.box.start)

    def read_box(self, block: int) -> Box:
        """Return the voxels of B that are read for `block`."""
        return self.own_box(block)

    def read_a(self, box: Box, session: str = "") -> np.ndarray:
        """Return the voxels (c, z, y, x) of A at `box` of B."""
        return read_block(self.a, box.relative_to(self.a_start), session)

    @property
    def outside(self) -> tuple[str, ...]:
        """Names of the inputs that no earlier stage of the flow makes, so that others may change them."""
        return ()

    @property
    def needs_whole_inputs(self) -> bool:
        """Whether all inputs must be written before the first block."""
        return self.checks_labels

    @property
    def identity(self) -> str:
        """A text of everything that the results depend on: kept times are found by it."""
        return str(self.describe())

    @abstractmethod
    def inputs(self) -> Mapping[str, Volume]:
        """Return the volumes that are read, by name."""

    @abstractmethod
    def sums(self, block: int, session: str) -> BlockSums:
        """Return the sums of a block; `session` names the driver's session, for which open volumes are kept."""

    def describe(self) -> dict[str, object]:
        """Return everything that the results depend on, as JSON values."""
        places = {name: str(volume) for name, volume in self.inputs().items()}
        is_incomplete = self.a.view.incomplete or self.b.view.incomplete
        facts: dict[str, object] = {"kind": self.kind, "box": str(self.box), "data_range": self.data_range}
        apart: dict[str, object] = {"reference_start": self.a_start} if any(self.a_start) else {}
        return {**places, **facts, **apart} | ({"incomplete": True} if is_incomplete else {})

    def describe_work(self) -> dict[str, object]:
        """Return the description by which the work's folder is recognised, as its file has it; no fingerprints."""
        described: dict[str, object] = json.loads(json.dumps(self.describe() | self.describe_sums()))
        return {key: value for key, value in described.items() if key != FINGERPRINT}

    def describe_sums(self) -> dict[str, object]:
        """Return the part of that description that tells sums of blocks from those of another version."""
        return {}


def reduce_blocks(
    subject: Subject, units: Sequence[int], session: str = "", run: str | None = None
) -> Record[BlockSums]:
    """Return the sums of the blocks `units`; a worker calls it, and writes to the folder `run` that it is alive."""
    own = Reporter(None if run is None else Path(run), session, subject.own_box)
    return work_each(subject.stage, units, lambda block: subject.sums(block, session), BlockSums.joined, reporter=own)


def tables(results: Results) -> Iterator[tuple[int, PlainOverlaps]]:
    """Yield the number and the table of labels of each block."""
    return (entry for part in results() for entry in part.tables.items())


def read_block(volume: Volume, box: Box, session: str = "") -> np.ndarray:
    """Return the voxels (c, z, y, x) of `volume` in `box`, as they are in this session."""
    return np.asarray(volume.open(cache_bytes=CACHE_BYTES, session=session).read(box))


def type_range(volume: Volume) -> float | None:
    """Return the range of the type, of whole numbers of 8 and 16 bits; None of others, which have no usual range."""
    if not np.issubdtype(volume.dtype, np.integer) or volume.dtype.itemsize > 2:
        return None
    return float(np.iinfo(volume.dtype).max) - float(np.iinfo(volume.dtype).min)


def refuse_image(volume: Volume, box: Box) -> None:
    """Refuse an image, by a sample of `box`: voxels of an object are like their neighbours, grey levels seldom.

    Raises:
        PlanError: naming the volume.
    """
    sample = take_sample(volume, box)
    if sample is not None and (share := image_share(sample)) is not None:
        raise PlanError(
            f"{volume} looks like an image, not like labels: of neighbouring voxels in {box} only {share:.0%} are "
            "alike, by a sample, and within objects all are; leave --labels out, or name the labels"
        )
