"""The layers of a viewer: which source shows a volume, and in which way; decided when the viewer is opened.

Not here: Neuroglancer's words for it (state), or HTTP (pages).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from volpipe.errors import RunError, VolumeError
from volpipe.geometry.grid import Box, Grid, triple
from volpipe.reporting.shades import Range, display_change, display_range
from volpipe.reporting.slices import middle_of, part_around
from volpipe.viewer.objects import ObjectTable, find_objects
from volpipe.viewer.progress import OutputWatch, outputs_of, watch
from volpipe.viewer.sources import (
    EDGE,
    NOTHING,
    Chunks,
    Folder,
    Source,
    decoded,
    difference,
    public_url,
)
from volpipe.viewer.styles import DIFFERENCE, IMAGE, LABELS, PROGRESS, LayerStyle, colours
from volpipe.volumes.formats.container import inside, output_around, read_attributes
from volpipe.volumes.places import Paired, Raster, places
from volpipe.volumes.survey import sample_parts
from volpipe.volumes.volume import View, Volume, absolute, open_volume

WIDE = ("uint32", "int32", "uint64", "int64")  # integers that no microscope gives: numbers of objects
SECONDS = 1.0  # for reading what the greys of a volume are measured on
MOST_MEASURED = 8  # chunks that a difference, and shards that an output under way, is measured on
MOST_TRIED = 256  # chunks that are looked at for them
MOST_MARKS = 512  # marks of shards along an axis
LEAST_SHARED = 1 / 4  # of the wider range of greys that both images have, below which a difference says nothing


@dataclass(frozen=True)
class Layer:
    """A layer of the viewer: a volume, a difference, or the progress of a run.

    Attributes:
        name: for people, no two alike.
        style: how it is drawn.
        raster: its finest level.
        source: what is served for it; None where the browser reads `url` itself.
        url: its address, with Neuroglancer's name of the format.
        shades: the values that are black and white, or blue and red; None until there are voxels to measure them on.
        num_channels: of the volume.
        objects: the table of a segmentation, where there is one.
        run: that writes it now.
        volume: that it shows, None of what has none.
        marks: the name of the layer whose progress it marks; "" of others.
    """

    name: str
    style: LayerStyle
    raster: Raster
    source: Source | None = None
    url: str = ""
    shades: Range | None = None
    num_channels: int = 1
    objects: ObjectTable | None = None
    run: OutputWatch | None = None
    volume: Volume | None = None
    marks: str = ""


@dataclass(frozen=True)
class Scene:
    """All layers, of the inputs, of the output and those derived of them, and notes for the user."""

    layers: tuple[Layer, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_sized(self) -> bool:
        """Whether lengths are in nm: the voxel size of every volume is known."""
        return all(layer.volume is None or layer.volume.voxel_size_nm is not None for layer in self.layers)


def open_scene(output: str | Path | Volume, volumes: Sequence[str | Path | Volume]) -> Scene:
    """Return the layers for `output` and the `volumes` beside it.

    Raises:
        VolumeError: one of them is no volume, or a container of several.
    """
    notes: list[str] = []
    places: Sequence[str | Path | Volume] = [output]
    if not isinstance(output, Volume):
        places = outputs_of(str(output)) or places
    inputs = [_volume_layer(place, notes) for place in volumes]
    layers = _with_own_names(_shaded([*inputs, *(_volume_layer(place, notes) for place in places)]))
    images = [layer for layer in layers[: len(inputs)] if layer.style.is_grey]
    derived = [_difference_layer(images[0], layer, notes) for layer in layers[len(inputs) :] if images]
    derived += [_progress_layer(layer) for layer in layers]
    found = (layer for layer in derived if layer is not None)
    return with_shades(Scene((*layers, *found), tuple(dict.fromkeys(notes))))


def with_shades(scene: Scene) -> Scene:
    """Return `scene` with the shades of images and differences that have voxels by now."""
    layers = _shaded(scene.layers)
    return replace(
        scene,
        layers=tuple(
            replace(layer, shades=_change_range(layer)) if layer.style.has_changes and layer.shades is None else layer
            for layer in layers
        ),
    )


def _volume_layer(place: str | Path | Volume, notes: list[str]) -> Layer:
    """Return the layer of one volume, without shades: these are measured later."""
    volume = (place if isinstance(place, Volume) else open_volume(place)).as_it_is
    run = _run_of(volume, notes)
    as_labels = is_labels(volume)
    url = "" if run is not None else public_url(volume)
    source = None if url else _source(volume, run, as_labels=as_labels)
    if volume.voxel_size_nm is None:
        notes.append(f"{volume}: voxel size unknown: places are in voxels, and there is no scale bar")
    style = LABELS if as_labels else colours(volume.num_channels) if volume.num_channels > 1 else IMAGE
    if volume.num_channels > 3:
        notes.append(f"{volume}: channels 0, 1 and 2 of {volume.num_channels} are red, green and blue")
    objects = find_objects(volume) if as_labels else None
    return Layer(
        Path(str(volume)).stem if not volume.key else f"{Path(volume.path).stem} {volume.key}",
        style, Raster.from_volume(volume), source, url, None, volume.num_channels, objects, run, volume,
    )  # fmt: skip


def _source(volume: Volume, run: OutputWatch | None, *, as_labels: bool) -> Source:
    """Return the source that serves `volume`: our reader, or the folder itself in Neuroglancer's format."""
    folder = absolute(volume.path)
    if run is not None:
        return decoded(volume, as_labels=as_labels, written=run.written)
    is_whole = volume.levels[:1] == (volume.key,) and volume.view == View()
    if volume.format == "precomputed" and isinstance(folder, Path) and is_whole:
        return Folder(folder)
    return decoded(volume, as_labels=as_labels)


