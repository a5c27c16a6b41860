"""Plans: their geometry is that of brute force, their sizes are sane, their refusals say what would fit."""

from __future__ import annotations

import math
import re
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import blocks_by_shard, facts, planned, plans, volume, voxels_of_blocks

from volpipe.errors import PlanError
from volpipe.geometry.block_shape import (
    BLOCKS_PER_WORKER,
    ENOUGH_BLOCKS,
    LARGEST_VOXELS,
    LONGEST,
    USUAL_WORKERS,
)
from volpipe.inference.plan import Plan, load_plan
from volpipe.inference.tiling import LARGEST_WASTE
from volpipe.nets.facts import NetFacts
from volpipe.nets.identity import NetIdentity
from volpipe.volumes.volume import View

FEW = settings(max_examples=60)


@FEW
@given(plans())
def test_blocks_and_shards_that_share_a_voxel_know_each_other(plan: Plan) -> None:
    expected = blocks_by_shard(plan)
    assert [list(plan.blocks_of_shard(shard)) for shard in range(len(plan.shards()))] == expected
    for block in range(len(plan.blocks)):
        assert list(plan.shards_of_block(block)) == [s for s, blocks in enumerate(expected) if block in blocks]


@FEW
@given(plans())
def test_shards_of_one_block_are_direct_and_the_others_are_counted(plan: Plan) -> None:
    num_blocks = [len(blocks) for blocks in blocks_by_shard(plan)]
    assert min(num_blocks) > 0
    assert [plan.is_direct(shard) for shard in range(len(num_blocks))] == [n == 1 for n in num_blocks]
    assert plan.num_sums == sum(n > 1 for n in num_blocks)
    if plan.recipe.windows.blend == "crop" and plan.roi[0] == (0, 0, 0):
        assert plan.num_sums == 0


@FEW
@given(plans())
def test_the_sum_of_a_block_reaches_as_far_as_its_windows(plan: Plan) -> None:
    along = [voxels_of_blocks(plan, axis) for axis in range(3)]
    for block in range(len(plan.blocks)):
        index, box = plan.blocks.index(block), plan.sum_box(block)
        for axis in range(3):
            assert set(range(box.start[axis], box.stop[axis])) == along[axis][index[axis]]
    num_reached = [sum(bool(voxels) for voxels in blocks) for blocks in along]
    assert plan.num_active == math.prod(num_reached)


@FEW
@given(plans())
def test_block_cores_are_whole_shards_and_shards_whole_chunks(plan: Plan) -> None:
    for core, scale, shard, chunk in zip(plan.blocks.cell, plan.net.scale, plan.shard, plan.chunk, strict=True):
        assert core * scale % shard == 0
        assert shard % chunk == 0


@FEW
@given(plans())
def test_block_tensors_hold_the_sum_on_whole_chunks(plan: Plan) -> None:
    for region in plan.sum_parts:
        assert all(size % chunk == 0 for size, chunk in zip(region.shape, plan.sum_chunk, strict=True))
    for block in range(len(plan.blocks)):
        if plan.sum_box(block).is_empty:
            continue  # far from the region of interest, or without a window
        box, seen = plan.sum_box(block), np.zeros(plan.sum_box(block).shape, int)
        assert all(n <= most for n, most in zip(box.shape, plan.sum_shape, strict=True))
        for region in plan.sum_parts:
            seen[(region.shift(plan.core_start(block)) & box).relative_to(box.start).slices] += 1
        assert (seen == 1).all()


