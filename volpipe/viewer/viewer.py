"""A viewer: the layers of some volumes, a server for them, and the address to open.

Not here: printing, or a browser (cli).
"""

from __future__ import annotations

import hashlib
import html
import re
from pathlib import Path

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple
from volpipe.viewer.layers import Scene, open_scene
from volpipe.viewer.server import Server
from volpipe.viewer.site import Answer, Service, host_names
from volpipe.viewer.state import address, check_at, make_state, state_link
from volpipe.volumes.volume import Volume

NAME = re.compile(r"(live|still)/(\d{1,4})/(.+)", re.DOTALL)
BIND = re.compile(r"(?:(?P<address>\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+):)?(?P<port>\d{1,5})")


class Viewer:
    """Volumes that a browser shows until it is closed.

    Attributes:
        notes: sentences on what the viewer had to assume or leave out.
    """

    def __init__(self, scene: Scene, at: Triple | None, bind: str) -> None:
        if at is not None:
            check_at(scene, at)
        self._scene = scene
        self._at = at
        self._problem = ""
        listen, port = parse_bind(bind)
        service = Service(self._state_link, self._answer, self._progress, listen, host_names(listen))
        self._server = Server(service, port)
        self.notes = scene.notes
        self._server.start()

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
        return self._server.url

    @property
    def link(self) -> str:
        """The same page with the whole state in its address, as Neuroglancer has it."""
        base = self.url.rstrip("/")
        return self._state_link(f"{base}/v/view/", base)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    @property
    def is_open(self) -> bool:
        """Whether other machines reach it."""
        return self._server.service.is_open

    def close(self) -> None:
        """End the server; pages that show it get nothing more."""
        self._server.close()

    def _state_link(self, page: str, base: str) -> str:
        return state_link(page, make_state(self._scene, base, self._at))

    def _answer(self, name: str) -> Answer:
        """Return what there is at `name`: layer, then what its source calls so."""
        match = NAME.fullmatch(name)
        layers = self._scene.layers
        if match is None or int(match[2]) >= len(layers):
            return None
        layer = layers[int(match[2])]
        if address(self._scene, layer) != f"{match[1]}/{int(match[2])}":
            return None
        try:
            result = layer.objects.answer(match[3]) if layer.objects is not None else None
            return result if result is not None or layer.source is None else layer.source.answer(match[3])
        except VolpipeError as error:
            self._problem = str(error)
            raise

    def _progress(self) -> tuple[str, str]:
        """Return a version of what is shown, and a sentence: what is wrong, or how far the runs are."""
        progress = [layer.run.look() for layer in self._scene.layers if layer.run is not None]
        version = hashlib.sha256(" ".join(entry.version for entry in progress).encode()).hexdigest()[:16]
        try:
            for layer in self._scene.layers:
                if layer.source is not None:
                    layer.source.check()
        except (VolpipeError, OSError) as error:
            return version, f"{error}; put it back, or close this viewer"
        return version, self._problem or "; ".join(entry.sentence for entry in progress)


def view(
    output: str | Path | Volume, *volumes: str | Path | Volume, at: Triple | None = None, bind: str = "127.0.0.1:0"
) -> Viewer:
    """Return a viewer whose `url` shows `output`, `volumes` beside it, and their difference, until it is closed.

    Args:
        output: of a run or a segmentation, also one that goes on; or any volume.
        volumes: such as its input; or their locations, as `open` takes them.
        at: voxel (z, y, x) of the output to begin at; its centre where it is not given.
        bind: port, or address and port, to listen on; 0 is any that is free.

    Raises:
        VolpipeError: no such volume or voxel, the port is taken, or Neuroglancer is not installed.
    """
    return Viewer(open_scene(output, volumes), at, bind)


def parse_bind(text: str) -> tuple[str, int]:
    """Return address and port of ``PORT`` or ``ADDRESS:PORT``.

    Raises:
        VolpipeError: it is neither.
    """
    match = BIND.fullmatch(text.strip())
    if match is None or int(match["port"]) > 65535:
        raise VolpipeError(f"--bind {text}: write a port, such as 8765, or an address and a port, such as 0.0.0.0:8765")
    return (match["address"] or "127.0.0.1").strip("[]"), int(match["port"])