def _run_of(volume: Volume, notes: list[str]) -> OutputWatch | None:
    """Return the run that writes `volume`; None, with a note, where what it stored cannot be understood."""
    try:
        output = output_around(volume.folder, volume.path)
        return watch(str(output), "/".join(inside(volume.folder, output)[:-1]))
    except RunError as error:
        notes.append(f"{error}; {volume} is shown as it is now")
        return None


def is_labels(volume: Volume) -> bool:
    """Return whether voxels are numbers of objects: by metadata, a type too wide for greys, or the name."""
    if volume.dtype.kind not in "ui" or volume.num_channels > 1:
        return False
    group = absolute(volume.path) / "/".join(volume.key.split("/")[:-1]) if volume.levels else volume.folder
    attributes = read_attributes(group)
    ome = attributes.get("ome", attributes)
    declared = isinstance(ome, dict) and "image-label" in ome
    name = f"{Path(volume.path).stem}/{volume.key}".lower()
    declared = declared or (volume.format == "precomputed" and attributes.get("type") == "segmentation")
    return declared or str(volume.dtype) in WIDE or any(word in name for word in ("label", "segment", "fragment"))


def _shaded(layers: Sequence[Layer]) -> list[Layer]:
    """Return `layers` with black and white: of all images of a type the same, measured on the first that has voxels."""
    known: dict[str, Range] = {}
    for layer in layers:
        key = scale_of(layer)
        if key is not None and key not in known and (shades := layer.shades or _grey_range(layer)) is not None:
            known[key] = shades
    keys = list(map(scale_of, layers))
    return [
        layer if key is None else replace(layer, shades=known.get(key)) for key, layer in zip(keys, layers, strict=True)
    ]


def scale_of(layer: Layer) -> str | None:
    """Return the key that images with the same greys share; None of a layer that has no greys."""
    if not layer.style.has_greys or layer.volume is None:
        return None
    return f"{layer.style.name} {layer.volume.dtype}"


def _grey_range(layer: Layer) -> Range | None:
    """Return the values that are shown black and white; None of an output of which nothing is written yet."""
    assert layer.volume is not None
    volume, run, values = layer.volume, layer.run, list[np.ndarray]()
    parts = sample_parts(volume, seconds=SECONDS) if run is None else _written_parts(volume, run)
    with suppress(VolumeError):  # a chunk that is damaged is empty on the page, and the others are drawn
        values.extend(parts)
    return display_range(*values) if values else None


def _written_parts(volume: Volume, run: OutputWatch) -> Iterator[np.ndarray]:
    """Yield voxels of the middles of shards that are written."""
    reader = volume.open(cache_bytes=0)
    for box in run.written_boxes(MOST_MEASURED):
        yield reader.read(part_around(box, middle_of(box), (EDGE,) * 3))


