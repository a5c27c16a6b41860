"""Ranks: they take the steps of one rank with a larger batch, and where one is lost the others end at once."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from command import begin, finish, processes_in, wait_until
from torch import nn
from trainings import Threads, losses_in, make_folder

from volpipe.blockwise.interrupts import GRACE_SECONDS, INTERRUPTS
from volpipe.blockwise.journal import Record
from volpipe.errors import RunStopped, SiteError, WorkerLost
from volpipe.recipes.training import WEIGHTS, TrainRecipe, load_training
from volpipe.training import distributed
from volpipe.training.distributed import RENDEZVOUS, PeerLost, RankGroup, join_ranks
from volpipe.training.driver import joined, run_training
from volpipe.training.logs import last_step
from volpipe.training.loop import checkpoints, train
from volpipe.training.rank_info import ABANDONED, RankInfo
from volpipe.training.task import RankResult, newest_step

pytestmark = pytest.mark.usefixtures("_no_process_outlives_a_test")

ADVERSARY = """
[adversary]
weight = 0.5
start = 1
features = 4
learning_rate = 0.02
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def recipe(folder: Path, *settings: str) -> TrainRecipe:
    return load_training(folder / "recipe.toml", settings)


def learn(folder: Path, name: str, slots: int, *settings: str) -> Path:
    run_training(recipe(folder, *settings), folder / name, Threads(slots).start, search_path=folder)
    return folder / name


# ---- steps


@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.long), ADVERSARY])
def test_two_ranks_learn_as_one_with_twice_the_batch(tmp_path: Path, more: str) -> None:
    """Threads of one process, each with its own connections on loopback."""
    folder = make_folder(tmp_path, more)
    settings = ("train.accumulate=2", "train.validate_every=3")
    two = learn(folder, "two", 2, "train.ranks=2", "train.batch=2", *settings)
    one = learn(folder, "one", 1, "train.batch=4", *settings)
    np.testing.assert_allclose(losses_in(two), losses_in(one), rtol=1e-4)
    assert losses_in(two) != losses_in(learn(folder, "half", 1, "train.batch=2", *settings))
    assert [path.name for path in checkpoints(two / "checkpoints")] == ["000000004.pt", "000000006.pt"]


