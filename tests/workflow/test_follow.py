"""A run that follows its volume: what is there at the end is that of a fresh run, whatever happened on the way."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from bucket import Bucket
from command import Process, begin, finish, giver, set_each, wait_until
from growing import GROWING, Growing, GrowingKeys, GrowingN5
from inline import Inline
from nets import SMOOTH
from volumes import fingerprint, noise, windowed

import volpipe as vp
from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.errors import LockLost, PlanError, RunError
from volpipe.geometry.grid import Box
from volpipe.recipes.inference import load_recipe
from volpipe.runs.options import RunOptions
from volpipe.runs.stage_work import Listener
from volpipe.volumes.storage.lock import LOCK_FILE
from volpipe.volumes.volume import open_volume
from volpipe.workflow.driver import Report, RunWork
from volpipe.workflow.follow import MOST_ALIKE, STOP, Look
from volpipe.workflow.prepare import prepare
from volpipe.workflow.status import find_status
from volpipe.workflow.work_plan import execute

SLICES = ("net.name=identity", *windowed((8, 16, 16), (0, 0, 0), (1, 1, 1), "crop"))  # blocks of 8 slices


class Following:
    """A run that follows the volume `name` in `folder`, in this process; between two looks `change` is called.

    `looks` are those that there were, `num_pools` counts how often workers were started, and are at work.
    """

    def __init__(self, folder: Path, name: str, change: Callable[[int], None], *settings: str) -> None:
        self.folder, self.location, self.change = folder, str(folder / name), change
        self.settings = settings or SLICES
        self.looks: list[Look] = []
        self.num_pools = self.num_open = 0

    @property
    def run(self) -> Path:
        return self.folder / "out.zarr.run"

    def stop(self) -> None:
        (self.run / STOP).touch()

    @contextmanager
    def start(self, folder: Path) -> Iterator[Inline]:
        self.num_pools += 1
        self.num_open += 1
        with Inline(slots=2).start(folder) as pool:
            yield pool
        self.num_open -= 1

    def on_look(self, look: Look) -> None:
        self.looks.append(look)
        self.change(look.number)

    def follow(self, **options: Any) -> Report:
        plan = prepare(self.location, load_recipe(None, self.settings), self.folder / "out.zarr", self.folder)
        return execute(plan, self.start, RunOptions(follow=0.0, **options), Listener(on_look=self.on_look))

    def assert_fresh(self) -> None:
        """Compare the output with that of a fresh run with the same sizes, in its place."""
        out = self.folder / "out.zarr"
        found = fingerprint(out)
        again = prepare(self.location, load_recipe(None, self.settings), out, self.folder)
        assert execute(RunWork(again).grown() or again, Inline().start, RunOptions(fresh=True)).missing == []
        assert fingerprint(out) == found


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind == "slices" else ()) for kind in GROWING]
)
def test_a_volume_that_grows_ten_times_is_followed(tmp_path: Path, kind: str) -> None:
    data = noise((125, 16, 16))
    volume = GROWING[kind](tmp_path)
    volume.show(data[:25])

    def grow(number: int) -> None:
        if number < 10:
            volume.show(data[: 35 + 10 * number])
        else:
            following.stop()

    following = Following(tmp_path, volume.name, grow)
    report = following.follow()
    assert report.was_complete and not report.missing
    assert [look.reason for look in following.looks] == [""] * 12
    reports = [look.report for look in following.looks if look.report is not None]
    assert [len(report.updates) for report in reports] == [0] + [1] * 10 + [0]
    assert not (following.run / STOP).exists()
    assert np.array_equal(open_volume(tmp_path / "out.zarr").open()[...], data)
    following.assert_fresh()


def test_workers_are_there_only_while_something_is_computed(tmp_path: Path) -> None:
    data = noise((40, 16, 16))
    volume = GrowingN5(tmp_path)
    volume.show(data[:20])
    at_work = []

    def change(number: int) -> None:
        at_work.append((following.num_pools, following.num_open))
        if number == 1:
            volume.show(data)
        if number == 3:
            following.stop()

    following = Following(tmp_path, volume.name, change)
    following.follow()
    assert [pools for pools, _ in at_work] == [1, 1, 2, 2, 2]  # looks that find nothing start none
    assert following.num_open == 0


def test_chunks_that_come_after_the_metadata_are_edits(tmp_path: Path) -> None:
    """The new slices are zeros at first, and stay absent over two looks."""
    data = noise((40, 16, 16))
    volume = GrowingN5(tmp_path)
    volume.show(data[:20])

    def change(number: int) -> None:
        pairs = volume.changes(data)
        if number == 0:
            new = next(file for _, file in pairs if file.name == "attributes.json" and file.parent.name == "raw")
            new.replace(volume.path / "raw/attributes.json")
        elif number == 2:
            volume.show(data)
        elif number == 3:
            following.stop()

    following = Following(tmp_path, volume.name, change)
    following.follow()
    assert np.array_equal(open_volume(tmp_path / "out.zarr").open()[...], data)
    following.assert_fresh()


def test_a_look_that_fails_is_told_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Metadata that are half written, a damaged chunk, a volume that is away: the work goes on when they are mended."""
    data = noise((48, 16, 16))
    volume = GrowingN5(tmp_path)
    volume.show(data[:20])
    metadata, chunk = volume.path / "raw/attributes.json", volume.path / "raw/0/0/1"
    kept = {}

    def change(number: int) -> None:
        if number == 0:
            kept["metadata"] = metadata.read_bytes()
            metadata.write_bytes(kept["metadata"][:30])
        elif number == 1:
            metadata.write_bytes(kept["metadata"])
            volume.show(data[:40])
            kept["chunk"] = chunk.read_bytes()
            chunk.write_bytes(kept["chunk"][:40])
        elif number == 3:
            chunk.write_bytes(kept["chunk"])
            volume.path.rename(tmp_path / "away")
        elif number == 4:
            (tmp_path / "away").rename(volume.path)
            volume.show(data)
        elif number == 5:
            following.stop()

    following = Following(tmp_path, volume.name, change)
    following.follow(tolerated=1.0)
    failed = [bool(look.reason) for look in following.looks]
    assert failed == [False, True, True, True, True, False, False]
    assert "attributes.json" in following.looks[1].reason
    assert "tried again in 0.0 s (the same for the 1. time of 10)" in caplog.text
    following.assert_fresh()


