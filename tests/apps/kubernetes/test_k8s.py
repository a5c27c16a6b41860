"""Runs on pods, disturbed in every way: the bytes of an undisturbed run, or a sentence soon; and nothing is left.

The cluster is a double that runs pods as processes; driver, client, provider and executor are the real ones.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, Refused, wait_for_pods
from command import Ended, begin, finish, processes_in, sentences, wait_until
from disturbance import NUM_BLOCKS, Slow, blocks_by_window
from pods import HARMS, SlowPods, cluster_for
from real_cluster import RealCluster, find_cluster, folder_on
from volumes import fingerprint

from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.workflow.roster import Roster
from volpipe.workflow.status import StatusReader

AnyCluster = Cluster | RealCluster

pytestmark = pytest.mark.slow

SOON = 60.0  # seconds within which a run that cannot complete ends
SHORTLY = 20.0  # seconds within which nothing is left of a driver that was killed
ONE_CORE = {"VOLPIPE_K8S_CORES": "1"}  # where a second worker would tell nothing more


@pytest.fixture(scope="module", params=["double", pytest.param("real", marks=pytest.mark.k8s)])
def real(request: pytest.FixtureRequest) -> RealCluster | None:
    """The user's own cluster, if the same is to be done there; None for the double."""
    return find_cluster() if request.param == "real" else None


