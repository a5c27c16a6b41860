"""Stages: their plans before anything exists, their runs, and how they go on."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from inline import Inline
from volumes import fingerprint, noise, write_volume

from volpipe.errors import PlanError, RunError, RunStopped, VolumeError
from volpipe.estimation import limits
from volpipe.recipes.inference import load_recipe
from volpipe.runs.options import RunOptions
from volpipe.runs.provenance import read_origin
from volpipe.volumes.volume import open_volume
from volpipe.workflow.cost import FlowCost, forecast_flow
from volpipe.workflow.execute import FlowListener, FlowReport
from volpipe.workflow.plan import FlowPlan, plan_flow
from volpipe.workflow.prepare import prepare
from volpipe.workflow.recipe import find_flow
from volpipe.workflow.work_plan import execute, preview

SHAPE = (16, 24, 16)
NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, channels=1, scale=1, add=0.0):
        super().__init__()
        self.volpipe = dict(
            in_channels=1, out_channels=channels, scale=(scale, 1, 1), stride=(1, 1, 1), halo=(0, 0, 0),
            window=(8, 8, 8), intensity="same"
        )
        self.channels, self.scale, self.add = channels, scale, add

    def forward(self, x):
        return (x + self.add).repeat_interleave(self.scale, 2).repeat(1, self.channels, 1, 1, 1)

def net(channels=1, scale=1, add=0.0):
    return Net(channels, scale, add)
"""
WINDOWS = "windows = { shape = [8, 8, 8], overlap = [0, 0, 0], block = [1, 1, 1] }"
TWO = f"""
[[stage]]
name = "first"
net = {{ name = "nets.py:net", options = {{ scale = 2 }} }}
{WINDOWS}

[[stage]]
name = "second"
net = {{ name = "nets.py:net", options = {{ add = 0.25 }} }}
{WINDOWS}
"""
SCORED = (
    TWO
    + """
[[stage]]
name = "scores"
kind = "evaluate"
input = "second"
reference = "truth.n5"
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a volume lies, and nets."""
    monkeypatch.chdir(tmp_path)
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def flow_plan(folder: Path, text: str, *settings: str, out: str = "out") -> FlowPlan:
    (folder / "flow.toml").write_text(text)
    flow = find_flow(folder / "flow.toml", settings)
    assert flow is not None
    return plan_flow(flow, str(folder / "in.n5"), folder / out, folder)


def flow_cost(folder: Path, text: str, *settings: str) -> FlowCost:
    return forecast_flow(flow_plan(folder, text, *settings))


class Counted:
    """Workers, and how often they were started."""

    def __init__(self, most_tasks: int | None = None) -> None:
        self.workers = Inline(most_tasks=most_tasks)
        self.num_starts = 0

    @contextmanager
    def start(self, folder: Path) -> Iterator[Inline]:
        self.num_starts += 1
        with self.workers.start(folder) as workers:
            yield workers


def run(plan: FlowPlan, *, fresh: bool = False) -> FlowReport:
    return execute(plan, Counted().start, RunOptions(fresh=fresh))


LABELLED = (
    TWO.replace("scale = 2", "scale = 1")
    + """
[[stage]]
name = "labels"
kind = "label"
input = { stage = "second", kind = "foreground" }
objects = { method = "components", threshold = 0.5 }

[[stage]]
name = "scores"
kind = "evaluate"
input = "first"
reference = "in.n5"
"""
)


def test_what_a_plan_told_of_times_is_known_to_the_same_stages_on_as_many_workers(folder: Path) -> None:
    plan = flow_plan(folder, LABELLED)
    told = preview(plan, Inline().start)
    names, workers = ("labels", "scores"), Inline()

    def known(plan: FlowPlan, workers: Inline | None) -> list[bool]:
        cost = forecast_flow(plan, workers)
        found = {each.stage.name: each.times for each in cost.stages}
        assert all(found.get(each.stage.name) in (None, each.times) for each in told.stages)
        return [found.get(name) is not None for name in names]

    assert known(plan, workers) == [True, True]
    assert workers.num_tasks == 0
    assert known(plan, Inline(slots=2)) == [False, False]
    assert known(plan, None) == [False, False]
    assert known(flow_plan(folder, LABELLED, "labels.objects.threshold=0.6"), workers) == [False, True]
    assert known(flow_plan(folder, LABELLED, "scores.margin=[1,1,1]"), workers) == [True, False]
    assert known(flow_plan(folder, TWO.replace('"second"', '"labels"')), workers) == [False, False]
    assert known(flow_plan(folder, LABELLED, out="other"), workers) == [False, False]
    times = plan.folder.path / "times.json"
    times.write_text(times.read_text().replace("seconds", "minutes"))  # as another version might write it
    assert known(plan, workers) == [False, False]


def test_stages_make_what_runs_given_one_by_one_make(folder: Path) -> None:
    plan = flow_plan(folder, TWO)
    assert run(plan).is_complete
    before = "in.n5"
    for stage, options in (("first", "scale = 2"), ("second", "add = 0.25")):
        (folder / "one.toml").write_text(f'[net]\nname = "nets.py:net"\noptions = {{ {options} }}\n' + f"{WINDOWS}\n")
        recipe = load_recipe(None, ["net.name=nets.py:net", f"net.options={{ {options} }}", *settings_of(WINDOWS)])
        execute(prepare(before, recipe, folder / f"{stage}.zarr", folder), Counted().start)
        before = f"{stage}.zarr"
        assert fingerprint(folder / "out" / f"{stage}.zarr" / "s0") == fingerprint(folder / f"{stage}.zarr" / "s0")
    # 0.25 of the normalised range of 255 / 2 is 31.875 grey values
    wanted = np.clip(np.rint(noise(SHAPE).repeat(2, axis=0) + 31.875), 0, 255)
    assert np.abs(open_volume(plan.result.out).open()[...] - wanted).max() <= 1


def settings_of(table: str) -> list[str]:
    """Return ``windows = { a = 1, b = 2 }`` as settings."""
    section, _, values = table.partition(" = ")
    return [f"{section}.{key}={value}" for key, value in re.findall(r"(\w+) = (\[.*?\])", values)]


def test_a_later_stage_says_which_output_it_read(folder: Path) -> None:
    plan = flow_plan(folder, TWO)
    run(plan)
    said = read_origin(plan.stages[1].out)
    assert said.volume == str(plan.stages[0].out / "s0")
    assert said.recipe.net.options == {"add": 0.25}


def test_one_site_is_started_for_all_stages_and_none_where_nothing_is_left(folder: Path) -> None:
    write_volume(folder / "truth.n5", noise(SHAPE).repeat(2, axis=0))
    plan, counted, again = flow_plan(folder, SCORED), Counted(), Counted()
    assert execute(plan, counted.start).is_complete
    assert execute(plan, again.start).was_complete
    assert (counted.num_starts, again.num_starts) == (1, 0)


def test_totals_are_the_sums_and_files_are_as_many_as_are_written(folder: Path) -> None:
    cost = flow_cost(folder, TWO)
    plans = [forecast_flow(replace(cost.plan, stages=(stage,))) for stage in cost.plan.stages[:1]]
    needs = [stage.need for stage in cost.stages]
    assert cost.stages[0].need == plans[0].stages[0].need
    assert cost.total.output_bytes == sum(need.output_bytes for need in needs if need)
    run(cost.plan)
    files = [path for out in cost.plan.out.glob("*.zarr") for path in out.rglob("*") if path.is_file()]
    assert cost.total.output_files == len(files)
    assert sum(path.stat().st_size for path in files if path.name != "zarr.json") <= cost.total.output_bytes
    plans = [stage.plan for stage in cost.plan.stages]
    levels = [(each.level_shape(n), each.chunk) for each in plans for n in range(len(each.factors))]
    num_chunks = sum(math.prod(-(-n // c) for n, c in zip(*pair, strict=True)) for pair in levels)
    apart = 2 * np.prod(SHAPE) + 2 * np.prod(SHAPE) + 64 * num_chunks
    assert cost.total.output_bytes == apart
    assert cost.total.most_bytes == apart


def test_scratch_of_stages_adds_up_for_they_run_side_by_side(folder: Path) -> None:
    cost = flow_cost(folder, TWO, "first.windows.blend=hann", "first.windows.overlap=[4,4,4]")
    first, second = (stage.need for stage in cost.stages)
    assert first is not None
    assert second is not None
    assert first.scratch_bytes > 0
    assert cost.total.most_bytes == cost.total.output_bytes + first.scratch_bytes + second.scratch_bytes


def test_disks_are_judged_by_what_all_stages_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = flow_cost(folder, TWO)
    most = max(need.most_inodes for stage in cost.stages if (need := stage.need))
    monkeypatch.setattr("volpipe.workflow.cost.disk_limits", lambda out: limits.Limits(free_files=most + 1))
    with pytest.raises(
        PlanError,
        match=rf"of all stages need {cost.total.most_inodes} files and folders, and .*out may have {most + 1};",
    ):
        cost.check()
    monkeypatch.setattr(
        "volpipe.workflow.cost.disk_limits", lambda out: limits.Limits(free_files=cost.total.most_inodes)
    )
    cost.check()


def test_what_is_complete_needs_no_more_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = flow_cost(folder, TWO)
    run(cost.plan)
    monkeypatch.setattr("volpipe.workflow.cost.disk_limits", lambda out: limits.Limits(free_files=0))
    forecast_flow(cost.plan).check()


def test_a_later_stage_lacks_what_an_earlier_one_lacks_and_the_next_command_goes_on(folder: Path) -> None:
    plan = flow_plan(folder, TWO)
    run(plan)
    whole = fingerprint(plan.out / "second.zarr")
    chunk = folder / "in.n5" / "raw" / "1" / "1" / "1"
    good, stamp = chunk.read_bytes(), chunk.stat()
    chunk.write_bytes(good[:-9])
    report = execute(plan, Counted().start, RunOptions(tolerated=1.0, fresh=True))
    assert not report.is_complete
    first, second = (done.report for done in report.stages)
    assert len(first.missing) == 1
    num_missing = len(second.missing)
    assert 0 < num_missing < len(plan.stages[1].plan.blocks)
    assert {part.reason for part in second.missing} == {"needs a part that failed"}
    assert all(not (part.box & first.missing[0].box).is_empty for part in second.missing)
    chunk.write_bytes(good)
    os.utime(chunk, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    again = run(plan)
    assert again.is_complete
    assert again.stages[1].report.totals["infer"].units == num_missing
    assert fingerprint(plan.out / "second.zarr") == whole


def test_statistics_of_a_stage_that_lacks_parts_are_refused_by_a_sentence(folder: Path) -> None:
    chunk = folder / "in.n5" / "raw" / "1" / "1" / "1"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    plan = flow_plan(folder, TWO, "second.normalise.method=zscore")
    with pytest.raises(RunStopped, match=r"^stage second: \d+ of \d+ blocks cannot be read, because parts"):
        execute(plan, Counted().start, RunOptions(tolerated=1.0))


def test_a_changed_recipe_is_refused_by_the_name_of_its_stage_and_made_with_fresh(folder: Path) -> None:
    run(flow_plan(folder, TWO))
    before = fingerprint(folder / "out" / "first.zarr")
    longer = TWO + f'[[stage]]\nname = "third"\ninput = "first"\nnet = {{ name = "identity" }}\n{WINDOWS}\n'
    changed, counted = flow_plan(folder, longer, "second.net.options={ add = 0.5 }"), Counted()
    with pytest.raises(RunError, match=r"^stage second: .*another recipe.*add.*0.25.*0.5.*over, all stages; to keep"):
        execute(changed, counted.start)
    assert counted.num_starts == 0
    assert fingerprint(folder / "out" / "first.zarr") == before
    assert run(changed, fresh=True).is_complete
    assert read_origin(folder / "out" / "second.zarr").recipe.net.options == {"add": 0.5}


def test_a_changed_first_stage_is_refused_before_a_later_one_is_touched(folder: Path) -> None:
    run(flow_plan(folder, TWO))
    with pytest.raises(RunError, match=r"^stage first: .*another recipe"):
        run(flow_plan(folder, TWO, "first.net.options={ scale = 2, add = 0.5 }"))


def test_an_evaluation_is_done_again_where_it_was_changed_and_left_alone_otherwise(folder: Path) -> None:
    write_volume(folder / "truth.n5", noise(SHAPE).repeat(2, axis=0))
    plan = flow_plan(folder, SCORED)
    run(plan)
    first = json.loads((folder / "out" / "scores.json").read_text())
    assert first["scores"]["output"]["psnr"] < 40
    assert first["reference"].endswith("truth.n5:raw")
    assert run(plan).was_complete
    other = run(flow_plan(folder, SCORED, "scores.input=first"))
    assert [done.report.was_complete for done in other.stages] == [True, True, False]
    second = json.loads((folder / "out" / "scores.json").read_text())
    assert second["scores"]["output"]["psnr"] is None  # infinite: nothing differs


def test_scores_of_a_part_are_refused_before_it_is_made_where_the_reference_is_not_cut_likewise(folder: Path) -> None:
    write_volume(folder / "truth.n5", noise(SHAPE).repeat(2, axis=0))
    settings = ("first.input.roi=8:16,:,:", "scores.roi=0:8,:,:")
    with pytest.raises(PlanError, match=r"stage scores: .*box 8:16,0:24,0:16 of its input.* --roi 16:32,0:24,0:16`"):
        flow_plan(folder, SCORED, *settings)
    write_volume(folder / "cut.n5", noise(SHAPE).repeat(2, axis=0)[16:])
    assert flow_plan(folder, SCORED, *settings, "scores.reference=cut.n5").stages


def test_two_stages_may_read_one_and_a_level_of_it(folder: Path) -> None:
    text = TWO.replace('name = "second"', 'name = "second"\ninput = { stage = "first", level = 1 }') + (
        '[[stage]]\nname = "third"\ninput = "first"\nrecipe = "one.toml"\n[[stage]]\nname = "fourth"\n'
        f'input = "volume"\nnet = {{ name = "identity" }}\n{WINDOWS}\n'
    )
    (folder / "one.toml").write_text(f'{WINDOWS}\n[net]\nname = "identity"\n')
    plan = flow_plan(folder, text, "first.output.levels=1")
    run(plan)
    first, second, third, fourth = (open_volume(stage.out).open()[...] for stage in plan.stages)
    assert np.array_equal(third, first)
    assert np.array_equal(fourth, noise(SHAPE))
    assert second.shape == open_volume(plan.stages[0].out, level=1).shape


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["second.net.options={ scale = 1, channels = 2 }"], r"stage labels: .* has 2 channels, input.offsets 9"),
        (
            ["labels.input.kind=foreground", "labels.input.channel=1"],
            r"stage labels: .*has no channel 1; input\.channel is one of its 1 channel",
        ),
        (["second.input.level=9"], r"stage second: .*first.zarr will have no level 9"),
        (["second.input.key=raw"], r"stage second: input.key raw is for the volume"),
        (["second.windows.shape=[7,8,8]", "second.net.stride=[2,1,1]"], r"stage second: axis z: window 7"),
        (
            ["second.windows.shape=[512,8,8]"],
            r"stage second: axis z: windows.shape 512 is too large for a volume of 32",
        ),
    ],
)
def test_stages_that_do_not_fit_what_they_read_are_refused(folder: Path, settings: list[str], sentence: str) -> None:
    text = TWO + '[[stage]]\nname = "labels"\nkind = "label"\n'
    with pytest.raises((PlanError, VolumeError), match=sentence):
        flow_plan(folder, text, *settings)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [([], True), (["second.net.intensity=unit"], False), (["labels.input.range=[0,255]"], False)],
)
def test_labels_of_what_may_be_no_probabilities_are_planned_with_a_warning(
    folder: Path, settings: list[str], is_told: bool
) -> None:
    text = TWO + '[[stage]]\nname = "labels"\nkind = "label"\n'
    plan = flow_plan(folder, text, 'labels.input.kind="membrane"', *settings)
    told = [text for text in plan.warnings() if "the net of stage second gives grey levels of its input, and" in text]
    assert bool(told) == is_told


def test_a_later_stage_that_no_worker_can_hold_is_refused_before_the_first_begins(folder: Path) -> None:
    plan, counted = flow_plan(folder, TWO, "second.windows.block=[4,3,2]"), Counted()
    first, second = (cost.forecast.estimate.memory_bytes for cost in forecast_flow(plan).stages if cost.forecast)
    assert first < second
    counted.workers.worker_bytes = int(first) + 1
    listener = FlowListener(on_workers=lambda workers: forecast_flow(plan, workers).check())
    with pytest.raises(PlanError, match=r"^stage second: a worker needs .* GiB of memory and has "):
        execute(plan, counted.start, listener=listener)
    assert not (folder / "out" / "first.zarr").exists()


def test_a_folder_with_another_run_is_refused(folder: Path) -> None:
    recipe = load_recipe(None, ["net.name=identity"])
    execute(prepare("in.n5", recipe, folder / "out", folder), Counted().start)
    with pytest.raises(RunError, match=r"out.run holds the run of one net; choose another --out"):
        run(flow_plan(folder, TWO))


def test_a_volume_that_changed_is_refused_and_no_update_is_offered_that_stages_do_not_have(folder: Path) -> None:
    run(flow_plan(folder, TWO))
    shutil.rmtree(folder / "in.n5")
    write_volume(folder / "in.n5", noise(SHAPE, seed=5), chunk=8)
    with pytest.raises(RunError, match="has changed since this output was begun") as refused:
        run(flow_plan(folder, TWO))
    assert "--update" not in str(refused.value)


def test_the_listener_hears_of_each_stage_in_order(folder: Path) -> None:
    heard: list[str] = []
    listener = FlowListener(
        lambda stage: heard.append(f"+{stage.name}"), lambda done: heard.append(f"-{done.stage.name}")
    )
    execute(flow_plan(folder, TWO), Counted().start, listener=listener)
    # The second begins when something is there to read, which on a slow machine may be all of it.
    assert heard in (["+first", "+second", "-first", "-second"], ["+first", "-first", "+second", "-second"])
