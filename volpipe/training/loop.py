"""The training loop: a net takes the steps of its recipe, one after another, from its newest checkpoint on.

Not here: samples (data.samples), or the task of a worker (task). A step depends on the recipe, the checkpoint
before it and its own number alone, so that a killed training reaches the same losses.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from volpipe.errors import PlanError, RecipeError, RunError, VolpipeError
from volpipe.geometry.grid import Triple
from volpipe.nets.declared import declared
from volpipe.nets.facts import NetFacts
from volpipe.nets.files import inner_net
from volpipe.nets.identity import NetIdentity
from volpipe.nets.load import build_net, check_identity, describe
from volpipe.nets.trained import BoxScores
from volpipe.recipes.training import CHECKPOINTS, STOP, WEIGHTS, Steps, TrainRecipe
from volpipe.training.data.augment import Loaded, Pair, PairMaker
from volpipe.training.data.samples import Sampler
from volpipe.training.data.volumes import check_net, learned_from
from volpipe.training.discriminator import Discriminator
from volpipe.training.distributed import RankGroup
from volpipe.training.logs import SCORES, Write, open_log, read_log, scores_in
from volpipe.training.losses import consistency, cropped, loss_terms
from volpipe.training.optimizer import Adam
from volpipe.training.validate import (
    KeptBox,
    check_scorable,
    finite_or_none,
    predict,
    prepare_held_out,
    prepare_test,
    tested_scores,
    validate,
)
from volpipe.volumes.storage.paths import atomic_write, whole_file

log = logging.getLogger(__name__)

BATCHES_AHEAD = 2
READERS = 4  # threads that read windows for a GPU; a CPU has better things to do
HELD_SHARE = 0.5  # of a GPU's free memory that volumes may take, beside activations
READ_EVERY = 20  # steps of a GPU
SUFFIX = ".pt"  # of a checkpoint
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

DEFAULT_THREADS = torch.get_num_threads()  # an earlier training of this worker may have set another number
SEEDING = threading.Lock()  # torch has one generator for all threads of a process, as on the site "threads"
SINGLE_RANK = RankGroup()

Entry = Mapping[str, float | Tensor]  # of a step's log; numbers that a GPU has not computed yet are tensors


@dataclass
class TrainState:
    """A net in training, with everything that changes from step to step.

    Attributes:
        net: in training mode, on `device`.
        average: the net with the running mean of the weights of `net`; it is validated and saved.
        discriminator: the net's adversary, if there is one.
        begun: the step at which the learning rate's schedule began.
        logits: whether `net` leaves its sigmoid to the loss, which is exact where affinities are near 0 and 1.
    """

    net: nn.Module
    average: nn.Module
    optimiser: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: str
    discriminator: Discriminator | None = None
    step: int = 0
    logits: bool = False
    begun: int = 0

    @property
    def _stateful_parts(self) -> dict[str, Any]:  # Any: of torch's and ours, which share no class
        parts = {"net": self.net, "average": self.average, "optimiser": self.optimiser, "scaler": self.scaler}
        return parts if self.discriminator is None else parts | {"judge": self.discriminator}

    def state_dict(self) -> dict[str, Any]:  # Any: tensors and numbers
        return {"step": self.step} | {name: part.state_dict() for name, part in self._stateful_parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: tensors and numbers
        for name, part in self._stateful_parts.items():
            part.load_state_dict(state[name])
        self.step = int(state["step"])


def make_train_state(recipe: TrainRecipe, search_path: str = "") -> TrainState:
    """Return the recipe's net before its first step: on the GPU if there is one, else on the CPU."""
    choice = recipe.train
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # As in a run, whatever this process did before: else losses depend on whether it had run a net.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = choice.deterministic
    torch.backends.cudnn.benchmark = not choice.deterministic
    net = build_net(recipe.net, search_path).requires_grad_(True).train().to(device)
    if choice.channels_last:
        net = net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # stubs lack 3d
    optimiser = Adam(net.parameters(), choice.learning_rate, choice.betas)
    scaler = torch.amp.GradScaler(device, enabled=choice.precision == "float16")
    average = copy.deepcopy(net).requires_grad_(False).eval()
    discriminator = Discriminator.from_choice(recipe.adversary, device)
    switch = declared(net).logits
    logits = recipe.learns_labels and not recipe.learns_classes and switch is not None
    if logits and switch is not None:  # of the net that learns; the average, which is kept, has its sigmoid
        setattr(inner_net(net), switch, True)
    return TrainState(net, average, optimiser, scaler, device, discriminator, logits=logits)


