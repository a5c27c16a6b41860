"""The speeds of a net: what windows cost, on a core and on a GPU, and the windows between those that were measured."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from plans import facts

from volpipe.errors import NetError
from volpipe.estimation import net_speeds
from volpipe.estimation.net_speeds import arithmetics_here, measure_speeds_on_gpu, measured_speeds
from volpipe.estimation.window_search import windows_to_try
from volpipe.nets.cache import keep_speeds, known_speeds
from volpipe.nets.facts import Arithmetic, WindowSpeed, WindowSpeeds
from volpipe.nets.load import describe
from volpipe.recipes.inference import NetChoice


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
    monkeypatch.setattr(net_speeds, "_time_on_gpu", Mock(side_effect=torch.OutOfMemoryError))
    choice = NetChoice(name="identity")
    with pytest.raises(NetError, match="no window of net identity could be timed on H100; others may use its memory"):
        measure_speeds_on_gpu(choice, describe(choice), "H100", device="cpu")


@pytest.mark.long
def test_windows_of_a_users_net_are_timed_by_processes_that_do_not_run_the_users_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(
        "import torch\ndef net():\n    made = torch.nn.Conv3d(1, 1, 3, padding=1)\n    made.halo = [1] * 3\n"
        "    return made\n"
    )
    choice = NetChoice(name=f"{tmp_path / 'mine.py'}:net", untrained=True)
    result = measured_speeds(choice, describe(choice, str(tmp_path)), str(tmp_path), most_seconds=4.0)
    assert result is not None
    assert [each.arithmetic for each in result.speeds] == arithmetics_here()
    for each in result.speeds:
        assert each.windows[0].window[0] == 33  # half of a core of 62, and its halo
        assert all(speed.seconds < 4 for speed in each.windows)
    assert keep_speeds(choice, str(tmp_path), result)
    assert known_speeds(choice, str(tmp_path), result.processor) == result


def test_windows_are_timed_on_a_device_in_the_memory_that_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_bytes, call_bytes, most_bytes = 10 << 20, 1000, 20_000
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
        "import torch\ndef net():\n    made = torch.nn.Conv3d(1, 1, 3, padding=1)\n    made.halo = [1] * 3\n"
        "    made.window = [10] * 3\n    return made\n"
    )
    choice = NetChoice(name=f"{tmp_path / 'mine.py'}:net", untrained=True)
    net = describe(choice, str(tmp_path))
    result = measure_speeds_on_gpu(choice, net, "H100", str(tmp_path), device="cpu")
    assert result.processor == "H100"
    assert [tuple(each.arithmetic) for each in result.speeds] == [
        (layout, precision) for precision in ("float32", "tf32", "bfloat16") for layout in (False, True)
    ]
    first, *others = result.speeds
    fits = windows_to_try(net, net.halo)[:5]  # of four calls each, the first of which is not counted
    assert [speed.window for speed in first.windows] == fits
    peaks = [call_bytes * 4 * number for number in range(1, 6)]
    assert first.bytes_per_voxel == max(p / math.prod(w) for p, w in zip(peaks, fits, strict=True))
    assert not any(other.windows for other in others)  # of which none fits any more
