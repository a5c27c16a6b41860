"""Coarser levels of labels: each voxel the most frequent label below it, in any blocks; resumed, noted and verified."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise, product
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import make
from command import THREADS, Give, giver, named_by_verify, set_each
from inline import Stopped
from segmented import Crowd, labelled, num_noted, tree

from volpipe.blockwise.journal import read_records
from volpipe.errors import PlanError, RunError, RunStopped
from volpipe.geometry.affinities import affinities
from volpipe.geometry.grid import Box, Triple
from volpipe.recipes.segmentation import NEAREST, SegmentRecipe
from volpipe.recipes.workflow import VOLUME
from volpipe.runs.options import RunOptions
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import Written
from volpipe.segmentation.driver import plan_segmentation, segment
from volpipe.segmentation.kind import LabelStage, label_needs
from volpipe.segmentation.plan import SegmentPlan
from volpipe.segmentation.tasks import RESULTS
from volpipe.volumes.storage.tensorstore import downsample
from volpipe.volumes.volume import open_volume

GRAPH = dict.fromkeys(("solve", "number", "name", "graph"), "1 / 1")
OBJECTS = {"method": "components", "threshold": 0.5, "background": 0.2}


def chosen(block: Sequence[int], levels: int | str, **output: Any) -> SegmentRecipe:
    """Return a recipe of components, in so many levels beside level 0."""
    sizes = {"block": block, "chunk": (2, 2, 2), "levels": levels}
    return SegmentRecipe.model_validate({"input": {"offsets": NEAREST}, "objects": OBJECTS, "output": sizes | output})


def touching(folder: Path, shape: Triple, voxel: Triple | None = None) -> Path:
    """Write affinities (c, z, y, x), uint8, of boxes of 3 voxels that touch, with specks in them; return where."""
    attributes = {} if voxel is None else {"resolution": list(voxel), "units": ["nm"] * 3}
    dice = np.random.default_rng(sum(shape))
    labels = dice.integers(1, 6, [n // 3 + 2 for n in shape])
    for axis, n in enumerate(shape):
        labels = labels.repeat(3, axis).take(range(1, n + 1), axis)
    near, _ = affinities(np.where(dice.random(shape) < 0.2, 6, labels), NEAREST)
    make(folder / "a.zarr", (near * 255).astype(np.uint8), attributes=attributes)
    return folder / "a.zarr"


def levels_in(out: Path) -> list[np.ndarray]:
    """Return the labels (z, y, x) of every level, the finest first."""
    return [np.asarray(open_volume(out / key).open().read_raw(...)) for key in open_volume(out).levels]


def majority(fine: np.ndarray, step: Sequence[int]) -> np.ndarray:
    """Return for each box of `step` voxels the value that most of them have, of such the smallest; voxel by voxel."""
    coarse = np.zeros([-(-n // s) for n, s in zip(fine.shape, step, strict=True)], fine.dtype)
    for place in np.ndindex(*coarse.shape):
        box = tuple(slice(i * s, (i + 1) * s) for i, s in zip(place, step, strict=True))
        found = sorted(fine[box].ravel().tolist())
        coarse[place] = max(found, key=lambda value: (found.count(value), -value))
    return coarse


# ---- voxels


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "voxel", "levels", "steps"),
    [
        ((13, 9, 11), None, 2, [(2, 2, 2), (2, 2, 2)]),
        ((7, 14, 10), (40, 8, 8), 3, [(1, 2, 2), (1, 2, 2), (2, 2, 2)]),
        ((1, 10, 18), (8, 8, 8), 3, [(1, 2, 2), (1, 2, 2), (1, 2, 2)]),
        ((3, 130, 70), None, "auto", [(2, 2, 2), (2, 2, 2)]),  # until no axis is longer than 64
        ((5, 64, 30), None, "auto", []),
        ((5, 6, 7), None, 0, []),
    ],
)
def test_levels_are_those_of_one_piece_in_any_blocks(
    tmp_path: Path, shape: Triple, voxel: Triple | None, levels: int | str, steps: list[Triple]
) -> None:
    source = touching(tmp_path, shape, voxel)
    sizes: tuple[Triple, ...] = ((14, 14, 14), (4, 6, 4), (8, 2, 16)) if max(shape) < 60 else ((4, 64, 64), (2, 66, 40))
    for number, block in enumerate(sizes):
        out = tmp_path / f"{number}.zarr"
        finest, _ = labelled(source, out, chosen(block, levels), Crowd(1 + number))
        found = levels_in(out)
        assert [level.dtype for level in found] == [np.dtype(np.uint32)] * (len(steps) + 1)
        np.testing.assert_array_equal(found[0], finest)
        for (fine, coarse), step in zip(pairwise(found), steps, strict=True):
            np.testing.assert_array_equal(coarse, majority(fine, step))
        assert all(len(np.unique(level)) > 1 for level in found) and not finest.all()


def test_chunks_of_odd_sizes_are_made_coarser_too(tmp_path: Path) -> None:
    source = touching(tmp_path, (11, 17, 9))
    labelled(source, tmp_path / "l.zarr", chosen((5, 9, 3), 2, chunk=(5, 3, 3)))
    finest, *coarser = levels_in(tmp_path / "l.zarr")
    known = majority(finest, (2, 2, 2))
    np.testing.assert_array_equal(coarser[0], known)
    np.testing.assert_array_equal(coarser[1], majority(known, (2, 2, 2)))


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_the_most_frequent_label_wins_and_of_equals_the_smallest(dtype: type) -> None:
    top = np.iinfo(dtype).max
    tied = np.array([top, top - 1, 3, top, top - 1, 3, 0, 0], dtype).reshape(2, 2, 2)
    assert downsample(tied, (2, 2, 2), "mode").item() == 0
    assert downsample(np.where(tied == 0, dtype(top), tied), (2, 2, 2), "mode").item() == top
    dice = np.random.default_rng(4)
    for _ in range(40):
        shape, step = dice.integers(1, 8, 3), dice.integers(1, 3, 3).tolist()
        labels = dice.choice(np.array([0, 1, 2, top - 1, top], dtype), shape)
        np.testing.assert_array_equal(downsample(labels, step, "mode"), majority(labels, step))


# ---- stopped, failed, resumed


def test_what_is_stopped_at_a_level_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    source, recipe = touching(tmp_path, (13, 16, 20)), chosen((4, 8, 8), 2)
    whole = Crowd()
    labelled(source, tmp_path / "known" / "l.zarr", recipe, whole)
    units = dict.fromkeys(GRAPH, 1) | {"pieces": 24, "edges": 24, "paint": 24, "pyramid 1": 2 * 1 * 2, "pyramid 2": 1}
    assert whole.num_sent == sum(units.values())
    for left in (7, 3, 1):  # in paint, at level 1, and at level 2
        stopped, again = Crowd(2, whole.num_sent - left), Crowd()
        with pytest.raises(Stopped):
            labelled(source, tmp_path / "l.zarr", recipe, stopped, fresh=True)
        noted = num_noted(tmp_path / "l.zarr", stopped)
        labelled(source, tmp_path / "l.zarr", recipe, again)
        assert again.num_sent == whole.num_sent - noted
        assert tree(tmp_path / "l.zarr") == tree(tmp_path / "known" / "l.zarr")
        records = list(read_records(tmp_path / "l.zarr.run" / "journal.jsonl", RESULTS))
        done = [(record.stage, unit) for record in records for unit in record.done]
        assert sorted(done) == sorted((stage, unit) for stage, most in units.items() for unit in range(most))
    nothing = Crowd()
    _, made = labelled(source, tmp_path / "l.zarr", recipe, nothing)
    assert made.was_complete and nothing.num_sent == 0


def test_each_shard_of_a_level_is_written_by_one_task_when_those_below_are_whole(tmp_path: Path) -> None:
    source = touching(tmp_path, (13, 22, 17))
    labelled(source, tmp_path / "l.zarr", chosen((4, 8, 8), 2), Crowd(3))
    written: list[tuple[int, int]] = []
    for record in read_records(tmp_path / "l.zarr.run" / "journal.jsonl", RESULTS):
        if isinstance(record.result, Written):
            for level, shard, _ in record.result.checksums:
                assert set(below(level, shard)) <= set(written)
                written.append((level, shard))
    assert sorted(written) == [(0, n) for n in range(36)] + [(1, n) for n in range(8)] + [(2, 0)]


def below(level: int, shard: int) -> list[tuple[int, int]]:
    """Return the shards (4, 8, 8) of the level before that lie under one of `level`, of 13 × 22 × 17 voxels."""
    if not level:
        return []
    fine, coarse = ([ceil(n / 2**k / s) for n, s in ((13, 4), (22, 8), (17, 8))] for k in (level - 1, level))
    place = np.unravel_index(shard, coarse)
    pairs = [[i for i in (2 * p, 2 * p + 1) if i < n] for p, n in zip(place, fine, strict=True)]
    return [(level - 1, int(np.ravel_multi_index(index, fine))) for index in product(*pairs)]


class Watched(Crowd):
    """Workers for tests; before the first task of a coarser level with that `shard`, `act` is called."""

    def __init__(self, act: Callable[[], object], shard: int) -> None:
        super().__init__()
        self._act, self._shard = act, shard

    def submit(self, app: str, *arguments: Any) -> Future[Any]:
        if app == "coarsen_labels" and self._shard in arguments[1]:
            act, self._act = self._act, lambda: None
            act()
        return super().submit(app, *arguments)


def test_a_task_of_a_level_whose_driver_lost_its_place_writes_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "l.zarr.run" / "lock"
    source, workers = touching(tmp_path, (13, 16, 11)), Watched(lambda: lock.write_text("another\n"), 0)
    with pytest.raises(
        RunStopped, match=r"(?m)stops: .*l\.zarr\.run is no longer held by process .*, but by another( driver)?$"
    ):
        labelled(source, tmp_path / "l.zarr", chosen((4, 8, 8), 1), workers)
    assert ("coarsen_labels", [1]) not in workers.tasks  # nothing more was begun
    assert (tmp_path / "l.zarr" / "s0" / "c").exists()
    assert not (tmp_path / "l.zarr" / "s1" / "c").exists()


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """The command; affinities lie at a.zarr."""
    touching(tmp_path, (13, 16, 11))
    return giver(tmp_path, monkeypatch, capsys)


CHOSEN = [f"objects.{key}={value}" for key, value in OBJECTS.items()]
SIZES = (f"input.offsets={list(map(list, NEAREST))}", "output.block=[4,8,8]", "output.chunk=[2,2,2]")
COMMAND = ("segment", "a.zarr", "-o", "l.zarr", *THREADS, *set_each(*CHOSEN, *SIZES))
STATUS = re.compile(r"^(\w+(?: \d)?) +(\d+ / \d+) ", re.MULTILINE)
DONE = {"pieces": "16 / 16", "edges": "16 / 16", **GRAPH, "paint": "16 / 16"}


def test_a_shard_that_cannot_be_made_coarser_is_named_and_made_by_the_same_command(tmp_path: Path, give: Give) -> None:
    plan = plan_segmentation(str(tmp_path / "a.zarr"), chosen((4, 8, 8), 1), tmp_path / "l.zarr", tmp_path)
    shard, whole = tmp_path / "l.zarr" / "s0" / "c" / "3" / "1" / "1", b""

    def damage() -> None:
        nonlocal whole
        whole = shard.read_bytes()
        shard.write_bytes(whole[: len(whole) // 2])

    made = segment(plan, Watched(damage, 1).start)
    (missing,) = made.missing
    assert (missing.stage, missing.unit, missing.box) == ("pyramid 1", 1, Box((4, 0, 0), (7, 8, 6)))
    assert f"{tmp_path}/l.zarr" in missing.reason
    with pytest.raises(RunStopped, match=r"^writing a coarser level \(pyramid 1 1\) failed, so .* stops: .*l\.zarr"):
        segment(plan, Crowd().start, RunOptions(tolerated=0))
    stopped = give("status", "l.zarr")
    assert stopped.code == 1
    assert re.search(r"^pyramid 1 +1 +4:7,0:8,0:6", stopped.out, re.MULTILINE)
    assert dict(STATUS.findall(stopped.out)) == DONE | {"pyramid 1": "1 / 2"}
    assert "1 shards have no checksum" in give("verify", "l.zarr").out

    shard.write_bytes(whole)
    assert segment(plan, Crowd().start).missing == []
    finest, coarse = levels_in(tmp_path / "l.zarr")
    np.testing.assert_array_equal(coarse, majority(finest, (2, 2, 2)))
    assert give("status", "l.zarr").code == give("verify", "l.zarr").code == 0


# ---- what is told of levels


def test_status_and_verify_know_the_files_of_all_levels(tmp_path: Path, give: Give) -> None:
    assert give(*COMMAND, *set_each("output.levels=2")).code == 0
    status = give("status", "l.zarr")
    assert status.code == 0
    assert dict(STATUS.findall(status.out)) == DONE | {"pyramid 1": "2 / 2", "pyramid 2": "1 / 1"}
    out = tmp_path / "l.zarr"
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) == 16 + 2 + 1 + 5
    whole = give("verify", "l.zarr")
    assert (whole.code, whole.out) == (0, f"{len(files) + 1} files read, 0 not as they were written\n")

    file = out / "s1" / "c" / "1" / "0" / "0"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    (out / "s2" / "c" / "0" / "0" / "0").unlink()
    meta = out / "s2" / "zarr.json"
    meta.write_bytes(meta.read_bytes() + b" ")
    (out / "s1" / "c" / "2" / "0").mkdir(parents=True)
    (out / "s1" / "c" / "2" / "0" / "0").touch()
    assert named_by_verify(give, "l.zarr") == {
        f"{file} differs (s1 4:7,0:8,0:6)",
        f"{out}/s2/c/0/0/0 is missing (s2 0:4,0:4,0:3)",
        f"{meta} differs",
        f"{out}/s1/c/2/0/0 is extra (s1 8:12,0:8,0:8)",
    }


def test_metadata_say_where_the_voxels_of_each_level_lie(tmp_path: Path) -> None:
    source = touching(tmp_path, (7, 14, 10), (40, 8, 8))
    labelled(source, tmp_path / "l.zarr", chosen((4, 8, 8), 3))
    group = json.loads((tmp_path / "l.zarr" / "zarr.json").read_text())["attributes"]["ome"]
    assert group["image-label"] == {}  # by which viewers know labels
    (told,) = group["multiscales"]
    assert [axis["name"] for axis in told["axes"]] == ["z", "y", "x"]
    assert {axis["unit"] for axis in told["axes"]} == {"nanometer"}
    levels = {each["path"]: each["coordinateTransformations"] for each in told["datasets"]}
    # The centre of a voxel that is made of n lies (n - 1) / 2 of theirs past that of the first.
    known = {
        "s0": ([40.0, 8.0, 8.0], [0.0, 0.0, 0.0]),
        "s1": ([40.0, 16.0, 16.0], [0.0, 4.0, 4.0]),
        "s2": ([40.0, 32.0, 32.0], [0.0, 12.0, 12.0]),
        "s3": ([80.0, 64.0, 64.0], [20.0, 28.0, 28.0]),
    }
    assert list(levels) == list(known)
    for key, (scale, translation) in known.items():
        found = {part["type"]: part[part["type"]] for part in levels[key]}
        assert found["scale"] == scale
        assert found.get("translation", [0.0, 0.0, 0.0]) == translation


@pytest.mark.parametrize("voxel", [None, (40, 8, 8)])
def test_plans_foresee_every_level_and_count_its_files_and_bytes(tmp_path: Path, voxel: Triple | None) -> None:
    out = tmp_path / "l.zarr"
    source = touching(tmp_path, (13, 22, 17), voxel)
    plan = plan_segmentation(str(source), chosen((4, 8, 8), 2, codec="raw"), out, tmp_path)
    stage = LabelStage("objects", VOLUME, open_volume(source), out, plan)
    foreseen = [stage.volume(level) for level in range(3)]
    with pytest.raises(PlanError, match=r"will have no level 3; its levels are 0 to 2"):
        stage.volume(3)
    segment(plan, Crowd().start)
    assert foreseen == [open_volume(out, level=level) for level in range(3)]

    need, none = (
        label_needs(plan, 1.0),
        label_needs(plan.model_copy(update={"factors": ((1, 1, 1),)}), 1.0),
    )
    assert need.output_files == sum(path.is_file() for path in out.rglob("*"))
    assert need.output_folders == sum(path.is_dir() for path in (out, *out.rglob("*")))
    sizes = [level.nbytes for level in levels_in(out)]
    assert need.output_bytes == sum(sizes)
    assert need.written_bytes - none.written_bytes == sizes[1] + sizes[2]
    assert need.read_bytes - none.read_bytes == sizes[0] + sizes[1]


# ---- labels of an earlier version, and damaged plans


def forget_levels(run: Path) -> None:
    """Leave in the folder `run` the plan that an earlier version would have left, which knew no levels."""
    plan = json.loads((run / "label.json").read_text())
    del plan["factors"], plan["recipe"]["output"]["levels"]
    (run / "label.json").write_text(json.dumps(plan))


def test_labels_of_an_earlier_version_are_refused_untouched_and_fresh_makes_them_again(
    tmp_path: Path, give: Give
) -> None:
    command = (*COMMAND, *set_each("output.levels=0"))
    assert give(*command).code == 0
    forget_levels(tmp_path / "l.zarr.run")
    before = tree(tmp_path / "l.zarr")
    for refused in (give("status", "l.zarr"), give("verify", "l.zarr"), give(*command)):
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert "l.zarr.run/label.json cannot be understood (written by another version?)" in refused.err
        assert "use --fresh to start over" in refused.err
    assert tree(tmp_path / "l.zarr") == before
    assert give(*command, "--fresh").code == give("status", "l.zarr").code == 0
    assert tree(tmp_path / "l.zarr") == before


@pytest.mark.parametrize(
    "text", ["[]", "null", '{"recipe": 3}', '{"recipe": {"output": []}}', "{", '{"recipe": {}}', ""]
)
def test_a_plan_that_cannot_be_understood_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "label.json").write_text(text)
    with pytest.raises(RunError, match=r"label\.json cannot be understood"):
        RunFolder(tmp_path).load(SegmentPlan)
