"""Batches: how each output stands, what is refused before anything runs, one dataset's failure, and going on."""

from __future__ import annotations

import csv
import json
import os
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from batches import FLOW, SHAPE, NoPool, endings, give, refused
from inline import Inline, Stopped, perform
from volumes import fingerprint, noise, write_volume

import volpipe as vp
from volpipe.display.batches import showing_rows
from volpipe.display.cell import Cell
from volpipe.errors import SiteError
from volpipe.estimation.limits import Limits
from volpipe.runs import run_folder
from volpipe.volumes.completeness import mark_incomplete
from volpipe.workflow import batch
from volpipe.workflow.batch import BatchListener
from volpipe.workflow.batch_table import BatchReport, DatasetRow, Table, read_table
from volpipe.workflow.status import find_status

NET = """
import torch
class Net(torch.nn.Module):
    volpipe = dict(
        in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(0, 0, 0), window=(8, 8, 8), intensity="same"
    )
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1))
    def forward(self, x):
        return x * self.gain
def build():
    return Net()
"""


@pytest.fixture(autouse=True)
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three volumes in `raw`, in the current folder."""
    for number, name in enumerate("abc"):
        write_volume(tmp_path / "raw" / f"{name}.n5", noise(SHAPE, seed=number))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "raw"


def states(report: BatchReport) -> list[str]:
    return [row.state for row in report.rows]


def test_all_datasets_are_done_and_the_second_time_no_worker_is_asked(tmp_path: Path) -> None:
    first = give()
    assert (states(first), endings(first), first.is_complete) == (["new"] * 3, ["done"] * 3, True)
    for name in "abc":
        np.testing.assert_array_equal(vp.open(f"done/{name}.zarr")[...], vp.open(f"raw/{name}.n5")[...])
    second = give(site=NoPool())
    assert endings(second) == ["unchanged"] * 3
    kept = ("out", "wall_seconds", "cpu_seconds", "read_bytes", "written_bytes", "provenance", "seams")
    assert [[getattr(row, k) for k in kept] for row in second.rows] == [
        [getattr(row, k) for k in kept] for row in first.rows
    ]
    assert all(row.cpu_seconds > 0 and row.written_bytes > 0 and len(row.provenance) == 32 for row in second.rows)
    assert len({row.provenance for row in second.rows}) == 3
    table = json.loads((tmp_path / "done.batch" / "batch.json").read_text())
    assert table == json.loads(json.dumps(second.to_json()))
    lines = list(csv.DictReader((tmp_path / "done.batch" / "batch.csv").read_text().splitlines()))
    assert [(line["volume"], line["ended"], line["shape"]) for line in lines] == [
        (f"raw/{name}.n5/raw", "unchanged", "16x24x16") for name in "abc"
    ]


def _other_recipe(folder: Path) -> tuple[str, ...]:
    return ("windows.blend=hann",)


def _other_weights(folder: Path) -> tuple[str, ...]:
    import torch

    torch.save({"gain": torch.full((1,), 0.5)}, folder / "gain.pt")
    return ()


def _other_code(folder: Path) -> tuple[str, ...]:
    (folder / "net.py").write_text(NET + "# edited\n")
    return ()


def _other_voxels(folder: Path) -> tuple[str, ...]:
    shutil.rmtree(folder / "raw" / "a.n5")
    write_volume(folder / "raw" / "a.n5", noise(SHAPE, seed=9))
    return ()


def _other_shape(folder: Path) -> tuple[str, ...]:
    shutil.rmtree(folder / "raw" / "a.n5")
    write_volume(folder / "raw" / "a.n5", noise((16, 16, 16), seed=0))
    return ()


def _other_version(folder: Path) -> tuple[str, ...]:
    file = folder / "done" / "a.zarr" / "zarr.json"
    file.write_text(file.read_text().replace(f'"version": "{vp.__version__}"', '"version": "0.0.9"'))
    return ()


def _no_chunks(folder: Path) -> tuple[str, ...]:
    shutil.rmtree(folder / "done" / "a.zarr" / "s0" / "c")
    return ()


def _no_output(folder: Path) -> tuple[str, ...]:
    shutil.rmtree(folder / "done" / "a.zarr")
    return ()


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "state", "why"),
    [
        (_other_recipe, "recipe changed", "windows.blend: 'crop' -> 'hann'"),
        (_other_weights, "weights changed", "the weights changed"),
        (_other_code, "code of the net changed", "the code of the net changed"),
        (_other_voxels, "input changed", "voxels that were compared differ"),
        (_other_shape, "input changed", "source.shape: 16 × 24 × 16 -> 16 × 16 × 16"),
        (_other_version, "other version", "it was made by 0.0.9, this is"),
        (_no_chunks, "files lost", "has lost files"),
        (_no_output, "files lost", "is gone"),
    ],
)
def test_an_output_that_was_made_otherwise_is_named_refused_and_replaced(
    tmp_path: Path, change: object, state: str, why: str
) -> None:
    import torch

    (tmp_path / "net.py").write_text(NET)
    torch.save({"gain": torch.ones(1)}, tmp_path / "gain.pt")
    net = ("net.name=net.py:build", "net.weights=gain.pt")
    give(["raw/a.n5", "raw/b.n5"], *net)
    more = change(tmp_path)  # type: ignore[operator]
    before = fingerprint(tmp_path / "done")
    seen = give(["raw/a.n5", "raw/b.n5"], *net, *more, dry_run=True, site=NoPool())
    assert seen.rows[0].state == state and why in seen.rows[0].why
    both = change in (_other_recipe, _other_weights, _other_code)
    assert seen.rows[1].state == (state if both else "unchanged")
    if state in ("input changed", "files lost"):  # of one dataset, for which the other does not wait
        left = give(["raw/a.n5", "raw/b.n5"], *net, *more, site=NoPool())
        assert endings(left) == ["failed", "unchanged"]
        assert f"left alone: {state}: " in left.rows[0].reason and "--replace" in left.rows[0].reason
    else:
        with pytest.raises(vp.BatchError, match="--replace makes them again") as error:
            give(["raw/a.n5", "raw/b.n5"], *net, *more, site=NoPool())
        assert state in dict(error.value.mistakes)["raw/a.n5"]
    assert fingerprint(tmp_path / "done") == before
    replaced = give(["raw/a.n5", "raw/b.n5"], *net, *more, replace=True)
    assert endings(replaced) == ["done", "done" if both else "unchanged"]
    assert states(give(["raw/a.n5", "raw/b.n5"], *net, *more, site=NoPool())) == ["unchanged"] * 2


def test_another_name_puts_the_new_output_beside_the_old() -> None:
    (Path("mine.toml")).write_text('[net]\nname = "identity"\n[windows]\nblend = "hann"\n')
    give(out="done/{stem}_{recipe}.zarr")
    report = give(recipe="mine.toml", out="done/{stem}_{recipe}.zarr", settings=[])
    assert states(report) == ["new"] * 3
    assert sorted(path.name for path in Path("done").glob("*.zarr")) == sorted(
        f"{name}_{recipe}.zarr" for name in "abc" for recipe in ("default", "mine")
    )


def test_others_go_on_where_the_input_of_one_was_touched(raw: Path) -> None:
    give(["raw/a.n5", "raw/b.n5"])
    for file in (raw / "a.n5").rglob("*"):
        os.utime(file, (0, 0))
    report = give()
    assert endings(report) == ["failed", "unchanged", "done"]
    for way in ("--same-input", "--update", "--replace"):
        assert way in report.rows[0].reason
    assert not report.is_complete
    with pytest.raises(vp.BatchError, match=r"--same-input .*--update .*--replace"):  # nothing else to go on with
        give(["raw/a.n5"])
    assert endings(give(update=True)) == ["unchanged"] * 3


def test_status_says_which_outputs_of_a_batch_are_gone_or_not_complete(tmp_path: Path) -> None:
    give()
    status = find_status("done")
    assert status.state == "complete"
    shutil.rmtree(tmp_path / "done" / "b.zarr")
    mark_incomplete(tmp_path / "done" / "c.zarr", "zarr3", "volpipe run")
    status = find_status("done")
    assert status.state == "incomplete"
    assert f"such as {tmp_path}/done/b.zarr" in status.remark
    assert [row.ended for row in status.datasets] == ["done", "incomplete", "incomplete"]
    assert "--replace" in status.datasets[1].reason


def test_a_copied_input_is_the_same_where_the_user_says_so(raw: Path) -> None:
    give()
    for file in (raw / "a.n5").rglob("*"):
        os.utime(file, (0, 0))
    assert states(give(dry_run=True)) == ["input changed", "unchanged", "unchanged"]
    assert states(give(same_input=True, site=NoPool())) == ["unchanged"] * 3


def test_all_mistakes_of_all_datasets_are_named_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "cells.csv").write_text(
        "volume,roi,out,normalise.low\n"
        "raw/a.n5/raw,,one.zarr,\n"
        "raw/b.n5/raw,,one.zarr,\n"
        "raw/gone.n5,,,\n"
        "raw/c.n5/raw,0:99,c.zarr,\n"
        "raw/c.n5/raw,,raw/c.n5/out.zarr,\n"
        "raw/c.n5/raw,,raw/a.n5/deep/out.zarr,\n"
        "raw/c.n5/raw,,typo.zarr,3\n"
        "one.zarr,,two.zarr,\n"
    )
    (tmp_path / "full.zarr").mkdir()
    first = "raw/a.n5/raw (cells.csv, line 2), raw/b.n5/raw (cells.csv, line 3)"
    mistakes = refused(["cells.csv", "nothing/*.n5"])
    expected = {
        first: "they have one output",
        "raw/gone.n5 (cells.csv, line 4)": "no volume at",
        "raw/c.n5/raw (cells.csv, line 5)": "roi",
        "raw/c.n5/raw (cells.csv, line 6)": "would lie inside the volume",
        "raw/c.n5/raw (cells.csv, line 7)": "lies in the input of raw/a.n5/raw",
        "raw/c.n5/raw (cells.csv, line 8)": "give low and high together",
        "one.zarr (cells.csv, line 9)": "no volume at",
        "nothing/*.n5": "nothing matches",
    }
    assert {what: sentence in mistakes.get(what, "") for what, sentence in expected.items()} == dict.fromkeys(
        expected, True
    )
    assert mistakes.keys() == expected.keys()
    assert "no run in" in refused(["raw/a.n5"], out="full.zarr")["raw/a.n5"]
    assert "no net 'nosuch'" in refused(["raw/a.n5"], settings=["net.name=nosuch"])["raw/a.n5"]
    assert "no recipe at nosuch" in refused(["raw/a.n5"], recipe="nosuch")["raw/a.n5"]
    assert "there is no folder" in refused(["raw/a.n5"], out="no/such/{stem}.zarr", parents=False)["raw/a.n5"]


def test_an_input_that_another_dataset_makes_is_refused(tmp_path: Path) -> None:
    give(["raw/a.n5"])
    (tmp_path / "link.zarr").symlink_to(tmp_path / "done" / "a.zarr")
    rows = ("raw/a.n5,done/a.zarr,", "link.zarr,done/b.zarr,", "raw/b.n5,done/a.zarr/inner.zarr,")
    (tmp_path / "cells.csv").write_text("\n".join(("volume,out,mask", *rows)))
    mistakes = refused("cells.csv")
    assert "is the output of raw/a.n5" in mistakes["link.zarr (cells.csv, line 3)"]
    assert "lies in that of raw/a.n5" in mistakes["raw/b.n5 (cells.csv, line 4)"]
    (tmp_path / "cells.csv").write_text("volume,out,mask\nraw/a.n5,done/a.zarr,\nraw/b.n5,done/b.zarr,done/a.zarr\n")
    assert "is the output of raw/a.n5" in refused("cells.csv")["raw/b.n5 (cells.csv, line 3)"]


def test_one_datasets_failure_is_its_own_and_the_same_call_goes_on(raw: Path) -> None:
    for chunk in (raw / "b.n5" / "raw").glob("*/*/*"):
        content = chunk.read_bytes()
        chunk.write_bytes(content[:-9] + bytes(9))
    report = give(tolerate=1)
    assert endings(report) == ["done", "incomplete", "done"]
    assert report.rows[1].missing and "parts missing, first infer 0" in report.rows[1].reason
    assert not report.is_complete
    assert endings(give()) == ["unchanged", "failed", "unchanged"]
    shutil.rmtree(raw / "b.n5")
    write_volume(raw / "b.n5", noise(SHAPE, seed=1))
    assert endings(give(same_input=True, replace=True)) == ["unchanged", "done", "unchanged"]


def test_a_dataset_that_could_not_be_measured_begins_again_once_its_input_is_mended(raw: Path) -> None:
    chunk = sorted((raw / "b.n5" / "raw").glob("*/*/*"))[0]
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-9] + bytes(9))
    report = give(["raw/b.n5"], "normalise.method=zscore")
    assert endings(report) == ["failed"] and "measure" in report.rows[0].reason
    assert Path("done/b.zarr.run/journal.jsonl").stat().st_size and not Path("done/b.zarr").exists()
    shutil.rmtree(raw / "b.n5")
    write_volume(raw / "b.n5", noise(SHAPE, seed=7))
    report = give(["raw/b.n5"], "normalise.method=zscore")
    assert (states(report), endings(report)) == (["new"], ["done"])
    give(["raw/b.n5"], "normalise.method=zscore", out="alone/{stem}.zarr")
    assert (vp.open("done/b.zarr")[:] == vp.open("alone/b.zarr")[:]).all()


def test_a_dataset_refused_for_memory_may_begin_again_with_other_windows() -> None:
    small = Inline()
    small.worker_bytes = 1 << 20
    report = give(["raw/a.n5"], site=small)
    assert endings(report) == ["failed"] and "a worker needs" in report.rows[0].reason
    report = give(["raw/a.n5"], "windows.block=[1,1,2]")
    assert (states(report), endings(report)) == (["new"], ["done"])


def test_an_error_of_the_site_ends_the_batch() -> None:
    class Broken(Inline):
        def submit(self, app: str, *arguments: object) -> object:  # type: ignore[override]
            raise SiteError("no worker came")

    with pytest.raises(SiteError, match="no worker came"):
        give(site=Broken())
    rows = read_table(Path("done.batch"))
    assert rows is not None and [row.ended for row in rows] == ["interrupted", "waiting", "waiting"]


def test_an_interrupted_batch_leaves_a_true_table_and_the_rest_is_the_same_bytes(tmp_path: Path) -> None:
    whole = Inline()
    give(out="whole", site=whole)
    with pytest.raises(Stopped):
        give(site=Inline(most_tasks=whole.num_tasks // 2))
    rows = read_table(Path("done.batch")) or []
    assert [row.ended for row in rows] == ["done", "interrupted", "waiting"]
    status = vp.status("done")
    assert (status.kind, status.state) == ("batch", "incomplete") and len(status.datasets) == 3
    report = give()
    assert states(report) == ["unchanged", "incomplete", "new"] and "infer" in report.rows[1].why
    assert 0 < report.rows[1].share_left < 1
    assert report.is_complete
    for name in "abc":
        assert fingerprint(f"done/{name}.zarr") == fingerprint(f"whole/{name}.zarr")


def test_an_interrupted_batch_tells_so_and_its_live_table_has_nothing_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    last: list[Any] = []
    cell = Cell()
    monkeypatch.setattr(cell, "draw", lambda make: last.append(make()))
    whole = Inline()
    give(out="whole", site=whole)
    with showing_rows(cell) as shown, pytest.raises(Stopped):
        listener = BatchListener(
            on_plan=lambda plan: shown.begin(plan.rows), on_begin=shown.start, on_end=shown.end, on_progress=shown.move
        )
        give(listener=listener, site=Inline(most_tasks=whole.num_tasks // 2))
    assert [row.ended for row in shown.rows] == ["done", "interrupted", "waiting"]
    assert (shown.now, shown.num_left) == ({}, 2)
    assert last[-1].caption == "3 datasets: 1 done, 1 interrupted, 1 waiting"


def test_the_table_follows_while_tasks_run_and_is_not_written_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    store = Table.store

    def stored(table: Table) -> None:
        times.append(time.monotonic())
        store(table)

    class Watched(Inline):
        """Workers whose first task goes on until the table on disk says that its dataset is running."""

        def submit(self, app: str, *arguments: object) -> Future[Any]:
            if self.num_tasks:
                return super().submit(app, *arguments)
            self.num_tasks, task, late = 1, Future[Any](), time.monotonic() + 20

            def work() -> None:
                while (read_table(Path("done.batch")) or [])[0].ended != "running" and time.monotonic() < late:
                    time.sleep(0.02)
                seen.append((read_table(Path("done.batch")) or [])[0].ended)
                task.set_result(perform(app, *arguments))

            threading.Thread(target=work).start()
            return task

    seen: list[str] = []
    monkeypatch.setattr(Table, "store", stored)
    assert endings(give(site=Watched())) == ["done"] * 3
    assert seen == ["running"]
    gaps = np.diff(times[:-1])  # the last one is the end's
    assert len(times) >= 3 and (gaps >= 1).all()
    assert [row.ended for row in read_table(Path("done.batch")) or []] == ["done"] * 3


def test_single_datasets_have_settings_and_recipes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "flow.toml").write_text(FLOW)
    (tmp_path / "all.toml").write_text(
        'volumes = "raw/*.n5/raw"\nrecipe = "mine.toml"\nout = "done/{stem}_{recipe}"\n'
        '[[dataset]]\nvolume = "raw/b.n5/raw"\nroi = "0:8,:,:"\nout = "part.n5"\n'
        '[[dataset]]\nvolume = "raw/c.n5/raw"\nrecipe = "flow.toml"\nroi = ":,0:8,:"\nfirst.windows.blend = "hann"\n'
    )
    (tmp_path / "mine.toml").write_text(
        '[net]\nname = "identity"\n[windows]\nshape = [8, 8, 8]\noverlap = 0\n[output]\nformat = "n5"\n'
    )
    report = vp.batch("all.toml", site=Inline())
    assert report.is_complete and report.folder == tmp_path / "all.batch"
    assert [Path(row.out).name for row in report.rows] == ["a_mine.n5", "part.n5", "c_flow"]
    np.testing.assert_array_equal(vp.open("part.n5")[...], vp.open("raw/b.n5")[:8])
    np.testing.assert_array_equal(vp.open("done/c_flow/second.zarr")[...], vp.open("raw/c.n5")[:, :8])
    assert endings(vp.batch("all.toml", site=NoPool())) == ["unchanged"] * 3
    (tmp_path / "flow.toml").write_text(FLOW.replace("overlap = 0", "overlap = 2", 1))
    row = vp.batch("all.toml", dry_run=True).rows[2]
    assert row.state == "recipe changed" and row.why.startswith("stage first: windows.overlap: 0 -> 2")
    shutil.rmtree("done/c_flow/second.zarr")
    (tmp_path / "flow.toml").write_text(FLOW)
    assert vp.batch("all.toml", dry_run=True).rows[2].state == "files lost"
    assert endings(vp.batch("all.toml", site=Inline(), replace=True)) == ["unchanged", "unchanged", "done"]


def test_the_table_says_how_grey_levels_are_mapped_and_where_that_differs(raw: Path) -> None:
    data = noise((16, 24, 32))
    shutil.rmtree(raw)
    raw.mkdir()
    write_volume(raw / "a.n5", data.astype(np.uint16))
    write_volume(raw / "b.n5", data)
    write_volume(raw / "c.n5", data.astype(np.uint16) * 200)
    report = vp.batch("raw/*.n5", "default", out="out", dry_run=True)
    assert [row.grey for row in report.rows] == ["8 bits: 0 … 255", "8 bits: 0 … 255", "percentiles"]
    assert [
        note for note in report.notes if "by percentiles those of" in note and "c.n5" in note.split("percentiles")[1]
    ]
    shutil.rmtree(raw / "c.n5")
    assert vp.batch("raw/*.n5", "default", out="out", dry_run=True).notes == []


def test_all_datasets_together_must_fit_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = give(dry_run=True).rows[0]
    inodes = alone.output_files + alone.output_folders
    room = Limits(free_files=2 * inodes, free_bytes=round(2 * alone.output_bytes), files_by="user lab")
    monkeypatch.setattr(batch, "disk_limits", lambda place: room)
    sentence = refused()["all datasets"]
    assert (
        f"they need {3 * inodes} files and folders" in sentence and f"{room.free_files} (quota of user lab)" in sentence
    )
    monkeypatch.setattr(batch, "disk_limits", lambda place: Limits(free_bytes=room.free_bytes))
    (note,) = give(dry_run=True).notes
    assert note.startswith("where nothing compresses, outputs and scratch take ") and " 0.0 GiB" not in note
    assert give().is_complete
    assert give(dry_run=True).notes == []


def test_a_plan_that_changes_before_its_turn_comes_is_not_run(raw: Path) -> None:
    def exchange(number: int, row: DatasetRow) -> None:
        if number == 0:
            shutil.rmtree(raw / "b.n5")
            write_volume(raw / "b.n5", noise((8, 8, 8)))

    report = give(listener=BatchListener(on_end=exchange))
    assert endings(report) == ["done", "failed", "done"]
    assert "changed after the batch began" in report.rows[1].reason
    assert not Path("done/b.zarr").exists()


def test_a_second_driver_is_kept_out() -> None:
    held = run_folder.RunFolder(Path("done.batch").absolute()).locked()
    with held, pytest.raises(vp.VolpipeError, match=r"done\.batch"):
        give()


def test_the_report_is_a_table_whose_text_is_escaped() -> None:
    row = DatasetRow("<script>", "a&b.zarr", "default", "new", reason="<b>")
    page = BatchReport([row], Path("x"))._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page and "a&amp;b.zarr" in page
    frame = BatchReport([row], Path("x")).to_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame["volume"]) == ["<script>"]


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "done.batch").mkdir()
    (tmp_path / "done.batch" / "batch.json").write_text('{"datasets": [{"volume": "a"}]}')
    with pytest.raises(vp.VolpipeError, match="cannot be understood"):
        vp.status("done.batch")


def test_a_net_is_examined_once_for_all_datasets(tmp_path: Path) -> None:
    counted = NET.replace(
        "    return Net()", '    with open("built", "a") as log:\n        log.write("x")\n    return Net()'
    )
    counts = []
    for volumes in (["raw/a.n5"], ["raw/a.n5", "raw/b.n5", "raw/c.n5"]):
        (tmp_path / "net.py").write_text(f"# for {len(volumes)}\n{counted}")
        (tmp_path / "built").write_text("")
        give(volumes, "net.name=net.py:build", "net.untrained=true", dry_run=True)
        counts.append(len((tmp_path / "built").read_text()))
    assert counts[0] == counts[1] > 0
