"""What a net declares for volpipe, in its attribute `volpipe`; and modules of ours around nets.

Not here: what is measured (receptive_field), or what a recipe says of its net (load). Whatever else a net has is its
own: a `window` of its attention, a `scale` of its values, a `margin` of its loss.

    net.volpipe = {"halo": (22, 22, 22), "intensity": "same"}
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    StrictBool,
    ValidationError,
)
from torch import nn

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple, triple
from volpipe.nets.net_geometry import BY_SPLINES, Interpolation, LabelRegion
from volpipe.recipes.complaints import complain
from volpipe.recipes.inference import Normalise, Output, Windows

NAME = "volpipe"  # of the attribute


def _as_whole_number(value: object) -> object:
    """Return a whole number of any library as Python's; anything else as it is, to be refused."""
    if isinstance(value, bool | str | float):
        raise ValueError(f"{value!r} is no whole number")
    return operator.index(value) if hasattr(value, "__index__") else value


def _as_tuple(value: object) -> object:
    """Return the entries of a sequence of any library as a tuple."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else value


Count = Annotated[PositiveInt, BeforeValidator(_as_whole_number)]
Voxels = Annotated[NonNegativeInt, BeforeValidator(_as_whole_number)]
Sizes = Annotated[tuple[Count, ...], Field(min_length=2, max_length=3), BeforeValidator(_as_tuple)]
Sides = Annotated[tuple[Voxels, ...], Field(min_length=2, max_length=3), BeforeValidator(_as_tuple)]
Lengths = Annotated[tuple[NonNegativeFloat, ...], Field(min_length=3, max_length=3), BeforeValidator(_as_tuple)]


class Declaration(BaseModel):
    """What a net declares; sizes in input voxels (z, y, x), or (y, x) of a net of slices. All else is measured.

    Attributes:
        slices: whether it takes slices (n, c, y, x), not volumes.
        one_by_one: whether it takes one window at a time.
        logits: the name of the net's attribute that, true, leaves its last sigmoid to the loss, while it learns.
        others: as in `NetFacts`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    in_channels: Count | None = None
    out_channels: Count | None = None
    scale: Sizes | None = None
    stride: Sizes | None = None
    halo: Sides | None = None
    window: Sizes | None = None
    intensity: Literal["same", "unit", "raw"] | None = None
    tile_invariant: StrictBool | None = None
    fixed: Sides | None = None
    normalise: Normalise | None = None
    integers: StrictBool | None = None
    margin: Sides | None = None
    remainder: Sides | None = None
    shrink: Sizes | None = None
    slices: StrictBool | None = None
    one_by_one: StrictBool = False
    logits: str | None = None
    windows: Windows | None = None
    output: Output | None = None
    padding: Annotated[tuple[float, ...], BeforeValidator(_as_tuple)] | None = None
    spacing: Lengths | None = None
    interpolation: Interpolation | None = None
    crops_zeros: StrictBool | None = None
    regions: tuple[LabelRegion, ...] | None = None
    least: Sizes | None = None
    has_open_axes: StrictBool | None = None
    axcodes: str | None = None

    def of(self, keys: Iterable[str]) -> dict[str, Any]:  # Any: of the keys' types
        """Return those of `keys` that are declared."""
        return {key: value for key in keys if (value := getattr(self, key, None)) is not None}


NOTHING = Declaration()


def declared(net: nn.Module, name: str = "") -> Declaration:
    """Return what `net` declares, which messages call `name`.

    Raises:
        VolpipeError: its attribute is no dictionary, or has an unknown key or a wrong value.
    """
    if isinstance(net, ServedNet):
        return net.declaration
    value = getattr(net, NAME, NOTHING)
    if isinstance(value, Declaration):
        return value
    where = f"net {name or type(net).__name__}, in its attribute {NAME}"
    if not isinstance(value, Mapping):
        raise VolpipeError(
            f"{where}, has {type(value).__name__}; give a dictionary of what it declares, such as "
            f"{NAME} = {{'halo': (8, 8, 8)}}, or call it otherwise"
        )
    tree = {str(key): entry for key, entry in value.items()}
    try:
        declaration = Declaration.model_validate(tree)
        if declaration.spacing is None or declaration.interpolation is not None:
            return declaration
        return declaration.model_copy(update={"interpolation": BY_SPLINES})
    except ValidationError as error:
        raise VolpipeError(f"{complain(error, Declaration, tree, where)}; correct it there") from error


class ServedNet(nn.Module):
    """A net in a module of volpipe, with its facts as attributes; a user's net may have attributes of the same names.

    Attributes:
        declaration: what its file or its maker says of it.
        planes: that it is run over; none of a net of volumes.
        context: neighbouring slices on each side, as channels.
        is_package: whether its axes are as a package describes them.
        varying: parts that look at the whole window; None where that is to be looked for.
        num_numbers: in its tensors, where they are no parameters of the module.
        draws_weights: whether `with_random_weights` gives one with others.
        slice_axis: the axis across the slices that it takes one by one; None of a net of volumes or several planes.
    """

    declaration: Declaration = NOTHING
    planes: tuple[str, ...] = ()
    context: int = 0
    is_package: bool = False
    varying: Sequence[str] | None = None
    num_numbers: int | None = None
    draws_weights: bool = False
    slice_axis: int | None = None

    @property
    def fixed(self) -> Triple:
        """The only sizes (z, y, x) of windows that the net takes; 0 where it takes others."""
        return triple(self.declaration.fixed or (0, 0, 0))

    @property
    def bare(self) -> nn.Module:
        """This net without its pre- and postprocessing."""
        return self

    def with_random_weights(self, *, positive: bool) -> Self:
        """Return this net with random weights."""
        raise NotImplementedError


PLAIN = ServedNet()  # a net of volumes with no context, whose weights are its parameters


def bare_net(net: nn.Module) -> nn.Module:
    """Return the bare network of a package, without its pre- and postprocessing; other nets as they are."""
    return net.bare if isinstance(net, ServedNet) else net


def served(net: nn.Module) -> ServedNet:
    """Return `net` if it is in a module of ours, else a plain one, whose planes, context and weights are as of it."""
    return net if isinstance(net, ServedNet) else PLAIN


def only_sizes_of(net: nn.Module) -> Triple:
    """Return the only sizes (z, y, x) of windows that `net` takes; 0 along an axis where it takes others."""
    return net.fixed if isinstance(net, ServedNet) else triple(declared(net).fixed or (0, 0, 0))
