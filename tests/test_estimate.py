"""Estimates: their closed forms are brute force, and what was planned is what a run then takes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline import Inline
from plans import blocks_by_shard, planned, plans, volume, voxels_of_blocks
from volumes import noise, windowed, write_volume

from volpipe.driver import Report, execute, prepare, preview
from volpipe.errors import PlanError, RunStopped
from volpipe.estimate import Estimate, Rates, Slots, estimate, upper_bounds
from volpipe.fetches import fetched_share
from volpipe.grid import mirror
from volpipe.limits import Limits, check_limits
from volpipe.plan import Plan
from volpipe.recipe import load_recipe
from volpipe.schedule import Schedule
from volpipe.wanted import Wanted

FEW = settings(deadline=None, max_examples=60)
ONE = Slots(1, 1, shared=True)
RATES = Rates(6, 2.0, 1e-9, 0.1, 0.5, 1e-8, 2e-8, 3e-8, 4e5, 2.5, 0.75, 0.5, 600 << 20)
CHUNK = 16  # of the volumes in plans


def estimated(plan: Plan, rates: Rates | None = RATES, slots: Slots = ONE) -> Estimate:
    return estimate(plan, volume(plan.source.shape), 0.125, slots, rates)


def seen_chunks(plan: Plan, block: int) -> set[tuple[int, ...]]:
    """Return the chunks that any window of `block` shows a voxel of, found window by window and voxel by voxel."""
    found = set()
    for number in Wanted(plan).windows_of(block):
        box = plan.lattice.window_box(number)
        ends = zip(box.start, box.stop, plan.source.shape, strict=True)
        along = [sorted({int(v) // CHUNK for v in mirror(a, b, n)}) for a, b, n in ends]
        found |= {(z, y, x) for z in along[0] for y in along[1] for x in along[2]}
    return found


def num_voxels(chunk: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return math.prod(min(CHUNK, n - CHUNK * i) for i, n in zip(chunk, shape, strict=True))


@FEW
@given(plans(longest=40))
def test_chunks_are_counted_as_often_as_blocks_read_them(plan: Plan) -> None:
    seen = [seen_chunks(plan, block) for block in range(len(plan.blocks))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("volpipe.estimate.CACHE_BYTES", 0)
        found = estimated(plan)
    assert found.chunk_reads == sum(map(len, seen))
    assert found.num_chunks == math.prod(-(-n // CHUNK) for n in plan.source.shape)
    reader = found.by_name()["factor" if plan.mode == "stored" else "infer"]
    voxels = sum(num_voxels(chunk, plan.source.shape) for chunks in seen for chunk in chunks)
    assert reader.read_bytes == voxels * 0.125


@FEW
@given(plans(longest=40), st.integers(1, 3))
def test_a_chunk_that_stays_in_memory_is_fetched_once_by_each_worker_that_needs_it(plan: Plan, workers: int) -> None:
    blocks = [chunks for block in range(len(plan.blocks)) if (chunks := seen_chunks(plan, block))]
    expected = sum(len(set().union(*blocks[i::workers])) for i in range(workers))
    found = estimated(plan, None, Slots(workers, workers, shared=True))
    assert found.chunk_reads == (expected if any(plan.overlap) else sum(map(len, blocks)))


def test_what_does_not_stay_in_memory_is_fetched_again() -> None:
    row, wide = [(0, 1), (1, 2), (2, 3)], [(0, 2), (1, 3)]
    assert fetched_share([[(0, 0)], [(0, 0)], wide], 3, 1, 1) == 4 / 6  # the second block shares two with the first
    assert fetched_share([[(0, 0)], [(0, 0)], wide], 1, 1, 1) == 1
    assert fetched_share([[(0, 0)], [(0, 0)], row], 2, 2, 1) == 1  # the two workers' blocks share none with their last
    assert fetched_share([[(0, 0)], row, row], 10**6, 1, 1) == 16 / 36


@FEW
@given(plans())
def test_sums_and_direct_shards_are_counted_as_voxels_say(plan: Plan) -> None:
    reached = blocks_by_shard(plan)
    sizes = [plan.shards().box(shard).num_voxels for shard in range(len(reached))]
    direct = sum(size for size, blocks in zip(sizes, reached, strict=True) if len(blocks) == 1)
    with_sum = {block for blocks in reached if len(blocks) > 1 for block in blocks}
    along = [[len(voxels) for voxels in voxels_of_blocks(plan, axis)] for axis in range(3)]
    sum_voxels = math.prod(sum(lengths) for lengths in along) - direct

    found = estimated(plan).by_name()
    num_direct = sum(len(blocks) == 1 for blocks in reached)
    assert found["infer"].written_bytes == pytest.approx(direct * 0.75 + sum_voxels * 2.5)
    assert found["infer"].files == num_direct + len(with_sum)
    if with_sum:
        assert found["reassemble"].files == len(reached) - num_direct
        assert found["reassemble"].written_bytes == pytest.approx((sum(sizes) - direct) * 0.75)


@FEW
@given(plans())
def test_stages_have_the_units_of_the_schedule(plan: Plan) -> None:
    assert {s.name: s.units for s in estimated(plan).stages} == {s.name: s.num_units for s in Schedule(plan).shown}


@FEW
@given(plans())
def test_bytes_that_do_not_compress_bound_those_that_do(plan: Plan) -> None:
    bound = upper_bounds(plan)
    less = replace(bound, sum_bytes=bound.sum_bytes / 2, output_bytes=bound.output_bytes / 2)
    untried, tried = estimated(plan, None), estimated(plan, less)
    assert untried.seconds is None
    assert untried.output_bytes >= tried.output_bytes
    assert untried.scratch_bytes >= tried.scratch_bytes
    voxels = sum(math.prod(plan.level_shape(level)) for level in range(len(plan.factors)))
    assert untried.output_bytes == voxels * plan.dtype.itemsize


def test_time_is_that_of_the_workers_side_by_side() -> None:
    plan = planned("windows.shape=[16,16,16]", "windows.overlap=8", "windows.blend=hann", "windows.block=[2,2,2]")
    one = estimated(plan, replace(RATES, start_seconds=0.0))
    four = estimated(plan, replace(RATES, start_seconds=0.0), Slots(4, 4, shared=True))
    apart = estimated(plan, replace(RATES, start_seconds=0.0), Slots(100, 2, shared=False))
    infer = plan.lattice.num_windows * 0.5
    assert one.by_name()["infer"].seconds == pytest.approx(infer)
    assert one.seconds == pytest.approx(sum(stage.seconds for stage in one.stages))
    assert four.seconds == pytest.approx((one.seconds or 0) / 4)
    assert apart.seconds == pytest.approx(infer / 2)


def test_a_plan_of_ten_to_the_fifteen_voxels_is_estimated_like_a_small_one() -> None:
    plan = planned(of=volume((100_000, 100_000, 100_000)))
    found = estimated(plan)
    assert plan.lattice.num_windows > 10**9
    cells = math.prod(-(-n // s) for n, s in zip(plan.out_shape, plan.shard, strict=True))
    assert found.by_name()["infer"].files == cells
    assert found.output_files > cells


SHAPE = (100, 96, 112)
FORMATS = ("ome-zarr-0.5", "ome-zarr-0.4", "n5", "zarr2")
BLENDS = [("hann", "streamed"), ("hann", "stored"), ("crop", "streamed"), ("gaussian", "streamed")]


def made(folder: Path, blend: str, mode: str, out_format: str = "ome-zarr-0.5") -> Plan:
    """Return a plan of many blocks over smooth noise, which compresses somewhat, alike everywhere."""
    data = (np.sin(np.arange(100 * 96 * 112).reshape(SHAPE) / 5) * 40 + noise(SHAPE) // 4 + 80).astype(np.uint8)
    location = write_volume(folder / "in.n5", data)
    recipe = [f"tensors.mode={mode}", f"output.format={out_format}", "net.name=shift", "output.levels=2"]
    recipe += windowed((32, 32, 32), (16, 16, 16), (2, 2, 2), blend)
    return prepare(str(location), load_recipe(None, recipe), folder / "out", Path.cwd())


def report_of(plan: Plan) -> Report:
    report = execute(plan, Inline().start)
    assert not report.missing
    return report


@pytest.mark.parametrize(("blend", "mode"), BLENDS)
def test_planned_bytes_are_within_a_tenth_of_those_that_a_run_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blend: str, mode: str
) -> None:
    # The rehearsal and the run share this process: what the one keeps, the other would not have to read.
    monkeypatch.setattr("volpipe.windows.CACHE_BYTES", 0)
    monkeypatch.setattr("volpipe.estimate.CACHE_BYTES", 0)
    plan = made(tmp_path, blend, mode)
    found = preview(plan, Inline().start).estimate
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.run/rehearsal").exists()
    report = report_of(plan)
    assert report.estimate is not None
    assert report.estimate.rates == found.rates
    for stage in found.stages[:-1]:  # the last, of a few bytes, is made of level 1, which nobody has seen yet
        took = report.totals[stage.name]
        assert stage.read_bytes == pytest.approx(took.read_bytes, rel=0.1), stage.name
        assert stage.written_bytes == pytest.approx(took.written_bytes, rel=0.1), stage.name
    assert found.read_bytes == pytest.approx(sum(took.read_bytes for took in report.totals.values()), rel=0.1)
    assert found.written_bytes == pytest.approx(sum(took.written_bytes for took in report.totals.values()), rel=0.1)
    on_disk = sum(file.stat().st_size for file in (tmp_path / "out").rglob("c/**/*") if file.is_file())
    assert found.output_bytes == pytest.approx(on_disk, rel=0.1)
    assert found.scratch_bytes >= report.most_scratch_bytes
    assert report.most_scratch_bytes > 0 or (blend, mode) == ("crop", "streamed")


@pytest.mark.parametrize("out_format", FORMATS)
def test_planned_files_are_those_that_a_run_writes(tmp_path: Path, out_format: str) -> None:
    plan = made(tmp_path, "hann", "streamed", out_format)
    found = preview(plan, None).estimate
    report_of(plan)
    assert found.output_files == sum(file.is_file() for file in (tmp_path / "out").rglob("*"))


def test_without_a_rehearsal_bytes_are_bounds_and_nothing_is_run_or_written(tmp_path: Path) -> None:
    plan = made(tmp_path, "hann", "stored")
    found = preview(plan, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.n5"]
    assert (found.estimate.rates, found.estimate.seconds) == (None, None)
    report = report_of(plan)
    for stage in found.estimate.stages:
        assert stage.written_bytes >= report.totals[stage.name].written_bytes


def test_alternatives_differ_from_the_plan_and_say_why_not(tmp_path: Path) -> None:
    plan = made(tmp_path, "hann", "streamed")
    rows = preview(plan, Inline().start).alternatives()
    assert [row.is_chosen for row in rows].count(True) == 1
    assert rows[0].plan == plan
    shapes = {(row.plan.mode, row.plan.block) for row in rows}
    assert len(shapes) == len(rows)
    assert {("stored", (2, 2, 2)), ("streamed", (1, 1, 1)), ("streamed", (4, 4, 4))} < shapes
    stored = next(row for row in rows if (row.plan.mode, row.plan.block) == ("stored", (2, 2, 2)))
    assert stored.estimate.written_bytes > rows[0].estimate.written_bytes
    assert "×" in stored.why or "needs" in stored.why


def test_a_net_that_fails_is_told_by_the_rehearsal_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        if not x.is_meta:\n"
        "            raise ValueError('no such weather')\n        return x\ndef build():\n    return Net()\n"
    )
    location = write_volume(tmp_path / "in.n5", noise((16, 16, 16)))
    recipe = load_recipe(None, [f"net.name={tmp_path}/net.py:build", "windows.shape=[8,8,8]"])
    plan = prepare(str(location), recipe, tmp_path / "out", Path.cwd())
    with pytest.raises(RunStopped, match="no such weather"):
        preview(plan, Inline().start)
    assert not (tmp_path / "out.run/rehearsal").exists()


LIMITS = [
    (Limits(worker_bytes=700 << 20), r"a worker needs 0\.7 GiB of memory and has 0\.7; use a windows\.block below"),
    (Limits(free_files=10), r"need [\d,]+ files and .* may have 10; use larger output\.shard"),
    (Limits(free_bytes=1000), r"need .* GiB and .* has 0\.0 free; free some, choose another --out"),
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
