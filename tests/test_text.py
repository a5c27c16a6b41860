"""Texts that people write are read as editors of any system save them: marked, in UTF-16, with other ends of lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import THREADS, Give, giver
from volumes import noise, write_volume

from volpipe.errors import VolpipeError
from volpipe.evaluation.skeletons import read_skeletons
from volpipe.geometry.grid import Box
from volpipe.nets.makers import read_json
from volpipe.nets.monai_bundle import Bundle
from volpipe.recipes.batch import list_datasets, load_batch
from volpipe.recipes.toml import load_tree
from volpipe.text import decoded, read_text
from volpipe.volumes.formats.container import folders_of
from volpipe.volumes.storage import object_store
from volpipe.volumes.volume import (
    ArraySpec,
    Level,
    Multiscale,
    create_array,
    create_multiscale,
    open_volume,
    open_writer,
)

CODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-32")
TABLE = "skeleton_id,treenode_id,parent_treenode_id,x,y,z\n1,1,,1,2,3\n1,2,1,2,2,3\n"
SWC = "# a tree\n1 0 1.5 2 3 1 -1\n2 0 2.5 2 3 1 1\n"


def datasets(file: Path) -> object:
    """Return what the list of volumes `file` names in a batch."""
    batch = file.with_name("batch.toml")
    batch.write_text(f'out = "{file.parent}/out/{{stem}}.zarr"\nvolumes = ["{file}"]\n')
    named, mistakes = list_datasets(load_batch(batch))
    assert not mistakes, mistakes
    return named


def nodes(file: Path) -> object:
    found = read_skeletons(str(file))
    return [np.asarray(value).tolist() for value in vars(found).values()]


def bundle(file: Path) -> object:
    (file.parent / "configs").mkdir(exist_ok=True)
    file.rename(file.parent / "configs/inference.yaml")
    return Bundle.read(file.parent).tree


def credentials(file: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        return object_store.profile_keys()


TEXTS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "a recipe": ("r.toml", '[net]\nname = "identity"  # µ\n', load_tree),
    "a list of volumes": ("v.txt", "a.n5\n# none\na.n5/raw\n", datasets),
    "a table of volumes": ("v.csv", "volume,input.channel\na.n5,0\n", datasets),
    "a skeleton": ("s.swc", SWC, nodes),
    "a table of skeletons": ("s.csv", TABLE, nodes),
    "a description in JSON": ("plans.json", '{"name": "µ"}', read_json),
    "a bundle in YAML": ("inference.yaml", "network: [1, 2]\nname: µ\n", bundle),
    "credentials": ("c", "[default]\naws_access_key_id = a\naws_secret_access_key = b\n", credentials),
}  # fmt: skip


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("what", TEXTS)
def test_a_text_is_read_alike_in_every_coding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, coding: str, ends: str
) -> None:
    name, text, read = TEXTS[what]
    monkeypatch.chdir(tmp_path)
    write_volume(tmp_path / "a.n5", noise((4, 4, 4)))
    (tmp_path / name).write_text(text, encoding="utf-8")
    expected = read(tmp_path / name)
    (tmp_path / name).write_bytes(text.replace("\n", ends).encode(coding))
    assert read(tmp_path / name) == expected
    assert expected


def test_bytes_that_are_no_text_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(VolpipeError, match=r"r\.toml is not valid TOML"):
        load_tree(tmp_path / "r.toml")
    (tmp_path / "r.json").write_bytes(b"\xff{}")
    with pytest.raises(VolpipeError, match=r"r\.json is no JSON"):
        read_json(tmp_path / "r.json")


def test_what_is_read_ends_lines_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("\ufeffa\r\nb\rc\nd".encode())
    assert read_text(tmp_path / "a") == "a\nb\nc\nd"
    assert decoded(b"\xe9", errors="replace") == "\ufffd"


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("format", ["n5", "zarr2", "ome-zarr-0.4", "ome-zarr-0.5", "precomputed"])
def test_metadata_that_an_editor_has_saved_are_read(tmp_path: Path, format: str, coding: str) -> None:
    data, place = noise((8, 8, 8)), tmp_path / f"a.{format.rpartition('-')[0].replace('ome-', '') or format}"
    create_array(place, "s0", ArraySpec(data.shape, data.dtype, (4, 4, 4), codec="gzip"), folders_of(format).name)
    open_writer(place, "s0").write(Box.from_shape(data.shape), data)
    create_multiscale(place, Multiscale((Level("s0"),), voxel_size_nm=(40.0, 4.0, 4.0)), format=format)
    names = ("attributes.json", ".zarray", ".zattrs", ".zgroup", "zarr.json", "info")
    changed = [file for file in place.rglob("*") if file.name in names]
    for file in changed:
        file.write_bytes(json.dumps(json.loads(file.read_text()), indent=2).replace("\n", "\r\n").encode(coding))
    volume = open_volume(place)
    assert np.array_equal(volume[...], data)
    assert volume.voxel_size_nm == (40, 4, 4)
    assert changed


def test_a_net_and_a_recipe_of_windows_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give: Give = giver(tmp_path, monkeypatch, capsys)
    np.save(tmp_path / "a.npy", noise((8, 16, 16)))
    net = "import torch\r\n\r\n\r\ndef net():\r\n    return torch.nn.Identity()\r\n"
    (tmp_path / "net.py").write_bytes(net.encode("utf-8-sig"))
    (tmp_path / "r.toml").write_bytes("[net]\r\nname = 'net.py:net'\r\nuntrained = true\r\n".encode("utf-16"))
    shape = ("--set", "windows.shape=[8,16,16]")
    ended = give("run", *THREADS, "--recipe", "r.toml", *shape, "a.npy", "-o", "o.zarr")
    assert ended.code == 0, ended
    (tmp_path / "net.py").write_bytes(net.encode("utf-16"))
    ended = give("run", *THREADS, *shape, "--set", "net.name=net.py:net", "a.npy", "-o", "p.zarr")
    assert (ended.code, "net.py" in ended.err, "Traceback" in ended.err) == (2, True, False), ended
