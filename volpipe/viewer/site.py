"""What a viewer's server shows, and to whom: between the layers and HTTP.

Not here: HTTP itself (pages), or the thread that serves (viewer).
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple
from volpipe.viewer.layers import Scene, with_shades
from volpipe.viewer.state import (
    FILLED,
    address,
    alike,
    make_state,
    shown_range,
    slice_edges,
    state_link,
    window,
)

T = TypeVar("T")
NAME = re.compile(r"(live|still)/(\d{1,4})/(.+)", re.DOTALL)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
READERS = 4  # threads that read chunks
BYTES = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


@dataclass
class Service:
    """What a server shows, and to whom.

    Attributes:
        scene: the layers, with the greys of those that have voxels by now.
        at: voxel (z, y, x) of the output to begin at; None for its centre.
        address: where it listens.
        hosts: names by which a browser may ask: none that another page could give to this machine.
        token: what all addresses begin with.
        readers: threads that read.
        closing: set at the end.
        problem: with the source that was asked for last, "" without one.
    """

    scene: Scene
    at: Triple | None
    address: str
    hosts: frozenset[str]
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(READERS, "view"), repr=False)
    closing: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    problem: str = ""

    def __post_init__(self) -> None:
        self.unmeasured = {layer.name for layer in self.scene.layers if layer.shades is None}

    @property
    def is_open(self) -> bool:
        """Whether other machines reach it; then any number of this machine's is a name too."""
        return self.address not in LOOPBACK

    def is_known(self, host: str) -> bool:
        """Return whether a Host header, with or without a port, is a name of this machine's."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.hosts or (self.is_open and bool(ipaddress.ip_address(name)))
        except ValueError:  # no host, or no number
            return False

    async def read(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, done in one of the threads that read."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, work)

    def link(self, base: str) -> str:
        """Return the address of the page with the whole state in it, below the address `base`."""
        return state_link(f"{base}/v/view/", make_state(self.scene, base, self.at))

    def source(self, name: str) -> bytes | Path | None:
        """Return the bytes or the file at `name`: the number of a layer, then a name in its source; it may read voxels.

        Raises:
            VolpipeError: its volume is gone, or damaged there.
        """
        match, layers = NAME.fullmatch(name), self.scene.layers
        if match is None or int(match[2]) >= len(layers):
            return None
        layer = layers[int(match[2])]
        if address(self.scene, layer) != f"{match[1]}/{int(match[2])}":
            return None
        try:
            result = layer.objects.answer(match[3]) if layer.objects is not None else None
            return result if result is not None or layer.source is None else layer.source.answer(match[3])
        except VolpipeError as error:
            self.problem = str(error)
            raise

    @property
    def look(self) -> dict[str, object]:
        """What the page is told beside its state: what fits into a panel, and which images have the same greys."""
        scene = self.scene
        return {"edges": slice_edges(scene), "share": FILLED, "alike": alike(scene)}

    def late(self) -> dict[str, dict[str, object]]:
        """Return the controls of layers that had no voxels when the viewer was opened, and have some now, by name."""
        if any(layer.shades is None for layer in self.scene.layers if layer.style.controls):
            self.scene = with_shades(self.scene)
        return {
            layer.name: {name: {"range": shown_range(layer), "window": window(layer)} for name in layer.style.controls}
            for layer in self.scene.layers
            if layer.name in self.unmeasured and layer.shades is not None
        }

    def progress(self) -> tuple[str, str]:
        """Return a version of what is shown, and a sentence: what is wrong, or how far the runs are."""
        progress = [layer.run.look() for layer in self.scene.layers if layer.run is not None]
        version = hashlib.sha256(" ".join(entry.version for entry in progress).encode()).hexdigest()[:16]
        try:
            for layer in self.scene.layers:
                if layer.source is not None:
                    layer.source.check()
        except (VolpipeError, OSError) as error:
            return version, f"{error}; put it back, or close this viewer"
        return version, self.problem or "; ".join(entry.sentence for entry in progress)


def host_names(address: str) -> frozenset[str]:
    """Return the names by which a browser may ask for a server that listens at `address`."""
    others = () if address in LOOPBACK else (address, socket.gethostname(), socket.getfqdn())
    return frozenset({*LOOPBACK, *(name.lower() for name in others)})


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
    """Return the first byte and the end of the part that a Range header asks for; None if `size` bytes have none.

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
