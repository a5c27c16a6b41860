"""Peak memory is that of the process itself, and what is planned covers what a worker takes, the net included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command import begin, finish
from conftest import ROOT
from inline import Inline
from volumes import noise, write_volume

from volpipe.blockwise.journal import read_records
from volpipe.display.console import rendered
from volpipe.display.plans import forecast_summary
from volpipe.estimation.forecast import forecast
from volpipe.estimation.memory import GPU_BYTES, cuda_bytes, net_bytes
from volpipe.inference.plan import Plan
from volpipe.nets.facts import bytes_per_voxel
from volpipe.recipes.inference import NetChoice, load_recipe
from volpipe.runs.planned import Planned
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import RESULTS
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import preview

# What importing took and gave back is no part of what is held before: the system is told to count anew.
CODE = """
import pathlib
from volpipe.blockwise.usage import peak_bytes
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = peak_bytes()
x = b"1" * (301 << 20)  # of which a page or two may be there already
print(before, peak_bytes())
"""


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    large = np.ones(512 << 20, np.uint8)
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 300 << 20
    assert 300 << 20 <= after - before < 310 << 20
    assert large[-1] == 1


@pytest.mark.parametrize(
    "name", ["default", *(pytest.param(name, marks=pytest.mark.long) for name in ("affinities", "superres_z4"))]
)
@pytest.mark.usefixtures("_pools_start_anew")
def test_a_worker_takes_no_more_memory_than_is_planned_before_anything_is_tried(tmp_path: Path, name: str) -> None:
    recipe = ROOT / "configs" / f"{name}.toml"
    write_volume(tmp_path / "in.n5", noise((48, 88, 88)))
    process = begin(tmp_path, "run", "--recipe", str(recipe), "-o", "out.zarr", "in.n5", VOLPIPE_WORKERS="1",
                    CUDA_VISIBLE_DEVICES="")  # fmt: skip
    assert finish(tmp_path, process).code == 0
    plan = RunFolder(tmp_path / "out.zarr.run").load(Plan)  # with the layout that the site's memory allows
    assert plan is not None and plan.channels_last
    planned = preview(plan, None).estimate
    assert planned.has_net
    peak = max(record.usage.peak_bytes for record in read_records(tmp_path / "out.zarr.run" / "journal.jsonl", RESULTS))
    assert peak <= planned.memory_bytes
    assert planned.memory_bytes < 2 * peak  # nor so much that what fits would be refused


OWN_NET = """
import torch
def build():
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Conv3d(a, b, 3, padding=1) for a, b in ((1, 8), (8, 8), (8, 1))))
    net.volpipe = dict(halo=(3, 3, 3), stride=(1, 1, 1), scale=(1, 1, 1))
    return net
"""


@pytest.mark.long
@pytest.mark.parametrize("site", ["threads", pytest.param("local", marks=pytest.mark.long)])
@pytest.mark.usefixtures("_pools_start_anew")
def test_a_net_of_ones_own_takes_no_more_memory_than_its_plan_says(tmp_path: Path, site: str) -> None:
    """Two threads took half as much again as was planned for each."""
    write_volume(tmp_path / "in.n5", noise((64, 64, 64)))
    (tmp_path / "mine.py").write_text(OWN_NET)
    options = ("--config", site, "-o", "out.zarr", "in.n5", "--set", "net.name=mine.py:build", "--set",
               "net.untrained=true")  # fmt: skip
    each = "the process of all 2 workers" if site == "threads" else "each of 2 workers"
    for command in ("plan", "run"):
        ended = finish(tmp_path, begin(tmp_path, command, *options, VOLPIPE_WORKERS="2", CUDA_VISIBLE_DEVICES=""))
        assert ended.code == 0, ended.err
        assert f" for {each}, the net included" in ended.out
    folder = RunFolder(tmp_path / "out.zarr.run")
    plan = folder.load(Plan)
    assert plan is not None
    planned = Planned.load(folder.path, plan.identity)
    assert planned is not None and planned.memory_bytes is not None
    peak = max(record.usage.peak_bytes for record in read_records(folder.path / "journal.jsonl", RESULTS))
    assert peak <= planned.memory_bytes
    # In a process of its own the peak of a trial is its own, without that of measuring the net.
    assert site == "threads" or planned.memory_bytes < 3 * peak


def test_the_memory_of_a_net_goes_with_its_shape_not_with_its_weights() -> None:
    default = load_recipe(ROOT / "configs" / "default.toml", []).net
    assert default.weights is not None
    other = default.model_copy(update={"weights": "mine.safetensors"})
    assert bytes_per_voxel(other) == bytes_per_voxel(default) is not None
    assert bytes_per_voxel(NetChoice(name="unet3d", options={"features": [2, 4]})) is None
    assert bytes_per_voxel(NetChoice(name="mine.py:net")) is None


def test_the_memory_of_a_net_on_a_gpu_is_not_its_workers(tmp_path: Path) -> None:
    location = write_volume(tmp_path / "in.n5", noise((48, 88, 88)))
    recipe = load_recipe(ROOT / "configs" / "default.toml", ["windows.shape=[148,148,148]"])
    plan = prepare(str(location), recipe, tmp_path / "out.zarr", tmp_path)
    workers = Inline()
    on_cpu = forecast(plan, RunFolder(tmp_path / "none"), workers)
    workers.on_gpu = True
    on_gpu = forecast(plan, RunFolder(tmp_path / "none"), workers)
    saved = on_cpu.estimate.memory_bytes - on_gpu.estimate.memory_bytes
    assert saved == net_bytes(plan) + cuda_bytes() - GPU_BYTES > 0
    assert "beside the memory of its GPU" in rendered(forecast_summary(on_gpu, "here"))
    assert "the net included" in rendered(forecast_summary(on_cpu, "here"))
