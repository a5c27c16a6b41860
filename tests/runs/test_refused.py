"""Refused before the start, each with what to do: one test for each way in which a run cannot work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from command import IDENTITY, THREADS, Ended, Give, giver, set_each
from disks import small_disk
from volumes import fingerprint, noise, windowed, write_volume

import volpipe as vp
from volpipe.errors import SiteError
from volpipe.estimation.limits import Limits, unwritable

SHAPE = (16, 24, 16)


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    return giver(tmp_path, monkeypatch, capsys)


def deny(monkeypatch: pytest.MonkeyPatch, place: Path, right: int) -> None:
    """Let the system say that this user lacks a right at `place`: root, as whom tests may run, lacks none."""
    ask = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == place and mode & right) and ask(path, mode))


def assert_refused(ended: Ended, *words: str, command: str = "run") -> None:
    """Assert that a command ended in one sentence with all of `words`, before it did anything."""
    assert ended.code == 2
    (sentence,) = ended.err.splitlines()
    assert sentence.startswith("volpipe: ")
    assert [word for word in words if word not in sentence] == []


def run(give: Give, *options: str, volume: str = "in.n5", out: str = "out.zarr") -> Ended:
    return give("run", *THREADS, *options, "-o", out, volume)


@pytest.mark.parametrize("place", ["in.n5", "in.n5/raw/0/1/0"])
def test_a_volume_that_may_not_be_read(tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    assert (tmp_path / place).exists()
    deny(monkeypatch, tmp_path / place, os.R_OK)
    ended = run(give, *IDENTITY)
    assert_refused(ended, f"{tmp_path / place} of the volume may not be read", "run as a user who may read it")
    assert not (tmp_path / "out.zarr.run").exists()


def test_a_folder_that_may_not_be_written(tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").mkdir()
    deny(monkeypatch, tmp_path / "kept", os.W_OK)
    ended = run(give, *IDENTITY, "--parents", out="kept/new/out.zarr")
    owner = f"it is user {os.getuid()}'s, mode {(tmp_path / 'kept').stat().st_mode & 0o777:o}"
    assert_refused(
        ended, f"{tmp_path / 'kept'} may not be written by user {os.getuid()}: {owner}; choose another --out"
    )
    assert not list((tmp_path / "kept").iterdir())


def test_a_folder_that_kubernetes_made_is_refused_with_how_it_gets_another_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = f"may not be written by user {os.geteuid()}: it is user 0's, mode 755"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert unwritable(Path("/usr")) == mine
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert unwritable(Path("/usr")).startswith(f"{mine}. A folder of a claim that does not exist is made by Kubernetes")
    assert f"(mkdir, chown {os.geteuid()}), let an init container do that" in unwritable(Path("/usr"))


def test_a_disk_that_is_mounted_read_only(tmp_path: Path, give: Give) -> None:
    with small_disk(tmp_path / "disk", "ro"):
        ended = run(give, *IDENTITY, out="disk/out.zarr")
    assert_refused(ended, f"{tmp_path / 'disk'} is on a file system that is mounted read-only; choose another --out")


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (
            96,
            ("output.codec=raw",),
            ("output and scratch need 864.5 KiB and ", " free; free some, "),
        ),
        (96, ("output.chunk=[8,8,8]", "output.shard=[8,8,8]"), ("files and folders, and ", "use larger output.shard")),
        # The blocks that are tried fit, and tell.
        pytest.param(
            420,
            ("windows.shape=[32,32,32]", "windows.block=[3,3,3]"),
            ("output and scratch need 7", " MiB and "),
            marks=pytest.mark.long,
        ),
    ],
    ids=["raw", "inodes", "tried"],
)
def test_a_disk_that_cannot_hold_the_output_of_a_short_run(
    tmp_path: Path, give: Give, size: int, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """It began, and stopped when the disk was full."""
    write_volume(tmp_path / "noise.n5", noise((size, size, size)))  # which does not compress
    chosen = set_each("net.name=identity", "output.levels=0", *options)
    with small_disk(tmp_path / "disk", "size=800k,nr_inodes=99" if size == 96 else "size=66m"):
        ended = give("run", *THREADS, *chosen, "-o", "disk/out.zarr", "noise.n5")
        assert ended.code == 2
        assert all(word in ended.err for word in words), ended.err
        assert not (tmp_path / "disk/out.zarr").exists()


def test_a_disk_that_is_too_small_if_nothing_compresses_is_warned_of(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "plain.n5", np.full((96, 96, 96), 7, np.uint8))
    warning = "where nothing compresses, output and scratch take 972.6 KiB, and "
    with small_disk(tmp_path / "disk", "size=900k"):
        for command in (("plan", "--quick"), ("run",)):
            ended = give(*command, *THREADS, *IDENTITY, "-o", "disk/out.zarr", "plain.n5")
            assert ended.code == 0
            assert ended.err.count(warning) == 1 and " free; the work stops when the disk is full" in ended.err


def test_an_output_of_another_run(tmp_path: Path, give: Give) -> None:
    assert run(give, *IDENTITY).code == 0
    before = fingerprint(tmp_path / "out.zarr")
    ended = run(give, *set_each("net.name=identity", "output.codec_level=2"))
    assert_refused(ended, "output.codec_level: 1 -> 2", "choose another --out, or use --fresh")
    (tmp_path / "out.zarr.run").rename(tmp_path / "elsewhere")
    ended = run(give, *IDENTITY)
    assert_refused(ended, f"{tmp_path / 'out.zarr'} exists and no run", "choose another --out")
    assert fingerprint(tmp_path / "out.zarr") == before


@pytest.mark.parametrize("out", ["in.n5", "in.n5/raw", "in.n5/raw/s0", "link.n5"])
def test_an_output_that_is_the_input_or_lies_in_it(tmp_path: Path, give: Give, out: str) -> None:
    (tmp_path / "link.n5").symlink_to("in.n5")
    before = fingerprint(tmp_path / "in.n5")
    ended = run(give, *IDENTITY, out=out)
    assert_refused(ended, "the volume", str(tmp_path / "in.n5"), "choose another --out")
    assert fingerprint(tmp_path / "in.n5") == before


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(free_files=1), ["files and", "may have 1", "use larger output.shard"]),
        (Limits(free_bytes=1000), ["need", "iB and", "1.0 free", "free some, choose another --out"]),
        (Limits(worker_bytes=1 << 20), ["a worker needs ", " GiB of memory and has 0.0", "use a windows."]),
    ],
    ids=["inodes", "disk", "memory"],
)
def test_too_little_of_what_a_run_takes(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch, limits: Limits, words: list[str]
) -> None:
    assert give("plan", *THREADS, *IDENTITY, "-o", "out.zarr", "in.n5").code == 0  # it tries blocks: bytes are known
    monkeypatch.setattr("volpipe.estimation.forecast.disk_limits", lambda out, worker_bytes: limits)
    assert_refused(run(give, *IDENTITY), *words)
    assert not (tmp_path / "out.zarr").exists()


def test_a_window_larger_than_the_volume(give: Give) -> None:
    sizes = windowed((16, 64, 16), (0, 0, 0), (1, 1, 1), "crop")
    ended = run(give, *IDENTITY, *set_each(*sizes))
    assert_refused(
        ended, "axis y: windows.shape 64 is too large for a volume of 24 voxels", "at most 24; set it to that"
    )
    sizes = windowed((16, 24, 16), (0, 0, 0), (1, 1, 1), "crop")
    assert run(give, *IDENTITY, *set_each(*sizes)).code == 0


def test_a_block_that_is_no_multiple_of_the_shard(give: Give) -> None:
    sizes = windowed((8, 8, 8), (0, 0, 0), (2, 2, 2), "crop")
    ended = run(give, *IDENTITY, *set_each(*sizes, "output.shard=[16,12,16]"))
    assert_refused(ended, "axis y: a block of 16 output voxels", "output.shard 12; use", "or change windows.block")


def test_a_window_off_the_stride_of_the_net(give: Give) -> None:
    ended = run(give, *set_each("net.name=unet3d", "windows.shape=[48,48,51]"))
    assert_refused(ended, "axis x: window 51", "stride", "use 50 or 52")


NETS = """
import threading, torch
class Net(torch.nn.Module):
    volpipe, limit = dict(in_channels=1), 10**9
    def forward(self, x):
        is_task = threading.current_thread() is not threading.main_thread()
        if is_task and x[0, 0].numel() > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x
