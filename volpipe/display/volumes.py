"""What a volume is and holds, as tables and lines: shape, codec, size on disk, grey levels, trials of codecs.

Not here: printing, or the survey (volumes.survey).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.table import Table

from volpipe.display.console import columns
from volpipe.units import count, in_nm, shape, size

if TYPE_CHECKING:
    from volpipe.volumes.survey import CodecTrials, Footprint, Intensities
    from volpipe.volumes.volume import Volume

T = TypeVar("T")

AXES = "tczyx"  # in which volumes are shown, however they are stored; other axes come first


def info_lines(volume: Volume) -> Iterator[str]:
    """Yield what a volume is, one fact a line; axes in the order of voxel sizes."""
    from volpipe.volumes.values import size_notes

    yield f"{volume.path} {volume.key}".strip() + volume.state
    yield f"format      {volume.format}{f' ({volume.metadata})' if volume.metadata else ''}"
    raw = size(math.prod(volume.shape) * volume.dtype.itemsize)
    axes = ", ".join(_ordered(volume, volume.axes))
    yield f"shape       {_ordered_shape(volume, volume.shape)} ({axes}), {volume.dtype.name}, {raw} uncompressed"
    if axes != (stored := ", ".join(volume.axes)):
        yield f"stored as   {shape(volume.shape)} ({stored})"
    if volume.num_stored_channels > 1:
        yield f"channels    {volume.channels}"
    if volume.voxel_size_nm is None:
        yield (
            "voxel size  unknown; give --set input.voxel_size_nm=z,y,x to run and plan, --voxel-size-nm z,y,x to "
            "convert"
        )
    else:
        yield f"voxel size  {in_nm(volume.voxel_size_nm)}, origin {' × '.join(f'{v:g}' for v in volume.origin_nm)} nm"
    shards = f" in shards {_ordered_shape(volume, volume.shards)}" if volume.shards else ""
    yield f"chunks      {_ordered_shape(volume, volume.chunks)}{shards}"
    yield f"codec       {volume.codec}"
    if volume.levels:
        yield f"levels      {', '.join(volume.levels)}"
    for note in (*volume.notes, *size_notes(volume)):
        yield f"note        {note}"
    if volume.incomplete is not None:
        yield f"incomplete  what is missing reads as zeros: {volume.incomplete.advice}"


def _ordered(volume: Volume, values: Sequence[T]) -> tuple[T, ...]:
    """Return `values`, one for each stored axis, in the order t, c, z, y, x."""
    order = sorted(range(volume.ndim), key=lambda i: AXES.find(volume.axes[i]))
    return tuple(values[i] for i in order)


def _ordered_shape(volume: Volume, lengths: Sequence[int]) -> str:
    return shape(_ordered(volume, lengths))


def arrays_table(rows: Sequence[tuple[str, Volume | str]]) -> Table:
    """Return the volumes of a container: each as it is named on a command line, or why it cannot be read."""
    names = ("volume", "shape", "axes", "type", "voxel size", "levels")
    table = columns(*names, left=names, fold=True)
    for name, volume in rows:
        if isinstance(volume, str):
            table.add_row(name, volume)
        else:
            levels = str(len(volume.levels)) if volume.levels else ""
            size = in_nm(volume.voxel_size_nm).removeprefix("voxel size ")
            axes = ", ".join(_ordered(volume, volume.axes))
            table.add_row(
                name + volume.state, _ordered_shape(volume, volume.shape), axes, volume.dtype.name, size, levels
            )
    return table


def footprint_lines(volume: Volume, found: Footprint) -> Iterator[str]:
    """Yield what lies on disk of a volume."""
    share = found.num_bytes / (math.prod(volume.shape) * volume.dtype.itemsize)
    guess = "" if found.is_counted else f" (from {count(found.num_seen, 'place')} where a file may be)"
    yield (
        f"on disk     {_about(found.is_counted)}{size(found.num_bytes)} in {count(found.num_files, 'file')}, "
        f"{share:.3f} of uncompressed{guess}"
    )
    if found.num_stored is not None:
        num_empty = found.num_chunks - found.num_stored
        about = _about(found.is_stored_counted)
        yield f"empty       {about}{num_empty:,} of {found.num_chunks:,} chunks ({num_empty / found.num_chunks:.1%})"


def intensity_line(found: Intensities) -> str:
    """Return percentiles of a volume, and what they were taken from."""
    names = {0.0: "min", 50.0: "median", 100.0: "max"}
    values = ", ".join(f"{names.get(percent, f'{percent:g} %')} {value:g}" for percent, value in found.percentiles)
    values = values or "no number that is finite"
    if found.num_nonfinite:
        values += f"; {count(found.num_nonfinite, 'voxel')} NaN or infinite"
    ends = {value for _, value in found.percentiles}
    is_constant = "; all are alike: is it the right array?" if len(ends) == 1 and found.num_voxels > 1 else ""
    if found.num_cells == found.num_all:
        return f"intensity   {values} (all voxels){is_constant}"
    return f"intensity   {values} ({found.num_cells:,} of {found.num_all:,} chunks, taken at random){is_constant}"


def codec_table(volume: Volume, found: CodecTrials, stored_share: float) -> Table:
    """Return what codecs and chunks gave, and what the volume would take, empty chunks left out of its bytes."""
    table = columns("codec", "chunk", "ratio", "bytes", "encode", "decode", "files", "files in 512³ shards")
    raw = math.prod(volume.shape) * volume.dtype.itemsize * stored_share
    for trial in found.trials:
        speeds = (f"{speed / 1e6:,.0f} MB/s" for speed in (trial.encode_speed, trial.decode_speed))
        files = (f"{trial.num_files:,}", f"{trial.num_shards:,}")
        table.add_row(trial.codec, f"{trial.edge}³", f"{trial.ratio:.3f}", size(raw * trial.ratio), *speeds, *files)
    table.caption = (
        f"measured on {found.num_boxes} of the volume's boxes of {shape(found.box)} voxels, on one core; "
        "bytes and files are those of the whole volume"
    )
    return table


def _about(is_exact: bool) -> str:
    return "" if is_exact else "about "
