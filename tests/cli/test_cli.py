"""The command line: what it prints, how it ends, and what it says to mistakes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import zarr
from command import IDENTITY, THREADS, Give, begin, finish, giver, set_each, wait_until
from conftest import ROOT
from volumes import fingerprint, noise, windowed, write_volume

import volpipe
from volpipe.blockwise.interrupts import INTERRUPTED, SAME_SECONDS
from volpipe.commit import commit_of
from volpipe.estimation import calibrate
from volpipe.estimation.limits import Limits
from volpipe.volumes.volume import ArraySpec, View, create_array, open_volume

SHAPE = (16, 24, 16)


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    return giver(tmp_path, monkeypatch, capsys)


def voxels(path: Path, level: int = 0) -> np.ndarray:
    return open_volume(path, level=level).open()[...]


def test_a_run_says_where_its_result_is_and_what_it_took(tmp_path: Path) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    ended = finish(tmp_path, begin(tmp_path, "run", *THREADS, *IDENTITY, "in.n5"))
    assert (ended.code, ended.err) == (0, "")
    out = tmp_path / "in_identity.zarr"
    assert ended.out.splitlines()[-1] == f"wrote {out}"
    took = re.search(
        r"first task after ([\d.]+) s \(([\d.]+) s of it waiting for workers\); "
        r"peak memory: driver ([\d.]+) MiB, workers ([\d.]+) MiB",
        ended.out,
    )
    assert took is not None
    first, waited, driver, workers = map(float, took.groups())
    assert 0 <= waited < first < 60
    assert 50 < driver < 2000
    assert abs(workers - driver) < 1  # threads are in the driver; the kernel adds up pages of threads now and then
    assert np.array_equal(voxels(out), noise(SHAPE))


def test_a_plan_shows_what_a_run_then_takes(tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SAMPLE_SECONDS", 60.0)  # a busy machine would sample fewer chunks than an idle one
    choice = (*THREADS, *IDENTITY, *set_each(*windowed((8, 8, 8), (4, 4, 4), (2, 2, 2), "hann")), "-o", "out.zarr")
    planned = give("plan", *choice, "in.n5")
    assert (planned.code, planned.err) == (0, "")
    assert "by 6 blocks tried there" in planned.out
    assert re.search(r"^✓ +streamed +2 × 2 × 2 ", planned.out, re.MULTILINE)
    assert len(re.findall(r"^ +stored +2 × 2 × 2 ", planned.out, re.MULTILINE)) == 1
    assert len(re.findall(r"^ +streamed +\d × \d × \d ", planned.out, re.MULTILINE)) == 2
    assert not (tmp_path / "out.zarr").exists()
    ran = give("run", *choice, "--details", "in.n5")
    assert ran.code == 0
    table = planned.out[planned.out.index("stage ") : planned.out.index("windows       block")]
    assert table.split() == ran.out[ran.out.index("stage ") :].split()[: len(table.split())]
    assert re.search(r"^infer +12 .* \([\d.]+ s\) .*B \([\d.]+ .*B\) ", ran.out, re.MULTILINE)
    assert re.search(
        r"^planned: scratch [\d.]+ KiB, was [\d.]+ KiB; memory .*; time [\d.]+ s, took", ran.out, re.MULTILINE
    )


def test_a_quick_plan_tries_nothing_and_says_so(tmp_path: Path, give: Give) -> None:
    ended = give("plan", "--quick", *THREADS, *IDENTITY, "in.n5")
    assert ended.code == 0
    assert re.search(r"^time +not known yet; `volpipe plan` measures it *$", ended.out, re.MULTILINE)
    assert re.search(r"^memory +up to [\d.]+ MiB for each worker, the net included *$", ended.out, re.MULTILINE)
    assert "≤" in ended.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.n5"]


def test_a_plan_that_cannot_work_is_refused(give: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly_full(out: Path, worker_bytes: int | None = None) -> Limits:
        return Limits(free_files=1, worker_bytes=worker_bytes)

    monkeypatch.setattr("volpipe.estimation.forecast.disk_limits", nearly_full)
    ended = give("plan", "--quick", *THREADS, *IDENTITY, "in.n5")
    assert ended.code == 2
    assert "streamed" in ended.out
    assert re.fullmatch(r"volpipe: output and scratch need \d+ files and .* may have 1; use larger .*\n", ended.err)
    refused = give("run", *THREADS, *IDENTITY, "-o", "out.zarr", "in.n5")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert not (tmp_path / "out.zarr").exists()


def test_a_complete_run_is_left_alone_a_changed_recipe_refused_and_a_fresh_run_made(tmp_path: Path, give: Give) -> None:
    command = ("run", *THREADS, "-o", "out.zarr", "in.n5", "--set", "net.name=shift", "--set")
    out = tmp_path / "out.zarr"
    assert give(*command, "net.options.offset=[0,0,1]").code == 0
    before = fingerprint(out), {path: path.stat().st_mtime_ns for path in out.rglob("*")}

    again = give(*command, "net.options.offset=[0,0,1]")
    assert (again.code, again.err) == (0, "")
    assert again.out == f"{out} is complete already; nothing to do (--fresh starts over)\n"

    changed = give(*command, "net.options.offset=[0,2,0]")
    assert changed.code == 2
    assert "net.options.offset: [0, 0, 1] -> [0, 2, 0]" in changed.err
    assert len(changed.err.splitlines()) == 1
    assert (fingerprint(out), {path: path.stat().st_mtime_ns for path in out.rglob("*")}) == before

    fresh = give(*command, "net.options.offset=[0,2,0]", "--fresh")
    assert fresh.code == 0
    padded = np.pad(noise(SHAPE), 2, mode="reflect")
    assert np.array_equal(voxels(out), padded[2:-2, :-4, 2:-2])


def test_status_tells_complete_from_incomplete_from_nothing(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = set_each("net.name=identity", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))
    assert give("run", *THREADS, *small, "-o", "out.zarr", "in.n5").code == 0
    done = give("status", "out.zarr")
    assert done.code == 0
    assert done.out.splitlines()[-1].strip() == f"{tmp_path / 'out.zarr'}: complete"
    assert re.search(r"^infer +12 / 12 ", done.out, re.MULTILINE)
    assert give("status", "out.zarr.run") == done

    journal = tmp_path / "out.zarr.run/journal.jsonl"
    record = json.loads(journal.read_text().splitlines()[0])
    journal.write_text(json.dumps(record | {"done": [0, 5]}) + "\n")
    part = give("status", "out.zarr")
    assert part.code == 1
    assert re.search(r"^infer +2 / 12 ", part.out, re.MULTILINE)
    assert "not complete" in part.out

    shutil.rmtree("out.zarr")
    gone = give("status", "out.zarr")
    assert gone.code == 1
    again = re.search(r"its output is gone; `(volpipe run --fresh .*)` makes it again", " ".join(gone.out.split()))
    assert again is not None
    (tmp_path / "else where").mkdir()
    monkeypatch.chdir(tmp_path / "else where")
    far = volpipe.status(tmp_path / "out.zarr")
    assert f"`cd {tmp_path} && {again[1]}` makes it again" in far.remark
    monkeypatch.chdir(tmp_path)

    nothing = give("status", "other.zarr")
    assert (nothing.code, nothing.out) == (2, "")
    assert nothing.err == "volpipe: no run of other.zarr was started: other.zarr.run holds no plan\n"


def test_info_tells_what_an_array_is(tmp_path: Path, give: Give) -> None:
    ended = give("info", "in.n5")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[0] == f"{tmp_path / 'in.n5'} raw"
    assert "shape       16 × 24 × 16 (z, y, x), uint8, 6.0 KiB uncompressed" in ended.out
    assert "chunks      16 × 16 × 16" in ended.out


def test_info_shows_axes_in_one_order_however_they_are_stored(tmp_path: Path, give: Give) -> None:
    create_array(tmp_path / "a.zarr", "", ArraySpec((7, 6, 5, 2), np.dtype("u1"), (4, 3, 2, 1), axes=tuple("xyzc")))
    lines = give("info", "--fast", "a.zarr").out.splitlines()
    assert "shape       2 × 5 × 6 × 7 (c, z, y, x), uint8, 420 B uncompressed" in lines
    assert "stored as   7 × 6 × 5 × 2 (x, y, z, c)" in lines
    assert "chunks      1 × 2 × 3 × 4" in lines


def test_info_takes_several_volumes_and_one_that_fails_hides_no_other(tmp_path: Path, give: Give) -> None:
    np.save(tmp_path / "b.npy", noise((5, 6, 7)))
    both = give("info", "--fast", "in.n5", "b.npy")
    assert (both.code, both.err) == (0, "")
    assert "16 × 24 × 16 (z, y, x)" in both.out and "5 × 6 × 7 (z, y, x)" in both.out
    ended = give("info", "--fast", "in.n5", "gone.n5", "b.npy")
    assert (ended.code, ended.out) == (2, both.out.replace("\n\n", "\n\n\n"))
    assert "no volume at" in ended.err and "gone.n5" in ended.err


def test_info_lists_what_a_container_holds(tmp_path: Path, give: Give) -> None:
    create_array(tmp_path / "in.n5", "labels/cells", ArraySpec((4, 4, 4), np.dtype("uint64"), (4, 4, 4)), "n5")
    ended = give("info", "in.n5")
    assert (ended.code, ended.err) == (0, "")
    assert [line.split()[0] for line in ended.out.splitlines()[1:3]] == ["in.n5/labels/cells", "in.n5/raw"]
    refused = give("plan", "in.n5")
    assert (refused.code, "labels/cells, raw; write in.n5/labels/cells" in refused.err) == (2, True)
    assert give("info", "in.n5/labels/cells").code == 0


def test_info_shows_the_level_that_is_asked_for(give: Give) -> None:
    assert give("run", *THREADS, *IDENTITY, *set_each("output.levels=1"), "-o", "out.zarr", "in.n5").code == 0
    assert "shape       16 × 24 × 16 (z, y, x)" in give("info", "out.zarr").out
    assert "shape       8 × 12 × 8 (z, y, x)" in give("info", "out.zarr", "--level", "1").out
    ended = give("info", "out.zarr", "--level", "2")
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1


def test_sites_are_listed_with_a_line_each(give: Give) -> None:
    ended = give("sites")
    assert ended.code == 0
    assert [line.split()[0] for line in ended.out.splitlines()] == sorted(
        path.stem for path in (ROOT / "configs").glob("[!_]*.py")
    )
    assert all(len(line) > 40 for line in ended.out.splitlines())


def test_a_sample_is_written_and_can_be_opened(tmp_path: Path, give: Give) -> None:
    ended = give("sample", "made.n5", "--shape", "16,32,24", "--seed", "3")
    assert ended.code == 0
    assert ended.out.startswith("wrote made.n5: raw and labels, 16 × 32 × 24 voxels, seed 3, in ")
    assert open_volume(tmp_path / "made.n5", "raw").shape == (16, 32, 24)
    assert open_volume(tmp_path / "made.n5", "labels").shape == (16, 32, 24)


def test_a_copy_says_what_was_assumed_of_its_source(tmp_path: Path, give: Give) -> None:
    tree = zarr.create_array(str(tmp_path / "a.zarr"), data=noise((5, 6, 7)), zarr_format=2)
    tree.attrs.update({"axes": ["z", "y", "x"], "resolution": [40, 4, 4]})
    ended = give("convert", "a.zarr", "b.n5")
    words = "note        a.zarr: voxel size guessed: it says 40 × 4 × 4 without a unit, taken as nm"
    assert (ended.code, ended.out.splitlines()[0].startswith(words)) == (0, True)


def test_a_binned_copy_of_a_sample_has_the_means_and_a_larger_voxel(tmp_path: Path, give: Give) -> None:
    assert give("sample", "made.n5", "--shape", "8,16,24", "--voxel-size-nm", "4,8,8.5").code == 0
    ended = give("convert", "--bin", "4,1,2", "made.n5/raw", "coarse.zarr")
    assert ended.code == 0
    fine, coarse = open_volume(tmp_path / "made.n5", "raw"), open_volume(tmp_path / "coarse.zarr")
    assert fine.voxel_size_nm == (4.0, 8.0, 8.5)
    assert (coarse.voxel_size_nm, coarse.origin_nm) == ((16.0, 8.0, 17.0), (6.0, 0.0, 4.25))
    means = fine[...].reshape(2, 4, 16, 12, 2).mean(axis=(1, 4))
    np.testing.assert_array_equal(coarse[...], np.rint(means))


def test_the_version_is_printed_with_the_commit_of_the_checkout(give: Give) -> None:
    ended = give("--version")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    version, _, commit = ended.out.strip().removesuffix(")").partition(" (commit ")
    assert (ended.code, version) == (0, volpipe.__version__)
    assert commit.removesuffix("-dirty") == head[:12]


def test_without_git_or_a_note_the_commit_is_unknown_also_inside_a_checkout(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == "unknown"
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "site-packages").mkdir()
    assert commit_of(tmp_path / "site-packages") == "unknown"
    assert commit_of(tmp_path) == "unknown"  # nothing is committed yet


def test_a_mistake_in_a_shell_is_one_sentence_too(tmp_path: Path) -> None:
    ended = finish(tmp_path, begin(tmp_path, "run", "nothing.n5"))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"volpipe: no volume at {tmp_path / 'nothing.n5'}\n"


FAILING = """
import pathlib, torch
class Net(torch.nn.Module):
    def forward(self, x):
        if x.any() and pathlib.Path(__file__).with_name("flag").exists() and {condition}:
            raise RuntimeError("no such voxel please")
        return x + {added}
