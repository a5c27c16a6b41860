"""What pages say that volpipe does, and does not, is so: a claim stands on its page, and is tried.

Not here: what blocks of code show (test_pages). A claim that something is *not* served fails here once it is.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from inline import Inline
from torch import nn
from volumes import noise, windowed, write_volume

import volpipe as vp
from volpipe.errors import VolpipeError
from volpipe.volumes.volume import open_volume

NETS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "volumes": ("Conv3d(1, 1, 3, padding=1)", lambda: nn.Conv3d(1, 1, 3, padding=1)),
    "slices": ("Conv2d(1, 1, 3, padding=1)", lambda: nn.Conv2d(1, 1, 3, padding=1)),
    "normed": (
        "Sequential(InstanceNorm3d(1), Conv3d(1, 1, 1))",
        lambda: nn.Sequential(nn.InstanceNorm3d(1), nn.Conv3d(1, 1, 1)),
    ),
    "both": ("Bilinear(8, 8, 8)", lambda: nn.Bilinear(8, 8, 8)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with an image of one slice, one of many, and labels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    np.save("one.npy", noise((1, 40, 40)))
    np.save("many.npy", noise((16, 24, 24)))
    np.save("labels.npy", noise((16, 24, 24)).astype(np.uint32))


def on_page(page: str, sentence: str) -> bool:
    return sentence in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def output(volume: str, name: str, *settings: str, beside: object = None) -> np.ndarray:
    """Return what a net of NETS makes of a volume; its weights lie in a file with something else beside them."""
    code, make = NETS[name]
    Path("nets.py").write_text(f"from torch.nn import *\n\n\ndef {name}():\n    return {code}\n")
    torch.save({"state_dict": make().state_dict(), "beside": beside}, "weights.pt")
    chosen = [f"net.name=nets.py:{name}", "net.weights=weights.pt", "output.levels=0", *settings]
    plan = vp.plan(volume, out="out.zarr", settings=chosen)
    assert not vp.run(plan, site=Inline()).missing
    data: np.ndarray = vp.open("out.zarr").open()[...]
    return data


def test_an_image_of_one_slice_runs_with_a_net_of_slices_alone() -> None:
    assert on_page("docs/faq.md", "an image is a volume of one slice")
    assert on_page("docs/peers.md", "Images of one slice only with nets of slices.")
    assert output("one.npy", "slices").shape == (1, 40, 40)
    with pytest.raises(VolpipeError):
        output("one.npy", "volumes")


def test_a_net_of_two_inputs_is_refused() -> None:
    assert on_page("docs/faq.md", "Nets with two inputs: no.")
    assert on_page("docs/peers.md", "**One input** of a net.")
    with pytest.raises(VolpipeError, match="missing 1 required positional argument"):
        output("many.npy", "both")


def test_a_net_that_looks_at_its_whole_window_is_tiled_and_not_refused() -> None:
    assert on_page("docs/faq.md", "volpipe says so, and tiles them as their makers do")
    assert np.ptp(output("many.npy", "normed", "windows.shape=[16,16,16]")) > 0


def test_labels_go_through_nets_of_integers_alone() -> None:
    assert on_page("docs/faq.md", "A net reads them only if it declares `integers`, with `normalise.method=none`")
    settings = ["net.name=identity", "normalise.method=none", "output.levels=0"]
    vp.run("labels.npy", out="same.zarr", site="threads", settings=settings)
    np.testing.assert_array_equal(vp.open("same.zarr").open()[...], np.load("labels.npy"))
    with pytest.raises(VolpipeError, match="whose numbers are no grey levels"):
        output("labels.npy", "volumes")


@pytest.mark.parametrize(("beside", "loads"), [
    (np.float64(0.5), True), (np.int64(3), True), (argparse.Namespace(a=1), False), (np.arange(3), False),
])  # fmt: skip
def test_weights_load_with_numbers_beside_them_and_not_with_other_classes(beside: object, loads: bool) -> None:
    assert on_page("docs/models.md", "| numpy's numbers beside the tensors | loads |")
    assert on_page("docs/models.md", "such as `argparse.Namespace` or numpy's arrays | refused, naming them.")
    if loads:
        assert output("many.npy", "volumes", beside=beside).shape == (16, 24, 24)
        return
    with pytest.raises(VolpipeError, match=r"argparse.Namespace|numpy.ndarray"):
        output("many.npy", "volumes", beside=beside)


@pytest.mark.parametrize(("placement", "has_sums"), [("lattice", False), ("even", True)])
def test_crop_takes_scratch_where_windows_are_placed_evenly(placement: str, has_sums: bool) -> None:
    assert on_page("docs/faq.md", "With `crop` on a lattice, with streamed windows, there is none;")
    np.save("large.npy", noise((32, 48, 48)))
    windows = windowed((20, 20, 20), (8, 8, 8), (1, 1, 1), "crop")
    settings = ["net.name=identity", *windows, f"windows.placement={placement}"]
    plan = vp.plan("large.npy", out="out.zarr", settings=settings)
    assert plan.mode == "streamed" and (plan.num_sums > 0) == has_sums


def test_every_extra_is_on_the_page_of_the_installation() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("| extra |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == set(extras)


def test_stored_windows_have_the_seven_dimensions_of_the_glossary() -> None:
    table = (
        (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("| dimension |")[2].partition("\n\n")[0]
    )
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"\*\*(\w+)\*\*", line.split("|")[1])]
    volume = write_volume(Path("in.n5"), noise((16, 24, 24)))
    settings = ["net.name=identity", "tensors.mode=stored", *windowed((8, 8, 8), (4, 4, 4), (2, 2, 2), "hann")]
    vp.run(f"{volume}/raw", out="out.zarr", site="threads", settings=settings, keep_tensors=True)
    stored = open_volume(Path("out.zarr.run/tensors.n5"), "tensors/source")
    attributes = stored.attributes["volpipe"]
    assert sorted(attributes["dimensions"]) == sorted(named) and len(named) == 7
    assert attributes["dimensions"][2:] == ["batch", "channel", "z", "y", "x"]
    assert (attributes["dataset"], attributes["iteration"]) == (f"{volume.absolute()}:raw", 0)
    assert stored.shape[1:] == (1, 8, 8, 8) and stored.shape[0] > 1
