"""MONAI bundles as nets: what their inference configuration says of net, windows and grey levels.

Not here: anything of a bundle's Python. A configuration is data: its references are followed, and of its expressions
those of numbers and lists are calculated. What it names that is not done here is refused by name
(https://docs.monai.io/en/stable/mb_specification.html, MONAI 1.6).
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import triple
from volpipe.nets.declared import Declaration
from volpipe.nets.makers import Grey, MadeNet, TurnedNet, library_class, read_json
from volpipe.nets.state_dicts import load_weights
from volpipe.recipes.inference import Normalise, Output, Windows
from volpipe.resolve import describe_error
from volpipe.syntax import parse
from volpipe.text import read_text
from volpipe.volumes.dialects.affine import OPPOSITES

CONFIGURATIONS = ("inference.json", "inference.yaml", "inference.yml")
NETS = "monai.networks.nets"
DEEPEST = 16  # references that lead to references
WEIGHTS = ("model.pt", "model.safetensors")
PROGRAMS = ("model.ts",)
OPTIONS = ("file", "axes")
ORDERS = ("xyz", "zyx")  # in which a net may count axes
REFERENCE = re.compile(r"@\w+(?:(?:::|#)\w+)*")
ROUNDED = re.compile("int|float16|half|bool")  # in the name of a type
MOST_REPEATS = 16  # of a list, in an expression
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {  # Any: numbers
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
# Transforms that read and write files, move tensors, or change axes as volumes have them already.
PLAIN = {
    "LoadImage", "EnsureChannelFirst", "EnsureType", "CastToType", "ToTensor", "ToDevice", "SelectItems", "DeleteItems",
    "Invert", "SaveImage", "Identity", "AddChannel", "AsChannelFirst", "CopyItems",
}  # fmt: skip
OTHERS = ("Activations", "AsDiscrete", "Spacing")
TAKE_OUT = "take it out where it changes nothing"
# What to do about transforms that bundles name often.
REMEDIES = {
    "Orientation": "set net.options.axes=xyz where the axes of a volume run as it says, or take it out if z, y, x are "
    "those of the training",
    "CropForeground": "take it out, and give the box with input.roi",
    "DivisiblePad": "windows at the edge are padded by themselves; take it out",
    "SpatialPad": "windows at the edge are padded by themselves; take it out",
    "Resize": "write the volume in the size that it makes, and take it out",
    "Spacing": "write three lengths of a voxel as its pixdim",
    "KeepLargestConnectedComponent": "take it out, and do that to the output",
    "FillHoles": "take it out, and do that to the output",
    "RemoveSmallObjects": "take it out, and do that to the output",
}
INFERER = "give an inferer SlidingWindowInferer with a roi_size"


@dataclass(frozen=True)
class Bundle:
    """A bundle in `folder`, whose configuration is `tree`; its net counts `axes` "xyz" or "zyx", "" if nobody says."""

    folder: Path
    tree: Mapping[str, Any]  # Any: JSON
    axes: str = ""

    @classmethod
    def read(cls, folder: Path, axes: str = "") -> Bundle:
        """Return the bundle in `folder`.

        Raises:
            VolpipeError: it has no configuration of an inference, or one that cannot be read.
        """
        files = [folder / "configs" / name for name in CONFIGURATIONS]
        there = next((file for file in files if file.is_file()), None)
        if there is None:
            raise VolpipeError(
                f"no configs/{CONFIGURATIONS[0]}; give the folder of a bundle, which has configs and models"
            )
        if there.suffix == ".json":
            return cls(folder, read_json(there), axes)
        import yaml

        try:
            tree = yaml.safe_load(read_text(there))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise VolpipeError(f"{there} cannot be read: {error}") from error
        if not isinstance(tree, dict):
            raise VolpipeError(f"{there} holds {type(tree).__name__}, not an object")
        return cls(folder, tree, axes)

    def in_volume(self, numbers: list[Any]) -> list[Any]:  # Any: numbers
        """Return `numbers`, one for each axis of the net, in the order z, y, x."""
        return numbers[::-1] if self.axes == "xyz" else numbers

    def value(self, value: Any, place: str, depth: int = 0) -> Any:  # Any: JSON
        """Return `value`, which the configuration has at `place`, with its references followed.

        Raises:
            VolpipeError: an expression, which would be run, or a reference to nothing.
        """
        if isinstance(value, Mapping):
            return {key: self.value(entry, f"{place}.{key}", depth) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.value(entry, f"{place}.{i}", depth) for i, entry in enumerate(value)]
        if not isinstance(value, str) or value[:1] not in ("@", "%", "$"):
            return value
        if depth > DEEPEST:
            raise VolpipeError(f"{place} refers to {value}, which leads to itself; write its value")
        if value[0] == "$":
            return self._calculated(value, place, depth)
        return self.value(self._found(value, place), place, depth + 1)

    def _found(self, value: str, place: str) -> Any:  # Any: JSON
        """Return the entry of the configuration to which the reference `value` leads, as it is written there."""
        found: Any = self.tree  # Any: JSON
        for part in value[1:].replace("#", "::").split("::"):
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise VolpipeError(f"{place} refers to {value}, which is not there") from error
        return found

    def _calculated(self, value: str, place: str, depth: int) -> Any:  # Any: JSON
        """Return the value of an expression of numbers, lists and references; no name or call in it is run."""
        try:
            text = REFERENCE.sub(lambda found: repr(self.value(found[0], place, depth + 1)), value[1:].strip())
            (statement,) = parse(text).body
            if not isinstance(statement, ast.Expr):
                raise ValueError(text)
            return _calculate(statement.value)
        except (ValueError, SyntaxError, TypeError, ArithmeticError, RecursionError) as error:
            raise VolpipeError(f"{place} is the expression {value!r}, which would be run; write its value") from error

    def section(self, *names: str) -> tuple[str, dict[str, Any]] | None:
        """Return name and entry of the first of `names` that describes a part of the bundle; None without one."""
        for name in names:
            entry = self.tree.get(name)
            if isinstance(entry, str) and entry.startswith("@"):
                entry = self.value(entry, name)
            if isinstance(entry, dict) and "_target_" in entry:
                return name, entry
        return None

    @cached_property
    def transforms(self) -> list[tuple[str, dict[str, Any]]]:
        """The transforms before the net and after it, by their short names."""
        dataset = self.tree.get("dataset")
        has_own = isinstance(dataset, dict) and "transform" in dataset
        before = "preprocessing" if "preprocessing" in self.tree or not has_own else "dataset::transform"
        steps: list[tuple[str, dict[str, Any]]] = []
        for name in (before, "postprocessing"):
            if name in self.tree or name == "dataset::transform":
                steps += self._transforms_in(f"@{name}", name)
        return steps

    def _transforms_in(self, entry: Any, place: str) -> list[tuple[str, dict[str, Any]]]:  # Any: JSON
        """Return the transforms that `entry` describes: one, a list, or Compose of them."""
        while isinstance(entry, str):
            entry = self._found(entry, place) if entry.startswith("@") else self.value(entry, place)
        if isinstance(entry, list):
            return [step for i, part in enumerate(entry) for step in self._transforms_in(part, f"{place}.{i}")]
        if entry is None or (isinstance(entry, dict) and entry.get("_disabled_") is True):
            return []
        if not isinstance(entry, dict) or "_target_" not in entry:
            raise VolpipeError(f"{place} is {entry!r}, which is no transform; write the transform with its _target_")
        if _transform_name(entry) == "Compose":
            return self._transforms_in(entry.get("transforms"), place)
        steps = [(_transform_name(entry), self._arguments_of(entry, place))]
        reader = entry.get("reader")
        given = {**entry, **reader} if isinstance(reader, dict) else entry
        if steps[0][0] == "LoadImage" and self.value(given.get("as_closest_canonical"), place):
            steps.append(("Orientation", {"axcodes": "RAS"}))
        return steps

    def _arguments_of(self, part: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return the arguments of a transform; those that read and write files are not looked at."""
        if _transform_name(part) in PLAIN:
            dtype = part.get("dtype")
            dtype = str(dtype[0] if isinstance(dtype, list) and dtype else dtype)
            if ROUNDED.search(dtype) and not place.startswith("postprocessing"):
                raise VolpipeError(
                    f"{_transform_name(part)} rounds grey levels to {dtype}, which is not done here; {TAKE_OUT}"
                )
            return {}
        skipped = ("keys", "allow_missing_keys", "meta_keys", "meta_key_postfix")
        return {key: self.value(value, f"{place}.{key}") for key, value in _own(part).items() if key not in skipped}

    @cached_property
    def inferer(self) -> dict[str, Any]:
        """The arguments of the sliding window."""
        described = self.section("inferer")
        if described is None or _transform_name(described[1]) not in (
            "SlidingWindowInferer",
            "SlidingWindowInfererAdapt",
        ):
            named = "no inferer" if described is None else f"the inferer {_transform_name(described[1])}"
            raise VolpipeError(f"it has {named}; {INFERER}")
        # Where it computes is the recipe's to say.
        return {
            key: self.value(value, f"inferer.{key}")
            for key, value in _own(described[1]).items()
            if key not in ("device", "sw_device", "progress", "cpu_thresh", "buffer_steps", "buffer_dim")
        }


