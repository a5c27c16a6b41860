"""The server of a viewer: a thread that listens, on loopback unless it is told another address.

Not here: what it answers (pages).
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from dataclasses import dataclass, field

from volpipe.errors import VolpipeError
from volpipe.viewer.site import Service, client_folder


@dataclass
class Server:
    """A server in a thread of its own.

    Attributes:
        service: what it shows, to whom, and at which address.
        port: where it listens; 0 for any that is free.
    """

    service: Service
    port: int = 0
    _loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)

    def start(self) -> None:
        """Listen.

        Raises:
            VolpipeError: the port is taken, the address is not this machine's, or the client is not installed.
        """
        client_folder()
        listener = self._bind()
        self.port = listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(listener, started), name="view", daemon=True)
        self._thread.start()
        started.wait()

    def close(self) -> None:
        """Listen no more."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self.service.closing.set)
        self._thread.join()
        self.service.readers.shutdown(cancel_futures=True)
        self._loop = self._thread = None

    @property
    def url(self) -> str:
        """The address to open in a browser of this machine."""
        host = self.service.address if self.service.address not in ("0.0.0.0", "::") else "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/{self.service.token}/"

    def _bind(self) -> socket.socket:
        address = self.service.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that ended a moment ago is no other
            listener.bind((address, self.port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            where = f"--bind {address}:{self.port}"
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

        server: HTTPServer = HTTPServer(application(self.service))
        server.add_sockets([listener])
        started.set()
        await self.service.closing.wait()
        server.stop()
        await server.close_all_connections()
