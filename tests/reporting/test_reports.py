"""Reports of a clean run, one with failures, a flow, a training, a batch and others: numbers of their journals, opened
in Chromium from their files without a network.

The numbers are added up here by json and plain arithmetic, line by line.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from browser import Browser
from command import begin, giver, wait_until
from reported_works import EVIL, FAILING, FLOW, IDENTITY, NET, SHAPE, SMALL, WAITING, check_sums, items, lines_of, sheet
from trainings import make_folder
from volumes import noise, write_volume

import volpipe as vp
from volpipe.api.outputs import find_page
from volpipe.errors import RunError, VolpipeError
from volpipe.reporting import render
from volpipe.reporting.page import REPORT, Chart, Draft, FactTable, Item, Sentence, Sheet
from volpipe.runs.pages import disk_use, log_notes
from volpipe.runs.presence import COMMAND
from volpipe.units import brief, size
from volpipe.workflow.driver import RunWork


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the outputs and reports of five works, whose input has a name that is a script."""
    folder = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(COMMAND, "line", "")  # that other tests gave in this process
        data = noise(SHAPE)
        write_volume(folder / "in.n5", data, chunk=8)
        write_volume(folder / "ev<script>alert(1)<" / "script>.n5", data, chunk=8)
        data[:, 8:, 24:], data[:, :8, 24:] = 7, 255
        write_volume(folder / "bad.n5", data, chunk=8)
        (folder / "net.py").write_text(NET)
        (folder / "flow.toml").write_text(FLOW)
        vp.run(f"ev{EVIL}.n5/raw", out="clean.zarr", site="threads", settings=[*IDENTITY, *SMALL, "output.levels=2"])
        vp.run("bad.n5/raw", out="failed.zarr", site="threads", settings=[*FAILING, *SMALL], tolerate=1.0)
        vp.run("in.n5/raw", "flow.toml", out="flow", site="threads")
        vp.batch(["in.n5", "bad.n5"], out="many/{stem}.zarr", site="threads", settings=[*FAILING, *SMALL], tolerate=1.0)
        make_folder(folder)
        vp.train("recipe.toml", out="trained", site="threads")
        yield folder


REPORTS = {
    "clean": "clean.zarr.run", "failed": "failed.zarr.run", "flow": "flow.run", "training": "trained",
    "batch": "many.batch", "stage": "flow/first.zarr.run", "labels": "flow/objects.zarr.run",
}  # fmt: skip


def test_numbers_of_a_clean_run_are_those_of_its_journal(place: Path) -> None:
    page, folder = find_page(str(place / "clean.zarr"))
    lines = lines_of(folder / "journal.jsonl")
    assert (page.title, page.state, page.is_well) == ("clean.zarr", "complete", True)
    rows = sheet(page, "By stage")
    assert set(rows) == {line["stage"] for line in lines} | {"all"}
    for stage in rows:
        check_sums(rows, lines, stage)
    assert rows["infer"]["units"] == "8"
    facts = next(item for item in items(page) if isinstance(item, FactTable)).entries
    run = json.loads((place / "clean.zarr" / "run" / "zarr.json").read_text())["attributes"]["volpipe"]
    assert all(f"{axis} {score:.2f}" in facts["seams"] for axis, score in run["seams"].items()) and run["seams"]
    planned = sheet(page, "Planned and taken")
    on_disk = [file for file in (place / "clean.zarr").rglob("*") if file.is_file()]
    voxels = sum(file.stat().st_size for file in on_disk if file.name != "zarr.json")
    assert planned["output, without metadata"]["taken"] == size(voxels)
    assert planned["files of the output"]["taken"] == f"{len(on_disk):,}"
    assert planned["files of the output"]["planned"] == f"≤ {len(on_disk):,}"
    assert planned["memory of a worker"]["taken"] == size(max(line["peak_bytes"] for line in lines))


