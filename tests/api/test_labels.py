"""Labels and scores by the public functions: by name, by sections, on sites and on pools that are started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import make
from inline import Inline
from skimage import measure

import volpipe as vp
from volpipe.errors import RecipeError, VolpipeError

BLOCKS: dict[str, Any] = {"block": [8, 8, 8], "chunk": [4, 4, 4], "levels": 0}
COMPONENTS: dict[str, Any] = {"input": {"kind": "foreground"}, "objects": {"method": "components"}, "output": BLOCKS}


@pytest.fixture
def mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Random voxels (z, y, x) that are foreground, stored at f.zarr in the current folder."""
    monkeypatch.chdir(tmp_path)
    mask = np.random.default_rng(0).random((12, 13, 11)) < 0.3
    make(tmp_path / "f.zarr", mask.astype(np.uint8) * 255)
    return mask


def labels_in(result: vp.SegmentationResult) -> np.ndarray:
    return np.asarray(vp.open(result.out).open().read_raw(...))


def test_objects_are_made_by_sections_on_a_pool_that_stays_up(mask: np.ndarray, tmp_path: Path) -> None:
    pool, plans, times, stages = Inline(), [], [], set()
    result = vp.segment(
        "f.zarr", COMPONENTS, site=pool, on_plan=plans.append, on_estimate=times.append,
        on_progress=lambda progress: stages.update(s.name for s in progress.stages if s.num_done == s.num_units),
    )  # fmt: skip
    assert result.out == str(tmp_path / "f_labels.zarr")
    np.testing.assert_array_equal(labels_in(result), measure.label(mask, connectivity=1))
    assert (len(plans), len(times)) == (1, 1)
    assert {"pieces", "edges", "solve", "number", "name", "graph", "paint"} <= stages
    assert vp.segment("f.zarr", COMPONENTS, site=pool).was_complete
    assert vp.segment("f.zarr", COMPONENTS, out="again.zarr", site=pool).num_objects == result.num_objects


def test_objects_are_made_by_a_file_on_a_site(mask: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[input]\nkind = "foreground"\n[objects]\nmethod = "watershed"\n')
    settings = ["objects.method=components", "output.block=[8,8,8]", "output.chunk=[4,4,4]"]
    result = vp.segment("f.zarr", "mine.toml", out="l.zarr", site="threads", settings=settings)
    np.testing.assert_array_equal(labels_in(result), measure.label(mask, connectivity=1))


@pytest.mark.usefixtures("mask")
def test_what_is_wrong_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"unknown key objects.treshold \(did you mean"):
        vp.segment("f.zarr", {"objects": {"treshold": 1}}, site=Inline())
    with pytest.raises(RecipeError, match=r"no recipe at nothing\.toml"):
        vp.segment("f.zarr", "nothing.toml", site=Inline())
    with pytest.raises(VolpipeError, match="labels are written as OME-Zarr"):
        vp.segment("f.zarr", COMPONENTS, out="l.n5", site=Inline())
    with pytest.raises(VolpipeError, match="is empty or leaves the output"):
        vp.evaluate("f.zarr", "f.zarr", margin=(6, 6, 6), labels=True, site=Inline())
    assert [path.name for path in tmp_path.iterdir()] == ["f.zarr"]


def test_an_image_is_scored_against_another(mask: np.ndarray, tmp_path: Path) -> None:
    make(tmp_path / "g.zarr", np.where(mask, 200, 5).astype(np.uint8))
    calls: list[int] = []
    result = vp.evaluate(
        "g.zarr", "f.zarr", site=Inline(), on_progress=lambda progress: calls.append(progress.stages[0].num_done)
    )
    error = np.where(mask, 55.0, 5.0)
    assert isinstance(result.scores, dict)
    assert result.scores["output"].psnr == pytest.approx(10 * np.log10(255**2 / (error**2).mean()))
    assert calls[-1] == 1
    assert vp.evaluate("g.zarr", "f.zarr", site="threads").scores == result.scores
    assert result.to_json()["reference"] == str(vp.open("f.zarr"))
    assert f"<td>output</td><td>{result.scores['output'].psnr:.2f}</td>" in result._repr_html_()
    assert repr(result).startswith("<EvaluationResult: output g.zarr, reference f.zarr, time ")
    result.draw(tmp_path / "p.png")
    assert (tmp_path / "p.png").is_file()


def test_labels_are_scored_against_others(mask: np.ndarray, tmp_path: Path) -> None:
    result = vp.segment("f.zarr", COMPONENTS, site=Inline())
    make(tmp_path / "truth.zarr", measure.label(mask, connectivity=1).astype(np.uint32))
    sizes = np.bincount(np.asarray(vp.open(result.out)).ravel())[1:]
    assert [int(row["voxels"]) for row in result.largest(2)] == sorted(sizes.tolist())[::-1][:2]
    assert f"<td>{sizes.argmax() + 1}</td><td>{sizes.max()}</td>" in result._repr_html_()
    scores = vp.evaluate(result.out, "truth.zarr", labels=True, site=Inline()).scores
    assert not isinstance(scores, dict)
    assert (scores.split, scores.merge, scores.rand_error) == (0, 0, 0)


@pytest.mark.usefixtures("mask")
def test_reports_stand_for_their_outputs(tmp_path: Path) -> None:
    volume = vp.open("f.zarr")
    report = vp.run(volume, {"net": {"name": "identity"}}, out="out.zarr", site=Inline())
    assert isinstance(report, vp.Report)
    result = vp.segment(report, COMPONENTS, out="l.zarr", site=Inline())
    assert result.num_objects == vp.segment("out.zarr", COMPONENTS, out="again.zarr", site=Inline()).num_objects
    scores = [vp.evaluate(labels, "again.zarr", labels=True, site=Inline()).scores for labels in (result, "l.zarr")]
    assert scores[0] == scores[1] is not None
    explorer = vp.explore(volume, report, labels=result)
    assert [str(image.levels[0].path) for image in explorer.images] == [
        str(tmp_path / n) for n in ("f.zarr", "out.zarr")
    ]
    assert explorer.labels is not None and explorer.labels.levels[0].path == result.out
    with vp.view(result, report) as viewer:
        assert [layer.name for layer in viewer._service.scene.layers][:2] == ["out s0", "l s0"]


@pytest.mark.usefixtures("mask")
def test_what_is_no_place_of_a_volume_is_refused_by_its_name() -> None:
    volume, other = vp.open("f.zarr"), np.zeros((4, 4, 4))
    calls: dict[str, Any] = {
        "affinities is ndarray; give a path, a volume, or what vp.run": lambda: vp.segment(other),  # type: ignore[arg-type]
        "affinities is opened by workers, by its location; give '.*f.zarr'": lambda: vp.segment(volume),  # type: ignore[arg-type]
        "reference is opened by workers": lambda: vp.evaluate("f.zarr", volume),  # type: ignore[arg-type]
        "labels is ndarray; give a path": lambda: vp.explore(volume, labels=other),  # type: ignore[arg-type]
        "output is int; give a path": lambda: vp.view(3),  # type: ignore[arg-type]
    }
    for sentence, call in calls.items():
        with pytest.raises(VolpipeError, match=sentence):
            call()
