"""What the plans of all outputs have in common: the volume that is read, and shards in levels.

Not here: how sizes come about (inference.plan, segmentation.plan).
"""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, field_serializer, model_serializer

from volpipe.errors import PlanError
from volpipe.geometry.block_shape import SLAB_VOXELS
from volpipe.geometry.grid import Box, Grid, Triple, triple
from volpipe.geometry.levels import FINEST, level_factors, level_shape
from volpipe.nets.files import short_hash
from volpipe.recipes.inference import Recipe
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.recipes.toml import differences
from volpipe.volumes.formats.container import folders_of
from volpipe.volumes.formats.format import ArrayFolders
from volpipe.volumes.on_grid import resampled
from volpipe.volumes.resampling import Resampling
from volpipe.volumes.stack import stack
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.volume import ArraySpec, Level, Multiscale, View, Volume, open_volume

COMPARED = {"source", "net", "code_sha256", "out"}  # fields that explain why sizes differ
IDENTITY = "net.identity"  # of a net, which says itself what differs
MEMBERS = "net.members"  # of an ensemble, whose recipe, weights and identity say what differs
REASONS = {"net.weights_sha256": ": the weights changed", "code_sha256": ": the code of the net changed"}


NET_GROUP = "net"  # in an output on the volume's grid: the group of its voxels on the net's


def level_key(level: int) -> str:
    return f"s{level}"


def levels_of(factors: Iterable[Triple]) -> tuple[Level, ...]:
    """Return the levels of an output that are coarser than its finest by `factors`."""
    return tuple(Level(level_key(i), triple(float(f) for f in factor)) for i, factor in enumerate(factors))


