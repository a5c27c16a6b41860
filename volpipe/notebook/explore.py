"""A volume, an output and labels in a notebook: three linked planes with sliders, and a picture where there are none.

Not here: what is read (cuts), or what the browser does (explore.js). Only voxels in sight are read, and drawn here, so
that the browser gets small PNGs. Messages to it and from it are plain values, with the PNGs beside them.
"""

from __future__ import annotations

import base64
import io
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import triple
from volpipe.notebook.boxes import checked_at
from volpipe.notebook.cuts import AXES, Cut, Plane, Region, Stack
from volpipe.reporting.panels import Panel, panels_png
from volpipe.reporting.shades import Range, coloured, display_range, in_colour, shaded
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.storage.paths import shown
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

STILL = 320  # pixels of the longer edge of each plane in the picture
MOST_PIXELS = 4096  # of a panel, whatever a browser asks for
OPACITY = 0.5  # of labels on an image
ADVICE = "A picture only: pip install 'volpipe[notebook]' brings planes that move."
LEVELS = "a copy with coarser levels (volpipe run VOLUME --set net.name=identity -o COPY.zarr)"  # convert makes none

Message = dict[str, Any]  # Any: JSON


@dataclass
class Explorer:
    """Planes of a volume, and of an output and labels in the same place; shows itself in a notebook.

    Attributes:
        images: the volume, and the output where there is one.
        labels: drawn over them in colours, a colour for each object.
        at: the point that all planes meet, in nm (z, y, x).
        shades: the values that are black and white, of each image.
        notes: what a user should know.
    """

    images: tuple[Stack, ...]
    labels: Stack | None
    at: Lengths
    notes: tuple[str, ...] = ()
    shades: list[Range] = field(default_factory=list)
    _widget: Any = None  # anywidget's, where that is installed

    def __post_init__(self) -> None:
        for image in self.images:
            self.shades.append(self._measured(image))

    def _measured(self, image: Stack) -> Range:
        """Return the values that are black and white: those of an earlier image of the type, or measured on a slice."""
        dtype = image.levels[0].dtype
        for other, shades in zip(self.images, self.shades, strict=False):
            if other.levels[0].dtype == dtype:
                return shades
        cut = image.cut(self._whole("xy", image))
        return display_range() if cut is None else display_range(cut.data[:, cut.is_known])

    def _whole(self, plane: Plane, image: Stack) -> Region:
        """Return the region of all of `image`, as coarse as the picture shows it."""
        (low, high), (_, down, across) = image.bounds, AXES[plane]
        pixel = max(high[down] - low[down], high[across] - low[across]) / STILL
        return Region(plane, self.at, (low[down], low[across]), (high[down], high[across]), pixel)

    def __repr__(self) -> str:
        return f"<Explorer of {', '.join(shown(image.levels[0]) for image in self.images)}>"

    def png(self) -> bytes:
        """Return a PNG of the three planes of each image, with labels over them, and what should be known."""
        rows = []
        for image, shades in zip(self.images, self.shades, strict=True):
            name = Path(str(image.levels[0])).name
            planes = ((plane, _still(image, self.labels, self._whole(plane, image), shades)) for plane in AXES)
            rows.append([Panel(f"{name} {plane}", pixels) for plane, pixels in planes])
        return panels_png(rows, [*self.notes, *([] if _has_widgets() else [ADVICE])])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[Message, Message]:
        """Return the picture, and beside it the widget where there can be one; Any: names, unused."""
        bundle: Message = {"text/plain": repr(self), "image/png": self.png()}
        if _has_widgets():
            bundle = dict(self._started(bundle["image/png"])._repr_mimebundle_()[0]) | bundle
        return bundle, {}

    def _started(self, picture: bytes) -> Any:  # Any: an AnyWidget
        """Return the widget, which asks for pictures as soon as a browser shows it, and shows `picture` until then.

        Pages that are exported with the state of widgets have no Python to ask: there the picture stays.
        """
        import anywidget
        from traitlets import Unicode

        if self._widget is None:
            still = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
            source = (Path(__file__).parent / "explore.js").read_text(encoding="utf-8")
            parts = {"_esm": source, "still": Unicode(still).tag(sync=True)}
            self._widget = type("ExploreWidget", (anywidget.AnyWidget,), parts)()
            self._widget.on_msg(self._answer)
        return self._widget

    def _answer(self, widget: Any, message: Message, buffers: Any) -> None:  # Any: ipywidgets', buffers unused
        """Send the browser the answer to its message, or the reason why there is none."""
        try:
            if message["kind"] == "open":
                widget.send(self.scene())
            else:
                content, pictures = self.draw(message)
                widget.send(content, pictures)
        except Exception as error:
            is_ours = isinstance(error, VolpipeError | OSError)
            if not is_ours:
                log.exception("vp.explore has no answer to %s", message)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}"
            widget.send({"kind": "refusal", "number": message.get("number", 0), "text": text})

    def scene(self) -> Message:
        """Return what the browser knows before it asks for pictures: names, faces, voxels, greys."""
        first = self.images[0]
        lows, highs = zip(*(image.bounds for image in self.images), strict=True)
        return {
            "kind": "scene",
            "names": [str(image.levels[0]) for image in self.images],
            "labels": None if self.labels is None else str(self.labels.levels[0]),
            "low": [min(each) for each in zip(*lows, strict=True)],
            "high": [max(each) for each in zip(*highs, strict=True)],
            "origin": first.rasters[0].origin_nm,
            "voxel": first.rasters[0].voxel_size_nm,
            "shape": first.rasters[0].shape,
            "levels": max(len(image.levels) for image in self.images),
            "at": self.at,
            "shades": self.shades,
            "opacity": OPACITY,
            "notes": self.notes,
        }

    def draw(self, message: Message) -> tuple[Message, list[bytes]]:
        """Return the pictures that the browser asks for, and where they lie.

        `message` has at and pixel in nm, level, shades of each image, and panels: a row, its plane and its pixels.
        """
        pictures, buffers, sparse = [], [], list[tuple[float, Stack]]()
        for asked in message["panels"]:
            image, region = self.images[int(asked["row"])], _region(message, asked)
            shades = message["shades"][int(asked["row"])]
            for what, stack in (("image", image), ("labels", self.labels)):
                cut = None if stack is None else stack.cut(region)
                if cut is not None and stack is not None:
                    pixels = _drawn(cut, stack, (shades[0], shades[1]), is_over=what == "labels")
                    buffers.append(_png(pixels))
                    place = {"low": cut.low, "high": cut.high, "level": cut.level, "index": cut.index}
                    place |= {"steps": cut.steps, "share": cut.share}
                    pictures.append({"row": asked["row"], "plane": asked["plane"], "what": what, **place})
                    if cut.share < 1:
                        sparse.append((cut.share, stack))
        answer = {"kind": "pictures", "number": message["number"], "pictures": pictures, "notes": _sparse_notes(sparse)}
        return answer, buffers


