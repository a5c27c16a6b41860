#!/usr/bin/env python
"""Draws the figures of docs/concepts, docs/tutorials and docs/fail.md into docs/figures, from code and invented tissue.

The curves are the weights that a run uses (volpipe/geometry/blend.py); the pictures are of runs over `volpipe sample`.
Not here: the figures of README.md and of the front page. `scripts/figures_concepts.py NAME…` draws some alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from volpipe.geometry.blend import Family, span
from volpipe.geometry.grid import Lattice

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
COLOURS = ("#3b6ea5", "#c8553d", "#4b8b5f", "#8a6bab", "#b8862b")
INK, PALE, LINE = "#222222", "#e8eef5", "#8899aa"


Points = Sequence[tuple[float, float]]


class Drawing:
    """Shapes of an SVG, in pixels from the top left corner, on white, so that it is read on dark pages too."""

    def __init__(self, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="13">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str = PALE, stroke: str = LINE) -> None:
        size = f'width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" {size} fill="{fill}" stroke="{stroke}"/>')

    def text(self, x: float, y: float, words: str, anchor: str = "start", fill: str = INK, size: int = 13) -> None:
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"'
        self.parts.append(f"<text {place}>{words}</text>")

    def line(
        self, points: Sequence[tuple[float, float]], stroke: str = INK, width: float = 1.5, dash: str = ""
    ) -> None:
        route = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f'fill="none" stroke="{stroke}" stroke-width="{width}"' + (
            f' stroke-dasharray="{dash}"' if dash else ""
        )
        self.parts.append(f'<polyline points="{route}" {style}/>')

    def arrow(self, x: float, y: float, end: float) -> None:
        self.line([(x, y), (end - 5, y)])
        self.parts.append(f'<polygon points="{end - 7:g},{y - 4:g} {end:g},{y:g} {end - 7:g},{y + 4:g}" fill="{INK}"/>')

    def save(self, name: str) -> None:
        (FIGURES / name).write_text("\n".join([*self.parts, "</svg>", ""]))


def draw_voxel() -> None:
    """The stages of a run, and what each of them hands to the next one."""
    drawing = Drawing(900, 200)
    steps = (
        ("volume", "chunks", "z, y, x"),
        ("window", "cut, mirrored at", "faces, normalised"),
        ("net", "on the worker's", "CPU or GPU"),
        ("block", "weighted sum of", "its windows"),
        ("shard", "blocks that meet,", "rounded, clipped"),
        ("levels", "means of 2³", "for viewers"),
    )
    for number, (name, *lines) in enumerate(steps):
        x = 10 + 150 * number
        drawing.box(x, 60, 118, 80)
        drawing.text(x + 59, 84, name, "middle", COLOURS[0], 15)
        for row, words in enumerate(lines):
            drawing.text(x + 59, 106 + 18 * row, words, "middle", size=12)
        if number < len(steps) - 1:
            drawing.arrow(x + 120, 100, x + 148)
    for first, last, words in (
        (0, 0, "input"),
        (1, 3, "stage infer"),
        (4, 4, "infer, or reassemble"),
        (5, 5, "pyramid"),
    ):
        left, right = 10 + 150 * first, 128 + 150 * last
        drawing.line([(left, 46), (left, 40), (right, 40), (right, 46)], LINE)
        drawing.text((left + right) / 2, 32, words, "middle", size=12)
    drawing.text(219, 166, "stored windows: stage factor writes them first", "middle", size=12)
    drawing.text(519, 166, "what later blocks need", "middle", size=12)
    drawing.text(519, 184, "waits in scratch", "middle", size=12)
    drawing.save("voxel.svg")


def weights_of(family: Family, lattice: Lattice, axis: int = 2) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return voxels and weights of each window along an axis."""
    curves = []
    for index in range(lattice.counts[axis]):
        part = span(family, lattice, axis, index)
        start = index * lattice.stride[axis] - lattice.margin[axis] + part.start
        curves.append((np.arange(start, start + len(part.weights)), part.weights))
    return curves


