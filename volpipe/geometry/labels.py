"""Numbers of labels that are no objects: 0, and those by which data sets say that nothing is known of a voxel.

Not here: which of them a recipe names (recipes), or objects (segmentation).
"""

from __future__ import annotations

import numpy as np

Ignore = int | tuple[int, ...] | None  # labels of which nothing is known; None for the reserved ones

# The last three of 64 bits: CREMI's "transparent", "no label" and "outside", and -1 of others (cremi_python, io).
RESERVED = (-1, -2, -3)
WIDE = 4  # bytes from which the last numbers of an unsigned type are reserved: narrower ones are in use up to there


def reserved(dtype: np.dtype) -> tuple[int, ...]:
    """Return the numbers that mean "unknown" in labels of `dtype`; none of narrow unsigned types."""
    if dtype.kind == "i":
        return RESERVED
    return tuple(number % 2 ** (8 * dtype.itemsize) for number in RESERVED) if dtype.itemsize >= WIDE else ()


def ignored(dtype: np.dtype, ignore: Ignore) -> tuple[int, ...]:
    """Return the numbers of `ignore` as labels of `dtype` have them, without those that they cannot have.

    -1 and 0xffffffffffffffff are one number: signed and unsigned labels of one data set differ in nothing else.
    """
    if ignore is None:
        return reserved(dtype)
    info, bits = np.iinfo(dtype), 8 * dtype.itemsize
    numbers = []
    for number in (ignore,) if isinstance(ignore, int) else ignore:
        turned = number - 2**64 if number >= 2**63 else number + 2**bits if number < 0 else number
        numbers += [each for each in (number, turned) if info.min <= each <= info.max][:1]
    return tuple(numbers)


def is_ignored(labels: np.ndarray, ignore: Ignore) -> np.ndarray:
    """Return for each of `labels` whether nothing is known of it, bool."""
    flags = np.zeros(labels.shape, bool)
    for number in ignored(labels.dtype, ignore):
        flags |= labels == labels.dtype.type(number)
    return flags


def in_64_bits(number: int) -> int:
    """Return a label as an unsigned number of 64 bits, as tables of labels have it."""
    return number % 2**64
