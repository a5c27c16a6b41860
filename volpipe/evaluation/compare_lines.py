"""What a comparison found, in sentences and lines of tables: for the terminal, for notebooks and for pages alike.

Not here: numbers (differences, compare), or how tables look (display, tables, reporting).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from volpipe.evaluation.compare import Comparison, Differences, is_identical
from volpipe.evaluation.differences import ImageDifference, LabelDifference
from volpipe.units import count

IMAGE_NUMBERS = ("voxels that differ", "largest", "mean", "mean of B - A", "PSNR dB")
LABEL_NUMBERS = ("voxels that differ", "VOI split + merge, bits")
CHANNEL_COLUMNS = {
    "image": ("", *IMAGE_NUMBERS),
    **dict.fromkeys(("labels", "classes"), ("", *LABEL_NUMBERS, "Rand error", "objects of A", "of B", "matched")),
}
WORST_COLUMNS = {
    "image": ("box z,y,x", *IMAGE_NUMBERS),
    **dict.fromkeys(("labels", "classes"), ("box z,y,x", *LABEL_NUMBERS)),
}
Line = tuple[str, ...]


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


def _numbers(difference: ImageDifference | LabelDifference) -> Line:
    if isinstance(difference, LabelDifference):
        voi = f"{difference.split:.4f} + {difference.merge:.4f}"
        return share_line(difference.num_differ, difference.num_voxels), voi
    psnr = difference.psnr
    decibel = "infinite" if psnr == math.inf else number(psnr) if psnr is None or math.isnan(psnr) else f"{psnr:.2f}"
    shift = number(difference.shift) if not difference.shift else f"{difference.shift:+,.4g}"
    return (
        share_line(difference.sums.num_differ, difference.sums.num_voxels), number(difference.largest),
        number(difference.mean), shift, decibel,
    )  # fmt: skip


def channel_lines(comparison: Comparison, differences: Differences) -> Iterator[Line]:
    """Yield a line of each channel, and one of all, in the columns of CHANNEL_COLUMNS."""
    names = comparison.a.channel_names
    for i, channel in enumerate(differences.channels):
        yield (f"channel {i}{f' {names[i]}' if i < len(names) else ''}", *_numbers(channel))
    together = differences.together
    if isinstance(together, LabelDifference):
        objects = (together.num_objects_a, together.num_objects_b, together.num_matched)
        yield ("all", *_numbers(together), f"{together.rand_error:.4f}", *(f"{num:,}" for num in objects))
    else:
        yield ("together" if differences.channels else "all", *_numbers(together))


def worst_lines(differences: Differences) -> Iterator[Line]:
    """Yield a line of each box that differs most, in the columns of WORST_COLUMNS."""
    for box in differences.worst:
        yield (str(box.box), *_numbers(box.difference))


def summary(comparison: Comparison, differences: Differences | None, num_missing: int) -> list[str]:
    """Return how both differ in sentences: what is the same, what is not, and what was not compared."""
    if differences is None:
        return ["nothing could be compared"]
    together = differences.together
    if isinstance(together, LabelDifference):
        sentences = _of_labels(comparison, together)
    else:
        sentences = _of_images(differences, together)
    if differences.num_boxes_differ:
        sentences.append(f"they lie in {differences.num_boxes_differ:,} of {count(differences.num_boxes, 'box')}")
    if num_missing:
        sentences.append(f"{count(num_missing, 'box')} could not be compared, and the numbers are of the others")
    return sentences


def _of_images(differences: Differences, together: ImageDifference) -> list[str]:
    sums = together.sums
    start = "identical: " if is_identical(together) else ""
    sentences = [f"{start}{sums.num_differ:,} of {count(sums.num_voxels, 'voxel')} differ"]
    if sums.num_nonfinite_a or sums.num_nonfinite_b:
        sentences.append(
            f"NaN or infinite: {sums.num_nonfinite_a:,} voxels of A, {sums.num_nonfinite_b:,} of B, first in "
            f"{differences.nonfinite_at}; {sums.num_unlike:,} are so in one alone or otherwise, and count as differing "
            "but in no mean"
        )
    if together.data_range is None:
        sentences.append("the PSNR is not known: give --data-range, the greatest value less the least")
    return sentences


def _of_labels(comparison: Comparison, together: LabelDifference) -> list[str]:
    if is_identical(together):
        return [f"identical: 0 of {count(together.num_voxels, 'voxel')} differ"]
    differ = f"{together.num_differ:,} of {count(together.num_voxels, 'voxel')}"
    if comparison.kind == "classes":
        return [f"{differ} have another class"]
    if not together.num_differ:
        return [
            f"the same objects, numbered otherwise: VOI 0, 0 of {count(together.num_voxels, 'voxel')} differ, and "
            f"{together.num_renumbered:,} have another number"
        ]
    return [f"{differ} differ: their labels are not each other's best match"]


ROW_COLUMNS = ("output", "kind", "voxels that differ", "PSNR dB, or VOI bits", "largest", "most in box z,y,x", "remark")


def row_line(name: str, kind: str, differences: Differences | None, remark: str) -> Line:
    """Return a line of one of many comparisons, in the columns of ROW_COLUMNS; None was not compared."""
    if differences is None:
        return (name, kind, "not compared", "", "", "", remark)
    together, numbers = differences.together, _numbers(differences.together)
    worst = str(differences.worst[0].box) if differences.worst else ""
    if isinstance(together, LabelDifference):
        return (name, kind, numbers[0], f"{together.voi:.4f}", "", worst, remark)
    return (name, kind, numbers[0], numbers[-1], numbers[1], worst, remark)
