"""The state that Neuroglancer opens with: layers, shaders, panels, place and zoom, as its JSON has them.

Not here: which layers there are (layers), or what they read (sources).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Box, Triple
from volpipe.reporting.shades import Range
from volpipe.reporting.slices import voxel_at
from volpipe.viewer.layers import Layer, Scene, scale_of
from volpipe.viewer.sources import NOTHING, Chunks
from volpipe.volumes.places import extent_nm

State = dict[str, Any]  # Any: Neuroglancer's JSON
WINDOW = (550, 1240)  # pixels (y, x) for all panels in a window of 1280 × 800; the page fits itself to others
FILLED = 0.94  # of a panel, by a slice
CONTROLS = 190  # pixels of the bar with the controls of greys
MOST_IN_ROW = 3
METRES = 1e-9
UNKNOWN: Range = (0.0, 1.0)  # black and white until there are voxels to measure them on

HOLE = "  if (toRaw(getDataValue(0)) >= %s) { emitTransparent(); return; }\n"


def make_state(scene: Scene, base: str, at: Triple | None = None) -> State:
    """Return the state.

    Args:
        scene: the layers.
        base: address below which the sources are served, each in a folder of its number.
        at: voxel (z, y, x) of the first layer that the output has, at first in the middle; None for its centre.
    """
    main = main_layer(scene)
    size = main.raster.voxel_size_nm
    place = at if at is not None else tuple((n - 1) // 2 for n in main.raster.shape)
    centre = [o / v + i for o, v, i in zip(main.raster.origin_nm, size, place, strict=True)]
    panels = _panels(scene.layers)
    return {
        "dimensions": {axis: _length(v, scene) for axis, v in zip("xyz", reversed(size), strict=True)},
        "position": list(reversed(centre)),
        "crossSectionScale": _zoom(scene, len(panels)),
        "projectionScale": 1.5 * max(extent_nm(main.raster)) / min(size),
        "layers": [_layer_state(layer, f"{base}/{address(scene, layer)}", scene) for layer in scene.layers],
        "layout": _panel_layout(panels),
        "crossSectionBackgroundColor": "#000000",
        "projectionBackgroundColor": "#000000",
        "showAxisLines": False,
        "showScaleBar": scene.is_sized,
        "toolPalettes": _controls(scene),
        "showDefaultAnnotations": False,
        "selectedLayer": {"layer": main.name, "visible": False},
    }


def _length(nm: float, scene: Scene) -> list[object]:
    """Return the length of a voxel with its unit, none where the size of one of the volumes is not known."""
    return [nm * METRES, "m"] if scene.is_sized else [nm, ""]


def _controls(scene: Scene) -> State:
    """Return the bar with the controls of greys and differences; none of labels alone."""
    tools = [
        {"layer": layer.name, "type": "shaderControl", "control": name}
        for layer in scene.layers
        for name in layer.style.controls
    ]
    return {"Contrast": {"side": "bottom", "row": 0, "size": CONTROLS, "tools": tools}} if tools else {}


def alike(scene: Scene) -> list[list[str]]:
    """Return the names of the images that have the same greys, a list for each range of them."""
    groups: dict[str, list[str]] = {}
    for layer in scene.layers:
        if (key := scale_of(layer)) is not None:
            groups.setdefault(key, []).append(layer.name)
    return list(groups.values())


def main_layer(scene: Scene) -> Layer:
    """Return the layer of the output: the last that shows a volume."""
    return [layer for layer in scene.layers if layer.volume is not None][-1]


def address(scene: Scene, layer: Layer) -> str:
    """Return the folder below which a layer's source is served; that of one that changes is in live/."""
    number = scene.layers.index(layer)
    return f"{'live' if layer.source is not None and layer.source.is_live else 'still'}/{number}"


