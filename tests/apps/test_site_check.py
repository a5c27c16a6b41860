"""`volpipe sites check` on sites with one deliberate fault each: it is named, alone, and nothing is left running.

Faults are real ones: packages that lie before the driver's, mounts that only the worker has or lacks, a full disk.
What a worker finds by itself is tried in the shell of a block; by way of Parsl as well with -m long. Slurm and
Kubernetes are tried in test_slurm_checks and test_k8s.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import parsl
import pytest
import torch
from command import Ended, Give, begin, finish, giver, processes_in, sentences, wait_until
from conftest import ROOT
from disks import OWN_MOUNTS, needs_mounts, small_disk
from parsl.config import Config
from parsl.executors import HighThroughputExecutor, ThreadPoolExecutor
from parsl.providers import LocalProvider, SlurmProvider
from volumes import noise, write_volume

from volpipe.apps import site_check
from volpipe.apps.site_check import OnAnswer, gpus_of
from volpipe.sites import node_facts
from volpipe.sites.findings import Answer, Checked, Gpus
from volpipe.sites.node_facts import NodeFacts, Question

SITE = """
from parsl.config import Config
from parsl.launchers import SimpleLauncher
from parsl.providers import LocalProvider
from volpipe.apps.htex.executor import ResilientExecutor

class Prompt(LocalProvider):
    status_polling_interval = 1

def config(run_dir):
    executor = ResilientExecutor(
        label={label!r}, address="127.0.0.1", max_workers_per_node=1, available_accelerators={gpus!r},
        heartbeat_period=1, heartbeat_threshold=4, worker_logdir_root={logs!r},
        provider=Prompt(init_blocks=2, max_blocks=4, launcher=SimpleLauncher(), worker_init={init!r}),
    )
    return Config(executors=[executor], run_dir=run_dir, strategy_period=1, initialize_logging=False)
"""


EXAMINE = f"""
import json, sys
names = {{"__name__": "checkup"}}
exec(open({node_facts.__file__!r}).read(), names)
print(json.dumps(names["examine"](json.load(sys.stdin))))
"""


@dataclass
class Trial:
    """A site of this machine, checked in a folder of its own; `started` has a line for each block that began.

    Attributes:
        give: the command in this process, where it is not to be one of its own.
    """

    folder: Path
    init: str = ""
    label: str = "cpu"
    gpus: list[str] = field(default_factory=list)
    out: Path | None = None
    logs: str | None = None  # of workers; without, in the output's folder
    give: Give | None = None

    @property
    def started(self) -> Path:
        return self.folder / "started"

    def command(self, *more: str | Path) -> list[str]:
        init = f'[ -n "$INSIDE" ] || echo block >> {self.started}\n{self.init}'
        (self.folder / "out").mkdir(exist_ok=True)
        site = SITE.format(label=self.label, gpus=self.gpus, logs=self.logs, init=init)
        (self.folder / "site.py").write_text(site)
        return ["sites", "check", "site.py", *map(str, more), "--out", str(self.out or self.folder / "out")]

    def check(self, *more: str | Path, blocks: int = 1) -> Ended:
        """Return how the command ended; see that it started so many blocks, and left nothing running."""
        command = self.command(*more)
        ended = self.give(*command) if self.give else finish(self.folder, begin(self.folder, *command))
        assert "Traceback" not in ended.err
        assert processes_in(self.folder) == []
        assert (self.started.read_text().count("block") if self.started.exists() else 0) == blocks
        return ended

    def fault(self, *more: str | Path, blocks: int = 1) -> str:
        """Return the one sentence that the command names, which is a fault."""
        ended = self.check(*more, blocks=blocks)
        (sentence,) = sentences(ended)
        assert ended.code == 1, ended.err
        return sentence


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    yield Trial(tmp_path)
    for process in processes_in(tmp_path):
        process.kill()


def ask_in_shell(config: Config, question: Question, wait_seconds: float, on_answer: OnAnswer) -> list[Answer]:
    """Return the answer of a worker in the shell of a block, without Parsl's pool and interchange."""
    (executor,) = config.executors
    folder = Path(question["mark"]).parent
    script, code = folder / "block.sh", folder / "examine.py"
    script.write_text(f"{executor.provider.worker_init}\nexec {sys.executable} {code}\n")
    code.write_text(EXAMINE)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    given = json.dumps(question)
    done = subprocess.run(["bash", script], env=environment, input=given, capture_output=True, text=True, check=True)
    answer = Answer(executor.label, gpus_of(executor), json.loads(done.stdout))
    on_answer(answer)
    return [answer]


