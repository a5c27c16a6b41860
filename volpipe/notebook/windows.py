"""The cost of a net's windows, and the one to choose.

Not here: how a window is measured (estimation.window_search).
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from pathlib import Path

from volpipe.errors import PlanError, VolpipeError
from volpipe.estimation.window_search import (
    WindowCost,
    fastest,
    free_memory,
    held_memory,
    measure_windows,
    measure_windows_here,
)
from volpipe.geometry.grid import Triple
from volpipe.nets.load import describe
from volpipe.recipes.inference import Recipe
from volpipe.tables import html_table, text_table
from volpipe.units import shape

MIB = 1 << 20
HEAD = ("window", "batch", "channels last", "kept of it", "memory", "time", "voxels kept per second", "")


@dataclass(frozen=True, repr=False)
class WindowCosts:
    """Windows that were tried, and the one to choose.

    Attributes:
        halo: voxels (z, y, x) that are cropped at either side of a window.
        costs: of windows, ascending; the search ends where one takes too long, or more memory than there is.
        most_bytes: memory that a window may take here.
        best: the fastest that fits; None where none does.
    """

    net: str
    halo: Triple
    costs: tuple[WindowCost, ...]
    most_bytes: int
    best: WindowCost | None

    def __repr__(self) -> str:
        return f"<WindowCosts of {self.net}, halo {self.halo}>\n{text_table(HEAD, self._cost_rows)}\n{self.advice}"

    def _repr_html_(self) -> str:
        marked = None if self.best is None else self.costs.index(self.best)
        table = html_table(HEAD, self._cost_rows, caption=f"{self.net}, halo {self.halo}", marked=marked)
        return f"{table}<p>{html.escape(self.advice)}</p>"

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that choose the best window, as `run` and `try_net` take them; none where no window fits."""
        if self.best is None:
            return ()
        return (
            f"windows.shape={list(self.best.window)}",
            f"infer.batch={self.best.batch}",
            f"infer.channels_last={str(self.best.channels_last).lower()}",
        )

    @property
    def advice(self) -> str:
        """What to choose, a sentence."""
        if self.best is None:
            return f"no window fits {self.most_bytes / MIB:,.0f} MiB of memory; use a smaller net, or another machine"
        return f"choose {' '.join(self.settings)}: {self.best.speed:,.0f} voxels per second"

    @property
    def _cost_rows(self) -> list[list[str]]:
        return [
            [
                shape(cost.window), str(cost.batch), "yes" if cost.channels_last else "",
                f"{100 * cost.kept / math.prod(cost.window):.0f} %",
                f"{cost.num_bytes / MIB:,.0f} MiB", f"{cost.seconds:.2g} s", f"{cost.speed:,.0f}",
                "choose this" if cost == self.best else "",
            ]
            for cost in self.costs
        ]  # fmt: skip


def windows(recipe: Recipe, search_path: Path, *, is_here: bool) -> WindowCosts:
    """Return the cost of windows of the net of `recipe`; arguments as of `volpipe.windows`.

    Relative names in it count from `search_path`; with `is_here` only this process has the net.
    """
    net = describe(recipe.net, str(search_path))
    if not net.tile_invariant:
        raise PlanError(
            f"net {net.label} looks at whole windows, so that its output depends on their size; set windows.shape to "
            "that of its training, whatever it costs"
        )
    measure = measure_windows_here if is_here else measure_windows
    costs = tuple(measure(recipe.net, recipe.infer, net, net.halo, str(search_path)))
    if not costs:
        raise VolpipeError(
            f"no window of net {net.label} could be tried: the process of the first one ended. Either the memory is "
            "too little for it, or this is a script: call vp.windows below `if __name__ == '__main__':` there"
        )
    memory = free_memory() + (held_memory() if is_here else 0)
    return WindowCosts(net.label, net.halo, costs, memory, fastest(costs, memory))
