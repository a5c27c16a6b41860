"""Packages as zips: unpacked once and whole; those that would do harm or are damaged are refused."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

import pytest
from zoo import facts_of, sha256, smooth, zipped

from volpipe.errors import VolpipeError
from volpipe.nets.bioimageio_spec import open_package


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "volpipe" / "packages"


@pytest.mark.parametrize("inside", ["", "pack/"])
def test_a_zip_is_unpacked_once_and_whole(tmp_path: Path, cache: Path, inside: str) -> None:
    path = zipped(smooth(tmp_path / "pack"), tmp_path / "my pack (1).zip", inside)
    assert facts_of(path).label == "my_pack_1_"
    (folder,) = cache.iterdir()
    assert folder.name == sha256(path)
    before = folder.stat().st_mtime_ns
    open_package(path)
    assert (list(cache.iterdir()), folder.stat().st_mtime_ns) == ([folder], before)


def entry(name: str, content: bytes = b"x", mode: int = 0) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info, content


ZIPS = {
    "upwards": ([entry("../evil")], "holds '../evil', which leads out of it"),
    "absolute": ([entry("/tmp/evil")], "holds '/tmp/evil', which leads out of it"),
    "link": ([entry("link", b"/etc/passwd", stat.S_IFLNK | 0o777)], "holds the link 'link'"),
    "bomb": ([entry("zeros")], "holds 1 files of 2147483648 bytes in 3; at most"),
    "many": ([entry(str(i)) for i in range(1001)], "holds 1001 files"),
}


def says(path: Path, size: int) -> None:
    """Have the directory of the zip at `path` say that its last file has `size` bytes."""
    data = path.read_bytes()
    place = data.rindex(b"PK\x01\x02") + 24
    path.write_bytes(data[:place] + size.to_bytes(4, "little") + data[place + 4 :])


@pytest.mark.parametrize("name", ZIPS)
def test_a_zip_that_holds_more_than_a_package_is_refused_and_leaves_nothing(
    tmp_path: Path, cache: Path, name: str
) -> None:
    entries, sentence = ZIPS[name]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for info, content in entries:
            archive.writestr(info, content)
    if name == "bomb":
        says(tmp_path / "a.zip", 2**31)
    with pytest.raises(VolpipeError, match=sentence):
        open_package(tmp_path / "a.zip")
    assert list(cache.iterdir()) == []


def test_a_zip_that_lies_about_its_sizes_or_is_cut_short_is_refused(tmp_path: Path, cache: Path) -> None:
    path = zipped(smooth(tmp_path / "pack"), tmp_path / "a.zip")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(VolpipeError, match=r"a\.zip is no zip that can be read"):
        open_package(path)
    path.write_bytes(data)
    says(path, 5)
    with pytest.raises(VolpipeError, match=r"a\.zip is no zip that can be read"):
        open_package(path)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(smooth(tmp_path / "pack"), tmp_path / "a.zip")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(VolpipeError, match=r"cannot be unpacked to .*: Not a directory"):
        open_package(path)
