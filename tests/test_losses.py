"""Each term of a loss is the mean that it says, by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from volpipe.losses import consistency, cropped, loss_terms
from volpipe.training import Loss

RNG = np.random.default_rng(9)
OUT, TRUTH = RNG.normal(size=(2, 2, 1, 4, 5, 6)).astype(np.float32)


def term(name: str) -> float:
    """Return the only term of a loss in which `name` has a weight."""
    weights = {"l1": 0.0} | {name: 2.0}
    terms = loss_terms(Loss.model_validate(weights), torch.from_numpy(OUT), torch.from_numpy(TRUTH))
    assert list(terms) == [name]
    return float(terms[name])


def test_errors_are_absolute_squared_and_in_between() -> None:
    error = OUT - TRUTH
    assert term("l1") == pytest.approx(np.abs(error).mean(), rel=1e-5)
    assert term("l2") == pytest.approx((error**2).mean(), rel=1e-5)
    assert term("charbonnier") == pytest.approx(np.sqrt(error**2 + 1e-6).mean(), rel=1e-5)


def test_gradients_are_compared_along_each_axis() -> None:
    each = [np.abs(np.diff(OUT, axis=axis) - np.diff(TRUTH, axis=axis)).mean() for axis in (2, 3, 4)]
    assert term("gradient") == pytest.approx(np.mean(each), rel=1e-5)


def test_a_brighter_output_has_no_error_of_gradients() -> None:
    brighter = torch.from_numpy(TRUTH + 1)
    terms = loss_terms(Loss(gradient=1.0), brighter, torch.from_numpy(TRUTH))
    assert float(terms["gradient"]) == pytest.approx(0, abs=1e-6)
    assert float(terms["l1"]) == pytest.approx(1, rel=1e-5)


def test_consistency_compares_the_binned_output_with_what_was_given() -> None:
    given = RNG.normal(size=(2, 1, 2, 5, 3)).astype(np.float32)
    binned = OUT.reshape(2, 1, 2, 2, 5, 3, 2).mean(axis=(3, 6))
    found = consistency(torch.from_numpy(OUT), torch.from_numpy(given), (2, 1, 2))
    assert float(found) == pytest.approx(np.abs(binned - given).mean(), rel=1e-5)


def test_the_margin_is_left_out_in_voxels_of_each_grid() -> None:
    kept = cropped(torch.from_numpy(OUT), (1, 0, 2))
    np.testing.assert_array_equal(kept.numpy(), OUT[:, :, 1:-1, :, 2:-2])
    np.testing.assert_array_equal(cropped(torch.from_numpy(OUT), (1, 0, 1), (1, 1, 2)).numpy(), kept.numpy())
