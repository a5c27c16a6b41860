"""Ranks: tasks that take the steps of one training together; how they meet, and what they tell each other.

Not here: the steps (train), or who sends the tasks (course). Rank 0 listens on a free port, of the address by which it
reaches the driver, and writes host and port into the training's folder; the others wait for that file. In a pod that a
service gives a name, rank 0 writes the name too, and where it resolves the others follow it. From then on
gradients travel between them by gloo, or by NCCL where each has a GPU of its own. Of gloo, a rank that is gone closes
its connections, so that the others end at once; one whose machine is gone, or any of NCCL, is missed after
`TALK_SECONDS`: neither group can be broken off from outside.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from volpipe.errors import RunError
from volpipe.formats.files import atomic_write
from volpipe.seats import ABANDONED, SERVICE_VARIABLE, Seat

log = logging.getLogger(__name__)

MEETING = "ranks.json"  # in a training's folder: where rank 0 of an attempt is
MEET_SECONDS = 1800.0  # that ranks wait for each other to start; jobs of a queue may start far apart
TALK_SECONDS = 300.0  # that one may be behind the others
LOOK_SECONDS = 0.2

dist: Any = torch.distributed  # Any: torch types neither its stores nor its groups
Check = Callable[[], None]


class PeerLost(RunError):
    """Another rank is gone, so that this one cannot go on; it says nothing of why."""


@dataclass
class Crew:
    """The ranks of a training, as one of them sees them; alone, all of this is nothing.

    Attributes:
        rank: this one's, from 0. Rank 0 alone writes.
        size: how many there are.
        check: raises where this process is to end; called while it waits.
    """

    rank: int = 0
    size: int = 1
    check: Check = lambda: None
    _group: Any = field(default=None, repr=False)  # Any: torch's group, of a kind that it does not type
    _store: Any = field(default=None, repr=False)  # Any: as above

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Set every one of `tensors`, of one device, to its mean over all ranks; the same bits on each."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
        with _in_our_words(self):
            self._group.allreduce([flat]).wait()
        flat /= self.size
        means = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Set every one of `tensors` to what rank 0 has there."""
        for tensor in tensors if self.size > 1 else ():
            with _in_our_words(self):
                whole = tensor.contiguous()
                self._group.broadcast(whole, 0).wait()
                tensor.copy_(whole)

    def average_gradients(self, net: torch.nn.Module) -> None:
        """Set the gradients of `net` to their means over all ranks."""
        self.average([each.grad for each in net.parameters() if each.grad is not None])

    def average_numbers(self, numbers: Mapping[str, float], device: str) -> dict[str, float]:
        """Return the mean of each number over all ranks."""
        if self.size == 1:
            return dict(numbers)
        values = torch.tensor(list(numbers.values()), dtype=torch.float32, device=device)
        self.average([values])
        return dict(zip(numbers, values.tolist(), strict=True))

    def agree(self, subject: str, number: int) -> int:
        """Return what rank 0 has for `number`; the others wait for it, however long it takes."""
        if self.size == 1:
            return number
        with _in_our_words(self):
            if self.leads:
                self._store.set(subject, str(number))
                return number
            pause = LOOK_SECONDS / 100
            while not self._store.check([subject]):
                self.check()
                time.sleep(pause)
                pause = min(2 * pause, LOOK_SECONDS)
            return int(self._store.get(subject))

    def leave(self) -> None:
        """Close the connections, so that no other rank waits for this one."""
        if self._group is not None:
            self._group.abort()  # of NCCL; gloo closes them when nobody holds its group any more
        self._group = self._store = None


@contextmanager
def joined(seat: Seat, folder: Path, check: Check) -> Iterator[Crew]:
    """Give the crew of the training in `folder` once all ranks are there.

    Args:
        seat: of this rank.
        folder: of the training, which all ranks see.
        check: called while this one waits; it raises where the driver is gone.

    Raises:
        PeerLost: another rank did not come in time, or the driver has given up this attempt.
    """
    if seat.ranks == 1:
        yield Crew(check=check)
        return

    def go_on() -> None:
        check()
        if _is_abandoned(seat, folder):
            raise PeerLost(f"rank {seat.rank} does not begin: another rank of its attempt has ended")

    crew = Crew(seat.rank, seat.ranks, go_on)
    try:
        crew._store = _meet(crew, seat, folder)
        crew._group = _group(crew, _own_address(seat.address))
        yield crew
        # The store lives in rank 0, which must not leave while another still asks it.
        crew.average_numbers({"over": 0.0}, _device(crew))
    finally:
        crew.leave()


