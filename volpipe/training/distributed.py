"""Ranks: tasks that take the steps of one training together, their rendezvous and their collectives.

Not here: the steps (loop), or sending the tasks (driver). Rank 0 listens on a free port of the address that leads to
the driver, and writes host and port into the training's folder. The other ranks wait for that file. In a pod whose
service gives it a name, rank 0 writes the name too; where it resolves, the others connect to it. Gradients travel by
gloo, or by NCCL where each rank has a GPU of its own. A gloo rank that dies closes its connections, so that the others
end at once. A machine, or an NCCL rank, that is gone is noticed after `TALK_SECONDS`: neither group can be aborted from
outside.
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
from volpipe.training.rank_info import ABANDONED, SERVICE_VARIABLE, RankInfo
from volpipe.volumes.storage.paths import atomic_write

log = logging.getLogger(__name__)

RENDEZVOUS = "ranks.json"  # in a training's folder: host and port of rank 0 of an attempt
MEET_SECONDS = 1800.0  # limit of the rendezvous; jobs of a queue may start far apart
TALK_SECONDS = 300.0  # limit of a collective
LOOK_SECONDS = 0.2

dist: Any = torch.distributed  # Any: torch types neither its stores nor its groups
Check = Callable[[], None]


class PeerLost(RunError):
    """Another rank has ended, so that this one cannot go on; that rank reports the reason."""


@dataclass
class RankGroup:
    """The process group of a training, in one rank; of a single rank, every collective is the identity.

    Attributes:
        rank: number of this rank, from 0. Rank 0 alone writes files.
        check: called while this rank waits; it raises where this process is to end.
    """

    rank: int = 0
    size: int = 1
    check: Check = lambda: None
    _process_group: Any = field(default=None, repr=False)  # Any: torch's group, of a kind that it does not type
    _store: Any = field(default=None, repr=False)  # Any: as above

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Set each of `tensors`, all on one device, to its mean over all ranks; the bits are the same on each."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
        with _translate_errors(self):
            self._process_group.allreduce([flat]).wait()
        flat /= self.size
        means = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Set each of `tensors` to the values of rank 0."""
        for tensor in tensors if self.size > 1 else ():
            with _translate_errors(self):
                values = tensor.contiguous()
                self._process_group.broadcast(values, 0).wait()
                tensor.copy_(values)

    def average_gradients(self, net: torch.nn.Module) -> None:
        """Set the gradients of `net` to their means over all ranks."""
        self.average([parameter.grad for parameter in net.parameters() if parameter.grad is not None])

    def average_numbers(self, numbers: Mapping[str, float], device: str) -> dict[str, float]:
        """Return the mean of each number over all ranks."""
        if self.size == 1:
            return dict(numbers)
        values = torch.tensor(list(numbers.values()), dtype=torch.float32, device=device)
        self.average([values])
        return dict(zip(numbers, values.tolist(), strict=True))

    def from_rank_zero(self, key: str, number: int) -> int:
        """Return rank 0's `number`, published as `key`; the other ranks wait for it, however long it takes."""
        if self.size == 1:
            return number
        with _translate_errors(self):
            if self.is_rank_zero:
                self._store.set(key, str(number))
                return number
            pause = LOOK_SECONDS / 100
            while not self._store.check([key]):
                self.check()
                time.sleep(pause)
                pause = min(2 * pause, LOOK_SECONDS)
            return int(self._store.get(key))

    def close(self) -> None:
        """Close the connections, so that no other rank waits for this one."""
        if self._process_group is not None:
            self._process_group.abort()  # NCCL's; gloo's close with the last reference to the group
        self._process_group = self._store = None


@contextmanager
def join_ranks(info: RankInfo, folder: Path, check: Check) -> Iterator[RankGroup]:
    """Yield the group of the training in `folder`, once all ranks are connected.

    Args:
        folder: the training's folder, which all ranks see.
        check: called while this rank waits; it raises where the driver is gone.

    Raises:
        PeerLost: a connection broke, or the driver has given up this attempt.
        RunError: a rank did not start in time.
    """
    if info.ranks == 1:
        yield RankGroup(check=check)
        return

    abandoned = folder / ABANDONED

    def check_attempt() -> None:
        check()
        if abandoned.is_file() and abandoned.read_text(encoding="utf-8") == info.attempt:
            raise PeerLost(f"rank {info.rank} does not begin: another rank of its attempt has ended")

    group = RankGroup(info.rank, info.ranks, check_attempt)
    try:
        group._store = _connect(group, info, folder)
        group._process_group = _process_group(group, _own_address(info.address))
        yield group
        # The store lives in rank 0, which must not close while another rank still reads from it.
        group.average_numbers({"over": 0.0}, "cuda" if _gpu() else "cpu")
    finally:
        group.close()


