"""A net tried on a box: the bytes that a run writes there, from any form of net, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from volumes import noise, windowed, write_volume

import volpipe as vp
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import ArraySpec, create_array, open_writer

SHAPE = (20, 24, 28)
NET = """
import torch
from torch import nn


class Net(nn.Module):
    volpipe = dict(intensity="same", scale=(1, 1, 1), stride=(1, 1, 1), halo=(2, 2, 2))

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 1, 3, padding=1)

    def forward(self, x):
        return x + 0.3 * self.second(torch.relu(self.first(x)))


def build():
    return Net()
"""
DIVISIONS = {
    "crop": windowed((12, 12, 12), (4, 4, 4), (1, 1, 1), "crop"),
    "hann": windowed((12, 12, 12), (6, 6, 6), (1, 2, 1), "hann"),
}
PLACES = [None, (0, 0, 0), (19, 0, 27)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the net in net.py and a volume of noise."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    return tmp_path


def recipe(*settings: str) -> vp.Recipe:
    """Return the recipe of the net in net.py."""
    from volpipe.api.arguments import load

    sections: Mapping[str, Any] = {"net": {"name": "net.py:build", "untrained": True}}  # Any: TOML values
    return load(vp.Recipe, sections, settings)


def written(choice: vp.Recipe, volume: str = "in.n5/raw") -> np.ndarray:
    """Return the output of a run over the whole volume."""
    vp.run(volume, choice, out="out.zarr", site="threads")
    return np.asarray(vp.open("out.zarr"))


@pytest.mark.parametrize("blend", [pytest.param("crop", marks=pytest.mark.long), "hann"])
def test_the_bytes_are_those_of_a_run_inside_and_at_faces(blend: str) -> None:
    choice = recipe(*DIVISIONS[blend])
    whole = written(choice)
    for place in PLACES:
        result = vp.try_net(choice, "in.n5/raw", at=place, size=(7, 9, 11))
        assert result.output.dtype == whole.dtype == np.uint8
        assert result.output.shape == (7, 9, 11)
        assert result.output.tobytes() == whole[result.out_box.slices].tobytes()
        assert np.array_equal(result.input, noise(SHAPE)[result.box.slices])
        assert result.facts.notes == ()


def test_an_open_volume_is_the_one_that_the_recipe_chooses() -> None:
    volume = vp.open("in.n5/raw", view=vp.View(voxel_size_nm=(8.0, 8.0, 8.0)))
    for function in (vp.try_net, vp.blends):
        with pytest.raises(vp.VolpipeError, match=r"chooses another by input.voxel_size_nm; give the location"):
            function("identity", volume, settings=["input.voxel_size_nm=[4,4,4]"])
    tried = vp.try_net("identity", volume, settings=["input.voxel_size_nm=[8,8,8]"], size=4)
    assert tried.voxel_size_nm == (8.0, 8.0, 8.0)


def test_the_box_lies_around_the_voxel_and_inside_of_the_volume() -> None:
    inside = vp.try_net("identity", "in.n5/raw", at=(9, 12, 13), size=(6, 8, 5))
    assert inside.box == vp.Box((6, 8, 11), (12, 16, 16))
    at_face = vp.try_net("identity", "in.n5/raw", at=(19, 0, 3), size=6)
    assert at_face.box == vp.Box((14, 0, 0), (20, 6, 6))


def test_without_a_size_it_is_the_core_of_one_window() -> None:
    result = vp.try_net(recipe(*DIVISIONS["crop"]), "in.n5/raw", at=(9, 1, 27))
    assert result.facts.num_windows == 1
    assert result.box == vp.Box((8, 0, 24), (16, 8, 28))  # cores of 8 from the corner, the last is clipped
    assert result.facts.halo == (2, 2, 2) and result.facts.window == (12, 12, 12)


def test_without_a_place_a_small_box_needs_one_window() -> None:
    result = vp.try_net(recipe(*DIVISIONS["crop"]), "in.n5/raw", size=6)
    assert result.facts.num_windows == 1
    assert result.box == vp.Box((9, 9, 9), (15, 15, 15))  # of the core 8:16, in which the middle 10, 12, 14 lies


def test_a_torch_module_gives_the_voxels_of_its_file_and_stays_as_it_is() -> None:
    scope: dict[str, Any] = {}  # Any: what the file defines
    exec(NET, scope)
    module: nn.Module = scope["build"]().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    result = vp.try_net(module, "in.n5/raw", size=8, settings=DIVISIONS["hann"])
    expected = vp.try_net(recipe(*DIVISIONS["hann"]), "in.n5/raw", size=8)
    assert result.facts.net == "Net"
    assert result.output.tobytes() == expected.output.tobytes()
    assert module.training and all(parameter.requires_grad for parameter in module.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


class Bare(nn.Module):
    """A net that says nothing of itself: two channels, twice as many voxels along z."""

    def __init__(self, radius: int) -> None:
        super().__init__()
        self.radius = radius
        generator = torch.Generator().manual_seed(1)
        self.conv = nn.Conv3d(1, 2, 2 * radius + 1, padding=radius)
        with torch.no_grad():
            self.conv.weight.copy_(torch.randn(self.conv.weight.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x).repeat_interleave(2, dim=2)
        return out


def test_a_coarser_output_lies_beside_its_input() -> None:
    """The box grows to whole voxels of the output; the last one along x has one voxel of the volume."""
    net, settings = nn.AvgPool3d((1, 2, 3)), ["windows.shape=[8,12,12]"]
    result = vp.try_net(net, "in.n5/raw", at=(9, 13, 27), size=(4, 5, 6), settings=settings)
    assert (result.box, result.out_box) == (Box((7, 10, 21), (11, 16, 28)), Box((7, 5, 7), (11, 8, 10)))
    assert (result.out_voxel, result.out_origin_nm) == ((1, 2, 3), result.origin_nm)
    grey = (noise(SHAPE).astype(np.float32) - 127.5) / 127.5
    means = np.pad(grey, ((0, 0), (0, 0), (0, 2)), mode="reflect").reshape(20, 12, 2, 10, 3).mean(axis=(2, 4))
    np.testing.assert_allclose(result.output, means[result.out_box.slices], atol=1e-6)
    whole = vp.try_net(net, "in.n5/raw", at=(0, 0, 0), size=SHAPE, settings=settings)
    assert vp.side_by_side(result, whole).largest < 1e-6
    for before, after in result.panels():
        assert before.pixels.shape == after.pixels.shape
    assert result.png().startswith(b"\x89PNG")


def test_a_module_leaves_the_random_numbers_of_the_notebook_alone() -> None:
    module = Bare(1)
    before = torch.get_rng_state()
    vp.try_net(module, "in.n5/raw", size=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    class Stuck(Bare):
        def __deepcopy__(self, memo: object) -> Stuck:
            raise TypeError("it holds a lock")

    with pytest.raises(vp.VolpipeError, match=r"net Stuck cannot be copied \(TypeError: it holds a lock"):
        vp.try_net(Stuck(1), "in.n5/raw")


def test_a_module_that_looks_at_whole_windows_runs_in_one_where_the_volume_fits() -> None:
    module = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2))
    facts = ["net.out_channels=2", "net.halo=[1,1,1]", "net.scale=[1,1,1]", "net.stride=[1,1,1]"]
    result = vp.try_net(module, "in.n5/raw", settings=facts)
    data = torch.from_numpy((noise(SHAPE).astype(np.float32) - 127.5) / 127.5)
    with torch.inference_mode():
        whole = module(data[None, None])[0].numpy()
    np.testing.assert_allclose(result.output, whole[:, *result.out_box.slices], atol=1e-4)
    accepted = vp.try_net(module, "in.n5/raw", settings=["net.accept_tile_variance=true", *facts])
    assert accepted.output.tobytes() == result.output.tobytes()


def test_modules_of_one_class_are_measured_one_by_one() -> None:
    for radius in (1, 3):
        result = vp.try_net(Bare(radius), "in.n5/raw", size=(4, 5, 6))
        assert result.facts.halo == (radius,) * 3
        assert result.facts.scale == (2, 1, 1)
        assert result.output.shape == (2, 8, 5, 6) and result.output.dtype == np.float32
        assert result.out_box == result.box.scaled((2, 1, 1))


def test_the_output_of_a_module_is_that_of_torch_over_the_whole_volume() -> None:
    module = Bare(1)
    result = vp.try_net(module, "in.n5/raw", at=(0, 23, 14), size=(4, 5, 6))
    padded = np.pad((noise(SHAPE).astype(np.float32) - 127.5) / 127.5, 1, mode="reflect")
    with torch.inference_mode():
        whole = module(torch.from_numpy(padded)[None, None])[0].numpy()[:, 2:-2, 1:-1, 1:-1]
    np.testing.assert_allclose(result.output, whole[:, *result.out_box.slices], atol=1e-5)


def test_a_scaled_output_lies_where_a_run_puts_it() -> None:
    choice = vp.Recipe.model_validate({"net": {"name": "upsample", "options": {"scale": [2, 1, 1]}}})
    whole = written(choice)
    result = vp.try_net(choice, "in.n5/raw", at=(19, 3, 3), size=(5, 6, 7))
    assert result.out_box == vp.Box((30, 0, 0), (40, 6, 7))
    assert result.output.tobytes() == whole[result.out_box.slices].tobytes()


def test_statistics_of_the_whole_volume_are_measured_as_a_run_does(folder: Path) -> None:
    write_volume(folder / "wide.n5", noise(SHAPE, "uint16") // 3)
    choice = recipe(*DIVISIONS["crop"])
    whole = written(choice, "wide.n5/raw")
    result = vp.try_net(choice, "wide.n5/raw", size=6)
    assert result.facts.notes == ()
    assert result.output.tobytes() == whole[result.out_box.slices].tobytes()


def test_a_large_volume_is_sampled_and_said_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volpipe.notebook.try_out.MOST_MEASURED", 100)
    write_volume(folder / "wide.n5", noise(SHAPE, "uint16"))
    result = vp.try_net("identity", "wide.n5/raw", size=6)
    (note,) = result.facts.notes
    assert "a run measures all" in note and "normalise.low" in note
    assert note in repr(result)
    given = vp.try_net("identity", "wide.n5/raw", size=6, settings=["normalise.low=0", "normalise.high=65535"])
    assert given.facts.notes == ()


def test_the_region_of_a_recipe_is_left_out_and_said_so() -> None:
    choice = recipe(*DIVISIONS["crop"], 'input.roi="0:4,:,:"')
    result = vp.try_net(choice, "in.n5/raw", at=(12, 12, 12), size=4)
    assert result.facts.notes == ("input.roi of the recipe does not count here; a run leaves out what it excludes",)


def test_a_volume_that_changed_is_read_again(folder: Path) -> None:
    first = vp.try_net("identity", "in.n5/raw", size=6, settings=DIVISIONS["crop"])
    open_writer(folder / "in.n5", "raw").write(Box.from_shape(SHAPE), 255 - noise(SHAPE))
    second = vp.try_net("identity", "in.n5/raw", size=6, settings=DIVISIONS["crop"])
    assert np.array_equal(second.output, 255 - first.output)


def test_settings_of_torch_are_those_of_the_notebook_afterwards() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.backends.cudnn.deterministic = False
    try:
        vp.try_net("identity", "in.n5/raw", size=4, settings=["infer.exact=true"])
        assert torch.get_num_threads() == 3
        assert torch.backends.mkldnn.enabled and not torch.backends.cudnn.deterministic
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"at": (20, 0, 0)}, "axis z of the volume has voxels 0 to 19, not 20"),
        ({"at": (0, 0)}, "give a voxel (z, y, x)"),
        ({"at": (0.5, 0, 0)}, "in whole numbers"),
        ({"size": (1, 25, 1)}, "axis y of the volume has 24 voxels, not 25"),
        ({"size": 0}, "axis z of the volume has 20 voxels, not 0"),
        ({"device": "tpu"}, "device 'tpu' is none"),
        ({"settings": ["windows.blend=tent"]}, "windows.blend"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(vp.VolpipeError, match=re.escape(problem)):
        vp.try_net("identity", "in.n5/raw", **arguments)


@pytest.mark.parametrize(
    ("net", "problem"),
    [
        ("unet3", "no net or recipe 'unet3' (did you mean 'unet3d'?)"),
        ("nothing.py:build", "no Python file at"),
        (3, "a net is a torch module, a name, a file or a recipe, not int"),
        (nn.Conv3d(3, 1, 1), "in_channels"),
        ("segment", "recipe"),
    ],
)
def test_what_is_no_net_for_the_volume_is_refused(net: Any, problem: str) -> None:  # Any: what a user gives
    with pytest.raises(vp.VolpipeError, match=re.escape(problem)):
        vp.try_net(net, "in.n5/raw")


def test_a_net_of_other_channels_is_refused(folder: Path) -> None:
    spec = ArraySpec((2, *SHAPE), np.dtype("uint8"), (1, 16, 16, 16), codec="gzip", axes=("c", "z", "y", "x"))
    create_array(folder / "two.zarr", "raw", spec, "zarr3")
    with pytest.raises(vp.VolpipeError, match=r"takes 1 channel, the volume .* has 2 channels"):
        vp.try_net("identity", folder / "two.zarr/raw")


def test_an_array_is_refused_with_the_way_to_store_it() -> None:
    with pytest.raises(vp.VolpipeError, match=re.escape("numpy.save('a.npy', array)")):
        vp.try_net("identity", noise(SHAPE))  # type: ignore[arg-type]


def test_a_box_for_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volpipe.notebook.boxes.MOST_VOXELS", 100)
    with pytest.raises(vp.VolpipeError, match=r"more than 100 voxels, .* use vp\.run"):
        vp.try_net("identity", "in.n5/raw", size=5)


def test_nothing_is_written(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    vp.try_net("identity", "in.n5/raw", size=4)
    assert [path for path in sorted(folder.rglob("*")) if path not in before] == []
