"""Expected run length: how far a walk along a neuron gets, on the average, before the segmentation errs.

Not here: files of skeletons (skeletons), or reading labels (subject). The definition is that of Januszewski et al. 2018
(doi 10.1038/s41592-018-0049-4) as funlib.evaluate computes it (run_length.py, read 2026-11), and NERL that of BANIS
(nisb, metrics.py): the labels at the two nodes of an edge tell of what kind it is, the first that holds::

    omitted    one of them is 0, or a label that --ignore names
    split      they differ
    merged     they are one label, which a node of another neuron has, too
    correct    else

A run is all correct edges of one label in one piece; its length l is theirs, in nm. A point that is chosen at random
along all skeletons, of total length L, lies on a run of the expected length ERL = sum(l²) / L; off the runs it counts
0, so that of a label in two neurons neither has a run. NERL is ERL by that of a perfect segmentation, sum(p²) / L over
pieces of length p.

A piece is a connected part of a skeleton inside the box: nodes outside, and their edges, are left out, and a neuron
that the box cuts in two is no split. A label in two pieces of one neuron is no merge either. Of skeletons that are
connected and lie inside, each is one piece, and all numbers are those of funlib.evaluate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volpipe.errors import PlanError
from volpipe.evaluation.score import SKELETONS, Score, Total, Values
from volpipe.evaluation.skeletons import Skeletons
from volpipe.evaluation.texts import part_sheet, share_line
from volpipe.geometry.grid import Box, Grid
from volpipe.reporting.page import Sheet
from volpipe.segmentation.agglomerate import connected_components
from volpipe.units import count
from volpipe.volumes.places import Paired
from volpipe.volumes.storage.metadata import shown
from volpipe.volumes.storage.paths import whole_file
from volpipe.volumes.volume import Volume

SLIVER = 1e-3  # of a voxel: positions of 32 bits at the face of a voxel lie in it
SHORTEST, SHORT = 0.02, 0.3  # of a voxel: edges of real skeletons are not as short, and seldom are
UNPLACED = (
    "{} has no voxel size, so that nobody knows where nodes of skeletons lie, whose positions are in nm; give it one "
    "(`volpipe convert --voxel-size-nm …` makes a copy that has it)"
)
EDGE_KINDS = ("correct", "split", "merged", "omitted")
FIELDS = ("names", "neurons", "voxels", "blocks", "edges", "lengths")


@dataclass(frozen=True, eq=False)
class Nodes:
    """Nodes of skeletons in a box of a volume, by the blocks in which they lie, and the edges between them.

    Attributes:
        names: (neurons,), of all neurons that the skeletons have.
        neurons: (nodes,), int64, the place in `names` of each.
        voxels: (nodes, 3), int64, the voxel (z, y, x) of the volume that each lies in.
        blocks: (nodes,), int64, the number of its block, ascending.
        edges, lengths: (edges, 2), int64, the two nodes of each; (edges,), float64, nm.
    """

    names: np.ndarray
    neurons: np.ndarray
    voxels: np.ndarray
    blocks: np.ndarray
    edges: np.ndarray
    lengths: np.ndarray

    @classmethod
    def placed(cls, skeletons: Skeletons, volume: Volume, box: Box, block: tuple[int, ...]) -> Nodes:
        """Return the nodes that lie in `box` of `volume`, whose voxel size is known, by blocks of that shape."""
        voxels, grid = voxels_of(skeletons, volume), Grid(box.shape, block)
        places = voxels - np.array(box.start)
        inside = np.flatnonzero(is_inside(voxels, box))
        blocks = np.ravel_multi_index(tuple((places[inside] // np.array(block)).T), grid.counts)
        order = np.argsort(blocks, kind="stable")
        chosen = inside[order]
        number = np.full(len(voxels), -1)
        number[chosen] = np.arange(len(chosen))
        edges = skeletons.edges[(number[skeletons.edges] >= 0).all(axis=1)]
        ends = skeletons.positions[edges]
        return cls(
            np.array(skeletons.names, np.str_), skeletons.neurons[chosen], voxels[chosen], blocks[order],
            number[edges], np.linalg.norm(ends[:, 0] - ends[:, 1], axis=1),
        )  # fmt: skip

    def store(self, path: Path) -> None:
        """Write this to `path`, whole or not at all."""
        with whole_file(path) as file, file.open("wb") as stream:
            np.savez(stream, **{name: getattr(self, name) for name in FIELDS})

    @classmethod
    def load(cls, path: Path) -> Nodes:
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{name: arrays[name] for name in FIELDS})


def voxels_in(path: Path, block: int) -> np.ndarray:
    """Return the voxels (nodes, 3) of those nodes stored at `path` that lie in `block`."""
    with np.load(path, allow_pickle=False) as arrays:
        start, stop = np.searchsorted(arrays["blocks"], [block, block + 1])
        return np.asarray(arrays["voxels"][start:stop])


def voxels_of(skeletons: Skeletons, volume: Volume) -> np.ndarray:
    """Return the voxel (z, y, x) of `volume` that each node lies in, int64, counted on outside the volume."""
    assert volume.voxel_size_nm is not None
    places = (skeletons.positions - np.array(volume.origin_nm)) / np.array(volume.voxel_size_nm)
    return np.asarray(np.floor(np.clip(places + 0.5 + SLIVER, -(2.0**62), 2.0**62)).astype(np.int64))


def is_inside(voxels: np.ndarray, box: Box) -> np.ndarray:
    """Return for each of `voxels` (n, 3) whether it lies in `box`, bool."""
    return np.asarray(((voxels >= np.array(box.start)) & (voxels < np.array(box.stop))).all(axis=1))


def check_extent(skeletons: Skeletons, volume: Volume, box: Box) -> list[str]:
    """Refuse skeletons of which no node lies in `box`; return notes on where they lie and on their unit.

    Raises:
        PlanError: no node does, or positions are in another unit; with both extents.
    """
    size, positions = volume.voxel_size_nm, skeletons.positions
    if size is None:
        raise PlanError(UNPLACED.format(volume))
    inside = is_inside(voxels_of(skeletons, volume), box)
    low, high = (shown(tuple(ends)) for ends in (positions.min(axis=0), positions.max(axis=0)))
    extents = f"nodes lie from {low} to {high} nm (z, y, x), and {Paired('the output', volume).place}"
    if not inside.any():
        raise PlanError(
            f"no node of the skeletons lies in box {box} of the output: {extents}; give positions x, y, z in nm, in "
            "the space of the volume"
        )
    ends = positions[skeletons.edges] / np.array(size)
    steps = np.linalg.norm(ends[:, 0] - ends[:, 1], axis=1)
    step, notes = float(np.median(steps)) if len(steps) else 0.0, list[str]()
    if 0 < step < SHORT:
        sentence = (
            f"half of the edges of the skeletons are shorter than {step:.2g} voxels: {extents}; positions are in nm: "
            "multiply those that are in µm by 1000, and those in voxels by their size"
        )
        if step < SHORTEST:
            raise PlanError(sentence)
        notes.append(sentence)
    elif max(size) > 1 and is_inside(np.rint(positions), Box.from_shape(volume.spatial_shape)).all():
        notes.append(
            f"the positions of all nodes would be voxels of the output, too: {extents}; positions are in nm: multiply "
            "those in voxels by their size"
        )
    outside = ~inside
    if outside.any():
        neurons = len(np.unique(skeletons.neurons[outside]))
        notes.append(
            f"{outside.sum():,} of {count(len(outside), 'node')}, of {count(neurons, 'neuron')}, lie outside box "
            f"{box}; they and their edges are left out: {extents}"
        )
    return notes


@dataclass(frozen=True)
class NeuronScores:
    """Scores of one neuron: its length and the expected length of a run along it, in nm; and edges of each kind."""

    name: str
    length: float
    run_length: float
    correct: int
    split: int
    merged: int
    omitted: int


@dataclass(frozen=True)
class SkeletonTotal(Total):
    """The label (nodes,), uint64, at each of the nodes of skeletons; 0 is background."""

    nodes: Nodes
    labels: np.ndarray


def run_lengths_of(total: SkeletonTotal) -> Values:
    """Return the scores of a segmentation by skeletons; lengths in nm, NaN where there is no edge.

    They are: the expected run length, that of a perfect segmentation, and the first by the second (erl, max_erl, nerl);
    the length of all edges; numbers of edges (correct, split, merged, omitted); labels that nodes of several neurons
    have (mergers); and each neuron with a node inside, that with the most length off its expected run first.
    """
    nodes, labels = total.nodes, total.labels
    num, of_neuron = len(nodes.names), nodes.neurons[nodes.edges[:, 0]]
    pairs = np.unique(np.stack([labels, nodes.neurons.astype(np.uint64)])[:, labels != 0], axis=1)
    names, neurons_of_each = np.unique(pairs[0], return_counts=True)
    mergers = names[neurons_of_each > 1]
    one, other = labels[nodes.edges].T
    omitted = (one == 0) | (other == 0)
    split = ~omitted & (one != other)
    merged = ~omitted & ~split & np.isin(one, mergers)
    correct = ~(omitted | split | merged)
    piece = connected_components(len(labels), nodes.edges, np.arange(len(labels)))[nodes.edges[:, 0]]
    runs = np.unique(np.stack([piece[correct].astype(np.uint64), one[correct]]), axis=1, return_inverse=True)[1].ravel()
    run_lengths = np.bincount(runs, nodes.lengths[correct])
    neuron_of_run = np.zeros(len(run_lengths), np.int64)
    neuron_of_run[runs] = of_neuron[correct]
    squares = np.bincount(neuron_of_run, run_lengths**2, num)
    lengths = np.bincount(of_neuron, nodes.lengths, num)
    length = float(lengths.sum())
    erl = float(squares.sum()) / length if length else math.nan
    max_erl = float((np.bincount(piece, nodes.lengths) ** 2).sum()) / length if length else math.nan
    kinds = np.stack([np.bincount(of_neuron[kind], minlength=num) for kind in (correct, split, merged, omitted)])
    expected = np.divide(squares, lengths, out=np.zeros(num), where=lengths > 0)
    known = np.unique(nodes.neurons)
    neurons = tuple(
        NeuronScores(str(nodes.names[i]), float(lengths[i]), float(expected[i]), *kinds[:, i].tolist())
        for i in known[np.argsort((expected - lengths)[known], kind="stable")]
    )
    nerl = erl / max_erl if length else math.nan
    return {
        "erl": erl, "max_erl": max_erl, "nerl": nerl, "length": length,
        **dict(zip(EDGE_KINDS, kinds.sum(axis=1).tolist(), strict=True)),
        "mergers": len(mergers), "neurons": neurons,
    }  # fmt: skip


def run_length_cells(values: Values, volume: object) -> Mapping[str, str]:
    num = sum(values[kind] for kind in EDGE_KINDS)
    return {
        "expected run length": f"{values['erl']:,.1f} nm, of at most {values['max_erl']:,.1f} nm",
        "normalised (NERL)": f"{values['nerl']:.4f}",
        **{f"{kind} edges": share_line(values[kind], num) for kind in EDGE_KINDS},
        "merging objects": f"{values['mergers']:,} in several neurons",
        "neurons": f"{len(values['neurons']):,}, of {values['length']:,.1f} nm together",
    }


def run_length_tables(values: Values) -> list[Sheet]:
    return part_sheet("Neurons", values.get("neurons") or ())


RUN_LENGTH = Score(
    "run_length", (SKELETONS,), run_lengths_of, unit="nm", cells=run_length_cells, tables=run_length_tables
)
