"""Instances of centres and flows by blocks are those in one piece, and those of the libraries' methods."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import make, renumbered
from command import THREADS, Give, giver, set_each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from instances_in_one_piece import flowed, grouped
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from segmented import Crowd, blobs, labelled, led_recipe, random_leads

from volpipe.errors import PlanError, RecipeError
from volpipe.recipes.segmentation import SegmentRecipe, load_segmentation
from volpipe.segmentation import boxes
from volpipe.segmentation.driver import plan_segmentation

LAWS = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHAPE = (26, 34, 30)


@pytest.fixture(autouse=True)
def _small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve the graph in boxes of few blocks, and number objects by few voxels, as of a large volume."""
    monkeypatch.setattr(boxes, "EDGE", 8)
    monkeypatch.setattr(boxes, "SLAB", 1000)


def cells(gap: float) -> tuple[np.ndarray, np.ndarray]:
    """Return labels (z, y, x) of touching cells, 0 where they are farther than `gap` from their middle, and middles."""
    labels, grid = blobs(SHAPE), np.indices(SHAPE)
    middles = np.array([np.rint(np.mean(np.nonzero(labels == n), axis=1)) for n in range(1, labels.max() + 1)])
    far = np.linalg.norm(grid - middles[labels - 1].transpose(3, 0, 1, 2), axis=0) > gap
    return np.where(far, 0, labels), middles


def centres_of(labels: np.ndarray, middles: np.ndarray) -> np.ndarray:
    """Return channels (5, z, y, x) of cells: foreground, heat map, offsets with noise."""
    grid = np.indices(labels.shape)
    distance = [np.linalg.norm(grid - middle[:, None, None, None], axis=0) for middle in middles]
    heat = np.exp(-((np.min(distance, axis=0) / 3) ** 2))
    offsets = np.where(labels > 0, middles[labels - 1].transpose(3, 0, 1, 2) - grid, 0)
    offsets = offsets + np.random.default_rng(0).normal(0, 1, offsets.shape)
    return np.concatenate([[labels > 0], [heat], offsets]).astype(np.float32)


def flows_of(labels: np.ndarray, middles: np.ndarray) -> np.ndarray:
    """Return channels (4, z, y, x) of cells: flows of length 5 with noise, the foreground as logits."""
    way = middles[labels - 1].transpose(3, 0, 1, 2) - np.indices(labels.shape)
    way = way / np.maximum(np.linalg.norm(way, axis=0), 1) + np.random.default_rng(0).normal(0, 0.1, way.shape)
    return np.concatenate([np.where(labels > 0, 5 * way, 0), [np.where(labels > 0, 4, -4)]]).astype(np.float32)


@LAWS
@given(
    kind=st.sampled_from(["centres", "flows"]),
    shape=st.tuples(*[st.integers(1, 14)] * 3),
    block=st.tuples(*[st.sampled_from([4, 6, 8])] * 3),
    axes=st.sampled_from([2, 3]),
    stitch=st.sampled_from([0, 0.2, 0.6]),
    seed=st.integers(0, 99),
)
def test_instances_by_blocks_are_those_in_one_piece(
    tmp_path_factory: pytest.TempPathFactory, kind: str, shape: tuple[int, int, int], block: tuple[int, int, int],
    axes: int, stitch: float, seed: int,
) -> None:  # fmt: skip
    """Of voxels that lead anywhere, also farther than they may."""
    folder = tmp_path_factory.mktemp(kind)
    make(folder / "a.zarr", random_leads(np.random.default_rng(seed), kind, shape, axes))
    rules: dict[str, Any] = {"window": (3, 3, 5)} if kind == "centres" else {"steps": 30}
    results = []
    for name, size in (("blocks", block), ("whole", (14, 14, 14))):
        reach = (0 if axes == 2 else 3, 2, 3)
        chosen = led_recipe(size, kind, stitch if axes == 2 else 0, reach=reach, **rules)
        data, made = labelled(folder / "a.zarr", folder / f"{name}.zarr", chosen, Crowd(3))
        results.append((data, made.table.read_text(), made.num_lost))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize("gap", [5.0, 99.0])
def test_centres_are_those_of_empanada(gap: float, tmp_path: Path) -> None:
    channels = centres_of(*cells(gap))
    make(tmp_path / "a.zarr", channels)
    found, made = labelled(
        tmp_path / "a.zarr", tmp_path / "l.zarr", led_recipe((14, 18, 16), "centres", reach=(20, 20, 20))
    )
    known = grouped(channels, 0.5, 0.1, (7, 7, 7))
    np.testing.assert_array_equal(found, renumbered(known))
    assert found.max() == 12 and made.num_lost == 0


