"""Sizes of a plan, from the recipe or chosen: window and overlap in whole strides, shard and chunk in whole parts.

Not here: the shape of blocks (geometry.block_shape).
"""

from __future__ import annotations

from volpipe.errors import PlanError
from volpipe.geometry.block_shape import CHUNK_TARGET
from volpipe.geometry.grid import Triple, align_up, divisor_near, triple
from volpipe.nets.facts import NetFacts
from volpipe.recipes.inference import Output, Windows
from volpipe.volumes.formats.precomputed import even_chunk

AXES = "zyx"
LARGEST_WASTE = 1.05  # along an axis: voxels that windows cover, by those of the volume


def choose_windows(
    choice: Windows, net: NetFacts, shape: Triple, chosen: Triple | None = None
) -> tuple[Triple, Triple]:
    """Return window and overlap in voxels, aligned to the net's stride.

    Where the recipe leaves the window open it is `chosen`, or the net's own, fitted to a volume of `shape`.
    """
    halo = aligned_halo(net)
    window = choice.shape if choice.shape != "auto" else chosen or own_window(net)
    _check_fixed(window, net)
    if choice.overlap != "auto":
        overlap = (choice.overlap,) * 3 if isinstance(choice.overlap, int) else choice.overlap
    elif choice.blend == "crop":
        overlap = (2 * halo[0], 2 * halo[1], 2 * halo[2])
    else:
        overlap = triple(w // (4 * s) * 2 * s for w, s in zip(window, net.stride, strict=True))
    for i, axis in enumerate(AXES):
        least = 2 * halo[i] if choice.blend == "crop" else 0
        _check_window(axis, window[i], max(overlap[i], least), net.stride[i])
        if choice.blend == "crop":
            _check_halo(axis, window[i], overlap[i], halo[i], net)
        _check_overlap(axis, window[i], overlap[i], net.stride[i], least)
    if choice.shape == "auto":
        fitted = _fitted(window, overlap, net.stride, shape)
        window = triple(only or size for only, size in zip(net.fixed, fitted, strict=True))
    return window, overlap


def aligned_halo(net: NetFacts) -> Triple:
    """Return the halo of `net` in whole strides."""
    return triple(align_up(h, s) for h, s in zip(net.halo, net.stride, strict=True))


def _check_fixed(window: Triple, net: NetFacts) -> None:
    """Refuse a window that is not of the net's fixed size."""
    for axis, size, only in zip(AXES, window, net.fixed, strict=True):
        if only and size != only:
            raise PlanError(
                f"axis {axis}: net {net.label} takes windows of {only} voxels alone, not {size}; set windows.shape=auto"
            )


def _fitted(window: Triple, overlap: Triple, stride: Triple, shape: Triple) -> Triple:
    """Return the smallest window of which as many cover the volume, where `window` would reach far past its end."""

    def fit(window: int, overlap: int, stride: int, size: int) -> int:
        num_windows = -(-size // (window - overlap))
        if num_windows * (window - overlap) <= LARGEST_WASTE * size:
            return window
        return overlap + align_up(-(-size // num_windows), stride)

    return triple(fit(*values) for values in zip(window, overlap, stride, shape, strict=True))


def own_window(net: NetFacts) -> Triple:
    """Return the net's own window in whole strides; four times its halo where that would leave next to no core."""
    halo = aligned_halo(net)
    sizes = (w if 4 * (w - 2 * h) >= h else 4 * h for w, h in zip(net.window, halo, strict=True))
    aligned = (align_up(size, stride) for size, stride in zip(sizes, net.stride, strict=True))
    return triple(only or size for only, size in zip(net.fixed, aligned, strict=True))


def _check_window(axis: str, window: int, overlap: int, stride: int) -> None:
    """Refuse a window that is not a multiple of the net's stride: the error would be as large as the signal."""
    if window < 1:
        raise PlanError(f"axis {axis}: window {window} is below 1; use a multiple of the net's stride {stride}")
    if window % stride:
        low = window // stride * stride
        fits = f"{low} or {low + stride}" if low > overlap else f"{align_up(max(window, overlap + 1), stride)}"
        raise PlanError(f"axis {axis}: window {window} is not a multiple of the net's stride {stride}; use {fits}")


def _check_halo(axis: str, window: int, overlap: int, halo: int, net: NetFacts) -> None:
    """Refuse to crop less than the halo, whose voxels depend on the outside of the window."""
    if window <= 2 * halo:
        raise PlanError(
            f"axis {axis}: window {window} has no core within the halo {halo} of net {net.label} on both sides; "
            f"use {align_up(2 * halo + 1, net.stride[AXES.index(axis)])} or more, or blend with hann"
        )
    if 0 <= overlap // 2 < halo:
        raise PlanError(
            f"axis {axis}: blend crop needs an overlap of {2 * halo} (twice the halo {halo} of net {net.label}), "
            f"not {overlap}; set windows.overlap to auto, or blend with hann"
        )


def _check_overlap(axis: str, window: int, overlap: int, stride: int, least: int) -> None:
    """Refuse an overlap that leaves no stride, or that puts windows off the net's own grid."""
    if not 0 <= overlap < window:
        most = (window - 1) // (2 * stride) * 2 * stride
        raise PlanError(
            f"axis {axis}: overlap {overlap} must be at least 0 and below the window {window}; use {least} to {most}"
        )
    if overlap // 2 % stride or (window - overlap) % stride:
        low = overlap // (2 * stride) * 2 * stride
        fits = " or ".join(str(o) for o in (low, low + 2 * stride) if o < window)
        raise PlanError(
            f"axis {axis}: overlap {overlap} puts windows off the net's stride {stride}; use {fits}, "
            "a multiple of twice the stride"
        )


def choose_shard(choice: Output, core: Triple) -> Triple:
    """Return the shard of an output, which divides a block's `core`: the recipe's, or the core itself."""
    shard = core if choice.shard == "auto" else choice.shard
    for axis, c, s in zip(AXES, core, shard, strict=True):
        if s < 1 or c % s:
            raise PlanError(
                f"axis {axis}: a block of {c} output voxels is not a multiple of output.shard {s}; "
                f"use {divisor_near(c, s)}, or change windows.block"
            )
    return shard


def choose_chunk(choice: Output, shard: Triple) -> Triple:
    """Return the chunk of an output, which divides its `shard`: the recipe's, or near CHUNK_TARGET."""
    if choice.chunk == "auto" and choice.format == "precomputed":
        return even_chunk(shard)
    if choice.chunk == "auto":
        return triple(divisor_near(n, CHUNK_TARGET) for n in shard)
    for axis, s, c in zip(AXES, shard, choice.chunk, strict=True):
        if c < 1 or s % c:
            raise PlanError(
                f"axis {axis}: a shard of {s} is not a multiple of output.chunk {c}; use {divisor_near(s, c)}"
            )
    return choice.chunk
