"""Mistakes that used to end with exit code 0 and a wrong volume, or wrong scores, are refused with a sentence."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import IDENTITY, THREADS, Give, set_each
from plans import facts, planned, volume
from volumes import noise, windowed, write_volume

from volpipe.errors import PlanError
from volpipe.geometry.affinities import OFFSETS
from volpipe.recipes.inference import load_recipe
from volpipe.resolve import shipped_recipe
from volpipe.synthetic.volume import SyntheticVolume, write_sample
from volpipe.volumes.volume import open_volume

SHAPE = (16, 16, 24)
WINDOWS = set_each(*windowed((8, 8, 8), (0, 0, 0), (2, 1, 1), "crop"), "output.levels=0")


def refusal(give: Give, *arguments: str, code: int = 2) -> str:
    """Return the sentence on one line with which a command is refused."""
    ended = give(*arguments)
    assert ended.code == code, ended.out
    return " ".join(ended.err.split())


def run(*options: str) -> list[str]:
    return ["run", *THREADS, *IDENTITY, *WINDOWS, *options, "-o", "out.zarr", "in.n5/raw"]


# ---- masks and boxes


def test_a_mask_that_covers_nothing_is_refused(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    write_volume(tmp_path / "mask.n5", np.zeros(SHAPE, np.uint8))
    assert "mask.n5/raw is zero all over the volume, so nothing is selected" in refusal(
        give, *run("--mask", "mask.n5/raw")
    )


def test_only_outside_the_output_is_refused_with_both_boxes(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    said = refusal(give, *run("--only", "0:8,0:8,24:32"))
    assert "--only 0:8,0:8,24:32, axis x: 24:32 is empty or leaves the output, which is 0:16,0:16,0:24" in said


@pytest.mark.parametrize(("factors", "is_stretched"), [((1, 2, 2), False), ((8 / 7, 1, 1), True), ((0.5, 1, 1), False)])
def test_a_mask_that_is_no_level_of_the_volume_is_said_to_be_stretched(
    factors: tuple[float, ...], is_stretched: bool, tmp_path: Path, give: Give
) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    shape = [round(n / factor) for n, factor in zip(SHAPE, factors, strict=True)]
    write_volume(tmp_path / "mask.n5", np.ones(shape, np.uint8))
    ended = give(*run("--mask", "mask.n5/raw"))
    assert ended.code == 0, ended.err
    words = " ".join(ended.out.split())
    assert ("stretched over the volume: its voxels are 1.14 × 1 × 1 of the volume's" in words) == is_stretched


def test_only_where_the_mask_wants_nothing_is_refused(tmp_path: Path, give: Give) -> None:
    """It said "wrote the part" of which nothing was written."""
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    mask = np.zeros(SHAPE, np.uint8)
    mask[:, :, :8] = 1
    write_volume(tmp_path / "mask.n5", mask)
    said = refusal(give, *run("--mask", "mask.n5/raw", "--only", "0:8,0:8,16:24"))
    assert "nothing in --only 0:8,0:8,16:24 is selected: mask or empty space leave it out" in said
    assert give(*run("--mask", "mask.n5/raw", "--only", "0:8,0:8,0:8")).code == 0


# ---- labels and images


@pytest.mark.parametrize("dtype", ["uint32", "int32", "uint64", "int64"])
def test_labels_given_to_a_net_of_images_are_refused(dtype: str) -> None:
    labels = volume(dtype=dtype)
    with pytest.raises(PlanError, match=rf"has {dtype} voxels, as labels have, .* more than 24 bits; name the image"):
        planned(of=labels)
    assert planned("normalise.low=0", "normalise.high=70000", of=labels).source.dtype == dtype
    assert planned("normalise.method=none", of=labels).source.dtype == dtype


def test_numbers_that_a_net_would_round_are_refused(tmp_path: Path, give: Give) -> None:
    """The identity, which computes nothing, gives all of them back."""
    labels = np.full(SHAPE, 2**24 + 1, np.uint32)
    write_volume(tmp_path / "in.n5", labels)
    said = refusal(give, *run(*set_each("normalise.method=none", "net.name=shift", "windows.overlap=auto")), code=1)
    assert "a voxel is 16,777,217; nets see float32, in which whole numbers above 16,777,216 are rounded" in said
    assert give(*run("--fresh", *set_each("normalise.method=none", "output.dtype=uint32"))).code == 0
    np.testing.assert_array_equal(open_volume(tmp_path / "out.zarr").open()[...], labels)


def test_a_mask_with_nan_is_refused(tmp_path: Path, give: Give) -> None:
    """NaN is not 0, so that it was wanted."""
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    mask = np.ones(SHAPE, np.float32)
    mask[3, 4, 5] = np.nan
    write_volume(tmp_path / "mask.n5", mask)
    assert "has NaN in its box 0:16,0:8,0:8" in refusal(give, *run("--mask", "mask.n5/raw"), code=1)


def test_an_image_is_not_scored_as_labels_nor_labels_as_an_image(tmp_path: Path, give: Give) -> None:
    write_sample(tmp_path / "sample.n5", SyntheticVolume((32, 48, 48), 3))
    raw, labels = "sample.n5/raw", "sample.n5/labels"
    score = ["evaluate", *THREADS]
    said = refusal(give, *score, "--labels", raw, raw)
    assert "sample.n5:raw looks like an image, not like labels: of neighbouring voxels in 0:32,0:48,0:48 only" in said
    assert "as labels have, whose numbers are no grey levels; score labels with --labels" in refusal(
        give, *score, labels, labels
    )
    assert give(*score, "--labels", labels, labels).code == 0
    assert give(*score, "--data-range", "1000", labels, labels).code == 0
    assert give(*score, raw, raw).code == 0


def test_scores_of_a_flow_are_made_again_where_the_reference_has_changed(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    write_volume(tmp_path / "truth.n5", noise(SHAPE, seed=1))
    (tmp_path / "flow.toml").write_text(
        '[[stage]]\nname = "same"\nnet = { name = "identity" }\nwindows = { shape = [8, 8, 8] }\n'
        '[[stage]]\nname = "scores"\nkind = "evaluate"\nreference = "truth.n5"\n'
    )
    command = ["run", *THREADS, "--recipe", "flow.toml", "-o", "out", "in.n5/raw"]
    assert give(*command).code == 0
    before = (tmp_path / "out/scores.json").read_text()
    assert "complete already" in give(*command).out
    shutil.rmtree(tmp_path / "truth.n5")
    write_volume(tmp_path / "truth.n5", noise(SHAPE))
    assert "stage 2 of 2: scores, evaluate of same" in give(*command).out
    assert (tmp_path / "out/scores.json").read_text() != before


# ---- offsets of affinities

FLOW = """
[[stage]]
name = "affinities"
net = { name = "nine.py:net", offsets = [[-1, 0, 0], [0, -1, 0], [0, 0, -1]] }
windows = { shape = [8, 8, 8] }

