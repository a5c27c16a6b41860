"""What `volpipe evaluate` shows, as tables.

Not here: printing, or the scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from volpipe.display.console import columns

if TYPE_CHECKING:
    from volpipe.evaluation.evaluate import Scores
    from volpipe.evaluation.label_scores import LabelScores
    from volpipe.volumes.volume import Volume


def score_table(scores: Scores, volume: Volume) -> Table:
    """Return the scores of each candidate, the best PSNR first, or of labels; `volume` knows the size of a voxel."""
    from volpipe.evaluation.evaluate import SCORE_CAPTION, SCORE_COLUMNS

    if not isinstance(scores, dict):
        return _label_table(scores)
    table = columns("", *SCORE_COLUMNS, caption=SCORE_CAPTION)
    for name, result in sorted(scores.items(), key=lambda item: -item[1].psnr):
        has_cubes = bool(result.curve)
        cuts = (result.half, result.seventh, result.half_z, result.seventh_z)
        shown = (_cut(cut, volume) if has_cubes else "too small" for cut in cuts)
        table.add_row(name, f"{result.psnr:.2f}", f"{result.ssim:.4f}", *shown)
    return table


def _label_table(result: LabelScores) -> Table:
    """Return the scores of labels, one a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    both = result.split + result.merge
    table.add_row("VOI split + merge", f"{result.split:.3f} + {result.merge:.3f} = {both:.3f} bits")
    table.add_row("adapted Rand error", f"{result.rand_error:.4f}")
    table.add_row("IoU of the foreground", f"{result.foreground_iou:.4f}")
    table.add_row("IoU of objects", f"{result.mean_iou:.4f}, the mean of each with its best")
    precision = f"{result.precision_50:.4f} at IoU 0.5, {result.mean_precision:.4f} at 0.50 to 0.95"
    table.add_row("average precision", precision)
    table.add_row("objects", f"{result.num_found:,} found, {result.num_truth:,} in the reference")
    return table


def _cut(frequency: float | None, volume: Volume) -> str:
    if frequency is None:
        return "never"
    from volpipe.evaluation.evaluate import resolution_nm

    resolution = resolution_nm(frequency, volume)
    return f"{frequency:.3f}" + ("" if resolution is None else f" ({resolution:.3g} nm)")
