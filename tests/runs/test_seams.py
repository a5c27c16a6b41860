"""The seam score: near one for outputs without seams, far above where windows disagree at their faces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from at_once import Together
from command import Give, giver, set_each
from plans import facts, planned, volume
from volumes import noise, windowed, write_volume

import volpipe as vp
from volpipe.api.outputs import find_page
from volpipe.display.reports import seam_line, seam_warning
from volpipe.inference.output import READERS
from volpipe.inference.selection import Selection
from volpipe.runs.seams import BLIND, THRESHOLD, blind_spot, seam_squares
from volpipe.synthetic.volume import SyntheticVolume, write_sample
from volpipe.volumes.formats.container import read_attributes

# Adds the mean of a window to it, many times: windows of an uneven volume disagree.
NET = """
import torch
class Tilted(torch.nn.Module):
    volpipe = dict(intensity="raw")
    def forward(self, x):
        return x + x.mean() * 20
def build():
    net = Tilted()
    net.volpipe = dict(net.volpipe, tile_invariant=True)
    return net
"""


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    (tmp_path / "net.py").write_text(NET)
    return giver(tmp_path, monkeypatch, capsys)


def scores(out: Path) -> dict[str, float]:
    found: dict[str, float] = read_attributes(out / "run")["volpipe"]["seams"]
    return found


def test_windows_that_disagree_are_scored_told_and_warned_about(tmp_path: Path, give: Give) -> None:
    rng = np.random.default_rng(0)
    write_volume(tmp_path / "in.n5", rng.normal(0, 1, (32, 32, 32)).astype(np.float32))
    division = windowed((8, 8, 8), (0, 0, 0), (2, 2, 2), "crop")
    recipe = set_each(
        "net.name=net.py:build", "net.accept_tile_variance=true", "normalise.method=none", *division
    )  # fmt: skip
    ended = give("run", "--config", "threads", *recipe, "-o", "out.zarr", "in.n5/raw")
    assert ended.code == 0
    (line,) = (line for line in ended.out.splitlines() if line.startswith("seams: z "))
    assert len(line) <= 120
    assert "warning: the faces of windows may be seen along z, y, x (above 1.2)" in ended.err
    assert min(scores(tmp_path / "out.zarr").values()) > THRESHOLD


@pytest.mark.parametrize("blend", ["crop", "hann"])
def test_a_net_that_changes_nothing_has_no_seams(tmp_path: Path, give: Give, blend: str) -> None:
    write_volume(tmp_path / "in.n5", noise((40, 40, 40)))
    division = windowed((16, 16, 16), (4, 4, 4), (1, 1, 1), blend)
    recipe = set_each("net.name=identity", *division)
    ended = give("run", "--config", "threads", *recipe, "-o", "out.zarr", "in.n5/raw")
    assert (ended.code, ended.err) == (0, "")
    assert list(scores(tmp_path / "out.zarr")) == ["z", "y", "x"]
    assert all(0.9 < value < 1.1 for value in scores(tmp_path / "out.zarr").values())


@pytest.mark.parametrize("shrink", [1, 4])
def test_a_score_is_the_ratio_of_mean_squares(monkeypatch: pytest.MonkeyPatch, shrink: int) -> None:
    """Steps of 3 at faces and of 1 next to them: 9 by 1, but for what rounding adds to both."""
    units, size = (shrink,) * 3, 10 * shrink
    plan = planned(
        "net.name=identity", f"windows.shape={[size] * 3}", "windows.overlap=0", "windows.block=[1,1,1]",
        of=volume((40 * shrink,) * 3), net=facts(stride=units, shrink=units),
    )  # fmt: skip
    along = np.cumsum([0, *(3 if i % 10 in (0, 4, 6) else 1 for i in range(1, 40))]).astype(np.uint8)
    data = np.broadcast_to(along[:, None, None], (40, 40, 40))
    monkeypatch.setattr("volpipe.inference.output.read_voxels", lambda plan, level, box: data[box.slices][np.newaxis])
    found = {each.score.axis: each.score.value for each in seam_squares(Selection(plan))}
    assert found == pytest.approx({"z": (9 + 1 / 6) / (1 + 1 / 6), "y": 1.0, "x": 1.0})


@pytest.mark.parametrize(("elsewhere", "is_seam"), [((1, 1), True), ((3, 1), False)])
def test_the_one_face_of_a_small_volume_is_a_seam_only_where_it_stands_out(
    monkeypatch: pytest.MonkeyPatch, elsewhere: tuple[int, int], is_seam: bool
) -> None:
    """A step of 3 at the face, in a volume whose other steps are all 1, or every second one 3 as well."""
    plan = planned(
        "net.name=identity", "windows.shape=[10,10,10]", "windows.overlap=0", "windows.block=[1,1,1]",
        of=volume((20, 40, 40)),
    )  # fmt: skip
    steps = [3 if place == 10 else elsewhere[place % 2] for place in range(1, 20)]
    data = np.broadcast_to(np.cumsum([0, *steps]).astype(np.uint8)[:, None, None], (20, 40, 40))
    monkeypatch.setattr("volpipe.inference.output.read_voxels", lambda plan, level, box: data[box.slices][np.newaxis])
    score = seam_squares(Selection(plan))[0].score
    assert (score.axis, score.value) == ("z", pytest.approx((9 + 1 / 6) / (1 + 1 / 6)))
    assert (score.is_seam, score.is_of_tissue) == (is_seam, not is_seam)
    assert bool(seam_warning([score])) == is_seam
    assert ("along z as large elsewhere" in seam_line([score])) == (not is_seam)


WHOLE = """
import torch
class Whole(torch.nn.Module):
    def forward(self, x):
        return x - x.mean((2, 3, 4), keepdim=True)
