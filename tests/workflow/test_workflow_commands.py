"""Recipes of several stages, as commands: planned, run, interrupted, resumed and reported as one."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path

import numpy as np
import pytest
from command import THREADS, Give, begin, finish, giver, wait_until
from skimage.measure import label as labelled
from volumes import fingerprint, noise, write_volume

from volpipe.geometry.affinities import affinities
from volpipe.synthetic.volume import SyntheticVolume, write_sample
from volpipe.units import duration
from volpipe.volumes.volume import open_volume
from volpipe.workflow.cost import known_times
from volpipe.workflow.plan import plan_flow
from volpipe.workflow.recipe import find_flow

OFFSETS = [[-1, 0, 0], [0, -1, 0], [0, 0, -1]]
# What a perfect net would give, of a volume that shows each object in two grey values of its own, speckled.
NETS = """
import torch
from torch import nn
from torch.nn import functional

class Affinities(nn.Module):
    volpipe = dict(
        in_channels=1, out_channels=3, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(1, 1, 1), window=(10, 10, 10), intensity="unit"
    )

    def forward(self, x):
        x = x.div(2, rounding_mode="floor")
        before = [functional.pad(x, pad)[(..., *cut)] for pad, cut in (
            ((0, 0, 0, 0, 1, 0), (slice(-1), slice(None), slice(None))),
            ((0, 0, 1, 0, 0, 0), (slice(None), slice(-1), slice(None))),
            ((1, 0, 0, 0, 0, 0), (slice(None), slice(None), slice(-1))),
        )]
        return torch.cat([((x == b) & (x > 0)).float() for b in before], 1)

def net():
    return Affinities()
"""
FLOW = f"""
[[stage]]
name = "restore"
net = {{ name = "identity" }}
windows = {{ shape = [8, 8, 8], overlap = 0, block = [1, 1, 1] }}

[[stage]]
name = "affinities"
net = {{ name = "nets.py:net" }}
normalise = {{ method = "none" }}
windows = {{ shape = [10, 10, 10], overlap = 2, block = [1, 1, 1] }}

[[stage]]
name = "objects"
kind = "label"
input = {{ stage = "affinities", offsets = {OFFSETS} }}
objects = {{ method = "components", min_voxels = 2 }}
output = {{ block = [16, 32, 32], chunk = [16, 16, 16] }}

