"""Labels made by blocks are those made in one piece, to the last voxel; and those are what brute force finds."""

from __future__ import annotations

import csv
import json
import platform
import re
import signal
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import make, renumbered
from command import begin, finish, giver, processes_in, set_each, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline import Stopped
from scipy import ndimage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from segmented import Crowd, blobs, labelled, noisy, num_noted, recipe, tree
from skimage import measure

from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.blockwise.journal import Record, read_records
from volpipe.errors import RunStopped
from volpipe.evaluation.label_scores import overlaps
from volpipe.evaluation.scores import label_scores
from volpipe.segmentation import boxes
from volpipe.segmentation.boundary_maps import as_bytes
from volpipe.segmentation.tasks import RESULTS
from volpipe.volumes.formats.container import read_attributes
from volpipe.volumes.volume import open_volume

SHAPES = st.tuples(*[st.integers(1, 13)] * 3)
BLOCKS = st.tuples(*[st.sampled_from([4, 6, 8, 14])] * 3)
STAGES = {"pieces", "edges", "solve", "number", "name", "graph", "paint"}
LAWS = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve the graph in boxes of few blocks, and number objects by few voxels, as of a large volume."""
    monkeypatch.setattr(boxes, "EDGE", 8)
    monkeypatch.setattr(boxes, "SLAB", 1000)


@pytest.fixture
def chances(tmp_path: Path) -> Path:
    """Noisy affinities (9, 13, 22, 17) of blobs at a.zarr, uint8."""
    make(tmp_path / "a.zarr", noisy(blobs((13, 22, 17)), 0.2))
    return tmp_path / "a.zarr"


# ---- components


@LAWS
@given(shape=SHAPES, block=BLOCKS, slots=st.integers(1, 4), share=st.floats(0.2, 0.8), seed=st.integers(0, 99))
def test_components_by_blocks_are_those_of_scikit_image_in_one_piece(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int, int],
    block: tuple[int, int, int],
    slots: int,
    share: float,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("components")
    mask = np.random.default_rng(seed).random(shape) < share
    make(folder / "f.zarr", mask.astype(np.uint8) * 255)
    chosen = recipe(block, "foreground", method="components")
    found, made = labelled(folder / "f.zarr", folder / "l.zarr", chosen, Crowd(slots))
    known = measure.label(mask, connectivity=1)  # which numbers them in the order of their first voxels
    np.testing.assert_array_equal(found, known)
    assert made.num_objects == known.max()


@LAWS
@given(shape=SHAPES, block=BLOCKS, slots=st.integers(1, 4), threshold=st.floats(0.3, 1.0), seed=st.integers(0, 99))
def test_components_of_affinities_are_those_of_the_graph_of_all_voxels(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int, int],
    block: tuple[int, int, int],
    slots: int,
    threshold: float,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("components")
    data = np.random.default_rng(seed).random((9, *shape)).astype(np.float32)
    make(folder / "a.zarr", data)
    number = np.arange(np.prod(shape)).reshape(shape)
    ends: list[tuple[np.ndarray, np.ndarray]] = []
    for axis in range(3):
        joined = np.rint(np.take(data[axis], range(1, shape[axis]), axis) * 255) >= threshold * 255 - 1e-9
        here, before = (np.take(number, range(a, shape[axis] - 1 + a), axis)[joined] for a in (1, 0))
        ends.append((here, before))
    rows, columns = (np.concatenate(side) for side in zip(*ends, strict=True))
    graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(number.size,) * 2)
    known = renumbered(connected_components(graph)[1].reshape(shape) + 1)
    found, _ = labelled(folder / "a.zarr", folder / "l.zarr", recipe(block, method="components", threshold=threshold))
    np.testing.assert_array_equal(found, known)


def test_membranes_part_what_foreground_joins(tmp_path: Path) -> None:
    inside = np.random.default_rng(3).integers(0, 256, (9, 8, 7)).astype(np.uint8)
    for kind, data in (("foreground", inside), ("membrane", 255 - inside)):
        make(tmp_path / f"{kind}.zarr", data)
        for method in ("components", "watershed"):
            labelled(
                tmp_path / f"{kind}.zarr",
                tmp_path / f"{kind}_{method}.zarr",
                recipe((4, 4, 4), kind, method=method, threshold=0.6),
            )
    for method in ("components", "watershed"):
        one, other = (open_volume(tmp_path / f"{kind}_{method}.zarr") for kind in ("foreground", "membrane"))
        np.testing.assert_array_equal(one.open().read_raw(...), other.open().read_raw(...))


# ---- watershed


@LAWS
@given(
    shape=SHAPES,
    block=BLOCKS,
    slots=st.integers(1, 4),
    seed=st.integers(0, 99),
    smooth=st.tuples(*[st.integers(0, 2)] * 3),
    rule=st.sampled_from([{}, {"small_voxels": 30, "small_threshold": 0.2}, {"agglomerate": "mutex"}]),
    background=st.sampled_from([0.0, 0.45]),
)
def test_a_watershed_by_blocks_is_that_in_one_piece(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, int, int], block: tuple[int, int, int],
    slots: int, seed: int, rule: dict[str, Any], **choices: Any,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("watershed")
    levels = np.random.default_rng(seed).choice([0, 100, 200, 255], (9, *shape))  # few, so that there are ties
    make(folder / "a.zarr", levels.astype(np.uint8))
    found = []
    for name, size in (("blocks", block), ("whole", (14, 14, 14))):
        chosen = recipe(size, threshold=0.55, min_voxels=2, **rule, **choices)
        data, made = labelled(folder / "a.zarr", folder / f"{name}.zarr", chosen, Crowd(slots))
        found.append((data, made.table.read_text()))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    np.testing.assert_array_equal(found[0][0], renumbered(found[0][0]))


@pytest.mark.parametrize("smooth", [(0, 0, 0), (2, 0, 1)])
def test_fragments_are_where_a_walk_uphill_ends(tmp_path: Path, smooth: tuple[int, int, int]) -> None:
    data = np.random.default_rng(5).integers(0, 255, (9, 7, 8, 9)).astype(np.uint8)  # no mean reaches 255
    make(tmp_path / "a.zarr", data)
    found, _ = labelled(tmp_path / "a.zarr", tmp_path / "l.zarr", recipe((4, 2, 6), threshold=1.0, smooth=smooth))
    np.testing.assert_array_equal(found, renumbered(walk_uphill(data, smooth)))
    assert 5 < found.max() < found.size / 3


def walk_uphill(data: np.ndarray, smooth: tuple[int, int, int]) -> np.ndarray:
    """Return the number of the peak, from 1 on, that a walk from each voxel ends at, one voxel at a time."""
    shape = data.shape[1:]
    height = np.zeros(shape, np.int64)
    for voxel in np.ndindex(*shape):
        around = []
        for axis in range(3):
            if voxel[axis] > 0:
                around.append(int(data[axis][voxel]))
            if voxel[axis] < shape[axis] - 1:
                around.append(int(data[axis][tuple(v + (a == axis) for a, v in enumerate(voxel))]))
        height[voxel] = 256 * (60 * sum(around) // len(around))
    for axis, passes in enumerate(smooth):
        for _ in range(passes):
            height = ndimage.correlate1d(height, [1, 2, 1], axis, mode="nearest") // 4
    number = np.arange(height.size).reshape(shape)

    def end(voxel: tuple[int, ...]) -> int:
        ways = []
        for axis in range(3):
            for step in (-1, 1):
                to = tuple(v + step * (a == axis) for a, v in enumerate(voxel))
                if 0 <= to[axis] < shape[axis]:
                    ways.append((int(data[axis][max(voxel, to)]), height[to], number[to], to))
        least = max(ways)[0] // 2
        ways = [way for way in ways if way[0] >= least and way[1:3] > (height[voxel], number[voxel])]
        return end(max(ways)[-1]) if ways else int(number[voxel])

    return np.array([1 + end(voxel) for voxel in np.ndindex(*shape)]).reshape(shape)


def test_labels_of_affinities_of_labels_are_those_labels(tmp_path: Path) -> None:
    truth = blobs((20, 31, 26))
    make(tmp_path / "a.zarr", noisy(truth, 0.1))
    for agglomerate in ("mean", "mutex"):
        chosen = recipe((10, 16, 26), agglomerate=agglomerate, smooth=(0, 0, 0), threshold=0.5)
        found, _ = labelled(tmp_path / "a.zarr", tmp_path / f"{agglomerate}.zarr", chosen)
        scored = label_scores(overlaps(found, truth))
        assert scored.split + scored.merge < 0.05


# ---- what is left out, and the table


def test_voxels_of_the_background_and_small_objects_get_no_label(chances: Path, tmp_path: Path) -> None:
    all_of_it, _ = labelled(chances, tmp_path / "all.zarr", recipe((8, 8, 8), method="components", threshold=0.9))
    sizes = np.bincount(all_of_it.ravel())
    large, _ = labelled(
        chances, tmp_path / "large.zarr", recipe((8, 8, 8), method="components", threshold=0.9, min_voxels=20)
    )
    np.testing.assert_array_equal(large, renumbered(np.where(sizes[all_of_it] >= 20, all_of_it, 0)))
    assert 0 < large.max() < all_of_it.max()
    bright, _ = labelled(chances, tmp_path / "bright.zarr", recipe((8, 8, 8), background=0.6))
    near = open_volume(chances).open().read_raw(...)[:3].astype(float)
    total, count = np.zeros(near.shape[1:]), np.zeros(near.shape[1:])
    for axis in range(3):
        inner = np.take(near[axis], range(1, near.shape[axis + 1]), axis)
        for side in ((1, 0), (0, 1)):
            around = [side if a == axis else (0, 0) for a in range(3)]
            total += np.pad(inner, around)
            count += np.pad(np.ones_like(inner), around)
    np.testing.assert_array_equal(bright == 0, total / count < 0.6 * 255)


def test_the_table_says_what_the_labels_show(tmp_path: Path) -> None:
    data = noisy(blobs((9, 14, 11)), 0.3)
    make(tmp_path / "a.zarr", data, attributes={"resolution": [4, 8, 40], "units": ["nm"] * 3}, chunks=(3, 4, 4, 4))
    found, made = labelled(tmp_path / "a.zarr", tmp_path / "l.zarr", recipe((4, 8, 6), min_voxels=2))
    with made.table.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    known = measure.regionprops(found.astype(int))
    assert [int(row["label"]) for row in rows] == [region.label for region in known] == list(range(1, found.max() + 1))
    for row, region in zip(rows, known, strict=True):
        assert int(row["voxels"]) == region.area
        assert tuple(int(row[name]) for name in ("z0", "y0", "x0", "z1", "y1", "x1")) == region.bbox
        assert [float(row[name]) for name in "zyx"] == pytest.approx(region.centroid, abs=6e-4)


@pytest.mark.parametrize(
    ("keys", "advised"),
    [
        ({}, ["objects.small_voxels=1000", "objects.min_voxels=100"]),
        ({"small_voxels": 1000}, []),
        ({"min_voxels": 100}, []),
        ({"agglomerate": "mutex"}, ["objects.min_voxels=100"]),
    ],
)
def test_crumbs_are_counted_at_the_end_with_the_keys_that_take_them_away(
    tmp_path: Path, keys: dict[str, int | str], advised: list[str]
) -> None:
    make(tmp_path / "a.zarr", noisy(blobs((20, 31, 26)), 0.6), chunks=(9, 20, 31, 26))
    found, made = labelled(tmp_path / "a.zarr", tmp_path / "l.zarr", recipe((8, 16, 16), threshold=0.7, **keys))
    sizes = np.bincount(found.ravel())[1:]
    num = int((sizes < 100).sum())
    assert bool(num) == bool(advised)
    assert made.crumbs.startswith(f"{num} of {len(sizes)} objects have fewer than 100 voxels" if num else "")
    assert re.findall(r"objects\.\w+=\d+", made.crumbs) == advised
    assert made.facts().get("crumbs", "") == made.crumbs


# ---- stopped, lost, resumed


@pytest.mark.long
@pytest.mark.parametrize("agglomerate", ["mean", "mutex"])
def test_a_labelling_that_is_stopped_anywhere_goes_on_to_the_same_bytes(
    chances: Path, tmp_path: Path, agglomerate: str
) -> None:
    chosen = recipe((8, 8, 16), agglomerate=agglomerate, threshold=0.6)
    whole = Crowd()
    _, known = labelled(chances, tmp_path / "known" / "l.zarr", chosen, whole)
    total = whole.num_sent
    num_boxes = 2 * 3 * 2 + 1 * 3 * 2 + 1 * 2 * 2 + 1 * 1 * 2 + 1  # two joined along z, y, y, x
    assert (
        total == 3 * 12 + 2 * num_boxes + 5 + 1
    )  # 2 × 3 × 2 blocks, three stages; boxes solved and named, slabs, table
    for most in (1, 7, 13, 25, 41, 65, 83, total - 1):
        stopped, again = Crowd(2, most), Crowd()
        with pytest.raises(Stopped):
            labelled(chances, tmp_path / "l.zarr", chosen, stopped, fresh=True)
        noted = num_noted(tmp_path / "l.zarr", stopped)
        _, made = labelled(chances, tmp_path / "l.zarr", chosen, again)
        assert again.num_sent == total - noted
        assert tree(tmp_path / "l.zarr") == tree(tmp_path / "known" / "l.zarr")
        assert made.table.read_bytes() == known.table.read_bytes()
    nothing = Crowd()
    _, made = labelled(chances, tmp_path / "l.zarr", chosen, nothing)
    assert made.was_complete and nothing.num_sent == 0 and made.num_objects == known.num_objects
    left = {path.name for path in (tmp_path / "l.zarr.run").iterdir()}
    files = {"inputs.json", "journal.jsonl", "label.json", "lock", "objects.csv", "progress.json"}
    assert left == files | {"planned.json", "report.html", "sessions.jsonl", "volpipe.log"}


def test_a_lost_worker_costs_its_task_and_three_stop_it(chances: Path, tmp_path: Path) -> None:
    chosen = recipe((8, 16, 32))
    labelled(chances, tmp_path / "known" / "l.zarr", chosen, whole := Crowd())
    labelled(chances, tmp_path / "l.zarr", chosen, losing := Crowd(lost=2))
    assert losing.num_sent == whole.num_sent + 2
    assert tree(tmp_path / "l.zarr") == tree(tmp_path / "known" / "l.zarr")
    with pytest.raises(
        RunStopped,
        match=r"(?m)^finding fragments \(pieces\) failed for \d+ parts and worked for none, so .* stops: .*killed$",
    ):
        labelled(chances, tmp_path / "l.zarr", chosen, Crowd(lost=99), fresh=True)


def test_a_unit_of_any_stage_that_fails_twice_costs_nothing_else(chances: Path, tmp_path: Path) -> None:
    class Flaky(Crowd):
        """Workers that fail twice at unit 3 of each app, and at the table."""

        def __init__(self) -> None:
            super().__init__(2)
            self.failures: Counter[str] = Counter()

        def submit(self, app: str, *arguments: Any) -> Future[Any]:
            future = super().submit(app, *arguments)
            if self.failures[app] == 2 or (3 not in arguments[1] and app != "finish_graph"):
                return future
            self.failures[app] += 1
            failed: Future[Any] = Future()
            stage = future.result().stage
            failed.set_result(Record(stage, (), tuple((n, f"OSError: {n} went wrong") for n in arguments[1])))
            return failed

    chosen = recipe((8, 8, 16))
    labelled(chances, tmp_path / "known" / "l.zarr", chosen, whole := Crowd())
    _, made = labelled(chances, tmp_path / "l.zarr", chosen, flaky := Flaky())
    assert made.missing == []
    assert flaky.failures == dict.fromkeys({app for app, _ in whole.tasks}, 2)
    assert len(flaky.failures) == 7
    assert flaky.num_sent >= whole.num_sent + 14
    assert tree(tmp_path / "l.zarr") == tree(tmp_path / "known" / "l.zarr")


def test_a_task_of_a_driver_that_lost_its_place_writes_nothing(chances: Path, tmp_path: Path) -> None:
    class Overtaken(Crowd):
        def submit(self, app: str, *arguments: Any) -> Future[Any]:
            (tmp_path / "l.zarr.run" / "lock").write_text("another\n")
            return super().submit(app, *arguments)

    with pytest.raises(RunStopped, match="no longer held"):
        labelled(chances, tmp_path / "l.zarr", recipe((8, 8, 8)), Overtaken())
    assert not list((tmp_path / "l.zarr.run" / "pieces").iterdir())
    assert not (tmp_path / "l.zarr").exists()


# ---- values, metadata, the command


def test_stored_chances_become_bytes_whatever_their_type() -> None:
    shares = np.array([0, 0.25, 0.5, 1.0])
    assert as_bytes(np.array([-1, 0.5, 2, np.nan], np.float32)).tolist() == [0, 128, 255, 0]
    assert as_bytes((shares * 65535).astype(np.uint16)).tolist() == [0, 63, 127, 255]
    assert as_bytes((shares * (2**32 - 1)).astype(np.uint32)).tolist() == [0, 63, 127, 255]


def test_the_command_labels_and_what_it_wrote_can_be_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = blobs((20, 31, 26))
    make(tmp_path / "truth.zarr", truth.astype(np.uint16), chunks=(20, 31, 26))
    make(tmp_path / "a.zarr", noisy(truth, 0.1), chunks=(9, 20, 31, 26))
    give = giver(tmp_path, monkeypatch, capsys)
    refused = give("segment", "a.zarr", "--config", "threads", "--json", "gone/made.json")
    assert (refused.code, refused.out) == (2, "") and "there is no folder gone" in refused.err  # before the work
    command = ("segment", "a.zarr", "--config", "threads", "--json", "made.json", "--set", "objects.threshold=0.5")
    ended = give(*command)
    assert ended.code == 0, ended.err
    told = json.loads((tmp_path / "made.json").read_text())
    assert told["objects"] >= 12 and set(told["seconds"]) == STAGES
    assert f"wrote {told['objects']} objects" in ended.out
    assert "is complete already" in give(*command).out
    scored = give("evaluate", "a_labels.zarr", "truth.zarr", "--config", "threads", "--labels", "--json", "s.json")
    assert scored.code == 0, scored.err
    found = json.loads((tmp_path / "s.json").read_text())["scores"]["output"]
    assert found["split"] + found["merge"] < 0.2
    refused = give(*command, "--set", "objects.min_voxels=9")
    assert refused.code == 2 and "objects.min_voxels: 0 -> 9" in refused.err
    said = read_attributes(tmp_path / "a_labels.zarr")["volpipe"]
    assert said["labelling"]["objects"]["threshold"] == 0.5
    assert said["input"]["path"] == str(tmp_path / "a.zarr") and len(said["input"]["fingerprint"]) == 32
    assert {"volpipe", "connected-components-3d", "fastremap"} <= said["packages"].keys()
    assert said["python"] == platform.python_version()


@pytest.mark.slow
@pytest.mark.long
def test_a_labelling_that_is_told_to_stop_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """By TERM to the driver alone, as Kubernetes and Slurm give it, on Parsl's own workers."""
    make(tmp_path / "a.zarr", noisy(blobs((32, 40, 40)), 0.2))
    settings = ("output.block=[8,8,8]", "output.chunk=[2,2,2]", "objects.threshold=0.6")
    command = ("segment", "a.zarr", *set_each(*settings))
    (tmp_path / "known").mkdir()
    known = finish(tmp_path, begin(tmp_path, *command, "-o", "known/l.zarr", "--config", "threads"))
    assert known.code == 0, known.err
    process = begin(tmp_path, *command, "-o", "l.zarr", VOLPIPE_WORKERS="2")
    journal = tmp_path / "l.zarr.run" / "journal.jsonl"
    wait_until(lambda: journal.exists() and len(list(read_records(journal, RESULTS))) > 10, 120)
    process.send_signal(signal.SIGTERM)
    ended = finish(tmp_path, process, 60)
    assert ended.code == INTERRUPTED, ended.err
    assert ended.err.splitlines()[-1] == "volpipe: interrupted; run the same command again to continue"
    wait_until(lambda: not processes_in(tmp_path), 30)
    assert "paint" not in {record.stage for record in read_records(journal, RESULTS)}
    ended = finish(tmp_path, begin(tmp_path, *command, "-o", "l.zarr", VOLPIPE_WORKERS="2"), 200)
    assert ended.code == 0, ended.err
    assert tree(tmp_path / "l.zarr") == tree(tmp_path / "known" / "l.zarr")
