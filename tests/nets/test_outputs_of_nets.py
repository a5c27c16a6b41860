"""Which tensor of what a net returned is taken, with which axes, and how several are joined: by hand, case by case."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from volpipe.nets.adapter import (
    Adapter,
    first_channels,
    joined,
    joined_arrays,
    outputs_of,
    pick,
    possible_channels,
    takes_single,
    takes_slices,
    with_channels,
)
from volpipe.nets.net_geometry import NetArray, OutputError
from volpipe.recipes.inference import NetChoice


def adapted(net: nn.Module, choice: NetChoice) -> Adapter:
    """Return a user's net with the interface of ours, as it is loaded."""
    is_asked = bool(choice.plane or choice.context)
    return Adapter(net, choice, is_flat=takes_slices(net, choice.context or 0, is_asked=is_asked))


ONE, TWO = torch.ones(1), torch.zeros(2)
WINDOW = (2, 1, 4, 6, 8)


class Pair(NamedTuple):
    near: object
    far: object


@dataclass
class Made:
    image: object
    rest: object = None


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (ONE, ["0"]), ([ONE, TWO], ["0", "1"]), ((ONE, (TWO, ONE)), ["0", "1.0", "1.1"]),
        ({"a": ONE, 3: TWO}, ["a", "3"]),
        (Pair(ONE, {"x": TWO}), ["near", "far.x"]), (Made(ONE), ["image"]), (Made([ONE], TWO), ["image.0", "rest"]),
        (SimpleNamespace(a=ONE, b=[TWO], c=3), ["a"]), (None, []), ("text", []), ([3, "x", ONE], ["2"]), (Made, []),
    ],
)  # fmt: skip
def test_tensors_are_found_in_tuples_dictionaries_and_classes_of_data(value: object, names: list[str]) -> None:
    assert list(outputs_of(value)) == names


def test_tensors_that_lie_too_deep_are_not_found() -> None:
    value: object = ONE
    for _ in range(8):
        value = [value]
    assert list(outputs_of(value)) == ["0.0.0.0.0.0.0.0"] and outputs_of([value]) == {}


def image(*channels_and_grid: int, start: int = 0) -> torch.Tensor:
    size = 1
    for n in channels_and_grid:
        size *= n
    return torch.arange(start, start + size, dtype=torch.float32).reshape(channels_and_grid)


@pytest.mark.parametrize(
    ("shape", "window", "whole"),
    [
        ((2, 3, 4, 6, 8), WINDOW, (2, 3, 4, 6, 8)), ((2, 4, 6, 8), WINDOW, (2, 1, 4, 6, 8)),
        ((3, 4, 6, 8), (1, 1, 4, 6, 8), (1, 3, 4, 6, 8)), ((4, 6, 8), (1, 1, 4, 6, 8), (1, 1, 4, 6, 8)),
        ((3, 4, 6, 8), WINDOW, (3, 4, 6, 8)), ((4, 6, 8), WINDOW, (4, 6, 8)), ((4, 6, 9), (1, 1, 4, 6, 8), (4, 6, 9)),
        ((1, 2, 3, 4), (1, 1, 4, 6, 8), (1, 1, 2, 3, 4)), ((6, 8), (1, 1, 6, 8), (1, 1, 6, 8)),
        ((2, 6, 8), (2, 1, 6, 8), (2, 1, 6, 8)), ((7,), WINDOW, (7,)),
    ],
)  # fmt: skip
def test_axes_that_a_net_left_out_are_put_back(
    shape: tuple[int, ...], window: tuple[int, ...], whole: tuple[int, ...]
) -> None:
    (out,) = with_channels({"0": torch.zeros(shape)}, window).values()
    assert tuple(out.shape) == whole


def test_of_several_outputs_only_those_on_the_grid_get_axes() -> None:
    values = {"on": torch.zeros(2, 4, 6, 8), "off": torch.zeros(2, 2, 3, 4), "loss": torch.zeros(2)}
    assert [tuple(out.shape) for out in with_channels(values, WINDOW).values()] == [
        (2, 1, 4, 6, 8), (2, 2, 3, 4), (2,)
    ]  # fmt: skip


