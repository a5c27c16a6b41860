"""Inference: the net's own numbers whatever the batch, threads that end, and failures that stay with their block."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import facts, planned

from volpipe.blockwise.usage import measured
from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Lattice, Slab
from volpipe.inference import runner as runner_module
from volpipe.inference.infer import infer
from volpipe.inference.intensity import Affine
from volpipe.inference.output import create_output
from volpipe.inference.plan import Plan
from volpipe.inference.reassemble import _outcome
from volpipe.inference.runner import Runner, largest_that_fits, load_runner, loaded_runner
from volpipe.inference.scratch import ScratchTensors
from volpipe.inference.selection import Selection
from volpipe.inference.statistics import affine
from volpipe.inference.windows import SlabsOf, StreamedWindows, Voxels, WindowSource, ahead, batches
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer
from volpipe.workflow.prepare import prepare


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Give back the settings of torch, and the net, that a runner leaves in its process."""
    enabled, deterministic = torch.backends.mkldnn.enabled, torch.backends.cudnn.deterministic
    yield
    torch.backends.mkldnn.enabled, torch.backends.cudnn.deterministic = enabled, deterministic
    runner_module._loaded.clear()


def windows(num: int, size: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (num, 1, size, size, size)).astype(np.float32)


IDENTITY = "net.name=identity"
ALLOWED = (
    "windows.placement=lattice",
    "windows.blend=crop",
    "net.accept_tile_variance=true",
)  # for a net that does not take what it would be looked at with
UNET = ("net.options={features=[4,6],seed=1}", "net.untrained=true")


