"""What a node's own disk gains where the input's store is slow: a run by way of it, by one that reads straight."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import inputs
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import session
from volpipe.volumes.node_cache import VARIABLE

BYTES_PER_SECOND = 4e6
LATENCY_SECONDS = 0.02
SETTINGS = (
    "net.name=identity",
    "normalise.method=zscore",  # which is measured over the volume first
    "tensors.mode=streamed",
    "windows.shape=[64,64,64]",
    "windows.overlap=32",
    "windows.blend=crop",
    "output.levels=0",
)


class SlowFiles(SimpleHTTPRequestHandler):
    """Files over HTTP, as slowly as a store that many share: all answers together get so many bytes per second."""

    protocol_version = "HTTP/1.1"
    line = threading.Lock()
    sent = 0

    def do_GET(self) -> None:
        time.sleep(LATENCY_SECONDS)
        path = Path(self.translate_path(self.path))
        size = path.stat().st_size if path.is_file() else 0
        with self.line:
            time.sleep(size / BYTES_PER_SECOND)
            type(self).sent += size
        super().do_GET()

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: a line for each request would bury the table."""


@contextmanager
def slowly(folder: Path) -> Iterator[str]:
    """Give the address at which the files in `folder` are served."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowFiles, directory=str(folder)))
    serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


def timed(setting: Setting, location: str, node: str | None) -> tuple[float, float]:
    """Return the seconds of a run, and the bytes that the store sent meanwhile; copies on the node are new ones."""
    os.environ.pop(VARIABLE, None)
    if node:
        os.environ[VARIABLE] = node
    try:
        with session(setting) as workers:
            before = SlowFiles.sent
            return workers.run(location, *SETTINGS), SlowFiles.sent - before
    finally:
        os.environ.pop(VARIABLE, None)


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    """Seconds of a run by way of a folder on this machine's disk, by those of one that reads straight."""
    volume = Path(inputs.volume(setting, setting.cube(256)))
    container = next(path for path in (volume, *volume.parents) if path.suffix == ".n5")
    with slowly(container.parent) as address:
        location = f"{address}/{volume.relative_to(container.parent)}"
        for _ in range(repeats):
            with TemporaryDirectory(dir=setting.scratch) as node:
                ours, fetched = timed(setting, location, node)
            theirs, fetched_straight = timed(setting, location, None)
            sides = {"by way": ours, "straight": theirs}
            bytes_sent = {"MB by way": fetched / 1e6, "MB straight": fetched_straight / 1e6}
            yield Outcome(ours / theirs, sides | bytes_sent)


ROWS = [
    Row(
        "node",
        "run by way of a node's disk / straight, slow store",
        0.8,
        0.6,
        measure,
        why="256³ uint8 in chunks of 64³ over HTTP at 4 MB/s for all workers and 20 ms for each request; z-score, "
        "which measures the volume first; identity, windows of 64³ with 50 % overlap",
    )
]
