"""The number of workers, and of threads that a site gives them, does not change a byte: threads are the plan's."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from at_once import Together
from command import begin, finish, set_each
from inline import Inline
from slabs import planned
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.errors import RecipeError
from volpipe.inference import pyramid
from volpipe.nets.load import build_net
from volpipe.recipes.inference import load_recipe
from volpipe.resolve import shipped_recipe
from volpipe.workflow.work_plan import execute

WINDOW = (36, 52, 52)  # oneDNN sums the default net's in another order with two threads; of 32 or 40 voxels it does not
SITES = (
    ("local", {"VOLPIPE_WORKERS": "1"}),  # with OMP_NUM_THREADS as many as there are cores
    ("local", {"VOLPIPE_WORKERS": "2"}),  # with half of them each
    ("threads", {"OMP_NUM_THREADS": "4"}),
)


def test_two_threads_do_sum_this_window_in_another_order() -> None:
    """Else the test below would hold by luck."""
    net = build_net(load_recipe(shipped_recipe(Path("default.toml"))).net)
    window = torch.from_numpy(np.random.default_rng(0).normal(0, 0.5, (1, 1, *WINDOW)).astype(np.float32))
    before, outs = torch.get_num_threads(), []
    for num in (1, 2):
        torch.set_num_threads(num)
        with torch.inference_mode():
            outs.append(net(window))
    torch.set_num_threads(before)
    assert not torch.equal(*outs)


@pytest.mark.long
@pytest.mark.usefixtures("_pools_start_anew")
def test_workers_and_their_threads_do_not_change_a_byte(tmp_path: Path) -> None:
    write_volume(tmp_path / "in.n5", noise(WINDOW))
    recipe = set_each(f"windows.shape={list(WINDOW)}", "output.dtype=float32", "output.levels=0")
    outputs = []
    for site, environment in SITES:
        command = ["run", "--fresh", "--config", site, *recipe, "-o", "out.zarr", "in.n5/raw"]
        ended = finish(tmp_path, begin(tmp_path, *command, **environment))
        assert ended.code == 0, ended.err
        cores = len(os.sched_getaffinity(0)) if environment.get("VOLPIPE_WORKERS") == "1" else 1
        line = f"a worker has {cores} cores, the net computes on 1: infer.threads={cores} would use them"
        assert (line in " ".join(ended.out.split())) == (cores > 1)
        outputs.append(fingerprint(tmp_path / "out.zarr"))
    assert len(set(outputs)) == 1


def test_coarser_voxels_are_made_by_all_threads_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first three parts wait for each other."""
    write_volume(tmp_path / "in.n5", noise((32, 48, 64)))
    windows = windowed((16, 16, 16), (0, 0, 0), (2, 3, 4), "crop")
    plan = planned(
        tmp_path,
        tmp_path / "in.n5",
        "out.zarr",
        *windows,
        "net.name=identity",
        "output.chunk=[8,8,8]",
        "output.levels=1",
    )
    assert execute(plan, Inline().start).missing == []
    box, read, together = plan.shards(1).box(0), pyramid.read_voxels, Together(pyramid.read_voxels, 3)
    monkeypatch.setenv("VOLPIPE_THREADS", "1")
    expected = pyramid.coarse_voxels(plan, 1, box)
    monkeypatch.setenv("VOLPIPE_THREADS", "3")
    monkeypatch.setattr(pyramid, "read_voxels", together)
    np.testing.assert_array_equal(pyramid.coarse_voxels(plan, 1, box), expected)
    np.testing.assert_array_equal(read(plan, 1, box), expected)
    two = Together(read, 2)
    monkeypatch.setattr(pyramid, "PARTS_BYTES", 2 * 8 * 48 * 64)  # the memory of two parts
    monkeypatch.setattr(pyramid, "read_voxels", two)
    pyramid.coarse_voxels(plan, 1, box)
    assert (together.most, two.most) == (3, 2)


def test_threads_are_the_recipes() -> None:
    assert load_recipe(None).infer.threads == 1
    assert load_recipe(None, ["infer.threads=4"]).infer.threads == 4
    with pytest.raises(RecipeError, match=r"infer\.threads"):
        load_recipe(None, ["infer.threads=0"])
