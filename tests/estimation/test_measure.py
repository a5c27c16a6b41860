"""A net measured: what windows cost it on a core and on a GPU, what other precisions change, and plans by that."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from plans import facts, volume

from volpipe.apps.net_times import time_at_site
from volpipe.blockwise.failures import message_of
from volpipe.blockwise.pool import Capacity, Gpu
from volpipe.errors import NetError
from volpipe.estimation import measure
from volpipe.estimation.measure import (
    GpuTimes,
    arithmetics_here,
    difference,
    difference_here,
    measure_difference,
    measure_speeds_on_gpu,
    speeds_here,
    time_net,
)
from volpipe.estimation.window_choice import UNTIMED, fastest_plan
from volpipe.estimation.window_search import windows_to_try
from volpipe.inference.intensity import Affine
from volpipe.inference.plan import Plan, make_plan
from volpipe.nets.cache import keep_speeds, known_speeds
from volpipe.nets.facts import Arithmetic, NetFacts, NetSpeeds, PrecisionDifference, WindowSpeed, WindowSpeeds
from volpipe.nets.load import describe
from volpipe.recipes.inference import NetChoice, Normalise, Recipe, load_recipe


def test_the_time_of_a_window_lies_between_those_of_the_next_measured_ones() -> None:
    sizes = {64: 1.0, 128: 3.0}  # microseconds a voxel
    windows = [WindowSpeed(window=(n, n, n), seconds=n**3 * rate) for n, rate in sizes.items()]
    measured = WindowSpeeds(arithmetic=Arithmetic(False, "float32"), bytes_per_voxel=1, windows=windows)
    by_hand = {32**3: 1.0, 64**3: 1.0, 2 * 64**3: 1.0 + 2 / 3, 128**3: 3.0, 256**3: 3.0}
    for voxels, rate in by_hand.items():
        assert measured.seconds(voxels) == pytest.approx(voxels * rate)
    assert measured.model_copy(update={"windows": ()}).seconds(1) is None


def test_larger_windows_are_tried_on_a_gpu() -> None:
    net = facts(halo=(8, 8, 8), window=(80, 80, 80))  # cores of 64
    on_core, on_gpu = windows_to_try(net, net.halo), windows_to_try(net, net.halo, on_gpu=True)
    assert on_gpu == [*on_core, (272, 272, 272)] and on_core[-1] == (208, 208, 208)


def test_a_gpu_on_which_nothing_could_be_timed_gives_no_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", Mock(side_effect=torch.OutOfMemoryError))
    choice = NetChoice(name="identity")
    with pytest.raises(NetError, match="no window of net identity could be timed on H100; others may use its memory"):
        measure_speeds_on_gpu(choice, describe(choice), "H100", device="cpu")


@pytest.mark.long
def test_windows_of_a_users_net_are_timed_by_processes_that_do_not_run_the_users_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(
        "import torch\ndef net():\n    made = torch.nn.Conv3d(1, 1, 3, padding=1)\n"
        "    made.volpipe = dict(halo=[1] * 3)\n"
        "    return made\n"
    )
    choice = NetChoice(name=f"{tmp_path / 'mine.py'}:net", untrained=True)
    facts = describe(choice, str(tmp_path))
    result = speeds_here(choice, facts, str(tmp_path))
    assert result is not None
    assert [each.arithmetic for each in result.speeds] == arithmetics_here()
    for each in result.speeds:
        assert each.windows[0].window[0] == 33  # half of a core of 62, and its halo
        assert all(speed.seconds < 4 for speed in each.windows)
    assert keep_speeds(choice, facts, str(tmp_path), result)
    assert known_speeds(choice, facts, str(tmp_path), result.processor) == result


def test_windows_are_timed_on_a_device_in_the_memory_that_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_bytes, call_bytes, most_bytes = 10 << 20, 500, 20_000
    calls: list[int] = []

    def highest() -> int:
        peak = held_bytes + call_bytes * len(calls)
        if peak > held_bytes + most_bytes:
            raise torch.OutOfMemoryError
        return peak

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held_bytes)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", highest)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    (tmp_path / "mine.py").write_text(
        "import torch\ndef net():\n    made = torch.nn.Conv3d(1, 1, 3, padding=1)\n"
        "    made.volpipe = dict(halo=[1] * 3, window=[10] * 3)\n"
        "    return made\n"
    )
    choice = NetChoice(name=f"{tmp_path / 'mine.py'}:net", untrained=True)
    net = describe(choice, str(tmp_path))
    result = measure_speeds_on_gpu(choice, net, "H100", str(tmp_path), device="cpu")
    assert result.processor == "H100"
    assert [tuple(each.arithmetic) for each in result.speeds] == [
        (layout, precision) for precision in ("float32", "tf32", "bfloat16") for layout in (False, True)
    ]
    first, *others = result.speeds
    fits = windows_to_try(net, net.halo)[:5]  # of four calls each, between two looks at the clock
    assert [speed.window for speed in first.windows] == fits
    peaks = [call_bytes * 8 * number for number in range(1, 6)]
    assert first.bytes_per_voxel == max(p / math.prod(w) for p, w in zip(peaks, fits, strict=True))
    assert not any(other.windows for other in others)  # of which none fits any more


GPU = Gpu("NVIDIA H100 80GB HBM3", 80 << 30)
AWAY = Capacity(16 << 30, 4, on_gpu=True, gpu=GPU, is_here=False)
CONV = (
    "import torch\ndef net(fill=1.0):\n    made = torch.nn.Conv3d(1, 1, 3, padding=1)\n"
    "    torch.nn.init.constant_(made.weight, fill)\n    made.volpipe = dict(halo=[1] * 3, window=[66] * 3)\n"
    "    return made\n"
)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe with a net of the user's, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(CONV)
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
    found = PrecisionDifference(normalise=recipe.normalise, relative=change)
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
    monkeypatch.setattr(measure, "MEASURE_SECONDS_ON_GPU", 0.05)
    monkeypatch.setattr(measure, "is_quick_to_compare", lambda facts, speeds: True)
    monkeypatch.setattr(measure, "measure_speeds_on_gpu", partial(measure_speeds_on_gpu, device="cpu"))
    compare = measure_difference
    monkeypatch.setattr(measure, "measure_difference", lambda *arguments, device, **more: compare(*arguments, **more))
    facts = describe(recipe.net)
    record = time_net(recipe.net, recipe.normalise, facts, "")
    assert record.failed == () and record.result is not None
    assert record.result.gpu == GPU
    assert record.result.differences.keys() == {"tf32", "bfloat16"}
    assert record.result.differences["tf32"].relative == 0  # of a processor, where it is float32
    assert {tuple(each.arithmetic) for each in record.result.speeds.speeds} == {
        (layout, name) for layout in (False, True) for name in ("float32", "tf32", "bfloat16")
    }
    assert record.result.keep(recipe.net, recipe.normalise, facts, "")
    assert planned(recipe, facts).notes.windows != UNTIMED


def test_a_worker_that_sees_no_gpu_says_so(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record = time_net(recipe.net, recipe.normalise, describe(recipe.net), "")
    assert record.result is None and record.fatal
    assert "sees no GPU; `volpipe sites check` says why" in message_of(record.failed[0][1])


def test_plans_for_gpus_elsewhere_choose_by_what_a_worker_found_there(recipe: Recipe) -> None:
    facts = describe(recipe.net)
    own = planned(recipe, facts)
    assert (own.window, own.notes.windows) == ((66, 66, 66), UNTIMED)
    times = times_of(recipe, {"float32": 1.0, "tf32": 0.5, "bfloat16": 0.7})
    assert times.keep(recipe.net, recipe.normalise, facts, "")
    told = planned(recipe, facts)
    assert (told.window, told.precision) == ((194, 194, 194), "float32")
    assert "times as fast as windows of 66 × 66 × 66, the net's own" in told.notes.windows
    assert "infer.precision=auto would take tf32" in told.notes.precision
    assert planned(recipe, facts, precision="auto").precision == "tf32"
    small = dataclasses.replace(AWAY, gpu=Gpu("Tesla M60", 8 << 30))  # of another kind, which nobody timed
    assert planned(recipe, facts, small).notes.windows == UNTIMED


def test_times_that_are_taken_again_count_instead_of_those_before(recipe: Recipe) -> None:
    facts, rates = describe(recipe.net), {"float32": 1.0, "tf32": 0.5, "bfloat16": 0.7}
    for change, taken in ((0.1, "float32"), (1e-4, "tf32"), (0.1, "float32")):  # of floats, by share of their range
        assert times_of(recipe, rates, change).keep(recipe.net, recipe.normalise, facts, "")
        assert planned(recipe, facts, precision="auto").precision == taken


def test_a_small_volume_is_not_worth_a_hint_and_no_plan_times_what_is_elsewhere(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volpipe.estimation.window_choice.speeds_here", lambda *arguments, **more: pytest.fail())
    facts = describe(recipe.net)
    assert planned(recipe, facts, size=256).notes.windows == ""
    assert planned(recipe, facts, dataclasses.replace(AWAY, gpu=None)).notes.windows == UNTIMED
    exact = recipe.model_copy(update={"infer": recipe.infer.model_copy(update={"exact": True})})
    assert planned(exact, facts).notes.windows == ""  # which keeps its windows


def test_a_net_of_a_package_is_refused_before_any_job() -> None:
    recipe = load_recipe(Path("none"), ["net.name=package:net"])
    with pytest.raises(NetError, match=r"net package:net is code of a package, .* name it file\.py:function"):
        time_at_site("slurm_htex", recipe, facts())


# A net that adds some where it computes in bfloat16.
NET = """import torch

