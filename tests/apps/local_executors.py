"""Executors on this machine, as the tests of Parsl start them."""

from __future__ import annotations

from parsl.launchers import SimpleLauncher
from parsl.providers import LocalProvider, SlurmProvider

ARGUMENTS = {"address": "127.0.0.1", "max_workers_per_node": 1, "heartbeat_period": 1, "heartbeat_threshold": 4}


class Prompt(LocalProvider):
    """Blocks on this machine, looked after every second."""

    status_polling_interval = 1


def local_provider(**arguments: object) -> LocalProvider:
    return Prompt(init_blocks=1, min_blocks=0, max_blocks=1, launcher=SimpleLauncher(), **arguments)


class FakeSlurm(SlurmProvider):
    """A provider whose commands are never given."""

    def execute_wait(self, cmd: str, timeout: int | None = None) -> tuple[int, str, str]:
        return 1, "", ""
