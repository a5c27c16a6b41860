"""MONAI bundles as nets: what their inference configuration says of net, windows and grey levels.

Not here: anything of a bundle's Python. A configuration is data: its references are followed, its expressions are not
evaluated, and what it names that is not done here is refused by name
(https://docs.monai.io/en/stable/mb_specification.html, MONAI 1.6).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import triple
from volpipe.nets.makers import Grey, MadeNet, library_class, read_json
from volpipe.nets.state_dicts import load_state
from volpipe.recipes.inference import Normalise, Output, Windows

CONFIGURATIONS = ("inference.json", "inference.yaml", "inference.yml")
NETS = "monai.networks.nets"
DEEPEST = 16  # references that lead to references
WEIGHTS = ("model.pt", "model.safetensors")
PROGRAMS = ("model.ts",)
OPTIONS = ("file",)
# Transforms that read and write files, move tensors, or change axes as volumes have them already.
PLAIN = {
    "LoadImage", "EnsureChannelFirst", "EnsureType", "CastToType", "ToTensor", "ToDevice", "EnsureTyped", "SelectItems",
    "DeleteItems", "Invert", "SaveImage", "Identity", "AddChannel", "AsChannelFirst",
}  # fmt: skip
INFERER = "give an inferer SlidingWindowInferer with a roi_size"


@dataclass(frozen=True)
class Bundle:
    """A bundle in `folder`, whose configuration is `tree`."""

    folder: Path
    tree: Mapping[str, Any]  # Any: JSON

    @classmethod
    def read(cls, folder: Path) -> Bundle:
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
            return cls(folder, read_json(there))
        import yaml

        try:
            tree = yaml.safe_load(there.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise VolpipeError(f"{there} cannot be read: {error}") from error
        if not isinstance(tree, dict):
            raise VolpipeError(f"{there} holds {type(tree).__name__}, not an object")
        return cls(folder, tree)

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
        if value[0] == "$" or depth > DEEPEST:
            raise VolpipeError(f"{place} is the expression {value!r}, which would be run; write its value")
        found: Any = self.tree  # Any: JSON
        for part in value[1:].replace("#", "::").split("::"):
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise VolpipeError(f"{place} refers to {value}, which is not there") from error
        return self.value(found, place, depth + 1)

    def section(self, *names: str) -> tuple[str, dict[str, Any]] | None:
        """Return the first of `names` that is there and describes a part, with its name; None without one."""
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
        steps = []
        for name in ("preprocessing", "postprocessing"):
            described = self.section(name)
            if described is None:
                continue
            place, entry = described
            parts = entry.get("transforms", []) if _short(entry) == "Compose" else [entry]
            for i, part in enumerate(self._listed(parts, place)):
                if isinstance(part, dict) and not _is_off(part):
                    steps.append((_short(part), self._given(part, f"{place}.{i}")))
        return steps

    def _listed(self, parts: Any, place: str) -> list[Any]:  # Any: JSON
        listed = self.value(parts, place) if isinstance(parts, str) else parts
        return listed if isinstance(listed, list) else [listed]

    def _given(self, part: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return the arguments of a transform; those that read and write files are not looked at."""
        if _short(part) in PLAIN:
            return {}
        skipped = ("_target_", "keys", "allow_missing_keys", "_disabled_")
        return {key: self.value(value, f"{place}.{key}") for key, value in part.items() if key not in skipped}

    @cached_property
    def inferer(self) -> dict[str, Any]:
        """The arguments of the sliding window."""
        described = self.section("inferer")
        if described is None or _short(described[1]) != "SlidingWindowInferer":
            named = "no inferer" if described is None else f"the inferer {_short(described[1])}"
            raise VolpipeError(f"it has {named}; {INFERER}")
        # Where it computes is the recipe's to say.
        return {
            key: self.value(value, f"inferer.{key}")
            for key, value in described[1].items()
            if key not in ("_target_", "device", "sw_device", "progress", "cpu_thresh", "buffer_steps", "buffer_dim")
        }


def load_bundle(folder: Path, options: Mapping[str, Any], *, trust: bool) -> nn.Module:
    """Return the net of the bundle at `folder`, with its weights, and with the windows and grey levels it needs.

    Raises:
        VolpipeError: it is none, or asks for what is not done here, by name.
    """
    try:
        if set(options) - set(OPTIONS):
            raise VolpipeError(f"the one option of a bundle is file, in its folder models; leave out {dict(options)}")
        bundle = Bundle.read(folder)
        normalise, grey = _grey(bundle)
        net = MadeNet([_net(bundle, options, trust=trust)], [grey])
        windows = _windows(bundle)
        facts: dict[str, object] = {
            "normalise": normalise, "padding": net.padding, "windows": windows, "window": windows.shape,
            "output": _output(bundle),
        }  # fmt: skip
        spacing = next((given for name, given in bundle.transforms if name == "Spacing"), None)
        if spacing is not None:
            facts["spacing"] = tuple(float(n) for n in spacing["pixdim"])
        described = bundle.section("network_def", "net", "network")
        count = (described[1] if described else {}).get("in_channels")
        facts |= {"in_channels": count} if isinstance(count, int) else {}
        net.of_maker = facts
    except VolpipeError as error:
        raise VolpipeError(f"MONAI bundle {folder}: {error}") from error
    return net