def _connect(group: RankGroup, info: RankInfo, folder: Path) -> Any:  # Any: torch's store
    """Return the key-value store of this attempt, once all ranks are connected to it."""
    patience = timedelta(seconds=TALK_SECONDS)
    deadline = time.monotonic() + MEET_SECONDS
    if group.is_rank_zero:
        listening = socket.create_server((_own_address(info.address), 0), backlog=info.ranks)
        host, port = listening.getsockname()[:2]
        # With a port alone, a store would listen on every interface of the machine.
        store = dist.TCPStore(
            host, port, None, True, patience, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        _publish(folder, {"attempt": info.attempt, "host": host, "port": port, "name": _own_name(host)})
    else:
        rendezvous = _await_rank_zero(group, info, folder, deadline)
        with _translate_errors(group):
            name, port = rendezvous["name"], rendezvous["port"]
            host = (name and _address_of(name)) or rendezvous["host"]  # of the name, where it resolves
            store = dist.TCPStore(host, port, None, False, patience, wait_for_workers=False)
    with _translate_errors(group):
        store.add("present", 1)
        while store.add("present", 0) < info.ranks:
            _wait_a_little(group, deadline, info.ranks)
    return store


def _publish(folder: Path, rendezvous: Mapping[str, object]) -> None:
    atomic_write(folder / RENDEZVOUS, json.dumps(rendezvous).encode())


def _await_rank_zero(group: RankGroup, info: RankInfo, folder: Path, deadline: float) -> dict[str, Any]:  # Any: JSON
    """Return host, port and name of rank 0, once it has published them for this attempt."""
    while True:
        if (folder / RENDEZVOUS).is_file():
            rendezvous: dict[str, Any] = json.loads((folder / RENDEZVOUS).read_text(encoding="utf-8"))  # Any: JSON
            if rendezvous["attempt"] == info.attempt:
                return rendezvous
        _wait_a_little(group, deadline, info.ranks)


def _wait_a_little(group: RankGroup, deadline: float, ranks: int) -> None:
    group.check()
    if time.monotonic() > deadline:
        raise RunError(
            f"rank {group.rank} waited {MEET_SECONDS:.0f} s, and not all {ranks} ranks were running; give fewer "
            "train.ranks, or a site that starts as many workers together"
        )
    time.sleep(LOOK_SECONDS)


def _own_address(towards: str) -> str:
    """Return the address from which this machine reaches `towards`; nothing is sent."""
    if not towards:
        return socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def _own_name(address: str) -> str | None:
    """Return this pod's full name from its service; None outside of pods, or where it does not resolve to `address`."""
    service = os.environ.get(SERVICE_VARIABLE)
    if not service:
        return None
    name = socket.getfqdn()  # HOST.SERVICE.NAMESPACE.svc…: the kubelet's, in /etc/hosts, with or without the service
    if name.split(".")[1:2] != [service] or _address_of(name) != address:
        return None
    return f"{name}."  # the dot keeps a wildcard search domain from answering where there is no service


def _address_of(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        log.info("%s does not resolve: %s", name, error)
        return None


def _process_group(group: RankGroup, address: str) -> Any:  # Any: see `RankGroup`
    """Return torch's group of all ranks: NCCL where each has a GPU of its own, else gloo."""
    patience = timedelta(seconds=TALK_SECONDS)
    with _translate_errors(group):
        group._store.set(f"device {group.rank}", _gpu())
        gpus = {group._store.get(f"device {rank}").decode() for rank in range(group.size)}
        store = dist.PrefixStore("group", group._store)
        if len(gpus) == group.size and "" not in gpus:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            return dist.ProcessGroupNCCL(store, group.rank, group.size, options)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = patience
        return dist.ProcessGroupGloo(store, group.rank, group.size, options)


def _gpu() -> str:
    """Return the UUID of this rank's GPU, "" where it has none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


@contextmanager
def _translate_errors(group: RankGroup) -> Iterator[None]:
    """Raise torch's error of a broken connection as `PeerLost`."""
    try:
        yield
    except RunError:
        raise
    except RuntimeError as error:  # all that torch.distributed raises
        message = str(error).partition("\n")[0]
        raise PeerLost(f"rank {group.rank} lost another of the {group.size} ranks: {message}") from error
