"""Bad input: a damaged chunk costs the boxes that need it, which are named; once it is mended, they are filled."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import THREADS, Ended, Give, giver, set_each
from inline import perform
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.errors import ChunkError, IncompleteError, PlanError
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.inference.roi import find_part
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import Job
from volpipe.volumes.storage import damage
from volpipe.volumes.volume import View, open_volume

SHAPE = (16, 32, 48)
CHUNK = 16  # 1 × 2 × 3 chunks
SMALL = ("net.name=identity", "normalise.method=none", "output.levels=1")
CROP = (*SMALL, *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))  # blocks and shards of 8³
HANN = (*SMALL, *windowed((8, 8, 8), (4, 4, 4), (2, 2, 2), "hann"), "output.shard=[8,8,8]")
BAD = Box((0, 16, 32), (16, 32, 48))
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "short": lambda text: text[:-9],
    "noise": lambda text: text[:16] + bytes(b ^ 0x5A for b in text[16:]),
    "of another shape": lambda text: text[:4] + (8).to_bytes(4, "big") + text[8:],
}


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    write_volume(tmp_path / "in.n5", noise(SHAPE), CHUNK)
    return giver(tmp_path, monkeypatch, capsys)


def chunk_file(folder: Path) -> Path:
    """Return the file of the chunk that holds BAD, x first as N5 has it."""
    return folder / "in.n5/raw/2/1/0"


def run(give: Give, recipe: tuple[str, ...], *options: str, out: str = "out.zarr") -> Ended:
    return give("run", *THREADS, *set_each(*recipe), *options, "-o", out, "in.n5")


def missing(text: str) -> list[tuple[str, Box]]:
    """Return stage and box of each row of a table of what is missing."""
    rows = re.findall(r"^([a-z]+(?: \d+)?) +\d+ +(\d+:\d+,\d+:\d+,\d+:\d+) ", text, re.MULTILINE)
    boxes = [tuple(map(int, re.split("[:,]", box))) for _, box in rows]
    return [(stage, Box(b[::2], b[1::2])) for (stage, _), b in zip(rows, boxes, strict=True)]


def covered(boxes: list[Box]) -> np.ndarray:
    inside = np.zeros(SHAPE, bool)
    for box in boxes:
        inside[box.slices] = True
    return inside


def voxels(folder: Path, name: str = "out.zarr") -> np.ndarray:
    """Return all voxels of an output that is complete."""
    return open_volume(folder / name, level=0).open()[...]


def voxels_so_far(folder: Path) -> np.ndarray:
    """Return the voxels of an output that is not complete, which is read only as it is."""
    with pytest.raises(IncompleteError, match=r"out\.zarr:s0 is incomplete: .* `volpipe run .*` completes it; "):
        voxels(folder)
    return open_volume(folder / "out.zarr", level=0, view=View(incomplete=True)).open()[...]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_chunk_costs_its_own_blocks_and_is_named_with_its_file(tmp_path: Path, give: Give, how: str) -> None:
    file = chunk_file(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[how](whole))
    ended = run(give, CROP)
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert f"chunk (0, 1, 2) in {file}" in " ".join(ended.err.split())
    rows = missing(ended.err)
    assert np.array_equal(covered([box for stage, box in rows if stage == "infer"]), covered([BAD]))
    assert [box for stage, box in rows if stage == "pyramid 1"] == [BAD]
    assert np.array_equal(voxels_so_far(tmp_path), np.where(covered([BAD]), 0, noise(SHAPE)))
    log = (tmp_path / "out.zarr.run/volpipe.log").read_text()
    assert log.count(" failed (attempt 1): ") == 8
    assert "(attempt 2)" not in log

    status = give("status", "out.zarr")
    assert status.code == 1
    assert missing(status.out) == rows
    assert f"chunk (0, 1, 2) in {file}" in " ".join(status.out.split())

    file.write_bytes(whole)
    assert run(give, CROP).code == 0
    assert run(give, CROP, out="undisturbed.zarr").code == 0
    assert fingerprint(tmp_path / "out.zarr/s0") == fingerprint(tmp_path / "undisturbed.zarr/s0")
    assert fingerprint(tmp_path / "out.zarr/s1") == fingerprint(tmp_path / "undisturbed.zarr/s1")
    status = give("status", "out.zarr")
    assert (status.code, missing(status.out)) == (0, [])


def test_shards_that_neighbours_would_add_to_stay_missing_and_are_named(tmp_path: Path, give: Give) -> None:
    """Blocks of 8 voxels whose windows reach 2 further: those that see the chunk fail, and with them whole shards."""
    file = chunk_file(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    ended = run(give, HANN, "--tolerate", "0.5")
    assert ended.code == 1
    rows = missing(give("status", "--all", "out.zarr").out)
    stages = {stage for stage, _ in rows}
    assert {"infer", "reassemble", "pyramid 1"} <= stages
    lost = covered([box for stage, box in rows if stage in ("infer", "reassemble")])
    assert lost[covered([BAD])].all()
    assert not lost[:, :8, :].any()
    assert not lost[:, :, :16].any()
    assert np.array_equal(voxels_so_far(tmp_path)[~lost], noise(SHAPE)[~lost])
    written = {tuple(int(n) * 8 for n in f.parts[-3:]) for f in (tmp_path / "out.zarr/s0/c").rglob("*") if f.is_file()}
    shards = {tuple(c) for c in np.argwhere(lost).tolist() if all(v % 8 == 0 for v in c)}
    assert not written & shards  # a shard is whole or absent
    file.write_bytes(whole)
    assert run(give, HANN).code == 0
    assert np.array_equal(voxels(tmp_path), noise(SHAPE))


def test_stored_windows_of_damaged_input_cost_the_same_boxes(tmp_path: Path, give: Give) -> None:
    chunk_file(tmp_path).write_bytes(b"")
    ended = run(give, (*CROP, "tensors.mode=stored"))
    assert ended.code == 1
    rows = missing(give("status", "--all", "out.zarr").out)
    for stage in ("factor", "infer"):
        assert np.array_equal(covered([box for name, box in rows if name == stage]), covered([BAD]))
    assert np.array_equal(voxels_so_far(tmp_path), np.where(covered([BAD]), 0, noise(SHAPE)))


@pytest.mark.parametrize("settings", [("normalise.method=zscore",), ("input.empty=0",)], ids=["measured", "scanned"])
def test_what_all_blocks_need_is_not_guessed_from_the_others(
    tmp_path: Path, give: Give, settings: tuple[str, ...]
) -> None:
    file = chunk_file(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(b"")
    ended = run(give, (*CROP, *settings))
    assert ended.code == 1
    assert "; mend the volume" in ended.err.splitlines()[-1]
    assert str(file) in ended.err.splitlines()[-1]
    assert not (tmp_path / "out.zarr").exists()
    file.write_bytes(whole)
    assert run(give, (*CROP, *settings)).code == 0
    assert run(give, (*CROP, *settings), out="undisturbed.zarr").code == 0
    assert np.array_equal(voxels(tmp_path), voxels(tmp_path, "undisturbed.zarr"))


def test_only_a_box_is_computed_and_the_rest_later_to_the_same_bytes(tmp_path: Path, give: Give) -> None:
    ended = run(give, HANN, "--only", "0:8,8:16,30:33")
    assert (ended.code, ended.err) == (0, "")
    held = r"^\d+ blocks beyond --only are not done; the same command without it does the rest$"
    assert re.search(held, ended.out, re.M)
    assert ended.out.splitlines()[-1] == f"wrote the part 0:8,8:16,30:33 of {tmp_path / 'out.zarr'}"
    made = voxels_so_far(tmp_path)
    part = Box((0, 8, 24), (8, 16, 40))  # all shards that the box touches
    assert np.array_equal(open_volume(tmp_path / "out.zarr").open()[part.slices], noise(SHAPE)[part.slices])
    wanted = covered([part])
    assert np.array_equal(made[wanted], noise(SHAPE)[wanted])
    assert not made[:, 24:].any()
    assert not made[:, :, :8].any()
    assert give("status", "out.zarr").code == 1
    assert run(give, HANN).code == 0
    assert run(give, HANN, out="undisturbed.zarr").code == 0
    assert fingerprint(tmp_path / "out.zarr/s0") == fingerprint(tmp_path / "undisturbed.zarr/s0")
    assert fingerprint(tmp_path / "out.zarr/s1") == fingerprint(tmp_path / "undisturbed.zarr/s1")


def test_only_the_missing_box_completes_a_run_whose_input_was_mended(tmp_path: Path, give: Give) -> None:
    file = chunk_file(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(b"")
    assert run(give, CROP).code == 1
    file.write_bytes(whole)
    assert run(give, CROP, "--only", str(BAD)).code == 0
    assert give("status", "out.zarr").code == 0
    assert np.array_equal(voxels(tmp_path), noise(SHAPE))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0:8,0:8", "write z0:z1,y0:y1,x0:x1"),
        ("4:4,:,:", "axis z: 4:4 is empty"),
        (":,0:33,:", "leaves the output, which is 0:16,0:32,0:48"),
    ],
)
def test_a_box_that_is_none_of_the_output_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        find_part(text, SHAPE)
    assert find_part(" 1:, :9,2:3", SHAPE) == Box((1, 0, 2), (16, 9, 3))


def test_a_disk_that_fails_is_tried_again_and_a_damaged_chunk_is_not(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(give, CROP).code == 0
    plan = RunFolder.from_output(tmp_path / "out.zarr").load(Plan)
    assert plan is not None
    job = Job(str(tmp_path / "out.zarr.run"), plan.identity)

    def fail(error: Exception) -> tuple[int, ...]:
        def read(*arguments: object) -> np.ndarray:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("volpipe.volumes.storage.tensorstore.TensorStoreArray.read", read)
            record = perform("measure", job, [0])
        assert [unit for unit, _ in record.failed] == [0]
        assert "chunk (0, 0, 0) in " in record.failed[0][1].splitlines()[-1]
        return record.permanent

    assert fail(OSError(errno.EIO, "Input/output error")) == ()
    assert fail(ValueError("INTERNAL: Error reading file [os_error_code='5']")) == ()
    assert fail(ValueError("DATA_LOSS: Error decoding chunk")) == (0,)
    assert issubclass(ChunkError, damage.VolumeError)


@pytest.mark.parametrize("damage", ["middle", "old"])
def test_a_journal_that_cannot_be_read_is_named_and_fresh_starts_over(tmp_path: Path, give: Give, damage: str) -> None:
    assert run(give, CROP).code == 0
    whole, journal = fingerprint(tmp_path / "out.zarr"), tmp_path / "out.zarr.run" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    written = '{"stage":"reassemble","done":[0],"sums":[[0,0,"0123abcd"]]}\n'  # as once it was
    journal.write_text("".join([lines[0], lines[1][9:] if damage == "middle" else written, *lines[2:]]))
    sentence = (
        "out.zarr.run/journal.jsonl is damaged, or another version wrote it; restore the file to continue, or use"
    )
    for ended in (run(give, CROP), give("status", "out.zarr"), give("verify", "out.zarr")):
        assert (ended.code, ended.err.count("\n")) == (2, 1)
        assert ended.err.startswith("volpipe: line 2 of ") and sentence in ended.err
    again = run(give, CROP, "--fresh")
    assert again.code == 0, again.err
    assert fingerprint(tmp_path / "out.zarr") == whole
