"""Outputs say where they come from, the same in every run but for one group, and how to make them again."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command import Give, giver, set_each
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.recipes.inference import Recipe, load_recipe
from volpipe.runs.provenance import read_provenance, sessions_of, settings_of, to_toml, toml
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.formats.container import read_attributes
from volpipe.volumes.identity import fingerprint as input_fingerprint
from volpipe.volumes.volume import open_volume

NET = """
import torch
class Double(torch.nn.Module):
    def forward(self, x):
        return x * 2
def build():
    return Double()
"""
SHAPE = (16, 16, 24)


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    (tmp_path / "my net.py").write_text(NET)
    return giver(tmp_path, monkeypatch, capsys)


def command(out: str = "out.zarr", *settings: str) -> list[str]:
    division = windowed((8, 8, 8), (2, 2, 2), (2, 1, 1), "hann")
    recipe = set_each("net.name=my net.py:build", "normalise.method=zscore", *division, *settings)
    return ["run", "--config", "threads", *recipe, "-o", out, "in.n5/raw"]


def said(out: Path) -> dict[str, Any]:
    attributes: dict[str, Any] = read_attributes(out)["volpipe"]
    return attributes


@pytest.mark.parametrize("format", ["ome-zarr-0.5", "ome-zarr-0.4", "zarr2", "n5"])
def test_attributes_say_what_made_the_output(tmp_path: Path, give: Give, format: str) -> None:
    out = tmp_path / ("out.n5" if format == "n5" else "out.zarr")
    assert give(*command(out.name, f"output.format={format}")).code == 0
    same, run = said(out), said(out / "run")
    assert same["recipe"]["net"]["name"] == "my net.py:build"
    sizes = {"shape": [8, 8, 8], "overlap": [2, 2, 2], "block": [2, 1, 1]}
    assert same["windows"] == sizes | {"channels_last": False, "precision": "float32", "blend": "hann"}
    assert same["normalise"]["shift"] == pytest.approx(noise(SHAPE).mean())
    assert same["input"]["path"] == str(tmp_path / "in.n5")
    assert len(same["net"]["weights_sha256"]) == len(same["net"]["code_sha256"]) == 64
    assert {"volpipe", "torch", "numpy"} <= same["packages"].keys()
    assert run["site"] == "threads"
    assert run["started"] <= run["ended"]
    assert (run["devices"], len(run["sessions"])) == (["cpu"], 1)
    assert open_volume(out).shape == SHAPE


def test_two_runs_differ_in_one_group_alone(tmp_path: Path, give: Give) -> None:
    assert give(*command("out.zarr")).code == 0
    first = fingerprint(tmp_path / "out.zarr"), said(tmp_path / "out.zarr")
    (tmp_path / "out.zarr").rename(tmp_path / "first.zarr")
    (tmp_path / "out.zarr.run").rename(tmp_path / "first.zarr.run")
    assert give(*command("out.zarr")).code == 0
    assert (fingerprint(tmp_path / "out.zarr"), said(tmp_path / "out.zarr")) == first


def test_the_hash_of_the_code_follows_the_nets_file(tmp_path: Path, give: Give) -> None:
    hashes = []
    for text in (NET, NET.replace("* 2", "* 3"), NET):
        (tmp_path / "my net.py").write_text(text)
        assert give(*command(), "--fresh").code == 0
        hashes.append(said(tmp_path / "out.zarr")["net"]["code_sha256"])
    assert hashes[0] == hashes[2] != hashes[1]
    sessions = sessions_of(RunFolder(tmp_path / "out.zarr.run"))
    assert [session.code_sha256 for session in sessions] == hashes[2:]


def test_the_fingerprint_of_the_input_follows_its_voxels_and_its_metadata(tmp_path: Path) -> None:
    data = noise(SHAPE)
    plain = input_fingerprint(open_volume(write_volume(tmp_path / "a.n5", data)))
    assert input_fingerprint(open_volume(write_volume(tmp_path / "b.n5", data))) == plain
    assert input_fingerprint(open_volume(write_volume(tmp_path / "c.n5", data, chunk=8))) != plain
    data[5, 6, 7] ^= 1
    assert input_fingerprint(open_volume(write_volume(tmp_path / "d.n5", data))) != plain


def test_an_input_with_a_damaged_chunk_has_a_fingerprint(tmp_path: Path) -> None:
    write_volume(tmp_path / "a.n5", noise(SHAPE))
    plain = input_fingerprint(open_volume(tmp_path / "a.n5"))
    (tmp_path / "a.n5/raw/0/0/0").write_bytes(b"rubbish")
    assert input_fingerprint(open_volume(tmp_path / "a.n5")) != plain


@pytest.mark.parametrize("in_file", [True, False])
def test_the_command_that_reproduce_prints_makes_the_same_voxels(tmp_path: Path, give: Give, in_file: bool) -> None:
    assert give(*command()).code == 0
    ended = give("reproduce", "out.zarr", *(["--recipe-out", "again.toml"] if in_file else []))
    assert ended.code == 0
    change, folder, then, program, *arguments = shlex.split(ended.out)
    assert (change, folder, then, program) == ("cd", str(tmp_path), "&&", "volpipe")
    assert str(tmp_path / "out_again.zarr") in arguments
    assert (tmp_path / "again.toml").exists() == in_file
    assert give(*arguments).code == 0
    arrays = [fingerprint(tmp_path / name / "s0") for name in ("out.zarr", "out_again.zarr")]
    assert arrays[0] == arrays[1]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ((), ["windows.blend=hann"]),
        pytest.param(("windows.blend=crop",), [], marks=pytest.mark.long),
        (("windows.placement=edge",), ["windows.blend=hann", "windows.placement=edge"]),
    ],
)
def test_reproduce_prints_no_tiling_that_the_net_has_by_itself(
    tmp_path: Path, give: Give, settings: tuple[str, ...], kept: list[str]
) -> None:
    assert give(*command("out.zarr", *settings)).code == 0
    arguments = shlex.split(give("reproduce", "out.zarr").out)[4:]
    tiling = [word.replace('"', "") for word in arguments if word.startswith(("windows.blend=", "windows.placement="))]
    assert tiling == kept
    assert give(*arguments).code == 0
    first, again = (read_provenance(tmp_path / name)["recipe"]["windows"] for name in ("out.zarr", "out_again.zarr"))
    assert (first["blend"], first["placement"]) == (again["blend"], again["placement"])


def test_a_recipe_file_is_not_overwritten(tmp_path: Path, give: Give) -> None:
    assert give(*command()).code == 0
    (tmp_path / "mine.toml").write_text("# mine\n")
    ended = give("reproduce", "out.zarr", "--recipe-out", "mine.toml")
    assert ended.code == 2
    assert "--recipe-out mine.toml: this file is there already, and it is not replaced" in ended.err
    assert (tmp_path / "mine.toml").read_text() == "# mine\n"


def test_what_no_run_made_cannot_be_reproduced(tmp_path: Path, give: Give) -> None:
    ended = give("reproduce", "in.n5")
    assert ended.code == 2
    assert "in.n5 says nothing of where it comes from" in ended.err
    missing = give("reproduce", "nothing.zarr")
    assert (missing.code, missing.out) == (2, "")
    assert missing.err.startswith("volpipe: there is nothing at nothing.zarr; name an output")


def test_a_recipe_comes_back_from_its_file_and_from_its_settings(tmp_path: Path) -> None:
    recipe = load_recipe(
        None,
        [
            "net.name=identity",
            'net.options={features=[4,6],name="grün \\"quoted\\"",deep={a=1.5,b=true}}',
            "input.empty=3.5",
            "normalise.percentiles=[1,99]",
            "windows.overlap=[2,4,6]",
            "infer.exact=true",
        ],
    )
    (tmp_path / "r.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "r.toml") == recipe
    assert load_recipe(Path("/dev/null"), settings_of(recipe)) == recipe  # as `reproduce` prints it
    assert settings_of(Recipe()) == []
    assert tomllib.loads(f"a = {toml({'x y': [1, 'ä']})}") == {"a": {"x y": [1, "ä"]}}
