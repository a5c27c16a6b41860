"""Histograms as charts: grey levels of what was read, and sizes of objects.

Not here: what is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from volpipe.reporting.page import Chart, columns_of
from volpipe.units import count

MOST_BINS = 128
SIZE_BINS = 40
MOST_BYTES, PIECES = 32 * 2**20, 64  # of a table of objects that are read, and in how many pieces of a larger one


def edges_of(values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the edges of the bins of all series: a bin for each whole number as far as these are few."""
    filled = [each for each in values.values() if each.size]
    low, high = float(min(each.min() for each in filled)), float(max(each.max() for each in filled))
    is_whole = all(each.dtype == bool or np.issubdtype(each.dtype, np.integer) for each in filled)
    if is_whole and high - low < 2 * MOST_BINS:
        return np.arange(low, high + 2) - 0.5
    if is_whole:
        step = np.ceil((high - low + 1) / MOST_BINS)  # as many whole numbers in each bin
        return np.arange(low, high + step + 1, step) - 0.5
    return np.linspace(low, high if high > low else low + 1.0, MOST_BINS + 1)


def histogram(title: str, values: Mapping[str, np.ndarray]) -> Chart:
    """Return the histogram of several series of values, (n,) each, over the same bins."""
    edges = edges_of(values)
    bins = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    rows = [
        (low, high, num, round(num / max(1, series.size), 6), name)
        for name, series in values.items()
        for (low, high), num in zip(bins, _bin_counts(series, edges).tolist(), strict=True)
    ]
    columns = columns_of(("low", "high", "count", "share", "series"), rows)
    return Chart(title, "Of the voxels in the slices above.", "histogram", columns)


def _bin_counts(series: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return how many values lie between neighbouring `edges`; short whole numbers are counted before."""
    if not series.size or series.dtype.kind not in "iu" or series.dtype.itemsize > 2:
        return np.histogram(series, edges)[0]
    low = int(series.min())
    numbers = np.bincount(series.ravel().astype(np.int64) - low)
    return np.histogram(np.arange(low, low + len(numbers)), edges, weights=numbers)[0]


def sizes_chart(table: Path, num_objects: int) -> Chart:
    """Return the histogram of the sizes of objects, from the table that a segmentation wrote of them.

    Args:
        table: CSV with a column "voxels" after that of labels.
        num_objects: its rows.
    """
    sizes, is_all = read_sizes(table)
    edges = (
        np.unique(np.ceil(np.geomspace(sizes.min(), sizes.max() + 1, SIZE_BINS + 1))) if sizes.size else np.arange(1, 3)
    )
    counts = np.histogram(sizes, edges)[0] * (1 if is_all else num_objects / max(1, sizes.size))
    sentences = [f"{count(num_objects, 'object')}"]
    if sizes.size:
        sentences[0] += f", half of them of up to {np.median(sizes):,.0f} voxels, the largest of {sizes.max():,}"
    if not is_all:
        sentences.append(f"Estimated from {sizes.size:,} of them, so that the largest may not be among these")
    columns = {"low": edges[:-1].tolist(), "high": edges[1:].tolist(), "count": counts.tolist()}
    return Chart("Sizes of objects", ". ".join(sentences) + ".", "sizes", columns)


def read_sizes(table: Path) -> tuple[np.ndarray, bool]:
    """Return the voxels of objects, (n,), int64, and whether these are all; of a large table pieces of it are read."""
    size = table.stat().st_size
    with table.open("rb") as file:
        first = len(file.readline())
        if size - first <= MOST_BYTES:
            return _voxels(file.read()), True
        pieces = []
        for start in np.linspace(first, size - MOST_BYTES // PIECES, PIECES).astype(int).tolist():
            file.seek(start)
            piece = file.read(MOST_BYTES // PIECES)
            pieces.append(_voxels(piece[piece.index(b"\n") + 1 : piece.rindex(b"\n")]))
    return np.concatenate(pieces), False


def _voxels(lines: bytes) -> np.ndarray:
    return np.array([int(line.split(b",", 2)[1]) for line in lines.splitlines()], np.int64)
