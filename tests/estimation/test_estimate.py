"""Estimates: their closed forms are brute force, and what was planned is what a run then takes."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inline import Inline
from plans import blocks_by_shard, planned, plans, volume, voxels_of_blocks
from volumes import noise, windowed, write_volume

from volpipe.blockwise.journal import Record
from volpipe.blockwise.phase import Phase
from volpipe.blockwise.stage import Stage, bundle_size
from volpipe.blockwise.usage import Totals
from volpipe.errors import PlanError, RunStopped
from volpipe.estimation import calibrate, memory
from volpipe.estimation.estimate import Estimate, Slots, StageEstimate, UnitCosts, estimate, upper_bounds
from volpipe.estimation.limits import Limits, check_limits
from volpipe.estimation.memory import CUDA_BYTES, array_bytes, memory_bytes
from volpipe.geometry.grid import Box, Triple, mirror
from volpipe.inference.plan import Plan
from volpipe.inference.scratch import PARTS, ScratchTensors
from volpipe.inference.selection import Selection
from volpipe.recipes.inference import load_recipe
from volpipe.runs.schedule import RunSchedule
from volpipe.volumes.volume import Reader, open_volume
from volpipe.workflow.driver import Report
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute, preview

FEW = settings(max_examples=60)
ONE = Slots(1, 1, shared=True)
RATES = UnitCosts(6, 2.0, 1e-9, 0.1, 0.5, 1e-8, 2e-8, 3e-8, 4e5, 2.5, 0.75, 0.5, 600 << 20)
CHUNK = 16  # of the volumes in plans, and of those that are written


def estimated(plan: Plan, rates: UnitCosts | None = RATES, slots: Slots = ONE) -> Estimate:
    return estimate(plan, volume(plan.source.shape), 0.125, slots, rates)


def seen_chunks(plan: Plan, block: int) -> set[tuple[int, ...]]:
    """Return the chunks that any window of `block` shows a voxel of, found window by window and voxel by voxel."""
    found = set()
    for number in Selection(plan).windows_of(block):
        box = plan.lattice.window_box(number)
        ends = zip(box.start, box.stop, plan.source.shape, strict=True)
        along = [sorted({int(v) // CHUNK for v in mirror(a, b, n)}) for a, b, n in ends]
        found |= {(z, y, x) for z in along[0] for y in along[1] for x in along[2]}
    return found


def num_voxels(chunk: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return math.prod(min(CHUNK, n - CHUNK * i) for i, n in zip(chunk, shape, strict=True))


@FEW
@given(plans(longest=40), st.integers(1, 9), st.booleans())
def test_a_chunk_is_fetched_by_each_block_or_once_by_each_worker_that_keeps_it(
    plan: Plan, workers: int, keeps: bool
) -> None:
    seen = [seen_chunks(plan, block) for block in range(len(plan.blocks))]
    with pytest.MonkeyPatch.context() as patch:
        if not keeps:
            patch.setattr("volpipe.estimation.estimate.CACHE_BYTES", 0)
        found = estimated(plan, RATES, Slots(workers, workers, shared=True))
    once = sum(num_voxels(chunk, plan.source.shape) for chunk in set().union(*seen))
    voxels = sum(num_voxels(chunk, plan.source.shape) for chunks in seen for chunk in chunks)
    if keeps and any(plan.overlap):
        voxels = min(voxels, workers * once)
    assert found.amplification == voxels / once
    reader = found.by_name()["factor" if plan.mode == "stored" else "infer"]
    if plan.mode == "stored" or not plan.num_sums:  # else sums are read as well
        assert reader.read_bytes == voxels * 0.125


@FEW
@given(plans())
def test_sums_and_shards_are_counted_as_voxels_say(plan: Plan) -> None:
    """One worker misses no block, so that all that is stored is what blocks leave to later ones."""
    along = [voxels_of_blocks(plan, axis) for axis in range(3)]
    sizes, sent, files = 0, 0, set()
    for shard, blocks in enumerate(blocks_by_shard(plan)):
        box = plan.shards().box(shard)
        sizes += box.num_voxels
        for block in blocks[:-1]:
            reach = zip(along, plan.blocks.index(block), box.start, box.stop, strict=True)
            seen = [voxels[k] & set(range(a, b)) for voxels, k, a, b in reach]
            sent += math.prod(map(len, seen))
            core = plan.core_start(block)
            for z, y, x in itertools.product(*seen):
                place = (z - core[0], y - core[1], x - core[2])
                files.add((block, next(p for p, r in enumerate(plan.sum_parts) if contains(r, place))))
    found = estimated(plan).by_name()
    assert "reassemble" not in found
    assert found["infer"].written_bytes == pytest.approx(sizes * 0.75 + sent * 2.5)
    places = zip(plan.roi[0], plan.corner, plan.blocks.cell, strict=True)
    if plan.num_active == len(plan.blocks) and not any((a - c) % n for a, c, n in places):
        assert found["infer"].files == len(plan.shards()) + len(files)


def contains(box: Box, place: tuple[int, ...]) -> bool:
    return all(a <= p < b for a, p, b in zip(box.start, place, box.stop, strict=True))


@FEW
@given(plans(), st.integers(2, 5))
def test_what_blocks_miss_is_stored_whole_and_reassembled(plan: Plan, workers: int) -> None:
    slow = replace(RATES, infer_seconds=100.0)  # a task for each block
    few, many = (estimated(plan, slow, Slots(n, n, shared=True)) for n in (1, workers))
    reached = math.prod(sum(b - a for a, b in plan.reaches[axis]) * plan.net.scale[axis] for axis in range(3))
    outputs = math.prod(plan.out_shape) * 0.75
    written, more = (
        sum(stage.written_bytes for stage in each.stages if stage.name in ("infer", "reassemble"))
        for each in (few, many)
    )
    assert outputs <= written * (1 + 1e-9) <= more * (1 + 2e-9)
    assert more <= (outputs + reached * 2.5) * (1 + 1e-9)
    assert (more > written) == bool(plan.num_sums and plan.num_active > 1)


@pytest.mark.parametrize(
    ("workers", "seconds", "share"),
    [
        (1, 100.0, 0.0),
        (2, 100.0, 1 / 4),  # of each two that run side by side, the later one needs the earlier: either is first
        (8, 100.0, 7 / 16),
        (2, 1.3, 1 / 8),  # of a task of four only the first needs a block of the other worker
    ],
)
def test_blocks_miss_what_is_still_at_work(workers: int, seconds: float, share: float) -> None:
    plan = planned(*windowed((16, 16, 16), (8, 8, 8), (1, 1, 2), "hann"), of=volume((8, 8, 128)))
    rates = replace(RATES, infer_seconds=seconds)
    stages = estimated(plan, rates, Slots(workers, workers, shared=True)).by_name()
    units = stages["reassemble"].units if share else 0
    assert ("reassemble" in stages) == (share > 0)
    assert units == math.ceil(share * plan.num_sums)


@FEW
@given(plans())
def test_stages_have_the_units_of_the_schedule(plan: Plan) -> None:
    units = {stage.name: stage.num_units for stage in RunSchedule(plan).shown}
    units.pop("reassemble", None)  # one worker's blocks finish all of them
    assert {stage.name: stage.units for stage in estimated(plan).stages} == units


@FEW
@given(plans())
def test_bytes_that_do_not_compress_bound_those_that_do(plan: Plan) -> None:
    bound = upper_bounds(plan)
    less = replace(bound, sum_bytes=bound.sum_bytes / 2, output_bytes=bound.output_bytes / 2)
    untried, tried = estimated(plan, None), estimated(plan, less)
    assert untried.seconds is None
    assert untried.output_bytes >= tried.output_bytes
    assert untried.scratch_bytes >= tried.scratch_bytes
    shapes = [plan.level_shape(level) for level in range(len(plan.factors))]
    chunks = sum(math.prod(-(-n // c) for n, c in zip(shape, plan.chunk, strict=True)) for shape in shapes)
    assert untried.output_bytes == sum(map(math.prod, shapes)) * plan.dtype.itemsize + 64 * chunks


def test_time_is_that_of_the_workers_side_by_side() -> None:
    plan = planned("windows.shape=[16,16,16]", "windows.overlap=8", "windows.blend=hann", "windows.block=[2,2,2]")
    rates = replace(RATES, start_seconds=0.0, sum_seconds=0.0, write_seconds=0.0)
    one = estimated(plan, rates)
    four = estimated(plan, rates, Slots(4, 4, shared=True))
    apart = estimated(plan, rates, Slots(100, 2, shared=False))
    infer = plan.lattice.num_windows * 0.5
    assert one.by_name()["infer"].seconds == pytest.approx(infer)
    assert one.seconds == pytest.approx(sum(stage.seconds for stage in one.stages))
    assert four.seconds == pytest.approx((one.seconds or 0) / 4)
    assert apart.seconds == pytest.approx(infer / 2)


@FEW
@given(plans(), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.floats(0, 1e-3), st.floats(0, 1e-3))
def test_no_stage_takes_longer_than_all_and_all_take_no_longer_than_one_after_the_other(
    plan: Plan, cpu: int, gpu: int, shared: bool, infer: float, coarsen: float
) -> None:
    """A pyramid's one shard is one worker's, however many there are: it took longer than the whole plan."""
    rates = replace(RATES, start_seconds=0.0, infer_seconds=infer, coarsen_seconds=coarsen)
    found = estimated(plan, rates, Slots(gpu if shared else cpu, gpu, shared=shared))
    assert found.seconds is not None
    assert found.stage_seconds.keys() == found.by_name().keys()
    assert max(found.stage_seconds.values()) <= found.seconds * (1 + 1e-9)
    assert found.seconds <= sum(found.stage_seconds.values()) * (1 + 1e-9)
    for name, seconds in found.stage_seconds.items():
        stage = found.by_name()[name]
        assert stage.seconds / stage.units <= seconds * (1 + 1e-9)  # a unit is one worker's
        assert seconds <= stage.seconds


def test_a_plan_of_ten_to_the_fifteen_voxels_is_estimated_like_a_small_one() -> None:
    plan = planned(of=volume((100_000, 100_000, 100_000)))
    found = estimated(plan)
    assert plan.lattice.num_windows > 10**9
    cells = math.prod(-(-n // s) for n, s in zip(plan.out_shape, plan.shard, strict=True))
    assert found.by_name()["infer"].files == cells
    assert found.output_files > cells


SHAPE = (132, 128, 144)
FORMATS = ("ome-zarr-0.5", "ome-zarr-0.4", "n5", "zarr2")
BLENDS = [
    ("hann", "stored"), ("crop", "streamed"),
    *(pytest.param(blend, "streamed", marks=pytest.mark.long) for blend in ("hann", "gaussian")),
]  # fmt: skip


def made(folder: Path, blend: str, mode: str, out_format: str = "ome-zarr-0.5") -> Plan:
    """Return a plan of many blocks over smooth noise, which compresses somewhat, alike everywhere."""
    data = (np.sin(np.arange(132 * 128 * 144).reshape(SHAPE) / 5) * 40 + noise(SHAPE) // 4 + 80).astype(np.uint8)
    location = write_volume(folder / "in.n5", data)
    recipe = [f"tensors.mode={mode}", f"output.format={out_format}", "net.name=shift", "output.levels=2"]
    recipe += windowed((32, 32, 32), (16, 16, 16), (2, 2, 2), blend)
    return prepare(str(location), load_recipe(None, recipe), folder / "out", Path.cwd())


def moved(stages: Iterable[StageEstimate | Totals], names: Sequence[str] = ()) -> dict[str, list[float]]:
    """Return bytes read and written by stage; who finishes a shard, a block or `reassemble`, depends on the order."""
    found: dict[str, list[float]] = {}
    for stage, name in itertools.zip_longest(stages, names):
        name = name or stage.name
        both = found.setdefault("infer" if name == "reassemble" else name, [0.0, 0.0])
        both[:] = both[0] + stage.read_bytes, both[1] + stage.written_bytes
    return found


def report_of(plan: Plan, slots: int = 1) -> Report:
    report = execute(plan, Inline(slots=slots, in_turn=True).start)
    assert not report.missing
    return report


@pytest.mark.parametrize(("blend", "mode"), BLENDS)
def test_planned_bytes_are_within_a_tenth_of_those_that_a_run_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blend: str, mode: str
) -> None:
    """Of the volume a plan says the most: chunks that windows share may be read again, or be in memory."""
    for module in ("blockwise.phase", "estimation.estimate"):  # how many units a task has hangs on how fast they were
        monkeypatch.setattr(f"volpipe.{module}.bundle_size", lambda pace, row=0, num_workers=1: 4)
    plan = made(tmp_path, blend, mode)
    found = preview(plan, Inline().start).estimate
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.run/calibration").exists()
    report = report_of(plan)
    assert report.estimate is not None
    assert report.estimate.rates == found.rates
    expected, took = moved(found.stages), moved(report.totals.values(), list(report.totals))
    of_volume = "factor" if mode == "stored" else "infer"
    assert took[of_volume][0] <= expected[of_volume].pop(0) <= 1.3 * took[of_volume].pop(0)
    for name in {stage.name for stage in found.stages[:-1]} - {"reassemble"}:  # the last, of a few bytes, is made of
        assert expected[name] == pytest.approx(took[name], rel=0.1), name  # level 1, which nobody has seen yet
    assert found.read_bytes == pytest.approx(sum(took.read_bytes for took in report.totals.values()), rel=0.1)
    assert found.written_bytes == pytest.approx(sum(took.written_bytes for took in report.totals.values()), rel=0.1)
    on_disk = sum(file.stat().st_size for file in (tmp_path / "out").rglob("c/**/*") if file.is_file())
    assert found.output_bytes == pytest.approx(on_disk, rel=0.1)
    assert found.scratch_bytes >= report.most_scratch_bytes
    assert report.most_scratch_bytes > 0 or (blend, mode) == ("crop", "streamed")


@pytest.mark.long
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("bundle", [1, pytest.param(4, marks=pytest.mark.long), 16])  # blocks
def test_scratch_is_never_above_what_was_planned_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: int, slots: int
) -> None:
    def size(pace: float, row: int = 0, num_workers: int = 1) -> int:
        return bundle if row else bundle_size(pace, row, num_workers)  # only blocks for the net come in rows

    for module in ("blockwise.phase", "estimation.estimate"):
        monkeypatch.setattr(f"volpipe.{module}.bundle_size", size)
    inodes, discard = list[int](), ScratchTensors.discard_sum

    def counting(tensors: ScratchTensors, block: int, part: int) -> None:
        arrays = [tensors.sums_path / tensors.sums_key / name / "c" for name in PARTS]
        inodes.append(sum(len(names) + len(files) for each in arrays for _, names, files in os.walk(each)))
        discard(tensors, block, part)

    monkeypatch.setattr(ScratchTensors, "discard_sum", counting)
    plan = made(tmp_path, "hann", "streamed")
    found = preview(plan, Inline(slots=slots).start).estimate
    assert 0 < report_of(plan, slots).most_scratch_bytes <= found.scratch_bytes
    assert 0 < max(inodes) <= found.scratch_files + found.scratch_folders


@pytest.mark.parametrize("out_format", FORMATS)
def test_an_output_is_never_above_its_bound_however_small_its_chunks(tmp_path: Path, out_format: str) -> None:
    location = write_volume(tmp_path / "in.n5", noise((36, 40, 44)))
    recipe = [f"output.format={out_format}", "net.name=identity", "output.levels=2", "output.chunk=[4,4,8]"]
    recipe += windowed((16, 16, 16), (0, 0, 0), (1, 1, 1), "crop")
    plan = prepare(str(location), load_recipe(None, recipe), tmp_path / "out", Path.cwd())
    report_of(plan)
    arrays = [level for level in (tmp_path / "out").iterdir() if level.is_dir()]
    files = [file for level in arrays for file in level.rglob("*") if file.is_file() and "json" not in file.name]
    on_disk = sum(file.stat().st_size for file in files if not file.name.startswith(".z"))
    assert 36 * 40 * 44 < on_disk <= estimate(plan, volume(plan.source.shape), 1.0, ONE).output_bytes


def test_scratch_stays_as_planned_where_the_driver_is_slower_than_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("blockwise.phase", "estimation.estimate"):
        monkeypatch.setattr(f"volpipe.{module}.bundle_size", lambda pace, row=0, num_workers=1: 4)
    come_back = Phase.come_back

    def late(phase: Phase, stage: Stage, units: list[int], future: Future[Record[Any]]) -> None:
        time.sleep(0.01)
        come_back(phase, stage, units, future)

    monkeypatch.setattr(Phase, "come_back", late)
    plan = made(tmp_path, "hann", "streamed")
    found = preview(plan, Inline().start).estimate
    assert 0 < report_of(plan).most_scratch_bytes <= found.scratch_bytes


@pytest.mark.parametrize("mode", ["streamed", "stored"])
@pytest.mark.parametrize(
    ("blend", "overlap", "block", "slots"),
    [
        pytest.param("hann", (8, 8, 8), (1, 1, 1), 1, marks=pytest.mark.long),
        pytest.param("hann", (8, 8, 8), (1, 1, 1), 2, marks=pytest.mark.long),
        ("hann", (8, 8, 8), (2, 2, 2), 3),
        pytest.param("hann", (4, 8, 4), (1, 2, 1), 4, marks=pytest.mark.long),
        ("gaussian", (8, 8, 8), (3, 1, 2), 2),
        ("crop", (4, 4, 4), (1, 1, 1), 3),
    ],
)
def test_where_nothing_was_measured_scratch_stays_below_what_is_called_the_most(
    tmp_path: Path, mode: str, blend: str, overlap: Triple, block: Triple, slots: int
) -> None:
    """Voxels that do not compress, few blocks and shards across them; tasks end in any order.

    The most that is promised, over what `volpipe run --config threads` took, two workers (2026-11-29):

    | net, volume, windows, blocks | before | now |
    |---|---|---|
    | instance norm, 100 x 300 x 300, 32 x 64 x 64 | 0.33 | 1.42 |
    | instance norm, 64 x 96 x 96, 32 | 0.41 | 1.24 |
    | instance norm, 64 x 96 x 96, 32, blocks of 2 | 1.12 | 1.88 |
    | hann, half overlapping, 64 x 96 x 96, 32 | 1.28 | 1.41 |
    | the same, blocks of 2 | 1.12 | 1.53 |
    | the same, window tensors, which compress to a third | 8.59 | 3.05 |
    | instance norm, 100 x 300 x 300, one window a block, where no block had to wait for another | 1.08 | 4.90 |
    """
    location = write_volume(tmp_path / "in.n5", noise((28, 36, 44)))
    recipe = [f"tensors.mode={mode}", "net.name=identity"]
    recipe += ["output.dtype=float32", *windowed((16, 16, 16), overlap, block, blend)]
    for seed in range(2):
        plan = prepare(str(location), load_recipe(None, recipe), tmp_path / f"out{seed}", Path.cwd())
        most = estimate(plan, plan.source.volume(), 1.0, Slots(slots, slots, shared=True)).scratch_bytes
        report = execute(plan, Inline(seed, slots).start)
        assert not report.missing
        assert report.most_scratch_bytes <= most
        assert most > 0 or (blend, mode) == ("crop", "streamed")


@pytest.mark.long
def test_tasks_side_by_side_report_together_what_they_wrote(tmp_path: Path) -> None:
    written = []
    for slots in (1, 3):
        (folder := tmp_path / str(slots)).mkdir()
        report = report_of(made(folder, "crop", "stored"), slots)
        written.append(sum(totals.written_bytes for totals in report.totals.values()))
    assert written[0] == written[1] > 10**7


@pytest.mark.parametrize(
    ("seconds", "at_once", "num_chunks"),
    [
        (60.0, 2**24, calibrate.SAMPLED_CHUNKS),
        (-1.0, 2**24, calibrate.LEAST_CHUNKS),  # however slow the volume is
        (-1.0, 3 * CHUNK**3, 3),
        (-1.0, 1, 1),  # a chunk that takes half of the memory
    ],
)
def test_a_sample_is_of_many_chunks_where_these_are_small_and_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, at_once: int, num_chunks: int
) -> None:
    plan, read, taken = made(tmp_path, "crop", "streamed"), Reader.read, list[Box]()
    source = open_volume(plan.source.path, plan.source.key)
    whole = calibrate.sample(plan, source)
    monkeypatch.setattr(calibrate, "SAMPLE_SECONDS", seconds)
    monkeypatch.setattr(calibrate, "VOXELS_AT_ONCE", at_once)
    monkeypatch.setattr(Reader, "read", lambda self, box: taken.append(box) or read(self, box))
    found = calibrate.sample(plan, source)
    assert len(taken) == num_chunks
    assert all(0 < box.num_voxels <= CHUNK**3 for box in taken)
    assert found.voxel_bytes == pytest.approx(whole.voxel_bytes, rel=0.1)


@pytest.mark.parametrize(
    "out_format", [*FORMATS[::2], *(pytest.param(each, marks=pytest.mark.long) for each in FORMATS[1::2])]
)
def test_planned_files_and_folders_are_those_that_a_run_writes(tmp_path: Path, out_format: str) -> None:
    plan = made(tmp_path, "hann", "streamed", out_format)
    found = preview(plan, None).estimate
    report_of(plan)
    written = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert found.output_files == sum(file.is_file() for file in written)
    assert found.output_folders == sum(file.is_dir() for file in written)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["stored", "streamed"])
def test_without_a_calibration_bytes_are_bounds_and_nothing_is_run_or_written(tmp_path: Path, mode: str) -> None:
    plan = made(tmp_path, "hann", mode)
    found = preview(plan, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.n5"]
    assert (found.estimate.rates, found.estimate.seconds) == (None, None)
    report = report_of(plan)
    assert found.estimate.scratch_bytes >= report.most_scratch_bytes > 0
    for stage in found.estimate.stages:
        assert stage.name == "reassemble" or stage.written_bytes >= report.totals[stage.name].written_bytes


def test_alternatives_differ_from_the_plan_and_say_why_not(tmp_path: Path) -> None:
    plan = made(tmp_path, "hann", "streamed")
    rows = preview(plan, Inline().start).alternatives()
    assert [row.is_chosen for row in rows].count(True) == 1
    assert rows[0].plan == plan
    shapes = {(row.plan.mode, row.plan.block) for row in rows}
    assert len(shapes) == len(rows)
    assert shapes == {("stored", (2, 2, 2)), *(("streamed", (n, n, n)) for n in (1, 2, 4))}
    stored = next(row for row in rows if (row.plan.mode, row.plan.block) == ("stored", (2, 2, 2)))
    assert stored.estimate.written_bytes > rows[0].estimate.written_bytes
    assert "×" in stored.why or "needs" in stored.why


def test_a_net_that_fails_is_found_by_the_calibration_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        if x.any():\n"
        "            raise ValueError('no such weather')\n        return x\ndef build():\n    return Net()\n"
    )
    location = write_volume(tmp_path / "in.n5", noise((16, 16, 16)))
    allowed = "net.accept_tile_variance=true"  # else it is refused when it is measured
    recipe = load_recipe(None, [f"net.name={tmp_path}/net.py:build", allowed, "windows.shape=[8,8,8]"])
    plan = prepare(str(location), recipe, tmp_path / "out", Path.cwd())
    with pytest.raises(RunStopped, match="no such weather"):
        preview(plan, Inline().start)
    assert not (tmp_path / "out.run/calibration").exists()


LIMITS = [
    (Limits(worker_bytes=700 << 20), r"a worker needs 0\.7 GiB of memory and has 0\.7 GiB; use a windows\.block below"),
    (Limits(free_files=10), r"need [\d,]+ files and folders, and .* may have 10; use larger output\.shard"),
    (Limits(free_bytes=1000), r"need 217\.8 KiB and .* has 1\.0 free; free some, choose another --out"),
]


@pytest.mark.parametrize(("limits", "reason"), LIMITS)
def test_a_plan_that_takes_more_than_there_is_is_refused_with_both_numbers(limits: Limits, reason: str) -> None:
    plan = planned("windows.shape=[16,16,16]", "windows.overlap=8", "windows.blend=hann", "windows.block=[2,2,2]")
    with pytest.raises(PlanError, match=reason):
        check_limits(plan, estimated(plan), limits)
    check_limits(plan, estimated(plan), Limits(10**12, 10**6, 10**12))
    check_limits(plan, estimated(plan), Limits())


def test_what_was_written_before_needs_no_room_again() -> None:
    plan = planned()
    found = estimated(plan)
    half = Limits(free_bytes=int(0.6 * (found.output_bytes + found.scratch_bytes)))
    with pytest.raises(PlanError):
        check_limits(plan, found, half)
    check_limits(plan, found, half, share_left=0.5)


def test_a_run_is_refused_before_it_writes_what_no_worker_can_hold(tmp_path: Path) -> None:
    plan = made(tmp_path, "hann", "streamed")
    small = Inline()
    small.worker_bytes = 1 << 20
    with pytest.raises(PlanError, match="of memory"):
        execute(plan, small.start)
    assert not (tmp_path / "out").exists()


def test_what_is_planned_covers_what_a_large_blended_run_was_seen_to_take() -> None:
    plan = planned("windows.blend=hann", "windows.block=[8,8,8]", of=volume((1500, 1500, 1500)))
    for tried_mib, used_mib in ((616, 995), (748, 949)):  # measured 2026-11-21, identity
        assert used_mib * 2**20 < memory_bytes(plan, tried_mib * 2**20) < 1.2 * used_mib * 2**20
    assert memory_bytes(plan, None) > 995 * 2**20
    crop = planned("windows.blend=crop", of=volume((1500, 1500, 1500)))
    assert memory_bytes(crop, 400 * 2**20) == 500 * 2**20  # nothing is added up


@FEW
@example(
    planned("input.roi=1:40,1:40,1:40", *windowed((12, 12, 12), (4, 4, 4), (2, 2, 2), "crop")).changed(corner=(1, 1, 1))
)  # block 0 holds no windows
@given(plans(longest=40, modes=("streamed",)))
def test_memory_is_that_of_the_block_that_reads_most(plan: Plan) -> None:
    """Two blocks of voxels are in memory, as large as the largest that is read."""
    selection, wide = Selection(plan), plan.source.model_copy(update={"dtype": "float32"})
    boxes = [selection.input_box(block) for block in range(len(plan.blocks)) if selection.has_block(block)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "CACHE_BYTES", 0)
        more = array_bytes(plan.model_copy(update={"source": wide})) - array_bytes(plan)
    assert more == 2 * max(box.num_voxels for box in boxes) * (4 - 1)


@pytest.mark.parametrize(("library", "more"), [("libtorch_cpu.so", 0), ("libtorch_cuda.so", CUDA_BYTES)])
def test_a_torch_for_gpus_takes_more_memory_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, more: int
) -> None:
    plan = planned()
    monkeypatch.setattr(memory, "cuda_bytes", lambda: 0)
    least, on_gpu = memory_bytes(plan, None), memory_bytes(plan, None, on_gpu=True)
    monkeypatch.undo()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / library).touch()
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "__init__.py")
    monkeypatch.setattr(memory, "find_spec", {"torch": spec}.get)
    monkeypatch.setattr(memory, "cuda_bytes", memory.cuda_bytes.__wrapped__)
    assert memory_bytes(plan, None) == least + more
    assert memory_bytes(plan, None, on_gpu=True) == on_gpu
