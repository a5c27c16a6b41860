"""Classes that are given as objects are told, and objects are not taken for classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from command import Give, giver

import volpipe as vp
from volpipe.geometry.grid import Box
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.volumes.label_values import class_notes

SHAPE = (48, 64, 64)
CELLS = SyntheticVolume(SHAPE, 2).labels(Box.from_shape(SHAPE))
Z, Y, X = np.mgrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
APART = (Z % 16 < 10) & (Y % 16 < 10) & (X % 16 < 10)  # 48 cubes that touch nowhere
NUMBERED = (1 + Z // 16 * 16 + Y // 16 * 4 + X // 16) * APART
ONE, CLASSES = "has one label alone", "looks like a map of classes"


def told(folder: Path, data: np.ndarray, **options: object) -> list[str]:
    np.save(folder / "labels.npy", data)
    return class_notes(vp.open(folder / "labels.npy"), None, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ((CELLS > 0).astype(np.uint8), ONE),
        (APART.astype(np.uint16), ONE),
        (APART.astype(np.uint8) * 255, ONE),
        (np.ones(SHAPE, np.int64), ONE),
        (APART * np.uint8(2) - (Z < 16) * APART.astype(np.uint8), CLASSES),
        (APART * (1 + Z // 16 % 3), CLASSES),
        (np.where(APART & (Z < 40), 1, np.where(APART, 2**63, 0)).astype(np.uint64), CLASSES),
    ],
)
def test_classes_are_told(tmp_path: Path, labels: np.ndarray, sentence: str) -> None:
    (note,) = told(tmp_path, labels)
    assert sentence in note and "objects.method=components" in note


@pytest.mark.parametrize(
    "labels",
    [
        CELLS, CELLS.astype(np.uint16), NUMBERED, NUMBERED.astype(np.int32) - (NUMBERED == 0), NUMBERED * 2**40,
        np.zeros(SHAPE, np.uint8), (1 + (X >= 32)).astype(np.uint8), 1 + X // 16 + 4 * (Y // 32),
    ],
)  # fmt: skip
def test_nothing_is_told_of_objects(tmp_path: Path, labels: np.ndarray) -> None:
    assert told(tmp_path, labels) == []


def test_the_parts_are_counted_that_touch_nowhere(tmp_path: Path) -> None:
    (note,) = told(tmp_path, APART.astype(np.uint8))
    assert "1, in 48 parts that touch nowhere" in note
    (note,) = told(tmp_path, APART.astype(np.uint8), within=Box((0, 0, 0), (16, 64, 64)))
    assert "1, in 16 parts that touch nowhere" in note


def test_what_is_advised_numbers_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (note,) = told(tmp_path, APART.astype(np.uint8))
    command = note.partition("`volpipe ")[2].partition("`")[0].replace("LABELS", "labels.npy")
    give: Give = giver(tmp_path, monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    give(*command.split(), "-o", "objects.zarr", "--config", "threads")
    objects = vp.open("objects.zarr").open()[...]
    pairs = np.unique(np.stack([objects.ravel(), NUMBERED.ravel()]), axis=1)
    assert pairs.shape[1] == len(np.unique(NUMBERED)) == len(np.unique(objects))


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "is_told"),
    [
        ("fibsem_medulla/ts2_bodies_gt.tif", False), ("fibsem_medulla/ts2_watershed_overseg.tif", False),
        ("fibsem_medulla/tiny96_gt.tif", False), ("gala_tinyfib/train_gt.tif", False),
        ("gala_tinyfib/test_gt.tif", False), ("confocal_plant/1135_label.tif", False),
        ("snemi_mini/train-labels.tif", False), ("vnc_sstem_NC/stack1_z0-5_membranes.tif", True),
        ("vnc_sstem_NC/stack1_z0-5_mitochondria.tif", True), ("vnc_sstem_NC/stack1_z0-5_synapses.tif", True),
        ("vnc_sstem_NC/stack1_z0-5_labels.tif", True),
    ],
)  # fmt: skip
def test_real_classes_are_told_and_real_objects_are_not(shared: Path, name: str, is_told: bool) -> None:
    assert bool(class_notes(vp.open(shared / name), None)) == is_told
    if not is_told:
        assert class_notes(vp.open(shared / name), None, Box((0, 0, 0), (32, 64, 64))) == []


@pytest.mark.real
def test_real_objects_as_one_class_are_told(tmp_path: Path, shared: Path) -> None:
    labels = tifffile.imread(shared / "gala_tinyfib" / "test_gt.tif")
    (note,) = told(tmp_path, (labels > 0).astype(np.uint8))
    assert ONE in note
