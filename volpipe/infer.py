"""Infer: the net runs over the windows of blocks; their weighted sums become shards of the output, or block tensors.

Not here: where windows come from (windows), what weights they get (blend), or the order of blocks (schedule).
Reading the next windows, computing these and writing the last block overlap: each has a thread.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from volpipe.augment import mean_of_forms
from volpipe.blend import span
from volpipe.errors import NetError, NonfiniteError
from volpipe.grid import Box
from volpipe.heap import keep_freed_memory
from volpipe.nets import build_net, check_same_net, weights_digest
from volpipe.ops import ALL_FINITE, Affine, Nonfinite, Tally
from volpipe.output import finish, write_total, write_selected
from volpipe.plan import Plan
from volpipe.programs import code_hash, short_hash
from volpipe.shortage import advice, is_shortage
from volpipe.tensors import NO_SUM, Tensors
from volpipe.wanted import Selection
from volpipe.windows import Batch, WindowSource, ahead, batches

if TYPE_CHECKING:
    import torch

BATCHES_AHEAD = 2
LARGEST_BATCH = 64


@dataclass
class Runner:
    """A net on its device, loaded once per process: windows in, outputs out, both as float32 arrays.

    Attributes:
        device: "cpu" or "cuda".
        batch: windows per call.
        seconds: time spent computing so far.
        weights_sha256, code_sha256: of the net as it was loaded here.
    """

    plan: Plan
    device: str
    batch: int = 1
    seconds: float = 0.0
    weights_sha256: str = ""
    code_sha256: str = ""
    _net: Callable[..., torch.Tensor] | None = field(default=None, repr=False)
    _advice: str = ""

    @property
    def device_name(self) -> str:
        """The name of the GPU, or "cpu"."""
        import torch

        return torch.cuda.get_device_name() if self.device == "cuda" else self.device

    @classmethod
    def load(cls, plan: Plan) -> Runner:
        """Return the plan's net on the GPU if there is one, else on the CPU."""
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            keep_freed_memory()
        # The same sums on every device of a kind: no TF32, no choice of algorithm by timing.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
        choice = plan.recipe.infer
        take_threads(choice.threads)
        # oneDNN's order of sums depends on the window's shape.
        torch.backends.mkldnn.enabled = not choice.exact  # type: ignore[assignment]  # a descriptor
        chosen, search_path = plan.recipe.net, plan.search_path
        net = build_net(chosen, search_path)
        weights, code = weights_digest(chosen, net, search_path), code_hash(chosen.name, search_path)
        net = net.to(device)
        if choice.channels_last:
            net = net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # stubs lack 3d
        runner = cls(
            plan, device, weights_sha256=weights, code_sha256=code, _net=torch.compile(net) if choice.compile else net
        )
        runner.batch = choice.batch if choice.batch != "auto" else runner._batch_that_fits()
        return runner

    def check(self) -> None:
        """Refuse to compute with another net than the plan's.

        Raises:
            NetError: with both hashes, and what to do.
        """
        check_same_net(self.plan.recipe.net, self.plan.net, self.weights_sha256)
        if self.code_sha256 != self.plan.code_sha256:
            raise NetError(
                f"the code of net {self.plan.net.label} is {short_hash(self.code_sha256)} on {socket.gethostname()}, "
                f"in the plan it is {short_hash(self.plan.code_sha256)}: it was edited after the run began, or "
                "differs on that machine; restore it, or start over with --fresh"
            )

    def __call__(self, windows: np.ndarray) -> np.ndarray:
        """Return the net's output for `windows` (n, c, z, y, x): (n, C, z', y', x'), float32.

        Raises:
            ValueError: the net's output has not the declared shape.
        """
        started = time.perf_counter()
        out = self._run(self._filled(windows))[: len(windows)]
        self.seconds += time.perf_counter() - started
        due = (
            len(windows),
            self.plan.net.out_channels,
            *(w * s for w, s in zip(windows.shape[2:], self.plan.net.scale, strict=True)),
        )
        if out.shape != due:
            raise ValueError(f"net {self.plan.net.label} gave {out.shape}, declared is {due}")
        return out

    def _run(self, windows: np.ndarray) -> np.ndarray:
        import torch

        assert self._net is not None
        choice = self.plan.recipe.infer
        take_threads(choice.threads)
        with (
            torch.inference_mode(),
            torch.autocast(self.device, getattr(torch, choice.precision), enabled=choice.precision != "float32"),
        ):
            data = torch.from_numpy(windows)
            if self.device == "cuda":
                data = data.pin_memory().to(self.device, non_blocking=True)
            if choice.channels_last:
                data = data.contiguous(memory_format=torch.channels_last_3d)
            out: np.ndarray = mean_of_forms(self._net, data, choice.augment).contiguous().cpu().numpy()
        return out

    def try_window(self, windows: np.ndarray) -> None:
        """Run the net over `windows` (n, c, z, y, x) of any shape that it takes, for the time and the memory."""
        try:
            self._run(windows)
        except Exception as error:
            raise self.explained(error) from error

    def _filled(self, windows: np.ndarray) -> np.ndarray:
        """Return `windows` with empty ones added up to a whole batch.

        Libraries sum in another order for another batch size, so that a window's last bits would depend on its block.
        """
        missing = self.batch - len(windows)
        if missing <= 0:
            return windows
        return np.concatenate([windows, np.zeros((missing, *windows.shape[1:]), np.float32)])

    def _batch_that_fits(self) -> int:
        """Return the windows per call: one on a CPU, which more do not speed up, else what the memory holds."""
        if self.device == "cpu":
            return 1
        import torch

        shape = (self.plan.source.num_channels, *self.plan.window)

        def fits(size: int) -> bool:
            try:
                self(np.zeros((size, *shape), np.float32))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                return False
            return True

        try:
            size = largest_that_fits(fits, min(LARGEST_BATCH, self.plan.lattice.windows_per_block))
        except MemoryError as error:
            raise self.explained(error) from error
        self.seconds = 0.0
        return size

    def explained(self, error: Exception) -> Exception:
        """Return `error`, or one that says which window would fit, where memory was not enough."""
        if not is_shortage(error):
            return error
        if not self._advice:  # which costs some windows
            self._advice = advice(self.plan, self.batch, self.device, self._fits)
        found = MemoryError(self._advice)
        found.__cause__ = error
        return found

    def _fits(self, window: tuple[int, int, int], batch: int) -> bool:
        import torch

        try:
            self._run(np.zeros((batch, self.plan.source.num_channels, *window), np.float32))
        except Exception as error:
            if not is_shortage(error):
                raise
            if self.device == "cuda":
                torch.cuda.empty_cache()
            return False
        return True


