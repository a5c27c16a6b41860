"""Blocks that are computed slab by slab: the same bytes as at once, chunks read once, and little in memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from inline import Inline, Stopped
from slabs import NORMALISE, planned, slabs_of, source_of
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.blockwise.notes import Reporter
from volpipe.estimation.memory import cuda_bytes, memory_bytes
from volpipe.geometry import block_shape
from volpipe.geometry.blend import FAMILIES
from volpipe.geometry.grid import Box, Triple
from volpipe.inference.infer import infer
from volpipe.inference.output import create_output, write_voxels
from volpipe.inference.plan import Plan
from volpipe.inference.runner import load_runner
from volpipe.inference.scratch import ScratchTensors
from volpipe.inference.selection import Selection
from volpipe.inference.windows import read_fingerprint
from volpipe.runs import worker
from volpipe.runs.options import RunOptions
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.verify import recompute
from volpipe.runs.worker import Job
from volpipe.volumes.rolling_box import RollingBox
from volpipe.volumes.storage.paths import partial_of
from volpipe.volumes.volume import ArraySpec, Reader, create_array, open_volume
from volpipe.workflow.work_plan import execute


def at_corner(plan: Plan) -> Plan:
    """Return `plan` with blocks that begin at the corner of its region, as those that a plan chooses do."""
    return plan.changed(corner=plan.roi[0])


def levels_of(plan: Plan) -> list[str]:
    """Return a hash of each level of the output."""
    return [fingerprint(Path(plan.out) / f"s{level}") for level in range(len(plan.factors))]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[str]]:
    """A volume's shape, and a recipe whose blocks have several layers of windows, of which some may be empty."""
    shape = tuple(draw(st.integers(1, 40)) for _ in range(3))
    overlap = tuple(2 * draw(st.integers(0, 2)) for _ in range(3))
    window = tuple(o + draw(st.integers(2, 8)) for o in overlap)
    settings = windowed(window, overlap, (draw(st.integers(3, 8)), 2, 3), draw(st.sampled_from(FAMILIES)))
    scale = [draw(st.integers(1, 2)) for _ in range(3)]
    settings += ["net.name=upsample", f"net.options.scale={scale}", "output.levels=1"]
    settings += draw(st.sampled_from([[], ["input.empty=0"], ["output.dtype=float32"], ["input.mask=mask.n5/raw"]]))
    if "input.mask" not in settings[-1] and draw(st.booleans()):  # else nothing might be left
        starts = [draw(st.integers(0, n - 1)) for n in shape]
        sides = ((a, draw(st.integers(a + 1, n))) for a, n in zip(starts, shape, strict=True))
        settings.append("input.roi=" + ",".join(f"{a}:{b}" for a, b in sides))
    return shape, settings


