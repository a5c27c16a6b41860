"""The command line: `volpipe run`, `plan`, `info`, `convert`, `status`, `sample`, `sites`; the only code that prints.

Not here: anything that a notebook would want as well (driver). Exit codes: 0 done, 1 part is missing, 2 refused.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import psutil
import typer
from rich.live import Live
from rich.text import Text

import volpipe.configs
from volpipe import cli_evaluate, cli_flow, cli_k8s, cli_label, cli_net, cli_sites, cli_sweep, cli_train, cli_verify
from volpipe.cli_slurm import slurm
from volpipe.errors import RunStopped, VolpipeError
from volpipe.interrupts import GRACE_SECONDS, INTERRUPTS
from volpipe.resolve import told
from volpipe.show import (
    MOST_ROWS,
    Rate,
    alternatives_table,
    appraisal_table,
    codec_table,
    duration,
    footprint_lines,
    info_lines,
    intensity_line,
    missing_table,
    plan_table,
    progress_line,
    progress_table,
    report_table,
    seam_line,
    seam_warning,
    status_table,
)
from volpipe.terminal import err, measuring_shown, out

if TYPE_CHECKING:
    from volpipe.driver import Report
    from volpipe.flow import Flow
    from volpipe.plan import Plan
    from volpipe.run import Progress
    from volpipe.volume import Volume

DONE, INCOMPLETE, REFUSED = 0, 1, 2
STOPPING = f"\nstopping: what runs may finish within {GRACE_SECONDS:.0f} s; once more, and it stops at once\n"
PLAIN_LINE_SECONDS = 10.0

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Run a neural net over a volume far larger than memory, in chunks, on whatever machines there are.",
)
app.add_typer(slurm, name="slurm")

app.add_typer(cli_k8s.app, name="k8s")
app.add_typer(cli_sites.app, name="sites")
app.command()(cli_train.train)
app.command("sweep")(cli_sweep.sweep)
app.command("tune")(cli_sweep.tune)
app.command()(cli_evaluate.evaluate)
app.command()(cli_label.label)
app.command()(cli_net.net)
app.command()(cli_verify.verify)
app.command()(cli_verify.reproduce)


VolumeArgument = Annotated[
    str, typer.Argument(help="The volume: N5, Zarr, HDF5, TIFF, MRC, .npy, or an array inside; also s3://, https://.")
]
SiteOption = Annotated[str, typer.Option(help="Site: a shipped name (see `volpipe sites`) or a Python file.")]
RecipeOption = Annotated[Path | None, typer.Option(help="What to do, as TOML; without one, the default recipe.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="key=value on top of the recipe.")]
OutOption = Annotated[
    str | None, typer.Option("--out", "-o", help="Output, also s3://; by default NAME_NET.zarr here.")
]

RoiOption = Annotated[
    str | None,
    typer.Option(help="Box z0:z1,y0:y1,x0:x1 that is wanted, in voxels or as 100nm:900nm; a bare : is all."),
]
TrustOption = Annotated[
    bool, typer.Option("--trust-model", help="Load a net's file that is code, TorchScript or torch.export.")
]
OnlyOption = Annotated[
    str | None, typer.Option(help="Box z0:z1,y0:y1,x0:x1 of the output, in voxels: compute what it needs, and no more.")
]
TolerateOption = Annotated[
    float, typer.Option(help="Share of the blocks begun that may fail before the run stops.", min=0, max=1)
]
MaskOption = Annotated[str | None, typer.Option(help="Volume of any resolution, nonzero where voxels are wanted.")]


@app.command()
def run(
    volume: VolumeArgument,
    config: SiteOption = "local",
    recipe: RecipeOption = None,
    settings: SetOption = None,
    out_path: OutOption = None,
    roi: RoiOption = None,
    mask: MaskOption = None,
    trust_model: TrustOption = False,
    fresh: Annotated[bool, typer.Option(help="Delete this output and its run, and start over.")] = False,
    keep_tensors: Annotated[bool, typer.Option(help="Keep window tensors and block tensors.")] = False,
    only: OnlyOption = None,
    tolerate: TolerateOption = 0.1,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first block that fails for good.")] = False,
) -> None:
    """Run a net, or a recipe's stages, over VOLUME; the same command again goes on where an interrupted run stopped."""
    flow = _find_flow(recipe, settings, roi, mask, trust_model)
    if flow is not None:
        if only is not None:
            raise VolpipeError("--only is for one net; leave it out, or give the stages a --roi")
        with _interruptible():
            is_complete = cli_flow.run(
                cli_flow.plan_of(flow, volume, out_path), config,
                fresh=fresh, keep_tensors=keep_tensors, tolerated=0 if strict else tolerate, shown=_shown, tell=_tell,
            )  # fmt: skip
        raise typer.Exit(DONE if is_complete else INCOMPLETE)
    from volpipe.apps.start import on_site
    from volpipe.driver import Listener, execute
    from volpipe.region import find_part

    with _interruptible():
        start = on_site(config)
        plan = _prepare(volume, recipe, _added(settings, roi, mask, trust_model), out_path)
        with _shown(plan) as on_progress:
            listener = Listener(
                lambda plan, folder: out.print(plan_table(plan, config)),
                lambda found: out.print(appraisal_table(found, config)),
                on_progress,
            )
            report = execute(
                plan, start, fresh=fresh, keep_tensors=keep_tensors, listener=listener, site=config,
                only=None if only is None else find_part(only, plan.out_shape), tolerated=0 if strict else tolerate,
            )  # fmt: skip
    if report.was_complete:
        out.print(f"{plan.out} is complete already; nothing to do (--fresh starts over)")
        return
    _tell(report)
    if report.missing:
        raise typer.Exit(INCOMPLETE)
    out.print(f"wrote {f'the part {only} of ' if report.num_held else ''}{plan.out}")