def test_a_volume_that_shrank_ends_the_work_with_the_refusal(tmp_path: Path) -> None:
    data = noise((40, 16, 16))
    volume = GrowingN5(tmp_path)
    volume.show(data)
    following = Following(tmp_path, volume.name, lambda number: volume.show(data[:30]))
    with pytest.raises(RunError, match=r"axis z: the volume .* had 40 voxels and has 30"):
        following.follow()
    assert len(following.looks) == MOST_ALIKE + 1
    assert following.num_pools == 1


def test_a_block_that_cannot_be_computed_ends_the_work_incomplete(tmp_path: Path) -> None:
    data = noise((40, 16, 16))
    volume = GrowingN5(tmp_path)
    volume.show(data)
    (volume.path / "raw/0/0/1").write_bytes(b"damaged")
    following = Following(tmp_path, volume.name, lambda number: None)
    report = following.follow(tolerated=1.0)
    assert len(report.missing) == 1
    assert len(following.looks) == MOST_ALIKE


def test_a_driver_whose_place_another_took_ends_at_once(tmp_path: Path) -> None:
    data = noise((40, 16, 16))
    volume = GrowingN5(tmp_path)
    volume.show(data[:20])

    def change(number: int) -> None:
        volume.show(data)
        (following.run / LOCK_FILE).write_text("process 1 on another since 2026-01-01 00:00:00 (0)")

    following = Following(tmp_path, volume.name, change)
    with pytest.raises(LockLost, match="is no longer held by"):
        following.follow()
    assert len(following.looks) == 1