@examples(8, 200)
@given(cases(), st.integers(0, 9), st.booleans())
def test_slabs_make_the_bytes_of_whole_blocks(
    drawn: tuple[tuple[int, ...], list[str]], seed: int, is_at_corner: bool
) -> None:
    """Whatever the order of work: shards are finished by their last block, or by a task that adds them up."""
    shape, settings = drawn
    data = noise(shape)
    data[len(data) // 3 : len(data) // 3 * 2] = 0  # nothing is selected there where input.empty is 0
    with tempfile.TemporaryDirectory() as name:
        folder, hashes = Path(name), []
        volume, mask = write_volume(folder / "in.n5", data), np.zeros(shape, np.uint8)
        mask[tuple(n // 2 for n in shape)] = mask[:1, -1:] = 1
        write_volume(folder / "mask.n5", mask)
        for voxels in (1, block_shape.SLAB_VOXELS):
            with slabs_of(voxels):
                plan = planned(folder, volume, f"{voxels}.zarr", *settings)
                plan = at_corner(plan) if is_at_corner else plan
                assert execute(plan, Inline(seed, slots=1 + seed % 3).start).missing == []
                hashes.append(levels_of(plan))
        assert hashes[0] == hashes[1]


@pytest.mark.long
@pytest.mark.parametrize("blend", ["crop", "hann"])
@pytest.mark.parametrize("roi", ["5:62,11:47,3:64", "8:64,16:48,:"], ids=["anywhere", "at a window"])
def test_a_region_of_large_blocks_is_the_crop_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blend: str, roi: str
) -> None:
    """Blocks of both runs are as a plan chooses them, for two workers and sizes a sixteenth as long as they are."""
    smaller = {"BLOCK_TARGET": 8, "LARGEST_TARGET": 16, "CHUNK_TARGET": 4, "USUAL_WORKERS": 2}
    for name, value in smaller.items():
        monkeypatch.setattr(block_shape, name, value)
    volume = write_volume(tmp_path / "in.n5", noise((64, 48, 64)))
    settings = [
        "net.name=shift", f"windows.blend={blend}", "windows.shape=[14,14,14]", "windows.overlap=6", "output.levels=0",
        "output.chunk=[8,8,8]",
    ]  # fmt: skip
    with slabs_of(1):
        whole = planned(tmp_path, volume, "whole.zarr", *settings)
        part = planned(tmp_path, volume, "part.zarr", *settings, f"input.roi={roi}")
        small = planned(tmp_path, volume, "small.zarr", *settings, f"input.roi={roi}", "windows.block=[2,2,2]")
        for seed, plan in enumerate((whole, part, small)):
            assert execute(plan, Inline(seed, slots=2).start).missing == []
        assert part.has_slabs and part.corner == part.roi[0]
        assert len(list(Path(part.out).glob("s0/c/*/*/*"))) == len(part.shards()) < len(small.shards())
    crop = open_volume(whole.out, level=0).open()[part.roi_box.slices]
    assert np.array_equal(open_volume(part.out, level=0).open()[...], crop)
    assert np.array_equal(open_volume(small.out, level=0).open()[...], crop)


def laid_out(folder: Path, shape: tuple[int, int, int], *settings: str) -> Plan:
    """Return a plan over noise, uint8, whose output exists."""
    plan = planned(folder, write_volume(folder / "in.n5", noise(shape)), "out.zarr", "output.levels=0", *settings)
    create_output(plan, {})
    return plan


def one_block(blend: str) -> list[str]:
    return ["net.name=shift", "output.chunk=[16,16,16]", *windowed((12, 20, 22), (4, 4, 6), (12, 3, 3), blend)]


ONE_BLOCK = one_block("crop")


@pytest.mark.parametrize(("blend", "num_slabs"), [("crop", 6), ("hann", 12)])
def test_every_voxel_of_a_block_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blend: str, num_slabs: int
) -> None:
    seen, plain = Counter[int](), Reader.read

    def read(reader: Reader, box: Box, **named: int | None) -> np.ndarray:
        seen.update(range(box.start[0] // 16, -(-box.stop[0] // 16)))  # chunks along z
        return plain(reader, box, **named)

    with slabs_of(1):
        plan = laid_out(tmp_path, (96, 48, 48), *one_block(blend))
        assert len(plan.blocks) == 1
        assert len(Selection(plan).slabs(0)) == num_slabs
        monkeypatch.setattr(Reader, "read", read)
        outcomes = list(infer(Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), [0]))
    assert [block for block, outcome in outcomes if not isinstance(outcome, Exception)] == [0]
    assert seen == dict.fromkeys(range(6), 1)


def test_the_fingerprint_of_a_block_is_that_of_its_voxels(tmp_path: Path) -> None:
    with slabs_of(1):
        plan = laid_out(tmp_path, (96, 48, 48), *ONE_BLOCK)
        selection = Selection(plan)

        def looked() -> str:
            return read_fingerprint(plan.source.volume().open(), selection.slabs(0))

        ((_, result),) = infer(selection, NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), [0])
        assert not isinstance(result, Exception)
        assert result.fingerprint == looked()
        data = noise((96, 48, 48))
        data[95, 47, 47] ^= 1
        write_volume(tmp_path / "other.n5", data)
        (tmp_path / "in.n5/raw/2/2/5").write_bytes((tmp_path / "other.n5/raw/2/2/5").read_bytes())
        assert result.fingerprint != looked()


def test_a_block_whose_input_changes_meanwhile_fails_and_leaves_nothing(tmp_path: Path) -> None:
    with slabs_of(1):
        plan = laid_out(tmp_path, (96, 48, 48), *ONE_BLOCK)
        source, windows = source_of(plan), list[int]()

        class Toucher(Reporter):
            def add(self, num_windows: int) -> None:
                windows.append(num_windows)
                (tmp_path / "in.n5/raw/0/0/0").touch()

        ((_, error),) = infer(Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source, [0], Toucher())
    assert "changed while its voxels" in str(error)
    assert len(windows) > 2
    assert not [path for path in (tmp_path / "out.zarr/s0").rglob("*") if path.is_file() and path.name != "zarr.json"]


SPOIL = (
    "import torch\n"
    "class Spoil(torch.nn.Module):\n"
    "    volpipe = dict(scale=(1, 1, 1), stride=(1, 1, 1), halo=(0, 0, 0))\n"
    "    def forward(self, x):\n"
    "        return torch.where(x > 0.9, float('nan'), x)\n"
    "def spoil():\n"
    "    return Spoil()\n"
)
SPOILED = (
    "net.name=spoil.py:spoil",
    "net.accept_tile_variance=true",
    "windows.placement=lattice",
    "windows.blend=crop",
    "net.intensity=same",
    "output.chunk=[16,16,16]",
)


def test_a_voxel_that_is_nan_in_two_slabs_counts_once(tmp_path: Path) -> None:
    (tmp_path / "spoil.py").write_text(SPOIL)
    data = np.full((96, 16, 16), 100, np.uint8)
    data[::5, 3, 4] = 250
    volume, bad = write_volume(tmp_path / "in.n5", data), []
    division = windowed((16, 16, 16), (8, 8, 8), (12, 2, 2), "hann")
    for voxels in (1, block_shape.SLAB_VOXELS):
        with slabs_of(voxels):
            plan = planned(
                tmp_path, volume, f"{voxels}.zarr", *SPOILED, *division, "output.levels=0", "infer.nonfinite=keep",
                "output.dtype=float32",
            )  # fmt: skip
            create_output(plan, {})
            assert plan.has_slabs == (voxels == 1)
            ((_, result),) = infer(Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), [0])
            assert not isinstance(result, Exception)
            bad.append((result.bad.nan, result.bad.infinite))
    assert bad == [(20, 0)] * 2


