"""A net tried on a box of a volume in this process: the voxels that a run would write there, and what they took.

Not here: runs (workflow), or the net and its windows (inference). Windows, normalisation, weights, sums and the cast to
the output's type are those of a run; windows lie where a run over the whole volume puts them.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path

import numpy as np

from volpipe.blockwise.usage import peak_bytes
from volpipe.errors import PlanError
from volpipe.estimation.limits import check_window
from volpipe.estimation.window_search import count_peak_anew
from volpipe.geometry.grid import Box, Triple, triple
from volpipe.inference.intensity import Affine
from volpipe.inference.plan import Plan
from volpipe.inference.runner import Runner
from volpipe.inference.selection import Selection
from volpipe.inference.statistics import join
from volpipe.inference.windows import StreamedWindows
from volpipe.notebook.boxes import Sizes, checked_at, checked_size
from volpipe.notebook.pictures import Drawn, channel_note, first_channel, slices_of
from volpipe.recipes.inference import Recipe
from volpipe.reporting.panels import Panel
from volpipe.reporting.shades import display_range, shaded
from volpipe.reporting.slices import middle_of, part_around
from volpipe.runs.verify import compute_box
from volpipe.tables import html_facts
from volpipe.units import count, shape
from volpipe.volumes.on_grid import resampled
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.volume import Volume, open_volume
from volpipe.workflow.prepare import check_opened, prepare_for

MOST_MEASURED = 1 << 28  # bytes of a volume whose statistics are measured over all of it, as a run does
SAMPLED_BOXES, SAMPLED_EDGE = 16, 64  # of larger ones: parts of random blocks, of at most so many voxels along an axis
MIB = 1 << 20


@dataclass(frozen=True)
class TryFacts:
    """How a net was tried; sizes in voxels (z, y, x) of the volume.

    Attributes:
        device: "cpu", or the name of the GPU.
        seconds: of all that was done: loading the net, reading, computing; net_seconds of the net alone.
        memory_bytes: highest memory of this process meanwhile, notebook included; of a GPU what torch held there; None
            where it is unknown.
        num_windows: that the net saw.
        window, overlap, halo, scale, shrink, blend: as of a run.
        notes: sentences on what a run would do otherwise; () where it writes the same bytes.
    """

    net: str
    device: str
    seconds: float
    net_seconds: float
    memory_bytes: int | None
    num_windows: int
    window: Triple
    overlap: Triple
    halo: Triple
    scale: Triple
    shrink: Triple
    blend: str
    normalise: Affine
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class TryOut(Drawn):
    """A box of a volume before and after a net.

    Attributes:
        input: voxels of the volume, (z, y, x), of several channels (c, z, y, x), in its type.
        output: voxels as a run writes them, (z, y, x) or (c, z, y, x), in the type of the output.
        box: of the volume, in its voxels.
        volume_shape: of the volume, (z, y, x).
        out_box: of the output of a run over the whole volume, in voxels of that.
        facts: time, memory, windows, halo.
        voxel_size_nm: of the volume, (z, y, x); None where it is unknown.
        origin_nm: centre of the first voxel of `input`, (z, y, x).
        has_same_greys: whether the values of the output are grey levels of the volume.
    """

    input: np.ndarray
    output: np.ndarray
    box: Box
    volume_shape: Triple
    out_box: Box
    facts: TryFacts
    voxel_size_nm: Lengths | None
    origin_nm: Lengths
    has_same_greys: bool

    def __repr__(self) -> str:
        facts = self.facts
        notes = "".join(f"\n  {note}" for note in facts.notes)
        windows = f"{count(facts.num_windows, 'window')} of {shape(facts.window)}"
        return (
            f"<TryOut of {facts.net} at {self.box}: {self.input.shape} {self.input.dtype} to {self.output.shape} "
            f"{self.output.dtype}, {windows} in {facts.seconds:.2g} s on {facts.device}>{notes}"
        )

    @property
    def out_voxel(self) -> Lengths:
        """Size of a voxel of `output`, (z, y, x), in voxels of the volume."""
        return divided(self.facts.shrink, self.facts.scale)

    @property
    def out_voxel_size_nm(self) -> Lengths | None:
        """Size of a voxel of `output`, (z, y, x); None where it is unknown."""
        size = self.voxel_size_nm
        return None if size is None else triple(n * v for n, v in zip(size, self.out_voxel, strict=True))

    @property
    def out_origin_nm(self) -> Lengths:
        """Centre of the first voxel of `output`, (z, y, x)."""
        voxel = self.voxel_size_nm or (0.0, 0.0, 0.0)
        places = zip(self.origin_nm, self.out_voxel, voxel, strict=True)
        return triple(o + (n - 1) / 2 * v for o, n, v in places)

    def panels(self) -> Iterator[list[Panel]]:
        """Yield slices of input and output, pairs of the same size: the coarser voxels are repeated."""
        before = repeated(first_channel(self.input), self.facts.scale)
        after = repeated(first_channel(self.output), self.facts.shrink)[Box.from_shape(before.shape).slices]
        shown = display_range(before)
        greys = shown if self.has_same_greys else display_range(after)
        same = "same greys" if self.has_same_greys else f"{greys[0]:.4g} to {greys[1]:.4g}"
        for part in slices_of(after.shape, self.box.scaled(self.facts.scale).start):
            nm = part.nm(None if self.voxel_size_nm is None else divided(self.voxel_size_nm, self.facts.scale))
            about = f"input{channel_note(self.input)}\n{part.name}, {shown[0]:.4g} to {shown[1]:.4g}"
            result = f"output of {self.facts.net}{channel_note(self.output)}\n{part.name}, {same}"
            yield [
                Panel(about, shaded(before[None, *part.index], shown), nm),
                Panel(result, shaded(after[None, *part.index], greys), nm),
            ]

    def _html_table(self) -> str:
        facts = self.facts
        memory = "unknown" if facts.memory_bytes is None else f"{facts.memory_bytes / MIB:,.0f} MiB"
        rows: dict[str, object] = {
            "input": f"{self.input.shape} {self.input.dtype}, box {self.box}",
            "output": f"{self.output.shape} {self.output.dtype}, box {self.out_box}",
            "windows": f"{facts.num_windows:,} of {facts.window}, overlap {facts.overlap}, {facts.blend}",
            "halo": facts.halo,
            "scale": divided(facts.scale, facts.shrink) if max(facts.shrink) > 1 else facts.scale,
            "time": f"{facts.seconds:.2g} s, of them {facts.net_seconds:.2g} s in the net, on {facts.device}",
            "memory": memory,
        }
        rows |= {f"note {i}": note for i, note in enumerate(facts.notes, 1)}
        return html_facts(rows, caption=f"{facts.net} at {self.box}")


def try_out(
    recipe: Recipe, volume: str | Path | Volume, at: Sequence[int] | None, size: Sizes | None, device: str
) -> TryOut:
    """Return what the net of `recipe` makes of a box of `volume`; arguments as of `volpipe.try_net`."""
    started = time.perf_counter()
    plan, source, notes = plan_whole(recipe, volume)
    box = _tried_box(plan, at, size)
    is_counted = count_peak_anew()
    with loaded(plan, device) as runner:
        normalise, more = normalisation(plan, source)
        output = computed(plan, source, normalise, runner, box)
        net_seconds, name = runner.seconds, runner.device_name
        num_bytes = _device_bytes(runner.device) or (peak_bytes() if is_counted else None)
    facts = TryFacts(
        plan.net.label, name, time.perf_counter() - started, net_seconds, num_bytes,
        Selection(part_of(plan, box)).num_windows, plan.window, plan.overlap, plan.net.halo, plan.net.scale,
        plan.net.shrink, plan.recipe.windows.blend, normalise, (*notes, *more),
    )  # fmt: skip
    voxel, origin = plan.source.voxel_size_nm, plan.source.origin_nm
    place = triple(o + a * v for o, a, v in zip(origin, box.start, voxel or (0.0, 0.0, 0.0), strict=True))
    return TryOut(
        squeezed(source.crop(box)), squeezed(output), box, plan.source.shape, plan.in_output(plan.coarse(box)), facts,
        voxel, place, plan.intensity == "same",
    )  # fmt: skip


def plan_whole(recipe: Recipe, volume: str | Path | Volume) -> tuple[Plan, Volume, list[str]]:
    """Return the plan of a run over the whole of `volume`, the volume, and what was left out of the recipe."""
    choice = recipe.input
    if not isinstance(volume, str | Path | Volume):
        raise PlanError(
            f"a net is tried on a stored volume, not on {type(volume).__name__}; name its file, or save an array by "
            "numpy.save('a.npy', array) and give 'a.npy'"
        )
    if isinstance(volume, Volume):
        check_opened(volume, choice)
    source = volume if isinstance(volume, Volume) else open_volume(volume, choice.key, choice.level, view=choice.view)
    limited = [name for name in ("roi", "mask", "empty") if getattr(choice, name) is not None]
    notes = [f"input.{name} of the recipe does not count here; a run leaves out what it excludes" for name in limited]
    whole = recipe.model_copy(update={"input": choice.model_copy(update=dict.fromkeys(limited))})
    out = str(Path(tempfile.gettempdir(), f"volpipe-{uuid.uuid4().hex}.zarr"))  # which nobody writes
    plan = prepare_for(source, whole, out, Path.cwd())
    check_window(plan)
    return plan, plan.source.volume() if plan.source.also else resampled(source, plan.source.resampling), notes


def _tried_box(plan: Plan, at: Sequence[int] | None, size: Sizes | None) -> Box:
    """Return the box: without `at` in the middle of a window's core, which few windows reach."""
    shape, stride = plan.source.shape, triple(map(mul, plan.lattice.stride, plan.net.shrink))
    corner = tuple(a // s * s for a, s in zip(checked_at(at, shape), stride, strict=True))
    core = Box.from_shape(stride).shift(corner) & Box.from_shape(shape)
    if size is None:
        return core
    middle = checked_at(middle_of(core) if at is None else at, shape)
    return whole_voxels(plan, part_around(Box.from_shape(shape), middle, checked_size(size, shape)))


def whole_voxels(plan: Plan, box: Box) -> Box:
    """Return `box` of the volume, larger where a voxel of a coarser output reaches out of it."""
    return plan.coarse(box).scaled(plan.net.shrink) & Box.from_shape(plan.source.shape)


def part_of(plan: Plan, box: Box) -> Plan:
    """Return `plan` with `box` of the volume as its region of interest."""
    return plan.changed(roi=(triple(box.start), triple(box.stop)), factors=((1, 1, 1),), grid=None)


def computed(plan: Plan, source: Volume, normalise: Affine, runner: Runner, box: Box) -> np.ndarray:
    """Return the output (c, z, y, x) over `box` of the volume, in the output's type, as a run of `plan` writes it."""
    part = part_of(plan, box)
    selection = Selection(part)
    windows = StreamedWindows(
        source, part.lattice, normalise,
        session=uuid.uuid4().hex,  # a file may have changed
        padding=part.net.padding,
    )  # fmt: skip
    return compute_box(selection, normalise, windows, Box.from_shape(part.out_shape), runner)


def normalisation(plan: Plan, source: Volume) -> tuple[Affine, list[str]]:
    """Return the map of grey levels, and a note if it is not that of a run: of large volumes a sample is measured."""
    rule = plan.grey_rule
    if not rule.needs_measuring:
        return rule.affine(None), []
    num_bytes = math.prod(plan.source.shape) * plan.source.num_channels * rule.dtype.itemsize
    if num_bytes <= MOST_MEASURED:
        boxes = [plan.lattice.core_box(block) for block in range(len(plan.blocks))]
        reader = source.open()
        statistics = join(rule.measure(reader.read_own(box)) for box in boxes)
        if rule.needs_histogram(statistics):
            ends = statistics.ends
            statistics = join(rule.measure(reader.read_own(box), ends) for box in boxes)
        return rule.affine(statistics), []
    numbers = np.random.default_rng(0).choice(len(plan.blocks), min(SAMPLED_BOXES, len(plan.blocks)), replace=False)
    cores = [plan.lattice.core_box(int(number)) for number in sorted(numbers)]
    parts = [part_around(core, middle_of(core), (SAMPLED_EDGE,) * 3) for core in cores]
    voxels = np.concatenate([source.crop(part).reshape(plan.source.num_channels, -1) for part in parts], axis=1)
    stops = np.cumsum([num for _, num in rule.choices])
    mapped = rule.sampled_affine(np.split(voxels, stops[:-1]))
    note = (
        f"grey levels are normalised by {voxels.size:,} voxels from {len(numbers)} places, a run measures all "
        f"{num_bytes / (1 << 30):,.1f} GiB: its output may differ a little; normalise.low and high (mean and std) "
        "make both the same"
    )
    return mapped, [note]


@contextlib.contextmanager
def loaded(plan: Plan, device: str) -> Iterator[Runner]:
    """Yield the runner of `plan` on `device`, "" for that of a run; torch's settings are put back afterwards.

    Raises:
        PlanError: there is no such device.
    """
    import torch

    if device not in ("", "cpu", "cuda"):
        raise PlanError(f"device {device!r} is none; give 'cpu' or 'cuda', or leave it out for what a run takes here")
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError("device 'cuda' needs a GPU that torch can use, and there is none; leave it out, or give 'cpu'")
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, torch.backends.mkldnn.enabled
    num_threads = torch.get_num_threads()
    try:
        runner = Runner.load(plan, device)
        runner.check()
        yield runner
    finally:
        cuda.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, torch.backends.mkldnn.enabled = before
        torch.set_num_threads(num_threads)


def _device_bytes(device: str) -> int:
    """Return the highest memory of the GPU; 0 of the CPU."""
    import torch

    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def divided(lengths: Lengths | Triple, factor: Triple) -> Lengths:
    return triple(length / f for length, f in zip(lengths, factor, strict=True))


def repeated(data: np.ndarray, factor: Triple) -> np.ndarray:
    """Return `data` (…, z, y, x) with its voxels repeated by `factor`."""
    for axis, times in enumerate(factor, -3):
        data = data.repeat(times, axis=axis)
    return data


def squeezed(data: np.ndarray) -> np.ndarray:
    """Return `data` (c, z, y, x), without its first axis where that has one entry, as outputs are stored."""
    return data[0] if len(data) == 1 else data
