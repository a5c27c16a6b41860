"""The layers of a viewer: which source shows a volume, and in which way; decided when the viewer is opened.

Not here: Neuroglancer's words for it (state), or HTTP (pages).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from volpipe.errors import RunError, VolumeError
from volpipe.geometry.grid import Box, triple
from volpipe.viewer.objects import Objects, find_objects
from volpipe.viewer.progress import Watch, outputs_of, watch
from volpipe.viewer.sources import Chunks, Folder, Source, as_files, decoded, difference, public_url
from volpipe.volumes.formats.container import read_attributes
from volpipe.volumes.raster import Raster
from volpipe.volumes.storage import paths
from volpipe.volumes.survey import measure_intensities
from volpipe.volumes.volume import Volume, absolute, open_volume

Kind = Literal["image", "colours", "labels", "difference", "progress"]
Range = tuple[float, float]
WIDE = ("uint32", "int32", "uint64", "int64")  # integers that no microscope gives: numbers of objects
DARK, BRIGHT = 0.5, 99.5  # percentiles shown black and white
SHARE = 4  # a difference of 1/4 of the greys is black or white


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        name: for people, no two alike.
        kind: how it is drawn.
        raster: its finest level.
        source: what is served for it; None where the browser reads `url` itself.
        url: its address, with Neuroglancer's name of the format.
        shades: the values that are black and white.
        num_channels: of the volume.
        objects: the table of a segmentation, where there is one.
        run: that writes it now.
        volume: that it shows, None of what has none.
    """

    name: str
    kind: Kind
    raster: Raster
    source: Source | None = None
    url: str = ""
    shades: Range = (0.0, 255.0)
    num_channels: int = 1
    objects: Objects | None = None
    run: Watch | None = None
    volume: Volume | None = None


@dataclass(frozen=True)
class Scene:
    """All layers: of the inputs, of the output, then what is derived; and what a user should know of them."""

    layers: tuple[Layer, ...]
    notes: tuple[str, ...] = ()


def open_scene(output: str | Path | Volume, volumes: Sequence[str | Path | Volume]) -> Scene:
    """Return the layers for `output` and the `volumes` beside it.

    Raises:
        VolumeError: one of them is no volume, or a container of several.
    """
    notes: list[str] = []
    places: Sequence[str | Path | Volume] = [output]
    if not isinstance(output, Volume):
        places = outputs_of(str(output)) or places
    inputs = [_layer(place, notes) for place in volumes]
    layers = _shaded([*inputs, *(_layer(place, notes) for place in places)])
    layers = _named(layers)
    images = [layer for layer in layers[: len(inputs)] if layer.kind == "image"]
    derived = [_difference(images[0], layer, notes) for layer in layers[len(inputs) :] if images]
    derived += [_progress(layer) for layer in layers]
    return Scene((*layers, *(layer for layer in derived if layer is not None)), tuple(dict.fromkeys(notes)))


def _layer(place: str | Path | Volume, notes: list[str]) -> Layer:
    """Return the layer of one volume, its shades still to be found."""
    if not isinstance(place, Volume):
        folder = paths.locate(place)
        if isinstance(folder, Path) and (info := _precomputed(folder)) is not None and not _is_made_now(folder):
            return _own_format(folder, info)
        volume = open_volume(place).as_it_is
    else:
        volume = place.as_it_is
    run = _run_of(volume, notes)
    as_labels = is_labels(volume)
    url = public_url(volume) if run is None else None
    source: Source | None = as_files(volume) if run is None and url is None else None
    if source is None and url is None:
        source = decoded(volume, as_labels=as_labels, is_live=run is not None)
    if volume.voxel_size_nm is None:
        notes.append(f"{volume}: voxel size unknown, shown as 1 nm")
    kind: Kind = "labels" if as_labels else "colours" if volume.num_channels > 1 else "image"
    if volume.num_channels > 3:
        notes.append(f"{volume}: channels 0, 1 and 2 of {volume.num_channels} are red, green and blue")
    objects = find_objects(volume) if as_labels else None
    return Layer(
        Path(str(volume)).stem if not volume.key else f"{Path(volume.path).stem} {volume.key}",
        kind, Raster.from_volume(volume), source, url or "", (0, 0), volume.num_channels, objects, run, volume,
    )  # fmt: skip


