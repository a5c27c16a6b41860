"""Two outputs compared: numbers of numpy and scikit-image whatever the blocks; how they were made; what is refused."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import make
from bucket import Bucket
from command import Give, giver
from inline import Inline, Stopped
from PIL import Image
from scored import compared, label_pair, save
from skimage import metrics
from volumes import noise, windowed

import volpipe as vp
from volpipe.errors import PlanError
from volpipe.evaluation import subject
from volpipe.evaluation.compare import Differences, plan_comparison
from volpipe.evaluation.differences import (
    ImageDifference,
    LabelDifference,
    change_of,
    difference_sums,
    label_difference,
    matches,
)
from volpipe.evaluation.label_scores import overlaps
from volpipe.evaluation.results import ComparisonResult
from volpipe.reporting.page import Picture
from volpipe.reporting.panels import CAPTION, MARGIN

SHAPE = (21, 40, 30)
A, B = (labels.astype(np.uint32) for labels in label_pair((4, 4, 5), (6, 7, 6)))
BLOCKY = np.kron(noise((3, 5, 5), "uint32"), np.ones((7, 8, 6), "uint32"))


@pytest.fixture(autouse=True)
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """Return what gives a command in a folder of the test, where all works in small blocks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subject, "BLOCK", (8, 16, 16))
    return giver(tmp_path, monkeypatch, capsys)


def found_in(result: ComparisonResult) -> Differences:
    assert result.differences is not None
    return result.differences


def of_images(result: ComparisonResult) -> ImageDifference:
    together = found_in(result).together
    assert isinstance(together, ImageDifference)
    return together


def of_labels(result: ComparisonResult) -> LabelDifference:
    together = found_in(result).together
    assert isinstance(together, LabelDifference)
    return together


def changed(a: np.ndarray, seed: int = 1) -> np.ndarray:
    """Return `a` with every fifth voxel drawn anew."""
    other = noise(a.shape, a.dtype.name, seed)
    return np.where(np.random.default_rng(seed).random(a.shape) < 0.2, other, a)


# ---- images


@pytest.mark.parametrize(("dtype", "data_range"), [("uint8", 255), ("int16", 65535), ("float32", 300)])
def test_differences_are_those_of_numpy(dtype: str, data_range: int) -> None:
    a = noise(SHAPE, dtype)
    b = changed(a)
    result = compared(a, b, data_range=300.0 if dtype == "float32" else None)
    gap, found = b.astype(np.float64) - a, of_images(result)
    assert (found.num_voxels, found.num_differ) == (a.size, int((a != b).sum()))
    assert found.largest == np.abs(gap).max()
    assert (found.mean, found.shift) == pytest.approx((np.abs(gap).mean(), gap.mean()))
    assert found.psnr == pytest.approx(metrics.peak_signal_noise_ratio(a, b, data_range=data_range))
    assert not Path("c.run").exists()


def test_the_boxes_that_differ_most_are_named_the_worst_first() -> None:
    a = np.zeros(SHAPE, np.uint8)
    b = a.copy()
    b[3, 5, 7], b[20, 39, 29], b[10, 20, 20] = 9, 200, 40
    result = compared(a, b)
    boxes = ["16:21,32:40,16:30", "8:16,16:32,16:30", "0:8,0:16,0:16"]
    assert [str(box.box) for box in found_in(result).worst] == boxes
    assert (found_in(result).num_boxes, found_in(result).num_boxes_differ) == (3 * 3 * 2, 3)
    assert all(f"<td>{box}</td>" in result._repr_html_() for box in boxes)
    part = compared(a, b, roi="2:21,:,:")
    assert str(found_in(part).worst[0].box) == "18:21,32:40,16:30"
    assert of_images(part).num_voxels == 19 * 40 * 30


@pytest.mark.parametrize("num_channels", [3, 5])
def test_channels_are_compared_each_and_together(num_channels: int) -> None:
    a = noise((num_channels, 10, 20, 18), "float32")
    b = np.stack([changed(part, seed) if seed else part for seed, part in enumerate(a)])
    result = compared(a, b, data_range=10.0)
    for channel, one, other in zip(found_in(result).channels, a, b, strict=True):
        known = metrics.peak_signal_noise_ratio(one, other, data_range=10) if (one != other).any() else math.inf
        assert (channel.psnr, channel.num_differ) == (pytest.approx(known), int((one != other).sum()))
    assert of_images(result).psnr == pytest.approx(metrics.peak_signal_noise_ratio(a, b, data_range=10))


