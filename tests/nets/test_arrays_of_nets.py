"""Names and parts of a net's outputs, orders of its interpolation, halos in whole strides, and reasons of its code."""

from __future__ import annotations

import pytest
import torch

from volpipe.nets.net_geometry import (
    LONGEST_REASON,
    Geometry,
    Interpolation,
    NetArray,
    Ratio,
    UnmeasurableError,
    only_tensor,
    reason,
    run_net,
)

CUBE, FLAT, THIN = (4.0, 4.0, 4.0), (40.0, 4.0, 4.0), (12.0, 4.0, 4.0)


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("near", "near"), ("far/left x", "far_left_x"), ("0", "output_0"), ("s0", "output_s0"), ("run", "output_run"),
        ("c", "output_c"), ("s", "s"), ("..", "output_"), ("_a", "a"),
        ("runs", "runs"), ("1a", "1a"), ("a.b-c", "a.b-c"),
    ],
)  # fmt: skip
def test_an_array_is_named_after_its_output_unless_that_is_no_name_of_a_folder(output: str, name: str) -> None:
    assert NetArray(output, 0, 1).name == name


def test_an_array_is_its_channels_on_its_own_grid() -> None:
    joined = torch.arange(3 * 4 * 6 * 8).reshape(3, 4, 6, 8)
    assert torch.equal(NetArray("a", 1, 3).cut(joined), joined[1:3])
    assert torch.equal(NetArray("a", 0, 2, (2, 3, 4)).cut(joined), joined[:2, ::2, ::3, ::4])


@pytest.mark.parametrize(
    ("given", "old", "new", "orders"),
    [
        ({}, CUBE, CUBE, (3, 3, 3)), ({}, FLAT, CUBE, (0, 3, 3)), ({}, CUBE, FLAT, (0, 3, 3)),
        ({}, THIN, CUBE, (3, 3, 3)),
        ({}, (12.1, 4.0, 4.0), CUBE, (0, 3, 3)), ({}, (40.0, 40.0, 4.0), CUBE, (3, 3, 3)),
        ({"apart": False}, FLAT, CUBE, (3, 3, 3)), ({"apart": True}, THIN, CUBE, (0, 3, 3)),
        ({"apart": True, "order": 1, "order_z": 3}, (4.0, 4.0, 8.0), CUBE, (1, 1, 3)),
        ({"apart": True}, CUBE, FLAT, (3, 3, 3)),
    ],
)  # fmt: skip
def test_the_axis_of_long_voxels_is_interpolated_apart(
    given: dict[str, object], old: tuple[float, float, float], new: tuple[float, float, float], orders: tuple[int, ...]
) -> None:
    assert Interpolation.model_validate(given).orders(old, new) == orders


def test_ratios_go_there_and_back() -> None:
    assert [Ratio(3).out(n) for n in (0, 1, 5)] == [0, 3, 15] and [Ratio(shrink=3).out(n) for n in (2, 3, 9)] == [
        0,
        1,
        3,
    ]
    assert [Ratio(3).back(n) for n in (0, 2, 3)] == [0, 0, 1] and [Ratio(shrink=3).back(n) for n in (0, 2)] == [0, 6]


def test_a_halo_reaches_as_far_as_the_longer_side_in_whole_strides() -> None:
    found = Geometry((1, 1, 1), (4, 1, 2), before=(5, 0, 3), after=(3, 2, 3), margin=(1, 0, 2))
    assert (found.halo, found.receptive_field) == ((5, 2, 3), (9, 3, 7))
    assert found.aligned_halo() == (1 + 4, 2, 2 + 2)
    assert found.aligned_halo(0.5) == (1 + 4, 1, 2 + 2)
    assert found.aligned_halo(0) == (1, 0, 2)
    assert found.ratios == (Ratio(), Ratio(), Ratio())


def test_the_reason_of_a_net_is_one_line() -> None:
    assert reason(ValueError("  no\n\n such thing\n")) == "no"
    assert reason(ValueError("a trace of TorchScript:\n at line 3\n no such thing")) == "no such thing"
    assert reason(ValueError()) == "ValueError"
    assert reason(ValueError("x" * LONGEST_REASON)) == "x" * LONGEST_REASON
    assert reason(ValueError("x" * (LONGEST_REASON + 1))) == "x" * LONGEST_REASON + "…"


def test_what_a_net_returns_or_raises_is_said() -> None:
    window = torch.zeros(1, 2, 3, 4, 5)
    assert torch.equal(run_net(lambda x: x + 1, window), window + 1)
    with pytest.raises(UnmeasurableError, match="it returns list, not a tensor"):
        run_net(lambda x: [x], window)  # type: ignore[arg-type, return-value]
    with pytest.raises(UnmeasurableError, match="it returns NoneType, not a tensor"):
        only_tensor(None)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such thing")

    with pytest.raises(UnmeasurableError) as refusal:
        run_net(broken, window)
    assert str(refusal.value) == "it takes no window of (3, 4, 5) voxels and 2 channels, float32: no such thing"

    def lacking(x: torch.Tensor) -> torch.Tensor:
        raise ImportError("No module named 'far'")

    with pytest.raises(
        UnmeasurableError, match="its code needs what is not installed: No module named 'far'"
    ) as absent:
        run_net(lacking, window)
    assert absent.value.remedy == "install it"
