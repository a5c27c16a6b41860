"""Nets in bioimage.io packages, as modules of our axes; and the test that a package brings, which must reproduce.

Not here: reading a package (packages), or what its steps do (processing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from volpipe.errors import VolpipeError
from volpipe.grid import align_up
from volpipe.onnx_nets import OnnxGraph, check_size, load_graph
from volpipe.packages import Package, Side, Tolerance, Weights
from volpipe.processing import LETTERS, STATISTICS, Step, for_runs, intensity_of

Triple = tuple[int, int, int]
RELATIVE = 1e-4  # of the largest value that is expected, where a package says nothing of itself
DISCRETE_PER_MILLION = 1000.0  # of values that may differ where they are integers; as bioimageio.spec has it
WINDOW, FLAT_WINDOW = (64, 64, 64), (16, 256, 256)


@dataclass(frozen=True)
class Outcome:
    """How a package's own test went.

    Attributes:
        largest: difference from what is expected.
        expected: the largest value of that, by its size.
        mismatched: values of a million that differ by more than is tolerated.
        is_reproduced: whether that are few enough.
    """

    largest: float
    expected: float
    mismatched: float
    is_reproduced: bool


class PackageNet(nn.Module):
    """The net of a package, (n, c, z, y, x) -> (n, C, z', y', x'), with its fixed steps before and after it.

    A net without z goes over slices. The volume must be normalised as `normalise` says.
    """

    def __init__(self, package: Package, kind: str, inner: nn.Module | OnnxGraph, *, is_bare: bool = False) -> None:
        super().__init__()
        self.package, self.kind = package, kind
        self._inner = inner
        self.is_strict = not is_bare  # as to sizes of windows, which its package may say more of than its net needs
        self.normalise, before = for_runs(package.input.steps, package.input.channels)
        self._before: Sequence[Step] = () if is_bare else before
        self._after: Sequence[Step] = () if is_bare else package.output.steps
        _check_output(package.output.steps)
        self.in_channels, self.out_channels = package.input.channels, package.output.channels
        self.scale, self.intensity = package.scale, intensity_of(package.output.steps)
        if package.halo is not None:
            self.halo = package.halo
        self.is_flat = "z" not in package.input.axes
        sizes = list(zip(FLAT_WINDOW if self.is_flat else WINDOW, package.least, package.step, strict=True))
        wanted = [least + align_up(max(0, size - least), step) if step else least for size, least, step in sizes]
        only = [not is_bare and (not step or least % step != 0) for _, least, step in sizes]
        own = _sizes_of(inner, package.input.axes)
        self.window = _triple([n or size for n, size in zip(own, wanted, strict=True)])
        self.fixed = _triple(
            [n or (size if is_only else 0) for n, size, is_only in zip(own, wanted, only, strict=True)]
        )
        if not any(self.fixed):
            self.stride = package.step
        if isinstance(inner, OnnxGraph):
            self.varying = inner.varying
            self.num_parameters = inner.graph.num_parameters

    @cached_property
    def bare(self) -> nn.Module:
        """The net without its steps, which hide how far it sees; a graph's can be with_random_weights."""
        if isinstance(self._inner, OnnxGraph):
            return _BareGraph(self.package, self.kind, self._inner, is_bare=True)
        return PackageNet(self.package, self.kind, self._inner, is_bare=True)

    @property
    def notes(self) -> list[str]:
        """What a user should know of how the package is served."""
        steps = [step.kind for step in self.package.input.steps if step.kind in STATISTICS]
        return [
            f"{kind} takes the statistics of the whole volume (normalise.method={self.normalise.method}), not of each "
            "window, which would make seams"
            for kind in steps
        ]

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        if self.is_strict and windows.device.type != "meta":
            sizes = tuple(windows.shape[2:])
            check_size(self.package.name, self.fixed, sizes)
            if any(n < least for n, least in zip(sizes, self.package.least, strict=True)):
                raise VolpipeError(
                    f"net {self.package.name} takes windows of {self.package.least} voxels or more, not {sizes}; "
                    "set windows.shape to so many"
                )
        return _through(self._after, self._run(_through(self._before, windows))).float()

    def _run(self, data: torch.Tensor) -> torch.Tensor:
        """Return what the net alone makes of `data` (n, c, z, y, x)."""
        given, made = self.package.input, self.package.output
        flat = "z" not in given.axes
        n, c, z, y, x = data.shape
        if flat:
            data = data.movedim(2, 1).reshape(n * z, c, 1, y, x)
        whole = "b" in given.axes and not flat and self._takes_batches
        parts = [data] if whole else torch.split(data, 1)
        out = torch.cat([_from_axes(self._call(_to_axes(part, given)), made) for part in parts])
        return out.reshape(n, z, out.shape[1], *out.shape[3:]).movedim(1, 2) if flat else out

    @property
    def _takes_batches(self) -> bool:
        if not isinstance(self._inner, OnnxGraph):
            return True
        return not isinstance(self._inner.input.shape[self.package.input.axes.index("b")], int)

    def _call(self, data: torch.Tensor) -> torch.Tensor:
        out: Any = self._inner(data)  # Any: whatever the net's code returns
        if isinstance(out, tuple | list) and len(out) == 1:
            out = out[0]
        if not isinstance(out, torch.Tensor) or out.ndim != len(self.package.output.axes):
            what = f"{out.ndim} axes" if isinstance(out, torch.Tensor) else type(out).__name__
            raise VolpipeError(f"net {self.package.name} makes {what}, its package says {self.package.output.axes}")
        return out

    def test(self) -> Outcome:
        """Return how the package's own test goes; with statistics of the test's own tensor, as its maker took them.

        Raises:
            VolpipeError: it brings none, or the net fails over it.
        """
        given, made = self.package.input, self.package.output
        seen, due = _tensor(self.package.name, given), _tensor(self.package.name, made)
        try:
            with torch.inference_mode():
                out = _through(made.steps, self._run(_through(given.steps, _from_axes(seen, given).float())))
        except VolpipeError:
            raise
        except Exception as error:  # whatever the net's code makes of it
            raise VolpipeError(f"net {self.package.name} fails over its own test: {error}") from error
        found = _to_axes(out, made)
        if found.shape != due.shape:
            shapes = f"{tuple(found.shape)}, expected is {tuple(due.shape)}"
            raise VolpipeError(f"net {self.package.name} makes {shapes} in its own test")
        is_discrete = not due.is_floating_point()
        said = self.package.tolerance
        return compare(found.double().numpy(), due.double().numpy(), said.get(self.kind, said.get("")), is_discrete)

    def check(self) -> Outcome:
        """Return how the package's own test goes.

        Raises:
            VolpipeError: it does not reproduce.
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
    """A package's graph without steps, which has no gradient and is measured by other means."""

    def with_random_weights(self, *, positive: bool) -> PackageNet:
        """Return this net with other weights, as those of its graph."""
        assert isinstance(self._inner, OnnxGraph)
        return PackageNet(self.package, self.kind, self._inner.with_random_weights(positive=positive), is_bare=True)


def compare(found: np.ndarray, due: np.ndarray, tolerance: Tolerance | None, is_discrete: bool) -> Outcome:
    """Return how `found` differs from what is `due`, both float64 and of one shape."""
    difference = np.abs(found - due)
    largest_due = float(np.abs(due).max(initial=0))
    if tolerance is None:
        tolerance = Tolerance(0, 0, DISCRETE_PER_MILLION) if is_discrete else Tolerance(0, RELATIVE * largest_due, 0)
    wrong = ~(difference <= tolerance.absolute + tolerance.relative * np.abs(due))  # NaN is wrong
    mismatched = 1e6 * float(wrong.mean()) if wrong.size else 0.0
    return Outcome(float(difference.max(initial=0)), largest_due, mismatched, mismatched <= tolerance.per_million)


def load_package(
    package: Package, wanted: str | None, trusted: bool, load: Callable[[Weights], nn.Module]
) -> PackageNet:
    """Return the net of `package`.

    Args:
        wanted: the format of its weights; None for the first that there is of those that are served.
        trusted: whether weights that are code may be loaded.
        load: returns the module of weights that are code.
    """
    kind = wanted or next(iter(package.weights))
    if kind not in package.weights:
        raise VolpipeError(f"package {package.name} has no {kind} weights; it has {', '.join(package.weights)}")
    weights = package.weights[kind]
    try:
        weights.file  # noqa: B018  # which is refused where it is missing, elsewhere or another
    except VolpipeError as error:
        raise VolpipeError(f"package {package.name}: {error}") from error
    if kind == "onnx":
        return PackageNet(package, kind, load_graph(weights.file))
    if not trusted:
        raise VolpipeError(
            f"package {package.name} has its net as {kind}, which is code and runs with your rights; add --trust-model "
            "(net.trust_model = true) if you trust its maker"
        )
    return PackageNet(package, kind, load(weights).eval())


def _sizes_of(inner: nn.Module | OnnxGraph, axes: str) -> Triple:
    """Return the only sizes (z, y, x) that a graph takes, 0 where it takes others, and for other nets."""
    if not isinstance(inner, OnnxGraph):
        return 0, 0, 0
    shape = inner.input.shape
    if len(shape) != len(axes):
        raise VolpipeError(f"net {inner.path.name} has {len(shape)} axes, its package says {axes}")
    known = {letter: n if isinstance(n, int) else 0 for letter, n in zip(axes, shape, strict=True)}
    return known.get("z", 0), known["y"], known["x"]


def _check_output(steps: Sequence[Step]) -> None:
    for step in steps:
        if step.kind in STATISTICS:
            raise VolpipeError(
                f"{step.kind} of the output rests on statistics that nobody knows before the run; it is not served"
            )


def _through(steps: Sequence[Step], data: torch.Tensor) -> torch.Tensor:
    for step in steps:
        data = step(data)
    return data


def _to_axes(data: torch.Tensor, side: Side) -> torch.Tensor:
    """Return `data` (n, c, z, y, x) with the axes of `side`, in its order; those that it lacks have one entry."""
    missing = [i for i, letter in enumerate(LETTERS) if letter not in side.axes]
    present = [letter for letter in LETTERS if letter in side.axes]
    squeezed = data.squeeze(missing) if missing else data
    return squeezed.permute([present.index(letter) for letter in side.axes])


def _from_axes(data: torch.Tensor, side: Side) -> torch.Tensor:
    """Return `data` with the axes of `side` as (n, c, z, y, x)."""
    ordered = data.permute([side.axes.index(letter) for letter in LETTERS if letter in side.axes])
    for i, letter in enumerate(LETTERS):
        if letter not in side.axes:
            ordered = ordered.unsqueeze(i)
    return ordered


def _tensor(package: str, side: Side) -> torch.Tensor:
    """Return the test tensor of `side`, of its axes."""
    if side.test is None:
        raise VolpipeError(f"package {package} brings no test of {side.name}, so nobody can tell whether it works")
    try:
        data = np.load(side.test, allow_pickle=False)
        tensor = torch.from_numpy(np.ascontiguousarray(data.astype(data.dtype.newbyteorder("="))))
    except Exception as error:  # whatever numpy and torch make of a file that is something else
        raise VolpipeError(f"package {package}: {side.test.name} holds no test tensor: {error}") from error
    if tensor.ndim != len(side.axes):
        raise VolpipeError(f"package {package}: {side.test.name} has {tensor.ndim} axes, its package says {side.axes}")
    return tensor


def _triple(values: Sequence[int]) -> Triple:
    z, y, x = values
    return z, y, x


def architecture(weights: Weights) -> Any:  # Any: JSON
    """Return what a package says of the code that its state dict belongs to, in the words of format 0.5."""
    said = weights.said["architecture"]
    if isinstance(said, str):  # of format 0.4: file.py:name, or module.name
        place, _, name = said.rpartition(":") if ":" in said else said.rpartition(".")
        kwargs = weights.said.get("kwargs") or {}
        known = {"source": place, "sha256": weights.said.get("architecture_sha256")}
        return {"callable": name, "kwargs": kwargs} | (known if ":" in said else {"import_from": place})
    return said
