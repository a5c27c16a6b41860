"""The script of a driver's job: the command line as it was given, whatever is in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command import Give
from parsl.jobs.states import JobState
from volumes import noise, write_volume

from volpipe.apps.slurm.driver_script import DriverJob, driver_script
from volpipe.apps.slurm.provider import STATE_OF, SlurmJobs
from volpipe.cli import app

ODD = ["--set", "net.options={a='it''s'}", "-o", "x y.zarr", "$HOME/*.n5"]


def test_the_script_gives_the_command_as_it_was_given(tmp_path: Path) -> None:
    """Run by a shell, with a Python in whose place stands what prints its arguments."""
    folder = tmp_path / "a 'folder"
    folder.mkdir()
    environment = {"VOLPIPE_WORKERS": "3 $x", "VOLPIPE_SLURM_ADDRESS": "10.0.0.1", "SECRET": "s"}
    script = driver_script(DriverJob(), ODD, folder, environment)
    start, command = script.rstrip("\n").rsplit("\n", 1)
    assert command.startswith("exec ")
    arguments = command.removeprefix("exec ").partition(" ")[2]
    shell = (
        f"{start}\npwd\necho $VOLPIPE_WORKERS\necho ${{!SLURM_@}} $VOLPIPE_SLURM_ADDRESS\nprintf '%s\\n' {arguments}"
    )
    ended = subprocess.run(
        ["bash", "-c", shell], env={"SLURM_JOB_ID": "3", "SLURM_CONF": "c"}, capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [str(folder), "3 $x", "SLURM_CONF", "-m", "volpipe", "run", *ODD]
    assert "SECRET" not in script


def test_a_job_whose_node_lacks_the_folder_ends(tmp_path: Path) -> None:
    """Else outputs without a folder of their own would go to wherever the job is."""
    script = driver_script(DriverJob(), ["in.n5"], tmp_path / "gone", {})
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "gone: No such file or directory" in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_the_script_asks_for_what_it_was_told() -> None:
    job = DriverJob("2-00:00:00", 1, 8, "main", None)
    lines = driver_script(job, ["in.n5"], Path("/here"), {}).splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = {line for line in lines if line.startswith("#SBATCH")}
    assert asked >= {f"#SBATCH --{each}" for each in ("time=2-00:00:00", "cpus-per-task=1", "mem=8G", "partition=main")}
    assert not any("account" in line for line in asked)


def test_what_a_run_would_refuse_is_refused_when_the_script_is_made(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise((8, 8, 8)))
    assert give("slurm", "script", "--config", "slurm_htex", "in.n5").code == 0
    ended = give("slurm", "script", "--fesh", "in.n5")
    assert (ended.code, ended.out) == (2, "")
    assert "--fesh" in ended.err
    assert "VOLUME" in give("slurm", "script", "--fresh").err.upper()
    ended = give("slurm", "script", "--time", "1h", "in.n5")
    assert ended.err == "volpipe: --time '1h': write HH:MM:SS or D-HH:MM:SS, such as 12:00:00 or 2-00:00:00\n"


@pytest.mark.parametrize("command", ["plan", "plan --quick", "run", "slurm script", "net identity", "sites check"])
@pytest.mark.parametrize("site", ["slurm_htex", "k8s_htex"])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"CORS": "8"}, "no setting 'cors'"),
        ({"MAX_JOBS": "many", "MAX_PODS": "many"}, "'many' is no whole number"),
        ({"WALLTIME": "4h", "CLAIMS": "scratch"}, "write "),
    ],
)
def test_wrong_settings_are_refused_where_there_is_no_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, give: Give,
    command: str, site: str, settings: dict[str, str], sentence: str,
) -> None:  # fmt: skip
    """Where sbatch or a cluster is absent, a quick plan only warned of that, and a script was printed."""
    write_volume(tmp_path / "in.n5", noise((8, 8, 8)))
    kind = "SLURM" if site.startswith("slurm") else "K8S"
    given = {"PARTITION": "cpu"} if kind == "SLURM" else {"IMAGE": "i", "NAMESPACE": "n", "CLAIMS": "c:/c"}
    known = {"SLURM": ("CORS", "MAX_JOBS", "WALLTIME"), "K8S": ("CORS", "MAX_PODS", "CLAIMS")}[kind]
    for name, value in (given | {key: settings[key] for key in known if key in settings}).items():
        monkeypatch.setenv(f"VOLPIPE_{kind}_{name}", value)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    words = command.split()
    place = [site] if words == ["sites", "check"] else ["--config", site]
    ended = (
        give(*words, *([] if words[0] == "net" else ["in.n5"]), *place) if words[0] != "sites" else give(*words, site)
    )
    assert (ended.code, ended.out) == (2, "")
    assert sentence in ended.err


def test_where_mem_is_refused_none_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise((8, 8, 8)))
    monkeypatch.setenv("VOLPIPE_SLURM_PARTITION", "cpu")
    words = ("slurm", "script", "--config", "slurm_htex", "in.n5")
    assert "#SBATCH --mem=4G\n" in give(*words).out
    ended = give(*words[:2], "--mem-gb", "0", *words[2:])
    assert ended.code == 0 and "--mem" not in ended.out
    monkeypatch.setenv("VOLPIPE_SLURM_MEM_GB", "0")
    ended = give(*words)
    assert ended.code == 0 and "--mem" not in ended.out
    assert "#SBATCH --mem=2G\n" in give(*words[:2], "--mem-gb", "2", *words[2:]).out


def test_a_command_that_a_script_gives_keeps_its_own_help(tmp_path: Path, give: Give) -> None:
    """Its options were read without the settings of all commands, and it kept what it was read with: no -h."""
    write_volume(tmp_path / "in.n5", noise((8, 8, 8)))
    app._commands.cache_clear()
    assert give("slurm", "script", "--config", "slurm_htex", "in.n5").code == 0
    assert "-h, --help" in give("run", "-h").out
    assert "Try 'volpipe run -h' for help." in give("slurm", "script", "--fesh", "in.n5").err


def test_the_driver_has_the_account_of_its_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, give: Give) -> None:
    """Where every job needs an account, Slurm refused the script of a site that had one."""
    write_volume(tmp_path / "in.n5", noise((8, 8, 8)))
    (tmp_path / "ours.toml").write_text('partition = "gpu"\naccount = "lab"\n')
    words = ("slurm", "script", "--config", "slurm_htex", "in.n5")
    assert "--account" not in give(*words).out
    monkeypatch.setenv("VOLPIPE_SITE", str(tmp_path / "ours.toml"))
    assert "#SBATCH --account=lab\n" in give(*words).out
    assert "#SBATCH --account=other\n" in give(*words[:2], "--account", "other", *words[2:]).out
    monkeypatch.setenv("VOLPIPE_SLURM_ACCOUNT", "third")
    assert "#SBATCH --account=third\n" in give(*words).out


class Scripted(SlurmJobs):
    """Jobs of which Slurm says what a test tells it to."""

    says: tuple[int, str, str] = (1, "", "no accounting")

    def execute_wait(self, cmd: str, timeout: int | None = None) -> tuple[int, str, str]:
        return self.says


def states_after(*says: tuple[int, str, str], accounting: bool) -> list[JobState]:
    """Return the states of job 7 after each of what Slurm says."""
    Scripted.says = (0 if accounting else 1, "", "")
    jobs = Scripted(partition="main", poll_seconds=3)
    assert jobs.has_accounting == accounting
    assert jobs.status_polling_interval == 3
    Scripted.says = (0, "Submitted batch job 7", "")
    jobs.script_dir = "/tmp"
    jobs._write_submit_script = lambda *arguments: None  # type: ignore[method-assign]
    assert jobs.submit("true", 1) == "7"
    found = []
    for said in says:
        Scripted.says = said
        found.append(jobs.status(["7"])[0].state)
    return found


@pytest.mark.parametrize("accounting", [True, False])
@pytest.mark.parametrize(
    ("word", "state"), [("CANCELLED by 0", "CANCELLED"), ("NODE_FAIL", "FAILED"), ("TIMEOUT", "TIMEOUT")]
)
def test_a_job_that_ended_keeps_its_state(word: str, state: str, accounting: bool) -> None:
    says = [(0, "7|PENDING\n", ""), (0, "7|RUNNING\n8|FAILED\n", ""), (0, f"7|{word}\n", ""), (0, "", "")]
    expected = [JobState.PENDING, JobState.RUNNING, JobState[state], JobState[state]]
    assert states_after(*says, accounting=accounting) == expected


def test_a_job_that_slurm_forgot_has_ended_and_a_silent_slurm_says_nothing() -> None:
    running = (0, "7|RUNNING", "")
    forgotten = (1, "", "slurm_load_jobs error: Invalid job id specified")
    assert states_after(running, forgotten, accounting=False) == [JobState.RUNNING, JobState.COMPLETED]
    assert states_after(running, (0, "", ""), accounting=False)[-1] is JobState.COMPLETED
    assert (
        states_after(running, (1, "", "Unable to contact slurm controller"), accounting=False)[-1] is JobState.RUNNING
    )
    assert states_after((0, "", ""), running, accounting=True) == [JobState.PENDING, JobState.RUNNING]


def test_every_word_has_one_state() -> None:
    assert len(STATE_OF) > 20
    assert STATE_OF["OUT_OF_MEMORY"] is JobState.FAILED
    assert STATE_OF["COMPLETING"] is JobState.RUNNING
