"""Zarr: what zarr-python wrote is read, in either separator, and chunks that are missing hold the fill value."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr
from arrays import invented, make
from metadata import lay
from numcodecs import Delta, Zstd

from volpipe.geometry.grid import Box
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer


@pytest.mark.parametrize(
    ("dtype", "choices"),
    [
        (">u2", {}),
        (">f8", {"order": "F"}),
        ("<i4", {"order": "F"}),
        ("bool", {}),
        ("float16", {}),
        ("<i4", {"filters": [Delta(dtype="<i4")]}),
        ("<u2", {"compressors": Zstd(3, checksum=True)}),
    ],
)
def test_zarr_v2_that_zarr_python_wrote_is_read(tmp_path: Path, dtype: str, choices: dict[str, object]) -> None:
    data = np.arange(5 * 6 * 7).reshape(5, 6, 7).astype(dtype)
    array = zarr.create_array(
        str(tmp_path / "a"), shape=data.shape, chunks=(2, 4, 7), dtype=dtype, zarr_format=2, **choices
    )
    array[...] = data
    read = open_volume(tmp_path / "a").open().read(Box.from_shape((5, 6, 7)))
    np.testing.assert_array_equal(read[0], data)
    assert read.dtype == (np.uint8 if dtype == "bool" else np.dtype(dtype).newbyteorder("="))


def test_old_nested_zarr_without_separator_is_not_taken_for_empty(tmp_path: Path) -> None:
    data = invented((6, 6, 6), "uint8")
    make(tmp_path / "a.zarr", data, "zarr2")
    metadata = json.loads((tmp_path / "a.zarr/.zarray").read_text())
    del metadata["dimension_separator"]
    lay(tmp_path, {"a.zarr/.zarray": metadata})
    np.testing.assert_array_equal(open_volume(tmp_path / "a.zarr").open()[...], data)


@pytest.mark.parametrize("fill", [7, -1])
@pytest.mark.parametrize("format", ["zarr2", "zarr3"])
def test_missing_chunks_are_fill(tmp_path: Path, format: str, fill: int) -> None:
    spec = ArraySpec(shape=(9, 9), dtype=np.dtype("int16"), chunks=(4, 4), axes=("y", "x"), fill=fill)
    create_array(tmp_path / "a", "", spec, format)
    open_writer(tmp_path / "a", "").write(Box((4, 4), (8, 8)), np.full((4, 4), 3, np.int16))
    expected = np.full((9, 9), fill, np.int16)
    expected[4:8, 4:8] = 3
    np.testing.assert_array_equal(open_volume(tmp_path / "a").open()[...], expected)