def test_a_block_with_nan_fails_at_once_and_the_next_is_computed(tmp_path: Path) -> None:
    """Its first slab is refused: what is left of the block is not computed to its end."""
    (tmp_path / "spoil.py").write_text(SPOIL)
    data = np.full((96, 16, 32), 100, np.uint8)
    data[20, 5, 5] = 250
    volume = write_volume(tmp_path / "in.n5", data)
    with slabs_of(1):
        plan = planned(
            tmp_path, volume, "out.zarr", *SPOILED, "output.levels=0",
            *windowed((16, 16, 16), (0, 0, 0), (6, 1, 1), "crop"),
        )  # fmt: skip
        create_output(plan, {})
        (_, error), (second, result) = infer(
            Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), [0, 1]
        )
    assert "1 NaN" in str(error)
    assert second == 1
    assert not isinstance(result, Exception)
    files = [path for path in (tmp_path / "out.zarr/s0").rglob("*") if path.is_file() and path.name != "zarr.json"]
    assert [path.name for path in files] == ["1"]
    assert (open_volume(tmp_path / "out.zarr", level=0).open()[:, :, 16:] == 100).all()


@given(st.integers(1, 60), st.integers(1, 7), st.data())
@examples(25, 100)
def test_rolling_boxes_are_the_boxes(size: int, chunk: int, data: st.DataObject) -> None:
    voxels = noise((size, 3, 4))
    starts = sorted(data.draw(st.lists(st.integers(-size, 2 * size), min_size=1, max_size=5)))
    lengths = [data.draw(st.integers(1, 30)) for _ in starts]
    stops = np.maximum.accumulate([start + length for start, length in zip(starts, lengths, strict=True)]).tolist()
    boxes = [Box((start, -1, 0), (stop, 3, 4)) for start, stop in zip(starts, stops, strict=True)]
    with tempfile.TemporaryDirectory() as name:
        reader = open_volume(write_volume(Path(name) / "in.n5", voxels, chunk)).open()
        rolling = RollingBox(reader, boxes)
        for index, box in enumerate(boxes):
            assert np.array_equal(rolling.read(index), reader.read_mirrored(box))


