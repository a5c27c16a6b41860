"""The state that Neuroglancer opens with: layers, shaders, panels, place and zoom, as its JSON has them.

Not here: which layers there are (layers), or what they read (sources).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Box, Triple
from volpipe.viewer.layers import Layer, Scene
from volpipe.viewer.progress import DONE, FAILED, RUNNING
from volpipe.viewer.sources import NOTHING
from volpipe.volumes.raster import extent_nm

State = dict[str, Any]  # Any: Neuroglancer's JSON
WINDOW = (680, 1240)  # pixels (y, x) for all panels in a window of 1280 × 800
FILLED = 0.9  # of a panel, by a slice
MOST_IN_ROW = 3
METRES = 1e-9

GREY = """#uicontrol invlerp grey(range=[{low}, {high}])
void main() {{ emitGrayscale(grey()); }}
"""
CHANGE = """#uicontrol invlerp change(range=[{low}, {high}])
void main() {{
  if (toRaw(getDataValue()) >= {nothing}) {{ emitTransparent(); }}
  else {{ emitGrayscale(change()); }}
}}
"""
COLOURS = """#uicontrol invlerp red(range=[{low}, {high}], channel=0)
#uicontrol invlerp green(range=[{low}, {high}], channel=1)
{blue_control}void main() {{ emitRGB(vec3(red(), green(), {blue})); }}
"""
BLUE = "#uicontrol invlerp blue(range=[{low}, {high}], channel=2)\n"
CELLS = f"""void main() {{
  uint state = toRaw(getDataValue());
  if (state == {DONE}u) {{ emitRGBA(vec4(0.0, 0.7, 0.2, 0.12)); }}
  else if (state == {RUNNING}u) {{ emitRGBA(vec4(1.0, 0.8, 0.0, 0.5)); }}
  else if (state == {FAILED}u) {{ emitRGBA(vec4(1.0, 0.0, 0.0, 0.6)); }}
  else {{ emitTransparent(); }}
}}
"""


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
        "dimensions": {axis: [v * METRES, "m"] for axis, v in zip("xyz", reversed(size), strict=True)},
        "position": list(reversed(centre)),
        "crossSectionScale": _zoom(main, len(panels)),
        "projectionScale": 1.5 * max(extent_nm(main.raster)) / min(size),
        "layers": [_layer(layer, f"{base}/{address(scene, layer)}", base) for layer in scene.layers],
        "layout": _layout(panels),
        "showDefaultAnnotations": False,
        "selectedLayer": {"layer": main.name, "visible": False},
    }


def main_layer(scene: Scene) -> Layer:
    """Return the layer of the output: the last that shows a volume."""
    return [layer for layer in scene.layers if layer.kind not in ("difference", "progress")][-1]


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
    if not Box.from_shape(main.raster.shape).contains(Box(at, tuple(n + 1 for n in at))):
        shape = " × ".join(map(str, main.raster.shape))
        raise VolpipeError(
            f"--at {','.join(map(str, at))} lies outside of {main.name}, which has {shape} voxels (z, y, x), from 0"
        )


def state_link(page: str, state: State) -> str:
    """Return the address of the page with `state` in it."""
    return f"{page}#!{quote(json.dumps(state, separators=(',', ':')), safe='')}"


def _layer(layer: Layer, folder: str, base: str) -> State:
    sources: list[State] = [{"url": layer.url or f"{folder}/|{_scheme(layer)}:"} | _transform(layer)]
    entry: State = {"name": layer.name, "source": sources}
    if layer.objects is not None:
        sources += [{"url": f"{folder}/{name}/|neuroglancer-precomputed:"} for name in ("objects", "mesh")]
    if layer.kind == "labels":
        return (
            entry | {"type": "segmentation", "tab": "segments"} | ({"segmentQuery": ">voxels"} if layer.objects else {})
        )
    if layer.kind == "progress":
        return entry | {"type": "image", "shader": CELLS, "opacity": 0.5, "blend": "default"}
    return entry | {"type": "image", "shader": shader(layer), "opacity": 1}


def _scheme(layer: Layer) -> str:
    assert layer.source is not None
    return layer.source.scheme


def shader(layer: Layer) -> str:
    """Return the program that turns a voxel of an image into a colour."""
    low, high = (f"{value:.9g}" for value in layer.shades)
    if layer.kind == "difference":
        return CHANGE.format(low=low, high=high, nothing=f"{float(NOTHING):.9e}")
    if layer.kind != "colours":
        return GREY.format(low=low, high=high)
    has_blue = layer.num_channels > 2
    control = BLUE.format(low=low, high=high) if has_blue else ""
    return COLOURS.format(low=low, high=high, blue_control=control, blue="blue()" if has_blue else "0.0")


def _transform(layer: Layer) -> State:
    """Return the place of an N5, whose own metadata have none that Neuroglancer reads; {} of other formats."""
    is_n5 = layer.url.endswith("|n5:") if layer.url else _scheme(layer) == "n5"
    if not is_n5 or layer.volume is None:
        return {}
    axes = [axis for axis in reversed(layer.volume.axes) if axis in "czyx"]
    sizes = dict(zip("zyx", layer.raster.voxel_size_nm, strict=True))
    origins = dict(zip("zyx", layer.raster.origin_nm, strict=True))
    dimensions = {("c^" if a == "c" else a): [1, ""] if a == "c" else [sizes[a] * METRES, "m"] for a in axes}
    matrix = []
    for i, axis in enumerate(axes):
        shift = 0.0 if axis == "c" else origins[axis] / sizes[axis] - 0.5
        matrix.append([float(i == j) for j in range(len(axes))] + [shift])
    return {"transform": {"matrix": matrix, "inputDimensions": dimensions, "outputDimensions": dimensions}}


def _panels(layers: Sequence[Layer]) -> list[list[str]]:
    """Return the names of the layers of each panel: an image with what lies upon it, labels upon the first image."""
    images = [layer for layer in layers if layer.kind in ("image", "colours")]
    panels = []
    for layer in layers:
        marks = [mark.name for mark in layers if mark.kind == "progress" and mark.name == f"progress of {layer.name}"]
        if layer.kind == "labels":
            panels.append([*(image.name for image in images[:1]), layer.name, *marks])
        elif layer.kind != "progress":
            panels.append([layer.name, *marks])
    return panels


def _layout(panels: Sequence[Sequence[str]]) -> Any:  # Any: a name, or a tree
    """Return one view of four planes for one panel, else panels side by side, some in each row."""
    if len(panels) == 1:
        return "4panel"
    children = [{"type": "viewer", "layers": list(names), "layout": "xy"} for names in panels]
    rows = [children[i : i + MOST_IN_ROW] for i in range(0, len(children), MOST_IN_ROW)]
    if len(rows) == 1:
        return {"type": "row", "children": rows[0]}
    return {"type": "column", "children": [{"type": "row", "children": row} for row in rows]}


def _zoom(layer: Layer, num_panels: int) -> float:
    """Return how many of the smallest voxel edges a pixel shows, so that a slice fits into a panel."""
    columns = 2 if num_panels == 1 else min(num_panels, MOST_IN_ROW)
    rows = 2 if num_panels == 1 else -(-num_panels // MOST_IN_ROW)
    _, y, x = extent_nm(layer.raster)
    pixels = (FILLED * WINDOW[0] / rows, FILLED * WINDOW[1] / columns)
    return max(y / pixels[0], x / pixels[1]) / min(layer.raster.voxel_size_nm)
