"""The scratch of a run: window tensors and block tensors, named, laid out, written whole and thrown away.

Not here: how sums come about (block_sum). Seven named dimensions in all; dataset and iteration stand in the
attributes and the key, the other five are the array's: batch (window or block number), channel, z, y, x.

    tensors.n5   tensors/source             windows, float32, one window = one chunk (Zarr: one block = one shard)
    tensors.zarr tensors/<net>/<iteration>  weighted sums, float32, in parts (Plan.sum_parts); one block = one shard

Block tensors are always sharded Zarr v3: a neighbour reads the sliver it needs, not the whole block. Voxels that a
block writes to the output are not in its tensor, and empty inner chunks and parts are not stored.
The folders of a block in Zarr v3 go with the last of its files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from volpipe.blockwise.malloc import mapped
from volpipe.blockwise.usage import counting_growth
from volpipe.geometry.grid import Box
from volpipe.inference.intensity import Affine
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection
from volpipe.inference.windows import StreamedWindows
from volpipe.volumes.formats.container import read_header
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import plain
from volpipe.volumes.storage.paths import delete, delete_emptied, partial_files
from volpipe.volumes.volume import ArraySpec, Volume, Writer, create_array, open_volume, open_writer
from volpipe.volumes.writer import ShardStream

SOURCE_KEY = "tensors/source"
DIMENSIONS = ("dataset", "iteration", "batch", "channel", "z", "y", "x")
NO_SUM = np.float32(-0.0)  # the neutral element of IEEE addition: -0.0 + x has the bits of x, 0.0 + -0.0 has not
WINDOWS_AT_ONCE = 16  # that are cut and written: bounds the memory of a task
FOLDERS = 4  # that the file of a block has to itself in Zarr v3: c/<block>/0/0/0/0
PARTS = ("core", "z", "y", "x")  # of a block tensor, as Plan.sum_parts has them


class ScratchTensors:
    """The tensors of one run under `folder`, which need not exist until `create`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.source_path = folder / ("tensors.zarr" if plan.recipe.tensors.is_sharded else "tensors.n5")
        self.sums_path = folder / "tensors.zarr"
        self.sums_key = f"tensors/{plan.net.label}/0"
        self._parts = () if len(plan.arrays) == 1 else tuple(ScratchTensors(each, folder) for each in plan.arrays)

    @property
    def arrays(self) -> tuple[ScratchTensors, ...]:
        """The tensors of each array of the output, which have the same windows and sums of their own."""
        return self._parts or (self,)

    def create(self) -> None:
        """Write the metadata of the arrays that the plan uses; data that is already there stays."""
        self._create_windows()
        for array in self.arrays:
            array._create_sums()

    def _create_windows(self) -> None:
        plan, choice = self.plan, self.plan.recipe.tensors
        if plan.mode == "stored":
            chunk = (1, plan.source.num_channels, *plan.window)
            sharded = choice.is_sharded
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

    def _create_sums(self) -> None:
        plan = self.plan
        for part, region in zip(PARTS, plan.sum_parts, strict=True):
            if plan.num_sums and not region.is_empty:
                shape = (plan.net.out_channels, *region.shape)
                spec = ArraySpec(
                    shape=(len(plan.blocks), *shape),
                    dtype=plan.sum_dtype,
                    chunks=(1, 1, *plan.sum_chunk),
                    shards=(1, *shape),
                    axes=DIMENSIONS[2:],
                    codec="zstd",
                    codec_level=1,
                    attributes={"volpipe": self._dimension_attributes(plan.net.label) | {"part": part}},
                )
                create_array(self.sums_path, f"{self.sums_key}/{part}", spec, "zarr3")

    def write_windows(self, numbers: Sequence[int], data: np.ndarray) -> None:
        """Write `data` (windows, c, z, y, x), float32: the windows of `numbers`, ascending, all of one block.

        In Zarr they must be all the windows of the block: they make one shard.
        """
        with counting_growth(self._window_files(numbers)):
            self._write_windows(numbers, data)

    def _write_windows(self, numbers: Sequence[int], data: np.ndarray) -> None:
        per_block = self.plan.lattice.windows_per_block
        if self.plan.recipe.tensors.is_sharded:
            first = numbers[0] // per_block * per_block
            whole = np.zeros((per_block, *data.shape[1:]), np.float32)
            whole[[n - first for n in numbers]] = data
            box = Box.from_shape(whole.shape).shift((first, 0, 0, 0, 0))
            open_writer(self.source_path, SOURCE_KEY).write(box, whole)
            return
        from volpipe.volumes.formats.n5 import write_chunks

        gaps = (np.flatnonzero(np.diff(numbers) > 1) + 1).tolist()  # between runs of consecutive numbers
        for first, part in zip([numbers[0], *(numbers[gap] for gap in gaps)], np.split(data, gaps), strict=True):
            write_chunks(str(self.source_path), SOURCE_KEY, (first, 0, 0, 0, 0), part)

    def source_volume(self) -> Volume:
        """Return the array of window tensors."""
        return open_volume(self.source_path, SOURCE_KEY)

    def total(self, box: Box, blocks: Sequence[int]) -> np.ndarray:
        """Return the stored sums of `blocks` in `box` of the output, added in ascending order, (c, z, y, x).

        The blocks are some of those whose sums reach the box.
        """
        total = np.full((self.plan.net.out_channels, *box.shape), NO_SUM, self.plan.sum_dtype)
        for block in sorted(blocks):
            part = box & self.plan.sum_box(block)
            total[:, *part.relative_to(box.start).slices] += self.read_sum(block, part)
        return total

    def read_sum(self, block: int, box: Box) -> np.ndarray:
        """Return the weighted sum of `block` in `box` of the output, (c, z, y, x)."""
        data = np.zeros((self.plan.net.out_channels, *box.shape), self.plan.sum_dtype)
        for part, region in self.parts(block, box):
            inner = region.relative_to(self.origin(block, part))
            place = Box((block, 0, *inner.start), (block + 1, self.plan.net.out_channels, *inner.stop))
            slices = region.relative_to(box.start).slices
            data[:, *slices] = self.sum_writer(part).read(place)[0]
        return data

    def has_sum(self, block: int, box: Box) -> bool:
        """Return whether the sum of `block` in `box` of the output is stored; a part that is all zeros never is."""
        box = box & self.plan.sum_box(block)
        return all(self.sum_file(block, part).exists() for part, _ in self.parts(block, box))

    def has_sums(self, block: int, shard: int) -> bool:
        """Return whether the sums of `block` in `shard` of every array of the output are stored."""
        return all(array.has_sum(block, array.plan.shards().box(shard)) for array in self.arrays)

    def discard_windows(self, block: int) -> None:
        """Delete the window tensors of `block`, if they exist."""
        files = self._window_files(self.plan.lattice.windows_of(block))
        _delete_files(files)
        if self.plan.recipe.tensors.is_sharded:
            delete_emptied(files[0], FOLDERS)

    def discard_sum(self, block: int, part: int) -> None:
        """Delete a part of the tensors of `block`, as far as they exist."""
        for file in (array.sum_file(block, part) for array in self.arrays):
            _delete_files([file])
            delete_emptied(file, FOLDERS)

    @property
    def is_fitting(self) -> bool:
        """Whether the arrays that are here already are those of the plan, not of one before its volume grew."""
        if not all(array._has_fitting_sums for array in self.arrays):
            return False
        windows = read_header(self.source_path / SOURCE_KEY)
        return windows is None or windows.attributes.get("volpipe") == plain(self._source_attributes())

    @property
    def _has_fitting_sums(self) -> bool:
        plan = self.plan
        for part, region in zip(range(len(PARTS)), plan.sum_parts, strict=True):
            header = read_header(self.sums_path / self._sum_key(part))
            if header is not None and header.shape != (len(plan.blocks), plan.net.out_channels, *region.shape):
                return False
        return True

    def forget_sums(self, done: np.ndarray) -> None:
        """Delete the tensors of blocks that are not `done`, a flag for each: their input may have changed since.

        A killed task leaves one that nobody marked, and another block would add it up.
        """
        for array, part in itertools.product(self.arrays, range(len(PARTS))):
            folder = array.sums_path / array._sum_key(part) / "c"
            for name in paths.list_folders(folder) if folder.is_dir() else ():
                if not done[int(name)]:
                    _delete_files(partial_files(array.sum_file(int(name), part).parent))
                    array.discard_sum(int(name), part)

    def sum_file(self, block: int, part: int) -> Path:
        """Return the file that holds a part of the sum of `block`."""
        return self.sums_path / self._sum_key(part) / "c" / str(block) / "0/0/0/0"

    def sum_writer(self, part: int) -> Writer:
        """Return the writer of a part of all block tensors."""
        return open_writer(self.sums_path, self._sum_key(part))

    def _sum_key(self, part: int) -> str:
        return f"{self.sums_key}/{PARTS[part]}"

    def parts(self, block: int, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the parts of the tensor of `block` that meet `box` of the output, and where."""
        for part, region in enumerate(self.plan.sum_parts):
            inside = region.shift(self.plan.core_start(block)) & box
            if not inside.is_empty:
                yield part, inside

    def origin(self, block: int, part: int) -> tuple[int, ...]:
        """Return the output voxel at which a part of the tensor of `block` begins; it may lie outside the region."""
        return self.plan.sum_parts[part].shift(self.plan.core_start(block)).start

    def _window_files(self, numbers: Sequence[int]) -> list[Path]:
        """Return the files that hold the windows of `numbers`, all of one block."""
        if self.plan.recipe.tensors.is_sharded:
            block = numbers[0] // self.plan.lattice.windows_per_block
            return [self.source_path / SOURCE_KEY / "c" / str(block) / "0/0/0/0"]
        return [self.source_path / SOURCE_KEY / "0/0/0/0" / str(number) for number in numbers]

    def remove(self) -> None:
        """Delete every tensor of the run."""
        for path in {self.source_path, self.sums_path}:
            delete(path)

    def _dimension_attributes(self, tensor: str) -> dict[str, object]:
        source = self.plan.source
        return {
            "dimensions": list(DIMENSIONS),
            "dataset": f"{source.path}:{source.key}",
            "tensor": tensor,
            "iteration": 0,
        }

    def _source_attributes(self) -> dict[str, object]:
        lattice = self.plan.lattice
        return self._dimension_attributes("source") | {
            "lattice": {f.name: value for f in fields(lattice) if (value := getattr(lattice, f.name)) != f.default},
            "num_windows": lattice.num_windows,
            "is_whole": self.plan.is_whole and not self.plan.needs_scan,
            "normalise": self.plan.recipe.normalise.model_dump(),
        }


class SumStream:
    """The tensor of one block, which is written layer by layer along z; each of its parts appears whole or not at all.

    Args:
        tensors: of the run.
        closed: shards that are not stored; parts that have nothing else are not written.
    """

    def __init__(self, tensors: ScratchTensors, block: int, closed: Collection[int]) -> None:
        plan = tensors.plan
        shards, channels = plan.shards(), plan.net.out_channels
        self._tensors, self._block, self._streams = tensors, block, dict[int, ShardStream]()
        self._layers: dict[int, np.ndarray] = {}
        self._closed = [shards.box(shard) for shard in closed]
        for part, region in tensors.parts(block, plan.sum_box(block)):
            if not all(shard in closed for shard in shards.touching(region)):
                whole = Box((block, 0, 0, 0, 0), (block + 1, channels, *plan.sum_parts[part].shape))
                self._streams[part] = ShardStream(tensors.sum_writer(part), whole, mapped)

    def append(self, box: Box, total: Callable[[Box], np.ndarray]) -> None:
        """Write the layers `box` of the output, which begin where those before ended, or later.

        `total` returns the sum in parts of it, (c, z, y, x).
        """
        plan = self._tensors.plan
        for part, region in self._tensors.parts(self._block, box):
            if (stream := self._streams.get(part)) is None:
                continue
            origin = self._tensors.origin(self._block, part)
            for layer in region.cut(0, plan.sum_chunk[0], origin[0]):
                data, first = self._layer_of_chunks(part)[:, : layer.shape[0]], (layer.start[0], *origin[1:])
                data[:, *layer.relative_to(first).slices] = total(layer)
                for inner in (shard & layer for shard in self._closed):
                    data[:, *inner.relative_to(first).slices] = 0.0
                stream.fill(layer.start[0] - origin[0])
                stream.append(data[np.newaxis])
            if stream.position == plan.sum_parts[part].shape[0]:
                self._layers.pop(part, None)

    def _layer_of_chunks(self, part: int) -> np.ndarray:
        """Return a layer of chunks of `part`, (c, z, y, x), the same each time: 0 where no sum reaches."""
        if part not in self._layers:
            plan = self._tensors.plan
            shape = (plan.net.out_channels, plan.sum_chunk[0], *plan.sum_parts[part].shape[1:])
            self._layers[part] = mapped(shape, plan.sum_dtype)
        return self._layers[part]

    def close(self) -> None:
        """Put the parts in their places, zeros where nothing was appended."""
        for part, stream in self._streams.items():
            with counting_growth([self._tensors.sum_file(self._block, part)]):
                stream.fill(self._tensors.plan.sum_parts[part].shape[0])
                stream.close()

    def abort(self) -> None:
        """Delete what was written of parts that are not whole."""
        for stream in self._streams.values():
            stream.abort()


def factor(selection: Selection, volume: Volume, normalise: Affine, tensors: ScratchTensors, block: int) -> str:
    """Write the selected window tensors of `block`, cut from `volume` and mirrored at its faces, and normalised.

    Return the fingerprint of the voxels.
    """
    plan, numbers = selection.plan, selection.windows_of(block)
    source = StreamedWindows(volume, plan.lattice, normalise, padding=plan.net.padding)
    source.begin([block], selection.slabs)
    voxels = source.voxels(block, 0, numbers)
    size = len(numbers) if plan.recipe.tensors.is_sharded else WINDOWS_AT_ONCE
    for start in range(0, len(numbers), size):
        part = slice(start, start + size)
        tensors.write_windows(numbers[part], voxels.part(part).windows())
    return source.fingerprint(block)


def _delete_files(files: Sequence[Path]) -> None:
    with counting_growth(files):
        for file in files:
            file.unlink(missing_ok=True)