def load_bundle(folder: Path, options: Mapping[str, Any], *, trust: bool) -> nn.Module:
    """Return the net of the bundle at `folder`, with its weights, and with the windows and grey levels it needs.

    Raises:
        VolpipeError: it is none, or asks for what is not done here, by name.
    """
    try:
        axes = options.get("axes", "")
        if set(options) - set(OPTIONS) or axes not in ("", *ORDERS):
            raise VolpipeError(
                "the options of a bundle are file, in its folder models, and axes, xyz or zyx, in which its net counts "
                f"them; correct {dict(options)}"
            )
        bundle = Bundle.read(folder, axes)
        normalise, grey = _map_of_grey_levels(bundle)
        own = _load_net(bundle, options, trust=trust)
        net = MadeNet([TurnedNet(own, (2, 1, 0)) if axes == "xyz" else own], [grey])
        windows = _sliding_windows(bundle)
        facts: dict[str, object] = {
            "normalise": normalise, "padding": net.padding, "windows": windows, "window": windows.shape,
            "output": _output(bundle), "intensity": "raw", "axcodes": _axcodes(bundle),
            "has_open_axes": not axes,
        }  # fmt: skip
        spacing = next((given for name, given in bundle.transforms if name == "Spacing"), None)
        if spacing is not None:
            facts["spacing"] = bundle.in_volume(_lengths(spacing.get("pixdim")))
        described = bundle.section("network_def", "net", "network")
        count = bundle.value((described[1] if described else {}).get("in_channels"), "network_def.in_channels")
        facts |= {"in_channels": count} if isinstance(count, int) else {}
        net.declaration = Declaration.model_validate(facts)
    except VolpipeError as error:
        raise VolpipeError(f"MONAI bundle {folder}: {error}") from error
    return net


