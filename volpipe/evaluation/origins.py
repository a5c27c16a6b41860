"""How two outputs were made, by what they say of themselves: whether of one input, and what was done otherwise.

Not here: what outputs say (runs.provenance, segmentation.output), or their voxels (compare). An output may be made of
another one, and that of another: labels of affinities, these of a volume::

    A  labels  ─ made of ─  affinities of the old net  ─ made of ─  raw          one input: both end at raw, whose
    B  labels  ─ made of ─  affinities of the new net  ─ made of ─  raw          fingerprint both name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pydantic import TypeAdapter

from volpipe.errors import PlanError, RunError, VolpipeError
from volpipe.evaluation.score import CLASSES, IMAGE, LABELS
from volpipe.geometry.grid import Box, Triple
from volpipe.nets.files import short_hash
from volpipe.recipes.toml import leaves
from volpipe.runs.provenance import read_provenance
from volpipe.segmentation.output import RECIPE_KEY
from volpipe.volumes.on_grid import resampled
from volpipe.volumes.resampling import Resampling
from volpipe.volumes.storage.paths import locate
from volpipe.volumes.volume import View, Volume, absolute, open_volume

MOST_PROVENANCES = 16  # outputs of outputs that are looked at
ABSENT = "–"


@dataclass(frozen=True)
class Provenance:
    """What an output says of how it was made.

    Attributes:
        place, shape: of the output; voxels (z, y, x).
        said: its attributes under "volpipe", and under "run" those of its run.
    """

    place: str
    shape: Triple
    said: Mapping[str, Any]  # Any: JSON

    @property
    def kind(self) -> str:
        """One of "labels" of objects, "classes", whose numbers mean the same in every output, and "image"."""
        if self.is_segmentation:
            return LABELS
        return CLASSES if _under(self.said, "recipe", "output", "kind") == "labels" else IMAGE

    @property
    def is_segmentation(self) -> bool:
        """Whether it is labels of objects, made by `volpipe segment`."""
        return RECIPE_KEY in self.said

    @property
    def is_copy(self) -> bool:
        """Whether the output is its input or a part of it, unchanged."""
        return bool(_under(self.said, "recipe", "net", "name") == "identity")

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the input; "" where the output does not say it."""
        return str(_under(self.said, "input", "fingerprint") or "")

    @property
    def input(self) -> str:
        """The place of the input, "" where it does not say."""
        path, key = _under(self.said, "input", "path"), _under(self.said, "input", "key")
        return "" if not path else str(locate(str(path)) / str(key)) if key else str(path)

    @property
    def roi(self) -> Box:
        """The part of the input that the output shows, in voxels of that; all where it does not say."""
        roi, whole = self.said.get("roi"), _under(self.said, "input", "shape") or self.shape
        if shown := _under(self.said, "grid", "roi"):
            return Box(*map(tuple, shown))
        return Box(tuple(roi["start"]), tuple(roi["stop"])) if roi else Box.from_shape(tuple(whole))

    def open_input(self) -> Volume:
        """Return the input, as it is now.

        Raises:
            VolpipeError: it is gone.
        """
        source = self.said["input"]
        view = View(**source.get("view") or {})
        grid = TypeAdapter(Resampling | None).validate_python(source.get("resampling"))
        grid = None if "grid" in self.said else grid  # the output lies on that of the volume
        return resampled(open_volume(source["path"], source["key"], view=view), grid)

    def input_box(self, box: Box) -> Box:
        """Return the voxels of the input that `box` of the output shows."""
        roi = self.roi
        factors = [max(1, n // m) for n, m in zip(self.shape, roi.shape, strict=True)]
        start = tuple(a // f for a, f in zip(box.start, factors, strict=True))
        return Box(start, tuple(-(-b // f) for b, f in zip(box.stop, factors, strict=True))).shift(roi.start)

    def facts(self) -> dict[str, str]:
        """Return the facts on how the output was made, by name, as texts."""
        said, net = self.said, self.said.get("net") or {}
        values = {
            "made by": "volpipe segment" if self.is_segmentation else "volpipe run",
            "net": net.get("label"),
            "weights SHA-256": net and short_hash(str(net.get("weights_sha256") or "")),
            "code of the net SHA-256": net and short_hash(str(net.get("code_sha256") or "")),
            "input": self.input,
            "normalised by": ", ".join(
                f"{name} {_level_text(value)}" for name, value in (said.get("normalise") or {}).items()
            ),
            **_with_prefix("recipe", dict(leaves(said.get("recipe") or said.get(RECIPE_KEY) or {}))),
            **_with_prefix("version", {"volpipe": said.get("version"), "python": said.get("python")}),
            **_with_prefix("version", said.get("packages") or {}),
            "devices": ", ".join(_under(said, "run", "devices") or []),
        }
        return {name: str(value) for name, value in values.items() if value not in (None, "", {})}


def _with_prefix(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    return {f"{prefix} {name}": value for name, value in values.items()}


def _level_text(value: Any) -> str:  # Any: a number, or a list of those of each channel
    return "(" + " ".join(map(_level_text, value)) + ")" if isinstance(value, list) else f"{value:g}"


def _under(tree: Any, *keys: str) -> Any:  # Any: JSON
    """Return the entry of a nested `tree` at the path `keys`; None where there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def provenances_of(volume: Volume) -> tuple[Provenance, ...]:
    """Return how `volume` was made, then how its input was made, and so on; () where it says nothing."""
    provenances: list[Provenance] = []
    current: Volume | None = volume
    while current is not None and len(provenances) < MOST_PROVENANCES:
        provenance = _provenance(current)
        if provenance is None:
            break
        provenances.append(provenance)
        try:
            current = provenance.open_input() if provenance.input else None
        except (VolpipeError, OSError, TypeError):  # gone, or described by another version
            current = None
    return tuple(provenances)


def _provenance(volume: Volume) -> Provenance | None:
    """Return how a volume was made, as the innermost group around it says; of a copy, how the original was made."""
    place, container = volume.folder, absolute(volume.path)
    while True:
        with suppress(RunError):  # inside an HDF5 file
            said = read_provenance(place)
            if _under(said, "copied_from", "bin") == [1, 1, 1] and isinstance(said.get("made"), dict):
                said = said["made"] | {"run": said["run"]}
            if "input" in said and ("recipe" in said or RECIPE_KEY in said):
                return Provenance(str(place), volume.spatial_shape, said)
        if place in (container, place.parent):
            return None
        place = place.parent


def check_same_input(a: Volume, b: Volume, made_a: Sequence[Provenance], made_b: Sequence[Provenance]) -> list[str]:
    """Refuse outputs of different inputs, or of different parts of one; return a note where an output does not say.

    Raises:
        PlanError: with what both were made of.
    """
    for name, volume, made in (("A", a, made_a), ("B", b, made_b)):
        if not made or not made[0].fingerprint:
            return [f"{name} says nothing of its input, so that both may be of different ones: {volume}"]
    of_a, of_b = ([provenance.fingerprint for provenance in made] for made in (made_a, made_b))
    if not set(of_a) & set(of_b):
        raise PlanError(
            f"A was made of {made_a[-1].input}, B of {made_b[-1].input}, and these are not the same: fingerprints "
            f"{short_hash(of_a[-1])} and {short_hash(of_b[-1])}; compare outputs of one input, or give --any-input"
        )
    for one, other in zip(made_a, made_b, strict=False):
        if one.roi != other.roi and one.fingerprint == other.fingerprint:
            raise PlanError(
                f"A shows the box {one.roi} of its input, B {other.roi}: {a} and {b}; give --any-input to compare "
                "them voxel by voxel all the same"
            )
    return []


def shared_input(made_a: Sequence[Provenance], made_b: Sequence[Provenance]) -> int | None:
    """Return the number of the last provenance of A whose input B was made of, too; None where there is none."""
    of_b = {provenance.fingerprint for provenance in made_b}
    return next((i for i in reversed(range(len(made_a))) if made_a[i].fingerprint in of_b), None)


def differing(made_a: Sequence[Provenance], made_b: Sequence[Provenance]) -> list[tuple[str, str, str]]:
    """Return the facts that differ between the makings of A and B, and of their inputs: name, A's and B's value.

    Where one says nothing, all that the other says differs.
    """
    rows: list[tuple[str, str, str]] = []
    for depth, (one, other) in enumerate(zip_longest(made_a, made_b)):
        if one is not None and other is not None and one.place == other.place:
            break  # from here on both are the same
        of_a, of_b = ({} if provenance is None else provenance.facts() for provenance in (one, other))
        pairs = ((name, of_a.get(name, ABSENT), of_b.get(name, ABSENT)) for name in dict.fromkeys([*of_a, *of_b]))
        rows += [(f"{'its input: ' * depth}{name}", a, b) for name, a, b in pairs if a != b]
    return rows
