"""The bench says when a row is over its limit, and keeps what every run gave; scripts/bench itself is run by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from benchmarks import history, main, report  # noqa: E402  # from scripts, which is not installed
from benchmarks.comparisons.default import AROUND, middle  # noqa: E402
from benchmarks.engine import recorded, scaling, whole_runs  # noqa: E402
from benchmarks.row import Measured, Outcome, Row, Setting  # noqa: E402

from volpipe.inference.output import create_output  # noqa: E402


def values(*values: float) -> Row:
    """Return a row that may be 2, and whose measurements give `values`."""

    def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
        return (Outcome(value, {"ours": value, "theirs": 1.0}) for value in values[:repeats])

    return Row("made", "ours / theirs", 2.0, 1.0, measure, unit="s", is_quick=True)


def bench(monkeypatch: pytest.MonkeyPatch, folder: Path, row: Row, *options: str) -> None:
    monkeypatch.setattr(main, "rows", lambda: {row.name: row})
    monkeypatch.setattr(sys, "argv", ["bench", f"--results={folder}/results", f"--cache={folder}/cache", *options])
    main.main()


@pytest.mark.parametrize(("measured", "is_over"), [([1.5, 9.0, 2.0], False), ([1.5, 9.0, 2.1], True)])
def test_a_row_above_its_limit_fails_the_script_after_all_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Sequence[float], is_over: bool
) -> None:
    if is_over:
        with pytest.raises(SystemExit, match="over their limits: made"):
            bench(monkeypatch, tmp_path, values(*measured))
    else:
        bench(monkeypatch, tmp_path, values(*measured))
    (file,) = (tmp_path / "results").glob("*.json")
    assert file.name.startswith(history.commit())
    assert json.loads(file.read_text())["rows"][0]["median"] == sorted(measured)[1]


def test_the_short_form_measures_quick_rows_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench(monkeypatch, tmp_path, values(1.0, 9.0, 9.0), "--short")
    (file,) = (tmp_path / "results").glob("*.json")
    assert len(json.loads(file.read_text())["rows"][0]["outcomes"]) == 1
    assert any(row.is_quick for row in main.rows().values())


def stored(folder: Path, name: str, at: str, median: float, **machine: object) -> None:
    """Store what a run of the bench at commit `name` gave then."""
    tree = report.tree([Measured(values(), [Outcome(median, {})])], repeats=1, short=False)
    tree["machine"] |= {"time": at} | machine
    (folder / f"{name}-{at}.json").write_text(json.dumps(tree))


def test_a_step_between_commits_shows_in_the_order_of_time(tmp_path: Path) -> None:
    stored(tmp_path, "ccc", "2026-11-03T00:00:00Z", 1.6)
    stored(tmp_path, "aaa", "2026-11-01T00:00:00Z", 1.0)
    stored(tmp_path, "bbb", "2026-11-02T00:00:00Z", 1.5)
    stored(tmp_path, "ddd", "2026-11-04T00:00:00Z", 9.0, cores=-1)  # another machine
    points = list(history.points(tmp_path, short=False))
    assert [(point.commit, point.median) for point in points] == [("aaa", 1.0), ("bbb", 1.5), ("ccc", 1.6)]
    (line,) = zip(*(column.cells for column in history.table(points).columns), strict=True)
    assert line == ("made", "2.00 s", "1.00 s", "1.60 s", "▅▇▇", "ccc", "1 → 1.5 at bbb, 2026-11-02")
    assert list(history.points(tmp_path, short=True)) == []


def test_the_history_is_shown_and_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(SystemExit, match="has no results of such rows and sizes of a machine like this one"):
        bench(monkeypatch, tmp_path, values(), "--history")
    stored(tmp_path / "results", "aaa", "2026-11-01T00:00:00Z", 2.5)
    bench(monkeypatch, tmp_path, values(), "--history")
    assert "2.50 s" in capsys.readouterr().out
    assert len(list((tmp_path / "results").iterdir())) == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"machine": {}}'])
def test_a_file_that_is_no_result_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "aaa-1.json").write_text(content)
    with pytest.raises(ValueError, match=r"aaa-1\.json is no result of the bench"):
        list(history.points(tmp_path, short=False))


def test_every_row_has_a_limit_that_its_aim_keeps() -> None:
    for row in main.rows().values():
        assert row.aim <= row.most, row.name


@pytest.mark.parametrize("side", [256, 512])
def test_the_cube_that_programs_are_compared_in_lies_in_the_volume_with_all_that_the_net_sees(side: int) -> None:
    shape = (side, side, side)
    seen = middle(shape, AROUND)
    assert min(seen.start) >= 0
    assert max(seen.stop) <= side
    assert [seen.stop[axis] - middle(shape).stop[axis] for axis in range(3)] == [AROUND] * 3


def test_a_simulated_task_takes_a_recorded_time_scaled_to_the_wanted_mean(tmp_path: Path) -> None:
    """The times of a run are shares of the mean of its blocks; two simulations draw the same ones."""
    runs = json.loads(recorded.FILE.read_text())["seconds"].values()
    known = [5 * s / (sum(run["infer"]) / len(run["infer"])) for run in runs for s in run["infer"]]
    assert sum(known) / len(known) == pytest.approx(5)
    draws = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        plan = whole_runs.planned(tmp_path / name, 20)
        create_output(plan, {})  # stand-ins write to it
        tasks = scaling.Tasks(plan, 4, 5.0)
        draws.append([tasks.task("infer", [block])[1] for block in range(20)])
    assert draws[0] == draws[1]
    assert all(min(abs(seconds - other) for other in known) < 1e-9 for seconds in draws[0])
