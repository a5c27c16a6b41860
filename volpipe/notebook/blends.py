"""Ways to join windows, tried on one box: their errors against the net's output for the whole box at once.

Not here: the weights (geometry.blend), or windows on their own grid (inference).

The whole is one window over the box and the net's halo around it, in whole strides, mirrored at the volume's faces.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, mul, sub
from pathlib import Path

import numpy as np

from volpipe.errors import PlanError
from volpipe.geometry.blend import Family
from volpipe.geometry.grid import Box, Triple, align_up, triple
from volpipe.inference.intensity import Affine
from volpipe.inference.output import finish
from volpipe.inference.plan import Plan
from volpipe.inference.runner import Runner
from volpipe.inference.tiling import aligned_halo, trims
from volpipe.nets.cache import remembering
from volpipe.notebook.boxes import Sizes, checked_at, checked_size
from volpipe.notebook.pictures import Drawn, first_channel, slices_of
from volpipe.notebook.try_out import computed, loaded, normalisation, plan_whole, whole_voxels
from volpipe.recipes.inference import Recipe
from volpipe.reporting.panels import Panel
from volpipe.reporting.shades import display_range, diverge, shaded
from volpipe.reporting.slices import part_around
from volpipe.tables import html_table, text_table
from volpipe.units import shape
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.volume import Volume

TRIED: tuple[Family, ...] = ("crop", "hann", "gaussian")
HEAD = ("blend", "window", "overlap", "windows' voxels / kept", "RMSE", "largest error")


@dataclass(frozen=True, eq=False)
class Blend:
    """A way to join windows, and its output over a box.

    Attributes:
        name: of the family of weights.
        output: (c, z, y, x), float32, in the units of the output before they are rounded.
        window, overlap: voxels (z, y, x) of the volume.
        rmse: root of the mean squared difference from the whole; largest: the largest.
    """

    name: str
    output: np.ndarray
    window: Triple
    overlap: Triple
    rmse: float
    largest: float

    @property
    def cost(self) -> float:
        """Voxels that windows hold by those that they add to the output."""
        steps = (w / (w - o) for w, o in zip(self.window, self.overlap, strict=True))
        return math.prod(steps)


@dataclass(frozen=True, eq=False, repr=False)
class Blends(Drawn):
    """Ways to join windows over the same box of a volume, and the whole that they are compared with.

    Attributes:
        box: of the volume, in its voxels; out_box: of the output of a run over the whole volume, in voxels of that.
        whole: (c, z, y, x), float32: the net's output for the box and its halo in one window.
        blends: in the order that they were tried.
        voxel_size_nm: of a voxel of the output, (z, y, x), or None.
        notes: as those of a try-out.
    """

    net: str
    box: Box
    out_box: Box
    whole: np.ndarray
    blends: tuple[Blend, ...]
    voxel_size_nm: Lengths | None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        notes = "".join(f"\n{note}" for note in self.notes)
        table = text_table(HEAD, self._error_rows)
        return f"<Blends of {self.net} at {self.box}, errors against the whole>\n{table}{notes}"

    def __getitem__(self, name: str) -> Blend:
        """Return the blend of that name."""
        by_name = {blend.name: blend for blend in self.blends}
        if name not in by_name:
            raise PlanError(f"no blend {name!r} was tried; there are {', '.join(by_name)}")
        return by_name[name]

    @property
    def _error_rows(self) -> list[list[str]]:
        return [
            [
                blend.name, shape(blend.window), shape(blend.overlap), f"{blend.cost:.2f}", f"{blend.rmse:.3g}",
                f"{blend.largest:.3g}",
            ]
            for blend in self.blends
        ]  # fmt: skip

    def panels(self) -> Iterator[list[Panel]]:
        """Yield slices of the whole and of the errors of each blend, which have one scale of colours."""
        whole = first_channel(self.whole)
        limits, largest = display_range(whole), max(blend.largest for blend in self.blends)
        for part in slices_of(whole.shape, self.out_box.start):
            nm = part.nm(self.voxel_size_nm)
            about = f"whole\n{part.name}, {limits[0]:.4g} to {limits[1]:.4g}"
            row = [Panel(about, shaded(whole[None, *part.index], limits), nm)]
            for blend in self.blends:
                change = first_channel(blend.output)[part.index].astype(np.float64) - whole[part.index]
                about = f"{blend.name} - whole, RMSE {blend.rmse:.2g}\nblue -{largest:.2g}, red +{largest:.2g}"
                row.append(Panel(about, diverge(change, largest), nm))
            yield row

    def _html_table(self) -> str:
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return html_table(HEAD, self._error_rows, caption=f"{self.net} at {self.box}, errors against the whole") + notes


def blends(
    recipe: Recipe, volume: str | Path | Volume, at: Sequence[int] | None, size: Sizes | None, device: str
) -> Blends:
    """Return the errors of ways to join windows; arguments as of `volpipe.blends`."""
    with remembering():  # one net, planned for each blend
        planned = [plan_whole(_with_blend(recipe, family), volume) for family in TRIED]
    plan, source, notes = planned[0]
    if any(plan.net.fixed):
        raise PlanError(
            f"net {plan.net.label} takes windows of {plan.net.fixed} voxels alone (0 is any), so that there is no "
            "whole to compare with; try_net and side_by_side compare two of its runs"
        )
    box = _blended_box(plan, at, size)
    with loaded(plan, device) as runner:
        normalise, more = normalisation(plan, source)
        whole = finish(plan, normalise, whole_of(plan, source, normalise, runner, box))
        tried = []
        for each, _, _ in planned:
            output = computed(each, source, normalise, dataclasses.replace(runner, plan=each), box)
            change = output.astype(np.float64) - whole
            largest, rmse = float(np.abs(change).max()), float(np.sqrt(np.square(change).mean()))
            tried.append(Blend(each.recipe.windows.blend, output, each.window, each.overlap, rmse, largest))
    made = plan.in_output(plan.coarse(box))
    return Blends(plan.net.label, box, made, whole, tuple(tried), plan.multiscale.voxel_size_nm, (*notes, *more))


def whole_of(plan: Plan, source: Volume, normalise: Affine, runner: Runner, box: Box) -> np.ndarray:
    """Return the net's output (c, z, y, x), float32, over `box`, which it sees with its halo in one window."""
    net, (before, after) = plan.net, trims(plan.net)
    inner = [h - m for h, m in zip(aligned_halo(net), before, strict=True)]  # in whole strides
    start = tuple(a // s * s - h for a, h, s in zip(box.start, inner, net.stride, strict=True))
    stop = tuple(align_up(b + h, s) for b, h, s in zip(box.stop, inner, net.stride, strict=True))
    seen = Box(tuple(map(sub, start, before)), tuple(map(add, stop, after)))
    window = normalise.apply(source.open().read_mirrored(seen))
    try:
        out: np.ndarray = dataclasses.replace(runner, batch=1)(window[None])[0]
    except Exception as error:
        raise runner.explain(error) from error
    made = plan.in_output(plan.coarse(box)).relative_to(plan.in_output(plan.coarse(Box(start, stop))).start)
    return out[:, *made.slices]


def _with_blend(recipe: Recipe, family: Family) -> Recipe:
    """Return `recipe` with another blend, its own overlap where it has that blend, and voxels that are not rounded."""
    overlap = recipe.windows.overlap if recipe.windows.blend == family else "auto"
    windows = recipe.windows.model_copy(update={"blend": family, "overlap": overlap})
    output = recipe.output.model_copy(update={"dtype": "float32"})
    return recipe.model_copy(update={"windows": windows, "output": output})


def _blended_box(plan: Plan, at: Sequence[int] | None, size: Sizes | None) -> Box:
    """Return the box: without `at` around a corner where windows meet, without `size` half as large as a window."""
    whole, stride = plan.source.shape, triple(map(mul, plan.lattice.stride, plan.net.shrink))
    middle = checked_at(at, whole)
    if at is None:
        middle = triple(min(n - 1, round(m / s) * s) for m, s, n in zip(middle, stride, whole, strict=True))
    sizes = tuple(max(1, w // 2) for w in plan.window) if size is None else checked_size(size, whole)
    return whole_voxels(plan, part_around(Box.from_shape(whole), middle, sizes))
