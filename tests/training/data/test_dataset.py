"""Windows as a torch dataset: the same values from tensors and from the volume, in every order, in other processes."""

from __future__ import annotations

import ast
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import tracemalloc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from inline import Inline, Stopped
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import volpipe.training.data.dataset
from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Lattice
from volpipe.recipes.inference import load_recipe
from volpipe.runs.options import RunOptions
from volpipe.training.data.dataset import ChunkSampler, WindowDataset
from volpipe.volumes.volume import ArraySpec, Reader, create_array, open_volume, open_writer
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

SHAPE, WINDOW, OVERLAP, BLOCK = (40, 34, 29), (16, 14, 12), (4, 7, 0), (2, 3, 2)


def write_volume(path: Path, data: np.ndarray, axes: tuple[str, ...] = ("z", "y", "x"), format: str = "n5") -> Path:
    """Write `data` as the only array of a container at `path`."""
    chunks = tuple(min(16, n) for n in data.shape)
    create_array(path, "raw", ArraySpec(data.shape, data.dtype, chunks, axes=axes, codec="gzip"), format)
    open_writer(path, "raw").write(Box.from_shape(data.shape), data)
    return path


def invented(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def stored(folder: Path, volume: Path, format: str, *, most_tasks: int | None = None) -> Path:
    """Run the identity over `volume` into `folder`, and return the window tensors that the run keeps."""
    sizes = {"shape": WINDOW, "overlap": OVERLAP, "block": BLOCK}
    windows = [f"windows.{name}={list(size)}" for name, size in sizes.items()]
    tensors = ["tensors.mode=stored", f"tensors.format={format}", "windows.blend=hann"]
    out = folder / "cells_unet3d.zarr"
    plan = prepare(str(volume), load_recipe(None, ["net.name=identity", *windows, *tensors]), out, folder)
    execute(plan, Inline(most_tasks=most_tasks).start, RunOptions(keep_tensors=True))
    return folder / "cells_unet3d.zarr.run" / ("tensors.n5" if format == "n5" else "tensors.zarr")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_volume(tmp_path_factory.mktemp("cells") / "cells.n5", invented())


@pytest.fixture(scope="module")
def tensors(cells: Path) -> Path:
    return stored(cells.parent, cells, "n5")


def over_volume(cells: Path) -> WindowDataset:
    return WindowDataset.from_volume(cells, window=WINDOW, overlap=OVERLAP, block=BLOCK, low=0, high=255)


def every(dataset: WindowDataset) -> list[torch.Tensor]:
    return [dataset[i] for i in range(len(dataset))]


def corners() -> Iterator[tuple[int, ...]]:
    """Yield where each window starts (z, y, x), in the order of the dataset: block by block, then window by window."""
    steps = [w - o for w, o in zip(WINDOW, OVERLAP, strict=True)]
    counts = [-(-n // s) for n, s in zip(SHAPE, steps, strict=True)]
    blocks = itertools.product(*(range(0, n, b) for n, b in zip(counts, BLOCK, strict=True)))
    for first in blocks:
        spans = (range(a, min(a + b, n)) for a, b, n in zip(first, BLOCK, counts, strict=True))
        for index in itertools.product(*spans):
            yield tuple(i * s - o // 2 for i, s, o in zip(index, steps, OVERLAP, strict=True))


def cut(data: np.ndarray) -> np.ndarray:
    """Return the windows of `data` (c, z, y, x), uint8, as numpy alone makes them: (n, c, z, y, x), -1 to 1."""
    padded = np.pad(data, [(0, 0), *((w, w) for w in WINDOW)], mode="reflect")
    starts = [tuple(a + w for a, w in zip(corner, WINDOW, strict=True)) for corner in corners()]
    windows = [padded[:, *(slice(a, a + w) for a, w in zip(start, WINDOW, strict=True))] for start in starts]
    return np.stack(windows) / 255.0 * 2 - 1


def test_windows_of_a_volume_are_mirrored_at_its_faces_and_normalised(cells: Path) -> None:
    dataset = over_volume(cells)
    expected = cut(invented()[np.newaxis])
    assert len(dataset) == len(expected) == len(list(corners()))
    assert isinstance(dataset, Dataset)
    for i, (window, corner) in enumerate(zip(expected, corners(), strict=True)):
        assert dataset[i].dtype == torch.float32
        np.testing.assert_allclose(dataset[i].numpy(), window, atol=1e-6)
        assert dataset.box(i).start == corner
        assert dataset.box(i).shape == WINDOW


def test_channels_come_first(tmp_path: Path) -> None:
    data = invented((*SHAPE, 2))
    volume = write_volume(tmp_path / "two.zarr", data, ("z", "y", "x", "c"), "zarr3")
    np.testing.assert_allclose(torch.stack(every(over_volume(volume))), cut(np.moveaxis(data, -1, 0)), atol=1e-6)


def test_values_stay_as_they_are_by_default(tmp_path: Path) -> None:
    data = np.random.default_rng(1).normal(0, 1e4, (4, 5, 6)).astype(np.float32)
    dataset = WindowDataset.from_volume(write_volume(tmp_path / "a.n5", data), window=data.shape)
    np.testing.assert_array_equal(dataset[0].numpy(), data[np.newaxis])


@pytest.mark.parametrize("format", ["n5", "zarr3"])
def test_stored_windows_are_those_of_the_volume(cells: Path, tmp_path: Path, format: str) -> None:
    found = WindowDataset.from_tensors(stored(tmp_path, cells, format))
    expected = over_volume(cells)
    assert len(found) == len(expected)
    by_box = {expected.box(i): window for i, window in enumerate(every(expected))}
    assert len(by_box) == len(found)
    for i, window in enumerate(every(found)):
        assert window.dtype == torch.float32
        assert torch.equal(window, by_box[found.box(i)])


def test_negative_indices_count_from_the_end(cells: Path, tensors: Path) -> None:
    for dataset in (over_volume(cells), WindowDataset.from_tensors(tensors)):
        last = len(dataset) - 1
        assert torch.equal(dataset[-1], dataset[last])
        assert torch.equal(dataset[-last - 1], dataset[0])
        assert dataset.box(-1) == dataset.box(last)
        assert not torch.equal(dataset[0], dataset[last])


@pytest.mark.parametrize("beyond", [0, 5, -(10**6)])
def test_an_index_outside_is_refused(cells: Path, beyond: int) -> None:
    dataset = over_volume(cells)
    index = len(dataset) + beyond
    for look in (dataset.__getitem__, dataset.box):
        with pytest.raises(IndexError, match=f"window {index} is outside the dataset of {len(dataset)} windows"):
            look(index)


def test_a_range_that_is_empty_is_refused(cells: Path) -> None:
    with pytest.raises(ValueError, match="low 3 must be below high 3"):
        WindowDataset.from_volume(cells, low=3, high=3)


def test_arrays_that_are_no_window_tensors_are_refused(cells: Path) -> None:
    with pytest.raises(VolumeError, match=r"raw holds no window tensors: its attributes lack volpipe\.lattice"):
        WindowDataset.from_tensors(cells, "raw")


@pytest.mark.parametrize(
    ("lattice", "message"),
    [
        ({"shape": [4, 4, 4]}, "is damaged"),
        ({"shape": "4", "window": [4], "overlap": [0], "block": [1]}, "is damaged"),
        ({"shape": [4] * 3, "window": [4] * 3, "overlap": [4] * 3, "block": [1] * 3}, "is damaged"),
        (
            {"shape": [9] * 3, "window": [4] * 3, "overlap": [0] * 3, "block": [1] * 3},
            r"needs windows .*\(27, 4, 4, 4\)",
        ),
    ],
)
def test_a_lattice_that_does_not_fit_is_refused(tmp_path: Path, lattice: dict[str, object], message: str) -> None:
    attributes = {"volpipe": {"lattice": lattice}}
    chunk, axes = (1, 1, 4, 4, 4), ("batch", "channel", "z", "y", "x")
    spec = ArraySpec(chunk, np.dtype("float32"), chunk, axes=axes, attributes=attributes)
    create_array(tmp_path / "a.zarr", "tensors/source", spec)
    with pytest.raises(VolumeError, match=message):
        WindowDataset.from_tensors(tmp_path / "a.zarr")


def test_the_tensors_of_an_interrupted_run_are_refused(cells: Path, tmp_path: Path) -> None:
    num_blocks = len(over_volume(cells).lattice.blocks)
    with pytest.raises(Stopped):
        stored(tmp_path, cells, "n5", most_tasks=1)
    with pytest.raises(VolumeError, match=rf"the windows of \d+ of {num_blocks} blocks; finish its run first"):
        WindowDataset.from_tensors(tmp_path / "cells_unet3d.zarr.run" / "tensors.n5")


def test_a_stored_window_is_one_file(tensors: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tensors, tmp_path / "tensors.n5")
    dataset = WindowDataset.from_tensors(copy)
    before = every(dataset)
    files = [file for file in (copy / "tensors/source").rglob("*") if file.name != "attributes.json" and file.is_file()]
    assert len(files) == len(dataset)
    files[7].unlink()
    changed = [window for window, old in zip(every(dataset), before, strict=True) if not torch.equal(window, old)]
    assert len(changed) == 1
    assert not changed[0].any()


@pytest.fixture
def boxes_read(monkeypatch: pytest.MonkeyPatch) -> list[Box]:
    """The boxes that are read from volumes from now on."""
    boxes: list[Box] = []
    read = Reader.read_mirrored

    def counted(reader: Reader, box: Box, **named: int | None) -> np.ndarray:
        boxes.append(box)
        return read(reader, box, **named)

    monkeypatch.setattr(Reader, "read_mirrored", counted)
    return boxes


def test_a_block_is_read_once_in_the_order_of_the_sampler(cells: Path, boxes_read: list[Box]) -> None:
    dataset = over_volume(cells)
    loader = DataLoader(dataset, batch_size=5, sampler=ChunkSampler(dataset, seed=3))
    assert sum(len(batch) for batch in loader) == len(dataset)
    assert len(boxes_read) == len(set(boxes_read)) == len(dataset.lattice.blocks) > 4


def test_a_batch_of_stored_windows_reads_a_chunk_each(tensors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = WindowDataset.from_tensors(tensors)
    shapes: list[tuple[int, ...]] = []
    read = Reader.read_raw

    def counted(reader: Reader, index: object) -> np.ndarray:
        data = read(reader, index)
        shapes.append(data.shape)
        return data

    monkeypatch.setattr(Reader, "read_raw", counted)
    dataset.__getitems__([3, 1, 2])
    assert shapes == [open_volume(tensors, "tensors/source").chunks] * 3


def test_a_dataset_pickles_as_names_alone(cells: Path, tensors: Path) -> None:
    for dataset in (over_volume(cells), WindowDataset.from_tensors(tensors)):
        fresh = pickle.dumps(dataset)
        window = dataset[4]
        used = pickle.dumps(dataset)
        assert max(len(fresh), len(used)) < 2000
        assert torch.equal(pickle.loads(used)[4], window)


@pytest.mark.long
def test_spawned_workers_give_the_same_batches_pinned_or_not(cells: Path) -> None:
    dataset = over_volume(cells)
    sampler = ChunkSampler(dataset, seed=1)
    batches = list(DataLoader(dataset, batch_size=16, sampler=sampler))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator")
        workers = DataLoader(
            dataset,
            batch_size=16,
            sampler=sampler,
            num_workers=2,
            multiprocessing_context="spawn",
            pin_memory=True,
        )
        found = list(workers)
    assert len(found) == len(batches) > 2
    assert all(torch.equal(one, other) for one, other in zip(found, batches, strict=True))
    assert all(batch.is_pinned() == torch.cuda.is_available() for batch in found)


def test_shares_of_a_distributed_sampler_cover_everything(cells: Path) -> None:
    dataset = over_volume(cells)
    shares = [DistributedSampler[int](dataset, num_replicas=2, rank=rank) for rank in range(2)]
    loaders = [DataLoader(dataset, batch_size=7, sampler=share) for share in shares]
    found = {window.numpy().tobytes() for loader in loaders for batch in loader for window in batch}
    assert found == {window.numpy().tobytes() for window in every(dataset)}
    assert len(found) == len(dataset)


@st.composite
def lattices(draw: st.DrawFn) -> Lattice:
    def triple(low: int, high: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(low, high)] * 3))

    return Lattice(triple(1, 12), (3, 4, 2), (1, 0, 1), triple(1, 4))


def sampled(lattice: Lattice, *, seed: int = 0, epoch: int = 0, rank: int = 0, ranks: int = 1) -> list[int]:
    """Return the order of a sampler over `lattice`; no window is read."""
    sampler = ChunkSampler(unread(lattice), seed=seed, rank=rank, ranks=ranks)
    sampler.set_epoch(epoch)
    indices = list(sampler)
    assert len(indices) == len(sampler)
    return indices


def unread(lattice: Lattice) -> WindowDataset:
    return WindowDataset(Unread(lattice))


@dataclass
class Unread:
    """Windows that nobody may read."""

    lattice: Lattice

    def read(self, numbers: Sequence[int]) -> np.ndarray:
        raise AssertionError(f"windows {numbers} were read")

    def expect(self, blocks: Sequence[int]) -> None:
        raise AssertionError(f"blocks {blocks} were read")


@given(lattices(), st.integers(0, 3), st.integers(0, 3))
def test_a_sampler_gives_every_index_once_and_each_block_in_one_go(lattice: Lattice, seed: int, epoch: int) -> None:
    indices = sampled(lattice, seed=seed, epoch=epoch)
    assert sorted(indices) == list(range(lattice.num_windows))
    blocks = [lattice.dense(i) // lattice.windows_per_block for i in indices]
    assert len(list(itertools.groupby(blocks))) == len(lattice.blocks)


@given(lattices(), st.integers(1, 5))
def test_ranks_share_out_the_order_and_repeat_only_its_beginning(lattice: Lattice, ranks: int) -> None:
    order = sampled(lattice)
    shares = [sampled(lattice, rank=rank, ranks=ranks) for rank in range(ranks)]
    joined = list(itertools.chain(*shares))
    assert len({len(share) for share in shares}) == 1
    assert len(joined) - len(order) < ranks
    assert joined == [order[i % len(order)] for i in range(len(joined))]


def test_the_order_is_that_of_seed_and_epoch() -> None:
    lattice = Lattice((64, 64, 64), (8, 8, 8), (0, 0, 0), (4, 4, 4))
    order = sampled(lattice, seed=1, epoch=2)
    assert order == sampled(lattice, seed=1, epoch=2)
    others = [sampled(lattice, seed=seed, epoch=epoch) for seed, epoch in [(1, 0), (1, 3), (0, 2), (2, 1)]]
    assert all(order != other for other in others)


def test_blocks_and_the_windows_within_them_are_shuffled() -> None:
    lattice = Lattice((64, 64, 64), (8, 8, 8), (0, 0, 0), (4, 4, 4))
    parts = np.reshape(sampled(lattice), (8, 64))  # no block at a face lacks windows
    blocks, places = parts[:, 0] // 64, parts % 64
    assert sorted(blocks) != list(blocks)
    assert len({tuple(row) for row in places}) == 8
    assert all(sorted(row) == list(range(64)) != list(row) for row in places)


def test_an_order_is_drawn_as_it_is_used() -> None:
    sampler = ChunkSampler(unread(Lattice((6880,) * 3, (64,) * 3, (32,) * 3, (4,) * 3)))
    assert len(sampler) == 215**3
    tracemalloc.start()
    try:
        assert len(set(itertools.islice(sampler, 1000))) == 1000
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 215**3  # a tenth of one 64-bit number per window


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_is_refused(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside 0..{ranks - 1}"):
        ChunkSampler(unread(Lattice((4,) * 3, (4,) * 3, (0,) * 3, (1,) * 3)), rank=rank, ranks=ranks)


def examples() -> list[str]:
    """Return the code in the module's docstring: each indented part after "::"."""
    docstring = (
        ast.get_docstring(ast.parse(Path(volpipe.training.data.dataset.__file__).read_text(encoding="utf-8"))) or ""
    )
    codes: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if inside and line.strip() and not line.startswith(" " * 8):
            inside = False
        if inside:
            codes[-1] += f"{line}\n"
        elif line.endswith("::"):
            inside = True
            codes.append("")
    return [textwrap.dedent(code) for code in codes]


@pytest.mark.long
def test_the_examples_in_the_documentation_run(tmp_path: Path) -> None:
    training, reading = examples()
    cells = write_volume(tmp_path / "cells.n5", invented((64, 64, 96)))
    (tmp_path / "training.py").write_text(training, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "training.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    shapes = [f"{epoch} torch.Size([4, 1, 64, 64, 64])" for epoch in (0, 0, 0, 1, 1, 1)]
    assert ended.stdout.splitlines() == shapes  # 2 × 2 × 3 windows, 4 at a time

    stored(tmp_path, cells, "n5")
    names: dict[str, WindowDataset] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(reading, {"WindowDataset": WindowDataset}, names)
    assert len(names["dataset"]) > 0
