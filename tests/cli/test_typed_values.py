"""Values of options as they are typed: which are numbers, shares, times and sizes; and what Tab offers for files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from volpipe.cli import options
from volpipe.errors import VolpipeError

GIVEN: Any = SimpleNamespace(opts=["--size"])


@pytest.mark.parametrize(
    ("parse", "taken", "refused"),
    [
        (options.whole, {"0": 0, "7": 7}, {"-1": "from 0", "1.5": "from 0", "x": "from 0"}),
        (options.positive, {"1": 1, "7": 7}, {"0": "from 1", "": "from 1"}),
        (
            options.share,
            {"0": 0.0, "0.25": 0.25, "1": 1.0},
            {"1.01": "from 0 to 1", "-0.1": "number from 0", "x": "a num"},
        ),
        (options.amount, {"0": 0.0, "1e3": 1000.0}, {"-1": "is not a number from 0", "inf": "is not a number"}),
        (options.number, {"-2.5": -2.5}, {"nan": "is not a number", "inf": "is not a number", "x": "is not a number"}),
        (options.seconds, {"0": 0.0, "0.1": 0.1, "9": 9.0}, {"0.09": "is less than 0.1 s", "-1": "a number from 0"}),
        (options.pause, {"0.1": 0.1, "60": 60.0}, {"0": "is no pause; give 0.1 s or more", "0.05": "is less than"}),
    ],
)
def test_a_number_is_taken_within_its_bounds(
    parse: Callable[[str], float], taken: dict[str, float], refused: dict[str, str]
) -> None:
    assert {text: parse(text) for text in taken} == taken
    for text, words in refused.items():
        with pytest.raises(typer.BadParameter, match=words):
            parse(text)


def test_sizes_are_three_numbers_or_one_for_all() -> None:
    assert options.sizes(GIVEN, None) is None and options.voxel(GIVEN, None) is None
    for text, expected in (("64", (64, 64, 64)), ("1,2,3", (1, 2, 3)), ("1x2x3", (1, 2, 3))):
        assert options.sizes(GIVEN, text) == expected
    for text in ("", "1,2", "1,2,0", "0", "a", "1,2,3,4"):
        with pytest.raises(VolpipeError, match=f"--size '{text}': write one number above 0, or three, z,y,x, such as"):
            options.sizes(GIVEN, text)
    assert options.margin(GIVEN, "0,0,4") == (0, 0, 4) and options.voxel(GIVEN, "-1,0,4") == (-1, 0, 4)
    with pytest.raises(VolpipeError, match="--size '4': write three numbers, z,y,x, such as 4,0,0"):
        options.margin(GIVEN, "4")
    with pytest.raises(VolpipeError, match="--size '4,0,-1': give numbers from 0 up"):
        options.margin(GIVEN, "4,0,-1")
    with pytest.raises(VolpipeError, match="write three whole numbers, z,y,x, such as 24,512,512"):
        options.voxel(GIVEN, "1,2")


def test_an_input_that_is_not_complete_is_read_where_that_is_asked_for() -> None:
    assert (options.of_incomplete(True), options.of_incomplete(False)) == (["input.incomplete=true"], [])


def test_tab_offers_files_of_its_kinds_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.toml", "a.txt", "ab.csv", "b.toml", ".a.toml", "a.png", "a.pdf"):
        (tmp_path / name).touch()
    (tmp_path / "a.n5").mkdir()
    (tmp_path / "a.n5" / "c.toml").touch()

    def offered(complete: Callable[[str], options.Choices], begun: str) -> list[str]:
        return [name for name, _ in complete(begun)]

    assert offered(options.complete_volumes, "a") == ["a.n5/", "a.png", "a.toml", "a.txt", "ab.csv"]
    assert offered(options.complete_volumes, "a.n5/") == ["a.n5/c.toml"]
    assert offered(options.complete_volumes, "a.n5/x") == [] == offered(options.complete_volumes, "none/x")
    assert offered(options.complete_recipe, "a") == ["affinities", "a.n5/", "a.toml"]
    assert offered(options.complete_start, "a.") == ["a.n5/"]
    assert offered(options.complete_net, "m") == ["mean"]
    assert offered(options.complete_site, "thr") == ["threads"]