def _load_net(bundle: Bundle, options: Mapping[str, Any], *, trust: bool) -> nn.Module:
    models = bundle.folder / "models"
    names = (str(options["file"]),) if "file" in options else (*WEIGHTS, *PROGRAMS)
    file = next((models / name for name in names if (models / name).is_file()), None)
    if file is None:
        raise VolpipeError(f"no {' or '.join(names)} in {models}")
    if file.suffix == ".ts":
        if not trust:
            raise VolpipeError(
                f"{file.name} is TorchScript, which is code and runs with your rights; add --trust-model "
                "(net.trust_model = true) if you trust its maker"
            )
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # to whoever makes such files
            program: nn.Module = torch.jit.load(str(file), map_location="cpu")  # type: ignore[no-untyped-call]
        return program
    described = bundle.section("network_def", "net", "network")
    if described is None:
        raise VolpipeError("its configuration has no network_def that names a net; give one, or models/model.ts")
    place, entry = described
    target = str(entry["_target_"])
    build = library_class(target if "." in target else f"{NETS}.{target}", ("monai.networks",), "monai")
    arguments = {key: bundle.value(value, f"{place}.{key}") for key, value in _own(entry).items()}
    try:
        net: nn.Module = build(**arguments)
    except Exception as error:  # whatever MONAI raises for arguments that it does not take, or without a library
        raise VolpipeError(f"{place} cannot be built: {describe_error(error)}") from error
    load_weights(net, file)
    return net


