"""The scratch of a run: window tensors and block tensors, named, laid out, written whole and thrown away.

Not here: what is in them (factor, infer). Seven named dimensions in all; dataset and iteration stand in the
attributes and the key, the other five are the array's: batch (window or block number), channel, z, y, x.

    tensors.n5   tensors/source             windows, float32, one window = one chunk (Zarr: one block = one shard)
    tensors.zarr tensors/<net>/<iteration>  weighted sums, float32, one block = one shard

Block tensors are always sharded Zarr v3: a neighbour reads the sliver it needs, not the whole block, and a block is
one file. Their inner chunks that hold nothing are not stored.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from volpipe.formats import files
from volpipe.formats.files import Location
from volpipe.grid import Box
from volpipe.plan import Plan
from volpipe.volume import ArraySpec, Volume, Writer, create_array, open_volume, open_writer

SOURCE_KEY = "tensors/source"
DIMENSIONS = ("dataset", "iteration", "batch", "channel", "z", "y", "x")
DELETE_ATTEMPTS, DELETE_PAUSE_SECONDS = 20, 0.1
NO_SUM = np.float32(-0.0)  # the neutral element of IEEE addition: -0.0 + x has the bits of x, 0.0 + -0.0 has not


class Tensors:
    """The tensors of one run under `folder`, which need not exist until `create`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.source_path = folder / ("tensors.n5" if plan.recipe.tensors.format == "n5" else "tensors.zarr")
        self.sums_path = folder / "tensors.zarr"
        self.sums_key = f"tensors/{plan.net.label}/0"

    def create(self) -> None:
        """Write the metadata of the arrays that the plan uses; data that is already there stays."""
        plan, choice = self.plan, self.plan.recipe.tensors
        if plan.mode == "stored":
            chunk = (1, plan.source.num_channels, *plan.window)
            sharded = choice.format == "zarr3"
            spec = ArraySpec(
                shape=(plan.lattice.max_number, *chunk[1:]),
                dtype=np.dtype(np.float32),
                chunks=chunk,
                shards=(plan.lattice.windows_per_block, *chunk[1:]) if sharded else None,
                axes=DIMENSIONS[2:],
                codec=choice.codec,
                codec_level=choice.level,
                attributes={"volpipe": self._source_attributes()},
            )
            create_array(self.source_path, SOURCE_KEY, spec, choice.format)
        if plan.num_sums:
            shape = (plan.net.out_channels, *plan.sum_shape)
            spec = ArraySpec(
                shape=(len(plan.blocks), *shape),
                dtype=np.dtype(np.float32),
                chunks=(1, 1, *plan.sum_chunk),
                shards=(1, *shape),
                axes=DIMENSIONS[2:],
                codec="zstd",
                codec_level=1,
                attributes={"volpipe": self._named(plan.net.label, 0)},
            )
            create_array(self.sums_path, self.sums_key, spec, "zarr3")

    def write_windows(self, numbers: Sequence[int], data: np.ndarray) -> None:
        """Write `data` (windows, c, z, y, x), float32: the windows of `numbers`, ascending, all of one block.

        In Zarr they must be all the windows of the block: they make one shard.
        """
        with _counted(self._window_files(numbers)):
            self._write_windows(numbers, data)

    def _write_windows(self, numbers: Sequence[int], data: np.ndarray) -> None:
        per_block = self.plan.lattice.windows_per_block
        if self.plan.recipe.tensors.format == "zarr3":
            first = numbers[0] // per_block * per_block
            whole = np.zeros((per_block, *data.shape[1:]), np.float32)
            whole[[n - first for n in numbers]] = data
            _write(open_writer(self.source_path, SOURCE_KEY), (first, 0, 0, 0, 0), whole)
            return
        from volpipe.formats.n5 import write_chunks

        done = 0
        for start, stop in _runs(numbers):
            part = data[done : done + stop - start]
            write_chunks(str(self.source_path), SOURCE_KEY, (start, 0, 0, 0, 0), part)
            done += stop - start

    def source_volume(self) -> Volume:
        """Return the array of window tensors."""
        return open_volume(self.source_path, SOURCE_KEY)

    def read_sum(self, block: int, box: Box) -> np.ndarray:
        """Return the weighted sum of `block` in `box` of the output, (c, z, y, x), float32."""
        inner = box.relative_to(self.plan.sum_origin(block))
        place = Box((block, 0, *inner.start), (block + 1, self.plan.net.out_channels, *inner.stop))
        data: np.ndarray = open_writer(self.sums_path, self.sums_key).read(place)[0]
        return data

    def write_sum(self, block: int, total: np.ndarray) -> None:
        """Write `total` (c, z, y, x), float32, the sum of `block` over its `sum_box`, as one shard."""
        plan = self.plan
        box = plan.sum_box(block)
        whole = np.zeros((plan.net.out_channels, *plan.sum_shape), np.float32)
        place = box.relative_to(plan.sum_origin(block))
        whole[:, *place.slices] = total
        for shard in plan.shards_of_block(block):
            if plan.is_direct(shard):
                inner = (plan.shards().box(shard) & box).relative_to(plan.sum_origin(block))
                whole[:, *inner.slices] = 0.0
        with _counted([self.sum_file(block)]):
            _write(open_writer(self.sums_path, self.sums_key), (block, 0, 0, 0, 0), whole[np.newaxis])

    def discard(self, block: int, what: str) -> None:
        """Delete the tensors of `block`: its "windows" or its "sum". What is gone already is no error."""
        windows = self.plan.lattice.windows_of(block)
        files = [self.sum_file(block)] if what == "sum" else self._window_files(windows)
        with _counted(files):
            for file in files:
                file.unlink(missing_ok=True)

    def sum_file(self, block: int) -> Path:
        """Return the file that holds the sum of `block`."""
        return self.sums_path / self.sums_key / "c" / str(block) / "0/0/0/0"

    def _window_files(self, numbers: Sequence[int]) -> list[Path]:
        """Return the files that hold the windows of `numbers`, all of one block."""
        if self.plan.recipe.tensors.format == "zarr3":
            block = numbers[0] // self.plan.lattice.windows_per_block
            return [self.source_path / SOURCE_KEY / "c" / str(block) / "0/0/0/0"]
        return [self.source_path / SOURCE_KEY / "0/0/0/0" / str(number) for number in numbers]

    def remove(self) -> None:
        """Delete every tensor of the run."""
        for path in {self.source_path, self.sums_path}:
            delete(path)

    def _named(self, tensor: str, iteration: int) -> dict[str, object]:
        source = self.plan.source
        return {
            "dimensions": list(DIMENSIONS),
            "dataset": f"{source.path}:{source.key}",
            "tensor": tensor,
            "iteration": iteration,
        }

    def _source_attributes(self) -> dict[str, object]:
        lattice = self.plan.lattice
        return self._named("source", 0) | {
            "lattice": {
                "shape": lattice.shape,
                "window": lattice.window,
                "overlap": lattice.overlap,
                "block": lattice.block,
            },
            "num_windows": lattice.num_windows,
            "is_whole": self.plan.is_whole and not self.plan.needs_scan,
            "normalise": self.plan.recipe.normalise.model_dump(),
        }


