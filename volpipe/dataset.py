"""`WindowDataset`: windows as a torch dataset, over stored window tensors or straight over a volume.

Not here: where windows lie (grid) or how they are read (windows). This is the one module of the core that imports torch
as it is imported; nothing that runs on a CPU worker imports it.

Example:
    Train on a volume, with augmentation of your own::

        from torch.utils.data import DataLoader
        from volpipe.dataset import ChunkSampler, WindowDataset

        dataset = WindowDataset.from_volume("cells.n5/raw", window=(64, 64, 64), overlap=(32, 32, 32), low=0, high=255)
        sampler = ChunkSampler(dataset, seed=1)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2,
                            multiprocessing_context="spawn", pin_memory=True)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for windows in loader:                                  # (4, c, 64, 64, 64), float32, -1..1
                ...

    A run with ``--keep-tensors`` and ``tensors.mode = "stored"`` leaves window tensors to train on again and again::

        dataset = WindowDataset.from_tensors("cells_unet3d.zarr.run/tensors.n5")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from volpipe.errors import VolumeError
from volpipe.grid import Box, Lattice
from volpipe.ops import Affine
from volpipe.tensors import SOURCE_KEY
from volpipe.volume import open_volume
from volpipe.windows import StoredWindows, StreamedWindows, WindowSource

Triple = tuple[int, int, int]


class WindowDataset(Dataset[torch.Tensor]):
    """The windows of a lattice as tensors (c, z, y, x), float32, normalised; all that exist, 0..len-1.

    Neighbouring indices are neighbouring windows, block by block: in that order a volume's chunks are read once per
    block. It pickles as names alone, so that DataLoader workers started by spawn open their own volume.
    """

    def __init__(self, source: WindowSource) -> None:
        self.source = source

    @classmethod
    def from_tensors(cls, path: str | Path, key: str = SOURCE_KEY) -> WindowDataset:
        """Return the windows that a run stored at `path`; each is read as one chunk.

        Raises:
            VolumeError: there are no window tensors.
        """
        tensors = open_volume(path, key)
        described = tensors.attributes.get("volpipe", {})
        if not isinstance(described, dict) or "lattice" not in described:
            raise VolumeError(f"{path} {key} holds no window tensors: its attributes lack volpipe.lattice")
        lattice = Lattice(**{name: tuple(sizes) for name, sizes in described["lattice"].items()})
        return cls(StoredWindows(tensors, lattice))

    @classmethod
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
            block: windows (z, y, x) whose voxels are read at once and kept; larger reads fewer chunks twice.
            low, high: values of the volume that become -1 and 1.
            key: the array, where the volume holds several.
        """
        volume = open_volume(location, key)
        normalise = Affine((low + high) / 2, (high - low) / 2)
        return cls(StreamedWindows(volume, Lattice(volume.spatial_shape, window, overlap, block), normalise))

    @property
    def lattice(self) -> Lattice:
        return self.source.lattice

    def __len__(self) -> int:
        return self.lattice.num_windows

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        numbers = [self.lattice.dense(int(index) + (len(self) if index < 0 else 0)) for index in indices]
        return list(torch.from_numpy(self.source.read(numbers)))

    def box(self, index: int) -> Box:
        """Return where window `index` lies in the volume, in voxels (z, y, x); it may reach outside."""
        return self.lattice.window_box(self.lattice.dense(index))


class ChunkSampler(Sampler[int]):
    """Window indices in a seeded random order that keeps blocks together, so that chunks are read once per epoch.

    Blocks come in random order, and the windows within each in random order. With `ranks`, each of that many processes
    gets its own share, of equal length: the last few windows are given twice where they do not divide.
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
        """Yield this rank's indices: a contiguous part of the common order, so that ranks hardly share blocks."""
        start = self.rank * len(self)
        order = self._order()
        for position in range(start, start + len(self)):
            yield int(order[position % len(order)])

    def _order(self) -> np.ndarray:
        lattice = self.dataset.lattice
        rng = np.random.default_rng((self.seed, self.epoch))
        firsts = np.cumsum([0, *(len(lattice.windows_of(block)) for block in range(len(lattice.blocks)))])
        return np.concatenate(
            [
                firsts[block] + rng.permutation(firsts[block + 1] - firsts[block])
                for block in rng.permutation(len(lattice.blocks))
            ]
        )