def _sliding_windows(bundle: Bundle) -> Windows:
    """Return windows as the bundle's sliding window has them."""
    given = bundle.inferer
    roi = given.get("roi_size")
    shape = [roi] * 3 if isinstance(roi, int) else roi
    if not isinstance(shape, list) or len(shape) not in (2, 3) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise VolpipeError(f"inferer.roi_size is {roi!r}, not lengths above 0; {INFERER}")
    if given.get("padding_mode", "constant") != "constant" or given.get("cval", 0) != 0:
        raise VolpipeError("inferer pads small volumes otherwise than with zeros, which is not done here")
    if given.get("sigma_scale", 0.125) != 0.125 or given.get("roi_weight_map") is not None:
        raise VolpipeError("inferer weighs windows by another sigma_scale than 0.125, which is not done here")
    shape, shares = bundle.in_volume(shape), given.get("overlap", 0.25)
    window = triple([1, *shape] if len(shape) == 2 else shape)
    along = [shares] * 3 if isinstance(shares, int | float) else bundle.in_volume(shares)
    along = [0, *along] if len(along) == 2 else along
    steps = [max(1, int(w * (1 - share))) for w, share in zip(window, along, strict=True)]
    mode = str(given.get("mode", "constant")).lower()
    if mode not in ("constant", "gaussian"):
        raise VolpipeError(f"inferer.mode is {mode!r}, not constant or gaussian; write its value")
    overlap = triple(w - s for w, s in zip(window, steps, strict=True))
    return Windows(shape=window, overlap=overlap, blend=mode, placement="edge")


def _output(bundle: Bundle) -> Output:
    """Return the section `output` of a recipe for the bundle's activation and argmax."""
    activation, kind = "none", "image"
    for name, given in bundle.transforms:
        if name == "Activations" and given.get("other") is not None:
            raise VolpipeError("Activations by a function of its own is not done here; take it out")
        if name == "Activations":
            activation = "softmax" if given.get("softmax") else "sigmoid" if given.get("sigmoid") else "none"
        if name == "AsDiscrete" and given.get("argmax") and given.get("to_onehot") is None:
            kind = "classes"
        elif name == "AsDiscrete":
            what = "with to_onehot" if given.get("argmax") else "without argmax"
            raise VolpipeError(f"AsDiscrete {what} is not done here; take it out, and do that to the output")
    return Output(kind=kind, activation="none" if kind == "classes" else activation)


