"""The seam score of an output: how much neighbouring voxels differ across the faces of windows, by how much inside.

Not here: who is told (cli, provenance). Per axis, from voxels as stored, a sample of the faces of windows' cores::

    -- a b | c d --      across (c - b)², inside (b - a)² and (d - c)², one step of the net's own grid from the face

Nets that pool and upsample differ by their grid's phase, so that inside is taken in the phase of the face: a step is
the net's stride in voxels of the output, one for most. A score is the ratio of the means, 1 where no face can be seen.
The same ratio at places beside the faces says how far from 1 the tissue alone takes it: much in a small volume, where a
score is that of one or two planes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.geometry.grid import Box
from volpipe.inference.output import read_each
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection
from volpipe.inference.tiling import AXES
from volpipe.reporting.page import Chart, Item, Sentence, columns_of
from volpipe.units import size

MOST_SAMPLES, REMOTE_SAMPLES = 32, 8  # per axis; of an output in a bucket, where each is two to four requests
EDGE = 64  # output voxels of a sample along the other axes
MOST_REACH = 16  # pairs of voxels to each side of a face in a profile, at least one step
FEWEST = 2000  # pairs of voxels across faces, below which a score is chance
SEED = 0
# On an invented EM volume of 96 × 160 × 160 voxels (2026-11-21), z, y, x: unet3d with its halo 1.00, 1.09, 1.00; hann
# 1.00, 1.09, 1.00; identity 1.00, 1.06, 1.01; unet3d with halo 0 1.22, 1.29, 1.59.
THRESHOLD = 1.2
REPORT_BYTES, REPORT_SAMPLES = 8 * 2**20, 12  # of decoded chunks that a report reads for its profiles; per axis
PROFILE_CAPTION = (
    "How much neighbouring voxels differ (root of the mean square) by their distance from the faces between windows, 0 "
    "the pair across a face: a seam is a peak, or a dip, at 0. From a sample of the output."
)
# Types that hold squares of differences, and are faster than float64, which holds their sums without rounding too.
EXACT = {"uint8": np.int32, "int8": np.int32, "uint16": np.int64, "int16": np.int64}
ROUNDING = 1 / 6  # energy of a difference of two rounded numbers, 1/12 each


# A seam stands out from the places beside it by so many times their spread. Of 300 volumes of 32 to 96 voxels a side,
# cut from an invented EM volume, identity brought a warning of 10 by the threshold alone, of 3 with this; with steps of
# 8 grey levels (standard deviation) between windows, of 257 and 249 (2026-11-23).
SPREADS = 3.0


MEANING = "at 1 no step stands out at faces"
BLIND = (
    "this score sees steps at faces alone: voxels of this net depend on where its windows lie, also inside them, and "
    "blending makes slow changes of steps; a score of 1 does not say that the output is that of the whole in one piece"
)


def blind_spot(plan: Plan) -> str:
    """Return what the score does not see of an output whose windows disagree; "" where the halo is exact.

    With group norm and `gaussian` over half a window, a U-Net of 96³ voxels scored 0.96 to 1.00, and 98.7 % of its
    voxels were not those of the whole in one piece (2026-11-28).
    """
    is_exact = plan.net.tile_invariant and not plan.recipe.net.accept_tile_variance
    return "" if is_exact else BLIND


@dataclass(frozen=True)
class SeamScore:
    """The score of the faces across one axis, and from how many pairs of voxels it is.

    Attributes:
        spread: root mean square of the logarithm of the same ratio at places beside the faces; 0 where there are none.
    """

    axis: str
    value: float
    num_pairs: int
    spread: float = 0.0

    @property
    def is_seam(self) -> bool:
        """Whether the score is above the threshold, and the tissue alone does not explain it."""
        return self.value > THRESHOLD and not self.is_of_tissue

    @property
    def is_of_tissue(self) -> bool:
        """Whether it is above the threshold and says nothing: neighbours differ as much at places beside the faces."""
        return self.value > THRESHOLD and math.log(self.value) <= SPREADS * self.spread


@dataclass(frozen=True)
class Profile:
    """How much neighbouring voxels differ by their distance from the faces across one axis.

    Attributes:
        distances: of a pair from the face, in voxels of the output; 0 is the pair across it.
        differences: mean square of each pair's difference.
        step: of the net's own grid; a score takes the pairs at -step and at step as inside.
        num_pairs: across faces.
    """

    axis: str
    distances: tuple[int, ...]
    differences: tuple[float, ...]
    step: int
    num_pairs: int


@dataclass(frozen=True)
class Squares:
    """Sums over a sample of the faces across one axis, by the distance of a pair of neighbouring voxels from its face.

    Attributes:
        axis: 0 to 2.
        sums, counts: of squared differences, and of pairs, (2 * reach + 1,); the pair across the face is in the middle.
        level: sum of squares of the voxels before the faces.
        step: of the net's own grid, in voxels of the output.
        stride: from one face to the next.
        is_rounded: whether voxels are whole numbers.
    """

    axis: int
    sums: np.ndarray
    counts: np.ndarray
    level: float
    step: int
    stride: int
    is_rounded: bool

    @property
    def reach(self) -> int:
        return len(self.counts) // 2

    @property
    def num_pairs(self) -> int:
        """Pairs across faces."""
        return int(self.counts[self.reach])

    @property
    def score(self) -> SeamScore:
        """How much more voxels differ across the faces than inside."""
        step, most = self.step, self.reach - self.step
        least = ROUNDING if self.is_rounded else 1e-12 * self.level / self.num_pairs + np.finfo(np.float64).tiny
        ratios = _ratios(self.sums, self.counts, step, least)
        beside = [ratios[place] for place in range(len(ratios)) if place - most not in (0, step, -step)]
        logarithms = np.log([ratio for ratio in beside if math.isfinite(ratio)])
        spread = float(np.sqrt(np.square(logarithms).mean())) if logarithms.size else 0.0
        return SeamScore(AXES[self.axis], float(ratios[most]), self.num_pairs, spread)

    @property
    def profile(self) -> Profile:
        """The differences from the middle of one face to that of the next, at most."""
        reach = max(self.step, min(MOST_REACH, self.stride // 2))
        known = [place for place in np.flatnonzero(self.counts) if abs(place - self.reach) <= reach]
        distances = tuple(int(place) - self.reach for place in known)
        differences = tuple((self.sums[known] / self.counts[known]).tolist())
        return Profile(AXES[self.axis], distances, differences, self.step, self.num_pairs)


def seam_squares(selection: Selection, most_samples: int = MOST_SAMPLES) -> list[Squares]:
    """Return what scores and profiles of the written output of `selection` are made of, read once for both.

    There is no axis without faces, or with too few voxels at them, and none of labels.
    """
    plan = selection.plan
    if plan.recipe.output.kind == "labels":
        return []
    rng = np.random.default_rng(SEED)
    most = min(most_samples, REMOTE_SAMPLES) if plan.is_in_bucket else most_samples
    found = [_squares(selection, axis, rng, most) for axis in range(3)]
    return [squares for squares in found if squares.num_pairs >= FEWEST]


def worst_scores(samples: Iterable[Squares]) -> list[SeamScore]:
    """Return the highest score of each axis, over the arrays of an output."""
    worst = dict[str, SeamScore]()
    for score in (squares.score for squares in samples):
        worst[score.axis] = max(score, worst.get(score.axis, score), key=lambda each: each.value)
    return list(worst.values())


def profile_items(selection: Selection, sample: Sequence[Squares] | None = None) -> list[Item]:
    """Return the chart of profiles for a report; nothing of labels.

    Without a `sample` that was read already, it is of as few voxels as a report may read.
    """
    plan = selection.plan
    if plan.recipe.output.kind == "labels":
        return []
    if sample is None:
        num_bytes = 2 * math.prod(plan.chunk) * plan.num_channels * plan.dtype.itemsize  # a face lies between two
        most = min(REPORT_SAMPLES, REPORT_BYTES // (3 * num_bytes))
        if most == 0:
            chunks = size(num_bytes / 2)
            return [
                Sentence(f"No profile across the faces of windows: chunks of {chunks} are too much to read for it.")
            ]
        sample = seam_squares(selection, most)
    profiles = [squares.profile for squares in sample]
    if not profiles:
        return [Sentence("No profile across the faces of windows: there are none, or too few voxels at them.")]
    rows = [
        (f"along {profile.axis}", distance, float(f"{value**0.5:.5g}"))
        for profile in profiles
        for distance, value in zip(profile.distances, profile.differences, strict=True)
    ]
    columns = columns_of(("axis", "distance", "difference"), rows)
    return [Chart("Profiles across the faces of windows", PROFILE_CAPTION, "seams", columns)]


def _ratios(sums: np.ndarray, counts: np.ndarray, step: int, least: float) -> np.ndarray:
    """Return the ratio of each place to those a step before and after it, all but the first and last `step` places.

    It is NaN where fewer than half as many pairs were read as across the faces.
    """
    is_known = 2 * counts >= counts[len(counts) // 2]
    means = np.where(is_known, sums / np.maximum(counts, 1) + least, np.nan)
    return means[step : len(means) - step] / ((means[: -2 * step] + means[2 * step :]) / 2)


def _squares(selection: Selection, axis: int, rng: np.random.Generator, most_samples: int) -> Squares:
    """Return the sums over `most_samples` faces across `axis`, which may be the same ones."""
    plan = selection.plan
    scale = plan.net.scale[axis]
    step, stride = plan.net.stride[axis] // plan.net.shrink[axis] * scale, plan.lattice.stride[axis] * scale
    reach = step + max(0, min(MOST_REACH, stride - step - 1))
    faces = [face for face in _faces(plan, axis) if step < face < plan.out_shape[axis] - step]
    chosen = [int(face) for face in rng.choice(faces, size=most_samples)] if faces else []
    drawn = ((face, _sample(plan, axis, face, step, rng)) for face in chosen)
    samples = Counter(sample for sample in drawn if _is_selected(selection, sample[1]))  # a small output has few
    boxes = [_longer(selection, axis, box, reach - step) for _, box in samples]
    sums, counts, level = np.zeros(2 * reach + 1), np.zeros(2 * reach + 1, np.int64), 0.0
    for ((face, _), times), box, data in zip(samples.items(), boxes, read_each(plan, 0, boxes), strict=True):
        lines = np.moveaxis(data, axis + 1, 0).astype(EXACT.get(data.dtype.name, np.float64))
        if not np.isfinite(lines).all():
            continue
        energy = np.square(np.diff(lines, axis=0)).reshape(len(lines) - 1, -1)
        first = box.start[axis] - (face - 1 - reach)  # the place of the box's first pair
        sums[first : first + len(energy)] += times * energy.sum(axis=1)
        counts[first : first + len(energy)] += times * energy.shape[1]
        level += times * np.square(lines[reach - first]).sum()
    return Squares(axis, sums, counts, level, step, stride, plan.dtype.kind != "f")


def _longer(selection: Selection, axis: int, box: Box, more: int) -> Box:
    """Return `box` longer by `more` voxels along `axis`, as far as the output goes; as it is where that is masked."""
    longer = box.along(axis, max(0, box.start[axis] - more), min(selection.plan.out_shape[axis], box.stop[axis] + more))
    return longer if longer == box or _is_selected(selection, longer) else box


def _is_selected(selection: Selection, box: Box) -> bool:
    mask = selection.mask(box)
    return mask is None or bool(mask.all())


def _faces(plan: Plan, axis: int) -> list[int]:
    """Return where the cores of windows begin along `axis`, in output voxels, inside the output.

    At the edge, where windows begin.
    """
    lattice, scale, first = plan.lattice, plan.net.scale[axis], plan.region.start[axis]
    shift = 0 if lattice.placement != "lattice" else lattice.margin[axis]
    windows = lattice.windows_between(axis, first + 1 - shift, plan.region.stop[axis] - shift)
    return [(lattice.start_along(axis, i) + shift - first) * scale for i in windows]


def _sample(plan: Plan, axis: int, face: int, step: int, rng: np.random.Generator) -> Box:
    """Return a random box that reaches a step and a voxel to both sides of `face`, and else touches few chunks."""
    start, stop = [], []
    for other, (length, chunk) in enumerate(zip(plan.out_shape, plan.chunk, strict=True)):
        first = int(rng.integers(max(1, length - EDGE + 1)))
        within = first % chunk
        first -= min(within, max(0, within + EDGE - chunk))
        start.append(face - 1 - step if other == axis else first)
        stop.append(face + 1 + step if other == axis else min(first + EDGE, length))
    return Box(tuple(start), tuple(stop))
