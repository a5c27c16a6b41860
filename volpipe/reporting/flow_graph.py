"""A flow as a drawing in SVG: a box for each stage, and arrows to it from what it reads and whose weights it uses.

Not here: which stages a flow has (workflow), or how far they are. A stage stands below all that it needs. Arrows that
pass a row have a place in it, so that they cross no box::

    +--------+
    | volume |
    +--------+
      |      |
      |  +-------+
      |  | learn |   a row: the place of an arrow that passes, and a stage
      |  +-------+
      |      |
    +------------+
    | affinities |
    +------------+
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import fmean

BOX, GAP, LANE = (148, 44), (28, 34), 24  # pixels (across, down) of a box and between two, and across for an arrow
EDGE = 8  # around all
MOST_LETTERS = 20  # of a name
FAINT = "#6b7a89"
STYLE = """
text { font-family: system-ui, Helvetica, Arial, sans-serif; font-size: 13px; text-anchor: middle; fill: #1c2733 }
.kind { font-size: 11px; fill: #5b6873 } rect { stroke-width: 1.5 }
path { fill: none; stroke: #6b7a89; stroke-width: 1.5 } marker path { fill: #6b7a89; stroke: none }
"""


@dataclass(frozen=True)
class Node:
    """A stage of the drawing.

    Attributes:
        kind: shown below its name.
        needs: names of the stages, or of the volume, from which arrows lead to it.
    """

    name: str
    kind: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Spot:
    """A place in a row: of the stage `name`, or of the arrows that lead from it and pass the row."""

    name: str
    row: int
    passes: bool


def draw_flow(stages: Sequence[Node], colours: Mapping[str, str], *, volume: str = "volume", title: str = "") -> str:
    """Return the SVG of `stages`, each of which comes after those that it needs.

    Args:
        colours: of the stages by name.
        volume: the name by which stages need what no stage makes; `title` stands in its box.
    """
    nodes = {volume: Node(volume, "volume")} | {stage.name: stage for stage in stages}
    rows = _rank_stages(nodes)
    places = _place_spots(rows)
    width = max(_width(spot) // 2 + x for spot, (x, _) in places.items()) + EDGE
    height = len(rows) * (BOX[1] + GAP[1]) - GAP[1] + 2 * EDGE
    arrows = [_arrow(places, need, stage.name) for stage in stages for need in dict.fromkeys(stage.needs)]
    at = {spot.name: place for spot, place in places.items() if not spot.passes}
    words = "; ".join(f"{stage.name} ({stage.kind}) needs {' and '.join(stage.needs)}" for stage in stages)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">',
        f"<title>{escape(words)}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
        *arrows,
        *(_svg_box(stage.name, stage.kind, at[stage.name], colours[stage.name]) for stage in stages),
        _svg_box(title or volume, "" if title in ("", volume) else volume, at[volume], FAINT),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _rank_stages(nodes: Mapping[str, Node]) -> list[list[_Spot]]:
    """Return the spots of each row: a stage stands below all that it needs, and arrows pass the rows between."""
    depth: dict[str, int] = {}
    for name, node in nodes.items():
        depth[name] = max((depth[need] + 1 for need in node.needs), default=0)
    last = {name: max((depth[n] for n, node in nodes.items() if name in node.needs), default=0) for name in nodes}
    rows: list[list[_Spot]] = []
    for row in range(max(depth.values()) + 1):
        spots = [
            _Spot(name, row, depth[name] < row)
            for name in nodes
            if row == depth[name] or depth[name] < row < last[name]
        ]
        above = {spot.name: place for place, spot in enumerate(rows[-1])} if rows else {}
        origins = {spot: [spot.name] if spot.passes else nodes[spot.name].needs for spot in spots}
        means = {
            spot: fmean([above[name] for name in names if name in above] or [0.0]) for spot, names in origins.items()
        }
        rows.append(sorted(spots, key=means.__getitem__))
    return rows


def _width(spot: _Spot) -> int:
    return LANE if spot.passes else BOX[0]


def _place_spots(rows: Sequence[Sequence[_Spot]]) -> dict[_Spot, tuple[int, int]]:
    """Return the middle (x, y) of each spot, in pixels; rows are centred below each other."""
    widths = [sum(map(_width, row)) + GAP[0] * (len(row) - 1) for row in rows]
    places = {}
    for number, (row, width) in enumerate(zip(rows, widths, strict=True)):
        x, y = EDGE + (max(widths) - width) // 2, EDGE + number * (BOX[1] + GAP[1]) + BOX[1] // 2
        for spot in row:
            places[spot] = x + _width(spot) // 2, y
            x += _width(spot) + GAP[0]
    return places


def _arrow(places: Mapping[_Spot, tuple[int, int]], start: str, end: str) -> str:
    """Return a line from one stage down to another, straight through the spots of its own between them."""
    target = next(spot for spot in places if spot.name == end and not spot.passes)
    own = sorted((spot for spot in places if spot.name == start and spot.row < target.row), key=lambda spot: spot.row)
    way = [places[spot] for spot in (*own, target)]
    half, (x, y) = BOX[1] // 2, way[0]
    path = [f"M{x} {y + half}"]
    for (x0, y0), (x1, y1) in pairwise(way):
        middle = (y0 + y1) // 2
        path.append(f"C{x0} {middle} {x1} {middle} {x1} {y1 - half}")
        if (x1, y1) != way[-1]:
            path.append(f"V{y1 + half}")
    return f'<path d="{"".join(path)}" marker-end="url(#tip)"/>'


def _svg_box(name: str, kind: str, place: tuple[int, int], colour: str) -> str:
    x, y = place
    short = name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"
    up, style = (4, f'fill="{colour}" fill-opacity="0.18" stroke="{colour}"')
    return (
        f'<rect x="{x - BOX[0] // 2}" y="{y - BOX[1] // 2}" width="{BOX[0]}" height="{BOX[1]}" rx="5" {style}/>'
        f'<text x="{x}" y="{y - 2 if kind else y + up}">{escape(short)}</text>'
        + (f'<text class="kind" x="{x}" y="{y + 14}">{escape(kind)}</text>' if kind else "")
    )
