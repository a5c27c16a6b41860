"""`WindowDataset`: windows as a torch dataset, over stored window tensors or straight over a volume.

Not here: the grid of windows (geometry.grid), or reading them (windows). It imports torch at the top; nothing that runs
on a CPU worker imports it.

Example:
    Train on a volume, `cells.n5`, by windows cut from it as they are needed::

        from torch.utils.data import DataLoader
        from volpipe.training.data.dataset import ChunkSampler, WindowDataset


        def main() -> None:
            dataset = WindowDataset.from_volume("cells.n5", window=(64, 64, 64), overlap=(32, 32, 32), low=0, high=255)
            sampler = ChunkSampler(dataset, seed=1)
            loader = DataLoader(dataset, batch_size=4, sampler=sampler, pin_memory=True, num_workers=2,
                                multiprocessing_context="spawn", persistent_workers=True)
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for windows in loader:
                    print(epoch, windows.shape)  # n,c,z,y,x, float32, -1 to 1


        if __name__ == "__main__":  # spawned workers import this file
            main()

    Or on the window tensors that ``volpipe run --keep-tensors --set tensors.mode=stored cells.n5`` leaves::

        dataset = WindowDataset.from_tensors("cells_unet3d.zarr.run/tensors.n5")
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from volpipe.blockwise.journal import read_records
from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Lattice, Triple
from volpipe.inference.intensity import Affine
from volpipe.inference.scratch import SOURCE_KEY
from volpipe.inference.windows import StoredWindows, VolumeWindows
from volpipe.resolve import homes_known
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import RESULTS
from volpipe.volumes.volume import Volume, open_volume


class WindowDataset(Dataset[torch.Tensor]):
    """The windows of a lattice as tensors (c, z, y, x), float32, normalised; all that exist, 0..len-1.

    Neighbouring indices are neighbouring windows, block by block: over a volume, that order or a `ChunkSampler`'s reads
    a block once, any other reads it for nearly every window. Each worker of a DataLoader reads what its own batches
    need. Stored windows are one chunk each, in any order. It pickles as names alone, so that workers started by spawn
    open their own volume; forked ones cannot, once the process that they come from has read or written any.
    """

    def __init__(self, source: StoredWindows | VolumeWindows) -> None:
        self.source = source

    @classmethod
    @homes_known
    def from_tensors(cls, path: str | Path, key: str = SOURCE_KEY) -> WindowDataset:
        """Return the windows that a run stored at `path`; each is read as one chunk.

        Raises:
            VolumeError: no window tensors, or some are missing.
        """
        tensors = open_volume(path, key)
        lattice = _lattice(tensors)
        _check_whole(tensors, lattice)
        return cls(StoredWindows(tensors, lattice))

    @classmethod
    @homes_known
    def from_volume(
        cls,
        location: str | Path,
        *,
        window: Triple = (64, 64, 64),
        overlap: Triple = (0, 0, 0),
        block: Triple = (4, 4, 4),
        low: float = -1.0,
        high: float = 1.0,
        key: str | None = None,
    ) -> WindowDataset:
        """Return windows cut from the volume at `location`, mirrored at its faces.

        Args:
            location: an N5 or Zarr volume, as `volpipe run` takes it.
            window: voxels (z, y, x) of a window.
            overlap: voxels (z, y, x) that neighbouring windows share.
            block: windows (z, y, x) whose voxels are read at once and cached; larger blocks read fewer chunks twice.
            low, high: values of the volume that map to -1 and 1; by default values do not change.
            key: the array, where the volume holds several.

        Raises:
            VolumeError: there is no such volume.
        """
        if not low < high:
            raise ValueError(f"low {low} must be below high {high}")
        volume = open_volume(location, key)
        normalise = Affine((low + high) / 2, (high - low) / 2)
        return cls(VolumeWindows(volume, Lattice(volume.spatial_shape, window, overlap, block), normalise))

    @property
    def lattice(self) -> Lattice:
        return self.source.lattice

    def __len__(self) -> int:
        return self.lattice.num_windows

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return list(torch.from_numpy(self.source.read([self._window_number(index) for index in indices])))

    def box(self, index: int) -> Box:
        """Return where window `index` lies in the volume, in voxels (z, y, x); it may reach outside."""
        return self.lattice.window_box(self._window_number(index))

    def _window_number(self, index: int) -> int:
        """Return the lattice's number of window `index`, which counts from the end if it is negative."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} is outside the dataset of {len(self)} windows")
        return self.lattice.dense(int(index) % len(self))