def test_complex_numbers_and_sparse_tensors_are_refused() -> None:
    for out, kind in ((torch.zeros(2, dtype=torch.complex64), "complex64"), (torch.eye(2).to_sparse(), "sparse_coo")):
        with pytest.raises(OutputError, match=rf"for a window \(2, 1, 4, 6, 8\) it gives {kind} numbers, \("):
            with_channels({"0": out}, WINDOW)


def test_the_one_output_that_is_an_image_is_taken() -> None:
    a, b = image(2, 3, 4, 6, 8), image(2, 1, 2, 3, 4)
    assert pick(a, WINDOW, None) is a and pick([a], WINDOW, None) is a
    assert pick({"a": a, "n": ONE}, WINDOW, None) is a  # the only image
    assert pick({"b": b, "a": a}, WINDOW, None) is a  # the only one on the window's grid
    assert pick(b, WINDOW, None) is b
    assert pick({"x": a, "y": b}, WINDOW, "y") is b and pick({"x": a, "y": b}, WINDOW, 1) is b
    assert pick({"0": b, "1": a}, WINDOW, 0) is b


@pytest.mark.parametrize(
    ("value", "output", "words"),
    [
        (None, None, r"it returns NoneType without a tensor for a window \(2, 1, 4, 6, 8\)"),
        ({"a": image(2, 1, 4, 6, 8), "b": image(2, 3, 4, 6, 8)}, None,
         r"it gives 2 outputs for a window \(1, 4, 6, 8\): a \(1, 4, 6, 8\), b \(3, 4, 6, 8\)"),
        ({"a": image(2, 1, 2, 6, 8), "b": image(2, 3, 2, 6, 8)}, None, "it gives 2 outputs"),
        ({"near": ONE, "far": TWO}, "neer",
         r"it has no output 'neer' \(did you mean 'near'\?\); it gives near \(\), far"),
        ({"near": ONE, "far": TWO}, 2, "it has no output 2; it gives"),
        ({"near": ONE, "far": TWO}, -1, "it has no output -1; it gives"),
    ],
)  # fmt: skip
def test_where_it_is_not_known_which_is_meant_it_is_refused(
    value: object, output: int | str | None, words: str
) -> None:
    with pytest.raises(OutputError, match=words):
        pick(value, WINDOW, output)


def test_outputs_are_joined_on_the_finest_grid() -> None:
    fine, coarse = image(1, 2, 4, 4, 4), image(1, 1, 2, 2, 4, start=1000)
    values = {"fine": fine, "coarse": coarse}
    assert joined_arrays(values) == (NetArray("fine", 0, 2), NetArray("coarse", 2, 3, (2, 2, 1)))
    whole = joined(values)
    assert torch.equal(whole[:, :2], fine)
    assert torch.equal(whole[:, 2:], coarse.repeat_interleave(2, 2).repeat_interleave(2, 3))
    assert torch.equal(pick(values, (1, 1, 4, 4, 4), "all"), whole)
    for array, out in zip(joined_arrays(values), values.values(), strict=True):
        assert torch.equal(array.cut(whole[0]), out[0])


