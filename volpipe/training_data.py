"""Training data: the volumes that a training learns from, opened, and whether its windows and its net fit them.

Not here: windows that are read (samples). Nothing here reads a voxel or needs torch, so that the driver can refuse what
cannot be learnt from before a worker starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volpipe.degrade import context
from volpipe.descriptions import NetFacts
from volpipe.errors import PlanError
from volpipe.grid import Box
from volpipe.measure import needs_measuring
from volpipe.recipe import Normalise
from volpipe.region import find_roi
from volpipe.training import Data, TrainRecipe
from volpipe.volume import Volume, open_volume

AXES = "zyx"


@dataclass(frozen=True)
class TrainingData:
    """A volume to learn from, what of it is held out, and its labels, if it has any."""

    volume: Volume
    held_out: Box | None
    labels: Volume | None


def open_data(data: Data, normalise: Normalise, search_path: str) -> TrainingData:
    """Return what `data` names, opened; not of stored windows.

    Raises:
        VolpipeError: no such volume, a box that leaves it, or a normalisation that only measuring would tell.
    """
    volume = open_volume(place_of(data.path, search_path), data.key, level=data.level)
    if needs_measuring(normalise, volume.dtype):
        raise PlanError(
            f"normalise.method {normalise.method} of {volume.dtype} needs numbers that a training does not measure: "
            "give normalise.low and high, or mean and std (volpipe info prints them), so that all volumes share them"
        )
    held_out = None if data.held_out is None else find_roi(data.held_out, volume)
    labels = None if data.labels is None else open_labels(data.labels, data.labels_key, volume, search_path)
    return TrainingData(volume, held_out, labels)


def open_labels(path: str, key: str | None, volume: Volume, search_path: str) -> Volume:
    """Return the labels of `volume`, opened.

    Raises:
        VolpipeError: there are none, or they do not fit the volume.
    """
    labels = open_volume(place_of(path, search_path), key)
    if labels.dtype.kind not in "iu":
        raise PlanError(f"the labels {labels} have {labels.dtype} voxels; give whole numbers, one for each object")
    if labels.num_channels != 1 or labels.spatial_shape != volume.spatial_shape:
        raise PlanError(
            f"the labels {labels} have shape {labels.shape}, their volume {volume} has {volume.spatial_shape} voxels "
            "(z, y, x); give labels of that shape"
        )
    return labels


def place_of(path: str, search_path: str) -> str:
    """Return the address that `path` means, which may count from `search_path`."""
    return path if "://" in path else str(Path(search_path) / path)


def check_data(recipe: TrainRecipe, facts: NetFacts, search_path: str) -> None:
    """Refuse volumes that hold no window outside of what is held out, or that the net of `facts` cannot take.

    Raises:
        VolpipeError: as `open_data`, or with what does not fit.
    """
    recipe.check_net(facts.out_channels, facts.scale, facts.intensity)
    for axis, size, stride in zip(AXES, recipe.samples.shape, facts.stride, strict=True):
        if size % stride:
            raise PlanError(
                f"axis {axis}: samples.shape {size} is no multiple of the stride {stride} of net {recipe.net.name}; "
                f"use {-(-size // stride) * stride}"
            )
    window = tuple(n * s for n, s in zip(recipe.samples.shape, facts.scale, strict=True))
    around = context(recipe.degrade.kind, facts.scale)
    for data in recipe.data:
        if data.stored:
            continue
        found = open_data(data, recipe.normalise, search_path)
        if found.volume.num_channels != facts.in_channels:
            raise PlanError(
                f"{found.volume} has {found.volume.num_channels} channels, net {recipe.net.name} takes "
                f"{facts.in_channels}; give another volume, or a net of as many"
            )
        check_holds(found.volume, window)
        check_free(found, tuple(n + 2 * c for n, c in zip(window, around, strict=True)), around)


def check_holds(volume: Volume, window: Sequence[int]) -> None:
    """Refuse a volume that is smaller than `window`, voxels (z, y, x).

    Raises:
        PlanError: with the axis, and both sizes.
    """
    for axis, size, due in zip(AXES, volume.spatial_shape, window, strict=True):
        if due > size:
            raise PlanError(
                f"axis {axis}: a window of {due} voxels (samples.shape times the net's scale) is longer than "
                f"the volume {volume}, which has {size}; give a smaller samples.shape"
            )


def check_free(found: TrainingData, wide: Sequence[int], around: Sequence[int]) -> None:
    """Refuse a volume in which what is held out leaves no room.

    Args:
        found: the volume.
        wide: voxels (z, y, x) of a window and what its degradation sees around it.
        around: the latter, at each face; it may lie beyond the volume's.

    Raises:
        PlanError: with the longest part that is left, and what a window takes.
    """
    if found.held_out is None:
        return
    ends = zip(found.held_out.start, found.held_out.stop, found.volume.spatial_shape, wide, around, strict=True)
    if not any(max(start, size - stop) + c >= due for start, stop, size, due, c in ends):
        raise PlanError(
            f"held_out {found.held_out} leaves no room in {found.volume}, {found.volume.spatial_shape} voxels, for a "
            f"window of {tuple(wide)}; make samples.shape or the box smaller"
        )


def check_finite(volume: Volume, data: np.ndarray, box: Box) -> None:
    """Refuse voxels that nothing can be learnt from.

    Raises:
        PlanError: some are NaN or infinite.
    """
    if volume.dtype.kind == "f" and not np.isfinite(data).all():
        raise PlanError(f"{volume} has NaN or infinite voxels in {box}; learn from a copy without them")
