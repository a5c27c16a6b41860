"""A region of interest, a mask and empty space: what is wanted has the whole run's bytes, and nothing else is done."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from command import IDENTITY, THREADS, giver, set_each
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from inline import Inline, Stopped
from plans import choices, plans, selected_voxels, some_selected, spans, voxels_of_blocks
from ramp import RAW, Bench, ran, result, windows_that_meet
from volumes import fingerprint, noise, windowed, write_volume

import volpipe as vp
from volpipe.errors import PlanError, RunError, RunStopped, VolumeError
from volpipe.geometry.blend import FAMILIES
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection, scanned_box
from volpipe.recipes.inference import load_recipe
from volpipe.runs.options import RunOptions
from volpipe.runs.run_folder import RunFolder
from volpipe.training.data.dataset import WindowDataset
from volpipe.volumes.volume import (
    ArraySpec,
    Level,
    Multiscale,
    create_array,
    create_multiscale,
    open_volume,
    open_writer,
)
from volpipe.workflow.prepare import prepare
from volpipe.workflow.status import find_status
from volpipe.workflow.work_plan import execute

SOME = examples(4, 12)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[str]]:
    """A volume's shape, and windows, overlap, block, shard, blend and way to the net that divide it somehow."""
    shape = tuple(draw(st.integers(1, 17)) for _ in range(3))
    window = tuple(draw(st.integers(3, 9)) for _ in range(3))
    overlap = tuple(draw(st.integers(0, w // 2)) for w in window)
    block = tuple(draw(st.integers(1, 3)) for _ in range(3))
    division = windowed(window, overlap, block, draw(st.sampled_from(FAMILIES)))
    mode, format_ = draw(st.sampled_from(["stored", "streamed"])), draw(st.sampled_from(["n5", "zarr3"]))
    return shape, [*division, f"tensors.mode={mode}", f"tensors.format={format_}"]


def drawn_roi(data: st.DataObject, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [data.draw(spans(n)) for n in shape]


def written(roi: list[tuple[int, int]]) -> str:
    return "input.roi=" + ",".join(f"{a}:{b}" for a, b in roi)


@SOME
@given(divisions(), st.tuples(*[st.integers(1, 2)] * 3), st.data())
def test_a_roi_is_the_crop_of_the_whole_and_costs_its_windows(
    drawn: tuple[tuple[int, ...], list[str]], scale: tuple[int, ...], data: st.DataObject
) -> None:
    shape, division = drawn
    roi = drawn_roi(data, shape)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), division, scale)
        write_volume(bench.folder / "in.n5", noise(shape))
        whole = result(bench.run())
        plan = bench.run(written(roi))
        crop = whole[tuple(slice(a * s, b * s) for (a, b), s in zip(roi, scale, strict=True))]
        assert np.array_equal(result(plan), crop)
        wanted = np.zeros(shape, bool)
        wanted[tuple(slice(a, b) for a, b in roi)] = True
        assert bench.num_calls == windows_that_meet(plan, wanted) == Selection(plan).num_windows


@pytest.mark.long
@SOME
@given(divisions(), st.tuples(*[st.integers(1, 2)] * 3), st.integers(0, 99), st.booleans(), st.data())
def test_so_is_a_roi_at_whose_corner_blocks_begin(
    drawn: tuple[tuple[int, ...], list[str]], scale: tuple[int, ...], seed: int, is_masked: bool, data: st.DataObject
) -> None:
    """Sums of blended windows are added in another order there, whose rounding differs."""
    shape, division = drawn
    roi = drawn_roi(data, shape)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), division, scale)
        write_volume(bench.folder / "in.n5", noise(shape))
        mask = (noise(shape) < 20).astype(np.uint8)
        mask[tuple(a for a, _ in roi)] = 1
        write_volume(bench.folder / "mask.n5", mask)
        masked = ["input.mask=mask.n5"] if is_masked else []
        plan = bench.plan(written(roi), *masked)
        plan = plan.changed(corner=plan.roi[0])
        ran(plan, seed)
        wanted = np.zeros(shape, bool)
        wanted[tuple(slice(a, b) for a, b in roi)] = True
        if masked:
            wanted &= cores_that_touch(plan, wanted & (mask > 0))
        num_calls, found = bench.num_calls, result(plan)
        whole = result(bench.run())[tuple(slice(a * s, b * s) for (a, b), s in zip(roi, scale, strict=True))]
    assert num_calls == windows_that_meet(plan, wanted)
    inside = wanted[tuple(slice(a, b) for a, b in roi)]
    for axis, factor in enumerate(scale):
        inside = inside.repeat(factor, axis)
    assert (found[~inside] == 0).all()
    if "windows.blend=crop" in division:
        assert np.array_equal(found[inside], whole[inside])
    else:  # of at most 64 positive terms each, whose sum has an error of 63 half units in the last place at most
        np.testing.assert_array_max_ulp(found[inside], whole[inside], 63)


