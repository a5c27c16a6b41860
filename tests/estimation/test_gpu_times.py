"""A net is timed by a worker on its GPU, and plans for such GPUs elsewhere choose by that."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from plans import volume

from volpipe.blockwise.failures import message_of
from volpipe.blockwise.pool import Capacity, Gpu
from volpipe.errors import NetError
from volpipe.estimation import gpu_times, net_speeds, precision
from volpipe.estimation.gpu_times import GpuTimes, check_can_keep, keep_times, time_net
from volpipe.estimation.window_choice import UNTIMED, fastest_plan
from volpipe.inference.plan import Plan, make_plan
from volpipe.nets.facts import Difference, NetFacts, NetSpeeds, WindowSpeed, WindowSpeeds
from volpipe.nets.load import describe
from volpipe.recipes.inference import Recipe, load_recipe

GPU = Gpu("NVIDIA H100 80GB HBM3", 80 << 30)
AWAY = Capacity(16 << 30, 4, on_gpu=True, gpu=GPU, is_here=False)
NET = (
    "import torch\ndef net(fill=1.0):\n    made = torch.nn.Conv3d(1, 1, 3, padding=1)\n"
    "    torch.nn.init.constant_(made.weight, fill)\n    made.halo = [1] * 3\n    made.window = [66] * 3\n"
    "    return made\n"
)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe with a net of the user's, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(NET)
    return load_recipe(Path("none"), [f"net.name={tmp_path / 'mine.py'}:net", "net.untrained=true"])


def planned(recipe: Recipe, facts: NetFacts, capacity: Capacity = AWAY, size: int = 1300, **infer: str) -> Plan:
    asked = recipe.model_copy(update={"infer": recipe.infer.model_copy(update=infer)})
    make = partial(make_plan, asked, volume((size, size, size)), facts, out=Path("/data/out.zarr"))
    return fastest_plan(lambda sizes: make(sizes=sizes), capacity)


def times_of(recipe: Recipe, rates: dict[str, float], change: float = 1e-4) -> GpuTimes:
    """Return made-up times: of larger windows less a voxel, of each precision its part."""
    speeds = [
        WindowSpeeds(
            arithmetic=(False, name),
            bytes_per_voxel=100,
            windows=[WindowSpeed(window=(n, n, n), seconds=n**3 * rate / n) for n in (66, 130, 194)],
        )
        for name, rate in rates.items()
    ]
    found = Difference(normalise=recipe.normalise, relative=change)
    return GpuTimes(GPU, NetSpeeds(processor=GPU.name, speeds=tuple(speeds)), {"tf32": found, "bfloat16": found})


def test_a_worker_times_windows_and_compares_precisions_on_its_gpu(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPU is a double of which torch knows; the net computes on the processor."""
    properties = type("Properties", (), {"total_memory": GPU.num_bytes})
    for name, double in {
        "is_available": lambda: True, "get_device_name": lambda: GPU.name,
        "get_device_properties": lambda number: properties, "synchronize": lambda: None,
        "memory_allocated": lambda: 0, "max_memory_allocated": lambda: 1000, "reset_peak_memory_stats": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(gpu_times, "MEASURE_SECONDS_ON_GPU", 0.05)
    monkeypatch.setattr(gpu_times, "is_quick_to_compare", lambda facts, speeds: True)
    monkeypatch.setattr(gpu_times, "measure_speeds_on_gpu", partial(net_speeds.measure_speeds_on_gpu, device="cpu"))
    compare = precision.measure_difference
    monkeypatch.setattr(gpu_times, "measure_difference", lambda *arguments, device, **more: compare(*arguments, **more))
    facts = describe(recipe.net)
    record = time_net(recipe.net, recipe.normalise, facts, "")
    assert record.failed == () and record.result is not None
    assert record.result.gpu == GPU
    assert record.result.differences.keys() == {"tf32", "bfloat16"}
    assert record.result.differences["tf32"].relative == 0  # of a processor, where it is float32
    assert {tuple(each.arithmetic) for each in record.result.speeds.speeds} == {
        (layout, name) for layout in (False, True) for name in ("float32", "tf32", "bfloat16")
    }
    assert keep_times(recipe, facts, "", record.result)
    assert planned(recipe, facts).sizes_note != UNTIMED


def test_a_worker_that_sees_no_gpu_says_so(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record = time_net(recipe.net, recipe.normalise, describe(recipe.net), "")
    assert record.result is None and record.fatal
    assert "sees no GPU; `volpipe sites check` says why" in message_of(record.failed[0][1])


def test_plans_for_gpus_elsewhere_choose_by_what_a_worker_found_there(recipe: Recipe) -> None:
    facts = describe(recipe.net)
    own = planned(recipe, facts)
    assert (own.window, own.sizes_note) == ((66, 66, 66), UNTIMED)
    assert keep_times(recipe, facts, "", times_of(recipe, {"float32": 1.0, "tf32": 0.5, "bfloat16": 0.7}))
    told = planned(recipe, facts)
    assert (told.window, told.precision) == ((194, 194, 194), "float32")
    assert "times as fast as windows of 66 × 66 × 66, the net's own" in told.sizes_note
    assert "infer.precision=auto would take tf32" in told.precision_note
    assert planned(recipe, facts, precision="auto").precision == "tf32"
    small = dataclasses.replace(AWAY, gpu=Gpu("Tesla M60", 8 << 30))  # of another kind, which nobody timed
    assert planned(recipe, facts, small).sizes_note == UNTIMED


def test_times_that_are_taken_again_count_instead_of_those_before(recipe: Recipe) -> None:
    facts, rates = describe(recipe.net), {"float32": 1.0, "tf32": 0.5, "bfloat16": 0.7}
    for change, taken in ((0.1, "float32"), (1e-4, "tf32"), (0.1, "float32")):  # of floats, by share of their range
        assert keep_times(recipe, facts, "", times_of(recipe, rates, change))
        assert planned(recipe, facts, precision="auto").precision == taken


def test_a_small_volume_is_not_worth_a_hint_and_no_plan_times_what_is_elsewhere(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volpipe.estimation.window_choice.measured_speeds", lambda *arguments, **more: pytest.fail())
    facts = describe(recipe.net)
    assert planned(recipe, facts, size=256).sizes_note == ""
    assert planned(recipe, facts, dataclasses.replace(AWAY, gpu=None)).sizes_note == UNTIMED
    exact = recipe.model_copy(update={"infer": recipe.infer.model_copy(update={"exact": True})})
    assert planned(exact, facts).sizes_note == ""  # which keeps its windows


def test_a_net_of_a_package_is_refused_before_any_job(tmp_path: Path) -> None:
    recipe = load_recipe(Path("none"), ["net.name=package:net"])
    with pytest.raises(NetError, match=r"net package:net is code of a package, .* name it file\.py:function"):
        check_can_keep(recipe, str(tmp_path))
