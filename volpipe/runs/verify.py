"""Whether an output is what its run wrote: its files against the journal, and random blocks through the net again.

Not here: the checksums themselves (volumes.checksums), or printing (cli.outputs).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.blockwise.journal import Record, read_records
from volpipe.errors import RunError
from volpipe.geometry.grid import Box, Grid, Slab, cells
from volpipe.inference.infer import block_sums
from volpipe.inference.intensity import Affine
from volpipe.inference.output import finish, read_voxels, split_arrays, stored_box
from volpipe.inference.output_plan import OutputPlan, level_key
from volpipe.inference.plan import Plan
from volpipe.inference.runner import Runner
from volpipe.inference.scratch import NO_SUM
from volpipe.inference.selection import Selection
from volpipe.inference.windows import StreamedWindows
from volpipe.runs.run_folder import NOTES, Metadata, RunFolder
from volpipe.runs.worker import Written
from volpipe.volumes import checksums
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.chunk_files import ChunkFiles
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.requests import in_turn, num_at_once
from volpipe.volumes.storage.tensorstore import num_threads
from volpipe.volumes.volume import open_writer

AT_ONCE = 64  # shards whose files a thread looks for; a task for each would take longer than to look
LOOKS, REMOTE_LOOKS = 1000, 50  # shards of a complete output that are looked for


Judge = Callable[["list[Difference]", paths.Location, int, str], None]


@dataclass(frozen=True)
class Difference:
    """A file that is not as the run left it.

    Attributes:
        file: where it is, or should be.
        what: "differs", "is missing", "is empty" or "is extra".
        box: of the output's level, such as "s0 0:64,0:64,0:64"; "" of a file that holds no voxels.
    """

    file: str
    what: str
    box: str = ""


@dataclass
class Verdict:
    """What was found: files that were read, shards that no task has written yet, and what is not as it should be."""

    num_files: int = 0
    num_unwritten: int = 0
    differences: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class Recomputed:
    """A block that was computed again.

    Attributes:
        box: of the output that it was compared in.
        num_differ, largest: voxels that differ, and by how much at most; None where values are names, as of labels.
        device: what the net ran on now; "" without one.
        array: of the output, where it has several.
    """

    block: int
    box: Box
    num_differ: int
    largest: float | None = None
    device: str = ""
    array: str = ""


def written(records: Iterable[Record[Any]]) -> dict[tuple[int, int], str]:  # Any: of any kind
    """Return the checksums of each shard that was written, by level and number, as the `records` of a journal say."""
    results = (record.result for record in records if isinstance(record.result, Written))
    return {(level, shard): taken for result in results for level, shard, taken in result.checksums}


def stored_flags(plan: OutputPlan, records: Iterable[Record[Any]]) -> dict[str, np.ndarray]:  # Any: of any kind
    """Return a flag for each file of each array of the output of `plan`, whether `records` say that it was written.

    In the axes of the array, by its key in the output.
    """
    flags: dict[str, np.ndarray] = {}
    grids: dict[tuple[int, int], tuple[str, Grid]] = {}
    for place, array in enumerate(plan.arrays):
        for level in range(len(plan.factors)):
            key = f"{array.folder}/{level_key(level)}".lstrip("/")
            grid = ChunkFiles(open_writer(str(paths.locate(plan.out)), key).header).grid
            grids[place, level] = key, grid
            flags[key] = np.zeros(grid.counts, bool)
    for record in records:
        for level, number, sums in record.result.checksums if isinstance(record.result, Written) else ():
            for place, own in enumerate(split_arrays(sums)):
                array, (key, grid) = plan.arrays[place], grids[place, level]
                files = cells(stored_box(array, array.shards(level).box(number)), grid.cell)
                for file, crc in zip(files, checksums.split(own), strict=True):
                    flags[key][file] = crc != checksums.ABSENT
    return flags


def metadata_of(folder: RunFolder) -> dict[str, int]:
    """Return the checksum of each file of metadata in the output, as the last session left it; none meanwhile."""
    last = None
    for record in read_records(folder.sessions, NOTES):
        last = record.result
    return last.checksums if isinstance(last, Metadata) else {}


@dataclass(frozen=True)
class Shard:
    """Files of a level: the box that they hold (z, y, x), the same in the axes of the array, and what was noted.

    `array` is the array's folder in the output, "" where it has one array.
    """

    array: str
    level: int
    box: Box
    stored: Box
    sums: str


def check_present(output: str, shards: Sequence[Shard], *, is_thorough: bool = False) -> None:
    """Refuse an output that has lost files, as far as a look at some of its shards tells; `verify` reads them all.

    One that `is_thorough` looks at all of those on a disk.

    Raises:
        RunError: with one that is gone, and how many of those that were looked at.
    """
    rng, most = np.random.default_rng(0), REMOTE_LOOKS
    if isinstance(paths.locate(output), Path):
        most = len(shards) if is_thorough else LOOKS
    chosen = rng.choice(len(shards), size=min(most, len(shards)), replace=False)
    files = [
        file for i in sorted(chosen) for file, _ in _files_of_shard(_header_of_shard(output, shards[i]), shards[i])
    ]
    gone = [file for file in files if not paths.exists(file)]
    if gone:
        raise RunError(
            f"{output} has lost files that its run wrote, such as {gone[0]} ({len(gone)} of {len(files)} that were "
            "looked at); `volpipe verify` names them all: put them back, or use --fresh to start over"
        )


def has_lost_files(output: str, shard: Shard) -> bool:
    """Return whether a file of `shard` was written and is gone; its checksums are "" where it was not written."""
    return bool(shard.sums) and any(
        not paths.exists(file) for file, _ in _files_of_shard(_header_of_shard(output, shard), shard)
    )


def remove(output: str, level: int, stored: Box) -> None:
    """Delete the files of `level` that hold a box in the axes of its array, noted or not, as far as they are there."""
    for file in checksums.stored_files(open_writer(output, level_key(level)).header, stored):
        paths.delete_file(file)


def _header_of_shard(output: str, shard: Shard) -> Header:
    """Return the header of the level of `shard`."""
    return open_writer(str(paths.locate(output) / shard.array), level_key(shard.level)).header


def _files_of_shard(header: Header, shard: Shard) -> list[tuple[paths.Location, int]]:
    """Return the files of `shard` that were written, each with its checksum."""
    files = checksums.stored_files(header, shard.stored)
    noted = zip(files, checksums.split(shard.sums), strict=True)
    return [(file, crc) for file, crc in noted if crc != checksums.ABSENT]


def check_files(
    output: str, shards: Iterable[Shard], metadata: Mapping[str, int], levels: Sequence[str], *, is_fast: bool = False
) -> Verdict:
    """Read the files of `shards` and of `metadata` in `output`, and return how they differ from what was noted.

    Args:
        output: with arrays at the keys `levels`.
        shards: that were written.
        metadata: checksum by name; where there are none, a driver may be at work, and nothing counts as extra.
        is_fast: whether files of shards are not read: those that are there and have bytes count as they were written.

    Raises:
        RunError: there is no output.
    """
    out, verdict, look = paths.locate(output), Verdict(), judge_presence if is_fast else judge
    if not paths.exists(out):
        raise RunError(f"{output} is gone; put it back, or give its command with --fresh to make it again")
    known = set(metadata)
    rest = iter(shards)
    parts = iter(lambda: list(itertools.islice(rest, AT_ONCE if is_fast else 1)), [])
    with ThreadPoolExecutor(num_threads()) as pool:
        for names, differences in pool.map(lambda part: _compare(output, part, look), parts):
            known.update(names)
            verdict.num_files += len(names)
            verdict.differences += differences
    for name, crc in metadata.items():
        verdict.num_files += 1
        judge(verdict.differences, out / name, crc, "")
    if metadata:
        extra = (name for name, _ in paths.list_files(out) if name not in known)
        verdict.differences += [
            Difference(str(out / name), "is extra", _box_of(output, levels, name)) for name in sorted(extra)
        ]
    return verdict


def _compare(output: str, shards: Sequence[Shard], look: Judge) -> tuple[list[str], list[Difference]]:
    """Return the names in `output` of the files of `shards`, and those that are not as was noted."""
    out, differences, names = paths.locate(output), list[Difference](), list[str]()
    levels = {(shard.array, shard.level): shard for shard in shards}
    headers = {level: _header_of_shard(output, shard) for level, shard in levels.items()}
    for shard in shards:
        for file, crc in _files_of_shard(headers[shard.array, shard.level], shard):
            look(differences, file, crc, f"{shard.array}/{level_key(shard.level)} {shard.box}".lstrip("/"))
            names.append(str(file.relative_to(out)))  # type: ignore[arg-type]  # both are of a kind
    return names, differences


def judge(differences: list[Difference], file: paths.Location, crc: int, box: str) -> None:
    """Add to `differences` what is wrong with `file`, if anything."""
    try:
        checksum = checksums.checksum(file)
    except OSError as error:
        differences.append(Difference(str(file), f"cannot be read ({error.strerror})", box))
        return
    if checksum != crc:
        differences.append(Difference(str(file), "is missing" if checksum == checksums.ABSENT else "differs", box))


def judge_presence(differences: list[Difference], file: paths.Location, crc: int, box: str) -> None:
    """Add to `differences` that `file` is not there or empty, as none is that was written; `crc` is not compared."""
    num_bytes = paths.size(file)
    if not num_bytes:
        differences.append(Difference(str(file), "is missing" if num_bytes is None else "is empty", box))


def _box_of(output: str, levels: Sequence[str], name: str) -> str:
    """Return the box that a file in `output` would hold, "" if it would hold none."""
    level = next((key for key in levels if name.startswith(f"{key}/")), "")
    places = [part for part in name.removeprefix(f"{level}/").split("/") if part != "c"]
    if not (level and all(map(str.isdecimal, places))):
        return ""
    header = open_writer(output, level).header
    index = ChunkFiles(header).scheme.index(header, places)
    if index is None or len(index) != len(header.shape):
        return ""
    start = tuple(i * n for i, n in zip(index, header.write_unit, strict=True))
    return f"{level} {Box(start, tuple(a + n for a, n in zip(start, header.write_unit, strict=True)))}"


def recompute(
    selection: Selection, normalise: Affine, runner: Runner, num_blocks: int, seed: int = 0
) -> Iterator[Recomputed]:
    """Yield random blocks whose cores went through the net again, compared with an array as it is stored.

    Where other blocks add to a core, they are computed too, so that the sums are the run's own. Of a block that is
    computed slab by slab, a layer as thick as one is, with the slabs that add to it.
    """
    plan = selection.plan
    cores = ((block, core_box(plan, block)) for block in range(len(plan.blocks)))
    written = [block for block, core in cores if not core.is_empty and selection.touches(core)]
    rng = np.random.default_rng(seed)
    chosen = rng.choice(written, size=min(num_blocks, len(written)), replace=False)
    source = plan.source.as_planned()
    for block in sorted(map(int, chosen)):
        box = core_box(plan, block)
        windows = StreamedWindows(source, plan.lattice, normalise, padding=plan.net.padding)
        depth = plan.slab * plan.lattice.stride[0] * plan.net.scale[0]
        layers = list(filter(selection.touches, box.cut(0, depth, box.start[0])))
        box = layers[int(rng.integers(len(layers)))]
        due = compute_box(selection, normalise, windows, box, runner)
        found = read_voxels(plan, 0, box)
        differs = due.view(f"V{due.itemsize}") != found.view(f"V{due.itemsize}")
        largest = np.abs(due[differs].astype(np.float64) - found[differs].astype(np.float64)).max(initial=0.0)
        yield Recomputed(block, box, int(np.count_nonzero(differs)), float(largest), runner.device_name, plan.folder)


def core_box(plan: Plan, block: int) -> Box:
    """Return the voxels of the output in the core of `block`; none where it is outside the region."""
    return plan.in_output(plan.lattice.core_box(block) & plan.region)


def compute_box(
    selection: Selection, normalise: Affine, windows: StreamedWindows, box: Box, runner: Runner
) -> np.ndarray:
    """Return `box` of the output (c, z, y, x), as the net of `runner` gives it now and as it would be stored."""

    def slabs_of(block: int) -> list[Slab]:
        """Return the slabs of `block` that add to the box."""
        return [slab for slab in selection.slabs(block) if not (slab.reached & box).is_empty]

    plan = selection.plan
    shards = plan.shards().touching(box)
    blocks = sorted({b for shard in shards for b in plan.blocks_of_shard(shard) if selection.has_block(b)})
    blocks = [b for b in blocks if not (plan.sum_box(b) & box).is_empty and slabs_of(b)]
    total = np.full((plan.net.out_channels, *box.shape), NO_SUM, plan.sum_dtype)
    stored: np.ndarray | None = None
    for _, done in block_sums(selection, normalise, runner, windows, blocks, slabs_of=slabs_of):
        if isinstance(done, Exception):
            raise done
        part = done.box & box
        if done.is_finished:
            stored = np.zeros((plan.num_channels, *box.shape), plan.dtype) if stored is None else stored
            stored[:, *part.relative_to(box.start).slices] = done.part(part)
        else:
            total[:, *part.relative_to(box.start).slices] += done.part(part)
    mask = selection.mask(box)
    if stored is None:
        total = total if mask is None else np.where(mask, total, total.dtype.type(0))
        stored = finish(plan, normalise, total)
    return np.ascontiguousarray(stored if mask is None else np.where(mask, stored, stored.dtype.type(0)))


def metadata_sums(out: paths.Location, folders: Sequence[str], names: Sequence[str]) -> Metadata:
    """Return the checksum of each file of `names` that there is in `folders` of the output at `out`."""
    files = [f"{folder}/{name}".lstrip("/") for folder in folders for name in names]
    works = [partial(checksums.checksum, out / path) for path in files]
    sums = in_turn(works, 1 if isinstance(out, Path) else num_at_once(0))
    return Metadata({path: crc for path, crc in zip(files, sums, strict=True) if crc != checksums.ABSENT})
