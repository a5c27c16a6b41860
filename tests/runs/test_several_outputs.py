"""A net of several outputs that are all taken: each array is what a run of that output alone writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from volumes import noise, write_volume

import volpipe
from volpipe.errors import IncompleteError, PlanError
from volpipe.geometry.grid import Box
from volpipe.resolve import load_function
from volpipe.volumes.volume import open_volume, open_writer

SHAPE = (21, 45, 38)
NETS = """
import torch
from torch import nn

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1)
        self.affinities, self.shape = nn.Conv3d(4, 3, 1), nn.Conv3d(4, 2, 3, padding=1)
        self.distance = nn.Conv3d(4, 1, (1, 2, 2), stride=(1, 2, 2))

    def forward(self, x):
        h = self.second(self.first(x).relu()).relu()
        return {"affinities": self.affinities(h).sigmoid(), "shape": self.shape(h), "distance": self.distance(h)}

def heads():
    torch.manual_seed(3)
    return Heads()

def single():
    torch.manual_seed(5)
    return nn.Conv3d(1, 2, 3, padding=1)

def slices():
    torch.manual_seed(4)
    first, ends = nn.Conv2d(1, 3, 3, padding=1), (nn.Conv2d(3, 2, 1), nn.Conv2d(3, 1, 2, stride=2))
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.ends = first, nn.ModuleList(ends)
        def forward(self, x):
            return [end(self.first(x).relu()) for end in self.ends]
    return Pair()