def train(
    recipe: TrainRecipe,
    folder: Path,
    search_path: str = "",
    check: Callable[[], None] = lambda: None,
    group: RankGroup = SINGLE_RANK,
    *,
    is_trial: bool = False,
    begun: int = 0,
    net: NetIdentity = NetIdentity(),  # noqa: B008  # it is frozen
) -> int:
    """Take the steps of `recipe` that `folder` lacks, and return the number of the last.

    Weights to start from are scored before the first.

    Args:
        folder: the training's folder, for checkpoints, logs and at the end the weights. A file "stop" in it ends the
            training at its next validation or checkpoint.
        search_path: folder that the recipe's relative names count from.
        check: called before anything is written; it raises where this process may no longer write.
        group: the ranks that take each step together.
        is_trial: whether other trainings of this node read the same volumes.
        begun: the step at which the learning rate's schedule began.
        net: the identity of the net as the training began.
    """
    torch.set_num_threads(recipe.train.threads or DEFAULT_THREADS)
    with SEEDING:
        torch.manual_seed(recipe.train.seed % 2**63)  # for the first weights of a net that seeds none
        state = make_train_state(recipe, search_path)
    state.begun = begun
    _resume(state, folder, group)
    check()
    facts = describe(recipe.net, search_path)
    check_identity(facts.label, net, facts.identity)
    check_net(recipe, facts)
    sampler = Sampler(recipe, facts.scale, search_path, is_trial=is_trial)
    maker = PairMaker(sampler, state.device)
    if state.device != "cpu":
        maker.hold(HELD_SHARE * torch.cuda.mem_get_info()[0])
    batches = pairs(recipe, sampler, maker, state.step, group)
    logs: contextlib.AbstractContextManager[Write] = contextlib.nullcontext(lambda entry: None)
    if group.is_rank_zero:
        logs = open_log(folder, state.step or -1)  # a training that begins again scores its weights again
    with contextlib.closing(batches), logs as write:  # type: ignore[type-var]
        read_every = 1 if state.device == "cpu" else READ_EVERY
        train_log = TrainLog(recipe, facts, sampler, folder, check, group, write, read_every)
        train_log.begin(state)
        while state.step < recipe.train.steps:
            entry = take_step(state, recipe, facts.scale, batches, group)
            if train_log.write(state, entry):
                log.info("asked to stop after step %d", state.step)
                return state.step
    if group.is_rank_zero:
        norms = [entry["norm"] for entry in read_log(folder) if "norm" in entry]
        if recipe.learns_labels and norms and not any(norms):
            raise PlanError("no window had a known label, so that nothing was learnt; give data.box, where labels are")
        # Of many trainings the chosen one alone is tested, once it is known.
        tested = None if is_trial else tested_scores(state.average, facts, sampler, folder)
        known = {"held_out": train_log.last_scores(), "test": tested}
        store_trained(recipe, facts.scale, folder, search_path, known)
        save_weights(folder / WEIGHTS, state.average.state_dict())
    return state.step


