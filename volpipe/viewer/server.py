"""The server of a viewer: Neuroglancer's client and the sources of its layers, to one browser, read-only.

Not here: what the sources are (sources), or the state (state). Everything lies below a random token; a request from
another page, by another name of this machine, or for anything that no layer has, is refused. Nothing can be written.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import logging
import mimetypes
import re
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from volpipe.errors import VolpipeError
from volpipe.viewer.sources import file_inside

if TYPE_CHECKING:
    from tornado.httpserver import HTTPServer

log = logging.getLogger(__name__)

LOOPBACK = ("localhost", "127.0.0.1", "::1")
READERS = 4  # threads that read chunks
REFRESH_SECONDS = 2.0  # between two questions of the page
BYTES = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
PART_BYTES = 2**26  # of a file that are held at once
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "Origin",
}

Answer = bytes | Path | None


@dataclass(frozen=True)
class Site:
    """What a server shows.

    Attributes:
        state_link: returns the address with the state, for the address of the page and that of the sources.
        source: returns what there is at a name below the sources; it may take its time.
        progress: returns a version, which changes with what is shown, and a sentence; it may take its time.
    """

    state_link: Callable[[str, str], str]
    source: Callable[[str], Answer]
    progress: Callable[[], tuple[str, str]]


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
        sockets = self._bind()
        self.port = sockets[0].getsockname()[1]
        self._readers = ThreadPoolExecutor(READERS, "view")
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(sockets, started), name="view", daemon=True)
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

    @cached_property
    def hosts(self) -> set[str]:
        """The names by which a browser may ask for this server: no other page can make itself one of these."""
        return {*LOOPBACK, self.address.lower(), *((socket.gethostname().lower(), socket.getfqdn().lower())
                if self.address not in LOOPBACK else ())}  # fmt: skip

    async def read(self, work: Callable[[], Any]) -> Any:  # Any: what `work` returns
        """Return the result of `work`, which a thread of its own does."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def closing(self) -> None:
        """Return when the server closes."""
        await self._closing.wait()

    def _bind(self) -> list[socket.socket]:
        from tornado.netutil import bind_sockets

        try:
            return bind_sockets(self.port, self.address)
        except OSError as error:
            where = f"{self.address}:{self.port}"
            if error.errno == errno.EADDRINUSE:
                raise VolpipeError(
                    f"--bind {where}: another program listens there; choose another port, or none for any that is free"
                ) from error
            if error.errno == errno.EACCES:
                raise VolpipeError(f"--bind {where}: ports below 1024 are the system's; choose another") from error
            raise VolpipeError(f"--bind {where}: nothing can listen there: {error.strerror}") from error

    def _serve(self, sockets: list[socket.socket], started: threading.Event) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run(sockets, started))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            started.set()
            self._loop.close()

    async def _run(self, sockets: list[socket.socket], started: threading.Event) -> None:
        from tornado.httpserver import HTTPServer

        server: HTTPServer = HTTPServer(_application(self))
        server.add_sockets(sockets)
        started.set()
        await self._closing.wait()
        server.stop()
        await server.close_all_connections()


def client_folder() -> Path:
    """Return the folder of Neuroglancer's client.

    Raises:
        VolpipeError: it is not installed.
    """
    package = find_spec("neuroglancer")
    if package is None or not package.submodule_search_locations or find_spec("tornado") is None:
        raise VolpipeError("volpipe view needs Neuroglancer's client: pip install 'volpipe[view]'")
    folder = Path(package.submodule_search_locations[0]) / "static" / "client"
    if not (folder / "index.html").is_file():
        raise VolpipeError(f"{folder} has no Neuroglancer client; install it again: pip install 'volpipe[view]'")
    return folder


def span(header: str, size: int) -> tuple[int, int] | None:
    """Return the first byte and one past the last that a Range header asks for, of `size`; None for none that there is.

    Raises:
        ValueError: it asks in another way, or for several parts.
    """
    match = BYTES.fullmatch(header.strip())
    if match is None or match.groups() == ("", ""):
        raise ValueError(f"Range {header!r} is not one part of bytes")
    first, last = match.groups()
    if not first:
        return (max(0, size - int(last)), size) if int(last) and size else None
    start, stop = int(first), min(size, int(last) + 1 if last else size)
    if last and int(last) < int(first):
        raise ValueError(f"Range {header!r} ends before it begins")
    return (start, stop) if start < stop else None