@pytest.mark.parametrize("a", [noise(SHAPE, "float32"), BLOCKY], ids=["float32", "uint32"])
def test_numbers_are_the_same_whatever_the_workers_and_their_order(a: np.ndarray) -> None:
    pools = [Inline(), *(Inline(seed, slots=slots) for seed, slots in ((1, 1), (2, 3), (3, 4)))]
    trees = [compared(a, changed(a), pool).to_json() for pool in pools]
    assert trees[1:] == trees[:1] * 3


def test_what_is_no_number_is_counted_named_and_the_same_where_both_have_it() -> None:
    a = np.ones(SHAPE, np.float32)
    b = a.copy()
    a[0, 0, :4] = np.nan, np.inf, -np.inf, np.nan
    b[0, 0, :4] = np.nan, np.inf, np.inf, 1.0
    b[20, 39, 29], a[12, 3, 3] = 3.0, np.inf
    result = compared(a, b, data_range=1.0)
    sums = of_images(result)
    assert (sums.num_nonfinite_a, sums.num_nonfinite_b, sums.num_unlike, sums.num_differ) == (5, 3, 3, 4)
    assert (sums.largest, sums.num) == (2.0, a.size - 5)
    boxes = ["0:8,0:16,0:16", "8:16,0:16,0:16", "16:21,32:40,16:30"]
    assert [str(box.box) for box in found_in(result).worst] == boxes
    assert any("5 voxels of A, 3 of B, first in 0:8,0:16,0:16; 3 are so in one" in line for line in result.summary)
    assert compared(a, a, data_range=1.0).is_same


def test_nan_in_one_alone_violates_every_limit_of_what_it_does_not_count_in() -> None:
    """Without it a net that gives NaN in half of its voxels, and else the same, would have an infinite PSNR."""
    a = np.ones(SHAPE, np.float32)
    b = np.where(np.arange(30) < 15, np.float32(np.nan), a)
    result = compared(a, b, data_range=1.0, limits=["psnr=40", "mean=1", "largest=1", "differ=0.6"])
    assert [line.split(":")[0] for line in result.violations] == ["psnr=40", "mean=1", "largest=1"]
    assert "12,600 voxels are NaN or infinite in one output alone" in result.violations[0]
    assert not result.is_within


@pytest.mark.parametrize("dtype", [np.uint64, np.int64])
def test_whole_numbers_of_64_bits_differ_by_what_they_do(dtype: type) -> None:
    extremes = np.array([0, 1, 2**63, 2**64 - 1, 2**64 - 2, 5], np.uint64).view(dtype)
    a, b = (part.ravel() for part in np.meshgrid(extremes, extremes))
    known = [float(int(y) - int(x)) for x, y in zip(a, b, strict=True)]
    assert change_of(a, b).tolist() == known
    assert difference_sums(a, b).largest == max(map(abs, known))


def test_without_a_range_there_is_no_psnr_and_no_limit_of_it() -> None:
    a = noise(SHAPE, "float32")
    result = compared(a, changed(a))
    assert of_images(result).psnr is None and any("give --data-range" in line for line in result.summary)
    with pytest.raises(PlanError, match=r"limit psnr=40: .* float32 voxels, .*give --data-range"):
        compared(a, a, limits=["psnr=40"])


# ---- labels


def best(labels: np.ndarray, others: np.ndarray, label: int) -> int:
    """Return the object of `others` with most voxels in that of `labels`, 0 without any."""
    values, counts = np.unique(others[(labels == label) & (others != 0)], return_counts=True)
    return int(values[counts == counts.max()].min()) if len(values) else 0


