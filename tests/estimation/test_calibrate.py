"""Trying blocks takes no more than 20 s, whatever the volume and the net, and tells what whole blocks would tell."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from inline import Inline
from plans import planned as plan_of
from volumes import noise, windowed, write_volume

from volpipe.estimation import calibrate
from volpipe.estimation.estimate import upper_bounds
from volpipe.estimation.memory import array_bytes, net_bytes
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import open_volume
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import preview

NET = """
import time, torch
class Net(torch.nn.Module):
    volpipe = dict(
        in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(0, 0, 0), window=(32, 32, 32), intensity="same"
    )
    def forward(self, x):
        time.sleep({seconds} * x.numel() / 32**3)
        return x
def build():
    return Net()
"""


def planned(folder: Path, seconds: float, location: str, *settings: str) -> Plan:
    (folder / "net.py").write_text(NET.format(seconds=seconds))
    recipe = load_recipe(None, ["net.name=net.py:build", *settings])
    return prepare(location, recipe, folder / "out.zarr", folder)


def huge(folder: Path) -> str:
    """Return an N5 of 100,000³ voxels of which no chunk is stored."""
    (folder / "big.n5" / "raw").mkdir(parents=True)
    (folder / "big.n5" / "attributes.json").write_text('{"n5": "2.0.0"}')
    array = {"dimensions": [100_000] * 3, "blockSize": [64] * 3, "dataType": "uint8", "compression": {"type": "gzip"}}
    (folder / "big.n5" / "raw" / "attributes.json").write_text(json.dumps(array))
    return str(folder / "big.n5" / "raw")


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.1, 1.5])
def test_a_huge_volume_and_a_slow_net_are_tried_in_time_by_smaller_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(calibrate, "MOST_SECONDS", 60.0)  # so that a busy machine does not end it
    plan = planned(tmp_path, seconds, huge(tmp_path))
    assert plan.lattice.windows_per_block * seconds > 20  # of the first of its blocks alone
    heard: list[float] = []
    began = time.monotonic()
    found = preview(plan, Inline().start, lambda took, most: heard.append(took))
    assert time.monotonic() - began < 20
    assert found.estimate.rates is not None
    assert found.estimate.rates.infer_seconds == pytest.approx(seconds, rel=0.5)
    assert heard == sorted(heard)
    assert not (tmp_path / "out.zarr.run" / "calibration").exists()


def test_what_smaller_blocks_tell_is_what_whole_ones_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (np.sin(np.arange(64**3).reshape(64, 64, 64) / 5) * 40 + noise((64, 64, 64)) // 4 + 80).astype(np.uint8)
    location = str(write_volume(tmp_path / "in.n5", data))
    cut = (*windowed((16, 16, 16), (0, 0, 0), (2, 2, 2), "crop"), "output.chunk=[16,16,16]", "output.levels=0")
    plan = planned(tmp_path, 0.4, location, *cut)
    whole = preview(plan, Inline().start).estimate
    (tmp_path / "out.zarr.run" / "rates.json").unlink()
    monkeypatch.setattr(calibrate, "BUDGET_SECONDS", 0.5)  # of two windows or so
    small = preview(plan, Inline().start).estimate
    assert whole.rates is not None and small.rates is not None
    assert whole.rates != small.rates
    assert small.output_bytes == pytest.approx(whole.output_bytes, rel=0.2)
    assert small.rates.infer_seconds == pytest.approx(whole.rates.infer_seconds, rel=0.6)


@pytest.mark.long
def test_a_slow_net_makes_no_slow_pyramid(tmp_path: Path) -> None:
    """A whole shard was written for the few voxels that are tried, and its seconds were those of a pyramid's voxels."""
    plan = planned(tmp_path, 0.5, str(write_volume(tmp_path / "in.n5", noise((250, 250, 250)))))
    found = preview(plan, Inline().start).estimate
    assert len(plan.factors) > 1
    assert found.by_name()["pyramid 1"].seconds < 10  # 0.3 s on a machine without other work; 30 s were planned
    assert found.rates is not None and 250**3 * found.rates.write_seconds < 20


def test_the_memory_of_a_shipped_net_is_not_guessed_from_a_smaller_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a small window takes is in good part what any takes: times eight, it was 4.4 GiB for a worker of one."""
    location = str(write_volume(tmp_path / "in.n5", noise((64, 64, 64))))
    plan, tried = (
        prepare(location, load_recipe(None, [f"windows.shape={[size] * 3}"]), tmp_path / f"{size}.zarr", tmp_path)
        for size in (84, 42)
    )
    idle, taken = 500 << 20, 900 << 20
    monkeypatch.setattr(calibrate, "peak_bytes", lambda: taken)
    probe = calibrate._Probe(start_seconds=0, seconds_per_voxel=0, idle_bytes=idle)
    found = calibrate._scaled(upper_bounds(tried), plan, tried, probe).peak_bytes
    arrays, (large, small) = array_bytes(plan) - array_bytes(tried), map(net_bytes, (plan, tried))
    assert large is not None and small is not None
    assert found == pytest.approx(taken + max(0, arrays) + large - small, abs=2)
    assert found < taken + max(0, arrays) + 7 * (taken - idle - array_bytes(tried))


def test_the_memory_of_a_net_on_a_gpu_is_none_of_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 276³, tried at half the size, were planned with 17 GiB of a worker, and the run was refused."""
    location = str(write_volume(tmp_path / "in.n5", noise((64, 64, 64))))
    plan, tried = (
        prepare(location, load_recipe(None, [f"windows.shape={[size] * 3}"]), tmp_path / f"{size}.zarr", tmp_path)
        for size in (276, 148)
    )
    monkeypatch.setattr(calibrate, "peak_bytes", lambda: 1 << 30)
    probe = calibrate._Probe(start_seconds=0, seconds_per_voxel=0, idle_bytes=500 << 20, on_gpu=True)
    found = calibrate._scaled(upper_bounds(tried), plan, tried, probe).peak_bytes
    assert found == pytest.approx((1 << 30) + array_bytes(plan) - array_bytes(tried), abs=2)


