"""What is read of an array and where it lies, as the user gives it: a channel, a point in time, a voxel size."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from arrays import make
from command import IDENTITY, THREADS, Give, set_each
from metadata import ARRAY, GROUP, SCALE, ZARRAY, dataset, lay, n5, ome, ome_zarr, zarr2
from plans import facts, planned
from plans import volume as reference
from volumes import noise

from volpipe.errors import PlanError, RecipeError, VolumeError
from volpipe.geometry.grid import Box
from volpipe.nets.facts import check_thickness
from volpipe.recipes.inference import load_recipe
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.segmentation.driver import plan_segmentation
from volpipe.volumes.identity import changes, identify
from volpipe.volumes.storage.metadata import lengths
from volpipe.volumes.volume import ArraySpec, View, create_array, open_volume, open_writer, with_view

SHAPE = (2, 5, 3, 20, 24)  # t, z, c, y, x
NAMES = ["DAPI", "GFP", "488"]


@pytest.fixture
def series(tmp_path: Path) -> np.ndarray:
    """Return what lies in a.ome.tif (t, z, c, y, x), whose channels have names."""
    data = noise(SHAPE)
    metadata = {"axes": "TZCYX", "Channel": {"Name": NAMES}}
    tifffile.imwrite(tmp_path / "a.ome.tif", data, ome=True, photometric="minisblack", metadata=metadata)
    return data


# ---- channels and points in time


@pytest.mark.parametrize(("channel", "number"), [(0, 0), (2, 2), ("GFP", 1), ("488", 2), (488, 2), (None, None)])
def test_a_channel_is_chosen_by_number_or_name(
    tmp_path: Path, series: np.ndarray, channel: int | str | None, number: int | None
) -> None:
    volume = open_volume(tmp_path / "a.ome.tif", view=View(channel, time=1))
    expected = series[1].swapaxes(0, 1)
    if number is not None:
        expected = expected[number : number + 1]
    assert (volume.num_channels, volume.view.channel, volume.channel_names) == (len(expected), number, tuple(NAMES))
    np.testing.assert_array_equal(volume.open().read(Box((1, 2, 3), (5, 18, 20))), expected[:, 1:5, 2:18, 3:20])
    again = open_volume(volume.path, volume.key, view=volume.view)  # as workers do
    assert again == volume


def test_channels_of_ome_zarr_have_names(tmp_path: Path) -> None:
    image = ome(dataset("0", {"type": "scale", "scale": [1, 6, 5, 4]}))
    image["axes"].insert(0, {"name": "c", "type": "channel"})
    labels = {"omero": {"channels": [{"label": "actin"}, {"label": "tubulin"}]}}
    array = ZARRAY | {"shape": [2, 8, 10, 12], "chunks": [1, 4, 4, 4]}
    lay(tmp_path / "a.zarr", {".zgroup": GROUP, "0/.zarray": array, ".zattrs": {"multiscales": [image]} | labels})
    assert open_volume(tmp_path / "a.zarr", view=View("tubulin")).view.channel == 1
    assert open_volume(tmp_path / "a.zarr/0", view=View("tubulin")).view.channel == 1
    with pytest.raises(
        VolumeError, match=r"no channel tubulim .did you mean 'tubulin'..; .* 2 channels, 0 actin, 1 tub"
    ):
        open_volume(tmp_path / "a.zarr", view=View("tubulim"))


@pytest.mark.parametrize(
    ("view", "sentence"),
    [
        (View(), "2 points in time; choose one, 0 to 1, by input.time"),
        (View(time=2), "no point in time 2; it has 2, counted from 0"),
        (View(3, time=0), "no channel 3; input.channel is one of its 3 channels, 0 DAPI, 1 GFP, 2 488"),
        (View("GPF", time=0), "no channel GPF .did you mean 'GFP'"),
    ],
)
def test_what_there_is_none_of_is_refused(tmp_path: Path, series: np.ndarray, view: View, sentence: str) -> None:
    with pytest.raises(VolumeError, match=sentence):
        open_volume(tmp_path / "a.ome.tif", view=view)


def test_an_array_without_channels_has_channel_0(tmp_path: Path) -> None:
    volume = make(tmp_path / "a", noise((4, 5, 6)))
    assert with_view(volume, View(channel=0, time=0)) == volume
    with pytest.raises(VolumeError, match=r"no channel 1; input\.channel is one of its 1 channel"):
        with_view(volume, View(channel=1))


@pytest.mark.parametrize(
    "setting",
    [
        *("channel=1.5", "channel=true", "channel=-1", 'channel=""', "channel=[1]", "time=-1", "time=0.5",
         "time=first"),
        *("voxel_size_nm=[8,8]", "voxel_size_nm=[8,0,8]", "voxel_size_nm=8x8x8", "voxel_size_nm=8x8x8furlong"),
        *("voxel_size_nm=[8,nan,8]", "origin_nm=here"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_key(setting: str) -> None:
    with pytest.raises(
        RecipeError,
        match=rf"^--set input\.{re.escape(setting)}: (write|channels count|a voxel has|.* is (not|neither))",
    ):
        load_recipe(None, [f"input.{setting}"])


def test_a_run_reads_what_was_chosen_and_says_so(tmp_path: Path, series: np.ndarray, give: Give) -> None:
    chosen = set_each("input.channel=GFP", "input.time=1", "input.voxel_size_nm=[40,8,8]", "input.origin_nm=0x80x0nm")
    ended = give("run", *THREADS, *IDENTITY, *chosen, "-o", "out.zarr", "a.ome.tif")
    assert (ended.code, ended.err) == (0, "")
    words = " ".join(ended.out.split())
    assert "channel 1, GFP, of 3; point in time 1 of 2; voxel size 40 × 8 × 8 nm as given" in words
    out = open_volume(tmp_path / "out.zarr")
    np.testing.assert_array_equal(out.open().read(Box.from_shape((5, 20, 24)))[0], series[1, :, 1])
    assert (out.voxel_size_nm, out.origin_nm) == ((40, 8, 8), (0, 80, 0))
    told = json.loads((tmp_path / "out.zarr/zarr.json").read_text())["attributes"]["volpipe"]["input"]
    assert told["view"] == {"channel": 1, "time": 1, "voxel_size_nm": [40, 8, 8], "origin_nm": [0, 80, 0]}
    assert "channel 1, GFP, of 3" in (tmp_path / "out.zarr.run/volpipe.log").read_text()
    assert give("verify", "--recompute", "1", "out.zarr").code == 0
    command = give("reproduce", "out.zarr").out
    for part in ("""input.channel="GFP\"""", "input.time=1", "input.voxel_size_nm=[40.0, 8.0, 8.0]"):
        assert part in command
    other = give(
        "run", *THREADS, *IDENTITY, *set_each("input.time=1", "input.channel=0"), "-o", "out.zarr", "a.ome.tif"
    )
    assert (other.code, "input.channel: 'GFP' -> 0" in other.err) == (2, True)