@dataclass
class TrainLog:
    """The logs, checkpoints, scores and predictions of a training; rank 0 alone writes them."""

    recipe: TrainRecipe
    facts: NetFacts
    sampler: Sampler
    folder: Path
    check: Callable[[], None]
    group: RankGroup
    write_entry: Write
    read_every: int = 1  # steps; of a GPU more, for to read a number makes it wait
    waiting: list[Entry] = field(default_factory=list)  # of steps whose numbers are not read yet

    @cached_property
    def held_out(self) -> list[KeptBox]:
        return prepare_held_out(self.sampler, self.folder)

    def begin(self, state: TrainState) -> None:
        """Refuse held-out and test boxes without labels; log the scores of weights to start from as those of step 0."""
        if self.group.is_rank_zero and self.recipe.train.validate_every:
            check_scorable(self.recipe, self.held_out)
        if self.group.is_rank_zero and self.recipe.learns_labels and self.recipe.has_test:
            check_scorable(self.recipe, prepare_test(self.sampler, self.folder), "data.test")
        is_first = not state.step and self.recipe.net.weights is not None
        if is_first and self.group.is_rank_zero and (scores := self.scores(state)):
            self._log([{"step": 0, **scores, "time": time.time()}])

    def write(self, state: TrainState, entry: Entry) -> bool:
        """Log `entry` and, at their intervals, scores and a checkpoint; return whether the training stops here.

        Raises:
            RunError: a loss or a gradient's norm is not finite, of this step or of one before it that was not read yet;
                no checkpoint has been written since.
        """
        choice, step = self.recipe.train, state.step
        self.waiting.append(entry)
        saves = step % choice.checkpoint_every == 0 or step == choice.steps
        pauses = saves or any(
            _is_at(step, every, choice.steps) for every in (choice.validate_every, choice.predict_every)
        )
        if not pauses:
            if len(self.waiting) >= self.read_every:
                self._log(self._read_waiting())
            return False
        stops, entries = 0, self._read_waiting()
        if self.group.is_rank_zero:
            self._log([*entries[:-1], {**entries[-1], **self.scores(state)}])
            stops = int((self.folder / STOP).exists() and step < choice.steps)
            if saves or stops:
                self.check()
                save_checkpoint(self.folder / CHECKPOINTS, step, state.state_dict(), choice.keep)
        return bool(self.group.from_rank_zero(f"stop at {step}", stops))

    def _log(self, entries: Sequence[Mapping[str, float]]) -> None:
        for entry in entries:
            self.write_entry(entry)

    def _read_waiting(self) -> list[dict[str, float]]:
        """Return the waiting entries in numbers, means over the ranks; the only wait for a GPU beside checkpoints."""
        tensors = [value.detach() for entry in self.waiting for value in entry.values() if isinstance(value, Tensor)]
        numbers = torch.stack([tensor.float() for tensor in tensors])
        self.group.average([numbers])
        read = iter(numbers.tolist())
        entries = [
            {name: next(read) if isinstance(value, Tensor) else value for name, value in entry.items()}
            for entry in self.waiting
        ]
        self.waiting.clear()
        for number, entry in enumerate(entries):
            if trouble := not_finite(entry, self.recipe.train):
                self._log(entries[:number])
                raise RunError(trouble)
        return entries

    def last_scores(self) -> BoxScores | None:
        """Return the last scores of the held-out boxes, with how many there were; None without any."""
        entries = [entry for entry in read_log(self.folder) if any(name in entry for name in SCORES)]
        if not entries:
            return None
        boxes = tuple(map(str, self.held_out))
        return BoxScores(boxes=boxes, scores=finite_or_none(scores_in(entries[-1])), num_values=len(entries))

    def scores(self, state: TrainState) -> dict[str, float]:
        """Return the scores of the held-out boxes, none between validations; write predictions at their interval."""
        choice = self.recipe.train
        scores: dict[str, float] = {}
        if _is_at(state.step, choice.validate_every, choice.steps):
            scores |= validate(state.average, self.facts, self.recipe, self.held_out, self.folder)
        if _is_at(state.step, choice.predict_every, choice.steps):
            predict(state.average, self.sampler, self.folder, self.facts.label, state.step)
        return scores


def _is_at(step: int, every: int, last: int) -> bool:
    return every > 0 and (step % every == 0 or step == last)