def several_blocks(blend: str, net: str = "shift") -> list[str]:
    return [f"net.name={net}", "output.chunk=[16,16,16]", *windowed((12, 20, 22), (4, 4, 6), (4, 1, 2), blend)]


@pytest.mark.long
@pytest.mark.parametrize(("blend", "num_slabs"), [("crop", 2), ("hann", 5)])
@pytest.mark.parametrize("most_tasks", [2, pytest.param(4, marks=pytest.mark.long), 7])
@pytest.mark.parametrize("start", [0, 5])
def test_an_interrupted_run_ends_with_the_same_bytes(
    tmp_path: Path, blend: str, num_slabs: int, most_tasks: int, start: int
) -> None:
    roi = f"input.roi={start}:96,{start}:48,:"
    volume = write_volume(tmp_path / "in.n5", noise((96, 48, 48)))
    with slabs_of(1):
        whole, stopped = (
            at_corner(planned(tmp_path, volume, f"{name}.zarr", *several_blocks(blend), roi)) for name in ("a", "b")
        )
        if not start:
            assert len(Selection(whole).slabs(0)) == num_slabs
        execute(whole, Inline().start)
        with pytest.raises(Stopped):
            execute(stopped, Inline(most_tasks=most_tasks).start)
        assert execute(stopped, Inline(seed=1, slots=2).start).missing == []
    assert levels_of(whole) == levels_of(stopped)


def job_of(plan: Plan, folder: Path) -> Job:
    """Return a job over `plan`, whose output exists."""
    RunFolder(folder / "run").path.mkdir()
    RunFolder(folder / "run").store(plan)
    job = Job(str(folder / "run"), plan.identity)
    job.tensors.create()
    return job


