"""Pre- and postprocessing of bioimage.io packages, on tensors (n, c, z, y, x).

Not here: packages (bioimageio_spec). One step may use statistics of the sample: a run takes those of the whole volume,
because statistics of each window would make seams. A step is a class, and `STEPS` lists them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from volpipe.errors import VolpipeError
from volpipe.recipes.inference import Normalise

if TYPE_CHECKING:
    import torch

LETTERS = "bczyx"
EPS = 1e-6

Numbers = tuple[float, ...]  # one for all channels, or one per channel


class Step(ABC):
    """One step.

    Attributes:
        name: as a package has it, and as messages have it.
        is_each: whether a channel is computed from that channel alone.
        gives_unit: whether it gives 0 to 1; None where values stay what they were.
    """

    name: ClassVar[str]
    is_each: ClassVar[bool] = False
    gives_unit: ClassVar[bool | None] = False

    @classmethod
    def is_named(cls, name: str, values: Mapping[str, Any]) -> bool:  # Any: JSON
        """Return whether a package that says `name`, with these `values`, means this step."""
        return name == cls.name

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:  # Any: JSON
        """Return the step with the `values` that a package says, in format 0.4 or 0.5."""
        return cls()

    @abstractmethod
    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        """Return `data` (n, c, z, y, x) after this step; statistics are its own."""

    @property
    def gain(self) -> float | None:
        """The one factor by which all values rise; None of a step after which statistics are not those of the volume.

        A normalisation by statistics makes the same numbers, whatever the factor.
        """
        return None


@dataclass(frozen=True)
class Sigmoid(Step):
    """The logistic function of each value."""

    name: ClassVar[str] = "sigmoid"
    is_each: ClassVar[bool] = True
    gives_unit: ClassVar[bool | None] = True

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        return data.sigmoid()


@dataclass(frozen=True)
class Softmax(Step):
    """The shares of the channels, which sum to one."""

    name: ClassVar[str] = "softmax"
    gives_unit: ClassVar[bool | None] = True

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        return data.softmax(1)


@dataclass(frozen=True)
class EnsureDtype(Step):
    """Values in another type."""

    name: ClassVar[str] = "ensure_dtype"
    gives_unit: ClassVar[bool | None] = None
    dtype: str

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:  # Any: JSON
        return cls(values["dtype"])

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        import torch

        return data.to(getattr(torch, self.dtype))

    @property
    def gain(self) -> float | None:
        return None if self.dtype == "bool" else 1.0


@dataclass(frozen=True)
class ScaleLinear(Step):
    """Values times a factor, and an offset more."""

    name: ClassVar[str] = "scale_linear"
    factors: Numbers
    offsets: Numbers

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:  # Any: JSON
        return cls(_numbers(values.get("gain", 1.0)), _numbers(values.get("offset", 0.0)))

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        return data * _by_channel(self.factors, data) + _by_channel(self.offsets, data)

    @property
    def gain(self) -> float | None:
        is_one = len(self.factors) == len(self.offsets) == 1
        return self.factors[0] if is_one and self.factors[0] > 0 else None


@dataclass(frozen=True)
class Binarize(Step):
    """1 above a threshold, else 0."""

    name: ClassVar[str] = "binarize"
    is_each: ClassVar[bool] = True
    gives_unit: ClassVar[bool | None] = True
    thresholds: Numbers

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:  # Any: JSON
        return cls(_numbers(values["threshold"]))

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        return (data > _by_channel(self.thresholds, data)).float()


@dataclass(frozen=True)
class Clip(Step):
    """Values clipped to numbers; None of an end that is open."""

    name: ClassVar[str] = "clip"
    low: float | None
    high: float | None

    @classmethod
    def is_named(cls, name: str, values: Mapping[str, Any]) -> bool:  # Any: JSON
        by_percentiles = any(values.get(key) is not None for key in ("min_percentile", "max_percentile"))
        return name == cls.name and not by_percentiles

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:  # Any: JSON
        low, high = (_numbers(values.get(key)) for key in ("min", "max"))
        return cls(low[0] if low else None, high[0] if high else None)

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        return data.clamp(self.low, self.high)


@dataclass(frozen=True)
class FixedNormalisation(Step):
    """Values less a mean, by a deviation, which the package gives."""

    name: ClassVar[str] = "fixed"
    means: Numbers
    deviations: Numbers
    eps: float = 0.0

    @classmethod
    def is_named(cls, name: str, values: Mapping[str, Any]) -> bool:  # Any: JSON
        is_old = name == ZeroMeanUnitVariance.name and values.get("mode") == "fixed"  # of format 0.4
        return is_old or name == f"fixed_{ZeroMeanUnitVariance.name}"

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:  # Any: JSON
        return cls(_numbers(values["mean"]), _numbers(values["std"]), values.get("eps", 0.0))

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        return (data - _by_channel(self.means, data)) / (_by_channel(self.deviations, data) + self.eps)

    @property
    def gain(self) -> float | None:
        is_one = len(self.means) == len(self.deviations) == 1
        return 1 / (self.deviations[0] + self.eps) if is_one and self.deviations[0] > 0 else None


@dataclass(frozen=True)
class StatisticsStep(Step):
    """A step that rests on statistics of its input, over `axes`, letters of "bczyx"."""

    axes: str = LETTERS
    eps: float = EPS

    @classmethod
    def is_named(cls, name: str, values: Mapping[str, Any]) -> bool:  # Any: JSON
        return name == cls.name and not values.get("reference_tensor")

    @staticmethod
    def read_axes(values: Mapping[str, Any]) -> str:  # Any: JSON
        """Return the letters of the axes that a package names for statistics, all where it names none."""
        axes, mode = values.get("axes"), values.get("mode")  # a mode is of format 0.4
        if not axes:
            return LETTERS
        letters = "".join(axis if len(axis) == 1 else axis[0] for axis in axes)
        return letters + "b" if mode == "per_dataset" and "b" not in letters else letters

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        shift, scale = self.shift_and_scale(data, tuple(LETTERS.index(letter) for letter in self.axes))
        return (data - shift) / (scale + self.eps)

    @abstractmethod
    def shift_and_scale(self, data: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the value that becomes 0, and the distance that becomes 1, by statistics of `data` over `dims`."""

    @abstractmethod
    def of_volume(self, eps: float) -> tuple[Normalise, tuple[Step, ...]]:
        """Return the normalisation by the same statistics of a whole volume, and the steps after it.

        Args:
            eps: in units of the volume.
        """


