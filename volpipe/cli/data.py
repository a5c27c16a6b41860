"""`volpipe info`, `convert` and `sample`: what a volume is, a copy of it in another format, an invented one.

Not here: how it is read, copied or invented (api.volumes).
"""

from __future__ import annotations

import shlex
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import volpipe as vp
from volpipe.cli.generate import command
from volpipe.cli.groups import Group
from volpipe.cli.options import Incomplete, Parents, whole
from volpipe.display import console
from volpipe.display.console import REFUSED, bars, check_folder, err, result_is_in_files
from volpipe.display.volumes import arrays_table, codec_table, footprint_lines, info_lines, intensity_line
from volpipe.errors import SeveralVolumesError, VolpipeError
from volpipe.units import duration

if TYPE_CHECKING:
    from volpipe.api.volumes import Info
    from volpipe.volumes.volume import Volume

MOST_ARRAYS = 100  # of a container, in a table

Level = Annotated[int, typer.Option(metavar="N", parser=whole, help="Level of a multiscale group, 0 is the finest.")]
Channel = Annotated[
    str | None, typer.Option(metavar="C", help="The one channel that is read: its number from 0, or its name.")
]
TimePoint = Annotated[
    int | None, typer.Option("--time", metavar="N", parser=whole, help="The point in time that is read, from 0.")
]


@command(Group.MOST_USED, "info", place=8, without=("volume",))
def info(
    *,
    volumes: Annotated[
        list[str], typer.Argument(metavar="VOLUME...", help="Volumes, or containers with several volumes each.")
    ],
    channel: Channel = None,
    time_point: TimePoint = None,
    **options: Any,  # Any: values of options
) -> None:
    """Print shape, type and voxel size of each VOLUME, its intensities, and what lies on disk."""
    from volpipe.recipes.inference import typed_view

    view = typed_view(channel=channel, time=time_point)
    is_refused = False
    for number, volume in enumerate(volumes):
        if number:
            console.out.print()
        try:
            vp.info(volume, view=view, on_part=_print_part, **options)
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
    console.out.print(arrays_table(rows))
    if len(keys) > MOST_ARRAYS:
        console.out.print(f"and {len(keys) - MOST_ARRAYS} more")
    if rows:
        console.out.print(f"name one to see more of it: volpipe info {shlex.quote(str(rows[0][0]))}")


def _print_part(info: Info) -> None:
    """Print the part of a survey that was measured last; together they take a few seconds."""
    if info.codecs is not None and info.footprint is not None:
        console.out.print()
        console.out.print(codec_table(info.volume, info.codecs, info.footprint.stored_share))
    elif info.footprint is not None:
        for line in footprint_lines(info.volume, info.footprint):
            console.out.print(line)
    elif info.intensities is not None:
        console.out.print(intensity_line(info.intensities))
    else:
        for line in info_lines(info.volume):
            console.out.print(line)


@command(Group.NETS, "sample", place=4)
def sample(
    path: str, shape: tuple[int, int, int], seed: int, *, parents: Parents = False, **options: Any
) -> None:  # Any: values of options
    """Write an invented electron-microscopy volume, arrays `raw` and `labels`, to PATH."""
    result_is_in_files()
    check_folder(path, path if "://" in path else Path(path), parents=parents)
    started = time.perf_counter()
    with bars() as shown:
        vp.sample(path, shape, seed=seed, on_progress=partial(shown.show, "sample", noun="box"), **options)
    took = duration(time.perf_counter() - started)
    console.out.print(f"wrote {path}: raw and labels, {' × '.join(map(str, shape))} voxels, seed {seed}, in {took}")


@command(Group.MOST_USED, "convert", place=7)
def convert(
    volume: str,
    out: str,
    *,
    level: Level = 0,
    channel: Channel = None,
    time_point: TimePoint = None,
    voxel_size_nm: Annotated[
        str | None, typer.Option(metavar="Z,Y,X", help="Lengths of a voxel, such as 16,8,8; they win over the file's.")
    ] = None,
    origin_nm: Annotated[
        str | None, typer.Option(metavar="Z,Y,X", help="Centre of the first voxel, such as 0,1000,1000.")
    ] = None,
    incomplete: Incomplete = False,
    parents: Parents = False,
    **options: Any,  # Any: values of options
) -> None:
    """Copy VOLUME to OUT, in another format; OUT appears once the copy is whole."""
    from volpipe.recipes.inference import typed_view
    from volpipe.volumes.convert import container_of

    result_is_in_files()
    view = typed_view(
        channel=channel, time=time_point, voxel_size_nm=voxel_size_nm, origin_nm=origin_nm, incomplete=incomplete
    )  # fmt: skip
    check_folder(out, container_of(out), parents=parents)
    started = time.perf_counter()
    source = vp.open(volume, level=level, view=view)
    for note in source.notes:
        console.out.print(f"note        {volume}: {note}")
    with bars() as shown:
        copy = vp.convert(source, out, on_progress=partial(shown.show, "convert", noun="box"), **options)
    console.out.print(f"wrote {out} in {duration(time.perf_counter() - started)}")
    for line in info_lines(copy):
        console.out.print(line)