def take_threads(num: int) -> None:
    """Let torch compute with `num` threads wherever the calling thread asks it to.

    The number is each thread's own, and setting it drops what oneDNN has prepared, so it is set only where it differs.
    """
    import torch

    if torch.get_num_threads() != num:
        torch.set_num_threads(num)


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest power of two up to `most` that `fits`, tried upwards.

    Raises:
        MemoryError: not even one fits.
    """
    size = 1
    if not fits(size):
        raise MemoryError("not even one window fits the device; use a smaller windows.shape")
    while size * 2 <= most and fits(size * 2):
        size *= 2
    return size


_loaded: dict[str, Runner] = {}
_loading = threading.Lock()


def load_runner(plan: Plan) -> Runner:
    """Return the runner of `plan`, loaded at the first call in this process; one net is kept at a time."""
    with _loading:
        if plan.identity not in _loaded:
            _loaded.clear()
            _loaded[plan.identity] = Runner.load(plan)
        return _loaded[plan.identity]


def loaded_runner() -> Runner | None:
    """Return the runner that this process holds, if any."""
    return next(iter(_loaded.values()), None)


@dataclass
class BlockSum:
    """The weighted sum of one block's windows while it grows, (c, z, y, x).

    With `crop` each voxel comes from one window, so that it is finished when it comes and held as it will be stored;
    a sum of several windows, or one that other blocks add to, is float32 until it is written.
    """

    wanted: Selection
    normalise: Affine
    block: int
    box: Box = field(init=False)
    total: np.ndarray = field(init=False, repr=False)
    tally: Tally = field(default_factory=Tally)
    _bad: np.ndarray | None = field(default=None, repr=False)  # flags of NaN and of infinite voxels, once there are any

    @property
    def plan(self) -> Plan:
        return self.wanted.plan

    def __post_init__(self) -> None:
        self.box = self.plan.sum_box(self.block)
        shape = (self.plan.net.out_channels, *self.box.shape)
        if self.is_finished:
            self.total = np.zeros(shape, self.plan.dtype)
        else:
            self.total = np.full(shape, NO_SUM, np.float32)

    @cached_property
    def is_finished(self) -> bool:
        """Whether `total` holds voxels as they are stored, not sums."""
        plan = self.plan
        return plan.recipe.windows.blend == "crop" and all(map(plan.is_direct, plan.shards_of_block(self.block)))

    def add(self, number: int, out: np.ndarray) -> None:
        """Add window `number`, whose net output is `out` (c, z, y, x), with its weights."""
        plan = self.plan
        index = plan.lattice.window_index(number)
        blend, scale = plan.recipe.windows.blend, plan.net.scale
        z, y, x = (span(blend, plan.lattice, axis, i, scale[axis]) for axis, i in enumerate(index))
        part = out[:, z.start : z.stop, y.start : y.stop, x.start : x.stop]
        corner = plan.lattice.window_box(number).relative_to(plan.roi_box.start).scaled(scale).start
        start = tuple(c + s.start for c, s in zip(corner, (z, y, x), strict=True))
        box = Box(start, tuple(a + n for a, n in zip(start, part.shape[1:], strict=True)))
        inside = box & self.box  # a region of interest may cut through windows
        place, inner = inside.relative_to(self.box.start).slices, inside.relative_to(start).slices
        part = part[:, *inner]
        finite = np.isfinite(part)
        if not finite.all():
            if self._note_bad(part, finite, inside) and plan.recipe.infer.nonfinite == "refuse":
                return  # the block fails once all of it is counted
            if plan.dtype.kind != "f":
                part = np.where(finite, part, np.float32(0))  # which is not wanted, and has no integer
        if self.is_finished:
            self.total[:, *place] = finish(plan, self.normalise, part, self.tally)
        elif blend == "crop":
            self.total[:, *place] += part
        else:
            weighted = part * z.weights[inner[0], None, None]
            weighted *= y.weights[inner[1], None]
            weighted *= x.weights[inner[2]]
            self.total[:, *place] += weighted

    def _note_bad(self, part: np.ndarray, finite: np.ndarray, box: Box) -> bool:
        """Flag what is not `finite` in `part` (c, z, y, x), a window's share of `box`, where that is wanted."""
        mask = self.wanted.mask(box)
        flags = ~finite if mask is None else ~finite & mask
        if not flags.any():
            return False
        if self._bad is None:
            self._bad = np.zeros((2, *self.total.shape), bool)
        nan, infinite = self._bad[:, :, *box.relative_to(self.box.start).slices]
        nan |= np.isnan(part) & flags
        infinite |= np.isinf(part) & flags
        return True

    @property
    def bad(self) -> Nonfinite:
        """How many voxels are not finite in some window; one that is NaN in any counts as that."""
        if self._bad is None:
            return ALL_FINITE
        nan, infinite = self._bad
        return Nonfinite(int(np.count_nonzero(nan)), int(np.count_nonzero(infinite & ~nan)))

    def check(self) -> None:
        """Refuse voxels that are not finite, unless the recipe keeps them.

        Raises:
            NonfiniteError: with how many there are, and where.
        """
        if self._bad is not None and self.plan.recipe.infer.nonfinite == "refuse":
            place = bounds(np.any(self._bad, axis=(0, 1))).shift(self.box.start)
            raise NonfiniteError(
                f"net {self.plan.net.label} gave {self.bad} voxels in box {place} of the output; mend the net, "
                "its weights or the input there, or keep them with infer.nonfinite=keep and output.dtype=float32"
            )

    def part(self, box: Box) -> np.ndarray:
        """Return the voxels of `total` in `box` of the output."""
        return self.total[:, *box.relative_to(self.box.start).slices]


