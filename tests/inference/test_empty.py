"""Empty space: windows that see nothing are not wanted, and what is left has the whole run's bytes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from ramp import Bench, result, windows_that_meet
from volumes import noise, windowed

from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer


def hollow(folder: Path, value: int, format_: str = "n5") -> np.ndarray:
    """Write a volume of chunks of 8 voxels, most of which hold `value`; those of zeros are not stored."""
    data = np.full((24, 24, 64), value, np.uint8)
    data[:8, :, :8] = noise((8, 24, 8)) // 2 + 1
    data[20:, :4, 60] = data[9, 8, 41] = 9  # the last is seen by a window that has it in its halo alone
    sharded = format_ == "zarr3"
    spec = ArraySpec(data.shape, data.dtype, (8, 8, 8), (8, 8, 16) if sharded else None, codec="gzip")
    create_array(folder / "in.n5", "raw", spec, format_)
    open_writer(folder / "in.n5", "raw").write(Box.from_shape(data.shape), data)
    return data


def windows_with(plan: Plan, content: np.ndarray) -> np.ndarray:
    """Return the voxels (z, y, x) of the cores of all windows that see any of `content`, mirrored at the faces."""
    pad = [(o // 2, w) for w, o in zip(plan.window, plan.overlap, strict=True)]
    seen, wanted = np.pad(content, pad, mode="reflect"), np.zeros_like(content)
    strides = [w - o for w, o in zip(plan.window, plan.overlap, strict=True)]
    for corner in itertools.product(*(range(0, n, s) for n, s in zip(content.shape, strides, strict=True))):
        window = tuple(slice(a, a + w) for a, w in zip(corner, plan.window, strict=True))
        wanted[tuple(slice(a, a + s) for a, s in zip(corner, strides, strict=True))] = seen[window].any()
    return wanted


EMPTY = {
    "value": (7, "n5", "input.empty=7", np.uint8(7)),
    "missing chunks of N5": (0, "n5", "input.empty=missing", None),
    "missing chunks of Zarr v2": (0, "zarr2", "input.empty=missing", None),
    "missing chunks of shards": (0, "zarr3", "input.empty=missing", None),
}


@pytest.mark.parametrize(
    ("case", "blend"),
    [
        pytest.param(case, blend, marks=[pytest.mark.long] * ((i + j) % 2))
        for i, case in enumerate(EMPTY)
        for j, blend in enumerate(("hann", "crop"))
    ],
)
def test_windows_without_content_are_not_wanted(tmp_path: Path, case: str, blend: str) -> None:
    value, format_, setting, fill = EMPTY[case]
    data = hollow(tmp_path, value, format_)
    content = data != 0
    if fill is not None:
        content = data != fill
    else:  # what shares a chunk with content is stored
        chunks = content.reshape(3, 8, 3, 8, 8, 8).any(axis=(1, 3, 5))
        content = np.kron(chunks, np.ones((8, 8, 8), bool))
    bench = Bench(tmp_path, windowed((12, 12, 12), (4, 4, 4), (2, 2, 2), blend))
    whole = result(bench.run())
    plan = bench.run(setting)
    wanted = windows_with(plan, content)
    assert 0 < np.count_nonzero(wanted) < wanted.size
    assert np.array_equal(result(plan), np.where(wanted, whole, 0))
    assert bench.num_calls == windows_that_meet(plan, wanted)


def test_a_stored_chunk_of_zeros_is_not_missing(tmp_path: Path) -> None:
    hollow(tmp_path, 0)
    (tmp_path / "in.n5/raw/0/0/2").touch()
    volume = open_volume(tmp_path / "in.n5").open()
    assert volume.is_stored(Box((16, 0, 0), (24, 8, 8)))
    assert not volume.is_stored(Box((16, 8, 0), (24, 16, 8)))
    assert volume.is_stored(Box((16, -1, 0), (24, 1, 8)))