_lock = threading.Lock()
_grown = 0


def grown() -> int:
    """Return by how many bytes this process has made scratch grow so far."""
    return _grown


@contextmanager
def _counted(files: Sequence[Path]) -> Iterator[None]:
    """Count by how much `files` grow or shrink meanwhile."""
    global _grown
    before = sum(map(_size, files))
    try:
        yield
    finally:
        change = sum(map(_size, files)) - before
        with _lock:
            _grown += change


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def delete(path: Location) -> None:
    """Delete the folder at `path` with all that is in it, even while workers of a killed driver still write there."""
    if not isinstance(path, Path):
        files.delete_remote(path)
        return
    for _ in range(DELETE_ATTEMPTS):
        try:
            shutil.rmtree(path)
        except OSError as error:  # what was listed has gone, or what was empty has been written to
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
        if not path.exists():
            return
        time.sleep(DELETE_PAUSE_SECONDS)
    shutil.rmtree(path)


def _write(writer: Writer, start: tuple[int, ...], data: np.ndarray) -> None:
    writer.write(Box(start, tuple(a + n for a, n in zip(start, data.shape, strict=True))), data)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, one past last) for each run of consecutive numbers in the ascending list."""
    start = previous = numbers[0]
    for number in numbers[1:]:
        if number != previous + 1:
            yield start, previous + 1
            start = number
        previous = number
    yield start, previous + 1
