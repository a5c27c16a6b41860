"""Random numbers of a synthetic tissue: each is a hash of a seed, of its purpose and of lattice coordinates.

Not a generator that draws in sequence, and not for secrets: a number is the same whoever asks, and in any order.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from volpipe.geometry.grid import Box

Array = np.ndarray[Any, np.dtype[Any]]  # shape and dtype differ; each function says which
Axes = tuple[Array, Array, Array]  # one 1-D array per axis (z, y, x)


class Stream(IntEnum):
    """The purpose of a random number; vectors take three numbers in a row."""

    NODE = 1
    ROOT = 4
    STEP = 5
    TRACT = 6
    OWN_WAY = 7
    CALIBRE = 8
    SWELLING = 9
    SHADE = 10
    RELEASING = 11
    MITOCHONDRION = 12
    FILLING = 13
    BEND = 20  # and 21 to 25: three axes, two scales
    CROWD = 30
    VESICLE = 31
    VESICLE_RADIUS = 34
    PRESENT = 35
    GRAIN = 40
    MOTTLE = 41
    RETICULUM = 42
    PLACE = 43
    SHADING = 44
    SECTION = 45
    NOISE = 46


def _mix(h: Array) -> Array:
    """Return uint64 `h` scrambled: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return h


def _lattice_hash(seed: int, stream: int, z: Array, y: Array, x: Array) -> Array:
    """Return random uint64 at int64 lattice points; the arrays broadcast."""
    h = np.full(1, (seed * 0x9E3779B97F4A7C15 + stream * 0xD1342543DE82EF95) % 2**64, np.uint64)
    for axis in (z, y, x):
        h = _mix(h + axis.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return h


def uniform(seed: int, stream: int, at: Array) -> Array:
    """Return random float64 in [0, 1) at lattice points `at` (3, ...)."""
    return _fraction(_lattice_hash(seed, stream, at[0], at[1], at[2]))


def _fraction(h: Array) -> Array:
    """Return uint64 `h` as float64 in [0, 1)."""
    fraction: Array = (h >> np.uint64(11)) * 2.0**-53
    return fraction


def smooth(seed: int, stream: int, at: Axes, spacing: float) -> Array:
    """Return smooth noise (z, y, x), float32 in (-1, 1), at the positions `at` in nm.

    Random numbers on a lattice of `spacing` nm, through quadratic B-splines; x first and z last, since the
    last axis costs most and is copied in whole planes.
    """
    taps = [_spline(axis, spacing) for axis in at]
    z, y, x = (np.arange(nodes.min() - 1, nodes.max() + 2) for nodes, _ in taps)
    lattice = _lattice_hash(seed, stream, z[:, None, None], y[None, :, None], x[None, None, :])
    values = (_fraction(lattice) * 2.0 - 1.0).astype(np.float32)
    for dim, origin in ((2, x[0]), (1, y[0]), (0, z[0])):
        nodes, weights = taps[dim]
        others = tuple(d for d in range(3) if d != dim)
        first, second, third = (
            np.take(values, nodes - origin + step, axis=dim) * np.expand_dims(weight, others)
            for step, weight in zip((-1, 0, 1), weights, strict=True)
        )
        values = first + second + third
    return values


def _spline(positions: Array, spacing: float) -> tuple[Array, list[Array]]:
    """Return the nearest lattice point (int64) and the weights (float32) of it and its two neighbours."""
    scaled = positions / spacing
    nodes = np.floor(scaled + 0.5)
    t = scaled - nodes
    weights = (0.5 * (0.5 - t) * (0.5 - t), 0.75 - t * t, 0.5 * (0.5 + t) * (0.5 + t))
    return nodes.astype(np.int64), [w.astype(np.float32) for w in weights]


def white_noise(seed: int, box: Box) -> Array:
    """Return white noise of `box` (z, y, x), float32, mean 0, deviation 1: the sum of a hash's bytes."""
    z, y, x = voxels(box)
    rows = _lattice_hash(seed, Stream.NOISE, z[:, None], y[None, :], np.zeros(1, np.int64)).astype(np.uint32)
    h = rows[:, :, None] ^ x.astype(np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # lowbias32, C. Wellons, 2018
        h ^= h >> np.uint32(shift)
        h *= np.uint32(factor)
    h ^= h >> np.uint32(16)
    pairs = (h & np.uint32(0x00FF00FF)) + ((h >> np.uint32(8)) & np.uint32(0x00FF00FF))
    total = (pairs & np.uint32(0xFFFF)) + (pairs >> np.uint32(16))
    return (total.astype(np.float32) - np.float32(510)) * np.float32(1 / 147.8)


def voxels(box: Box) -> Axes:
    """Return the coordinates of the voxels of `box`, int64."""
    z, y, x = (np.arange(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return z, y, x
