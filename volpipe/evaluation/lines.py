"""Differences of two outputs in sentences and tables: for the terminal, for notebooks and for pages alike.

Not here: the numbers (differences), scores (score), or how tables look (display, tables, reporting).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from volpipe.evaluation.compare import ComparisonPlan
from volpipe.evaluation.differences import Differences
from volpipe.reporting.page import Sheet
from volpipe.units import count

ROW_COLUMNS = ("output", "kind", "voxels that differ", "PSNR dB, or VOI bits", "largest", "most in box z,y,x", "remark")


def difference_sheets(comparison: ComparisonPlan, differences: Differences) -> list[Sheet]:
    """Return a table with a row for each channel and one for all, and a table of the boxes that differ most."""
    known, together = comparison.a.channel_names, differences.together
    names = [f"channel {i}{f' {known[i]}' if i < len(known) else ''}" for i in range(len(differences.channels))]
    names.append("together" if names else "all")
    cells = [each.cells for each in (*differences.channels, together)]
    cells[0] |= together.object_cells
    sheets = [_cells_sheet("How much differs", "", names, cells)]
    if differences.worst:
        boxes = [str(box.box) for box in differences.worst]
        worst = [box.difference.cells for box in differences.worst]
        sheets.append(_cells_sheet("Boxes that differ most", "box z,y,x", boxes, worst))
    return sheets


def _cells_sheet(title: str, first: str, names: Sequence[str], cells: Sequence[Mapping[str, str]]) -> Sheet:
    rows = [(name, *line.values()) for name, line in zip(names, cells, strict=True)]
    return Sheet(title, (first, *cells[0]), rows)


def row_line(name: str, kind: str, differences: Differences | None, remark: str) -> tuple[str, ...]:
    """Return the row of one of many comparisons, in the columns of ROW_COLUMNS; None was not compared."""
    if differences is None:
        return name, kind, "not compared", "", "", "", remark
    together, cells = differences.together, differences.together.cells
    worst = str(differences.worst[0].box) if differences.worst else ""
    return (
        name, kind, cells["voxels that differ"], together.distance, cells.get("largest", ""), worst, remark,
    )  # fmt: skip


def summary(comparison: ComparisonPlan, differences: Differences | None, num_missing: int) -> list[str]:
    """Return sentences on how two outputs differ, where, and how much of them was not compared."""
    if differences is None:
        return ["nothing could be compared"]
    sentences = comparison.sentences(differences)
    if differences.num_boxes_differ:
        sentences.append(f"they lie in {differences.num_boxes_differ:,} of {count(differences.num_boxes, 'box')}")
    if num_missing:
        sentences.append(f"{count(num_missing, 'box')} could not be compared, and the numbers are of the others")
    return sentences