@pytest.mark.parametrize(
    ("view", "channels", "sentence"),
    [
        (
            View(),
            1,
            r"takes 1 channel, the volume .* has 3 channels, 0 to 2; choose a channel, such as --set input\.ch",
        ),
        (View(), 2, "takes 2 channels, .* choose a net of 3 in_channels, or an array of 2 channels"),
        (View(channel=1), 3, r"takes 3 channels, .* leave out input\.channel, or choose a net of 1 in_channels"),
    ],
)
def test_a_wrong_number_of_channels_names_the_remedy(view: View, channels: int, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        planned(of=with_view(reference(num_channels=3), view), net=facts(in_channels=channels))


def test_labels_are_made_of_the_channel_that_is_chosen(tmp_path: Path) -> None:
    make(tmp_path / "a.zarr", noise((3, 8, 9, 10)))
    recipe = SegmentRecipe.model_validate({"input": {"kind": "membrane", "channel": 2, "voxel_size_nm": "4nm,4nm,4nm"}})
    plan = plan_segmentation(str(tmp_path / "a.zarr"), recipe, tmp_path / "l.zarr", tmp_path)
    assert (plan.source.view.channel, plan.source.num_channels, plan.source.voxel_size_nm) == (2, 1, (4, 4, 4))
    np.testing.assert_array_equal(plan.source.volume().open().read(plan.box), noise((3, 8, 9, 10))[2:])


# ---- voxel sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16x8x8nm", (16, 8, 8)),
        ("16 x 8 x 8 nm", (16, 8, 8)),
        ("16×8×8 nm", (16, 8, 8)),
        ("1,0.5,0.5 um", (1000, 500, 500)),
        ("1 µm, 8 nm, .5nm", (1000, 8, 0.5)),
        ("-1e3,0,5 Å", (-100, 0, 0.5)),
        ([16, 8, 8.5], (16, 8, 8.5)),
        (["8 nm", "0.5 µm", 4], (8, 500, 4)),
        ("16,8,8", None),
        ("16x8nm", None),
        ("16x8x8 pixels", None),
        ("nm,nm,nm", None),
        ("0,5 x 1 x 1 nm", None),
        ([1, 2], None),
        ([1, 2, "wide"], None),
        ([1, 2, True], None),
        (8, None),
    ],
)
def test_lengths_are_understood_with_their_units(text: object, expected: tuple[float, ...] | None) -> None:
    assert lengths(text) == (None if expected is None else pytest.approx(expected))


