"""What a program means by a dataset of its HDF5 file: its true shape, type and place, and how its levels are named.

Not here: what attributes say in general (attributes), or HDF5 itself (formats.hdf5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volpipe.volumes.storage.metadata import Place, Tree


@dataclass(frozen=True)
class Hdf5Dataset:
    """A dataset in an HDF5 file, and what else its program may have written there.

    Attributes:
        file: the file.
        key: of the dataset in it.
        shape, dtype: as HDF5 has them.
        attributes: returns those of the group or dataset at a key, {} where there is none.
        table: returns the numbers of the small dataset at a key, as nested lists; None where there is none.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    attributes: Callable[[str], Tree]
    table: Callable[[str], list[list[float]] | None]


@dataclass(frozen=True)
class Meaning:
    """A dataset as its program means it: shape, at most that which is stored; type, of as many bytes; place; axes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    place: Place | None = None
    notes: tuple[str, ...] = ()
    axes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Levels:
    """The datasets of one volume at several resolutions: a group in the file, and their keys in it, finest first."""

    group: str
    keys: tuple[str, ...]


def unsigned(dtype: np.dtype) -> np.dtype:
    """Return the unsigned type of as many bytes as `dtype`."""
    return np.dtype(f"u{dtype.itemsize}")