@pytest.mark.parametrize("gap", [6.0, pytest.param(99.0, marks=pytest.mark.long)])
def test_flows_are_those_of_cellpose(gap: float, tmp_path: Path) -> None:
    channels = flows_of(*cells(gap))
    make(tmp_path / "a.zarr", channels)
    found, made = labelled(
        tmp_path / "a.zarr", tmp_path / "l.zarr", led_recipe((14, 18, 30), "flows", reach=(20, 20, 20))
    )
    np.testing.assert_array_equal(found, renumbered(flowed(channels, 0.0, 200)))
    assert found.max() == 12 and made.num_lost == 0


def test_parts_that_do_not_touch_are_one_object_where_they_lead_to_one_centre(tmp_path: Path) -> None:
    """Two blocks apart, with a centre that is no voxel of the object; and a part that is too far."""
    channels = np.zeros((5, 4, 4, 26), np.float32)
    channels[1, 2, 2, 9] = 1
    for x in (3, 15, 25):
        channels[0, 1:3, 1:3, x] = 1
        channels[4, ..., x] = 9 - x
    make(tmp_path / "a.zarr", channels)
    found, made = labelled(tmp_path / "a.zarr", tmp_path / "l.zarr", led_recipe((4, 4, 4), "centres", reach=(4, 4, 6)))
    known = np.zeros(found.shape, int)
    known[1:3, 1:3, [3, 15]] = 1
    np.testing.assert_array_equal(found, known)
    assert made.num_lost == 4
    assert (
        "4 voxels of the foreground lead nowhere within centres.reach=[4, 4, 6] and have no" in made.closing_lines()[-1]
    )


def test_slices_are_volumes_of_their_own_without_an_axis_z(tmp_path: Path) -> None:
    labels, middles = cells(6.0)
    whole = {"centres": centres_of(labels, middles), "flows": flows_of(labels, middles)}
    for kind, channels in whole.items():
        flat = np.delete(channels, -3 if kind == "centres" else 0, axis=0)
        reach = {"reach": (0, 20, 20)}
        make(tmp_path / f"{kind}.zarr", flat)
        found, _ = labelled(
            tmp_path / f"{kind}.zarr", tmp_path / "l.zarr", led_recipe((8, 18, 30), kind, **reach), fresh=True
        )
        for z in (7, 13):
            make(tmp_path / f"{kind}_{z}.zarr", flat[:, z : z + 1])
            chosen = led_recipe((8, 40, 40), kind, **reach)
            one, _ = labelled(tmp_path / f"{kind}_{z}.zarr", tmp_path / f"{kind}_{z}_l.zarr", chosen)
            assert one.max() > 1
            np.testing.assert_array_equal(renumbered(found[z]), renumbered(one[0]))


@pytest.mark.parametrize("stitch", [0.3, 0.6])
def test_slices_are_stitched_where_their_objects_overlap_enough(stitch: float, tmp_path: Path) -> None:
    flat = np.delete(centres_of(*cells(6.0)), -3, axis=0)
    flat[2:] += np.random.default_rng(1).normal(0, 2, flat[2:].shape)
    make(tmp_path / "a.zarr", flat)
    found = []
    for share in (0, stitch):
        chosen = led_recipe((6, 18, 30), "centres", share, reach=(0, 20, 20))
        found.append(labelled(tmp_path / "a.zarr", tmp_path / f"{share}.zarr", chosen)[0])
    apart, ends = found[0], []
    sizes = np.bincount(apart.ravel())
    for before, after in itertools.pairwise(apart):
        pairs, overlap = np.unique(np.stack([before.ravel(), after.ravel()]), axis=1, return_counts=True)
        union = sizes[pairs].sum(axis=0) - overlap
        ends.append(pairs[:, (pairs > 0).all(axis=0) & (overlap >= stitch * union)])
    rows, columns = np.concatenate(ends, axis=1)
    graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(len(sizes),) * 2)
    known = 1 + connected_components(graph)[1][apart]
    np.testing.assert_array_equal(found[1], renumbered(np.where(apart > 0, known, 0)))
    assert 6 < found[1].max() < apart.max()