def test_a_timeline_has_a_bar_for_each_task_where_it_ran(place: Path) -> None:
    page, folder = find_page(str(place / "failed.zarr"))
    lines = [line for line in lines_of(folder / "journal.jsonl") if line.get("started")]
    chart = next(item for item in items(page) if isinstance(item, Chart) and item.kind == "timeline")
    began = sorted(round(1000 * line["started"]) for line in lines)
    assert sorted(chart.data["began"]) == began
    colours = list(chart.data["colour"])
    assert colours.count("failed attempt") == sum(line.get("result") == "Attempt" for line in lines) == 4
    retried = [name for name in chart.data["retried"] if name]
    assert sorted(map(retried.count, set(retried))) == [2, 3] and retried.count("infer 7") == 3
    first = next(line for line in lines if line["done"] and line["stage"] == "infer")
    places = zip(chart.data["stage"], chart.data["units"], chart.data["failed"], strict=True)
    number = list(places).index(("infer", str(first["done"][0]), None))
    k, j, i = 0, first["done"][0] // 4, first["done"][0] % 4
    box = f"{8 * k}:{8 * k + 8},{8 * j}:{8 * j + 8},{8 * i}:{8 * i + 8}"
    assert (chart.data["box"][number], chart.data["read"][number]) == (box, size(first.get("read_bytes", 0)))


def test_failures_are_counted_explained_and_placed(place: Path) -> None:
    page, folder = find_page(str(place / "failed.zarr"))
    lines = lines_of(folder / "journal.jsonl")
    rows = sheet(page, "By stage")
    check_sums(rows, lines, "infer")
    assert rows["infer"]["units"] == "7 of 8" and rows["infer"]["set aside"] == 1
    assert (page.state, page.is_well) == ("1 part missing", False)
    reasons = {row["reason"]: row["attempts"] for row in sheet(page, "Why tasks failed").values()}
    assert reasons == {"ValueError: the grey block always fails <b>": 3, "ValueError: the bright block fails once": 1}
    missing = next(i for i in items(page) if isinstance(i, Sheet) and i.title == "Missing")
    assert missing.rows[0] == ("infer", 7, "0:8,8:16,24:32", "ValueError: the grey block always fails <b>")
    assert any(
        "then run the same command again to compute it." in i.text for i in items(page) if isinstance(i, Sentence)
    )


def test_a_flow_adds_up_its_stages_and_leads_to_their_reports(place: Path) -> None:
    page, folder = find_page(str(place / "flow"))
    entries = json.loads((folder / "flow.json").read_text())["stages"]
    assert page.state == "complete"
    stages, tasks = sheet(page, "Stages"), sheet(page, "By stage")
    everything = []
    for entry in entries:
        lines = lines_of(Path(entry["folder"]) / "journal.jsonl")
        everything += lines
        assert stages[entry["name"]]["tasks"] == sum(bool(line["done"]) for line in lines)
        for stage in {line["stage"] for line in lines}:
            check_sums({stage: tasks[f"{entry['name']}: {stage}"]}, lines, stage)
        link = stages[entry["name"]]["stage"]
        assert (folder / link.target).resolve() == (Path(entry["folder"]) / REPORT).resolve()
    check_sums(tasks, everything, "all")
    charts = [item for item in items(page) if isinstance(item, Chart) and item.kind in ("at_work", "timeline")]
    domains = [chart.changes["encoding"]["color"]["scale"]["domain"] for chart in charts]  # type: ignore[index]
    assert domains == [["first", "objects", "scores"]] * 2
    assert set(charts[0].data["stage"]) | set(charts[1].data["colour"]) <= set(domains[0])
    scores = json.loads((place / "flow" / "scores.json").read_text())["scores"]["output"]
    assert sheet(page, "Scores of stage scores")["output"]["ssim"] == f"{scores['ssim']:.4f}"
    for name in ("flow/scores.json", "flow/scores.json.run"):
        page, _ = find_page(str(place / name))
        assert (page.state, sheet(page, "Scores")["output"]["ssim"]) == ("complete", f"{scores['ssim']:.4f}")