def _with_own_names(layers: Sequence[Layer]) -> list[Layer]:
    """Return `layers` with names of which no two are alike."""
    names: list[str] = []
    for layer in layers:
        name, number = layer.name, 2
        while name in names:
            name, number = f"{layer.name} ({number})", number + 1
        names.append(name)
    return [replace(layer, name=name) for layer, name in zip(layers, names, strict=True)]


def _difference_layer(first: Layer, second: Layer, notes: list[str]) -> Layer | None:
    """Return the layer of output minus input; None, with a note, where there is none to show."""
    if not second.style.is_grey or first.volume is None or second.volume is None:
        return None
    written = [None if layer.run is None else layer.run.written for layer in (first, second)]
    source = difference(first.volume, second.volume, *written)
    if isinstance(source, str):
        notes.append(f"no difference is shown: {first.name} and {second.name} {source}")
        notes.append(places(Paired(first.name, first.volume), Paired(second.name, second.volume)))
        return None
    if not _are_alike(first, second):
        notes.append(
            f"no difference is shown: {first.name} has greys of {_greys(first)}, {second.name} of {_greys(second)}"
        )
        return None
    return Layer(f"{second.name} − {first.name}", DIFFERENCE, second.raster, source)


def _are_alike(first: Layer, second: Layer) -> bool:
    """Return whether two images have the same kind of greys, so that their difference says something."""
    assert first.volume is not None and second.volume is not None
    if first.volume.dtype == second.volume.dtype:
        return True
    if first.shades is None or second.shades is None:
        return False
    shared = min(first.shades[1], second.shades[1]) - max(first.shades[0], second.shades[0])
    return shared >= LEAST_SHARED * max(high - low for low, high in (first.shades, second.shades))


def _greys(layer: Layer) -> str:
    """Return type and greys of an image, for people."""
    assert layer.volume is not None
    return (
        str(layer.volume.dtype)
        if layer.shades is None
        else "{} from {:.4g} to {:.4g}".format(layer.volume.dtype, *layer.shades)
    )


def _change_range(layer: Layer) -> Range | None:
    """Return the changes that are shown blue and red, measured on some chunks of `layer`; None before there is any."""
    assert isinstance(layer.source, Chunks)
    grid, stop = Grid(layer.raster.shape, (EDGE, EDGE, EDGE)), time.monotonic() + SECONDS
    number, rng, parts = math.prod(grid.counts), np.random.default_rng(0), list[np.ndarray]()
    places = rng.permutation(number) if number <= MOST_TRIED else rng.integers(0, number, MOST_TRIED)
    for place in places.tolist():
        with suppress(VolumeError):  # a chunk that is damaged is empty on the page
            data = layer.source.read(0, grid.box(place))
            parts += [] if data is None else [data[data != NOTHING]]
        if len(parts) == MOST_MEASURED or time.monotonic() > stop:
            break
    if not parts:
        return None
    values = np.concatenate(parts)
    most = display_change(values, is_whole=bool((values == np.rint(values)).all())) or 1.0
    return -most, most


def _progress_layer(layer: Layer) -> Layer | None:
    """Return the layer that marks how far the run is that writes `layer`: one voxel for each shard."""
    run = layer.run
    if run is None:
        return None
    grid = run.grid
    # So that marks end with the volume, as long as they are few.
    shares = [math.gcd(cell, n) for cell, n in zip(grid.cell, layer.raster.shape, strict=True)]
    along = zip(shares, grid.cell, layer.raster.shape, strict=True)
    step = triple(share if n // share <= MOST_MARKS else cell for share, cell, n in along)

    def read(level: int, box: Box) -> np.ndarray:
        sides = zip(box.start, box.stop, step, grid.cell, strict=True)
        return run.look().cells[np.ix_(*(np.arange(a, b) * s // c for a, b, s, c in sides))][np.newaxis]

    raster = layer.raster.every(step)

    source = Chunks((raster,), np.dtype(np.uint8), 1, read, is_live=True)
    return Layer(f"progress of {layer.name}", PROGRESS, raster, source, marks=layer.name)
