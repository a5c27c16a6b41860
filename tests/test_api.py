"""`import volpipe as vp`: its names are sorted, true and described, and cost nothing until they are used."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from volumes import write_volume

import volpipe as vp
from volpipe.geometry.grid import Box
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.volumes.convert import CODECS

STUB = ast.parse((ROOT / "volpipe" / "__init__.pyi").read_text(encoding="utf-8"))
IMPORTED = [alias.name for node in STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names]
HEAVY = {"numpy", "torch", "parsl", "pydantic", "tensorstore", "zarr", "dask", "rich", "typer"}


def test_the_names_are_sorted_and_those_of_the_stub() -> None:
    (names,) = [
        ast.literal_eval(node.value)
        for node in STUB.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert names == sorted(IMPORTED)
    assert sorted(vp.__all__) == names


@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_each_name_is_there_and_says_what_it_is(name: str) -> None:
    assert (getattr(vp, name).__doc__ or "").strip()
    assert name in dir(vp)
    assert getattr(vp, name).__name__ == name  # that help() shows


def test_every_format_and_codec_of_a_copy_is_described() -> None:
    words = set(re.findall(r"[\w.-]*\w", vp.convert.__doc__ or ""))
    assert words >= {*CODECS, *chain(*CODECS.values())}


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, volpipe as vp; vp.__all__; dir(vp); print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in ended.stdout.split()}
    assert "volpipe" in imported and imported & HEAVY == set()


def test_a_volume_is_surveyed_part_by_part_and_copied(tmp_path: Path) -> None:
    volume = vp.sample(tmp_path / "a.n5", (16, 24, 32))
    parts: list[object] = []
    info = vp.info(tmp_path / "a.n5/raw", codecs=True, on_part=parts.append)
    assert len(parts) == 4 and parts[-1] is info and info.volume == volume
    assert info.intensities is not None and info.footprint is not None and info.codecs is not None
    assert vp.info(volume, fast=True).intensities is None
    calls: list[tuple[int, int]] = []
    copy = vp.convert(volume, tmp_path / "b.npy", on_progress=lambda done, total: calls.append((done, total)))
    np.testing.assert_array_equal(copy, volume[...])
    assert calls[-1][0] == calls[-1][1]
    assert [array.key for array in vp.list_arrays(tmp_path / "a.n5")] == ["labels", "raw"]


def test_a_sample_has_the_voxel_size_that_is_asked_for(tmp_path: Path) -> None:
    volume = vp.sample(tmp_path / "a.n5", (16, 24, 32), voxel_size_nm=(10, 12, 14))
    assert volume.voxel_size_nm == (10, 12, 14)
    np.testing.assert_array_equal(
        volume, SyntheticVolume((16, 24, 32), 0, (10, 12, 14)).raw(Box.from_shape((16, 24, 32)))
    )
    with pytest.raises(vp.VolpipeError, match="exists already, with resolution"):
        vp.sample(tmp_path / "a.n5", (16, 24, 32))
    assert vp.convert(volume, tmp_path / "b.n5", bin=(4, 1, 1)).voxel_size_nm == (40, 12, 14)


def test_what_a_notebook_prints_is_for_people(tmp_path: Path) -> None:
    volume = vp.sample(tmp_path / "a.n5", (16, 24, 32))
    lines = [line.split()[0] for line in repr(vp.info(volume)).splitlines()]
    assert lines[1:] == ["format", "shape", "voxel", "chunks", "codec", "intensity", "on", "empty"]
    assert "files in 512³ shards" in repr(vp.info(volume, codecs=True))
    assert repr(vp.net_report("identity")) == (
        "<NetReport of identity: 0 parameters, scale (1, 1, 1), stride (1, 1, 1), halo (0, 0, 0)>"
    )
    vp.run(volume, {"net": {"name": "identity"}}, out=tmp_path / "out.zarr", site="threads")
    assert repr(vp.reproduce(tmp_path / "out.zarr")).startswith("<Reproduction: cd ")


def test_a_container_of_several_is_not_surveyed(tmp_path: Path) -> None:
    vp.sample(tmp_path / "a.n5", (16, 16, 16))
    with pytest.raises(vp.VolpipeError, match="holds 2 volumes"):
        vp.info(tmp_path / "a.n5")


def test_volumes_are_drawn_side_by_side(tmp_path: Path) -> None:
    path = write_volume(tmp_path / "a.n5", np.arange(512, dtype=np.uint8).reshape(8, 8, 8))
    volume = vp.open(path)
    vp.draw_comparison(tmp_path / "a.png", volume, volume[...])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_net_comes_with_its_weights_and_measures() -> None:
    net = vp.load_net("identity")
    assert not net.training
    report = vp.net_report("identity")
    assert report.geometry is not None and report.geometry.scale == report.facts.scale == (1, 1, 1)
    assert report.untruths == [] and report.problem == ""
    wrong = vp.net_report("identity", "net.stride=[2, 2, 2]")
    assert wrong.facts.stride == (2, 2, 2) and wrong.untruths == []  # a multiple is safe


def test_sites_are_listed_and_a_remote_folder_is_not_tried() -> None:
    assert "threads" in vp.list_sites()
    with pytest.raises(vp.VolpipeError, match="only folders are tried"):
        vp.check_site("threads", "s3://bucket/out.zarr")
