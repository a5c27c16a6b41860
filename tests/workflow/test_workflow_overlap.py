"""Stages side by side, by their journals: none reads a shard before it is written, and the bytes are those in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from inline import Inline
from volumes import fingerprint, noise, write_volume

from volpipe.blockwise.journal import read_records
from volpipe.blockwise.loop import perform
from volpipe.evaluation import subject
from volpipe.runs import worker
from volpipe.segmentation import tasks
from volpipe.stages.kind import StagePlan
from volpipe.workflow.plan import FlowPlan, plan_flow
from volpipe.workflow.recipe import find_flow
from volpipe.workflow.work_plan import execute

SHAPE, EDGE = (64, 16, 16), 8
COUNTS = tuple(n // EDGE for n in SHAPE)  # blocks of every stage, which are shards as well
BLOCKS = [tuple(map(int, index)) for index in np.ndindex(COUNTS)]
KINDS = (*worker.RESULTS, *tasks.RESULTS, *subject.RESULTS)
# Nets that see two voxels further than they tell, and take their time.
NETS = """
import time
import torch
from torch import nn

class Net(nn.Module):
    volpipe = dict(
        in_channels=1, scale=(1, 1, 1), stride=(1, 1, 1), halo=(2, 2, 2),
        window=(12, 12, 12), intensity="same", out_channels=1
    )

    def __init__(self, add, seconds):
        super().__init__()
        self.add, self.seconds = add, seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return (x + x.roll(2, 4) + x.roll(-2, 3)) / 3 + self.add

def net(add=0.0, seconds=0.0):
    return Net(add, seconds)
"""
STAGE = """
[[stage]]
name = "{name}"
net = {{ name = "nets.py:net", options = {{ seconds = {seconds}, add = {add} }} }}
windows = {{ shape = [12, 12, 12], overlap = 4, block = [1, 1, 1] }}
output = {{ chunk = [8, 8, 8], shard = [8, 8, 8], levels = {levels} }}
"""
FIRST = STAGE.format(name="first", seconds=0.03, add=0.0, levels=2)
SECOND = STAGE.format(name="second", seconds=0.0, add=0.1, levels=1)
OBJECTS = """
[[stage]]
name = "objects"
kind = "label"
input = { stage = "first", kind = "foreground" }
objects = { method = "components", threshold = 0.55 }
output = { block = [8, 8, 8], chunk = [4, 4, 4] }
"""
IMAGE = """
[[stage]]
name = "image"
kind = "evaluate"
input = "first"
reference = "in.n5"
"""
AGREE = """
[[stage]]
name = "agree"
kind = "evaluate"
input = "objects"
reference = "truth.n5"
labels = true
"""
Times = dict[int, tuple[float, float]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a volume lies, labels, and nets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subject, "BLOCK", (EDGE,) * 3)
    coarse = np.random.default_rng(0).integers(0, 2, [n // 4 for n in SHAPE], np.uint8)
    write_volume(tmp_path / "in.n5", 200 * np.kron(coarse, np.ones((4, 4, 4), np.uint8)) + noise(SHAPE) // 8, chunk=8)
    write_volume(tmp_path / "truth.n5", np.repeat(np.arange(1, SHAPE[0] + 1, dtype=np.uint16), 16 * 16).reshape(SHAPE))
    (tmp_path / "nets.py").write_text(NETS)
    yield tmp_path


def planned(folder: Path, text: str, *settings: str) -> FlowPlan:
    (folder / "flow.toml").write_text(text)
    flow = find_flow(folder / "flow.toml", settings)
    assert flow is not None
    return plan_flow(flow, str(folder / "in.n5"), folder / "out", folder)


def stage_of(plan: FlowPlan, name: str) -> StagePlan:
    (stage,) = (stage for stage in plan.stages if stage.name == name)
    return stage


def times(plan: FlowPlan, name: str, of: str) -> Times:
    """Return when the task of each unit of a stage's own stage `of` began and ended, by its journal."""
    records = (r for r in read_records(stage_of(plan, name).folder.journal, KINDS) if r.stage == of)
    return {n: (r.usage.started, r.usage.started + r.usage.seconds) for r in records for n in r.done}


