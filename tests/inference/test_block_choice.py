"""The shape of blocks: few files and few fetches of a large volume, workers busy, and little memory."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from plans import facts, volume
from volumes import noise, windowed, write_volume

from volpipe.blockwise.pool import Capacity
from volpipe.errors import RunError
from volpipe.estimation.estimate import Slots, estimate
from volpipe.estimation.forecast import num_tried
from volpipe.estimation.memory import array_bytes
from volpipe.geometry.block_shape import LARGEST_SLABS, LARGEST_VOXELS, Sizes, choose_block
from volpipe.geometry.grid import Box, Lattice, Triple, cells, triple
from volpipe.inference.plan import Plan, make_plan
from volpipe.inference.selection import Selection
from volpipe.recipes.inference import load_recipe
from volpipe.stages.sizing import Sizing
from volpipe.volumes.storage.growing import part_bytes
from volpipe.volumes.storage.paths import locate
from volpipe.volumes.writer import shard_bytes
from volpipe.workflow.prepare import prepare

DENOISE = facts(halo=(10, 10, 10), window=(84, 84, 84))  # the default recipe's, about
HALF = ("windows.blend=hann", "windows.shape=[64,64,64]", "windows.overlap=32")
BUCKET = "s3://cells/out.zarr"
ROI = ("input.roi=8:96,:,:",)
MIB = 1 << 20


def plan_of(side: int, num_workers: int | None, *settings: str, out: str = "/data/out.zarr", channels: int = 1) -> Plan:
    given = dataclasses.replace(volume((side,) * 3), chunks=(64, 64, 64))
    net = DENOISE.model_copy(update={"out_channels": channels})
    return make_plan(load_recipe(None, settings), given, net, out=locate(out), num_workers=num_workers)


@pytest.mark.parametrize(
    ("side", "num_workers", "files", "fetches"),
    [
        (1024, 2, 30, 1.45),
        (2048, 2, 100, 1.3),
        (2048, None, 100, 1.7),
        (4096, 16, 200, 1.35),
        (100_000, 64, 1.2e6, 1.45),
    ],
)
def test_a_large_volume_has_few_files_and_its_chunks_are_fetched_few_times(
    side: int, num_workers: int | None, files: float, fetches: float
) -> None:
    plan = plan_of(side, num_workers)
    result = estimate(plan, plan_volume(side), 1.0, Slots(num_workers or 1, num_workers or 1, shared=True))
    assert result.output_files <= files
    assert result.amplification <= fetches
    assert array_bytes(plan) <= 512 * MIB  # of the GiB of a worker, beside its net


@pytest.mark.parametrize(
    ("side", "num_workers", "scratch", "files", "fetches"),
    [
        (1024, 2, 2.42, 30, 1.35),  # among few blocks, those whose slabs wait longest weigh more
        (2048, 2, 2.3, 100, 1.3),
        (2048, 16, 2.3, 200, 1.46),
        (4096, 16, 2.3, 200, 1.3),
        (100_000, 64, 2.3, 1.5e6, 1.3),
    ],
)
def test_so_has_one_whose_windows_are_blended(
    side: int, num_workers: int, scratch: float, files: float, fetches: float
) -> None:
    plan = plan_of(side, num_workers, *HALF)
    result = estimate(plan, plan_volume(side), 1.0, Slots(num_workers, num_workers, shared=True))
    assert plan.has_slabs
    assert result.scratch_bytes <= scratch * side**3  # where nothing compresses
    assert result.output_files <= files
    assert result.amplification <= fetches
    assert array_bytes(plan) <= 512 * MIB


@pytest.mark.parametrize("settings", [(), HALF, ("output.dtype=float32",)], ids=["crop", "half", "float32"])
@pytest.mark.parametrize(("side", "num_workers"), [(2048, 2), (4096, 16), (100_000, 64)])
def test_a_large_volume_has_as_few_files_in_a_bucket_as_on_a_disk(
    side: int, num_workers: int, settings: tuple[str, ...]
) -> None:
    plan, local = plan_of(side, num_workers, *settings, out=BUCKET), plan_of(side, num_workers, *settings)
    assert (plan.block, plan.shard, plan.slab) == (local.block, local.shard, local.slab)
    assert len(plan.shards()) == len(local.shards()) < side**3 / 256**3 / 10
    most_files = 8 if plan.num_sums else 2
    assert array_bytes(plan) - array_bytes(local) == (2 + most_files) * part_bytes(shard_bytes(plan.shard, plan.dtype))
    assert array_bytes(plan) <= 640 * MIB


@pytest.mark.parametrize("settings", [(), HALF], ids=["crop", "half"])
@pytest.mark.parametrize("side", [256, 512, 1024])
def test_a_volume_of_few_files_has_small_blocks_in_a_bucket(side: int, settings: tuple[str, ...]) -> None:
    """Several are on their way at a time, and workers have some at the end."""
    plan = plan_of(side, 2, *settings, out=BUCKET)
    assert not plan.has_slabs
    assert max(plan.shard) <= 256
    assert len(plan.shards()) <= 1024


def test_several_channels_stay_in_small_shards_in_a_bucket() -> None:
    """Their chunks would be in another order than those of a shard that is written at once."""
    assert plan_of(2048, 2, channels=3).has_slabs
    plan = plan_of(2048, 2, out=BUCKET, channels=3)
    assert not plan.has_slabs
    assert max(plan.shard) <= 256


@pytest.mark.parametrize(("start", "crop", "half"), [(0, 1.3, 1.2), (64, 1.3, 1.2), (1000, 1.4, 1.4), (1029, 1.4, 1.2)])
@pytest.mark.parametrize("settings", [(), HALF], ids=["crop", "half"])
def test_so_has_a_region_wherever_it_begins(start: int, crop: float, half: float, settings: tuple[str, ...]) -> None:
    roi = ",".join([f"{start}:{start + 2048}"] * 3)
    plan = plan_of(8192, 2, f"input.roi={roi}", *settings)
    result = estimate(plan, plan_volume(8192), 1.0, Slots(2, 2, shared=True))
    assert plan.has_slabs
    assert result.scratch_bytes <= 2.3 * 2048**3
    assert result.output_files <= 100
    assert result.amplification <= (half if settings else crop)
    assert array_bytes(plan) <= 512 * MIB
    assert plan.num_active >= 4 * 2 * (2 if plan.num_sums else 1)


@examples(60, 300)
@given(st.tuples(*[st.integers(200, 3000)] * 3), st.sampled_from(["crop", "hann"]), st.data())
def test_the_fetches_of_a_region_are_those_of_its_plan(shape: Triple, blend: str, data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, n - 100)) for n in shape]
    stops = [data.draw(st.integers(a + 100, n)) for a, n in zip(starts, shape, strict=True)]
    roi = Box(tuple(starts), tuple(stops))
    window = data.draw(st.sampled_from([44, 64, 84]))
    given_volume = dataclasses.replace(volume(shape), chunks=(64, 64, 64))
    windows = [f"windows.blend={blend}", f"windows.shape={[window] * 3}", "windows.overlap=20"]
    recipe = load_recipe(None, [f"input.roi={roi}", *windows])
    plan = make_plan(recipe, given_volume, DENOISE, out=Path("/data/out.zarr"), num_workers=2)
    assert plan.corner == tuple(starts)
    sizes = Sizes(shape, plan.overlap, triple(plan.lattice.stride), (1, 1, 1), is_blended=blend == "hann", region=roi)
    fetched = math.prod(sizes.fetches(axis, plan.block[axis]) for axis in range(3))
    assert sizes.num_filled(plan.block) == plan.num_active
    seen = Counter[tuple[int, ...]]()
    for block in range(len(plan.blocks)):
        if not plan.sum_box(block).is_empty:
            seen.update(cells(Selection(plan).input_box(block) & Box.from_shape(shape), (64, 64, 64)))
    assert fetched == pytest.approx(seen.total() / len(seen))


def plan_volume(side: int):  # type: ignore[no-untyped-def]  # see `plan_of`
    return dataclasses.replace(volume((side,) * 3), chunks=(64, 64, 64))


def test_where_windows_may_be_left_out_blocks_are_more() -> None:
    plan = plan_of(2048, 2, "input.empty=0")
    assert len(plan.blocks) == 64
    assert len(plan_of(2048, 2).blocks) == 8


@pytest.mark.parametrize("num_workers", [1, 2, 7, 16, 64, 300])
@pytest.mark.parametrize("side", [256, 700, 2048])
@pytest.mark.parametrize("settings", [(), HALF, ("windows.blend=hann",)], ids=["crop", "half", "auto"])
def test_workers_have_enough_blocks(side: int, num_workers: int, settings: tuple[str, ...]) -> None:
    plan = plan_of(side, num_workers, *settings)
    small = plan_of(side, 10**6, *settings).lattice.num_blocks
    assert plan.lattice.num_blocks >= min(small, 4 * num_workers)
    assert plan.lattice.num_blocks >= min(small, 8)


def test_a_run_over_few_large_blocks_tries_some_as_over_many_small_ones() -> None:
    """Else its time would not be known: three that are tried cost a run of a hundred per worker little."""
    large, small = plan_of(2048, 2), plan_of(2048, 2, "windows.block=[2,2,4]")
    assert len(large.blocks) == 8
    assert len(large.blocks) * num_tried(large) > 100 * 2
    assert num_tried(small) == 1


def test_256_cubed_is_divided_alike_for_any_site() -> None:
    assert {plan_of(256, num_workers).identity for num_workers in (None, 1, 2, 8, 100)} == {plan_of(256, 2).identity}


@pytest.mark.parametrize(
    "settings",
    [
        ("tensors.mode=stored",),
        ("output.format=n5",),
        ("output.format=precomputed",),
        ("output.shard=[64,64,64]",),
    ],
)
def test_blocks_that_are_not_computed_slab_by_slab_stay_small(settings: tuple[str, ...]) -> None:
    plan = plan_of(2048, 2, *settings)
    assert not plan.has_slabs or plan.slab * plan.lattice.stride[0] * math.prod(plan.blocks.cell[1:]) <= 1 << 24
    assert max(plan.blocks.cell) <= 256


TRIPLES = st.tuples(*[st.integers(1, 40)] * 3)


@examples(60, 300)
@given(TRIPLES, TRIPLES, st.tuples(*[st.integers(0, 6)] * 3), TRIPLES, st.integers(1, 9))
def test_fetches_are_the_chunks_under_each_block(
    shape: Triple, stride: Triple, overlap: Triple, chunk: Triple, block: int
) -> None:
    sizes = Sizes(shape, overlap, stride, (1, 1, 1), input_chunk=chunk)
    blended = dataclasses.replace(sizes, is_blended=True)
    for axis in range(3):
        n, step, before = shape[axis], block * stride[axis], overlap[axis] // 2
        fetched = 0
        for start in range(0, n, step):
            seen = range(start - before, min(start + step, n) + overlap[axis] - before)
            fetched += len({voxel // chunk[axis] for voxel in seen if 0 <= voxel < n})
        num_chunks = len({voxel // chunk[axis] for voxel in range(n)})
        assert sizes.fetches(axis, block) == fetched / num_chunks

        window = triple(s + o for s, o in zip(stride, overlap, strict=True))
        shift = triple(-(-(o // 2) // s) for o, s in zip(overlap, stride, strict=True))
        lattice = Lattice(shape, window, overlap, (block,) * 3, shift)
        fetched = 0
        for k in range(lattice.blocks.counts[axis]):
            if windows := lattice.windows_along(axis, k):
                first, last = windows.start * stride[axis] - before, (windows.stop - 1) * stride[axis] - before
                seen = range(first, min(last + stride[axis], n - before) + overlap[axis])
                fetched += len({voxel // chunk[axis] for voxel in seen if 0 <= voxel < n})
        assert blended.fetches(axis, block) == fetched / num_chunks


@examples(40, 200)
@given(
    st.tuples(*[st.integers(1, 6000)] * 3), st.sampled_from([24, 44, 64, 128]), st.sampled_from([1, 4, 12]),
    st.sampled_from([0, 4, 48]), st.sampled_from([None, 1, 8, 64]), st.booleans(),
)  # fmt: skip
def test_large_blocks_keep_their_bounds(
    shape: Triple, stride: int, voxel_bytes: int, sum_bytes: int, workers: int | None, is_part: bool
) -> None:
    sizes = Sizes(
        shape, (20, 20, 20), (stride,) * 3, (1, 1, 1), output_bytes=voxel_bytes, sum_bytes=sum_bytes,
        is_blended=sum_bytes > 0, num_workers=workers,
        region=Box(triple(n // 3 for n in shape), shape) if is_part else None,
    )  # fmt: skip
    small, large = (choose_block("auto", sizes, in_slabs=in_slabs) for in_slabs in (False, True))
    if large != small:
        assert math.prod(sizes.core(large)) <= LARGEST_VOXELS
        assert sizes.slab_bytes(large) <= LARGEST_SLABS
        assert sizes.num_filled(large) >= 4 * (16 if workers is None else workers)


def test_a_run_that_was_begun_keeps_its_blocks_on_another_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from volpipe.geometry import block_shape
    from volpipe.runs.run_folder import RunFolder

    monkeypatch.setattr(block_shape, "LARGEST_VOXELS", 48**3)
    monkeypatch.setattr(block_shape, "LARGEST_TARGET", 16)
    monkeypatch.setattr(block_shape, "BLOCK_TARGET", 16)
    monkeypatch.setattr(block_shape, "CHUNK_TARGET", 16)
    monkeypatch.setattr(block_shape, "SLAB_VOXELS", 1)
    volume_path = write_volume(tmp_path / "in.n5", noise((96, 96, 96)))
    recipe = load_recipe(None, ["net.name=identity", *windowed((16,) * 3, (0,) * 3, (1, 1, 1), "crop")[:2]])

    def made(num_workers: int, *, fresh: bool = False) -> Plan:
        out = tmp_path / "out.zarr"
        return prepare(
            str(volume_path), recipe, out, tmp_path, Sizing(Capacity(None, num_workers, on_gpu=False), fresh)
        )

    two, many = made(2), made(50)
    assert len(two.blocks) < len(many.blocks)
    folder = RunFolder.from_output(tmp_path / "out.zarr")
    folder.path.mkdir()
    folder.store(many)
    assert made(2).identity == many.identity
    assert made(2, fresh=True).identity == two.identity
    begun = prepare(str(volume_path), load_recipe(None, [*ROI, "net.name=identity"]), tmp_path / "roi.zarr", tmp_path)
    older = begun.changed(corner=(0, 0, 0))  # as regions were divided before
    RunFolder.from_output(tmp_path / "roi.zarr").path.mkdir()
    RunFolder.from_output(tmp_path / "roi.zarr").store(older)
    again = prepare(str(volume_path), begun.recipe, tmp_path / "roi.zarr", tmp_path)
    assert begun.corner == (8, 0, 0) and again.identity == older.identity
    other = load_recipe(None, ["net.name=identity", "windows.shape=[32,32,32]"])
    refusal = folder.difference(many, prepare(str(volume_path), other, tmp_path / "out.zarr", tmp_path), "run")
    assert isinstance(refusal, RunError) and "windows.shape" in str(refusal)
    assert folder.difference(many, many, "run") is None
