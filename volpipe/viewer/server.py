"""The server of a viewer: a thread that listens, on loopback unless it is told another address.

Not here: what it answers (pages).
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from volpipe.errors import VolpipeError
from volpipe.viewer.site import Service, Site, client_folder

LOOPBACK = ("localhost", "127.0.0.1", "::1")
READERS = 4  # threads that read chunks


@dataclass
class Server:
    """A server in a thread of its own.

    Attributes:
        site: what it shows.
        address: where it listens.
        port: where it listens; 0 for any that is free.
        token: what its addresses begin with.
    """

    site: Site
    address: str = "127.0.0.1"
    port: int = 0
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    _loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)
    _readers: ThreadPoolExecutor | None = field(default=None, repr=False)
    _closing: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def start(self) -> None:
        """Listen.

        Raises:
            VolpipeError: the port is taken, the address is not this machine's, or the client is not installed.
        """
        client_folder()
        listener = self._bind()
        self.port = listener.getsockname()[1]
        self._readers = ThreadPoolExecutor(READERS, "view")
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(listener, started), name="view", daemon=True)
        self._thread.start()
        started.wait()

    def close(self) -> None:
        """Listen no more."""
        if self._loop is None or self._thread is None or self._readers is None:
            return
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._readers.shutdown(cancel_futures=True)
        self._loop = self._thread = self._readers = None

    @property
    def url(self) -> str:
        """The address to open in a browser of this machine."""
        host = self.address if self.address not in ("0.0.0.0", "::") else "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/{self.token}/"

    @property
    def hosts(self) -> frozenset[str]:
        """The names by which a browser may ask for this server."""
        others = (self.address, socket.gethostname(), socket.getfqdn()) if self.is_open else ()
        return frozenset({*LOOPBACK, *(name.lower() for name in others)})

    @property
    def is_open(self) -> bool:
        """Whether other machines reach it."""
        return self.address not in LOOPBACK

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that ended a moment ago is no other
            listener.bind((self.address, self.port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            where = f"--bind {self.address}:{self.port}"
            if error.errno == errno.EADDRINUSE:
                raise VolpipeError(
                    f"{where}: another program listens there; choose another port, or none for any that is free"
                ) from error
            if error.errno == errno.EACCES:
                raise VolpipeError(f"{where}: ports below 1024 are the system's; choose another") from error
            raise VolpipeError(f"{where}: {error.strerror}; choose an address of this machine") from error
        listener.setblocking(False)
        return listener

    def _serve(self, listener: socket.socket, started: threading.Event) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run(listener, started))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            started.set()
            self._loop.close()

    async def _run(self, listener: socket.socket, started: threading.Event) -> None:
        from tornado.httpserver import HTTPServer

        from volpipe.viewer.pages import application

        assert self._readers is not None
        service = Service(self.site, self.token, self.hosts, self.is_open, self._readers, self._closing)
        server: HTTPServer = HTTPServer(application(service))
        server.add_sockets([listener])
        started.set()
        await self._closing.wait()
        server.stop()
        await server.close_all_connections()
