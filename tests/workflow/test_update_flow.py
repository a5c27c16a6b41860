"""After an update the outputs of all stages are those of a fresh flow, byte for byte."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import THREADS, Give, giver
from growing import edit, edits, grow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline import Inline, Stopped
from nets import SMOOTH
from volumes import fingerprint, noise, write_volume

from volpipe.blockwise.journal import Record
from volpipe.errors import RunError
from volpipe.geometry.grid import Box
from volpipe.runs.options import RunOptions
from volpipe.runs.provenance import read_provenance
from volpipe.volumes.volume import open_volume
from volpipe.workflow.execute import FlowReport
from volpipe.workflow.plan import FlowPlan, plan_flow
from volpipe.workflow.recipe import find_flow
from volpipe.workflow.status import find_status
from volpipe.workflow.work_plan import execute

LAWS = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ALIKE = """
import torch
class Alike(torch.nn.Module):
    volpipe = dict(in_channels=1, out_channels=3, scale=(1, 1, 1), stride=(1, 1, 1), halo=(1, 1, 1), intensity="unit")
    def forward(self, x):
        return torch.cat([1 - (x - x.roll(1, axis)).abs().clamp(0, 255) / 255 for axis in (2, 3, 4)], 1)
def alike():
    return Alike()
"""
FLOW = """
[[stage]]
name = "first"
net = {{ name = "smooth.py:smooth", intensity = "same" }}
normalise = {{ method = "none" }}
windows = {{ shape = [{window}, {window}, {window}], overlap = {overlap}, block = [1, 1, 1], blend = "{blend}" }}
output = {{ chunk = [8, 8, 8], shard = [8, 8, 8] }}

[[stage]]
name = "near"
net = {{ name = "alike.py:alike" }}
normalise = {{ method = "none" }}
input = {{ stage = "first" }}
windows = {{ shape = [10, 10, 10], overlap = 2, block = [1, 1, 1], blend = "{near}" }}
output = {{ chunk = [8, 8, 8], shard = [8, 8, 8] }}

[[stage]]
name = "objects"
kind = "label"
input = {{ stage = "near", offsets = [[-1, 0, 0], [0, -1, 0], [0, 0, -1]] }}
objects = {{ threshold = 0.7 }}
output = {{ block = [8, 8, 8], chunk = [4, 4, 4] }}
"""
SHAPE = (16, 16, 24)


def planned(folder: Path, num_stages: int = 3, near: str = "crop", **choices: Any) -> FlowPlan:
    """Return the plan of the flow in `folder` for the volume there; `near` is the blend of its second stage."""
    (folder / "smooth.py").write_text(SMOOTH)
    (folder / "alike.py").write_text(ALIKE)
    toml = "[[stage]]".join(FLOW.split("[[stage]]")[: num_stages + 1])
    (folder / "flow.toml").write_text(
        toml.format(**({"window": 10, "overlap": 2, "blend": "crop", "near": near} | choices))
    )
    flow = find_flow(folder / "flow.toml")
    assert flow is not None
    return plan_flow(flow, str(folder / "in.n5"), folder / "out", folder)


def ran(plan: FlowPlan, inline: Inline | None = None, **options: Any) -> FlowReport:
    report = execute(plan, (inline or Inline()).start, RunOptions(**options))
    assert report.is_complete
    return report


def made(folder: Path) -> dict[str, str]:
    """Return a hash of the output of each stage, and of the table of objects."""
    hashes = {path.name: fingerprint(path) for path in (folder / "out").glob("*.zarr")}
    return hashes | {path.name: path.read_text() for path in (folder / "out").glob("*.run/objects.csv")}


def assert_fresh(folder: Path, **choices: Any) -> None:
    """Compare the outputs with those of a fresh flow in their place."""
    found = made(folder)
    shutil.rmtree(folder / "out")
    shutil.rmtree(folder / "out.run")
    ran(planned(folder, **choices))
    assert made(folder) == found


def goes_on(plan: FlowPlan, most_tasks: int | None, *, may_have_grown: bool) -> bool:
    """Return whether an interrupted update is completed without the option, by so many tasks."""
    try:
        ran(plan, Inline(0, 2, most_tasks))
    except Stopped:
        return False
    except RunError as error:
        assert may_have_grown and "with another recipe or input" in str(error)  # a stage has not followed yet
        return False
    return True


def check_law(data: st.DataObject, most_times: int) -> None:
    """Edit, grow, interrupt, go on with and without the option."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    choices = data.draw(st.sampled_from([{}, {"window": 12, "overlap": 4, "blend": "hann"}]))
    shape = tuple(data.draw(st.integers(9, 14)) for _ in range(3))
    with tempfile.TemporaryDirectory() as name:
        folder, voxels, has_grown = Path(name), noise(shape), False
        write_volume(folder / "in.n5", voxels, chunk=8)
        for _ in range(data.draw(st.integers(1, most_times))):
            plan = planned(folder, **choices)
            with contextlib.suppress(Stopped):
                execute(plan, Inline(0, 2, int(rng.integers(0, 120))).start, RunOptions(update=True))
            if data.draw(st.booleans()):  # as it was given first
                most = data.draw(st.sampled_from([None, int(rng.integers(0, 60))]))
                if goes_on(plan, most, may_have_grown=has_grown):
                    assert_fresh(folder, **choices)
            more = data.draw(st.sampled_from([(0, 0, 0), (0, 0, 0), (5, 0, 0), (0, 3, 6)]))
            if any(more):
                has_grown, before = True, open_volume(folder / "in.n5").open()[...]
                grow(folder / "in.n5", np.pad(before, [(0, n) for n in more], mode="reflect"), chunk=8)
            shape = open_volume(folder / "in.n5").spatial_shape
            for box, other in data.draw(edits(shape)):
                edit(folder / "in.n5", box, other)
        ran(planned(folder, **choices), Inline(0, 2), update=True)
        assert ran(planned(folder, **choices), update=True).was_complete
        assert_fresh(folder, **choices)