@dataclass(frozen=True)
class ZeroMeanUnitVariance(StatisticsStep):
    """Values of mean 0 and standard deviation 1."""

    name: ClassVar[str] = "zero_mean_unit_variance"

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:  # Any: JSON
        return cls(cls.read_axes(values), values.get("eps", EPS))

    def shift_and_scale(self, data: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        return data.mean(dims, keepdim=True), data.std(dims, correction=0, keepdim=True)

    def of_volume(self, eps: float) -> tuple[Normalise, tuple[Step, ...]]:
        return Normalise(method="zscore", eps=eps), ()


@dataclass(frozen=True)
class ScaleRange(StatisticsStep):
    """Values of which the percentile `low` is 0 and `high` is 1."""

    name: ClassVar[str] = "scale_range"
    low: float = 0.0
    high: float = 100.0

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:  # Any: JSON
        low, high = values.get("min_percentile", 0.0), values.get("max_percentile", 100.0)
        return cls(cls.read_axes(values), values.get("eps", EPS), float(low), float(high))

    def shift_and_scale(self, data: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        others = [i for i in range(5) if i not in dims]
        ordered = data.permute(*others, *dims).flatten(len(others)).double().sort(-1).values
        shape = [1 if i in dims else n for i, n in enumerate(data.shape)]
        low, high = (quantile(ordered, q / 100).reshape(shape).to(data.dtype) for q in (self.low, self.high))
        return low, high - low

    def of_volume(self, eps: float) -> tuple[Normalise, tuple[Step, ...]]:
        half = ScaleLinear((0.5,), (0.5,))  # from -1..1 to 0..1
        return Normalise(method="percentile", percentiles=(self.low, self.high), eps=eps), (half,)


STEPS: tuple[type[Step], ...] = (
    Sigmoid, Softmax, EnsureDtype, ScaleLinear, Binarize, Clip, FixedNormalisation, ZeroMeanUnitVariance, ScaleRange,
)  # fmt: skip


def quantile(ordered: torch.Tensor, share: float) -> torch.Tensor:
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


def _numbers(value: float | Sequence[float] | None) -> Numbers:
    if value is None:
        return ()
    return tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),)


def read_step(entry: Mapping[str, Any]) -> Step:  # Any: JSON
    """Return the step that a package says, in format 0.4 or 0.5.

    Raises:
        VolpipeError: it is none of those that are served.
    """
    name = str(entry.get("id", entry.get("name")))
    values: Mapping[str, Any] = entry.get("kwargs") or {}  # Any: JSON
    along = values.get("axis")
    if along not in (None, "channel", "c"):
        raise VolpipeError(f"{name} along the axis {along} is not served; along channels it is")
    step = next((step for step in STEPS if step.is_named(name, values)), None)
    if step is None:
        raise VolpipeError(f"{name} {dict(values) or ''} is not served".replace("  ", " "))
    return step.read(values)


def split_normalisation(steps: Sequence[Step], in_channels: int) -> tuple[Normalise, tuple[Step, ...]]:
    """Return the normalisation of the volume for a package with these steps, and the other steps, those of windows.

    Raises:
        VolpipeError: the statistics cannot be those of the whole volume.
    """
    normalising = [(place, step) for place, step in enumerate(steps) if isinstance(step, StatisticsStep)]
    if not normalising:
        return Normalise(method="none"), tuple(steps)
    (first, step), *others = normalising
    if others:
        raise VolpipeError(f"it normalises twice by statistics ({step.name}, {others[0][1].name}); once is served")
    gains = [before.gain for before in steps[:first]]
    if None in gains:
        names = ", ".join(before.name for before in steps[:first])
        raise VolpipeError(f"{names} before {step.name} makes other statistics than the volume's; that is not served")
    if in_channels > 1 and "c" not in step.axes:
        raise VolpipeError(
            f"{step.name} by channel is not served for {in_channels} channels, which are normalised together here"
        )
    normalise, then = step.of_volume(step.eps / math.prod(gain for gain in gains if gain is not None))
    return normalise, (*then, *steps[first + 1 :])


def output_intensity(steps: Sequence[Step]) -> str:
    """Return "unit" where the last step gives 0 to 1, else "raw"."""
    units = [step.gives_unit for step in steps if step.gives_unit is not None]
    return "unit" if units and units[-1] else "raw"
