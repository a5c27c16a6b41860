"""Pairs of tensors, made of windows where the net is: moved, turned, degraded, normalised, and turned to targets.

Not here: what is drawn for a window (samples). One code for CPU and GPU; a pair is a function of its window alone, the
same on both up to rounding, for its noise is counted, not drawn from the state of a generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample, interpolate

from volpipe.geometry.grid import Box, Triple, mirror
from volpipe.geometry.labels import ignored
from volpipe.inference.intensity import to_dtype
from volpipe.recipes.training import TrainRecipe
from volpipe.training.data.degrade import blur, coarsening, radius
from volpipe.training.data.samples import Augmentation, Sampler, Window
from volpipe.training.data.targets import class_targets, partial_targets, region_targets, signed, tensor_targets
from volpipe.training.data.volumes import check_classes

Pair = tuple[Tensor, Tensor]  # inputs, float32, and truth, float32 or int8 targets: (n, c, z, y, x)

MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # of a hash of 32 bits by Chris Wellons ("lowbias32"), as signed numbers


@dataclass(frozen=True)
class Loaded:
    """A window and its voxels, as stored (c, z, y, x); and its `signed` labels (z, y, x), where it has any."""

    window: Window
    voxels: Tensor
    labels: Tensor | None


class PairMaker:
    """Makes pairs of the windows of a `sampler`, on `device`."""

    def __init__(self, sampler: Sampler, device: str = "cpu") -> None:
        self.sampler, self.recipe, self.device = sampler, sampler.recipe, device
        self.held: dict[int, tuple[Tensor, Tensor | None]] = {}

    def hold(self, room: float) -> None:
        """Keep volumes on the device, as stored, small ones first, as far as they fit into `room` bytes.

        One of which the training sees but a part is not kept: to read it whole would take longer. Of a volume with
        labels of a part, that is kept.
        """
        pairs = zip(self.sampler.reads_whole, self.sampler.sources, strict=True)
        for is_whole, source in sorted(pairs, key=lambda pair: pair[1].num_bytes):
            if is_whole and source.num_bytes <= room:
                loaded = self._read_voxels(Window(source, source.read_box, Augmentation()))
                labels = None if loaded.labels is None else loaded.labels.to(self.device)
                self.held[id(source)] = loaded.voxels.to(self.device), labels
                room -= source.num_bytes

    def load(self, window: Window) -> Loaded:
        """Return `window` with its voxels: cut from a volume that is held, else read, ready for a copy to a GPU."""
        if id(window.source) not in self.held:
            return self._read_voxels(window)
        (voxels, labels), box = self.held[id(window.source)], window.box.relative_to(window.source.read_box.start)
        return Loaded(window, mirrored_part(voxels, box), None if labels is None else labels[box.slices])

    def _read_voxels(self, window: Window) -> Loaded:
        data, labels = window.source.read(window), window.source.read_labels(window.box)
        small = data.dtype.itemsize <= 2 and np.issubdtype(data.dtype, np.integer)
        voxels = torch.from_numpy(np.ascontiguousarray(data, data.dtype.newbyteorder("=") if small else np.float32))
        if labels is not None and self.recipe.learns_classes:
            check_classes(window.source.labels, labels, self.recipe.classes, window.source.annotated)
        numbers = None if labels is None else signed(labels)
        if self.device != "cpu":
            voxels, numbers = voxels.pin_memory(), None if numbers is None else numbers.pin_memory()
        return Loaded(window, voxels, numbers)

    def pair(self, batch: Sequence[Loaded]) -> Pair:
        """Return inputs and truth of `batch`, whose windows are of one shape."""
        windows = [each.window for each in batch]
        data, labels = self._displaced(batch)
        inputs = _intensities(self.degraded(data, windows), windows)
        if labels is not None:
            sources = [window.source for window in windows]
            return inputs, targets_of(self.recipe, labels, sources[0].label_dtype, [each.annotated for each in sources])
        z, y, x = (slice(c, n - c) for c, n in zip(self.sampler.context, data.shape[2:], strict=True))
        return inputs, _intensities(data[..., z, y, x], windows)

    def degraded(self, data: Tensor, windows: Sequence[Window]) -> Tensor:
        """Return `data` (n, c, z, y, x) with its context as the inputs of `windows`, in units of their volumes."""
        choice, changes = self.recipe.degrade, [window.changes for window in windows]
        inputs = coarser(data, choice.kind, self.sampler.scale)
        if choice.blur:
            inputs = blurred(inputs, [each.blur for each in changes], (2, 3, 4))
        if choice.defocused:
            inputs = torch.stack([_defocused(part, each) for part, each in zip(inputs, changes, strict=True)])
        if choice.noise:
            noise = normal([each.key for each in changes], inputs[0].numel(), inputs.device).view(inputs.shape)
            inputs = inputs + noise.mul_(_column([each.noise for each in changes], inputs))
        gains = [each.gains for each in changes if each.gains is not None]
        if gains:
            factors = torch.from_numpy(np.stack(gains).astype(np.float32)).to(inputs.device, non_blocking=True)
            inputs = inputs * factors[:, None, :, None, None]
        if choice.cut_out or choice.whole:
            inputs = torch.stack([self._as_stored(*each) for each in zip(inputs, windows, strict=True)])
        return inputs

    def _as_stored(self, inputs: Tensor, window: Window) -> Tensor:
        """Return the inputs (c, z, y, x) of one window with its boxes cut out, rounded as its volume would."""
        dtype, inputs = window.source.volume.dtype, inputs.clone()
        for box in window.changes.cuts:
            inputs[:, *box.slices] = inputs.mean()
        is_rounded = self.recipe.degrade.whole and np.issubdtype(dtype, np.integer)
        return to_dtype(inputs, dtype).float() if is_rounded else inputs

    def _displaced(self, batch: Sequence[Loaded]) -> tuple[Tensor, Tensor | None]:
        """Return voxels (n, c, z, y, x), float32, and labels (n, z, y, x) of `batch`, on the device and turned."""
        voxels, labels = [], []
        for each in batch:
            data, numbers, changes = (
                each.voxels.to(self.device, non_blocking=True).float(),
                each.labels,
                each.window.changes,
            )
            numbers = None if numbers is None else numbers.to(self.device, non_blocking=True)
            if changes.bends is not None:
                data, numbers = bent(data, numbers, changes.bends)
            if changes.slips is not None:
                data, numbers = slipped(data, numbers, changes.slips)
            voxels.append(turned(data, changes))
            if numbers is not None:
                labels.append(turned(numbers, changes))
        return torch.stack(voxels), torch.stack(labels) if labels else None


def targets_of(recipe: TrainRecipe, labels: Tensor, dtype: np.dtype, annotated: Sequence[Sequence[str]]) -> Tensor:
    """Return the targets (n, c, z, y, x), int8, of `signed` labels (n, z, y, x) that had the type `dtype`.

    Args:
        annotated: for each of n, the names of the classes that its labels annotate; none for all.
    """
    unknown, classes = ignored(dtype, recipe.ignore), recipe.classes
    if not recipe.learns_classes:
        return tensor_targets(labels, recipe.affinities.offsets, unknown)
    flags = [classes.are_annotated(names) for names in annotated]
    if classes.regions:
        return region_targets(labels, classes.label_sets, unknown, flags)
    targets = class_targets(labels, classes.label_sets, unknown)
    return partial_targets(targets, len(classes.names), flags) if recipe.is_partly_annotated else targets


def mirrored_part(data: Tensor, box: Box) -> Tensor:
    """Return the voxels of `box` in `data` (c, z, y, x); outside of `data` they are mirrored at its faces."""
    if Box.from_shape(data.shape[1:]).contains(box):
        return data[:, *box.slices]
    for axis, (start, stop, size) in enumerate(zip(box.start, box.stop, data.shape[1:], strict=True), 1):
        data = data[(slice(None),) * axis + (torch.from_numpy(mirror(start, stop, size)).to(data.device),)]
    return data


def turned(data: Tensor, changes: Augmentation) -> Tensor:
    """Return `data` (..., z, y, x) flipped, then with y and x exchanged, as `changes` has it."""
    data = data.flip(changes.flips)
    return data.transpose(-1, -2) if changes.swap else data


def bent(data: Tensor, labels: Tensor | None, bends: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Return `data` (c, z, y, x), interpolated linearly, and `labels` (z, y, x), the nearest, where `bends` leads.

    Places outside of the window are moved to its face.
    """
    shape = data.shape[1:]
    moved = interpolate(
        torch.from_numpy(bends)[None].to(data.device), size=shape, mode="trilinear", align_corners=True
    )[0]
    for axis, size in enumerate(shape):
        places = torch.arange(size, dtype=torch.float32, device=data.device)
        moved[axis].add_(places.view([-1 if a == axis else 1 for a in range(3)])).clamp_(0, size - 1)
    if labels is not None:
        z, y, x = moved.round().long()
        labels = labels[z, y, x]
    scale = torch.tensor([2 / max(1, size - 1) for size in shape], device=data.device).view(3, 1, 1, 1)
    grid = (moved * scale - 1).flip(0).permute(1, 2, 3, 0)  # x, y, z from -1 to 1
    return grid_sample(data[None], grid[None], align_corners=True, padding_mode="border")[0], labels


