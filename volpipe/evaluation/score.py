"""A score: what an evaluation takes of each block, what it makes of all blocks together, and how that is shown.

Not here: the scores themselves, each in a file that says all about it; scores.py lists them. The way of a number::

    block ── sums ──► vector ─┐
    block ── sums ──► vector ─┴─ added up ─► total ── values ──► {"psnr": 31.2} ── cells ──► {"PSNR dB": "31.20"}
                                                                 in the JSON                 on the terminal

A label or a class means the same in every block. So an evaluation of labels or classes also counts the voxels of each
pair of them, and their total has that table: most scores of labels need no sums of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from volpipe.reporting.page import Sheet
    from volpipe.volumes.volume import Volume

# What an evaluation is of, and a score is for.
IMAGE, LABELS, CLASSES, SKELETONS = "image", "labels", "classes", "skeletons"

Sums = np.ndarray  # (n,), float64: those of all blocks add up
Values = Mapping[str, Any]  # Any: numbers, and lists of the scores of parts, by their names in the JSON


@dataclass(frozen=True)
class ScoredBlock:
    """The voxels of a block in the output and in its reference.

    Attributes:
        data, truth: (z, y, x), of the output and of the reference; float64 of images, whole numbers of labels. They
            have as many voxels around the block as the score asks for, as far as the scored box goes.
        own: the block's own voxels in both.
        data_range: the greatest grey level less the least that there may be; 1 of labels.
    """

    data: np.ndarray
    truth: np.ndarray
    own: tuple[slice, ...]
    data_range: float = 1.0

    def with_margin(self, reach: int) -> ScoredBlock:
        """Return the same block with at most `reach` voxels around it."""
        part = tuple(slice(max(0, own.start - reach), own.stop + reach) for own in self.own)
        own = tuple(slice(o.start - p.start, o.stop - p.start) for o, p in zip(self.own, part, strict=True))
        return ScoredBlock(self.data[part], self.truth[part], own, self.data_range)


@dataclass(frozen=True)
class Total:
    """What all blocks gave: the added sums of each score, by its name."""

    sums: Mapping[str, Sums]


@dataclass(frozen=True)
class ImageTotal(Total):
    """What all blocks of an image gave, and the greatest grey level less the least that there may be."""

    data_range: float


T = TypeVar("T", bound=Total)


@dataclass(frozen=True)
class Score(Generic[T]):
    """One score of an evaluation, of one number or of a few that belong together.

    Attributes:
        name: its own among all scores; of a score of one number also that number's name in the JSON.
        kinds: what it is for: some of IMAGE, LABELS, CLASSES and SKELETONS.
        values: returns its numbers from the total of all blocks, by their names in the JSON.
        title, unit, digits: the heading of its number, what that is measured in, and digits after the point; a score
            without a title is in the JSON alone.
        sums: returns what it takes of a block; None where the table of labels is enough.
        reach: voxels around a block that `sums` looks at.
        cells: returns texts of its numbers by their headings, where one heading is not enough.
        tables: returns tables of the parts that it scores one by one, from its values in the JSON, which
            may be of a version without this score.
        caption: what a reader of the table must know.
    """

    name: str
    kinds: tuple[str, ...]
    values: Callable[[T], Values]
    title: str = ""
    unit: str = ""
    sums: Callable[[ScoredBlock], Sums] | None = None
    reach: int = 0
    digits: int = 4
    cells: Callable[[Values, Volume | None], Mapping[str, str]] | None = None
    tables: Callable[[Values], Sequence[Sheet]] | None = None
    caption: str = ""

    def texts(self, values: Values, volume: Volume | None = None) -> Mapping[str, str]:
        """Return its cells by their headings; `volume`, where it is given, knows the size of a voxel."""
        if self.cells is not None:
            return self.cells(values, volume)
        return {f"{self.title} {self.unit}".strip(): f"{values[self.name]:.{self.digits}f}"} if self.title else {}


@dataclass(frozen=True, repr=False)
class Scores:
    """The scores of one output: each number is an attribute, by the name that it has in the JSON."""

    values: Values

    @classmethod
    def from_total(cls, scores: Iterable[Score[T]], total: T) -> Scores:
        """Return what `scores` make of the total of all blocks."""
        values: dict[str, Any] = {}  # Any: as of Values
        for score in scores:
            values |= score.values(total)
        return cls(values)

    def __getattr__(self, name: str) -> Any:  # Any: as of Values
        values = vars(self).get("values", {})
        if name not in values:
            raise AttributeError(f"there is no score {name}; those are {', '.join(values)}")
        return values[name]

    def __repr__(self) -> str:
        return f"Scores({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the scores as JSON values; infinity and NaN are None, inside of lists too."""
        values: dict[str, Any] = plain(self.values)  # Any: JSON
        return values


def plain(value: Any) -> Any:  # Any: JSON and dataclasses
    """Return a value for JSON, which has neither infinity nor NaN: None, at whatever depth one stands."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