def _tell(report: Report, started: float | None = None) -> None:
    """Print how a run ended that was `started` then, in seconds since 1970, or with this process; what is missing."""
    out.print(report_table(report, started=started or psutil.Process().create_time()))
    if report.seams:
        out.print(seam_line(report.seams))
    if warning := seam_warning(report.seams):
        err.print(warning)
    if report.kept.total:
        err.print(
            f"blocks of the output hold {report.kept} voxels, kept as infer.nonfinite=keep says "
            "(the journal has each block; a voxel that several reach counts in each)"
        )
    if report.num_held:
        out.print(f"{report.num_held} blocks beyond --only are not done; the same command without it does them")
    if report.missing:
        err.print(missing_table(report.missing))
        err.print(
            f"{len(report.missing)} parts are missing; the same command again tries them once more "
            f"(log: {report.folder}/volpipe.log)"
        )


@app.command()
def plan(
    volume: VolumeArgument,
    config: SiteOption = "local",
    recipe: RecipeOption = None,
    settings: SetOption = None,
    out_path: OutOption = None,
    roi: RoiOption = None,
    mask: MaskOption = None,
    trust_model: TrustOption = False,
    quick: Annotated[bool, typer.Option(help="Try no block: no times, and upper bounds of bytes.")] = False,
) -> None:
    """Print what `volpipe run` with the same options would read, write and take, after trying a few blocks."""
    flow = _find_flow(recipe, settings, roi, mask, trust_model)
    if flow is not None:
        with _interruptible():
            cli_flow.show_plan(cli_flow.plan_of(flow, volume, out_path), config, quick=quick)
        return
    from volpipe.driver import preview

    with _interruptible():
        start = None
        if not quick:
            from volpipe.apps.start import on_site

            start = on_site(config)
        chosen = _prepare(volume, recipe, _added(settings, roi, mask, trust_model), out_path)
        out.print(plan_table(chosen, config))
        found = preview(chosen, start)
    out.print(appraisal_table(found, config))
    out.print(alternatives_table(found.alternatives()))
    found.check()


@app.command()
def info(
    volume: Annotated[str, typer.Argument(help="A volume, or a container with several.")],
    level: Annotated[int, typer.Option(help="Level of a multiscale group, 0 is the finest.")] = 0,
    fast: Annotated[bool, typer.Option("--fast", help="Only what the metadata say; read no voxels.")] = False,
    seed: Annotated[int, typer.Option(help="Decides which chunks of a large volume are looked at.")] = 0,
) -> None:
    """Print what VOLUME is; what lies on disk, its intensities, and what other codecs and chunks would give."""
    from volpipe.volume import open_volume

    found = open_volume(volume, level=level)
    for line in info_lines(found):
        out.print(line)
    if not fast:
        _print_survey(found, seed)


