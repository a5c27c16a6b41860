"""How long labellings and evaluations take, as planned: by timings that are injected, never by a clock."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from arrays import make
from command import THREADS, giver
from hypothesis import given
from hypothesis import strategies as st
from inline import Inline, Stopped, take_steps

from volpipe.blockwise.journal import Record
from volpipe.errors import RunStopped
from volpipe.estimation.estimate import StageTime, StageTimes
from volpipe.evaluation import driver, evaluate, subject
from volpipe.geometry.grid import Box, Triple
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.runs.options import RunOptions
from volpipe.runs.stage_work import Listener
from volpipe.segmentation import estimate as estimate_module
from volpipe.segmentation import graph as graph_module
from volpipe.segmentation import tasks as tasks_module
from volpipe.segmentation.driver import plan_segmentation, segment
from volpipe.segmentation.estimate import (
    SegmentCosts,
    SegmentTrial,
    calibrate_segmentation,
    forecast_labels,
    segment_times,
)
from volpipe.segmentation.plan import SegmentPlan, fit
from volpipe.volumes.placeholder import affinities, zeros_like
from volpipe.volumes.volume import Volume

NO_COSTS = SegmentCosts(
    1, 0.0, 0.0, dict.fromkeys(("pieces", "edges", "solve", "number", "name", "graph", "paint", "pyramid 1"), 0.0)
)
SIZES = st.tuples(*[st.integers(1, 40)] * 3)


def recipe(block: Triple, **objects: object) -> SegmentRecipe:
    output = {"block": block, "chunk": tuple(max(1, n // 2) for n in block)}
    return SegmentRecipe.model_validate({"objects": objects, "output": output})


def planned_over(folder: Path, data: np.ndarray, chosen: SegmentRecipe, chunk: int = 16) -> tuple[SegmentPlan, Volume]:
    """Return the plan of labelling `data` (c, z, y, x), stored at a.zarr in `folder`, and where that is."""
    volume = make(folder / "a.zarr", data, chunks=(len(data), *(min(chunk, n) for n in data.shape[1:])))
    return plan_segmentation(str(folder / "a.zarr"), chosen, folder / "out.zarr", folder), volume


def trial_of(folder: Path, plan: SegmentPlan, volume: Volume, *, is_there: bool = True) -> SegmentTrial:
    return SegmentTrial(plan, volume, is_there, str(folder / "tried"))


def calibrated(trial: SegmentTrial, slots: int = 1) -> StageTimes:
    workers = Inline(slots=slots)
    return take_steps(calibrate_segmentation(trial, workers), workers)


def forecast(plan: SegmentPlan, slots: int = 1) -> list[StageTimes]:
    workers = Inline(slots=slots)
    return take_steps(forecast_labels(plan, workers), workers)


def imagined(shape: Triple, block: Triple, chunk: Triple, **objects: object) -> SegmentTrial:
    """Return the trial of labelling a volume of nine channels that is nowhere."""
    data = np.dtype(np.uint8)
    volume = Volume(
        "", "", "zarr3", (9, *shape), data, (9, *chunk), None, ("c", "z", "y", "x"), None, (0.0, 0.0, 0.0), "raw", ()
    )
    chosen = SegmentRecipe.model_validate({"objects": objects, "output": {"block": block, "chunk": (1, 1, 1)}})
    return SegmentTrial(fit(volume, chosen, Path("l.zarr"), Path()), volume, True, "")


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what sets the seconds that each stopwatch shows."""

    def stop_at(seconds: float) -> None:
        @contextmanager
        def stopwatch() -> Iterator[SimpleNamespace]:
            yield SimpleNamespace(seconds=seconds)

        monkeypatch.setattr(estimate_module, "stopwatch", stopwatch)

    return stop_at


def seen(plan: SegmentPlan, block: int, reach: tuple[int, ...]) -> int:
    """Return the voxels of `block` and of what lies up to `reach` around it in the volume."""
    own = plan.blocks.box(block)
    grown = Box(
        tuple(a - r for a, r in zip(own.start, reach, strict=True)),
        tuple(b + r for b, r in zip(own.stop, reach, strict=True)),
    )
    return (grown & plan.box).num_voxels


R = TypeVar("R")