def draw_blending() -> None:
    """The weights of the windows along an axis of 160 voxels, and their sum."""
    drawing = Drawing(760, 560)
    panels: tuple[tuple[Family, int], ...] = (("crop", 16), ("hann", 32), ("gaussian", 32))
    for row, (family, overlap) in enumerate(panels):
        top = 50 + 170 * row
        lattice = Lattice((1, 1, 160), (1, 1, 64), (0, 0, overlap), (1, 1, 1))
        total = np.zeros(160)
        drawing.text(60, top - 14, f"{family}: windows of 64 voxels, overlap {overlap}")
        drawing.line([(60, top), (60, top + 110), (700, top + 110)], LINE)
        for words, value in (("1", 1), ("0", 0)):
            drawing.text(50, top + 114 - 100 * value, words, "end", size=12)
        for number, (voxels, weights) in enumerate(weights_of(family, lattice)):
            total[voxels] += weights
            curve = [(62 + 4 * v, top + 110 - 100 * float(w)) for v, w in zip(voxels, weights, strict=True)]
            curve = [(curve[0][0], top + 110), *curve, (curve[-1][0], top + 110)]
            drawing.line(curve, COLOURS[number % len(COLOURS)], 2)
        np.testing.assert_allclose(total, 1, atol=1e-6)
        drawing.line([(62 + 4 * v, top + 110 - 100 * float(w)) for v, w in enumerate(total)], INK, 1.5, "4 3")
    drawing.text(60, 548, "voxel 0, a face of the volume", size=12)
    drawing.text(700, 548, "voxel 159, the other face", "end", size=12)
    drawing.text(380, 548, "dashed: the sum of all windows", "middle", size=12)
    drawing.save("blending.svg")


def draw_halo() -> None:
    """What a voxel of the output sees through three convolutions, inside a window and at its face."""
    drawing = Drawing(760, 330)
    step, left, rows = 22, 60, ("output", "layer 2", "layer 1", "input")
    for row, words in enumerate(rows):
        y = 50 + 62 * row
        drawing.text(left - 8, y + 14, words, "end", size=12)
        for voxel in range(30):
            near = any(abs(voxel - centre) <= row for centre in (9, 24))
            is_outside = voxel > 25
            fill = ("#f3c9bf" if is_outside else "#bcd3ec") if near else ("#f5f5f5" if is_outside else "white")
            drawing.box(left + step * voxel, y, step - 2, 18, fill, "#cccccc")
    for centre in (9, 24):
        drawing.box(left + step * centre, 50, step - 2, 18, COLOURS[0], INK)
    edge = left + step * 26 - 1
    drawing.line([(edge, 30), (edge, 262)], COLOURS[1], 2, "5 3")
    drawing.text(edge - 6, 26, "the window ends here", "end", COLOURS[1], 12)
    drawing.line([(left + step * 6, 262), (left + step * 13 - 2, 262)], INK, 2)
    drawing.text(left + step * 9.5, 282, "sees 7 voxels: halo 3", "middle")
    halo = (left + step * 23, left + step * 26 - 2)
    drawing.line([(halo[0], 262), (halo[1], 262)], COLOURS[1], 3)
    drawing.text(left + step * 24.5, 282, "halo: thrown away", "middle", COLOURS[1])
    drawing.line([(left, 302), (left + step * 23 - 2, 302)], COLOURS[2], 3)
    drawing.text(left + step * 11.5, 320, "core: kept, exact", "middle", COLOURS[2])
    drawing.save("halo.svg")


def draw_resume() -> None:
    """Tasks of a run that is killed, and those of the same command again."""
    drawing = Drawing(760, 250)
    tasks = ((0, 60, 110, 1), (0, 175, 120, 2), (1, 60, 150, 1), (1, 215, 80, 1), (0, 300, 60, 0), (1, 300, 60, 0))
    drawing.text(60, 30, "first command")
    drawing.text(430, 30, "the same command again")
    for row, x, width, is_done in tasks:
        drawing.box(x, 50 + 50 * row, width - 5, 34, "#cfe3d4" if is_done else "#f3c9bf")
    for row in range(2):
        drawing.text(56, 72 + 50 * row, f"worker {row + 1}", "end", size=11)
        drawing.box(430, 50 + 50 * row, 75, 34, "#cfe3d4")
        drawing.box(510, 50 + 50 * row, 115, 34, "#cfe3d4")
    drawing.line([(362, 40), (362, 150)], COLOURS[1], 2, "5 3")
    drawing.text(362, 168, "killed", "middle", COLOURS[1])
    drawing.text(60, 205, "green: its files are whole, and the journal names them with their checksums", size=12)
    drawing.text(60, 225, "red: under way, no line in the journal: computed again, its files written anew", size=12)
    drawing.save("resume.svg")


