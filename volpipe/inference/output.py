"""The output of a run: its arrays, one per pyramid level, their metadata, and the finish of its voxels.

Not here: the sums (block_sum), their way here (reassemble), or the bytes of a format (formats).
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

import numpy as np
from pydantic import ValidationError

from volpipe.blockwise.malloc import mapped
from volpipe.errors import PlanError, VolumeError
from volpipe.geometry.grid import Box, Grid, triple
from volpipe.inference.intensity import Affine, ClippedVoxels, constant, is_tensor, library, to_dtype, unit_scale
from volpipe.inference.output_plan import NET_GROUP, OutputPlan
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection
from volpipe.recipes.inference import Recipe
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.volumes.formats import ome
from volpipe.volumes.formats.container import (
    check_suffix,
    count_image_levels,
    grow_array,
    labels_format,
    locate,
    write_record,
)
from volpipe.volumes.formats.known import FORMATS, format_named
from volpipe.volumes.formats.ome_zarr import label_place
from volpipe.volumes.places import warn_of_image
from volpipe.volumes.storage.metadata import Display
from volpipe.volumes.storage.paths import PARTIAL, Location, check_letters, reading_once
from volpipe.volumes.storage.requests import InTurn, boxes_at_once, num_at_once
from volpipe.volumes.volume import Volume, absolute, create_array, create_multiscale, open_writer
from volpipe.volumes.writer import ShardStream, Writer

if TYPE_CHECKING:
    from volpipe.inference.intensity import Array

R = TypeVar("R", Recipe, SegmentRecipe)

SUMMED_VOXELS = 1 << 22  # values that are added up at a time, about
SHOWN_BOXES, SHOWN_EDGE = 8, 64  # a sample of a level, for its display range
SHOWN_PERCENTILES = (0.1, 99.9)  # black and white
ARRAYS = ";"  # between the checksums of arrays
READERS, REMOTE_READERS = 4, 8  # of boxes at a time, from a disk and from a bucket

FOLDERS = {
    ".zarr": ("ome-zarr-0.5", "ome-zarr-0.6", "ome-zarr-0.4", "zarr2"),
    ".n5": ("n5",),
    ".precomputed": ("precomputed",),
}  # formats of an output by its suffix
COPIES = tuple(
    suffix for each in FORMATS if each.writing is not None and each.writing.write_file for suffix in each.suffixes
)  # that `volpipe convert` writes
FILES = (
    *(suffix for each in FORMATS if each.files is not None for suffix in each.suffixes), ".btf", ".tf8", ".he5",
    ".mrcs", ".st", ".ali", ".npz", ".bmp", ".gif", ".webp", ".jp2", ".gz", ".mha", ".mhd", ".ims",
    ".czi", ".lif", ".nd2", ".oib", ".oif", ".vsi", ".klb", ".ozx", ".zip", ".tar", ".csv",
    ".toml", ".json", ".txt", ".xml", ".pdf", ".svg", ".py", ".pt", ".onnx", ".safetensors",
)  # fmt: skip


def suffix_of(format: str) -> str:
    """Return how the name of an output in `format` ends."""
    return next(suffix for suffix, formats in FOLDERS.items() if format in formats)


def check_name(out: str | Location) -> None:
    """Refuse an output that is named like a file: it will be a folder of chunks.

    Raises:
        PlanError: with a name for --out, and the command that makes such a file.
        VolumeError: its chunks would lie elsewhere.
    """
    check_letters(absolute(out))
    name = str(out).rstrip("/")
    suffix = Path(name).suffix.lower()
    if suffix in FILES:
        folder = f"{name[: -len(suffix)]}.zarr"
        copy = (
            f"; `{shlex.join(('volpipe', 'convert', folder, name))}` then makes a file of it"
            if suffix in COPIES
            else ""
        )
        raise PlanError(
            f"--out {out}: {suffix} is no format of an output, which is a folder of chunks, OME-Zarr (.zarr), "
            f"N5 (.n5) or Neuroglancer's (.precomputed); give --out {folder}{copy}"
        )
    check_suffix(f"--out {out}", name)


def with_format(recipe: R, out: str | Location) -> R:
    """Return `recipe`, of a run or a segmentation, with the format that the name `out` has, where it gives none.

    Raises:
        PlanError: the name is that of another format than the recipe's, or of one that cannot be.
    """
    check_name(out)
    output, suffix, place = recipe.output, locate(str(out))[0].suffix.lower(), absolute(out)
    of_image, changes = labels_format(place), dict[str, object]()
    named = FOLDERS.get(suffix, ()) if of_image is None else (of_image.name,)
    known = get_args(type(output).model_fields["format"].annotation)
    fitting = [format for format in named if format in known]
    if of_image is not None and output.levels == "auto":
        changes["levels"] = count_image_levels(place) - 1
    if not named or output.format in fitting:
        return _with_output(recipe, changes, out)
    if not fitting and of_image is not None:
        raise PlanError(
            f"--out {out}: its image is {of_image.name}, in which labels are not written here; write them beside the "
            "image, and copy them by `volpipe convert`"
        )
    if not fitting:
        raise PlanError(
            f"--out {out}: labels are written as OME-Zarr or precomputed; give a name that ends in .zarr or "
            ".precomputed"
        )
    if "format" in output.model_fields_set and of_image is not None:
        raise PlanError(
            f"--out {out}: its image is {of_image.name}, and output.format is {output.format}; leave that out, or "
            "choose another --out"
        )
    if "format" in output.model_fields_set:
        raise PlanError(
            f"--out {out}: its name is that of {fitting[0]}, and output.format is {output.format}; give a name that "
            f"ends in {suffix_of(output.format)}, or output.format={fitting[0]}"
        )
    return _with_output(recipe, changes | {"format": fitting[0]}, out)


def _with_output(recipe: R, changes: dict[str, object], out: str | Location) -> R:
    """Return `recipe` with these keys of its output; the name `out` asks for them."""
    if not changes:
        return recipe
    output = recipe.output
    try:
        chosen = type(output).model_validate(output.model_dump(exclude_unset=True) | changes)
    except ValidationError as error:
        raise PlanError(f"--out {out}: output.{error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    return recipe.model_copy(update={"output": chosen})


# Unfinished files of a killed writer: tensorstore's, and that of our JSON.
LEFT_BEHIND = re.compile(rf".+\.__lock|{PARTIAL}")


def remove_leftovers(out: Location) -> list[Path]:
    """Delete and return the unfinished files that killed writers left in the output at `out`; none may be at work.

    In S3 a file appears once it is whole, so that there are none. Parts that killed workers left are no files, and the
    bucket's lifecycle rule deletes them.
    """
    if not isinstance(out, Path):
        return []
    left = [path for path in out.rglob("*") if LEFT_BEHIND.fullmatch(path.name)]
    for path in left:
        path.unlink(missing_ok=True)
    return left


def finish(plan: Plan, normalise: Affine, total: Array, tally: ClippedVoxels | None = None) -> Array:
    """Return the net's summed output `total` (c, z, y, x), float32, in the type and scale of the output.

    Of an ensemble the median is taken first. Numbers go through the recipe's activation then. Of classes, the largest
    channel's number or label is left, or the label of the last region that a voxel is in, for which most nets vote.
    "same" intensities go back through the inverse of the normalisation, "unit" ones become 0..255 and so on, then
    integers are rounded half to even and clipped, and `tally` counts the clipped voxels. A tensor stays on its device,
    and for integers all of it must be finite. Voxels that went through the net as they are stored stay as they are.
    """
    if plan.is_as_stored:
        return total
    activation = "sigmoid" if plan.classes_overlap else plan.recipe.output.activation
    num_nets = plan.net.num_stacked
    nets = total.reshape(num_nets, len(total) // num_nets, *total.shape[1:])  # (nets, c, z, y, x)
    if plan.net.combine == "median":
        nets = median(nets)[None]
    if plan.is_classes:
        labels, each = plan.class_labels, [activated(net, activation) for net in nets]
        votes: list[Array] = [
            painted(net, labels) if plan.classes_overlap else largest_channel(net, labels) for net in each
        ]
        return to_dtype(majority(votes), plan.dtype)
    total = activated(nets[0], activation)
    if plan.intensity == "same":
        total = normalise.invert(total)
    elif plan.intensity == "unit":
        total = total * constant(total, unit_scale(plan.dtype))
    return to_dtype(total, plan.dtype, tally)


def median(nets: Array) -> Array:
    """Return the median over `nets` (nets, c, z, y, x), as numpy's: of an even number the mean of the two in the
    middle, NaN where any is.
    """
    of, high = library(nets), len(nets) // 2
    along = {"dim": 0} if is_tensor(nets) else {"axis": 0}
    result: Array = of.empty_like(nets[0])
    for z in range(nets.shape[2]):  # slice by slice, so that little is in memory beside them
        ranked = of.sort(nets[:, :, z], **along)
        ranked = ranked.values if is_tensor(nets) else ranked
        middle = ranked[high] if len(nets) % 2 else (ranked[high - 1] + ranked[high]) / 2
        result[:, z] = of.where(of.isnan(ranked[-1]), ranked[-1], middle)  # NaN comes last
    return result


def majority(votes: Sequence[Array]) -> Array:
    """Return the value that most of `votes`, each (1, z, y, x), have at a voxel, of several the least."""
    first, *others = votes
    if not others:
        return first
    of = library(first)
    best, most = first, sum((vote == first) * 1 for vote in votes)
    for own in others:
        number = sum((vote == own) * 1 for vote in votes)
        is_better = (number > most) | ((number == most) & (own < best))
        best, most = of.where(is_better, own, best), of.where(is_better, number, most)
    return best


def activated(total: Array, activation: str) -> Array:
    """Return `total` (c, z, y, x) after the sigmoid, or the softmax over the channels."""
    import torch

    if activation == "none":
        return total
    tensor = torch.from_numpy(total) if isinstance(total, np.ndarray) else total
    result = torch.sigmoid(tensor) if activation == "sigmoid" else torch.softmax(tensor, 0)
    return result.numpy() if isinstance(total, np.ndarray) else result


def largest_channel(total: Array, labels: Sequence[int] = ()) -> Array:
    """Return the number of the largest channel of `total` (c, z, y, x), the first of equal ones, as (1, z, y, x).

    Args:
        labels: of each channel, in place of its number.
    """
    if isinstance(total, np.ndarray):
        numbers = total.argmax(axis=0, keepdims=True)
        return np.asarray(np.asarray(labels)[numbers] if labels else numbers, np.float32)
    channels = total.argmax(dim=0, keepdim=True)
    return (channels.new_tensor(labels)[channels] if labels else channels).float()


def painted(chances: Array, labels: Sequence[int]) -> Array:
    """Return the label of the last region of which a voxel's chance is above a half, 0 where none is, as (1, z, y, x).

    That is nnU-Net's `convert_probabilities_to_segmentation` (nnunetv2 2.8).

    Args:
        chances: of each region (c, z, y, x).
        labels: of each region.
    """
    result = chances[:1] * 0
    for chance, label in zip(chances, labels, strict=True):
        result[0][chance > 0.5] = label
    return result


def join_arrays(sums: Iterable[str]) -> str:
    """Return the checksums of a shard of each array of an output as one text, which `split_arrays` takes apart."""
    return ARRAYS.join(sums)


def split_arrays(sums: str) -> list[str]:
    """Return the checksums of a shard of each array of an output."""
    return sums.split(ARRAYS)


def create_output(plan: OutputPlan, provenance: dict[str, object], of_arrays: Sequence[dict[str, object]] = ()) -> None:
    """Write the metadata of every level and of their group; voxels that exist stay.

    Where the output has several arrays, each has a group of its own in that of the output, and says `of_arrays`.
    """
    if len(plan.arrays) > 1:
        write_record(absolute(plan.out), provenance, plan.array_format)
        for array, own in zip(plan.arrays, of_arrays, strict=True):
            create_output(array, own)
        return
    with reading_once():
        for level in range(len(plan.factors)):
            group, _, key = plan.key(level).rpartition("/")
            create_array(absolute(plan.out) / group, key, plan.spec(level), plan.array_format)
        create_multiscale(plan.out, plan.multiscale, format=plan.format, attributes=provenance)
        if plan.finest:
            own = {name: value for name, value in provenance.items() if name != "grid"}
            create_multiscale(absolute(plan.out) / NET_GROUP, plan.group_of(0), format=plan.format, attributes=own)


def grow_output(plan: OutputPlan) -> None:
    """Give the levels that an output has already the shapes of `plan`, which has grown."""
    for array in plan.arrays:
        for level in range(len(plan.factors)):
            grow_array(array.out, array.key(level), array.spec(level), array.array_format)


def write_displays(plan: Plan) -> None:
    """Store in a whole output the display ranges of its channels, from a sample of its voxels; it is always the same.

    The sample is up to SHOWN_BOXES boxes of the coarsest level, most often all of it. With a mask or empty space its
    zeros do not count. Labels and formats other than OME-Zarr have no display ranges.
    """
    if plan.is_labels or not format_named(plan.format).is_ome:
        return
    last = len(plan.factors) - 1
    grid = Grid(plan.level_shape(last), (SHOWN_EDGE,) * 3)
    numbers = np.random.default_rng(0).choice(len(grid), min(SHOWN_BOXES, len(grid)), replace=False)
    boxes = [*read_each(plan, last, [grid.box(n) for n in sorted(map(int, numbers))])]
    names = plan.channel_names or [f"channel {i}" for i in range(plan.num_channels)]
    displays = tuple(
        _display_range(name, np.concatenate([box[channel].ravel() for box in boxes]), is_partial=plan.needs_scan)
        for channel, name in enumerate(names)
    )
    with reading_once():
        create_multiscale(plan.out, dataclasses.replace(plan.multiscale, displays=displays), format=plan.format)


def _display_range(name: str, values: np.ndarray, *, is_partial: bool) -> Display:
    """Return the display range of a channel with these `values`: from one to the other of SHOWN_PERCENTILES."""
    dtype = values.dtype
    # Whose sorted values have differences that are exact as they are.
    is_exact = np.issubdtype(dtype, np.unsignedinteger) and dtype.itemsize <= 2
    if not is_exact:
        values = values[np.isfinite(values)].astype(np.float64)
    values = values[values != 0] if is_partial and values.any() else values
    low, start, end, high = np.percentile(values if values.size else [0.0], (0, *SHOWN_PERCENTILES, 100)).tolist()
    if np.issubdtype(dtype, np.floating):
        low, start, end, high = (float(f"{value:.6g}") for value in (low, start, end, high))
        end = end if start < end else start + 1
        return Display(name, (min(low, start), max(high, end)), (start, end))
    info = np.iinfo(dtype)
    first = min(math.floor(start), int(info.max) - 1)
    return Display(name, (int(info.min), int(info.max)), (first, max(math.ceil(end), first + 1)))


def check_output(plan: OutputPlan) -> None:
    """Raise where its format cannot hold what `plan` will write, or cannot say where it lies.

    Raises:
        PlanError: with what would do.
    """
    writing, place = format_named(plan.format).writing, label_place(absolute(plan.out))
    assert writing is not None
    if place is not None and not plan.is_labels:
        raise PlanError(
            f"--out {plan.out} would be labels of {place.image}, and the output is an image; set output.kind=labels or "
            "classes if it is not, or choose another --out"
        )
    group = plan.multiscale
    warn_of_image(absolute(plan.out), plan.out_shape, group.voxel_size_nm, group.origin_nm)
    try:
        for level in range(len(plan.factors)):
            writing.check_spec(plan.spec(level))
        for level in {0, plan.finest}:
            writing.check_place(plan.group_of(level))
    except VolumeError as error:
        raise PlanError(str(error)) from error


def planned_volume(plan: OutputPlan, level: int = 0) -> Volume:
    """Return `level` of the output as `open_volume` will return it; it need not exist yet.

    Where the output lies on the volume's grid, level 0 is what the net made, on its own.

    Raises:
        PlanError: the output has no such level.
    """
    if level >= len(plan.factors):
        raise PlanError(f"{plan.out} will have no level {level}; its levels are 0 to {len(plan.factors) - 1}")
    spec, group, spatial = plan.spec(level), plan.group_of(level), slice(-3, None)
    place = group.levels[level - plan.finest if level >= plan.finest else level]
    above = f"{plan.folder}/{plan.key(level).rpartition(place.key)[0]}"
    is_ome, version = format_named(plan.format).is_ome, format_named(plan.format).ome_version
    shards, codec = plan.folders.as_read(spec)
    is_placed = group.voxel_size_nm is not None  # else the metadata has no unit
    return Volume(
        path=str(absolute(plan.out).parent if plan.folder else absolute(plan.out)),
        key=f"{above}{place.key}".lstrip("/"),
        format=plan.array_format,
        shape=spec.shape,
        dtype=spec.dtype,
        chunks=spec.chunks,
        shards=shards,
        axes=spec.axes,
        voxel_size_nm=triple(group.scale(place)[spatial]) if is_placed else None,
        origin_nm=triple(group.shift(place)[spatial]) if is_placed else (0.0, 0.0, 0.0),
        has_origin=is_placed or is_ome,
        codec=codec,
        levels=tuple(f"{above}{entry.key}".lstrip("/") for entry in group.levels),
        channel_names=plan.channel_names if is_ome else (),
        metadata=ome.described(version, ome.SYSTEM if ome.has_systems(version) else "") if is_ome else "",
        is_planned=True,
    )


def summed(selection: Selection, normalise: Affine, box: Box, total: np.ndarray, tally: ClippedVoxels) -> np.ndarray:
    """Return the net's summed output `total` (c, z, y, x) in `box` of level 0, as it will be stored.

    A sum outside the selection may be partial, so that the checks of `finish` do not see it. `tally` counts the clipped
    voxels.
    """
    mask, nothing = selection.mask(box), total.dtype.type(0)
    return finish(selection.plan, normalise, total if mask is None else np.where(mask, total, nothing), tally)


def selected(selection: Selection, box: Box, data: np.ndarray) -> np.ndarray:
    """Return stored `data` (c, z, y, x) of `box` of level 0, zeros outside the selection."""
    mask = selection.mask(box)
    return data if mask is None else np.where(mask, data, data.dtype.type(0))


def summed_layers(
    selection: Selection, box: Box, summed: Callable[[Box], np.ndarray]
) -> Iterator[tuple[Box, np.ndarray]]:
    """Yield layers of `box` of level 0, as they will be stored; `summed` returns the voxels of a part of one.

    Of a large shard these parts are whole chunks of block tensors, which are read once, so that little is in memory.
    """
    plan, origin = selection.plan, selection.plan.core_start(0)
    if box.is_empty:
        return
    if not plan.is_layered:
        yield box, selected(selection, box, summed(box))
        return
    row = plan.sum_chunk[0] * box.shape[2] * plan.num_channels * plan.sum_chunk[1]
    height = plan.sum_chunk[1] * max(1, SUMMED_VOXELS // max(1, row))
    for layer in box.cut(0, plan.sum_chunk[0], origin[0]):
        data = np.empty((plan.num_channels, *layer.shape), plan.dtype)
        for part in layer.cut(1, height, origin[1]):
            data[:, *part.relative_to(layer.start).slices] = summed(part)
        yield layer, selected(selection, layer, data)


def shards_at_once(plan: OutputPlan) -> int:
    """Return how many shards a worker writes at a time: several into a bucket, where each waits for an answer."""
    shard_bytes = math.prod(plan.shard) * plan.num_channels * plan.dtype.itemsize
    return num_at_once(shard_bytes, fewest=1) if plan.is_in_bucket and not plan.is_layered else 1


def shards_behind(plan: OutputPlan) -> int:
    """Return how many shards a worker has in memory while it makes one and writes those before: two into a bucket,
    more where they are small.
    """
    return max(2, shards_at_once(plan)) if plan.is_in_bucket else 1


class WholeShard:
    """A shard that is written at once with its last layer, in the place of a `ShardStream`; its layers wait in memory.

    Attributes:
        position: where the next layer lies along z in the array.
    """

    def __init__(self, writer: Writer, box: Box) -> None:
        self._writer, self._box, self.position = writer, box, box.start[-3]
        self._waiting: np.ndarray | None = None
        self._checksums = ""

    def append(self, data: np.ndarray) -> None:
        """Take the next layers, `data` in stored axes, and write the shard with the last one."""
        place = slice(self.position - self._box.start[-3], self.position - self._box.start[-3] + data.shape[-3])
        self.position += data.shape[-3]
        if data.shape != self._box.shape:
            if self._waiting is None:
                self._waiting = mapped(self._box.shape, self._writer.dtype)
            self._waiting[..., place, :, :] = data
        if self.position == self._box.stop[-3]:
            self._checksums = self._writer.write_summed(self._box, data if self._waiting is None else self._waiting)
            self._waiting = None

    def fill(self, stop: int) -> None:
        """Append zeros up to `stop` along z, if anything is missing there."""
        if (missing := stop - self.position) > 0:
            shape = self._box.shape
            self.append(np.zeros((*shape[:-3], missing, *shape[-2:]), self._writer.dtype))

    def settle(self) -> None:
        """Do nothing: what was written has arrived."""

    def persist(self) -> None:
        """Do nothing: what was written is stored for good."""

    def close(self) -> None:
        """Do nothing: the shard is in its place."""

    def abort(self) -> None:
        """Do nothing: no part of it was written."""

    def checksums(self) -> str:
        """Return the checksums of the files of the shard, as `checksums.take` does."""
        return self._checksums


ShardFile = ShardStream | WholeShard


def open_shard(plan: OutputPlan, shard: int, level: int = 0) -> ShardFile:
    """Return the file, or the files, of `shard` of `level`, to which its layers are appended."""
    writer, box = open_writer(plan.out, plan.key(level)), stored_box(plan, plan.shards(level).box(shard))
    return ShardStream(writer, box, mapped) if plan.is_layered else WholeShard(writer, box)


def append_voxels(plan: OutputPlan, file: ShardFile, box: Box, data: np.ndarray) -> None:
    """Append `data` (c, z, y, x), the next layers of a shard in `box`; those before that are missing are zeros."""
    file.fill(box.start[0])
    file.append(data if plan.num_channels > 1 else data[0])


def close_shard(plan: OutputPlan, shard: int, file: ShardFile, level: int = 0) -> str:
    """Put `shard` of `level` in its place, zeros where nothing was appended; return its checksums."""
    file.fill(plan.shards(level).box(shard).stop[0])
    file.close()
    return file.checksums()


def writing_shard(
    plan: OutputPlan, shard: int, layers: Iterable[tuple[Box, np.ndarray]], level: int = 0
) -> Callable[[], str]:
    """Return a function that writes `shard` of `level`, and returns its checksums.

    Where it is not written layer by layer, its voxels are in memory by now.
    """
    layers = layers if plan.is_layered else list(layers)

    def write() -> str:
        file = open_shard(plan, shard, level)
        try:
            for box, data in layers:
                append_voxels(plan, file, box, data)
            return close_shard(plan, shard, file, level)
        finally:
            file.abort()  # nothing is left once it is closed

    return write


def write_voxels(plan: OutputPlan, level: int, box: Box, data: np.ndarray) -> str:
    """Write `data` (c, z, y, x) to `box` of `level`, whole shards with one writer each; return the checksums."""
    writer = open_writer(plan.out, plan.key(level))
    return writer.write_summed(stored_box(plan, box), data if plan.num_channels > 1 else data[0])


def stored_box(plan: OutputPlan, box: Box) -> Box:
    """Return `box` (z, y, x) of the output, all channels, in the axes of its arrays."""
    return Box((0, *box.start), (plan.num_channels, *box.stop)) if plan.num_channels > 1 else box


def read_voxels(plan: OutputPlan, level: int, box: Box) -> np.ndarray:
    """Return `box` of `level` as (c, z, y, x)."""
    data = open_writer(plan.out, plan.key(level)).read(stored_box(plan, box))
    return data if plan.num_channels > 1 else data[np.newaxis]


def read_each(plan: OutputPlan, level: int, boxes: Sequence[Box]) -> Iterator[np.ndarray]:
    """Yield each of `boxes` of `level` as (c, z, y, x); several are read at a time where their chunks are small."""
    chunks, voxel_bytes = Grid(plan.level_shape(level), plan.chunk), plan.num_channels * plan.dtype.itemsize
    most = REMOTE_READERS if plan.is_in_bucket else READERS
    works = (partial(read_voxels, plan, level, box) for box in boxes)
    for future in InTurn(works, min(most, boxes_at_once(boxes, chunks, voxel_bytes))):
        yield future.result()
