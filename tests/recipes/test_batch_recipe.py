"""The file of a batch, and what stands for volumes: patterns, CSV and text files, tables; names of outputs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

from volpipe.errors import RecipeError
from volpipe.recipes.batch import BatchDataset, BatchRecipe, expand, home, list_datasets, load_batch

VOLUMES = ("a.n5/em", "b.n5/em", "c.n5/em", "other.n5/em")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of volumes, of which the batch knows no more than the names."""
    for name in VOLUMES:
        (tmp_path / "raw" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def listed(**keys: object) -> list[BatchDataset]:
    """Return the datasets of a batch without mistakes."""
    datasets, mistakes = list_datasets(BatchRecipe.model_validate({"out": "done"} | keys))
    assert mistakes == []
    return datasets


def wrong(**keys: object) -> list[tuple[str, str]]:
    return list_datasets(BatchRecipe.model_validate({"out": "done"} | keys))[1]


def test_a_pattern_may_end_in_a_key_and_a_literal_name_may_look_like_one(tmp_path: Path) -> None:
    assert expand("raw/?.n5/em") == [f"raw/{name}" for name in VOLUMES[:3]]
    (tmp_path / "raw" / "cells.h5").touch()
    assert expand("raw/*.h5/volumes/raw") == ["raw/cells.h5/volumes/raw"]
    (tmp_path / "odd[1].n5").mkdir()
    assert expand("odd[1].n5") == ["odd[1].n5"]
    (tmp_path / "raw" / "a.zarr.run").mkdir()
    assert "raw/a.zarr.run" not in expand("raw/*")


def test_a_table_stands_in_place_of_what_a_pattern_gives() -> None:
    table = {"volume": "raw/b.n5/em", "roi": "0:8,:,:", "normalise": {"low": 3, "high": 5.5}, "recipe": "superres_z4"}
    datasets = listed(volumes="raw/?.n5/em", recipe="default", dataset=(table,))
    assert [(Path(each.volume).parts[1], each.recipe) for each in datasets] == [
        ("a.n5", "default"), ("c.n5", "default"), ("b.n5", "superres_z4"),
    ]  # fmt: skip
    assert datasets[-1].region == ('input.roi="0:8,:,:"',)
    assert datasets[-1].settings == ("normalise.low=3", "normalise.high=5.5")
    twice = listed(volumes="raw/?.n5/em", dataset=(table, {"volume": "raw/b.n5/em", "out": "x.zarr"}))
    assert [each.volume for each in twice].count("raw/b.n5/em") == 2


def test_columns_of_a_csv_are_settings_and_empty_cells_are_none(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(
        "\ufeffvolume, level, normalise.low, out\nraw/a.n5/em,1,,\n\nraw/b.n5/em,,7,x.zarr\n", encoding="utf-8"
    )
    first, second = listed(volumes=("list.csv",))
    assert (first.region, first.settings, first.line) == (("input.level=1",), (), "list.csv, line 2")
    assert (second.region, second.settings, second.out) == ((), ("normalise.low=7",), str(tmp_path / "x.zarr"))


def test_lines_of_a_text_file_are_volumes_or_patterns(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("# ours\nraw/a.n5/em\n\n  raw/[bc].n5/em  \n")
    assert [each.volume for each in listed(volumes="list.txt")] == [f"raw/{name}" for name in VOLUMES[:3]]


@pytest.mark.parametrize(
    ("out", "name"),
    [
        ("done", "done/a"),
        ("done/", "done/a"),
        ("done/{stem}_{key}_{recipe}.zarr", "done/a_em_superres_z4.zarr"),
        ("{recipe}/{stem}.n5", "superres_z4/a.n5"),
        ("one.zarr", "one.zarr"),
    ],
)
def test_an_output_is_named_by_its_template_or_its_folder(tmp_path: Path, out: str, name: str) -> None:
    (dataset,) = listed(volumes="raw/a.n5/em", recipe="superres_z4", out=out)
    assert dataset.out == str(tmp_path / name)


def test_the_home_of_a_batch_is_the_folder_that_all_outputs_share(tmp_path: Path) -> None:
    outs = ("done", "done/{stem}.zarr", "done/{recipe}/{stem}.zarr", "{stem}.zarr", "done/x.zarr")
    assert [home(out) for out in outs] == [tmp_path / "done"] * 3 + [tmp_path, tmp_path / "done"]
    assert str(home("s3://bucket/done/{stem}.zarr")) == "s3://bucket/done"


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("volume,levl\nraw/a.n5/em,1\n")
    (tmp_path / "long.csv").write_text("volume,roi\nraw/a.n5/em,0:8,0:8,0:8\n,:\nraw/no*,\n")
    (tmp_path / "headless.csv").write_text("raw/a.n5/em,1\n")
    (tmp_path / "twice.csv").write_text("volume,level,level\nraw/a.n5/em,1,2\n")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    entries = ("raw/no*.n5", "gone.csv", "bad.csv", "long.csv", "headless.csv", "twice.csv", "empty.txt")
    mistakes = wrong(volumes=entries, dataset=({"volume": "raw/a.n5", "normalize": {"low": 1}}, {"roi": ":"}))
    expected = {
        "raw/no*.n5": "nothing matches raw/no*.n5",
        "gone.csv": "there is no file gone.csv",
        "bad.csv": "there is no setting 'levl' (did you mean 'level'?)",
        "long.csv, line 2": "2 more cells than there are columns; put a roi into quotes",
        "long.csv, line 3": "it names no volume",
        "long.csv, line 4": "nothing matches raw/no*",
        "headless.csv": "has no column named volume",
        "twice.csv": "several columns named level",
        "empty.txt": "names no volume",
        "[[dataset]] 2": "it names no volume",
    }
    found = dict(mistakes)
    assert {what: sentence in found[what] for what, sentence in expected.items()} == dict.fromkeys(expected, True)
    assert "no {name}" in dict(wrong(volumes="raw/a.n5/em", out="{name}.zarr"))["raw/a.n5/em"]
    assert "names no volume" in dict(wrong())["volumes"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('volumes = "a"\n', "out is missing"),
        ('out = "x"\nat_once = 0\n', "at_once: 0 is not a whole number from 1"),
        ('out = "x"\nvolume = "a"\n', "unknown key volume (did you mean 'volumes'?)"),
        ('[[stage]]\nname = "a"\n', "is a recipe, not a batch"),
        ("out = \n", "is not valid TOML"),
    ],
)
def test_a_file_that_is_no_batch_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "batch.toml").write_text(text)
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        load_batch(Path("batch.toml"))


def test_the_batch_of_the_documentation_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "batches.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "batch.toml").write_text(example)
    batch = load_batch(Path("batch.toml"))
    assert (batch.at_once, len(batch.dataset)) == (4, 2)
    (tmp_path / "more.csv").write_text("volume,mask\nraw/other.n5/em,tissue.zarr\n")
    for name in ("thick.n5/em", "thin.n5/em"):
        (tmp_path / "raw" / name).mkdir(parents=True)
    datasets, mistakes = list_datasets(batch)
    assert mistakes == []
    assert sorted(Path(each.volume).parts[1] for each in datasets) == [
        "a.n5", "b.n5", "c.n5", "other.n5", "thick.n5", "thin.n5",
    ]  # fmt: skip