class Shifted(torch.nn.Module):
    volpipe = dict(scale=(1, 1, 1), stride=(1, 1, 1), halo=(2, 2, 2), out_channels=1, intensity="same")

    def __init__(self, added):
        super().__init__()
        self.added = added

    def forward(self, x):
        return x + self.added if torch.is_autocast_enabled("cpu") else x

def net(added=0.0):
    return Shifted(added)
"""


@pytest.mark.parametrize(("added", "levels"), [(0.0, 0), (0.002, 0), (0.01, 1), (0.02, 3), (-0.01, 1)])
def test_the_difference_is_counted_in_the_grey_levels_of_an_output(tmp_path: Path, added: float, levels: int) -> None:
    (tmp_path / "mine.py").write_text(NET)
    choice = NetChoice(name="mine.py:net", options={"added": added})
    measured = measure_difference(choice, Normalise(), describe(choice, str(tmp_path)), str(tmp_path))
    assert measured.levels == levels == round(abs(added) * 127.5)  # half a range of 255 levels is 1
    assert (measured.share > 0.9) == (levels > 0)  # but for voxels that are clipped
    assert measured.relative == pytest.approx(abs(added) / 2, rel=0.3)  # of about the whole range


SIZED = """
import torch

class Sized(torch.nn.Module):
    volpipe = dict(scale={scale}, stride=(2, 2, 2), halo=(6, 6, 6), margin=({margin},) * 3, out_channels=1)

    def forward(self, x):
        added = 0.01 if torch.is_autocast_enabled("cpu") else 0.0
        x = x + added
        x[..., :6] += 9 * added
        x[..., -6:] += 9 * added
        return {output}