def slipped(data: Tensor, labels: Tensor | None, slips: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Return `data` (c, z, y, x) and `labels` (z, y, x) with slices moved along y and x, mirrored at their faces.

    Of slices of context, outside of `slips`, the nearest of these counts.
    """
    around = (data.shape[1] - len(slips)) // 2
    slips = np.pad(slips, ((around, data.shape[1] - len(slips) - around), (0, 0)), mode="edge")
    data, labels = data.clone(), None if labels is None else labels.clone()
    for z, (down, right) in enumerate(slips.tolist()):
        if down or right:
            rows, columns = (
                torch.from_numpy(mirror(step, step + n, n)).to(data.device)
                for step, n in zip((down, right), data.shape[2:], strict=True)
            )
            data[:, z] = data[:, z][:, rows][:, :, columns]
            if labels is not None:
                labels[z] = labels[z][rows][:, columns]
    return data, labels


def coarser(data: Tensor, kind: str, scale: Triple) -> Tensor:
    """Return `data` (n, c, z, y, x), float32, coarser by `scale` and without its `context`.

    Args:
        data: whole coarse voxels, with the voxels of `context` on each side.
        kind: "none", "bin", "subsample" or "gaussian".
        scale: voxels (z, y, x) of the truth per voxel of the result.
    """
    for axis, factor in enumerate(scale, start=2):
        if factor > 1:
            data = coarsening(kind).along(data, axis, factor)
    return data


def blurred(data: Tensor, deviations: Sequence[float], axes: Sequence[int]) -> Tensor:
    """Return `data` (n, ...), float32, each under a Gaussian of its own along `axes`, mirrored at its faces."""
    reach = max(map(radius, deviations))
    if not reach:
        return data
    rows = np.stack([blur(deviation, reach) for deviation in deviations])
    weights = torch.from_numpy(rows.T.copy()).to(data.device, non_blocking=True)
    for axis in axes:
        size = data.shape[axis]
        around = data.index_select(axis, torch.from_numpy(mirror(-reach, size + reach, size)).to(data.device))
        data = torch.zeros_like(data)
        for tap, weight in enumerate(weights):
            data.addcmul_(around.narrow(axis, tap, size), weight.view(-1, *[1] * (data.ndim - 1)))
    return data


def _defocused(data: Tensor, changes: Augmentation) -> Tensor:
    """Return the inputs (c, z, y, x) of one window, whose slices are blurred along y and x by their own deviations."""
    if changes.slice_blurs is None or not changes.slice_blurs.any():
        return data
    return blurred(data.transpose(0, 1), changes.slice_blurs.tolist(), (2, 3)).transpose(0, 1)


def normal(keys: Sequence[int], size: int, device: torch.device | str) -> Tensor:
    """Return `size` numbers for each of `keys` (n, size), float32, of a normal distribution of deviation 1.

    A number is a function of its key and its place alone: hashes of 32 bits, by pairs as Box and Muller have it.
    """
    half = -(-size // 2)
    places = torch.arange(2 * half, dtype=torch.int32, device=device)
    starts = torch.tensor(keys, dtype=torch.int32).to(device, non_blocking=True)
    hashed = _hashed(_hashed(places)[None] ^ starts[:, None])
    uniform = hashed.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float().add_(0.5).mul_(2.0**-24)
    lengths, angles = uniform[:, :half].log_().mul_(-2).sqrt_(), uniform[:, half:].mul_(2 * math.pi)
    return torch.cat([angles.cos().mul_(lengths), angles.sin().mul_(lengths)], 1)[:, :size]


def _hashed(numbers: Tensor) -> Tensor:
    """Return a hash of each of `numbers`, int32."""
    first, second = MULTIPLIERS
    numbers = (numbers ^ ((numbers >> 16) & 0xFFFF)).mul_(first)
    numbers.bitwise_xor_((numbers >> 15) & 0x1FFFF).mul_(second)
    return numbers.bitwise_xor_((numbers >> 16) & 0xFFFF)


def _intensities(data: Tensor, windows: Sequence[Window]) -> Tensor:
    """Return `data` (n, c, z, y, x) of volumes normalised, with the contrast and brightness of each window."""
    data = data.clone(memory_format=torch.contiguous_format)
    for part, window in zip(data, windows, strict=True):
        window.source.normalise.normalise(part)
    changes = [window.changes for window in windows]
    if any((each.gain, each.offset) != (1.0, 0.0) for each in changes):
        data.mul_(_column([each.gain for each in changes], data)).add_(_column([each.offset for each in changes], data))
    return data


def _column(numbers: Sequence[float], data: Tensor) -> Tensor:
    """Return `numbers`, one for each window of `data` (n, ...), as a float32 tensor that broadcasts over it."""
    column = torch.tensor(numbers, dtype=torch.float32).to(data.device, non_blocking=True)
    return column.view(-1, *[1] * (data.ndim - 1))
