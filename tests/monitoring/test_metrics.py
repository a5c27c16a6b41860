"""Metrics: what a scrape or a file says is what the journal has, whatever the work; no fault of theirs ends a run."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from command import THREADS, Give, giver, set_each
from conftest import ROOT
from inline import Inline
from prometheus_client import CollectorRegistry, generate_latest
from scrapes import Samples, by_state, free_port, is_open, labelled, samples, scrape, state
from trainings import Threads, make_folder
from volumes import noise, windowed, write_volume
from works import WORKS, prepare

import volpipe as vp
from volpipe.blockwise.phase import Progress
from volpipe.blockwise.stage import Stage
from volpipe.blockwise.usage import Totals, Usage
from volpipe.blockwise.work import Work
from volpipe.errors import RunStopped
from volpipe.monitoring import exposition
from volpipe.monitoring.metrics import MOST_FLOW_STAGES, OTHER, Metrics
from volpipe.runs.held_work import HeldWork
from volpipe.runs.run_folder import RunFolder
from volpipe.training.task import newest_step

SHAPE = (16, 16, 24)
NUM_BLOCKS = 12
SETTINGS = (
    "net.name=identity", "normalise.method=none", "output.levels=1",
    *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"),
)  # fmt: skip
FAILING = """
import torch
FAULTS = iter(range(3))
class Net(torch.nn.Module):
    volpipe = dict(
        in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(0, 0, 0), window=(8, 8, 8), intensity="same"
    )
    def forward(self, x):
        if (x == 7).all() or ((x == 5).all() and next(FAULTS, 2) < 1):
            raise ValueError("this block does not please")
        return x
def build():
    return Net()