def test_two_ranks_that_were_stopped_go_on_to_the_same_bits(folder: Path) -> None:
    whole = learn(folder, "whole", 2, "train.ranks=2")
    learn(folder, "cut", 2, "train.ranks=2", "train.steps=3")
    cut = learn(folder, "cut", 2, "train.ranks=2")
    assert losses_in(cut) == losses_in(whole)
    assert (cut / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


def test_ranks_may_change_while_the_windows_of_a_step_stay(folder: Path) -> None:
    learn(folder, "t", 2, "train.ranks=2", "train.steps=4")
    gone_on = learn(folder, "t", 1, "train.batch=2")
    one = learn(folder, "one", 1, "train.batch=2")
    np.testing.assert_allclose(losses_in(gone_on), losses_in(one), rtol=1e-4)
    with pytest.raises(ValueError, match=r"train.ranks: 1 -> 2"):
        learn(folder, "t", 2, "train.ranks=2", "train.batch=2")


def test_a_group_of_one_rank_changes_nothing() -> None:
    net = nn.Linear(2, 1)
    net(torch.ones(1, 2)).sum().backward()
    before = net.weight.grad
    assert before is not None
    kept = before.clone()
    RankGroup().average_gradients(net)
    assert torch.equal(net.weight.grad, kept)  # type: ignore[arg-type]
    assert RankGroup().average_numbers({"loss": 0.1}, "cpu") == {"loss": 0.1}


def test_more_ranks_than_workers_are_refused(folder: Path) -> None:
    with pytest.raises(SiteError, match=r"train.ranks is 2, and the site runs 1 task .* give train.ranks=1"):
        learn(folder, "t", 1, "train.ranks=2")


# ---- ranks that are lost


def begin_rank(folder: Path, rank: int, *, fail_at: int = 1000) -> Future[int]:
    """Train as one of two ranks in a thread; before its `fail_at`-th step it ends with an error of its own."""
    future: Future[int] = Future()
    info = RankInfo(rank, 2, "attempt 1 of this")

    def work() -> None:
        try:
            with join_ranks(info, folder / "t", lambda: None) as group:
                if rank:
                    average, calls = group.average, iter(range(10_000))

                    def failing(tensors: list[torch.Tensor]) -> None:
                        if next(calls) == 2 * fail_at:
                            raise ValueError("of its own")
                        average(tensors)

                    group.average = failing  # type: ignore[method-assign, assignment]
                future.set_result(train(recipe(folder, "train.ranks=2"), folder / "t", str(folder), group=group))
        except Exception as error:
            future.set_exception(error)

    (folder / "t").mkdir(exist_ok=True)
    threading.Thread(target=work).start()
    return future


def test_where_a_rank_fails_the_other_ends_at_once_and_says_that_it_was_left(folder: Path) -> None:
    first, second = begin_rank(folder, 0), begin_rank(folder, 1, fail_at=3)
    with pytest.raises(ValueError, match="of its own"):
        second.result(60)
    failed = time.monotonic()
    with pytest.raises(PeerLost, match="rank 0 lost another of the 2 ranks"):
        first.result(60)
    assert time.monotonic() - failed < 20
    assert last_step(folder / "t") == 3


@dataclass
class Told:
    """Workers whose tasks end at once, as they are told: each with a reason, and whether that is a lost peer."""

    ends: list[tuple[str, bool]]
    address: str = "127.0.0.1"

    @property
    def slots(self) -> dict[str, int]:
        return {"gpu": 2}

    @contextmanager
    def start(self, folder: Path) -> Iterator[Told]:
        yield self

    def submit(self, app: str, *arguments: Any) -> Future[Any]:
        reason, is_peer = self.ends.pop(0)
        failed = ((0, reason),) if reason else ()
        future: Future[Any] = Future()
        future.set_result(Record("train", (), failed, RankResult(is_peer)))
        return future


def test_the_reason_of_the_rank_that_failed_is_the_one_that_is_told(folder: Path) -> None:
    workers = Told([("PeerLost: rank 0 lost another", True), ("ValueError: of its own", False)] * 4)
    with pytest.raises(RunStopped, match="after step 0: ValueError: of its own"):
        run_training(recipe(folder, "train.ranks=2"), folder / "t", workers.start, search_path=folder)
    assert len(workers.ends) == 2  # it is tried again, as a block is


def test_a_connection_that_broke_is_tried_again_as_a_rank_that_fails_is(folder: Path) -> None:
    workers = Told([("PeerLost: rank 0 lost another", True), ("PeerLost: rank 1 lost another", True)] * 4)
    with pytest.raises(RunStopped, match="the training stops after step 0: PeerLost: rank 0 lost another"):
        run_training(recipe(folder, "train.ranks=2"), folder / "t", workers.start, search_path=folder)
    assert len(workers.ends) == 2


def ended(*, reason: str = "", peer_lost: bool = False, fatal: bool = False) -> Record[RankResult]:
    return Record("train", () if reason else (1,), ((1, reason),) if reason else (), RankResult(peer_lost), fatal=fatal)


PEER = ended(reason="PeerLost: another", peer_lost=True)


@pytest.mark.parametrize(
    ("outcomes", "blamed"),
    [
        ([ended(), ended()], ""),
        ([PEER, ended(reason="ValueError: own")], "ValueError: own"),
        ([PEER, WorkerLost("killed"), PEER], "killed"),
        ([WorkerLost("killed"), ended(reason="ValueError: own")], "ValueError: own"),
        ([ended(reason="ValueError: own"), ended(reason="NetError: other", fatal=True)], "NetError: other"),
        ([PEER, ended()], "PeerLost: another"),
    ],
)
def test_ranks_end_as_one_when_the_last_is_back_and_the_first_failure_is_told_at_once(
    outcomes: list[Record[RankResult] | WorkerLost], blamed: str
) -> None:
    tasks, calls = [Future[Record[RankResult]]() for _ in outcomes], list[str]()
    whole = joined(tasks, lambda: calls.append("abandon"))
    for task, outcome in zip(tasks, outcomes, strict=True):
        assert not whole.done()
        if isinstance(outcome, WorkerLost):
            task.set_exception(outcome)
        else:
            task.set_result(outcome)
    assert bool(calls) == any(isinstance(each, WorkerLost) or each.failed for each in outcomes[:-1])
    if blamed == "killed":
        assert isinstance(whole.exception(0), WorkerLost)
        return
    assert (whole.result(0).done, whole.result(0).failed) == (() if blamed else (0,), ((0, blamed),) if blamed else ())


class Mortal(Threads):
    """Workers that are lost at the ends of their first tasks, when these have come to the steps that are given."""

    def __init__(self, training: TrainRecipe, steps: list[int]) -> None:
        super().__init__(1)
        self.training, self.steps = training, steps

    def submit(self, app: str, *arguments: Any) -> Future[Any]:
        if not self.steps:
            return super().submit(app, *arguments)
        self.sent.append("lost")
        few = self.training.train.model_copy(update={"steps": self.steps.pop(0)})
        place = Path(arguments[0])
        train(self.training.model_copy(update={"train": few}), place, str(place.parent))
        (place / WEIGHTS).unlink()
        future: Future[Any] = Future()
        future.set_exception(WorkerLost("the worker was killed"))
        return future


def test_a_loss_after_a_new_checkpoint_counts_anew_and_the_losses_are_those_of_no_loss(folder: Path) -> None:
    """Four losses, of which two without a checkpoint between them would be too many."""
    workers = Mortal(recipe(folder), [2, 3, 4, 5])
    result = run_training(recipe(folder), folder / "t", workers.start, search_path=folder)
    assert (result.steps, workers.sent) == (6, ["lost"] * 4 + ["t"])
    assert losses_in(folder / "t") == losses_in(learn(folder, "whole", 1))


def test_an_interrupt_lets_ranks_come_to_their_next_checkpoint_and_no_further(folder: Path) -> None:
    INTERRUPTS.reset()
    settings, calls = ("train.steps=4000", "train.checkpoint_every=10", "train.ranks=2"), list[int]()

    def interrupt(step: int, steps: int) -> None:
        calls.append(step)
        if len(calls) == 2:
            assert INTERRUPTS.ask()

    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_training(
                recipe(folder, *settings), folder / "t", Threads(2).start, search_path=folder, on_step=interrupt
            )
    finally:
        INTERRUPTS.reset()
    assert time.monotonic() - began < GRACE_SECONDS
    assert 0 < last_step(folder / "t") == newest_step(folder / "t") < 4000


def test_a_recipe_that_fails_on_every_rank_says_why(folder: Path) -> None:
    with pytest.raises(RunStopped, match=r"the (loss|gradient's norm) is (nan|inf)"):
        learn(folder, "t", 2, "train.ranks=2", "train.learning_rate=1e30", "train.clip=0")


def test_a_rank_waits_in_vain_for_an_attempt_that_is_abandoned_or_never_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ABANDONED).write_text("this")
    with (
        pytest.raises(PeerLost, match="rank 1 does not begin"),
        join_ranks(RankInfo(1, 2, "this"), folder, lambda: None),
    ):
        pass
    monkeypatch.setattr(distributed, "MEET_SECONDS", 0.3)
    with (
        pytest.raises(RuntimeError, match="not all 2 ranks were running; give fewer"),
        join_ranks(RankInfo(0, 2, "that"), folder, lambda: None),
    ):
        pass


