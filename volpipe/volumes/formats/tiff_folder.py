"""A folder of files, each one slice: a volume whose first axes count the files, by the numbers in their names.

Not here: what is in a file (tiff, picture). Gaps in the numbers are no gaps in the volume: the slices follow each
other, and the header has a note of the numbers that lack a file. Names that tell of channels or times make an axis of
them::

    z00_ch00.tif z00_ch01.tif z01_ch00.tif z01_ch01.tif  ->  (z=2, c=2, y, x)

What is doubtful is a note, or `check` refuses it; a worker reads what was there when the volume was opened.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path

import numpy as np

from volpipe.errors import VolumeError
from volpipe.units import listed
from volpipe.volumes.formats import picture, tiff
from volpipe.volumes.formats.format import FolderReader, Format, ReadRow
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.tensorstore import Index, StoredArray

KINDS = {".tif": "TIFF", ".tiff": "TIFF", ".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}  # of files, by their suffix
OPEN_SLICES = 128  # in a process: each is a descriptor, and keeps its share of the decoded chunks of its volume
CHECKED_AT_ONCE = 8  # each mostly waits, where the disk is behind a network
MAX_DIFFERENT = 5  # of which an error speaks


NUMBER = re.compile(r"\d+(?:\.\d+)?")
WORD = re.compile(r"([a-z]+)[^a-z]*$")  # the last before a number
LABELS = {  # what a number counts, by the word before it
    **dict.fromkeys(("z", "slice", "section", "plane", "depth"), "z"),
    **dict.fromkeys(("c", "ch", "chan", "channel"), "c"),
    **dict.fromkeys(("t", "time", "tp", "timepoint"), "t"),
    **dict.fromkeys(("x", "y", "r", "row", "col", "column", "tile", "pos", "position", "fov", "field"), "tile"),
}
CALLED = {"c": "channels", "t": "points in time", "tile": "tiles"}


@dataclass(frozen=True)
class Column:
    """A number in the names of files: its value in each, and the word before it."""

    word: str
    numbers: tuple[Decimal, ...]

    @property
    def count(self) -> int:
        return len(set(self.numbers))

    @property
    def label(self) -> str:
        """What it counts: "z", "c", "t" or "tile"; "" where the word does not say."""
        return LABELS.get(self.word, "")


@dataclass(frozen=True)
class Slices:
    """The files of a folder that are slices, in order.

    Attributes:
        names: of the files, the last of `axes` fastest.
        axes: that count the files: "z", and "t" before it or "c" behind it where the names tell of them.
        counts: slices along each.
        notes: what a user should know.
        problem: why they are no volume, "" where they are one.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...] = ("z",)
    counts: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", self.counts or (len(self.names),))