@pytest.mark.long
@LAWS
@given(st.data())
def test_updated_stages_are_those_of_a_fresh_flow(data: st.DataObject) -> None:
    """Edited and grown at random, interrupted anywhere, and continued also without --update."""
    check_law(data, 2)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(LAWS, max_examples=100)
@given(st.data())
def test_updated_stages_are_those_of_a_fresh_flow_at_length(data: st.DataObject) -> None:
    check_law(data, 4)


def num_computed(report: FlowReport) -> dict[str, tuple[int, int]]:
    """Return how many blocks of each stage had changed, and how many were computed again."""
    updates = {each.stage.name: getattr(each.report, "updates", ()) for each in report.stages}
    return {name: (sum(u.changed for u in us), sum(u.computed for u in us)) for name, us in updates.items()}


def test_later_stages_compute_what_rests_on_changed_blocks_of_earlier_ones(tmp_path: Path) -> None:
    """One voxel in the middle of one of twelve blocks."""
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    ran(planned(tmp_path), update=False)
    edit(tmp_path / "in.n5", Box((3, 3, 11), (4, 4, 12)))
    computed = num_computed(ran(planned(tmp_path), update=True))
    assert (computed["first"], computed["near"]) == ((1, 1), (1, 1))
    assert 1 <= computed["objects"][0] < 12  # fragments rest on 4 voxels around their block
    assert ran(planned(tmp_path), update=True).was_complete
    assert_fresh(tmp_path)


def test_where_an_earlier_stage_wrote_the_same_bytes_later_ones_compute_nothing(tmp_path: Path) -> None:
    """The halo of a block that is cut off, so that it reads others but gives the same: only voxels are read again."""
    write_volume(tmp_path / "in.n5", np.full(SHAPE, 7, np.uint8), chunk=8)
    plan = planned(tmp_path)
    ran(plan)
    before = made(tmp_path)
    journal = tmp_path / "out" / "first.zarr.run" / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:  # as if it had read other voxels of the same mean
        if "seen" in line:
            line["seen"] = [[block, f"x:{seen[::-1]}"] for block, seen in line["seen"]]
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report = ran(planned(tmp_path), update=True)
    assert num_computed(report) == {"first": (12, 12), "near": (0, 0), "objects": (0, 0)}
    assert [each.report.was_complete for each in report.stages] == [False, True, True]
    assert made(tmp_path) == before
    assert "updates" not in read_provenance(tmp_path / "out" / "near.zarr")["run"]
    assert "updating" not in read_provenance(tmp_path / "out" / "near.zarr")["run"]


@pytest.mark.parametrize("num_tasks", [18, *(pytest.param(number, marks=pytest.mark.long) for number in (17, 19))])
def test_a_stage_that_lacked_its_end_alone_knows_what_it_read(tmp_path: Path, num_tasks: int) -> None:
    """It had done all blocks when the flow was stopped: what it reads was complete after that."""
    write_volume(tmp_path / "in.n5", noise((9, 9, 9)), chunk=8)
    with pytest.raises(Stopped):
        ran(planned(tmp_path), Inline(0, 2, num_tasks), update=True)
    ran(planned(tmp_path))
    assert_fresh(tmp_path)


