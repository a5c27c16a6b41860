"""Results folders of nnU-Net v2 as nets: plans.json, dataset.json and fold_*/checkpoint_final.pth.

Not here: training one, or the cascade, whose second net needs the labels of the first. The net is built from the plans
by dynamic-network-architectures, as nnU-Net does it; its mean over folds and mirrored forms, its tiles and its grey
levels are nnU-Net's too (Isensee et al. 2021, Nature Methods 18:203; nnunetv2 2.8).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple, triple
from volpipe.nets.declared import Declaration, ServedNet
from volpipe.nets.makers import Grey, MadeNet, TurnedNet, library_class, read_json
from volpipe.nets.state_dicts import load_weights, read_file
from volpipe.recipes.inference import Normalise, Output, Windows
from volpipe.resolve import nearest

ALLOWED = ("dynamic_network_architectures", "torch.nn")
CHECKPOINTS = ("checkpoint_final.pth", "checkpoint_best.pth")
RESAMPLED_BY = "resample_data_or_seg_to_shape"
OPTIONS = ("folds", "checkpoint", "configuration", "mirror")
NOT_THERE = (
    "give the folder that holds plans.json, dataset.json and fold_0, such as nnUNetTrainer__nnUNetPlans__3d_fullres"
)


@dataclass(frozen=True)
class Results:
    """A results folder, of which some folds are taken.

    Attributes:
        folder: with plans.json and dataset.json.
        options: of the recipe's net: folds, checkpoint, configuration, mirror.
    """

    folder: Path
    options: Mapping[str, Any]  # Any: TOML values

    def __post_init__(self) -> None:
        for option in self.options:
            if option not in OPTIONS:
                raise VolpipeError(
                    f"a net of nnU-Net has no option {option}{nearest(option, OPTIONS)}; it takes {', '.join(OPTIONS)}"
                )
        if not (self.folder / "plans.json").is_file():
            inner = sorted(path.parent.name for path in self.folder.glob("*/plans.json"))
            raise VolpipeError(
                f"no plans.json in {self.folder}; " + (f"name one of {', '.join(inner)} in it" if inner else NOT_THERE)
            )

    @cached_property
    def plans(self) -> dict[str, Any]:
        return read_json(self.folder / "plans.json")

    @cached_property
    def dataset(self) -> dict[str, Any]:
        return read_json(self.folder / "dataset.json")

    @cached_property
    def checkpoints(self) -> list[Path]:
        """The checkpoint of each fold, the final one where it is there."""
        named = self.options.get("checkpoint")
        names = CHECKPOINTS if named is None else (str(named),)
        found = {path.name.removeprefix("fold_"): path for path in sorted(self.folder.glob("fold_*"))}
        chosen = [str(fold) for fold in self.options.get("folds", [f for f in found if f != "all"] or list(found))]
        if not chosen or set(chosen) - set(found):
            missing = ", ".join(f"fold_{fold}" for fold in chosen if fold not in found) or "fold_0"
            raise VolpipeError(
                f"no {missing} in {self.folder}, which has {', '.join(map('fold_{}'.format, found)) or 'none'}"
            )
        files = []
        for fold in chosen:
            there = [found[fold] / name for name in names if (found[fold] / name).is_file()]
            if not there:
                raise VolpipeError(
                    f"no {' or '.join(names)} in {found[fold]}; set net.options.checkpoint or net.options.folds"
                )
            files.append(there[0])
        return files

    @cached_property
    def checkpoint(self) -> dict[str, Any]:
        """The contents of the first fold's checkpoint."""
        content = read_file(self.checkpoints[0])
        if not isinstance(content, dict) or "network_weights" not in content:
            raise VolpipeError(f"{self.checkpoints[0]} is no checkpoint of nnU-Net: it has no network_weights")
        return content

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """The configuration that was trained, with what it inherits."""
        known = self.plans.get("configurations", {})
        asked = self.options.get("configuration")
        parts = self.folder.resolve().name.split("__")
        name = str(
            asked or (parts[2] if len(parts) == 3 else self.checkpoint.get("init_args", {}).get("configuration"))
        )
        return self._inherited(name, known)

    def _inherited(self, name: str, known: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
        if name not in known or depth > len(known):
            raise VolpipeError(
                f"plans.json in {self.folder} has no configuration {name!r}; it has {', '.join(known)}; set "
                "net.options.configuration"
            )
        own = dict(known[name])
        parent = own.get("inherits_from")
        whole = (self._inherited(parent, known, depth + 1) if parent else {}) | own
        if whole.get("previous_stage"):
            raise VolpipeError(
                f"configuration {name} is the second stage of nnU-Net's cascade, which needs the labels of the first; "
                "take the folder of 3d_fullres or 3d_lowres"
            )
        return whole

    @cached_property
    def order(self) -> Triple:
        """The axis z, y, x of a volume that is each axis of the net."""
        return triple(self.plans.get("transpose_forward", (0, 1, 2)))

    @cached_property
    def patch(self) -> tuple[int, ...]:
        return tuple(map(int, self.configuration["patch_size"]))

    @property
    def is_flat(self) -> bool:
        return len(self.patch) == 2

    def in_volume(self, sizes: Sequence[float], across: float = 1) -> tuple[float, float, float]:
        """Return sizes along the net's axes as z, y, x."""
        own = (across, *sizes) if len(sizes) == 2 else tuple(sizes)
        result = [0.0, 0.0, 0.0]
        for axis, size in zip(self.order, own, strict=True):
            result[axis] = size
        return triple(result)

    @cached_property
    def num_classes(self) -> int:
        """Channels of the output: one for each label, or for each region of labels."""
        labels = self.dataset.get("labels", {})
        return len(self.regions) if self.has_regions else len([name for name in labels if name != "ignore"])

    @cached_property
    def regions(self) -> list[dict[str, object]]:
        """The name and the label of each region (`net_geometry.LabelRegion`), in the order of nnU-Net.

        As in its LabelManager (nnunetv2 2.8), regions of the background alone have no channel.

        Raises:
            VolpipeError: the data set has another number of labels.
        """
        labels, order = self.dataset.get("labels", {}), self.dataset.get("regions_class_order") or []
        parts = {name: set(part if isinstance(part, list) else [part]) for name, part in labels.items()}
        names = [name for name, part in parts.items() if name != "ignore" and part != {0}]
        if order and (len(order) != len(names) or not all(isinstance(n, int) and n >= 0 for n in order)):
            raise VolpipeError(
                f"dataset.json has {len(names)} regions ({', '.join(names)}) and the regions_class_order {order}; give "
                "one label for each"
            )
        return [{"name": name, "label": label} for name, label in zip(names, order or [0] * len(names), strict=True)]

    @property
    def has_regions(self) -> bool:
        """Whether the net was trained on regions, unions of labels, each with a channel of its own."""
        return any(isinstance(value, list) and len(value) > 1 for value in self.dataset.get("labels", {}).values())

    @cached_property
    def num_channels(self) -> int:
        return len(self.dataset.get("channel_names") or self.dataset.get("modality") or {"0": ""})


def load_results(folder: Path, options: Mapping[str, Any]) -> nn.Module:
    """Return the net of the results folder at `folder`, with its weights, and with the tiles and grey levels it needs.

    Raises:
        VolpipeError: it is none, a part of it is missing, or it asks for what is not done here, by name.
    """
    results = Results(folder, options)
    try:
        return _built(results)
    except VolpipeError as error:
        raise VolpipeError(f"nnU-Net's folder {folder}: {error}") from error


def _built(results: Results) -> nn.Module:
    normalise, greys = _normalisation(results)
    flips = results.checkpoint.get("inference_allowed_mirroring_axes") if results.options.get("mirror", True) else None
    nets = []
    for file in results.checkpoints:
        fold = _architecture(results)
        load_weights(fold, file, "network_weights")
        nets.append(fold)
    made = MadeNet(nets, greys, flips or ())
    net: ServedNet = made if results.order == (0, 1, 2) or results.is_flat else TurnedNet(made, results.order)
    if results.is_flat and results.order != (0, 1, 2):
        raise VolpipeError(f"its slices are of the axes {results.order[1:]}; turn the volume, so that they are y and x")
    window = triple(int(n) for n in results.in_volume(results.patch))
    step = [max(1, n // 2) for n in window]
    overlap = triple(
        0 if results.is_flat and axis == 0 else w - s for axis, (w, s) in enumerate(zip(window, step, strict=True))
    )
    spacing = results.in_volume(results.configuration["spacing"], 0)
    facts: dict[str, object] = {
        "slices": results.is_flat,
        "intensity": "raw",
        "in_channels": results.num_channels,
        "out_channels": results.num_classes,
        "scale": (1, 1, 1),
        "stride": triple(int(n) for n in results.in_volume(_strides(results))),
        "halo": (0, 0, 0),
        "window": window,
        "tile_invariant": False,
        "normalise": normalise,
        "padding": made.padding,
        "windows": Windows(shape=window, overlap=overlap, blend="gaussian", placement="even"),
        "output": Output(activation="sigmoid") if results.has_regions else Output(kind="classes"),
        "regions": results.regions if results.has_regions else None,
        # Ones are what files without a voxel size have.
        "spacing": spacing if set(spacing) - {0, 1} else None,
        "interpolation": _interpolation(results, greys),
        "crops_zeros": True,
    }
    net.declaration = Declaration.model_validate(facts)
    return net


def _interpolation(results: Results, greys: Sequence[Grey]) -> dict[str, object] | None:
    """Return how volumes of other voxels are resampled (`net_geometry.Interpolation`); None where that is not done."""
    own = results.configuration
    given = {"order": 3, "order_z": 0, "force_separate_z": None} | (own.get("resampling_fn_data_kwargs") or {})
    if own.get("resampling_fn_data", RESAMPLED_BY) != RESAMPLED_BY or {given["order"], given["order_z"]} - {0, 1, 3}:
        return None
    limits = tuple(None if grey.low is None or grey.high is None else (grey.low, grey.high) for grey in greys)
    names = {"order": "order", "order_z": "order_z", "apart": "force_separate_z"}
    return {name: given[key] for name, key in names.items()} | {"limits": limits}


def _architecture(results: Results) -> nn.Module:
    """Return the net that the plans describe, with weights at random."""
    described = results.configuration.get("architecture") or _old_architecture(results.configuration)
    kwargs = dict(described["arch_kwargs"])
    for key in described.get("_kw_requires_import", ()):
        if kwargs.get(key) is not None:
            kwargs[key] = library_class(str(kwargs[key]), ALLOWED, "nnunet")
    kwargs["deep_supervision"] = False
    build = library_class(str(described["network_class_name"]), ALLOWED[:1], "nnunet")
    net: nn.Module = build(input_channels=results.num_channels, num_classes=results.num_classes, **kwargs)
    return net


def _old_architecture(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the architecture of plans before nnU-Net 2.4, which have the sizes of a U-Net alone."""
    kinds = {"PlainConvUNet": ("unet", "n_conv_per_stage"), "ResidualEncoderUNet": ("unet", "n_blocks_per_stage")}
    name = str(configuration.get("UNet_class_name"))
    if name not in kinds:
        raise VolpipeError(f"its plans name the architecture {name}, of which nothing else is known")
    module, layers = kinds[name]
    dims, stages = len(configuration["patch_size"]), len(configuration["n_conv_per_stage_encoder"])
    base, most = configuration["UNet_base_num_features"], configuration["unet_max_num_features"]
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.{module}.{name}",
        "arch_kwargs": {
            "n_stages": stages,
            "features_per_stage": [min(base * 2**i, most) for i in range(stages)],
            "conv_op": f"torch.nn.Conv{dims}d",
            "kernel_sizes": configuration["conv_kernel_sizes"],
            "strides": configuration["pool_op_kernel_sizes"],
            layers: configuration["n_conv_per_stage_encoder"],
            "n_conv_per_stage_decoder": configuration["n_conv_per_stage_decoder"],
            "conv_bias": True,
            "norm_op": f"torch.nn.InstanceNorm{dims}d",
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "nonlin"],
    }


def _strides(results: Results) -> list[int]:
    """Return the product of the strides of all stages, along each axis of the net."""
    described = results.configuration.get("architecture")
    strides = described["arch_kwargs"]["strides"] if described else results.configuration["pool_op_kernel_sizes"]
    dims = len(results.patch)
    steps = [[each] * dims if isinstance(each, int) else each for each in strides]
    return [math.prod(int(each[axis]) for each in steps) for axis in range(dims)]


def _normalisation(results: Results) -> tuple[Normalise, list[Grey]]:
    """Return the normalisation of the whole volume, and what is done to each channel after it.

    Raises:
        VolpipeError: with the name of a scheme that is not done here.
    """
    schemes = [str(name) for name in results.configuration["normalization_schemes"]]
    if any(results.configuration.get("use_mask_for_norm") or ()):
        raise VolpipeError(
            "use_mask_for_norm takes statistics over the voxels that are not zero, which is not done here"
        )
    kinds, is_several = set(schemes), len(schemes) > 1
    if kinds == {"ZScoreNormalization"}:
        return Normalise(method="zscore", per_channel=is_several), []
    if kinds <= {"RescaleTo01Normalization", "Rescale0_1Normalization"}:  # which is measured as -1 to 1
        measured = Normalise(method="percentile", percentiles=(0, 100), per_channel=is_several)
        return measured, [Grey(-1, 2)] * len(schemes)
    if is_several and not kinds <= {"CTNormalization", "NoNormalization", "RGBTo01Normalization"}:
        raise VolpipeError(
            f"{' beside '.join(sorted(kinds))} in one volume is not done here; normalise its channels before, and name "
            "NoNormalization in plans.json"
        )
    return Normalise(method="none"), [_grey_of_channel(name, results, i) for i, name in enumerate(schemes)]


def _grey_of_channel(scheme: str, results: Results, channel: int) -> Grey:
    if scheme == "NoNormalization":
        return Grey()
    if scheme == "RGBTo01Normalization":
        return Grey(std=255)
    if scheme == "CTNormalization":
        known = results.plans.get("foreground_intensity_properties_per_channel") or results.plans.get(
            "foreground_intensity_properties_by_modality", {}
        )
        numbers = known[str(channel)]
        ends = float(numbers["percentile_00_5"]), float(numbers["percentile_99_5"])
        return Grey(float(numbers["mean"]), max(float(numbers["std"]), 1e-8), *ends)
    raise VolpipeError(f"its normalisation {re.sub(r'[^ -~]', '?', scheme)} is not one of nnU-Net's own")