def test_of_outputs_with_other_margins_the_voxels_that_all_have_are_joined() -> None:
    wide, small = image(1, 1, 4, 8, 8), image(1, 1, 4, 6, 8, start=1000)
    assert torch.equal(joined({"wide": wide, "small": small}), torch.cat([wide[:, :, :, 1:7], small], 1))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"a": image(1, 1, 4, 4, 4), "b": image(1, 3)},
         r"not all of its outputs are images: a \(1, 4, 4, 4\), b \(3,\)"),
        ({"a/b": image(1, 1, 2, 2, 2), "a_b": image(1, 1, 2, 2, 2)}, "would have the same names"),
        ({"a": image(1, 1, 4, 4, 4), "b": image(1, 1, 4, 4, 3)}, "its outputs have different grids"),
    ],
)  # fmt: skip
def test_outputs_that_cannot_be_joined_are_refused(values: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(OutputError, match=words):
        joined(values)


class Named(nn.Module):
    """A net of slices that says which plane it saw: its output is the index along the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 4:
            raise ValueError("slices only")
        rows = torch.arange(x.shape[2], dtype=torch.float32).reshape(1, 1, -1, 1)
        return x[:, :1] * 0 + rows + 10 * (x.shape[1] - 1)


@pytest.mark.parametrize(("plane", "axis"), [("yx", 1), ("zx", 0), ("zy", 0)])
def test_slices_are_cut_in_their_plane(plane: str, axis: int) -> None:
    net = adapted(Named(), NetChoice(name="x.py:f", plane=(plane,)))  # type: ignore[arg-type]
    assert net.slice_axis == {"yx": 0, "zx": 1, "zy": 2}[plane]
    out = net(torch.zeros(2, 1, 3, 4, 5))
    expected = torch.arange((3, 4, 5)[axis], dtype=torch.float32)
    assert torch.equal(out.movedim(2 + axis, -1), expected.expand(out.movedim(2 + axis, -1).shape))


def test_several_planes_are_averaged() -> None:
    net = adapted(Named(), NetChoice(name="x.py:f", plane=("yx", "zx", "zy")))
    assert net.slice_axis is None and net.in_volume((7, 9), 1) == (7, 9, 9)
    out = net(torch.zeros(1, 1, 3, 4, 5))
    z, y = torch.arange(3.0).reshape(3, 1, 1), torch.arange(4.0).reshape(1, 4, 1)
    torch.testing.assert_close(out[0, 0], ((y + 2 * z) / 3).expand(3, 4, 5))


def test_neighbouring_slices_are_channels_and_the_last_ones_repeat() -> None:
    class Seen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.ndim != 4 or x.shape[1] not in (1, 5):
                raise ValueError("five slices")
            return x if x.shape[1] == 5 else x.repeat(1, 5, 1, 1)

    net = adapted(Seen(), NetChoice(name="x.py:f", context=2))
    depth = torch.arange(4.0).reshape(1, 1, 4, 1, 1).expand(1, 1, 4, 6, 6)
    out = net(depth)[0, :, :, 0, 0]
    places = [[max(0, min(3, z + offset)) for z in range(4)] for offset in range(-2, 3)]
    assert out.tolist() == [[float(z) for z in row] for row in places]


def test_a_net_of_volumes_takes_no_plane() -> None:
    with pytest.raises(Exception, match=r"net x is a net of volumes \(n, c, z, y, x\), and net.plane is for nets"):
        Adapter(nn.Conv3d(1, 1, 1), NetChoice(name="x", plane=("yx",)), is_flat=False)
    with pytest.raises(Exception, match=r"and net\.context is for nets of slices"):
        Adapter(nn.Conv3d(1, 1, 1), NetChoice(name="x", context=1), is_flat=False)


def test_what_a_net_takes_is_seen_by_its_weights_or_by_trying() -> None:
    assert not takes_slices(nn.Conv3d(1, 1, 3), 0, is_asked=True)
    assert takes_slices(nn.Conv2d(1, 1, 3), 0, is_asked=False) and takes_slices(Named(), 0, is_asked=False)
    assert not takes_slices(nn.Identity(), 0, is_asked=False)
    assert takes_single(nn.Conv3d(1, 1, 3)) and takes_single(nn.Conv2d(2, 1, 3))
    assert not takes_single(nn.Linear(7, 7))
    assert [first_channels(net) for net in (nn.Conv2d(3, 1, 1), nn.Sequential(nn.ReLU(), nn.Conv3d(5, 1, 1)))] == [3, 5]
    assert first_channels(nn.ReLU()) is None
    assert possible_channels(nn.Conv3d(1, 1, 1)) == [1] and possible_channels(nn.Conv3d(6, 1, 1)) == [1, 6]
    assert possible_channels(nn.Conv2d(6, 1, 1), 1) == [1, 2] and possible_channels(nn.Conv2d(2, 1, 1), 1) == [1]


def test_whole_numbers_become_floats_and_gradients_are_cut_off() -> None:
    class Classes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x > 0

    net = adapted(nn.Sequential(nn.Conv3d(1, 1, 1), Classes()), NetChoice(name="x.py:f"))
    with torch.no_grad():
        assert net(torch.zeros(1, 1, 2, 2, 2)).dtype == torch.float32
    plain = adapted(nn.Conv3d(1, 1, 1), NetChoice(name="x.py:f"))
    with torch.no_grad():
        assert not plain(torch.zeros(1, 1, 2, 2, 2)).requires_grad