def test_a_given_size_wins_over_the_files_and_is_said(tmp_path: Path) -> None:
    lay(tmp_path / "v", n5(resolution=[4, 5, 6], units=["nm"] * 3, offset=[1, 2, 3]))
    volume = open_volume(tmp_path / "v", view=View(voxel_size_nm=(10.0, 8.0, 8.0)))
    assert (volume.voxel_size_nm, volume.origin_nm) == ((10, 8, 8), (3, 2, 1))
    assert volume.notes == (
        "axes guessed: z, y, x",
        "voxel size 10 × 8 × 8 nm as given, instead of the file's 6 × 5 × 4 nm",
        "origin 3 × 2 × 1 nm as the file says; input.origin_nm gives another",
    )
    volume = open_volume(tmp_path / "v", view=View(origin_nm=(0.0, 0.0, 0.0)))
    assert volume.origin_nm == (0, 0, 0)
    assert volume.notes[1] == "origin 0 × 0 × 0 nm as given, instead of the file's 3 × 2 × 1 nm"


def test_a_region_in_lengths_needs_a_size_that_may_be_given(tmp_path: Path, give: Give) -> None:
    np.save(tmp_path / "a.npy", noise((8, 9, 10)))
    refused = give("plan", "--quick", *THREADS, *IDENTITY, "--roi", "16nm:,:,:", "a.npy")
    assert refused.code == 2
    assert "16nm needs a voxel size, which" in refused.err and "--set input.voxel_size_nm=40,8,8" in refused.err
    ended = give(
        "plan", "--quick", *THREADS, *IDENTITY, "--roi", "16nm:,:,:", *set_each("input.voxel_size_nm=8x4x4nm"), "a.npy"
    )
    assert (ended.code, "8 × 4 × 4 nm" in ended.out, "axes guessed: z, y, x" in ended.out) == (0, True, True)
    assert "6 × 9 × 10 voxels" in ended.out


def test_convert_takes_a_channel_a_time_and_a_place(tmp_path: Path, series: np.ndarray, give: Give) -> None:
    options = ("--channel", "488", "--time", "1", "--voxel-size-nm", "1,0.5,0.5 um", "--origin-nm", "0,80,0")
    assert give("convert", *options, "a.ome.tif", "b.zarr").code == 0
    copy = open_volume(tmp_path / "b.zarr")
    assert (copy.shape, copy.voxel_size_nm, copy.origin_nm) == ((5, 20, 24), (1000, 500, 500), (0, 80, 0))
    np.testing.assert_array_equal(copy.open()[...], series[1, :, 2])
    assert give("convert", *options[:4], "--voxel-size-nm", "16,8,8", "a.ome.tif", "c.zarr").code == 0
    assert open_volume(tmp_path / "c.zarr").voxel_size_nm == (16, 8, 8)


def test_info_says_how_a_size_is_given(tmp_path: Path, series: np.ndarray, give: Give) -> None:
    ended = give("info", "--fast", "--time", "0", "a.ome.tif")
    assert (
        "voxel size  unknown; give --set input.voxel_size_nm=z,y,x to run and plan, --voxel-size-nm z,y,x to convert"
        in ended.out
    )
    assert "channels    3 channels, 0 DAPI, 1 GFP, 2 488" in ended.out


# ---- what is guessed, and what is chosen unasked


@pytest.mark.parametrize(
    ("files", "is_guessed"),
    [
        (n5(), True),
        (n5(axes=["x", "y", "z"]), False),
        (zarr2(), True),
        (ome_zarr(ome(dataset("0", SCALE))), False),
        (ome_zarr({"datasets": [{"path": "0"}]}), True),
    ],
)
def test_axes_that_are_guessed_are_said_to_be(tmp_path: Path, files: dict[str, Any], is_guessed: bool) -> None:
    assert ("axes guessed: z, y, x" in open_volume(lay(tmp_path / "v", files)).notes) == is_guessed


