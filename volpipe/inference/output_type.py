"""The type of an output's voxels, or of its classes.

Not here: how voxels are rounded (output), or which grey levels they have (intensity).
"""

from __future__ import annotations

import numpy as np

from volpipe.errors import PlanError
from volpipe.nets.facts import NetFacts
from volpipe.recipes.inference import Recipe
from volpipe.units import count


def output_type(recipe: Recipe, dtype: np.dtype, intensity: str, net: NetFacts) -> str:
    """Return the output's type; refuse one that cannot hold a function's results, or NaN and infinity that are kept."""
    is_kept = np.issubdtype(dtype, np.integer) and (net.integers or (dtype.itemsize <= 2 and dtype != np.int8))
    if recipe.output.kind == "classes":
        return _classes_dtype(recipe, net)
    if net.combine == "vote":
        raise PlanError(
            f"net.combine=vote takes the class that most of {len(net.members)} nets give, and output.kind is "
            f"{recipe.output.kind}; set output.kind=classes, or net.combine to mean or median"
        )
    own = net.dtype or (
        "uint8" if intensity == "unit" else dtype.name if intensity == "same" and is_kept else "float32"
    )
    out_dtype = own if recipe.output.dtype == "auto" else recipe.output.dtype
    if net.dtype and not np.can_cast(net.dtype, out_dtype, "safe"):
        raise PlanError(
            f"output.dtype {out_dtype} cannot hold all that function {net.label} gives, which is {net.dtype}; leave it "
            f"out, or let the function return {out_dtype}, rounded and clipped as it should be"
        )
    if recipe.infer.nonfinite == "keep" and not np.issubdtype(out_dtype, np.floating):
        raise PlanError(
            f"infer.nonfinite=keep needs voxels that can be NaN, the output's are {out_dtype}; set output.dtype=float32"
        )
    return out_dtype


def _classes_dtype(recipe: Recipe, net: NetFacts) -> str:
    """Return the type of an output of classes, one for each channel of the net, or of the labels of its regions."""
    num_channels, names = net.combined_channels, ", ".join(region.name for region in net.regions)
    labels = recipe.output.labels
    if labels and len(labels) != num_channels:
        raise PlanError(
            f"output.labels has {count(len(labels), 'number')}, and net {net.label} gives "
            f"{count(num_channels, 'channel')}; give one for each channel"
        )
    if net.regions and not labels and not any(region.label for region in net.regions):
        raise PlanError(
            f"output.kind=classes: the channels of net {net.label} are regions, which may overlap ({names}), and no "
            "order of their labels is known (regions_class_order of nnU-Net's dataset.json); set output.kind=image"
        )
    if net.regions and recipe.output.activation == "softmax":
        raise PlanError(
            f"output.activation=softmax is for classes of which a voxel has one, and the channels of net {net.label} "
            f"are regions, which may overlap ({names}); leave it out"
        )
    if not (net.regions or labels) and recipe.output.activation == "sigmoid":
        raise PlanError(
            f"output.kind=classes takes the largest channel, and output.activation=sigmoid says that the channels of "
            f"net {net.label} are no exclusive classes, so that a voxel may have several or none; set "
            "output.kind=image, or output.activation=none if a voxel has one"
        )
    if not (net.regions or labels) and num_channels < 2:
        raise PlanError(
            "output.kind=classes takes the largest of several channels, and the net has one; threshold it, or leave "
            "output.kind out"
        )
    if net.regions or labels:
        num_channels = 1 + max(labels or [region.label for region in net.regions])
    least = "uint8" if num_channels <= 1 << 8 else "uint16"
    own = least if recipe.output.dtype == "auto" else recipe.output.dtype
    if np.dtype(own).kind not in "iu" or np.iinfo(own).max < num_channels - 1:
        raise PlanError(f"output.dtype {own} cannot hold {num_channels} classes; set output.dtype={least}")
    return own