MEASURED = """
import sys
from volpipe.runs import worker
from volpipe.runs.worker import Job
job = Job(*sys.argv[1:3], shift=1.0)  # else sums of an empty volume are zeros, which are not stored
assert worker.infer(job, [int(sys.argv[3])]).failed == ()
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize(
    ("overlap", "blend", "roi"),
    [pytest.param(32, "hann", ":,:,:", marks=pytest.mark.long), (0, "crop", "5:,:,7:")],
    ids=["blended", "in a region"],
)
def test_a_worker_takes_no_more_for_a_long_block_of_sums_than_planned(
    tmp_path: Path, overlap: int, blend: str, roi: str
) -> None:
    """A block whose earlier neighbour is not done, so that its whole sum goes to scratch; that alone is 0.3 GiB."""
    spec = ArraySpec((832, 320, 768), np.dtype("uint8"), (64, 64, 64), codec="gzip")
    create_array(tmp_path / "in.n5", "raw", spec, "n5")
    stride = 64 - overlap
    division = windowed((64, 64, 64), (overlap,) * 3, (832 // stride, 320 // stride, 384 // stride), blend)
    wider = "output.dtype=uint16"  # else voxels would go through as they are stored, and be no sums of float32
    chosen = ["net.name=identity", "output.levels=0", wider, f"input.roi={roi}", *division]
    plan = at_corner(planned(tmp_path, tmp_path / "in.n5", "out.zarr", *chosen))
    create_output(plan, {})
    job = job_of(plan, tmp_path)
    block = max(n for n in range(len(plan.blocks)) if not plan.sum_box(n).is_empty)
    assert plan.sum_box(block).num_voxels * 4 > 300 << 20
    peak = peak_of(job, block)
    assert job.tensors.sum_file(block, 0).stat().st_size > 0
    assert peak < memory_bytes(plan, None) < (800 << 20) + cuda_bytes()


def peak_of(job: Job, block: int) -> int:
    """Return the highest memory of a worker that infers `block`, in bytes."""
    command = [sys.executable, "-c", MEASURED, job.folder, job.identity, str(block)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024


# Nets that take next to no memory of their own: what a plan knows of a worker is the rest.
LIGHT = """
import torch
class Valid(torch.nn.Module):
    volpipe = dict(
        stride=(8, 8, 8), halo=(61, 61, 61), margin=(61, 61, 61), remainder=(2, 2, 2),
        scale=(1, 1, 1), out_channels=1
    )
    def forward(self, x):
        return x[..., 61:-61, 61:-61, 61:-61]
class Slices(torch.nn.Module):
    volpipe = dict(slices=True, stride=(8, 8), halo=(0, 16, 16), scale=(1, 1), out_channels=1)
    def forward(self, x):
        return x * 0.5
