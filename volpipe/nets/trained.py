"""What weights learned from, as a file beside them says, and whether a volume is like that.

Not here: how a net computes (facts), or the grey levels that -1 and 1 stood for, which a recipe has (statistics). A
training writes the file; the shipped weights have theirs::

    weights.safetensors
    weights.trained.json    {"voxel_sizes_nm": [[40, 10, 10]], "line_contrasts": [0.24]}
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from volpipe.nets.facts import weights_path
from volpipe.recipes.inference import NetChoice, Normalise
from volpipe.units import count
from volpipe.volumes.lines import line_contrast
from volpipe.volumes.storage.metadata import Lengths, shown
from volpipe.volumes.storage.paths import atomic_write
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

UNITS = {"psnr": " dB"}  # of scores
SUFFIX = ".trained.json"  # in place of that of the weights
ALIKE, ROUNDING = 0.1, 1e-6  # of a voxel's length, by which one may be longer or shorter
LEAST_CONTRAST = 0.1  # of lines, to either side: see `lines.line_contrast`
LEAST_ANISOTROPY = 1.5  # of the longest side of a voxel by the next


class BoxScores(BaseModel):
    """The scores of weights in boxes of their volumes that they did not learn from.

    Attributes:
        boxes: such as "0:8,0:32,0:32 of cells.n5", in voxels of each volume.
        scores: by name; None of what has none there.
        num_values: how many scores of these boxes there were to look at, these included.
        chose: what was chosen by them, such as "the best of 4 trainings"; "" where nothing was.
    """

    model_config = ConfigDict(frozen=True)

    boxes: tuple[str, ...]
    scores: dict[str, float | None]
    num_values: int = 1
    chose: str = ""

    def summary(self) -> str:
        """Return the scores, where they are from, and whether something was chosen by them."""
        shown = (
            f"{name} {'nan' if value is None else f'{value:.4g}'}{UNITS.get(name, '')}"
            for name, value in self.scores.items()
        )
        where, num = " and ".join(self.boxes), f"{count(self.num_values, 'value')} looked at"
        chosen = (
            f"which chose {self.chose} ({num}), so that this score flatters it"
            if self.chose
            else f"by which nothing was chosen ({num})"
        )
        return f"{', '.join(shown)} in {where}, {chosen}"


class Trained(BaseModel):
    """The volumes that weights learned from, and their scores in what was kept from them.

    Attributes:
        voxel_sizes_nm: (z, y, x) of the net's input, of each volume; none where nobody knows.
        line_contrasts: of each volume, as of `line_contrast`.
        normalise: in numbers, where all volumes had the same.
        held_out: the last scores in the boxes that were looked at on the way.
        test: the scores in the boxes that were scored at the end alone.
    """

    model_config = ConfigDict(frozen=True)

    voxel_sizes_nm: tuple[Lengths, ...] = ()
    line_contrasts: tuple[float, ...] = ()
    normalise: Normalise | None = None
    unlike: tuple[Normalise, ...] = Field((), exclude=True)  # those of the nets of an ensemble, where they differ
    held_out: BoxScores | None = None
    test: BoxScores | None = None

    @classmethod
    def beside(cls, choice: NetChoice, search_path: str) -> Trained | None:
        """Return the file beside the weights of `choice` that describes their training; None without one.

        Of an ensemble, those of all nets together.
        """
        if choice.ensemble is not None:
            known = list(filter(None, (cls.beside(member, search_path) for member in choice.members)))
            maps = tuple(dict.fromkeys(each.normalise for each in known if each.normalise is not None))
            if not known:
                return None
            return cls(
                voxel_sizes_nm=tuple(dict.fromkeys(size for each in known for size in each.voxel_sizes_nm)),
                line_contrasts=tuple(contrast for each in known for contrast in each.line_contrasts),
                normalise=maps[0] if len(maps) == 1 else None,
                unlike=maps if len(maps) > 1 else (),
            )
        return None if choice.weights is None else cls.of(weights_path(choice.weights, search_path))

    @classmethod
    def of(cls, weights: Path) -> Trained | None:
        """Return the file beside `weights` that describes their training; None without one."""
        path = trained_path(weights)
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            log.warning("%s, which says what the weights learned from, cannot be read: %s", path, error)
            return None

    def store(self, weights: Path) -> None:
        """Write this beside `weights`, whole or not at all."""
        atomic_write(trained_path(weights), self.model_dump_json(indent=1, exclude_none=True).encode() + b"\n")


def trained_path(weights: Path) -> Path:
    """Return the path of the file that says what `weights` learned from."""
    return weights.with_suffix(SUFFIX)


def voxel_notes(volume: Volume, trained: Trained, label: str) -> list[str]:
    """Return a sentence if voxels of `volume` have another size than those of the training of the net `label`."""
    size, known = volume.voxel_size_nm, trained.voxel_sizes_nm
    if size is None or not known or any(_is_alike(size, other) for other in known):
        return []
    sizes = f"{_sizes_text(known)} nm (z, y, x)"
    said = f"net {label} learned from voxels of {sizes}, and those of {volume} are {shown(size)} nm"
    longest, before = _long_axis(size), "".join(dict.fromkeys(map(_long_axis, known)))
    if longest and before and longest not in before:
        return [
            f"{said}: they are longest along {longest}, and in training along {' or '.join(before)}. Exchange the axes "
            "of the volume, or correct its voxel size, such as by input.voxel_size_nm"
        ]
    level = "choose a level of about that size by input.level, " if len(volume.levels) > 1 else ""
    return [
        f"{said}: its output may be of no use there; {level}set net.spacing={','.join(f'{n:g}' for n in known[0])} to "
        "have voxels interpolated, train a net on volumes like it, or correct the voxel size if it is wrong, such as "
        "by input.voxel_size_nm"
    ]


def unknown_size_note(volume: Volume, trained: Trained | None) -> str:
    """Return a sentence with the voxel sizes of the training if that of `volume` is unknown; "" otherwise."""
    if volume.voxel_size_nm is not None or trained is None or not trained.voxel_sizes_nm:
        return ""
    return (
        f"the net learned from voxels of {_sizes_text(trained.voxel_sizes_nm)} nm; give input.voxel_size_nm to compare"
    )


def contrast_notes(volume: Volume, trained: Trained, label: str) -> list[str]:
    """Return a sentence if lines are dark in `volume` and bright in the training of the net `label`, or the reverse.

    The other way round as well; nothing where one of both is in doubt.
    """
    known = trained.line_contrasts
    if not known or not (min(known) >= LEAST_CONTRAST or max(known) <= -LEAST_CONTRAST):
        return []
    contrast = line_contrast(volume)
    if contrast is None or abs(contrast) < LEAST_CONTRAST or (contrast > 0) == (known[0] > 0):
        return []
    dark, bright = ("darker than what they part", "brighter")
    before, now = (dark, bright) if known[0] > 0 else (bright, dark)
    mean = sum(known) / len(known)
    return [
        f"{volume} looks inverted for net {label}: lines such as membranes are {now} (contrast {contrast:+.2f} in "
        f"sampled slices), and those that it learned from were {before} ({mean:+.2f}). Write it the other way round "
        "first, of 8 bits 255 less each value (net.name=numpy:FILE.py:FUNCTION runs such a function), or train a net "
        "on volumes like it"
    ]


def _is_alike(size: Lengths, other: Lengths) -> bool:
    return all(max(a, b) <= (1 + ALIKE + ROUNDING) * min(a, b) for a, b in zip(size, other, strict=True))


def _long_axis(size: Lengths) -> str:
    """Return the axis along which a voxel is clearly the longest; "" where it is along none."""
    *_, second, first = sorted(size)
    return "zyx"[size.index(first)] if first >= LEAST_ANISOTROPY * second else ""


def _sizes_text(sizes: Sequence[Lengths]) -> str:
    return " or ".join(dict.fromkeys(map(shown, sizes)))
