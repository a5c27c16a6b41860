"""Tables of colours: the numbers are those that other programs read, none is applied, and every command says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import skimage.io
import tifffile
from boxes import check_reads
from command import IDENTITY, THREADS, Give, giver
from PIL import Image
from volumes import noise

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.attributes import COLOUR_CHANNELS, INVERTING_TABLE, PALETTE
from volpipe.volumes.volume import open_volume

TRAINING = """
data = [{ path = "image.npy", labels = "LABELS" }]
net = { name = "unet3d", options = { features = [2, 4], out_channels = 3, output = "none" } }
classes.names = ["none", "one", "two"]
samples.shape = [8, 16, 16]
train = { steps = 1, threads = 1 }
"""
GREYS = bytes(n for n in range(256) for _ in range(3))


def with_palette(numbers: np.ndarray, palette: bytes) -> Image.Image:
    """Return a picture of `numbers` (y, x) with a palette: red, green and blue, a byte each."""
    picture = Image.fromarray(numbers, "P")
    picture.putpalette(palette)
    return picture


def few_numbers(shape: tuple[int, ...], count: int) -> np.ndarray:
    return (noise(shape, "uint16") % count).astype(np.uint8)


def colours(count: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, 3 * count, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("settings", [{}, {"transparency": b"\0\x80"}, {"optimize": True}])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_png_with_a_palette_is_the_numbers_that_pillow_reads(
    tmp_path: Path, bits: int, settings: dict[str, Any], is_folder: bool
) -> None:
    data = few_numbers((3, 20, 31), 2**bits)
    for z, numbers in enumerate(data):
        with_palette(numbers, colours(2**bits)).save(tmp_path / f"z{z}.png", bits=bits, **settings)
    expected = np.stack([np.asarray(Image.open(tmp_path / f"z{z}.png")) for z in range(3)])
    volume = open_volume(tmp_path if is_folder else tmp_path / "z1.png")
    check_reads(volume, expected if is_folder else expected[1])
    assert volume.value_notes == (PALETTE,)


@pytest.mark.parametrize(("bits", "compression"), [(1, None), (4, None), (8, None), (8, "zlib")])
def test_a_tiff_with_a_palette_is_the_numbers_that_tifffile_and_pillow_read(
    tmp_path: Path, bits: int, compression: str | None
) -> None:
    data, file = few_numbers((20, 32), 2**bits), tmp_path / "a.tif"
    colormap = (320, 3, 3 * 2**bits, [n * 257 for n in colours(2**bits)], True)
    stored: dict[str, Any] = {"bitspersample": bits} if bits > 1 else {}
    tifffile.imwrite(
        file, data > 0 if bits == 1 else data, photometric="minisblack", compression=compression, extratags=[colormap],
        **stored,
    )  # fmt: skip
    with tifffile.TiffFile(file, mode="r+") as tif:  # which writes palettes of 8 and 16 bits alone
        tif.pages[0].tags["PhotometricInterpretation"].overwrite(3)
    assert np.array_equal(np.asarray(Image.open(file)), data)
    check_reads(open_volume(file), tifffile.imread(file).astype(np.uint8))
    assert open_volume(file).value_notes == (PALETTE,)


def test_a_palette_of_the_grey_values_themselves_is_grey(tmp_path: Path) -> None:
    data = noise((3, 20, 31))
    (tmp_path / "png").mkdir()
    for z, numbers in enumerate(data):
        with_palette(numbers, GREYS).save(tmp_path / f"png/z{z}.png")
    Image.fromarray(data[1]).save(tmp_path / "png/z1.png")  # without one
    colormap = np.tile(np.arange(256, dtype=np.uint16) * 257, (3, 1))
    tifffile.imwrite(tmp_path / "a.tif", data, photometric="palette", colormap=colormap)
    for place in ("png", "a.tif"):
        check_reads(open_volume(tmp_path / place), data)
        assert open_volume(tmp_path / place).value_notes == ()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "int16", "float32"])
@pytest.mark.parametrize("settings", [{}, {"imagej": True}, {"compression": "zlib"}])
def test_an_inverting_table_leaves_the_numbers_that_tifffile_and_scikit_image_read(
    tmp_path: Path, dtype: str, settings: dict[str, Any]
) -> None:
    if settings.get("imagej") and dtype in ("bool", "int16"):
        dtype = "uint8"  # what ImageJ has
    data = noise((5, 20, 24)) > 99 if dtype == "bool" else noise((5, 20, 24), dtype)
    tifffile.imwrite(tmp_path / "a.tif", data, photometric="miniswhite", **settings)
    volume = open_volume(tmp_path / "a.tif")
    check_reads(volume, data.astype(np.uint8) if dtype == "bool" else data)
    assert np.array_equal(skimage.io.imread(tmp_path / "a.tif"), data)
    assert volume.value_notes == (INVERTING_TABLE,)


def write_tiff(path: Path, numbers: np.ndarray, palette: bytes) -> None:
    colormap = np.frombuffer(palette, np.uint8).reshape(-1, 3).T.astype(np.uint16) * 257
    tifffile.imwrite(path.with_suffix(".tif"), numbers, photometric="palette", colormap=colormap)


def write_png(path: Path, numbers: np.ndarray, palette: bytes) -> None:
    with_palette(numbers, palette).save(path.with_suffix(".png"))


@pytest.mark.parametrize("write", [write_png, write_tiff])
def test_slices_in_which_a_number_is_another_colour_are_refused(
    tmp_path: Path, write: Callable[[Path, np.ndarray, bytes], None]
) -> None:
    data, palette = noise((3, 20, 31)), colours(256)
    for z, numbers in enumerate(data):
        write(tmp_path / f"z{z}", numbers, palette)
    check_reads(open_volume(tmp_path), data)
    write(tmp_path / "z2", data[2], palette[:3] + palette[6:9] + palette[3:6] + palette[9:])
    with pytest.raises(VolumeError, match=r"another colour in z2\.\w+ than in z0\.\w+: their palettes differ"):
        open_volume(tmp_path)


def test_palettes_that_end_with_the_last_colour_used_are_one(tmp_path: Path) -> None:
    palette = colours(256)
    for z, count in enumerate((4, 200, 17)):
        with_palette(few_numbers((20, 31), count), palette[: 3 * count]).save(tmp_path / f"z{z}.png")
    assert open_volume(tmp_path).value_notes == (PALETTE,)


def test_pages_of_a_file_with_other_palettes_are_refused(tmp_path: Path) -> None:
    data = noise((2, 20, 32))
    with tifffile.TiffWriter(tmp_path / "a.tif") as tif:
        for page, seed in zip(data, (1, 2), strict=True):
            colormap = np.random.default_rng(seed).integers(0, 65535, (3, 256), dtype=np.uint16)
            tif.write(page, photometric="palette", colormap=colormap, metadata=None)
    with pytest.raises(VolumeError):
        open_volume(tmp_path / "a.tif")


def test_tables_that_hdf5_names_are_said(tmp_path: Path) -> None:
    """By "HDF5 Image and Palette Specification" 1.2, sections 2.2 and 2.3."""
    data = noise((20, 31))
    attributes = {"IMAGE_SUBCLASS": np.bytes_("IMAGE_INDEXED"), "IMAGE_WHITE_IS_ZERO": np.uint8(1)}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, value in attributes.items():
            file.create_dataset(name, data=data).attrs.update({"CLASS": np.bytes_("IMAGE"), name: value})
    for name, note in (("IMAGE_SUBCLASS", PALETTE), ("IMAGE_WHITE_IS_ZERO", INVERTING_TABLE)):
        volume = open_volume(tmp_path / "a.h5", name)
        check_reads(volume, data)
        assert volume.value_notes == (note,)


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """Return what gives a command beside an image, and labels in PNG, in TIFF, and in colours."""
    labels = np.zeros((16, 32, 32), np.uint8)
    labels[:, :, 16:], labels[:, :20, :9] = 1, 2
    for name in ("png", "rgb"):
        (tmp_path / name).mkdir()
        for z, numbers in enumerate(labels):
            picture = with_palette(numbers, bytes([0, 0, 0, 200, 0, 0, 0, 200, 0]))
            (picture if name == "png" else picture.convert("RGB")).save(tmp_path / f"{name}/z{z}.png")
    tifffile.imwrite(tmp_path / "white.tif", labels, imagej=True, photometric="miniswhite", metadata={"axes": "ZYX"})
    np.save(tmp_path / "labels.npy", labels)
    np.save(tmp_path / "image.npy", noise(labels.shape))
    (tmp_path / "train.toml").write_text(TRAINING)
    return giver(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(("labels", "note"), [("png", "palette"), ("white.tif", "MINISWHITE")])
@pytest.mark.parametrize(
    "command",
    [
        ("info", "--fast", "LABELS"),
        ("convert", "LABELS", "copy.zarr"),
        ("run", *THREADS, *IDENTITY, "LABELS", "-o", "out.zarr"),
        ("run", *THREADS, *IDENTITY, "--mask", "LABELS", "image.npy", "-o", "out.zarr"),
        ("evaluate", *THREADS, "--classes", "LABELS", "labels.npy"),
        ("evaluate", *THREADS, "--labels", "labels.npy", "LABELS"),
        ("compare", *THREADS, "LABELS", "labels.npy"),
        ("train", *THREADS, "LABELS.toml", "--out", "made"),
    ],
)
def test_every_command_says_that_a_table_is_not_applied(
    tmp_path: Path, give: Give, command: tuple[str, ...], labels: str, note: str
) -> None:
    recipe = (tmp_path / "train.toml").read_text().replace("LABELS", labels)
    (tmp_path / f"{labels}.toml").write_text(recipe)
    ended = give(*(part.replace("LABELS", labels) for part in command))
    assert note in ended.out + ended.err, ended
    assert ended.code == 0, ended
    if command[0] == "evaluate":
        assert "1.0000" in ended.out


def test_colours_as_classes_are_said(give: Give) -> None:
    ended = give("evaluate", *THREADS, "--classes", "rgb", "labels.npy")
    assert ended.code != 0 or COLOUR_CHANNELS in ended.out + ended.err
