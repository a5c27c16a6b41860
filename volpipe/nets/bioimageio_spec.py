"""bioimage.io packages, formats 0.4 and 0.5: their description, checked, in our words and axes.

Not here: running their net (bioimageio), or pre- and postprocessing (bioimageio_ops). Nothing is fetched, and files
outside of the package are refused. bioimageio.spec checks the description.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import stat
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple, triple
from volpipe.nets.bioimageio_ops import Step, read_step
from volpipe.resolve import describe_error
from volpipe.text import check_no_text, decoded, stand_in

DESCRIPTIONS = ("bioimageio.yaml", "rdf.yaml", "model.yaml")
DISCRETE = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool")
MOST_TEXT = 4 << 20  # bytes of a description
MOST_ALIASES = 16  # of which YAML may make a text that is exponentially longer
MOST_FILES, MOST_BYTES = 1000, 16 << 30  # of a zip, unpacked
MOST_RATIO = 1000  # of bytes unpacked by stored
COPY_BYTES = 1 << 20
SUPPORTED = ("onnx", "torchscript", "pytorch_state_dict")  # the preferred first: data before code
SPACE = "zyx"
TOLERANCE, PER_MILLION = 1e-3, 100  # defaults of bioimageio.spec


@dataclass(frozen=True)
class TensorSpec:
    """The input or the output of a package.

    Attributes:
        axes: letters of "bczyx", in its order.
        channels: along c, 1 without that axis.
        steps: pre- or postprocessing.
        test: the file of its test tensor, None without one.
    """

    name: str
    axes: str
    channels: int
    steps: tuple[Step, ...]
    test: Path | None


@dataclass(frozen=True)
class Weights:
    """The weights in one format: the package's folder, and their entry in its description."""

    kind: str
    folder: Path
    entry: Mapping[str, Any]  # Any: JSON

    @cached_property
    def file(self) -> Path:
        """Their file, checked at first use: other formats of the package may be missing."""
        return resolve_file(self.folder, self.entry)


@dataclass(frozen=True)
class Tolerance:
    """Largest relative and absolute difference of a test, and how many of a million values may exceed it."""

    relative: float
    absolute: float
    per_million: float


@dataclass(frozen=True)
class Package:
    """A package of one input, and one of its outputs.

    Attributes:
        folder: of its description.
        least, step: sizes of windows (z, y, x) are least + k · step; step is 0 where the size is the only one.
        scale: output voxels per input voxel.
        shrink: input voxels per output voxel where the output is coarser.
        margin: input voxels that the output lacks on each side.
        halo: input voxels that its maker wants cropped, the margin included; None without an entry.
        output_index: place of the output among `num_outputs`.
        tolerance: of its own test, by format of weights; "" for all.
    """

    name: str
    folder: Path
    input: TensorSpec
    output: TensorSpec
    least: Triple
    step: Triple
    scale: Triple
    halo: Triple | None
    weights: Mapping[str, Weights]
    tolerance: Mapping[str, Tolerance]
    shrink: Triple = (1, 1, 1)
    margin: Triple = (0, 0, 0)
    output_index: int = 0
    num_outputs: int = 1

    def weights_in(self, kind: str | None) -> Weights:
        """Return the weights in the format `kind`, None for the preferred one.

        Raises:
            VolpipeError: there are none, or their file is missing, outside of the package, or another.
        """
        kind = kind or next(iter(self.weights))
        if kind not in self.weights:
            raise VolpipeError(f"package {self.name} has no {kind} weights; it has {', '.join(self.weights)}")
        try:
            self.weights[kind].file  # noqa: B018  # refused if it is none
        except VolpipeError as error:
            raise VolpipeError(f"package {self.name}: {error}") from error
        return self.weights[kind]


def open_package(path: Path, output: int | str | None = None) -> Package:
    """Return the package at `path`: a folder, a zip, or the description in a folder.

    Args:
        output: name or number of the output that is taken, where there are several; None for the only image.

    Raises:
        VolpipeError: it is no package, or needs an unsupported feature, which the message names.
    """
    file = description_file(path)
    source = _read_description(file)
    description, version = _checked_description(file, source)
    try:
        return _package_of(file.parent, description, source.get("config"), output, is_new=version >= (0, 5))
    except VolpipeError as error:
        raise VolpipeError(f"package {path.name}: {error}") from error


