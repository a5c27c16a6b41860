"""Pre- and postprocessing of bioimage.io packages, on tensors (n, c, z, y, x).

Not here: packages (bioimageio_spec). One step may use statistics of the sample: a run takes those of the whole volume,
because statistics of each window would make seams.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from volpipe.errors import VolpipeError
from volpipe.recipes.inference import Normalise

if TYPE_CHECKING:
    import torch

LETTERS = "bczyx"
UNITS = ("sigmoid", "softmax", "binarize")  # which give 0 to 1
EACH = ("sigmoid", "binarize")  # which look at each channel for itself
STATISTICS = ("zero_mean_unit_variance", "scale_range")
EPS = 1e-6


@dataclass(frozen=True)
class Step:
    """One step; its numbers are one for all channels, or one per channel.

    Attributes:
        first, second: gain and offset, least and most, threshold, mean and deviation, or percentiles.
        axes: of statistics, letters of "bczyx".
    """

    kind: str
    first: tuple[float, ...] = ()
    second: tuple[float, ...] = ()
    axes: str = LETTERS
    eps: float = EPS
    dtype: str = ""

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        """Return `data` (n, c, z, y, x) after this step; statistics are its own."""
        import torch

        if self.kind == "sigmoid":
            return torch.sigmoid(data)
        if self.kind == "softmax":
            return torch.softmax(data, 1)
        if self.kind == "ensure_dtype":
            return data.to(getattr(torch, self.dtype))
        if self.kind == "clip":
            low, high = (values[0] if values else None for values in (self.first, self.second))
            return data.clamp(low, high)
        if self.kind == "binarize":
            return (data > _by_channel(self.first, data)).to(torch.float32)
        if self.kind == "scale_linear":
            return data * _by_channel(self.first, data) + _by_channel(self.second, data)
        if self.kind == "fixed":
            return (data - _by_channel(self.first, data)) / (_by_channel(self.second, data) + self.eps)
        shift, scale = self._statistics(data)
        return (data - shift) / (scale + self.eps)

    def _statistics(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dims = tuple(LETTERS.index(letter) for letter in self.axes)
        if self.kind == "zero_mean_unit_variance":
            return data.mean(dims, keepdim=True), data.std(dims, correction=0, keepdim=True)
        others = [i for i in range(5) if i not in dims]
        ordered = data.permute(*others, *dims).flatten(len(others)).double().sort(-1).values
        shape = [1 if i in dims else n for i, n in enumerate(data.shape)]
        low, high = (_quantile(ordered, q[0] / 100).reshape(shape).to(data.dtype) for q in (self.first, self.second))
        return low, high - low


def _quantile(ordered: torch.Tensor, share: float) -> torch.Tensor:
    """Return the quantile along the last, sorted axis, between the two nearest; NaN are the largest.

    torch's own stops at 2^24 values and numpy's at the first NaN; numpy's wants a tensor of the CPU without gradients.
    """
    place = share * (ordered.shape[-1] - 1)
    below = int(place)
    above = min(below + 1, ordered.shape[-1] - 1)
    low, high = ordered[..., below], ordered[..., above]
    return low + (high - low) * (place - below)


def _by_channel(values: Sequence[float], data: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.tensor(values, dtype=torch.float32, device=data.device).reshape(1, -1, 1, 1, 1)


def read_step(entry: Mapping[str, Any]) -> Step:  # Any: JSON
    """Return the step that a package says, in format 0.4 or 0.5.

    Raises:
        VolpipeError: it is none of those that are served.
    """
    kind = str(entry.get("id", entry.get("name")))
    values: Mapping[str, Any] = entry.get("kwargs") or {}  # Any: JSON
    along = values.get("axis")
    if along not in (None, "channel", "c"):
        raise VolpipeError(f"{kind} along the axis {along} is not served; along channels it is")
    if kind in ("sigmoid", "softmax"):
        return Step(kind)
    if kind == "ensure_dtype":
        return Step(kind, dtype=values["dtype"])
    if kind == "scale_linear":
        return Step(kind, _numbers(values.get("gain", 1.0)), _numbers(values.get("offset", 0.0)))
    if kind == "binarize":
        return Step(kind, _numbers(values["threshold"]))
    if kind == "clip" and not any(values.get(key) is not None for key in ("min_percentile", "max_percentile")):
        return Step(kind, _numbers(values.get("min")), _numbers(values.get("max")))
    is_old_fixed = kind == "zero_mean_unit_variance" and values.get("mode") == "fixed"
    if kind == "fixed_zero_mean_unit_variance" or is_old_fixed:
        return Step("fixed", _numbers(values["mean"]), _numbers(values["std"]), eps=values.get("eps", 0.0))
    if kind in STATISTICS and not values.get("reference_tensor"):
        axes = _letters(values.get("axes"), values.get("mode"))
        eps = values.get("eps", EPS)
        if kind == "scale_range":
            low, high = values.get("min_percentile", 0.0), values.get("max_percentile", 100.0)
            return Step(kind, (float(low),), (float(high),), axes, eps)
        return Step(kind, axes=axes, eps=eps)
    raise VolpipeError(f"{kind} {dict(values) or ''} is not served".replace("  ", " "))


def _numbers(value: float | Sequence[float] | None) -> tuple[float, ...]:
    if value is None:
        return ()
    return tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),)


def _letters(axes: str | Sequence[str] | None, mode: str | None) -> str:
    """Return the letters of the axes of a statistic, all where none are named; `mode` is that of format 0.4."""
    if not axes:
        return LETTERS
    letters = "".join(axis if len(axis) == 1 else axis[0] for axis in axes)
    return letters + "b" if mode == "per_dataset" and "b" not in letters else letters


def split_normalisation(steps: Sequence[Step], in_channels: int) -> tuple[Normalise, tuple[Step, ...]]:
    """Return how the volume is normalised for a package of these first steps, and the steps that windows go through.

    Raises:
        VolpipeError: the statistics cannot be those of the whole volume.
    """
    places = [i for i, step in enumerate(steps) if step.kind in STATISTICS]
    if not places:
        return Normalise(method="none"), tuple(steps)
    first = places[0]
    step, before, after = steps[first], steps[:first], tuple(steps[first + 1 :])
    if len(places) > 1:
        raise VolpipeError(f"it normalises twice by statistics ({step.kind}, {steps[places[1]].kind}); once is served")
    if any(not _is_undone(other) for other in before):
        names = ", ".join(other.kind for other in before)
        raise VolpipeError(f"{names} before {step.kind} makes other statistics than the volume's; that is not served")
    if in_channels > 1 and "c" not in step.axes:
        raise VolpipeError(
            f"{step.kind} by channel is not served for {in_channels} channels, which are normalised together here"
        )
    eps = step.eps / math.prod(_gain(other) for other in before)  # in units of the volume
    if step.kind == "zero_mean_unit_variance":
        return Normalise(method="zscore", eps=eps), after
    half = Step("scale_linear", (0.5,), (0.5,))  # from -1..1 to 0..1
    return Normalise(method="percentile", percentiles=(step.first[0], step.second[0]), eps=eps), (half, *after)


def _is_undone(step: Step) -> bool:
    """Return whether statistics take back what a step does: a rise by one factor for all, or a type of numbers."""
    if step.kind == "ensure_dtype":
        return step.dtype != "bool"
    factors = {"scale_linear": step.first, "fixed": step.second}.get(step.kind, ())
    return len(factors) == 1 and factors[0] > 0 and len(step.first) == len(step.second) == 1


def _gain(step: Step) -> float:
    """Return by how much values rise in a step that statistics take back."""
    if step.kind == "fixed":
        return 1 / (step.second[0] + step.eps)
    return step.first[0] if step.kind == "scale_linear" else 1.0


def output_intensity(steps: Sequence[Step]) -> str:
    """Return "unit" where the last step gives 0 to 1, else "raw"."""
    kinds = [step.kind for step in steps if step.kind != "ensure_dtype"]
    return "unit" if kinds and kinds[-1] in UNITS else "raw"