def test_labels_differ_where_they_are_no_best_match_and_voi_is_that_of_scikit_image() -> None:
    result = compared(A, B)
    found, objects, others = of_labels(result), np.unique(A[A != 0]), np.unique(B[B != 0])
    back = {int(label): best(A, B, label) for label in objects}
    pairs = {0: 0} | {one: other for one, other in back.items() if other and best(B, A, other) == one}
    same = np.vectorize(lambda one, other: pairs.get(int(one)) == int(other))(A, B)
    assert found.num_differ == int((~same).sum()) > 0
    assert (found.num_matched, found.num_objects_a, found.num_objects_b) == (len(pairs) - 1, len(objects), len(others))
    either = (A != 0) | (B != 0)
    assert (found.split, found.merge) == pytest.approx(metrics.variation_of_information(A[either], B[either]))
    assert found.rand_error == pytest.approx(metrics.adapted_rand_error(A[either] + 1, B[either] + 1)[0])
    worst = found_in(result).worst[0]
    assert worst.difference.num_differ == int((~same[worst.box.slices]).sum())


def test_labels_that_have_other_numbers_alone_are_the_same_objects() -> None:
    b = np.array([0, *np.random.default_rng(5).permutation(np.arange(1, 9)) * 7], np.uint32)[A]
    result = compared(A, b, limits=["voi=0", "differ=0"])
    assert result.is_same and result.is_within
    assert (of_labels(result).voi, of_labels(result).num_differ) == (0, 0)
    none, moved = f"0 of {A.size:,} voxels differ", int((b != A).sum())
    assert result.summary == [
        f"the same objects, numbered otherwise: VOI 0, {none}, and {moved:,} have another number"
    ]  # fmt: skip
    assert compared(A, A).summary == [f"identical: {none}"]


def test_objects_that_are_invented_or_lost_differ() -> None:
    a = np.zeros(SHAPE, np.uint32)
    a[:5] = 1
    b = a.copy()
    b[10:12, :20], b[10:12, 20:] = 2, 3
    invented, lost = of_labels(compared(a, b)), of_labels(compared(b, a))
    assert invented.num_differ == lost.num_differ == 2 * 40 * 30
    assert invented.split == pytest.approx(lost.merge) and invented.voi > 0.1
    assert of_labels(compared(a, np.zeros_like(a))).num_differ == 5 * 40 * 30  # which VOI does not see
    assert compared(np.zeros_like(a), np.zeros_like(a)).is_same


def test_of_equal_overlaps_the_lowest_label_is_the_match_and_the_greatest_number_is_one_too() -> None:
    a, b = np.repeat([1, 2], 8), np.tile([6, 5], 8)
    pairs = matches(overlaps(labels=b, truth=a))
    assert pairs.T.tolist() == [[0, 0], [1, 5]]
    assert label_difference(overlaps(labels=b, truth=a), pairs).num_differ == 12
    most = np.where(b == 6, 2**64 - 1, 0).astype(np.uint64)
    table = overlaps(labels=most, truth=b)  # 5 lies in nothing, and no number says so
    assert label_difference(table, matches(table)).num_differ == 8


# ---- what tells labels from images, and what is refused


def test_a_type_too_wide_for_greys_is_one_of_labels_unless_a_range_is_given() -> None:
    save(a=BLOCKY, narrow=(BLOCKY % 200).astype(np.uint8))
    assert plan_comparison("a.npy", "a.npy").kind == "labels"
    assert plan_comparison("a.npy", "a.npy", data_range=9.0).kind == "image"
    assert plan_comparison("narrow.npy", "narrow.npy").kind == "image"
    assert plan_comparison("narrow.npy", "narrow.npy", labels=True).kind == "labels"
    assert plan_comparison("narrow.npy", "a.npy", labels=True).kind == "labels"  # numbers of any width


BYTE, WIDE = noise(SHAPE), np.zeros(SHAPE, np.uint32)