def draw_cluster(name: str, you: str, driver: str, scheduler: str, job: str, disk: str) -> None:
    """Who starts whom on a cluster: the driver asks for workers, and sends them blocks."""
    drawing = Drawing(760, 300)
    for x, y, width, words, note in (
        (10, 90, 120, you, "one command"), (190, 90, 170, driver, "plans; keeps the journal"),
        (190, 220, 170, scheduler, "finds free nodes"),
        *((460, 20 + 90 * number, 150, f"{job} {number + 1}", "workers") for number in range(3)),
    ):  # fmt: skip
        drawing.box(x, y, width, 56)
        drawing.text(x + width / 2, y + 24, words, "middle", COLOURS[0], 14)
        drawing.text(x + width / 2, y + 44, note, "middle", size=12)
    drawing.arrow(130, 118, 190)
    drawing.line([(275, 146), (275, 220)])
    drawing.text(283, 188, f"asks for {job}s", size=12)
    for number in range(3):
        drawing.line([(360, 118), (460, 48 + 90 * number)], COLOURS[2])
        drawing.line([(360, 248), (460, 60 + 90 * number)], LINE, 1, "4 3")
        drawing.line([(610, 48 + 90 * number), (660, 48 + 90 * number)], LINE)
    drawing.text(372, 78, "blocks", fill=COLOURS[2], size=12)
    drawing.text(372, 270, "starts", fill=LINE, size=12)
    drawing.box(660, 20, 90, 236)
    for row, words in enumerate((disk, "volume", "output")):
        drawing.text(705, 120 + 24 * row, words, "middle", COLOURS[0] if row == 0 else INK, 14 if row == 0 else 12)
    drawing.save(name)


def draw_clusters() -> None:
    """The drivers and workers of Slurm and of Kubernetes."""
    draw_cluster("slurm.svg", "you", "driver: volpipe run", "Slurm", "job", "shared disk")
    draw_cluster("kubernetes.svg", "kubectl apply", "job: the driver", "Kubernetes", "pod", "claims")


def draw_pictures() -> None:
    """The pictures of the first volume and of seams, by runs over the samples of those pages."""
    import volpipe as vp

    vp.sample("sample.n5", shape=(16, 128, 128))
    vp.run("sample.n5/raw", out="restored.zarr", site="threads")
    comparison = vp.side_by_side("sample.n5/raw", "restored.zarr")
    (FIGURES / "first-volume.png").write_bytes(comparison.png())
    wrong = ["net.halo=[0,0,0]", "net.accept_tile_variance=true", "windows.shape=[16,32,32]", "windows.overlap=[0,0,0]"]
    vp.run("sample.n5/raw", out="seams.zarr", site="threads", settings=wrong)
    (FIGURES / "seams.png").write_bytes(vp.side_by_side("seams.zarr", "restored.zarr").png())


def draw_results() -> None:
    """The pictures of finer slices and of objects, by runs over the samples of those tutorials."""
    import volpipe as vp

    vp.sample("truth.n5", shape=(64, 64, 64), voxel_size_nm=(10, 10, 10))
    vp.convert("truth.n5/raw", "coarse.n5/raw", bin=(4, 1, 1))
    vp.run("coarse.n5/raw", "superres_z4", out="fine.zarr", site="threads")
    (FIGURES / "superres.png").write_bytes(vp.side_by_side("fine.zarr", "truth.n5/raw").png())
    vp.sample("cells.n5", shape=(48, 64, 64), voxel_size_nm=(10, 10, 10))
    vp.run("cells.n5/raw", "affinities", out="affinities.zarr", site="threads")
    vp.segment("affinities.zarr", out="labels.zarr", site="threads")
    (FIGURES / "segmentation.png").write_bytes(
        vp.explore("cells.n5/raw", "affinities.zarr", labels="labels.zarr").png()
    )


DRAWINGS: dict[str, Callable[[], None]] = {
    "clusters": draw_clusters,
    "voxel": draw_voxel, "blending": draw_blending, "halo": draw_halo, "resume": draw_resume, "pictures": draw_pictures,
    "results": draw_results,
}  # fmt: skip


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in sys.argv[1:] or DRAWINGS:
            DRAWINGS[name]()


if __name__ == "__main__":
    main()
