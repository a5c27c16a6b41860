"""Several volumes of one grid, read as one: the channels of each follow those of the volume before it.

    image (z, y, x)  +  mask (z, y, x)  ->  (2, z, y, x)

Not here: how each is normalised (inference.statistics). Its place and its name are those of the first, and so are the
chunks by which it is read. Whatever is known of files, such as their states, is known of each volume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.storage.metadata import Lengths, shown
from volpipe.volumes.volume import Reader, Volume

SAME = 0.01  # of a voxel's length, by which sizes and origins may differ that were rounded


@dataclass(frozen=True, kw_only=True)
class StackedVolume(Volume):
    """A volume whose channels are those of the volumes `stacked`; its type holds the voxels of all of them."""

    stacked: tuple[Volume, ...]

    @property
    def parts(self) -> tuple[Volume, ...]:
        return self.stacked

    @property
    def num_channels(self) -> int:
        return sum(part.num_channels for part in self.stacked)

    @property
    def stored_dtype(self) -> np.dtype:
        return np.result_type(*(part.stored_dtype for part in self.stacked))

    @property
    def channels(self) -> str:
        counts = " + ".join(str(part.num_channels) for part in self.stacked)
        return f"{self.num_channels} channels, {counts} of {len(self.stacked)} volumes"

    @property
    def as_it_is(self) -> Volume:
        return stack([part.as_it_is for part in self.stacked])

    def check_written(self, box: Box | None = None) -> None:
        for part in self.stacked:
            part.check_written(box)

    def open(self, *, cache_bytes: int = 0, session: str = "", live: bool = False) -> Reader:
        readers = [part.open(cache_bytes=cache_bytes, session=session, live=live) for part in self.stacked]
        return StackedReader(self, readers, partial(self.open, cache_bytes=cache_bytes, live=live))


class StackedReader(Reader):
    """The readers of several volumes as one; it reads boxes alone."""

    def __init__(self, volume: StackedVolume, readers: Sequence[Reader], reopen: Callable[[], Reader]) -> None:
        self.volume, self.readers, self._reopen = volume, readers, reopen
        self.shape, self.dtype, self.ndim, self.header = volume.shape, volume.dtype, volume.ndim, readers[0].header

    @property
    def is_fetched(self) -> bool:
        return all(reader.is_fetched for reader in self.readers)

    def __reduce__(self) -> tuple[Callable[[], Reader], tuple[()]]:
        return self._reopen, ()

    def read(self, box: Box, *, num_channels: int | None = None) -> np.ndarray:
        left = self.volume.num_channels if num_channels is None else num_channels
        data = list[np.ndarray]()
        for reader in self.readers:
            if left > 0:
                data.append(reader.read(box, num_channels=min(left, reader.volume.num_channels)))
                left -= len(data[-1])
        return np.concatenate(data, dtype=self.dtype)

    def read_own(self, box: Box) -> np.ndarray:
        return np.concatenate([reader.read_own(box) for reader in self.readers], dtype=self.volume.stored_dtype)

    def is_stored(self, box: Box) -> bool:
        return any(reader.is_stored(box) for reader in self.readers)

    def read_raw(self, index: object) -> np.ndarray:
        raise VolumeError(f"{self.volume} is read with {len(self.readers) - 1} more volumes, by boxes; use crop(box)")


def stack(volumes: Sequence[Volume]) -> Volume:
    """Return `volumes` as one, the first of which gives its place; a single one as it is."""
    first, *others = volumes
    if not others:
        return first
    known = {each.name: getattr(first, each.name) for each in fields(Volume)}
    known |= {"dtype": np.result_type(*(volume.dtype for volume in volumes)), "incomplete": None}
    return StackedVolume(**known, stacked=tuple(volumes))


def check_stack(volume: Volume) -> None:
    """Refuse volumes that are to be read as one and have different grids, or no type that holds all of their voxels.

    Raises:
        VolumeError: with both shapes, voxel sizes, origins or types.
    """
    first, *others = volume.parts
    for i, other in enumerate(others):
        key = f"input.also.{i}"
        if other.spatial_shape != first.spatial_shape:
            raise VolumeError(
                f"{key} {other} has {other.spatial_shape} voxels (z, y, x), and {first} has {first.spatial_shape}; cut "
                "or resample one to the shape of the other"
            )
        size, own_size = other.voxel_size_nm, first.voxel_size_nm
        if size is None or own_size is None:
            continue
        if not _are_alike_lengths(size, own_size, own_size):
            raise VolumeError(
                f"{key} {other} has voxels of {shown(size)} nm (z, y, x), and {first} of {shown(own_size)} nm; if one "
                f"of them is wrong, give {key}.voxel_size_nm, or input.voxel_size_nm"
            )
        is_placed = first.has_origin and other.has_origin
        if is_placed and not _are_alike_lengths(other.origin_nm, first.origin_nm, own_size):
            raise VolumeError(
                f"{key} {other} begins at {shown(other.origin_nm)} nm (z, y, x), and {first} at "
                f"{shown(first.origin_nm)} nm; if one of them is wrong, give {key}.origin_nm, or input.origin_nm"
            )
    types = [part.dtype for part in volume.parts]
    if volume.dtype.kind == "f" and any(dtype.kind in "iu" and dtype.itemsize > 4 for dtype in types):
        listed = " and ".join(dict.fromkeys(dtype.name for dtype in types))
        raise VolumeError(
            f"volumes of {listed} have no type that holds all voxels of both; convert one to another type"
        )


def _are_alike_lengths(lengths: Lengths, others: Lengths, size: Lengths) -> bool:
    return all(abs(a - b) <= SAME * n for a, b, n in zip(lengths, others, size, strict=True))