@pytest.mark.parametrize(
    ("a", "b", "options", "sentence"),
    [
        (BYTE, BYTE[1:], {}, r"A has 21 × 40 × 30 voxels \(z, y, x\), B 20 × 40 × 30"),
        (noise((3, 4, 8, 8)), noise((2, 4, 8, 8)), {}, "A has 3 channels, B 2: "),
        (BYTE, BYTE.astype(np.uint16), {}, "A has uint8 voxels, B uint16"),
        (BYTE, BYTE.astype(np.float32), {}, "A has uint8 voxels, B float32"),
        (BYTE.astype(np.float32), WIDE, {"labels": True}, "A has float32 voxels and 1 channel, "),
        (BYTE, BYTE, {"labels": True}, "looks like an image, not like labels"),
        (BYTE, BYTE, {"data_range": 0.0}, "0 is no difference of two values"),
        (WIDE, WIDE, {"labels": True, "data_range": 1.0}, "labels have none"),
        (BYTE, BYTE, {"roi": "5:22,:,:"}, "axis z: 5:22 leaves the volume of 21 voxels"),
        (BYTE, BYTE, {"limits": ["voi=1"]}, r"compared as images .*, which have no voi; .* psnr"),
        (WIDE, WIDE, {"limits": ["psnr=1"]}, r"compared as labels .*, which have no psnr; .* voi"),
        (
            BYTE,
            BYTE,
            {"limits": ["pnsr=40"]},
            r"'pnsr' \(did you mean 'psnr'\?\); those are psnr, differ, mean, largest",
        ),
        (BYTE, BYTE, {"limits": ["psnr"]}, "write psnr=NUMBER, a number from 0 up"),
        (BYTE, BYTE, {"limits": ["psnr=nan"]}, "write psnr=NUMBER"),
        (BYTE, BYTE, {"limits": ["differ=1.5"]}, r"it is a share, from 0 to 1; write differ=0.01 for 1 %"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_both_values(
    a: np.ndarray, b: np.ndarray, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(vp.VolpipeError, match=sentence):
        compared(a, b, **options)
    assert not Path("c.run").exists()


def test_a_limit_of_one_channel_is_not_hidden_by_the_others() -> None:
    a = np.zeros((4, 8, 8, 8), np.uint8)
    b = a.copy()
    b[2] = 5
    result = compared(a, b, limits=["mean=2", "largest=5", "psnr=30"])
    assert result.violations == ["channel 2: mean=2: the mean difference is 5"]


# ---- how outputs were made

COMPONENTS: dict[str, Any] = {
    "input": {"kind": "foreground"},
    "objects": {"method": "components"},
    "output": {"block": [8, 8, 8], "chunk": [4, 4, 4], "levels": 0},
}
IDENTITY = ("net.name=identity", "output.levels=1", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))
RANGE = ("normalise.low=3", "normalise.high=190", "normalise.method=range")
RAW = noise((16, 16, 16))


def run(out: str, *settings: str, volume: str = "raw.zarr", data: np.ndarray = RAW) -> vp.Report:
    """Return the report of a run over a volume, which is written before if it is not there."""
    if not Path(volume).exists():
        make(Path(volume).absolute(), data)
    report = vp.run(volume, out=out, site=Inline(), settings=[*IDENTITY, *settings])
    assert isinstance(report, vp.Report)
    return report


def outputs_compared(a: str, b: str | vp.Report, **options: Any) -> vp.ComparisonResult:
    result = vp.compare(a, b, site=Inline(), **options)
    assert isinstance(result, vp.ComparisonResult)
    return result


def test_what_was_done_otherwise_stands_beside_it() -> None:
    run("a.zarr")
    run("b.zarr", *RANGE)
    rows = {what: (a, b) for what, a, b in outputs_compared("a.zarr", "b.zarr").made_otherwise}
    assert rows["recipe normalise.low"] == ("–", "3.0")
    assert rows["normalised by"][0] == "shift 127.5, scale 127.5"
    assert set(rows) == {"normalised by", *(f"recipe normalise.{key}" for key in ("method", "low", "high"))}
    alike = outputs_compared("a.zarr", run("again.zarr"))
    assert (alike.made_otherwise, alike.is_same, alike.plan.why) == ([], True, "as their attributes say")
    assert plan_comparison("a.zarr", "a.zarr").notes[0].startswith("A and B are the same volume")


def test_outputs_of_different_inputs_are_refused_unless_they_are_asked_for() -> None:
    run("of_raw.zarr")
    run("of_other.zarr", volume="other.zarr", data=noise((16, 16, 16), seed=1))
    with pytest.raises(PlanError, match=r"A was made of .*/raw\.zarr, B of .*/other\.zarr, .* or give --any-input"):
        outputs_compared("of_raw.zarr", "of_other.zarr")
    assert not outputs_compared("of_raw.zarr", "of_other.zarr", any_input=True).is_same
    run("low.zarr", "input.roi=0:8,:,:")
    run("high.zarr", "input.roi=8:16,:,:")
    with pytest.raises(PlanError, match=r"A (shows the box 0:8|begins at)"):
        outputs_compared("low.zarr", "high.zarr")
    save(foreign=RAW)
    assert outputs_compared("of_raw.zarr", "foreign.npy").plan.notes[0].startswith("B says nothing of its input")


def test_labels_of_two_nets_have_one_input_through_what_they_were_made_of() -> None:
    blocks = np.kron(noise((4, 4, 4)), np.ones((4, 4, 4), np.uint8))
    for name, scale in (("old", "1.0"), ("new", "0.5")):
        settings = ("normalise.method=zscore", "normalise.mean=0", f"normalise.std={scale}")
        run(f"{name}.zarr", *settings, volume="blocks.zarr", data=blocks)
        vp.segment(f"{name}.zarr", COMPONENTS, out=f"{name}_labels.zarr", site=Inline())
    result = outputs_compared("old_labels.zarr", "new_labels.zarr")
    assert result.plan.kind == "labels"
    assert ("its input: recipe normalise.std", "1.0", "0.5") in result.made_otherwise
    with pytest.raises(PlanError, match="A is labels of `volpipe segment`, B an image of a net"):
        outputs_compared("old_labels.zarr", "new.zarr", any_input=True)


def test_classes_of_a_net_are_compared_by_their_numbers() -> None:
    classes = RAW % 3
    for name, data in (("a", classes), ("b", np.array([0, 2, 1], np.uint8)[classes])):
        run(f"{name}.zarr", "output.kind=labels", "normalise.method=none", volume=f"{name}_raw.zarr", data=data)
    result = outputs_compared("a.zarr", "b.zarr", any_input=True, page="p.html")
    assert (result.plan.kind, of_labels(result).voi) == ("classes", 0)
    assert of_labels(result).num_differ == int((classes != 0).sum())
    assert not result.is_same and result.summary[0].endswith("voxels have another class")


def test_an_output_that_is_not_complete_is_refused() -> None:
    run("a.zarr")
    with pytest.raises(Stopped):
        vp.run("raw.zarr", out="b.zarr", site=Inline(most_tasks=3), settings=IDENTITY)
    with pytest.raises(PlanError, match=r"^B is not complete, its run is not done: b\.zarr; .* reads as zeros"):
        outputs_compared("a.zarr", "b.zarr")


def test_an_output_that_lost_a_file_is_refused() -> None:
    run("a.zarr")
    run("b.zarr")
    Path("moved").mkdir()
    for name in ("b.zarr", "b.zarr.run"):
        Path(name).rename(f"moved/{name}")
    assert outputs_compared("a.zarr", "moved/b.zarr").is_same
    next(file for file in sorted(Path("moved/b.zarr/s0/c").rglob("*")) if file.is_file()).unlink()
    with pytest.raises(vp.VolpipeError, match=r"moved/b\.zarr has lost files that were written, such as .*/s0/c/"):
        outputs_compared("a.zarr", "moved/b.zarr")


def test_outputs_in_a_bucket_are_compared(bucket: Bucket) -> None:
    run("s3://cells/old/a.zarr")
    Path("a.zarr.run").rename("kept.run")  # where both runs keep theirs
    run("s3://cells/new/a.zarr", *RANGE)
    result = outputs_compared("s3://cells/old/a.zarr", "s3://cells/new/a.zarr", page="p.html")
    assert result.plan.why == "as their attributes say"
    assert ("recipe normalise.low", "–", "3.0") in result.made_otherwise


# ---- the command and the page


def test_the_command_prints_and_writes_and_its_exit_code_is_that_of_the_limits(give: Give) -> None:
    a = noise(SHAPE)
    b = np.where(np.arange(30) < 15, a, a ^ 3)
    save(a=a, b=b)
    base = ("compare", "a.npy", "b.npy", "--config", "threads", "--page", "p.html")
    known = metrics.peak_signal_noise_ratio(a, b, data_range=255)
    ended = give(*base, "--json", "c.json", "--limit", "psnr=30", "--limit", "differ=0.6")
    assert ended.code == 0, ended.err
    assert ["all", "12,600", "(50", "%)"] in [line.split()[:4] for line in ended.out.splitlines()]
    assert f"{known:.2f}" in ended.out and "compared as image (as voxels are uint8;" in ended.out
    tree = json.loads(Path("c.json").read_text())
    assert tree["differences"]["together"]["psnr"] == pytest.approx(known)
    assert tree["limits"]["psnr=30"] == {"is_violated": False, "why": []}
    violated = give(*base, "--limit", "psnr=60", "--limit", "largest=2")
    assert violated.code == 1
    assert violated.err.splitlines()[1:] == [
        f"limit violated: psnr=60: the PSNR is {known:.6g} dB",
        "limit violated: largest=2: the largest difference is 3",
    ]
    assert give(*base[:-1], "p.txt").err.startswith("volpipe: --page p.txt: an HTML page is written")
    assert sorted(path.name for path in Path().iterdir()) == ["a.npy", "b.npy", "c.json", "p.html"]
    assert give(*base, "--limit", "psnr=x").code == 2
    save(b=a)
    same = give("compare", "a.npy", "b.npy", "--config", "threads", "--limit", "differ=0", "--json", "c.json")
    assert same.code == 0 and "identical: 0 of 25,200 voxels differ" in same.out and "infinite" in same.out
    tree = json.loads(Path("c.json").read_text())
    assert (tree["differences"]["identical"], tree["differences"]["together"]["psnr"]) == (True, None)
    files = ["a.npy", "b.npy", "c.json", "p.html", "volpipe_a_b_compare.html"]
    assert sorted(path.name for path in Path().iterdir()) == files


def pictures(result: ComparisonResult) -> list[Picture]:
    return [item for section in result.page().sections for item in section.items if isinstance(item, Picture)]


def panels(picture: Picture) -> list[np.ndarray]:
    """Return the panels (y, x, 3) of a picture of three, without captions and margins."""
    image = np.asarray(Image.open(io.BytesIO(picture.image)).convert("RGB"))
    width = (image.shape[1] - MARGIN) // 3
    return [image[MARGIN + CAPTION : -MARGIN, MARGIN + i * width : (i + 1) * width] for i in range(3)]


def test_the_page_shows_the_slice_that_differs_most_of_the_worst_boxes() -> None:
    a = noise(SHAPE) // 2
    b = a.copy()
    b[13, 20, 18], b[11, 17, 16] = a[13, 20, 18] + 100, a[11, 17, 16] + 5
    result = compared(a, b)
    (picture,) = pictures(result)
    assert picture.caption.startswith("xy at z 13, y,x 16:32,16:30: the slice of the box that differs most")
    one, other, difference = panels(picture)
    zoom = one.shape[1] // 14
    middle = (slice(zoom * 4 + zoom // 2, None, zoom * 16), zoom * 2 + zoom // 2)
    assert (difference[middle][0] == (255, 0, 0)).all()  # red where B is brighter
    assert (one[middle][0] < other[middle][0]).all()
    assert ((difference == 255).all(axis=-1)).mean() > 0.98


def test_the_page_marks_labels_that_have_no_match_and_gives_matches_one_colour() -> None:
    a = np.ones(SHAPE, np.uint32)
    a[:, 20:] = 2
    b = np.where(a == 1, 9, 7).astype(np.uint32)
    b[9, 16:20, 16:20] = 5
    (picture,) = pictures(compared(a, b))
    one, other, difference = panels(picture)
    red = (difference == (200, 30, 30)).all(axis=-1)
    assert red.mean() == pytest.approx(16 / (16 * 14))
    assert (one[~red] == other[~red]).all() and (one[red] != other[red]).any(axis=-1).all()


def test_names_on_the_page_are_text(tmp_path: Path) -> None:
    (tmp_path / "<script>alert(1)<").mkdir()
    save(**{"<script>alert(1)</a": noise(SHAPE), "b": noise(SHAPE, seed=1)})
    vp.compare("<script>alert(1)</a.npy", "b.npy", site=Inline(), page="p.html")
    text = Path("p.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;" in text and "<script>alert" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
