"""The plan: a recipe checked against a real volume, with every size decided; immutable, and the same everywhere.

Not here: reading voxels or running anything. A worker loads the plan from the run's folder and computes from it
where its block lies, what it reads and what it writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from volpipe.errors import PlanError
from volpipe.geometry.affinities import name_of
from volpipe.geometry.blend import Family, reach, support, windows_over
from volpipe.geometry.block_shape import (
    CHUNK_TARGET,
    LARGEST_VOXELS,
    SMALL_IN_BUCKET,
    SUM_CHUNK_TARGET,
    Sizes,
    choose_block,
    slab_layers,
)
from volpipe.geometry.grid import Box, Grid, Index, Lattice, Triple, align_up, divisor_near, triple
from volpipe.geometry.levels import FINEST
from volpipe.inference.output_plan import IDENTITY, OutputPlan, SourceVolume, can_stream, levels_of
from volpipe.inference.output_type import output_type
from volpipe.inference.roi import Mask, find_roi, lay_mask
from volpipe.inference.statistics import GreyRule, check_grey
from volpipe.inference.tiling import choose_chunk, choose_shard, choose_windows, trims
from volpipe.inference.volume_grid import VolumeGrid, output_grid, output_place
from volpipe.nets.facts import Arithmetic, NetFacts, cautions, check_net, with_net_defaults
from volpipe.nets.files import code_hash_of
from volpipe.nets.net_geometry import NetArray
from volpipe.nets.tta import check_turns, with_forms
from volpipe.recipes.inference import Auto, Precision, Recipe
from volpipe.volumes.formats.container import folders_of
from volpipe.volumes.formats.known import format_named
from volpipe.volumes.resampling import Resampling
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.storage.paths import Location, locate
from volpipe.volumes.storage.requests import num_at_once
from volpipe.volumes.volume import ArraySpec, Multiscale, Volume, absolute

SUM_TYPE = np.dtype(np.float32)


@dataclass(frozen=True)
class NetSizes:
    """Sizes and arithmetic of a net that a recipe may leave open.

    Attributes:
        window: (z, y, x), None for the net's own.
        block_voxels: of the output in a large block, at most.
    """

    window: Triple | None = None
    channels_last: bool = False
    precision: Precision = "float32"
    block_voxels: int = LARGEST_VOXELS


@dataclass(frozen=True)
class PlanNotes:
    """What a user is to know of a plan, printed with it; "" and () for nothing.

    Attributes:
        volume: sentences on the volume.
        fit: sentences on whether it suits the net.
        mapping: the rule by which grey levels are mapped.
        net, windows, precision: a sentence on how each was chosen.
    """

    volume: tuple[str, ...] = ()
    fit: tuple[str, ...] = ()
    mapping: str = ""
    net: str = ""
    windows: str = ""
    precision: str = ""


OWN_SIZES, NO_NOTES = NetSizes(), PlanNotes()
T = TypeVar("T", bool, Precision)


class Plan(OutputPlan):
    """Everything that a worker needs to know beside the number of its block.

    `corner` is the voxel of the volume at which a block begins, so that shards of a region are cores of blocks. The
    `notes` are not stored.
    """

    FILE: ClassVar[str] = "plan.json"  # in a run's folder
    SIZES: ClassVar[tuple[str, ...]] = (
        *OutputPlan.SIZES, "window", "overlap", "channels_last", "precision", "corner",
    )  # fmt: skip

    recipe: Recipe
    net: NetFacts
    mode: Literal["stored", "streamed"]
    window: Triple
    overlap: Triple
    channels_last: bool
    precision: Precision
    out_dtype: str
    intensity: Literal["same", "unit", "raw"]
    roi: tuple[Triple, Triple]
    corner: Triple = (0, 0, 0)
    mask: Mask | None = None
    code_sha256: str = ""
    grid: VolumeGrid | None = None
    notes: PlanNotes = Field(NO_NOTES, exclude=True, repr=False)

    @model_serializer(mode="wrap")
    def _as_stored(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Return the fields by their names; the volume's grid only where the output lies on that, and the net's not."""
        tree: dict[str, object] = dump(self)
        return tree if self.grid is not None else {key: value for key, value in tree.items() if key != "grid"}

    @property
    def grey_rule(self) -> GreyRule:
        """How grey levels are mapped, those of each volume."""
        also = (each.normalise or self.recipe.normalise for each in self.recipe.input.also or ())
        nums = (num for num, _ in self.source.given)
        return GreyRule(tuple(zip((self.recipe.normalise, *also), nums, strict=True)), self.source.grey_dtype)

    def as_begun(self, old: Self) -> Self:
        """Return the plan with the sizes, and the net's identity, of the plan `old` by which its output was begun."""
        return super().as_begun(old).changed(net=self.net.as_begun(old.net))

    def net_changes(self, new: Self) -> list[str]:
        """Return a line for each difference of the net in `new` beside its weights, source and facts."""
        lines = self.net.identity.differences(new.net.identity)
        return [f"{IDENTITY}: the net {new.net.label} is another: {line}" for line in lines]

    @property
    def sizes(self) -> NetSizes:
        """The sizes that were taken where the recipe leaves them open."""
        return NetSizes(self.window, self.channels_last, self.precision)

    @property
    def arithmetic(self) -> Arithmetic:
        """How the net computes."""
        return Arithmetic(self.channels_last, self.precision)

    @property
    def blend(self) -> Family:
        """How windows are joined."""
        blend = self.recipe.windows.blend
        assert blend != "auto", "a plan's recipe leaves no blend open"
        return blend

    @cached_property
    def lattice(self) -> Lattice:
        """The windows; blocks are shifted where windows are blended, so that none adds to a core before its own.

        It counts voxels of which the net makes `scale` output voxels each: those of the volume, unless the net's output
        is coarser.
        """
        placement = self.recipe.windows.placement
        assert placement != "auto", "a plan's recipe leaves no placement open"
        unit, (trim_before, trim_after) = self.net.shrink, trims(self.net)
        trim = [b + a for b, a in zip(trim_before, trim_after, strict=True)]
        window, overlap = (
            triple((n - m) // u for n, m, u in zip(sizes, trim, unit, strict=True))
            for sizes in (self.window, self.overlap)
        )
        plain = Lattice(
            triple(-(-n // u) for n, u in zip(self.source.shape, unit, strict=True)), window, overlap, self.block,
            corner=triple(c // u for c, u in zip(self.corner, unit, strict=True)),
            unit=unit, before=trim_before, after=trim_after, placement=placement,
        )  # fmt: skip
        if placement != "lattice":
            return plain
        before, after = support(plain, self.blend)
        shift = tuple(-((p - b) // s) for b, p, s in zip(before, plain.phase, plain.stride, strict=True))
        first = tuple(max(0, (c - a) // s) for a, c, s in zip(after, plain.corner, plain.stride, strict=True))
        return replace(plain, shift=shift, first=first)

    @cached_property
    def blocks(self) -> Grid:
        return self.lattice.blocks

    @cached_property
    def roi_box(self) -> Box:
        """The voxels of the volume that the output shows; output voxels count from its corner."""
        return Box(*self.roi)

    @cached_property
    def region(self) -> Box:
        """The voxels of the lattice that the output shows."""
        return self.coarse(self.roi_box)

    def coarse(self, box: Box) -> Box:
        """Return `box` of the volume in voxels of the lattice."""
        return _coarse(box, self.net)

    def in_output(self, box: Box) -> Box:
        """Return the voxels of the output that voxels `box` of the lattice make."""
        return box.relative_to(self.region.start).scaled(self.scale)

    @property
    def is_whole(self) -> bool:
        """Whether the output shows the whole volume, so that every block adds to it."""
        return self.roi_box == Box.from_shape(self.source.shape)

    @property
    def needs_scan(self) -> bool:
        """Whether a mask or the volume's own voxels decide which windows are selected."""
        return self.mask is not None or self.recipe.input.empty is not None

    @cached_property
    def num_active(self) -> int:
        """Number of blocks that reach the region of interest; of these a mask may leave fewer."""
        return math.prod(sum(a < b for a, b in along) for along in self.reaches)

    @property
    def scale(self) -> Triple:
        return self.net.scale

    @cached_property
    def out_shape(self) -> Triple:
        return triple(n * s for n, s in zip(self.region.shape, self.scale, strict=True))

    def warnings(self) -> list[str]:
        """Return what a user should know of net, mask and volume before it runs, in sentences."""
        mask = [] if self.mask is None or not self.mask.note else [f"mask {self.mask.path}: {self.mask.note}"]
        return [*cautions(self.recipe, self.net), *mask, *self.notes.fit]

    @cached_property
    def back(self) -> Resampling | None:
        if self.grid is None:
            return None
        return self.grid.resampling(self.net, self.source.shape, self.out_dtype, nearest=self.is_labels)

    @cached_property
    def shown_region(self) -> Box:
        return Box.from_shape(self.out_shape) if self.grid is None else self.grid.region(self.net)

    @property
    def input_voxel(self) -> Lengths | None:
        return self.source.voxel_size_nm if self.grid is None else self.grid.voxel_size_nm

    def finer_box(self, level: int, box: Box) -> Box:
        if self.back is None or level != 1:
            return super().finer_box(level, box)
        seen = self.back.seen(box.shift(self.shown_region.start))
        return seen.relative_to(self.region.scaled(self.scale).start)

    def coarser_box(self, level: int, box: Box) -> Box:
        return self.shown_box(box) if self.finest and level == 1 else super().coarser_box(level, box)

    def shown_box(self, box: Box) -> Box:
        if self.back is None:
            return box
        around = self.back.sees(box.shift(self.region.scaled(self.scale).start)).relative_to(self.shown_region.start)
        return around & Box.from_shape(self.shown_shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.out_dtype)

    @property
    def is_labels(self) -> bool:
        return self.recipe.output.kind != "image"

    @property
    def is_classes(self) -> bool:
        """Whether the output is the number of the net's largest channel."""
        return self.recipe.output.kind == "classes"

    @property
    def class_labels(self) -> tuple[int, ...]:
        """The label that is written for each channel, where the output is of classes; none where that is its number."""
        given = self.recipe.output.labels
        return (given or tuple(region.label for region in self.net.regions)) if self.is_classes else ()

    @property
    def classes_overlap(self) -> bool:
        """Whether the output is of classes of which a voxel may have several or none."""
        return self.is_classes and (bool(self.net.regions) or self.recipe.output.activation == "sigmoid")

    @property
    def num_channels(self) -> int:
        return 1 if self.is_classes else self.net.combined_channels

    @property
    def arrays(self) -> tuple[Plan, ...]:
        """The plans of the arrays of the output: this one, or one for each of the net's outputs, if all are taken.

        These have the same windows, and by number the same blocks, shards and levels; grid, channels and type of their
        voxels are their own.
        """
        return self._array_plans or (self,)

    @cached_property
    def _array_plans(self) -> tuple[Plan, ...]:
        return () if len(self.net.arrays) < 2 else tuple(map(self._of_array, self.net.arrays))

    @property
    def folder(self) -> str:
        return self.net.arrays[0].name if len(self.net.arrays) == 1 else ""

    def _of_array(self, array: NetArray) -> Plan:
        """Return the plan of one of the net's outputs."""
        net, recipe = self.net.of_array(array), self.recipe
        own = recipe.output.arrays.get(array.name)
        output = recipe.output.model_copy(
            update={"arrays": {}} | ({} if own is None else own.model_dump(exclude_none=True))
        )
        offsets = recipe.net.offsets if len(recipe.net.offsets or ()) == net.out_channels else None
        choice = recipe.net.model_copy(update={"output": array.output, "offsets": offsets})
        recipe = recipe.model_copy(update={"output": output, "net": choice})
        intensity = net.intensity if output.intensity == "auto" else output.intensity
        shard, chunk = (
            triple(n // c for n, c in zip(sizes, array.coarser, strict=True)) for sizes in (self.shard, self.chunk)
        )
        return self.changed(
            recipe=recipe, net=net, out=str(locate(self.out) / array.name), shard=shard, chunk=chunk,
            intensity=intensity, out_dtype=output_type(recipe, self.source.grey_dtype, intensity, net),
        )  # fmt: skip

    def with_widest_type(self) -> Self:
        """Return this plan with the widest type of its arrays, which bounds its bytes."""
        return self.changed(
            out_dtype=max((array.out_dtype for array in self.arrays), key=lambda name: np.dtype(name).itemsize)
        )

    def checked(self) -> Self:
        """Return this plan, whose arrays can share its windows, blocks and shards.

        Raises:
            PlanError: voxels of one do not fall together with those of the others, or the recipe names none such.
        """
        if self.net.dtype and not self.is_as_stored:
            raise PlanError(
                f"{self.net.label} is a function on arrays, whose results are stored as they are: leave out "
                "windows.blend, windows.placement, infer.augment, tensors.mode, output.activation and output.kind = "
                "classes"
            )
        names = [array.name for array in self.net.arrays]
        if unknown := self.recipe.output.arrays.keys() - set(names):
            listed = ", ".join(names) or "one output alone, or all with net.output=all"
            raise PlanError(f"output.arrays.{min(unknown)}: net {self.net.label} gives {listed}")
        if len(names) > 1 and self.folders.is_one_volume:
            raise PlanError(
                f"net.output=all: {self.format} holds one array; write OME-Zarr or N5, or name one output, such as "
                f"net.output={self.net.arrays[0].output}"
            )
        for array in self.net.arrays if len(names) > 1 else ():
            for what, sizes in (("output.shard", self.shard), ("output.chunk", self.chunk)):
                for axis, n, coarser in zip("zyx", sizes, array.coarser, strict=True):
                    if n % coarser:
                        raise PlanError(
                            f"axis {axis}: output {array.output} of net {self.net.label} is {coarser} times coarser "
                            f"than the finest, and {what} is {n}; use {align_up(n, coarser)}"
                        )
        if self.grid is not None:
            for plan in self.arrays:
                self.grid.check(plan.net, self.source.shape)
        for array, plan in zip(self.net.arrays, self.arrays, strict=False):
            _check_corner(self.roi_box, plan.net)
            if plan._shared_layout != self._shared_layout:
                raise PlanError(
                    f"output {array.output} of net {self.net.label} is {list(array.coarser)} times coarser than the "
                    "finest (z, y, x), and windows do not begin with its voxels: set windows.placement=lattice, or "
                    f"name one, such as net.output={array.output}"
                )
        return self

    @property
    def _shared_layout(self) -> tuple[object, ...]:
        """The layout that arrays must share: places of windows, and the blocks that make each shard."""
        lattice = self.lattice
        ends = [[lattice.start_along(i, k) * lattice.unit[i] for k in (0, lattice.counts[i] - 1)] for i in range(3)]
        shards = [self.shards(level).counts for level in range(len(self.factors))]
        return lattice.counts, lattice.places, lattice.shift, ends, shards, self._blocks_along, self.slab

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names of the output's channels: as the net has them, or the output's name for a single one."""
        if self.recipe.net.offsets is not None and not self.is_classes:
            return tuple(map(name_of, self.recipe.net.offsets))
        if self.net.regions and not self.is_classes:
            return tuple(region.name for region in self.net.regions)
        name = absolute(self.out).stem
        if self.num_channels == 1:
            return (name,)
        return tuple(f"{name}_{i}" for i in range(self.num_channels)) if self.net.arrays else ()

    @property
    def multiscale(self) -> Multiscale:
        """The places of the output's levels."""
        return self.group_of(self.finest)

    def group_of(self, level: int) -> Multiscale:
        size, origin = self.source.voxel_size_nm, self.source.origin_nm
        corner = triple(r * u for r, u in zip(self.region.start, self.net.shrink, strict=True))
        if self.grid is not None and level >= self.finest:
            size, origin, corner = self.grid.voxel_size_nm, self.grid.origin_nm, self.grid.roi[0]
        return Multiscale(
            levels_of(self.factors[self.finest :] if level >= self.finest else self.factors[: self.finest]),
            ("c", "z", "y", "x") if self.num_channels > 1 else ("z", "y", "x"),
            *output_place(self.net, size, origin, corner),
            absolute(self.out).stem,
            is_labels=self.is_labels,
        )

    def spec(self, level: int) -> ArraySpec:
        """Return the array of `level`."""
        choice = self.recipe.output
        codec: str = choice.codec
        if codec == "auto":
            writing = format_named(self.format).writing
            assert writing is not None
            codec = writing.default_codec(self.dtype, is_labels=self.is_labels)
        channels = (self.num_channels,) if self.num_channels > 1 else ()
        return ArraySpec(
            shape=(*channels, *self.level_shape(level)),
            dtype=self.dtype,
            chunks=(*self.folders.channel_chunk(channels), *self.chunk),
            shards=(*channels, *self.shard) if self.folders.is_sharded else None,
            axes=self.multiscale.axes,
            codec=codec,
            codec_level=choice.codec_level,
        )

    def sum_box(self, block: int) -> Box:
        """Return the output voxels that the weighted sum of `block` reaches; none where it is not needed."""
        reach = [self.reaches[axis][k] for axis, k in enumerate(self.blocks.index(block))]
        box = Box(tuple(a for a, _ in reach), tuple(b for _, b in reach))
        return self.in_output(box)

    def sole_box(self, block: int) -> Box:
        """Return the output voxels that no block but `block` adds to; not all of them where they make no box."""
        sides = []
        for axis, k in enumerate(self.blocks.index(block)):
            start, stop = self._block_reach(axis, k)
            if k > 0:
                start = max(start, self._block_reach(axis, k - 1)[1])
            if k + 1 < self.blocks.counts[axis] and self.lattice.windows_along(axis, k + 1):
                stop = min(stop, self._block_reach(axis, k + 1)[0])
            sides.append((start, max(start, stop)))
        box = Box(tuple(a for a, _ in sides), tuple(b for _, b in sides))
        return self.in_output(box)

    @cached_property
    def is_as_stored(self) -> bool:
        """Whether the net gets voxels as they are stored, and gives them as they will be: there are no other steps.

        A function on arrays does.
        """
        keeps_integers = (
            self.net.integers
            and self.intensity == "same"
            and np.issubdtype(self.source.dtype, np.integer)
            and self.out_dtype == self.source.dtype
        )
        return (
            (keeps_integers or bool(self.net.dtype))
            and (self.blend, self.recipe.infer.augment) == ("crop", "none")
            and self.mode == "streamed"
            and not self.is_classes
            and self.recipe.output.activation == "none"
            and not self.lattice.is_padded
        )

    @cached_property
    def slab(self) -> int:
        """Layers of windows, along z, of a block that are computed at a time; they follow from the sizes alone."""
        whole, chunk = self.lattice.places[0], None if self.is_summed else self.chunk[0]
        layers = slab_layers(self.block, triple(self.lattice.stride), self.net.scale, chunk)
        return layers if self.mode == "streamed" and self.can_stream and layers < self.block[0] else whole

    @property
    def is_summed(self) -> bool:
        """Whether blocks hold sums, not voxels as they are stored."""
        return self.blend != "crop" or self.num_sums > 0

    @property
    def sum_dtype(self) -> np.dtype:
        """Type of sums: that of the output where each voxel is of one window, and needs no other step."""
        return self.dtype if self.is_as_stored else SUM_TYPE

    @property
    def has_slabs(self) -> bool:
        """Whether blocks are computed slab by slab."""
        return self.slab < self.lattice.places[0]

    @property
    def is_layered(self) -> bool:
        return super().is_layered or (self.can_stream and self.has_slabs)

    @property
    def blocks_behind(self) -> int:
        """How many blocks a worker writes at a time: several into a bucket, if they are small and no two write one
        shard.
        """
        if not self.is_in_bucket or self.has_slabs or self.num_sums:
            return 1
        return num_at_once(self.sum_bytes, fewest=1)

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sum of a whole block."""
        channels, dtype = (self.net.out_channels, self.sum_dtype) if self.is_summed else (self.num_channels, self.dtype)
        return math.prod(self.sum_shape) * channels * dtype.itemsize

    @cached_property
    def reaches(self) -> list[list[tuple[int, int]]]:
        """The voxels of the lattice, clipped to the region, that the sums of each block reach, by axis."""
        return [[self._block_reach(axis, k) for k in range(num)] for axis, num in enumerate(self.blocks.counts)]

    def _block_reach(self, axis: int, block: int) -> tuple[int, int]:
        windows = self.lattice.windows_along(axis, block)
        first, last = self.region.start[axis], self.region.stop[axis]
        # One without windows adds nothing: it would begin where the block before it, or the volume, ends.
        begin = end = self.lattice.shape[axis] if block else 0
        if windows:
            begin, _ = reach(self.blend, self.lattice, axis, windows[0])
            _, end = reach(self.blend, self.lattice, axis, windows[-1])
        start = min(max(begin, first), last)
        return start, max(start, min(end, last))

    def blocks_of_shard(self, shard: int) -> tuple[int, ...]:
        """Return the blocks, ascending, whose sums make `shard` of level 0."""
        z, y, x = (self._blocks_along[axis][i] for axis, i in enumerate(self.shards().index(shard)))
        _, ny, nx = self.blocks.counts
        return tuple((k * ny + j) * nx + i for k in z for j in y for i in x)

    @cached_property
    def _blocks_along(self) -> list[list[range]]:
        return [[self.blocks_along(axis, i) for i in range(num)] for axis, num in enumerate(self.shards().counts)]

    def blocks_along(self, axis: int, index: int) -> range:
        """Return the blocks along `axis` whose sums reach the shards at `index` of that axis."""
        size, scale, first = self.shard[axis], self.net.scale[axis], self.region.start[axis]
        start = first + index * size // scale
        stop = first - (-min((index + 1) * size, self.out_shape[axis]) // scale)
        windows = windows_over(self.blend, self.lattice, axis, start, stop)
        return range(self.lattice.block_along(axis, windows[0]), self.lattice.block_along(axis, windows[-1]) + 1)

    def is_direct(self, shard: int) -> bool:
        """Return whether one block alone determines `shard`, and so writes it itself."""
        return all(direct[i] for direct, i in zip(self.direct, self.shards().index(shard), strict=True))

    def shards_of_block(self, block: int) -> tuple[int, ...]:
        """Return the shards of level 0, ascending, that the sum of `block` reaches."""
        return tuple(self.shards().touching(self.sum_box(block)))

    @cached_property
    def num_sums(self) -> int:
        """Number of shards that are added from several blocks' sums; zero when every shard is direct."""
        return len(self.shards()) - math.prod(map(sum, self.direct))

    @cached_property
    def direct(self) -> tuple[list[bool], ...]:
        """By axis, for each place: whether a single block along that axis reaches the shards there."""
        return tuple([len(blocks) == 1 for blocks in along] for along in self._blocks_along)

    @cached_property
    def sum_chunk(self) -> Triple:
        """Inner chunk of the parts of a block tensor, which can be read without the rest."""
        core = self.blocks.cell
        return triple(divisor_near(c * s, SUM_CHUNK_TARGET) for c, s in zip(core, self.net.scale, strict=True))

    @cached_property
    def sum_parts(self) -> tuple[Box, ...]:
        """The four parts of a block tensor, in output voxels from the block's core: the core, what lies beyond it in z,
        what else lies beyond it in y, and in x. Shards that later blocks finish need them in that order, so that each
        part is a file of its own, which goes as soon as it has been used.
        """
        core = tuple(c * s for c, s in zip(self.blocks.cell, self.net.scale, strict=True))
        # Output voxels past the core that a sum reaches at most, in whole chunks.
        lattice, (_, after) = self.lattice, support(self.lattice, self.blend)
        reach = (s * t + a + p for s, t, a, p in zip(lattice.shift, lattice.stride, after, lattice.phase, strict=True))
        most = reach if lattice.placement == "lattice" else lattice.window
        rest = (max(0, n - c) for n, c in zip(lattice.shape, self.blocks.cell, strict=True))
        sizes = zip(most, rest, self.net.scale, self.sum_chunk, strict=True)
        beyond = (align_up(min(r, n) * s, chunk) for r, n, s, chunk in sizes)
        (cz, cy, cx), (ez, ey, ex) = core, (c + b for c, b in zip(core, beyond, strict=True))
        return (
            Box((0, 0, 0), core),
            Box((cz, 0, 0), (ez, ey, ex)),
            Box((0, cy, 0), (cz, ey, ex)),
            Box((0, 0, cx), (cz, cy, ex)),
        )

    @cached_property
    def sum_shape(self) -> Triple:
        """Output voxels (z, y, x) of the largest sum of a block."""
        reach = ([b - a for a, b in along] for along in self.reaches)
        return triple(max(lengths) * s for lengths, s in zip(reach, self.net.scale, strict=True))

    def core_start(self, block: int) -> Index:
        """Return the output voxel at which the core of `block` begins; it may lie outside the region."""
        return self.in_output(self.blocks.box(block).relative_to(self.lattice.phase)).start


@lru_cache(maxsize=8)
def load_plan(path: str, identity: str) -> Plan:
    """Return the plan stored at `path`; `identity` guards against a run that was replaced meanwhile."""
    plan = Plan.model_validate_json(Path(path).read_text(encoding="utf-8"))
    if plan.identity != identity:
        raise PlanError(f"{path} holds plan {plan.identity}, not {identity}: another run took its place")
    return plan


def make_plan(
    recipe: Recipe,
    volume: Volume,
    net: NetFacts,
    *,
    out: Location,
    search_path: str = "",
    mask: Volume | None = None,
    sizes: NetSizes = OWN_SIZES,
    num_workers: int | None = None,
    stored: Volume | None = None,
) -> Plan:
    """Return the plan of `recipe` for `volume`, all sizes decided.

    Relative names in the recipe count from `search_path`; `mask` is the volume of its mask; `sizes` are taken where the
    recipe leaves them open. Large volumes have blocks enough for `num_workers`. `stored` is the volume as it is stored,
    where the net reads it on another grid.

    Raises:
        PlanError: recipe, net and volume do not fit; the message names the axis, both values and what would fit.
    """
    recipe = with_net_defaults(recipe, net)
    check_net(recipe, volume, net)
    net = with_forms(recipe, net)
    first, *others = volume.parts
    check_grey(recipe.normalise, first)
    for part, also in zip(others, recipe.input.also or (), strict=True):
        check_grey(also.normalise or recipe.normalise, part)
    window, overlap = choose_windows(recipe.windows, net, volume.spatial_shape, sizes.window)
    check_turns(recipe, window=window, scale=net.scale, stride=net.stride, halo=net.halo)
    intensity = net.intensity if recipe.output.intensity == "auto" else recipe.output.intensity
    _check_channels(recipe, volume, net, intensity)
    out_dtype = output_type(recipe, volume.stored_dtype, intensity, net)
    grid = None if stored is None else output_grid(recipe, stored, volume, net)
    nets = [net.of_array(array) for array in net.arrays] if len(net.arrays) > 1 else [net]
    roi = find_roi(recipe.input.roi, volume) if grid is None else grid.seen(nets, volume.spatial_shape)
    # Such blocks are shards, too.
    in_slabs = (
        recipe.tensors.mode != "stored"
        and can_stream(folders_of(recipe.output.format), net.combined_channels, in_bucket=not isinstance(out, Path))
        and recipe.output.shard == "auto"
    )
    _check_corner(roi, net)
    moves = in_slabs and recipe.windows.block == "auto" and recipe.windows.placement == "lattice"
    sized = replace(
        _block_sizes(recipe, volume, net, (window, overlap), out_dtype),
        region=_coarse(roi, net) if moves else None, num_workers=num_workers, most_voxels=sizes.block_voxels,
        is_sparse=mask is not None or recipe.input.empty is not None,
        small_voxels=0 if isinstance(out, Path) else SMALL_IN_BUCKET,
    )  # fmt: skip
    block = choose_block(recipe.windows.block, sized, in_slabs=in_slabs)
    shard = choose_shard(recipe.output, sized.core(block))
    return (
        Plan(
            recipe=recipe,
            source=SourceVolume.from_volume(volume),
            net=net,
            search_path=search_path,
            out=str(out),
            # Windows overlap, so storing them always writes more than it saves on one machine.
            mode="streamed" if recipe.tensors.mode == "auto" else recipe.tensors.mode,
            window=window,
            overlap=overlap,
            channels_last=_set_or_chosen(recipe.infer.channels_last, sizes.channels_last),
            precision=_set_or_chosen(recipe.infer.precision, sizes.precision),
            block=block,
            shard=shard,
            chunk=choose_chunk(recipe.output, shard),
            out_dtype=out_dtype,
            intensity=intensity,
            factors=FINEST,
            roi=(triple(roi.start), triple(roi.stop)),
            corner=triple(roi.start) if moves else (0, 0, 0),
            mask=None if mask is None else lay_mask(mask, volume),
            code_sha256=code_hash_of(recipe.net, search_path),
            grid=grid,
            notes=PlanNotes(volume=_volume_notes(volume, grid)),
        )
        .with_levels()
        .checked()
        .with_widest_type()
    )


def _volume_notes(volume: Volume, grid: VolumeGrid | None) -> tuple[str, ...]:
    """Return which level is read, the notes of the volume, and on which of two grids the output lies."""
    level, lies = list[str](), list[str]()
    if len(volume.levels) > 1:
        number, name = volume.levels.index(volume.key), volume.key.rpartition("/")[2]
        level.append(f"level {number}, {name}, of {len(volume.levels)}")
    if volume.resampling is not None:
        lies.append(f"the output lies on {'these' if grid is None else 'those of the volume'}")
    return (*level, *volume.notes, *lies)


def _block_sizes(
    recipe: Recipe, volume: Volume, net: NetFacts, windows: tuple[Triple, Triple], out_dtype: str
) -> Sizes:
    """Return the sizes that decide the shape of blocks, in voxels of the lattice; the number of workers is left open.

    `windows` are their shape and their overlap, as the net sees them.
    """
    window, overlap = windows
    unit = net.shrink
    return Sizes(
        triple(-(-n // u) for n, u in zip(volume.spatial_shape, unit, strict=True)),
        triple(-(-o // u) for o, u in zip(overlap, unit, strict=True)),
        triple((w - o) // u for w, o, u in zip(window, overlap, unit, strict=True)), net.scale,
        input_chunk=triple(-(-c // u) for c, u in zip(volume.spatial_chunks, unit, strict=True)),
        input_bytes=volume.num_channels * volume.dtype.itemsize * math.prod(unit),
        output_bytes=net.out_channels * np.dtype(out_dtype).itemsize,
        sum_bytes=net.out_channels * max(SUM_TYPE.itemsize, np.dtype(out_dtype).itemsize),
        is_blended=(recipe.windows.blend, recipe.windows.placement) != ("crop", "lattice"),
        chunk=CHUNK_TARGET if recipe.output.chunk == "auto" else recipe.output.chunk[0],
    )  # fmt: skip


def _check_channels(recipe: Recipe, volume: Volume, net: NetFacts, intensity: str) -> None:
    """Refuse an output whose channels would go back through the normalisation of as many others."""
    is_apart = (recipe.normalise.per_channel or len(volume.parts) > 1) and volume.num_channels > 1
    if (
        is_apart
        and intensity == "same"
        and net.combined_channels != volume.num_channels
        and recipe.output.kind == "image"
    ):
        raise PlanError(
            f"{'normalise.per_channel' if recipe.normalise.per_channel else 'input.also'} maps each of "
            f"{volume.num_channels} channels for itself, and net {net.label} gives "
            f"{net.combined_channels}, which cannot go back to grey levels; set output.intensity=raw"
        )


def _check_corner(roi: Box, net: NetFacts) -> None:
    """Refuse a region that begins within a voxel of a coarser output."""
    for axis, start, unit in zip("zyx", roi.start, net.shrink, strict=True):
        if start % unit:
            raise PlanError(
                f"axis {axis}: the roi begins at voxel {start}, and a voxel of the output of net {net.label} is {unit} "
                f"of the volume; begin at {start // unit * unit} or {align_up(start, unit)}"
            )


def _coarse(roi: Box, net: NetFacts) -> Box:
    """Return `roi` in voxels of the lattice."""
    ends = zip(roi.start, roi.stop, net.shrink, strict=True)
    return Box(*zip(*((a // u, -(-b // u)) for a, b, u in ends), strict=True))


def _set_or_chosen(choice: T | Auto, chosen: T) -> T:
    """Return the `choice` of a recipe, or what was `chosen` where it leaves that open."""
    return chosen if choice == "auto" else choice