[[stage]]
name = "objects"
kind = "label"
input = { offsets = [[-1, 0, 0], [0, -1, 0], [0, 0, -1]] }
"""
NET = """
import torch
class Three(torch.nn.Module):
    volpipe = dict(out_channels=3, intensity="unit")
    def forward(self, x):
        return torch.sigmoid(x).repeat(1, 3, 1, 1, 1)
def net():
    return Three()
"""


def test_affinities_of_other_offsets_than_the_recipes_are_refused(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    (tmp_path / "nine.py").write_text(NET)
    given = [[-1, 0, 0], [0, -1, 0], [0, 0, -3]]
    settings = set_each("net.name=nine.py:net", f"net.offsets={given}")
    assert give("run", *THREADS, *settings, *WINDOWS, "-o", "aff.zarr", "in.n5/raw").code == 0
    nearest = "[[-1,0,0],[0,-1,0],[0,0,-1]]"
    said = refusal(give, "segment", *THREADS, "--set", f"input.offsets={nearest}", "-o", "l.zarr", "aff.zarr")
    assert f"aff.zarr:s0 holds affinities of the offsets {given}, as its maker noted" in said
    assert "and input.offsets are [[-1, 0, 0], [0, -1, 0], [0, 0, -1]]" in said


def test_stages_whose_offsets_differ_are_refused(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    (tmp_path / "nine.py").write_text(NET)
    command = ["plan", "--quick", *THREADS, "--recipe", "flow.toml", "-o", "out", "in.n5/raw"]
    (tmp_path / "flow.toml").write_text(FLOW)
    assert give(*command).code == 0
    (tmp_path / "flow.toml").write_text(FLOW.replace("[0, 0, -1]]", "[0, 0, -3]]", 1))
    assert "stage objects" in (said := refusal(give, *command))
    assert "as its maker noted" in said


def test_offsets_are_one_for_each_channel() -> None:
    with pytest.raises(PlanError, match=r"net\.offsets names 1 channel, net net makes 3"):
        planned("net.offsets=[[-1,0,0]]", net=facts(out_channels=3))
    assert load_recipe(shipped_recipe(Path("affinities"))).net.offsets == OFFSETS


# ---- files of results


@pytest.mark.parametrize(
    ("command", "fault", "option", "code"),
    [
        (("evaluate", "a.npy", "b.npy", "--data-range", "1"), "nan.npy", "--json", 1),
        (("evaluate", "a.npy", "b.npy", "--data-range", "1"), "nan.npy", "--picture", 1),
        (("evaluate", "a.npy", "b.npy", "--data-range", "1"), "gone.npy", "--json", 2),
        (("compare", "a.npy", "b.npy"), "gone.npy", "--json", 2),
        (("compare", "a.npy", "b.npy"), "gone.npy", "--page", 2),
    ],
)
def test_a_command_that_fails_leaves_no_result_of_an_earlier_one_and_a_refused_one_changes_none(
    tmp_path: Path, give: Give, command: tuple[str, ...], fault: str, option: str, code: int
) -> None:
    data = np.random.default_rng(0).random((16, 16, 16), np.float32)
    np.save(tmp_path / "a.npy", data)
    data[3, 3, 3] = np.nan
    np.save(tmp_path / "nan.npy", data)
    file = tmp_path / {"--json": "r.json", "--picture": "r.png", "--page": "r.html"}[option]
    np.save(tmp_path / "b.npy", np.nan_to_num(data))
    assert give(*command, "--config", "threads", option, file.name).code == 0
    earlier = file.read_bytes()
    command = tuple(fault if word == "b.npy" else word for word in command)
    ended = give(*command, "--config", "threads", option, file.name)
    assert ended.code == code, ended.err
    assert not file.exists() if code == 1 else file.read_bytes() == earlier


def test_the_refusal_of_an_incomplete_output_names_the_command_that_completes_it(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "raw.n5", noise((16, 16, 16)), 8)
    sizes = (f"--set={key}=[8,8,8]" for key in ("windows.shape", "output.shard", "output.chunk"))
    whole = ("run", "--config", "threads", "--set=net.name=identity", "--set=windows.block=[1,1,1]", *sizes)
    assert give(*whole, "-o", "o.zarr", "raw.n5/raw", "--only", "0:8,:,:").code == 0
    refused = give("convert", "o.zarr", "copy.tif")
    assert refused.code == 2
    words = " ".join(refused.err.split())
    assert "is incomplete: only 0:8,0:16,0:16 is written" in words
    assert f"`volpipe {shlex.join(whole)} -o o.zarr raw.n5/raw` completes it" in words
    assert "--incomplete" in words
    assert give("info", "o.zarr", "--fast").out.splitlines()[0].endswith("(incomplete, written: 0:8,0:16,0:16)")
    assert give("convert", "o.zarr", "copy.tif", "--incomplete").code == 0
    assert give(*whole, "-o", "o.zarr", "raw.n5/raw").code == 0
    assert give("convert", "o.zarr", "whole.tif").code == 0