@pytest.fixture(scope="module")
def base(real: RealCluster | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all runs here: outputs name their input, which is one for all."""
    if real is None:
        yield tmp_path_factory.mktemp("k8s")
        return
    folder = folder_on(real)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def undisturbed(base: Path) -> str:
    """The fingerprint of what a run on this machine makes, without pods."""
    slow = Slow(base / "undisturbed", seconds=0, site="threads")
    ended = finish(slow.folder, begin(slow.folder, *slow.command))
    assert ended.code == 0, ended.err
    return fingerprint(slow.out)


@pytest.fixture
def cluster(real: RealCluster | None, base: Path, tmp_path: Path) -> Iterator[AnyCluster]:
    if real is not None:
        yield real
        kill_all(base)  # drivers, which would replace what is deleted
        real.delete_pods()
        return
    with cluster_for(tmp_path) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _no_process_outlives_a_test(base: Path) -> Iterator[None]:
    yield
    kill_all(base)


def kill_all(base: Path) -> None:
    for folder in base.iterdir():
        for process in processes_in(folder):
            with contextlib.suppress(psutil.NoSuchProcess):  # some end with those before them
                process.kill()


def finish_well(slow: SlowPods, undisturbed: str) -> None:
    """Wait until the run is complete, and see that its bytes are right and that nothing is left."""
    slow.hurry()
    ended = slow.finish()
    assert ended.code == 0, ended.err
    assert fingerprint(slow.out) == undisturbed
    wait_until(lambda: not slow.left(), SHORTLY)
    assert not list(slow.run.glob("tensors.*"))


def finish_badly(slow: SlowPods) -> tuple[Ended, str]:
    """Wait until the run ends, soon, and return how, and its last sentence; see that nothing is left."""
    began = time.monotonic()
    ended = slow.finish()
    assert time.monotonic() - began < SOON
    assert ended.code in (1, 2, INTERRUPTED)
    assert "Traceback" not in ended.err
    wait_until(lambda: not slow.left(), SHORTLY)
    return ended, ended.err.splitlines()[-1]


@pytest.mark.usefixtures("_pools_start_anew")
def test_pods_of_two_kinds_make_the_bytes_of_this_machine(base: Path, cluster: AnyCluster, undisturbed: str) -> None:
    one_each = ONE_CORE | {"VOLPIPE_K8S_GPUS": "1"}
    slow = SlowPods(base / "plain", seconds=0, cluster=cluster, settings=one_each)
    slow.begin()
    names = wait_for_pods(cluster, "Running", 2, SOON)
    assert sorted(name.rpartition(".")[0] for name in names) == ["parsl.cpu.block-0", "parsl.gpu.block-0"]
    finish_well(slow, undisturbed)
    if isinstance(cluster, Cluster):
        assert {verb for verb, _, _ in cluster.requests} == {"create", "list", "delete"}


OFTEN = ("deleted", "evicted", "manager killed")


@pytest.mark.long
def test_a_run_outlives_the_loss_of_one_pod_after_another(base: Path, cluster: AnyCluster, undisturbed: str) -> None:
    for harm in OFTEN:
        cluster.check(HARMS[harm].method)
    slow = SlowPods(base / "often", seconds=0.2, cluster=cluster)
    log, observer, roster = slow.run / "volpipe.log", StatusReader(str(slow.out)), Roster()
    slow.begin()
    for harm in OFTEN:
        slow.wait_for_calls(len(slow.calls(1)) + 10)
        wait_until(lambda: any(each.is_alive and each.tasks for each in roster.look(observer.look())), SOON)
        (name,) = cluster.names("Running")
        known = len(log.read_text())
        getattr(cluster, HARMS[harm].method)(name)
        wait_until(lambda: re.search(HARMS[harm].said, log.read_text()[known:]), SOON)  # noqa: B023
        wait_until(lambda: name not in cluster.names("Running"), SOON)  # noqa: B023
    finish_well(slow, undisturbed)
    assert slow.computed(1).total() >= 10 * len(OFTEN)


@pytest.mark.long
@pytest.mark.parametrize("harm", [harm for harm in HARMS if harm not in OFTEN])
def test_a_run_goes_on_whatever_happens_to_a_pod(base: Path, cluster: AnyCluster, undisturbed: str, harm: str) -> None:
    method = HARMS[harm].method
    cluster.check(method)
    slow = SlowPods(base / harm.replace(" ", "-"), seconds=0.03, cluster=cluster)
    slow.begin()
    slow.wait_for_calls(20)
    (name,) = cluster.names("Running")
    tells = cluster.tells(method, name)
    getattr(cluster, method)(name)
    finish_well(slow, undisturbed)
    assert slow.computed(1).total() > 20
    assert not tells or re.search(HARMS[harm].said, (slow.run / "volpipe.log").read_text())


@pytest.mark.long
def test_a_run_goes_on_with_the_pods_that_a_quota_leaves_it(base: Path, cluster: AnyCluster, undisturbed: str) -> None:
    if not isinstance(cluster, Cluster):
        pytest.skip("no quota is set on a real cluster, nor is its API server stopped")
    slow = SlowPods(base / "few", seconds=0.05, cluster=cluster, settings={"VOLPIPE_K8S_MAX_PODS": "4"})
    cluster.quota = 1
    slow.begin()
    slow.wait_for_calls(20)
    wait_until(lambda: "exceeded quota: few" in (slow.folder / "err.txt").read_text(), SOON)
    cluster.is_silent = True
    slow.wait_for_calls(len(slow.calls(1)) + 60)
    assert slow.process is not None and slow.process.poll() is None
    cluster.is_silent = False
    finish_well(slow, undisturbed)
    said = (slow.folder / "err.txt").read_text()
    assert said.count("executor cpu gets no more blocks for now, and continues with the 1 that it has: ") == 1
    assert "exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1" in said
    refused = [verb for verb, _, _ in cluster.requests].count("create") - len(cluster.asked)
    assert 1 <= refused < 8  # it asks ever less often


# A block of the volume is a task, however short.
UNBUNDLED = "from volpipe.blockwise import stage\nstage.BUNDLE_SECONDS = stage.LEAST_SECONDS = 0\n"
LOSS_SECONDS = 12.0  # stands for a minute: the heartbeat's threshold is 8 s here, and 60 s there


@pytest.mark.long
def test_pods_lost_again_and_again_cost_a_task_each_at_most(base: Path, cluster: AnyCluster, undisturbed: str) -> None:
    if not isinstance(cluster, Cluster):
        pytest.skip("pods of a real cluster are not deleted all the time")
    four = {"VOLPIPE_K8S_MAX_PODS": "4", "VOLPIPE_K8S_CORES": "1"}
    slow = SlowPods(base / "churn", seconds=0.5, cluster=cluster, settings=four)
    with (slow.folder / "site.py").open("a") as site:
        site.write(UNBUNDLED)
    slow.begin()
    slow.wait_for_calls(4)
    lost = 0
    while slow.process is not None and slow.process.poll() is None:
        names = cluster.names("Running")
        for name in names[: (len(names) + 1) // 2]:  # the oldest, which work
            with contextlib.suppress(Refused):  # gone meanwhile
                cluster.delete_pod(name, grace=0)
                lost += 1
        until = time.monotonic() + LOSS_SECONDS
        wait_until(lambda: time.monotonic() > until or slow.process.poll() is not None, 2 * LOSS_SECONDS)  # noqa: B023
    finish_well(slow, undisturbed)
    windows = Counter(blocks_by_window().values())
    again = {block: times - windows[block] for block, times in slow.computed(1).items() if times > windows[block]}
    print(f"{lost} pods were lost; of {NUM_BLOCKS} tasks {len(again)} were begun again, {sum(again.values())} windows")
    assert lost >= 4
    assert sum(-(-times // windows[block]) for block, times in again.items()) <= lost


@pytest.mark.long
def test_a_run_that_ends_while_nobody_answers_says_what_is_left(base: Path, cluster: AnyCluster) -> None:
    if not isinstance(cluster, Cluster):
        pytest.skip("the API server of a real cluster is not stopped")
    slow = SlowPods(base / "silent", seconds=0.03, cluster=cluster, settings=ONE_CORE)
    slow.begin()
    slow.wait_for_calls(10)
    (name,) = cluster.names("Running")
    cluster.is_silent = True
    slow.interrupt(signal.SIGTERM)
    began = time.monotonic()
    ended = slow.finish()
    assert time.monotonic() - began < 20
    assert ended.code == INTERRUPTED
    (notice,) = [line for line in ended.err.splitlines() if "pods may be left in namespace lab" in line]
    command = notice.partition("when it does: ")[2].split()
    assert command[:-1] == ["kubectl", "delete", "pod", "--namespace", "lab", "--selector"]
    assert name in notice
    cluster.is_silent = False
    for left in cluster.selected(command[-1]):
        cluster.delete_pod(left)
    wait_until(lambda: not slow.left(), SHORTLY)


@pytest.mark.long
def test_a_killed_interchange_ends_the_run_in_a_sentence(base: Path, cluster: AnyCluster) -> None:
    slow = SlowPods(base / "interchange", seconds=0.03, cluster=cluster, settings=ONE_CORE)
    slow.begin()
    slow.wait_for_calls(10)
    (interchange,) = [p for p in processes_in(slow.folder) if "interchange" in p.name()]
    interchange.kill()
    ended, sentence = finish_badly(slow)
    assert ended.code == 1
    assert re.match(
        "volpipe: the interchange of executor cpu ended .*; run the same command again to continue", sentence
    )


@pytest.mark.long
def test_the_pods_of_a_killed_driver_go_when_the_run_goes_on(base: Path, cluster: AnyCluster, undisturbed: str) -> None:
    slow = SlowPods(base / "driver", seconds=0.03, cluster=cluster, settings=ONE_CORE)
    slow.begin()
    slow.wait_for_calls(20)
    (name,) = cluster.names("Running")
    slow.interrupt(signal.SIGKILL)
    assert slow.finish().code == -signal.SIGKILL
    wait_until(lambda: cluster.is_quiet(name) and not processes_in(slow.folder), SHORTLY)
    assert cluster.names() == [name]  # ended, but still there: nobody was left to delete it
    slow.begin()
    finish_well(slow, undisturbed)
    assert slow.computed(2).total() > 0


# Settings with which no pod can start, and what the run's last sentence then says.
HOPELESS = {
    "image": ({"IMAGE": "lab/nowhere:1"},
     "executor cpu cannot start workers: .*image lab/nowhere:1 cannot be pulled: .*ImagePull"),
    "quota": ({}, "executor cpu cannot start workers: .*403 Forbidden: .*exceeded quota: few"),
    "nowhere": ({"NAMESPACE": "nowhere"}, ".*Kubernetes does not take a pod in namespace nowhere: 40[34] .*nowhere"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("what", HOPELESS)
def test_pods_that_cannot_start_end_the_run_in_a_sentence(base: Path, cluster: AnyCluster, what: str) -> None:
    settings, words = HOPELESS[what]
    told = ONE_CORE | {f"VOLPIPE_K8S_{name}": value for name, value in settings.items()}
    # An image that cannot be pulled is known once a real node has tried.
    slow = SlowPods(base / what, cluster=cluster, pending=30 if what == "image" else 3, settings=told)
    if what == "quota":
        if not isinstance(cluster, Cluster):
            pytest.skip("the quota of a real cluster is its own")
        cluster.quota = 0
    slow.begin()
    ended, sentence = finish_badly(slow)
    assert ended.code == 2
    assert re.match(f"volpipe: {words}", sentence)


@pytest.mark.long
def test_interrupting_a_run_removes_its_pods(base: Path, cluster: AnyCluster) -> None:
    slow = SlowPods(base / "interrupted", seconds=0.03, cluster=cluster, settings=ONE_CORE)
    slow.begin()
    slow.wait_for_calls(10)
    slow.interrupt(signal.SIGTERM)
    ended, sentence = finish_badly(slow)
    assert (ended.code, sentence) == (INTERRUPTED, "volpipe: interrupted; run the same command again to continue")


def check_site(slow: SlowPods, wait: float = 120, out: Path | None = None) -> tuple[int, list[str]]:
    """Return the exit code of `volpipe sites check`, and what it named; see that no pod is left."""
    command = ["sites", "check", slow.site, str(slow.folder.parent / "in.n5"), "--wait", str(wait)]
    command += ["--out", str(out)] if out else []
    ended = finish(slow.folder, begin(slow.folder, *command, **slow.environment), wait + SOON)
    assert "Traceback" not in ended.err
    wait_until(lambda: not slow.left(), SHORTLY)
    return ended.code, sentences(ended)


def test_a_check_of_pods_finds_nothing_where_all_is_well(base: Path, cluster: AnyCluster) -> None:
    assert check_site(SlowPods(base / "well", cluster=cluster, settings=ONE_CORE)) == (0, [])


@pytest.mark.long
def test_a_check_names_a_gpu_that_a_pod_does_not_see(base: Path, cluster: AnyCluster) -> None:
    """The double's node counts GPUs and has none."""
    if not isinstance(cluster, Cluster):
        pytest.skip("a real cluster has real GPUs")
    one_gpu = ONE_CORE | {"VOLPIPE_K8S_GPUS": "1"}
    code, (sentence,) = check_site(SlowPods(base / "no-gpu", cluster=cluster, settings=one_gpu))
    assert code == 1
    assert sentence.startswith("gpu: no GPU is seen on ")


@pytest.mark.long
def test_a_check_names_an_image_that_is_not_there(base: Path, cluster: AnyCluster) -> None:
    slow = SlowPods(base / "no-image", cluster=cluster, settings={"VOLPIPE_K8S_IMAGE": "lab/nowhere:1"})
    code, (sentence,) = check_site(slow)
    assert code == 1
    assert re.match("cpu: no worker could start, .* last said: image lab/nowhere:1 cannot be pulled: ", sentence)


@pytest.mark.long
def test_a_check_that_waits_in_vain_gives_the_words_of_the_scheduler(base: Path, cluster: AnyCluster) -> None:
    too_large = {"VOLPIPE_K8S_GPUS": "32"}
    code, found = check_site(SlowPods(base / "too-large", cluster=cluster, settings=too_large), wait=15)
    assert code == 1
    sentence = found[-1]
    assert sentence.startswith("gpu: no answer within 15 s, for no worker has started; its block is PENDING and last ")
    assert re.search("Unschedulable: 0/[0-9]+ nodes are available: .*Insufficient", sentence)