def half():
    class Half(Net):
        volpipe = dict(out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1), halo=(0, 0, 0))
        def forward(self, x):
            return x[..., ::2]
    return Half()
def two():
    net = Net()
    net.volpipe = dict(in_channels=2)
    return net
def large(limit=600):
    net = Net()
    net.limit = limit
    return net
"""


def test_a_net_whose_output_is_not_of_the_declared_scale(tmp_path: Path, give: Give) -> None:
    (tmp_path / "net.py").write_text(NETS)
    ended = run(give, *set_each("net.name=net.py:half"))
    assert_refused(ended, "net half: a window", "but scale (1, 1, 1) and 1 channels mean", "so that they are measured")


def test_a_net_of_other_channels(tmp_path: Path, give: Give) -> None:
    (tmp_path / "net.py").write_text(NETS)
    ended = run(give, *set_each("net.name=net.py:two"))
    assert_refused(ended, "net two takes 2 channels", "has 1 channel; choose a net of 1 in_channels")


def test_weights_that_do_not_fit(tmp_path: Path, give: Give) -> None:
    import torch

    torch.save({"first.weight": torch.zeros(3)}, tmp_path / "w.pt")
    ended = run(give, *set_each("net.name=unet3d", "net.weights=w.pt"))
    assert_refused(ended, f"the weights in {tmp_path / 'w.pt'} do not fit the net", "first.weight")


def test_a_key_that_no_recipe_has(give: Give) -> None:
    assert_refused(run(give, *set_each("windows.shap=[8,8,8]")), "unknown key windows.shap", "did you mean 'shape'?")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ("windows.shape=[16,16,16]",),
            ["[16, 16, 16] needs more memory than cpu has, [8, 8, 8] fits; set windows.sh"],
        ),
        pytest.param(
            ("windows.shape=[8,8,8]", "infer.batch=2", "net.options.limit=0"),
            ["of [8, 8, 8] need", "use a smaller net"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["window", "net"],
)
def test_a_window_that_memory_does_not_hold(
    tmp_path: Path, give: Give, settings: tuple[str, ...], words: list[str]
) -> None:
    """Only the first tasks know: nothing is written, and the sentence says which window would fit."""
    (tmp_path / "net.py").write_text(NETS)
    chosen = ("net.name=net.py:large", "windows.overlap=0", "windows.block=[1,1,1]", "windows.blend=crop", *settings)
    ended = run(give, *set_each(*chosen))
    assert ended.code == 1
    sentence = ended.err.splitlines()[-1]
    assert [word for word in words if word not in sentence] == []
    assert not list((tmp_path / "out.zarr/s0").glob("c*"))
    ended = give("plan", *THREADS, *set_each(*chosen), "in.n5")
    assert ended.code == 1
    assert [word for word in words if word not in ended.err.splitlines()[-1]] == []


def test_a_run_refused_for_memory_may_begin_again_with_other_windows_without_fresh(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("volpipe.estimation.forecast.disk_limits", lambda out, worker_bytes: Limits(worker_bytes=1 << 20))
        assert_refused(run(give, *IDENTITY), "a worker needs ", "use a windows.")
    write_volume(tmp_path / "other.n5", noise(SHAPE, seed=1))
    (tmp_path / "in.n5").rename(tmp_path / "old.n5")
    (tmp_path / "other.n5").rename(tmp_path / "in.n5")
    smaller = set_each(*windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))
    ended = run(give, *IDENTITY, *smaller, "--keep-tensors")
    assert (ended.code, ended.err) == (0, "")
    assert run(give, *IDENTITY, *smaller, out="alone.zarr").code == 0
    assert (vp.open(tmp_path / "out.zarr")[:] == vp.open(tmp_path / "alone.zarr")[:]).all()


def refused_by_the_site(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a run that ends at its first task: its output has metadata, and no voxel."""

    def refuse(stage: str, units: Sequence[int]) -> NoReturn:
        raise SiteError("executor cpu cannot start workers")

    with monkeypatch.context() as patch:
        patch.setattr("volpipe.workflow.driver.submitter", lambda pool, job: refuse)
        assert "executor cpu cannot start workers" in run(give, *IDENTITY).err