def cores_that_touch(plan: Plan, wanted: np.ndarray) -> np.ndarray:
    """Return for each voxel of the volume whether the core of its window has a voxel that is `wanted`."""
    cells, strides = np.zeros(plan.lattice.counts, bool), plan.lattice.stride
    for place in np.argwhere(wanted):
        cells[tuple(place // strides)] = True
    for axis, (stride, size) in enumerate(zip(strides, wanted.shape, strict=True)):
        cells = cells.repeat(stride, axis).take(range(size), axis)
    return cells


RATIOS = [(1, 1, 1), (4, 4, 4), (1, 2, 4), (3, 1, 2), (5, 7, 3)]


@SOME
@given(divisions(), st.sampled_from(RATIOS), st.sampled_from([0.01, 0.2]), st.integers(0, 99), st.data())
def test_under_a_mask_the_cores_that_it_touches_have_the_whole_run_s_bytes_and_others_are_not_computed(
    drawn: tuple[tuple[int, ...], list[str]], ratio: tuple[int, ...], share: float, seed: int, data: st.DataObject
) -> None:
    counts, division = drawn
    shape = tuple(max(1, n // r) * r for n, r in zip(counts, ratio, strict=True))
    roi = drawn_roi(data, shape) if data.draw(st.booleans()) else [(0, n) for n in shape]
    rng = np.random.default_rng(seed)
    coarse = rng.random([n // r for n, r in zip(shape, ratio, strict=True)]) < share
    coarse[tuple(a // r for (a, _), r in zip(roi, ratio, strict=True))] = True
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), division)
        write_volume(bench.folder / "in.n5", noise(shape))
        write_volume(bench.folder / "mask.n5", coarse.astype(np.uint8) * 3)
        whole = result(bench.run())
        plan = bench.run("input.mask=mask.n5", written(roi), seed=seed)
        inside = tuple(slice(a, b) for a, b in roi)
        wanted = np.zeros(shape, bool)
        wanted[inside] = np.kron(coarse, np.ones(ratio, bool))[inside]
        wanted = whole_cores(plan, wanted)
        outside = np.ones(shape, bool)
        outside[inside] = False
        wanted &= ~outside
        assert np.array_equal(result(plan), np.where(wanted, whole, 0)[inside])
        selection = RunFolder.from_output(Path(plan.out)).load_selection(plan)
        assert selection is not None
        assert bench.num_calls == windows_that_meet(plan, wanted) == selection.num_windows
        check_shards(plan, wanted[inside])


def whole_cores(plan: Plan, touched: np.ndarray) -> np.ndarray:
    """Return `touched` (z, y, x), with every voxel set of a window's core that has one that is set."""
    wanted = np.zeros_like(touched)
    sides = []
    for size, window, overlap in zip(plan.source.shape, plan.window, plan.overlap, strict=True):
        sides.append([slice(a, a + window - overlap) for a in range(0, size, window - overlap)])
    for core in itertools.product(*sides):
        wanted[core] = touched[core].any()
    return wanted


def check_shards(plan: Plan, wanted: np.ndarray) -> None:
    """Check that there are files for those shards that hold a `wanted` voxel, and for no others, at every level."""
    for level in range(len(plan.factors)):
        folder = Path(plan.out) / f"s{level}" / "c"
        found = {path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file()}
        touched = set()
        for index in np.ndindex(*plan.shards(level).counts):
            sides = zip(index, plan.shard, plan.factors[level], strict=True)
            if wanted[tuple(slice(i * s * f, (i + 1) * s * f) for i, s, f in sides)].any():
                touched.add(tuple(map(str, index)))
        assert found == touched


DIVISION = windowed((16, 16, 16), (8, 8, 8), (2, 2, 2), "hann")
SHARDS = ["output.shard=[8,8,16]", "output.chunk=[8,8,8]", "output.levels=2"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    write_volume(tmp_path / "in.n5", noise((40, 44, 50)))
    mask = np.zeros((10, 11, 25), np.uint16)
    mask[2, 3:5, 4] = 7
    mask[9, 0, 20:] = 1
    write_volume(tmp_path / "mask.n5", mask)
    return Bench(tmp_path, [*DIVISION, *SHARDS])


def test_a_block_whose_wanted_shards_are_its_own_leaves_no_tensor(tmp_path: Path) -> None:
    write_volume(tmp_path / "in.n5", noise((8, 8, 64)))
    mask = np.zeros((1, 1, 8), np.uint8)
    mask[..., 1] = 1
    write_volume(tmp_path / "mask.n5", mask)
    bench = Bench(tmp_path, [*windowed((8, 8, 8), (0, 0, 4), (1, 1, 8), "hann"), "output.shard=[8,8,8]"])
    plan = bench.plan("input.mask=mask.n5")
    assert plan.is_direct(1)
    assert not plan.is_direct(4)
    report = execute(plan, Inline().start, RunOptions(keep_tensors=True))
    assert not list((report.folder / "tensors.zarr").rglob("c"))


def test_coarser_levels_are_made_from_what_is_written(bench: Bench) -> None:
    plan = bench.run("input.mask=mask.n5")
    assert len(plan.factors) == 3
    for level in (1, 2):
        fine, step = result(plan, level - 1), plan.step(level)
        padded = np.pad(fine.astype(np.float64), [(0, -n % s) for n, s in zip(fine.shape, step, strict=True)], "edge")
        grouped = padded.reshape([v for n, s in zip(padded.shape, step, strict=True) for v in (n // s, s)])
        np.testing.assert_allclose(result(plan, level), grouped.mean(axis=(1, 3, 5)), rtol=1e-6)


@pytest.mark.parametrize("mode", ["stored", "streamed"])
def test_interrupted_anywhere_a_run_under_a_mask_goes_on_to_the_same_bytes(bench: Bench, mode: str) -> None:
    plan = bench.run("input.mask=mask.n5", "input.roi=3:39,:,5:", f"tensors.mode={mode}")
    undisturbed = fingerprint(plan.out)
    rng = np.random.default_rng(3)
    interruptions, fresh = 0, True
    for seed in itertools.count():
        try:
            report = execute(plan, Inline(seed, 2, int(rng.integers(2, 12))).start, RunOptions(fresh=fresh))
        except Stopped:
            interruptions, fresh = interruptions + 1, False
            continue
        break
    assert interruptions > 3
    assert report.missing == []
    assert fingerprint(plan.out) == undisturbed
    assert not list(report.folder.glob("tensors.*"))
    assert execute(plan, Inline().start).was_complete


def test_a_mask_that_changes_once_it_is_scanned_is_refused(bench: Bench) -> None:
    """Until it is as it was: what was scanned counts, and a finished run would not be of the mask that there is."""
    before = bench.run("input.mask=mask.n5")
    plan = bench.plan("input.mask=mask.n5")
    folder = RunFolder.from_output(Path(plan.out))
    while not folder.selection_file.exists():
        with pytest.raises(Stopped):
            execute(plan, Inline(0, 1, 6).start)
    shutil.copytree(bench.folder / "mask.n5", bench.folder / "kept.n5")
    write_volume(bench.folder / "mask.n5", np.ones((10, 11, 25), np.uint16))
    with pytest.raises(RunError, match=r"the mask .*mask\.n5:raw has changed since this output was begun"):
        execute(plan, Inline().start)
    shutil.rmtree(bench.folder / "mask.n5")
    shutil.copytree(bench.folder / "kept.n5", bench.folder / "mask.n5")
    ran(plan)
    assert np.array_equal(result(plan), result(before))
    attributes = json.loads((Path(plan.out) / "zarr.json").read_text())["attributes"]["volpipe"]
    assert attributes["wanted"]["windows"] == 4
    assert attributes["mask"]["step"] == [4.0, 4.0, 2.0]


def test_a_mask_lies_where_its_voxel_size_and_origin_say(tmp_path: Path) -> None:
    place_volume(tmp_path / "in.n5", np.ones((24, 24, 24), np.uint8), (8.0, 4.0, 4.0), (80.0, 40.0, 0.0))
    mask = np.zeros((3, 4, 4), np.uint8)
    mask[1, 3, 0] = 1
    place_volume(tmp_path / "mask.n5", mask, (64.0, 32.0, 32.0), (80.0 + 28, 40.0 + 14, 14.0))
    bench = Bench(tmp_path, windowed((2, 2, 2), (0, 0, 0), (4, 4, 4), "crop"))
    with pytest.raises(PlanError, match=r"axis y: 4 voxels of 8 of the volume's cover 0 to 32, the volume is 0 to 24"):
        bench.plan("input.mask=mask.n5")
    place_volume(tmp_path / "fits.n5", mask[:, 1:, :3], (64.0, 32.0, 32.0), (80.0 + 28, 40.0 + 14, 14.0))
    plan = bench.run("input.mask=fits.n5")
    wanted = np.zeros((24, 24, 24), bool)
    wanted[8:16, 16:24, :8] = True
    assert np.array_equal(result(plan) != 0, wanted)


def place_volume(
    path: Path, data: np.ndarray, size: tuple[float, float, float], origin: tuple[float, float, float]
) -> None:
    create_array(path, "s0", ArraySpec(data.shape, data.dtype, data.shape, codec="gzip"), "n5")
    open_writer(path, "s0").write(Box.from_shape(data.shape), data)
    multiscale = Multiscale((Level("s0"),), voxel_size_nm=size, origin_nm=origin)
    create_multiscale(path, multiscale, format="n5")


def test_a_roi_in_nanometres_is_that_in_voxels_and_lies_where_it_was_cut(tmp_path: Path) -> None:
    place_volume(tmp_path / "in.n5", noise((20, 24, 28)), (30.0, 8.0, 8.0), (60.0, 0.0, -8.0))
    bench = Bench(tmp_path, windowed((8, 8, 8), (2, 2, 2), (2, 2, 2), "hann"), (1, 2, 2))
    plans = [bench.run(f"input.roi={roi}") for roi in ("4:10,5:,:13", "0.18um:360nm,40 nm:,:96nm")]
    assert plans[0].roi == plans[1].roi == ((4, 5, 0), (10, 24, 13))
    assert np.array_equal(result(plans[0]), result(plans[1]))
    found = open_volume(plans[0].out)
    assert found.voxel_size_nm == (30.0, 4.0, 4.0)
    assert found.origin_nm == (60.0 + 4 * 30, 5 * 8 - 2.0, -8.0 - 2.0)


def test_statistics_are_those_of_the_whole_volume(bench: Bench) -> None:
    chosen = ("normalise.method=percentile", "output.intensity=same", "output.dtype=uint8")
    whole, plan = bench.run(*chosen), bench.run(*chosen, "input.roi=:10,:12,30:")
    assert np.array_equal(result(plan), result(whole)[:10, :12, 30:])


def test_reports_count_what_is_wanted(bench: Bench) -> None:
    plan = bench.plan("input.mask=mask.n5", "tensors.mode=stored")
    report = ran(plan)
    standing = find_status(plan.out)
    units = {name: stage.all for name, stage in standing.stages.items()}
    assert standing.is_complete
    selection = RunFolder(report.folder).load_selection(plan)
    assert selection is not None
    blocks = some_selected(selection, [voxels_of_blocks(plan, axis) for axis in range(3)])
    assert units["infer"] == units["factor"] == report.totals["infer"].units == len(blocks)
    assert 0 < units["pyramid 1"] < len(plan.shards(1))
    done = {name: totals.units for name, totals in report.totals.items() if name in units}
    assert done.pop("reassemble", 0) <= units.pop("reassemble")  # blocks finish the others
    assert done == units


@given(choices(longest=12))
def test_blocks_and_boxes_are_selected_where_a_voxel_is(selection: Selection) -> None:
    plan, voxels = selection.plan, selected_voxels(selection)
    blocks = some_selected(selection, [voxels_of_blocks(plan, axis) for axis in range(3)])
    assert {block for block in range(len(plan.blocks)) if selection.has_block(block)} == blocks
    for box in map(plan.shards().box, range(len(plan.shards()))):
        assert selection.touches(box) == voxels[box.slices].any()


def test_a_scan_that_was_interrupted_is_what_status_shows(bench: Bench) -> None:
    plan = bench.plan("input.mask=mask.n5")
    with pytest.raises(Stopped):
        execute(plan, Inline(0, 1, 4).start)
    standing = find_status(plan.out)
    assert not standing.is_complete
    assert [(name, stage.all) for name, stage in standing.stages.items()] == [("scan", 36)]
    assert 0 < standing.totals["scan"].units < 36


def test_another_region_or_mask_on_the_same_output_is_refused(bench: Bench) -> None:
    plan = bench.run("input.roi=:10,:,:")
    for other in ("input.roi=:11,:,:", "input.mask=mask.n5"):
        changed = bench.plan("input.roi=:10,:,:", other).model_copy(update={"out": plan.out})
        with pytest.raises(RunError, match=r"another recipe or input \(input"):
            execute(changed, Inline().start)


def test_an_output_over_its_mask_is_refused(bench: Bench) -> None:
    recipe = load_recipe(None, [*RAW, "input.mask=mask.n5", *DIVISION])
    for name in ("mask.n5", "mask.n5/out.zarr"):
        with pytest.raises(PlanError, match=r"would (overwrite|lie inside) the mask .*/mask\.n5; choose another --out"):
            prepare(str(bench.folder / "in.n5"), recipe, bench.folder / name, bench.folder)


def test_a_mask_of_nothing_is_refused_and_once_mended_it_runs(bench: Bench) -> None:
    write_volume(bench.folder / "zero.n5", np.zeros((10, 11, 25), np.uint8))
    plan = bench.plan("input.mask=zero.n5", "input.roi=:30,:,:")
    with pytest.raises(PlanError, match=r"^mask zero\.n5 is zero all over the roi 0:30,0:44,0:50, so nothing"):
        execute(plan, Inline().start)
    assert not Path(plan.out).exists()
    write_volume(bench.folder / "zero.n5", np.ones((10, 11, 25), np.uint8))
    for setting in ("input.mask=mask.n5", "input.mask=zero.n5"):
        mended = bench.plan(setting, "input.roi=:30,:,:").model_copy(update={"out": plan.out})
        ran(mended)
        Path(plan.out).rename(bench.folder / setting)
        RunFolder.from_output(Path(plan.out)).path.rename(bench.folder / f"{setting}.run")
    assert (open_volume(bench.folder / setting).open()[...] != 0).all()


def test_what_the_net_makes_of_unwanted_voxels_is_not_even_looked_at(tmp_path: Path) -> None:
    data = noise((8, 8, 32), "float32")
    data[4, 4, 10] = np.nan
    write_volume(tmp_path / "in.n5", data)
    write_volume(tmp_path / "mask.n5", np.repeat(np.array([1, 0], np.uint8), (7, 25)) * np.ones((8, 8, 1), np.uint8))
    bench = Bench(tmp_path, windowed((8, 8, 8), (0, 0, 4), (1, 1, 8), "hann"))
    chosen = ("output.dtype=uint8", "output.levels=0")
    with pytest.raises(RunStopped, match="gave 1 NaN and 0 infinite voxels in box 4:5,4:5,10:11"):
        bench.run(*chosen)
    plan = bench.run(*chosen, "input.mask=mask.n5")
    assert not result(plan)[:, :, 8:].any()
    assert result(plan)[:, :, :8].any()


def test_stored_windows_of_a_part_are_no_dataset(bench: Bench) -> None:
    plan = bench.plan("input.roi=:10,:,:", "tensors.mode=stored")
    report = execute(plan, Inline().start, RunOptions(keep_tensors=True))
    with pytest.raises(VolumeError, match="windows of a part of its volume"):
        WindowDataset.from_tensors(report.folder / "tensors.n5")


def test_the_command_takes_a_roi_and_a_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = noise((32, 32, 32)) // 2 + 1
    write_volume(tmp_path / "in.n5", data)
    mask = np.zeros((4, 4, 4), np.uint8)
    mask[0, 1, 3] = 1
    write_volume(tmp_path / "mask.n5", mask)
    give = giver(tmp_path, monkeypatch, capsys)
    division = set_each(*windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))
    command = ["run", *THREADS, *IDENTITY, *division, "--roi", "2:,:,:", "--mask", "mask.n5", "-o", "o.zarr", "in.n5"]
    ended = give(*command)
    assert ended.code == 0, ended.err
    expected = np.zeros_like(data)
    expected[:8, 8:16, 24:] = data[:8, 8:16, 24:]
    assert np.array_equal(open_volume(tmp_path / "o.zarr").open()[...], expected[2:])
    assert "roi       2:32,0:32,0:32 (z, y, x)" in ended.out
    assert give("status", "o.zarr").code == 0
    assert give(*command).out.startswith(f"{tmp_path / 'o.zarr'} is complete already")
    refused = give("run", *IDENTITY, "--roi", "9:3,:,:", "-o", "p.zarr", "in.n5")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


@examples(80, 200)
@given(plans())
def test_a_scan_of_a_block_sees_the_windows_of_the_cells_that_begin_in_its_core(plan: Plan) -> None:
    """Of blended windows these are others than the block computes."""
    lattice, inside = plan.lattice, list[list[bool]]()
    for axis, (stride, low, high) in enumerate(zip(lattice.stride, *plan.roi, strict=True)):
        inside.append([])
        for place in range(plan.blocks.counts[axis]):
            block = plan.blocks.number(tuple(place if other == axis else 0 for other in range(3)))
            core, seen = (
                (box.start[axis], box.stop[axis]) for box in (lattice.core_box(block), scanned_box(plan, block))
            )
            starts = [first for first in range(0, plan.source.shape[axis], stride) if core[0] <= first < core[1]]
            inside[axis].append(any(first < high and first + stride > low for first in starts))
            if starts:
                margin, window = lattice.margin[axis], lattice.window[axis]
                assert seen == (starts[0] - margin, starts[-1] - margin + window)
    touched = [all(flags) for flags in itertools.product(*inside)]
    owners = Selection(plan).owners
    assert touched == ([True] * len(plan.blocks) if owners is None else owners.tolist())


def test_outside_of_a_mask_that_covers_a_part_nothing_is_computed(tmp_path: Path) -> None:
    raw = np.random.default_rng(3).integers(1, 255, (24, 32, 40), np.uint8)
    place = {"resolution": [40.0, 4.0, 4.0]}
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("raw", data=raw).attrs.update(place)
        file.create_dataset("mask", data=np.ones((8, 16, 16), np.uint8)).attrs.update(
            place | {"offset": [320.0, 32.0, 64.0]}
        )
    window = ["net.name=identity", "windows.shape=[8,8,8]", "windows.overlap=0", "windows.block=[1,2,2]"]
    options = {"settings": window, "mask": str(tmp_path / "in.h5/mask"), "out": tmp_path / "out.zarr"}
    plan = vp.plan(tmp_path / "in.h5/raw", **options)
    assert [text for text in plan.warnings() if "covers the box 8:16,8:24,16:32 (z, y, x) of the volume alone" in text]
    vp.run(plan, site=Inline())
    expected = np.zeros_like(raw)
    expected[8:16, 8:24, 16:32] = raw[8:16, 8:24, 16:32]
    np.testing.assert_array_equal(vp.open(tmp_path / "out.zarr")[:], expected)