def test_pages_without_a_word_are_slices_by_a_guess(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", noise((5, 12, 13)), metadata=None)
    assert "axes guessed: z, y, x" in open_volume(tmp_path / "a.tif").notes
    tifffile.imwrite(tmp_path / "b.tif", noise((5, 12, 13)), metadata={"axes": "ZYX"})
    assert open_volume(tmp_path / "b.tif").notes == ()


def test_the_level_that_is_read_is_in_the_plan(tmp_path: Path) -> None:
    lay(tmp_path / "v", {f"em/s{i}/attributes.json": ARRAY | {"axes": ["x", "y", "z"]} for i in range(3)})
    assert planned(of=open_volume(tmp_path / "v", "em")).notes.volume == ("level 0, s0, of 3",)
    assert planned(of=open_volume(tmp_path / "v", "em/s2")).notes.volume == ("level 2, s2, of 3",)


@pytest.mark.parametrize(("shape", "halo", "axis"), [((1, 40, 40), (9, 9, 9), "z"), ((40, 40, 1), (0, 0, 2), "x")])
def test_a_single_slice_is_refused_for_a_net_that_sees_its_neighbours(
    shape: tuple[int, int, int], halo: tuple[int, int, int], axis: str
) -> None:
    with pytest.raises(PlanError, match=f"one voxel thick along {axis}, and net net sees . voxels .* into a folder"):
        check_thickness(reference(shape), facts(halo=halo))


@pytest.mark.parametrize(
    ("shape", "halo"), [((1, 40, 40), (0, 9, 9)), ((2, 40, 40), (9, 9, 9)), ((1, 1, 1), (0, 0, 0))]
)
def test_a_slice_for_a_flat_net_is_taken(shape: tuple[int, int, int], halo: tuple[int, int, int]) -> None:
    check_thickness(reference(shape), facts(halo=halo))


def test_a_run_over_an_image_is_refused(tmp_path: Path, give: Give) -> None:
    tifffile.imwrite(tmp_path / "a.tif", noise((40, 40)))
    ended = give("run", *THREADS, "-o", "out.zarr", "a.tif")
    assert (ended.code, "is one voxel thick along z" in ended.err, (tmp_path / "out.zarr").exists()) == (2, True, False)


# ---- containers of several


def test_info_lists_what_a_container_holds_and_run_names_its_paths(tmp_path: Path, give: Give) -> None:
    more = {"labels/attributes.json": ARRAY | {"dataType": "object"}}
    lay(tmp_path / "a.n5", {f"{key}/attributes.json": ARRAY for key in ("raw", "em/s0", "em/s1")} | more)
    ended = give("info", "a.n5")
    lines = [line.split() for line in ended.out.splitlines()]
    assert ended.code == 0
    assert lines[1] == ["a.n5/em", *["8", "×", "10", "×", "12", "z,", "y,", "x", "uint8", "unknown", "2"]]
    assert lines[-2] == ["a.n5/raw", *["8", "×", "10", "×", "12", "z,", "y,", "x", "uint8", "unknown"]]
    assert "dataType" in ended.out and lines[-1][-1] == "a.n5/em"
    for command in (("run", *THREADS), ("plan", *THREADS), ("convert",)):
        refused = give(*command, "a.n5", *(("b.zarr",) if command == ("convert",) else ()))
        assert (refused.code, "choose one by its key: em, labels, raw; write a.n5/em" in refused.err) == (2, True)


def test_two_arrays_of_a_container_have_two_outputs(tmp_path: Path, give: Give) -> None:
    for key in ("raw", "raw2"):
        make(tmp_path / f"a.zarr/{key}", noise((8, 9, 10)), axes=("z", "y", "x"))
        assert give("run", *THREADS, *IDENTITY, *set_each(f"input.key={key}"), "a.zarr").code == 0
        assert (tmp_path / f"a_{key}_identity.zarr").is_dir()
    assert give("run", *THREADS, *IDENTITY, "-o", "out.zarr", "a.zarr/raw").code == 0
    refused = give("run", *THREADS, *IDENTITY, "-o", "out.zarr", "a.zarr/raw2")
    assert refused.code == 2
    assert "raw2" in refused.err


def test_the_identity_of_one_channel_is_that_of_its_own_files(tmp_path: Path) -> None:
    spec = ArraySpec((2, 8, 8, 8), np.dtype("uint8"), (1, 8, 8, 8), axes=("c", "z", "y", "x"))
    create_array(tmp_path / "a.zarr", "", spec, "zarr3")
    volume, writer = open_volume(tmp_path / "a.zarr", view=View(channel=1)), open_writer(tmp_path / "a.zarr", "")

    def write(channel: int, seed: int) -> None:
        writer.write(Box((channel, 0, 0, 0), (channel + 1, 8, 8, 8)), noise((1, 8, 8, 8), seed=seed))

    write(0, 0)
    write(1, 1)
    before = identify(volume)
    write(0, 2)
    assert changes(before, identify(volume)) == []
    write(1, 3)
    assert any("c/1/0/0/0 was" in difference for difference in changes(before, identify(volume)))
