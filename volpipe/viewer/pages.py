"""The pages of a viewer's server: Neuroglancer's client, the sources of its layers, and how far a run is.

Not here: what the sources are (sources), or the state (state). Everything lies below a random token; a request from
another page, by another name of this machine, or for anything that no layer has, is refused. Nothing can be written.
"""

from __future__ import annotations

import hmac
import html
import json
import logging
import mimetypes
from functools import partial
from pathlib import Path
from typing import Any

from tornado.iostream import StreamClosedError
from tornado.web import Application, HTTPError, RequestHandler

from volpipe.errors import VolpipeError
from volpipe.viewer.site import Service, client_folder, span

log = logging.getLogger(__name__)

REFRESH_SECONDS = 2.0  # between two questions of the page
# Controls of greys stand side by side, each below its panel.
STYLE = (
    ".neuroglancer-tool-palette-items{flex-direction:row!important}"
    ".neuroglancer-tool-palette-items>*{flex:1 1 0;min-width:0}"
    ".neuroglancer-tool-palette-drop-zone{display:none!important}"
)
PART_BYTES = 2**26  # of a file that are held at once
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "Origin",
}


class Guarded(RequestHandler):
    """A handler that answers only requests with our token, to a name of this machine."""

    SUPPORTED_METHODS = ("GET", "HEAD", "OPTIONS")

    def initialize(self, service: Service) -> None:
        self.service = service

    def set_default_headers(self) -> None:
        self.clear_header("Server")
        for name, value in HEADERS.items():
            self.set_header(name, value)

    def prepare(self) -> None:
        token = self.path_kwargs.pop("token", "")
        if not hmac.compare_digest(token.encode(), self.service.token.encode()):
            raise HTTPError(404)
        if not self.service.is_known(self.request.host):
            raise HTTPError(403)
        origin = self.request.headers.get("Origin")
        if origin is not None and origin != f"http://{self.request.host}":
            raise HTTPError(403)
        if origin is not None:
            self.set_header("Access-Control-Allow-Origin", origin)
            self.set_header("Access-Control-Allow-Headers", "Range")
            self.set_header("Access-Control-Expose-Headers", "Content-Range, Content-Length")

    def write_error(self, status_code: int, **details: Any) -> None:  # Any: as tornado has it
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(self._reason)

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
            if isinstance(data, bytes):
                self.write(data[start:end])
            else:
                self.write(await self.service.read(partial(_part, data, start, end)))
            await self.flush()
            start = end


class StartHandler(Guarded):
    """The address that is printed: it leads to the page, with the state in its address."""

    async def get(self) -> None:
        base = f"http://{self.request.host}/{self.service.token}"
        self.redirect(await self.service.read(lambda: self.service.link(base)))


class Client(Guarded):
    """Neuroglancer's own files; its page has our script as well."""

    async def get(self, name: str) -> None:
        file = client_folder() / (name or "index.html")  # `name` has no slash in it
        if not file.is_file():
            raise HTTPError(404)
        self.set_header("Content-Type", mimetypes.guess_type(file.name)[0] or "application/octet-stream")
        if file.name != "index.html":
            self.set_header("Cache-Control", "private, max-age=3600")
            await self.send_bytes(file)
            return
        version, _ = await self.service.read(self.service.progress)
        look = html.escape(json.dumps(self.service.look))
        script = (
            f'<style>{STYLE}</style><script defer id="volpipe-watch" src="../../watch.js" data-version="{version}" '
            f'data-seconds="{REFRESH_SECONDS}" data-look="{look}"></script></body>'
        )
        page = file.read_text(encoding="utf-8")
        await self.send_bytes(page.replace("</body>", script).replace("<title>neuroglancer", "<title>volpipe").encode())


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
            await self.service.closing.wait()
        except StreamClosedError:
            return


class ProgressHandler(Guarded):
    """How far the run is."""

    async def get(self) -> None:
        version, sentence = await self.service.read(self.service.progress)
        late = await self.service.read(self.service.late)
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps({"version": version, "sentence": sentence, "late": late}))


class Sources(Guarded):
    """Metadata and chunks of the layers."""

    async def get(self, name: str) -> None:
        try:
            answer = await self.service.read(lambda: self.service.source(name))
            if answer is None:
                raise HTTPError(404)
            self.set_header("Content-Type", "application/octet-stream")
            await self.send_bytes(answer)
        except VolpipeError as error:
            self.set_status(410)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.write(str(error))
        except OSError as error:  # deleted a moment ago, or nobody waits any more
            raise HTTPError(404) from error


def application(service: Service) -> Application:
    """Return the handlers of all addresses; what none has is not found."""
    token = r"/(?P<token>[A-Za-z0-9_-]{1,64})"
    handlers = {
        f"{token}/": StartHandler,
        rf"{token}/v/view/(?P<name>[A-Za-z0-9._-]*)": Client,
        rf"{token}/watch\.js": Script,
        rf"{token}/events/view": Events,
        rf"{token}/progress": ProgressHandler,
        rf"{token}/(?P<name>(?:live|still)/.+)": Sources,
    }
    return Application(
        [(address, handler, {"service": service}) for address, handler in handlers.items()],
        log_function=lambda handler: log.debug("%s %s", handler.get_status(), handler.request.method),
    )


def _part(file: Path, start: int, stop: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read(stop - start)
