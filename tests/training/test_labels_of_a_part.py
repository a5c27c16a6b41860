"""Labels that are a part of their volume, as an array of their own: paired by voxel sizes and origins, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from trainings import made
from volumes import noise, write_volume

import volpipe as vp
from volpipe.errors import PlanError, RunError
from volpipe.geometry.grid import Box
from volpipe.recipes.inference import Normalise
from volpipe.recipes.training import WEIGHTS, Data, TrainRecipe
from volpipe.training.data.augment import PairMaker
from volpipe.training.data.samples import Sampler
from volpipe.training.data.volumes import open_data
from volpipe.training.fine_tuning import StartingWeights, fine_tuning
from volpipe.training.logs import read_log
from volpipe.training.loop import train
from volpipe.volumes import node_cache

SHAPE, SIZE = (24, 30, 36), (30.0, 8.0, 4.0)  # as long along each axis as along no other
PART = Box((4, 6, 8), (20, 22, 28))
ORIGIN = tuple(a * s for a, s in zip(PART.start, SIZE, strict=True))
TEXT = "4:20,6:22,8:28"
ATTRIBUTES: dict[str, object] = {"resolution": SIZE, "offset": ORIGIN}
Write = Callable[[Path, np.ndarray], Path]


def hdf5(path: Path, data: np.ndarray, **attributes: object) -> Path:
    """Write an HDF5 file that has lists in the order z, y, x."""
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        file.create_dataset("a", data=data).attrs.update(attributes or ATTRIBUTES)
    return path.with_suffix(".h5")


def java_n5(path: Path, data: np.ndarray) -> Path:
    """Write N5 as n5-java does: lists in the order x, y, z."""
    write_volume(path, data)
    file = path / "raw" / "attributes.json"
    lists = {"resolution": SIZE[::-1], "offset": ORIGIN[::-1], "units": ["nm"] * 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | lists))
    return path


def cosem_n5(path: Path, data: np.ndarray) -> Path:
    """Write N5 as OpenOrganelle does, with axes by name, in an order of its own."""
    write_volume(path, data)
    file = path / "raw" / "attributes.json"
    order = {"scale": SIZE, "translate": ORIGIN, "axes": "zyx", "units": ["nm"] * 3}
    transform = {key: [*values] for key, values in order.items()}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"transform": transform}))
    return path


def funlib_zarr(path: Path, data: np.ndarray) -> Path:
    array = zarr.create_array(path, data=data, chunks=(8, 8, 8), zarr_format=2)
    array.attrs.update({"voxel_size": SIZE, "offset": ORIGIN, "axis_names": ["z", "y", "x"], "units": ["nm"] * 3})
    return path


def ome_zarr(path: Path, data: np.ndarray, origin: tuple[float, ...] = ORIGIN, unit: str = "micrometer") -> Path:
    factor = 1000 if unit == "micrometer" else 1
    group = zarr.open_group(path, mode="w")
    group.create_array("0", data=data, chunks=(8, 8, 8))
    lists = {"scale": SIZE, "translation": origin}
    steps = [{"type": kind, kind: [n / factor for n in numbers]} for kind, numbers in lists.items() if numbers]
    axes = [{"name": name, "type": "space", "unit": unit} for name in "zyx"]
    levels = [{"path": "0", "coordinateTransformations": steps}]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": levels}]}
    return path


def mrc(path: Path, data: np.ndarray) -> Path:
    tifffile.imwrite(path.with_suffix(".tif"), data)
    view = vp.View(voxel_size_nm=SIZE, origin_nm=ORIGIN)
    vp.convert(vp.open(path.with_suffix(".tif"), view=view), path.with_suffix(".mrc"))
    return path.with_suffix(".mrc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with v.h5, which states its voxel size alone, and whole.h5, labels of its shape that are its voxels."""
    data = np.random.default_rng(5).integers(1, 4, SHAPE).astype(np.uint8)
    for name in ("v", "whole"):
        hdf5(tmp_path / name, data, resolution=SIZE)
    return tmp_path


def labels(folder: Path, box: Box = PART) -> np.ndarray:
    return np.asarray(vp.open(folder / "whole.h5")[box.slices]).astype(np.uint16)