def not_finite(entry: Mapping[str, float], choice: Steps) -> str | None:
    """Return which number of a step is not finite, and what to change; None where all are."""
    is_scaled = choice.precision == "float16"  # whose scaler leaves out steps of infinite gradients
    for what, key, advice in (
        ("loss", "loss", "train.learning_rate or train.clip, or precision float32"),
        ("gradient's norm", "norm", "train.learning_rate or train.clip, or precision float32"),
        ("discriminator's loss", "judge", "adversary.learning_rate"),
    ):
        value = 0.0 if key == "norm" and is_scaled else entry.get(key, 0.0)
        if not math.isfinite(value):
            return f"step {entry['step']}: the {what} is {value}; give a smaller {advice}"
    return None


def take_step(
    state: TrainState, recipe: TrainRecipe, scale: Triple, batches: Iterator[Pair], group: RankGroup = SINGLE_RANK
) -> Entry:
    """Take one step, and return its log entry, times in seconds.

    A GPU may still compute the step: its numbers are tensors, and the time of a step that is read has the wait for
    those before it.
    """
    choice, started, waited = recipe.train, time.perf_counter(), 0.0
    with SEEDING:
        torch.manual_seed((choice.seed * 1_000_003 + state.step) % 2**63)  # for dropout and the like
    rate = choice.rate(state.step, state.begun)
    for parameters in state.optimiser.param_groups:
        parameters["lr"] = rate
    state.optimiser.zero_grad(set_to_none=True)
    sums: dict[str, Tensor] = {}
    for _ in range(choice.accumulate):
        before = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - before
        for name, value in _add_gradient(state, recipe, batch, scale).items():
            share = value.detach() / choice.accumulate
            sums[name] = sums[name] + share if name in sums else share
    group.average_gradients(state.net)  # before the scaler looks for infinities, so that all ranks see the same ones
    norm = _update(state, choice)
    if state.discriminator is not None:
        group.average_gradients(state.discriminator.net)
        state.discriminator.update()
    state.step += 1
    times = {"seconds": time.perf_counter() - started, "waited": waited, "time": time.time()}
    return {"step": state.step, **sums, "rate": rate, "norm": norm, **times}


def _add_gradient(state: TrainState, recipe: TrainRecipe, batch: Pair, scale: Triple) -> dict[str, Tensor]:
    """Add the gradient of one batch, and return its loss and the loss's terms."""
    choice, weights, (inputs, truth) = recipe.train, recipe.weights, batch
    if choice.channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last_3d)
    with torch.autocast(state.device, PRECISIONS[choice.precision], enabled=choice.precision != "float32"):
        outputs = state.net(inputs)
    margin = recipe.samples.margin
    outputs, truth = cropped(outputs.float(), margin, scale), cropped(truth, margin, scale)
    shape = (len(truth), len(recipe.classes.names) if recipe.learns_classes else truth.shape[1], *truth.shape[2:])
    if outputs.shape != shape:
        raise RecipeError(
            f"net {recipe.net.name} gave {tuple(outputs.shape)} (n, c, z, y, x), {shape} are learnt; correct what it, "
            "or [net], declares of its channels, scale and margin"
        )
    terms = loss_terms(weights, outputs, truth, logits=state.logits)
    if recipe.loss.consistency:
        terms["consistency"] = consistency(outputs, cropped(inputs, margin), scale)
    zero = torch.zeros((), device=outputs.device)
    loss = sum((getattr(weights, name) * term for name, term in terms.items()), zero)
    discriminator = state.discriminator
    if discriminator is not None and state.step >= discriminator.choice.start:
        terms["fooled"] = discriminator.generator_loss(outputs, cropped(inputs, margin), scale)
        loss = loss + discriminator.choice.weight * terms["fooled"]
    state.scaler.scale(loss / choice.accumulate).backward()
    entry = {"loss": loss} | (terms if len(terms) > 1 else {})
    if discriminator is not None:
        share = 1 / choice.accumulate
        entry["judge"] = discriminator.discriminator_loss(outputs, truth, cropped(inputs, margin), scale, share)
    return entry