def build():
    net = Whole()
    net.volpipe = dict(
        in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(0, 0, 0), tile_invariant=False, intensity="same"
    )
    return net
"""


@pytest.mark.parametrize(("name", "is_exact"), [("identity", True), ("net.py:build", False)])
def test_a_score_says_what_it_does_not_see_where_windows_disagree(tmp_path: Path, name: str, is_exact: bool) -> None:
    """Blended by half of a window, a net that subtracts the mean of its window has no steps and other voxels."""
    (tmp_path / "net.py").write_text(WHOLE)
    data = write_volume(tmp_path / "in.n5", noise((64, 64, 64)))
    choices = ["windows.shape=[32,32,32]", "windows.overlap=[16,16,16]", "windows.blend=gaussian"]
    place = name if is_exact else tmp_path / name
    choices += [f"net.name={place}", f"net.accept_tile_variance={str(not is_exact).lower()}"]
    report = vp.run(f"{data}/raw", out=tmp_path / "out.zarr", site="threads", settings=choices)
    assert not any(score.is_seam for score in report.seams) and report.seams
    page, _ = find_page(str(report.plan.out))
    said = [seam_line(report.seams, blind_spot(report.plan)), repr(vp.seams(report)), repr(page)]
    assert [BLIND in text for text in said] == [not is_exact] * 3
    assert all("is no seam" not in text for text in said)


@pytest.mark.parametrize(("chunk", "num"), [(64, READERS), (128, 1)])
def test_few_large_chunks_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch, chunk: int, num: int) -> None:
    plan = planned("net.name=identity", f"output.chunk=[{chunk},{chunk},{chunk}]", of=volume((1024, 1024, 1024)))
    read = Together(lambda plan, level, box: np.zeros((1, *box.shape), np.uint8), num)
    monkeypatch.setattr("volpipe.inference.output.read_voxels", read)
    monkeypatch.setattr("volpipe.volumes.storage.requests.BYTES_AT_ONCE", 2 * 128**3)  # a face lies between two
    seam_squares(Selection(plan), 8)
    assert read.most == num


def test_labels_have_no_score() -> None:
    assert seam_squares(Selection(planned("net.name=identity", "output.kind=labels"))) == []


def test_the_edges_of_a_mask_are_no_seams(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise((40, 40, 40)) // 4 + 150)
    mask = np.zeros((40, 40, 40), np.uint8)
    mask[:20, :20] = 1
    write_volume(tmp_path / "mask.n5", mask)
    recipe = set_each("net.name=identity", *windowed((10, 10, 10), (0, 0, 0), (1, 1, 1), "crop"))
    ended = give("run", "--config", "threads", *recipe, "--mask", "mask.n5/raw", "-o", "out.zarr", "in.n5/raw")
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.long
@pytest.mark.slow
def test_a_denoiser_without_its_halo_is_warned_about_and_with_it_is_not(tmp_path: Path, give: Give) -> None:
    write_sample(tmp_path / "em.n5", SyntheticVolume((64, 96, 96), 0))
    right = set_each("windows.shape=[52,52,52]", "output.levels=0")
    ended = give("run", "--config", "threads", *right, "-o", "right.zarr", "em.n5/raw")
    assert (ended.code, "warning" in ended.err) == (0, False)
    lie = ("net.halo=[0,0,0]", "net.accept_tile_variance=true")
    without = set_each("windows.shape=[32,32,32]", *lie, "windows.overlap=0", "output.levels=0")
    ended = give("run", "--config", "threads", *without, "-o", "without.zarr", "em.n5/raw")
    assert ended.code == 0
    assert "warning: the faces of windows may be seen" in ended.err