"""


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(tmp_path, monkeypatch, capsys)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a volume."""
    write_volume(tmp_path / "in.n5", noise(SHAPE), 8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(**arguments: Any) -> vp.Report:
    defaults = {"out": "out.zarr", "settings": SETTINGS, "site": Inline()}
    report = vp.run("in.n5", **(defaults | arguments))
    assert isinstance(report, vp.Report)
    return report


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def journal_sums(folder: Path) -> dict[str, Counter[str]]:
    """Return by stage what the lines of the journal add up to, and how many tasks and units there were."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for line in lines(folder):
        took = sums[line["stage"]]
        took["tasks"] += 1
        took["units"] += len(line["done"])
        for name in ("seconds", "cpu_seconds", "read_bytes", "written_bytes", "queued_seconds"):
            took[name] += line.get(name, 0)
        took["peak_bytes"] = max(took["peak_bytes"], line.get("peak_bytes", 0))
    return sums


NAMES = {
    "volpipe_tasks_total": "tasks", "volpipe_task_seconds_total": "seconds", "volpipe_cpu_seconds_total": "cpu_seconds",
    "volpipe_read_bytes_total": "read_bytes", "volpipe_written_bytes_total": "written_bytes",
    "volpipe_queue_seconds_total": "queued_seconds", "volpipe_worker_memory_peak_bytes": "peak_bytes",
}  # fmt: skip


def check_journal(found: Samples, folder: Path, **labels: str) -> set[str]:
    """Compare the metrics of a work with its journal; return its stages."""
    sums = journal_sums(folder)
    for stage, took in sums.items():
        for metric, name in NAMES.items():
            value = found[metric][labelled(stage=stage, **labels)]
            assert value == pytest.approx(took[name]), (metric, stage)
        units = by_state(found, "volpipe_units", stage=stage, **labels)
        assert units == {"done": took["units"], "failed": 0, "in_flight": 0, "left": 0}
        assert found["volpipe_progress_ratio"][labelled(stage=stage, **labels)] == 1
        assert found["volpipe_tasks_in_flight"][labelled(stage=stage, **labels)] == 0
        assert found["volpipe_retries_total"][labelled(stage=stage, **labels)] == 0
    return set(sums)


def test_the_numbers_of_a_run_are_those_of_its_journal(here: Path) -> None:
    report = run(settings=[*SETTINGS, "tensors.mode=stored", "output.levels=2"], metrics=here / "m.prom")
    found = samples(here / "m.prom")
    assert check_journal(found, report.folder) == {"factor", "infer", "pyramid 1", "pyramid 2"}
    assert state(found) == "complete"
    assert by_state(found, "volpipe_voxels") == {"done": 16 * 16 * 24, "left": 0}
    (info,) = found["volpipe_info"]
    assert dict(info) == {"version": vp.__version__, "command": "run"}
    assert f'output="{here / "out.zarr"}"' in (here / "m.prom").read_text()
    assert found["volpipe_elapsed_seconds"][labelled()] > 0
    assert found["volpipe_driver_memory_bytes"][labelled()] > 10e6


def test_scrapes_of_a_run_under_way_add_up_and_the_port_is_free_again_after_it(here: Path) -> None:
    port, texts = free_port(), list[str]()
    for _ in range(2):  # at the same port
        texts.clear()
        run(metrics=port, on_progress=lambda progress: texts.append(scrape(port)), fresh=True)
        assert not is_open(port)
        assert not [each.name for each in threading.enumerate() if each.name.startswith("volpipe-metrics")]
    found = [samples(text) for text in texts]
    assert [state(each) for each in found] == ["running"] * len(found)
    units = [by_state(each, "volpipe_units", stage="infer") for each in found if "volpipe_units" in each]
    assert [sum(each.values()) for each in units] == [NUM_BLOCKS] * len(units)
    done = [each["done"] for each in units]
    assert done == sorted(done) and len(set(done)) > 3
    assert any(each["in_flight"] for each in units)
    workers = [by_state(each, "volpipe_workers") for each in found if "volpipe_workers" in each]
    assert workers and all(each["wanted"] == 1 for each in workers)
    tasks = [each["volpipe_tasks_total"][labelled(stage="infer")] for each in found if "volpipe_tasks_total" in each]
    assert tasks == sorted(tasks)


def test_workers_that_are_connected_are_counted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "ASK_PERIOD", 0.01)
    port, texts = free_port(), list[str]()

    def look(progress: Progress) -> None:
        threading.Event().wait(0.05)
        texts.append(scrape(port))

    run(metrics=port, on_progress=look)
    assert by_state(samples(texts[-1]), "volpipe_workers") == {"wanted": 1, "connected": 1}


def test_a_run_that_is_complete_says_so_and_one_that_goes_on_counts_what_was_done(here: Path) -> None:
    run(only="0:8,0:8,0:8", metrics="m.prom")
    assert by_state(samples(here / "m.prom"), "volpipe_units", stage="infer")["done"] == 1
    run(metrics="m.prom")
    found = samples(here / "m.prom")
    assert by_state(found, "volpipe_units", stage="infer")["done"] == NUM_BLOCKS
    assert found["volpipe_read_bytes_total"][labelled(stage="infer")] < sum(
        line["read_bytes"] for line in lines(here / "out.zarr.run")
    )  # of this session alone
    run(metrics="m.prom")
    found = samples(here / "m.prom")
    assert state(found) == "complete" and "volpipe_units" not in found


@pytest.mark.parametrize(
    ("error", "ending"), [(KeyboardInterrupt(), "interrupted"), (RunStopped("too much fails"), "stopped")]
)
def test_a_file_says_how_a_run_of_a_script_ended_that_raises(here: Path, error: BaseException, ending: str) -> None:
    def fail(progress: Progress) -> None:
        raise error

    with pytest.raises(type(error)):
        run(metrics="m.prom", on_progress=fail)
    assert state(samples(here / "m.prom")) == ending


def test_retries_and_what_failed_are_counted(here: Path, give: Give) -> None:
    data = noise((8, 8, 64))
    data[:, :, :8], data[:, :, 8:16] = 5, 7
    shutil.rmtree(here / "in.n5")
    write_volume(here / "in.n5", data, 8)
    (here / "net.py").write_text(FAILING)
    settings = set_each("net.name=net.py:build", *SETTINGS[1:])
    command = ["run", *THREADS, *settings, "--tolerate", "1", "--metrics", "m.prom", "-o", "out.zarr", "in.n5"]
    assert give(*command).code == 1
    found = samples(here / "m.prom")
    assert state(found) == "incomplete"
    assert by_state(found, "volpipe_units", stage="infer") == {"done": 7, "failed": 1, "in_flight": 0, "left": 0}
    # Of one block a single attempt failed, of the other three, after two of which it was tried again.
    assert found["volpipe_retries_total"][labelled(stage="infer")] == 3
    assert give(*command, "--strict", "--fresh").code == 1
    assert state(samples(here / "m.prom")) == "stopped"


@pytest.mark.parametrize("name", WORKS)
def test_every_kind_of_work_has_the_metrics_of_its_stages(name: str, tmp_path: Path, give: Give) -> None:
    prepare(tmp_path)
    kind = WORKS[name]
    ended = give(*kind.command("threads", "--metrics", "m.prom"))
    assert ended.code == 0, ended.err
    found = samples(tmp_path / "m.prom")
    assert state(found) == "complete"
    assert any(labelled(stage=kind.stage) <= series for series in found["volpipe_tasks_total"])
    for folder in kind.folders if name not in ("evaluate", "compare") else ():  # whose folder goes at its end
        labels = {"flow_stage": Path(folder).stem.removesuffix(".zarr")} if name == "flow" else {}
        assert kind.stage in check_journal(found, tmp_path / folder, **labels) or "flow_stage" in labels


def test_a_batch_counts_datasets_and_adds_up_their_stages(here: Path) -> None:
    for number in range(3):
        write_volume(here / "raw" / f"{number}.n5", noise(SHAPE, seed=number), 8)
    (here / "raw" / "2.n5" / "raw" / "0" / "0" / "0").write_bytes(b"damage")
    arguments: dict[str, Any] = {"out": "done", "site": Inline(), "settings": SETTINGS, "metrics": "m.prom"}
    vp.batch("raw/*.n5/raw", **arguments)
    found = samples(here / "m.prom")
    assert state(found) == "incomplete"
    assert by_state(found, "volpipe_datasets") == {"done": 2, "incomplete": 1}
    units = by_state(found, "volpipe_units", stage="infer")
    assert units == {"done": 3 * NUM_BLOCKS - 1, "failed": 1, "in_flight": 0, "left": 0}
    folders = [here / "done" / f"{number}_raw.zarr.run" for number in range(3)]
    folders = sorted((here / "done").glob("*.run"))
    sums = sum((journal_sums(folder)["infer"] for folder in folders), Counter[str]())
    assert found["volpipe_written_bytes_total"][labelled(stage="infer")] == sums["written_bytes"]


def test_phases_and_works_of_one_stage_are_added_up_their_gpus_too() -> None:
    metrics, usage = Metrics("run"), Usage(seconds=4, device_seconds=3, device_percent=50, device_used_bytes=7)
    metrics.begin((), [held("b.batch")])
    for seconds in (10.0, 20.0):  # two phases of a work, and then another work
        for number in range(2):
            progress = Progress([stage := Stage("infer", 4)], 0.0, num_voxels=100, seconds_left=seconds)
            stage.label = "gpu"
            stage.mark(number)
            progress.totals = {"infer": Totals()}
            progress.totals["infer"].add(1, usage)
            progress.retries["infer"] = 1
            metrics.move((0,) if seconds == 20 else (), [held("b.batch")] * (2 if seconds == 20 else 1), progress)
    found = samples(generate_latest(registry_of(metrics)).decode())
    assert found["volpipe_remaining_seconds"] == {labelled(): 10}
    for name, value in {
        "gpu_seconds_total": 12,
        "gpu_busy_seconds_total": 8,
        "retries_total": 4,
        "tasks_total": 4,
    }.items():
        assert found[f"volpipe_{name}"] == {labelled(stage="infer"): value}
    assert found["volpipe_gpu_memory_used_peak_bytes"] == {labelled(stage="infer"): 7}
    assert by_state(found, "volpipe_units", stage="infer") == {"done": 2, "in_flight": 0, "failed": 0, "left": 6}
    assert by_state(found, "volpipe_voxels") == {"done": 50, "left": 150}


def test_names_that_are_no_text_are_labels_all_the_same() -> None:
    metrics = Metrics("run", 'a "recipe"\n')
    metrics.begin((), [held('a "b"\n\udcff.zarr')])
    text = generate_latest(registry_of(metrics)).decode()
    assert 'output="a \\"b\\"\\n\\\\udcff.zarr"' in text and samples(text)["volpipe_info"]


def registry_of(metrics: Metrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(metrics)
    return registry


def held(folder: str) -> HeldWork[None]:
    """Return work with many others, none of which is done."""

    def fail(*arguments: object) -> Any:
        raise AssertionError

    return HeldWork("batch", RunFolder(Path(folder)), claim=fail, held_steps=fail, page=fail)


def test_ten_thousand_datasets_make_no_more_series_than_one() -> None:
    def count(num_datasets: int, num_recipes: int) -> int:
        metrics, batch = Metrics("batch"), held("b.batch")
        metrics.begin((), [batch])
        for number in range(num_datasets):
            stage = Work(f"stage {number % num_recipes}", batch.steps, "flow_stage")
            works = [batch, Work(f"{number}.n5", batch.steps, "dataset"), stage]
            progress = Progress([Stage("infer", 4)], 0.0)
            progress.totals = {"infer": Totals()}
            metrics.move((number, 0), works, progress)
            if number % 8:
                metrics.end((number, 0), works, None, None)
        return sum(len(family.samples) for family in metrics.collect())

    assert count(10_000, 1) == count(1, 1)
    assert count(10_000, 10_000) == count(10_000, MOST_FLOW_STAGES + 1)
    assert OTHER == "other"


def test_a_training_counts_steps_and_a_sweep_its_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_folder(tmp_path))
    with Threads(1).start(tmp_path) as workers:
        vp.train("recipe.toml", out="t", site=workers, metrics="m.prom")
    found = samples(tmp_path / "m.prom")
    assert state(found) == "complete"
    assert by_state(found, "volpipe_training_steps") == {"done": newest_step(tmp_path / "t"), "left": 0}
    assert found["volpipe_tasks_total"][labelled(stage="train")] == 1
    make_folder(tmp_path, '[sweep]\n"train.seed" = [1, 2]\n')
    with Threads(2).start(tmp_path) as workers:
        vp.sweep("recipe.toml", out="s", site=workers, metrics="m.prom")
    found = samples(tmp_path / "m.prom")
    assert by_state(found, "volpipe_trials") == {"done": 2, "waiting": 0, "running": 0}
    assert found["volpipe_tasks_total"][labelled(stage="train")] == 2
    assert dict(next(iter(found["volpipe_info"])))["recipe"] == "recipe"


@pytest.mark.parametrize("command", ["run", "batch", "segment", "evaluate", "compare", "train", "sweep", "tune"])
def test_every_command_that_works_has_the_options(command: str, give: Give) -> None:
    text = give(command, "--help").out
    assert all(f"  {option} " in text for option in ("--metrics", "--log-json", "--notify"))


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("nine", "write a port such as 9100, HOST:PORT, or a file whose name ends in .prom"),
        ("٣", "write a port such as 9100, HOST:PORT, or a file whose name ends in .prom"),
        ("99999", "ports end at 65535, and this is 99999"),
        (":9100", "there is no host before the colon; write 9100, or 0.0.0.0:9100"),
        ("metrics.txt", "write a port such as 9100, HOST:PORT, or a file whose name ends in .prom"),
        ("none/m.prom", "there is no folder none; make it first"),
        ("folder.prom", "it is a folder; name a file in it"),
        ("203.0.113.7:9100", "give a port, or the address of this machine with one"),
        ("/proc/m.prom", "it cannot be written"),
    ],
)
def test_a_target_that_cannot_be_is_refused_before_anything_begins(
    target: str, sentence: str, here: Path, give: Give
) -> None:
    (here / "folder.prom").mkdir()
    ended = give("run", *THREADS, *set_each(*SETTINGS), "--metrics", target, "-o", "out.zarr", "in.n5")
    said = " ".join(ended.err.split())
    assert ended.code == 2 and said.startswith(f"volpipe: --metrics {target}: ") and sentence in said
    assert not (here / "out.zarr.run").exists()
    with pytest.raises(vp.VolpipeError, match=re.escape(sentence)):
        run(metrics=target)
    assert not (here / "out.zarr.run").exists()


def test_a_port_that_is_taken_is_refused_before_anything_begins(here: Path, give: Give) -> None:
    port = free_port()
    with exposition.monitored(port, "run"):
        ended = give("run", *THREADS, *set_each(*SETTINGS), "--metrics", str(port), "-o", "out.zarr", "in.n5")
        assert ended.code == 2
        said = f"--metrics {port}: another process listens at port {port} of 127.0.0.1; give another port"
        assert said in " ".join(ended.err.split())
        assert is_open(port)
    assert not (here / "out.zarr.run").exists() and not is_open(port)


def test_a_port_alone_is_of_this_machine_and_is_told(here: Path, give: Give) -> None:
    ended = give("run", *THREADS, *set_each(*SETTINGS), "--metrics", "0", "-o", "out.zarr", "in.n5")
    assert ended.code == 0
    assert re.search(r"^metrics are at http://127\.0\.0\.1:\d+/metrics$", ended.err, re.MULTILINE)


def test_a_file_that_cannot_be_written_any_more_fails_no_run(
    here: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "gone").mkdir()
    (here / "net.py").write_text(
        FAILING.replace("return x\n", "import shutil; shutil.rmtree('gone', True); return x\n")
    )
    settings = set_each("net.name=net.py:build", *SETTINGS[1:])
    ended = give("run", *THREADS, *settings, "--metrics", "gone/m.prom", "-o", "out.zarr", "in.n5")
    assert ended.code == 0, ended.err
    assert ended.err.count("metrics cannot be written to") == 1


def test_a_fault_of_the_metrics_fails_no_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a fault of ours")

    port, texts = free_port(), list[str]()
    monkeypatch.setattr(Metrics, "trials", property(fail))
    assert run(metrics=port, on_progress=lambda progress: texts.append(scrape(port))).is_complete
    assert set(texts) == {""}
    monkeypatch.setattr(Metrics, "move", fail)
    assert run(metrics=port, fresh=True).is_complete
    assert "Metrics fails, and hears of no further task" in (here / "out.zarr.run" / "volpipe.log").read_text()


# ---- the dashboard


def test_the_dashboard_asks_for_metrics_that_there_are(here: Path) -> None:
    board = json.loads((ROOT / "configs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"volpipe_\w+", query)}
    port, names = free_port(), set[str]()
    run(metrics=port, on_progress=lambda progress: names.update(samples(scrape(port))), out="a.zarr")
    vp.batch(["in.n5/raw"], out="done", site=Inline(), settings=SETTINGS, metrics="b.prom")
    make_folder(here, '[sweep]\n"train.seed" = [1]\n')
    with Threads(1).start(here) as workers:
        vp.train("recipe.toml", out="t", site=workers, metrics="t.prom", settings=["train.steps=2"])
        vp.sweep("recipe.toml", out="s", site=workers, metrics="s.prom", settings=["train.steps=2"])
    names |= {name for file in ("b.prom", "t.prom", "s.prom") for name in samples(here / file)}
    names.add("volpipe_remaining_seconds")  # which a run has after 5 s
    assert len(asked) > 20 and asked - names == set()
    described = set(
        re.findall(
            r"`(volpipe_\w+)`", (ROOT / "docs" / "reference" / "machines.md").read_text().partition("## Metrics")[2]
        )
    )
    assert described == names
    assert all("$output" in query or "label_values" in query for query in queries)
