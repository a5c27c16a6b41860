"""A user's function on arrays in the place of a net: what it gives, and whether the halo that it declares is enough.

Not here: nets of torch (load, adapter). A function gets a block with its halo, as it is stored, (z, y, x), or
(c, z, y, x) of several channels, and returns as many voxels, of as many channels as it likes; the halo is cut off
later. It may change its block. Of several volumes it gets a block each. `numpy:file.py:function` names it where others
name a net::

    |hh|bbbbbbbb|hh|  ->  |hh|rrrrrrrr|hh|      h: halo, in which the result need not be right
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from volpipe.errors import NetError, PlanError, VolpipeError
from volpipe.geometry.grid import Triple, triple
from volpipe.nets.facts import NetFacts
from volpipe.nets.files import FUNCTION, code_files, label_of
from volpipe.nets.identity import NetIdentity, samples
from volpipe.recipes.inference import NetChoice, Normalise, Output
from volpipe.resolve import describe_error, load_function
from volpipe.user_code import running

BLOCK = 64  # voxels of a block along each axis, without its halo
CORE, THIN = 8, 4  # voxels of a block that is tried, along the axis that is looked at and along the others
FURTHER = 16  # voxels by which a block is longer, in which a function sees what a shorter one hides
SAME = 1e-5  # of the largest value: more than another order of sums changes
GIVEN = {"float16": "float32", "float64": "float32", "bool": "uint8"}  # types that are stored as another
Given = Sequence[tuple[int, str]]  # channels and type of each volume
UNFIT = ("weights", "weights_key", "output", "plane", "context", "scale", "margin", "remainder", "stride", "offsets")


class ArrayFunction(nn.Module):
    """A function on arrays with the interface of a net, for blocks (n, c, z, y, x) as they are stored, on the CPU.

    `given` has the channels and the type of each volume of several; nothing of one.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: dict[str, Any],  # Any: the user's own
        given: Given = (),
    ) -> None:
        super().__init__()
        self.name, self.function, self.options, self.given = name, function, options, given

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.stack([self.of(block) for block in windows.numpy()]))

    def of(self, block: np.ndarray) -> np.ndarray:
        """Return the result (C, z, y, x) for `block` (c, z, y, x), in a type that can be stored.

        Raises:
            NetError: it is no array of as many voxels.
            VolpipeError: the function fails.
        """
        try:
            result = self.function(*self._blocks_of(block), **self.options)
        except (Exception, SystemExit) as error:  # the user's code
            raise VolpipeError(
                f"function {self.name} fails for a block of {block.shape[1:]} voxels of {block.dtype}: "
                f"{describe_error(error)}"
            ) from error
        if not isinstance(result, np.ndarray):
            raise NetError(
                f"function {self.name} returned {type(result).__name__} for a block of {block.shape[1:]} voxels; let "
                "it return an array of as many"
            )
        if result.shape[-3:] != block.shape[1:] or result.ndim not in (3, 4) or result.dtype.kind not in "biuf":
            raise NetError(
                f"function {self.name} returned {result.dtype} {result.shape} for a block of {block.shape[1:]} voxels; "
                "let it return real numbers (z, y, x), or (c, z, y, x), for as many voxels, the halo included"
            )
        stored = np.dtype(GIVEN.get(result.dtype.name, result.dtype.name))
        return np.ascontiguousarray(result if result.ndim == 4 else result[np.newaxis], stored)

    def _blocks_of(self, block: np.ndarray) -> list[np.ndarray]:
        """Return the part of `block` (c, z, y, x) of each volume in its own type; a single channel is no axis."""
        blocks, first = list[np.ndarray](), 0
        for num, dtype in self.given or ((len(block), block.dtype.name),):
            part = block[first : first + num].astype(dtype, copy=bool(self.given))
            blocks.append(part[0] if num == 1 else part)
            first += num
        return blocks


def build_function(choice: NetChoice, search_path: str, given: Given = ()) -> ArrayFunction:
    """Return the function that `choice` names; `given` is as of `ArrayFunction`.

    Raises:
        VolpipeError: there is none.
    """
    name = choice.name.removeprefix(FUNCTION)
    return ArrayFunction(name, load_function(name, search_path), choice.options, given)


def function_facts(choice: NetChoice) -> NetFacts:
    """Return the facts of a function that its recipe declares, before a volume is known.

    Raises:
        PlanError: the recipe says of it what is said of nets.
    """
    if unfit := [key for key in UNFIT if getattr(choice, key) is not None]:
        raise PlanError(f"net.{unfit[0]} is for nets, and {choice.name} is a function on arrays; leave it out")
    halo = choice.halo or (0, 0, 0)
    return NetFacts(
        label=label_of(choice.name), in_channels=1, out_channels=choice.out_channels or 1, scale=(1, 1, 1),
        stride=(1, 1, 1), halo=halo, window=triple(BLOCK + 2 * h for h in halo), intensity="raw", tile_invariant=True,
        num_parameters=0, weights_sha256=hashlib.sha256().hexdigest(), normalise=Normalise(method="none"),
    )  # fmt: skip