"""
NET = (
    "net.name=nets.py:heads",
    "net.untrained=true",
    "windows.shape=[16,16,20]",
    "infer.exact=true",
    "output.levels=1",
)
ARRAYS = {"affinities": (3, *SHAPE), "shape": (2, *SHAPE), "distance": (21, 23, 19)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS, encoding="utf-8")
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    return tmp_path


def run(out: str, *settings: str, **options: Any) -> volpipe.Report | volpipe.FlowReport:
    return volpipe.run("in.n5/raw", out=out, site="threads", settings=[*NET, *settings], **options)


def voxels(place: str) -> np.ndarray:
    volume = open_volume(place).as_it_is
    data = volume.open().read(Box.from_shape(volume.spatial_shape))
    return data if volume.num_channels > 1 else data[0]


@pytest.mark.parametrize(
    ("suffix", "settings"),
    [
        pytest.param("zarr", ("windows.overlap=[6,8,8]",), marks=pytest.mark.long),
        ("n5", ("windows.overlap=[6,8,8]", "output.format=n5", "windows.block=[1,2,1]")),
        pytest.param(
            "zarr", ("windows.overlap=[6,8,8]", "windows.blend=hann", "windows.block=[1,1,2]"), marks=pytest.mark.long
        ),
        ("zarr", ("windows.overlap=[6,8,8]", "windows.blend=hann", "tensors.mode=stored", "input.roi=3:20,4:41,2:33")),
    ],
)
def test_each_array_is_that_of_a_run_of_its_output_alone(folder: Path, suffix: str, settings: tuple[str, ...]) -> None:
    run(f"all.{suffix}", "net.output=all", *settings)
    for name in ARRAYS:
        run(f"{name}.{suffix}", f"net.output={name}", *settings)
        for level in (0, 1):
            own, due = (open_volume(place, level=level) for place in (f"all.{suffix}/{name}", f"{name}.{suffix}"))
            box = Box.from_shape(due.spatial_shape)
            assert np.array_equal(own.open().read(box), due.open().read(box))
            places = (own.voxel_size_nm, own.origin_nm, own.shape, own.dtype)
            assert places == (due.voxel_size_nm, due.origin_nm, due.shape, due.dtype)
    verdict = volpipe.verify(f"all.{suffix}", recompute=1)
    assert verdict.is_whole and {block.array for block in verdict.blocks} == set(ARRAYS)


def test_arrays_are_what_torch_gives_for_the_whole(folder: Path) -> None:
    run("all.zarr", "net.output=all")
    net: nn.Module = load_function("nets.py:heads", folder)()
    data = torch.from_numpy(noise(SHAPE).astype(np.float32) / 127.5 - 1)[None, None]
    padded = nn.functional.pad(data, (4,) * 6, mode="reflect")
    with torch.inference_mode():
        outs = net(padded)
    for name, shape in ARRAYS.items():
        first = [4, *(2 if name == "distance" else 4 for _ in range(2))]
        due = outs[name][0][:, *(slice(a, a + n) for a, n in zip(first, shape[-3:], strict=True))].numpy()
        np.testing.assert_allclose(voxels(f"all.zarr/{name}").reshape(due.shape), due, atol=1e-6)


def test_an_array_has_its_own_type_and_kind(folder: Path) -> None:
    run(
        "all.zarr", "net.output=all", "net.offsets=[[-1,0,0],[0,-1,0],[0,0,-1]]",
        "output.arrays.affinities.intensity=unit", "output.arrays.shape.kind=classes",
    )  # fmt: skip
    volumes = {name: open_volume(f"all.zarr/{name}") for name in ARRAYS}
    assert {name: volume.dtype.name for name, volume in volumes.items()} == {
        "affinities": "uint8", "shape": "uint8", "distance": "float32",
    }  # fmt: skip
    assert volumes["affinities"].channel_names == ("z-1", "y-1", "x-1")
    run("shape.zarr", "net.output=shape")
    assert np.array_equal(voxels("all.zarr/shape"), voxels("shape.zarr").argmax(axis=0))


def test_slices_have_arrays_named_by_their_numbers(folder: Path) -> None:
    run("all.zarr", "net.name=nets.py:slices", "windows.shape=[1,16,16]", "net.output=all")
    assert voxels("all.zarr/output_0").shape == (2, *SHAPE)
    assert voxels("all.zarr/output_1").shape == (21, 23, 19)


def test_all_of_a_net_of_one_output_are_that_output(folder: Path) -> None:
    run("all.zarr", "net.name=nets.py:single", "net.output=all")
    run("own.zarr", "net.name=nets.py:single")
    assert np.array_equal(voxels("all.zarr"), voxels("own.zarr"))


def test_a_part_an_update_and_a_lost_file_are_of_all_arrays(folder: Path) -> None:
    settings = ("net.output=all", "windows.overlap=[6,8,8]", "windows.blend=hann", "windows.block=[1,1,1]")
    run("all.zarr", *settings, only="0:8,0:8,0:8")
    part = Box((0, 0, 0), (8, 4, 4))
    assert open_volume("all.zarr/distance").open().read(part).any()
    with pytest.raises(IncompleteError, match="distance"):
        open_volume("all.zarr/distance").open().read(Box.from_shape(ARRAYS["distance"]))
    run("all.zarr", *settings)
    changed = noise((16, 13, 16), seed=7)
    open_writer("in.n5", "raw").write(Box((0, 32, 0), (16, 45, 16)), changed)
    run("all.zarr", *settings, update=True)
    run("fresh.zarr", *settings)
    for name in ARRAYS:
        assert np.array_equal(voxels(f"all.zarr/{name}"), voxels(f"fresh.zarr/{name}"))
    lost = next(file for file in (folder / "all.zarr/shape/s0").rglob("*") if file.is_file() and file.suffix == "")
    lost.unlink()
    assert volpipe.report("all.zarr/shape") == volpipe.report("all.zarr")
    (difference,) = volpipe.verify("all.zarr/shape").differences
    assert (Path(difference.file), difference.what) == (lost, "is missing") and difference.box.startswith("shape/s0 ")


def test_a_stage_reads_the_array_that_it_names(folder: Path) -> None:
    settings = "\n".join(f"{key.partition('.')[2]} = {value}" for key, _, value in (s.partition("=") for s in NET[2:3]))
    (folder / "flow.toml").write_text(
        f"""
        [[stage]]
        name = "predict"
        net = {{ name = "nets.py:heads", untrained = true, output = "all", offsets = [[-1,0,0],[0,-1,0],[0,0,-1]] }}
        windows = {{ {settings} }}
        [[stage]]
        name = "copy"
        input = "predict/distance"
        net = {{ name = "identity" }}
        normalise = {{ method = "none" }}
        [[stage]]
        name = "labels"
        kind = "label"
        input = {{ stage = "predict/affinities", offsets = [[-1,0,0],[0,-1,0],[0,0,-1]], range = [0, 1] }}
        """,
        encoding="utf-8",
    )
    volpipe.run("in.n5/raw", folder / "flow.toml", out="flow", site="threads")
    assert np.array_equal(voxels("flow/copy.zarr"), voxels("flow/predict.zarr/distance"))
    assert open_volume("flow/labels.zarr").spatial_shape == SHAPE
    whole = (folder / "flow.toml").read_text(encoding="utf-8")
    (folder / "flow.toml").write_text(whole.replace("predict/distance", "predict"), encoding="utf-8")
    with pytest.raises(PlanError, match=r"stage copy: .* has the arrays affinities, shape, distance, of which one"):
        volpipe.plan("in.n5/raw", folder / "flow.toml", out="other")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("output.arrays.depth.dtype=uint8",), r"output.arrays.depth: net heads gives affinities, shape, distance"),
        (("output.format=precomputed", "input.voxel_size_nm=[1,1,1]"), "precomputed holds one array"),
        (("windows.placement=edge", "windows.blend=gaussian"), r"distance of net heads is \[1, 2, 2\] times coarser"),
        (("output.chunk=[16,9,9]", "output.shard=[16,9,9]"), "axis y: .*output.(shard|chunk) is 9; use 10|multiple"),
        (("net.offsets=[[-1,0,0],[0,-1,0]]", "net.output=affinities"), "net.offsets names 2 channels"),
    ],
)
def test_what_arrays_cannot_be_is_refused(folder: Path, settings: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(volpipe.VolpipeError, match=sentence):
        volpipe.plan("in.n5/raw", out="out", settings=[*NET, "net.output=all", *settings])