@pytest.fixture(params=["in a shell", pytest.param("by Parsl", marks=pytest.mark.long)])
def _starter(
    request: pytest.FixtureRequest, trial: Trial, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who starts the worker of a trial."""
    if request.param == "in a shell":
        monkeypatch.setattr(site_check, "ask_each", ask_in_shell)
        trial.give = giver(trial.folder, monkeypatch, capsys)


def rows(ended: Ended) -> dict[str, list[str]]:
    """Return the cells of the table by the name of their row."""
    lines = [line for line in ended.out.splitlines() if "  " in line.strip()]
    return {
        cells[0]: cells[1:] for cells in ([part.strip() for part in line.split("  ") if part.strip()] for line in lines)
    }


def put_package(trial: Trial, name: str, code: str) -> None:
    """Let the worker find another package of that name first."""
    folder = trial.folder / "first" / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(code)
    trial.init = f"export PYTHONPATH={folder.parent}:$PYTHONPATH"


def test_threads_that_lack_nothing_are_well(tmp_path: Path, give: Give) -> None:
    volume = write_volume(tmp_path / "in.n5", noise((20, 24, 28)))
    before = sorted(tmp_path.iterdir())
    ended = give("sites", "check", "threads", volume)
    assert ended.code == 0, ended.err
    assert sentences(ended) == []
    assert ended.out.splitlines()[-1] == "site threads: nothing found that would fail a run"
    found = rows(ended)
    for package in ("parsl", "tensorstore", "numpy", "zarr", "z5py"):
        assert found[package] == [importlib.metadata.version(package)] * 2
    assert found["torch"] == [torch.__version__] * 2  # which names its build, too
    assert found["Python"] == [".".join(map(str, sys.version_info[:3]))] * 2
    assert found["volume"] == ["can be read", "the same voxels"]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
@pytest.mark.usefixtures("_pools_start_anew")
def test_a_worker_that_lacks_nothing_is_well_and_only_one_block_starts(trial: Trial) -> None:
    volume = write_volume(trial.folder / "in.n5", noise((20, 24, 28)))
    ended = trial.check(volume)
    assert (ended.code, sentences(ended)) == (0, []), ended.err
    assert rows(ended)["volume"] == ["can be read", "the same voxels"]
    assert rows(ended)["time to start"][0].endswith(" s")
    assert list((trial.folder / "out").iterdir()) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_starter")
@pytest.mark.parametrize(
    ("package", "code", "is_fault", "said"),
    [
        ("volpipe", "__version__ = '0.0.1'", True, "cpu: volpipe is 0.0.1 on "),
        pytest.param("zarr", "__version__ = '2.18.0'", True, "cpu: zarr is 2.18.0 on ", marks=pytest.mark.long),
        ("z5py", "__version__ = '3.0.999'", False, "note: cpu: z5py is 3.0.999 on "),
        ("volpipe", "import nothing_of_that_name", True, "cpu: volpipe cannot be imported on "),
        ("torch", "raise OSError('libcudart.so.12: not found')", True, "cpu: torch cannot be imported on "),
    ],
)
def test_another_version_is_named(trial: Trial, package: str, code: str, is_fault: bool, said: str) -> None:
    volume = write_volume(trial.folder / "in.n5", noise((8, 8, 8)))
    put_package(trial, package, code)
    ended = trial.check(volume)
    (sentence,) = sentences(ended)
    if trial.give is None and "nothing_of_that_name" in code:  # its pool is a command of volpipe's
        said = "cpu: no worker could start, or none could report: "
        assert "No module named 'nothing_of_that_name'" in sentence
    assert sentence.startswith(said)
    assert ended.code == (1 if is_fault else 0), ended.err


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_starter")
def test_other_code_of_the_same_version_is_named(trial: Trial) -> None:
    import volpipe

    source = Path(volpipe.__file__).parent
    copy = trial.folder / "first"
    copy.mkdir()
    for name in ("apps", "models", "configs"):
        (copy / name).symlink_to(source.parent / name)
    shutil.copytree(source, copy / "volpipe", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "volpipe/geometry/grid.py").open("a") as file:
        file.write("\nOLDER = True\n")
    trial.init = f"export PYTHONPATH={copy}:$PYTHONPATH"
    sentence = trial.fault()
    assert sentence.startswith("cpu: volpipe is other code on ")


@pytest.mark.long
@pytest.mark.slow
def test_another_parsl_is_named_although_no_task_can_reach_it(trial: Trial) -> None:
    here, there = Path(parsl.__file__).parent, trial.folder / "first/parsl"
    there.mkdir(parents=True)
    for file in here.iterdir():
        if file.name not in ("version.py", "__pycache__"):
            (there / file.name).symlink_to(file)
    (there / "version.py").write_text("VERSION = '2020.01.01'\n")
    trial.init = f"export PYTHONPATH={there.parent}:$PYTHONPATH"
    sentence = trial.fault()
    own = importlib.metadata.version("parsl")
    assert "its workers run Python 3." in sentence
    assert "and Parsl 2020.01.01, and this command Python 3." in sentence
    assert f"and Parsl {own}, which do not understand each other; let the site start" in sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "gpus"), [("gpu", []), pytest.param("gpu_h200", [], marks=pytest.mark.long), ("cpu", ["none"])]
)
def test_a_gpu_executor_without_a_gpu_is_named(trial: Trial, label: str, gpus: list[str]) -> None:
    trial.label, trial.gpus, trial.init = label, gpus, "export CUDA_VISIBLE_DEVICES="
    sentence = trial.fault()
    assert f"{label}: no GPU is seen on " in sentence
    assert f"(CUDA_VISIBLE_DEVICES is {'none' if gpus else ''!r})" in sentence


def in_own_mounts(trial: Trial, mount: str) -> None:
    needs_mounts()
    trial.init = OWN_MOUNTS.format(copy=trial.folder / "copy.sh", mount=mount)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_starter")
def test_a_volume_that_the_worker_does_not_see_is_named(trial: Trial) -> None:
    (trial.folder / "data").mkdir()
    volume = write_volume(trial.folder / "data/in.n5", noise((8, 8, 8)))
    in_own_mounts(trial, f"mount -t tmpfs tmpfs {volume.parent}")
    ended = trial.check(volume)
    (sentence,) = sentences(ended)
    assert ended.code == 1
    assert f"cpu: {volume}:raw cannot be read on " in sentence
    assert "; it must be at the same path for all, and readable" in sentence
    assert rows(ended)["volume"] == ["can be read", "cannot be read"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_starter")
def test_another_volume_at_the_same_path_is_named(trial: Trial) -> None:
    volume, other = (write_volume(trial.folder / f"{seed}.n5", noise((8, 8, 8), seed=seed)) for seed in (1, 2))
    in_own_mounts(trial, f"mount --bind {other} {volume}")
    sentence = trial.fault(volume)
    assert f"cpu: {volume}:raw has other voxels on " in sentence


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("logs", "said"),
    [
        ("elsewhere", "it is not there"),
        pytest.param(None, "another folder has that path there, without what", marks=pytest.mark.long),
    ],
)
def test_an_output_that_the_worker_does_not_see_is_named(trial: Trial, logs: str | None, said: str) -> None:
    """It could write there all the same, to a folder of its own, as Parsl does that writes its logs there."""
    trial.logs = logs and str(trial.folder / logs)
    in_own_mounts(trial, f"mount -t tmpfs -o size=2g tmpfs {trial.folder / 'out'}")
    sentence = trial.fault()
    assert f"cpu: {trial.folder / 'out'} cannot be written on " in sentence
    assert f": {said}" in sentence
    assert sentence.endswith("; choose an --out that is the same folder for all, with room")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_starter")
def test_an_output_that_the_worker_may_only_read_is_named(trial: Trial) -> None:
    out, trial.logs = trial.folder / "out", str(trial.folder / "logs")
    in_own_mounts(trial, f"mount --bind {out} {out} && mount -o remount,ro,bind {out}")
    sentence = trial.fault()
    assert f"cpu: {out} cannot be written on " in sentence
    assert ": Read-only file system; choose an --out" in sentence


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_starter")
def test_a_disk_that_is_nearly_full_is_named(trial: Trial) -> None:
    trial.out = trial.folder / "small"
    with small_disk(trial.out, "size=4m,nr_inodes=500"):
        ended = trial.check()
    here, files_here, there, files_there = sentences(ended)
    assert ended.code == 1
    assert here.startswith(f"here: {trial.out} has 4.0 MiB free here, less than 1 GiB; free some, or choose another")
    assert files_here.startswith(f"here: {trial.out} has room for 4")
    assert " MiB free on " in there
    assert files_there.startswith(f"cpu: {trial.out} has room for 4")


@pytest.mark.slow
def test_a_full_disk_is_named_and_nothing_is_started(trial: Trial) -> None:
    trial.out = trial.folder / "full"
    with small_disk(trial.out, "size=1m"):
        (trial.out / "data").write_bytes(bytes(1 << 20))
        sentence = trial.fault(blocks=0)
    assert sentence == (
        f"here: {trial.out} cannot be written here: the disk is full; choose an --out that is the same folder for all, "
        "with room"
    )


@pytest.mark.slow
def test_a_block_that_never_starts_is_named_with_its_last_words_and_its_logs(trial: Trial) -> None:
    trial.init = "echo there is no such module >&2; exit 1"
    sentence = trial.fault()
    assert "cpu: no worker could start, or none could report: " in sentence
    assert "last said: there is no such module" in sentence
    (logs,) = (trial.folder / "out").iterdir()
    assert f"(logs: {logs})" in sentence
    assert any("there is no such module" in file.read_text() for file in logs.rglob("*.err"))


@pytest.mark.long
@pytest.mark.slow
def test_a_block_that_takes_too_long_is_given_up(trial: Trial) -> None:
    trial.init = "echo loading modules >&2; sleep 600"
    sentence = trial.fault("--wait", "10")
    assert "cpu: no answer within 10 s, for no worker has started; its block is RUNNING" in sentence


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "wait", "said"),
    [
        (
            "import time; time.sleep(600)",
            "20",
            "no answer within 20 s, although a worker runs: something that it reads",
        ),
        ("import os; os.kill(os.getpid(), 9)", "90", "died while it looked about: give it more memory, or mend the"),
    ],
)
def test_a_worker_that_hangs_or_dies_as_it_looks_about_is_named(trial: Trial, code: str, wait: str, said: str) -> None:
    put_package(trial, "z5py", code)
    sentence = trial.fault("--wait", wait)
    assert said in sentence


@pytest.mark.slow
def test_ctrl_c_stops_what_was_started(trial: Trial) -> None:
    trial.init = "sleep 600"
    process = begin(trial.folder, *trial.command())
    wait_until(lambda: trial.started.exists(), 60)
    os.killpg(process.pid, signal.SIGINT)
    ended = finish(trial.folder, process)
    assert ended.code == 4
    assert ended.err.splitlines()[-1] == "volpipe: interrupted; what was started is stopped"
    assert processes_in(trial.folder) == []
    assert list((trial.folder / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no site 'nowhere'"),
        (
            ["slurm_htex"],
            "site slurm_htex cannot be used here: no sbatch on the PATH; give the command on a machine that",
        ),
        (["threads", "nothing.n5"], "nothing.n5"),
        (["threads", "--out", "s3://bucket/out.zarr"], "only folders are tried"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, give: Give, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = give("sites", "check", *arguments)
    assert ended.code == 2
    assert said in ended.err.splitlines()[-1]
    assert "starting" not in ended.err  # said only when all is checked that can be refused
    assert list(tmp_path.iterdir()) == []


def slurm(**arguments: object) -> SlurmProvider:
    return SlurmProvider(partition="main", **arguments)


@pytest.mark.parametrize(
    ("label", "accelerators", "provider", "expected"),
    [
        ("cpu", 0, LocalProvider(), Gpus.NONE),
        ("gpus", 0, LocalProvider(), Gpus.NONE),
        ("cpu", 2, LocalProvider(), Gpus.NEEDED),
        ("gpu", 0, LocalProvider(), Gpus.NEEDED),
        ("gpu_big", 0, LocalProvider(), Gpus.NEEDED),
        ("gpu", 0, slurm(), Gpus.WAIVED),
        ("gpu", 0, slurm(gpus_per_node=1), Gpus.NEEDED),
    ],
)
def test_an_executor_is_meant_to_have_gpus_by_what_its_site_says(
    label: str, accelerators: int, provider: LocalProvider | SlurmProvider, expected: Gpus
) -> None:
    executor = HighThroughputExecutor(
        label=label, address="127.0.0.1", available_accelerators=accelerators, provider=provider, encrypted=False
    )
    assert gpus_of(executor) is expected


def test_threads_are_meant_to_have_gpus_by_their_label() -> None:
    assert [gpus_of(ThreadPoolExecutor(label=label)) for label in ("gpu", "mine")] == [Gpus.NEEDED, Gpus.NONE]


WELL: NodeFacts = {
    "host": "n1", "python": "3.11.7", "executable": "/bin/python", "broken": {},
    "versions": {"volpipe": "1.2", "torch": "2.13.0+cpu"},
    "code": "c", "gpus": [], "gpu_error": "none", "visible": None, "shm_bytes": 1, "folder_error": "",
    "free_bytes": 1 << 30, "free_files": 1000, "voxels": "v", "volume_error": "", "seconds": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("there", "faults", "notes"),
    [
        ({}, 0, 0),
        ({"python": "3.11.9"}, 0, 0),
        ({"python": "3.12.7"}, 1, 0),
        ({"versions": {"volpipe": "1.2", "torch": "2.13.0+cu126"}}, 0, 0),
        ({"versions": {"volpipe": "1.2", "torch": "2.13.1+cu126"}}, 0, 1),
        ({"versions": {"volpipe": "1.2", "torch": "2.12.0"}}, 1, 0),
        ({"versions": {"volpipe": "1.2.1", "torch": "2.13.0"}}, 1, 0),
        ({"code": "other"}, 1, 0),
        ({"free_bytes": (1 << 30) - 1}, 1, 0),
        ({"free_files": 999}, 1, 0),
        ({"free_bytes": None, "free_files": None}, 0, 0),
        ({"voxels": "w"}, 1, 0),
        ({"voxels": "", "volume_error": "gone"}, 1, 0),
        ({"folder_error": "gone", "free_bytes": 0}, 1, 0),
    ],
)
def test_what_fails_a_run_is_a_fault_and_a_difference_a_note(there: dict[str, object], faults: int, notes: int) -> None:
    facts: NodeFacts = {**WELL, **there}  # type: ignore[typeddict-item]
    found = Checked("/out", "in.n5", WELL, [Answer("cpu", Gpus.NONE, facts)]).findings()
    assert sum(finding.is_fault for finding in found) == faults
    assert sum(not finding.is_fault for finding in found) == notes
