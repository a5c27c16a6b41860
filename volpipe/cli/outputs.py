"""`volpipe status`, `verify` and `reproduce`: how far an output is, whether it is as it was written, how to repeat it.

Not here: the comparing (runs.verify), its origin (runs.provenance), or how far it is (workflow.status). Exit codes as
in app, which has the command `status`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from volpipe.cli.display.console import check_target, out
from volpipe.cli.display.reports import driver_line, missing_table, standing_table
from volpipe.cli.options import Parents, whole

if TYPE_CHECKING:
    from volpipe.runs.verify import Recomputed, RunRecord, Verdict
    from volpipe.workflow.status import Status

OutputArgument = Annotated[
    str, typer.Argument(metavar="OUTPUT", help="An output of `volpipe run`, or labels of `volpipe segment`.")
]
MOST_NAMED = 100


def verify(
    output: OutputArgument,
    recompute: Annotated[
        int,
        typer.Option(parser=whole, metavar="K", help="Random blocks to compute again, by the net or as fragments."),
    ] = 0,
    seed: Annotated[int, typer.Option(metavar="N", parser=whole, help="Decides which blocks.")] = 0,
) -> None:
    """Read OUTPUT back, and name each file that is not as its task wrote it; exit code 1 if there are any."""
    from volpipe.runs import verify as verifying
    from volpipe.segmentation.verify import find_labels, recompute_labels, verify_labels

    _refuse_stages(output, "verify")
    labels = find_labels(output)
    if labels is not None:
        is_whole, again = _told(verify_labels(*labels)), recompute_labels(*labels, recompute, seed)
    else:
        record = verifying.load_run_record(verifying.location_of(output), needs_sums=not recompute)
        is_whole, again = _told(verifying.verify(record)), _recomputed(output, record, recompute, seed)
    num_wrong = sum(not _is_same(block) for block in again) if recompute else 0
    if num_wrong and labels is None:
        _say_why(output)
    if num_wrong or not is_whole:
        raise typer.Exit(1)


def _recomputed(output: str, record: RunRecord, num_blocks: int, seed: int) -> Iterator[Recomputed]:
    from volpipe.inference.intensity import Affine
    from volpipe.runs.provenance import read_origin
    from volpipe.runs.verify import recompute

    said = read_origin(output).normalise
    yield from recompute(record, Affine(said["shift"], said["scale"]), num_blocks, seed)


def _say_why(output: str) -> None:
    """Print what may change the voxels of `output` and differs from when it was made."""
    from volpipe.inference.runner import loaded_runner
    from volpipe.runs.provenance import changes, read_origin

    runner = loaded_runner()
    sentences = [] if runner is None else changes(read_origin(output), runner)
    for sentence in sentences:
        typer.echo(f"why: {sentence}")
    if not sentences:
        typer.echo(
            "why: net, input, packages and device are as they were; the files changed after the run (see above), "
            "or the net gives other numbers each time"
        )


def _is_same(block: Recomputed) -> bool:
    """Print how a block compares that was computed again, and return whether it is as it is stored."""
    alike = f"{block.num_differ:,} voxels differ" if block.num_differ else "the same"
    if block.num_differ and block.largest is not None:
        alike += f", by up to {block.largest:g}"
    typer.echo(f"block {block.block} (s0 {block.box}){block.device and f' on {block.device}'}: {alike}")
    return not block.num_differ


def _told(found: Verdict) -> bool:
    """Print what was found, and return whether everything is there as it was written."""
    for difference in found.differences[:MOST_NAMED]:
        typer.echo(f"{difference.file} {difference.what}{difference.box and f' ({difference.box})'}")
    if len(found.differences) > MOST_NAMED:
        typer.echo(f"… and {len(found.differences) - MOST_NAMED} more")
    typer.echo(f"{found.num_files:,} files read, {len(found.differences):,} not as they were written")
    if found.num_unwritten:
        typer.echo(f"{found.num_unwritten:,} shards have no checksum: not written yet, or by an earlier version")
    return not found.differences and not found.num_unwritten


def _refuse_stages(output: str, command: str) -> None:
    """Raise if `output` is the folder of a recipe of stages, each of which has an output of its own.

    Raises:
        RunError: with the stages to name.
    """
    from volpipe.errors import RunError
    from volpipe.workflow.execute import find_entries

    entries = find_entries(output)
    if entries:
        outs = ", ".join(entry.out for entry in entries)
        raise RunError(f"{output} holds the stages of a recipe; name the output of one to {command}: {outs}")


def reproduce(
    output: OutputArgument,
    recipe_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recipe to this file, and name it.")
    ] = None,
    parents: Parents = False,
) -> None:
    """Print the command that makes OUTPUT again, from what its attributes say."""
    from volpipe.errors import RunError
    from volpipe.runs.provenance import command_of, read_origin, to_toml
    from volpipe.segmentation.output import read_label_origin

    _refuse_stages(output, "reproduce")
    origin = read_label_origin(output) or read_origin(output)
    if recipe_out is not None:
        if recipe_out.exists():
            raise RunError(f"{recipe_out} exists; choose another --recipe-out")
        check_target("--recipe-out", recipe_out, parents=parents)
        recipe_out.write_text(to_toml(origin.again), encoding="utf-8")
    typer.echo(command_of(origin, recipe_out.absolute() if recipe_out else None))


def show_status(status: Status, most: int | None) -> None:
    """Print `status`, with no more than `most` of the boxes that failed; None prints all."""
    for number, part in enumerate(status.parts, 1):
        out.print(f"{'stage' if status.kind == 'stages' else 'trial'} {number} of {len(status.parts)}")
        show_status(part, most)
    if status.missing:
        out.print(missing_table(status.missing, most))
    if status.stages:
        out.print(standing_table(status.totals, status.stages, ""))
    out.print(status_line(status))


def status_line(status: Status) -> str:
    """Return a sentence or two: how far the work is, whether somebody is at it, and which command goes on."""
    if status.state == "not begun":
        return f"{status.output}: not begun"
    if status.state == "complete":
        return f"{status.output}: complete" + (f", {status.remark}" if status.remark else "")
    if status.remark and status.state != "running":
        return f"{status.output}: not complete; {status.remark}"
    return driver_line(status.output, status.driver, status.is_complete, len(status.missing))
