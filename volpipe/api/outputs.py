"""Outputs: how far they are, whether they are what their run wrote, their reports, and how to make them again.

Not here: the comparing and what outputs say of themselves (runs, segmentation, workflow), or printing (cli).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from volpipe.errors import RunError
from volpipe.reporting.page import REPORT, Page
from volpipe.reporting.render import WRITER, render, write_page
from volpipe.resolve import homes_known
from volpipe.runs.provenance import Origin, command_of, read_origin, to_toml
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.verify import Difference, Recomputed, Verdict
from volpipe.segmentation.output import read_label_origin
from volpipe.stages.status import Status
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.result_file import ResultFile, page_kind
from volpipe.workflow.batch_table import find_batch
from volpipe.workflow.entries import FLOW_FILE, find_entries
from volpipe.workflow.kinds import KINDS, find_work
from volpipe.workflow.pages import batch_page, flow_page
from volpipe.workflow.status import find_status

REPORT_PAGE = page_kind("volpipe report --out", WRITER)


@dataclass(frozen=True)
class Verification:
    """How an output compares with what its run wrote.

    Attributes:
        num_files: files that were read.
        num_unwritten: shards that have no checksum.
        differences: files that are not as they were written.
        blocks: those that were computed again.
        reasons: sentences on why recomputed blocks may differ; () where none differs, and for labels.
    """

    num_files: int
    num_unwritten: int
    differences: tuple[Difference, ...]
    blocks: tuple[Recomputed, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every file is there as it was written, and each recomputed block is the same."""
        is_same = not any(block.num_differ for block in self.blocks)
        return is_same and not self.differences and not self.num_unwritten


@dataclass(frozen=True, repr=False)
class Reproduction:
    """How to make an output again: the command line for a shell, and its recipe."""

    origin: Origin

    def __repr__(self) -> str:
        return f"<Reproduction: {self.command}>"

    @property
    def command(self) -> str:
        """The command line, with the recipe's keys as settings."""
        return command_of(self.origin)

    @property
    def recipe(self) -> str:
        """The recipe as a TOML file has it."""
        return to_toml(self.origin.again)

    def command_with(self, recipe_file: Path) -> str:
        """Return the command line that reads the recipe from `recipe_file`."""
        return command_of(self.origin, recipe_file.absolute())


@homes_known
def status(output: str | Path, *, changes: bool = False) -> Status:
    """Return how far the work on `output` is, and who is at it: a run, stages, labels, a training or many.

    Args:
        output: an output, its run's folder, the folder of a training, or a batch's file or folder.
        changes: count the blocks of a run that read files which have changed since.

    Raises:
        RunError: nobody began anything there, or what is stored is damaged.
    """
    return find_status(str(output), with_changes=changes)


@homes_known
def report(output: str | Path, file: str | Path | None = None) -> Path:
    """Write the report of `output` as one HTML file, and return where that is; also while it is made, or after a kill.

    Args:
        output: as of `status`.
        file: HTML file; by default report.html in the run's folder. No other file than a report is replaced.

    Raises:
        RunError: nobody began anything there, what is stored cannot be understood, or the file cannot be written.
        VolpipeError: something else than a report is there.
    """
    chosen = None if file is None else ResultFile.named("file", file, REPORT_PAGE)
    if chosen is not None:
        chosen.check()
    page, folder = find_page(str(output))
    if chosen is not None:
        chosen.write(render(page, REPORT_PAGE.writer).encode())
        return chosen.path
    target = folder / REPORT
    try:
        write_page(page, target)
    except OSError as error:
        advice = "name another file: `volpipe report OUT -o FILE`, vp.report(out, file)"
        raise RunError(f"the report cannot be written to {target}: {error.strerror or error}; {advice}") from error
    return target


@homes_known
def verify(
    output: str | Path,
    *,
    fast: bool = False,
    recompute: int = 0,
    seed: int = 0,
    on_files: Callable[[Verdict], None] = lambda verdict: None,
    on_block: Callable[[Recomputed], None] = lambda block: None,
) -> Verification:
    """Read an output back, compare it with what its tasks noted, and compute some blocks again.

    Args:
        output: an output of `volpipe run`, or labels of `volpipe segment`.
        fast: only whether each file of voxels is there; a damaged one is not found.
        recompute: random blocks to compute again, by the net or as fragments.
        seed: decides which blocks.
        on_files: called when all files are compared.
        on_block: called after each recomputed block.

    Raises:
        RunError: no output, no journal, or a folder of several stages, whose outputs the message names.
    """
    _refuse_stages(output, "verify")
    folder = RunFolder(RunFolder.find(output).path.absolute())
    work = find_work(folder)
    if not folder.path.exists() and not paths.exists(paths.locate(output)):
        raise RunError(f"there is nothing at {output}; name an output of `volpipe run` or `volpipe segment`")
    if work is None:
        raise RunError(
            f"{folder.path} holds no journal, which alone knows what the output's files should hold; restore the "
            "folder, or give the command with --fresh to make both again"
        )
    on_files(verdict := work.verify(is_fast=fast))
    blocks = []
    for block in work.recomputed(recompute, seed) if recompute else ():
        on_block(block)
        blocks.append(block)
    reasons = work.suspects() if any(block.num_differ for block in blocks) else ()
    return Verification(verdict.num_files, verdict.num_unwritten, tuple(verdict.differences), tuple(blocks), reasons)


@homes_known
def reproduce(output: str | Path) -> Reproduction:
    """Return the command that makes `output` again, and its recipe, from what its attributes say.

    Args:
        output: as of `verify`.

    Raises:
        RunError: it is no output of a run or a segmentation, an earlier version's, or a folder of several stages.
    """
    _refuse_stages(output, "reproduce")
    return Reproduction(read_label_origin(output) or read_origin(output))


def _refuse_stages(output: str | Path, verb: str) -> None:
    """Raise, with the outputs to name, if `output` is the folder of a recipe of stages."""
    entries = find_entries(str(output))
    if entries:
        outs = ", ".join(entry.out for entry in entries)
        raise RunError(f"{output} holds the stages of a recipe; name the output of one to {verb}: {outs}")


def find_page(output: str) -> tuple[Page, Path]:
    """Return the report of `output`, or of what is made in the folder of that name, and the folder that it belongs to.

    Raises:
        RunError: nobody began anything there, or what is stored cannot be understood.
    """
    if (batch := find_batch(output)) is not None:
        return batch_page(RunFolder(batch)), batch
    if find_entries(output) is not None:
        is_folder = (Path(output) / FLOW_FILE).is_file()
        stages = RunFolder(Path(output).absolute()) if is_folder else RunFolder.for_stages(paths.locate(output))
        return flow_page(stages, output.removesuffix(".run") if is_folder else output), stages.path
    for kind in KINDS.values():
        folder = RunFolder(kind.home(output).path.absolute())
        if (page := kind.page(folder)) is not None:
            return page, folder.path
    raise RunError(
        f"there is nothing to report of {output}: {RunFolder.find(output).path.absolute()} holds no plan; name the "
        "output of a run, a segmentation or a flow, the folder of a training, or a batch"
    )