def read_header(folder: paths.Location) -> Header | None:
    """Return the header of the slices in `folder` by the first of them, None where there are none.

    Raises:
        VolumeError: the first is not a single slice.
    """
    if not isinstance(folder, Path):
        return None
    slices = find_slices(folder)
    if not slices.names:
        return None
    first = stored = _slice_header(folder / slices.names[0])
    some = {slices.names[i] for i in (0, len(slices.names) // 2, -1)}
    if stored.format == "picture" and picture.has_equal_colours(stored, [folder / name for name in sorted(some)]):
        first = picture.without_colours(stored)
    axes = (*slices.axes, *(first.axes or ()))
    if len(set(axes)) < len(axes):
        raise VolumeError(
            f"{folder}: the names tell of axes {slices.axes}, and {slices.names[0]} has {first.axes}; keep the "
            "slices of one stack in a folder"
        )
    return Header(
        folder=folder,
        format=first.format,
        shape=(*slices.counts, *first.shape),
        dtype=first.dtype,
        chunks=(*(1 for _ in slices.counts), *first.chunks),
        codec=first.codec,
        axes=axes,
        is_guessed=first.is_guessed,
        channel_names=first.channel_names,
        known={"names": slices.names, "counts": slices.counts, "kind": _kind(stored)},
        notes=(*slices.notes, *first.notes),
        unsupported="a folder of slices",
        place=first.place,
    )


def find_slices(folder: Path) -> Slices:
    """Return the slices in `folder`, slice_2 before slice_10; none if it holds a container too.

    They are of the kind of which most files are. PNG and JPEG without a pattern in their names are no slices.
    """
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
            names = [entry.name for entry in visible if _file_kind(entry.name) and not entry.is_dir()]
    except OSError:
        return Slices(())
    if any(entry.name.lower().endswith((".n5", ".zarr")) for entry in visible) or not names:
        return Slices(())
    numbers = Counter(map(_file_kind, names))
    kind = max(numbers, key=lambda kind: (numbers[kind], kind == "TIFF"))
    chosen = sorted((name for name in names if _file_kind(name) == kind), key=natural)
    patterns = Counter(map(_pattern, chosen))
    if kind != "TIFF" and max(patterns.values()) < max(2, len(chosen) / 2):
        return Slices(())
    slices, others = arrange(chosen), sorted({*names} - {*chosen}, key=natural)
    mixed = [name for name in others if _file_kind(name) == "TIFF" or _pattern(name) in patterns]
    if mixed and not slices.problem:
        problem = f"{mixed[0]} is among {len(chosen)} slices of {kind}; keep slices of one kind of files in a folder"
        return replace(slices, problem=problem)
    note = f"{', '.join(others[:MAX_DIFFERENT])}{' …' if len(others) > MAX_DIFFERENT else ''}: no slice by its name"
    return replace(slices, notes=(*slices.notes, note)) if others else slices


def _file_kind(name: str) -> str:
    """Return the kind of the file `name`, "" of what is no picture."""
    return KINDS.get("." + name.lower().rpartition(".")[2], "")


def arrange(names: Sequence[str]) -> Slices:
    """Return the slices that files of these `names` are; their natural order stays where there is a problem."""
    whole = Slices(tuple(names))
    patterns: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        patterns.setdefault(_pattern(name), []).append(name)
    groups = sorted(patterns.values(), key=len, reverse=True)
    if len(names) > 1 and sum(len(group) == 1 for group in groups) > len(names) / 2:
        return replace(
            whole, notes=(f"slices in the order of their names, which have no pattern: {names[0]} to {names[-1]}",)
        )
    if len(groups) > 1:
        return replace(whole, problem=_why_unlike(groups))
    columns = _columns(names)
    numbers = sorted(zip(*(column.numbers for column in columns), names, strict=True))
    twice = [(a[-1], b[-1]) for a, b in itertools.pairwise(numbers) if a[:-1] == b[:-1]]
    if twice:
        return replace(whole, problem=f"{twice[0][0]} and {twice[0][1]} have the same numbers; keep one of them")
    varying = [column for column in columns if column.count > 1]
    if any(column.label in CALLED and column.count < len(names) for column in varying):
        return _by_labels(names, columns)
    slices = Slices(tuple(line[-1] for line in numbers))
    if len(varying) == 1:
        word, is_other = varying[0].word, varying[0].label in CALLED
        notes = (f"the numbers after {word} are taken for slices",) if is_other else ()
        return replace(slices, notes=(*notes, *missing_note(varying[0].numbers)))
    counts = [column.count for column in varying]
    if len(varying) > 1 and math.prod(counts) == len(names):
        return replace(
            whole,
            problem=(
                f"the names count in {len(counts)} numbers, {' × '.join(map(str, counts))}, from {slices.names[0]} to "
                f"{slices.names[-1]}; keep the slices of one stack in a folder, or name channels ch0, ch1 … and "
                "times t0, t1 …"
            ),
        )
    return replace(slices, notes=_order_note(names, slices.names, varying))


def _by_labels(names: Sequence[str], columns: Sequence[Column]) -> Slices:
    """Return the slices of names that tell of channels, times or tiles: with an axis for each, or the problem."""
    is_tiled = any(column.label == "tile" for column in columns)
    labelled = [column for column in columns if column.label in CALLED and 1 < column.count < len(names)]
    num_others = math.prod(column.count for column in labelled)
    others = [c for c in columns if c not in labelled and c.count > 1 and c.count * num_others == len(names)]
    depth = sorted(others, key=lambda column: column.label != "z")[:1]
    chosen = sorted([*labelled, *depth], key=lambda column: "tz c".find(column.label or "z"))
    places = list(zip(*(column.numbers for column in chosen), strict=True))
    labels = [column.label if column in labelled else "z" for column in chosen]
    if (
        is_tiled
        or len(set(labels)) < len(labels)
        or len(set(places)) < len(names)
        or num_others * math.prod(column.count for column in depth) != len(names)
    ):
        counted = ", ".join(
            f"{column.count} {CALLED['tile' if is_tiled else column.label]} ({column.word})" for column in labelled
        )
        first = next(iter(sorted(names, key=natural)))
        return Slices(
            tuple(names),
            problem=(
                f"the {len(names)} names ({first} …) tell of {counted}, and not of one file for each slice of each; "
                "keep the slices of one stack in a folder"
            ),
        )
    ordered = tuple(name for _, name in sorted(zip(places, names, strict=True)))
    notes = [f"{column.count} {CALLED[column.label]} by the names of the files ({column.word})" for column in labelled]
    missing = missing_note(depth[0].numbers) if depth else ()
    return Slices(ordered, tuple(labels), tuple(column.count for column in chosen), (*notes, *missing))


def _pattern(name: str) -> tuple[str, ...]:
    """Return what is between the numbers of `name`, without their signs and the suffix."""
    *texts, last = NUMBER.split(_stem(name))
    return (*(text.removesuffix("-").removesuffix("+") for text in texts), last)


def _stem(name: str) -> str:
    return name.lower().rpartition(".")[0]


def _columns(names: Sequence[str]) -> list[Column]:
    """Return the numbers in `names`, which have one pattern.

    A dash is a sign where another name lacks it (z-1 beside z0), and a point is one of decimals unless what follows it
    counts, as in 12.001 to 12.250.
    """
    texts = list(zip(*(NUMBER.split(_stem(name)) for name in names), strict=True))
    tokens = list(zip(*(NUMBER.findall(_stem(name)) for name in names), strict=True))
    columns = []
    for before, column in zip(texts, tokens, strict=False):
        signs = ["-" if text.endswith("-") else "" for text in before]
        is_signed = len({text[-1:] if text[-1:] in ("-", "+") else "" for text in before}) > 1
        match = WORD.search(before[0])
        word = match[1] if match else ""
        if _is_counter(column):
            pairs = [token.split(".") for token in column]
            columns += [Column(word, tuple(Decimal(pair[i]) for pair in pairs)) for i in range(2)]
        else:
            values = zip(signs, column, strict=True)
            columns.append(Column(word, tuple(Decimal(sign * is_signed + token) for sign, token in values)))
    return columns


def _is_counter(tokens: Sequence[str]) -> bool:
    """Return whether `tokens` are pairs of whole numbers, such as 12.001, and no decimals."""
    if not all("." in token for token in tokens):
        return False
    tails = {token.partition(".")[2] for token in tokens}
    widths, values = {len(tail) for tail in tails}, sorted({int(tail) for tail in tails})
    is_run = values[-1] - values[0] == len(values) - 1 and values[0] < 2
    return len(tails) > 1 and is_run and (len(widths) > 1 or min(widths) > 2)


def _why_unlike(groups: Sequence[Sequence[str]]) -> str:
    """Return which names do not fit the others; `groups` have one pattern each, the largest first."""
    if 2 * len(groups[1]) >= len(groups[0]):
        kinds = ", ".join(f"{len(group)} like {group[0]}" for group in groups[:MAX_DIFFERENT])
        return f"the names are of {len(groups)} kinds: {kinds}; keep the slices of one stack in a folder"
    strays = list(itertools.chain.from_iterable(groups[1:]))
    return (
        f"{listed(strays, MAX_DIFFERENT)} {'do' if len(strays) > 1 else 'does'} not fit the names of the "
        f"other {len(groups[0])} slices ({groups[0][0]} to {groups[0][-1]}); move what is no slice to another place"
    )


def _order_note(names: Sequence[str], ordered: Sequence[str], columns: Sequence[Column]) -> tuple[str, ...]:
    """Return a note where the numbers of `columns` would give different orders, () where they do not."""
    orders = [dict(zip(names, column.numbers, strict=True)) for column in columns]
    if all(order[a] <= order[b] for a, b in itertools.pairwise(ordered) for order in orders):
        return ()
    return (f"the names have {len(columns)} numbers; slices are in the order of the first: {', '.join(ordered[:3])} …",)


def hash_names(header: Header) -> str:
    """Return a hash of the names of the slices in `header`, in their order; "" of what is no folder of slices."""
    names = header.known.get("names", ())
    return hashlib.sha256("/".join(names).encode()).hexdigest()[:16] if names else ""


def as_it_was(header: Header, num: int, names_hash: str) -> Header:
    """Return the `header` of a folder as it was before slices came behind its `num` slices, of names with this hash.

    One of fewer slices, or of something else, is returned as it is.

    Raises:
        VolumeError: the first `num` slices have other names.
    """
    if "names" not in header.known:
        return header
    inner = header.known["counts"][1:]
    names = header.known["names"][: num * math.prod(inner)]
    if len(names) < num * math.prod(inner):
        return header
    known = {**header.known, "names": names, "counts": (num, *inner)}
    before = replace(header, shape=(num, *header.shape[1:]), known=known)
    if hash_names(before) != names_hash:
        raise VolumeError(f"{header.folder} has other slices than when it was opened; open it again")
    return before


def natural(name: str) -> tuple[list[tuple[bool, int, str]], str]:
    """Return a sort key as people sort names: numbers by value, before letters."""
    parts = re.findall(r"\d+|\D+", name)
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part.lower()) for part in parts], name