def check_at(scene: Scene, at: Triple) -> None:
    """Raise unless `at` (z, y, x) is a voxel of the output.

    Raises:
        VolpipeError: with the shape.
    """
    main = main_layer(scene)
    if not Box.from_shape(main.raster.shape).contains(voxel_at(at)):
        shape = " × ".join(map(str, main.raster.shape))
        raise VolpipeError(
            f"--at {','.join(map(str, at))} lies outside of {main.name}, which has {shape} voxels (z, y, x), from 0"
        )


def state_link(page: str, state: State) -> str:
    """Return the address of the page with `state` in it."""
    return f"{page}#!{quote(json.dumps(state, separators=(',', ':')), safe='')}"


def _layer_state(layer: Layer, folder: str, scene: Scene) -> State:
    transform = _transform(layer, scene)
    sources: list[State] = [{"url": layer.url or f"{folder}/|{_scheme(layer)}:"} | transform]
    entry: State = {"name": layer.name, "source": sources}
    if layer.objects is not None:
        nm = {} if scene.is_sized else _without_unit(dict.fromkeys("xyz", 1.0))
        sources.append({"url": f"{folder}/objects/|neuroglancer-precomputed:"})
        sources.append({"url": f"{folder}/mesh/|neuroglancer-precomputed:"} | nm)
    entry["type"] = layer.style.type
    if program := shader(layer):
        entry["shader"] = program
    return {**entry, **layer.style.fields} | ({"segmentQuery": ">voxels"} if layer.objects is not None else {})


def _scheme(layer: Layer) -> str:
    assert layer.source is not None
    return layer.source.scheme


def shader(layer: Layer) -> str:
    """Return the program that turns a voxel into a colour; "" of labels, for which Neuroglancer has its own."""
    style = layer.style
    if not style.controls:
        return style.shader
    lines = [_control(name, layer, number) for number, name in enumerate(style.controls)]
    has_holes = isinstance(layer.source, Chunks) and layer.source.fill == NOTHING
    hole = HOLE % f"{float(NOTHING):.9e}" if has_holes else ""
    return "\n".join([*lines, f"void main() {{\n{hole}{style.body}}}\n"])


def _control(name: str, layer: Layer, channel: int) -> str:
    """Return the shader's line for the control `name`: a range of values, at first the layer's, that can be widened."""
    low, high, first, last = (f"{value:.9g}" for value in (*shown_range(layer), *window(layer)))
    of = f", channel={channel}" if len(layer.style.controls) > 1 else ""
    return f"#uicontrol invlerp {name}(range=[{low}, {high}], window=[{first}, {last}]{of})"


def window(layer: Layer) -> Range:
    """Return the values between which a layer's control can be moved: twice the range shown, within the type."""
    low, high = shown_range(layer)
    first, last = low - (high - low) / 2, high + (high - low) / 2
    if not _is_whole(layer):
        return first, last
    assert layer.volume is not None
    ends = np.iinfo(layer.volume.dtype)
    return float(max(ends.min, math.floor(first))), float(min(ends.max, math.ceil(last)))


def shown_range(layer: Layer) -> Range:
    """Return the range that a control begins with; of whole numbers its ends are whole, as Neuroglancer wants."""
    low, high = layer.shades or UNKNOWN
    return (float(round(low)), float(max(round(high), round(low) + 1))) if _is_whole(layer) else (low, high)


def _is_whole(layer: Layer) -> bool:
    """Return whether the browser gets the layer's voxels as whole numbers; floats come as float32."""
    return layer.volume is not None and np.issubdtype(layer.volume.dtype, np.integer)


