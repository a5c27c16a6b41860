"""Nets in bioimage.io packages, as modules of our axes; and a package's own test.

Not here: reading a package (bioimageio_spec), or its pre- and postprocessing (bioimageio_ops).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.nets.adapter import called, outputs_of
from volpipe.nets.bioimageio_ops import LETTERS, StatisticsStep, Step, output_intensity, split_normalisation
from volpipe.nets.bioimageio_spec import Package, TensorSpec, Tolerance, Weights
from volpipe.nets.declared import Declaration, ServedNet
from volpipe.nets.net_geometry import LabelRegion
from volpipe.nets.onnx import OnnxGraph, check_size

RELATIVE = 1e-4  # of the largest expected value, where a package has no tolerance
DISCRETE_PER_MILLION = 1000.0  # integers of a million that may differ; as in bioimageio.spec
WINDOW, FLAT_WINDOW = (64, 64, 64), (16, 256, 256)


@dataclass(frozen=True)
class SelfTestResult:
    """The result of a package's own test.

    Attributes:
        largest: difference from the expected values.
        expected: the largest absolute value expected.
        mismatched: values of a million that differ by more than the tolerance.
        is_reproduced: whether so many may differ.
    """

    largest: float
    expected: float
    mismatched: float
    is_reproduced: bool


class PackageNet(ServedNet):
    """The net of a package, (n, c, z, y, x) -> (n, C, z', y', x'), with its fixed pre- and postprocessing.

    A net without z runs over slices. The volume must be normalised by `normalise`.
    """

    def __init__(self, package: Package, kind: str, inner: nn.Module | OnnxGraph, *, is_bare: bool = False) -> None:
        super().__init__()
        self.package, self.kind = package, kind
        self._inner = inner
        self.is_code = kind not in ("onnx", "torchscript")
        self.is_strict = not is_bare  # a package may restrict sizes of windows more than its net does
        self.normalise, before = split_normalisation(package.input.steps, package.input.channels)
        self._before: Sequence[Step] = () if is_bare else before
        self._after: Sequence[Step] = () if is_bare else package.output.steps
        for step in package.output.steps:
            if isinstance(step, StatisticsStep):
                raise VolpipeError(
                    f"{step.name} of the output rests on statistics that nobody knows before the run; it is not served"
                )
        is_flat = "z" not in package.input.axes
        several = range(package.output.channels if package.output.channels > 1 else 0)
        is_each = any(step.is_each for step in package.output.steps)
        regions = tuple(LabelRegion(f"channel {i}") for i in several if is_each) or None
        self.is_package, self.planes, self.slice_axis = True, ("yx",) if is_flat else (), 0 if is_flat else None
        sizes = list(zip(FLAT_WINDOW if is_flat else WINDOW, package.least, package.step, strict=True))
        whole = [least + align_up(max(0, size - least), step) if step else least for size, least, step in sizes]
        is_valid = any(package.margin)
        only = [not is_bare and (not step or (not is_valid and least % step != 0)) for _, least, step in sizes]
        own = _sizes_of(inner, package.input.axes)
        self._sizes = triple([n or (size if is_only else 0) for n, size, is_only in zip(own, whole, only, strict=True)])
        is_free = not any(self._sizes)
        rest = triple(least % max(step, 1) for least, step in zip(package.least, package.step, strict=True))
        self.declaration = Declaration(
            in_channels=package.input.channels, out_channels=package.output.channels, scale=package.scale,
            shrink=package.shrink, margin=package.margin, halo=package.halo, slices=is_flat, fixed=self._sizes,
            intensity=output_intensity(package.output.steps), normalise=self.normalise,
            window=triple([n or size for n, size in zip(own, whole, strict=True)]),
            stride=package.step if is_free and all(package.step) else None,
            remainder=rest if is_free and is_valid else None, least=package.least, regions=regions,
        )  # fmt: skip
        if isinstance(inner, OnnxGraph):
            self.varying = inner.varying
            self.num_numbers = inner.graph.num_parameters

    @property
    def bare(self) -> nn.Module:
        """The bare network, without pre- and postprocessing, which hide its receptive field."""
        if isinstance(self._inner, OnnxGraph):
            return _BareGraph(self.package, self.kind, self._inner, is_bare=True)
        return PackageNet(self.package, self.kind, self._inner, is_bare=True)

    @property
    def notes(self) -> list[str]:
        """Differences from the package's own pipeline, one sentence each."""
        return [
            f"{step.name} takes the statistics of the whole volume (normalise.method={self.normalise.method}), not of "
            "each window, which would make seams"
            for step in self.package.input.steps
            if isinstance(step, StatisticsStep)
        ]

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        if self.is_strict and windows.device.type != "meta":
            sizes = tuple(windows.shape[2:])
            check_size(self.package.name, self._sizes, sizes)
            if any(n < least for n, least in zip(sizes, self.package.least, strict=True)):
                raise VolpipeError(
                    f"net {self.package.name} takes windows of {self.package.least} voxels or more, not {sizes}; "
                    "set windows.shape to so many"
                )
        out = _through(self._after, self._bare_output(_through(self._before, windows))).float()
        return out if torch.is_grad_enabled() else out.detach()

    def _bare_output(self, data: torch.Tensor) -> torch.Tensor:
        """Return the bare network's output for `data` (n, c, z, y, x)."""
        source, target = self.package.input, self.package.output
        flat = "z" not in source.axes
        n, c, z, y, x = data.shape
        if flat:
            data = data.movedim(2, 1).reshape(n * z, c, 1, y, x)
        takes_all = "b" in source.axes and not flat
        if takes_all and isinstance(self._inner, OnnxGraph):  # whose number of windows may be fixed
            takes_all = not isinstance(self._inner.input.shape[source.axes.index("b")], int)
        parts = [data] if takes_all else torch.split(data, 1)
        out = torch.cat([_from_axes(self._call_inner(_to_axes(part, source)), target) for part in parts])
        return out.reshape(n, z, out.shape[1], *out.shape[3:]).movedim(1, 2) if flat else out

    def _call_inner(self, data: torch.Tensor) -> torch.Tensor:
        inner = self._inner
        out: Any = (
            called(inner, data) if isinstance(inner, nn.Module) else inner(data)
        )  # Any: whatever its code returns
        values = list(outputs_of(out).values())
        if len(values) == self.package.num_outputs:
            out = values[self.package.output_index]
        if not isinstance(out, torch.Tensor) or out.ndim != len(self.package.output.axes):
            what = f"{out.ndim} axes" if isinstance(out, torch.Tensor) else type(out).__name__
            raise VolpipeError(f"net {self.package.name} makes {what}, its package says {self.package.output.axes}")
        return out

    def test(self) -> SelfTestResult:
        """Return the result of the package's own test, with statistics of the test's own tensor.

        Raises:
            VolpipeError: the package has no test, or the net raises an error in it.
        """
        source, target = self.package.input, self.package.output
        window, expected = _tensor(self.package.name, source), _tensor(self.package.name, target)
        try:
            with torch.inference_mode():
                out = _through(
                    target.steps, self._bare_output(_through(source.steps, _from_axes(window, source).float()))
                )
        except VolpipeError:
            raise
        except Exception as error:  # whatever the net's code raises
            raise VolpipeError(f"net {self.package.name} fails over its own test: {error}") from error
        result = _to_axes(out, target)
        package, given = self.package, _from_axes(window, source).shape[2:]
        sizes = zip(given, package.margin, package.scale, package.shrink, strict=True)
        described = tuple((n - 2 * margin) * scale // shrink for n, margin, scale, shrink in sizes)
        if tuple(out.shape[2:]) != described:
            raise VolpipeError(
                f"net {self.package.name} makes {tuple(out.shape[2:])} voxels in its own test, where its description "
                f"says {described}; correct the size of {target.name} there"
            )
        if result.shape != expected.shape:
            shapes = f"{tuple(result.shape)}, expected is {tuple(expected.shape)}"
            raise VolpipeError(f"net {self.package.name} makes {shapes} in its own test")
        is_discrete = not expected.is_floating_point()
        tolerances = self.package.tolerance
        tolerance = tolerances.get(self.kind, tolerances.get(""))
        return compare(result.double().numpy(), expected.double().numpy(), tolerance, is_discrete)

    def check(self) -> SelfTestResult:
        """Return the result of the package's own test.

        Raises:
            VolpipeError: it is not reproduced.
        """
        outcome = self.test()
        if not outcome.is_reproduced:
            raise VolpipeError(
                f"package {self.package.name} does not reproduce its own test: with its {self.kind} weights the "
                f"largest difference is {outcome.largest:.3g} where values reach {outcome.expected:.3g}, and "
                f"{outcome.mismatched:,.0f} values of a million differ; take another copy, or other weights by "
                "net.options={weights=…}"
            )
        return outcome


class _BareGraph(PackageNet):
    """A package's bare graph of ONNX, which has no gradient, but random weights on demand."""

    draws_weights = True

    def with_random_weights(self, *, positive: bool) -> PackageNet:  # type: ignore[override]
        """Return this net with random weights."""
        assert isinstance(self._inner, OnnxGraph)
        return PackageNet(self.package, self.kind, self._inner.with_random_weights(positive=positive), is_bare=True)


def compare(result: np.ndarray, expected: np.ndarray, tolerance: Tolerance | None, is_discrete: bool) -> SelfTestResult:
    """Return the differences of `result` and `expected`, both float64 and of one shape."""
    difference = np.abs(result - expected)
    largest = float(np.abs(expected).max(initial=0))
    if tolerance is None:
        tolerance = Tolerance(0, 0, DISCRETE_PER_MILLION) if is_discrete else Tolerance(0, RELATIVE * largest, 0)
    wrong = ~(difference <= tolerance.absolute + tolerance.relative * np.abs(expected))  # NaN is wrong
    mismatched = 1e6 * float(wrong.mean()) if wrong.size else 0.0
    return SelfTestResult(float(difference.max(initial=0)), largest, mismatched, mismatched <= tolerance.per_million)


def _sizes_of(inner: nn.Module | OnnxGraph, axes: str) -> Triple:
    """Return the sizes (z, y, x) that are fixed in a graph; 0 along an axis of any size, and for modules."""
    if not isinstance(inner, OnnxGraph):
        return 0, 0, 0
    shape = inner.input.shape
    if len(shape) != len(axes):
        raise VolpipeError(f"net {inner.path.name} has {len(shape)} axes, its package says {axes}")
    known = {letter: n if isinstance(n, int) else 0 for letter, n in zip(axes, shape, strict=True)}
    return known.get("z", 0), known["y"], known["x"]


def _through(steps: Sequence[Step], data: torch.Tensor) -> torch.Tensor:
    for step in steps:
        data = step(data)
    return data


def _to_axes(data: torch.Tensor, side: TensorSpec) -> torch.Tensor:
    """Return `data` (n, c, z, y, x) with the axes of `side` alone, in its order; the others have one entry."""
    missing = [i for i, letter in enumerate(LETTERS) if letter not in side.axes]
    present = [letter for letter in LETTERS if letter in side.axes]
    squeezed = data.squeeze(missing) if missing else data
    return squeezed.permute([present.index(letter) for letter in side.axes])


def _from_axes(data: torch.Tensor, side: TensorSpec) -> torch.Tensor:
    """Return `data` with the axes of `side` as (n, c, z, y, x)."""
    ordered = data.permute([side.axes.index(letter) for letter in LETTERS if letter in side.axes])
    for i, letter in enumerate(LETTERS):
        if letter not in side.axes:
            ordered = ordered.unsqueeze(i)
    return ordered


def _tensor(package: str, side: TensorSpec) -> torch.Tensor:
    """Return the test tensor of `side`, of its axes."""
    if side.test is None:
        raise VolpipeError(f"package {package} brings no test of {side.name}, so nobody can tell whether it works")
    try:
        data = np.load(side.test, allow_pickle=False)
        tensor = torch.from_numpy(np.ascontiguousarray(data.astype(data.dtype.newbyteorder("="))))
    except Exception as error:  # whatever numpy and torch raise for another file
        raise VolpipeError(f"package {package}: {side.test.name} holds no test tensor: {error}") from error
    if tensor.ndim != len(side.axes):
        raise VolpipeError(f"package {package}: {side.test.name} has {tensor.ndim} axes, its package says {side.axes}")
    return tensor


def architecture(weights: Weights) -> Any:  # Any: JSON
    """Return the description's entry for the code of its state dict, as in format 0.5."""
    entry = weights.entry["architecture"]
    if isinstance(entry, str):  # of format 0.4: file.py:name, or module.name
        place, _, name = entry.rpartition(":") if ":" in entry else entry.rpartition(".")
        kwargs = weights.entry.get("kwargs") or {}
        source = {"source": place, "sha256": weights.entry.get("architecture_sha256")}
        return {"callable": name, "kwargs": kwargs} | (source if ":" in entry else {"import_from": place})
    return entry
