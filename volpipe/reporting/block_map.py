"""The map of blocks over a volume: how long each took and where, which were tried again, and which are missing.

Not here: tables of tasks (tally). The grid of blocks is seen from three sides; a cell of the map stands for a column
of blocks, and of a large grid for several columns, so that 10^7 blocks take no more room than 10^4::

    blocks (z, y, x)      seen along z: a cell for each (y, x)      seen along y: (z, x)      seen along x: (z, y)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from volpipe.blockwise.stage import Schedule, Stage
from volpipe.geometry.grid import Grid
from volpipe.reporting.page import Chart, Item
from volpipe.reporting.slices import PLANES
from volpipe.units import count, duration

MOST_CELLS = 32  # of a map along an axis
BATCH = 1 << 16  # units that are added at a time
MOST_NODES = 20  # told apart by colour
OTHERS = "other nodes"
MOST_MAPS = 2


@dataclass
class GridSide:
    """A grid of blocks from one side; arrays are (down, across), of cells.

    Attributes:
        axis: along which it is seen.
        step: blocks (down, across) that a cell joins.
        longest, total: seconds of the slowest block, and of all.
        node: number of the node that had the slowest.
        num_done, num_tries, num_missing: blocks; tries are those that failed.
    """

    grid: Grid
    axis: int
    step: tuple[int, int] = field(init=False)
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        counts = [n for i, n in enumerate(self.grid.counts) if i != self.axis]
        down, across = (-(-n // MOST_CELLS) for n in counts)
        self.step = down, across
        self.shape = -(-counts[0] // down), -(-counts[1] // across)
        self.longest, self.total = np.zeros(self.shape), np.zeros(self.shape)
        self.node = np.full(self.shape, -1)
        self.num_done, self.num_tries, self.num_missing = (np.zeros(self.shape, np.int64) for _ in range(3))

    def cells(self, units: np.ndarray) -> np.ndarray:
        """Return the number of the cell of each of `units`, (n,)."""
        places = [p for i, p in enumerate(np.unravel_index(units, self.grid.counts)) if i != self.axis]
        cells: np.ndarray = places[0] // self.step[0] * self.shape[1] + places[1] // self.step[1]
        return cells

    def add(self, units: np.ndarray, seconds: np.ndarray, nodes: np.ndarray) -> None:
        """Add blocks that are done, (n,), with the seconds and the node of each."""
        cells, size = self.cells(units), self.longest.size
        self.num_done += np.bincount(cells, minlength=size).reshape(self.shape)
        self.total += np.bincount(cells, seconds, size).reshape(self.shape)
        order = np.argsort(seconds, kind="stable")
        longest, node = np.full(size, -1.0), np.zeros(size, np.int64)
        longest[cells[order]], node[cells[order]] = seconds[order], nodes[order]  # the last of a cell counts
        is_longer = longest.reshape(self.shape) > np.where(self.node < 0, -1.0, self.longest)
        self.longest = np.where(is_longer, longest.reshape(self.shape), self.longest)
        self.node = np.where(is_longer, node.reshape(self.shape), self.node)

    def count(self, units: np.ndarray) -> np.ndarray:
        """Return how many of `units` are in each cell."""
        return np.bincount(self.cells(units), minlength=self.longest.size).reshape(self.shape)

    def edges(self, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where cells begin and end, down (0) or across (1), in voxels."""
        axis = [i for i in range(3) if i != self.axis][side]
        size = self.step[side] * self.grid.cell[axis]
        starts = np.arange(self.shape[side]) * size
        return starts, np.minimum(starts + size, self.grid.shape[axis])


