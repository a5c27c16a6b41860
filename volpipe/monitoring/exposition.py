"""Where metrics are read: at a port of this machine, or in a file that node_exporter's textfile collector reads.

Not here: the metrics. Once they are to be had, no fault of port, file or network ends a work. Nothing heavy is imported
before: the command line reads its options here.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from volpipe.errors import NOTICE, VolpipeError
from volpipe.resolve import path_of
from volpipe.volumes.storage.result_file import ResultFile, comment, text_kind

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from volpipe.monitoring.metrics import Metrics

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
SUFFIX = ".prom"  # the only files that the textfile collector reads
METRICS_FILE = text_kind("volpipe --metrics")
MOST_PORT = 65535
PERIOD = 5.0  # seconds between two writings of a file
ASK_PERIOD = 2.0  # between two looks at the workers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Port:
    """A port of this machine, at one of its addresses, or under a name of it; 0 is any that is free."""

    host: str
    number: int
    has_host: bool = True  # given by the user

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine, or this pod, can reach it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        return _host_and_port(self.host, self.number) if self.has_host else str(self.number)

    def at(self, number: int) -> str:
        """Return the address of the metrics, where the port turned out to be `number`."""
        return f"http://{_host_and_port(self.host, number)}/metrics"


def _host_and_port(host: str, number: int) -> str:
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def parse_target(text: str) -> Port | Path:
    """Return the port or the file that `text` names; whether it can be used is not looked at.

    Raises:
        VolpipeError: it names neither.
    """
    host, colon, number = text.rpartition(":")
    if number.isascii() and number.isdecimal() and "/" not in host:
        if colon and not host:
            raise VolpipeError(
                f"--metrics {text}: there is no host before the colon; write {number}, or 0.0.0.0:{number}"
            )
        if int(number) > MOST_PORT:
            raise VolpipeError(f"--metrics {text}: ports end at {MOST_PORT}, and this is {number}")
        return Port(host.strip("[]") or LOOPBACK, int(number), bool(colon))
    path = path_of(text)
    if path.suffix != SUFFIX:
        raise VolpipeError(
            f"--metrics {text}: write a port such as 9100, HOST:PORT, or a file whose name ends in {SUFFIX}, as those "
            "that node_exporter reads"
        )
    return path


@contextmanager
def monitored(target: str | int | Path | None, command: str, recipe: object = None) -> Iterator[str]:
    """Let the metrics of what this thread performs meanwhile be read at `target`, and give their address.

    Nothing of it stays open. Arguments as of `Metrics`, and:

    Args:
        target: as a user names it; None: nowhere, and the address is "".

    Raises:
        VolpipeError: it is none, the port is taken, or the file cannot be written.
    """
    if target is None:
        yield ""
        return
    place = parse_target(str(target))
    from prometheus_client import CollectorRegistry

    from volpipe.blockwise.work import observing
    from volpipe.monitoring.metrics import Metrics  # knows works of every kind: most of what a run would import

    name = Path(recipe).stem if isinstance(recipe, str | Path) else ""
    registry, metrics = CollectorRegistry(), Metrics(command, name)
    registry.register(metrics)
    publisher = _served if isinstance(place, Port) else _kept_in_file
    with publisher(place, registry) as address, _asking(metrics), observing(metrics):  # type: ignore[arg-type]
        yield address


@contextmanager
def _served(port: Port, registry: CollectorRegistry) -> Iterator[str]:
    """Serve the metrics at a port."""
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port.number, port.host, registry)
    except OSError as error:
        raise VolpipeError(f"--metrics {port}: {_why(error, port)}") from error
    thread.name = "volpipe-metrics"
    try:
        yield port.at(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _why(error: OSError, port: Port) -> str:
    """Return why a port cannot be listened at, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return f"another process listens at port {port.number} of {port.host}; give another port"
    if error.errno == errno.EACCES:
        return f"port {port.number} is the system's; give one from 1024 up"
    return f"{error.strerror or error}; give a port, or the address of this machine with one"


@contextmanager
def _kept_in_file(path: Path, registry: CollectorRegistry) -> Iterator[str]:
    """Write the metrics to a file now and then, and at the end, however that comes."""
    file = ResultFile("--metrics", path, METRICS_FILE)
    file.check()
    writer = _Writer(replace(file, path=path.absolute()), registry)
    writer.write()
    try:
        with _repeating("volpipe-metrics-file", PERIOD, writer.try_writing):
            yield str(path)
    finally:
        writer.try_writing()


class _Writer:
    """Writes metrics to a file, whole or not at all; says once that it cannot."""

    def __init__(self, file: ResultFile, registry: CollectorRegistry) -> None:
        self.file, self.registry, self._has_told = file, registry, False

    def write(self) -> None:
        from prometheus_client import generate_latest

        self.file.write(comment(METRICS_FILE.writer).encode() + generate_latest(self.registry))

    def try_writing(self) -> None:
        """Write; a fault of any kind is a warning, once."""
        try:
            self.write()
        except Exception as error:
            if not self._has_told:
                log.warning("metrics cannot be written to %s: %s", self.file.path, error, extra=NOTICE)
            self._has_told = True


@contextmanager
def _asking(metrics: Metrics) -> Iterator[None]:
    """Ask the pool now and then how many workers are connected, in a thread: the answer may take a while."""

    def ask() -> None:
        pool = metrics.pool
        if pool is not None:
            num_connected = pool.num_connected()
            metrics.num_connected = num_connected if metrics.pool is pool else None

    with _repeating("volpipe-metrics-workers", ASK_PERIOD, ask):
        yield


@contextmanager
def _repeating(name: str, seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` each time that so many seconds are over, in a thread; one that raises is called no more."""
    stopped = threading.Event()

    def repeat() -> None:
        try:
            while not stopped.wait(seconds):
                act()
        except Exception:
            log.warning("%s ends by a fault; the work continues", name, exc_info=True)

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(PERIOD)