def _print_survey(volume: Volume, seed: int) -> None:
    """Print each part as soon as it is there; together they take a few seconds."""
    from volpipe.survey import measure_footprint, measure_intensities, try_codecs

    footprint = measure_footprint(volume, seed=seed)
    for line in footprint_lines(volume, footprint):
        out.print(line)
    intensities = measure_intensities(volume, seed=seed)
    out.print(intensity_line(intensities))
    trials = try_codecs(volume, seed=seed, seconds_per_chunk=intensities.seconds)
    out.print()
    out.print(codec_table(volume, trials, footprint.stored_share))


@app.command()
def status(
    output: Annotated[str, typer.Argument(help="An output, or its run's folder.")],
    every: Annotated[bool, typer.Option("--all", help="List all boxes that failed, not the first of them.")] = False,
) -> None:
    """Print how far the run or the labelling that writes OUTPUT is, and which boxes failed, from its journal."""
    from volpipe.driver import inspect_run

    most = None if every else MOST_ROWS
    is_complete = cli_flow.show_status(output, most)
    if is_complete is None:
        is_complete = cli_label.show_status(output, most)
    if is_complete is None:
        found = inspect_run(output)
        is_complete = found.is_complete
        if found.missing:
            out.print(missing_table(found.missing, most))
        out.print(status_table(found))
    raise typer.Exit(DONE if is_complete else INCOMPLETE)


@app.command()
def sample(
    path: Annotated[Path, typer.Argument(help="Where to write, such as sample.n5.")],
    shape: Annotated[str, typer.Option(help="Voxels z,y,x.")] = "128,256,256",
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
) -> None:
    """Write a made-up electron-microscopy volume, arrays `raw` and `labels`, to PATH."""
    from volpipe.sample import Sample, write_sample

    if str(path).startswith(("s3:", "http:", "https:")):
        raise VolpipeError(f"samples are written to a disk, not to {path.parts[0]}//; choose a folder")
    sizes = _parse_shape(shape)
    started = time.perf_counter()
    with _counting() as on_progress:
        write_sample(path, Sample(sizes, seed), workers=workers, on_progress=on_progress)
    took = duration(time.perf_counter() - started)
    out.print(f"wrote {path}: raw and labels, {' × '.join(map(str, sizes))} voxels, seed {seed}, in {took}")