@dataclass
class BlockMap:
    """The blocks of one stage: its tasks, as a tally of its journal adds them, and in the end what of it is done."""

    stage: str
    grid: Grid
    views: dict[str, GridSide] = field(init=False)
    nodes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    _waiting: list[tuple[list[int], float, int]] = field(default_factory=list, repr=False)
    _num_waiting: int = 0

    def __post_init__(self) -> None:
        self.views = {name: GridSide(self.grid, axis) for name, axis in PLANES.items()}

    def add(self, units: Sequence[int], seconds: float, node: str) -> None:
        """Add a task: the blocks that it did, and the seconds that it took for all of them."""
        number = self.nodes.setdefault(node, len(self.nodes))
        self._waiting.append(([*units], seconds / max(1, len(units)), number))
        self._num_waiting += len(units)
        self.seconds += seconds
        if self._num_waiting >= BATCH:
            self._flush()

    def _flush(self) -> None:
        lengths = [len(units) for units, _, _ in self._waiting]
        units = np.array([unit for some, _, _ in self._waiting for unit in some], np.int64)
        seconds = np.repeat(np.array([pace for _, pace, _ in self._waiting]), lengths)
        nodes = np.repeat(np.array([node for _, _, node in self._waiting], np.int64), lengths)
        inside = (units >= 0) & (units < len(self.grid))
        for view in self.views.values():
            view.add(units[inside], seconds[inside], nodes[inside])
        self._waiting, self._num_waiting = [], 0

    def add_attempt(self, units: Iterable[int]) -> None:
        """Add blocks of a task that failed."""
        self._count_units("num_tries", units)

    def close(self, stage: Stage) -> None:
        """Take note of what is missing in the end."""
        self._flush()
        lacking = ~stage.done if stage.active is None else ~stage.done & stage.active
        for start in range(0, len(lacking), BATCH):
            self._count_units("num_missing", (np.flatnonzero(lacking[start : start + BATCH]) + start).tolist())

    def _count_units(self, name: str, units: Iterable[int]) -> None:
        known = np.array([unit for unit in units if 0 <= unit < len(self.grid)], np.int64)
        if known.size:
            for view in self.views.values():
                setattr(view, name, getattr(view, name) + view.count(known))

    def items(self) -> Iterator[Item]:
        """Yield the map of times and, where there are several, of nodes; nothing of a single block."""
        views = {name: view for name, view in self.views.items() if view.longest.size > 1}
        if not views:
            return
        parts = [self._cell_columns(name, view) for name, view in views.items()]
        columns = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        slowest = max(float(view.longest.max()) for view in self.views.values())
        num_joined = max(view.step[0] * view.step[1] for view in views.values())
        cell = "a column of blocks" if num_joined == 1 else f"up to {count(num_joined, 'column')} of blocks"
        caption = (
            f"Each square is {cell}, seen along the axis that its panel does not show; its colour is the time of the "
            f"slowest block in it, {duration(slowest)} at most. Triangles: tried again. Crosses: missing, "
            "set aside among them. Voxels count from the corner of the volume."
        )
        yield Chart(f"Blocks of {self.stage}: time", caption, "block_times", columns)
        if len(self.nodes) > 1:
            caption = "The node of the slowest block in each square."
            yield Chart(f"Blocks of {self.stage}: nodes", caption, "block_nodes", columns)

    def _cell_columns(self, name: str, view: GridSide) -> dict[str, list[object]]:
        """Return the cells of a view, a row each."""
        (top, bottom), (left, right) = view.edges(0), view.edges(1)
        down, across = (grid.ravel() for grid in np.indices(view.shape))
        names = [*self.nodes][:MOST_NODES]
        nodes = [names[i] if 0 <= i < MOST_NODES else OTHERS if i >= 0 else None for i in view.node.ravel().tolist()]
        known = view.num_done > 0
        mean = np.divide(view.total, view.num_done, out=np.full(view.shape, np.nan), where=known)
        return {
            "plane": [name] * view.longest.size,
            "x0": left[across].tolist(), "x1": right[across].tolist(),
            "y0": top[down].tolist(), "y1": bottom[down].tolist(),
            "seconds": _rounded(np.where(known, view.longest, np.nan)), "mean": _rounded(mean),
            "blocks": view.num_done.ravel().tolist(), "tries": view.num_tries.ravel().tolist(),
            "missing": view.num_missing.ravel().tolist(), "node": nodes,
        }  # fmt: skip


def _rounded(values: np.ndarray) -> list[object]:
    return [None if value != value else float(f"{value:.3g}") for value in values.ravel().tolist()]


def slowest_maps(maps: Mapping[str, BlockMap], schedule: Schedule) -> Iterator[Item]:
    """Yield the maps of the stages that took longest, with what `schedule` says is missing."""
    for name, blocks in sorted(maps.items(), key=lambda entry: -entry[1].seconds)[:MOST_MAPS]:
        blocks.close(schedule.by_name[name])
        yield from blocks.items()
