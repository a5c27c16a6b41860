"""Values that are not what they are meant as are refused or told, by a sample that is spread over the volume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from volumes import noise

import volpipe as vp
from volpipe.errors import PlanError
from volpipe.geometry.grid import Box
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.volumes.values import Sample, check_probabilities, grey_notes, image_share, labels_note, take_sample

SHAPE = (40, 64, 72)
RAW = SyntheticVolume(SHAPE, 3).raw(Box.from_shape(SHAPE))
INSIDE = 1 / (1 + np.exp((90.0 - RAW) / 3))  # a map of probabilities, 0 to 1
LABELS = np.kron(np.arange(1, 121).reshape(5, 4, 6), np.ones((8, 16, 12), int))
EMPTY = np.zeros(SHAPE)


def sampled(folder: Path, data: np.ndarray) -> Sample:
    np.save(folder / "data.npy", data)
    sample = take_sample(vp.open(folder / "data.npy"))
    assert sample is not None
    return sample


@pytest.mark.parametrize(
    ("data", "top", "sentence"),
    [
        ((INSIDE * 255).astype(np.float32), 1, r"float32 voxels of .* affinities go from 0 to 1 .*range=\[0, 255\]"),
        ((INSIDE * 100).astype(np.float64), 1, r"range=\[0, 100\]"),
        ((INSIDE * 255).astype(np.uint16), 65535, r"uint16 voxels of 0 to 255 .*go from 0 to 65535 .*range=\[0, 255\]"),
        ((INSIDE > 0.5).astype(np.uint8), 255, r"uint8 voxels of 0 to 1 .*range=\[0, 1\]"),
        ((RAW / 3 - 30).astype(np.float32), 1, "numbers of a net before its sigmoid have none"),
    ],
)
def test_values_that_are_no_probabilities_are_refused_unless_they_are_given(
    data: np.ndarray, top: float, sentence: str, tmp_path: Path
) -> None:
    sample = sampled(tmp_path, data)
    with pytest.raises(PlanError, match=sentence):
        check_probabilities(sample, "affinities", (0.0, top), "input.range")
    check_probabilities(sample, "affinities", (0.0, top), "")


@pytest.mark.parametrize(
    ("data", "kind", "top", "sentence"),
    [
        (EMPTY, "affinities", 1, "of 0 alone in 27 sampled boxes"),
        (EMPTY + 0.5, "membrane", 1, "of 0.5 alone"),
        (np.where(LABELS % 5 == 0, np.nan, INSIDE), "affinities", 1, "has NaN or infinite voxels"),
        (INSIDE * 1.05, "affinities", 1, "what is beyond counts as 0 or 1"),
        ((INSIDE * 100).astype(np.uint8), "affinities", 255, r"set input.range=\[0, 100\]"),
        (RAW, "membrane", 255, "so are grey levels of an image, and few maps of membrane"),
        (np.maximum(INSIDE, LABELS % 3 > 0), "membrane", 1, "is it a map of objects, input.kind=foreground"),
    ],
)
def test_odd_values_are_told(data: np.ndarray, kind: str, top: float, sentence: str, tmp_path: Path) -> None:
    notes = check_probabilities(sampled(tmp_path, data), kind, (0.0, top), "input.range")
    assert [note for note in notes if sentence.replace("\\", "") in note]


@pytest.mark.parametrize("data", [INSIDE, (INSIDE * 255).astype(np.uint8), (INSIDE * 65535).astype(np.uint16)])
def test_nothing_is_told_of_probabilities(data: np.ndarray, tmp_path: Path) -> None:
    top = 1.0 if data.dtype.kind == "f" else float(np.iinfo(data.dtype).max)
    assert check_probabilities(sampled(tmp_path, data), "affinities", (0.0, top), "input.range") == []


@pytest.mark.parametrize(
    ("data", "is_labels"),
    [
        (LABELS.astype(np.uint16), True),
        ((LABELS % 19).astype(np.uint8), True),
        (RAW, False),
        (np.pad(RAW, 30, constant_values=77), False),  # padded by one value
        ((RAW > 100).astype(np.uint8) * 255, False),  # a mask
        (EMPTY.astype(np.uint8), False),
    ],
)
def test_labels_are_told_from_images(data: np.ndarray, is_labels: bool, tmp_path: Path) -> None:
    sample = sampled(tmp_path, data)
    assert bool(labels_note(sample, "")) == is_labels
    assert (image_share(sample) is not None) == (data is RAW)


def test_a_sample_sees_what_is_far_from_the_middle_and_leaves_out_what_cannot_be_read(tmp_path: Path) -> None:
    data = np.zeros((96, 96, 96), np.uint16)
    data[60:, 60:, 60:] = 9
    np.save(tmp_path / "far.npy", data)
    volume = vp.open(tmp_path / "far.npy")
    sample = take_sample(volume)
    assert sample is not None and sample.ends == (0.0, 9.0)
    inside = take_sample(volume, Box((61, 61, 61), (96, 96, 96)))
    assert inside is not None and inside.ends == (9.0, 9.0)
    (tmp_path / "far.npy").unlink()
    assert take_sample(volume) is None


@pytest.mark.parametrize(
    ("shift", "scale", "is_told"),
    [(0.5, 0.5, True), (127.5, 127.5, False), (0.0, 255.0, False), (32767.5, 32767.5, True)],
)
def test_a_map_beyond_the_range_is_told(shift: float, scale: float, is_told: bool, tmp_path: Path) -> None:
    notes = grey_notes(sampled(tmp_path, noise(SHAPE)), shift, scale, "normalise.low and high")
    assert bool(notes) == is_told
