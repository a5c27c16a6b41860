"""The learning rate of every step, by each schedule, against its formula."""

from __future__ import annotations

import math

import pytest

from volpipe.recipes.training import Steps


def rates(**given: object) -> list[float]:
    steps = Steps.model_validate({"steps": 10, "warm_up": 0, "learning_rate": 2.0} | given)
    return [steps.rate(step) for step in range(10)]


def test_a_constant_rate_rises_over_its_warm_up() -> None:
    assert rates(schedule="constant") == [2.0] * 10
    assert rates(schedule="constant", warm_up=4) == [0.5, 1.0, 1.5, *[2.0] * 7]


def test_a_cosine_falls_to_nothing() -> None:
    expected = [1 + math.cos(math.pi * step / 10) for step in range(10)]
    assert rates(schedule="cosine") == pytest.approx(expected)
    assert rates(schedule="cosine", warm_up=2) == pytest.approx([expected[0] / 2, *expected[1:]])
    later = Steps(steps=10, warm_up=0, learning_rate=2.0, schedule="cosine")
    assert [later.rate(step, 4) for step in range(4, 10)] == pytest.approx(
        [1 + math.cos(math.pi * step / 6) for step in range(6)]
    )


def test_a_trapezoid_falls_in_a_line_over_its_last_steps() -> None:
    assert rates(schedule="trapezoid", decay=4) == pytest.approx([*[2.0] * 7, 1.5, 1.0, 0.5])
    assert rates(schedule="trapezoid") == [2.0] * 10