class Netless(Inline):
    """Executors whose driver is interrupted before a net would be run."""

    def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:
        if app == "infer":
            raise Stopped
        return super().submit(app, *arguments)


def test_a_later_stage_is_not_complete_from_when_an_earlier_one_changes(tmp_path: Path) -> None:
    """Also for a command without --update, which then compares as well."""
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    ran(planned(tmp_path), update=False)
    edit(tmp_path / "in.n5", Box((3, 3, 11), (4, 4, 12)))
    with pytest.raises(Stopped):
        execute(planned(tmp_path), Netless().start, RunOptions(update=True))
    parts = {part.name: part for part in find_status(str(tmp_path / "out")).parts}
    assert not any(part.is_complete for part in parts.values())
    for name in ("first", "near", "objects"):
        assert read_provenance(tmp_path / "out" / f"{name}.zarr")["run"]["updating"]
    ran(planned(tmp_path), update=False)
    assert_fresh(tmp_path)


def test_growth_passes_through_all_stages(tmp_path: Path) -> None:
    data = noise((32, 16, 16))
    write_volume(tmp_path / "in.n5", data[:16], chunk=8)
    ran(planned(tmp_path), update=False)
    grow(tmp_path / "in.n5", data, chunk=8)
    report = ran(planned(tmp_path), update=True)
    assert all(str(each.report.updates[0]).startswith("the volume has grown") for each in report.stages)  # type: ignore[attr-defined]
    assert open_volume(tmp_path / "out" / "objects.zarr").shape == data.shape
    assert_fresh(tmp_path)