@FEW
@given(plans())
def test_each_level_is_the_one_before_halved_on_some_axes(plan: Plan) -> None:
    assert plan.factors[0] == (1, 1, 1)
    assert plan.level_shape(0) == tuple((b - a) * s for a, b, s in zip(*plan.roi, plan.net.scale, strict=True))
    assert len(plan.factors) <= 1 + int(plan.recipe.output.levels)
    for level in range(1, len(plan.factors)):
        step, finer = plan.step(level), plan.level_shape(level - 1)
        assert 2 in step and set(step) <= {1, 2}
        assert all(f == b * s for f, b, s in zip(plan.factors[level], plan.factors[level - 1], step, strict=True))
        assert plan.level_shape(level) == tuple(math.ceil(n / s) for n, s in zip(finer, step, strict=True))
        assert all(s == 1 for n, s in zip(finer, step, strict=True) if n == 1)


@given(st.tuples(*[st.integers(1, 30_000)] * 3), st.tuples(*[st.floats(1, 60)] * 3), st.sampled_from([1, 2, 4]))
def test_levels_tend_to_cubes_and_end_at_64_voxels(
    shape: tuple[int, int, int], voxel: tuple[float, float, float], scale: int
) -> None:
    plan = planned(of=volume(shape, voxel_size_nm=voxel), net=facts(scale=(scale, 1, 1)))
    fine = (voxel[0] / scale, voxel[1], voxel[2])
    assert max(plan.level_shape(len(plan.factors) - 1)) <= 64
    assert all(max(plan.level_shape(level)) > 64 for level in range(len(plan.factors) - 1))
    for level, factor in enumerate(plan.factors):
        if 1 in plan.level_shape(level):
            break  # an axis that has run out stays behind
        size = [v * f for v, f in zip(fine, factor, strict=True)]
        assert max(size) / min(size) <= max(2.0, max(fine) / min(fine) / 1.5**level) * (1 + 1e-9)


def test_thick_sections_wait_until_the_other_axes_are_as_coarse() -> None:
    plan = planned(of=volume((500, 2000, 2000), voxel_size_nm=(16.0, 8.0, 8.0)))
    assert plan.factors == ((1, 1, 1), (1, 2, 2), (2, 4, 4), (4, 8, 8), (8, 16, 16), (16, 32, 32))
    enlarged = planned(of=volume((500, 2000, 2000), voxel_size_nm=(32.0, 8.0, 8.0)), net=facts(scale=(4, 1, 1)))
    assert enlarged.factors[:2] == ((1, 1, 1), (2, 2, 2))


def cubic(halo: int = 0, stride: int = 1, window: int = 64, **more: object) -> NetFacts:
    return facts(halo=(halo,) * 3, stride=(stride,) * 3, window=(window,) * 3, **more)


NETS = [
    cubic(),
    cubic(halo=23, stride=4, window=128),
    cubic(halo=60, stride=4, window=248),
    cubic(halo=60, stride=4),  # a net from outside that says its halo, and no window
    cubic(halo=30, stride=2),
    cubic(stride=3),
    cubic(halo=5, stride=16),
    cubic(scale=(4, 1, 1)),
    cubic(halo=2, scale=(2, 2, 2)),
    facts(halo=(0, 23, 23), stride=(1, 4, 4), window=(16, 128, 128)),
    facts(halo=(2, 20, 20), stride=(1, 8, 8), window=(20, 128, 128), scale=(5, 1, 1)),
]
SHAPES = [(1, 1, 1), (2, 3, 5), (1, 512, 512), (63, 64, 65), (1000, 1000, 1000), (7, 20_000, 20_000), (100_000,) * 3]