def test_what_takes_a_part_alone_is_not_followed(tmp_path: Path) -> None:
    volume = GrowingN5(tmp_path)
    volume.show(noise((20, 16, 16)))
    with pytest.raises(RunError, match="follow takes all that changes"):
        Following(tmp_path, volume.name, lambda number: None).follow(only=Box.from_shape((8, 8, 8)))


def test_python_follows_a_volume_on_a_pool_that_stays_up(tmp_path: Path) -> None:
    data, volume = noise((40, 16, 16)), GrowingN5(tmp_path)
    volume.show(data[:20])
    looks = list[Look]()

    def on_look(look: Look) -> None:
        looks.append(look)
        volume.show(data)
        (tmp_path / "out.zarr.run" / STOP).touch()

    given: dict[str, Any] = {"out": tmp_path / "out.zarr", "settings": SLICES, "site": Inline()}
    report = vp.run(volume.path, **given, follow=0.01, listener=Listener(on_look=on_look))
    assert isinstance(report, Report)
    assert [str(update).startswith("the volume has grown from 20") for update in report.updates] == [True]
    assert len(looks) == 2 and looks[-1].report is report
    with pytest.raises(PlanError, match="follow is 0 s; give the seconds"):
        vp.run(volume.path, **given, follow=0)


class Follower:
    """The command that follows a volume, in a process of its own."""

    def __init__(
        self, folder: Path, location: str, *settings: str, site: str = "threads", seconds: float = 0.3
    ) -> None:
        self.folder, self.out = folder, folder / "out.zarr"
        given = set_each(*(settings or SLICES))
        self.command = ["run", "--config", site, *given, "-o", str(self.out), location]
        self.following = [*self.command, "--follow", str(seconds)]

    def begin(self, *options: str) -> Process:
        return begin(self.folder, *self.following, *options)

    @property
    def num_looks(self) -> int:
        """Looks of all sessions that computed something."""
        journal = self.folder / "out.zarr.run/sessions.jsonl"
        return journal.read_text().count('"metadata"') if journal.is_file() else 0

    def is_waiting(self) -> bool:
        note = self.folder / "out.zarr.run/progress.json"
        return note.is_file() and json.loads(note.read_text()).get("waits", 0) > time.time()

    def stop(self, process: Process) -> None:
        """Let it look once more, and end."""
        (self.folder / "out.zarr.run" / STOP).touch()
        ended = finish(self.folder, process)
        assert ended.code == 0, ended.err
        assert "is complete, of its volume as it was when you asked to stop" in ended.out


def grown_while_it_is_killed(follower: Follower, show: Callable[[int], None], first: int) -> int:
    """Let ten slices come ten times while the driver follows, which is killed twice; return how often it was begun.

    The volume has `first` slices when that begins.
    """

    def has_looked() -> bool:
        assert process.poll() is None, (follower.folder / "err.txt").read_text()
        return follower.num_looks > num_looks

    show(first)
    process, num_begun, num_looks = follower.begin(), 1, 0
    for number in range(1, 11):
        show(first + 10 * number)
        if number in (4, 7):
            wait_until(has_looked, 120)
            process.kill()
            process.wait()
            num_looks, num_begun = follower.num_looks, num_begun + 1
            process = follower.begin()
        elif has_looked():
            wait_until(follower.is_waiting, 120)
        time.sleep(0.1 * number)
    follower.stop(process)
    return num_begun