@pytest.mark.parametrize(
    ("on_gpu", "seconds", "num", "num_windows"),  # windows of a block; of two, smaller ones are tried
    [
        (True, 1e-6, 16, 2),
        (True, 0.1, 10, 1),
        (True, 2.0, 3, 2),
        (False, 1e-6, 3, 1),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((True, 1e-6, 16, 1), (True, 0.1, 10, 2), (True, 2.0, 3, 1), (False, 1e-6, 3, 2))
        ),
    ],
)
def test_on_a_gpu_as_many_blocks_are_tried_as_it_computes_in_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, seconds: float, num: int, num_windows: int
) -> None:
    """Two windows of 0.05 s each took 0.2 s, so that 2048³ was planned with twice the time that it took."""
    location = str(write_volume(tmp_path / "in.n5", noise((16, 16, 16 * 400))))
    blocks = windowed((16, 16, 16), (0, 0, 0), (1, 1, num_windows), "crop")
    plan = planned(tmp_path, 0.0, location, *blocks, "output.levels=0")
    probe = calibrate._Probe(start_seconds=0, seconds_per_voxel=seconds / 16**3, idle_bytes=0, on_gpu=on_gpu)
    monkeypatch.setattr(calibrate, "_probe", lambda job: probe)
    monkeypatch.setattr(calibrate, "LONG_SECONDS", 60.0)
    monkeypatch.setattr(calibrate, "BUDGET_SECONDS", calibrate.NUM_PASSES * seconds)  # of one window
    rates = preview(plan, Inline().start).estimate.rates
    assert rates is not None
    assert rates.num_blocks in (num, num - 1)  # of 400 two may be the same
    stored = plan.changed(mode="stored")
    assert calibrate._more_on_gpu(stored, [0], np.random.default_rng(0), probe) == []


def test_large_windows_are_tried_as_they_are_where_none_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To store one of 276³ would take 6 s, for which smaller ones were tried on a GPU that computes it in 0.1 s."""
    location = str(write_volume(tmp_path / "in.n5", noise((64, 64, 64))))
    monkeypatch.setattr(calibrate, "BUDGET_SECONDS", 0.005)
    monkeypatch.setattr(calibrate, "MOST_FACTOR_SECONDS", 0.0)
    for mode, is_whole in (("streamed", True), ("stored", False)):
        plan = planned(
            tmp_path, 0.0, location, *windowed((32, 32, 32), (0, 0, 0), (1, 1, 1), "crop"), f"tensors.mode={mode}"
        )
        assert (calibrate._sized(plan, open_volume(location), 1e-9) is None) == is_whole
    plan = planned(tmp_path, 0.0, location, *windowed((32, 32, 32), (0, 0, 0), (1, 1, 1), "crop"))
    rates = preview(plan, Inline().start).estimate.rates
    assert rates is not None
    assert rates.factor_seconds == pytest.approx(calibrate.FACTOR_SECONDS * 32**3)
    assert rates.window_bytes == 4 * 32**3


@pytest.mark.long
def test_a_window_that_takes_too_long_leaves_the_time_unknown_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "MOST_SECONDS", 0.3)
    location = str(write_volume(tmp_path / "in.n5", noise((32, 32, 32))))
    plan = planned(tmp_path, 3.0, location, "windows.shape=[32,32,32]", "windows.overlap=0")
    found = preview(plan, Inline().start)
    assert found.estimate.rates is None
    assert (
        found.untimed
        == "no worker could try a window within 0 s; a smaller windows.shape would tell how fast the net is"
    )


def test_blocks_that_are_tried_for_a_region_lie_in_it() -> None:
    """They are blocks of the whole volume, which have other numbers than those that begin at the region's corner."""
    plan = plan_of("input.roi=13:40,7:33,9:40", *windowed((4, 4, 4), (0, 0, 0), (2, 2, 2), "hann"))
    plan, rng = plan.changed(corner=plan.roi[0]), np.random.default_rng(0)
    whole = calibrate._without_region(plan).lattice
    cores = [whole.core_box(calibrate._inner_block(plan, rng)) for _ in range(50)]
    assert not any((core & plan.roi_box).is_empty for core in cores)
    assert len({core.start for core in cores}) > 5
