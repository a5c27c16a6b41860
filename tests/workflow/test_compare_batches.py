"""Two batches compared: paired by their volumes, sorted by what changed, on one site, and gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Give, giver
from inline import Inline, Stopped
from volumes import noise, windowed, write_volume

import volpipe as vp
from volpipe.api import compare as compare_module
from volpipe.errors import PlanError
from volpipe.evaluation import subject
from volpipe.workflow.compare import ComparisonTable, pair_name

SHAPE = (16, 16, 16)
IDENTITY = ("net.name=identity", "output.levels=1", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))
FLOW = """
[[stage]]
name = "first"
net = {{ name = "identity" }}
normalise = {{ method = "zscore", mean = 0, std = {std} }}
windows = {{ shape = [8, 8, 8], overlap = 0, block = [1, 1, 1] }}

[[stage]]
name = "objects"
kind = "label"
input = {{ stage = "first", kind = "foreground" }}
objects = {{ method = "components", threshold = {threshold} }}
output = {{ block = [8, 8, 8], chunk = [4, 4, 4] }}
"""


class Counted(Inline):
    """Workers that count how often their site is started, and the blocks that they compare."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_starts, self.blocks = 0, list[tuple[str, int]]()

    def submit(self, app: str, *arguments: Any) -> Any:
        self.blocks += [(Path(arguments[0].a.path).name, block) for block in arguments[1]]
        return super().submit(app, *arguments)

    @contextmanager
    def start(self, folder: Path) -> Iterator[Inline]:
        self.num_starts += 1
        yield self


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three volumes in `raw`, in the current folder; compared in blocks of which each has eight."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subject, "BLOCK", (8, 8, 8))
    for number, name in enumerate("abc"):
        write_volume(
            tmp_path / "raw" / f"{name}.n5", np.kron(noise((4, 4, 4), seed=number), np.ones((4, 4, 4), "uint8"))
        )


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(tmp_path, monkeypatch, capsys)


def batch(out: str, volumes: str | list[str] = "raw/*.n5/raw", **options: Any) -> vp.BatchReport:
    return vp.batch(volumes, out=out, site=Inline(), **({"settings": IDENTITY} | options))


def change(output: str, by: int, num: int = 1) -> None:
    """Add `by` to `num` slices of an output, as another net might have."""
    import tensorstore

    array = tensorstore.open({"driver": "zarr3", "kvstore": f"file://{Path(output).absolute()}/s0/"}).result()
    array[:num] = np.asarray(array[:num]) // 2 + by


def table_of(*places: str, **options: Any) -> ComparisonTable:
    table = vp.compare(*places, **({"site": Inline()} | options))
    assert isinstance(table, ComparisonTable)
    return table


def test_datasets_are_paired_by_their_volume_and_the_one_that_changed_most_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch("old")
    batch("new/{stem}_again.zarr")
    change("new/b_again.zarr", 5, num=4)
    change("new/c_again.zarr", 90, num=16)
    pool = Counted()
    monkeypatch.setattr(compare_module, "site_of", lambda site: (pool.start, ""))
    table = table_of("old", "new", limits=["psnr=30"])
    assert [row.name.split("/")[-2] for row in table.rows] == ["c.n5", "b.n5", "a.n5"]
    assert [row.result.is_same for row in table.rows if row.result] == [False, False, True]
    assert (pool.num_starts, len(pool.blocks)) == (1, 24)
    assert [line.split(": psnr=30")[0].split("/")[-2] for line in table.violations] == ["c.n5", "b.n5"]
    assert table.is_complete and not table.is_within
    for row in table.rows:
        assert row.result is not None
        a, b = (np.asarray(vp.open(place)).astype(float) for place in (row.a, row.b))
        assert row.result.to_json()["differences"]["together"]["num_differ"] == int((a != b).sum())  # type: ignore[index]
    assert not list(Path().glob("volpipe_*"))


def test_what_one_has_alone_and_what_is_not_complete_is_named_and_the_rest_is_compared(give: Give) -> None:
    batch("old", ["raw/a.n5/raw", "raw/b.n5/raw"])
    batch("new", ["raw/b.n5/raw", "raw/c.n5/raw"])
    table = table_of("old", "new")
    assert [Path(row.a).name for row in table.rows] == ["b.zarr"]
    assert [[Path(name).parent.name for name in only] for only in (table.only_a, table.only_b)] == [["a.n5"], ["c.n5"]]
    assert not table.is_complete
    file = Path("new.batch/batch.json")
    file.write_text(file.read_text().replace('"ended": "done"', '"ended": "failed", "reason": "the disk is full"', 1))
    file.write_text(file.read_text().replace('"reason": "", ', "", 1))
    (row,) = table_of("old", "new").rows
    assert (row.result, row.reason) == (None, "B is not complete: failed, the disk is full")
    ended = give("compare", "old", "new", "--config", "threads", "--json", "c.json", "--page", "p.html")
    assert ended.code == 1
    assert "not compared" in " ".join(ended.out.split())
    assert "in A only: " in ended.err and "a.n5/raw" in ended.err
    assert ended.err.count("not all was compared; run the same command again to compare the rest") == 1
    assert json.loads(Path("c.json").read_text())["is_within"] is False
    assert "the disk is full" in Path("p.html").read_text()


