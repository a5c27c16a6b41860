"""On a real Slurm of this machine: whatever dies, a run ends with an undisturbed one's bytes, or says what happened.

Afterwards no job and no process is left. Longer ones are in scripts/cluster.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from command import begin, finish, processes_in, wait_until
from conftest import ROOT
from disturbance import NUM_BLOCKS, Slow
from slurm import Slurm, kill, lacking, running_slurm
from slurm_runs import (
    busy_job,
    cancel_a_job,
    check_complete,
    check_gone,
    kill_a_pool,
    kill_a_worker,
    kill_an_interchange,
    kill_slurmd,
    kill_the_driver,
    lose_a_node,
    new_slurm,
    on_slurm,
    pools,
    press_ctrl_c,
)
from volumes import fingerprint

from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.blockwise.journal import read_records
from volpipe.runs.worker import RESULTS
from volpipe.workflow.roster import Roster, Worker
from volpipe.workflow.status import StatusReader

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
STAGES = {"calibrate", "factor", "infer", "reassemble", "discard windows", "discard sum"}  # of a run's tasks


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    yield from new_slurm(tmp_path_factory, accounting=False)


@pytest.fixture(scope="module")
def accounting_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    yield from new_slurm(tmp_path_factory, accounting=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all runs of one volume: an output says whence its voxels came."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> str:
    """The fingerprint of what one go makes in threads."""
    slow = Slow(place / "undisturbed", seconds=0, site="threads")
    ended = finish(slow.folder, begin(slow.folder, *slow.command))
    assert ended.code == 0, ended.err
    return fingerprint(slow.out)


@pytest.fixture(autouse=True)
def _no_process_outlives_a_test(place: Path) -> Iterator[None]:
    yield
    kill(processes_in(place))


# The other site runs in an array of jobs below.
@pytest.mark.usefixtures("_pools_start_anew")
@pytest.mark.parametrize("site", ["slurm_htex", pytest.param("slurm_single", marks=pytest.mark.long)])
def test_a_run_on_slurm_gives_the_bytes_of_a_run_here(place: Path, slurm: Slurm, undisturbed: str, site: str) -> None:
    slow = on_slurm(place / site, slurm, 0, site)
    slow.begin()
    check_complete(slow, slurm, undisturbed)
    assert "failed (attempt" not in (slow.run / "volpipe.log").read_text()


def disturbed(folder: Path, slurm: Slurm, disturb: Callable[[Slow, Slurm], None]) -> Slow:
    """Return a run that was disturbed once its net had seen some windows."""
    slow = on_slurm(folder, slurm)
    slow.begin()
    slow.wait_for_calls(20)
    disturb(slow, slurm)
    return slow


@pytest.mark.long
def test_a_run_survives_the_loss_of_a_worker_a_pool_and_a_job(place: Path, slurm: Slurm, undisturbed: str) -> None:
    slow = on_slurm(place / "losses", slurm, 0.3)
    log, journal = slow.run / "volpipe.log", slow.run / "journal.jsonl"
    slow.begin()
    for disturb, error in ((kill_a_worker, "WorkerLost"), (kill_a_pool, "ManagerLost"), (cancel_a_job, "ManagerLost")):
        slow.wait_for_calls(len(slow.calls(1)) + 10)
        known = len(log.read_text())
        disturb(slow, slurm)
        wait_until(lambda: error in log.read_text()[known:], 60)  # noqa: B023
        left = len(journal.read_bytes().splitlines()) + 20
        wait_until(lambda: len(journal.read_bytes().splitlines()) >= left, 60)  # noqa: B023  # else one unit loses all
    check_complete(slow, slurm, undisturbed)


def elements(slurm: Slurm, *states: str) -> list[str]:
    """Return the jobs of arrays in one of `states`, as Slurm names them: 17_0."""
    listed = slurm.do("squeue", "--noheader", "--array", f"--states={','.join(states)}", "--format=%i").split()
    return [job for job in listed if "_" in job]


# A block of the volume is a task, however short.
UNBUNDLED = """
from volpipe.blockwise import stage
from volpipe.configs.slurm_single import Settings, config
stage.BUNDLE_SECONDS = stage.LEAST_SECONDS = 0
"""
ARRAY = {"ARRAY": "1", "MAX_JOBS": "12"}  # four more than there are cores


def in_an_array(folder: Path, slurm: Slurm) -> Slow:
    """Return a run whose jobs of workers, but the first, are one array of which some wait, once its net has run."""
    slow = on_slurm(folder, slurm, 0.6, "site.py", **ARRAY)
    (slow.folder / "site.py").write_text(UNBUNDLED)
    slow.begin()
    wait_until(lambda: len(elements(slurm, "RUNNING")) >= 4 and elements(slurm, "PENDING"), 120)
    slow.wait_for_calls(20)
    assert len({job.partition("_")[0] for job in elements(slurm, "RUNNING", "PENDING")}) == 1
    return slow


@pytest.mark.long
def test_workers_in_an_array_of_jobs_give_the_bytes_of_a_run_here(place: Path, slurm: Slurm, undisturbed: str) -> None:
    slow = on_slurm(place / "in-an-array", slurm, 0.05, "slurm_single", ARRAY="1", MAX_JOBS="4")
    slow.begin()
    wait_until(lambda: len(elements(slurm, "RUNNING")) == 3, 60)
    check_complete(slow, slurm, undisturbed)
    assert "failed (attempt" not in (slow.run / "volpipe.log").read_text()


@pytest.mark.long
def test_an_array_survives_the_loss_of_jobs_that_run_or_wait(place: Path, slurm: Slurm, undisturbed: str) -> None:
    slow = in_an_array(place / "array", slurm)
    killed, waiting = elements(slurm, "RUNNING")[0], elements(slurm, "PENDING")[0]
    slurm.do("scancel", "--signal=KILL", "--full", killed)
    slurm.do("scancel", waiting)
    slow.wait_for_calls(100)
    press_ctrl_c(slow, slurm)
    assert slow.finish().code == INTERRUPTED
    check_gone(slow, slurm)
    assert killed in elements(slurm, "FAILED", "CANCELLED")
    assert len(slow.marked()) < NUM_BLOCKS
    slow.begin()
    check_complete(slow, slurm, undisturbed)


@pytest.mark.long
def test_an_array_survives_the_loss_of_an_element_where_slurm_remembers_failed_jobs(
    place: Path, accounting_slurm: Slurm, undisturbed: str
) -> None:
    """Accounting forgets an element that was cancelled while it waited: it must not be waited for."""
    slow = in_an_array(place / "accounted-array", accounting_slurm)
    kill(pools(slow)[:1])
    accounting_slurm.do("scancel", *elements(accounting_slurm, "PENDING"))
    check_complete(slow, accounting_slurm, undisturbed)
    assert "ManagerLost" in (slow.run / "volpipe.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("disturb", [kill_the_driver, kill_an_interchange])
def test_an_array_ends_with_its_driver_or_interchange_and_another_goes_on(
    place: Path, slurm: Slurm, undisturbed: str, disturb: Callable[[Slow, Slurm], None]
) -> None:
    slow = in_an_array(place / f"array-{disturb.__name__}", slurm)
    disturb(slow, slurm)
    assert slow.finish().code == (-signal.SIGKILL if disturb is kill_the_driver else 1)
    check_gone(slow, slurm)
    slow.begin()
    check_complete(slow, slurm, undisturbed)


@pytest.mark.long
def test_a_run_survives_the_loss_of_a_node(place: Path, slurm: Slurm, undisturbed: str) -> None:
    slow = disturbed(place / "node", slurm, lose_a_node)
    try:
        ended = slow.finish(240)
    finally:
        slurm.start_node("n1")
    assert ended.code == 0, ended.err
    assert fingerprint(slow.out) == undisturbed
    check_gone(slow, slurm)
    assert "ManagerLost" in (slow.run / "volpipe.log").read_text()


@pytest.mark.long
def test_a_run_survives_a_slurmd_that_dies_while_its_job_lives_on(place: Path, slurm: Slurm, undisturbed: str) -> None:
    slow = on_slurm(place / "slurmd", slurm, 0.4)
    slow.begin()
    slow.wait_for_calls(20)
    kill_slurmd(slow, slurm)
    try:
        ended = slow.finish(280)
    finally:
        for node in ("n1", "n2"):
            if not slurm.is_alive(node):
                slurm.start_node(node)
    assert ended.code == 0, ended.err
    assert fingerprint(slow.out) == undisturbed
    check_gone(slow, slurm)
    assert slurm.jobs("NODE_FAIL")


@pytest.mark.long
def test_a_run_goes_on_after_its_jobs_made_room_for_urgent_ones(place: Path, slurm: Slurm, undisturbed: str) -> None:
    slow = on_slurm(place / "preempted", slurm, 0.5)
    slow.begin()
    slow.wait_for_calls(20)
    job = busy_job(slurm)
    slurm.do("sbatch", "--partition=urgent", "--exclusive", "--nodes=2", f"--output={place}/urgent", "--wrap=sleep 5")
    wait_until(lambda: job in slurm.jobs("PREEMPTED"), 60)
    check_complete(slow, slurm, undisturbed)
    assert "ManagerLost" in (slow.run / "volpipe.log").read_text()


@pytest.mark.long
def test_a_driver_that_slurm_requeues_goes_on(place: Path, slurm: Slurm, undisturbed: str) -> None:
    slow = on_slurm(place / "requeued", slurm)
    command = ["slurm", "script", "--time", "1:00:00", "--cores", "1", "--mem-gb", "1", *slow.command[1:]]
    printed = finish(slow.folder, begin(slow.folder, *command, **slow.environment))
    (slow.folder / "script.sh").write_text(printed.out)
    given = [f"--chdir={slow.folder}", f"--export=PATH,PYTHONPATH={ROOT}", str(slow.folder / "script.sh")]
    job = slurm.do("sbatch", "--parsable", *given).strip()
    wait_until(slow.marked, 120)
    slurm.do("scontrol", "requeue", job)
    wait_until(lambda: job in slurm.jobs("PENDING"), 30)
    wait_until(lambda: slurm.jobs() == [job], 60)  # those of the workers end
    marked = slow.marked()
    assert len(marked) < NUM_BLOCKS
    slurm.do("scontrol", "update", f"JobId={job}", "StartTime=now")  # else two minutes later
    check_gone(slow, slurm, 150)
    (said,) = slow.folder.glob("volpipe-*.log")
    assert said.read_text().splitlines()[-1] == f"wrote {slow.out}"
    assert fingerprint(slow.out) == undisturbed


@pytest.mark.long
def test_a_controller_that_is_full_is_waited_for(
    place: Path, tmp_path_factory: pytest.TempPathFactory, undisturbed: str
) -> None:
    if missing := lacking():
        pytest.skip(f"no {', '.join(missing)} here; `make test` installs them where it may")
    with running_slurm(tmp_path_factory.mktemp("full"), max_jobs=2, min_job_age=2) as slurm:
        held = slurm.do("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
        slow = on_slurm(place / "full", slurm, 0, "slurm_single")
        slow.begin()
        error = slow.folder / "err.txt"
        wait_until(lambda: "gets no more blocks for now, and waits: " in error.read_text(), 60)
        assert "temporarily unable to accept job" in error.read_text()
        slurm.do("scancel", held)
        check_complete(slow, slurm, undisturbed)


@pytest.mark.long
def test_a_limit_of_jobs_leaves_a_run_those_that_it_has_and_an_account_without_rights_is_named(
    place: Path, accounting_slurm: Slurm, undisturbed: str
) -> None:
    user = psutil.Process().username()
    slow = on_slurm(place / "no-account", accounting_slurm, ACCOUNT="others")
    slow.begin()
    ended = slow.finish()
    assert ended.code == 2
    assert "cannot start workers: " in ended.err.splitlines()[-1]
    assert "Invalid account or account/partition combination specified" in ended.err.splitlines()[-1]
    accounting_slurm.do("sacctmgr", "-i", "modify", "user", user, "set", "MaxSubmitJobs=1")
    try:
        slow = on_slurm(place / "limited", accounting_slurm, 0.02, "slurm_single")
        slow.begin()
        check_complete(slow, accounting_slurm, undisturbed)
    finally:
        accounting_slurm.do("sacctmgr", "-i", "modify", "user", user, "set", "MaxSubmitJobs=-1")
    said = (slow.folder / "err.txt").read_text()
    assert said.count("executor slurm gets no more blocks for now, and continues with the 1 that it has: ") == 1
    assert "AssocMaxSubmitJobLimit" in said


@pytest.mark.long
def test_a_limit_of_a_qos_leaves_a_run_one_job(place: Path, accounting_slurm: Slurm, undisturbed: str) -> None:
    """Slurm takes jobs beyond such a limit, and lets them wait."""
    qos = ("sacctmgr", "-i", "modify", "qos", "normal", "set")
    accounting_slurm.do(*qos, "MaxJobsPerUser=1")
    try:
        slow = on_slurm(place / "qos", accounting_slurm, 0.2, "site.py", MAX_JOBS="3")
        (slow.folder / "site.py").write_text(UNBUNDLED)
        slow.begin()
        reasons = ("squeue", "--noheader", "--states=PENDING", "--format=%r")
        wait_until(lambda: "QOSMaxJobsPerUserLimit" in accounting_slurm.do(*reasons).split(), 60)
        assert len(accounting_slurm.jobs("RUNNING")) == 1
        check_complete(slow, accounting_slurm, undisturbed)
    finally:
        accounting_slurm.do(*qos, "MaxJobsPerUser=-1")


@pytest.mark.long
def test_a_run_whose_interchange_dies_ends_and_goes_on(place: Path, slurm: Slurm, undisturbed: str) -> None:
    slow = disturbed(place / "cut", slurm, kill_an_interchange)
    began = time.monotonic()
    ended = slow.finish()
    assert time.monotonic() - began < 60
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("volpipe: the interchange of executor ")
    check_gone(slow, slurm)
    slow.begin()
    check_complete(slow, slurm, undisturbed)


@pytest.mark.long
def test_the_jobs_of_a_killed_driver_end_and_another_goes_on(place: Path, slurm: Slurm, undisturbed: str) -> None:
    slow = disturbed(place / "killed", slurm, kill_the_driver)
    assert slow.finish().code == -signal.SIGKILL
    check_gone(slow, slurm)
    marked = slow.marked()
    slow.begin()
    check_complete(slow, slurm, undisturbed)
    assert not marked & slow.computed(2).keys()


UNDRAINED = """
from volpipe.apps.htex import executor
from volpipe.configs.slurm_single import Settings, config
executor.drain_period = lambda *arguments: 1000
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_tasks_that_the_walltime_cut_off_are_done_by_the_next_job(place: Path, slurm: Slurm, undisturbed: str) -> None:
    """A drain that would begin after the walltime: Slurm ends the jobs, up to half a minute late."""
    late = {"WALLTIME": "00:01:00", "LONGEST_TASK": "1", "START_SECONDS": "1", "CORES": "2", "MEM_GB": "2"}
    slow = on_slurm(place / "walltime", slurm, 1.0, "site.py", MAX_JOBS="1", **late)
    (slow.folder / "site.py").write_text(UNDRAINED)
    slow.begin()
    ended = slow.finish(500)
    assert ended.code == 0, ended.err
    assert fingerprint(slow.out) == undisturbed
    check_gone(slow, slurm)
    assert slurm.jobs("TIMEOUT")
    assert "ManagerLost" in (slow.run / "volpipe.log").read_text()


