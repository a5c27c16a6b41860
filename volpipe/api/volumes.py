"""Volumes: references that slice as numpy does, what they hold, copies in other formats, and samples.

Not here: how they are read, surveyed, copied or invented (volumes, synthetic), or printing (cli).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from volpipe.api.progress import count_shown
from volpipe.errors import VolpipeError
from volpipe.resolve import homes_known
from volpipe.segmentation.properties import find_table, segment_properties
from volpipe.synthetic.volume import SyntheticVolume, write_sample
from volpipe.volumes.convert import Choice, OnProgress
from volpipe.volumes.convert import convert as copy
from volpipe.volumes.storage import paths
from volpipe.volumes.survey import (
    CodecTrials,
    Footprint,
    Intensities,
    measure_footprint,
    measure_intensities,
    try_codecs,
)
from volpipe.volumes.volume import AS_STORED, View, Volume, list_arrays, open_volume

__all__ = ["Info", "convert", "info", "list_arrays", "open", "sample"]


@dataclass(frozen=True, repr=False)
class Info:
    """A volume and its survey.

    Attributes:
        volume: what the metadata say: shape, type, voxel size, chunks, codec, levels.
        intensities: percentiles of what was read.
        footprint: its files.
        codecs: size and speed of other codecs and chunks.
        Each of the last three is None as long as it was not measured.
    """

    volume: Volume
    intensities: Intensities | None = None
    footprint: Footprint | None = None
    codecs: CodecTrials | None = None

    def __repr__(self) -> str:
        """Return the lines that `volpipe info` prints."""
        from volpipe.display.console import rendered
        from volpipe.display.volumes import codec_table, footprint_lines, info_lines, intensity_line

        lines = [*info_lines(self.volume)]
        if self.intensities is not None:
            lines.append(intensity_line(self.intensities))
        if self.footprint is not None:
            lines += footprint_lines(self.volume, self.footprint)
        if self.codecs is not None and self.footprint is not None:
            lines += ["", rendered(codec_table(self.volume, self.codecs, self.footprint.stored_share)).rstrip()]
        return "\n".join(lines)


@homes_known
def open(location: str | Path, key: str | None = None, level: int = 0, *, view: View = AS_STORED) -> Volume:
    """Return the volume at `location`: an array, a level of a multiscale group, or the only one of these inside.

    Args:
        location: an N5, Zarr or Neuroglancer precomputed container, a file of HDF5, TIFF, NIfTI or another format, a
            folder of TIFF slices, or a path into one; on a disk, containers also s3://bucket/… or https://host/… .
        key: the array or group in it; needed where there are several.
        level: of the multiscale group, 0 for the finest.
        view: what is read of the array, and where it lies, in place of what it says itself, such as
            `View(voxel_size_nm=(16, 8, 8), channel=1)`.

    Raises:
        VolumeError: nothing there, several to choose from, metadata that are broken, wrong or not supported, or a
            channel or a point in time that there is none of.
    """
    return open_volume(location, key, level, view=view)


@homes_known
def info(
    volume: Volume | str | Path,
    *,
    level: int = 0,
    view: View = AS_STORED,
    fast: bool = False,
    codecs: bool = False,
    seed: int = 0,
    on_part: Callable[[Info], None] = lambda info: None,
) -> Info:
    """Return metadata, intensities and size on disk of a volume; a large one is sampled, in a few seconds.

    Args:
        volume: or its location, as `open` takes it, with `level` and `view`.
        level: level of a multiscale group, 0 is the finest.
        view: one channel or point in time.
        fast: only what the metadata say; read no voxels.
        codecs: try what other codecs and chunks would give.
        seed: decides which chunks of a large volume are looked at.
        on_part: called after each part with what is known so far.

    Raises:
        SeveralVolumesError: a container with several arrays.
        VolumeError: no volume there, or a damaged chunk.
    """
    if fast and codecs:
        raise VolpipeError("--codecs reads voxels, which --fast leaves alone; give one of the two")
    opened = volume if isinstance(volume, Volume) else open(volume, level=level, view=view)
    result = Info(opened)
    on_part(result)
    if fast:
        return result
    watched = opened.as_it_is
    intensities = measure_intensities(watched, seed=seed)
    result = replace(result, intensities=intensities)
    on_part(result)
    result = replace(result, footprint=measure_footprint(opened, seed=seed))
    on_part(result)
    if codecs:
        result = replace(result, codecs=try_codecs(watched, seed=seed, seconds_per_chunk=intensities.seconds))
        on_part(result)
    return result


@homes_known
def convert(
    volume: Volume | str | Path,
    out: str | Path,
    *,
    format: str = "auto",
    chunk: tuple[int, int, int] | None = None,
    shard: tuple[int, int, int] | None = None,
    codec: str = "auto",
    bin: tuple[int, int, int] = (1, 1, 1),
    workers: int = 1,
    progress: bool | None = None,
    on_progress: OnProgress | None = None,
) -> Volume:
    """Return the copy of `volume` at `out`, which appears once it is whole.

    Args:
        volume: a volume of any format, or an array inside a container. Also one that is open.
        out: the copy: a file or a container, or a path into one. It must not exist.
        format: one of n5, zarr2, zarr3, ome-zarr-0.4, ome-zarr-0.5, ome-zarr-0.6, precomputed, hdf5, tiff, mrc, npy;
            auto is by `out`'s name.
        chunk: voxels (z, y, x); None for 64 each.
        shard: voxels, of Zarr v3 and precomputed. None for 256 each.
        codec: one of zstd, gzip, raw, compressed_segmentation. By default what the format's readers all have; the
            last is of precomputed labels.
        bin: voxels of `volume` whose mean is a voxel of `out`; one number for all three. In Python (z, y, x); the mean
            is rounded as the type needs.
        workers: how many read at once.
        progress: as of `run`.
        on_progress: called with the number of boxes copied and the number of boxes, after each.

    Raises:
        VolumeError: `out` exists, its format cannot hold such a volume, there is no room for it, or `bin` does not
            divide its voxels.
    """
    opened = volume if isinstance(volume, Volume) else open(volume)
    with count_shown("convert", "box", progress, on_progress) as show:
        choice = Choice(format, chunk, shard, codec, bin)
        table = find_table(opened) if opened.key in ("", *opened.levels[:1]) else None
        properties = None if table is None else partial(segment_properties, table)
        return copy(opened, out, choice, workers=workers, on_progress=show, properties=properties)


@homes_known
def sample(
    path: str | Path,
    shape: tuple[int, int, int] = (128, 256, 256),
    *,
    seed: int = 0,
    voxel_size_nm: tuple[float, float, float] = (16.0, 8.0, 8.0),
    workers: int = 1,
    progress: bool | None = None,
    on_progress: OnProgress | None = None,
) -> Volume:
    """Write an invented electron-microscopy volume, arrays `raw` and `labels`, and return `raw`.

    Args:
        path: where to write, such as sample.n5. A sample in it of another shape, seed or voxel size is in the way.
        shape: voxels.
        seed: the same seed gives the same bytes.
        voxel_size_nm: lengths of a voxel; tissue is recognised from about 2 to 40.
        workers: processes.
        progress: as of `run`.
        on_progress: called with the number of boxes written and the number of boxes, after each.

    Raises:
        VolpipeError: not a folder on a disk, not an N5, or another array in its place.
    """
    if str(path).startswith(("s3:", "http:", "https:")):
        raise VolpipeError(f"samples are written to a disk, not to {Path(path).parts[0]}//; choose a folder")
    if Path(path).suffix.lower() != ".n5":
        raise VolpipeError(f"{path}: a sample is an N5 container; give a name that ends in .n5, such as sample.n5")
    paths.check_letters(paths.locate(path))
    with count_shown("sample", "box", progress, on_progress) as show:
        write_sample(Path(path), SyntheticVolume(shape, seed, voxel_size_nm), workers=workers, on_progress=show)
    return open(path, "raw")