def missing_note(numbers: Sequence[Decimal]) -> tuple[str, ...]:
    """Return a note of what is missing between the first and the last of `numbers`, () where nothing is.

    The step is the one most common between neighbours.
    """
    gaps = list(itertools.pairwise(sorted(set(numbers))))
    step = Counter(b - a for a, b in gaps).most_common(1)[0][0]
    absent = [(a + step, b - step) for a, b in gaps if b - a > step]
    if not absent:
        return ()
    ranges = ", ".join(f"{a.normalize():f}" + f" to {b.normalize():f}" * (a < b) for a, b in absent[:MAX_DIFFERENT])
    more = f" and {len(absent) - MAX_DIFFERENT} more gaps" if len(absent) > MAX_DIFFERENT else ""
    return (f"no slice has the number {ranges}{more}: the slices on both sides lie next to each other here",)


def check(folder: Path) -> None:
    """Raise unless the names in `folder` fit each other, and all slices have the shape, type and axes of the first.

    Raises:
        VolumeError: with those that differ.
    """
    slices = find_slices(folder)
    if slices.problem:
        raise VolumeError(f"{folder}: {slices.problem}")
    first, *others = slices.names
    expected = _slice_header(folder / first)
    different, palettes = [], [(first, expected.known["palette"])]
    with ThreadPoolExecutor(CHECKED_AT_ONCE) as pool:
        try:
            headers = pool.map(_slice_header, (folder / name for name in others))
            for name, other in zip(others, headers, strict=True):
                if _kind(other) != _kind(expected):
                    different.append(f"{name} is {_described(other)}")
                palettes.append((name, other.known["palette"]))
        finally:
            pool.shutdown(cancel_futures=True)
    if different:
        raise VolumeError(
            f"{folder}: the slices differ: {first} is {_described(expected)}, "
            f"{listed(different, MAX_DIFFERENT)}; keep only those of one stack in a folder"
        )
    # Palettes may end with the last colour that their slice uses.
    longest_name, longest = max(palettes, key=lambda each: len(each[1]))
    odd = [name for name, palette in palettes if not longest.startswith(palette)]
    if odd:
        raise VolumeError(
            f"{folder}: the same number is another colour in {listed(odd, MAX_DIFFERENT)} than in {longest_name}: "
            "their palettes differ; save all slices with one palette, or as grey values"
        )


