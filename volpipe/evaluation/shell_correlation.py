"""Fourier shell correlation: up to which frequency the detail of an output is that of its reference.

Not here: which blocks are scored (subject). It is taken cube by cube, and the spectra of all cubes add up: they
estimate the correlation of the whole volume, at frequencies that are CUBE-ths of a cycle per voxel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from volpipe.evaluation.score import IMAGE, ImageTotal, Score, ScoredBlock, Sums, Values
from volpipe.volumes.volume import Volume

CUBE = 64  # voxels per axis of which the correlation is taken
CONE = math.cos(math.radians(30.0))  # about the z axis, for the correlation along it
SHAPE = (2, 3, CUBE // 2 + 1)  # of spectra: all directions and along z; the three sums of `shells`; shells
# The names of the frequencies in the JSON, with their headings.
CUTS = {"half": "FSC 0.5", "seventh": "FSC 1/7", "half_z": "along z 0.5", "seventh_z": "along z 1/7"}
THRESHOLDS = (0.5, 1 / 7)
CAPTION = (
    f"FSC: cycles per voxel at which the Fourier shell correlation, over cubes of {CUBE} voxels, first falls below; "
    "along z: of directions within 30 degrees of it"
)

Floats = np.ndarray  # float64


def spectra_sums(block: ScoredBlock) -> Sums:
    """Return the spectra of all whole cubes of a block, added up."""
    data, truth, spectra = block.data[block.own], block.truth[block.own], np.zeros(SHAPE)
    for index in np.ndindex(*(size // CUBE for size in data.shape)):
        cube = tuple(slice(i * CUBE, (i + 1) * CUBE) for i in index)
        spectra = spectra + shells(data[cube], truth[cube])
    return np.asarray(spectra.ravel())


def shells(data: Floats, truth: Floats) -> Floats:
    """Return the spectra of a cube, (2, 3, shells): of all directions, and of those within CONE of z.

    The three are the sums over each shell of the real part of the cross spectrum, and of both power spectra. The cube
    loses its mean, and is faded out to its faces by a Hann window. Shell i has the frequencies around i / CUBE cycles
    per voxel.
    """
    fade = np.hanning(CUBE + 2)[1:-1]
    window = fade[:, None, None] * fade[:, None] * fade
    one, other = (np.fft.fftn((part - part.mean()) * window) for part in (data, truth))
    parts = [(one * other.conj()).real, np.abs(one) ** 2, np.abs(other) ** 2]
    frequency, num_shells = np.fft.fftfreq(CUBE), CUBE // 2 + 1
    along_z = np.abs(frequency)[:, None, None]
    length = np.sqrt(along_z**2 + frequency[:, None] ** 2 + frequency**2)
    number = np.rint(length * CUBE).astype(int)
    inside = [number < num_shells, (number < num_shells) & (along_z >= CONE * length)]
    return np.array([[np.bincount(number[each], part[each], num_shells) for part in parts] for each in inside])


def shell_correlation(spectra: Floats) -> Floats:
    """Return the correlation of each shell from its three sums (3, shells); 1 for the shell of the mean."""
    cross, one, other = spectra
    with np.errstate(invalid="ignore", divide="ignore"):
        curve = cross / np.sqrt(one * other)
    curve[0] = 1.0
    return np.asarray(np.nan_to_num(curve))


def crossing(curve: Floats, threshold: float) -> float | None:
    """Return the frequency in cycles per voxel at which `curve` first falls below `threshold`, None if never."""
    below = np.flatnonzero(curve < threshold)
    if not len(below):
        return None
    i = int(below[0])
    step = (curve[i - 1] - threshold) / (curve[i - 1] - curve[i])
    return float((i - 1 + step) / CUBE)


def resolutions(total: ImageTotal) -> Values:
    """Return the frequencies at which the correlation falls below 0.5, and below 1/7; None if never.

    They are in cycles per voxel. Two are of all directions, two of those within 30 degrees of z. `curve` is the
    correlation of each shell; () where no cube fits.
    """
    spectra = total.sums[FSC.name].reshape(SHAPE)
    if not spectra.any():
        return {**dict.fromkeys(CUTS), "curve": ()}
    curves = [shell_correlation(part) for part in spectra]
    cuts = [crossing(curve, threshold) for curve in curves for threshold in THRESHOLDS]
    return {**dict(zip(CUTS, cuts, strict=True)), "curve": tuple(map(float, curves[0]))}


def resolution_cells(values: Values, volume: Volume | None) -> Mapping[str, str]:
    """Return each frequency, with its length in nm where the voxels of `volume` are cubes."""
    size = None if volume is None else volume.voxel_size_nm
    is_cube = size is not None and math.isclose(min(size), max(size), rel_tol=1e-3)

    def cell(frequency: float | None) -> str:
        if not values["curve"]:
            return "too small"
        if frequency is None:
            return "never"
        return f"{frequency:.3f}" + (f" ({size[0] / frequency:.3g} nm)" if size and is_cube and frequency else "")

    return {heading: cell(values[name]) for name, heading in CUTS.items()}


FSC = Score(
    "fsc", (IMAGE,), resolutions, unit="cycles per voxel", sums=spectra_sums, cells=resolution_cells, caption=CAPTION
)
