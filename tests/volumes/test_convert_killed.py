"""Copies that are killed or terminated leave nothing, and take little memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from boxes import MiB
from conftest import ROOT
from volumes import noise

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-m", "volpipe"]


@contextmanager
def copying(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Give the command that makes a large copy `b.n5` in `folder`, once it has begun to write, and its workers."""
    with (folder / "a.npy").open("wb") as stream:
        header = {"descr": "|u1", "fortran_order": False, "shape": (1000, 2000, 2000)}
        np.lib.format.write_array_header_2_0(stream, header)
        stream.truncate(stream.tell() + 4 * 10**9)
    command = [*COMMAND, "convert", "--workers", "2", "--codec", "gzip", "a.npy", "b.n5"]
    with subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        children: list[psutil.Process] = []
        while len(children) < 3 and time.monotonic() < deadline:  # two workers, and the tracker of their resources
            time.sleep(0.05)
            children = psutil.Process(process.pid).children(recursive=True)
        assert (folder / "b.n5.partial").exists()
        try:
            yield process, children
        finally:
            process.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    assert not (folder / "b.n5").exists()


def test_a_killed_copy_leaves_no_process_and_no_copy_under_its_name(tmp_path: Path) -> None:
    with copying(tmp_path) as (process, _):
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
    assert (tmp_path / "b.n5.partial").exists()  # for the same command to go on with


def test_a_terminated_copy_leaves_nothing(tmp_path: Path) -> None:
    with copying(tmp_path) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    assert [p.name for p in tmp_path.iterdir()] == ["a.npy"]


def test_a_copy_whose_worker_is_killed_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with copying(tmp_path) as (process, children):
        next(child for child in children if "spawn_main" in " ".join(child.cmdline())).kill()
        _, printed = process.communicate(timeout=60)
        assert (process.returncode, "was killed" in printed) == (2, True)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npy"]


COPY = """
import sys
from volpipe.volumes import convert
from volpipe.volumes.volume import open_volume

def peak():
    with open("/proc/self/status") as status:  # getrusage would count the process that started this one
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

convert.MIN_BOX_BYTES = convert.MAX_BOX_BYTES = 2**22
volume = open_volume(sys.argv[1])
convert.convert(open_volume(sys.argv[2]), "warm_" + sys.argv[3], convert.Choice(codec="raw"))
before = peak()
convert.convert(volume, sys.argv[3], convert.Choice(codec="raw"))
print(peak() - before)
"""


@pytest.mark.parametrize("name", ["b.mrc", "b.tif", "b.h5", "b.n5"])
def test_memory_is_a_few_boxes_whatever_the_volume(tmp_path: Path, name: str) -> None:
    shape = (60, 1000, 2000)  # a plane is less than a box, also where bytes are stored as uint16
    with (tmp_path / "a.npy").open("wb") as stream:
        np.lib.format.write_array_header_2_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
        stream.truncate(stream.tell() + int(np.prod(shape)))
    np.save(tmp_path / "small.npy", noise((9, 12, 13)))
    ended = subprocess.run(
        [sys.executable, "-c", COPY, "a.npy", "small.npy", name], cwd=tmp_path, env=ENVIRONMENT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 6 * 4 * MiB
