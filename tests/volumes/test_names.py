"""What is named is what is read and written, whatever letters the name has; or it is refused before there is work."""

from __future__ import annotations

import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import h5py
import numpy as np
import pytest
from bucket import Bucket
from command import IDENTITY, THREADS, Give, giver
from volumes import noise

import volpipe as vp
from volpipe.errors import VolpipeError

SHAPE = (8, 8, 8)
SIZED = vp.View(voxel_size_nm=(8.0, 8.0, 8.0))
LETTERS = [chr(code) for code in range(32, 127) if chr(code) != "/"]
OTHERS = ["é", "e\u0301", "日本", "\u2028", "\t", "\n", "\x01", "\x7f", "\udc80"]
REFUSED = "\\"  # tensorstore takes it for a slash
TOGETHER = "".join(letter for letter in LETTERS if letter != REFUSED)
GROUPS = [TOGETHER[start : start + 8] for start in range(0, len(TOGETHER), 8)]  # of letters in one name
FORMATS = (".n5", ".zarr", ".precomputed", ".h5", ".tif", ".mrc", ".npy")
CHUNKED = FORMATS[:3]


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(tmp_path, monkeypatch, capsys)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("letter", [*GROUPS, REFUSED, *OTHERS], ids=ascii)
def test_a_copy_lies_where_its_name_says(tmp_path: Path, letter: str) -> None:
    data, name = noise(SHAPE), f"{letter}a{letter}b{letter}"
    folder = tmp_path / "above" / name / "in"
    folder.mkdir(parents=True)
    np.save(folder / f"{name}.npy", data)
    for suffix in FORMATS:
        before = names(tmp_path)
        place = folder / f"{name}{suffix}x{suffix}"
        if letter in (REFUSED, OTHERS[-1]) and suffix in CHUNKED:
            with pytest.raises(VolpipeError, match=r"has a (backslash|byte b'\\x80') in its name"):
                vp.convert(vp.open(folder / f"{name}.npy", view=SIZED), place)
            assert names(tmp_path) == before
            continue
        vp.convert(vp.open(folder / f"{name}.npy", view=SIZED), place)
        np.testing.assert_array_equal(vp.open(place)[...], data)
        assert {
            new for new in names(tmp_path) - before if not new.startswith(str(place.relative_to(tmp_path)))
        } == set()
        assert [*tmp_path.iterdir(), *(tmp_path / "above").iterdir()] == [tmp_path / "above", tmp_path / "above" / name]


@pytest.mark.parametrize("letter", [*GROUPS, REFUSED, *OTHERS[:-1]], ids=ascii)
@pytest.mark.parametrize("suffix", [".n5", ".zarr", ".h5"])
def test_a_dataset_lies_where_its_key_says(tmp_path: Path, letter: str, suffix: str) -> None:
    data, key = noise(SHAPE), f"g{letter}h/a{letter}b"
    np.save(tmp_path / "a.npy", data)
    place = tmp_path / f"c{suffix}" / key
    if letter == REFUSED and suffix in CHUNKED:
        with pytest.raises(VolpipeError, match=r"has a backslash in its name"):
            vp.convert(tmp_path / "a.npy", place)
        assert names(tmp_path) == {"a.npy"}
        return
    vp.convert(tmp_path / "a.npy", place)
    np.testing.assert_array_equal(vp.open(place)[...], data)
    np.testing.assert_array_equal(vp.open(tmp_path / f"c{suffix}", key)[...], data)
    if suffix == ".h5":
        with h5py.File(tmp_path / "c.h5") as file:
            assert list(file) == [f"g{letter}h"] and list(file[f"g{letter}h"]) == [f"a{letter}b"]


@pytest.mark.parametrize("suffix", CHUNKED)
def test_chunks_below_a_backslash_are_not_read_as_fill_values(tmp_path: Path, suffix: str) -> None:
    np.save(tmp_path / "a.npy", noise(SHAPE))
    vp.convert(vp.open(tmp_path / "a.npy", view=SIZED), tmp_path / f"v{suffix}")
    (tmp_path / "scan\\one").mkdir()
    shutil.move(tmp_path / f"v{suffix}", tmp_path / "scan\\one")
    with pytest.raises(VolpipeError, match=r"scan\\one.* has a backslash in its name"):
        vp.open(tmp_path / "scan\\one" / f"v{suffix}")
    (tmp_path / "plain").symlink_to("scan\\one")
    np.testing.assert_array_equal(vp.open(tmp_path / "plain" / f"v{suffix}")[...], noise(SHAPE))