def with_seconds(record: Record[R], seconds: float) -> Record[R]:
    return dataclasses.replace(record, usage=dataclasses.replace(record.usage, seconds=seconds))


def inject(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[SegmentPlan, str, int], float]) -> None:
    """Let tasks say that they took `seconds(plan, stage, unit)`, in labellings and in what is tried for them."""
    graph_tasks = ("solve_boxes", "number_objects", "name_fragments", "finish_graph")
    for module, names in ((tasks_module, ("fragments", "edges", "paint", "coarsen")), (graph_module, graph_tasks)):
        for name in names:
            monkeypatch.setattr(module, name, partial(timed, getattr(module, name), seconds))


def timed(
    task: Callable[[tasks_module.SegmentJob, Sequence[int]], Record[R]],
    seconds: Callable[[SegmentPlan, str, int], float],
    job: tasks_module.SegmentJob,
    units: Sequence[int],
) -> Record[R]:
    record = task(job, units)
    return with_seconds(record, sum(seconds(job.plan, record.stage, unit) for unit in units))


@pytest.mark.parametrize("objects", [{"method": "components", "threshold": 0.5}, {}, {"agglomerate": "mutex"}])
def test_tasks_that_take_time_by_voxels_are_planned_to_take_what_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: Callable[[float], None], objects: dict[str, object]
) -> None:
    still(0.0)
    near = (1, 1, 1) if "method" in objects else (3, 3, 3)
    plan, volume = planned_over(tmp_path, affinities((9, 20, 44, 40)), recipe((16, 20, 24), **objects))
    reach = {"pieces": near, "edges": plan.reach, "paint": (0, 0, 0)}
    rates = {"pieces": 3e-3, "edges": 5e-3, "paint": 2e-3}
    inject(monkeypatch, lambda plan, stage, n: rates[stage] * seen(plan, n, reach[stage]) if stage in rates else 0.0)
    times = calibrated(trial_of(tmp_path, plan, volume))
    made = segment(plan, Inline().start)
    assert [stage.num_tasks for stage in times.stages] == [12, 12, 1, 1, 1, 1, 12]
    found = {stage.name: stage.seconds for stage in times.stages}
    for name in rates:
        assert found[name] == pytest.approx(made.stage_seconds[name], rel=1e-9)
    assert times.seconds == pytest.approx(sum(made.stage_seconds.values()), rel=1e-9)
    assert not times.is_guess