@dataclass(frozen=True)
class Written:
    """What a block wrote.

    Attributes:
        shared: shards, of those that it shares with other blocks, that are thereby written.
        bad: what was not finite, and was kept.
        sums: checksums of all the shards that it wrote, by their number.
        clipped: voxels that were clipped to the type of the output.
    """

    shared: tuple[int, ...] = ()
    bad: Nonfinite = ALL_FINITE
    sums: Mapping[int, str] = field(default_factory=dict)
    clipped: int = 0


def write_block(wanted: Selection, tensors: Tensors, done: BlockSum) -> Written:
    """Write a finished block, and return what is thereby written.

    It writes the shards that no later block adds to, where what earlier blocks add is there; the rest of its sum goes
    to scratch. Shards without a wanted voxel do not count.
    """
    plan = wanted.plan
    shards = [shard for shard in plan.shards_of_block(done.block) if wanted.touches(plan.shards().box(shard))]
    contributors = {s: list(filter(wanted.has_block, plan.blocks_of_shard(s))) for s in shards}
    closed = [
        shard
        for shard, blocks in contributors.items()
        if blocks[-1] == done.block and all(tensors.has_sum(b, plan.shards().box(shard)) for b in blocks[:-1])
    ]
    if len(closed) < len(shards):
        tensors.write_sum(done.block, done.total, closed)
    sums = {}
    for shard in closed:
        box = plan.shards().box(shard)
        if done.is_finished:
            sums[shard] = write_selected(wanted, box, done.part(box))
        else:
            total = tensors.total(box, contributors[shard], done)
            sums[shard] = write_total(wanted, done.normalise, box, total, done.tally)
    shared = tuple(shard for shard in closed if not plan.is_direct(shard))
    return Written(shared, done.bad, sums, done.tally.clipped)


