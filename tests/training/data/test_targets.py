"""Targets of affinities, and the scores of what a net makes of them, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from volpipe.geometry.affinities import OFFSETS
from volpipe.training.data.targets import APART, LEVELS, NEAR, UNKNOWN, accuracy, histograms, roc_auc, targets

LABELS = np.random.default_rng(2).integers(0, 4, (5, 6, 7))
SOME = ((-1, 0, 0), (0, 2, 0), (0, -1, 3))


@pytest.mark.parametrize("ignore", [None, 0, 2])
def test_a_target_is_near_apart_or_unknown_as_the_two_voxels_say(ignore: int | None) -> None:
    made = targets(LABELS, SOME, ignore)
    assert made.dtype == np.int8
    for channel, offset in enumerate(SOME):
        for place in itertools.product(*map(range, LABELS.shape)):
            other = tuple(p + o for p, o in zip(place, offset, strict=True))
            inside = all(0 <= o < n for o, n in zip(other, LABELS.shape, strict=True))
            pair = (LABELS[place], LABELS[other]) if inside else ()
            due = UNKNOWN if not inside or ignore in pair else NEAR if pair[0] == pair[1] != 0 else APART
            assert made[channel][place] == due, (offset, place)


def test_labels_of_64_bits_are_told_apart() -> None:
    labels = np.array([2**63, 2**63 + 1, 2**63 + 1], np.uint64).reshape(3, 1, 1)
    assert targets(labels, [(-1, 0, 0)]).ravel().tolist() == [UNKNOWN, APART, NEAR]


def test_only_known_pairs_are_counted_at_their_level() -> None:
    truth = targets(LABELS, OFFSETS)
    made = np.random.default_rng(3).integers(0, LEVELS, truth.shape).astype(np.uint8)
    levels = histograms(made, truth)
    assert levels.shape == (len(OFFSETS), 2, LEVELS)
    for k, side, level in itertools.product(range(len(OFFSETS)), (APART, NEAR), (0, 7, 255)):
        assert levels[k, side, level] == ((made[k] == level) & (truth[k] == side)).sum()


def test_the_area_is_the_chance_that_near_is_higher_than_apart() -> None:
    levels = np.random.default_rng(4).integers(0, 3, (2, 2, LEVELS))
    each = []
    for apart, near in levels:
        low, high = (np.repeat(np.arange(LEVELS), kind) for kind in (apart, near))
        each.append((high[:, None] > low).mean() + (high[:, None] == low).mean() / 2)
    assert roc_auc(levels) == pytest.approx(np.mean(each), rel=1e-9)


def test_scores_of_what_is_perfect_inverted_or_constant() -> None:
    truth = targets(LABELS, SOME)
    for made, due in (((truth == NEAR) * 255, 1.0), ((truth != NEAR) * 255, 0.0), (truth * 0 + 99, 0.5)):
        levels = histograms(made.astype(np.uint8), truth)
        assert roc_auc(levels) == pytest.approx(due)
        assert accuracy(levels) == pytest.approx(due)


def test_accuracy_weighs_near_and_apart_alike() -> None:
    levels = np.zeros((1, 2, LEVELS), int)
    levels[0, APART, [127, 128]] = 1, 3  # a quarter right
    levels[0, NEAR, [127, 128]] = 10, 90
    assert accuracy(levels) == pytest.approx((0.25 + 0.9) / 2)


def test_an_offset_without_both_kinds_has_no_score() -> None:
    levels = np.zeros((2, 2, LEVELS), int)
    levels[0, NEAR, 5] = levels[1, NEAR, 200] = levels[1, APART, 3] = 1
    assert roc_auc(levels) == accuracy(levels) == 1.0
    assert np.isnan(roc_auc(levels[:1]))
