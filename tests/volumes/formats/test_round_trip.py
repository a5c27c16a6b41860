"""Arrays come back as they were written, in every format, and other libraries read the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import z5py
import zarr
from arrays import AXES, invented, write_all
from hypothesis import given, settings
from hypothesis import strategies as st

from volpipe.volumes.volume import ArraySpec, create_array, open_volume

N5_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")


@st.composite
def arrays(draw: st.DrawFn, *, dtypes: tuple[str, ...], sharded: bool = False) -> tuple[np.ndarray, ArraySpec]:
    """Small arrays of one to four axes: any chunk, shard and codec."""
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 13)) for _ in range(rank))
    chunks = tuple(draw(st.integers(1, 7)) for _ in range(rank))
    shards = tuple(c * draw(st.integers(1, 3)) for c in chunks) if sharded else None
    data = invented(shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 99)))
    codec = draw(st.sampled_from(["raw", "gzip", "zstd"]))
    return data, ArraySpec(shape=shape, dtype=data.dtype, chunks=chunks, shards=shards, axes=AXES[-rank:], codec=codec)


def check_round_trip(data: np.ndarray, spec: ArraySpec, format: str) -> None:
    """Check that `data` comes back, to us and to a reader that is not ours."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("a.n5" if format == "n5" else "a.zarr")
        create_array(path, "volumes/raw", spec, format)
        write_all(path, "volumes/raw", data)
        if format == "n5":
            other = z5py.N5File(str(path), "r")["volumes/raw"][...]
        else:
            other = zarr.open_array(str(path / "volumes/raw"), mode="r")[...]
        volume = open_volume(path)
        assert (volume.key, volume.format, volume.axes) == ("volumes/raw", format, spec.axes)
        assert (volume.shape, volume.dtype, volume.chunks, volume.shards) == (
            data.shape,
            data.dtype,
            spec.chunks,
            spec.shards,
        )
        np.testing.assert_array_equal(volume.open()[...], data)
        np.testing.assert_array_equal(other, data)


@settings(max_examples=25)
@given(arrays(dtypes=N5_DTYPES))
def test_n5_comes_back_and_z5py_reads_it(made: tuple[np.ndarray, ArraySpec]) -> None:
    check_round_trip(*made, "n5")


@settings(max_examples=15)
@given(arrays(dtypes=(*N5_DTYPES, "float16")))
def test_zarr_v2_comes_back_and_zarr_python_reads_it(made: tuple[np.ndarray, ArraySpec]) -> None:
    check_round_trip(*made, "zarr2")


@settings(max_examples=15)
@given(arrays(dtypes=(*N5_DTYPES, "float16")))
def test_zarr_v3_comes_back_and_zarr_python_reads_it(made: tuple[np.ndarray, ArraySpec]) -> None:
    check_round_trip(*made, "zarr3")


@settings(max_examples=20)
@given(arrays(dtypes=("uint8", "int16", "float32", "uint64"), sharded=True))
def test_sharded_zarr_comes_back_and_zarr_python_reads_it(made: tuple[np.ndarray, ArraySpec]) -> None:
    check_round_trip(*made, "zarr3")