def test_rank_0_listens_on_the_address_towards_the_driver_alone(folder: Path) -> None:
    listening: list[str] = []
    own = psutil.Process()

    def look() -> None:
        found = [each for each in own.net_connections() if each.status == psutil.CONN_LISTEN]
        listening.extend(str(each.laddr.ip) for each in found)
        (folder / ABANDONED).write_text("this")

    with pytest.raises(PeerLost), join_ranks(RankInfo(0, 2, "this"), folder, look):
        pass
    assert "127.0.0.1" in listening
    assert not {"0.0.0.0", "::"} & set(listening)


# ---- how they meet in pods

NAME = "volpipe-0a1b2c3d.volpipe.lab.svc.cluster.local"  # as a kubelet writes it into a pod's /etc/hosts


def meet(folder: Path) -> list[float]:
    """Let two ranks meet; return the mean of their numbers as each of them has it."""

    def sit(rank: int) -> float:
        with join_ranks(RankInfo(rank, 2, "this"), folder, lambda: None) as group:
            return group.average_numbers({"rank": rank}, "cpu")["rank"]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(sit, (0, 1)))


def rendezvous_in(folder: Path) -> dict[str, Any]:  # Any: JSON
    found: dict[str, Any] = json.loads((folder / RENDEZVOUS).read_text())  # Any: JSON
    return found


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks that are misled give up soon."""
    monkeypatch.setattr(distributed, "TALK_SECONDS", 20.0)
    monkeypatch.setattr(distributed, "MEET_SECONDS", 20.0)


@pytest.fixture
def _in_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this host one whose name is `NAME`, for itself alone: nobody else can resolve it."""
    monkeypatch.setenv("VOLPIPE_SERVICE", "volpipe")
    monkeypatch.setattr("socket.getfqdn", lambda: NAME)
    resolve = socket.gethostbyname
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.0.1" if name == NAME else resolve(name))