class ChunkSampler(Sampler[int]):
    """Window indices in a seeded random order that keeps blocks together, so that chunks are read once per epoch.

    Blocks come in random order, and the windows within each in random order. With `ranks`, each of that many processes
    gets its own share, of equal length: the first few windows are given twice where they do not divide. It takes the
    place of torch's DistributedSampler, which would tear blocks apart.
    """

    def __init__(self, dataset: WindowDataset, *, seed: int = 0, rank: int = 0, ranks: int = 1) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is outside 0..{ranks - 1}")
        self.dataset = dataset
        self.seed = seed
        self.rank = rank
        self.ranks = ranks
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose another order, the same for the same seed and epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.ranks)

    def __iter__(self) -> Iterator[int]:
        """Return this rank's indices: a contiguous part of the common order, so that ranks hardly share blocks."""
        epoch, start = self.epoch, self.rank * len(self)
        endless = itertools.chain.from_iterable(self._shuffled(epoch) for _ in itertools.count())
        return itertools.islice(endless, start, start + len(self))

    def _shuffled(self, epoch: int) -> Iterator[int]:
        """Yield every index once; only the order of blocks is held in memory."""
        lattice = self.dataset.lattice
        rng = np.random.default_rng((self.seed, epoch))
        for block in rng.permutation(len(lattice.blocks)):
            indices = lattice.positions_of(int(block))
            yield from (indices.start + rng.permutation(len(indices))).tolist()


def _lattice(tensors: Volume) -> Lattice:
    """Return the lattice of the windows in `tensors`, from its attributes."""
    described = tensors.attributes.get("volpipe")
    sizes = described.get("lattice") if isinstance(described, dict) else None
    if not isinstance(sizes, dict):
        raise VolumeError(f"{tensors} holds no window tensors: its attributes lack volpipe.lattice")
    try:
        placement = sizes.pop("placement", "lattice")
        lattice = Lattice(**{name: tuple(map(int, n)) for name, n in sizes.items()}, placement=placement)
    except (TypeError, ValueError) as error:
        raise VolumeError(f"{tensors}: volpipe.lattice in its attributes is damaged: {error}") from error
    shape = (lattice.max_number, *lattice.seen)
    if (tensors.shape[0], *tensors.shape[2:]) != shape:
        raise VolumeError(f"{tensors} has shape {tensors.shape}, its lattice needs windows (n, z, y, x) {shape}")
    return lattice


def _check_whole(tensors: Volume, lattice: Lattice) -> None:
    """Refuse `tensors` of an unfinished run; missing windows would be read as zeros."""
    described = tensors.attributes.get("volpipe")
    if isinstance(described, dict) and not described.get("is_whole", True):
        raise VolumeError(f"{tensors} holds the windows of a part of its volume; run without roi, mask and empty")
    journal = RunFolder(Path(tensors.path).parent).journal
    if not journal.is_file():  # moved away from their run
        return
    blocks = {block for r in read_records(journal, RESULTS) if r.stage == "factor" for block in r.done}
    if len(blocks) < lattice.num_blocks:
        raise VolumeError(
            f"{tensors} holds the windows of {len(blocks)} of {lattice.num_blocks} blocks; finish its run first, "
            "with --keep-tensors"
        )