def infer(
    wanted: Selection,
    normalise: Affine,
    tensors: Tensors,
    source: WindowSource,
    blocks: Sequence[int],
    *,
    before_write: Callable[[], None] = lambda: None,
    on_windows: Callable[[int], None] = lambda num_windows: None,
) -> Iterator[tuple[int, Exception | Written]]:
    """Yield each of `blocks` when it is written, with what it wrote, or with what went wrong.

    At most two sums are in memory at a time: the one that grows and the one that is being written; the voxels of the
    next block are read when that is written. What `before_write` raises keeps a block from being written; `on_windows`
    is called with the number of windows of each batch that was computed.
    """
    after_next = dict(zip(blocks, blocks[2:], strict=False))

    def write(done: BlockSum) -> Written:
        source.forget(done.block)
        try:
            before_write()
            return write_block(wanted, tensors, done)
        finally:
            if done.block in after_next:
                source.expect(after_next[done.block])

    runner = load_runner(wanted.plan)
    runner.check()
    for block in blocks[:2]:
        source.expect(block)
    writing: tuple[int, Future[Written]] | None = None
    with ThreadPoolExecutor(1, "volpipe-write") as writer:
        incoming = ahead(batches(source, blocks, runner.batch, wanted.windows_of), BATCHES_AHEAD)
        for block, outcome in block_sums(wanted, normalise, runner, incoming, on_windows):
            if isinstance(outcome, Exception):
                yield block, outcome
                continue
            if writing is not None:
                yield writing[0], _outcome(writing[1])
            writing = block, writer.submit(write, outcome)
            del outcome  # else it would stay while the next one grows
        if writing is not None:
            yield writing[0], _outcome(writing[1])


def block_sums(
    wanted: Selection,
    normalise: Affine,
    runner: Runner,
    incoming: Iterator[Batch],
    on_windows: Callable[[int], None] = lambda num_windows: None,
) -> Iterator[tuple[int, BlockSum | Exception]]:
    """Yield each block with its sum as soon as its last window is added, or with the first error that it met."""
    growing: BlockSum | None = None
    failed: int | None = None
    for batch in incoming:
        if batch.block == failed:
            continue
        if growing is None or growing.block != batch.block:
            growing = BlockSum(wanted, normalise, batch.block)
        error = batch.error
        if batch.windows is not None:
            try:
                for number, out in zip(batch.numbers, runner(batch.windows), strict=True):
                    growing.add(number, out)
                on_windows(len(batch.numbers))
                if batch.is_last:
                    growing.check()
            except Exception as problem:
                error = runner.explained(problem)
        if error is not None:
            failed, growing = batch.block, None
            yield batch.block, error
        elif batch.is_last:
            yield batch.block, growing
            growing = None


def _outcome(future: Future[Written]) -> Exception | Written:
    error = future.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return future.result() if error is None else error


def bounds(flags: np.ndarray) -> Box:
    """Return the smallest box around what is set in `flags`, of which some are."""
    places = np.nonzero(flags)
    return Box(tuple(int(p.min()) for p in places), tuple(int(p.max()) + 1 for p in places))
