"""A user's net as one of volumes: slices, planes, neighbouring slices as channels, and one output of several.

Not here: loading a net (load, files), or its sizes (window_sizes). Nothing else in volpipe calls nets of slices, or
nets that return something else than one tensor.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple, triple
from volpipe.nets.declared import ServedNet, bare_net, declared, served
from volpipe.nets.net_geometry import Geometry, NetArray, OutputError, UnmeasurableError, is_shortage
from volpipe.recipes.inference import NetChoice
from volpipe.resolve import nearest

ALL = "all"
DEEPEST = 8  # tuples and dictionaries within each other, searched for tensors
# Orders of z, y, x that bring the axis across a plane to the front, by plane.
ORDERS = {"yx": (0, 1, 2), "zx": (1, 0, 2), "zy": (2, 0, 1)}
TRIED_SIZES = (16, 32, 64)  # of windows along each axis, to distinguish nets of slices from nets of volumes
GRADIENTS = re.compile("grad|inference (mode|tensor)", re.IGNORECASE)  # in what torch says where there are none

_with_gradients = WeakSet[nn.Module]()


class Adapter(ServedNet):
    """A user's net with the interface of ours: (n, c, z, y, x) -> one tensor (n, C, z', y', x').

    The net gets a copy of its input, which it may change in place. The names of its weights are those of the net.

    Attributes:
        net: as its maker wrote it.
        uneven: returns the geometry of a net whose output may lack more behind than before, which is then cut to lack
            as much before; None while that is measured.
    """

    def __init__(self, net: nn.Module, choice: NetChoice, *, is_flat: bool) -> None:
        super().__init__()
        self.net = net
        self.choice = choice
        self.declaration = declared(net)
        self.is_package = isinstance(net, ServedNet) and net.is_package
        self.taken = None if self.is_package else choice.output  # a package has taken it
        self.uneven: Callable[[], Geometry] | None = None
        self.one_by_one = self.declaration.one_by_one
        self.planes = (choice.plane or ("yx",)) if is_flat else ()
        self.context = choice.context or 0
        if not is_flat and (choice.plane or choice.context):
            key = "plane" if choice.plane else "context"
            raise VolpipeError(
                f"net {choice.name} is a net of volumes (n, c, z, y, x), and net.{key} is for nets of slices "
                f"(n, c, y, x); leave net.{key} out"
            )

    @property
    def draws_weights(self) -> bool:  # type: ignore[override]  # that of its net
        return served(self.net).draws_weights

    def with_random_weights(self, *, positive: bool) -> Adapter:
        assert isinstance(self.net, ServedNet)
        return self._adapting(self.net.with_random_weights(positive=positive))

    def _adapting(self, net: nn.Module) -> Adapter:
        return Adapter(net, self.choice, is_flat=bool(self.planes))

    @property
    def bare(self) -> Adapter:
        """This net without the pre- and postprocessing of a package."""
        inner = bare_net(self.net)
        return self if inner is self.net else self._adapting(inner)

    @property
    def slice_axis(self) -> int | None:  # type: ignore[override]  # follows from the planes
        """The axis across the one plane of slices; None of volumes and of several planes."""
        return ORDERS[self.planes[0]][0] if len(self.planes) == 1 else None

    @property
    def fixed(self) -> Triple:
        """The only sizes (z, y, x) of windows that the net takes; 0 where it takes others."""
        return self.in_volume(self.declaration.fixed or (0, 0, 0), 0)

    def in_volume(self, sizes: Sequence[int], across: int) -> Triple:
        """Return sizes along the net's own axes as z, y, x; of two sizes, `across` is the one across slices."""
        own = (across, *sizes) if len(sizes) == 2 else tuple(sizes)
        result = [0, 0, 0]
        for plane in self.planes or ("yx",):
            for size, axis in zip(own, ORDERS[plane], strict=True):
                result[axis] = max(result[axis], size)
        return triple(result)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # Any: as torch has it
        return self.net.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:  # Any: as torch has it
        return self.net.load_state_dict(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:  # Any: as torch has it
        if self.planes and kwargs.get("memory_format") is torch.channels_last_3d:
            kwargs["memory_format"] = torch.channels_last
        return super().to(*args, **kwargs)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        if self.planes:
            outs = [self._over(windows, plane) for plane in self.planes]
        else:
            outs = [pick(self._call_net(windows), windows.shape, self.taken)]
        out = self._evened(outs[0] if len(outs) == 1 else _mean_of_planes(outs, windows.shape), windows.shape)
        if not torch.is_grad_enabled():  # of a net whose code takes gradients
            out = out.detach()
        # classes and thresholds are numbers as others
        return out.float() if windows.is_floating_point() and not out.is_floating_point() else out

    def _evened(self, out: torch.Tensor, window: Sequence[int]) -> torch.Tensor:
        """Return `out` cut so that it lacks as many voxels at the low faces of its window as at the high ones."""
        if self.uneven is None or not any(m % n for n, m in zip(window[2:], out.shape[2:], strict=True)):
            return out
        try:
            geometry = self.uneven()
        except UnmeasurableError:  # then its output is compared with what is declared
            return out
        for axis, (uneven, ratio) in enumerate(zip(geometry.uneven, geometry.ratios, strict=True), 2):
            first = ratio.out(uneven)
            out = out.narrow(axis, first, out.shape[axis] - first)
        return out

    def _over(self, windows: torch.Tensor, plane: str) -> torch.Tensor:
        """Return the output (n, C, z', y', x') of slices in `plane`."""
        order = ORDERS[plane]
        across = windows.permute(0, 1, *(2 + axis for axis in order))  # (n, c, slices, rows, columns)
        values = self._of_slices(_with_neighbours(across, self.context))
        out = pick(values, across.shape, self.taken)
        return out.permute(0, 1, *(2 + order.index(axis) for axis in range(3)))

    def _of_slices(self, slices: torch.Tensor) -> Any:  # Any: whatever the net returns, with its tensors of five axes
        """Return what the net returns for (n, c, slices, rows, columns): all slices in one call."""
        if self.is_package:  # whose axes are as its description has them
            return self.net(slices.clone())
        n, c, s, rows, columns = slices.shape
        values = outputs_of(self._call_net(slices.movedim(2, 1).reshape(n * s, c, rows, columns)))
        return {
            name: out.reshape(n, s, *out.shape[1:]).movedim(1, 2) if out.ndim == 4 and len(out) == n * s else out
            for name, out in with_channels(values, (n * s, c, rows, columns)).items()
        }

    def _call_net(self, data: torch.Tensor) -> Any:  # Any: whatever the net returns
        """Return what the net returns for a copy of `data`, which it may change."""
        if not self.one_by_one or len(data) == 1:
            return called(self.net, data)
        parts = [outputs_of(called(self.net, part)) for part in torch.split(data, 1)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def described_outputs(self, windows: torch.Tensor) -> tuple[str, ...]:
        """Return the outputs for `windows` by name and shape (C, z', y', x'); none of a net with a single one."""
        values = self._outputs_by_name(windows)
        return tuple(_names_and_shapes(values)) if len(values) > 1 else ()

    def arrays(self, windows: torch.Tensor) -> tuple[NetArray, ...]:
        """Return the outputs for `windows` that are joined in one tensor; none where one output is taken."""
        if self.taken != ALL:
            return ()
        arrays = joined_arrays(self._outputs_by_name(windows))
        if len(self.planes) > 1 and any(max(array.coarser) > 1 for array in arrays):
            raise OutputError("outputs of slices have different grids in several planes", "set net.plane to one plane")
        return arrays if len(arrays) > 1 else ()

    def _outputs_by_name(self, windows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs (n, C, z', y', x') for `windows` by name, of slices in the first of the planes."""
        with torch.inference_mode():
            if not self.planes:
                return with_channels(outputs_of(self._call_net(windows)), windows.shape)
            order = ORDERS[self.planes[0]]
            across = windows.permute(0, 1, *(2 + axis for axis in order))
            values = outputs_of(self._of_slices(_with_neighbours(across, self.context)))
            back = (0, 1, *(2 + order.index(axis) for axis in range(3)))
            return {name: out.permute(back) if out.ndim == len(back) else out for name, out in values.items()}


def called(net: nn.Module, data: torch.Tensor) -> Any:  # Any: whatever the net returns
    """Return what `net` returns for a copy of `data`, which it may change; with gradients where its code takes some.

    Without them, as nets run, such code fails.
    """
    if net not in _with_gradients:
        try:
            return net(data.clone())
        except RuntimeError as error:
            if not GRADIENTS.search(str(error)):
                raise
    with torch.inference_mode(False), torch.enable_grad():
        out = net(data.clone())
    _with_gradients.add(net)
    return out


def takes_slices(net: nn.Module, context: int, *, is_asked: bool) -> bool:
    """Return whether a net takes slices (n, c, y, x): by what it says, by its weights, or by trying volumes first."""
    if (is_flat := declared(net).slices) is not None:
        return is_flat
    ranks = {tensor.ndim for tensor in net.state_dict().values() if isinstance(tensor, torch.Tensor)}
    if 5 in ranks:
        return False
    channels = [n * (2 * context + 1) for n in possible_channels(net, context)]
    if _takes_any(net, channels, 3):
        return False
    return 4 in ranks or is_asked or _takes_any(net, channels, 2)


def takes_single(net: nn.Module) -> bool:
    """Return whether a net takes windows of float32, of volumes or of slices, with the numbers that it has."""
    channels = possible_channels(net)
    return _takes_any(net, channels, 3) or _takes_any(net, channels, 2)


def _takes_any(net: nn.Module, channels: Sequence[int], num_axes: int) -> bool:
    for size in TRIED_SIZES:
        for number in channels:
            try:
                with torch.inference_mode():
                    called(net, torch.zeros((1, number, *(size,) * num_axes)))
                return True
            except (Exception, SystemExit) as error:  # whatever the net's code raises for such a window
                if is_shortage(error):  # which says nothing of its axes
                    raise
    return False


def possible_channels(net: nn.Module, context: int = 0) -> list[int]:
    """Return the numbers of a volume's channels that a net may take, the likely one first.

    Args:
        context: neighbouring slices on each side, which are channels of the net, not of the volume.

    Raises:
        VolpipeError: it takes no whole number of slices.
    """
    own = declared(net).in_channels
    first = own if own is not None else first_channels(net)
    slices = 2 * context + 1
    if first is not None and first % slices and own is not None:
        raise VolpipeError(
            f"net.context={context} gives {slices} slices as channels, and the net takes {first} channels; set "
            f"net.context to {(first - 1) // 2}"
        )
    if own is not None:
        return [own // slices]
    return list(dict.fromkeys([1, *([first // slices] if first and first >= slices else [])]))


def first_channels(net: nn.Module) -> int | None:
    """Return the number of channels that the first convolution of a net takes; None without one."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            return layer.in_channels
    weights = (t for t in net.state_dict().values() if isinstance(t, torch.Tensor) and t.ndim in (4, 5))
    first = next(weights, None)
    return None if first is None else int(first.shape[1])


def _with_neighbours(slices: torch.Tensor, context: int) -> torch.Tensor:
    """Return (n, c, s, y, x) with `context` slices before and after each as channels; the last ones repeat at faces."""
    if not context:
        return slices
    count = slices.shape[2]
    places = torch.arange(-context, count + context, device=slices.device).clamp(0, count - 1)
    around = slices.index_select(2, places)
    return torch.cat([around.narrow(2, offset, count) for offset in range(2 * context + 1)], 1)


def _mean_of_planes(outs: Sequence[torch.Tensor], window: Sequence[int]) -> torch.Tensor:
    """Return the mean of the outputs of several planes, over the voxels that all of them have."""
    least = [min(out.shape[axis] for out in outs) for axis in range(2, 5)]
    if any(out.shape[axis] > window[axis] for out in outs for axis in range(2, 5)):
        raise OutputError(
            "slices of several planes give finer outputs along different axes", "set net.plane to one plane"
        )
    total: torch.Tensor | None = None
    for out in outs:
        for axis, size in enumerate(least, 2):
            out = out.narrow(axis, (out.shape[axis] - size) // 2, size)
        total = out if total is None else total + out
    assert total is not None
    return total / len(outs)


def outputs_of(value: object) -> dict[str, torch.Tensor]:
    """Return the tensors in what a net returned, by name; they may lie in tuples, dictionaries and classes of data.

    Of another object, those that are its attributes.
    """
    return dict(_tensors_in(value, "", 0)) or dict(_tensors_in(getattr(value, "__dict__", None), "", DEEPEST - 1))


def _tensors_in(value: object, place: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place or "0", value
    elif depth < DEEPEST:
        for name, entry in _items_of(value):
            yield from _tensors_in(entry, f"{place}.{name}" if place else str(name), depth + 1)


def _items_of(value: object) -> list[tuple[object, object]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def _names_and_shapes(values: Mapping[str, torch.Tensor]) -> list[str]:
    return [f"{name} {tuple(out.shape[1:])}" for name, out in values.items()]


def pick(value: object, window: Sequence[int], output: int | str | None) -> torch.Tensor:
    """Return one tensor of what a net returned for a window of the shape `window`.

    Args:
        output: its number or name, "all" for their channels together on the finest grid, None for the only one, or the
            only one on the grid of the input.

    Raises:
        OutputError: there is none such, or it is not known which.
    """
    values = outputs_of(value)
    if not values:
        raise OutputError(
            f"it returns {type(value).__name__} without a tensor for a window {tuple(window)}",
            "let its forward return one",
        )
    values = with_channels(values, window)
    listed = ", ".join(_names_and_shapes(values))
    if output == ALL:
        return joined(values)
    if output is not None:
        names = list(values)
        name = names[output] if isinstance(output, int) and -1 < output < len(names) else str(output)
        if name not in values:
            hint = nearest(name, names)
            raise OutputError(f"it has no output {output!r}{hint}; it gives {listed}", "set net.output to one of them")
        return values[name]
    images = [out for out in values.values() if out.ndim == len(window)] if len(values) > 1 else list(values.values())
    alike = images if len(images) == 1 else [out for out in images if tuple(out.shape[2:]) == tuple(window[2:])]
    if len(alike) != 1:
        raise OutputError(
            f"it gives {len(values)} outputs for a window {tuple(window[1:])}: {listed}",
            f"name the one to take, such as net.output={next(iter(values))}",
        )
    return alike[0]


def with_channels(values: Mapping[str, torch.Tensor], window: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return outputs with an axis of channels, and one of windows, where their net left these out.

    Of several outputs, others than those on the grid of the window may mean something else, and stay.

    Args:
        window: the shape of what the net got, (n, c, z, y, x) or (n, c, y, x).

    Raises:
        OutputError: one has no real numbers, or not all of them.
    """
    n, grid, num_axes, whole = window[0], tuple(window[2:]), len(window), {}
    for name, out in values.items():
        if out.is_complex() or out.layout is not torch.strided or out.is_quantized:
            kind = str(out.dtype if out.layout is torch.strided else out.layout).removeprefix("torch.")
            raise OutputError(
                f"for a window {tuple(window)} it gives {kind} numbers, {tuple(out.shape)}",
                "let its forward return a dense tensor of real numbers",
            )
        is_on_grid = tuple(out.shape[-len(grid) :]) == grid
        if out.ndim == num_axes - 1 and (len(values) == 1 or is_on_grid):
            out = out.unsqueeze(1) if len(out) == n else out[None] if n == 1 else out
        elif out.ndim == num_axes - 2 and is_on_grid and n == 1:
            out = out[None, None]
        whole[name] = out
    return whole


def joined_arrays(values: Mapping[str, torch.Tensor]) -> tuple[NetArray, ...]:
    """Return how the outputs `values`, (n, C, z, y, x) by name, lie in the tensor that joins them.

    Raises:
        OutputError: one is no image, two are named alike, or their grids have no common voxels.
    """
    listed = ", ".join(_names_and_shapes(values))
    if any(out.ndim != 5 for out in values.values()):
        raise OutputError(f"not all of its outputs are images: {listed}", "name one of them with net.output")
    finest = [max(out.shape[axis] for out in values.values()) for axis in range(2, 5)]
    arrays, first = list[NetArray](), 0
    for name, out in values.items():
        coarser = triple(max(1, round(n / m)) for n, m in zip(finest, out.shape[2:], strict=True))
        arrays.append(NetArray(name, first, first + out.shape[1], coarser))
        first += out.shape[1]
    if len({array.name for array in arrays}) < len(arrays):
        raise OutputError(f"arrays of its outputs would have the same names: {listed}", "name one with net.output")
    for axis in range(3):
        sizes = [out.shape[2 + axis] for out in values.values()]
        least = min(size * array.coarser[axis] for size, array in zip(sizes, arrays, strict=True))
        if any(
            (n * each.coarser[axis] - least) % (2 * each.coarser[axis]) for n, each in zip(sizes, arrays, strict=True)
        ):
            raise OutputError(
                f"its outputs have different grids: {listed}",
                "net.output=all is for outputs of whole voxels of the finest one; name one of them",
            )
    return tuple(arrays)


def joined(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the outputs `values` in one tensor, on the finest of their grids, over the voxels common to all."""
    arrays, parts = joined_arrays(values), list[torch.Tensor]()
    least = [
        min(out.shape[2 + axis] * array.coarser[axis] for out, array in zip(values.values(), arrays, strict=True))
        for axis in range(3)
    ]
    for array, out in zip(arrays, values.values(), strict=True):
        for axis, (size, coarser) in enumerate(zip(least, array.coarser, strict=True), 2):
            out = out.narrow(axis, (out.shape[axis] - size // coarser) // 2, size // coarser)
            out = out if coarser == 1 else out.repeat_interleave(coarser, axis)
        parts.append(out)
    return torch.cat(parts, 1)