@pytest.mark.usefixtures("_in_pod", "_impatient")
def test_rank_0_writes_its_full_name_and_where_nobody_knows_it_its_address_is_taken(folder: Path) -> None:
    """A dot ends the name, so that no search domain is tried: here it is what makes it unknown."""
    assert meet(folder) == [0.5, 0.5]
    assert (rendezvous_in(folder)["name"], rendezvous_in(folder)["host"]) == (f"{NAME}.", "127.0.0.1")


@pytest.mark.usefixtures("_impatient")
def test_a_name_that_resolves_is_followed_before_the_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = distributed._publish
    elsewhere = {"name": "localhost", "host": "127.0.0.2"}  # where nobody listens
    monkeypatch.setattr(
        distributed, "_publish", lambda folder, rendezvous: publish(folder, {**rendezvous, **elsewhere})
    )
    assert meet(folder) == [0.5, 0.5]


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    ("service", "fqdn", "address"),
    [
        ("", NAME, "127.0.0.1"),  # in no pod of ours
        ("volpipe", "node.lab", "127.0.0.1"),  # in a pod on the network of its node
        ("volpipe", NAME, "127.0.0.2"),  # in a pod with several addresses: it listens on another
    ],
)
def test_rank_0_writes_no_name_that_would_not_lead_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, service: str, fqdn: str, address: str
) -> None:
    monkeypatch.setenv("VOLPIPE_SERVICE", service)
    monkeypatch.setattr("socket.getfqdn", lambda: fqdn)
    monkeypatch.setattr("socket.gethostbyname", lambda name: address)
    assert meet(folder) == [0.5, 0.5]
    assert (rendezvous_in(folder)["name"], rendezvous_in(folder)["host"]) == (None, "127.0.0.1")


@pytest.mark.long
@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_attempt_and_the_training_goes_on_to_the_same_losses(folder: Path) -> None:
    """By SIGKILL of rank 0, one of two worker processes of Parsl's own."""
    settings = ("train.ranks=2", "train.steps=150", "train.checkpoint_every=5")
    whole = learn(folder, "whole", 2, *settings)
    options = [part for setting in settings for part in ("--set", setting)]
    process = begin(folder, "train", "recipe.toml", "--out", "cut", *options, VOLPIPE_WORKERS="2")
    ranks: list[psutil.Process] = []  # looked for before it is at work: the look may take as long as the training
    wait_until(lambda: ranks.extend(first_rank(folder)) or ranks, 120)
    wait_until(lambda: last_step(folder / "cut") > 7, 120)
    ranks[0].kill()
    ended = finish(folder, process, 200)
    assert ended.code == 0, ended.err
    assert losses_in(folder / "cut") == losses_in(whole)
    assert (folder / "cut" / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    one = learn(folder, "one", 1, "train.batch=2", *settings[1:])
    np.testing.assert_allclose(losses_in(folder / "cut")[:30], losses_in(one)[:30], rtol=1e-3)
    assert "attempt 2 of" in (folder / "cut" / "ranks.json").read_text()
    wait_until(lambda: not processes_in(folder), 30)


def first_rank(folder: Path) -> list[psutil.Process]:
    """Return the process of rank 0, if there is one yet: it listens where the training's folder says."""
    if not (folder / "cut" / "ranks.json").exists():
        return []
    port = json.loads((folder / "cut" / "ranks.json").read_text())["port"]
    for process in processes_in(folder):
        with suppress(psutil.NoSuchProcess):  # one that was about to end
            if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in process.net_connections()):
                return [process]
    return []
