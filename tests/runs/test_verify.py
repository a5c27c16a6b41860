"""What was written is what lies there: every file against its checksum, and blocks through the net again."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from command import Give, giver, named_by_verify, set_each
from volumes import noise, windowed, write_volume

from volpipe.blockwise.journal import read_results
from volpipe.geometry.grid import Box
from volpipe.runs.worker import RESULTS, Written
from volpipe.volumes import checksums
from volpipe.volumes.formats.n5 import write_chunks
from volpipe.volumes.storage.tensorstore import context
from volpipe.volumes.volume import ArraySpec, View, create_array, open_volume, open_writer

SHAPE = (20, 24, 28)
FORMATS = ["ome-zarr-0.5", "ome-zarr-0.4", "zarr2", "n5"]


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    data = noise(SHAPE)
    data[:8, :8, :8] = 0  # a block of nothing, which formats do not store
    write_volume(tmp_path / "in.n5", data)
    return giver(tmp_path, monkeypatch, capsys)


def run(give: Give, *settings: str, blend: str = "crop", out: str = "out.zarr") -> None:
    overlap = 0 if blend == "crop" else 4
    division = windowed((8, 8, 8), (overlap,) * 3, (1, 1, 1), blend)
    recipe = set_each("net.name=identity", "output.levels=2", *division, *settings)
    ended = give("run", "--config", "threads", *recipe, "-o", out, "in.n5/raw")
    assert ended.code == 0, ended.err


def chunk_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name.isdecimal())


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


@pytest.mark.parametrize("format", FORMATS)
def test_one_flipped_bit_is_found_and_its_file_and_box_are_named(tmp_path: Path, give: Give, format: str) -> None:
    name = "out.n5" if format == "n5" else "out.zarr"
    run(give, f"output.format={format}", "output.chunk=[4,4,4]", out=name)
    whole = give("verify", name)
    num_files = sum(file.is_file() for file in (tmp_path / name).rglob("*"))
    assert (whole.code, whole.out) == (0, f"{num_files:,} files read, 0 not as they were written\n")
    dice = random.Random(3)
    for file in dice.sample(chunk_files(tmp_path / name), 3):
        bit = dice.randrange(8 * file.stat().st_size)
        flip(file, bit)
        ended = give("verify", name)
        assert ended.code == 1
        named, counted = ended.out.splitlines()
        assert named.startswith(f"{file} differs (s{file.relative_to(tmp_path / name).parts[0][1:]} ")
        assert counted.endswith("1 not as they were written")
        flip(file, bit)
    assert give("verify", name).code == 0


def test_the_box_of_a_file_that_differs_holds_the_voxels_that_are_in_it(tmp_path: Path, give: Give) -> None:
    run(give)
    file = tmp_path / "out.zarr/s0/c/1/2/0"
    before = open_volume(tmp_path / "out.zarr").open()[...]
    flip(file, 8 * (file.stat().st_size // 2))
    assert "differs (s0 8:16,16:24,0:8)" in give("verify", "out.zarr").out
    file.unlink()
    after = open_volume(tmp_path / "out.zarr", view=View(incomplete=True)).open()[...]
    places = np.argwhere(before != after)
    assert (places.min(axis=0) >= (8, 16, 0)).all() and (places.max(axis=0) < (16, 24, 8)).all()


def test_metadata_that_were_changed_are_found(tmp_path: Path, give: Give) -> None:
    run(give)
    for name in ("zarr.json", "s0/zarr.json", "s1/zarr.json", "run/zarr.json"):
        file = tmp_path / "out.zarr" / name
        before = file.read_bytes()
        file.write_bytes(before + b" ")
        ended = give("verify", "out.zarr")
        assert (ended.code, ended.out.splitlines()[0]) == (1, f"{file} differs")
        file.write_bytes(before)


def test_what_is_missing_and_what_is_extra_is_named(tmp_path: Path, give: Give) -> None:
    run(give)
    out = tmp_path / "out.zarr"
    empty = out / "s0/c/0/0/0"
    assert not empty.exists()  # zeros alone, which read as such without a file
    shutil.copy(out / "s0/c/1/1/1", out / "s0/c/0/0/0")
    (out / "s0/c/1/1/2").unlink()
    (out / "notes.txt").write_text("mine")
    assert named_by_verify(give, "out.zarr") == {
        f"{out}/s0/c/1/1/2 is missing (s0 8:16,8:16,16:24)",
        f"{out}/notes.txt is extra",
        f"{out}/s0/c/0/0/0 is extra (s0 0:8,0:8,0:8)",
    }
    shutil.rmtree(out)
    gone = give("verify", "out.zarr")
    assert (gone.code, gone.out, gone.err.count("\n")) == (2, "", 1)
    assert f"{out} is gone; put it back" in gone.err


def test_a_fast_look_finds_what_is_gone_or_empty_and_says_that_it_reads_nothing(tmp_path: Path, give: Give) -> None:
    run(give)
    out = tmp_path / "out.zarr"
    whole = give("verify", "--fast", "out.zarr")
    num_files = sum(file.is_file() for file in out.rglob("*"))
    said = "looked for, 0 not as they were written; voxels were not read"
    assert (whole.code, whole.out) == (0, f"{num_files:,} files {said}\n")
    flip(out / "s0/c/1/1/1", 77)
    assert give("verify", "--fast", "out.zarr").code == 0  # which is what it is not for
    assert give("verify", "out.zarr").code == 1
    (out / "s0/c/1/1/2").unlink()
    (out / "s1/c/0/0/1").write_bytes(b"")
    (out / "notes.txt").write_text("mine")
    ended = give("verify", "--fast", "out.zarr")
    assert ended.code == 1
    assert sorted(ended.out.splitlines()[:-1]) == [
        f"{out}/notes.txt is extra",
        f"{out}/s0/c/1/1/2 is missing (s0 8:16,8:16,16:24)",
        f"{out}/s1/c/0/0/1 is empty (s1 0:8,0:8,8:14)",
    ]


def test_channels_are_in_the_files_of_their_shard(tmp_path: Path) -> None:
    for format, num_files in (("zarr3", 1), ("zarr2", 2 * 2), ("n5", 2 * 2)):
        sharded = (2, 8, 8, 8) if format == "zarr3" else None
        spec = ArraySpec((2, 8, 8, 16), np.dtype("uint8"), (1, 8, 8, 4), shards=sharded, axes=("c", "z", "y", "x"))
        create_array(tmp_path / format, "a", spec, format)
        writer = open_writer(tmp_path / format, "a")
        box = Box((0, 0, 0, 8), (2, 8, 8, 16))
        writer.write(box, noise((2, 8, 8, 8)))
        files = list(checksums.stored_files(writer.header, box))
        assert sorted(map(str, files)) == sorted(map(str, chunk_files(tmp_path / format)))
        assert len(files) == num_files
        assert checksums.split(checksums.take(writer.header, box)) == [
            google_crc32c.value(Path(str(file)).read_bytes()) for file in files
        ]


def test_the_checksum_is_castagnolis(tmp_path: Path) -> None:
    (tmp_path / "digits").write_bytes(b"123456789")
    assert checksums.checksum(tmp_path / "digits") == 0xE3069283  # RFC 3720's check value
    (tmp_path / "empty").touch()
    assert checksums.checksum(tmp_path / "empty") == 1
    assert checksums.checksum(tmp_path / "digits" / "below") == checksums.checksum(tmp_path / "none") == 0


def test_a_journal_that_is_gone_is_told(tmp_path: Path, give: Give) -> None:
    run(give)
    shutil.rmtree(tmp_path / "out.zarr.run")
    ended = give("verify", "out.zarr")
    assert ended.code == 2
    assert "out.zarr.run holds no journal, which alone knows what the output's files should hold" in ended.err


def test_a_run_that_is_not_whole_is_not_verified(tmp_path: Path, give: Give) -> None:
    run(give)
    journal = tmp_path / "out.zarr.run/journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    num_lost = len(next(read_results(journal, RESULTS, Written)).checksums)
    journal.write_text("".join(lines[1:]))
    ended = give("verify", "out.zarr")
    assert ended.code == 1
    assert f"{num_lost} shards have no checksum: not written yet" in ended.out


@pytest.mark.parametrize(
    ("dtype", "blend"),
    [
        ("float32", "hann"),
        ("uint8", "crop"),
        pytest.param("uint8", "hann", marks=pytest.mark.long),
        pytest.param("float32", "crop", marks=pytest.mark.long),
    ],
)
def test_blocks_that_go_through_the_net_again_give_the_same_bytes(
    tmp_path: Path, give: Give, blend: str, dtype: str
) -> None:
    write_volume(tmp_path / "cube.n5", noise((32, 32, 32), seed=1))
    division = windowed((44, 44, 44), (20, 20, 20), (1, 1, 1), blend)
    recipe = set_each(f"output.dtype={dtype}", *division)
    assert give("run", "--config", "threads", *recipe, "-o", "out.zarr", "cube.n5/raw").code == 0
    ended = give("verify", "out.zarr", "--recompute", "2")
    assert ended.code == 0
    assert ended.out.count(": the same\n") == 2


def test_recomputing_finds_voxels_that_the_net_did_not_give(tmp_path: Path, give: Give) -> None:
    run(give, "windows.block=[2,2,2]", blend="hann")
    writer = open_writer(tmp_path / "out.zarr", "s0")
    box = Box((0, 0, 0), writer.header.write_unit) & Box.from_shape(SHAPE)
    data = writer.read(box)
    data[1, 2, 3] = data[1, 2, 3] ^ 1
    writer.write(box, data)
    ended = give("verify", "out.zarr", "--recompute", "1000")
    assert ended.code == 1
    wrong = [line for line in ended.out.splitlines() if "voxels differ" in line]
    assert len(wrong) == 1
    assert wrong[0].endswith("on cpu: 1 voxels differ, by up to 1")


def test_where_only_a_part_is_wanted_that_part_is_verified(tmp_path: Path, give: Give) -> None:
    mask = np.zeros(SHAPE, np.uint8)
    mask[12:, 12:, 12:] = 1
    write_volume(tmp_path / "mask.n5", mask)
    run(give, 'input.mask="mask.n5/raw"', "input.roi=2:20,3:24,:", "windows.block=[2,2,2]", blend="hann")
    ended = give("verify", "out.zarr", "--recompute", "1000")
    assert ended.code == 0, ended.out


def test_chunk_files_are_on_disk_before_they_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert context().spec.to_json()["file_io_sync"] is True
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    create_array(tmp_path / "a.n5", "raw", ArraySpec((8, 8, 8), np.dtype("uint8"), (8, 8, 8), codec="gzip"), "n5")
    write_chunks(str(tmp_path / "a.n5"), "raw", (0, 0, 0), noise((8, 8, 8)))
    assert any("scratch" in name for name in synced)