def _slice_header(file: Path) -> Header:
    """Return the header of the slice in `file`, with all colours that it has."""
    if _file_kind(file.name) != "TIFF":
        return picture.read_header(file)
    header = tiff.read_header(file, "")
    if header is None or {"z", "t"} & set(header.axes or ()):
        raise VolumeError(f"{file} is not a single slice; name the file itself, or keep one slice a file in its folder")
    return header


def _kind(header: Header) -> tuple[object, ...]:
    """Return what the slices of a volume have in common, however each is stored."""
    return header.shape, header.dtype, header.axes, header.known["colours"]


def _described(header: Header) -> str:
    colours = header.known["colours"]
    return f"{header.dtype} {header.shape}" + (f" ({colours})" if colours != "grey" else "")


class SliceArray:
    """An open folder of slices, which several threads may read; `shape` and `dtype` are those of one slice."""

    def __init__(self, header: Header, cache_bytes: int) -> None:
        self._header = header
        self._files = [header.folder / name for name in header.known["names"]]
        self._cache_bytes = cache_bytes // OPEN_SLICES

    def read(self, index: Index) -> np.ndarray:
        counts = self._header.known["counts"]
        outer, inner = index[: len(counts)], index[len(counts) :]
        numbers = np.arange(math.prod(counts)).reshape(counts)[outer]
        sizes = zip(inner, self._header.shape[len(counts) :], strict=True)
        shape = [len(range(*i.indices(n))) for i, n in sizes if not isinstance(i, int)]
        out = np.empty((*np.shape(numbers), *shape), self._header.dtype)
        for place in np.ndindex(np.shape(numbers)):
            out[place] = self._slice(self._files[int(numbers[place])]).read(inner)
        return out

    def _slice(self, file: Path) -> StoredArray:
        known = self._header.known
        rank = len(self._header.shape) - len(known["counts"])
        return _open_slice(file, paths.file_state(file), known["kind"], rank, self._cache_bytes)


@lru_cache(maxsize=OPEN_SLICES)
def _open_slice(file: Path, state: paths.State, kind: tuple[object, ...], rank: int, cache_bytes: int) -> StoredArray:
    """Return the slice of `rank` axes in `file`, which is in this `state`: one written again is opened again."""
    header = _slice_header(file)
    if _kind(header) != kind:
        shape, dtype, *_ = kind
        raise VolumeError(f"{file} is {_described(header)}, and the other slices are {dtype} {shape}")
    if header.format == "picture":
        return picture.open_array(header if rank > 2 else picture.without_colours(header), cache_bytes)
    return tiff.open_array(header, cache_bytes)


SLICES = Format(
    name="slices",
    row=ReadRow(
        "a folder of slices: TIFF, PNG or JPEG",
        "by the numbers in their names (`z-1.tif`, `z0.5.tif`, `z10.tif`), which may count channels and times, too",
        "the first slice, if it says its thickness",
    ),
    folders=FolderReader(read_header),
)