def open_explorer(
    volume: Volume, output: Volume | None = None, labels: Volume | None = None, at: Sequence[int] | None = None
) -> Explorer:
    """Return planes of `volume` and `output` with `labels` over them, that meet at voxel `at` of `volume`.

    Raises:
        VolpipeError: `at` is no voxel of the volume, `labels` are no labels, or a volume has several points in time.
    """
    images = [each for each in (volume, output) if each is not None]
    if labels is not None and (labels.dtype.kind not in "ui" or labels.num_channels > 1):
        raise VolpipeError(
            f"{labels} holds {labels.dtype} of {labels.channels}, and labels are whole numbers of one channel; give it "
            "as the output, to see it beside the volume"
        )
    middle = checked_at(at, volume.spatial_shape)
    stacks = tuple(map(Stack.from_volume, images))
    raster = stacks[0].rasters[0]
    places = zip(middle, raster.origin_nm, raster.voxel_size_nm, strict=True)
    everything = [*images, *([] if labels is None else [labels])]
    notes = [f"{shown(each)}: voxel size unknown, shown as 1 nm" for each in everything if each.voxel_size_nm is None]
    notes += [
        f"{shown(each)}: channels 0, 1 and 2 of {each.num_channels} are red, green and blue"
        for each in images
        if each.num_channels > 3
    ]
    over = None if labels is None else Stack.from_volume(labels)
    point = triple(origin + place * size for place, origin, size in places)
    return Explorer(stacks, over, point, tuple(notes))


