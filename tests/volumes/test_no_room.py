"""Copies that find no room, at whatever byte: a sentence, no process that crashes, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from volpipe.volumes.convert import Choice, convert
from volpipe.volumes.volume import open_volume

SHARES = (0.0, 0.001, 0.02, 0.3, 0.7, 0.95, 0.999)
CROWDED = """
import json, resource, sys
from pathlib import Path
from volpipe.errors import VolumeError
from volpipe.volumes.convert import Choice, convert
from volpipe.volumes.volume import open_volume

name, codec, size, shares = json.loads(sys.argv[1])
for share in shares:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * size), resource.RLIM_INFINITY))
    try:
        convert(open_volume("a.npy"), name, Choice(codec=codec))
    except VolumeError as error:
        print(share, error)
    else:
        print(share, "was copied")
    left = sorted(path.name for path in Path().iterdir())
    print("left", *left)
"""


def volume() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (64, 100, 128), dtype=np.uint16)


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("c.h5", "gzip"),
        ("c.h5", "raw"),
        ("c.tif", "raw"),
        ("c.ome.tif", "gzip"),
        ("c.mrc", "raw"),
        ("c.npy", "raw"),
    ],
)
def test_a_single_file_without_room_is_an_error_that_leaves_nothing(tmp_path: Path, name: str, codec: str) -> None:
    np.save(tmp_path / "a.npy", volume())
    convert(open_volume(tmp_path / "a.npy"), tmp_path / name, Choice(codec=codec))
    size = (tmp_path / name).stat().st_size
    (tmp_path / name).unlink()
    asked = json.dumps([name, codec, size, SHARES])
    ended = subprocess.run(
        [sys.executable, "-c", CROWDED, asked], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended
    lines = ended.stdout.splitlines()
    assert lines[1::2] == ["left a.npy"] * len(SHARES), ended
    assert len(lines) == 2 * len(SHARES)
    for line, share in zip(lines[::2], SHARES, strict=True):
        assert line.startswith(f"{share} ") and name in line and "make room" in line, line
    assert ended.stderr == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("name", ["c.h5", "c.tif", "c.mrc", "c.npy", "c.zarr"])
def test_a_full_file_system_is_an_error_that_leaves_nothing(tmp_path: Path, name: str) -> None:
    full = tmp_path / "full"
    full.mkdir()
    np.save(tmp_path / "a.npy", volume())
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", full], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system may be mounted here")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "volpipe", "convert", tmp_path / "a.npy", full / name],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert ended.returncode == 2, ended
        assert "Traceback" not in ended.stderr and name in ended.stderr, ended
        assert "No space left" in ended.stderr or "make room" in ended.stderr, ended
        assert name == "c.zarr" or not [*full.iterdir()]
    finally:
        subprocess.run(["umount", full], check=True)