@given(shape=SIZES, block=SIZES, chunk=SIZES, smooth=st.integers(0, 4), is_watershed=st.booleans())
def test_what_is_read_is_every_chunk_that_a_block_or_its_surroundings_touch(
    shape: tuple[int, int, int],
    block: tuple[int, int, int],
    chunk: tuple[int, int, int],
    smooth: int,
    is_watershed: bool,
) -> None:
    method = "watershed" if is_watershed else "components"
    trial = imagined(shape, block, chunk, method=method, smooth=(smooth,) * 3)
    plan = trial.plan
    times = segment_times(trial, dataclasses.replace(NO_COSTS, read_seconds=1.0), 1)
    reach = smooth + 2 if is_watershed else 1
    wanted = 0
    for number in range(len(plan.blocks)):
        own, along = plan.blocks.box(number), []
        for a, b, c, n in zip(own.start, own.stop, chunk, shape, strict=True):
            cells = {voxel // c for voxel in range(max(0, a - reach), min(n, b + reach))}
            along.append(sum(voxel // c in cells for voxel in range(n)))
        wanted += math.prod(along)
    assert [stage.seconds for stage in times.stages] == [wanted, wanted if is_watershed else 0, 0, 0, 0, 0, 0]


@given(num_tasks=st.integers(1, 60), num_workers=st.integers(1, 12), each=st.floats(0.1, 9))
def test_equal_tasks_end_with_the_last_worker(num_tasks: int, num_workers: int, each: float) -> None:
    busy = [0.0] * num_workers
    for _ in range(num_tasks):
        busy[busy.index(min(busy))] += each
    stage = StageTime("paint", num_tasks, num_tasks * each)
    assert StageTimes((stage,), 0.0, 1, is_guess=False, num_workers=num_workers).seconds == pytest.approx(max(busy))


def test_stages_follow_each_other_and_a_start_and_a_box_are_not_shared_out() -> None:
    trial = imagined((40, 20, 20), (20, 20, 20), (20, 20, 20))
    each = {"solve": 1e-3, "number": 5e-4, "name": 1.5, "graph": 2.5, "paint": 1e-3}
    costs = dataclasses.replace(NO_COSTS, start_seconds=7.0, stage_seconds={**NO_COSTS.stage_seconds, **each})
    times = segment_times(trial, costs, 4)
    graph = {"solve": 16.0, "number": 8.0, "name": 3.0, "graph": 5.0}
    assert {stage.name: stage.seconds for stage in times.stages} == pytest.approx(
        {"pieces": 0, "edges": 0, **graph, "paint": 16.0}
    )
    assert times.seconds == pytest.approx(7.0 + sum(graph.values()) + 8.0)  # two blocks are painted side by side


@pytest.mark.parametrize(("seconds", "edge"), [(0.0, 96), (1.0, 64)])
def test_larger_blocks_are_tried_where_that_is_quick(
    tmp_path: Path, still: Callable[[float], None], seconds: float, edge: int
) -> None:
    still(seconds)
    chosen = SegmentRecipe.model_validate(
        {
            "input": {"kind": "foreground"},
            "objects": {"method": "components"},
            "output": {"block": (96,) * 3, "chunk": (48,) * 3},
        }
    )
    plan, volume = planned_over(tmp_path, np.zeros((1, 96, 96, 192), np.uint8), chosen, 96)
    assert calibrated(trial_of(tmp_path, plan, volume)).num_voxels == 2 * edge**3


def test_blocks_are_tried_where_there_is_something_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, brightest = affinities((9, 64, 64, 64)), list[int]()
    data[:, 20:44, 20:44, 20:44] = 0
    plan, volume = planned_over(tmp_path, data, recipe((8, 8, 8), method="components", background=0.2), 8)

    def look(plan: SegmentPlan, stage: str, unit: int) -> float:
        brightest.append(plan.source.volume().open()[...].max())
        return 0.0

    inject(monkeypatch, look)
    assert calibrated(trial_of(tmp_path, plan, volume), 2).num_voxels == 2 * 2 * 8**3
    assert brightest and all(value > 0 for value in brightest)


@pytest.mark.parametrize("is_there", [True, False])
def test_what_is_tried_is_deleted_and_nothing_else_is_touched(tmp_path: Path, *, is_there: bool) -> None:
    plan, volume = planned_over(tmp_path, affinities((9, 20, 24, 40)), recipe((16, 16, 16)))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    found = calibrated(trial_of(tmp_path, plan, volume, is_there=is_there), 3)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert found.is_guess is not is_there
    assert found.num_voxels == 3 * 16 * 16 * 32  # as many as each of three workers tries


def test_a_volume_that_is_not_there_is_made_up(tmp_path: Path) -> None:
    plan, volume = planned_over(tmp_path, affinities((9, 40, 40, 40)).astype(np.float32) / 255, recipe((20, 20, 20)))
    (tmp_path / "a.zarr").rename(tmp_path / "b.zarr")
    times = calibrated(trial_of(tmp_path, plan, volume, is_there=False))
    assert times.is_guess
    assert all(stage.seconds > 0 for stage in times.stages)


def test_coarser_levels_are_timed_by_the_voxels_that_they_are_made_of(tmp_path: Path) -> None:
    chosen = recipe((16, 16, 16)).model_dump()
    chosen["output"]["levels"] = 2
    plan, volume = planned_over(tmp_path, affinities((9, 32, 48, 40)), SegmentRecipe.model_validate(chosen))
    trial = trial_of(tmp_path, plan, volume)
    times = segment_times(
        trial, dataclasses.replace(NO_COSTS, stage_seconds={**NO_COSTS.stage_seconds, "pyramid 1": 1e-3}), 1
    )
    coarser = {stage.name: (stage.num_tasks, stage.seconds) for stage in times.stages[-2:]}
    assert coarser == {"pyramid 1": (4, pytest.approx(61.44)), "pyramid 2": (1, pytest.approx(7.68))}
    assert times.seconds == pytest.approx(69.12)
    assert all(stage.seconds > 0 for stage in calibrated(trial).stages)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_made_up_affinities_are_the_same_each_time_and_of_the_type_that_is_wanted(tmp_path: Path, dtype: str) -> None:
    volume = dataclasses.replace(make(tmp_path / "a.zarr", np.zeros((4, 9, 9, 9), np.uint8)), dtype=np.dtype(dtype))
    parts = [estimate_module.synthetic_affinities(volume, (20, 30, 25), tmp_path / name) for name in ("one", "two")]
    first, second = (part.open().read(Box.from_shape((20, 30, 25))) for part in parts)
    assert np.array_equal(first, second)
    assert first.shape == (4, 20, 30, 25)
    assert first.dtype == dtype
    whole = first / (1.0 if dtype == "float32" else np.iinfo(dtype).max)
    assert whole.min() == 0
    assert 0.9 < whole.max() <= 1
    assert 0.2 < whole.mean() < 0.8


def test_nothing_stands_in_for_a_volume_at_no_cost(tmp_path: Path) -> None:
    volume = make(tmp_path / "a.zarr", np.ones((9, 30, 30, 30), np.uint16), chunks=(9, 10, 10, 10))
    found = zeros_like(volume, tmp_path / "nothing")
    assert (found.shape, found.dtype, found.chunks) == (volume.shape, volume.dtype, volume.chunks)
    assert not found.open()[...].any()
    assert sum(path.stat().st_size for path in (tmp_path / "nothing").rglob("*")) < 20_000


def test_a_labelling_of_few_blocks_or_of_damaged_ones_is_not_foreseen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan, _ = planned_over(tmp_path, affinities((9, 32, 32, 32)), recipe((16, 16, 16)), 8)
    assert len(forecast(plan)) == 1
    assert forecast(plan, 2) == []
    chunks = [path for path in (tmp_path / "a.zarr").rglob("*") if path.is_file() and path.name != "zarr.json"]
    for path in chunks:
        path.write_bytes(b"damaged")
    assert forecast(plan) == []
    assert f"no block could be tried: trial 0 failed: {tmp_path}/a.zarr, voxels " in caplog.text
    assert not (tmp_path / "out.zarr.run" / "calibration").exists()


def test_a_labelling_is_foreseen_once_where_nothing_was_done_before_and_only_for_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "WORTH_TRYING", 0)
    plan, _ = planned_over(tmp_path, affinities((9, 16, 16, 32)), recipe((16, 16, 16)))
    heard: list[object] = []

    class Named(Inline):
        def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:
            future = super().submit(app, *arguments)
            heard.append(app)
            return future

    listener = Listener(on_estimate=heard.append)
    with pytest.raises(Stopped):
        segment(plan, Named(most_tasks=3).start, listener=listener)
    trial, times, *tasks = heard
    assert (trial, tasks) == ("try_segmentation", ["find_fragments"] * 2)
    assert isinstance(times, StageTimes)
    for goes_on in (True, False):
        heard.clear()
        segment(plan, Named().start, listener=listener)
        assert not {type(each) for each in heard} - {str} and "try_segmentation" not in heard
        assert ("paint" in heard) == goes_on
    segment(plan, Named().start, RunOptions(fresh=True))
    assert heard and "try_segmentation" not in heard


def test_the_command_says_how_long_it_takes_before_it_begins_and_beside_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "a.zarr", affinities((9, 16, 16, 32)), chunks=(9, 16, 16, 16))
    monkeypatch.setattr(estimate_module, "WORTH_TRYING", 0)
    give = giver(tmp_path, monkeypatch, capsys)
    ended = give("segment", "a.zarr", *THREADS, "--set", "output.block=[16,16,16]", "--set", "output.chunk=[8,8,8]")
    assert ended.code == 0, ended.err
    before, after = ended.out.split("wrote ")
    assert "writes up to 32.0 KiB in 5 files, takes up to " in before
    rows = [line.split() for line in before.splitlines()[-8:-1]]
    assert [(name, tasks) for name, tasks, *_ in rows] == [
        ("pieces", "2"),
        ("edges", "2"),
        *((name, "1") for name in ("solve", "number", "name", "graph")),
        ("paint", "2"),
    ]
    (whole,) = re.findall(r"^(.* s) on threads, by [\d,]+ voxels tried there$", before, re.MULTILINE)
    times = ", ".join(rf"{name} [\d.]+ s \((?:≈ )?([\d.]+) s\)" for name, *_ in rows)
    summary = re.search(rf" in [\d.]+ s \(planned {re.escape(whole)}\); tasks: {times}$", after, re.MULTILINE)
    assert summary is not None
    # Two workers share the tasks of a stage: seconds of all of them, beside those from its first task to its last.
    for (name, _, *took), seconds in zip(rows, map(float, summary.groups()), strict=True):
        (elapsed,) = map(float, re.findall(r"[\d.]+", " ".join(took)))
        assert elapsed - 0.1 <= seconds + 0.05 and seconds <= 2 * elapsed + 0.2, name


# ---- evaluations


@pytest.fixture
def timed_score(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Box]]:
    """Let scoring a block take a second for every 1,000 voxels; what is scored, and where, is noted."""
    heard: list[tuple[str, Box]] = []
    real = subject.reduce_blocks

    def score(found: evaluate.Evaluation, units: Sequence[int]) -> Record[subject.BlockSums]:
        boxes = [found.blocks.box(block) for block in units]
        heard.extend((found.output.path, box) for box in boxes)
        return with_seconds(real(found, units), sum(box.num_voxels for box in boxes) / 1000)

    monkeypatch.setattr(subject, "reduce_blocks", score)
    return heard


