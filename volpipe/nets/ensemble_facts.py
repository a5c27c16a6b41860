"""The facts of an ensemble from those of its nets, which must have one geometry.

Not here: the ensemble itself (ensemble).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from volpipe.errors import PlanError
from volpipe.geometry.grid import align_up, triple
from volpipe.nets.facts import NetFacts
from volpipe.nets.files import joined_hash
from volpipe.nets.identity import NetIdentity
from volpipe.recipes.toml import differences

# What windows, their values and the output rest on, and none of the nets can have for itself.
SHARED = (
    "in_channels", "out_channels", "scale", "shrink", "margin", "remainder", "arrays", "intensity", "normalise",
    "windows", "output", "padding", "spacing", "interpolation", "regions", "axcodes",
)  # fmt: skip


def ensemble_facts(members: Sequence[NetFacts], combine: str) -> NetFacts:
    """Return the facts of an ensemble of nets: the largest halo, windows that all of them take, the sum of parameters.

    Raises:
        PlanError: what they must share differs; with both values.
    """
    first, *others = members
    for number, own in enumerate(members):
        for key in SHARED:
            if getattr(own, key) != getattr(first, key):
                before, now = (NetFacts.model_construct(**{key: getattr(each, key)}) for each in (first, own))
                raise PlanError(
                    f"an ensemble is of nets with one geometry, and net.ensemble.{number}, {own.label}, differs from "
                    f"the first, {first.label}: {'; '.join(differences(before, now))}; run it by itself"
                )
    if combine != "mean" and first.arrays:
        raise PlanError(
            f"net.combine={combine} is of one output, and the nets give {len(first.arrays)}; name one, such as "
            f"net.output={first.arrays[0].output}, or take the mean"
        )
    fixed = triple(max(sizes) for sizes in zip(*(own.fixed for own in members), strict=True))
    for own in members:
        if any(only not in (0, size) for only, size in zip(own.fixed, fixed, strict=True)):
            raise PlanError(
                f"net {own.label} of the ensemble takes windows of {list(own.fixed)} voxels alone, another of "
                f"{list(fixed)} (0 is any); run it by itself"
            )
    stride = triple(math.lcm(*sizes) for sizes in zip(*(own.stride for own in members), strict=True))
    halo = (max(sizes) for sizes in zip(*(own.halo for own in members), strict=True))
    largest = (max(sizes) for sizes in zip(*(own.window for own in members), strict=True))
    along = zip(fixed, largest, first.remainder, stride, strict=True)
    is_alike = all((own.planes, own.context) == (first.planes, first.context) for own in others)
    label = first.label if all(own.label == first.label for own in others) else "ensemble"
    return first.model_copy(
        update={
            "label": f"{label}-{combine}-of-{len(members)}",
            "out_channels": first.out_channels * (1 if combine == "mean" else len(members)),
            "stride": stride, "fixed": fixed,
            "halo": triple(
                margin + align_up(size - margin, step) if margin else size
                for size, margin, step in zip(halo, first.margin, stride, strict=True)
            ),
            "window": triple(only or rest + align_up(size - rest, step) for only, size, rest, step in along),
            "least": triple(max(sizes) for sizes in zip(*(own.least for own in members), strict=True)),
            "tile_invariant": all(own.tile_invariant for own in members),
            "crops_zeros": any(own.crops_zeros for own in members),
            "has_open_axes": any(own.has_open_axes for own in members),
            "integers": False,
            "planes": first.planes if is_alike else (), "context": first.context if is_alike else 0,
            "num_parameters": sum(own.num_parameters for own in members),
            "weights_sha256": joined_hash(own.weights_sha256 for own in members),
            "identity": NetIdentity(members=tuple(own.identity for own in members)),
            "members": tuple(own.model_copy(update={"identity": NetIdentity()}) for own in members),
            "combine": combine,
        }
    )  # fmt: skip
