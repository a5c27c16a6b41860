"""The path on the device: what goes up and comes down, that a GPU is asked for nothing meanwhile, too little memory.

There is no GPU here. Bytes are counted where they would cross, on the CPU; that nothing else would is shown on torch's
device "meta", whose tensors have no values: torch refuses to read one, or to mix it with one that is elsewhere.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from command import wait_until
from hypothesis import given
from hypothesis import strategies as st
from plans import facts, planned, plans, volume
from volumes import noise, windowed, write_volume

from volpipe.errors import NetError
from volpipe.geometry.grid import Box
from volpipe.inference import runner as runner_module
from volpipe.inference.block_sum import BlockSum
from volpipe.inference.infer import block_sums, cut, infer
from volpipe.inference.intensity import Affine, ClippedVoxels, to_dtype
from volpipe.inference.output import create_output, finish
from volpipe.inference.plan import Plan
from volpipe.inference.runner import Bus, Runner, load_runner
from volpipe.inference.scratch import ScratchTensors
from volpipe.inference.selection import Selection
from volpipe.inference.windows import StreamedWindows, Voxels
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import open_volume
from volpipe.workflow.prepare import prepare

NORMALISE = Affine(127.5, 127.5)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Give back the settings of torch, and the net, that a runner leaves in its process."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, torch.backends.mkldnn.enabled
    yield
    cuda.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, torch.backends.mkldnn.enabled = before
    runner_module._loaded.clear()


# --- bytes


def laid_out(folder: Path, shape: tuple[int, int, int], *settings: str) -> Plan:
    """Return a plan over noise, uint8, whose output and tensors exist."""
    location = write_volume(folder / "in.n5", noise(shape))
    plan = prepare(str(location), load_recipe(None, ["output.levels=0", *settings]), folder / "out.zarr", folder)
    create_output(plan, {})
    ScratchTensors(plan, folder).create()
    return plan


def crossed(plan: Plan, folder: Path) -> tuple[int, int]:
    """Return the bytes that go up and come down in a run of `plan`, block after block."""
    source = StreamedWindows(plan.source.volume(), plan.lattice, NORMALISE)
    blocks = [block for block in range(len(plan.blocks)) if not plan.sum_box(block).is_empty]
    outcomes = list(infer(Selection(plan), NORMALISE, ScratchTensors(plan, folder), source, blocks))
    assert not [outcome for _, outcome in outcomes if isinstance(outcome, Exception)]
    bus = load_runner(plan).bus
    return bus.up_bytes, bus.down_bytes


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        # The default recipe's, about, where windows of 84 have a core of 64, two along each axis of a block.
        (windowed((18, 20, 22), (2, 4, 6), (2, 2, 2), "crop"), 1.6),
        # Those of hann over 512³: windows of 64 that overlap by half, eight along each axis of a block.
        (windowed((8, 8, 8), (4, 4, 4), (8, 8, 8), "hann"), 2.5),
    ],
    ids=["crop", "hann"],
)
def test_little_more_crosses_the_bus_than_is_read_and_written(
    tmp_path: Path, settings: tuple[str, ...], most: float
) -> None:
    plan = laid_out(tmp_path, (64, 64, 64), "net.name=shift", *settings)
    up, down = crossed(plan, tmp_path)
    least = 2 * 64**3  # each voxel up, and each down, a byte
    assert least < up + down <= most * least


def test_with_crop_all_that_comes_down_is_the_output(tmp_path: Path) -> None:
    plan = laid_out(tmp_path, (24, 16, 16), "net.name=shift", *windowed((6, 8, 10), (2, 4, 6), (2, 2, 2), "crop"))
    boxes = [plan.lattice.input_box(block).num_voxels for block in range(len(plan.blocks))]
    up, down = crossed(plan, tmp_path)
    asked = 9 * len(boxes) if load_runner(plan).bus.is_gpu else 0  # whether a block is finite, and voxels clipped
    assert (up, down) == (sum(boxes), 24 * 16 * 16 + asked)


def test_two_blocks_of_voxels_are_on_the_device_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = laid_out(tmp_path, (8, 8, 96), "net.name=identity", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))
    source, asked = StreamedWindows(plan.source.volume(), plan.lattice, NORMALISE), list[int]()
    plain = source.voxels
    monkeypatch.setattr(source, "voxels", lambda block, *slab: (asked.append(block), plain(block, *slab))[1])
    for block, _ in block_sums(Selection(plan), NORMALISE, load_runner(plan), source, range(12)):
        wait_until(lambda: max(asked) >= min(block + 1, 11), 20)  # noqa: B023
        time.sleep(0.02)  # for whoever reads further ahead
        assert max(asked) == min(block + 1, 11)


# --- no value of the device is asked for


class FakeBus(Bus):
    """A bus to a device that has no values, and computes on its own."""

    def __init__(self) -> None:
        self.device, self.up_bytes, self.down_bytes = "meta", 0, 0
        self._upward = self._downward = None

    def up(self, array: np.ndarray) -> torch.Tensor:
        self.up_bytes += array.nbytes
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device="meta")

    def mark(self) -> None:
        return None


@pytest.mark.parametrize("blend", ["crop", "hann"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_while_a_sum_grows_the_gpu_is_asked_for_no_value(blend: str, dtype: str) -> None:
    division = windowed((8, 8, 8), (4, 4, 4), (2, 2, 2), blend)
    plan = planned(*division, f"output.dtype={dtype}", "input.roi=1:16,:,:", of=volume((16, 16, 16)))
    bus = FakeBus()
    kernel = torch.empty((1, 1, 3, 3, 3), device="meta")
    net = functools.partial(torch.nn.functional.conv3d, weight=kernel, padding=1)
    runner = Runner(plan, "cpu", 4, _net=net)  # a GPU's autocast and clock would need one
    growing = BlockSum(Selection(plan), NORMALISE, 0, Selection(plan).slabs(0)[0], bus)
    numbers = plan.lattice.windows_of(0)
    box = plan.lattice.input_box(0)
    data = bus.up(np.zeros((1, *box.shape), np.uint8))
    places = tuple((slice(None), *plan.lattice.window_box(n).relative_to(box.start).slices) for n in numbers)
    windows = cut(Voxels(np.zeros(0), places, NORMALISE), data, as_stored=False)
    for number, out in zip(numbers, runner.run(windows), strict=True):
        assert out.device.type == "meta"
        growing.add(number, out)
    finished = growing._total if growing.is_finished else finish(plan, NORMALISE, growing._total, ClippedVoxels())
    assert (finished.device.type, finished.dtype) == ("meta", getattr(torch, dtype))
    assert bus.down_bytes == 0


def test_a_value_of_such_a_gpu_cannot_be_asked_for() -> None:
    """Else the test above would hold for any code."""
    value = torch.ones((), device="meta")
    with pytest.raises(Exception, match="meta"):
        bool(value > 0)
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(3, device="meta") + torch.ones(3)


# --- the same bits from numpy and torch


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    st.sampled_from(["uint8", "uint16", "int16", "uint32", "int32", "float32"]),
    st.sampled_from([Affine(), NORMALISE, Affine(31000.25, 977.125), Affine(-3.7, 0.02)]),
)
def test_arrays_and_tensors_have_the_same_bits(values: list[float], dtype: str, affine: Affine) -> None:
    array = np.array(values, np.float32)
    tensor, tallies = torch.from_numpy(array.copy()), (ClippedVoxels(), ClippedVoxels())
    expected = to_dtype(affine.invert(array), np.dtype(dtype), tallies[0])
    result = to_dtype(affine.invert(tensor), np.dtype(dtype), tallies[1]).numpy()
    assert result.tobytes() == expected.tobytes()
    assert tallies[0].clipped == tallies[1].clipped
    affine.normalise(tensor)
    assert tensor.numpy().tobytes() == affine.apply(array).tobytes()


# --- voxels that one block alone adds to


@given(plans())
def test_no_other_block_adds_to_the_voxels_that_are_a_blocks_own(plan: Plan) -> None:
    reached = np.zeros(plan.out_shape, np.int64)
    for block in range(len(plan.blocks)):
        reached[plan.sum_box(block).slices] += 1
    for block in range(len(plan.blocks)):
        sole = plan.sole_box(block)
        assert plan.sum_box(block).contains(sole)
        assert (reached[sole.slices] == 1).all()


def test_most_of_a_large_block_is_its_own() -> None:
    plan = planned(*windowed((8, 8, 8), (4, 4, 4), (8, 8, 8), "hann"), of=volume((96, 96, 96)), net=facts())
    middle = plan.blocks.number((1, 1, 1))
    # The core is 32:64; sums of the block before reach 6 voxels into it, and its own as far into the next.
    assert plan.sole_box(middle) == Box((38,) * 3, (66,) * 3)


@given(st.data())
def test_a_box_without_another_is_the_rest_of_it_once(data: st.DataObject) -> None:
    sides = [sorted(data.draw(st.tuples(*[st.integers(0, 6)] * 4))) for _ in range(3)]
    whole = Box(tuple(s[0] for s in sides), tuple(s[3] for s in sides))
    hole = Box(tuple(s[1] for s in sides), tuple(s[2] for s in sides))
    count = np.zeros((6, 6, 6), np.int64)
    for box in (hole, *whole.without(hole)):
        count[box.slices] += 1
    expected = np.zeros_like(count)
    expected[whole.slices] = 1
    assert np.array_equal(count, expected)


# --- too little memory


def hungry(most: int, seen: list[int]) -> torch.nn.Module:
    """Return a net that adds 1, and takes no more windows at once than `most`."""

    class Hungry(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            if len(x) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return x + 1

    return Hungry()


def test_a_batch_that_is_too_much_is_halved_and_stays_so(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    runner = Runner(planned("infer.batch=8"), "cpu", 8, _net=hungry(2, seen))
    windows = np.random.default_rng(0).normal(0, 1, (7, 1, 4, 4, 4)).astype(np.float32)
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(runner(windows), windows + 1)
    assert seen == [8, 4, 2, 2, 2, 2]
    assert runner.batch == 2
    assert "8 windows of [40, 40, 40] need more memory than cpu has" in caplog.text
    runner(windows[:2])
    assert seen[6:] == [2]


def test_one_window_that_is_too_much_is_told_with_the_way_out() -> None:
    runner = Runner(planned("infer.batch=2"), "cpu", 2, _net=hungry(0, []))
    with pytest.raises(torch.OutOfMemoryError):
        runner(np.zeros((2, 1, 4, 4, 4), np.float32))
    assert runner.batch == 1
    assert "needs more memory than cpu has" in str(runner.explain(torch.OutOfMemoryError()))


def test_threads_that_fail_together_never_ask_for_no_window() -> None:
    runner = Runner(planned("infer.batch=2"), "cpu", 2, _net=hungry(1, []))
    threads = [threading.Thread(target=runner._halve, args=(2,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runner.batch == 1


# --- whole numbers, and TF32


def seeing(seen: list[torch.dtype], *, cast: bool = False) -> torch.nn.Module:
    class Seeing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            return x.float() if cast else x.clone()

    return Seeing()


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ((), torch.uint8),
        (("windows.blend=hann",), torch.float32),
        (("output.dtype=uint16",), torch.float32),
        (("output.intensity=raw", "output.dtype=uint8"), torch.float32),
        (("infer.augment=flips",), torch.float32),
        (("tensors.mode=stored",), torch.float32),
    ],
)
def test_a_net_of_integers_gets_them_where_nothing_else_is_done(settings: tuple[str, ...], dtype: torch.dtype) -> None:
    plan = planned(*windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"), *settings, of=volume((8, 8, 8)),
                   net=facts(integers=True))  # fmt: skip
    assert plan.is_as_stored == (dtype == torch.uint8)
    assert not planned(*settings, of=volume((8, 8, 8))).is_as_stored


def test_whole_numbers_go_through_a_net_many_small_windows_at_a_time() -> None:
    settings = ("net.name=identity", *windowed((8, 8, 8), (0, 0, 0), (4, 4, 4), "crop"))
    assert Runner.load(planned(*settings, of=volume((32, 32, 32)), net=facts(integers=True)), "cpu").batch == 64
    assert Runner.load(planned(*settings, of=volume((32, 32, 32))), "cpu").batch == 1
    large = ("net.name=identity", *windowed((64, 64, 128), (0, 0, 0), (1, 1, 1), "crop"))
    assert Runner.load(planned(*large, of=volume((128, 128, 128)), net=facts(integers=True)), "cpu").batch == 4


@pytest.mark.parametrize("num", [1, 3])
def test_batches_of_whole_numbers_are_not_filled_up(num: int) -> None:
    seen: list[tuple[int, ...]] = []
    plan = planned(
        *windowed((8, 8, 8), (0, 0, 0), (2, 2, 2), "crop"), of=volume((16, 16, 16)), net=facts(integers=True)
    )
    runner = Runner(plan, "cpu", 4, _net=lambda x: (seen.append(tuple(x.shape)), x.clone())[1])
    windows = torch.arange(num * 512, dtype=torch.uint8).reshape(num, 1, 8, 8, 8)
    assert torch.equal(runner.run(windows), windows)
    assert seen == [(num, 1, 8, 8, 8)]


def test_large_labels_go_through_a_net_of_integers(tmp_path: Path) -> None:
    data = noise((8, 8, 16)).astype(np.int32) + 2**30
    location = write_volume(tmp_path / "in.n5", data)
    recipe = load_recipe(None, ["net.name=identity", "normalise.method=none", "output.dtype=int32", "output.levels=0"])
    plan = prepare(str(location), recipe, tmp_path / "out.zarr", tmp_path)
    create_output(plan, {})
    crossed(plan, tmp_path)
    assert np.array_equal(open_volume(plan.out).open()[...], data)


def test_a_net_that_only_says_that_it_keeps_integers_is_refused(tmp_path: Path) -> None:
    write_volume(tmp_path / "in.n5", noise((8, 8, 8)))
    source = open_volume(tmp_path / "in.n5", "raw")
    plan = planned(of=source, net=facts(integers=True))
    seen: list[torch.dtype] = []
    runner = Runner(plan, "cpu", 1, _net=seeing(seen, cast=True))
    windows = StreamedWindows(source, plan.lattice, NORMALISE)
    ((_, error),) = block_sums(Selection(plan), NORMALISE, runner, windows, [0])
    assert isinstance(error, NetError)
    assert "net net declares integers, and gave torch.float32 for torch.uint8" in str(error)
    assert seen == [torch.uint8]


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_tf32_is_on_where_the_recipe_says_so_and_only_there(precision: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "tf32"
    runner = Runner.load(planned("net.name=identity", f"infer.precision={precision}"))
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == (precision == "tf32")
    windows = np.random.default_rng(0).normal(0, 1, (1, 1, 4, 4, 4)).astype(np.float32)
    assert np.array_equal(runner(windows), windows)
