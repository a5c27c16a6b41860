"""`volpipe verify` and `volpipe reproduce`: whether an output is what its run wrote, and how to make it again.

Not here: the comparing (verify), or what outputs say of themselves (provenance). Exit codes as in cli.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from volpipe.verify import Verdict

OutputArgument = Annotated[str, typer.Argument(help="An output of `volpipe run`.")]
MOST_NAMED = 100


def verify(
    output: Annotated[str, typer.Argument(help="An output of `volpipe run`, or labels of `volpipe label`.")],
    recompute: Annotated[int, typer.Option(min=0, help="Random blocks to put through the net again.")] = 0,
    seed: Annotated[int, typer.Option(help="Decides which blocks.")] = 0,
) -> None:
    """Read OUTPUT back, and name each file that is not as its task wrote it; exit code 1 if there are any."""
    from volpipe import verify as verifying
    from volpipe.errors import RunError
    from volpipe.label_audit import verify_labels
    from volpipe.ops import Affine
    from volpipe.provenance import read_origin

    labels = verify_labels(output)
    if labels is not None:
        if recompute:
            raise RunError(f"{output} holds labels, which no net gave; --recompute is for outputs of `volpipe run`")
        raise typer.Exit(0 if _told(labels) else 1)
    evidence = verifying.gather_evidence(verifying.location_of(output), needs_sums=not recompute)
    is_whole = _told(verifying.verify(evidence))
    num_wrong = 0
    if recompute:
        said = read_origin(output).normalise
        for block in verifying.recompute(evidence, Affine(said["shift"], said["scale"]), recompute, seed):
            num_wrong += block.num_differ > 0
            alike = (
                f"{block.num_differ:,} voxels differ, by up to {block.largest:g}" if block.num_differ else "the same"
            )
            typer.echo(f"block {block.block} (s0 {block.box}) on {block.device}: {alike}")
    if num_wrong or not is_whole:
        raise typer.Exit(1)


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


def reproduce(
    output: OutputArgument,
    recipe_out: Annotated[Path | None, typer.Option(help="Write the recipe to this file, and name it.")] = None,
) -> None:
    """Print the command that makes OUTPUT again, from what its attributes say."""
    from volpipe.errors import RunError
    from volpipe.provenance import command_of, read_origin, to_toml

    origin = read_origin(output)
    if recipe_out is not None:
        if recipe_out.exists():
            raise RunError(f"{recipe_out} exists; choose another --recipe-out")
        recipe_out.write_text(to_toml(origin.again), encoding="utf-8")
    typer.echo(command_of(origin, recipe_out.absolute() if recipe_out else None))
