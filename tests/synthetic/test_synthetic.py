"""The invented tissue: the same bytes from any box, and labels that fit the picture."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import z5py
from hypothesis import given, settings
from hypothesis import strategies as st

from volpipe.errors import RecipeError, VolumeError
from volpipe.geometry.grid import Box
from volpipe.synthetic import neurites, random_field
from volpipe.synthetic import volume as volume_module
from volpipe.synthetic.render import blur, paint, sections
from volpipe.synthetic.tissue import grow, vesicles
from volpipe.synthetic.volume import CYTOPLASM, MEMBRANE, MITOCHONDRION, VESICLE, SyntheticVolume, write_sample
from volpipe.volumes.volume import open_volume

KINDS = ("raw", "labels", "organelles")
FAR = (30_000, 90_000, 60_000)  # where single precision no longer tells voxels apart in nm
WHOLE = (20, 40, 36)  # not a multiple of bricks, in a place that is not either


def make(sample: SyntheticVolume, kind: str, box: Box) -> np.ndarray:
    data: np.ndarray = getattr(sample, kind)(box)
    return data


@cache
def far_sample() -> SyntheticVolume:
    return SyntheticVolume((100_000, 100_000, 100_000), seed=5)


@cache
def whole(kind: str) -> np.ndarray:
    return make(far_sample(), kind, Box.from_shape(WHOLE).shift(FAR))


@cache
def tissue() -> dict[str, np.ndarray]:
    sample = SyntheticVolume((64, 128, 128), seed=1)
    return {kind: make(sample, kind, Box.from_shape(sample.shape)) for kind in KINDS}


def floats(sample: SyntheticVolume, box: Box) -> dict[str, np.ndarray]:
    """Return what decides the voxels of `box` before it is rounded, where a wrong bit cannot hide."""
    grown = grow(sample.seed, box, sample.voxel_size_nm)
    return {
        "wall": grown.wall,
        "mitochondrion": grown.mitochondrion,
        "vesicles": vesicles(grown),
        "painted": paint(grown),
    }


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in WHOLE]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


@pytest.mark.parametrize("kind", KINDS)
@given(box=boxes())
@settings(max_examples=25)
def test_any_box_equals_the_crop_of_the_whole(kind: str, box: Box) -> None:
    assert np.array_equal(make(far_sample(), kind, box.shift(FAR)), whole(kind)[box.slices])


@cache
def whole_floats() -> dict[str, np.ndarray]:
    return floats(far_sample(), Box.from_shape(WHOLE).shift(FAR))


@given(box=boxes().filter(lambda box: not box.is_empty))
@settings(max_examples=25)
def test_not_one_bit_depends_on_the_box(box: Box) -> None:
    for name, found in floats(far_sample(), box.shift(FAR)).items():
        assert np.array_equal(found, whole_floats()[name][box.slices]), name


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_do_not_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(kind)
    monkeypatch.setattr(volume_module, "_TILE", (7, 19, 23))
    assert np.array_equal(make(far_sample(), kind, Box.from_shape(WHOLE).shift(FAR)), expected)


@pytest.mark.parametrize("voxel_size_nm", [(16.0, 8.0, 8.0), (40.0, 4.0, 4.0), (10.0, 10.0, 10.0)])
def test_leaving_out_distant_rods_changes_nothing(
    voxel_size_nm: tuple[float, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = SyntheticVolume((200, 200, 200), seed=2, voxel_size_nm=voxel_size_nm)
    box = Box((60, 80, 90), (70, 104, 120))
    quick = floats(sample, box)
    monkeypatch.setattr(neurites.Rods, "deciding", lambda rods, point: rods)
    monkeypatch.setattr(neurites.Rods, "filled", lambda rods, point: rods[rods.mitochondrion > 0])
    for name, found in floats(sample, box).items():
        assert np.array_equal(found, quick[name]), name


def test_looking_further_for_rods_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, box = SyntheticVolume((200, 200, 200), seed=3), Box((20, 30, 40), (36, 62, 72))
    quick = floats(sample, box)
    reach = neurites._farthest_rod()
    monkeypatch.setattr(neurites, "_farthest_rod", lambda: reach + 900.0)
    for name, found in floats(sample, box).items():
        assert np.array_equal(found, quick[name]), name


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("raw", "7a8f15cdc343c894"),
        ("labels", "c9b64255c1a17e3c"),
        ("organelles", "75c41909dab703fd"),
    ],
)
def test_bytes_are_those_that_were_recorded(kind: str, digest: str) -> None:
    data = make(SyntheticVolume((64, 64, 64), seed=7), kind, Box((10, 0, 20), (34, 48, 64)))
    assert hashlib.sha256(data.astype(data.dtype.newbyteorder("<")).tobytes()).hexdigest()[:16] == digest


def test_not_one_bit_depends_on_whether_lengths_are_numbers_of_numpy() -> None:
    box, lengths = Box((0, 0, 0), (12, 40, 40)), (16.3, 7.7, 9.1)
    for field in ("wall", "mitochondrion", "crista"):
        one, other = (getattr(grow(3, box, size), field) for size in (lengths, tuple(map(np.float64, lengths))))
        assert one.dtype == other.dtype == np.float32
        assert np.array_equal(one, other)


def test_another_seed_gives_another_tissue() -> None:
    first, second = (SyntheticVolume((8, 32, 32), seed).raw(Box.from_shape((8, 32, 32))) for seed in (0, 1))
    assert np.mean(first == second) < 0.1


def test_another_voxel_size_shows_the_same_tissue() -> None:
    coarse = SyntheticVolume((20, 60, 60), 1, (16.0, 16.0, 16.0)).labels(Box.from_shape((20, 60, 60)))
    fine = SyntheticVolume((40, 120, 120), 1, (8.0, 8.0, 8.0)).labels(Box.from_shape((40, 120, 120)))[::2, ::2, ::2]
    inside = (coarse > 0) & (fine > 0)
    assert inside.mean() > 0.7
    assert np.mean(coarse[inside] == fine[inside]) > 0.995


@pytest.mark.long
def test_membrane_is_what_has_no_label() -> None:
    assert np.array_equal(tissue()["labels"] == 0, tissue()["organelles"] == MEMBRANE)


def test_membranes_keep_cells_apart() -> None:
    labels = tissue()["labels"]
    for dim in range(3):
        first, second = np.delete(labels, 0, axis=dim), np.delete(labels, -1, axis=dim)
        touching = (first != second) & (first > 0) & (second > 0)
        assert touching.mean() < 0.001, f"axis {'zyx'[dim]}"


def test_cells_are_many_and_none_is_everywhere() -> None:
    labels = tissue()["labels"]
    _, counts = np.unique(labels[labels > 0], return_counts=True)
    assert (counts > 500).sum() >= 10
    assert counts.max() < 0.5 * labels.size


def test_parts_of_tissue_have_the_greys_of_electron_microscopy() -> None:
    raw, kinds = tissue()["raw"], tissue()["organelles"]
    grey = {kind: raw[kinds == kind].mean() for kind in (CYTOPLASM, MEMBRANE, MITOCHONDRION, VESICLE)}
    assert grey[MEMBRANE] < grey[CYTOPLASM] - 50
    assert grey[MITOCHONDRION] < grey[CYTOPLASM] - 40
    assert 0.10 < np.mean(kinds == MEMBRANE) < 0.30
    assert 0.01 < np.mean(kinds == MITOCHONDRION) < 0.20
    assert 0.0005 < np.mean(kinds == VESICLE) < 0.05


def test_greys_use_the_bytes_and_do_not_saturate() -> None:
    raw = tissue()["raw"]
    assert 115 < raw.mean() < 165
    assert np.percentile(raw, 1) < 60
    assert np.percentile(raw, 99) > 190
    assert np.mean((raw == 0) | (raw == 255)) < 0.01


def test_blur_spreads_a_point_further_along_z() -> None:
    point = np.zeros((9, 7, 7), np.float32)
    point[4, 3, 3] = 256
    expected = np.multiply.outer(np.multiply.outer([1, 4, 6, 4, 1], [1, 2, 1]), [1, 2, 1])
    blurred = blur(point)  # less its halo of 2, 1, 1
    assert np.array_equal(blurred[:, 1:4, 1:4], expected)
    assert blurred.sum() == 256


def test_noise_is_white_with_deviation_one() -> None:
    noise = random_field.white_noise(3, Box((5, 100, 7), (25, 200, 107)))
    count = noise.size
    assert abs(noise.mean()) < 5 / count**0.5
    assert abs(noise.std() - 1) < 0.02
    for dim in range(3):
        pairs = np.delete(noise, 0, axis=dim) * np.delete(noise, -1, axis=dim)
        assert abs(pairs.mean()) < 5 / pairs.size**0.5, f"axis {'zyx'[dim]}"


def test_mix_gives_the_published_numbers_of_splitmix64() -> None:
    golden = 0x9E3779B97F4A7C15
    states = np.array([golden, (2 * golden) % 2**64, (3 * golden) % 2**64], np.uint64)
    # The first outputs of splitmix64 from state 0, as in S. Vigna's reference, 2015.
    assert random_field._mix(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_smooth_noise_is_the_spline_of_its_lattice() -> None:
    at = (np.array([-33.0, 12.5]), np.array([7.0, 700.25]), np.array([55.0, 61.0, 140.0]))
    spacing = 50.0
    found = random_field.smooth(9, 2, at, spacing)

    def weight(distance: float) -> float:
        d = abs(distance)
        return 0.75 - d * d if d <= 0.5 else 0.5 * (1.5 - d) ** 2 if d <= 1.5 else 0.0

    for i, j, k in product(range(2), range(2), range(3)):
        point = [at[0][i] / spacing, at[1][j] / spacing, at[2][k] / spacing]
        total = 0.0
        for node in product(*(range(int(p) - 3, int(p) + 4) for p in point)):
            place = [np.array([n]) for n in node]
            value = float(random_field._lattice_hash(9, 2, *place)[0]) / 2**64 * 2 - 1
            total += value * float(np.prod([weight(p - n) for p, n in zip(point, node, strict=True)]))
        assert found[i, j, k] == pytest.approx(total, abs=1e-5)


def test_distance_to_a_rod_is_that_to_its_nearest_point() -> None:
    rng = np.random.default_rng(0)
    start, point, way = rng.normal(size=(3, 3, 20))
    length = np.linalg.norm(way, axis=0)
    found = neurites.axis_distance((point[0], point[1], point[2]), start, way / length, length)
    steps = np.linspace(0, 1, 20_001)[:, None, None]
    brute = np.linalg.norm(start + steps * way - point, axis=1).min(axis=0)
    np.testing.assert_allclose(found, brute, atol=1e-4)


def test_noise_is_added_to_the_picture_and_to_nothing_else() -> None:
    box = Box.from_shape((24, 64, 64))
    clean, usual, double = (SyntheticVolume(box.shape, 1, noise=noise) for noise in (0.0, 1.0, 2.0))
    greys = clean.raw(box).astype(np.float64)
    inside = (greys > 50) & (greys < 205)  # where no noise is clipped away
    for sample, deviation in ((usual, 6.0), (double, 12.0)):
        added = (sample.raw(box) - greys)[inside]
        assert abs(added.mean()) < 0.2
        assert added.std() == pytest.approx(deviation, rel=0.02)
        assert np.array_equal(sample.labels(box), clean.labels(box))


def test_picture_without_noise_is_the_blurred_paint_rounded() -> None:
    box = Box((3, 5, 7), (9, 15, 17))
    wide = Box((1, 4, 6), (11, 16, 18))
    sample = SyntheticVolume((20, 20, 20), 4, noise=0.0)
    light = sections(4, box)
    expected = np.rint(blur(paint(grow(4, wide, sample.voxel_size_nm))) + light)
    assert np.array_equal(sample.raw(box), expected)


def test_box_outside_the_sample_is_refused_with_its_axis() -> None:
    with pytest.raises(ValueError, match="box 0:9 leaves the sample 0:8 on axis y"):
        SyntheticVolume((8, 8, 8)).raw(Box((0, 0, 0), (8, 9, 8)))


def test_empty_box_gives_an_empty_array() -> None:
    assert SyntheticVolume((8, 8, 8)).raw(Box((2, 3, 4), (2, 8, 8))).shape == (0, 5, 4)


def test_impossible_samples_are_refused_when_made() -> None:
    with pytest.raises(RecipeError, match="sample shape is 0 on axis y"):
        SyntheticVolume((8, 0, 8))
    with pytest.raises(RecipeError, match=r"sample voxel size is -8\.0 nm on axis x"):
        SyntheticVolume((8, 8, 8), voxel_size_nm=(8.0, 8.0, -8.0))
    with pytest.raises(RecipeError, match=r"sample noise is -0\.5"):
        SyntheticVolume((8, 8, 8), noise=-0.5)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_written_arrays_hold_the_sample_for_other_readers(tmp_path: Path) -> None:
    sample = SyntheticVolume((20, 50, 70), seed=3)
    write_sample(tmp_path / "a.n5", sample, chunk=16)
    with z5py.File(str(tmp_path / "a.n5"), "r") as file:
        for key in ("raw", "labels"):
            assert np.array_equal(file[key][:], make(sample, key, Box.from_shape(sample.shape)))
            assert file[key].chunks == (16, 16, 16)
    attributes = json.loads((tmp_path / "a.n5/raw/attributes.json").read_text())
    assert attributes["resolution"] == [8, 8, 16]  # x, y, z
    assert attributes["units"] == ["nm", "nm", "nm"]
    assert attributes["compression"]["type"] == "gzip"


def test_written_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    sample = SyntheticVolume((40, 40, 20), seed=3)
    for workers in (1, 2):
        write_sample(tmp_path / f"{workers}.n5", sample, chunk=16, workers=workers)
    one = contents(tmp_path / "1.n5")
    assert len(one) > 2 * 18  # chunks of raw and of labels
    assert contents(tmp_path / "2.n5") == one


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_counts_every_box_once(workers: int, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_sample(
        tmp_path / "a.n5",
        SyntheticVolume((9, 9, 17)),
        chunk=4,
        workers=workers,
        on_progress=lambda *counts: seen.append(counts),
    )
    assert seen == [(n, 12) for n in range(1, 13)]  # boxes of 8: 2 x 2 x 3


@pytest.mark.parametrize("format", ["n5", "zarr2", "zarr3"])
def test_written_arrays_say_their_voxel_size(format: str, tmp_path: Path) -> None:
    write_sample(tmp_path / "a", SyntheticVolume((4, 5, 6), voxel_size_nm=(30.0, 5.0, 4.0)), format=format)
    for key in ("raw", "labels"):
        assert open_volume(tmp_path / "a", key).voxel_size_nm == (30.0, 5.0, 4.0)


@pytest.mark.parametrize("format", ["zarr2", "zarr3"])
def test_zarr_holds_the_same_voxels(format: str, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    sample = SyntheticVolume((10, 20, 20))
    write_sample(tmp_path / "a.zarr", sample, chunk=8, format=format)
    assert np.array_equal(
        zarr.open_array(str(tmp_path / "a.zarr/raw"), mode="r")[:], sample.raw(Box.from_shape(sample.shape))
    )


def test_another_sample_in_the_same_place_is_refused(tmp_path: Path) -> None:
    write_sample(tmp_path / "a.n5", SyntheticVolume((8, 8, 8), seed=1))
    write_sample(tmp_path / "a.n5", SyntheticVolume((8, 8, 8), seed=1))
    before = contents(tmp_path / "a.n5")
    for other in (
        SyntheticVolume((8, 8, 8), seed=2),
        SyntheticVolume((8, 8, 9), seed=1),
        SyntheticVolume((8, 8, 8), seed=1, noise=0.0),
    ):
        with pytest.raises(VolumeError, match="exists already"):
            write_sample(tmp_path / "a.n5", other)
    assert contents(tmp_path / "a.n5") == before