def tried(choice: NetChoice, facts: NetFacts, given: Given, search_path: str) -> NetFacts:
    """Return `facts` of a function with channels and type of its results, by trying it for those `given`.

    It is tried over random voxels of these types, single ones and cubes of 4, so that most of what it sees is noticed.

    Raises:
        PlanError: it fails, gives another result each time, or sees more than its halo.
    """
    several = tuple(given) if len(given) > 1 else ()
    function, trial = build_function(choice, search_path, several), RandomBlocks(given)
    try:
        block = trial.blocks(triple(2 * h + CORE for h in facts.halo))[0]
        result, again = function.of(block.copy()), function.of(block.copy())
        if result.shape != again.shape or not is_same(result, again).all():
            raise PlanError(f"function {function.name} gives another result for the same block each time; seed it")
        reach = [trial.reach(function, axis, facts.halo) for axis in range(3)]
        if any(r > h for r, h in zip(reach, facts.halo, strict=True)):
            wider = triple(2 * max(h, r) + FURTHER for h, r in zip(facts.halo, reach, strict=True))
            reach = [trial.reach(function, axis, wider) if r > facts.halo[axis] else r for axis, r in enumerate(reach)]
            raise PlanError(_too_small(function.name, facts.halo, reach, wider))
    except PlanError:
        raise
    except VolpipeError as error:
        raise PlanError(f"{error}; it was tried over random voxels, of which it must take any") from error
    are_labels = np.issubdtype(result.dtype, np.integer) and result.dtype.itemsize >= 4
    return facts.model_copy(
        update={
            "in_channels": sum(num for num, _ in given), "out_channels": len(result), "dtype": result.dtype.name,
            "output": Output(kind="labels") if are_labels else None,
            "identity": function_identity(choice, facts, given, search_path), "given": several,
        }
    )  # fmt: skip


def function_identity(choice: NetChoice, facts: NetFacts, given: Given, search_path: str) -> NetIdentity:
    """Return the identity of the function that `choice` names: files that it opens, and samples of its results."""
    name = choice.name.removeprefix(FUNCTION)
    with running(name, search_path) as opened:
        function = build_function(choice, search_path, given if len(given) > 1 else ())
        blocks = RandomBlocks(given).blocks(triple(2 * h + CORE for h in facts.halo))
        output = [value for block in blocks for value in samples(function.of(block))]
    return NetIdentity(files=opened.hashes(*code_files(choice.name, search_path)), output=tuple(output))


def _too_small(name: str, halo: Triple, reach: list[int], wider: Triple) -> str:
    """Return the refusal of a halo that is less than the `reach`, which was measured in blocks of a `wider` one."""
    axes = [axis for axis in range(3) if reach[axis] > halo[axis]]
    listed = ", ".join(f"{reach[axis]} along {'zyx'[axis]}" for axis in axes)
    sentence = f"function {name} sees voxels further away than its halo {list(halo)} (z, y, x): {listed}"
    if any(reach[axis] > wider[axis] for axis in axes):
        return f"{sentence} and perhaps all of its block, so that its result would depend on the size of blocks"
    return f"{sentence}; declare halo = {[max(h, r) for h, r in zip(halo, reach, strict=True)]} or more"


class RandomBlocks:
    """Random blocks on which a function is tried: of each volume `given`, in the type that holds all of them."""

    def __init__(self, given: Given, seed: int = 0) -> None:
        self.given = [(num, np.dtype(dtype)) for num, dtype in given]
        self.dtype, self.seed = np.result_type(*(dtype for _, dtype in self.given)), seed

    def blocks(self, shape: Triple) -> list[np.ndarray]:
        """Return blocks (c, z, y, x) of random voxels, and of random cubes."""
        rng, coarse = np.random.default_rng(self.seed), triple(-(-n // 4) for n in shape)
        fine = self._noise(rng, shape)
        cubes = self._noise(rng, coarse).repeat(4, 1).repeat(4, 2).repeat(4, 3)
        return [fine, np.ascontiguousarray(cubes[:, : shape[0], : shape[1], : shape[2]])]

    def _noise(self, rng: np.random.Generator, shape: Triple) -> np.ndarray:
        parts = [random_voxels(rng, (num, *shape), dtype) for num, dtype in self.given]
        return np.concatenate(parts, dtype=self.dtype)

    def reach(self, function: ArrayFunction, axis: int, halo: Triple) -> int:
        """Return how far from its faces along `axis` the result for a block differs from that for a longer block."""
        longer = [2 * h + (CORE if i == axis else THIN) for i, h in enumerate(halo)]
        longer[axis] += 2 * FURTHER
        inside = [slice(None)] * 4
        inside[1 + axis] = slice(FURTHER, -FURTHER)
        depths = [0]
        for block in self.blocks(triple(longer)):
            whole = function.of(block.copy())[tuple(inside)]
            own = function.of(block[tuple(inside)].copy())
            if own.shape != whole.shape:
                raise NetError(
                    f"function {function.name} gives {len(own)} channels, and {len(whole)} of a longer block"
                )
            others = tuple(i for i in range(4) if i != 1 + axis)
            differs, size = (~is_same(own, whole)).any(axis=others), own.shape[1 + axis]
            depths += [min(int(i) + 1, size - int(i)) for i in np.flatnonzero(differs)]
        return max(depths)


def random_voxels(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return voxels of any value of `dtype`, of labels a few; of floats 0 to 1."""
    if np.issubdtype(dtype, np.floating):
        return rng.random(shape).astype(dtype)
    info = np.iinfo(dtype)
    low, high = (info.min, info.max) if dtype.itemsize <= 2 else (0, 50)
    return rng.integers(low, high, shape, dtype, endpoint=True)


def is_same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return for each voxel whether both have it, but for the last bits of floats."""
    same: np.ndarray = one == other
    if np.issubdtype(one.dtype, np.floating):
        finite = one[np.isfinite(one)]
        same |= (np.isnan(one) & np.isnan(other)) | (np.abs(one - other) <= SAME * np.abs(finite).max(initial=0.0))
    return same
