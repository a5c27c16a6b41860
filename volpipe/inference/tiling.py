"""Sizes of a plan, from the recipe or chosen: window and overlap in whole strides, shard and chunk in whole parts.

Not here: the shape of blocks (geometry.block_shape).
"""

from __future__ import annotations

import math

from volpipe.errors import PlanError
from volpipe.geometry.block_shape import CHUNK_TARGET
from volpipe.geometry.grid import Triple, align_up, divisor_near, triple
from volpipe.nets.facts import NetFacts
from volpipe.nets.net_geometry import Geometry
from volpipe.recipes.inference import Output, Windows
from volpipe.volumes.formats.container import folders_of

AXES = "zyx"
LARGEST_WASTE = 1.05  # along an axis: voxels that windows cover, by those of the volume


def choose_windows(
    choice: Windows, net: NetFacts, shape: Triple, chosen: Triple | None = None
) -> tuple[Triple, Triple]:
    """Return window and overlap in voxels that the net sees, aligned to its stride.

    Where the recipe leaves the window open it is `chosen`, or the net's own, fitted to a volume of `shape`. What the
    net gives of a window is shorter by its `trims`, and lies on the net's stride.
    """
    trim = triple(map(sum, zip(*trims(net), strict=True)))
    halo = triple(h - m for h, m in zip(aligned_halo(net), net.margin, strict=True))
    seen = choice.shape if choice.shape != "auto" else chosen or own_window(net)
    _check_fixed(seen, net)
    window = triple(w - n for w, n in zip(seen, trim, strict=True))
    # What the net gives of the smallest window that its maker allows, in whole strides.
    least_window = [align_up(max(1, n - m), s) for n, m, s in zip(net.least, trim, net.stride, strict=True)]
    is_cropped, at_edge = choice.blend == "crop", choice.placement in ("edge", "even")
    if at_edge:
        window = triple(
            # Slices are not padded across, and windows of one size alone have it in a small volume too.
            max(least, min(w, align_up(n, s)))
            if (choice.shape == "auto" and not net.fixed[i]) or i == net.across
            else w
            for i, (w, n, s, least) in enumerate(zip(window, shape, net.stride, least_window, strict=True))
        )
    if choice.overlap != "auto":
        given = (choice.overlap,) * 3 if isinstance(choice.overlap, int) else choice.overlap
        overlap = triple(o - n for o, n in zip(given, trim, strict=True))
    elif is_cropped:
        overlap = (2 * halo[0], 2 * halo[1], 2 * halo[2])
    elif at_edge:
        overlap = triple(w - max(u, w // 2 // u * u) for w, u in zip(window, net.shrink, strict=True))
    else:
        overlap = triple(w // (4 * s) * 2 * s for w, s in zip(window, net.stride, strict=True))
    if at_edge and net.across is not None:
        overlap = _of_slices(overlap, window, net, is_open=choice.overlap == "auto")
    for i, axis in enumerate(AXES):
        least = 2 * halo[i] if is_cropped else 0
        _check_window(axis, window[i], max(overlap[i], least), net.stride[i], trim[i])
        if is_cropped and not (at_edge and window[i] >= shape[i]):
            _check_halo(axis, window[i], overlap[i], halo[i], net, trim[i])
        _check_overlap(axis, window[i], overlap[i], 1 if at_edge and not is_cropped else net.stride[i], least, trim[i])
        if at_edge and i == net.across and window[i] < shape[i]:
            _check_context(axis, choice, net, overlap[i])
        if overlap[i] % net.shrink[i]:
            raise PlanError(
                f"axis {axis}: overlap {overlap[i] + trim[i]} is not a multiple of {net.shrink[i]}, the "
                "input voxels per output voxel"
            )
        if at_edge and is_cropped:
            _check_length(axis, shape[i], net)
            _check_length_of_window(axis, window[i], shape[i], trim[i])
    if choice.shape == "auto" and not at_edge:
        fitted = map(max, least_window, _least_covering(window, overlap, net.stride, shape))
        window = triple(only - n if only else size for only, size, n in zip(net.fixed, fitted, trim, strict=True))
    return (
        triple(w + n for w, n in zip(window, trim, strict=True)),
        triple(o + n for o, n in zip(overlap, trim, strict=True)),
    )


def trims(net: NetFacts) -> tuple[Triple, Triple]:
    """Return the trim of a window: the voxels before and after what is taken of the net's output for it.

    That output is cut to whole strides where the windows that a net takes leave a rest.
    """
    return around_core(net, net.margin)


def around_core(net: NetFacts | Geometry, halo: Triple) -> tuple[Triple, Triple]:
    """Return the voxels of a window before and after its core; the `halo` beyond the margin is in whole strides.

    The first output voxel of the core is the one at (before - margin) * scale // shrink.
    """
    sizes = list(zip(halo, net.margin, net.remainder, net.stride, strict=True))
    before = triple(m + align_up(max(0, h - m), s) for h, m, _, s in sizes)
    return before, triple(b + (r - 2 * m) % s for b, (_, m, r, s) in zip(before, sizes, strict=True))


def aligned_halo(net: NetFacts) -> Triple:
    """Return the halo of `net`, whose part beyond the margin is rounded up to whole strides."""
    return around_core(net, net.halo)[0]


def _check_fixed(window: Triple, net: NetFacts) -> None:
    """Refuse a window that is not of the net's fixed size."""
    for axis, size, only in zip(AXES, window, net.fixed, strict=True):
        if only and size != only:
            raise PlanError(
                f"axis {axis}: net {net.label} takes windows of {only} voxels alone, not {size}; set windows.shape=auto"
            )


def _least_covering(window: Triple, overlap: Triple, stride: Triple, shape: Triple) -> Triple:
    """Return a window so small that as many just cover the volume, where `window` would reach far past its end."""

    def fit(window: int, overlap: int, stride: int, size: int) -> int:
        num_windows = -(-size // (window - overlap))
        if num_windows * (window - overlap) <= LARGEST_WASTE * size:
            return window
        return overlap + align_up(-(-size // num_windows), stride)

    return triple(fit(*values) for values in zip(window, overlap, stride, shape, strict=True))


def own_window(net: NetFacts) -> Triple:
    """Return the net's own window in whole strides; four times its halo where that would leave next to no core.

    Of slices there are fewer then, so that a window has no more voxels than its slices need.
    """
    halo = aligned_halo(net)
    sizes = [w if 4 * (w - 2 * h) >= h else 4 * h for w, h in zip(net.window, halo, strict=True)]
    if (across := net.across) is not None:
        slices = math.prod(net.window) * sizes[across] // math.prod(sizes)
        sizes[across] = max(2 * halo[across] + 1, min(sizes[across], slices))
    aligned = (r + align_up(size - r, s) for size, s, r in zip(sizes, net.stride, net.remainder, strict=True))
    return triple(only or size for only, size in zip(net.fixed, aligned, strict=True))


def _check_window(axis: str, window: int, overlap: int, stride: int, trim: int) -> None:
    """Refuse a window off the net's stride: the error would be as large as the signal.

    `window` and `overlap` are of what the net gives; the window that it sees is longer by its `trim`.
    """
    if window < 1 and not trim:
        raise PlanError(f"axis {axis}: window {window} is below 1; use a multiple of the net's stride {stride}")
    if window < 1 or window % stride:
        low = window // stride * stride
        fits = (
            f"{low + trim} or {low + stride + trim}"
            if low > overlap
            else f"{align_up(max(window, overlap + 1), stride) + trim}"
        )
        if trim:
            raise PlanError(
                f"axis {axis}: of a window of {window + trim} the net gives {window}; it takes windows of "
                f"{stride + trim}, {2 * stride + trim}, {3 * stride + trim} and so on; use {fits}"
            )
        raise PlanError(f"axis {axis}: window {window} is not a multiple of the net's stride {stride}; use {fits}")


def _check_halo(axis: str, window: int, overlap: int, halo: int, net: NetFacts, trim: int) -> None:
    """Refuse to crop less than the halo, whose voxels depend on the outside of the window."""
    if window <= 2 * halo:
        raise PlanError(
            f"axis {axis}: window {window + trim} has no core within the halo {net.halo[AXES.index(axis)]} of net "
            f"{net.label} on both sides; use {align_up(2 * halo + 1, net.stride[AXES.index(axis)]) + trim} or more, or "
            "blend with hann"
        )
    if 0 <= overlap // 2 < halo:
        raise PlanError(
            f"axis {axis}: blend crop needs an overlap of {2 * halo + trim} (twice the halo "
            f"{net.halo[AXES.index(axis)]} of net {net.label}), not {overlap + trim}; set windows.overlap to auto, or "
            "blend with hann"
        )


def _check_overlap(axis: str, window: int, overlap: int, stride: int, least: int, trim: int) -> None:
    """Refuse an overlap that leaves no stride, or that puts windows off the net's own grid."""
    if not 0 <= overlap < window:
        most = (window - 1) // (2 * stride) * 2 * stride
        raise PlanError(
            f"axis {axis}: overlap {overlap + trim} must be at least {trim} and below the window {window + trim}; use "
            f"{least + trim} to {most + trim}"
        )
    if stride > 1 and (overlap // 2 % stride or (window - overlap) % stride):
        low = overlap // (2 * stride) * 2 * stride
        fits = " or ".join(str(o + trim) for o in (low, low + 2 * stride) if o < window)
        raise PlanError(
            f"axis {axis}: overlap {overlap + trim} puts windows off the net's stride {stride}; use {fits}, "
            + (
                "a multiple of twice the stride"
                if not trim
                else "so that what is left is a multiple of twice the stride"
            )
        )


def _of_slices(overlap: Triple, window: Triple, net: NetFacts, *, is_open: bool) -> Triple:
    """Return the overlap of windows for a net of slices: across the slices, no more than its context needs."""
    return triple(
        min(2 * net.context if is_open else o, w - 1) if i == net.across else o
        for i, (w, o) in enumerate(zip(window, overlap, strict=True))
    )


def _check_context(axis: str, choice: Windows, net: NetFacts, overlap: int) -> None:
    """Refuse windows at the edge that show a slice fewer neighbours than the net takes."""
    if net.context and choice.blend not in ("gaussian", "crop"):
        raise PlanError(
            f"axis {axis}: net {net.label} takes {net.context} slices on each side, and blend {choice.blend} at the "
            "edge joins slices that lack them; set windows.blend=gaussian"
        )
    if overlap < 2 * net.context:
        raise PlanError(
            f"axis {axis}: net {net.label} takes {net.context} slices on each side, so that windows overlap by "
            f"{2 * net.context} at least, not {overlap}; set windows.overlap=auto"
        )


def _check_length(axis: str, size: int, net: NetFacts) -> None:
    """Refuse cropped windows at the edge of a volume that the net could not take in one piece."""
    stride = net.stride[AXES.index(axis)]
    if size % stride:
        raise PlanError(
            f"axis {axis}: the volume has {size} voxels, no multiple of the stride {stride} of net {net.label}, which "
            "could not take it in one piece; set windows.placement=lattice"
        )


def _check_length_of_window(axis: str, window: int, size: int, trim: int) -> None:
    """Refuse cropped windows at the edge that are longer than the volume: zeros around it would change the output."""
    if window > size:
        raise PlanError(
            f"axis {axis}: window {window + trim} is longer than the volume of {size} voxels, and windows.blend=crop "
            f"at the edge is for the volume as it is; use {size + trim} or less, or leave windows.shape out"
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
    if choice.chunk == "auto":
        own = folders_of(choice.format).usual_chunk(shard)
        return own or triple(divisor_near(n, CHUNK_TARGET) for n in shard)
    for axis, s, c in zip(AXES, shard, choice.chunk, strict=True):
        if c < 1 or s % c:
            raise PlanError(
                f"axis {axis}: a shard of {s} is not a multiple of output.chunk {c}; use {divisor_near(s, c)}"
            )
    return choice.chunk