def _meet(crew: Crew, seat: Seat, folder: Path) -> Any:  # Any: torch's store
    """Return the store of this attempt, once all ranks are connected to it."""
    patience = timedelta(seconds=TALK_SECONDS)
    deadline = time.monotonic() + MEET_SECONDS
    if crew.leads:
        listening = socket.create_server((_own_address(seat.address), 0), backlog=seat.ranks)
        host, port = listening.getsockname()[:2]
        # Given a port alone, a store would listen on every interface of the machine.
        store = dist.TCPStore(
            host, port, None, True, patience, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        _publish(folder, {"attempt": seat.attempt, "host": host, "port": port, "name": _own_name(host)})
    else:
        place = _found(crew, seat, folder, deadline)
        with _in_our_words(crew):
            store = dist.TCPStore(_host(place), place["port"], None, False, patience, wait_for_workers=False)
    with _in_our_words(crew):
        store.add("present", 1)
        while store.add("present", 0) < seat.ranks:
            _wait_a_little(crew, deadline, seat.ranks)
    return store


def _publish(folder: Path, place: Mapping[str, object]) -> None:
    atomic_write(folder / MEETING, json.dumps(place).encode())


def _found(crew: Crew, seat: Seat, folder: Path, deadline: float) -> dict[str, Any]:  # Any: JSON
    """Return where rank 0 of this attempt is, once it says so."""
    while True:
        if (folder / MEETING).is_file():
            place: dict[str, Any] = json.loads((folder / MEETING).read_text(encoding="utf-8"))  # Any: JSON
            if place["attempt"] == seat.attempt:
                return place
        _wait_a_little(crew, deadline, seat.ranks)


def _host(place: Mapping[str, Any]) -> str:  # Any: JSON
    """Return the address of rank 0: the one that its name leads to, else the one that it wrote."""
    return (place["name"] and _address_of(place["name"])) or place["host"]


def _wait_a_little(crew: Crew, deadline: float, ranks: int) -> None:
    crew.check()
    if time.monotonic() > deadline:
        raise RunError(
            f"rank {crew.rank} waited {MEET_SECONDS:.0f} s, and not all {ranks} ranks were running; give fewer "
            "train.ranks, or a site that starts as many workers together"
        )
    time.sleep(LOOK_SECONDS)


def _is_abandoned(seat: Seat, folder: Path) -> bool:
    path = folder / ABANDONED
    return path.is_file() and path.read_text(encoding="utf-8") == seat.attempt


def _own_address(towards: str) -> str:
    """Return the address of this machine that leads `towards` another; nothing is sent."""
    if not towards:
        return socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def _own_name(address: str) -> str | None:
    """Return the full name that a service gives this pod; None outside, and where it does not lead to `address`."""
    service = os.environ.get(SERVICE_VARIABLE)
    if not service:
        return None
    name = socket.getfqdn()  # HOST.SERVICE.NAMESPACE.svc…: the kubelet's, in /etc/hosts, with or without the service
    if name.split(".")[1:2] != [service] or _address_of(name) != address:
        return None
    return f"{name}."  # without the dot, a search domain that knows every name would answer where there is no service


def _address_of(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        log.info("%s does not resolve: %s", name, error)
        return None


def _group(crew: Crew, address: str) -> Any:  # Any: see Crew
    """Return the group of all ranks: of NCCL where each has a GPU of its own, else of gloo."""
    patience = timedelta(seconds=TALK_SECONDS)
    with _in_our_words(crew):
        crew._store.set(f"device {crew.rank}", _gpu())
        gpus = {crew._store.get(f"device {rank}").decode() for rank in range(crew.size)}
        store = dist.PrefixStore("group", crew._store)
        if len(gpus) == crew.size and "" not in gpus:
            chosen = dist.ProcessGroupNCCL.Options()
            chosen._timeout = patience
            return dist.ProcessGroupNCCL(store, crew.rank, crew.size, chosen)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = patience
        return dist.ProcessGroupGloo(store, crew.rank, crew.size, options)


def _gpu() -> str:
    """Return what names this rank's GPU among all, "" where it has none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _device(crew: Crew) -> str:
    return "cuda" if _gpu() else "cpu"


@contextmanager
def _in_our_words(crew: Crew) -> Iterator[None]:
    """Tell what torch says of a connection that broke as the loss of another rank."""
    try:
        yield
    except RunError:
        raise
    except RuntimeError as error:  # all that torch.distributed raises
        said = str(error).partition("\n")[0]
        raise PeerLost(f"rank {crew.rank} lost another of the {crew.size} ranks: {said}") from error