def build():
    return Net()
"""


def write_net(folder: Path, condition: str = "True", added: int = 0) -> None:
    (folder / "net.py").write_text(FAILING.format(condition=condition, added=added))


@pytest.mark.long
def test_a_net_that_fails_on_one_block_leaves_out_that_block_alone(tmp_path: Path, give: Give) -> None:
    """The box of the voxel that the net cannot bear is named; with the net mended, the rest is done."""
    data = noise(SHAPE) // 2
    data[9, 17, 3] = 255
    write_volume(tmp_path / "marked.n5", data)
    small = set_each("net.name=net.py:build", "normalise.method=none", "output.dtype=uint8")
    small += set_each("output.levels=1", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))
    command = ("run", *THREADS, *small, "-o", "out.zarr", tmp_path / "marked.n5")
    write_net(tmp_path, "bool((x == 255).any())", added=1)
    (tmp_path / "flag").touch()

    ended = give(*command)
    assert ended.code == 1
    words = ended.err.split()
    assert "8:16,16:24,0:8" in words
    assert words.count("RuntimeError:") == 1
    assert "no such voxel please" in ended.err
    assert "2 parts are missing; run the same command again to compute them" in ended.err
    assert re.search(r"^pyramid 1 +1 +0:16,16:24,0:16 +needs a part that failed", ended.err, re.MULTILINE)
    assert "wrote" not in ended.out.split("\n")[-2]
    log = (tmp_path / "out.zarr.run/volpipe.log").read_text()
    assert "Traceback" in log
    assert 'net.py", line' in log
    assert give("status", "out.zarr").code == 1
    expected = data.astype(int) + 1
    expected[8:16, 16:24, 0:8] = 0
    assert np.array_equal(open_volume(tmp_path / "out.zarr", view=View(incomplete=True))[...], expected)

    (tmp_path / "flag").unlink()
    assert give(*command).code == 0
    (tmp_path / "undisturbed").mkdir()
    write_net(tmp_path / "undisturbed", "bool((x == 255).any())", added=1)
    undisturbed = finish(tmp_path / "undisturbed", begin(tmp_path / "undisturbed", *map(str, command)))
    assert undisturbed.code == 0
    assert fingerprint(tmp_path / "out.zarr") == fingerprint(tmp_path / "undisturbed/out.zarr")


def test_a_net_that_fails_everywhere_stops_the_run_at_once(tmp_path: Path, give: Give) -> None:
    write_net(tmp_path)
    (tmp_path / "flag").touch()
    allowed = "net.accept_tile_variance=true"  # else it is refused when it is measured
    small = set_each("net.name=net.py:build", allowed, *windowed((4, 4, 4), (0, 0, 0), (1, 1, 1), "crop"))
    ended = give("run", *THREADS, *small, "-o", "out.zarr", "in.n5")
    assert ended.code == 1
    variance, greys, *traceback, report, sentence = ended.err.splitlines()
    assert variance.startswith("warning: net build ")
    assert greys.startswith("warning: ") and "while nothing says which it was trained with" in greys
    assert report == f"report: {tmp_path / 'out.zarr.run/report.html'}"
    assert "no such voxel please" in (tmp_path / "out.zarr.run/report.html").read_text()
    stops = "running the net (infer) failed for 3 parts and worked for none, so the work stops"
    assert sentence == f"volpipe: {stops}: RuntimeError: no such voxel please"
    assert [traceback[0], traceback[-1]] == ["Traceback (most recent call last):", "RuntimeError: no such voxel please"]
    assert sum('net.py", line' in line for line in traceback) == 1
    assert (tmp_path / "out.zarr.run/volpipe.log").read_text().count('net.py", line') == 1
    attempts = (tmp_path / "out.zarr.run/volpipe.log").read_text().count(" failed (attempt ")
    assert 3 <= attempts <= 30  # of 96 blocks, three times each


def test_what_nobody_foresaw_is_a_sentence_too_and_the_traceback_is_in_the_log(tmp_path: Path, give: Give) -> None:
    (tmp_path / "out.zarr.run/plan.json").mkdir(parents=True)
    ended = give("run", *THREADS, *IDENTITY, "-o", "out.zarr", "in.n5")
    log = tmp_path / "out.zarr.run/volpipe.log"
    assert ended.code == 1
    (sentence,) = ended.err.splitlines()
    assert sentence.startswith("volpipe: IsADirectoryError: ")
    assert str(log) in sentence
    assert "Traceback" in log.read_text()


def test_a_folder_that_cannot_be_used_is_refused_before_the_start(tmp_path: Path, give: Give) -> None:
    (tmp_path / "out.zarr.run/lock").mkdir(parents=True)
    ended = give("run", *THREADS, *IDENTITY, "-o", "out.zarr", "in.n5")
    assert (ended.code, ended.out) == (2, "")
    folder = tmp_path / "out.zarr.run"
    assert ended.err == f"volpipe: {folder} cannot be written: Is a directory; choose another place\n"
    assert not (tmp_path / "out.zarr").exists()


STUCK = """
import threading, time
from pathlib import Path
from torch import nn

class Stuck(nn.Module):
    volpipe = dict(scale=(1, 1, 1), stride=(1, 1, 1), halo=(0, 0, 0), window=(8, 8, 8), in_channels=1, out_channels=1)
    def forward(self, windows):
        while threading.current_thread() is not threading.main_thread():
            Path("computes").touch()
            time.sleep(0.1)
        return windows

def net():
    return Stuck()
"""


@pytest.mark.long
def test_the_second_interrupt_does_not_wait_for_threads_that_compute(tmp_path: Path) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    (tmp_path / "stuck.py").write_text(STUCK)
    command = ("run", *THREADS, "--set", "net.name=stuck.py:net", "-o", "out.zarr", "in.n5")
    process = begin(tmp_path, *command, PYTHONPATH=str(ROOT))  # started anew: what ends it is the command itself
    wait_until(lambda: (tmp_path / "computes").exists(), 60)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(2 * SAME_SECONDS)
    ended = finish(tmp_path, process)
    assert ended.code == INTERRUPTED
    assert ended.err.endswith("volpipe: interrupted; run the same command again to continue\n")