def _update(state: TrainState, choice: Steps) -> Tensor:
    """Update the weights by their gradient, then their running mean; return the gradient's norm."""
    state.scaler.unscale_(state.optimiser)
    norm = nn.utils.clip_grad_norm_(state.net.parameters(), choice.clip or math.inf)
    state.scaler.step(state.optimiser)
    state.scaler.update()
    # Early on the mean is over the last tenth of the steps, so that it forgets the first ones.
    decay = min(choice.ema, (1 + state.step) / (10 + state.step))
    means, now = (list(net.state_dict().values()) for net in (state.average, state.net))
    floats = [n for n, mean in enumerate(means) if mean.is_floating_point()]
    with torch.no_grad():
        torch._foreach_lerp_([means[n] for n in floats], [now[n] for n in floats], 1 - decay)
        for n in set(range(len(means))).difference(floats):
            means[n].copy_(now[n])
    return norm


def pairs(recipe: TrainRecipe, sampler: Sampler, maker: PairMaker, step: int, group: RankGroup) -> Iterator[Pair]:
    """Yield the batches of all steps from `step` on, without end; of n ranks, rank r has windows r, r + n, r + 2n...

    Windows are read ahead. On a CPU pairs are made there as well; a GPU makes them itself, after the step before.
    """
    size = recipe.train.batch * group.size
    first = step * size * recipe.train.accumulate

    def load(number: int) -> list[Loaded]:
        start = first + number * size
        return [maker.load(sampler.window(n)) for n in range(start + group.rank, start + size, group.size)]

    here = maker.device == "cpu"
    make: Callable[[int], Any] = (lambda number: maker.pair(load(number))) if here else load  # Any: a pair, or windows
    with ThreadPoolExecutor(1 if here else READERS, "volpipe-ahead") as pool:
        waiting = deque(pool.submit(make, number) for number in range(BATCHES_AHEAD + 1 if here else READERS))
        try:
            for number in itertools.count(len(waiting)):
                made = waiting.popleft().result()
                waiting.append(pool.submit(make, number))
                yield made if here else maker.pair(made)
        finally:
            pool.shutdown(cancel_futures=True)


def _resume(state: TrainState, folder: Path, group: RankGroup) -> None:
    """Load the newest checkpoint in `folder` that rank 0 sees; without one, give all ranks the same weights."""
    paths = checkpoints(folder / CHECKPOINTS)
    step = group.from_rank_zero("begin at", int(paths[-1].stem) if paths else 0)
    if step:
        state.load_state_dict(load_checkpoint(checkpoint_at(folder / CHECKPOINTS, step)))
        log.info("continuing from step %d", step)
        return
    adversary = [] if state.discriminator is None else [state.discriminator.net]
    for net in (state.net, state.average, *adversary):
        group.broadcast(list(net.state_dict().values()))  # not every net draws the same weights each time


# ---- checkpoints: tensors, numbers and text, which load with weights_only=True


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any], keep: int) -> Path:  # Any: tensors and numbers
    """Write `state` after `step` steps into `folder`, delete all but the newest `keep`, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint_at(folder, step)
    with whole_file(path) as partial:
        torch.save(dict(state), partial)
    for old in checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:  # Any: tensors and numbers
    """Return the state in the checkpoint at `path`.

    Raises:
        RunError: the file is damaged, or holds other objects than tensors, numbers and text.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise RunError(
            f"checkpoint {path} cannot be read ({type(error).__name__}: {error}); "
            "delete it to continue from the one before"
        ) from error
    return state


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first; each is named by the number of steps before it."""
    return sorted(folder.glob(f"[0-9]*{SUFFIX}"))


def checkpoint_at(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps in `folder`; it need not exist."""
    return folder / f"{step:09}{SUFFIX}"


def store_trained(
    recipe: TrainRecipe, scale: Triple, folder: Path, search_path: str, scores: Mapping[str, BoxScores | None]
) -> None:
    """Write the file in `folder` that describes the training of its weights and their `scores`, before the weights."""
    try:
        learned_from(recipe, scale, search_path).model_copy(update=dict(scores)).store(folder / WEIGHTS)
    except (VolpipeError, OSError) as error:  # the weights are worth more
        log.warning("what the weights learned from cannot be noted, and no run compares its volume with it: %s", error)


def save_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` to `path` as safetensors, whole or not at all."""
    atomic_write(path, save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}))
