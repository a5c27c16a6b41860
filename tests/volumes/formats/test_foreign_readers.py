"""Other people's readers open what volpipe writes: those that the tests' environment cannot hold, in their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

READERS = ("ome-zarr-models", "ome-zarr", "napari-ome-zarr", "bioio", "webknossos", "cloud-volume", "zarr", "z5py")


@pytest.mark.long  # each is installed from the package index first
@pytest.mark.timeout(900)
@pytest.mark.parametrize("reader", READERS)
def test_readers_show_what_the_table_in_the_docs_says(tmp_path: Path, reader: str) -> None:
    command = [sys.executable, str(ROOT / "scripts/foreign_readers"), "--folder", str(tmp_path), reader]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
