"""The difference of a net's output in another precision from that in float32, and how much of one a plan allows.

Not here: how much faster a precision is (net_speeds), or which one is taken (window_choice).
"""

from __future__ import annotations

import json
import math
import sys

import numpy as np

from volpipe.estimation.net_speeds import ask
from volpipe.geometry.grid import Box, align_up, triple
from volpipe.inference.intensity import Affine, to_dtype, unit_scale
from volpipe.inference.plan import Plan
from volpipe.inference.runner import autocast, take_precision
from volpipe.inference.statistics import sampled_affine
from volpipe.inference.tiling import around_core
from volpipe.nets.facts import Difference, NetFacts
from volpipe.nets.load import build_net
from volpipe.recipes.inference import NetChoice, Normalise, Precision
from volpipe.synthetic.volume import Sample

CORE = 64  # voxels along an axis that are compared, at least: the core is in whole strides
MOST_SECONDS = 60.0  # for a process that loads torch and the net
MOST_LEVELS = 1  # of 8 bits by which an output may differ
MOST_RELATIVE = 1e-3  # share of an output's range by which numbers that are not rounded may differ


def compared_voxels(net: NetFacts) -> int:
    """Return the voxels of the window that `measure_difference` computes."""
    return math.prod(_window(net))


def difference_key(precision: Precision, normalise: Normalise, net: NetFacts, processor: str) -> str:
    """Return by what the difference of a net in `precision` is remembered, as measured on a processor or GPU."""
    return f"{precision} {normalise} {net.weights_sha256} on {processor}"


def _window(net: NetFacts) -> tuple[int, int, int]:
    """Return the window (z, y, x): a core with the halo around it, or the only size that the net takes."""
    sizes = zip(net.fixed, net.stride, *around_core(net, net.halo), strict=True)
    return triple(only or align_up(CORE, stride) + before + after for only, stride, before, after in sizes)


def _core(net: NetFacts) -> tuple[slice, ...]:
    """Return the part of the net's output (z, y, x) for `_window` that is that of the whole."""
    sizes = zip(_window(net), net.margin, net.scale, net.shrink, *around_core(net, net.halo), strict=True)
    return tuple(slice((b - m) * s // u, (w - a - m) * s // u) for w, m, s, u, b, a in sizes)


def measure_difference(
    choice: NetChoice,
    normalise: Normalise,
    net: NetFacts,
    search_path: str = "",
    *,
    precision: Precision = "bfloat16",
    device: str = "cpu",
) -> Difference:
    """Return how the output of the net, with its weights, differs in `precision`, over an invented volume of 8 bits."""
    import torch

    torch.backends.cudnn.deterministic = True  # as workers have it
    window = _window(net)
    raw = Sample(window).raw(Box.from_shape(window))
    affine = sampled_affine(normalise, raw[None])
    data = torch.from_numpy(affine.apply(np.repeat(raw[None, None], net.in_channels, axis=1))).to(device)
    module = build_net(choice, search_path).to(device)
    core = _core(net)

    def output(precision: str) -> np.ndarray:
        take_precision(precision)
        with torch.inference_mode(), autocast(device, precision):
            result: np.ndarray = module(data).float().cpu().numpy()[0][:, *core]
        return result

    return difference(output("float32"), output(precision), net, normalise, affine)


def difference(exact: np.ndarray, other: np.ndarray, net: NetFacts, normalise: Normalise, affine: Affine) -> Difference:
    """Return how `other` (c, z, y, x), float32, differs from `exact`, whose range is above 0."""
    if not np.isfinite(other).all():
        return Difference(normalise=normalise, relative=1.0)
    relative = float(np.abs(other - exact).max() / np.ptp(exact))
    if net.intensity == "raw":
        return Difference(normalise=normalise, relative=relative)
    levels = np.abs(_grey(other, net, affine).astype(np.int16) - _grey(exact, net, affine))
    share = np.count_nonzero(levels) / levels.size
    return Difference(normalise=normalise, relative=relative, levels=int(levels.max()), share=share)


def _grey(data: np.ndarray, net: NetFacts, affine: Affine) -> np.ndarray:
    """Return the output of a net as the 8 bits that a run would store."""
    dtype = np.dtype(np.uint8)
    return to_dtype(data * np.float32(unit_scale(dtype)) if net.intensity == "unit" else affine.invert(data), dtype)


def is_allowed(plan: Plan, measured: Difference) -> bool:
    """Return whether the output of `plan` may be computed with this difference, by how it is rounded.

    Labels never may. Nor may whole numbers of more than 8 bits: their levels are finer than bfloat16 and TF32 are.
    """
    if plan.is_labels or measured.normalise != plan.recipe.normalise:
        return False
    if plan.dtype.kind == "f":
        return measured.relative <= MOST_RELATIVE
    is_grey = plan.dtype == np.uint8 and plan.intensity == plan.net.intensity and _is_grey(plan)
    return is_grey and measured.levels is not None and measured.levels <= MOST_LEVELS


def _is_grey(plan: Plan) -> bool:
    """Return whether the levels of the output are those of an output of 8 bits that was measured."""
    return plan.intensity == "unit" or plan.source.dtype == "uint8"


def change(plan: Plan, measured: Difference) -> str:
    """Return what the difference changes in the output of `plan`."""
    if plan.dtype.kind == "f":
        return f"voxels by at most {measured.relative:.1g} of the output's range"
    return f"{measured.share:.2g} of the voxels by one grey level" if measured.levels else "no voxel"


def measured_difference(
    choice: NetChoice,
    normalise: Normalise,
    net: NetFacts,
    search_path: str,
    *,
    precision: Precision = "bfloat16",
    device: str = "cpu",
) -> Difference | None:
    """Return what `measure_difference` does, by a process that is none of the caller's program; None where it fails."""
    question = {
        "choice": choice.model_dump(), "normalise": normalise.model_dump(), "net": net.model_dump(),
        "search_path": search_path, "precision": precision, "device": device,
    }  # fmt: skip
    answer = ask("volpipe.estimation.precision", question, MOST_SECONDS)
    return None if answer is None else Difference.model_validate_json(answer)


def _answer() -> None:
    """Answer the question of `measured_difference`, in its process."""
    question = json.loads(sys.stdin.read())
    choice, normalise = NetChoice.model_validate(question["choice"]), Normalise.model_validate(question["normalise"])
    net = NetFacts.model_validate(question["net"])
    how = {name: question[name] for name in ("precision", "device")}
    sys.stdout.write(measure_difference(choice, normalise, net, question["search_path"], **how).model_dump_json())


if __name__ == "__main__":
    _answer()
