"""What weights learned from stands beside them, and volumes of other voxels or inverted ones are told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
from conftest import ROOT, examples
from hypothesis import given
from hypothesis import strategies as st

import volpipe as vp
from volpipe.geometry.grid import Box
from volpipe.nets.trained import Trained, contrast_notes, trained_path, unknown_size_note, voxel_notes
from volpipe.recipes.inference import NetChoice
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.volume import Volume

SHAPE = (24, 64, 64)
RAW = SyntheticVolume(SHAPE, 6).raw(Box.from_shape(SHAPE))
DARK, BRIGHT, UNKNOWN = (Trained(line_contrasts=values) for values in ((0.3, 0.2), (-0.3,), (0.3, -0.3)))
SHIPPED = sorted((ROOT / "models").glob("*.trained.json"))
LENGTH = st.sampled_from((4.0, 4.3, 4.6, 8.0, 8.7, 10.0, 30.0, 40.0))


def stored(folder: Path, data: np.ndarray, size: Lengths | None = None) -> Volume:
    np.save(folder / "v.npy", data)
    return replace(vp.open(folder / "v.npy"), voxel_size_nm=size)


@pytest.mark.parametrize(
    ("size", "known", "sentence"),
    [
        ((10, 10, 10), [(40, 10, 10)], "learned from voxels of 40 × 10 × 10 nm (z, y, x), and those of"),
        ((100, 100, 100), [(10, 10, 10)], "are 100 × 100 × 100 nm: its output may be of no use there"),
        ((10, 10, 40), [(40, 10, 10)], "they are longest along x, and in training along z. Exchange the axes"),
        ((10, 40, 10), [(40, 10, 10), (30, 6, 6)], "longest along y, and in training along z. Exchange"),
        ((40, 10, 10), [(10, 10, 10)], "its output may be of no use there"),
        ((12, 8, 8), [(16, 8, 8), (10, 10, 10)], "of 16 × 8 × 8 or 10 × 10 × 10 nm"),
        ((40, 10, 11.2), [(40, 10, 10)], "are 40 × 10 × 11.2 nm"),
        ((40, 10, 8.9), [(40, 10, 10)], "are 40 × 10 × 8.9 nm"),
        ((40, 10, 11), [(40, 10, 10)], ""),
        ((36.4, 10, 9.1), [(40, 10, 10)], ""),
        ((16, 8, 8), [(10, 10, 10), (16, 8, 8)], ""),
        ((16, 8, 8), [], ""),
        (None, [(16, 8, 8)], ""),
    ],
)
def test_other_voxels_than_those_of_the_training_are_told(
    tmp_path: Path, size: Lengths | None, known: list[Lengths], sentence: str
) -> None:
    notes = voxel_notes(stored(tmp_path, RAW, size), Trained(voxel_sizes_nm=tuple(known)), "net")
    assert bool(notes) == bool(sentence) and all(sentence in note for note in notes)


@given(size=st.tuples(LENGTH, LENGTH, LENGTH), known=st.lists(st.tuples(LENGTH, LENGTH, LENGTH), max_size=3))
@examples(100, 1000)
def test_voxels_are_told_of_unless_they_are_within_a_tenth_of_some(
    tmp_path: Path, size: Lengths, known: list[Lengths]
) -> None:
    volume = stored(tmp_path, RAW[:2, :2, :2], size)
    ratios = [[max(a / b, b / a) for a, b in zip(size, other, strict=True)] for other in known]
    if any(abs(ratio - 1.1) < 1e-3 for each in ratios for ratio in each):
        return
    is_alike = any(max(each) < 1.1 for each in ratios)
    assert bool(voxel_notes(volume, Trained(voxel_sizes_nm=tuple(known)), "net")) == (bool(known) and not is_alike)


def test_a_volume_of_unknown_voxels_is_told_which_were_learned_from(tmp_path: Path) -> None:
    trained = Trained(voxel_sizes_nm=((40, 10, 10),))
    assert "40 × 10 × 10 nm; give input.voxel_size_nm" in unknown_size_note(stored(tmp_path, RAW), trained)
    assert not unknown_size_note(stored(tmp_path, RAW, (1, 1, 1)), trained)
    assert not unknown_size_note(stored(tmp_path, RAW), Trained()) and not unknown_size_note(
        stored(tmp_path, RAW), None
    )


@pytest.mark.parametrize(
    ("data", "trained", "is_told"),
    [
        (RAW, DARK, False), (255 - RAW, DARK, True), (RAW, BRIGHT, True), (255 - RAW, BRIGHT, False),
        (255 - RAW, UNKNOWN, False), (255 - RAW, Trained(), False), (255 - RAW, Trained(line_contrasts=(0.05,)), False),
        (np.random.default_rng(0).integers(0, 255, SHAPE, np.uint8), DARK, False),
    ],
)  # fmt: skip
def test_inverted_volumes_are_told(tmp_path: Path, data: np.ndarray, trained: Trained, is_told: bool) -> None:
    notes = contrast_notes(stored(tmp_path, data), trained, "net")
    assert bool(notes) == is_told and all("looks inverted for net net" in note for note in notes)


def test_what_is_stored_beside_weights_is_found(tmp_path: Path) -> None:
    trained = Trained(voxel_sizes_nm=((4, 4, 40),), line_contrasts=(0.5,))
    (tmp_path / "w").mkdir()
    trained.store(tmp_path / "w" / "mine.v2.pt")
    assert Trained.beside(NetChoice(name="a.py:a", weights="w/mine.v2.pt"), str(tmp_path)) == trained
    assert Trained.beside(NetChoice(name="a.py:a", weights="w/mine.v3.pt"), str(tmp_path)) is None
    assert Trained.beside(NetChoice(name="a.py:a"), str(tmp_path)) is None
    trained_path(tmp_path / "w" / "mine.v2.pt").write_text('{"voxel_sizes_nm": [[1, 2]]}')
    assert Trained.beside(NetChoice(name="a.py:a", weights="w/mine.v2.pt"), str(tmp_path)) is None


def test_all_shipped_weights_say_what_they_learned_from_as_their_cards_do() -> None:
    weights = sorted((ROOT / "models").glob("*.safetensors"))
    assert [trained_path(path) for path in weights] == SHIPPED
    for path in SHIPPED:
        trained = Trained.model_validate_json(path.read_bytes())
        assert trained.voxel_sizes_nm and min(trained.line_contrasts) > 0
        card = path.with_name(path.name.replace(".trained.json", ".md")).read_text(encoding="utf-8")
        (row,) = re.findall(r"^\| voxels of the training \| (.*) nm", card, re.MULTILINE)
        sizes = [tuple(map(float, size.split(" × "))) for size in re.split(", | or ", row)]
        assert tuple(sizes) == trained.voxel_sizes_nm
        assert {*json.loads(path.read_text())} == {"voxel_sizes_nm", "line_contrasts"}


@pytest.mark.real
@pytest.mark.parametrize("weights", SHIPPED)
@pytest.mark.parametrize("name", ["fibsem_medulla/ts2_raw", "fibsem_medulla/tiny96_raw", "gala_tinyfib/test_image"])
def test_shipped_nets_are_told_of_real_volumes_that_are_inverted_alone(
    tmp_path: Path, shared: Path, name: str, weights: Path
) -> None:
    data, trained = tifffile.imread(shared / f"{name}.tif"), Trained.model_validate_json(weights.read_bytes())
    assert contrast_notes(stored(tmp_path, data), trained, "net") == []
    assert len(contrast_notes(stored(tmp_path, 255 - data), trained, "net")) == 1