@pytest.mark.long
def test_the_workers_of_jobs_are_seen_with_what_they_take(place: Path, slurm: Slurm) -> None:
    slow = on_slurm(place / "watched", slurm, 0.2)
    slow.begin()
    observer, roster = StatusReader(str(slow.out)), Roster()

    def workers() -> list[Worker]:
        status = observer.look() if (slow.run / "plan.json").is_file() else None
        return [] if status is None else [each for each in roster.look(status) if each.is_alive and each.tasks]

    wait_until(lambda: len(workers()) == 2, 120)
    seen, pools_of_jobs = workers(), pools(slow)
    assert len({worker.note.pid for worker in seen}) == 2
    for worker in seen:
        process = psutil.Process(worker.note.pid)
        assert set(process.parents()) & set(pools_of_jobs)
        assert worker.note.memory_bytes == pytest.approx(process.memory_info().rss, rel=0.5)
        assert 0 <= worker.note.cpu_percent < 100 * psutil.cpu_count() + 100
        assert {task.note.stage for task in worker.tasks} <= STAGES
    press_ctrl_c(slow, slurm)
    slow.finish()
    check_gone(slow, slurm)
    assert not (slow.run / "beats").exists()


@pytest.mark.long
def test_jobs_that_slurm_refuses_end_the_run_in_its_words(place: Path, slurm: Slurm) -> None:
    slow = on_slurm(place / "refused", slurm, PARTITION="nowhere")
    slow.begin()
    began = time.monotonic()
    ended = slow.finish()
    assert time.monotonic() - began < 60
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].startswith("volpipe: executor cpu cannot start workers: ")
    assert "Invalid partition name specified" in ended.err.splitlines()[-1]
    check_gone(slow, slurm)
    assert (slow.out / "zarr.json").is_file()
    slow.mode = "streamed"  # another recipe, which needs no --fresh
    slow.begin()
    assert "Invalid partition name specified" in slow.finish().err.splitlines()[-1]
    assert json.loads((slow.run / "plan.json").read_text())["mode"] == "streamed"


