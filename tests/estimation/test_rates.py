"""Rates hold for workers like those that tried the blocks, and for no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from inline import Inline
from volumes import noise, windowed, write_volume

from volpipe.blockwise.pool import Capacity, Gpu
from volpipe.display.console import rendered
from volpipe.display.plans import forecast_summary
from volpipe.estimation.forecast import forecast
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.runs.run_folder import RunFolder
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import preview

A100, H100 = Gpu("A100", 40 << 30), Gpu("H100", 80 << 30)


def workers(slots: int = 2, **facts: object) -> Inline:
    pool = Inline(slots=slots)
    for name, value in facts.items():
        setattr(pool, name, value)
    return pool


def with_gpu(gpu: Gpu | None) -> Inline:
    return workers(on_gpu=True, capacity=Capacity(None, 2, on_gpu=True, gpu=gpu))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    location = write_volume(tmp_path / "in.n5", noise((32, 32, 32)))
    recipe = load_recipe(None, ["net.name=identity", *windowed((8, 8, 8), (0, 0, 0), (2, 2, 2), "crop")])
    return prepare(str(location), recipe, tmp_path / "out.zarr", tmp_path)


def num_tried(plan: Plan, pool: Inline) -> int:
    """Return the number of tasks by which `volpipe plan` tries blocks."""
    assert preview(plan, pool.start).estimate.rates is not None
    return pool.num_tasks


@pytest.mark.parametrize("make", [workers, lambda: with_gpu(None), lambda: with_gpu(H100)])
def test_blocks_are_tried_once_on_a_site(plan: Plan, make: type[Inline]) -> None:
    assert [num_tried(plan, make()) for _ in range(3)] == [2, 0, 0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (workers(2), workers(3)),
        (workers(), with_gpu(None)),
        (with_gpu(H100), workers()),
        (with_gpu(A100), with_gpu(H100)),
        (workers(), workers(is_here=False)),  # on processors that nobody knows
        (workers(), workers(worker_threads=4)),
        (workers(), workers(shared=False)),
    ],
)
def test_blocks_are_tried_anew_on_other_workers(plan: Plan, before: Inline, after: Inline) -> None:
    """Seconds of two CPU workers, over eight GPUs, were the hours of a plan for these, and their memory its memory."""
    assert num_tried(plan, before) == before.slots["gpu"]
    elsewhere = forecast(plan, RunFolder.from_output(Path(plan.out)), after).estimate
    assert (elsewhere.rates, elsewhere.seconds) == (None, None)
    assert num_tried(plan, after) == after.slots["gpu"]


def test_without_a_site_no_time_is_known(plan: Plan) -> None:
    assert "about" in rendered(forecast_summary(preview(plan, workers().start), "here"))
    quick = preview(plan, None)
    assert (quick.estimate.rates, quick.estimate.seconds) == (None, None)
    assert "not known yet" in rendered(forecast_summary(quick, "here"))


def test_rates_of_another_version_are_none(plan: Plan) -> None:
    assert num_tried(plan, workers()) == 2
    folder = RunFolder.from_output(Path(plan.out))
    folder.rates_file.write_text(folder.rates_file.read_text().replace('"workers"', '"site"'))
    assert num_tried(plan, workers()) == 2