def _application(server: Server) -> Any:  # Any: tornado's Application
    """Return the handlers of all addresses; what none has is not found."""
    from tornado.iostream import StreamClosedError
    from tornado.web import Application, HTTPError, RequestHandler

    site = server.site

    class Guarded(RequestHandler):
        """What may ask for what: one browser, for names below the token, by a name of this machine's."""

        SUPPORTED_METHODS = ("GET", "HEAD", "OPTIONS")

        def set_default_headers(self) -> None:
            self.clear_header("Server")
            for name, value in HEADERS.items():
                self.set_header(name, value)

        def prepare(self) -> Coroutine[Any, Any, None] | None:
            token = self.path_kwargs.pop("token", "")
            if not hmac.compare_digest(token.encode(), server.token.encode()):
                raise HTTPError(404)
            host = urlsplit(f"//{self.request.host}").hostname or ""
            if host not in server.hosts:
                raise HTTPError(403)
            origin = self.request.headers.get("Origin")
            if origin is not None and origin != f"http://{self.request.host}":
                raise HTTPError(403)
            if origin is not None:
                self.set_header("Access-Control-Allow-Origin", origin)
                self.set_header("Access-Control-Allow-Headers", "Range")
                self.set_header("Access-Control-Expose-Headers", "Content-Range, Content-Length")
            return None

        def write_error(self, status_code: int, **details: Any) -> None:  # Any: as tornado has it
            error = details.get("exc_info", (None, None))[1]
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(str(error) if isinstance(error, VolpipeError) else self._reason)

        def options(self, name: str = "") -> None:
            self.set_status(204)

        async def head(self, name: str = "") -> None:
            get: Any = self.get  # tornado sends no body for HEAD
            result = get(name) if name else get()
            if result is not None:
                await result

        async def send_bytes(self, data: bytes | Path) -> None:
            """Send what was asked for of `data`: all, or one part."""
            size = len(data) if isinstance(data, bytes) else data.stat().st_size
            start, stop = 0, size
            self.set_header("Accept-Ranges", "bytes")
            if header := self.request.headers.get("Range"):
                try:
                    part = span(header, size)
                except ValueError:
                    part = (0, size)  # as RFC 9110 has it: what is not understood is left out
                    header = ""
                if part is None:
                    self.set_status(416)
                    self.set_header("Content-Range", f"bytes */{size}")
                    return
                start, stop = part
                if header:
                    self.set_status(206)
                    self.set_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.set_header("Content-Length", str(stop - start))
            while start < stop and self.request.method != "HEAD":
                end = min(stop, start + PART_BYTES)
                self.write(data[start:end] if isinstance(data, bytes) else await server.read(_Part(data, start, end)))
                await self.flush()
                start = end

    class Start(Guarded):
        """The address that is printed: it leads to the page, with the state in its address."""

        async def get(self) -> None:
            base = f"http://{self.request.host}/{server.token}"
            self.redirect(await server.read(lambda: site.state_link(f"{base}/v/view/", base)))

    class Client(Guarded):
        """Neuroglancer's own files; its page has our script as well."""

        async def get(self, name: str) -> None:
            file = file_inside(client_folder(), name or "index.html")
            if file is None:
                raise HTTPError(404)
            self.set_header("Content-Type", mimetypes.guess_type(file.name)[0] or "application/octet-stream")
            if file.name != "index.html":
                self.set_header("Cache-Control", "private, max-age=3600")
                await self.send_bytes(file)
                return
            version, _ = await server.read(site.progress)
            script = (
                f'<script defer id="volpipe-watch" src="../../watch.js" data-version="{version}" '
                f'data-seconds="{REFRESH_SECONDS}"></script></body>'
            )
            page = file.read_text(encoding="utf-8")
            await self.send_bytes(
                page.replace("</body>", script).replace("<title>neuroglancer", "<title>volpipe").encode()
            )

    class Script(Guarded):
        """Our script."""

        async def get(self) -> None:
            self.set_header("Content-Type", "text/javascript; charset=utf-8")
            await self.send_bytes(Path(__file__).with_name("watch.js"))

    class Events(Guarded):
        """The stream on which the client waits for orders; there are none, but it would complain if it ended."""

        async def get(self) -> None:
            self.set_header("Content-Type", "text/event-stream")
            try:
                await self.flush()
                await server.closing()
            except StreamClosedError:
                return

    class Progress(Guarded):
        """How far the run is."""

        async def get(self) -> None:
            version, sentence = await server.read(site.progress)
            self.set_header("Content-Type", "application/json")
            self.write(json.dumps({"version": version, "sentence": sentence}))

    class Sources(Guarded):
        """Metadata and chunks of the layers."""

        async def get(self, name: str) -> None:
            try:
                answer = await server.read(lambda: site.source(name))
                if answer is None:
                    raise HTTPError(404)
                self.set_header("Content-Type", "application/octet-stream")
                await self.send_bytes(answer)
            except VolpipeError:
                self.set_status(410)
                raise
            except (FileNotFoundError, StreamClosedError) as error:  # deleted a moment ago, or nobody waits any more
                raise HTTPError(404) from error

    token = r"/(?P<token>[A-Za-z0-9_-]{1,64})"
    return Application(
        [
            (f"{token}/", Start),
            (rf"{token}/v/view/(?P<name>[A-Za-z0-9._-]*)", Client),
            (rf"{token}/watch\.js", Script),
            (rf"{token}/events/view", Events),
            (rf"{token}/progress", Progress),
            (rf"{token}/(?P<name>(?:live|still)/.+)", Sources),
        ],
        log_function=lambda handler: log.debug("%s %s", handler.get_status(), handler.request.method),
    )


@dataclass(frozen=True)
class _Part:
    """Bytes of a file, read when called."""

    file: Path
    start: int
    stop: int

    def __call__(self) -> bytes:
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            return stream.read(self.stop - self.start)
