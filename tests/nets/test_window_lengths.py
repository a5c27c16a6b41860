"""The windows that a net takes, found from the shapes that it gives: by brute force over nets made of arithmetic."""

from __future__ import annotations

import itertools

import pytest
import torch

from volpipe.nets.net_geometry import Ratio, UnmeasurableError
from volpipe.nets.window_sizes import AxisSizes, Shapes, window_sizes


class Made(torch.nn.Module):
    """A net of shapes alone: along x, (length - lost) * scale / shrink for lengths rest + k * step, others refused."""

    def __init__(self, *, scale: int = 1, shrink: int = 1, lost: int = 0, step: int = 1, rest: int = 0) -> None:
        super().__init__()
        self.scale, self.shrink, self.lost, self.step, self.rest = scale, shrink, lost, step, rest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[4]
        if (length - self.rest) % self.step or length <= self.lost:
            raise ValueError("no such length")
        return torch.zeros(1, 2, *x.shape[2:4], (length - self.lost) * self.scale // self.shrink)


def sizes_of(net: torch.nn.Module, fixed: tuple[int, int, int] = (0, 0, 0)) -> list[AxisSizes]:
    shapes = Shapes(net, lambda: net, [1])
    axes = window_sizes(shapes, fixed)[2]
    assert shapes.num_out == 2
    return axes


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({}, AxisSizes(Ratio(), 0, 0, 1, 32)),
        ({"scale": 3}, AxisSizes(Ratio(3), 0, 0, 1, 32)),
        ({"lost": 4}, AxisSizes(Ratio(), 2, 0, 1, 5)),
        ({"lost": 5}, AxisSizes(Ratio(), 3, 0, 1, 6, 1)),
        ({"lost": 6, "scale": 2}, AxisSizes(Ratio(2), 3, 0, 1, 7)),
        ({"shrink": 2, "step": 2}, AxisSizes(Ratio(shrink=2), 0, 0, 2, 32)),
        ({"shrink": 2, "step": 2, "lost": 4}, AxisSizes(Ratio(shrink=2), 2, 0, 2, 6)),
        ({"lost": 4, "step": 4}, AxisSizes(Ratio(), 2, 0, 4, 8)),
        ({"lost": 4, "step": 4, "rest": 2}, AxisSizes(Ratio(), 2, 2, 4, 6)),
    ],
)
def test_the_lengths_of_windows_are_those_that_the_net_takes(made: dict[str, int], expected: AxisSizes) -> None:
    z, y, x = sizes_of(Made(**made))
    assert x == expected
    assert z == y and (z.ratio, z.margin, z.remainder, z.step) == (Ratio(), 0, 0, 1)


def test_a_net_of_one_length_takes_no_other() -> None:
    class One(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[2:] != (32, 32, 32):
                raise ValueError("only 32")
            return torch.zeros(1, 2, 32, 28, 16)

    shapes = Shapes(One(), One, [1])
    base, fixed, axes = window_sizes(shapes, (0, 0, 0))
    assert base == fixed == (32, 32, 32)
    assert axes == [
        AxisSizes(Ratio(), 0, 0, 1, 32), AxisSizes(Ratio(), 2, 32, 1, 32), AxisSizes(Ratio(shrink=2), 0, 0, 1, 32),
    ]  # fmt: skip


def test_a_net_that_gives_more_than_it_gets_is_refused() -> None:
    with pytest.raises(UnmeasurableError, match="a window of 32 voxels along x gives 36: it gains 4, not the same on"):
        sizes_of(Made(lost=-4))


def test_a_net_of_four_axes_is_refused() -> None:
    class Flat(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[0]

    with pytest.raises(UnmeasurableError, match=r"a window \(1, 1, z, y, x\) gives 4 axes, \(1, 32, 32, 32\)"):
        sizes_of(Flat())


@pytest.mark.parametrize("ratio", [Ratio(), Ratio(2), Ratio(3), Ratio(shrink=2), Ratio(shrink=3)], ids=str)
def test_a_window_is_the_shortest_that_gives_so_much(ratio: Ratio) -> None:
    cases = itertools.product((0, 1, 3), (0, 2, 5), (1, 2, 3), (0, 1, 4), (1, 2, 7, 40))
    for margin, remainder, factor, more, least_output in cases:
        step, least = ratio.shrink * factor, remainder + more
        if least <= 2 * margin:
            continue
        window = AxisSizes(ratio, margin, remainder, 1, least).window(least_output, step)
        lengths = range(remainder, 400, step)
        enough = (n for n in lengths if n >= least and ratio.out(n - 2 * margin) >= least_output)
        assert window == next(enough)