class Killed(Inline):
    """Executors whose driver is interrupted before a task of `stage` that compares."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:
        if app in ("reread", "look_fragments") and f"{self.stage}.zarr" in str(arguments[0].folder):
            raise Stopped
        return super().submit(app, *arguments)


@pytest.mark.parametrize(("stage", "num_stages"), [("near", 2), pytest.param("objects", 3, marks=pytest.mark.long)])
def test_a_stage_that_has_grown_and_not_compared_is_not_complete(tmp_path: Path, stage: str, num_stages: int) -> None:
    """Also for a command without --update, which then compares as well."""
    data = noise((32, 16, 16))
    write_volume(tmp_path / "in.n5", data[:16], chunk=8)
    ran(planned(tmp_path, num_stages), update=True)
    grow(tmp_path / "in.n5", data, chunk=8)
    edit(tmp_path / "in.n5", Box((3, 3, 11), (4, 4, 12)))
    with pytest.raises(Stopped):
        execute(planned(tmp_path, num_stages), Killed(stage).start, RunOptions(update=True))
    parts = {part.name: part.is_complete for part in find_status(str(tmp_path / "out")).parts}
    assert not parts.pop(stage) and all(parts.values())
    ran(planned(tmp_path, num_stages), update=False)
    assert_fresh(tmp_path, num_stages=num_stages)


@pytest.mark.long
def test_a_stage_is_not_complete_before_it_has_grown_as_well(tmp_path: Path) -> None:
    """A command without --update is refused until all stages have."""
    data = noise((32, 16, 16))
    write_volume(tmp_path / "in.n5", data[:16], chunk=8)
    ran(planned(tmp_path), update=False)
    grow(tmp_path / "in.n5", data, chunk=8)
    with pytest.raises(Stopped):
        execute(planned(tmp_path), Killed("near").start, RunOptions(update=True))
    assert [part.name for part in find_status(str(tmp_path / "out")).parts if part.is_complete] == ["first"]
    with pytest.raises(RunError, match=r"stage objects: .* with another recipe or input"):
        ran(planned(tmp_path), update=False)
    ran(planned(tmp_path), update=True)
    assert_fresh(tmp_path)


def test_a_later_stage_that_grows_keeps_blocks_far_from_the_old_face(tmp_path: Path) -> None:
    data = noise((72, 16, 16))
    write_volume(tmp_path / "in.n5", data[:64], chunk=8)
    ran(planned(tmp_path, 2, near="hann"))
    grow(tmp_path / "in.n5", data, chunk=8)
    report = ran(planned(tmp_path, 2, near="hann"), update=True)
    for stage in report.stages:
        assert 0 < stage.report.totals["infer"].units < stage.stage.num_blocks  # type: ignore[attr-defined]
    assert_fresh(tmp_path, num_stages=2, near="hann")


def test_scores_of_an_output_that_changes_are_made_again(tmp_path: Path) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    write_volume(tmp_path / "ref.n5", noise(SHAPE, seed=3), chunk=8)
    (tmp_path / "smooth.py").write_text(SMOOTH)
    first = FLOW.split("[[stage]]")[1].format(window=10, overlap=2, blend="crop")
    score = '[[stage]]\nname = "score"\nkind = "evaluate"\ninput = { stage = "first" }\nreference = "REF"\n'.replace(
        "REF", str(tmp_path / "ref.n5/raw")
    )
    (tmp_path / "flow.toml").write_text(f"[[stage]]{first}\n{score}")

    def run(**options: Any) -> FlowReport:
        flow = find_flow(tmp_path / "flow.toml")
        assert flow is not None
        return ran(plan_flow(flow, str(tmp_path / "in.n5"), tmp_path / "out", tmp_path), **options)

    run()
    before = json.loads((tmp_path / "out" / "score.json").read_text())
    edit(tmp_path / "in.n5", Box((3, 3, 11), (4, 4, 12)))
    run(update=True)
    assert json.loads((tmp_path / "out" / "score.json").read_text()) != before


def test_an_output_that_lost_a_file_is_refused_and_made_anew_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lies where a stage will write is no input of the stages after it; it is looked at by its own stage."""
    give: Give = giver(tmp_path, monkeypatch, capsys)
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    write_volume(tmp_path / "ref.n5", noise(SHAPE, seed=3), chunk=8)
    planned(tmp_path, 1)
    score = '[[stage]]\nname = "score"\nkind = "evaluate"\ninput = { stage = "first" }\nreference = "ref.n5/raw"\n'
    with (tmp_path / "flow.toml").open("a") as file:
        file.write(f"\n{score}")
    command = ("run", *THREADS, "--recipe", "flow.toml", "-o", "out", "in.n5")
    assert give(*command).code == 0
    chunks = (tmp_path / "out/first.zarr/s0").rglob("0/*")
    lost = next(path for path in chunks if path.is_file())
    content = lost.read_bytes()
    lost.unlink()
    for more in ((), ("--update",)):
        refused = give(*command, *more)
        assert refused.code == 2
        assert f"stage first: {tmp_path}/out/first.zarr has lost files that its run wrote" in refused.err
        assert "use --fresh to start over" in refused.err
    ended = give(*command, "--fresh")
    assert ended.code == 0, ended.err
    assert lost.read_bytes() == content


def test_what_cannot_be_updated_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    ran(planned(tmp_path), update=False)
    edit(tmp_path / "in.n5", Box((3, 3, 11), (4, 4, 12)))
    before = made(tmp_path)
    with pytest.raises(RunError, match=r"measure.again: no stage measures what it reads"):
        ran(planned(tmp_path), update=True, measure_again=True)
    with pytest.raises(RunError, match="update writes tensors of what has changed alone"):
        ran(planned(tmp_path), update=True, keep_tensors=True)
    with pytest.raises(RunError, match="use --update to compute what has changed"):
        ran(planned(tmp_path), update=False)
    assert made(tmp_path) == before


def test_the_command_updates_stages_and_status_says_how_much_it_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give: Give = giver(tmp_path, monkeypatch, capsys)
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    planned(tmp_path)
    command = ("run", *THREADS, "--recipe", "flow.toml", "-o", "out", "in.n5")
    assert give(*command).code == 0
    assert "has changed since" not in " ".join(give("status", "out").out.split())
    assert "its input has not changed" in " ".join(give("status", "--changes", "out").out.split())
    edit(tmp_path / "in.n5", Box((3, 3, 11), (4, 4, 12)))
    said = " ".join(give("status", "--changes", "out").out.split())
    update = " ".join(("volpipe", "run", "--update", *command[1:]))
    changed = r"stage first: \d+ of 12 blocks read files that have changed"
    assert re.search(rf"{changed}; `{re.escape(update)}` compares", said)
    assert "what rests on that is known once it is computed" in said
    ended = give(*command, "--update")
    assert ended.code == 0, ended.err
    assert ended.out.count("1 block of 12 read voxels that have changed; 1 is computed again") == 2
    assert "is complete, and nothing has changed" in give(*command, "--update").out
