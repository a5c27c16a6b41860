"""A viewer: some volumes, a thread that serves them on loopback unless it is told another address, and its own address.

Not here: what is served (site, pages), printing, or a browser (cli).
"""

from __future__ import annotations

import asyncio
import errno
import html
import re
import socket
import threading
from pathlib import Path

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple
from volpipe.resolve import homes_known
from volpipe.runs.report import WorkReport
from volpipe.viewer.layers import Scene, open_scene
from volpipe.viewer.site import Service, client_folder, host_names
from volpipe.viewer.state import check_at
from volpipe.volumes.volume import Volume
from volpipe.workflow.entries import place_of

BIND = re.compile(r"(?:(?P<address>\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+):)?(?P<port>\d{1,5})")

Place = str | Path | Volume | WorkReport


class Viewer:
    """Volumes that a browser shows until it is closed.

    Attributes:
        notes: sentences on what the viewer had to assume or leave out.
        port: where it listens.
    """

    def __init__(self, scene: Scene, at: Triple | None, bind: str) -> None:
        if at is not None:
            check_at(scene, at)
        address, port = parse_bind(bind)
        client_folder()
        listener, started = _listen(address, port), threading.Event()
        self.notes, self.port = scene.notes, int(listener.getsockname()[1])
        self._service = Service(scene, at, address, host_names(address))
        self._loop = asyncio.new_event_loop()
        served = (self._service, self._loop, listener, started)
        self._thread = threading.Thread(target=_serve, args=served, name="view", daemon=True)
        self._thread.start()
        started.wait()

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Viewer {self.url}>"

    def _repr_html_(self) -> str:
        return f'<a href="{html.escape(self.url)}" target="_blank">{html.escape(self.url)}</a>'

    @property
    def url(self) -> str:
        """The address to open in a browser of this machine."""
        host = self._service.address if self._service.address not in ("0.0.0.0", "::") else "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/{self._service.token}/"

    @property
    def link(self) -> str:
        """The same page with the whole state in its address, as Neuroglancer has it."""
        return self._service.link(self.url.rstrip("/"))

    @property
    def is_open(self) -> bool:
        """Whether other machines reach it."""
        return self._service.is_open

    def close(self) -> None:
        """End the server; pages that show it get nothing more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._service.closing.set)
            self._thread.join()
        self._service.readers.shutdown(cancel_futures=True)


@homes_known
def view(output: Place, *volumes: Place, at: Triple | None = None, bind: str = "127.0.0.1:0") -> Viewer:
    """Return a viewer whose `url` shows `output`, `volumes` beside it, and their difference, until it is closed.

    Args:
        output: an output, also of a run at work, or any volume. Also the report of a run.
        volumes: volumes to show beside it, such as its input.
        at: voxel of `output` to begin at; its centre otherwise.
        bind: listen on this port, or ADDRESS:PORT; by default any that is free, on 127.0.0.1.

    Raises:
        VolpipeError: no such volume or voxel, the port is taken, or Neuroglancer is not installed.
    """
    places = [place_of(volume, "volume") for volume in volumes]
    return Viewer(open_scene(place_of(output, "output"), places), at, bind)


def parse_bind(text: str) -> tuple[str, int]:
    """Return address and port of ``PORT`` or ``ADDRESS:PORT``.

    Raises:
        VolpipeError: it is neither.
    """
    match = BIND.fullmatch(text.strip())
    if match is None or int(match["port"]) > 65535:
        raise VolpipeError(f"--bind {text}: write a port, such as 8765, or an address and a port, such as 0.0.0.0:8765")
    return (match["address"] or "127.0.0.1").strip("[]"), int(match["port"])


def _listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        VolpipeError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that ended a moment ago is no other
        listener.bind((address, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        where = f"--bind {address}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise VolpipeError(
                f"{where}: another program listens there; choose another port, or none for any that is free"
            ) from error
        if error.errno == errno.EACCES:
            raise VolpipeError(f"{where}: ports below 1024 are the system's; choose another") from error
        raise VolpipeError(f"{where}: {error.strerror}; choose an address of this machine") from error
    listener.setblocking(False)
    return listener


def _serve(
    service: Service, loop: asyncio.AbstractEventLoop, listener: socket.socket, started: threading.Event
) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_run(service, listener, started))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        started.set()
        loop.close()


async def _run(service: Service, listener: socket.socket, started: threading.Event) -> None:
    from tornado.httpserver import HTTPServer

    from volpipe.viewer.pages import application

    server: HTTPServer = HTTPServer(application(service))
    server.add_sockets([listener])
    started.set()
    await service.closing.wait()
    server.stop()
    await server.close_all_connections()
