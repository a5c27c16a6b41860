"""What the page of a training shows of its log: which charts, of which values, and which axis."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from volpipe.recipes.training import LOSSES
from volpipe.reporting.page import Chart, Item, Sentence, Sheet
from volpipe.training.pages import curve, curves


def shown(folder: Path, *entries: dict[str, float]) -> list[Item]:
    folder.mkdir(exist_ok=True)
    (folder / LOSSES).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return [*curves(folder)]


@pytest.mark.parametrize(
    ("values", "is_wide", "scale"),
    [
        ([1.0, 9.0], True, {"zero": False}), ([1.0, 10.0], True, {"zero": False}), ([1.0, 10.1], True, {"type": "log"}),
        ([1.0, 11.0], False, {"zero": False}), ([0.0, 11.0], True, {"zero": False}),
        ([-1.0, 1.0, 11.0], True, {"zero": False}), ([], True, {"zero": False}),
    ],
)  # fmt: skip
def test_an_axis_is_logarithmic_where_values_span_a_decade(
    values: list[float], is_wide: bool, scale: dict[str, object]
) -> None:
    chart = curve("Losses", "loss", {"a": list(enumerate(values))}, is_wide=is_wide)
    encoding = chart.changes["encoding"]
    assert encoding["y"] == {"title": "loss", "scale": scale}  # type: ignore[index]
    assert encoding["color"] == {"legend": None}  # type: ignore[index]
    assert chart.data == {"series": ["a"] * len(values), "x": [*range(len(values))], "y": values}


def test_points_are_drawn_where_they_are_few_and_what_is_not_finite_is_left_out() -> None:
    few, many = ([(i, 1.0) for i in range(n)] for n in (40, 41))
    assert [curve("", "", {"a": some}).changes["mark"] for some in (few, many)] == [{"point": True}, {"point": False}]
    two = curve("", "", {"a": many, "b": few[:39]})
    assert two.changes["mark"] == {"point": True} and "color" not in two.changes["encoding"]  # type: ignore[operator]
    holes = curve("", "", {"a": [(0, float("nan")), (1, 2.0), (2, float("inf"))]})
    assert holes.data == {"series": ["a"], "x": [1], "y": [2.0]}


def test_each_score_has_a_chart_and_single_values_a_table(tmp_path: Path) -> None:
    step = {"loss": 2.0, "l1": 1.0, "rate": 0.1, "seconds": 3.0, "waited": 1.0, "norm": 5.0, "time": 7.0}
    first, second = ({"step": i} | step for i in (1, 2))
    items = shown(tmp_path / "a", first | {"psnr": 20.5}, second | {"dice a": 0.5})
    charts = {item.title: set(item.data["series"]) for item in items if isinstance(item, Chart)}
    assert charts == {"Losses": {"loss", "l1"}, "Learning rate": {"rate"}}
    assert [(item.names, item.rows) for item in items if isinstance(item, Sheet)] == [
        (("", "value", "after step"), [("psnr", "20.5", "1")])
    ]
    assert not [item for item in items if isinstance(item, Sentence)]
    (note,) = [item for item in shown(tmp_path / "b", first, second) if isinstance(item, Sentence)]
    assert note.text.startswith("Nothing was held out and scored: data.held_out and train.validate_every")
    assert [type(item) for item in shown(tmp_path / "c")] == [Sentence]