@app.command()
def convert(
    volume: Annotated[str, typer.Argument(help="A volume of any format, or an array inside a container.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="The copy: a file or a container, or a path into one.")],
    format: Annotated[
        str, typer.Option(help="n5, zarr2, zarr3, ome-zarr-0.4, ome-zarr-0.5, hdf5, tiff, mrc, npy.")
    ] = "auto",
    chunk: Annotated[str | None, typer.Option(help="Voxels z,y,x; one number for all three.")] = None,
    shard: Annotated[str | None, typer.Option(help="Voxels z,y,x, of Zarr v3.")] = None,
    codec: Annotated[str, typer.Option(help="zstd, gzip or raw.")] = "auto",
    workers: Annotated[int, typer.Option(help="How many read at once.", min=1)] = 1,
    level: Annotated[int, typer.Option(help="Level of a multiscale group, 0 is the finest.")] = 0,
) -> None:
    """Copy VOLUME to OUT, in another format; OUT is there when it is whole."""
    from volpipe.convert import Choice, parse_sizes
    from volpipe.convert import convert as copy
    from volpipe.volume import open_volume

    sizes = (parse_sizes(chunk, "--chunk") if chunk else None, parse_sizes(shard, "--shard") if shard else None)
    started = time.perf_counter()
    with _counting() as on_progress:
        made = copy(
            open_volume(volume, level=level), target, Choice(format, *sizes, codec),
            workers=workers, on_progress=on_progress,
        )  # fmt: skip
    out.print(f"wrote {target} in {duration(time.perf_counter() - started)}")
    for line in info_lines(made):
        out.print(line)


def version(wanted: bool) -> None:
    if wanted:
        out.print(volpipe.__version__)
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run the command line; what a user can put right is one sentence, anything else is a traceback."""
    INTERRUPTS.reset()
    signal.signal(signal.SIGTERM, _interrupt)
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background, and under nohup
            signal.signal(number, _interrupt)
    logging.getLogger("volpipe").addHandler(logging.NullHandler())
    try:
        app()
    except RunStopped as error:
        from volpipe.run import is_told

        if error.detail and not is_told(error.detail):
            err.print(error.detail, markup=False)
        _fail(str(error), INCOMPLETE)
    except VolpipeError as error:
        _fail(str(error), REFUSED)
    except OSError as error:
        _fail(told(error), REFUSED)


def _fail(sentence: str, code: int) -> NoReturn:
    err.print(f"volpipe: {sentence}", markup=False)
    sys.exit(code)


def _interrupt(signum: int, frame: Any) -> None:  # Any: a frame, unused
    if INTERRUPTS.ask():
        # Not through the console: what was interrupted may be printing.
        os.write(sys.stderr.fileno(), STOPPING.encode())


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn Ctrl-C, TERM and a closed terminal into a sentence; the journal is whole at any moment."""
    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted; the same command again goes on from here", INCOMPLETE)


@contextmanager
def _counting() -> Iterator[Callable[[int, int], None]]:
    """Give a listener that shows on a terminal how many boxes are done."""
    with Live(console=err, transient=True, auto_refresh=False) if err.is_terminal else nullcontext() as live:

        def on_progress(done: int, total: int) -> None:
            if live is not None:
                live.update(Text(f"box {done} of {total}"), refresh=True)

        yield on_progress


@contextmanager
def _shown(plan: Plan) -> Iterator[Callable[[Progress], None]]:
    """Give a listener that shows progress: a live table on a terminal, a plain line now and then elsewhere."""
    rate = Rate(math.prod(plan.out_shape) / plan.num_active)
    if err.is_terminal:
        with Live(console=err, transient=True, refresh_per_second=4) as live:

            def on_terminal(progress: Progress) -> None:
                rate.look(progress)
                live.update(progress_table(progress, rate))

            yield on_terminal
        return
    last = time.perf_counter()

    def on_pipe(progress: Progress) -> None:
        nonlocal last
        rate.look(progress)
        if time.perf_counter() - last >= PLAIN_LINE_SECONDS:
            last = time.perf_counter()
            err.print(progress_line(progress, rate))

    yield on_pipe


def _added(settings: list[str] | None, roi: str | None, mask: str | None, trust_model: bool) -> list[str]:
    """Return `settings` and those that the other options stand for."""
    named = {"roi": roi, "mask": mask}
    region = [f"input.{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    return [*(settings or []), *region, *(["net.trust_model=true"] if trust_model else [])]


def _find_flow(
    recipe: Path | None, settings: list[str] | None, roi: str | None, mask: str | None, trust_model: bool
) -> Flow | None:
    """Return the stages that the recipe's file declares; None where it is the recipe of one net."""
    from volpipe.flow import find_flow
    from volpipe.resolve import shipped_recipe

    if recipe is None:
        return None
    return find_flow(
        shipped_recipe(recipe), settings or [],
        for_volume=_added([], roi, mask, trust_model=False), for_runs=_added([], None, None, trust_model),
    )  # fmt: skip


def _prepare(volume: str, recipe: Path | None, settings: list[str], out_path: str | None) -> Plan:
    from volpipe.driver import prepare
    from volpipe.limits import check_window
    from volpipe.nets import cautions
    from volpipe.recipe import load_recipe
    from volpipe.resolve import shipped_recipe

    chosen = load_recipe(shipped_recipe(recipe) if recipe else None, settings)
    target = out_path or _default_output(volume, chosen.net.name, chosen.output.format)
    with measuring_shown():
        plan = prepare(volume, chosen, target, Path.cwd())
    check_window(plan)
    for caution in cautions(plan.recipe.net, plan.net):
        err.print(f"warning: {caution}", markup=False)
    return plan


def _default_output(volume: str, net: str, output_format: str) -> str:
    """Return a name in this folder: of the container, the key in it where it was given, and the net."""
    from volpipe.formats.container import locate
    from volpipe.programs import label_of

    container, key = locate(volume)
    parts = [container.stem, *filter(None, key.split("/")), label_of(net)]
    return f"{'_'.join(parts)}{'.n5' if output_format == 'n5' else '.zarr'}"


def _parse_shape(text: str) -> tuple[int, int, int]:
    try:
        z, y, x = (int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise VolpipeError(f"--shape {text!r}: write three numbers, z,y,x, such as 128,256,256") from None
    if min(z, y, x) < 1:
        raise VolpipeError(f"--shape {text!r}: every axis needs at least one voxel")
    return z, y, x


if __name__ == "__main__":
    main()