def test_channels_in_another_order_are_named(tmp_path: Path) -> None:
    channels = centres_of(*cells(5.0))
    make(tmp_path / "a.zarr", channels)
    known, _ = labelled(tmp_path / "a.zarr", tmp_path / "l.zarr", led_recipe((8, 16, 30), "centres", reach=(8, 8, 8)))
    order = [3, 0, 5, 1, 4]  # where foreground, heat map, z, y, x lie
    mixed = np.full((6, *SHAPE), 7, np.float32)
    mixed[order] = channels
    make(tmp_path / "m.zarr", mixed)
    chosen = led_recipe((8, 16, 30), "centres", reach=(8, 8, 8)).model_dump()
    chosen["input"]["channels"] = order
    found, _ = labelled(tmp_path / "m.zarr", tmp_path / "n.zarr", SegmentRecipe.model_validate(chosen))
    np.testing.assert_array_equal(found, known)


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (["input.kind=flows"], r"flows.reach must be set: the largest radius .* \[0, 20, 20\] for flows within slices"),
        (
            ["input.kind=flows", "flows.reach=[5,5,5]", "objects.method=watershed"],
            "watershed is not for input.kind flo",
        ),
        (["objects.method=centres"], "objects.method centres is not for input.kind affinities"),
        (["input.kind=centres", "centres.reach=[5,5,5]", "input.range=[0,1]"], "range is for probabilities"),
        (["input.channels=[0,1]"], "channels are for centres and flows; leave them out for affinities"),
        (["objects.stitch=0.5"], "objects.stitch is for centres and flows of single slices"),
        (["centres.window=[7,6,7]"], r"window \[7, 6, 7\] has no middle; give odd numbers"),
    ],
)
def test_recipes_that_do_not_go_together_are_refused(chosen: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        load_segmentation(None, chosen)


@pytest.mark.parametrize(
    ("data", "kind", "reach", "channels", "sentence"),
    [
        (np.zeros((4, 4, 4, 4), np.float32), "centres", 2, None, r"reach is 2 along z, and .* no displacement along z"),
        (np.zeros((4, 4, 4, 4), np.float32), "flows", 0, None, r"reach is 0 along z, and .* a displacement along z"),
        (
            np.zeros((6, 4, 4, 4), np.float32),
            "flows",
            2,
            None,
            r"flows are 4 channels, .* or 3 without z, and .* has 6",
        ),
        (
            np.zeros((4, 4, 4, 4), np.float32),
            "flows",
            2,
            [0, 1, 2, 4],
            r"input.channels \[.*\]: .* has 4 channels, num",
        ),
        (np.zeros((4, 4, 4, 4), np.float32), "flows", 2, [], r"without z, and input.channels names 0; name them"),
        (np.zeros((4, 4, 4, 4), np.uint8), "flows", 2, None, "uint8 voxels, and flows go either way: .*dtype=float32"),
    ],
)
def test_volumes_that_do_not_fit_are_refused(
    data: np.ndarray, kind: str, reach: int, channels: list[int] | None, sentence: str, tmp_path: Path
) -> None:
    make(tmp_path / "a.zarr", data)
    tree = led_recipe((4, 4, 4), kind, reach=(reach, 2, 2)).model_dump()
    tree["input"]["channels"] = channels
    with pytest.raises(PlanError, match=sentence):
        plan_segmentation(str(tmp_path / "a.zarr"), SegmentRecipe.model_validate(tree), tmp_path / "l.zarr", tmp_path)


def test_what_a_sample_shows_to_be_wrong_is_said(tmp_path: Path) -> None:
    labels, middles = cells(5.0)
    centres, flows = centres_of(labels, middles), flows_of(labels, middles)
    centres[2] *= 9
    flows[:3] /= 100
    for kind, channels, sentence in (
        ("centres", centres, "offsets of .* are up to .* along z in a sample, and centres.reach is"),
        ("flows", flows, r"flows of .* are steps of 0\.01 voxels in a sample"),
        ("flows", np.abs(flows) + 1, "all of it above flows.foreground=0: is it the right channel"),
    ):
        make(tmp_path / f"{len(list(tmp_path.iterdir()))}.zarr", channels)
        source = sorted(tmp_path.glob("*.zarr"))[-1]
        chosen = led_recipe((8, 16, 30), kind, reach=(8, 8, 8))
        plan = plan_segmentation(str(source), chosen, tmp_path / "l.out.zarr", tmp_path)
        assert any(re.search(sentence, note) for note in plan.warnings()), plan.warnings()


def test_the_commands_make_verify_and_reproduce_instances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give: Give = giver(tmp_path, monkeypatch, capsys)
    make(tmp_path / "a.zarr", flows_of(*cells(6.0)))
    keys = set_each("input.kind=flows", "flows.reach=[4,4,3]", "output.block=[16,16,16]", "output.chunk=[8,8,8]")
    ended = give("segment", "a.zarr", "-o", "l.zarr", "--json", "l.json", *THREADS, *keys)
    assert ended.code == 0, ended.err
    facts = json.loads((tmp_path / "l.json").read_text())
    assert facts["objects"] == 12 and facts["lost"] > 0
    assert f"{facts['lost']:,} voxels of the foreground lead nowhere" in " ".join(ended.out.split())
    assert give("verify", "--recompute", "4", "l.zarr").code == 0
    again = give("reproduce", "l.zarr").out
    assert 'input.kind="flows"' in again and "flows.reach=[4, 4, 3]" in again
