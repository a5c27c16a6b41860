"""Histograms as charts: grey levels of what was read, and sizes of objects.

Not here: what is counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from volpipe.reporting.page import Chart

MOST_BINS = 128


def edges_of(values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the edges of the bins of all series: a bin for each whole number as far as these are few."""
    filled = [each for each in values.values() if each.size]
    low, high = float(min(each.min() for each in filled)), float(max(each.max() for each in filled))
    if all(each.dtype.kind in "iub" for each in filled) and high - low < 2 * MOST_BINS:
        return np.arange(low, high + 2) - 0.5
    if all(each.dtype.kind in "iub" for each in filled):
        step = np.ceil((high - low + 1) / MOST_BINS)  # whole numbers: as many of them in each bin
        return np.arange(low, high + step + 1, step) - 0.5
    return np.linspace(low, high if high > low else low + 1.0, MOST_BINS + 1)


def histogram(title: str, values: Mapping[str, np.ndarray]) -> Chart:
    """Return the histogram of several series of values, (n,) each, over the same bins."""
    edges = edges_of(values)
    columns: dict[str, list[object]] = {"low": [], "high": [], "count": [], "share": [], "series": []}
    for name, series in values.items():
        counts = np.histogram(series, edges)[0]
        columns["low"] += edges[:-1].tolist()
        columns["high"] += edges[1:].tolist()
        columns["count"] += counts.tolist()
        columns["share"] += (counts / max(1, series.size)).round(6).tolist()
        columns["series"] += [name] * len(counts)
    return Chart(title, "Of the voxels in the slices above.", "histogram", columns)
