"""A format whose voxels lie in another file than its header: no module knows it, and all that it says is this one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from volumes import noise

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.file_states import FileStates
from volpipe.volumes.formats import container, known
from volpipe.volumes.formats.flat import check_size
from volpipe.volumes.formats.format import Format, ReadRow, one_array
from volpipe.volumes.identity import changes, identify
from volpipe.volumes.storage.metadata import Header, Place, flat_chunk
from volpipe.volumes.survey import measure_footprint
from volpipe.volumes.volume import Volume, open_volume

SHAPE = (6, 9, 20)
BOX = Box.from_shape(SHAPE)


def read_header(file: Path) -> Header:
    """Return the header of uint8 voxels: three lines, the word DETACHED, the shape, and the name of the data file."""
    _, shape, name = file.read_text(encoding="utf-8").split("\n")[:3]
    sizes, dtype, data = tuple(map(int, shape.split())), np.dtype(np.uint8), file.parent / name
    if data.exists():
        check_size(data, 0, sizes, dtype)
    return Header(
        file, "detached", sizes, dtype, flat_chunk(sizes), place=Place(), known={"offset": 0, "stored": dtype},
        unsupported="a detached file", data_files=(data,),
    )  # fmt: skip


DETACHED = Format(
    name="detached", title="detached", row=ReadRow("detached", "all", "–"), suffixes=(".det",),
    magics=((0, b"DETACHED"),), files=one_array(read_header),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(container, "FORMATS", (*known.FORMATS, DETACHED))
    monkeypatch.setitem(known.BY_NAME, "detached", DETACHED)
    yield


def write(folder: Path, data: np.ndarray, name: str = "a.bytes") -> Volume:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data.tobytes())
    (folder / "a.det").write_text(f"DETACHED\n{' '.join(map(str, data.shape))}\n{name}\n", encoding="utf-8")
    return open_volume(folder / "a.det")


def test_voxels_come_from_the_data_file(tmp_path: Path) -> None:
    data = noise(SHAPE)
    volume = write(tmp_path, data)
    assert (volume.format, volume.shape) == ("detached", SHAPE)
    footprint, num_bytes = measure_footprint(volume), (tmp_path / "a.det").stat().st_size + data.size
    assert (footprint.num_files, footprint.num_bytes) == (2, num_bytes)
    np.testing.assert_array_equal(volume[...], data)
    np.testing.assert_array_equal(write(tmp_path / "b", data, "inner/a.bytes")[1:3, ::2], data[1:3, ::2])


def test_a_change_of_the_data_file_alone_is_seen(tmp_path: Path) -> None:
    volume = write(tmp_path, noise(SHAPE))
    state, identity = FileStates(volume).hash(BOX), identify(volume)
    assert volume.open() is volume.open()
    other = noise(SHAPE, seed=1)
    (tmp_path / "new").write_bytes(other.tobytes())
    shutil.move(tmp_path / "new", tmp_path / "a.bytes")
    np.testing.assert_array_equal(volume.open()[...], other)
    assert state and FileStates(volume).hash(BOX) != state
    assert {"a.det", "a.bytes"} == identity.files.keys()
    assert changes(identity, identify(volume))[0].startswith("a.bytes was ")


def test_a_data_file_that_is_not_there_has_no_state_of_its_own(tmp_path: Path) -> None:
    volume = write(tmp_path, noise(SHAPE))
    there = FileStates(volume).hash(BOX)
    (tmp_path / "a.bytes").unlink()
    assert FileStates(volume).hash(BOX) not in ("", there)
    with pytest.raises(VolumeError, match=r"a\.bytes"):
        volume.open()[...]


def test_a_data_file_elsewhere_is_refused_unless_the_user_trusts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise(SHAPE)
    (tmp_path / "stranger").mkdir()
    with pytest.raises(VolumeError, match=r"refers to .*secret, which does not lie in its folder .*VOLPIPE_LINKS"):
        write(tmp_path / "stranger", data, "../secret")
    monkeypatch.setenv("VOLPIPE_LINKS", str(tmp_path))
    np.testing.assert_array_equal(write(tmp_path / "stranger", data, "../secret")[...], data)
