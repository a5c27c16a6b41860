"""`volpipe info`, `convert` and `sample`: what a volume is, a copy of it in another format, an invented one.

Not here: how it is read, copied or invented (api.volumes).
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import volpipe as vp
from volpipe.cli.options import Incomplete, Parents, positive, whole
from volpipe.display.console import REFUSED, bars, check_folder, err, out
from volpipe.display.volumes import arrays_table, codec_table, footprint_lines, info_lines, intensity_line
from volpipe.errors import SeveralVolumesError, VolpipeError
from volpipe.units import duration

if TYPE_CHECKING:
    from volpipe.api.volumes import Info
    from volpipe.volumes.volume import Volume

MOST_ARRAYS = 100  # of a container, in a table

LevelOption = Annotated[
    int, typer.Option(metavar="N", parser=whole, help="Level of a multiscale group, 0 is the finest.")
]
ChannelOption = Annotated[
    str | None, typer.Option(metavar="C", help="The one channel that is read: its number from 0, or its name.")
]
TimeOption = Annotated[
    int | None, typer.Option("--time", metavar="N", parser=whole, help="The point in time that is read, from 0.")
]


def info(
    volumes: Annotated[
        list[str], typer.Argument(metavar="VOLUME...", help="Volumes, or containers with several volumes each.")
    ],
    level: LevelOption = 0,
    channel: ChannelOption = None,
    time_point: TimeOption = None,
    fast: Annotated[bool, typer.Option("--fast", help="Only what the metadata say; read no voxels.")] = False,
    codecs: Annotated[bool, typer.Option("--codecs", help="Print what other codecs and chunks would give.")] = False,
    seed: Annotated[
        int, typer.Option(metavar="N", parser=whole, help="Decides which chunks of a large volume are looked at.")
    ] = 0,
) -> None:
    """Print shape, type and voxel size of each VOLUME, its intensities, and what lies on disk."""
    from volpipe.recipes.inference import typed_view

    view = typed_view(channel=channel, time=time_point)
    is_refused = False
    for number, volume in enumerate(volumes):
        if number:
            out.print()
        try:
            vp.info(volume, level=level, view=view, fast=fast, codecs=codecs, seed=seed, on_part=_print_part)
        except SeveralVolumesError as error:
            _print_arrays(volume, error.keys)
        except (VolpipeError, OSError) as error:
            if len(volumes) == 1:
                raise
            err.print(f"volpipe: {error}")
            is_refused = True
    if is_refused:
        raise typer.Exit(REFUSED)


def _print_arrays(container: str, keys: list[str]) -> None:
    """Print a table of the volumes `keys` in `container`, and how one is named."""
    from volpipe.volumes.storage.paths import locate
    from volpipe.volumes.volume import typed

    rows: list[tuple[str, Volume | str]] = []
    for key in keys[:MOST_ARRAYS]:
        try:
            rows.append((typed(locate(container) / key), vp.open(container, key)))
        except VolpipeError as error:
            rows.append((typed(locate(container) / key), str(error)))
    out.print(arrays_table(rows))
    if len(keys) > MOST_ARRAYS:
        out.print(f"and {len(keys) - MOST_ARRAYS} more")
    if rows:
        out.print(f"name one to see more of it: volpipe info {rows[0][0]}")


def _print_part(info: Info) -> None:
    """Print the part of a survey that was measured last; together they take a few seconds."""
    if info.codecs is not None and info.footprint is not None:
        out.print()
        out.print(codec_table(info.volume, info.codecs, info.footprint.stored_share))
    elif info.footprint is not None:
        for line in footprint_lines(info.volume, info.footprint):
            out.print(line)
    elif info.intensities is not None:
        out.print(intensity_line(info.intensities))
    else:
        for line in info_lines(info.volume):
            out.print(line)


def sample(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Where to write, such as sample.n5.")],
    shape: Annotated[str, typer.Option(metavar="Z,Y,X", help="Voxels.")] = "128,256,256",
    seed: Annotated[int, typer.Option(metavar="N", parser=whole, help="The same seed gives the same bytes.")] = 0,
    voxel_size_nm: Annotated[
        str, typer.Option(metavar="Z,Y,X", help="Lengths of a voxel; tissue is recognised from about 2 to 40.")
    ] = "16,8,8",
    workers: Annotated[int, typer.Option(metavar="N", parser=positive, help="Processes.")] = 1,
    parents: Parents = False,
) -> None:
    """Write an invented electron-microscopy volume, arrays `raw` and `labels`, to PATH."""
    check_folder(path, path if "://" in path else Path(path), parents=parents)
    from volpipe.recipes.inference import typed_lengths
    from volpipe.volumes.convert import parse_sizes

    sizes, voxel = parse_sizes(shape, "--shape"), typed_lengths("--voxel-size-nm", voxel_size_nm)
    started = time.perf_counter()
    with bars() as shown:
        vp.sample(
            path, sizes, seed=seed, voxel_size_nm=voxel, workers=workers,
            on_progress=partial(shown.show, "sample", noun="box"),
        )  # fmt: skip
    took = duration(time.perf_counter() - started)
    out.print(f"wrote {path}: raw and labels, {' × '.join(map(str, sizes))} voxels, seed {seed}, in {took}")


def convert(
    volume: Annotated[
        str, typer.Argument(metavar="VOLUME", help="A volume of any format, or an array inside a container.")
    ],
    target: Annotated[str, typer.Argument(metavar="OUT", help="The copy: a file or a container, or a path into one.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="n5, zarr2, zarr3, ome-zarr-0.4, ome-zarr-0.5, precomputed, hdf5, tiff, mrc, npy; auto is by "
            "OUT's name.",
        ),
    ] = "auto",
    chunk: Annotated[str | None, typer.Option(metavar="Z,Y,X", help="Voxels; one number for all three.")] = None,
    shard: Annotated[str | None, typer.Option(metavar="Z,Y,X", help="Voxels, of Zarr v3 and precomputed.")] = None,
    codec: Annotated[str, typer.Option(metavar="CODEC", help="zstd, gzip, raw or compressed_segmentation.")] = "auto",
    bin: Annotated[
        str,
        typer.Option(metavar="Z,Y,X", help="Voxels of VOLUME whose mean is a voxel of OUT; one number for all three."),
    ] = "1,1,1",
    workers: Annotated[int, typer.Option(metavar="N", parser=positive, help="How many read at once.")] = 1,
    level: LevelOption = 0,
    channel: ChannelOption = None,
    time_point: TimeOption = None,
    voxel_size_nm: Annotated[
        str | None, typer.Option(metavar="Z,Y,X", help="Lengths of a voxel, such as 16,8,8; they win over the file's.")
    ] = None,
    origin_nm: Annotated[
        str | None, typer.Option(metavar="Z,Y,X", help="Centre of the first voxel, such as 0,1000,1000.")
    ] = None,
    incomplete: Incomplete = False,
    parents: Parents = False,
) -> None:
    """Copy VOLUME to OUT, in another format; OUT appears once the copy is whole."""
    from volpipe.recipes.inference import typed_view
    from volpipe.volumes.convert import container_of, parse_sizes

    view = typed_view(
        channel=channel, time=time_point, voxel_size_nm=voxel_size_nm, origin_nm=origin_nm, incomplete=incomplete
    )  # fmt: skip
    check_folder(target, container_of(target), parents=parents)
    sizes = (parse_sizes(chunk, "--chunk") if chunk else None, parse_sizes(shard, "--shard") if shard else None)
    binned = parse_sizes(bin, "--bin")
    started = time.perf_counter()
    source = vp.open(volume, level=level, view=view)
    for note in source.notes:
        out.print(f"note        {volume}: {note}")
    with bars() as shown:
        copy = vp.convert(
            source, target, format=format, chunk=sizes[0], shard=sizes[1], codec=codec,
            bin=binned, workers=workers, on_progress=partial(shown.show, "convert", noun="box"),
        )  # fmt: skip
    out.print(f"wrote {target} in {duration(time.perf_counter() - started)}")
    for line in info_lines(copy):
        out.print(line)