class SourceVolume(BaseModel):
    """The volume of a plan; shapes in voxels (z, y, x).

    `view` is the channel, time point, voxel size and origin that the recipe sets; the rest follows from it. `slices` is
    the hash of their names when the plan was made (`Volume`). With a `resampling` all of this is of its grid. Where
    several volumes are read as one, channels and type are those of all, and `also` has the others.
    """

    model_config = ConfigDict(frozen=True)

    path: str
    key: str
    format: str
    shape: Triple
    num_channels: int
    dtype: str
    voxel_size_nm: tuple[float, float, float] | None
    origin_nm: tuple[float, float, float]
    view: View = View()
    slices: str = ""
    resampling: Resampling | None = None
    also: tuple[SourceVolume, ...] = ()
    own_channels: int = 0  # of the first of several volumes, and its type
    own_dtype: str = ""

    @property
    def grey_dtype(self) -> np.dtype:
        """The type that holds voxels as they are stored, by which grey levels are mapped; of another grid they are
        float32."""
        own = self.own_dtype or (self.dtype if self.resampling is None else self.resampling.dtype)
        return np.result_type(np.dtype(own), *(each.grey_dtype for each in self.also))

    @model_serializer(mode="wrap")
    def _as_stored(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Return the fields by their names; the resampling, and other volumes, only where there are some."""
        tree: dict[str, object] = dump(self)
        left_out = set() if self.resampling is not None else {"resampling"}
        left_out |= set() if self.also else {"also", "own_channels", "own_dtype"}
        return {name: value for name, value in tree.items() if name not in left_out}

    @field_serializer("resampling", mode="wrap")
    def _grid_as_stored(self, grid: Resampling | None, dump: SerializerFunctionWrapHandler) -> object:
        """Return the fields of the grid; `sigmas` only where there are some, which no net's maker has."""
        tree = dump(grid)
        if isinstance(tree, dict) and not any(tree["sigmas"]):
            del tree["sigmas"]
        return tree

    @field_serializer("view")
    def _view_as_stored(self, view: View) -> dict[str, object]:
        """Return the fields of the view; `incomplete` only where an incomplete volume is read."""
        tree = asdict(view)
        return tree if view.incomplete else {name: value for name, value in tree.items() if name != "incomplete"}

    @classmethod
    def from_volume(cls, volume: Volume) -> SourceVolume:
        """Return the source that describes `volume`."""
        first, *others = volume.parts
        several = {
            "also": map(cls.from_volume, others),
            "own_channels": first.num_channels,
            "own_dtype": first.stored_dtype.name,
        }
        return cls(
            **(several if others else {}),
            path=volume.path,
            key=volume.key,
            format=volume.format,
            shape=volume.spatial_shape,
            num_channels=volume.num_channels,
            dtype=volume.dtype.name,
            voxel_size_nm=volume.voxel_size_nm,
            origin_nm=volume.origin_nm,
            view=volume.view,
            slices=volume.slices,
            resampling=volume.resampling,
        )

    @property
    def given(self) -> tuple[tuple[int, str], ...]:
        """The channels and the type of each volume, one after the other."""
        if not self.also:
            return ((self.num_channels, self.grey_dtype.name),)
        return (self.own_channels, self.own_dtype), *((each.num_channels, each.grey_dtype.name) for each in self.also)

    def of_shape(self, shape: Triple) -> SourceVolume:
        """Return this source with volumes of `shape`, which have grown."""
        also = tuple(each.of_shape(shape) for each in self.also)
        return self.model_copy(update={"shape": shape, "also": also})

    def volume(self) -> Volume:
        """Return the volume, as it is now, whether or not it is complete."""
        return self.opened().as_it_is

    def opened(self) -> Volume:
        """Return the volume, as it is now; reading a chunk that is not written yet is an error."""
        first = resampled(open_volume(self.path, self.key, view=self.view), self.resampling)
        return stack([first, *(each.opened() for each in self.also)])

    def as_planned(self) -> Volume:
        """Return the volume as it was planned, also where it has grown since; one that has shrunk cannot be opened."""
        grid, volume = self.resampling, open_volume(self.path, self.key, view=self.view, is_planned=True).as_it_is
        shape, dtype = (self.shape, self.given[0][1]) if grid is None else (grid.stored, grid.dtype)
        first = resampled(volume.as_it_was(shape, np.dtype(dtype), self.slices), grid)
        return stack([first, *(each.as_planned() for each in self.also)])


def can_stream(folders: ArrayFolders, num_channels: int, *, in_bucket: bool) -> bool:
    """Return whether shards can be written layer by layer.

    The chunks of a channel lie together in a shard, but those of a layer come together: of several channels they are
    put in order once all are there, which a file in a bucket cannot be.
    """
    return folders.is_streamed and not (in_bucket and num_channels > 1)


class OutputPlan(BaseModel, ABC):
    """The plan of an output, as its folder stores it in the file FILE; shapes in voxels (z, y, x).

    Attributes:
        search_path: folder that the recipe's relative names start from.
        block: what a task computes.
        shard, chunk: of the output, at every level.
        factors: of each level against level 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    FILE: ClassVar[str]
    SIZES: ClassVar[tuple[str, ...]] = ("block", "shard", "chunk", "factors")  # that an output keeps once it is begun

    recipe: Recipe | SegmentRecipe
    source: SourceVolume
    search_path: str
    out: str
    block: Triple
    shard: Triple
    chunk: Triple
    factors: tuple[Triple, ...]

    @property
    @abstractmethod
    def out_shape(self) -> Triple:
        """Shape of the output."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype:
        """Type of the output's voxels."""

    @property
    def format(self) -> str:
        return self.recipe.output.format

    @property
    def is_in_bucket(self) -> bool:
        return "://" in self.out

    @property
    def can_stream(self) -> bool:
        """Whether shards can be written layer by layer."""
        return can_stream(self.folders, self.num_channels, in_bucket=self.is_in_bucket)

    @property
    def is_layered(self) -> bool:
        """Whether shards are written layer by layer: large ones, where they can be."""
        return self.can_stream and math.prod(self.shard) > SLAB_VOXELS

    @property
    def folders(self) -> ArrayFolders:
        """How the output's arrays lie in folders."""
        return folders_of(self.format)

    @property
    def array_format(self) -> str:
        """Format of the output's arrays."""
        return self.folders.name

    @property
    def num_active(self) -> int:
        """Number of blocks that are computed."""
        return len(self.shards())

    @property
    def needs_scan(self) -> bool:
        """Whether voxels decide what is computed, so that it is not known before they are read."""
        return False

    def warnings(self) -> list[str]:
        """Return what a user should know before it is made, in sentences."""
        return []

    @property
    @abstractmethod
    def is_labels(self) -> bool:
        """Whether the output's voxels are numbers of objects."""

    @property
    @abstractmethod
    def multiscale(self) -> Multiscale:
        """The places of the output's levels."""

    def group_of(self, level: int) -> Multiscale:
        """Return the places of the levels in the group of `level`."""
        return self.multiscale

    @property
    def back(self) -> Resampling | None:
        """The grid of level 1, of which level 0 is the net's, where an output lies on the volume's; None of others."""
        return None

    @property
    def finest(self) -> int:
        """The number of the finest of the levels that readers of the output see."""
        return 0 if self.back is None else 1

    @property
    def shown_region(self) -> Box:
        """The finest of these levels, in voxels of the grid `back` where it lies on that."""
        return Box.from_shape(self.out_shape)

    @property
    def shown_shape(self) -> Triple:
        """Shape of the finest of these levels."""
        return triple(self.shown_region.shape)

    @property
    def input_voxel(self) -> Lengths | None:
        """Length of a voxel of the volume, on the grid on which these levels lie; None where it is unknown."""
        return self.source.voxel_size_nm

    @property
    def arrays(self) -> tuple[Self, ...]:
        """The plans of the arrays that the output has, each with its levels; this one, where it has one."""
        return (self,)

    def array(self, name: str) -> Self:
        """Return the plan of the array of that name, "" for the only one.

        Raises:
            PlanError: there is none, with those that there are.
        """
        named = {array.folder: array for array in self.arrays}
        if name not in named:
            if len(named) < 2:
                raise PlanError(f"{self.out} has one array, none is named {name}; leave that out")
            listed, what = ", ".join(named), f"and none is named {name}" if name else "of which one is to be read"
            raise PlanError(f"{self.out} has the arrays {listed}, {what}: name one, as STAGE/{next(iter(named))}")
        return named[name]

    @property
    def groups(self) -> tuple[Self, ...]:
        """The plans of the groups of the output: its own, and those of its arrays where it has several."""
        return (self, *self.arrays) if len(self.arrays) > 1 else (self,)

    @property
    def level_keys(self) -> tuple[str, ...]:
        """The keys of all levels of all arrays in the output."""
        keys = (f"{each.folder}/{each.key(level)}" for each in self.arrays for level in range(len(self.factors)))
        return tuple(key.lstrip("/") for key in keys)

    def key(self, level: int) -> str:
        """Return the key of `level` in the output, or in the folder of its array where that has several."""
        return level_key(level - self.finest) if level >= self.finest else f"{NET_GROUP}/{level_key(level)}"

    @property
    def group_folders(self) -> tuple[str, ...]:
        """The folders of the output's groups: "" for its own, and those of its arrays and of voxels on a net's grid."""
        nets = (f"{each.folder}/{NET_GROUP}".lstrip("/") for each in self.arrays if each.finest)
        return (*(group.folder if number else "" for number, group in enumerate(self.groups)), *nets)

    @property
    def folder(self) -> str:
        """The folder in the output of the one array that this plan is of; "" where the output has one array."""
        return ""

    @property
    def num_channels(self) -> int:
        """Channels of the output; a single one is no axis of its arrays."""
        return 1

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names of the output's channels, () where it has none."""
        return ()

    @abstractmethod
    def spec(self, level: int) -> ArraySpec:
        """Return the array of `level`."""

    @cached_property
    def identity(self) -> str:
        """A short hash of everything that decides the output's bytes, but for what the volume holds.

        Names count from the folder `search_path`; what they name is in here by its contents.
        """
        left_out: dict[str, Any] = {"source": {"slices"}, "search_path": True}  # Any: as pydantic has it
        return hashlib.sha256(self.model_dump_json(exclude=left_out).encode()).hexdigest()[:16]

    def changes(self, new: Self) -> list[str]:
        """Return a line for each difference from `new`."""
        before, after = (dict(_plan_fields(plan.model_dump(include=COMPARED))) for plan in (self, new))
        own = [
            f"{name}: {_as_words(value)} -> {_as_words(after.get(name))}{REASONS.get(name, '')}"
            for name, value in before.items()
            if value != after.get(name) and name not in (IDENTITY, MEMBERS)
        ]
        return differences(self.recipe, new.recipe) + own + self.net_changes(new)

    def net_changes(self, new: Self) -> list[str]:
        """Return a line for each difference of the net in `new` beside its weights, source and facts."""
        return []

    def changed(self, **fields: object) -> Self:
        """Return the plan with other values in some fields; pydantic's own copy keeps cached properties."""
        return self.model_validate({name: getattr(self, name) for name in type(self).model_fields} | fields)

    def as_begun(self, old: Self) -> Self:
        """Return the plan with the sizes of the plan `old` by which its output was begun."""
        return self.changed(**{name: getattr(old, name) for name in self.SIZES})

    @property
    def scale(self) -> Triple:
        """Voxels (z, y, x) of the output for a voxel of the volume."""
        return (1, 1, 1)

    def with_levels(self, begun: tuple[Triple, ...] = FINEST) -> Self:
        """Return the plan with all levels that its recipe asks for, those of the factors `begun` first."""
        voxel = tuple(v / s for v, s in zip(self.input_voxel or (1.0, 1.0, 1.0), self.scale, strict=True))
        own = level_factors(self.recipe.output.levels, self.shown_shape, voxel, begun[self.finest :] or FINEST)
        return self.changed(factors=FINEST[: self.finest] + own)

    def level_shape(self, level: int) -> Triple:
        """Return the shape of `level`; level 0 is the output itself."""
        return level_shape(self.out_shape if level < self.finest else self.shown_shape, self.factors[level])

    def finer_box(self, level: int, box: Box) -> Box:
        """Return the voxels of the level before `level` from which `box` of that is made."""
        return box.scaled(self.step(level)) & Box.from_shape(self.level_shape(level - 1))

    def coarser_box(self, level: int, box: Box) -> Box:
        """Return voxels of `level` around those that are made of the corner of `box`, a shard of the level before."""
        corner = tuple(a // s for a, s in zip(box.start, self.step(level), strict=True))
        return Box(corner, tuple(c + 1 for c in corner))

    def shown_box(self, box: Box) -> Box:
        """Return the voxels of the finest level that readers see in which those of `box` of level 0 count."""
        return box

    def step(self, level: int) -> Triple:
        """Return by how much `level` is coarser than the level before it, per axis."""
        return triple(b // a for a, b in zip(self.factors[level - 1], self.factors[level], strict=True))

    def shards(self, level: int = 0) -> Grid:
        """Return the shards of `level`: each is written by one task at once."""
        return self._shards[level]

    @property
    def num_folders(self) -> int:
        """Number of folders of the output, once it is whole: its own, that of its runs, and those of its levels."""
        if len(self.arrays) > 1:
            return 2 + sum(array.num_folders for array in self.arrays)
        specs = [self.spec(level) for level in range(len(self.factors))]
        files = (Grid(spec.shape, spec.shards or spec.chunks).counts for spec in specs)
        return 2 + self.finest + sum(self.folders.scheme.count_folders(counts) for counts in files)

    @cached_property
    def _shards(self) -> list[Grid]:
        return [Grid(self.level_shape(level), self.shard) for level in range(len(self.factors))]


def _plan_fields(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:  # Any: values of plans
    """Yield the names and values of `tree`; those of a table in it as TABLE.NAME."""
    for name, value in tree.items():
        if isinstance(value, dict) and not above:
            yield from _plan_fields(value, f"{name}.")
        else:
            yield above + name, value


def _as_words(value: object) -> str:
    """Return a value of a plan as a sentence has it: a hash by its beginning, sizes as z × y × x."""
    if isinstance(value, str):
        return short_hash(value) if re.fullmatch("[0-9a-f]{64}", value) else value or "none"
    if isinstance(value, dict):
        return f"{value.get('path', '')} {value.get('key', '')}".strip()
    if isinstance(value, tuple):
        return " × ".join(map(_as_words, value))
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