def test_two_batches_that_are_the_same_are_within_any_limit(give: Give) -> None:
    batch("old")
    Path("new.toml").write_text('out = "made/{stem}.zarr"\nvolumes = "raw/*.n5/raw"\n')
    vp.batch("new.toml", site=Inline(), settings=IDENTITY)
    ended = give("compare", "old", "new.toml", "--config", "threads", "--limit", "differ=0")
    assert ended.code == 0, ended.err
    assert ended.out.count("infinite") == 3
    assert "not all was compared" not in ended.err
    assert "Comparison of many outputs" in Path("volpipe_old_new_compare.html").read_text()
    assert table_of("old", "new.toml")._repr_html_().count("<td>infinite</td>") == 3


def test_what_is_compared_to_its_end_is_not_said_to_be_left(give: Give) -> None:
    batch("old")
    batch("new", ["raw/a.n5/raw", "raw/b.n5/raw"])
    change("new/a.zarr", 90, num=16)
    ended = give("compare", "old", "new", "--config", "threads", "--limit", "psnr=40")
    assert ended.code == 1  # by a limit, and by what one has alone
    assert "in A only: " in ended.err and "limit violated: " in ended.err
    assert "not all was compared" not in ended.err


def test_an_interrupted_comparison_goes_on_with_what_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    batch("old")
    batch("new")
    change("new/b.zarr", 5)
    first, second = Counted(most_tasks=9), Counted()
    with pytest.raises(Stopped):
        table_of("old", "new", site=first)
    assert Path("volpipe_old_new_compare_all.run").is_dir()
    table = table_of("old", "new", site=second)
    assert len(first.blocks) + len(second.blocks) - len(set(first.blocks) & set(second.blocks)) == 24
    assert len(second.blocks) < 24 and set(first.blocks) | set(second.blocks) == {
        (f"{name}.zarr", block) for name in "abc" for block in range(8)
    }
    assert table.to_json() == table_of("old", "new").to_json()
    assert not Path("volpipe_old_new_compare_all.run").exists()


def test_one_dataset_that_cannot_be_compared_stops_no_other() -> None:
    batch("old")
    batch("new", ["raw/a.n5/raw", "raw/b.n5/raw"])
    batch("roi", ["raw/a.n5/raw"], settings=[*IDENTITY, "input.roi=0:8,:,:"])
    rows = json.loads(Path("new.batch/batch.json").read_text())
    rows["datasets"][0]["out"] = json.loads(Path("roi.batch/batch.json").read_text())["datasets"][0]["out"]
    Path("new.batch/batch.json").write_text(json.dumps(rows))
    table = table_of("old", "new")
    assert table.rows[0].reason == ""
    assert "A has 16 × 16 × 16 voxels (z, y, x), B 8 × 16 × 16" in table.rows[1].reason
    assert not table.is_within


def test_stages_of_two_flows_are_compared_by_their_names() -> None:
    for name, std, threshold in (("old", 1, 0.5), ("new", 2, 0.4)):
        Path(f"{name}.toml").write_text(FLOW.format(std=std, threshold=threshold))
        vp.run("raw/a.n5/raw", f"{name}.toml", out=name, site=Inline())
    table = table_of("old", "new", limits=["psnr=20", "voi=5"])
    assert [(row.name, row.result and row.result.plan.kind) for row in table.rows] == [
        ("first", "image"), ("objects", "labels")
    ]  # fmt: skip
    assert [line.split(":")[0] for line in table.violations] in ([], ["first"])
    objects = table.rows[1].result
    assert objects is not None and ("recipe objects.threshold", "0.5", "0.4") in objects.made_otherwise
    with pytest.raises(PlanError, match="A is a folder of stages, B one output"):
        vp.compare("old", "new/objects.zarr", site=Inline())
    only = table_of("old", "new", limits=["psnr=20", "largest=1", "voi=5"]).violations
    assert not any("nothing that was compared has it" in line for line in only)


def test_a_limit_that_no_output_has_is_not_kept_by_all() -> None:
    batch("old")
    batch("new")
    table = table_of("old", "new", limits=["voi=1"])
    assert table.violations == ["voi=1: nothing that was compared has it"]
    assert not table.is_within


def test_a_batch_and_an_output_are_refused(give: Give) -> None:
    batch("old")
    ended = give("compare", "old", "old/a.zarr")
    assert ended.code == 2 and "A is a batch, B one output" in ended.err
    Path("b.toml").write_text('out = "x"\nvolumes = "raw/*.n5/raw"\n')
    ended = give("compare", "b.toml", "b.toml")
    assert ended.code == 2 and "no batch of that name was begun; `volpipe batch b.toml` runs it" in ended.err


@pytest.mark.parametrize(
    ("a", "b", "name"),
    [
        ("old.zarr", "new.zarr", "old_new"),
        ("x/old/cells.zarr", "x/new/cells.zarr", "old_cells_new_cells"),
        ("a.zarr", "a.zarr", "a"),
        ("s3://bucket/old/cells.zarr", "s3://bucket/new/cells.zarr", "old_cells_new_cells"),
    ],
)
def test_a_pair_is_named_by_what_tells_its_places_apart(a: str, b: str, name: str) -> None:
    assert pair_name(a, b) == name