def description_file(path: Path) -> Path:
    """Return the description file of the package at `path`; a zip is unpacked."""
    folder = unpack(path) if path.suffix == ".zip" else path
    if folder.is_file():
        return folder
    file = next((folder / name for name in DESCRIPTIONS if (folder / name).is_file()), None)
    if file is None:
        inner = [p for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
        if path.suffix == ".zip" and len(inner) == 1:  # zipped with its folder
            return description_file(inner[0])
        raise VolpipeError(f"no bioimage.io package at {path}: it has no {' or '.join(DESCRIPTIONS[:2])}")
    return file


def unpack(path: Path) -> Path:
    """Return the folder in the user's cache with the files of the zip at `path`, unpacked once and whole."""
    if not path.is_file():
        raise VolpipeError(f"no package at {path}")
    check_no_text(path, "zip")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "volpipe" / "packages" / digest
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{digest}.{uuid.uuid4().hex}")
    try:
        partial.mkdir(parents=True, mode=0o700)
        _extract(path, partial)
        partial.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another worker was quicker
            raise VolpipeError(f"{path} cannot be unpacked to {folder.parent}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _extract(path: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            _check_entries(path, entries)
            for entry in entries:
                target = folder / PurePosixPath(entry.filename)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, target.open("xb") as stream:
                    shutil.copyfileobj(source, stream, COPY_BYTES)  # zipfile stops at the size that it says
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:  # damaged, or encrypted
        raise VolpipeError(f"{path} is no zip that can be read: {describe_error(error)}") from error
    except FileExistsError as error:
        raise VolpipeError(f"{path} holds {error.filename} twice") from error


def _check_entries(path: Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse paths out of the folder, links, and zips larger than any package."""
    for entry in entries:
        place = PurePosixPath(entry.filename)
        if place.is_absolute() or ".." in place.parts or "\\" in entry.filename:
            raise VolpipeError(f"{path} holds {entry.filename!r}, which leads out of it")
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise VolpipeError(f"{path} holds the link {entry.filename!r}; packages hold files")
    size, stored = sum(e.file_size for e in entries), sum(e.compress_size for e in entries)
    if len(entries) > MOST_FILES or size > min(MOST_BYTES, MOST_RATIO * max(stored, COPY_BYTES)):
        raise VolpipeError(
            f"{path} holds {len(entries)} files of {size} bytes in {stored}; at most {MOST_FILES} files, {MOST_BYTES} "
            f"bytes and {MOST_RATIO} times as many as are stored are unpacked"
        )


def _checked_description(file: Path, source: dict[str, Any]) -> tuple[Mapping[str, Any], tuple[int, ...]]:  # Any: JSON
    """Return a description, checked and completed by bioimageio.spec, and its format."""
    try:
        from bioimageio.spec import InvalidDescr, ValidationContext, build_description
    except ImportError as error:
        raise VolpipeError("packages of bioimage.io need bioimageio.spec; pip install 'volpipe[models]'") from error

    context = ValidationContext(root=file.parent.absolute(), perform_io_checks=False, warning_level=50)
    try:
        model = build_description(source, context=context, format_version="discover")
    except Exception as error:  # whatever the library raises for other content
        raise VolpipeError(f"{file} describes no model: {describe_error(error)}") from error
    if isinstance(model, InvalidDescr):
        raise VolpipeError(f"{file} describes no model: {' '.join(str(model.get_reason()).split())}")
    if model.type != "model":
        raise VolpipeError(f"{file} describes a {model.type}, not a model")
    version = tuple(int(part) for part in str(model.format_version).split(".")[:2])
    return model.model_dump(mode="json"), version


def _read_description(file: Path) -> dict[str, Any]:  # Any: YAML
    import yaml

    if file.stat().st_size > MOST_TEXT:
        raise VolpipeError(f"{file} has {file.stat().st_size} bytes; a description has at most {MOST_TEXT}")
    text = decoded(file.read_bytes(), errors="replace")
    if instead := stand_in(text.encode()):
        raise VolpipeError(f"{file} is no description of a package, but looks like {instead}")
    try:
        num_aliases = sum(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
        description = _plain_values(yaml.safe_load(text)) if num_aliases <= MOST_ALIASES else None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise VolpipeError(f"{file} is no YAML that can be read: {describe_error(error)}") from error
    if num_aliases > MOST_ALIASES:
        raise VolpipeError(
            f"{file} has {num_aliases} aliases, of which an endless text can be made; at most {MOST_ALIASES} are read"
        )
    if not isinstance(description, dict):
        raise VolpipeError(f"{file} holds {type(description).__name__}, not a description")
    return description


def _plain_values(value: Any) -> Any:  # Any: YAML
    """Return `value` with dates as texts, and with numbers such as 1e-3, texts in YAML 1.1, as numbers."""
    if isinstance(value, dict):
        return {str(key): _plain_values(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain_values(inner) for inner in value]
    if isinstance(value, str) and "e" in value.lower() and value[:1] in "+-.0123456789":
        try:
            return float(value)
        except ValueError:
            return value
    return value.isoformat() if hasattr(value, "isoformat") else value


def _package_of(
    folder: Path, description: Mapping[str, Any], config: Any, output: int | str | None, *, is_new: bool
) -> Package:  # Any: JSON
    """Return the package of a description; `config` is its section of that name, without defaults."""
    inputs, outputs = description["inputs"], description["outputs"]
    if len(inputs) != 1:
        raise VolpipeError(
            f"it has {len(inputs)} inputs ({', '.join(map(_tensor_name, inputs))}); packages of one are run"
        )
    index = _output_index(outputs, output)
    source, target = inputs[0], outputs[index]
    read = _read_new if is_new else _read_old
    axes, least, step, channels = _read_input(source, is_new=is_new)
    sizes = dict(zip(axes, zip(least, step, strict=True), strict=True))
    out_axes, growth, halo, out_channels = read(target, sizes, source)
    if set(axes) - set("bc") != set(out_axes) - set("bc"):
        raise VolpipeError(f"it makes axes {out_axes} of {axes}; those of space must stay")
    tests = (
        _test_file(folder, source, (description.get("test_inputs") or ())[:1]),
        _test_file(folder, target, (description.get("test_outputs") or ())[index : index + 1]),
    )
    spatial = [sizes.get(axis, (1, 1)) for axis in SPACE]  # along z, slices go one by one
    scale, shrink, margin = map(triple, zip(*(growth.get(axis, (1, 1, 0)) for axis in SPACE), strict=True))
    cropped = [-(-halo.get(axis, 0) * r // s) for axis, s, r in zip(SPACE, scale, shrink, strict=True)]
    data = target.get("data")
    first = data[0] if isinstance(data, list) else data
    entries = description["weights"]
    present = {kind: entry for kind, entry in entries.items() if entry}
    weights = [Weights(kind, folder, present[kind]) for kind in SUPPORTED if kind in present]
    if not weights:
        raise VolpipeError(f"it has weights of {', '.join(present) or 'no kind'}; {', '.join(SUPPORTED)} are run")
    weights.sort(key=lambda w: "://" in str(w.entry["source"]))  # files in the package first
    return Package(
        name=str(description["name"]),
        folder=folder,
        input=TensorSpec(_tensor_name(source), axes, channels, _read_steps(source, "preprocessing"), tests[0]),
        output=TensorSpec(
            _tensor_name(target), out_axes, out_channels, _read_steps(target, "postprocessing"), tests[1]
        ),
        least=triple([n for n, _ in spatial]),
        step=triple([k for _, k in spatial]),
        scale=scale,
        halo=triple(map(int.__add__, margin, cropped)) if any(halo.values()) else None,
        weights={w.kind: w for w in weights},
        tolerance=_tolerances(
            config,
            _tensor_name(target),
            is_discrete=str(first["type"] if first else target.get("data_type")) in DISCRETE,
        ),
        shrink=shrink,
        margin=margin,
        output_index=index,
        num_outputs=len(outputs),
    )


def _output_index(outputs: Sequence[Mapping[str, Any]], output: int | str | None) -> int:  # Any: JSON
    """Return the place in `outputs` of the output that the recipe names, else of the only one, or the only image."""
    names = list(map(_tensor_name, outputs))
    if output is not None:
        if output in names:
            return names.index(str(output))
        if isinstance(output, int) and 0 <= output < len(names):
            return output
        raise VolpipeError(f"it has no output {output!r}; it has {', '.join(names)}: set net.output to one of them")
    images = [i for i, tensor in enumerate(outputs) if _is_image(tensor)]
    if len(names) > 1 and len(images) != 1:
        raise VolpipeError(
            f"it has {len(names)} outputs ({', '.join(names)}); name the one to take, such as net.output={names[0]}"
        )
    return images[0] if images else 0


def _is_image(tensor: Mapping[str, Any]) -> bool:  # Any: JSON
    axes = tensor["axes"]
    letters = axes if isinstance(axes, str) else "".join(map(_letter, axes))
    return {"y", "x"} <= set(letters)


def _read_input(tensor: Mapping[str, Any], *, is_new: bool) -> tuple[str, list[int], list[int], int]:  # Any: JSON
    """Return axes, least sizes, steps (0 for a fixed size) and channels of an input."""
    if not is_new:
        axes, shape = _check_axes(tensor["axes"]), tensor["shape"]
        least = list(shape["min"] if isinstance(shape, Mapping) else shape)
        step = list(shape["step"]) if isinstance(shape, Mapping) else [0] * len(least)
    else:
        axes = _check_axes("".join(map(_letter, tensor["axes"])))
        by_name = {axis["id"]: axis for axis in tensor["axes"]}
        pairs = [_axis_size(axis, by_name, tensor["id"]) for axis in tensor["axes"]]
        least, step = [n for n, _ in pairs], [k for _, k in pairs]
    channels = least[axes.index("c")] if "c" in axes else 1
    return axes, least, step, channels


def _axis_size(axis: Mapping[str, Any], others: Mapping[str, Any], tensor: str) -> tuple[int, int]:  # Any: JSON
    """Return the least size and the step of an axis of an input, 0 for a fixed size."""
    if axis["type"] == "channel":
        return len(axis["channel_names"]), 0
    size = axis.get("size")
    if axis["type"] == "batch" or size is None:
        return 1, 1
    if isinstance(size, int):
        return size, 0
    if "min" in size:
        return size["min"], size["step"]
    other = others.get(size["axis_id"])
    if other is not None and size["tensor_id"] == tensor and not size["offset"]:
        theirs = other.get("size")
        if isinstance(theirs, int) or (theirs and "min" in theirs):
            return _axis_size(other, others, tensor)
    raise VolpipeError(f"the size of its axis {axis['id']} follows from {size['tensor_id']}.{size['axis_id']}")


Growth = tuple[int, int, int]  # scale, shrink, margin
Outline = tuple[str, dict[str, Growth], dict[str, int], int]  # axes; by axis of space: growth and halo; channels
Sizes = Mapping[str, tuple[int, int]]


def _read_new(tensor: Mapping[str, Any], sizes: Sizes, source: Mapping[str, Any]) -> Outline:  # Any: JSON
    """Return axes, growth, halo and channels of an output of format 0.5."""
    axes = _check_axes("".join(map(_letter, tensor["axes"])))
    scale: dict[str, Growth] = {}
    halo, channels = {}, 1
    source_axes = {axis["id"]: axis for axis in source["axes"]}
    for letter, axis in zip(axes, tensor["axes"], strict=True):
        if letter == "c":
            channels = len(axis["channel_names"])
        if letter not in SPACE:
            continue
        size = axis["size"]
        if isinstance(size, int):
            scale[letter] = _ratio(letter, size, sizes)
        elif size.get("axis_id") == axis["id"] and size["tensor_id"] == source["id"]:
            factor = source_axes[axis["id"]]["scale"] / axis["scale"]
            scale[letter] = _whole_growth(letter, factor, size["offset"])
        else:
            raise VolpipeError(f"the size of its output along {letter} does not follow from its input along {letter}")
        halo[letter] = axis.get("halo") or 0
    return axes, scale, halo, channels


def _read_old(tensor: Mapping[str, Any], sizes: Sizes, source: Mapping[str, Any]) -> Outline:  # Any: JSON
    """Return axes, growth, halo and channels of an output of format 0.4."""
    axes, shape = _check_axes(tensor["axes"]), tensor["shape"]
    scale: dict[str, Growth] = {}
    channels = 1
    for i, letter in enumerate(axes):
        if isinstance(shape, Mapping):
            factor, offset = shape["scale"][i] or 0.0, 2 * shape["offset"][i]
            if letter == "c":
                channels = round(sizes.get("c", (1, 0))[0] * factor + offset)
            elif letter in SPACE:
                scale[letter] = _whole_growth(letter, factor, offset)
        elif letter == "c":
            channels = shape[i]
        elif letter in SPACE:
            scale[letter] = _ratio(letter, shape[i], sizes)
    halo = dict(zip(axes, tensor.get("halo") or [0] * len(axes), strict=True))
    return axes, scale, {letter: halo[letter] for letter in axes if letter in SPACE}, channels


def _ratio(letter: str, size: int, sizes: Sizes) -> Growth:
    """Return the growth of an output of one size: a whole factor, one over it, or the loss on both sides."""
    least, step = sizes.get(letter, (1, 0))
    if step:
        raise VolpipeError(f"its output has {size} voxels along {letter} whatever its input has")
    if size < least and least % size and (least - size) % 2 == 0:
        return 1, 1, (least - size) // 2
    return _whole_growth(letter, size / least, 0)


def _whole_growth(letter: str, factor: float, offset: float) -> Growth:
    """Return the growth of an output of `factor` times the voxels of its input, and `offset` more."""
    scale, shrink = (round(factor), 1) if factor >= 1 else (1, round(1 / max(factor, 1e-9)))
    margin = -offset / 2 / max(factor, 1e-9)
    if not math.isclose(factor, scale / shrink, rel_tol=1e-6) or margin < 0 or margin != round(margin):
        raise VolpipeError(
            f"along {letter}, its output has {factor:g} times the voxels of its input and {offset:+g}; a whole factor "
            "or one over it is run, with as many voxels lost on both sides"
        )
    return scale, shrink, round(margin)


def _letter(axis: Mapping[str, Any]) -> str:  # Any: JSON
    """Return the letter of an axis of format 0.5: b, c, z, y, x, or "?"."""
    known = {"batch": "b", "channel": "c"}.get(axis["type"], "")
    return known or (axis["id"] if axis["type"] == "space" and axis["id"] in SPACE else f"?{axis['id']}")


def _check_axes(axes: str) -> str:
    if not set(axes) <= set("bczyx") or not {"y", "x"} <= set(axes):
        raise VolpipeError(
            f"its axes are {axes.replace('?', ' ')}; b, c, z, y, x are run, of which y and x must be there"
        )
    return axes


def _read_steps(tensor: Mapping[str, Any], key: str) -> tuple[Step, ...]:  # Any: JSON
    return tuple(map(read_step, tensor.get(key) or ()))


def _tensor_name(tensor: Mapping[str, Any]) -> str:  # Any: JSON
    return str(tensor.get("id", tensor.get("name")))


def _test_file(folder: Path, tensor: Mapping[str, Any], old: Sequence[str] | None) -> Path | None:  # Any: JSON
    """Return the file of a test tensor, of format 0.5; or of 0.4, from the list `old`."""
    entry = tensor.get("test_tensor") or ({"source": old[0]} if old else None)
    return None if entry is None else resolve_file(folder, entry)


def resolve_file(folder: Path, entry: Mapping[str, Any]) -> Path:  # Any: JSON
    """Return the file of the package that `entry` names as its source.

    Raises:
        VolpipeError: it is on the web, outside of the package, missing, or of another SHA-256.
    """
    source, expected = str(entry["source"]), entry.get("sha256")
    if "://" in source:
        raise VolpipeError(f"its file {source} is on the web; nothing is fetched, so take the package with its files")
    root = folder.resolve()
    file = (root / source).resolve()
    if root not in file.parents:
        raise VolpipeError(f"its file {source!r} is outside of its folder")
    if not file.is_file():
        raise VolpipeError(f"its file {source} is missing")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest() if expected else None
    if expected != digest:
        raise VolpipeError(
            f"its file {source} has SHA-256 {digest}, the description says {expected}: it is another file"
        )
    return file


def _tolerances(config: Any, name: str, is_discrete: bool) -> Mapping[str, Tolerance]:  # Any: YAML
    """Return the tolerances of a package for its output `name`, by format of weights; "" for all."""
    own = config.get("bioimageio") if isinstance(config, Mapping) else None
    entries = own.get("reproducibility_tolerance") if isinstance(own, Mapping) else None
    kind = "any_discrete_output" if is_discrete else "any_continuous_output"
    tolerances: dict[str, Tolerance] = {}
    for entry in entries or ():
        outputs = entry.get("output_ids") or (name,)
        if name in outputs or outputs == kind:
            tolerance = Tolerance(
                float(entry.get("relative_tolerance", TOLERANCE)),
                float(entry.get("absolute_tolerance", TOLERANCE)),
                float(entry.get("mismatched_elements_per_million", PER_MILLION)),
            )
            tolerances |= dict.fromkeys(entry.get("weights_formats") or ("",), tolerance)
    return tolerances
