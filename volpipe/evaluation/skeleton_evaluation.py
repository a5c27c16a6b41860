"""An evaluation of labels of objects by skeletons of neurons.

Not here: files of skeletons (skeletons), or run lengths along them (run_lengths).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.errors import PlanError
from volpipe.evaluation import run_lengths
from volpipe.evaluation.evaluation import OUTPUT, Evaluation
from volpipe.evaluation.keys import OF_LABELS
from volpipe.evaluation.run_lengths import Nodes
from volpipe.evaluation.score import SKELETONS, Scores
from volpipe.evaluation.scores import skeleton_scores
from volpipe.evaluation.skeletons import check_makeable, read_skeletons, skeletons_of
from volpipe.evaluation.subject import BlockSums, Results, read_block
from volpipe.geometry.grid import Box, triple
from volpipe.geometry.labels import Ignore, ignored, in_64_bits
from volpipe.reporting.panels import Panel
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.volume import Volume


@dataclass(frozen=True, kw_only=True)
class SkeletonEvaluation(Evaluation):
    """An evaluation of labels of objects by the labels at nodes of skeletons.

    Attributes:
        ignore: labels of the reference of which nothing is known, and of the output that are none; None for RESERVED.
        skeletons: the path of the skeletons, or OF_LABELS: they are made of the reference.
        fingerprint: of skeletons in files, what they hold; "" where they are made of the reference.
        nodes: file of the `Nodes`, on workers; "" elsewhere.
    """

    skeletons: str
    ignore: Ignore = None
    fingerprint: str = ""
    nodes: str = ""
    kind = SKELETONS

    @property
    def truth(self) -> str:
        return self.skeletons if self.fingerprint else str(self.reference)

    def inputs(self) -> dict[str, Volume]:
        is_in_files = bool(self.fingerprint)
        return {name: each for name, each in super().inputs().items() if not (is_in_files and name == "reference")}

    def describe_choices(self) -> dict[str, object]:
        return {"ignore": self.ignore, "skeletons": self.skeletons, "skeletons_fingerprint": self.fingerprint}

    def describe_reference(self) -> dict[str, object]:
        return {} if self.fingerprint else super().describe_reference()

    @classmethod
    def choices_of(cls, output: Volume, ignore: Ignore, skeletons: str) -> dict[str, Any]:  # Any: of each field
        return {"ignore": ignore, "skeletons": skeletons}

    def with_notes(self, exchanged: Sequence[str]) -> tuple[SkeletonEvaluation, list[str]]:
        if self.skeletons != OF_LABELS:
            skeletons = read_skeletons(self.skeletons)
            notes = run_lengths.check_extent(skeletons, self.output, self.box)
            return replace(self, fingerprint=skeletons.fingerprint), [*notes, *exchanged]
        check_makeable(self.box)
        _known_size(self.placed)
        return self, [*exchanged]

    @property
    def placed(self) -> Volume:
        """The output, or else its reference, which has the same voxels: the one whose voxel size is known."""
        return self.output if self.output.voxel_size_nm is not None else self.reference

    def with_nodes(self, path: Path) -> SkeletonEvaluation:
        return replace(self, nodes=str(path))

    def store_nodes(self) -> None:
        """Write the nodes of the skeletons for workers; those that are there stay.

        Raises:
            PlanError: they have changed since they were planned.
        """
        path, place = Path(self.nodes), self.placed
        if path.is_file():
            return
        if self.fingerprint:
            skeletons = read_skeletons(self.skeletons)
            if skeletons.fingerprint != self.fingerprint:
                raise PlanError(f"{self.skeletons} has changed since it was looked at; give the command again")
        else:
            size = _known_size(place)
            start = tuple(o + n * s for o, n, s in zip(place.origin_nm, self.box.start, size, strict=True))
            skeletons = skeletons_of(self.read_a(self.box)[0], size, triple(start), self.ignore)
            run_lengths.check_extent(skeletons, place, self.box)
        Nodes.placed(skeletons, place, self.box, self.block).store(path)

    def sums(self, block: int, session: str) -> BlockSums:
        voxels = run_lengths.voxels_in(Path(self.nodes), block) if self.nodes else np.zeros((0, 3), int)
        if not len(voxels):
            return BlockSums()
        start = voxels.min(axis=0)
        box = Box(triple(start.tolist()), triple((voxels.max(axis=0) + 1).tolist()))
        labels = read_block(self.output, box, session)[0][tuple((voxels - start).T)]
        return BlockSums(nodes={block: labels.astype(np.uint64).tolist()})

    def scores(self, results: Results) -> dict[str, Scores]:
        parts = sorted(BlockSums.joined(results()).nodes.items())
        labels = np.array([label for _, part in parts for label in part], np.uint64)
        no_objects = [in_64_bits(n) for n in ignored(self.output.dtype, self.ignore)]
        labels[np.isin(labels, np.array(no_objects, np.uint64))] = 0
        return {OUTPUT: skeleton_scores(Nodes.load(Path(self.nodes)), labels)}

    def panels(self, slices: dict[str, np.ndarray], title: str) -> tuple[list[Panel], list[Panel]]:
        """Return pictures of slices (y, x), an object in one colour; skeletons in files are no volume."""
        is_in_files = bool(self.fingerprint)
        return super().panels({n: d for n, d in slices.items() if not (is_in_files and n == "reference")}, title)


def _known_size(volume: Volume) -> Lengths:
    """Return the size of a voxel; refuse a volume that does not say it."""
    if volume.voxel_size_nm is None:
        raise PlanError(run_lengths.UNPLACED.format(volume))
    return volume.voxel_size_nm
