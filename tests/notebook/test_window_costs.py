"""The cost of windows, as a table with the one to choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import volpipe as vp
from volpipe.estimation import window_search
from volpipe.estimation.window_search import WindowCost
from volpipe.notebook.windows import WindowCosts

MIB = 1 << 20


class Slow(nn.Module):
    """A net of one layer that says all of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.volpipe = {
            "scale": (1, 1, 1), "stride": (1, 1, 1), "halo": (1, 1, 1), "window": (16, 16, 16), "out_channels": 1,
        }  # fmt: skip
        self.conv = nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x)
        return out


def costs() -> WindowCosts:
    small = WindowCost((8, 8, 8), 1, 216, 0.5, 10 * MIB)
    large = WindowCost((16, 16, 16), 1, 2744, 0.5, 30 * MIB)
    huge = WindowCost((32, 32, 32), 1, 27000, 0.5, 300 * MIB)
    best = window_search.fastest((small, large, huge), 100 * MIB)
    return WindowCosts("net", (1, 1, 1), (small, large, huge), 100 * MIB, best)


def test_the_one_to_choose_is_marked() -> None:
    table = costs()
    assert table.settings == ("windows.shape=[16, 16, 16]", "infer.batch=1", "infer.channels_last=false")
    lines = repr(table).splitlines()
    assert [line.endswith("choose this") for line in lines[2:5]] == [False, True, False]
    assert lines[3].split()[:7] == ["16", "×", "16", "×", "16", "1", "67"]
    assert (
        "choose windows.shape=[16, 16, 16] infer.batch=1 infer.channels_last=false: 5,488 voxels per second" in lines[5]
    )
    html = table._repr_html_()
    assert html.count("font-weight:bold") == 1
    assert "<td>16 × 16 × 16</td>" in html.partition("font-weight:bold")[2].partition("</tr>")[0]


def test_where_none_fits_it_says_so() -> None:
    table = WindowCosts("net", (1, 1, 1), costs().costs, MIB, None)
    assert table.settings == () and "no window fits 1 MiB" in repr(table) and "no window fits" in table._repr_html_()


def test_windows_of_a_module_are_tried_here_and_its_settings_run() -> None:
    threads = torch.get_num_threads()
    table = vp.windows(Slow())
    assert [cost.window[0] for cost in table.costs] == [9, 16, 23, 30, 37, 44]
    assert table.costs[0].kept == 7**3 and all(cost.seconds > 0 for cost in table.costs)
    assert table.best in table.costs and torch.get_num_threads() == threads


def test_a_window_that_would_not_fit_beside_the_notebook_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_search, "free_memory", lambda: 4 * MIB)
    monkeypatch.setattr(window_search, "_time_call", lambda *arguments: (0.1, window_search.held_memory() + 10 * MIB))
    table = vp.windows(Slow())
    assert len(table.costs) == 1


def test_what_the_notebook_holds_already_is_not_held_against_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    held = np.ones(300 * MIB, np.uint8)
    monkeypatch.setattr(window_search, "free_memory", lambda: 100 * MIB)
    monkeypatch.setattr("volpipe.notebook.windows.free_memory", lambda: 100 * MIB)
    table = vp.windows(Slow())
    assert len(table.costs) == 6 and table.best is not None
    assert table.costs[0].num_bytes > held.nbytes


def test_a_peak_that_cannot_be_counted_anew_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_search, "count_peak_anew", lambda: False)
    with pytest.raises(vp.VolpipeError, match="memory cannot be measured here"):
        vp.windows(Slow())


@pytest.mark.long
def test_windows_of_a_named_net_are_tried_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_search, "GROWTHS", (0.5,))
    table = vp.windows("identity")
    assert [(cost.window, cost.channels_last) for cost in table.costs] == [((32, 32, 32), False), ((32, 32, 32), True)]
    assert table.net == "identity" and table.halo == (0, 0, 0)


def test_a_process_that_ends_at_once_is_no_empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volpipe.notebook.windows.measure_windows", lambda *arguments: iter(()))
    with pytest.raises(vp.VolpipeError, match=r"no window of net identity could be tried: .* __name__ =="):
        vp.windows("identity")
