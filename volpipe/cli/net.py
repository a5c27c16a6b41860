"""`volpipe net`: what a net is, measured: how far it sees, the halo that it needs, and what windows cost it.

Not here: the measuring (api.nets, estimation). Exit codes as in cli; 1 where the net says of itself what is not so.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import volpipe as vp
from volpipe.cli.generate import command
from volpipe.cli.groups import Group
from volpipe.cli.options import amount, complete_site
from volpipe.display.console import columns, err, measuring_shown, out
from volpipe.errors import VolpipeError
from volpipe.units import count, shape, size

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from volpipe.api.nets import NetReport
    from volpipe.nets.facts import NetFacts
    from volpipe.nets.net_geometry import Geometry
    from volpipe.recipes.inference import Recipe

UNTRUE = 1
MOST_TRIED = 256**3  # voxels of the window over which smaller halos are tried
HALF_A_GREY_LEVEL = 0.5 / 127.5  # of uint8 voxels between -1 and 1


@command(Group.NETS, "net_report", place=3)
def net(
    name: str,
    settings: list[str],
    recipe: str | None,
    trust_model: bool,
    *,
    volume: Annotated[
        str | None, typer.Argument(metavar="VOLUME", help="Where a real window is taken from; else an invented one.")
    ] = None,
    error: Annotated[
        float, typer.Option(parser=amount, metavar="E", help="Largest error that a halo may leave.")
    ] = HALF_A_GREY_LEVEL,
    no_costs: Annotated[bool, typer.Option("--no-costs", help="Try no windows for their memory and speed.")] = False,
    site: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="SITE",
            help="Time windows on a worker of this site, a cluster's GPU or a core here; plans then take the fastest.",
            autocompletion=complete_site,
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            min=0.0,
            metavar="SECONDS",
            help="With --config of a cluster: for the job to start and to time the net.",
        ),
    ] = 300,
) -> None:
    """Measure the net NAME: its receptive field, exact halo and stride, smaller halos, and what windows cost."""
    if site is not None:
        from volpipe.apps.net_times import check_site

        check_site(site)  # before anything is measured
    with measuring_shown():
        report = vp.net_report(name, *settings, recipe=recipe, trust_model=trust_model)
    facts, geometry = report.facts, report.geometry
    _print_description(report)
    if geometry is None:
        err.print(f"its geometry cannot be measured: {report.problem}")
        raise typer.Exit(UNTRUE)
    out.print(_geometry_table(facts, geometry))
    is_plain = not any(facts.fixed) and not geometry.whole_window and not geometry.further
    halo = _halos(report.recipe, facts, geometry, volume, error) if is_plain else geometry.halo
    if site is not None:
        _times(report.recipe, facts, site, wait)
    elif not no_costs:
        _costs(report.recipe, facts, halo)
    for sentence in report.untruths:
        err.print(sentence)
    if report.untruths:
        raise typer.Exit(UNTRUE)


def _print_description(report: NetReport) -> None:
    """Print what the net is: its kind, channels, shapes and outputs, and what of it looks at whole windows."""
    facts, geometry = report.facts, report.geometry
    kind = f"a net of slices ({', '.join(facts.planes)})" if facts.planes else "a net of volumes"
    context = f", each with {count(facts.context, 'neighbour')} on both sides" if facts.context else ""
    out.print(
        f"net {facts.label}, {facts.num_parameters:,} parameters, {facts.in_channels} → {facts.out_channels} channels"
    )
    for line in report.notes:
        out.print(line)
    out.print(f"it is {kind}{context}")
    if geometry is not None and geometry.least is not None:
        window, output = geometry.least
        out.print(
            f"a window ({facts.in_channels}, {', '.join(map(str, window))}) gives ({geometry.out_channels}, "
            f"{', '.join(map(str, output))}); it takes {_window_sizes(facts)}",
        )
    if facts.outputs:
        taken = f"; {report.recipe.net.output} is taken" if report.recipe.net.output is not None else ""
        out.print(f"it gives {len(facts.outputs)} outputs: {', '.join(facts.outputs)}{taken}")
    if facts.regions:
        listed = ", ".join(f"{i} {region.name}" for i, region in enumerate(facts.regions))
        out.print(f"its channels are regions, which may overlap: {listed}")
    for layer in report.whole_window_layers:
        out.print(f"looks at whole windows: {layer}; tiles differ from the whole, whatever the halo")
    if geometry is not None and geometry.whole_window and not report.whole_window_layers:
        out.print(f"tiles differ from the whole: {geometry.whole_window}")
    if geometry is not None and geometry.further:
        out.print(
            f"its halo is not known: {geometry.further}; windows get one of {shape(facts.halo)}, and may show seams"
        )


def _window_sizes(facts: NetFacts) -> str:
    """Return which windows a net takes, along z, y, x."""
    if not any((*facts.fixed, *facts.margin, *facts.remainder)):
        return (
            f"windows of multiples of {shape(facts.stride)} voxels" if max(facts.stride) > 1 else "windows of any size"
        )
    axes = zip(facts.fixed, facts.margin, facts.remainder, facts.stride, strict=True)
    lengths = [str(only) if only else _ascending(2 * margin + 1, rest, stride) for only, margin, rest, stride in axes]
    if len(set(lengths)) == 1:
        return f"windows of {lengths[0]} voxels along each axis"
    return f"windows of {'; '.join(f'{each} along {axis}' for axis, each in zip('zyx', lengths, strict=True))} (voxels)"


def _ascending(least: int, rest: int, stride: int) -> str:
    """Return the first three of the lengths rest + k * stride that are no less than `least`, and dots."""
    first = least + (rest - least) % stride
    return ", ".join(map(str, (first, first + stride, first + 2 * stride, "…")))


def _geometry_table(facts: NetFacts, found: Geometry) -> Table:
    """Return what was measured beside what the net says."""
    table = columns("voxels", "z", "y", "x", "declared")
    scales = [str(s) if r == 1 else f"1/{r}" for s, r in zip(found.scale, found.shrink, strict=True)]
    declared = [str(s) if r == 1 else f"1/{r}" for s, r in zip(facts.scale, facts.shrink, strict=True)]
    table.add_row("scale", *scales, " × ".join(declared))
    table.add_row("stride", *map(str, found.stride), shape(facts.stride))
    if any(found.margin) or any(facts.margin):
        table.add_row("margin", *map(str, found.margin), shape(facts.margin))
    if found.whole_window:
        return table
    if not any(found.margin) and not found.further:
        table.add_row("receptive field", *map(str, found.receptive_field), "")
    table.add_row("halo" if found.further else "exact halo", *map(str, found.halo), shape(facts.halo))
    return table


def _halos(chosen: Recipe, facts: NetFacts, found: Geometry, volume: str | None, error: float) -> tuple[int, int, int]:
    """Print what halos leave over a window, and return the least whose error is below `error`."""
    import torch

    from volpipe.estimation.halo_search import CORE, halo_errors, real_window
    from volpipe.geometry.grid import align_up, triple
    from volpipe.inference.tiling import around_core, own_window
    from volpipe.nets.bioimageio import PackageNet
    from volpipe.nets.files import inner_net
    from volpipe.nets.load import build_net
    from volpipe.nets.net_geometry import run_net

    core = triple(1 if axis == facts.across else align_up(CORE, stride) for axis, stride in enumerate(found.stride))
    largest = math.prod(map(sum, zip(core, *around_core(found, found.aligned_halo()), strict=True)))
    if largest > MOST_TRIED:
        out.print(f"smaller halos are not tried: the exact one takes a window of {largest:,} voxels")
        return found.halo
    voxels = real_window(chosen, facts.in_channels, found, core, volume)
    module = build_net(chosen.net, str(Path.cwd()))
    if isinstance(package := inner_net(module), PackageNet):
        package.is_strict = False  # halos are tried on windows that a package's own sizes may leave out

    def run(windows: np.ndarray) -> np.ndarray:
        result: np.ndarray = run_net(module, torch.from_numpy(windows)).numpy()
        return result

    table, enough, window = columns("halo", "largest error", "rms", "computed / kept"), None, own_window(facts)
    for row in halo_errors(run, voxels, found, core):
        kept = math.prod(max(0, w - sum(s)) for w, *s in zip(window, *around_core(found, row.halo), strict=True))
        ratio = f"{math.prod(window) / kept:.2f}" if kept else "no room"
        table.add_row(shape(row.halo), f"{row.largest:.2g}", f"{row.rms:.2g}", ratio)
        enough = row.halo if enough is None and row.largest <= error else enough
    out.print(table)
    assert enough is not None  # the exact halo leaves rounding alone
    out.print(f"halo {shape(enough)} keeps errors below {error:.2g}, over {volume or 'an invented volume'}")
    return enough


def _times(chosen: Recipe, facts: NetFacts, site: str, wait: float) -> None:
    """Print how fast windows are on a worker of `site`, by arithmetic, in millions of voxels a second."""
    from volpipe.apps.net_times import time_at_site

    with measuring_shown("volpipe.estimation.measure"):
        speeds, where = time_at_site(site, chosen, facts, wait_seconds=wait)
    measured = {
        each.arithmetic.words: {speed.window: math.prod(speed.window) / speed.seconds / 1e6 for speed in each.windows}
        for each in speeds.speeds
    }
    table = columns("window", *measured)
    for window in sorted({window for rates in measured.values() for window in rates}, key=math.prod):
        table.add_row(
            shape(window), *(f"{rates[window]:.3g}" if window in rates else "" for rates in measured.values())
        )
    out.print(table)
    out.print(f"Mvoxel/s on {where}; plans for {site} choose windows by them from now on")


def _costs(chosen: Recipe, facts: NetFacts, halo: tuple[int, int, int]) -> None:
    """Print what windows cost, and the one to choose."""
    from volpipe.estimation.window_search import fastest, free_memory, measure_windows

    table, found = columns("window", "batch", "channels last", "memory", "time", "voxels kept per second"), []
    for cost in measure_windows(chosen.net, chosen.infer, facts, halo, str(Path.cwd())):
        found.append(cost)
        table.add_row(
            shape(cost.window),
            str(cost.batch),
            "yes" if cost.channels_last else "",
            size(cost.num_bytes),
            f"{cost.seconds:.2g} s",
            f"{cost.speed:,.0f}",
        )
    out.print(table)
    memory = free_memory()
    choice = fastest(found, memory)
    if choice is None:
        raise VolpipeError(f"no window fits {size(memory)} of memory; use a smaller net, or another machine")
    out.print(
        f"choose net.halo={list(halo)} windows.shape={list(choice.window)} infer.batch={choice.batch} "
        f"infer.channels_last={str(choice.channels_last).lower()}: "
        f"{choice.speed:,.0f} voxels per second in {size(choice.num_bytes)}"
    )