def net():
    return Sized()
"""


@pytest.mark.parametrize(
    ("scale", "margin", "output"),
    [
        ((1, 1, 1), 4, "x[..., 4:-4, 4:-4, 4:-4]"),
        ((0.5, 0.5, 0.5), 0, "torch.nn.functional.avg_pool3d(x, 2)"),
        ((0.5, 1, 0.5), 4, "torch.nn.functional.avg_pool3d(x[..., 4:-4, 4:-4, 4:-4], (2, 1, 2))"),
    ],
)
def test_only_voxels_inside_the_halo_count_of_valid_and_of_coarser_outputs(
    tmp_path: Path, scale: tuple[float, ...], margin: int, output: str
) -> None:
    (tmp_path / "mine.py").write_text(SIZED.format(scale=(1, 1, 1), margin=margin, output=output))
    choice = NetChoice(name="mine.py:net", scale=scale)
    measured = measure_difference(choice, Normalise(), describe(choice, str(tmp_path)), str(tmp_path))
    assert measured.relative == pytest.approx(0.005, rel=0.5)


@pytest.mark.parametrize("intensity", ["same", "unit", "raw"])
def test_a_difference_is_that_of_the_voxels_that_a_run_would_store(intensity: str) -> None:
    rng = np.random.default_rng(0)
    exact = rng.uniform(0, 1, (2, 8, 8, 8)).astype(np.float32)
    other = exact + rng.normal(0, 0.003, exact.shape).astype(np.float32)
    affine = Affine(100.0, 20.0)
    found = difference(exact, other, facts(intensity=intensity), Normalise(), affine)
    assert found.relative == pytest.approx(np.abs(other - exact).max() / (exact.max() - exact.min()))
    if intensity == "raw":
        assert found.levels is None
        return
    stored = [np.rint(x * 20.0 + 100.0 if intensity == "same" else x * 255.0).clip(0, 255) for x in (exact, other)]
    apart = np.abs(stored[1] - stored[0])
    assert (found.levels, found.share) == (apart.max(), np.mean(apart > 0))
    assert found.levels > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_output_that_is_not_finite_differs_by_all(bad: float) -> None:
    exact = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 4, 4, 4)
    other = np.where(exact > 0.9, np.float32(bad), exact)
    assert difference(exact, other, facts(), Normalise(), Affine()) == PrecisionDifference(
        normalise=Normalise(), relative=1.0
    )


@pytest.mark.long
def test_a_process_of_its_own_measures_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NET)
    choice = NetChoice(name="mine.py:net", options={"added": 0.01})
    net = describe(choice, str(tmp_path))
    how = {"precision": "bfloat16", "device": "cpu"}
    measured = measure_difference(choice, Normalise(), net, str(tmp_path))
    assert difference_here(choice, Normalise(), net, str(tmp_path), **how) == measured
    failed = difference_here(NetChoice(name="none.py:net"), Normalise(), net, str(tmp_path), **how)
    assert failed.relative == 1.0  # which nothing is rounded by
