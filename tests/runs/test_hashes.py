"""What scripts/hashes leaves out and what it counts; that it makes every output is for a run of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from volpipe.volumes.convert import CODECS

sys.path.insert(0, str(ROOT / "scripts"))

from hashing import steps  # from scripts, which is not installed
from hashing.contents import stable, tree_hash

LATER = {"started": "2026-11-22T20:00:00Z", "hosts": ["another"], "packages": {"numpy": "3"}, "code_sha256": "ff"}


def output(folder: Path, attributes: dict[str, object], voxels: bytes = b"12") -> Path:
    """Return an output below `folder` that says `attributes` of where it comes from."""
    out = folder / "out.zarr"
    out.mkdir(parents=True)
    (out / "zarr.json").write_text(json.dumps({"attributes": {"volpipe": attributes}}))
    (out / "c").write_bytes(voxels)
    return out


def test_two_outputs_of_one_recipe_have_one_hash_whenever_and_wherever_they_were_made(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    paths = [{"output": str(folder / "out.zarr"), "sums": 1} for folder in (first, second)]
    out, again = output(first, paths[0] | {"started": "1970"}), output(second, paths[1] | LATER)
    assert tree_hash(out, first) == tree_hash(again, second)


@pytest.mark.parametrize("other", [{"sums": 2}, {"total": 1}, {}])
def test_every_other_attribute_counts_by_name_and_value(tmp_path: Path, other: dict[str, object]) -> None:
    out, changed = output(tmp_path / "a", {"sums": 1}), output(tmp_path / "b", other)
    assert tree_hash(out, tmp_path) != tree_hash(changed, tmp_path)


def test_every_voxel_counts(tmp_path: Path) -> None:
    out, changed = output(tmp_path / "a", {}), output(tmp_path / "b", {}, b"13")
    assert tree_hash(out, tmp_path) != tree_hash(changed, tmp_path)


def test_a_time_outside_our_attributes_counts() -> None:
    assert stable({"started": 1, "volpipe": {"started": 1, "in": [{"hosts": 1}]}}) == {
        "started": 1,
        "volpipe": {"in": [{}]},
    }


def test_tiffs_have_one_hash_but_for_the_name_that_each_draws_anew(tmp_path: Path) -> None:
    for name, uuid, voxels in (("a", "0", b"1"), ("b", "f", b"1"), ("c", "0", b"2")):
        (tmp_path / f"{name}.tif").write_bytes(b'<OME UUID="urn:uuid:' + uuid.encode() * 36 + b'">' + voxels)
    hashes = [tree_hash(tmp_path / f"{name}.tif", tmp_path) for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]


def test_every_format_and_codec_is_copied_to() -> None:
    assert {format: set(codecs) for format, codecs in steps.CODECS.items()} == {
        format: set(codecs) for format, codecs in CODECS.items()
    }
