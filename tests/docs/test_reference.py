"""The reference is that of the code: what users can set, see and get back is described, and nothing else is."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import ROOT
from pydantic import BaseModel

import volpipe as vp
from volpipe.recipes.complaints import keys
from volpipe.volumes.formats.format import Format, ReadRow, Writing
from volpipe.volumes.formats.known import FORMATS
from volpipe.volumes.formats.npy import NPY
from volpipe.volumes.formats.picture import PICTURE

REFERENCE = ROOT / "docs" / "reference"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("reference_pages.runtime")


def test_the_committed_reference_is_the_one_that_the_code_gives() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "reference"), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("model", [vp.Recipe, vp.SegmentRecipe, vp.TrainRecipe])
def test_every_key_of_a_recipe_has_a_row_with_its_default(model: type[BaseModel]) -> None:
    text = (REFERENCE / "recipes.md").read_text(encoding="utf-8")
    for key in keys(model):
        section, _, name = key.replace(".0.", ".").partition(".")
        tables = re.findall(rf"^### `\[+{section}\]+`.*?(?=^##)", text, re.MULTILINE | re.DOTALL)
        assert any(re.search(rf"^\| `{name}` \| .+ \| .* \| .{{10,}} \|$", table, re.MULTILINE) for table in tables), (
            key
        )


@pytest.mark.parametrize("model", [vp.Recipe, vp.SegmentRecipe])
def test_the_whole_recipe_of_the_reference_has_every_key_with_its_default(model: type[BaseModel]) -> None:
    text = (REFERENCE / "recipes.md").read_text(encoding="utf-8")
    kind = "runs" if model is vp.Recipe else "segmentations"
    block = text.partition(f"### All defaults ({kind})")[2].partition("```toml\n")[2].partition("```")[0]
    assert model.model_validate(tomllib.loads(block)) == model()
    for part in re.split(r"^(?=\[)", block, flags=re.MULTILINE)[1:]:
        (section, given), *_ = tomllib.loads(part).items()
        optional = re.findall(r"^# (\w+)$", part, flags=re.MULTILINE)
        assert sorted([*given, *optional]) == sorted(model().model_dump()[section])
        assert all(model().model_dump()[section][key] is None for key in optional)


def test_a_variable_that_the_code_reads_and_the_reference_lacks_is_refused(runtime: ModuleType, tmp_path: Path) -> None:
    for line in ('os.environ["VOLPIPE_NEW"]', 'os.environ.get("VOLPIPE_NEW", 2)', 'VARIABLE = "VOLPIPE_NEW"'):
        for folder in ("volpipe", "apps", "configs"):
            (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / "apps" / "new.py").write_text(f"import os\n{line}\n")
        assert runtime.read_variables(tmp_path) == {"VOLPIPE_NEW"}
        with pytest.raises(SystemExit, match="VOLPIPE_NEW"):
            runtime.check_described(
                "environment variables", runtime.VARIABLES, runtime.VARIABLES.keys() | {"VOLPIPE_NEW"}
            )


def test_the_tables_show_each_format_that_says_something_of_itself(runtime: ModuleType) -> None:
    formats = importlib.import_module("reference_pages.formats")
    new = Format("new", row=ReadRow("New one", "all of it", "its header"))
    assert formats.read_table((*FORMATS, new)) == f"{formats.read_table()}\n| New one | all of it | its header |"
    assert formats.written_table((*FORMATS, new)) == formats.written_table()


def test_a_page_of_formats_gets_the_facts_of_the_code(runtime: ModuleType, tmp_path: Path) -> None:
    formats = importlib.import_module("reference_pages.formats")
    page = tmp_path / "formats.md"
    page.write_text("Before.\n<!-- table: read -->\n| typed |\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="1 of the 2 tables"):
        formats.page(page)
    page.write_text(f"{page.read_text()}Between.\n<!-- table: written -->\n| typed |\n<!-- end -->\nAfter.\n")
    other = replace(NPY, writing=Writing(("new", "raw"), "keeps no voxel size"))
    text = formats.page(page, (PICTURE, other))
    assert "typed" not in text and text.startswith("Before.\n") and "Between." in text and text.endswith("After.\n")
    assert "| `npy` | `.npy` | new, raw | – | – | keeps no voxel size |" in text
    assert "| NumPy `.npy` | C and Fortran order | – |" in text
    page.write_text(text)
    assert formats.page(page, (PICTURE, other)) == text


def test_every_file_of_a_real_runs_folder_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("cells.npy", np.random.default_rng(0).integers(0, 256, (16, 24, 24), np.uint8))
    settings = ["net.name=identity", "windows.shape=[8,16,16]", "tensors.mode=stored", "input.empty=0"]
    vp.run("cells.npy", recipe="none", out="same.zarr", settings=settings, site="threads", keep_tensors=True)
    names = {path.name for path in (tmp_path / "same.zarr.run").iterdir()}
    described = set(
        re.findall(r"^\| `([^`]+)` \|", (REFERENCE / "run-folder.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {"plan.json", "journal.jsonl", "report.html"} <= names
    assert names <= described