def _net(bundle: Bundle, options: Mapping[str, Any], *, trust: bool) -> nn.Module:
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
    arguments = {key: bundle.value(value, f"{place}.{key}") for key, value in entry.items() if key != "_target_"}
    try:
        net: nn.Module = build(**arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise VolpipeError(f"{place} cannot be built: {error}") from error
    net.load_state_dict(load_state(net.state_dict(), file))
    return net


def _windows(bundle: Bundle) -> Windows:
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
    window = triple([1, *shape] if len(shape) == 2 else shape)
    shares = given.get("overlap", 0.25)
    along = [shares] * 3 if isinstance(shares, int | float) else [0, *shares] if len(shares) == 2 else shares
    steps = [max(1, int(w * (1 - share))) for w, share in zip(window, along, strict=True)]
    mode = str(given.get("mode", "constant")).lower()
    if mode not in ("constant", "gaussian"):
        raise VolpipeError(f"inferer.mode is {mode!r}, not constant or gaussian; write its value")
    overlap = triple(w - s for w, s in zip(window, steps, strict=True))
    return Windows(shape=window, overlap=overlap, blend=mode, placement="edge")


def _output(bundle: Bundle) -> Output:
    """Return what is done to the net's numbers after it."""
    activation, kind = "none", "image"
    for name, given in bundle.transforms:
        if name == "Activations":
            activation = "softmax" if given.get("softmax") else "sigmoid" if given.get("sigmoid") else "none"
        if name == "AsDiscrete" and given.get("argmax"):
            kind = "classes"
        elif name == "AsDiscrete":
            raise VolpipeError("AsDiscrete without argmax is not done here; take it out, and threshold the output")
    return Output(kind=kind, activation="none" if kind == "classes" else activation)


def _grey(bundle: Bundle) -> tuple[Normalise, Grey]:
    """Return the normalisation of the whole volume, and what is done to it after that.

    Raises:
        VolpipeError: with the name of a transform that is not done here.
    """
    chosen: tuple[Normalise, Grey] | None = None
    for name, given in bundle.transforms:
        if name in PLAIN or name in ("Activations", "AsDiscrete", "Spacing"):
            continue
        if name not in _GREYS:
            raise VolpipeError(
                f"it names the transform {name}d, which is not done here; take it out where it changes nothing"
            )
        if chosen is not None:
            raise VolpipeError(f"it maps grey levels twice, by {name} last, which is not done here")
        chosen = _GREYS[name](given)
    return chosen or (Normalise(method="none"), Grey())


def _scaled(given: Mapping[str, Any]) -> tuple[Normalise, Grey]:
    if given.get("factor") is not None:
        raise VolpipeError("ScaleIntensity by a factor is not done here")
    return Normalise(method="percentile", percentiles=(0, 100), per_channel=_is_apart(given)), _mapped(
        -1, 1, given.get("minv", 0), given.get("maxv", 1)
    )


def _ranged(given: Mapping[str, Any]) -> tuple[Normalise, Grey]:
    low, high = float(given["a_min"]), float(given["a_max"])
    return Normalise(method="none"), _mapped(
        low, high, given.get("b_min", low), given.get("b_max", high), given.get("clip")
    )


def _percentiles(given: Mapping[str, Any]) -> tuple[Normalise, Grey]:
    if given.get("relative"):
        raise VolpipeError("ScaleIntensityRangePercentiles relative to a range is not done here")
    ends = float(given["lower"]), float(given["upper"])
    mapped = _mapped(-1, 1, given["b_min"], given["b_max"], given.get("clip"))
    return Normalise(method="percentile", percentiles=ends, per_channel=_is_apart(given)), mapped


def _normalised(given: Mapping[str, Any]) -> tuple[Normalise, Grey]:
    if given.get("nonzero"):
        raise VolpipeError("NormalizeIntensity over the voxels that are not zero is not done here")
    mean, std = given.get("subtrahend"), given.get("divisor")
    if mean is None and std is None:
        return Normalise(method="zscore", per_channel=_is_apart(given)), Grey()
    if isinstance(mean, list) or isinstance(std, list):
        raise VolpipeError("NormalizeIntensity by numbers of each channel is not done here")
    return Normalise(method="none"), Grey(float(mean or 0), float(1 if std is None else std))


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


def _short(part: Mapping[str, Any]) -> str:
    """Return the name of a transform, which may be one of dictionaries."""
    name = str(part.get("_target_", "")).rpartition(".")[2]
    for suffix in ("Dict", "D", "d"):
        short = name.removesuffix(suffix)
        if short != name and (short in PLAIN or short in _GREYS or short in ("Activations", "AsDiscrete", "Spacing")):
            return short
    return name


def _is_off(part: Mapping[str, Any]) -> bool:
    return bool(part.get("_disabled_")) and part["_disabled_"] is True
