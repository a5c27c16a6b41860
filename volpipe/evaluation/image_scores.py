"""Scores of an image against a reference: sums over blocks, which add.

Not here: blocks, and reading them (subject). All arrays are (z, y, x). What a block returns is small, and
the sums of all blocks give what the whole volume would, but for the Fourier shell correlation, which is taken cube by
cube: `shells` says how.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

WINDOW = 7  # voxels per axis over which SSIM compares: that of scikit-image
REACH = WINDOW // 2
K1, K2 = 0.01, 0.03  # Wang et al. 2004 (doi 10.1109/TIP.2003.819861)
CUBE = 64  # voxels per axis of which the Fourier shell correlation is taken
CONE = math.cos(math.radians(30.0))  # about the z axis, for the correlation along it

Floats = np.ndarray  # float64
PlainSums = tuple[int, float, int, float, list[list[list[float]]]]  # the fields of ImageSums


@dataclass(frozen=True)
class ErrorSums:
    """Sums of errors: the number of voxels, and the sum of their squared errors."""

    num: int = 0
    squares: float = 0.0


@dataclass(frozen=True)
class ImageSums(ErrorSums):
    """Sums over the blocks of an image.

    Attributes:
        num_windows, similarity: windows of SSIM, and its sum over them.
        spectra: (2, 3, shells): of all directions, and within CONE of z; the sums over each shell of the real part of
            the cross spectrum, and of both power spectra.
    """

    num_windows: int = 0
    similarity: float = 0.0
    spectra: Floats = field(default_factory=lambda: np.zeros((2, 3, CUBE // 2 + 1)))

    def __add__(self, other: ImageSums) -> ImageSums:
        return ImageSums(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def to_list(self) -> PlainSums:
        """Return plain values, to travel as JSON."""
        return self.num, self.squares, self.num_windows, self.similarity, self.spectra.tolist()

    @classmethod
    def from_list(cls, values: PlainSums) -> ImageSums:
        return cls(*values[:-1], np.array(values[-1]))


def image_sums(data: np.ndarray, truth: np.ndarray, own: tuple[slice, ...], data_range: float) -> ImageSums:
    """Return the sums of a block; `data` and `truth` have up to REACH voxels around its `own`: as many as exist.

    The `data_range` between the smallest and the largest possible value is the same for every block.
    """
    data, truth = data.astype(np.float64), truth.astype(np.float64)
    middles = tuple(  # windows whose middle is one of the block's own voxels
        slice(max(0, part.start - REACH), max(0, min(part.stop, size - REACH) - REACH))
        for part, size in zip(own, data.shape, strict=True)
    )
    similar = structural_similarity(data, truth, data_range)[middles]
    data, truth = data[own], truth[own]
    spectra = ImageSums().spectra
    for index in np.ndindex(*(size // CUBE for size in data.shape)):  # the rest at the end of a block does not count
        cube = tuple(slice(i * CUBE, (i + 1) * CUBE) for i in index)
        spectra = spectra + shells(data[cube], truth[cube])
    squares = float(np.square(data - truth).sum())
    return ImageSums(truth.size, squares, similar.size, float(similar.sum()), spectra)


def psnr(sums: ErrorSums, data_range: float) -> float:
    """Return the peak signal-to-noise ratio in dB; infinite where nothing differs, not a number of no voxels."""
    if not sums.num:
        return math.nan
    return 10 * math.log10(data_range**2 * sums.num / sums.squares) if sums.squares else math.inf


def ssim(sums: ImageSums) -> float:
    """Return the mean structural similarity; not a number where no window fits."""
    return sums.similarity / sums.num_windows if sums.num_windows else math.nan


def plain(value: object) -> object:
    """Return a value for JSON, which has neither infinity nor NaN: None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class ImageScores:
    """Scores of a candidate against the reference; frequencies in cycles per voxel.

    Attributes:
        psnr: dB.
        ssim: mean structural similarity.
        half, seventh: frequency at which the Fourier shell correlation falls below 0.5, and below 1/7; None if never.
        half_z, seventh_z: the same of directions within 30 degrees of z.
        curve: the correlation of each shell; shell i is i / 64 cycles per voxel; () where no cube fits.
    """

    psnr: float
    ssim: float
    half: float | None = None
    seventh: float | None = None
    half_z: float | None = None
    seventh_z: float | None = None
    curve: tuple[float, ...] = ()

    @classmethod
    def from_sums(cls, sums: ImageSums, data_range: float) -> ImageScores:
        """Return the scores that sums over all blocks have."""
        scores = cls(psnr(sums, data_range), ssim(sums))
        if not sums.spectra.any():
            return scores
        everywhere, along_z = (shell_correlation(part) for part in sums.spectra)
        half, seventh, half_z, seventh_z = (crossing(c, t) for c in (everywhere, along_z) for t in (0.5, 1 / 7))
        return cls(scores.psnr, scores.ssim, half, seventh, half_z, seventh_z, tuple(map(float, everywhere)))


# ---- structural similarity


def structural_similarity(data: Floats, truth: Floats, data_range: float) -> Floats:
    """Return the SSIM of each window of WINDOW voxels per axis that lies inside, with the sample covariance."""
    if min(data.shape) < WINDOW:
        return np.empty((0, 0, 0))
    num = WINDOW**3
    unbiased = num / (num - 1)
    middle = round(float(truth.mean()))  # of values far from 0 a variance is lost in their squares
    data, truth = data - middle, truth - middle
    mean_a, mean_b = means(data), means(truth)
    var_a = unbiased * (means(data * data) - mean_a * mean_a)
    var_b = unbiased * (means(truth * truth) - mean_b * mean_b)
    both = unbiased * (means(data * truth) - mean_a * mean_b)
    mean_a, mean_b = mean_a + middle, mean_b + middle
    c1, c2 = (K1 * data_range) ** 2, (K2 * data_range) ** 2
    above = (2 * mean_a * mean_b + c1) * (2 * both + c2)
    similarity: Floats = above / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return similarity


def means(data: Floats) -> Floats:
    """Return the mean of every window of WINDOW voxels per axis; whole numbers are summed without an error."""
    for axis in range(3):
        total = np.cumsum(np.insert(data, 0, 0.0, axis), axis)
        size = total.shape[axis]
        data = np.take(total, range(WINDOW, size), axis) - np.take(total, range(size - WINDOW), axis)
    return data / WINDOW**3


# ---- Fourier shell correlation


def shells(data: Floats, truth: Floats) -> Floats:
    """Return the spectra of a cube, as in ImageSums; without its mean, and faded out to its faces by a Hann window.

    Shell i has the frequencies around i / CUBE cycles per voxel. Sums over many cubes estimate the correlation of the
    volume, at frequencies that are CUBE-ths of a cycle.
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
