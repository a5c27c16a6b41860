"""Labels whose axes were exchanged or mirrored are told by what they are labels of, with what puts them right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile

import volpipe as vp
from volpipe.geometry.grid import Box
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.volumes.orientation import agreements, middle_box, orders, orientation_notes, turned

SHAPE = (64, 64, 64)
TISSUE = SyntheticVolume(SHAPE, 5, (10.0, 10.0, 10.0))
RAW, LABELS = (make(Box.from_shape(SHAPE)) for make in (TISSUE.raw, TISSUE.labels))
ALL = [*orders(SHAPE)]
REAL = (
    ("fibsem_medulla/ts2_raw.tif", "fibsem_medulla/ts2_bodies_gt.tif"),
    ("fibsem_medulla/tiny96_raw.tif", "fibsem_medulla/tiny96_gt.tif"),
    ("gala_tinyfib/train_image.tif", "gala_tinyfib/train_gt.tif"),
    ("gala_tinyfib/test_image.tif", "gala_tinyfib/test_gt.tif"),
    ("confocal_plant/1135_raw.tif", "confocal_plant/1135_label.tif"),
    ("snemi_mini/train-probabilities.tif", "snemi_mini/train-labels.tif"),
)


def told(folder: Path, labels: np.ndarray, target: np.ndarray, start: tuple[int, ...] = (0, 0, 0)) -> list[str]:
    for name, data in (("labels", labels), ("target", target)):
        np.save(folder / f"{name}.npy", data)
    return orientation_notes(vp.open(folder / "labels.npy"), vp.open(folder / "target.npy"), start)


def mended(labels: np.ndarray, note: str) -> np.ndarray:
    """Return `labels` after what a note says that puts them right."""
    result: np.ndarray = eval(note.rpartition(" in numpy ")[2], {"np": np, "labels": labels})
    return result


def test_there_are_48_orders_of_a_cube_and_8_of_a_box_and_each_is_another() -> None:
    numbered = np.arange(27).reshape(3, 3, 3)
    assert len({turned(numbered, order).tobytes() for order in orders((3, 3, 3))}) == 48
    assert len([*orders((3, 4, 5))]) == 8
    assert len([*orders((3, 4, 4))]) == 16


@pytest.mark.parametrize("order", ALL[1:])
def test_any_other_order_agrees_less_than_the_right_one(order: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    wrong = turned(LABELS, order)
    scores = agreements(wrong, RAW, SHAPE, is_image=True)
    best = max(scores, key=lambda each: scores[each])
    assert np.array_equal(turned(wrong, best), LABELS)


@pytest.mark.parametrize("number", [1, 5, 9, 20, 33, 47])
def test_a_note_says_what_puts_labels_right(tmp_path: Path, number: int) -> None:
    wrong = turned(LABELS, ALL[number])
    (note,) = told(tmp_path, wrong, RAW)
    assert np.array_equal(mended(wrong, note), LABELS)
    (note,) = told(tmp_path, wrong, LABELS * 3 + 1)  # a reference beside other labels
    assert np.array_equal(mended(wrong, note), LABELS)


def test_labels_of_a_part_are_laid_where_they_lie(tmp_path: Path) -> None:
    part, around = np.ascontiguousarray(LABELS[:48, :48, :48]), np.pad(RAW, ((7, 0), (3, 0), (0, 5)))
    assert told(tmp_path, part, around, (7, 3, 0)) == []
    wrong = part[:, ::-1]
    (note,) = told(tmp_path, wrong, around, (7, 3, 0))
    assert np.array_equal(mended(wrong, note), part)


@pytest.mark.parametrize(
    ("labels", "target"),
    [
        (LABELS, RAW),
        (LABELS, 255 - RAW),
        (LABELS, RAW.astype(np.float32) / 255),
        (LABELS, np.random.default_rng(0).integers(0, 255, SHAPE, np.uint8)),
        (np.random.default_rng(0).integers(1, 99, SHAPE, np.uint16), RAW),
        (np.zeros(SHAPE, np.uint8), RAW),
        (LABELS, np.full(SHAPE, 7, np.uint8)),
    ],
)
def test_nothing_is_told_of_labels_that_lie_right_or_on_nothing(
    tmp_path: Path, labels: np.ndarray, target: np.ndarray
) -> None:
    assert told(tmp_path, labels, target) == []


@pytest.mark.parametrize("shape", [(10, 20, 30), (7, 900, 900), (301, 302, 5000), (1, 64, 64)])
def test_the_box_lies_in_the_middle_so_that_it_stays_in_any_order(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "v.npy"
    np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    box = middle_box(vp.open(path), vp.open(path))
    assert box is not None
    assert all(a == n - b for a, b, n in zip(box.start, box.stop, shape, strict=True))
    sizes = dict(zip(shape, box.shape, strict=True))
    assert all(sizes[n] == size for n, size in zip(shape, box.shape, strict=True))


@pytest.mark.real
@pytest.mark.parametrize(("image", "labels"), REAL)
def test_real_labels_lie_right_and_are_told_where_they_do_not(
    tmp_path: Path, shared: Path, image: str, labels: str
) -> None:
    raw, truth = (tifffile.imread(shared / name) for name in (image, labels))
    assert told(tmp_path, truth, raw) == []
    for wrong in (
        truth[:, ::-1],
        truth[::-1, :, ::-1],
        *([truth.swapaxes(1, 2)] if len({*truth.shape[1:]}) == 1 else []),
    ):
        (note,) = told(tmp_path, wrong, raw)
        assert np.array_equal(mended(wrong, note), truth)