def _is_made_now(folder: Path) -> bool:
    """Return whether a run writes the volume in `folder`; False where what it stored cannot be understood."""
    try:
        return watch(str(folder)) is not None
    except RunError:  # which `_run_of` notes
        return False


def _run_of(volume: Volume, notes: list[str]) -> Watch | None:
    """Return the run that writes `volume`; None, with a note, where what it stored cannot be understood."""
    try:
        return watch(str(absolute(volume.path)))
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


def _precomputed(folder: Path) -> dict[str, Any] | None:  # Any: JSON
    """Return the description of a folder of Neuroglancer's own format, None of any other."""
    try:
        info = json.loads((folder / "info").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return info if isinstance(info, dict) and info.get("scales") and "data_type" in info else None


def _own_format(folder: Path, info: dict[str, Any]) -> Layer:  # Any: JSON
    """Return the layer of a precomputed volume, as it lies."""
    try:
        scale, count = info["scales"][0], int(info["num_channels"])
        shape = triple(int(n) for n in reversed(scale["size"]))
        size = triple(float(v) for v in reversed(scale["resolution"]))
        offset = triple(float(v) for v in reversed(scale.get("voxel_offset", (0, 0, 0))))
        origin = triple((n + 0.5) * v for n, v in zip(offset, size, strict=True))
        shades: Range = (0, 1) if info["data_type"] == "float32" else (0, float(np.iinfo(info["data_type"]).max))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise VolumeError(f"{folder}/info is no description of a precomputed volume: {error}") from error
    kind: Kind = "labels" if info.get("type") == "segmentation" else "colours" if count > 1 else "image"
    return Layer(folder.name, kind, Raster(shape, size, origin), Folder(folder), "", shades, count)


def _shaded(layers: Sequence[Layer]) -> list[Layer]:
    """Return `layers` with black and white: of all images of a type the same, measured on the first that has voxels."""
    known: dict[str, Range] = {}
    for layer in layers:
        key = _scale_of(layer)
        if key is not None and key not in known and (shades := _shades(layer)) is not None:
            known[key] = shades
    return [
        layer if layer.volume is None else replace(layer, shades=known.get(_scale_of(layer) or "", (0.0, 1.0)))
        for layer in layers
    ]


def _scale_of(layer: Layer) -> str | None:
    """Return what images must share to have the same greys; None of what is no image of ours."""
    if layer.kind not in ("image", "colours") or layer.volume is None:
        return None
    return f"{layer.kind} {layer.volume.dtype}"


def _shades(layer: Layer) -> Range | None:
    """Return the values to show black and white; None of floats of which nothing is written yet."""
    assert layer.volume is not None
    dtype = layer.volume.dtype
    if dtype in (np.uint8, np.int8):
        return float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
    values = dict(measure_intensities(layer.volume).percentiles)
    if values and values[DARK] < values[BRIGHT]:
        return values[DARK], values[BRIGHT]
    return None


def _named(layers: Sequence[Layer]) -> list[Layer]:
    """Return `layers` with names of which no two are alike."""
    names: list[str] = []
    for layer in layers:
        name, number = layer.name, 2
        while name in names:
            name, number = f"{layer.name} ({number})", number + 1
        names.append(name)
    return [replace(layer, name=name) for layer, name in zip(layers, names, strict=True)]


def _difference(first: Layer, second: Layer, notes: list[str]) -> Layer | None:
    """Return the layer of output minus input; None, with a note, where there is none to show."""
    if first.kind != "image" or second.kind != "image" or first.volume is None or second.volume is None:
        return None
    written = [None if layer.run is None else layer.run.written for layer in (first, second)]
    source = difference(first.volume, second.volume, *written)
    if isinstance(source, str):
        notes.append(f"no difference is shown: {first.name} and {second.name} {source}")
        return None
    most = max(1e-12, (second.shades[1] - second.shades[0]) / SHARE)
    return Layer(f"{second.name} − {first.name}", "difference", second.raster, source, shades=(-most, most))


def _progress(layer: Layer) -> Layer | None:
    """Return the layer that marks how far the run is that writes `layer`: one voxel for each shard."""
    run = layer.run
    if run is None:
        return None
    raster = layer.raster.every(triple(run.grid.cell))

    def read(level: int, box: Box) -> np.ndarray:
        return run.look().cells[box.slices][np.newaxis]

    source = Chunks((raster,), np.dtype(np.uint8), 1, read, is_live=True)
    return Layer(f"progress of {layer.name}", "progress", raster, source)
