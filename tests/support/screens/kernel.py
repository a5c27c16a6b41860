"""The kernel of a notebook, without one: cells are run, and what it would show of them is returned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import TEST_PATH


@dataclass(frozen=True)
class Shown:
    """What a notebook gets of a cell: displays, by their ids each time they are drawn, the result, and plain text."""

    displays: dict[str, list[dict[str, str]]]
    result: dict[str, str]
    text: str


@dataclass(frozen=True)
class Kernel:
    """A kernel that is started."""

    client: Any  # jupyter_client's

    def run(self, code: str, seconds: float = 120) -> Shown:
        """Run a cell, whose error is raised."""
        number = self.client.execute(code)
        shown = Shown({}, {}, "")
        while True:
            message = self.client.get_iopub_msg(timeout=seconds)
            content = message["content"]
            if message["parent_header"].get("msg_id") != number:
                continue
            if content.get("execution_state") == "idle":
                return shown
            if message["msg_type"] in ("display_data", "update_display_data"):
                drawings = shown.displays.setdefault(content["transient"].get("display_id", ""), [])
                assert bool(drawings) == (message["msg_type"] == "update_display_data")
                drawings.append(content["data"])
            elif message["msg_type"] == "execute_result":
                shown.result.update(content["data"])
            elif message["msg_type"] == "stream":
                shown = Shown(shown.displays, shown.result, shown.text + content["text"])
            assert message["msg_type"] != "error", "\n".join(content["traceback"])


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """Give a kernel that works in `folder`; its connection lies there too, and nothing of it outlives the test."""
    from jupyter_client.manager import KernelManager

    with_path = {"PYTHONPATH": TEST_PATH, "JUPYTER_RUNTIME_DIR": str(folder), "IPYTHONDIR": str(folder / "ipython")}
    manager = KernelManager(transport="ipc", connection_file=str(folder / "kernel.json"))
    manager.start_kernel(cwd=str(folder), env=os.environ | with_path)
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=120)
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