@pytest.mark.parametrize("net", NETS, ids=lambda net: f"halo{net.halo}-stride{net.stride}-scale{net.scale}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("blend", ["crop", "hann"])
def test_what_auto_chooses_is_sane(net: NetFacts, shape: tuple[int, int, int], blend: str) -> None:
    plan = planned(f"windows.blend={blend}", of=volume(shape), net=net)
    for axis in range(3):
        window, overlap, stride, halo = plan.window[axis], plan.overlap[axis], net.stride[axis], net.halo[axis]
        step = (window - overlap) * net.scale[axis]
        core = plan.block[axis] * step
        num_windows = plan.lattice.counts[axis]
        if blend == "crop":
            assert halo <= overlap // 2 < halo + stride
        assert window % stride == overlap // 2 % stride == 0
        assert window <= max(net.window[axis], 4 * halo) + stride
        covered = num_windows * (window - overlap)
        assert covered <= max(LARGEST_WASTE * shape[axis], shape[axis] + num_windows * stride)
        if num_windows > 100:
            assert window >= net.window[axis]
            assert 4 * (window - overlap) >= halo if blend == "crop" else window / 4 <= overlap <= window / 2
        assert core <= (LONGEST if plan.has_slabs else 384) or plan.block[axis] == 1
        if min(shape) >= 1000:
            assert core >= 96 or core + step > 256
        assert plan.shard[axis] == core
        assert 32 <= plan.chunk[axis] <= 128 or plan.chunk[axis] == core < 32
        assert plan.sum_chunk[axis] <= 64
    assert math.prod(plan.shard) <= LARGEST_VOXELS if plan.has_slabs else math.prod(plan.sum_shape) <= 1 << 28
    assert not plan.has_slabs or len(plan.blocks) >= BLOCKS_PER_WORKER * USUAL_WORKERS
    assert len(plan.blocks) >= min(
        ENOUGH_BLOCKS, math.prod(-(-n * s // 128) for n, s in zip(shape, net.scale, strict=True)) // 8
    )


def test_a_plan_of_a_petavoxel_is_made_at_once_and_lists_nothing() -> None:
    net = cubic(halo=23, stride=4, window=128)
    tracemalloc.start()
    plan = planned("windows.blend=hann", "output.shard=[64,64,64]", of=volume((100_000,) * 3), net=net)
    last = len(plan.shards()) - 1
    assert len(plan.blocks) > 10**7
    assert 0 < plan.num_sums < len(plan.shards())
    assert plan.blocks_of_shard(last)[-1] == len(plan.blocks) - 1
    assert plan.shards_of_block(len(plan.blocks) - 1)[-1] == last
    assert len(plan.model_dump_json()) < 10_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


REFUSED = [
    (["windows.shape=[64,66,64]"], facts(stride=(4, 4, 4)), "axis y: window 66 .* stride 4; use 64 or 68"),
    (["windows.shape=[2,64,64]"], facts(stride=(4, 4, 4)), "axis z: window 2 .* stride 4; use 4"),
    (["windows.shape=[64,64,0]"], facts(), "axis x: window 0 is below 1"),
    (["windows.shape=[50,64,64]"], cubic(24, 4), "axis z: window 50 .* stride 4; use 52"),
    (["windows.shape=[48,64,64]"], cubic(24, 4), "axis z: window 48 .* halo 24 .*use 52 or more"),
    (["windows.overlap=12", "windows.blend=hann"], facts(stride=(4, 4, 4)), "axis z: overlap 12 .* use 8 or 16"),
    (["windows.overlap=[48,48,60]"], cubic(24, 4, 64), "axis x: overlap 60 .* stride 4; use 56"),
    (["windows.overlap=70"], facts(), "axis z: overlap 70 .* window 64; use 0 to 62"),
    (["windows.overlap=-2"], cubic(4, 2), "axis z: overlap -2 .* window 64; use 8 to 60"),
    (["windows.overlap=[46,46,20]"], cubic(23, 1, 128), "axis x: blend crop needs an overlap of 46 .*halo 23.* not 20"),
    (["windows.block=[2,2,0]"], facts(), r"windows.block \(2, 2, 0\) must be at least 1"),
    (
        ["windows.shape=[64,64,64]", "windows.block=[2,2,2]", "output.shard=[64,96,64]"],
        facts(),
        "axis y: .* 128 .* output.shard 96; use 128",
    ),
    (["windows.shape=[64,64,64]", "output.shard=[0,64,64]"], facts(), "axis z: .* 64 .* output.shard 0; use 1"),
    (["windows.shape=[64,64,64]", "output.chunk=[32,32,48]"], facts(), "axis x: .* 64 .* output.chunk 48; use 64"),
    (["windows.shape=[64,64,64]", "output.chunk=[32,-1,32]"], facts(), "axis y: .* 64 .* output.chunk -1; use 1"),
]


@pytest.mark.parametrize(("given_", "net", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_refusal_names_the_axis_both_values_and_what_fits(given_: list[str], net: NetFacts, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        planned(*given_, net=net)


def test_a_net_of_other_channels_is_refused() -> None:
    with pytest.raises(PlanError, match=r"net net takes 2 channels, the volume /data/in\.n5:raw has 1"):
        planned(net=facts(in_channels=2))
    assert planned(of=volume(num_channels=2), net=facts(in_channels=2)).source.num_channels == 2


def test_a_net_that_normalises_by_window_is_tiled_at_the_edge_unless_the_recipe_says_otherwise() -> None:
    net = facts(tile_invariant=False)
    assert (planned(net=net).blend, planned(net=net).lattice.placement) == ("gaussian", "edge")
    cropped = planned("windows.blend=crop", net=net)
    assert (cropped.blend, cropped.lattice.placement) == ("crop", "lattice")


ADVICE = {
    r"axis (\w): window .*multiple.*; use ([\d or]+)$": "shape",
    r"axis (\w): window .* no core .*; use (\d+) or more": "shape",
    r"axis (\w): blend crop needs an overlap of (\d+)": "overlap",
    r"axis (\w): overlap .*; use (\d+(?: to \d+)?)$": "overlap",
    r"axis (\w): overlap .* off .*; use ([\d or]+), a": "overlap",
    r"axis (\w): a block .* output.shard .*; use (\d+)": "shard",
    r"axis (\w): a shard .* output.chunk .*; use (\d+)": "chunk",
}
WORDS = {"shape": "windows.shape", "overlap": "windows.overlap", "shard": "output.shard", "chunk": "output.chunk"}


def advice(sentence: str) -> tuple[str, int, list[int]]:
    """Return what the sentence says to change: which size, of which axis, and to which values."""
    for pattern, what in ADVICE.items():
        if found := re.search(pattern, sentence):
            return what, "zyx".index(found[1]), [int(n) for n in re.findall(r"\d+", found[2])]
    raise AssertionError(f"no advice in {sentence!r}")


def complaint(sizes: dict[str, list[int]], blend: str, net: NetFacts) -> str | None:
    chosen = [f"{WORDS[what]}={size}" for what, size in sizes.items()]
    try:
        planned(*chosen, f"windows.blend={blend}", "windows.block=[2,1,3]", net=net)
    except PlanError as error:
        return str(error)
    return None


@settings(max_examples=200)
@given(
    st.fixed_dictionaries(
        {
            "shape": st.lists(st.integers(1, 70), min_size=3, max_size=3),
            "overlap": st.lists(st.integers(-1, 70), min_size=3, max_size=3),
            "shard": st.lists(st.integers(0, 40), min_size=3, max_size=3),
            "chunk": st.lists(st.integers(0, 40), min_size=3, max_size=3),
        }
    ),
    st.sampled_from(["crop", "hann"]),
    st.tuples(*[st.integers(1, 5)] * 3),
    st.tuples(*[st.integers(0, 20)] * 3),
    st.randoms(use_true_random=False),
)
def test_whoever_does_as_refusals_say_has_a_plan(
    sizes: dict[str, list[int]], blend: str, stride: tuple[int, ...], halo: tuple[int, ...], random: Any
) -> None:
    """No advice is refused itself: each size changes at most once."""
    net = facts(stride=stride, halo=halo)
    changed: list[tuple[str, int]] = []
    while sentence := complaint(sizes, blend, net):
        what, axis, values = advice(sentence)
        sizes[what][axis] = random.choice(values)
        changed.append((what, axis))
    assert len(changed) == len(set(changed))


@given(plans())
def test_a_plan_survives_its_file(plan: Plan) -> None:
    again = Plan.model_validate_json(plan.model_dump_json(indent=1))
    assert again == plan
    assert again.identity == plan.identity


def other(value: object) -> object:
    """Return something else of much the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return (*value[:-1], other(value[-1])) if value else ("more",)
    if isinstance(value, View):
        return replace(value, channel="else")
    if isinstance(value, NetIdentity):
        return value.model_copy(update={"members": (value,)})
    return {"more": 1} if isinstance(value, dict) else f"{value} else"


def remade(plan: Plan, **changed: object) -> Plan:
    return Plan.model_construct(**{name: getattr(plan, name) for name in Plan.model_fields} | changed)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of values that are not what the field says
def test_whatever_changes_in_recipe_source_or_net_changes_the_identity() -> None:
    plan = planned(of=volume(voxel_size_nm=(4.0, 4.0, 4.0)))
    identities = [plan.identity, remade(plan).identity]
    for part in ("source", "net"):
        whole = getattr(plan, part)
        for name in type(whole).model_fields.keys() - {"slices", "also", "own_channels", "own_dtype"}:
            value = (whole,) if name == "members" else other(getattr(whole, name))
            changed = whole.model_copy(update={name: value})
            identities.append(remade(plan, **{part: changed}).identity)
    several = plan.source.model_copy(update={"also": (plan.source,)})
    for name in ("also", "own_channels", "own_dtype"):  # which only several volumes have
        value = (plan.source, plan.source) if name == "also" else other(getattr(several, name))
        identities.append(remade(plan, source=several.model_copy(update={name: value})).identity)
    for section, whole in plan.recipe:
        for name in type(whole).model_fields:
            changed = whole.model_copy(update={name: other(getattr(whole, name))})
            recipe = plan.recipe.model_copy(update={section: changed})
            identities.append(remade(plan, recipe=recipe).identity)
    renamed = plan.source.model_copy(
        update={"slices": "other names"}
    )  # files of slices are compared by the identity of the input
    assert identities[0] == identities[1] == remade(plan, source=renamed).identity
    assert len(set(identities)) == len(identities) - 1


def test_a_worker_refuses_the_plan_of_another_run(tmp_path: Any) -> None:
    plan = planned()
    file = tmp_path / "plan.json"
    file.write_text(plan.model_dump_json(), encoding="utf-8")
    assert load_plan(str(file), plan.identity) == plan
    with pytest.raises(PlanError, match=f"{file} holds plan {plan.identity}, not 0123"):
        load_plan(str(file), "0123")


@pytest.mark.parametrize(
    ("dtype", "intensity", "setting", "expected"),
    [
        ("uint8", "same", "auto", "uint8"),
        ("uint16", "same", "auto", "uint16"),
        ("int16", "same", "auto", "int16"),
        ("float32", "same", "auto", "float32"),
        ("float64", "same", "auto", "float32"),
        ("uint32", "same", "auto", "float32"),
        ("uint16", "unit", "auto", "uint8"),
        ("uint8", "raw", "auto", "float32"),
        ("uint8", "raw", "int16", "int16"),
    ],
)
def test_the_type_of_the_output_follows_the_meaning_of_its_values(
    dtype: str, intensity: str, setting: str, expected: str
) -> None:
    of, grey = volume(dtype=dtype), ("normalise.low=0", "normalise.high=9")
    plan = planned(f"output.dtype={setting}", *grey, of=of, net=facts(intensity=intensity))
    assert plan.dtype == np.dtype(expected)
    if setting == "auto":
        said = planned(f"output.intensity={intensity}", *grey, of=of, net=facts(intensity="raw"))
        assert said.dtype == np.dtype(expected)


def test_windows_are_streamed_unless_the_recipe_says_otherwise() -> None:
    assert planned().mode == "streamed"
    assert planned("tensors.mode=stored").mode == "stored"