[[stage]]
name = "scores"
kind = "evaluate"
labels = true
reference = "truth.n5"
"""
SHAPE = (32, 32, 48)
NUM_WORKERS = 2  # of the site threads
TIME = r"(?:\d+ min )?[\d.]+ s"
TRYING = (  # functions of kinds of work
    "volpipe.workflow.run_stages.calibrate", "volpipe.segmentation.kind.calibrate_segmentation",
    "volpipe.evaluation.kinds.calibrate_evaluation",
)  # fmt: skip


@pytest.fixture
def truth(tmp_path: Path) -> np.ndarray:
    """Labels of a sample as `truth.n5`, an image of them as `in.n5`, and nets and a recipe beside them."""
    write_sample(tmp_path / "sample.n5", SyntheticVolume(SHAPE, 3))
    found = open_volume(tmp_path / "sample.n5", "labels").open()[...]
    labels = (np.unique(found, return_inverse=True)[1].reshape(SHAPE) + (found.min() > 0)).astype(np.uint8)
    assert len(np.unique(found)) < 127  # twice each, and one, are grey levels of 8 bits
    write_volume(tmp_path / "in.n5", 2 * labels + noise(SHAPE) % 2)
    write_volume(tmp_path / "truth.n5", labels)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "flow.toml").write_text(FLOW)
    return labels


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(tmp_path, monkeypatch, capsys)


COMMAND = ("run", *THREADS, "--recipe", "flow.toml", "-o", "out", "in.n5")


def test_a_volume_becomes_labels_and_scores_by_one_command_also_after_ctrl_c(
    tmp_path: Path, truth: np.ndarray, give: Give
) -> None:
    process = begin(tmp_path, *COMMAND)
    journal = tmp_path / "out" / "affinities.zarr.run" / "journal.jsonl"
    wait_until(lambda: journal.is_file() and journal.stat().st_size, 120)
    process.send_signal(signal.SIGINT)
    stopped = finish(tmp_path, process)
    assert stopped.code == 4
    assert "interrupted; run the same command again to continue" in stopped.err
    assert not (tmp_path / "out" / "objects.zarr").exists()

    status = give("status", "out")
    assert status.code == 1
    first, *others = re.findall(r"(\w+)\.\w+: (complete|interrupted|not begun)", status.out)
    assert first in [("restore", "complete"), ("restore", "interrupted")]  # both stages were at work
    assert others[0] == ("affinities", "interrupted")
    assert others[1] in [("objects", "not begun"), ("objects", "interrupted")]
    assert others[2] == ("scores", "not begun")
    assert f"To continue: volpipe {shlex.join(COMMAND)}" in status.out

    again = give(*COMMAND)
    assert again.code == 0
    assert all(line.startswith("warning: the faces of windows may be seen along") for line in again.err.splitlines())
    assert again.out.splitlines()[-1] == f"wrote {tmp_path / 'out' / 'objects.zarr'}"
    assert (first[1] == "complete") == bool(re.search(r"^restore +run +complete before ", again.out, re.MULTILINE))
    assert re.search(r"^objects +label +[\d.]+ s +[\d.]+ KiB \(≤ .*B\) +[\d.]+ KiB \(≤ .*B\) ", again.out, re.MULTILINE)
    near, known = affinities(truth, [(-1, 0, 0), (0, -1, 0), (0, 0, -1)])
    made = open_volume(tmp_path / "out" / "affinities.zarr").open()[...]
    assert np.array_equal(made[known] == 255, near[known])
    objects = open_volume(tmp_path / "out" / "objects.zarr").open()[...]
    wanted = labelled(truth, connectivity=1)
    wanted[np.bincount(wanted.ravel())[wanted] == 1] = 0  # nothing tells such a voxel from one between objects
    pairs = {(int(a), int(b)) for a, b in zip(objects.ravel(), wanted.ravel(), strict=True)}
    assert len(pairs) == len(np.unique(wanted)) == len(np.unique(objects))  # one in one, whatever the numbers
    assert (0, 0) in pairs
    told = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert told["scores"]["output"]["merge"] < 1e-3  # of the single voxels
    assert give("status", "out").code == 0
    assert give("verify", "out/affinities.zarr").code == 0
    for command in ("verify", "reproduce"):
        refused = give(command, "out")
        words = " ".join(refused.err.split())
        assert refused.code == 2
        assert f"out holds the stages of a recipe; name the output of one to {command}: " in words
        assert "out/affinities.zarr" in words
    assert "out/restore.zarr" in give("reproduce", "out/affinities.zarr").out

    again = give("verify", "out/objects.zarr", "--recompute", "2")
    assert (again.code, again.out.count(": the same\n")) == (0, 2)
    _, folder, _, _, *arguments = shlex.split(give("reproduce", "out/objects.zarr").out)
    assert folder == str(tmp_path)
    assert arguments[:3] == ["segment", *THREADS]
    assert arguments[-1] == str(tmp_path / "out" / "affinities.zarr" / "s0")
    assert give(*arguments).code == 0
    first, second = (tmp_path / "out" / f"{name}.zarr" / "s0" for name in ("objects", "objects_again"))
    assert fingerprint(first) == fingerprint(second)


def test_a_plan_tells_of_all_stages_before_any_has_run(tmp_path: Path, truth: np.ndarray, give: Give) -> None:
    planned = give("plan", *COMMAND[1:])
    assert (planned.code, planned.err) == (0, "")
    assert [int(n) for n in re.findall(r"^stage (\d) of 4", planned.out, re.MULTILINE)] == [1, 2, 3, 4]
    assert f"{tmp_path / 'out' / 'restore.zarr'} s0" in planned.out  # which stage 2 reads
    rows = planned.out[planned.out.rindex("stage ") :].splitlines()
    assert [row.split()[0] for row in rows[1:6]] == ["restore", "affinities", "objects", "scores", "all"]
    assert all(re.search(rf" {{2}}{TIME}$", row) for row in rows[1:3])  # blocks of both runs were tried
    assert all(re.search(rf" ≈ {TIME}$", row) for row in rows[3:6])  # of the others on what was made up
    assert re.search(rf"^≈ {TIME} on threads, by [\d,]+ synthetic voxels tried there", planned.out, re.MULTILINE)
    assert "≤" not in rows[1]
    assert "≤" in rows[2]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["affinities.zarr.run", "restore.zarr.run"]
    assert not (tmp_path / "out" / "affinities.zarr.run" / "stand_in").exists()
    assert not (tmp_path / "out.run" / "calibration").exists()


@pytest.mark.long
def test_what_stages_took_stands_beside_what_the_plan_said_before(
    tmp_path: Path, truth: np.ndarray, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = give("plan", *COMMAND[1:]).out
    said = dict(re.findall(rf"^(restore|objects|scores) .* {{2,}}((?:≈ )?{TIME})$", planned, re.MULTILINE))
    assert {name: time[0] == "≈" for name, time in said.items()} == {"restore": False, "objects": True, "scores": True}
    stages = re.findall(
        rf"^(pieces|edges|solve|number|name|graph|paint|pyramid \d) .* (≈ {TIME})$", planned, re.MULTILINE
    )
    assert len(stages) >= 7
    flow = find_flow(tmp_path / "flow.toml")
    assert flow is not None
    known = known_times(plan_flow(flow, str(tmp_path / "in.n5"), tmp_path / "out", tmp_path), NUM_WORKERS)["objects"]
    of_tasks = {stage.name: stage.seconds for stage in known.stages}
    rounds = {stage.name: -(-stage.num_tasks // NUM_WORKERS) / stage.num_tasks for stage in known.stages}
    assert stages == [(name, f"≈ {duration(rounds[name] * seconds)}") for name, seconds in of_tasks.items()]
    for function in TRYING:
        monkeypatch.setattr(function, None)  # so that nothing can be tried again
    made = give(*COMMAND)
    assert made.code == 0
    took = dict(re.findall(rf"^(\w+) +(?:run|label|evaluate) +{TIME}(?: \(([^)]*s)\))? ", made.out, re.MULTILINE))
    assert took == said | {"affinities": ""}  # of which blocks were tried over nothing
    tasks = ", ".join(rf"{name} {TIME} \(≈ {duration(seconds)}\)" for name, seconds in of_tasks.items())
    assert re.search(rf"objects.zarr in {TIME} \(planned {said['objects']}\); tasks: {tasks}$", made.out, re.MULTILINE)


@pytest.mark.long
def test_a_stage_that_goes_on_is_not_set_beside_the_plan_of_all_of_it(
    tmp_path: Path, truth: np.ndarray, give: Give
) -> None:
    (tmp_path / "flow.toml").write_text(FLOW.replace("chunk = [16, 16, 16]", "chunk = [16, 16, 16], levels = 1"))
    give("plan", *COMMAND[1:])
    assert give(*COMMAND).code == 0
    journal = tmp_path / "out" / "objects.zarr.run" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    stages = [json.loads(line)["stage"] for line in lines]
    journal.write_text("".join(lines[: stages.index("pyramid 1")]))  # as if it had been killed before
    again = give(*COMMAND)
    assert again.code == 0
    assert re.search(r"objects.zarr in [\d.]+ s; tasks: pieces [\d.]+ s, ", again.out)
    assert re.search(r"^objects +label +[\d.]+ s {2,}", again.out, re.MULTILINE)
    (tmp_path / "out" / "scores.json").write_text("{}")
    for scored in (again, give(*COMMAND)):  # what its blocks gave is kept
        assert re.search(r"^scores +evaluate +[\d.]+ s {2,}", scored.out, re.MULTILINE)


def test_a_quick_plan_of_stages_leaves_nothing_behind(tmp_path: Path, truth: np.ndarray, give: Give) -> None:
    before = sorted(tmp_path.rglob("*"))
    planned = give("plan", "--quick", *COMMAND[1:])
    assert (planned.code, planned.err) == (0, "")
    assert len(re.findall("^time +not known yet; `volpipe plan` measures it", planned.out, re.MULTILINE)) == 2
    assert re.search(r"at the highest ≤ .* in \d+ files and folders: outputs stay", planned.out)
    assert "≈" not in planned.out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_roi_and_a_mask_are_about_what_reads_the_volume(tmp_path: Path, truth: np.ndarray, give: Give) -> None:
    planned = give("plan", "--quick", "--roi", "0:16,:,:", *COMMAND[1:-1], "in.n5", "--set", "scores.roi=0:16,:,:")
    assert planned.code == 0
    assert planned.out.count("16 × 32 × 48 voxels") >= 2
    (tmp_path / "flow.toml").write_text('[[stage]]\nname = "a"\nkind = "label"\n')
    refused = give("plan", "--quick", "--roi", "0:16,:,:", *COMMAND[1:])
    assert refused.code == 2
    assert "no run reads the volume, so input.roi=" in refused.err


def test_what_is_for_one_net_is_refused_for_stages(tmp_path: Path, truth: np.ndarray, give: Give) -> None:
    refused = give("run", "--only", "0:8,:,:", *COMMAND[1:])
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "--only is for one net" in refused.err


def test_a_volume_is_named_by_itself_and_the_recipe_where_nobody_says(
    tmp_path: Path, truth: np.ndarray, give: Give
) -> None:
    planned = give("plan", "--quick", *THREADS, "--recipe", "flow.toml", "in.n5")
    assert f"output    {tmp_path / 'in_flow' / 'restore.zarr'}" in planned.out


def test_missing_parts_end_the_command_with_their_code_and_name_what_waits(
    tmp_path: Path, truth: np.ndarray, give: Give
) -> None:
    chunk = tmp_path / "in.n5" / "raw" / "1" / "1" / "1"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    ended = give("run", "--tolerate", "1", *COMMAND[1:])
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == "not complete: restore, affinities, objects; not begun: scores"
    assert not (tmp_path / "out" / "scores.json").exists()
