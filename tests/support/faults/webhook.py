"""A server on loopback that takes what is posted to it, in whatever mood."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "s3cret"


@dataclass
class Webhook:
    """What was posted, and how it is answered.

    Attributes:
        posts: as JSON, in order.
        statuses: of the next answers; 200 when there are no more.
        hangs: whether there is no answer at all.
        trickles: whether an answer comes byte by byte, and never whole.
    """

    port: int = 0
    posts: list[Any] = field(default_factory=list)  # Any: JSON
    headers: list[dict[str, str]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    hangs: bool = False
    trickles: bool = False
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """The address, with secrets wherever it may have some."""
        return f"http://me:{SECRET}@127.0.0.1:{self.port}/hooks/{SECRET}?token={SECRET}"


@contextmanager
def webhook() -> Iterator[Webhook]:
    """Give a server, up meanwhile."""
    hook = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hook.posts.append(json.loads(body))
            hook.headers.append(dict(self.headers))
            if hook.hangs:
                hook.closing.wait(60)
            while hook.trickles and not hook.closing.is_set():
                self.wfile.write(b"H")
                time.sleep(0.02)
            if hook.hangs or hook.trickles:
                return
            self.send_response(hook.statuses.pop(0) if hook.statuses else 200)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            raise AssertionError("nobody asks for anything here")

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:  # whoever posted waits no longer
                return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hook.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hook
        finally:
            hook.closing.set()
            server.shutdown()
            thread.join()