def test_the_table_of_stages_has_the_sums_of_journals_as_numbers_for_several_flows(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give = giver(place, monkeypatch, capsys)
    assert give("status", "flow", "--csv", "stages.csv").code == 0  # an earlier command
    assert give("status", "flow", "failed.zarr", "many.batch", "--csv", "stages.csv").code == 1  # two are not complete
    rows = list(csv.DictReader((place / "stages.csv").read_text().splitlines()))
    assert [(row["flow"], row["stage"]) for row in rows] == [
        ("flow", "first"), ("flow", "objects"), ("flow", "scores"), ("failed.zarr", "run"),
        *((str(place / "many" / name), "run") for name in ("in.zarr", "bad.zarr")),
    ]  # fmt: skip
    entries = json.loads((place / "flow.run" / "flow.json").read_text())["stages"]
    folders = [Path(entry["folder"]) for entry in entries] + [Path(f"{row['output']}.run") for row in rows[3:]]
    shown = sheet(find_page(str(place / "flow"))[0], "Stages")
    for row, folder in zip(rows, folders, strict=True):
        done = [line for line in lines_of(folder / "journal.jsonl") if line["done"]]
        sums = {name: sum(line.get(name, 0) for line in done) for name in ("read_bytes", "written_bytes")}
        assert {name: int(row[name]) for name in sums} == sums
        assert (int(row["tasks"]), int(row["peak_memory_bytes"])) == (len(done), max(e["peak_bytes"] for e in done))
        began, ended = min(e["started"] for e in done), max(e["started"] + e["seconds"] for e in done)
        cpu, wall = (sum(line.get(name, 0.0) for line in done) for name in ("cpu_seconds", "seconds"))
        assert float(row["seconds"]) == pytest.approx(ended - began)
        assert float(row["cpu_percent"]) == pytest.approx(100 * cpu / wall, abs=0.06)
        assert (row["gpu_percent"], row["peak_gpu_memory_bytes"]) == ("", "")  # no GPU is not 0 % of one
        made = Path(row["output"])
        assert int(row["files"]) == (1 if made.is_file() else sum(file.is_file() for file in made.rglob("*")))
        if row["flow"] == "flow":
            page = shown[row["stage"]]
            assert (page["CPU"], page["files"]) == (f"{100 * cpu / wall:.0f} %", int(row["files"]))
            assert (page["read"], page["output"]) == (size(sums["read_bytes"]), made.name)
    assert [row["input"] for row in shown.values()] == ["in.n5 raw", "first", "first"]
    first = str(place / "flow" / "first.zarr")
    assert [row["input"].split()[0] for row in rows[:3]] == [str(place / "in.n5"), first, first]
    assert {(row["flow"], row["complete"]) for row in rows[:4]} == {("flow", "True"), ("failed.zarr", "False")}
    for arguments, why in (
        (("flow", "failed.zarr", "--json"), "--json is for one output, and 2 are named"),
        (("trained", "--csv", "stages.csv"), "trained has no table of stages"),
    ):
        refused = give("status", *arguments)
        assert refused.code == 2 and why in refused.err
    assert not (place / "stages.csv").exists()


def test_a_training_has_the_numbers_of_its_log_and_the_tasks_of_its_ranks(place: Path) -> None:
    page, folder = find_page(str(place / "trained"))
    log = lines_of(folder / "losses.jsonl")
    assert page.state == "complete"
    scores = sheet(page, "Losses and scores")
    assert scores["loss"]["last"] == f"{log[-1]['loss']:.4g} (step {log[-1]['step']})"
    low = min(log, key=lambda entry: entry["loss"])
    assert scores["loss"]["best"] == f"{low['loss']:.4g} (step {low['step']})"
    facts = next(item for item in items(page) if isinstance(item, FactTable) and "steps" in item.entries)
    assert facts.entries["steps"] == "6 of 6; newest checkpoint after step 6"
    assert facts.entries["time of steps"] == brief(sum(entry["seconds"] for entry in log))
    check_sums(sheet(page, "By stage"), lines_of(folder / "journal.jsonl"), "train")


def test_a_batch_has_a_line_for_each_dataset_and_leads_to_its_report(place: Path) -> None:
    page, folder = find_page(str(place / "many.batch"))
    table = json.loads((folder / "batch.json").read_text())["datasets"]
    rows = sheet(page, "")
    assert [rows[Path(entry["volume"]).name]["ended"] for entry in table] == ["done", "incomplete"]
    journals = []
    for entry in table:
        run = Path(entry["out"] + ".run")
        journals.append(run / "journal.jsonl")
        row = next(row for row in rows.values() if row["output"] == entry["out"])
        assert (folder / row["dataset"].target).resolve() == run / REPORT
        done = [line for line in lines_of(journals[-1]) if line.get("result") != "Attempt"]  # that did something
        assert row["written"] == size(sum(line.get("written_bytes", 0) for line in done))
    check_sums(sheet(page, "By stage"), lines_of(*journals), "infer")
    facts = next(item for item in items(page) if isinstance(item, FactTable)).entries
    planned = size(sum(entry["output_bytes"] for entry in table))
    assert facts["planned"] == f"outputs of ≤ {planned} in {sum(entry['output_files'] for entry in table)} files"
    sums = [size(sum(entry[f"{what}_bytes"] for entry in table)) for what in ("read", "written")]
    assert facts["taken"] == f"read {sums[0]}, written {sums[1]}"
    assert (page.state, page.is_well) == ("not complete", False)


@pytest.mark.browser
@pytest.mark.parametrize(
    "name",
    [
        *("clean", "failed", "flow", "batch"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("training", "stage", "labels")),
    ],
)
def test_a_report_opens_offline(place: Path, browser: Browser, name: str) -> None:
    file = (place / REPORTS[name] / REPORT).resolve()
    assert file.stat().st_size < render.MOST_BYTES / 2
    assert browser.open_file(file) == [file.as_uri()]
    assert browser.drawn_pixels() > 100
    rows = browser.driver.execute_script(
        """return [...document.querySelectorAll("figure.sheet")].filter((f) => f.textContent.includes("By stage"))
        .flatMap((f) => [...f.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((c) => c.textContent)));"""
    )
    shown = {row[0]: row[2] for row in rows}
    expected = sheet(find_page(str(file.parent))[0], "By stage")
    assert shown == {stage: f"{row['tasks']:,}" for stage, row in expected.items()}


@pytest.mark.browser
def test_names_and_reasons_are_text_in_a_browser(place: Path, browser: Browser) -> None:
    browser.open_file(place / REPORTS["clean"] / REPORT)
    assert EVIL in browser.driver.find_element("tag name", "body").text
    browser.open_file(place / REPORTS["failed"] / REPORT)
    assert "always fails <b>" in browser.driver.find_element("tag name", "body").text


@pytest.mark.long
@pytest.mark.browser
def test_the_pointer_on_a_bar_tells_of_its_task(place: Path, browser: Browser) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    browser.open_file(place / REPORTS["clean"] / REPORT)
    canvas = browser.driver.find_element("xpath", "//figure[h3='Workers and their tasks']//canvas")
    browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    width, height = canvas.size["width"], canvas.size["height"]
    tip = ""
    for y, x in itertools.product(np.linspace(-0.25, 0.25, 6), np.linspace(-0.35, 0.45, 25)):
        place_of_pointer = int(x * width), int(y * height)
        ActionChains(browser.driver).move_to_element_with_offset(canvas, *place_of_pointer).perform()
        tip = "".join(tip.text for tip in browser.driver.find_elements("id", "vg-tooltip-element"))
        if "box z,y,x" in tip:  # there is no tooltip before the pointer was on a bar
            break
    assert all(word in tip for word in ("box z,y,x", "stage", "seconds", "read", "peak memory", "began"))


def run_again(folder: Path, out: str, **options: Any) -> Any:
    return vp.run(str(folder / "in.n5/raw"), out=folder / out, site="threads", settings=IDENTITY, **options)


@pytest.fixture
def own(place: Path, tmp_path: Path) -> Path:
    """A run and its output, to be broken."""
    for name in ("clean.zarr", "clean.zarr.run"):
        shutil.copytree(place / name, tmp_path / name)
    return tmp_path


def test_what_was_planned_stands_beside_what_it_took(own: Path) -> None:
    folder = own / "clean.zarr.run"
    planned = json.loads((folder / "planned.json").read_text())
    of_chunks = 64 * (8 + 2 + 1)  # beside their voxels
    assert planned["output_bytes"] == 8 * 16 * 32 + 4 * 8 * 16 + 2 * 4 * 8 + of_chunks and planned["memory_bytes"] > 1e8
    known = {"seconds": 7300.0, "stage_seconds": {"infer": 100.0, "pyramid 1": 20.0}, "is_measured": True}
    (folder / "planned.json").write_text(json.dumps(planned | known))
    rows = sheet(find_page(str(folder))[0], "Planned and taken")
    lines = lines_of(folder / "journal.jsonl")
    assert (rows["time, first task to last"]["planned"], rows["time of all workers"]["planned"]) == (
        "2 h 01 min",
        "2 min 00 s",
    )
    assert rows["… infer"]["planned"] == "1 min 40 s"
    assert rows["… infer"]["taken"] == brief(sum(e["seconds"] for e in lines if e["stage"] == "infer"))
    assert rows["output, without metadata"]["planned"] == size(planned["output_bytes"])  # no bound any more
    (folder / "planned.json").write_text(json.dumps(planned | {"identity": "of another plan"}))
    assert sheet(find_page(str(folder))[0], "Planned and taken")["output, without metadata"]["planned"] == ""


def test_a_damaged_journal_is_reported_with_a_sentence(own: Path) -> None:
    journal = own / "clean.zarr.run" / "journal.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([lines[0], "{damaged", *lines[2:], '{"stage":"infer","done":[99999]}']) + "\n")
    page, _ = find_page(str(own / "clean.zarr.run"))
    assert any("the first is line 2 of" in item.text for item in items(page) if isinstance(item, Sentence))
    assert page.state == "not complete"


def test_a_run_without_its_output_is_reported(own: Path) -> None:
    shutil.rmtree(own / "clean.zarr")
    plan = json.loads((own / "clean.zarr.run" / "plan.json").read_text()) | {"out": str(own / "clean.zarr")}
    (own / "clean.zarr.run" / "plan.json").write_text(json.dumps(plan))
    page, _ = find_page(str(own / "clean.zarr"))
    assert any("The output is not there" in item.text for item in items(page) if isinstance(item, Sentence))


def test_a_folder_of_another_version_and_one_of_nothing_are_refused(own: Path) -> None:
    (own / "clean.zarr.run" / "plan.json").write_text('{"from": "the future"}')
    with pytest.raises(RunError, match="another version"):
        vp.report(own / "clean.zarr")
    with pytest.raises(RunError, match="there is nothing to report of"):
        vp.report(own / "nothing.zarr")


def test_a_folder_that_may_only_be_read_gives_its_report_elsewhere(own: Path) -> None:
    folder = own / "clean.zarr.run"
    (folder / REPORT).unlink()
    folder.chmod(0o555)
    try:
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write anywhere")
        with pytest.raises(RunError, match="name another file"):
            vp.report(own / "clean.zarr")
        assert vp.report(own / "clean.zarr", own / "mine.html").is_file()
    finally:
        folder.chmod(0o755)


def test_a_place_that_cannot_be_written_is_named(own: Path) -> None:
    with pytest.raises(VolpipeError, match=r"mine.html: there is no folder .*nowhere; make it first"):
        vp.report(own / "clean.zarr", own / "nowhere" / "mine.html")
    (own / "clean.zarr.run" / REPORT).unlink()
    (own / "clean.zarr.run" / REPORT).mkdir()
    with pytest.raises(RunError, match=r"cannot be written to .*report.html: Is a directory; name another file"):
        vp.report(own / "clean.zarr")


@pytest.mark.parametrize("fault", ["full disk", "no template", "bug"])
def test_a_report_that_fails_is_a_warning_and_no_failed_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def fail(*arguments: object, **options: object) -> Any:
        raise OSError(28, "No space left on device") if fault == "full disk" else ZeroDivisionError("a bug")

    if fault == "full disk":
        monkeypatch.setattr("volpipe.runs.held_work.write_page", fail)
    elif fault == "bug":
        monkeypatch.setattr(RunWork, "page", fail)
    else:
        render._template.cache_clear()
        monkeypatch.setattr(render, "FOLDER", tmp_path)
    report = run_again(place, f"{fault}.zarr")
    render._template.cache_clear()
    assert report.is_complete and vp.status(place / f"{fault}.zarr").state == "complete"
    folder = place / f"{fault}.zarr.run"
    assert not (folder / REPORT).exists()
    assert (
        f"WARNING volpipe.runs.held_work no report was written to {folder / REPORT}"
        in (folder / "volpipe.log").read_text()
    )


def test_a_picture_that_fails_leaves_a_sentence_in_the_report(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Item]:
        raise RuntimeError("no colours")

    monkeypatch.setattr(RunWork, "voxel_pictures", lambda self, schedule: [Draft("Slices", fail)])
    assert run_again(place, "picture.zarr").is_complete
    text = (place / "picture.zarr.run" / REPORT).read_text()
    assert "Slices: it cannot be made (RuntimeError: no colours" in text


def test_a_report_is_written_when_work_stops_or_is_interrupted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, state in ((KeyboardInterrupt(), "interrupted"), (RunError("it cannot go on"), "stopped")):

        def fail(*arguments: object, error: BaseException = error) -> Any:
            raise error

        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(RunWork, "phases", fail)
            run_again(place, f"{state}.zarr")
        assert f'<span class="state bad">{state}</span>' in (place / f"{state}.zarr.run" / REPORT).read_text()
        run_again(place, f"{state}.zarr")
        assert '<span class="state well">complete</span>' in (place / f"{state}.zarr.run" / REPORT).read_text()


def test_a_report_tells_of_work_under_way(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    def look(work: RunWork, *arguments: Any) -> Any:
        states.append(find_page(str(place / "busy.zarr"))[0].state)
        return closed(work, *arguments)

    closed = RunWork.closed
    monkeypatch.setattr(RunWork, "closed", look)
    run_again(place, "busy.zarr")
    assert states[0].startswith("running")


@pytest.mark.usefixtures("_no_process_outlives_a_test")
def test_a_run_in_another_process_is_told_of_while_it_works_and_after_a_kill(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "bad.n5", tmp_path / "in.n5")
    (tmp_path / "net.py").write_text(WAITING)
    settings = [part for setting in [*FAILING, *SMALL] for part in ("--set", setting)]
    process = begin(tmp_path, "run", "--config", "threads", *settings, "-o", "out.zarr", "in.n5/raw")
    try:
        journal = tmp_path / "out.zarr.run" / "journal.jsonl"
        wait_until(lambda: journal.is_file() and journal.read_bytes().count(b'"infer"') == 7, 60)
        page, _ = find_page(str(tmp_path / "out.zarr"))
        assert page.is_well and page.state.startswith("running") and f"process {process.pid}" in page.line
        check_sums(sheet(page, "By stage"), lines_of(journal), "infer")
    finally:
        process.kill()
        process.wait()
    page, folder = find_page(str(tmp_path / "out.zarr"))
    assert (page.state, page.is_well) == ("interrupted", False)
    assert not (folder / REPORT).exists()  # a killed driver writes nothing
    facts = next(item for item in items(page) if isinstance(item, FactTable) and "command" in item.entries)
    assert str(facts.entries["command"]).startswith("volpipe run --config threads")
    assert vp.report(tmp_path / "out.zarr").is_file()


def test_a_complete_run_given_again_keeps_its_report(place: Path) -> None:
    run_again(place, "again.zarr")
    file = place / "again.zarr.run" / REPORT
    before = file.stat().st_mtime_ns
    run_again(place, "again.zarr")
    assert file.stat().st_mtime_ns == before
    file.unlink()
    run_again(place, "again.zarr")
    assert file.is_file()


def test_a_sweep_leads_to_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Browser) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path, '[sweep]\n"train.seed" = [1, 2]\n')
    vp.sweep("recipe.toml", out="swept", site="threads")
    page, folder = find_page("swept")
    rows = sheet(page, "")
    assert {row["trial"].text: row["train.seed"] for row in rows.values()} == {"000": "1", "001": "2"}
    assert all((folder / row["trial"].target).is_file() for row in rows.values())
    for name in ("000", "001"):
        assert '<span class="state well">complete</span>' in (folder / name / REPORT).read_text()
    assert page.state == "complete" and ">complete</span>" in (folder / REPORT).read_text()
    assert browser.open_file(folder / REPORT) == [(folder / REPORT).as_uri()]


def test_the_command_writes_the_report_and_says_where(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(COMMAND, "line", "")
    give = giver(place, monkeypatch, capsys)
    ended = give("report", "clean.zarr", "-o", tmp_path / "mine.html")
    assert (ended.code, ended.out) == (0, f"wrote {tmp_path / 'mine.html'}\n")
    assert give("report", "clean.zarr").out == f"wrote {place / 'clean.zarr.run' / REPORT}\n"
    nothing = give("report", "nothing.zarr")
    assert nothing.code and "there is nothing to report of nothing.zarr" in nothing.err
    settings = [part for setting in IDENTITY for part in ("--set", setting)]
    ran = give("run", "--config", "threads", *settings, "-o", "told.zarr", "in.n5/raw")
    assert f"report: {place / 'told.zarr.run' / REPORT}" in ran.out.splitlines()


def test_an_evaluation_leaves_its_report_where_it_is_asked_for(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give = giver(place, monkeypatch, capsys)
    file, scores = tmp_path / "scores.html", tmp_path / "scores.json"
    ended = give("evaluate", "--config", "threads", "clean.zarr", "in.n5/raw", "--report", file, "--json", scores)
    assert ended.code == 0, ended.err
    text = file.read_text()
    for score in json.loads(scores.read_text())["scores"]["output"].values():
        if isinstance(score, float):
            assert f">{score:.4f}</td>" in text
    assert ">complete</span>" in text and not list(place.glob("volpipe_*_scores.run"))


def test_warnings_of_a_log_are_told_once_with_the_end_of_a_traceback(tmp_path: Path) -> None:
    log = tmp_path / "volpipe.log"
    log.write_text(
        "2026-11-23 07:11:37,123 INFO volpipe.a nothing\n"
        "2026-11-23 07:11:37,124 WARNING volpipe.b the net warns\n"
        "2026-11-23 07:11:37,125 WARNING volpipe.b the net warns\n"
        "2026-11-23 07:11:37,126 WARNING volpipe.blockwise.phase infer 7 failed (attempt 1): Traceback (most rec\n"
        "ValueError: no\n"
        "2026-11-23 07:11:37,127 ERROR volpipe.c the work stopped\nTraceback (most recent call last):\n"
        "  File x\nKeyError: 3\n"
        "2026-11-23 07:11:37,128 INFO volpipe.a over\n"
    )
    texts = [item.text for item in log_notes(log) if isinstance(item, Sentence)]
    assert texts == ["warning: the net warns", "error: the work stopped: KeyError: 3"]
    assert log_notes(tmp_path / "none") == []


def test_what_an_output_takes_on_disk_is_counted_file_by_file(tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    sizes = {"s0/c/0/0/0": 10, "s0/c/0/0/1": 7, "s0/zarr.json": 1000, "zarr.json": 500, "s1/c/0/0/0": 3}
    for name, num_bytes in sizes.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(bytes(num_bytes))
    assert disk_use(str(out)) == (10 + 7 + 3, len(sizes))  # bytes of voxels, and files with those of metadata
    (tmp_path / "empty").mkdir()
    assert disk_use(str(tmp_path / "empty")) == (0, 0)


def test_an_output_that_is_far_away_or_has_too_many_files_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disk_use("s3://bucket/out.zarr") is None
    for number in range(50):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "chunk").write_bytes(b"1")
    assert disk_use(str(tmp_path)) == (50, 50)
    hours = itertools.count()
    monkeypatch.setattr("volpipe.runs.pages.time", SimpleNamespace(monotonic=lambda: 3600.0 * next(hours)))
    assert disk_use(str(tmp_path)) is None
