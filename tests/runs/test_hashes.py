"""What scripts/hashes leaves out and what it counts; that it makes every output is for a run of it."""

from __future__ import annotations

import json
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

from volpipe.volumes.convert import CODECS

LATER = {"started": "2026-11-22T20:00:00Z", "hosts": ["another"], "packages": {"numpy": "3"}, "code_sha256": "ff"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/hashes as a module."""
    loader = SourceFileLoader("hashes", str(ROOT / "scripts" / "hashes"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)  # dataclasses look for it there
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


def output(folder: Path, attributes: dict[str, object], voxels: bytes = b"12") -> Path:
    """Return an output below `folder` that says `attributes` of where it comes from."""
    out = folder / "out.zarr"
    out.mkdir(parents=True)
    (out / "zarr.json").write_text(json.dumps({"attributes": {"volpipe": attributes}}))
    (out / "c").write_bytes(voxels)
    return out


def test_two_outputs_of_one_recipe_have_one_hash_whenever_and_wherever_they_were_made(
    script: ModuleType, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    paths = [{"output": str(folder / "out.zarr"), "sums": 1} for folder in (first, second)]
    out, again = output(first, paths[0] | {"started": "1970"}), output(second, paths[1] | LATER)
    assert script.tree_hash(out, first) == script.tree_hash(again, second)


@pytest.mark.parametrize("other", [{"sums": 2}, {"total": 1}, {}])
def test_every_other_attribute_counts_by_name_and_value(
    script: ModuleType, tmp_path: Path, other: dict[str, object]
) -> None:
    out, changed = output(tmp_path / "a", {"sums": 1}), output(tmp_path / "b", other)
    assert script.tree_hash(out, tmp_path) != script.tree_hash(changed, tmp_path)


def test_every_voxel_counts(script: ModuleType, tmp_path: Path) -> None:
    out, changed = output(tmp_path / "a", {}), output(tmp_path / "b", {}, b"13")
    assert script.tree_hash(out, tmp_path) != script.tree_hash(changed, tmp_path)


def test_a_time_outside_our_attributes_counts(script: ModuleType) -> None:
    assert script.stable({"started": 1, "volpipe": {"started": 1, "in": [{"hosts": 1}]}}) == {
        "started": 1,
        "volpipe": {"in": [{}]},
    }


def test_tiffs_have_one_hash_but_for_the_name_that_each_draws_anew(script: ModuleType, tmp_path: Path) -> None:
    for name, uuid, voxels in (("a", "0", b"1"), ("b", "f", b"1"), ("c", "0", b"2")):
        (tmp_path / f"{name}.tif").write_bytes(b'<OME UUID="urn:uuid:' + uuid.encode() * 36 + b'">' + voxels)
    hashes = [script.tree_hash(tmp_path / f"{name}.tif", tmp_path) for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]


def test_every_format_and_codec_is_copied_to(script: ModuleType) -> None:
    assert {format: set(codecs) for format, codecs in script.CODECS.items()} == {
        format: set(codecs) for format, codecs in CODECS.items()
    }