def test_a_run_that_the_site_refuses_stands_in_nobodys_way(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_by_the_site(give, monkeypatch)
    assert (tmp_path / "out.zarr/zarr.json").is_file()
    other = set_each("output.levels=1", "output.codec_level=2")
    assert (run(give, *IDENTITY, *other).code, run(give, *IDENTITY, *other, out="alone.zarr").code) == (0, 0)
    assert (vp.open(tmp_path / "out.zarr")[:] == vp.open(tmp_path / "alone.zarr")[:]).all()
    names = [{file.relative_to(out) for file in out.rglob("*")} for out in tmp_path.glob("*.zarr")]
    assert len(names) == 2 and names[0] == names[1]


def test_a_run_that_wrote_a_voxel_and_no_line_of_its_journal_is_not_given_up(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_by_the_site(give, monkeypatch)
    (tmp_path / "out.zarr/s0/c/0/0").mkdir(parents=True)
    (tmp_path / "out.zarr/s0/c/0/0/0").write_bytes(b"of a task that was lost")
    assert_refused(run(give, *IDENTITY, *set_each("output.levels=1")), "holds a run with another recipe")


def test_a_scan_that_was_begun_is_not_given_up_for_another_recipe(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = set_each("input.empty=0")
    with monkeypatch.context() as patch:
        patch.setattr("volpipe.runs.prepasses.gather", lambda plan, cells: 1 / 0)
        assert run(give, *IDENTITY, *empty).code != 0
    assert (tmp_path / "out.zarr.run" / "journal.jsonl").stat().st_size
    assert_refused(run(give, *IDENTITY), "holds a run with another recipe", "use --fresh to start over")
    assert run(give, *IDENTITY, *empty).code == 0


def test_a_scan_of_an_input_that_is_another_now_counts_no_more(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = set_each("input.empty=0")
    write_volume(tmp_path / "in.n5", np.zeros(SHAPE, np.uint8) + (np.arange(SHAPE[2]) < 4).astype(np.uint8))
    with monkeypatch.context() as patch:
        patch.setattr("volpipe.runs.prepasses.gather", lambda plan, cells: 1 / 0)
        assert run(give, *IDENTITY, *empty).code != 0
    shutil.rmtree(tmp_path / "in.n5")
    data = noise(SHAPE, seed=1)
    write_volume(tmp_path / "in.n5", data)
    ended = run(give, *IDENTITY, *empty)
    assert (ended.code, "the input is another than when" in caplog.text) == (0, True)
    np.testing.assert_array_equal(vp.open(tmp_path / "out.zarr")[:], data)
