"""How a layer is drawn: its shader, the controls in that, and what it has to do with other layers.

Not here: which layer is drawn how (layers), or the rest of Neuroglancer's state (state).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from volpipe.viewer.progress import DONE, FAILED, RUNNING

CHANNELS = ("red", "green", "blue")
GREY = "  emitGrayscale(grey());\n"
# Blue at and below the lower end, white in the middle, red at and above the upper one.
CHANGE = """  float share = 2.0 * change() - 1.0;
  float red = 1.0 + min(share, 0.0), blue = 1.0 - max(share, 0.0);
  emitRGB(vec3(red, min(red, blue), blue));
"""
CELLS = f"""void main() {{
  uint state = toRaw(getDataValue());
  if (state == {DONE}u) {{ emitRGBA(vec4(0.0, 0.7, 0.2, 0.12)); }}
  else if (state == {RUNNING}u) {{ emitRGBA(vec4(1.0, 0.8, 0.0, 0.5)); }}
  else if (state == {FAILED}u) {{ emitRGBA(vec4(1.0, 0.0, 0.0, 0.6)); }}
  else {{ emitTransparent(); }}
}}
"""


@dataclass(frozen=True)
class LayerStyle:
    """How a layer is drawn.

    Attributes:
        name: of this way to draw.
        type: Neuroglancer's of the layer.
        fields: more of the layer in Neuroglancer's state.
        controls: names of the controls in its shader, each of a range of values; several are of a channel each.
        body: lines of its shader that turn what the controls give into a colour.
        shader: the whole of it, where it has no controls.
        has_greys: whether its range of values is that of all volumes of its type.
        has_changes: whether its range of values is measured on changes, and lies around 0.
        lies_on_image: whether the first image is drawn below it.
    """

    name: str
    type: str = "image"
    fields: Mapping[str, object] = field(default_factory=dict)
    controls: tuple[str, ...] = ()
    body: str = ""
    shader: str = ""
    has_greys: bool = False
    has_changes: bool = False
    lies_on_image: bool = False

    @property
    def is_grey(self) -> bool:
        """Whether a voxel has one grey level."""
        return self.has_greys and len(self.controls) == 1


OPAQUE = {"opacity": 1}
IMAGE = LayerStyle("image", fields=OPAQUE, controls=("grey",), body=GREY, has_greys=True)
DIFFERENCE = LayerStyle("difference", fields=OPAQUE, controls=("change",), body=CHANGE, has_changes=True)
LABELS = LayerStyle("labels", type="segmentation", fields={"tab": "segments"}, lies_on_image=True)
PROGRESS = LayerStyle("progress", fields={"opacity": 0.5, "blend": "default"}, shader=CELLS)


def colours(num_channels: int) -> LayerStyle:
    """Return how a volume of several channels is drawn: the first three are red, green and blue."""
    body = f"  emitRGB(vec3(red(), green(), {'blue()' if num_channels > 2 else '0.0'}));\n"
    return LayerStyle("colours", fields=OPAQUE, controls=CHANNELS[:num_channels], body=body, has_greys=True)