def score_time(found: evaluate.Evaluation, missing: Collection[str], folder: Path, slots: int = 1) -> StageTimes:
    workers = Inline(slots=slots)
    return take_steps(driver.calibrate_evaluation(found, missing, workers, folder / "tried"), workers)


def test_an_evaluation_takes_as_long_as_its_blocks(tmp_path: Path, timed_score: list[tuple[str, Box]]) -> None:
    volume = make(tmp_path / "a.zarr", np.ones((20, 150, 300), np.uint8), chunks=(20, 64, 64))
    found = evaluate.plan_evaluation(volume, volume, None)
    time = score_time(found, {"of another stage"}, tmp_path)
    assert (time.seconds, time.is_guess) == (pytest.approx(20 * 150 * 300 / 1000), False)
    assert [box.shape for _, box in timed_score] == [(20, 128, 128)]  # whole along y and x, where there is such a one
    four = score_time(found, (), tmp_path, 4)
    assert four.seconds == pytest.approx(time.seconds * 2 / 6)  # six blocks: two rounds
    assert not (tmp_path / "tried").exists()


@pytest.mark.parametrize("kind", ["image", "labels"])
def test_an_evaluation_of_what_is_not_there_is_a_guess(
    tmp_path: Path, timed_score: list[tuple[str, Box]], kind: str
) -> None:
    truth = make(tmp_path / "truth.zarr", np.arange(24 * 20 * 20, dtype=np.uint16).reshape(24, 20, 20) % 99)
    made, given = (
        make(tmp_path / name, np.ones(shape, np.uint16)) for name, shape in (("a", (24, 20, 20)), ("b", (12, 20, 20)))
    )
    found = evaluate.plan_evaluation(made, truth, given if kind == "image" else None, kind=kind)
    for name in ("a", "b"):
        (tmp_path / name).rename(tmp_path / f"not-{name}")
    with pytest.raises(RunStopped, match=r"^trial 0 failed: no array at .*/a any more"):
        score_time(found, (), tmp_path)
    time = score_time(found, {made.path, given.path}, tmp_path)
    assert (time.seconds, time.is_guess) == (pytest.approx(24 * 20 * 20 / 1000), True)
    assert not (tmp_path / "tried").exists()


def test_times_of_a_labelling_say_what_they_rest_on() -> None:
    from volpipe.display.plans import time_table

    stages = (StageTime("pieces", 12, 61.0), StageTime("graph", 1, 3.0))
    table = time_table(StageTimes(stages, 0.0, 1000, is_guess=True), "local")
    assert [list(column.cells) for column in table.columns] == [
        ["pieces", "graph"], ["12", "1"], ["≈ 1 min 01 s", "≈ 3.0 s"],
    ]  # fmt: skip
    assert table.caption == (
        "≈ 1 min 04 s on local, by 1,000 synthetic voxels tried there, for its input does not exist yet"
    )