def _has_widgets() -> bool:
    from importlib.util import find_spec

    return find_spec("anywidget") is not None


def _sparse_notes(sparse: Sequence[tuple[float, Stack]]) -> list[str]:
    """Return a note where only a share of the visible chunks is read, with what helps."""
    if not sparse:
        return []
    share = min(share for share, _ in sparse)
    copy = "" if all(stack.is_labels for _, stack in sparse) else f", or make {LEVELS}"  # of labels a run makes none
    return [f"{100 * share:.2g} % of the chunks in sight are read, each in its place; zoom in to see all{copy}"]


def _region(message: Message, asked: Message) -> Region:
    """Return the region of a panel: `size` pixels (down, across) around the point that all planes meet."""
    z, y, x = (float(value) for value in message["at"])
    pixel, plane = float(message["pixel"]), asked["plane"]
    _, *axes = AXES[plane]
    half = [pixel * min(float(n), MOST_PIXELS) / 2 for n in asked["size"]]
    low, high = ([(z, y, x)[a] + sign * h for a, h in zip(axes, half, strict=True)] for sign in (-1, 1))
    return Region(plane, (z, y, x), (low[0], low[1]), (high[0], high[1]), pixel, message["level"])


def _drawn(cut: Cut, stack: Stack, shades: Range, *, is_over: bool) -> np.ndarray:
    """Return the colours (y, x, 4) of a cut; with `is_over` label 0 is clear, to lie over an image."""
    pixels = in_colour(coloured(cut.data[0]) if is_over or stack.is_labels else shaded(cut.data, shades))
    is_clear = ~cut.is_known | (cut.data[0] == 0 if is_over else False)
    pixels = np.concatenate([pixels, np.full((*pixels.shape[:2], 1), 255, np.uint8)], axis=-1)
    pixels[is_clear] = 0
    return pixels


def _still(image: Stack, labels: Stack | None, region: Region, shades: Range) -> np.ndarray:
    """Return a plane of `image` with `labels` over it, (y, x, 3), uint8, with square pixels."""
    (low, high), (_, down, across) = image.bounds, AXES[region.plane]
    shape = [max(1, math.ceil((high[a] - low[a]) / region.pixel)) for a in (down, across)]
    canvas = np.full((*shape, 3), 34, np.uint8)
    axes = zip((down, across), shape, strict=True)
    places = [low[a] + (np.arange(n) + 0.5) * region.pixel for a, n in axes]  # centres of pixels
    for stack, share in ((image, 1.0), (labels, OPACITY)):
        cut = None if stack is None else stack.cut(region)
        if cut is None or stack is None:
            continue
        shown = _drawn(cut, stack, shades, is_over=stack is labels)
        which = [
            np.floor((place - edge) / (far - edge) * n).astype(int)
            for place, edge, far, n in zip(places, cut.low, cut.high, shown.shape[:2], strict=True)
        ]
        inside = [(w >= 0) & (w < n) for w, n in zip(which, shown.shape[:2], strict=True)]
        where = np.ix_(np.flatnonzero(inside[0]), np.flatnonzero(inside[1]))
        pixels = shown[np.ix_(which[0][inside[0]], which[1][inside[1]])]
        weight = share * (pixels[..., 3:] / 255)
        canvas[where] = np.rint(canvas[where] * (1 - weight) + pixels[..., :3] * weight).astype(np.uint8)
    return canvas


def _png(pixels: np.ndarray) -> bytes:
    """Return pixels (y, x, 4), uint8, as a PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG", compress_level=1)
    return file.getvalue()