def test_on_a_cpu_windows_go_one_by_one() -> None:
    assert Runner.load(planned(IDENTITY)).batch == 1
    assert Runner.load(planned(IDENTITY, "infer.batch=6")).batch == 6


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_worker_keeps_freed_memory_on_every_device(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    monkeypatch.setattr(runner_module, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.nn.Module, "to", lambda net, *arguments, **named: net)
    assert Runner.load(planned(IDENTITY, "infer.batch=1")).device == ("cuda" if has_gpu else "cpu")
    assert kept == [True]


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_batch_is_the_largest_power_of_two_that_fits(capacity: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= capacity

    powers = [2**i for i in range(10) if 2**i <= min(capacity, most)]
    assert largest_that_fits(fits, most) == powers[-1]
    assert max(tried) <= min(2 * capacity, most)  # what is far too large is never tried


def test_where_not_even_one_window_fits_the_sentence_says_so() -> None:
    with pytest.raises(MemoryError, match="not even one window fits the device; use a smaller"):
        largest_that_fits(lambda size: False, 64)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_what_comes_out_does_not_depend_on_the_batch(batch: int) -> None:
    runner = Runner.load(planned(IDENTITY, f"infer.batch={batch}"))
    data = windows(5)
    out = np.concatenate([runner(data[start : start + batch]) for start in range(0, 5, batch)])
    assert out.dtype == np.float32
    assert np.array_equal(out, data)


def test_the_net_sees_whole_batches_and_nobody_what_filled_them() -> None:
    plan = planned(IDENTITY, "infer.batch=4")
    seen: list[torch.Tensor] = []

    def net(data: torch.Tensor) -> torch.Tensor:
        seen.append(data.clone())
        return data + 1

    runner = Runner(plan, "cpu", 4, _net=net)
    data = windows(3)
    assert np.array_equal(runner(data), data + 1)
    assert np.array_equal(runner(windows(4)), windows(4) + 1)
    assert [tuple(batch.shape) for batch in seen] == [(4, 1, 8, 8, 8)] * 2
    assert not seen[0][3].any()
    assert runner.seconds > 0


def test_an_output_of_another_shape_than_declared_is_refused() -> None:
    runner = Runner.load(planned(IDENTITY, net=facts(out_channels=2)))
    with pytest.raises(ValueError, match=r"net net gave \(3, 1, 8, 8, 8\), declared is \(3, 2, 8, 8, 8\)"):
        runner(windows(3))
    runner = Runner.load(planned(IDENTITY, net=facts(scale=(2, 1, 1))))
    with pytest.raises(ValueError, match=r"gave \(1, 1, 8, 8, 8\), declared is \(1, 1, 16, 8, 8\)"):
        runner(windows(1))


def test_bfloat16_changes_a_little_and_gives_float32() -> None:
    plain = Runner.load(planned(*UNET))(windows(2))
    coarse = Runner.load(planned(*UNET, "infer.precision=bfloat16"))(windows(2))
    assert coarse.dtype == np.float32
    differences = np.abs(coarse - plain)
    assert 0 < differences.max() < 0.05 * np.abs(plain).max()


def test_channels_last_changes_the_layout_and_not_the_result() -> None:
    plain = Runner.load(planned(*UNET))(windows(2))
    runner = Runner.load(planned(*UNET, "infer.channels_last=true", "infer.batch=2"))
    assert isinstance(runner._net, torch.nn.Module)
    weights = [p for p in runner._net.parameters() if p.ndim == 5 and p.shape[1] > 1 and p.shape[2] > 1]
    assert all(p.is_contiguous(memory_format=torch.channels_last_3d) for p in weights)
    out = runner(windows(2))
    assert out.flags.c_contiguous
    np.testing.assert_allclose(out, plain, atol=1e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
def test_a_compiled_net_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain = Runner.load(planned(*UNET))(windows(1))
    compiled = Runner.load(planned(*UNET, "infer.compile=true"))(windows(1))
    np.testing.assert_allclose(compiled, plain, atol=1e-5)


def test_a_process_keeps_one_net_and_loads_it_once() -> None:
    assert loaded_runner() is None
    plan, other = planned(IDENTITY), planned(IDENTITY, "infer.batch=2")
    first = load_runner(plan)
    assert load_runner(planned(IDENTITY)) is first
    assert loaded_runner() is first
    assert load_runner(other) is not first
    assert loaded_runner() is load_runner(other)
    assert load_runner(plan) is not first


def test_a_task_counts_the_seconds_of_the_net_that_it_loads() -> None:
    with measured("infer") as before:
        pass
    assert (before.usage.device, before.usage.device_seconds) == ("", 0.0)
    with measured("infer") as meter:
        runner = load_runner(planned(IDENTITY))
        runner(windows(1))
    assert (meter.usage.device, meter.usage.device_seconds) == (runner.device_name, runner.seconds)
    assert runner.seconds > 0


# --- ahead


def producers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("volpipe-ahead")]


@given(st.lists(st.integers()), st.integers(1, 5))
def test_items_come_in_order(items: list[int], depth: int) -> None:
    assert list(ahead(items, depth)) == items
    assert producers() == []


def test_an_error_comes_after_what_was_made_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("three")

    found = []
    with pytest.raises(KeyError, match="three"):
        for item in ahead(items(), 1):
            found.append(item)
    assert found == [1, 2]
    assert producers() == []


def test_the_thread_stops_when_nobody_takes_any_more() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(10**9):
            made.append(i)
            yield i

    stream = ahead(items(), 3)
    assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
    deadline = time.monotonic() + 5
    while len(made) < 9 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 9  # five taken, three waiting, one in hand
    assert len(producers()) == 1
    stream.close()  # type: ignore[attr-defined]  # a generator
    assert producers() == []
    assert len(made) == 9


# --- batches


@dataclass
class Source(WindowSource):
    """Windows that hold their own number, but for those that cannot be read."""

    lattice: Lattice
    broken: frozenset[int] = frozenset()

    def begin(self, blocks: Sequence[int], slabs_of: SlabsOf) -> None:
        pass

    def close(self) -> None:
        pass

    def voxels(self, block: int, index: int, numbers: Sequence[int]) -> Voxels:
        if bad := self.broken & set(numbers):
            raise OSError(f"window {min(bad)} is damaged")
        data = np.array(numbers, np.float32)[:, None, None, None, None]
        return Voxels(data, tuple((i,) for i in range(len(numbers))))


def slabs_of(block: int) -> list[Slab]:
    """Return a block of LATTICE in a slab of its own."""
    box = LATTICE.input_box(block)
    return [Slab(tuple(LATTICE.windows_of(block)), box, box, box)]


LATTICE = Lattice((20, 20, 20), (4, 4, 4), (0, 0, 0), (2, 2, 2))  # 27 blocks, those at the far faces with fewer windows


@given(st.lists(st.integers(0, 26), min_size=1, unique=True), st.integers(1, 9))
def test_batches_hold_the_windows_of_one_block_each_and_none_is_forgotten(blocks: list[int], size: int) -> None:
    source = Source(LATTICE)
    found = list(batches(source, blocks, slabs_of, size))
    assert [n for batch in found for n in batch.numbers] == [n for block in blocks for n in LATTICE.windows_of(block)]
    for batch in found:
        assert batch.voxels is not None
        assert 0 < len(batch.numbers) <= size
        assert {number // 8 for number in batch.numbers} == {batch.block}
        assert [batch.voxels.data[place].item() for place in batch.voxels.places] == list(batch.numbers)


def test_a_block_that_cannot_be_read_yields_its_error_and_the_next_goes_on() -> None:
    source = Source(LATTICE, frozenset({3}))
    found = list(batches(source, [0, 1], slabs_of, 2))
    assert [(batch.block, batch.numbers, batch.voxels is None) for batch in found] == [
        (0, (0, 1), False), (0, (2, 3), True), *[(1, (8 + i, 9 + i), False) for i in range(0, 8, 2)],
    ]  # fmt: skip
    assert str(found[1].error) == "window 3 is damaged"


# --- infer


def laid_out(folder: Path, data: np.ndarray, *settings: str) -> tuple[Plan, StreamedWindows, Affine]:
    """Return a plan over `data` (z, y, x), stored in chunks of 8, whose output exists; and where its windows are."""
    create_array(folder / "in.n5", "raw", ArraySpec(data.shape, data.dtype, (8, 8, 8), codec="gzip"), "n5")
    open_writer(folder / "in.n5", "raw").write(Box.from_shape(data.shape), data)
    shape = ("windows.shape=[8,8,8]", "windows.block=[1,1,1]", "output.levels=0")
    plan = prepare(str(folder / "in.n5"), load_recipe(None, [*shape, *settings]), folder / "out.zarr", folder)
    create_output(plan, {})
    normalise = affine(plan.recipe.normalise, data.dtype, None)
    return plan, StreamedWindows(open_volume(folder / "in.n5", "raw"), plan.lattice, normalise), normalise


def noise(shape: tuple[int, int, int]) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 255, shape, np.uint8)


def test_blocks_with_damaged_chunks_fail_and_the_others_are_written(tmp_path: Path) -> None:
    data = noise((8, 16, 24))
    plan, source, normalise = laid_out(tmp_path, data, IDENTITY)
    (tmp_path / "in.n5" / "raw" / "1" / "0" / "0").write_bytes(b"rubbish")  # N5 counts x, y, z: block 1
    outcomes = list(infer(Selection(plan), normalise, ScratchTensors(plan, tmp_path), source, range(6)))
    assert sorted(block for block, _ in outcomes) == [0, 1, 2, 3, 4, 5]
    ((block, error),) = [(block, error) for block, error in outcomes if isinstance(error, Exception)]
    assert block == 1
    assert isinstance(error, VolumeError)
    assert str(tmp_path / "in.n5") in str(error)
    data[:, :8, 8:16] = 0
    assert np.array_equal(open_volume(plan.out).open()[...], data)
    assert producers() == []


def test_a_window_that_the_net_fails_on_costs_its_block_alone(tmp_path: Path) -> None:
    (tmp_path / "fussy.py").write_text(
        "import torch\n"
        "class Fussy(torch.nn.Module):\n"
        "    volpipe = dict(intensity='same')\n"
        "    def forward(self, x):\n"
        "        if x.max() > 0.999:\n"
        "            raise ArithmeticError('255 is too much')\n"
        "        return x * 1\n"
        "def fussy():\n"
        "    return Fussy()\n"
    )
    data = noise((8, 16, 32)) // 2
    data[0, 0, 9] = 255  # in the second window of block 0, and of none else
    plan, source, normalise = laid_out(tmp_path, data, "net.name=fussy.py:fussy", *ALLOWED, "windows.block=[1,2,2]")
    outcomes = list(infer(Selection(plan), normalise, ScratchTensors(plan, tmp_path), source, [0, 1]))
    assert [(block, repr(error) if isinstance(error, Exception) else "written") for block, error in outcomes] == [
        (0, "ArithmeticError('255 is too much')"),
        (1, "written"),
    ]
    data[:, :, :16] = 0
    assert np.array_equal(open_volume(plan.out).open()[...], data)


def test_a_chunk_that_blocks_share_is_fetched_once(tmp_path: Path) -> None:
    plan, source, _ = laid_out(tmp_path, noise((48, 48, 48)), IDENTITY, "windows.shape=[24,24,24]", "windows.overlap=8")
    stored = sum(
        path.stat().st_size
        for path in (tmp_path / "in.n5" / "raw").rglob("*")
        if path.is_file() and path.name.isdecimal()
    )
    before = bytes_fetched()
    blocks = range(len(plan.blocks))
    assert all(batch.error is None for batch in batches(source, blocks, Selection(plan).slabs, 1))
    assert bytes_fetched() - before == stored


def bytes_fetched() -> int:
    import tensorstore as ts

    name = "/tensorstore/kvstore/file/bytes_read"
    return sum(
        value["value"] for metric in ts.experimental_collect_matching_metrics(name) for value in metric["values"]
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such settings")
def test_memory_that_was_freed_is_used_again_without_page_faults() -> None:
    code = """
import resource, numpy as np
from volpipe.blockwise.malloc import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.ones(2**24, np.float32)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
default = faults()
keep_freed_memory()
np.ones(2**24, np.float32)
print(default, faults())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    default, kept = map(int, ended.stdout.split())
    assert kept < default / 4


def test_whoever_stops_listening_leaves_no_thread(tmp_path: Path) -> None:
    plan, source, normalise = laid_out(tmp_path, noise((8, 16, 64)), IDENTITY)
    stream = infer(Selection(plan), normalise, ScratchTensors(plan, tmp_path), source, range(16))
    assert next(stream)[0] == 0
    stream.close()  # type: ignore[attr-defined]  # a generator
    del stream
    assert producers() == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("volpipe-write")]


def test_what_could_not_be_written_keeps_no_frame_and_so_no_sum() -> None:
    task, error = Future[Any](), OSError("disk full")
    task.set_exception(error)
    assert _outcome(task) is error
    assert error.__traceback__ is None