def _map_of_grey_levels(bundle: Bundle) -> tuple[Normalise, Grey]:
    """Return the normalisation of the whole volume, and the map of grey levels after it.

    Raises:
        VolpipeError: with the name of a transform that is not done here.
    """
    chosen: tuple[Normalise, Grey] | None = None
    for name, given in bundle.transforms:
        if name in PLAIN or name in OTHERS or (name == "Orientation" and bundle.axes == "xyz"):
            continue
        if name not in _GREYS:
            raise VolpipeError(f"it names the transform {name}, which is not done here; {REMEDIES.get(name, TAKE_OUT)}")
        if chosen is not None:
            raise VolpipeError(f"it maps grey levels twice, by {name} last, which is not done here")
        try:
            chosen = _GREYS[name](given)
        except (TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise VolpipeError(f"{name} with {dict(given)} maps no grey levels: {describe_error(error)}") from error
    return chosen or (Normalise(method="none"), Grey())


def _axcodes(bundle: Bundle) -> str:
    """Return to where x, y and z run in volumes after Orientation, such as "RAS"; "" without it."""
    codes = set[str]()
    for name, given in bundle.transforms:
        if name != "Orientation":
            continue
        asked = given.get("axcodes")
        code = "".join(map(str, asked)) if isinstance(asked, list) else str(asked)
        is_whole = sorted(min(letter, OPPOSITES.get(letter, "")) for letter in code) == ["A", "I", "L"]
        if not is_whole or given.get("labels") is not None or given.get("as_closest_canonical"):
            raise VolpipeError(f"Orientation with {dict(given)} is not done here; write its axcodes alone, such as RAS")
        codes.add(code)
    if len(codes) > 1:
        raise VolpipeError(f"Orientation to {' and '.join(sorted(codes))} is not done here; {TAKE_OUT}")
    return "".join(codes)


def _scaled(given: Mapping[str, Any]) -> tuple[Normalise, Grey]:
    if given.get("factor") is not None:
        raise VolpipeError("ScaleIntensity by a factor is not done here")
    return Normalise(method="percentile", percentiles=(0, 100), per_channel=_is_apart(given)), _mapped(
        -1, 1, given.get("minv", 0), given.get("maxv", 1)
    )


def _ranged(given: Mapping[str, Any]) -> tuple[Normalise, Grey]:
    low, high = float(given["a_min"]), float(given["a_max"])
    return Normalise(method="none"), _mapped(low, high, *_range_to_map_to(given))


def _percentiles(given: Mapping[str, Any]) -> tuple[Normalise, Grey]:
    if given.get("relative"):
        raise VolpipeError("ScaleIntensityRangePercentiles relative to a range is not done here")
    ends = float(given["lower"]), float(given["upper"])
    mapped = _mapped(-1, 1, *_range_to_map_to(given))
    return Normalise(method="percentile", percentiles=ends, per_channel=_is_apart(given)), mapped


def _normalised(given: Mapping[str, Any]) -> tuple[Normalise, Grey]:
    if given.get("nonzero"):
        raise VolpipeError(
            "NormalizeIntensity over the voxels that are not zero is not done here; set nonzero to false if the volume "
            "has no zeros outside of what was imaged"
        )
    mean, std = given.get("subtrahend"), given.get("divisor")
    if mean is None and std is None:
        return Normalise(method="zscore", per_channel=_is_apart(given)), Grey()
    if isinstance(mean, list) or isinstance(std, list):
        raise VolpipeError("NormalizeIntensity by numbers of each channel is not done here")
    return Normalise(method="none"), Grey(float(mean or 0), float(1 if std is None else std))


def _range_to_map_to(given: Mapping[str, Any]) -> tuple[float, float, bool]:
    """Return the ends that grey levels are mapped to, 0 and 1 by default, and whether values are clipped to them."""
    first, last = given.get("b_min"), given.get("b_max")
    if first is None or last is None:
        if given.get("clip"):
            raise VolpipeError("clip without b_min and b_max is not done here; write both")
        return 0, 1, False
    return float(first), float(last), bool(given.get("clip"))


def _lengths(pixdim: Any) -> list[float]:  # Any: JSON
    """Return the lengths of a voxel along the net's axes; 0 along one whose voxels Spacing leaves as they are."""
    given = pixdim if isinstance(pixdim, list | tuple) else [pixdim]
    if not 0 < len(given) <= 3 or not all(isinstance(n, int | float) for n in given):
        raise VolpipeError(f"Spacing has the pixdim {pixdim!r}; {REMEDIES['Spacing']}")
    given = [*given] * 3 if len(given) == 1 else [*given, 0]
    return [max(0.0, float(n)) for n in given[:3]]


def _is_apart(given: Mapping[str, Any]) -> bool:
    return bool(given.get("channel_wise"))


def _mapped(low: float, high: float, first: float, last: float, clip: object = False) -> Grey:
    """Return what maps `low` and `high` to `first` and `last`."""
    std = (high - low) / (last - first)
    ends = (low, high) if clip else (None, None)
    return Grey(low - first * std, std, *ends)


_GREYS = {
    "ScaleIntensity": _scaled,
    "ScaleIntensityRange": _ranged,
    "ScaleIntensityRangePercentiles": _percentiles,
    "NormalizeIntensity": _normalised,
}


def _transform_name(part: Mapping[str, Any]) -> str:
    """Return the name of a transform, which may be one of dictionaries."""
    name = str(part.get("_target_", "")).rpartition(".")[2]
    for suffix in ("Dict", "D", "d"):
        short = name.removesuffix(suffix)
        if short != name and (short in PLAIN or short in _GREYS or short in OTHERS or short in REMEDIES):
            return short
    return name


def _own(part: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    """Return the arguments of a part, without the keys of the configuration, which begin and end with an underscore."""
    return {key: value for key, value in part.items() if not (key.startswith("_") and key.endswith("_"))}


def _calculate(node: ast.expr) -> Any:  # Any: numbers, texts and lists of them
    """Return the value of an expression of numbers and lists.

    Raises:
        ValueError: it has a name, a call, or something else.
    """
    if isinstance(node, ast.List | ast.Tuple):
        return [_calculate(entry) for entry in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        values = _calculate(node.left), _calculate(node.right)
        is_repeated = isinstance(node.op, ast.Mult) and isinstance(values[0], list) and values[1] in range(MOST_REPEATS)
        if is_repeated or all(isinstance(value, int | float) for value in values):
            return OPERATORS[type(node.op)](*values)
        raise ValueError(values)
    return ast.literal_eval(node)