"""
VALID, SLICES = ["net.name=light.py:Valid"], ["net.name=light.py:Slices"]
EDGE = ["net.name=identity", "windows.placement=edge", "windows.blend=gaussian"]


@pytest.mark.parametrize(
    ("chosen", "window", "overlap", "count"),
    [
        pytest.param(VALID, (178, 178, 178), (122, 122, 122), 3, marks=pytest.mark.long),
        (SLICES, (64, 256, 256), (0, 32, 32), 1),
        pytest.param(EDGE, (160, 160, 160), (80, 80, 80), 2, marks=pytest.mark.long),
    ],
    ids=["valid", "slices", "edge"],
)
def test_a_worker_takes_no_more_for_a_net_of_any_kind_than_planned(
    tmp_path: Path, chosen: list[str], window: Triple, overlap: Triple, count: int
) -> None:
    (tmp_path / "light.py").write_text(LIGHT)
    create_array(tmp_path / "in.n5", "raw", ArraySpec((400, 400, 400), np.dtype("uint8"), (64, 64, 64)), "n5")
    division = [f"windows.shape={list(window)}", f"windows.overlap={list(overlap)}", f"windows.block={[count] * 3}"]
    plan = planned(tmp_path, tmp_path / "in.n5", "out.zarr", *chosen, *division, "output.levels=0")
    create_output(plan, {})
    peak = peak_of(job_of(plan, tmp_path), 0)
    assert peak < memory_bytes(plan, None) < 2 * peak


@pytest.mark.parametrize("is_ascending", [True, False])
def test_a_blended_block_finishes_its_shard_where_its_neighbours_are_done(tmp_path: Path, is_ascending: bool) -> None:
    """Else its sum goes to scratch, layer by layer, and is added up by another task, the same way."""
    data = noise((96, 48, 48))
    with slabs_of(1):
        plan = laid_out(tmp_path, data.shape, *several_blocks("hann", "identity"))
        job = job_of(plan, tmp_path)
        blocks = [block for block in range(len(plan.blocks)) if not plan.sum_box(block).is_empty]
        assert len(Selection(plan).slabs(blocks[-1])) > 2
        shared, closed = {shard for shard in range(len(plan.shards())) if not plan.is_direct(shard)}, set[int]()
        for block in blocks if is_ascending else blocks[::-1]:
            record = worker.infer(job, [block])
            assert record.result is not None and record.failed == ()
            closed |= set(record.result.shared)
        assert closed == (shared if is_ascending else set())
        assert worker.reassemble(job, sorted(shared - closed)).failed == ()
    assert np.array_equal(open_volume(plan.out, level=0).open()[...], data)


def test_what_a_killed_writer_left_of_a_sum_is_deleted(tmp_path: Path) -> None:
    with slabs_of(1):
        plan = laid_out(tmp_path, (96, 48, 48), *several_blocks("hann"))
        job = job_of(plan, tmp_path)
        assert worker.infer(job, [0]).failed == ()
    whole = list(job.tensors.sums_path.rglob("c/*/0/0/0/0"))
    left = [partial_of(file) for file in whole]
    for file in left:
        file.write_bytes(b"begun")
    done = np.zeros(len(plan.blocks), bool)
    done[0] = True
    job.tensors.forget_sums(done)
    assert all(file.exists() for file in whole)
    job.tensors.forget_sums(~done)
    assert not any(file.exists() for file in (*whole, *left))


def test_an_update_computes_the_blocks_that_saw_what_has_changed(tmp_path: Path) -> None:
    data = noise((96, 48, 48))
    volume = write_volume(tmp_path / "in.n5", data)
    with slabs_of(1):
        plan = planned(tmp_path, volume, "out.zarr", *several_blocks("crop"))
        execute(plan, Inline().start)
        data[40, 2, 5] ^= 255  # in the middle of a block, which is the second along z
        write_volume(tmp_path / "other.n5", data)
        changed = "in.n5/raw/0/0/2"
        (tmp_path / changed).write_bytes((tmp_path / "other.n5/raw/0/0/2").read_bytes())
        report = execute(plan, Inline().start, RunOptions(update=True))
        assert [update.changed for update in report.updates] == [1]
        fresh = planned(tmp_path, volume, "fresh.zarr", *several_blocks("crop"))
        execute(fresh, Inline().start)
    assert levels_of(plan) == levels_of(fresh)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
@pytest.mark.parametrize(("blend", "roi"), [("hann", ":,:,:"), ("hann", "5:,3:,7:45"), ("crop", "5:,3:,7:45")])
def test_verify_computes_a_layer_of_a_block_of_sums(tmp_path: Path, seed: int, blend: str, roi: str) -> None:
    with slabs_of(1):
        volume = write_volume(tmp_path / "in.n5", noise((96, 48, 48)))
        plan = at_corner(planned(tmp_path, volume, "out.zarr", *several_blocks(blend), f"input.roi={roi}"))
        assert execute(plan, Inline().start).missing == []
        found = list(recompute(Selection(plan), NORMALISE, load_runner(plan), 3, seed))
        assert [one.num_differ for one in found] == [0, 0, 0]
        assert all(one.box.shape[0] <= 8 for one in found)  # a layer of windows
        stored = open_volume(plan.out, level=0).open()[...]
        stored[found[1].box.start] ^= 1
        write_voxels(plan, 0, Box.from_shape(stored.shape), stored[None])
        assert [one.num_differ for one in recompute(Selection(plan), NORMALISE, load_runner(plan), 3, seed)] == [
            0,
            1,
            0,
        ]


def test_verify_computes_a_slab_of_a_block_and_finds_a_voxel_that_differs(tmp_path: Path) -> None:
    with slabs_of(1):
        plan = laid_out(tmp_path, (96, 48, 48), *ONE_BLOCK)
        list(infer(Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), [0]))
        (found,) = recompute(Selection(plan), NORMALISE, load_runner(plan), 1)
        assert found.num_differ == 0
        assert found.box.shape == (16, 48, 48)
        stored = open_volume(plan.out, level=0).open()[...]
        stored[found.box.start] ^= 1
        write_voxels(plan, 0, Box.from_shape(stored.shape), stored[None])
        (found,) = recompute(Selection(plan), NORMALISE, load_runner(plan), 1)
        assert found.num_differ == 1
