"""Arrays read box by box against the same arrays in memory, and the memory that reading takes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from conftest import ROOT
from hypothesis import strategies as st

from volpipe.geometry.grid import Box
from volpipe.volumes.volume import Volume

MiB = 2**20

# Reads boxes of 64 voxels all over a volume, and prints by how many bytes that raised the most memory held so far.
READ_BOXES = """
import sys
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import open_volume

def peak():
    with open("/proc/self/status") as status:  # getrusage would count the process that started this one
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

volume = open_volume(sys.argv[1])
reader = volume.open()
reader.read(Box((0, 0, 0), (1, 1, 1)))
before = peak()
far = tuple(max(0, n - 64) for n in volume.spatial_shape)
for start in ((0, 0, 0), tuple(n // 2 for n in far), far):
    box = Box(start, tuple(min(n, a + 64) for a, n in zip(start, volume.spatial_shape)))
    assert reader.read(box).shape[1:] == box.shape
print(peak() - before)
"""


def indexes(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[slice | int, ...]]:
    """Return any index of an array of `shape`: per axis an integer, or a slice with a positive step, maybe empty."""
    return st.tuples(*(st.integers(0, n - 1) | spans(n) for n in shape))


def spans(n: int) -> st.SearchStrategy[slice]:
    bounds = st.tuples(st.integers(0, n), st.integers(0, n), st.integers(1, 3))
    return bounds.map(lambda b: slice(min(b[:2]), max(b[:2]), b[2]))


def check_reads(volume: Volume, expected: np.ndarray, seed: int = 0) -> None:
    """Assert that a volume reads as `expected`, in stored axes: whole, at random indexes, and from several threads."""
    reader = volume.open()
    whole = reader[...]
    assert (whole.shape, whole.dtype) == (expected.shape, expected.dtype)
    assert whole.dtype.isnative
    assert np.array_equal(whole, expected)
    rng = np.random.default_rng(seed)
    some = [tuple(_some(rng, n) for n in expected.shape) for _ in range(24)]
    with ThreadPoolExecutor(4) as pool:
        for index, found in zip(some, pool.map(reader.read_raw, some), strict=True):
            assert found.shape == expected[index].shape
            assert np.array_equal(found, expected[index])


def _some(rng: np.random.Generator, n: int) -> slice | int:
    if rng.random() < 0.2:
        return int(rng.integers(n))
    a, b = sorted(rng.integers(0, n + 1, 2))
    return slice(int(a), int(b), int(rng.integers(1, 3)))


def memory_of_boxes(path: Path) -> int:
    """Return by how many bytes reading three boxes of 64³ raises the memory of a process that did nothing else."""
    ended = subprocess.run(
        [sys.executable, "-c", READ_BOXES, path], capture_output=True, text=True, check=False, cwd=ROOT, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def boxes_of(shape: tuple[int, int, int], count: int = 8, seed: int = 1) -> list[Box]:
    """Return some boxes that lie in a volume of `shape`, none empty."""
    rng = np.random.default_rng(seed)
    starts = [tuple(int(rng.integers(n)) for n in shape) for _ in range(count)]
    return [Box(s, tuple(int(rng.integers(a + 1, n + 1)) for a, n in zip(s, shape, strict=True))) for s in starts]