def fresh(follower: Follower, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return a hash of what the command makes in one go, with the sizes of windows, blocks and shards given."""
    (follower.folder / "fresh").mkdir()
    command = [part.replace("out.zarr", "fresh/out.zarr") for part in follower.command]
    ended = giver(follower.folder, monkeypatch, capsys)(*command)
    assert ended.code == 0, ended.err
    return fingerprint(follower.folder / "fresh/out.zarr")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_no_process_outlives_a_test")
def test_a_growing_volume_is_followed_by_a_driver_that_is_killed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, volume = noise((125, 24, 24)), GrowingN5(tmp_path)
    blended = ("net.name=identity", "normalise.method=none", *windowed((16, 16, 16), (8, 8, 8), (2, 2, 2), "hann"))
    follower = Follower(tmp_path, str(volume.path / "raw"), *blended, "output.shard=[16,16,16]", "output.chunk=[8,8,8]")
    assert grown_while_it_is_killed(follower, lambda n: volume.show(data[:n]), 25) == 3
    assert np.array_equal(open_volume(follower.out).open()[...], data)
    assert fingerprint(follower.out) == fresh(follower, monkeypatch, capsys)


@pytest.mark.real
@pytest.mark.long
@pytest.mark.usefixtures("_no_process_outlives_a_test")
@pytest.mark.parametrize("kind", ["slices", "n5", "shards", "bucket"])
def test_a_real_volume_that_grows_is_followed_by_a_driver_that_is_killed_twice(
    tmp_path: Path, shared: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:  # fmt: skip
    """FIB-SEM of medulla, through a net that blurs; what it should be is computed by scipy as well."""
    from scipy.ndimage import uniform_filter

    (tmp_path / "net.py").write_text(SMOOTH)
    data = tifffile.imread(shared / "fibsem_medulla" / "ts2_raw.tif")[:, 60:156, 80:176]
    volume: Growing = GrowingKeys(tmp_path, bucket) if kind == "bucket" else GROWING[kind](tmp_path)
    location = volume.location if isinstance(volume, GrowingKeys) else str(volume.path)
    sizes = windowed((32, 32, 32), (8, 8, 8), (1, 2, 2), "crop")
    recipe = ("net.name=net.py:smooth", "net.intensity=same", "output.dtype=float32", "normalise.method=none", *sizes)
    layout = ("output.shard=[24,48,48]", "output.chunk=[24,24,24]")
    follower = Follower(tmp_path, location, *recipe, *layout, site="local")
    assert grown_while_it_is_killed(follower, lambda n: volume.show(data[:n]), 150) == 3
    expected = uniform_filter(data.astype(np.float64), 3, mode="mirror")
    np.testing.assert_allclose(open_volume(follower.out).open()[...], expected, atol=1e-3)
    assert fingerprint(follower.out) == fresh(follower, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_process_outlives_a_test")
def test_a_driver_that_waits_says_so_and_ends_when_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give = giver(tmp_path, monkeypatch, capsys)
    volume = GrowingN5(tmp_path)
    volume.show(noise((20, 16, 16)))
    follower = Follower(tmp_path, str(volume.path / "raw"), seconds=60)
    process = follower.begin("--metrics", "how.prom")
    wait_until(follower.is_waiting, 60)
    told = give("status", "out.zarr")
    assert told.code == 3
    assert "complete; process" in told.out and "follows the volume, and looks again at" in " ".join(told.out.split())
    status = find_status(str(follower.out))
    assert status.is_complete and 0 < status.to_json()["waits_until"] - time.time() < 60
    wait_until(lambda: 'state="waiting"} 1' in (tmp_path / "how.prom").read_text(), 30)
    page = (tmp_path / "out.zarr.run/report.html").read_text()
    assert "follows its volume" in page
    assert "out.zarr.run is in use by process" in give(*follower.command).err
    process.send_signal(signal.SIGTERM)
    ended = finish(tmp_path, process, seconds=10)
    assert ended.code == INTERRUPTED
    assert "run the same command again to continue" in ended.err
    assert find_status(str(follower.out)).state == "complete"
    process = follower.begin()
    wait_until(follower.is_waiting, 60)
    follower.stop(process)
    assert "follows its volume" not in (tmp_path / "out.zarr.run/report.html").read_text()