def recipe(*entries: dict[str, object], **sections: object) -> TrainRecipe:
    net = {"name": "unet3d", "options": {"features": [4, 8], "out_channels": 3, "output": "sigmoid"}}
    data = [{"path": "v.h5"} | entry for entry in entries]
    tree = {"net": net, "affinities": {"offsets": [[-1, 0, 0], [0, -1, 0], [0, 0, -1]]}, "data": data}
    return TrainRecipe.model_validate(tree | {"samples": {"shape": (4, 8, 8)}, "train": {"seed": 3}} | sections)


def opened(folder: Path, labels: Path | str, **keys: object) -> Box:
    data = Data.model_validate({"path": "v.h5", "labels": str(labels)} | keys)
    return open_data(data, Normalise(), str(folder)).extent


def same_samples(one: Sampler, other: Sampler) -> None:
    for number in range(12):
        a, b = made(one, number), made(other, number)
        np.testing.assert_array_equal(a.inputs, b.inputs)
        np.testing.assert_array_equal(a.truth, b.truth)


@pytest.mark.parametrize("write", [hdf5, java_n5, cosem_n5, funlib_zarr, ome_zarr, mrc])
def test_windows_are_those_of_labels_of_the_whole_volume_in_that_box(folder: Path, write: Write) -> None:
    path = write(folder / "part", labels(folder))
    assert opened(folder, path) == PART
    part = Sampler(recipe({"labels": str(path)}), (1, 1, 1), str(folder))
    whole = Sampler(recipe({"labels": "whole.h5", "box": TEXT}), (1, 1, 1), str(folder))
    assert {str(part.window(n).box) for n in range(12)} == {str(whole.window(n).box) for n in range(12)}
    same_samples(part, whole)


def test_losses_and_weights_are_those_of_labels_of_the_whole_volume(folder: Path) -> None:
    """Boxes beside labels of a part count in their voxels, shares as well."""
    hdf5(folder / "part", labels(folder))
    sections = {"train": {"steps": 4, "warm_up": 1, "validate_every": 2, "predict_every": 4, "threads": 1}}
    entries = {
        "part": {"labels": "part.h5", "box": ":,0:12,:", "held_out": "75%:,:,:"},
        "nm": {"labels": "part.h5", "box": ":,48nm:144nm,:", "held_out": "480nm:,:,:"},
        "whole": {"labels": "whole.h5", "box": "4:20,6:18,8:28", "held_out": "16:20,6:22,8:28"},
    }
    for name, entry in entries.items():
        train(recipe(entry, **sections), folder / name, str(folder))
    logs = [[{k: v for k, v in line.items() if k in ("loss", "auc")} for line in read_log(folder / n)] for n in entries]
    assert logs[0] == logs[1] == logs[2] and "auc" in logs[0][-1]
    assert len({(folder / name / WEIGHTS).read_bytes() for name in entries}) == 1


def test_what_one_entry_holds_out_is_closed_to_windows_of_others_of_the_same_volume(folder: Path) -> None:
    hdf5(folder / "part", labels(folder))
    entries = {"labels": "part.h5", "held_out": "0:12,:,:"}, {"labels": "whole.h5"}
    sampler = Sampler(recipe(*entries), (1, 1, 1), str(folder))
    held = Box((4, 6, 8), (16, 22, 28))
    assert all((sampler.window(number).box & held).is_empty for number in range(100))