def _transform(layer: Layer, scene: Scene) -> State:
    """Return the part of a layer's place that Neuroglancer cannot read: all of an N5's, and lengths without a unit.

    It is {} of what says both itself.
    """
    format = layer.url.rpartition("|")[2].removesuffix(":") if layer.url else _scheme(layer)
    sizes = dict(zip("zyx", layer.raster.voxel_size_nm, strict=True))
    if format != "n5" or layer.volume is None:
        if scene.is_sized:
            return {}
        return _without_unit({axis: sizes.get(axis) for axis in _axis_order(layer, format)})
    axes = [axis for axis in reversed(layer.volume.axes) if axis in "czyx"]
    origins = dict(zip("zyx", layer.raster.origin_nm, strict=True))
    dimensions = {("c^" if a == "c" else a): [1, ""] if a == "c" else _length(sizes[a], scene) for a in axes}
    matrix = []
    for i, axis in enumerate(axes):
        shift = 0.0 if axis == "c" else origins[axis] / sizes[axis] - 0.5
        matrix.append([float(i == j) for j in range(len(axes))] + [shift])
    return {"transform": {"matrix": matrix, "inputDimensions": dimensions, "outputDimensions": dimensions}}


def _without_unit(sizes: Mapping[str, float | None]) -> State:
    """Return the transform of nm to lengths without a unit; `sizes` has the voxel along each axis, None of channels."""
    before = {axis: [1, ""] if nm is None else [nm * METRES, "m"] for axis, nm in sizes.items()}
    after = {axis: [1, ""] if nm is None else [nm, ""] for axis, nm in sizes.items()}
    # Neuroglancer multiplies by the lengths of both dimensions, whatever their units.
    matrix = np.eye(len(sizes), len(sizes) + 1) * [[1.0 if nm is None else 1 / METRES] for nm in sizes.values()]
    return {"transform": {"matrix": matrix.tolist(), "inputDimensions": before, "outputDimensions": after}}


def _axis_order(layer: Layer, format: str) -> list[str]:
    """Return the axes in the order in which Neuroglancer has those of a format."""
    has_channels = layer.num_channels > 1
    if format == "neuroglancer-precomputed":
        return ["x", "y", "z", *(["c^"] if has_channels else [])]
    if isinstance(layer.source, Chunks) or layer.volume is None:
        return [*(["c^"] if has_channels else []), "z", "y", "x"]
    return ["c^" if axis == "c" else axis for axis in layer.volume.axes if axis in "czyx"]


def _panels(layers: Sequence[Layer]) -> list[list[str]]:
    """Return the names of the layers of each panel: an image with what lies upon it, labels upon the first image."""
    images = [layer for layer in layers if layer.style.has_greys]
    panels = []
    for layer in layers:
        marks = [mark.name for mark in layers if mark.marks == layer.name]
        below = [image.name for image in images[:1] if layer.style.lies_on_image]
        if not layer.marks:
            panels.append([*below, layer.name, *marks])
    return panels


def _panel_layout(panels: Sequence[Sequence[str]]) -> Any:  # Any: a name, or a tree
    """Return one view of four planes for one panel, else panels side by side, some in each row."""
    if len(panels) == 1:
        return "4panel"
    children = [{"type": "viewer", "layers": list(names), "layout": "xy"} for names in panels]
    rows = [children[i : i + MOST_IN_ROW] for i in range(0, len(children), MOST_IN_ROW)]
    if len(rows) == 1:
        return {"type": "row", "children": rows[0]}
    return {"type": "column", "children": [{"type": "row", "children": row} for row in rows]}


def slice_edges(scene: Scene) -> tuple[float, float]:
    """Return the height and width that must fit into a panel, in units of the output's smallest voxel edge."""
    raster = main_layer(scene).raster
    z, y, x = (length / min(raster.voxel_size_nm) for length in extent_nm(raster))
    return (max(y, z), max(x, z)) if len(_panels(scene.layers)) == 1 else (y, x)


def _zoom(scene: Scene, num_panels: int) -> float:
    """Return how many of the output's smallest voxel edges a pixel must show for a slice to fit into a panel."""
    columns = 2 if num_panels == 1 else min(num_panels, MOST_IN_ROW)
    rows = 2 if num_panels == 1 else -(-num_panels // MOST_IN_ROW)
    down, across = slice_edges(scene)
    return max(down * rows / WINDOW[0], across * columns / WINDOW[1]) / FILLED
