"""Measurements: the rows that a user's function gives of each block, and the table that is made of all.

Not here: the work in its folder (driver). The table is the same whatever the blocks and their order: sums are exact, of
floats too, which are rounded once, at the end::

    block ─ function ─► label voxels first_z            combine: voxels = sum, first_z = min
                            7     40      12
    block ─ function ─►     7      2       3     ─►     7, 42, 3
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from volpipe.errors import NetError, PlanError, VolpipeError
from volpipe.evaluation.keys import Measuring
from volpipe.evaluation.label_scores import accumulated
from volpipe.evaluation.subject import BlockSums, Results, Subject, read_block
from volpipe.geometry.grid import Box, triple
from volpipe.inference.roi import find_roi
from volpipe.nets.files import code_hash, short_hash
from volpipe.resolve import describe_error, load_function
from volpipe.units import shape
from volpipe.volumes.places import Paired, check_same_place
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import write_json
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.values import stored_notes
from volpipe.volumes.volume import Volume

UFUNCS = {"sum": np.add, "min": np.minimum, "max": np.maximum}
STORED = {"b": "int64", "i": "int64", "u": "uint64", "f": "float64"}  # types of columns, by the kind of what is given
SCALE = 1 << 1074  # every float is a multiple of its inverse
TRIED = Box((5, 7, 3), (17, 17, 17))  # the block that is tried, without its halo
ROWS, FIRST_ROWS = 1 << 14, 10  # that are Python's numbers at once; that are shown
Columns = dict[str, np.ndarray]  # of one length, by their names
Function = Callable[..., Any]  # Any: the user's own


@dataclass(frozen=True, kw_only=True)
class Measurement(Subject):
    """A volume A, and perhaps a second one B, whose blocks a user's function measures; without a second one, B is A.

    Attributes:
        search_path: folder that the name of the function counts from.
        code: hash of its code.
        types: of the columns, in their order.
        is_outside: whether no stage makes B.
    """

    choice: Measuring
    search_path: str
    code: str
    types: tuple[tuple[str, str], ...] = ()
    is_outside: bool = False
    kind = "rows"
    stage = "measure"
    mark = "measurement.json"
    doing = "measuring"

    @property
    def outside(self) -> tuple[str, ...]:
        return ("other",) if self.is_outside else ()

    def inputs(self) -> dict[str, Volume]:
        return {"input": self.a} if self.choice.other is None else {"input": self.a, "other": self.b}

    def read_box(self, block: int) -> Box:
        return self.own_box(block).grown(self.choice.halo) & Box.from_shape(self.a.spatial_shape)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "recipe": self.choice.model_dump(mode="json"), "code_sha256": self.code}

    def over(self, given: Volume) -> Measurement:
        """Return the same measurement of `given` in place of A, which may have grown."""
        b = given if self.choice.other is None else self.b
        return replace(self, a=given, b=b, box=find_roi(self.choice.roi, given))

    def sums(self, block: int, session: str) -> BlockSums:
        own, box = self.own_box(block), self.read_box(block)
        whole = own.grown(self.choice.halo).relative_to(box.start)  # of which the volume's faces cut off
        sides = [(0, 0), *((-a, b - n) for a, b, n in zip(whole.start, whole.stop, box.shape, strict=True))]
        arrays = [np.pad(read_block(volume, box, session), sides, mode="edge") for volume in self.inputs().values()]
        rows = self.rows(_loaded(self.choice.function, self.search_path, self.code), arrays, own)
        return BlockSums(rows={block: {name: values.tolist() for name, values in rows.items()}})

    def rows(self, function: Function, arrays: Sequence[np.ndarray], box: Box) -> Columns:
        """Return the columns of the block `box`, whose voxels with the halo are `arrays` (c, z, y, x), checked.

        Raises:
            VolpipeError: the function fails, or gives something else.
        """
        choice, start = self.choice, f"function {self.choice.function}, block {box}:"
        names = [*choice.by, *choice.combine]
        given = (array[0] if len(array) == 1 else array for array in arrays)
        try:
            result = function(*given, start=box.start, **choice.options)
            shapes = {name: np.shape(result[name]) for name in result} if isinstance(result, Mapping) else {}
        except Exception as error:  # the user's code
            raise VolpipeError(f"{start} it fails: {describe_error(error)}") from error
        if set(shapes) != {*names} or len({*shapes.values()}) != 1 or len(shapes[names[0]]) != 1:
            what = ", ".join(f"{name} {sizes}" for name, sizes in shapes.items()) or type(result).__name__
            raise VolpipeError(f"{start} it returned {what}; let it return arrays (rows,) {', '.join(names)}")
        columns = {name: np.asarray(result[name]) for name in names}
        for name, values in columns.items():
            stored, expected = STORED.get(values.dtype.kind, ""), dict(self.types).get(name)
            is_fit = stored and expected in (None, stored) and not (stored == "float64" and name in choice.by)
            if not is_fit and (len(values) or expected is None):
                due = expected or ("whole numbers" if name in choice.by else "numbers")
                raise VolpipeError(f"{start} column {name} has the type {values.dtype}; give {due}, as in other blocks")
            if len(wrong := np.flatnonzero(~np.isfinite(values))):
                key = _row_key(choice, columns, wrong[0])
                raise VolpipeError(f"{start} column {name} is {values[wrong[0]]} where {key}; give finite numbers")
            zero = np.zeros(1, expected or stored)
            columns[name] = values.astype(zero.dtype) + zero  # of the two zeros of floats it leaves one
        return columns

    def total(self, tables: Iterable[Columns]) -> Columns:
        """Return all `tables` as one, with one row for each key, in the order of keys."""
        choice, types = self.choice, dict(self.types)
        is_sum = {name: choice.combine.get(name) == "sum" for name in types}
        nothing = {name: np.zeros(0, object if is_sum[name] else dtype) for name, dtype in types.items()}

        def added_up(parts: Sequence[Columns]) -> Columns:
            return _one_row_a_key(
                {n: np.concatenate([nothing[n], *(part[n] for part in parts)]) for n in types}, choice
            )

        exact = ({n: _exact(values) if is_sum[n] else values for n, values in table.items()} for table in tables)
        whole = accumulated(exact, added_up, lambda table: len(table[choice.by[0]]))
        floats = [name for name in types if is_sum[name] and types[name] == "float64"]
        return whole | {name: np.array([n / SCALE for n in whole[name]], np.float64) for name in floats}

    def store(self, results: Results, table: Location, about: Location) -> None:
        """Write the `table`, and then its description in JSON to the file `about`."""
        blocks = (rows for part in results() for rows in part.rows.values())
        whole = self.total({name: np.array(rows[name], dtype) for name, dtype in self.types} for rows in blocks)
        headings = [*whole, *self.choice.ratio]
        lines = (",".join(map(str, row)) for row in _cells(whole, self.choice))
        text = "".join(f"{line}\n" for line in (",".join(headings), *lines)).encode()
        paths.write(table, text)
        facts = {"table": str(table), "bytes": len(text), "rows": len(whole[headings[0]]), "columns": headings}
        first = list(islice(_cells(whole, self.choice), FIRST_ROWS))
        write_json(about, {**self.describe(), **facts, "first_rows": first})


def plan_measurement(
    volume: Volume, other: Volume | None, choice: Measuring, search_path: str, *, is_outside: bool
) -> Measurement:
    """Return the measurement of `volume`, and of the `other`, if there is one, by a function that is tried.

    Raises:
        PlanError: the volumes do not fit, or the function fails, or its rows depend on the blocks.
    """
    notes = list[str]()
    if other is not None:
        if volume.spatial_shape != other.spatial_shape:
            one, two = (f"{each} has {shape(each.spatial_shape)} voxels (z, y, x)" for each in (volume, other))
            raise PlanError(f"{one}, and other {two}; name two volumes of one shape")
        if not choice.any_place:
            advice = "set any_place = true to pair them voxel by voxel all the same"
            notes = check_same_place(Paired("the input", volume), Paired("other", other), advice)
    notes += stored_notes(volume, other)
    function = load_function(choice.function, search_path)
    plan = Measurement(
        a=volume, b=other or volume, box=find_roi(choice.roi, volume), data_range=None, block=choice.block,
        notes=tuple(notes), choice=choice, search_path=search_path, code=code_hash(choice.function, search_path),
        is_outside=is_outside,
    )  # fmt: skip
    try:
        return _with_types(plan, function)
    except PlanError:
        raise
    except VolpipeError as error:
        raise PlanError(f"{error}; it was tried over random voxels, of which it must take any") from error


def _with_types(plan: Measurement, function: Function) -> Measurement:
    """Return `plan` with the types of its columns, after a check that rows of two halves combine to those of the whole.

    Raises:
        PlanError: they do not; it names a row.
    """
    from volpipe.nets.functions import RandomBlocks

    volumes, size = enumerate(plan.inputs().values()), triple(TRIED.grown(plan.choice.halo).shape)
    trials = [RandomBlocks([(volume.num_channels, volume.dtype.name)], seed).blocks(size) for seed, volume in volumes]
    for arrays in zip(*trials, strict=True):
        first = _rows_of_part(plan, function, arrays, TRIED)
        plan = replace(plan, types=tuple((name, values.dtype.name) for name, values in first.items()))
        for parts in ([TRIED], *(_halves(TRIED, axis) for axis in range(3))):
            total = plan.total(_rows_of_part(plan, function, arrays, part) for part in parts)
            if difference := _row_difference(plan.choice, plan.total([first]), total):
                raise PlanError(
                    f"function {plan.choice.function} gives other rows of {' and '.join(map(str, parts))} than of "
                    f"{TRIED}: {difference}; the table would depend on the blocks, or on chance. Count each voxel "
                    "once, none of the halo; add start to positions; give sums, and ratio for means; seed chance"
                )
    return plan


def _rows_of_part(plan: Measurement, function: Function, arrays: Sequence[np.ndarray], part: Box) -> Columns:
    """Return the rows of a part of the block that is tried, whose voxels with the halo are `arrays` (c, z, y, x)."""
    place = part.grown(plan.choice.halo).relative_to(TRIED.grown(plan.choice.halo).start).slices
    return plan.rows(function, [array[:, *place].copy() for array in arrays], part)


def _halves(box: Box, axis: int) -> list[Box]:
    """Return two boxes of about half of `box`."""
    cut = [(box.start[axis] + box.stop[axis]) // 2 - 1]
    below, above = ([*corner[:axis], *cut, *corner[axis + 1 :]] for corner in (box.stop, box.start))
    return [Box(box.start, tuple(below)), Box(tuple(above), box.stop)]


def _row_difference(choice: Measuring, whole: Columns, parts: Columns) -> str:
    """Return how rows differ, in words; "" where they do not, but for the last bits of floats."""
    from volpipe.nets.functions import is_same

    if not all(np.array_equal(whole[name], parts[name]) for name in choice.by):
        return f"{len(parts[choice.by[0]])} rows and {len(whole[choice.by[0]])}, or of other {', '.join(choice.by)}"
    for name in choice.combine:
        if len(rows := np.flatnonzero(~is_same(whole[name], parts[name]))):
            values = f"{parts[name][rows[0]]} and not {whole[name][rows[0]]}"
            return f"column {name} is {values} where {_row_key(choice, whole, rows[0])}"
    return ""


def _row_key(choice: Measuring, columns: Columns, row: int) -> str:
    """Return the key of a row in words, such as "label is 7"."""
    return " and ".join(f"{name} is {columns[name][row]}" for name in choice.by)


def _one_row_a_key(table: Columns, choice: Measuring) -> Columns:
    """Return `table` with one row of each key, in the order of keys."""
    order = np.lexsort([table[name] for name in reversed(choice.by)])
    table = {name: values[order] for name, values in table.items()}
    is_first = np.ones(len(order), bool)
    is_first[1:] = np.any([table[name][1:] != table[name][:-1] for name in choice.by], axis=0)
    starts = np.flatnonzero(is_first)
    columns = {name: UFUNCS[rule].reduceat(table[name], starts) for name, rule in choice.combine.items()}
    return {name: table[name][starts] for name in choice.by} | columns


def _exact(values: np.ndarray) -> np.ndarray:
    """Return numbers as Python integers, which add up exactly; floats are multiplied by SCALE first."""
    if values.dtype.kind != "f":
        return values.astype(object)
    ratios = map(float.as_integer_ratio, values.tolist())
    return np.array([above * (SCALE // below) for above, below in ratios], object)


def _cells(table: Columns, choice: Measuring) -> Iterator[list[int | float | str]]:
    """Yield the cells of each row, with those of ratios."""
    places = {name: number for number, name in enumerate(table)}
    ratios = [(places[above], places[below]) for above, below in choice.ratio.values()]
    for start in range(0, len(table[choice.by[0]]), ROWS):
        for row in zip(*(values[start : start + ROWS].tolist() for values in table.values()), strict=True):
            yield [*row, *(row[above] / row[below] if row[below] else "" for above, below in ratios)]


@lru_cache(maxsize=4)
def _loaded(name: str, search_path: str, code: str) -> Function:
    """Return the function of that name, whose `code` is that of the plan."""
    if (own := code_hash(name, search_path)) != code:
        raise NetError(
            f"the code of function {name} is {short_hash(own)} here, and {short_hash(code)} in the plan: it was edited "
            "after the stage began, or is another on this node; give the command again"
        )
    return load_function(name, search_path)