def check_order(before: Times, after: Times, reach: int) -> None:
    """Check that what a task of `after` sees was written when it began.

    Args:
        before: of the blocks of the stage that is read, each of which writes a shard.
        after: of the stage that reads.
        reach: 1 where a task sees a part of the neighbouring blocks, 0 where it does not.
    """
    assert before.keys() == after.keys() == set(range(len(BLOCKS)))
    for number, (began, _) in after.items():
        places = [range(i - reach, i + reach + 1) for i in BLOCKS[number]]
        near = [n for n, index in enumerate(BLOCKS) if all(i in p for i, p in zip(index, places, strict=True))]
        latest = max(before[n][1] for n in near)
        assert latest <= began + 0.001, (number, latest - began)  # two clocks: of the day, and of durations


def ends(*stages: Times) -> float:
    return max(ended for _, ended in itertools.chain(*(stage.values() for stage in stages)))


def begins(stage: Times) -> float:
    return min(began for began, _ in stage.values())


def made(plan: FlowPlan) -> dict[str, str]:
    """Return a fingerprint of what each stage made: all of its output, attributes as well, or its scores."""
    outs = {stage.name: stage.out for stage in plan.stages if isinstance(stage.out, Path)}
    return {name: fingerprint(out) if out.is_dir() else out.read_text() for name, out in outs.items()}


def check_same_in_turn(plan: FlowPlan, folder: Path) -> None:
    """Check that the stages one after the other, each on workers of its own, make what lies there to the byte."""
    beside = made(plan)
    plan.out.rename(folder / "beside")
    plan.folder.path.rename(folder / "beside.run")
    plan.out.mkdir()
    for stage in plan.stages:
        work = stage.work()
        assert perform(work, partial(Inline(seed=3).start, work.folder.parsl)).is_complete
    assert made(plan) == beside


@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_second_net_sees_what_the_first_one_wrote_as_soon_as_it_is_there(folder: Path, level: int) -> None:
    plan = planned(folder, FIRST + SECOND, f"second.input.level={level}")
    assert execute(plan, Inline(slots=2, in_turn=True).start).is_complete
    infer = times(plan, "first", "infer")
    coarser = times(plan, "first", "pyramid 1")
    second = times(plan, "second", "infer")
    assert begins(second) < ends(infer, coarser)
    if level == 0:
        check_order(infer, second, reach=1)
    else:
        assert coarser.keys() == second.keys() == set(range(4))  # 32 × 8 × 8 voxels
        for number, (began, _) in second.items():
            assert max(ended for n, (_, ended) in coarser.items() if abs(n - number) <= 1) <= began + 0.001
    check_same_in_turn(plan, folder)


def test_statistics_of_the_whole_wait_for_the_whole(folder: Path) -> None:
    plan = planned(folder, FIRST + SECOND, "second.normalise.method=zscore")
    assert execute(plan, Inline(slots=2).start).is_complete
    infer, measure = times(plan, "first", "infer"), times(plan, "second", "measure")
    check_order(infer, measure, reach=0)
    assert begins(measure) < ends(infer)
    assert begins(times(plan, "second", "infer")) >= ends(infer, measure) - 0.001
    check_same_in_turn(plan, folder)


def test_labels_and_scores_follow_a_net_as_far_as_it_is(folder: Path) -> None:
    plan = planned(folder, FIRST + OBJECTS + IMAGE + AGREE)
    assert execute(plan, Inline(slots=2, in_turn=True).start).is_complete
    infer, fragments, scores = (
        times(plan, name, of) for name, of in [("first", "infer"), ("objects", "pieces"), ("image", "evaluate")]
    )
    for later in (fragments, scores):
        assert begins(later) < ends(infer)
    check_order(infer, fragments, reach=1)
    check_order(infer, scores, reach=1)  # SSIM sees three voxels further
    paint, agree = times(plan, "objects", "paint"), times(plan, "agree", "evaluate")
    assert begins(agree) >= ends(paint) - 0.001  # of all labels, some are looked at first
    check_same_in_turn(plan, folder)