@pytest.mark.long
def test_ctrl_c_lets_tasks_finish_and_cancels_the_jobs(place: Path, slurm: Slurm) -> None:
    slow = disturbed(place / "stopped", slurm, press_ctrl_c)
    ended = slow.finish()
    assert ended.code == INTERRUPTED
    assert ended.err.splitlines()[-1] == "volpipe: interrupted; run the same command again to continue"
    check_gone(slow, slurm)
    assert slow.marked() == slow.computed(1).keys()  # nothing that was begun is lost
    assert len(slow.marked()) < NUM_BLOCKS


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_hundred_tasks_over_six_jobs_that_drain_lose_none(place: Path, slurm: Slurm, undisturbed: str) -> None:
    """Of a minute, 25 s are left for tasks to begin; those of this run take 137 s together."""
    times = {"WALLTIME": "00:01:00", "LONGEST_TASK": "20", "START_SECONDS": "15"}
    slow = on_slurm(place / "drained", slurm, 0.65, "site.py", MAX_JOBS="1", **times)
    (slow.folder / "site.py").write_text(UNBUNDLED)
    cut_off = set(slurm.jobs("TIMEOUT"))
    slow.begin()
    ended = slow.finish(900)
    assert ended.code == 0, ended.err
    assert fingerprint(slow.out) == undisturbed
    check_gone(slow, slurm)
    assert "failed (attempt" not in (slow.run / "volpipe.log").read_text()
    tasks = [record for record in read_records(slow.run / "journal.jsonl", RESULTS) if record.stage == "infer"]
    assert len(tasks) == sum(len(record.done) for record in tasks) == NUM_BLOCKS >= 100
    assert len({record.usage.pid for record in tasks}) >= 6
    assert set(slurm.jobs("TIMEOUT")) == cut_off