@pytest.mark.parametrize("suffix", [".n5", ".zarr"])
@pytest.mark.parametrize("how", ["http", "s3"])
def test_a_server_is_asked_for_what_is_named(bucket: Bucket, tmp_path: Path, suffix: str, how: str) -> None:
    bucket.readable = bucket.listable = True
    np.save(tmp_path / "a.npy", noise(SHAPE))
    vp.convert(tmp_path / "a.npy", tmp_path / f"v{suffix}")
    files = {str(f.relative_to(tmp_path)): f.read_bytes() for f in (tmp_path / f"v{suffix}").rglob("*") if f.is_file()}
    key = "/raw" if suffix == ".n5" else ""
    for letter in LETTERS:
        if how == "s3" and letter == "?":
            continue  # settings of a server begin with it
        name = f"a{letter}b"
        bucket.files |= {f"{name}/{file}": content for file, content in files.items()}
        place = (
            f"{bucket.url}/cells/{quote(name)}/v{suffix}{key}" if how == "http" else f"s3://cells/{name}/v{suffix}{key}"
        )
        before = set(bucket.files)
        try:
            np.testing.assert_array_equal(vp.open(place)[...], noise(SHAPE), err_msg=letter)
        except VolpipeError as error:
            assert "backslash" in str(error) or letter in str(error), letter
            assert letter in REFUSED
        assert set(bucket.files) == before
    with pytest.raises(VolpipeError):
        vp.open(f"s3://cells/a?b/v{suffix}{key}")


@pytest.mark.long
def test_a_bucket_gets_what_is_named(bucket: Bucket, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", noise(SHAPE))
    for letter in LETTERS:
        before = set(bucket.files)
        place = f"s3://cells/{letter}a{letter}b/v.zarr"
        try:
            vp.convert(tmp_path / "a.npy", place)
        except VolpipeError:
            assert letter in "?" + REFUSED, letter
            assert set(bucket.files) == before
            continue
        assert {file.split("/v.zarr")[0] for file in set(bucket.files) - before} == {f"{letter}a{letter}b"}
        np.testing.assert_array_equal(vp.open(place)[...], noise(SHAPE), err_msg=letter)


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder whose name has all letters but the backslash, with volumes in it; nothing comes beside it."""
    folder = tmp_path / TOGETHER
    folder.mkdir()
    np.save(folder / f"{TOGETHER}.npy", noise((16, 16, 16)))
    np.save(folder / "-m [1].npy", np.ones((16, 16, 16), np.uint8))
    np.save(folder / "grey*.npy", np.full((16, 16, 16), 200, np.uint8))
    yield folder
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == [TOGETHER]


@pytest.mark.parametrize("site", ["threads", pytest.param("local", marks=pytest.mark.long)])
def test_commands_take_all_letters(odd: Path, give: Give, site: str) -> None:
    out, page = odd / f"{TOGETHER}.zarr", odd / 'it\'s <b>a<b> & "b".html'
    done = [
        give("run", "--config", site, *IDENTITY, odd / f"{TOGETHER}.npy", "--mask", odd / "-m [1].npy", "-o", out,
             "--log-json", odd / "l%s {}.jsonl"),
        give("run", "--config", site, *IDENTITY, odd / f"{TOGETHER}.npy", "-o", odd / "b c.n5",
             "--set", f"input.mask={odd / '-m [1].npy'}"),
        give("status", out), give("verify", out), give("report", out, "-o", page),
        give("reproduce", out, "--recipe-out", odd / "a = 'b'.toml"),
        give("segment", *THREADS, odd / "grey*.npy", "-o", odd / "s #1.zarr", "--set", "input.kind=foreground"),
    ]  # fmt: skip
    assert [(ended.code, ended.err) for ended in done if ended.code] == []
    for volume in (out, odd / "b c.n5"):
        np.testing.assert_array_equal(vp.open(volume)[...], noise((16, 16, 16)))


@pytest.mark.parametrize(
    "words",
    [
        ["run", *THREADS, *IDENTITY, "scan\\one/a.npy", "-o", "scan\\one/o.zarr"],
        ["run", *THREADS, *IDENTITY, "a.npy", "-o", "o\\.zarr"],
        ["plan", *THREADS, *IDENTITY, "a.npy", "-o", "scan\\one/o.zarr"],
        ["run", *THREADS, "--recipe", "segment", "a.npy", "-o", "seg\\ments"],
        ["segment", *THREADS, "a.npy", "--set", "input.kind=foreground", "-o", "l\\.zarr"],
        ["convert", "a.npy", "c\\.zarr"],
        ["sample", "s\\.n5"],
        ["batch", *THREADS, *IDENTITY, "a.npy", "-o", "b\\atch/"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_an_output_with_a_backslash_is_refused_first(give: Give, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "scan\\one").mkdir()
    np.save(tmp_path / "a.npy", noise(SHAPE))
    np.save(tmp_path / "scan\\one/a.npy", noise(SHAPE))
    before = names(tmp_path)
    ended = give(*words)
    assert (ended.code, names(tmp_path)) == (2, before)
    assert "has a backslash in its name" in ended.err


def test_values_of_settings_are_what_is_written(tmp_path: Path) -> None:
    from volpipe.recipes.toml import set_values

    for text in (
        "C\\x",
        "a#b",
        "'a'#b",
        "[a].npy",
        '"my" file.npy',
        "a=b",
        " a",
        "a'",
        *TOGETHER.replace("'", "").split("="),
    ):
        tree: dict[str, object] = {}
        set_values(tree, [f"net.weights={text}"])
        if not text.strip(string.digits + ",.:- "):
            continue  # a number
        assert tree == {"net": {"weights": text}}
