"""Runs from Python: the command line's bytes, by every form of volume, recipe and site."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inline import Inline
from volumes import noise, write_volume

import volpipe as vp
from volpipe.estimation.forecast import Forecast
from volpipe.workflow.execute import FlowReport

SETTINGS = (
    "net.name=identity",
    "windows.shape=[8,8,8]",
    "windows.block=[1,1,1]",
    "output.chunk=[4,4,4]",
    "output.shard=[8,8,8]",
)
SECTIONS: dict[str, Any] = {
    "net": {"name": "identity"},
    "windows": {"shape": (8, 8, 8), "block": (1, 1, 1)},
    "output": {"chunk": (4, 4, 4), "shard": (8, 8, 8)},
}
STAGES = """
[[stage]]
name = "first"
kind = "run"
net = { name = "identity" }
windows = { shape = [8, 8, 8], block = [1, 1, 1] }
output = { chunk = [4, 4, 4], shard = [8, 8, 8] }
"""


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A volume of noise (z, y, x), uint8, in the current folder."""
    monkeypatch.chdir(tmp_path)
    return str(write_volume(tmp_path / "a.zarr", noise((16, 20, 24))))


def check(out: str) -> None:
    """See that the voxels of `out` are those that the net `identity` makes of the volume."""
    assert np.array_equal(vp.open(out).open()[...], noise((16, 20, 24)))


def test_a_recipe_by_any_form_gives_the_same_output(volume: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('net.name = "identity"\nwindows.shape = [8, 8, 8]\nwindows.block = [1, 1, 1]\n')
    recipes = (SECTIONS, vp.Recipe.model_validate(SECTIONS), tmp_path / "mine.toml", "mine.toml")
    for number, recipe in enumerate(recipes):
        settings = SETTINGS[3:] if number > 1 else ()
        vp.run(volume, recipe, out=f"{number}.zarr", site="threads", settings=settings)
        check(f"{number}.zarr")


def test_a_plan_is_run_and_the_same_call_finds_it_complete(volume: str) -> None:
    planned = vp.plan(vp.open(volume), SECTIONS, out="b.zarr")
    assert isinstance(planned, vp.Plan) and planned.out_shape == (16, 20, 24)
    assert isinstance(vp.estimate(planned), Forecast)
    first, again = (vp.run(planned, site="threads") for _ in range(2))
    assert isinstance(first, vp.Report) and isinstance(again, vp.Report)
    assert (first.was_complete, again.was_complete) == (False, True)
    check("b.zarr")


def test_an_open_volume_is_the_one_that_the_recipe_chooses(volume: str) -> None:
    vp.run(volume, SECTIONS, out="b.zarr", site="threads", settings=["output.levels=2"])
    fine, coarse = vp.open("b.zarr"), vp.open("b.zarr", level=1)
    for setting in ("input.level=1", 'input.key="s1"', "input.voxel_size_nm=[4,4,4]"):
        with pytest.raises(vp.VolpipeError, match=rf"is open already, and .* by {setting.partition('=')[0]}; give the"):
            vp.plan(fine, SECTIONS, out="c.zarr", settings=[setting], site=None)
    for settings in (["input.level=1"], ['input.key="s1"'], []):
        planned = vp.plan(coarse, SECTIONS, out="c.zarr", settings=settings, site=None)
        assert isinstance(planned, vp.Plan) and planned.source.shape == coarse.shape
    sized = vp.open("b.zarr", view=vp.View(voxel_size_nm=(4.0, 4.0, 4.0)))
    assert vp.plan(sized, SECTIONS, out="c.zarr", settings=["input.voxel_size_nm=[4,4,4]"], site=None)


def test_a_pool_that_is_started_stays_up_and_progress_is_told(volume: str, tmp_path: Path) -> None:
    steps: list[int] = []
    with Inline().start(tmp_path) as pool:
        for out in ("b.zarr", "c.zarr"):
            vp.run(
                volume, SECTIONS, out=out, site=pool,
                on_progress=lambda progress: steps.append(sum(stage.num_done for stage in progress.stages)),
            )  # fmt: skip
            check(out)
    assert steps and max(steps) >= 12


def test_a_recipe_of_stages_is_run_by_the_same_function(volume: str, tmp_path: Path) -> None:
    (tmp_path / "flow.toml").write_text(STAGES)
    report = vp.run(volume, "flow.toml", out="all", site="threads")
    assert isinstance(report, FlowReport) and report.is_complete
    check("all/first.zarr")
    with pytest.raises(vp.VolpipeError, match="open the volume themselves"):
        vp.run(vp.open(volume), "flow.toml", out="more", site="threads")


def test_a_part_is_computed_and_the_rest_follows(volume: str) -> None:
    part = vp.run(volume, SECTIONS, out="b.zarr", site="threads", only=vp.Box((0, 0, 0), (4, 4, 4)))
    assert isinstance(part, vp.Report) and part.num_held
    left = f"{part.num_held} blocks beyond --only left for another session"
    assert (part.is_complete, part.open_reason, vp.status("b.zarr").is_complete) == (False, left, False)
    rest = vp.run(volume, SECTIONS, out="b.zarr", site="threads", only=":,:,:")
    assert (rest.is_complete, rest.open_reason, vp.status("b.zarr").is_complete) == (True, "", True)
    check("b.zarr")


def test_the_output_is_named_after_volume_and_net_where_nobody_names_it(volume: str) -> None:
    vp.run("a.zarr", SECTIONS, site="threads")
    check("a_identity.zarr")


def test_mistakes_are_refused_before_anything_is_made(volume: str, tmp_path: Path) -> None:
    with pytest.raises(vp.VolpipeError, match="did you mean 'shift'"):
        vp.run(volume, {"net": {"name": "shft"}}, out="b.zarr", site="threads")
    with pytest.raises(vp.VolpipeError, match="no site 'thread'"):
        vp.run(volume, SECTIONS, out="b.zarr", site="thread")
    with pytest.raises(vp.VolpipeError, match=r"windows\.shap"):
        vp.plan(volume, SECTIONS, settings=("windows.shap=8",))
    assert not (tmp_path / "b.zarr").exists()
    shutil.rmtree(tmp_path / "a.zarr")
    with pytest.raises(vp.VolpipeError):
        vp.plan(volume, SECTIONS)
