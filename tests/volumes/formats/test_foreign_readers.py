"""Other people's readers open what volpipe writes: those that the tests' environment cannot hold, in their own."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

import volpipe as vp

READERS = (
    "ome-zarr-models", "ngff-zarr", "ome-zarr", "napari-ome-zarr", "bioio", "webknossos", "cloud-volume", "zarr",
    "z5py",
)  # fmt: skip


def test_the_script_writes_what_readers_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = SourceFileLoader("foreign_readers", str(ROOT / "scripts" / "foreign_readers"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    script = module_from_spec(spec)
    loader.exec_module(script)
    script.write(tmp_path)
    places = sorted(tmp_path.iterdir())
    assert len(places) >= 10
    for place in places:
        np.testing.assert_array_equal(np.asarray(vp.open(place)), script.truth(place.name.partition("_")[0]))


@pytest.mark.long  # each is installed from the package index first
@pytest.mark.timeout(900)
@pytest.mark.parametrize("reader", READERS)
def test_readers_show_what_the_table_in_the_docs_says(tmp_path: Path, reader: str) -> None:
    command = [sys.executable, str(ROOT / "scripts/foreign_readers"), "--folder", str(tmp_path), reader]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
