"""Each term of a loss is the mean that it says, by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from volpipe.recipes.training import Affinities, Loss
from volpipe.training.losses import RAREST, balance, consistency, cropped, loss_terms

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


@pytest.mark.parametrize("name", ["l1", "l2", "charbonnier", "gradient"])
def test_a_net_without_error_has_the_least_loss_and_stays_as_it_is(name: str) -> None:
    weights = {"l1": 0.0} | {name: 1.0}
    truth = torch.from_numpy(TRUTH)
    out = truth.clone().requires_grad_()
    (value,) = loss_terms(Loss.model_validate(weights), out, truth).values()
    value.backward()
    assert value.item() == pytest.approx(1e-3 if name == "charbonnier" else 0.0)  # round below errors of 1e-3
    assert torch.equal(out.grad, torch.zeros_like(out))


def test_the_slope_of_charbonnier_is_that_of_its_formula() -> None:
    out, error = torch.from_numpy(OUT).requires_grad_(), OUT.astype(np.float64) - TRUTH
    loss_terms(Loss.model_validate({"l1": 0.0, "charbonnier": 1.0}), out, torch.from_numpy(TRUTH))[
        "charbonnier"
    ].backward()
    slope = error / np.sqrt(error**2 + 1e-6) / error.size
    np.testing.assert_allclose(out.grad, slope, rtol=1e-4, atol=1e-9)


def test_gradients_are_compared_along_each_axis() -> None:
    each = [np.abs(np.diff(OUT, axis=axis) - np.diff(TRUTH, axis=axis)).mean() for axis in (2, 3, 4)]
    assert term("gradient") == pytest.approx(np.mean(each), rel=1e-5)


def test_a_single_slice_has_gradients_along_two_axes() -> None:
    out, truth = OUT[:, :, :1], TRUTH[:, :, :1]
    each = [np.abs(np.diff(out, axis=axis) - np.diff(truth, axis=axis)).mean() for axis in (3, 4)]
    terms = loss_terms(Loss(gradient=1.0), torch.from_numpy(out), torch.from_numpy(truth))
    assert float(terms["gradient"]) == pytest.approx(np.mean(each), rel=1e-5)


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


# ---- of affinities

TARGETS = RNG.choice([-1, 0, 1], (2, 3, 4, 5, 6), p=[0.2, 0.5, 0.3]).astype(np.float32)
LOGITS = RNG.normal(size=TARGETS.shape).astype(np.float32) * 3


def affinity_term(name: str, **weights: float) -> float:
    """Return a term of the loss of `LOGITS`, the same of them and of their chances."""
    choice = Affinities.model_validate({"bce": 0.0} | weights)
    logits, truth = torch.from_numpy(LOGITS), torch.from_numpy(TARGETS)
    of_logits = loss_terms(choice, logits, truth, logits=True)
    of_chances = loss_terms(choice, logits.sigmoid(), truth)
    assert list(of_logits) == list(of_chances) == [name]
    assert float(of_logits[name]) == pytest.approx(float(of_chances[name]), rel=1e-4)
    return float(of_logits[name])


def test_near_and_apart_weigh_the_same_and_the_unknown_nothing() -> None:
    chance = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
    due, num = 0.0, 0
    for channel in range(3):
        made, truth = chance[:, channel], TARGETS[:, channel]
        near, apart = -np.log(made[truth == 1]), -np.log(1 - made[truth == 0])
        size = len(near) + len(apart)
        due, num = due + size * (near.mean() + apart.mean()) / 2, num + size
    assert affinity_term("bce", bce=2.0) == pytest.approx(due / num, rel=1e-4)


def test_a_rare_kind_weighs_less_than_a_half() -> None:
    truth = np.ones((1, 1, 10, 10, 10), np.float32)
    truth[0, 0, 0, 0, 0] = 0
    weights = balance(torch.from_numpy(truth), torch.ones(1, 1, 10, 10, 10)).numpy()
    assert weights.max() == pytest.approx(0.5 / RAREST) == weights[0, 0, 0, 0, 0]
    assert weights.ravel()[-1] == pytest.approx(0.5 / (1 - RAREST))


def test_dice_is_of_what_is_apart_channel_by_channel() -> None:
    chance = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
    each = []
    for channel in range(3):
        known = TARGETS[:, channel] >= 0
        made, truth = 1 - chance[:, channel][known], TARGETS[:, channel][known] == 0
        each.append(2 * made[truth].sum() / ((made**2).sum() + truth.sum()))
    assert affinity_term("dice", dice=1.0) == pytest.approx(1 - np.mean(each), rel=1e-4)


def test_logits_that_are_far_off_still_have_a_gradient() -> None:
    logits = torch.full((1, 1, 2, 2, 2), 40.0, requires_grad=True)
    (loss_terms(Affinities(), logits, torch.zeros(1, 1, 2, 2, 2), logits=True)["bce"]).backward()
    assert logits.grad is not None and float(logits.grad.min()) > 0


def test_a_window_of_which_nothing_is_known_has_no_loss() -> None:
    unknown = torch.full((1, 2, 3, 3, 3), -1.0)
    terms = loss_terms(Affinities(dice=1.0), torch.zeros_like(unknown), unknown, logits=True)
    assert {name: float(term) for name, term in terms.items()} == {"bce": 0.0, "dice": pytest.approx(0, abs=1e-6)}