@pytest.mark.parametrize("is_trial", [pytest.param(False, marks=pytest.mark.long), True])
def test_no_voxel_is_read_beside_the_labels(folder: Path, is_trial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by trainings that share a decoded copy, and by one that keeps its volumes on the device."""
    monkeypatch.setenv(node_cache.VARIABLE, str(folder / "node"))
    write_volume(folder / "v.n5", noise(SHAPE), chunk=2)
    attributes = folder / "v.n5" / "raw" / "attributes.json"
    lists = {"resolution": SIZE[::-1], "units": ["nm"] * 3}
    attributes.write_text(json.dumps(json.loads(attributes.read_text()) | lists))
    write_volume(folder / "whole.n5", noise(SHAPE) % 3 + 1)
    path = hdf5(folder / "part", noise(SHAPE)[PART.slices] % 3 + 1)
    whole = Sampler(recipe({"path": "v.n5", "labels": "whole.n5", "box": TEXT}), (1, 1, 1), str(folder))
    expected = [made(whole, number) for number in range(12)]
    near = [range(a // 2, -(-b // 2)) for a, b in zip(PART.start, PART.stop, strict=True)][::-1]
    for file in attributes.parent.glob("*/*/*"):
        if not all(int(i) in side for i, side in zip(file.parts[-3:], near, strict=True)):
            file.write_bytes(b"no chunk")
    learning = recipe({"path": "v.n5", "labels": str(path)}, train={"seed": 3, "steps": 1000})
    sampler = Sampler(learning, (1, 1, 1), str(folder), is_trial=is_trial)
    assert sampler.sources[0].is_shared == is_trial
    held = PairMaker(sampler)
    held.hold(2**20)
    assert held.held
    for number, sample in enumerate(expected):
        for maker in (PairMaker(sampler), held):
            inputs, truth = maker.pair([maker.load(sampler.window(number))])
            np.testing.assert_array_equal(inputs[0], sample.inputs)
            np.testing.assert_array_equal(truth[0], sample.truth)
    assert not node_cache.take_warnings()
    node_cache.close_caches()


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        (
            {"resolution": (30, 8, 8), "offset": ORIGIN},
            r"axis x: voxels of the volume are 4 nm long, of its labels 8 n",
        ),
        ({"resolution": SIZE, "offset": (120, 48, 34)}, r"begins at 0 nm, .* at 34 nm: .* 8\.5 voxels of 4 nm, no who"),
        (
            {"resolution": SIZE, "offset": (120, 48, 3.2e4)},
            r"labels lie at 4:20,6:22,8000:8020 .* 0:24,0:30,0:36: .* no",
        ),
        (
            {"resolution": SIZE, "offset": (120, -8, 32)},
            r"labels lie at 4:20,-1:15,8:28 of .* y -4 … 116, .* in common;",
        ),
        (
            {"resolution": SIZE},
            r"shape \(24, 30, 36\), its labels .* \(16, 16, 20\) .* of its labels state no origin.*--origin-nm",
        ),
        ({"offset": ORIGIN}, r"metadata of its labels state no voxel size"),
        # 10,000 voxels away, as many of 4.003 nm end 7 voxels further
        (
            {"resolution": (30, 8, 4.003), "offset": (120, 48, 40000)},
            r"voxels of the volume are 4 nm long, .* 4\.003 nm",
        ),
    ],
)
def test_labels_whose_place_is_not_certain_are_refused(
    folder: Path, attributes: dict[str, object], sentence: str
) -> None:
    path = hdf5(folder / "part", labels(folder), **attributes)
    with pytest.raises(PlanError, match=sentence):
        opened(folder, path)
    with pytest.raises(PlanError, match=r"shape \(16, 16, 20\), .* leave any_place out"):
        opened(folder, path, any_place=True)


def test_a_level_of_n5_has_the_centre_of_its_voxels_and_labels_of_a_corner_are_half_a_voxel_off(tmp_path: Path) -> None:
    """N5 states no origin of a level: its first centre lies (2 - 1) / 2 fine voxels on. Some programs state corners."""
    write_volume(tmp_path / "v.n5", noise(SHAPE))
    fine = [s / 2 for s in SIZE[::-1]]
    file = tmp_path / "v.n5" / "raw" / "attributes.json"
    lists = {"resolution": fine, "units": ["nm"] * 3, "downsamplingFactors": [2, 2, 2]}
    file.write_text(json.dumps(json.loads(file.read_text()) | lists))
    data = noise((16, 16, 20)) % 3
    centre = tuple(o + s / 4 for o, s in zip(ORIGIN, SIZE, strict=True))
    ome_zarr(tmp_path / "centre.zarr", data, centre, "nanometer")
    ome_zarr(tmp_path / "corner.zarr", data, ORIGIN, "nanometer")
    assert opened(tmp_path, "centre.zarr", path="v.n5") == PART
    with pytest.raises(PlanError, match=r"axis z: .* 3\.75 voxels of 30 nm, no whole number \(remainder -0\.25\)"):
        opened(tmp_path, "corner.zarr", path="v.n5")


def test_a_coarser_level_has_no_origin_where_the_finest_states_none(folder: Path) -> None:
    group = zarr.open_group(ome_zarr(folder / "part.zarr", labels(folder), (), "nanometer"))
    tree = dict(group.attrs)
    scale, shift = [2 * s for s in SIZE], [s / 2 for s in SIZE]
    steps = [{"type": "scale", "scale": scale}, {"type": "translation", "translation": shift}]
    tree["ome"]["multiscales"][0]["datasets"].append({"path": "1", "coordinateTransformations": steps})
    group.create_array("1", data=labels(folder)[::2, ::2, ::2])
    group.attrs.update(tree)
    hdf5(folder / "v", noise(SHAPE), resolution=scale, offset=shift)
    with pytest.raises(PlanError, match=r"metadata of its labels state no origin"):
        opened(folder, "part.zarr", labels_key="1")


def test_a_corrected_origin_is_a_change_of_the_labels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the group around the array, whose own files stay as they are."""
    monkeypatch.chdir(folder)
    data = (np.indices(PART.shape)[2] // 10 + 1).astype(np.uint16)
    keys = {"train": {"steps": 2, "warm_up": 1, "checkpoint_every": 1, "schedule": "constant", "threads": 1}}
    ome_zarr(folder / "part.zarr", data)
    learning = recipe({"labels": "part.zarr"}, **keys)
    vp.train(learning, out="t", site="threads")
    longer = learning.model_copy(update={"train": learning.train.model_copy(update={"steps": 4})})
    group = zarr.open_group("part.zarr")
    tree = dict(group.attrs)
    tree["ome"]["multiscales"][0]["datasets"][0]["coordinateTransformations"][1]["translation"][2] += 4 / 1000
    group.attrs.update(tree)
    with pytest.raises(
        RunError, match=r"labels 1 .* has changed .*origin \[120.0, 48.0, 32.0\] is now \[120.0, 48.0, 36"
    ):
        vp.train(longer, out="t", site="threads")


def test_a_fine_tuning_holds_out_an_end_of_the_labels(tmp_path: Path) -> None:
    vp.sample(tmp_path / "tissue.n5", shape=(32, 48, 80), voxel_size_nm=(10, 10, 10))
    box = Box((0, 8, 16), (32, 40, 72))
    data = vp.open(tmp_path / "tissue.n5", "labels").open()[...][box.slices]
    hdf5(tmp_path / "part", data, resolution=(10, 10, 10), offset=(0, 80, 160))
    settings = ["samples.shape=[16,16,16]"]
    raw = str(tmp_path / "tissue.n5/raw")
    tuned = fine_tuning(StartingWeights.find("affinities"), raw, "part.h5", settings, str(tmp_path))
    assert tuned.data[0].held_out == "0:32,0:32,40:56"
    assert open_data(tuned.data[0], tuned.normalise, str(tmp_path)).held_out == Box((0, 8, 56), (32, 40, 72))


@pytest.mark.real
def test_a_crop_of_real_labels_teaches_what_they_teach_in_a_box(shared: Path, tmp_path: Path) -> None:
    names = {"raw": "ts2_raw.tif", "bodies": "ts2_bodies_gt.tif"}
    raw, bodies = (tifffile.imread(shared / "fibsem_medulla" / file) for file in names.values())
    box, size = Box((100, 60, 40), (148, 140, 136)), (10.0, 10.0, 10.0)
    for name, data in (("raw", raw), ("bodies", bodies)):
        hdf5(tmp_path / name, data, resolution=size)
    origin = tuple(10.0 * n for n in box.start)
    group = zarr.open_group(tmp_path / "crop.zarr", mode="w")
    group.create_array("labels", data=bodies[box.slices], chunks=(32, 32, 32))
    group["labels"].attrs.update({"resolution": size, "offset": origin, "axis_names": ["z", "y", "x"]})
    steps = {"steps": 3, "warm_up": 1, "batch": 2, "validate_every": 3, "threads": 1}
    for name, entry in {
        "part": {"labels": "crop.zarr", "held_out": ":,:,75%:"},
        "box": {"labels": "bodies.h5", "box": str(box), "held_out": "100:148,60:140,112:136"},
    }.items():
        learning = recipe({"path": "raw.h5"} | entry, samples={"shape": (16, 32, 32)}, train=steps)
        train(learning, tmp_path / name, str(tmp_path))
    part, whole = ([(line["loss"], line.get("auc")) for line in read_log(tmp_path / name)] for name in ("part", "box"))
    assert part == whole and part[-1][1] is not None
    assert (tmp_path / "part" / WEIGHTS).read_bytes() == (tmp_path / "box" / WEIGHTS).read_bytes()
