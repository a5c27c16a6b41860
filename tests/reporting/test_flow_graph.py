"""The drawing of a flow: boxes that do not touch, arrows that cross none, and each need an arrow."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volpipe.reporting.flow_graph import BOX, Node, draw_flow
from volpipe.reporting.tasks import FAILED_COLOUR, colours_of

SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def flows(draw: st.DrawFn) -> list[Node]:
    """Draw stages that each need some of the earlier ones, or the volume."""
    nodes: list[Node] = []
    for number in range(draw(st.integers(1, 9))):
        earlier = ["volume", *(node.name for node in nodes)]
        needs = draw(st.lists(st.sampled_from(earlier), min_size=1, max_size=3))
        nodes.append(Node(f"stage_{number}", "run", tuple(needs)))
    return nodes


def drawn(nodes: list[Node]) -> tuple[dict[str, tuple[int, int]], list[list[tuple[int, int]]]]:
    """Return the corner of each box by its name, and points along each arrow."""
    root = ElementTree.fromstring(draw_flow(nodes, colours_of([node.name for node in nodes])))
    boxes = [rect for rect in root.findall(f"{SVG}rect") if rect.get("x")]
    names = [text.text or "" for text in root.findall(f"{SVG}text") if not text.get("class")]
    corners = {n: (int(box.attrib["x"]), int(box.attrib["y"])) for n, box in zip(names, boxes, strict=True)}
    return corners, [points(path.attrib["d"]) for path in root.findall(f"{SVG}path")]


def points(path: str) -> list[tuple[int, int]]:
    """Return points along a path of curves and vertical lines, some for each of them."""
    (x, y), shown = map(int, path[1:].partition("C")[0].split()), list[tuple[int, int]]()
    for command, numbers in re.findall(r"([CV])([^CV]+)", path[path.index("C") :]):
        values = [*map(int, numbers.split())]
        if command == "V":
            shown += [(x, y + (values[0] - y) * i // 8) for i in range(9)]
            y = values[0]
            continue
        xs, ys = (x, *values[::2]), (y, *values[1::2])
        weights = [((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3) for t in (i / 16 for i in range(17))]
        shown += [tuple(round(sum(w * v for w, v in zip(ws, vs, strict=True))) for vs in (xs, ys)) for ws in weights]  # type: ignore[misc]
        x, y = values[4:]
    return shown


@given(nodes=flows())
def test_each_need_has_an_arrow_downwards_that_crosses_no_box(nodes: list[Node]) -> None:
    corners, arrows = drawn(nodes)
    assert set(corners) == {"volume", *(node.name for node in nodes)}
    for (_, (x, y)), (_, (u, v)) in itertools.combinations(corners.items(), 2):
        assert abs(x - u) > BOX[0] or abs(y - v) > BOX[1]
    ends = []
    for arrow in arrows:
        assert all(a[1] <= b[1] for a, b in itertools.pairwise(arrow))
        for (x, y), (across, down) in itertools.product(arrow[1:-1], corners.values()):
            assert not (across < x < across + BOX[0] and down < y < down + BOX[1])
        start, end = arrow[0], arrow[-1]
        (source,) = [n for n, (x, y) in corners.items() if (x + BOX[0] // 2, y + BOX[1]) == start]
        (target,) = [n for n, (x, y) in corners.items() if (x + BOX[0] // 2, y) == end]
        ends.append((source, target))
    assert sorted(ends) == sorted({(need, node.name) for node in nodes for need in node.needs})


def test_names_are_text_and_long_ones_are_shortened() -> None:
    svg = draw_flow([Node("a" * 40, "<run>", ("volume",))], {"a" * 40: "#123456"}, title="<b>.n5")
    texts = [text.text for text in ElementTree.fromstring(svg).findall(f"{SVG}text")]
    assert texts == [f"{'a' * 19}…", "<run>", "<b>.n5", "volume"]


@pytest.mark.parametrize("num", [1, 10, 11, 60])
def test_all_stages_have_colours_of_their_own(num: int) -> None:
    colours = list(colours_of([str(i) for i in range(num)]).values())
    assert len({*colours, FAILED_COLOUR}) == num + 1
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
