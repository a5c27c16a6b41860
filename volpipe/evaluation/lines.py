"""Scores and differences in sentences and tables: for the terminal, for notebooks and for pages alike.

Not here: the numbers (image_scores, label_scores, differences), or how tables look (display, tables, reporting).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from volpipe.evaluation.class_scores import ClassScores
from volpipe.evaluation.compare import Comparison, Differences
from volpipe.evaluation.differences import Difference, ImageDifference, LabelDifference
from volpipe.evaluation.evaluate import Scores
from volpipe.evaluation.image_scores import CUBE, ImageScores
from volpipe.evaluation.label_scores import LabelScores
from volpipe.evaluation.run_lengths import SkeletonScores
from volpipe.reporting.page import Item, Sheet
from volpipe.units import count
from volpipe.volumes.volume import Volume

Line = tuple[str, ...]
MOST_PARTS = 20  # neurons or classes in a table

# ---- scores


def score_sheets(scores: Scores, volume: Volume) -> list[Sheet]:
    """Return the scores of each candidate, the best PSNR first, or of labels, with a line for each of their parts.

    `volume` knows the size of a voxel.
    """
    if isinstance(scores, dict):
        return [_image_sheet(scores, volume)]
    if isinstance(scores, LabelScores):
        return [Sheet("Scores", ("", ""), list(_label_lines(scores)))]
    rows = _skeleton_lines(scores) if isinstance(scores, SkeletonScores) else _class_lines(scores)
    return [Sheet("Scores", ("", ""), list(rows)), *_part_sheets(asdict(scores))]


def _image_sheet(scores: Mapping[str, ImageScores], volume: Volume) -> Sheet:
    names = ("", "PSNR dB", "SSIM", "FSC 0.5", "FSC 1/7", "along z 0.5", "along z 1/7")
    caption = (
        f"FSC: cycles per voxel at which the Fourier shell correlation, over cubes of {CUBE} voxels, first falls "
        "below; along z: of directions within 30 degrees of it"
    )
    rows = []
    for name, each in sorted(scores.items(), key=lambda item: -item[1].psnr):
        cuts = (each.half, each.seventh, each.half_z, each.seventh_z)
        cells = (_cut(cut, volume) if each.curve else "too small" for cut in cuts)
        rows.append((name, f"{each.psnr:.2f}", f"{each.ssim:.4f}", *cells))
    return Sheet("Scores", names, rows, caption)


def _label_lines(scores: LabelScores) -> Iterator[Line]:
    split, merge = scores.split, scores.merge
    yield "VOI split + merge", f"{split:.3f} + {merge:.3f} = {split + merge:.3f} bits"
    yield "adapted Rand error", f"{scores.rand_error:.4f}"
    yield "IoU of the foreground", f"{scores.foreground_iou:.4f}"
    yield "IoU of objects", f"{scores.mean_iou:.4f}, the mean of each with its best"
    yield "average precision", f"{scores.precision_50:.4f} at IoU 0.5, {scores.mean_precision:.4f} at 0.50 to 0.95"
    yield "objects", f"{scores.num_found:,} found, {scores.num_truth:,} in the reference"


def _skeleton_lines(scores: SkeletonScores) -> Iterator[Line]:
    yield "expected run length", f"{scores.erl:,.1f} nm, of at most {scores.max_erl:,.1f} nm"
    yield "normalised (NERL)", f"{scores.nerl:.4f}"
    kinds = {kind: getattr(scores, kind) for kind in ("correct", "split", "merged", "omitted")}
    for kind, num in kinds.items():
        yield f"{kind} edges", share_line(num, sum(kinds.values()))
    yield "merging objects", f"{scores.mergers:,} in several neurons"
    yield "neurons", f"{len(scores.neurons):,}, of {scores.length:,.1f} nm together"


def _class_lines(scores: ClassScores) -> Iterator[Line]:
    yield "mean Dice", f"{scores.mean_dice:.4f}"
    yield "mean IoU", f"{scores.mean_iou:.4f}"
    yield "accuracy", f"{scores.accuracy:.4f}"


def _part_sheets(entry: Mapping[str, Any]) -> Iterator[Sheet]:  # Any: JSON
    """Yield a table of each list of parts that scores have: of neurons, or of classes and of their confusion."""
    for key, parts in entry.items():
        if isinstance(parts, list | tuple) and parts and isinstance(parts[0], Mapping):
            rows = [tuple(map(_cell, part.values())) for part in parts[:MOST_PARTS]]
            rest = f"{len(parts) - MOST_PARTS:,} more are in the JSON" if len(parts) > MOST_PARTS else ""
            names = [name.replace("_", " ") for name in parts[0]]
            yield Sheet(key.capitalize(), names, rows, rest)
    if 0 < len(confusion := entry.get("confusion") or ()) <= MOST_PARTS:
        names = [part["name"] for part in entry["classes"]]
        rows = [(name, *row) for name, row in zip(names, confusion, strict=True)]
        yield Sheet("Confusion", ("", *names), rows, "voxels of each class of the reference (rows), by the output's")


def _cell(value: object) -> str:
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)


def _cut(frequency: float | None, volume: Volume) -> str:
    """Return a frequency in cycles per voxel, with its length in nm where the voxels of `volume` are cubes."""
    if frequency is None:
        return "never"
    size = volume.voxel_size_nm
    is_known = frequency and size is not None and math.isclose(min(size), max(size), rel_tol=1e-3)
    return f"{frequency:.3f}" + (f" ({size[0] / frequency:.3g} nm)" if size is not None and is_known else "")


def stored_sheets(scores: Mapping[str, Mapping[str, Any]]) -> list[Item]:  # Any: JSON
    """Return the numbers of `scores`, as they are stored: a line for each candidate, and for each of their parts.

    Scores of labels are said as `score_sheets` says them.
    """
    output = scores.get("output", {})
    if set(output) == {field.name for field in fields(LabelScores)}:
        return [Sheet("Scores", ("", ""), list(_label_lines(LabelScores(**output))))]
    names = [key for key, value in next(iter(scores.values())).items() if not isinstance(value, list | tuple | dict)]

    def cell(value: object) -> str:
        return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

    rows = [(name, *(cell(entry.get(key)) for key in names)) for name, entry in scores.items()]
    sheet = Sheet("Scores", ("", *(name.replace("_", " ") for name in names)), rows)
    return [sheet, *(part for entry in scores.values() for part in _part_sheets(entry))]


# ---- differences

ROW_COLUMNS = ("output", "kind", "voxels that differ", "PSNR dB, or VOI bits", "largest", "most in box z,y,x", "remark")


def number(value: float | None) -> str:
    """Return a number for people; "not known" where there is none."""
    if value is None or math.isnan(value):
        return "not known"
    return "infinite" if math.isinf(value) else f"{value:,.4g}"


def share_line(num: int, num_all: int) -> str:
    """Return a number of voxels and their share of all: "12 (0.003 %)"."""
    if not num:
        return "0"
    share = num / num_all
    percent = f"{100 * share:.3g}" if share < 0.99995 or num == num_all else f"{100 * share:.6g}"
    return f"{num:,} ({percent} %)"


def _numbers(difference: Difference) -> dict[str, str]:
    """Return the cells of a difference by the names of their columns."""
    share = {"voxels that differ": share_line(difference.num_differ, difference.num_voxels)}
    if isinstance(difference, LabelDifference):
        return share | {"VOI split + merge, bits": f"{difference.split:.4f} + {difference.merge:.4f}"}
    psnr, shift = difference.psnr, difference.shift
    return share | {
        "largest": number(difference.largest),
        "mean": number(difference.mean),
        "mean of B - A": f"{shift:+,.4g}" if shift else number(shift),
        "PSNR dB": f"{psnr:.2f}" if psnr is not None and math.isfinite(psnr) else number(psnr),
    }


def difference_sheets(comparison: Comparison, differences: Differences) -> list[Sheet]:
    """Return a line of each channel and one of all; and of each box that differs most, if any does."""
    known, together = comparison.a.channel_names, differences.together
    names = [f"channel {i}{f' {known[i]}' if i < len(known) else ''}" for i in range(len(differences.channels))]
    names.append("together" if names else "all")
    cells = [_numbers(each) for each in (*differences.channels, together)]
    if isinstance(together, LabelDifference):
        objects = {"objects of A": together.num_objects_a, "of B": together.num_objects_b}
        counts = objects | {"matched": together.num_matched}
        cells[0] |= {"Rand error": f"{together.rand_error:.4f}"} | {name: f"{n:,}" for name, n in counts.items()}
    sheets = [_sheet("How much differs", "", names, cells)]
    if differences.worst:
        boxes, cells = (
            [str(box.box) for box in differences.worst],
            [_numbers(box.difference) for box in differences.worst],
        )
        sheets.append(_sheet("Boxes that differ most", "box z,y,x", boxes, cells))
    return sheets


def _sheet(title: str, first: str, names: Sequence[str], cells: Sequence[Mapping[str, str]]) -> Sheet:
    rows = [(name, *line.values()) for name, line in zip(names, cells, strict=True)]
    return Sheet(title, (first, *cells[0]), rows)


def row_line(name: str, kind: str, differences: Differences | None, remark: str) -> Line:
    """Return a line of one of many comparisons, in the columns of ROW_COLUMNS; None was not compared."""
    if differences is None:
        return name, kind, "not compared", "", "", "", remark
    together, numbers = differences.together, _numbers(differences.together)
    distance = f"{together.voi:.4f}" if isinstance(together, LabelDifference) else numbers["PSNR dB"]
    worst = str(differences.worst[0].box) if differences.worst else ""
    return name, kind, numbers["voxels that differ"], distance, numbers.get("largest", ""), worst, remark


def summary(comparison: Comparison, differences: Differences | None, num_missing: int) -> list[str]:
    """Return how both differ in sentences: what is the same, what is not, and what was not compared."""
    if differences is None:
        return ["nothing could be compared"]
    together = differences.together
    differ = f"{together.num_differ:,} of {count(together.num_voxels, 'voxel')}"
    if isinstance(together, ImageDifference):
        start = "identical: " if together.is_identical else ""
        sentences = [f"{start}{differ} differ", *_of_images(differences, together)]
    elif together.is_identical:
        sentences = [f"identical: {differ} differ"]
    elif comparison.kind == "classes":
        sentences = [f"{differ} have another class"]
    elif together.num_differ:
        sentences = [f"{differ} differ: their labels are not each other's best match"]
    else:
        moved = f"{together.num_renumbered:,} have another number"
        sentences = [f"the same objects, numbered otherwise: VOI 0, {differ} differ, and {moved}"]
    if differences.num_boxes_differ:
        sentences.append(f"they lie in {differences.num_boxes_differ:,} of {count(differences.num_boxes, 'box')}")
    if num_missing:
        sentences.append(f"{count(num_missing, 'box')} could not be compared, and the numbers are of the others")
    return sentences


def _of_images(differences: Differences, together: ImageDifference) -> Iterator[str]:
    a, b = together.num_nonfinite_a, together.num_nonfinite_b
    if a or b:
        yield (
            f"NaN or infinite: {a:,} voxels of A, {b:,} of B, first in {differences.nonfinite_at}; "
            f"{together.num_unlike:,} are so in one alone or otherwise, and count as differing but in no mean"
        )
    if together.data_range is None:
        yield "the PSNR is not known: give --data-range, the greatest value less the least"
