"""Train: a net takes the steps of its recipe, one after another, from its newest checkpoint on.

Not here: which samples it sees (samples), or where it runs (apps.trainings). Everything a step does follows from the
recipe, the checkpoint before it and its own number; so a training that was killed comes to the same losses.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from volpipe.adam import Adam
from volpipe.adversary import Judge
from volpipe.checkpoints import checkpoint_at, checkpoints, load_checkpoint, save_checkpoint, save_weights, step_of
from volpipe.descriptions import NetFacts
from volpipe.errors import RunError
from volpipe.events import append_event, write_events
from volpipe.losses import consistency, cropped, loss_terms
from volpipe.nets import build_net, describe
from volpipe.ranks import Crew
from volpipe.samples import Sampler
from volpipe.training import CHECKPOINTS, EVENTS, LOSSES, STOP, WEIGHTS, Steps, TrainRecipe
from volpipe.validate import Held, hold, predict, validate
from volpipe.windows import ahead

log = logging.getLogger(__name__)

BATCHES_AHEAD = 2
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Triple = tuple[int, int, int]
DEFAULT_THREADS = torch.get_num_threads()  # a worker may have had a training with another number before
SEEDING = threading.Lock()  # torch's numbers are one row for all threads of a process, as of the site "threads"
ALONE = Crew()

Batch = tuple[Tensor, Tensor]  # what the net sees, and the truth: (n, c, z, y, x), float32


@dataclass
class Trainee:
    """A net in training, with all that changes from step to step.

    Attributes:
        net: in training mode, on `device`.
        judge: the discriminator that it learns to fool, if there is one.
        average: the net whose weights are the running mean of those of `net`; what is saved, and validated.
        step: how many steps were taken.
        logits: whether `net` leaves its sigmoid to the loss, which is exact where chances are near 0 and 1.
    """

    net: nn.Module
    average: nn.Module
    optimiser: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: str
    judge: Judge | None = None
    step: int = 0
    logits: bool = False

    def state(self) -> dict[str, Any]:  # Any: tensors and numbers
        return {
            "step": self.step,
            "net": self.net.state_dict(),
            "average": self.average.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "scaler": self.scaler.state_dict(),
            **({} if self.judge is None else {"judge": self.judge.state()}),
        }

    def load(self, state: Mapping[str, Any]) -> None:  # Any: tensors and numbers
        self.net.load_state_dict(state["net"])
        self.average.load_state_dict(state["average"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.scaler.load_state_dict(state["scaler"])
        if self.judge is not None:
            self.judge.load(state["judge"])
        self.step = int(state["step"])


def make_trainee(recipe: TrainRecipe, search_path: str = "") -> Trainee:
    """Return the recipe's net, ready for its first step: on the GPU if there is one, else on the CPU."""
    choice = recipe.train
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = build_net(recipe.net, search_path).requires_grad_(True).train().to(device)
    if choice.channels_last:
        net = net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # stubs lack 3d
    optimiser = Adam(net.parameters(), choice.learning_rate, choice.betas)
    scaler = torch.amp.GradScaler(device, enabled=choice.precision == "float16")
    average = copy.deepcopy(net).requires_grad_(False).eval()
    logits = recipe.learns_labels and getattr(net, "logits", None) is False
    if logits:
        net.logits = True  # type: ignore[assignment]  # a module's attributes are tensors to its stubs
    return Trainee(net, average, optimiser, scaler, device, Judge.of(recipe.adversary, device), logits=logits)


def train(
    recipe: TrainRecipe,
    folder: Path,
    search_path: str = "",
    check: Callable[[], None] = lambda: None,
    crew: Crew = ALONE,
) -> int:
    """Take the steps of `recipe` that `folder` lacks; return how many there are then.

    Args:
        recipe: what to do.
        folder: of the training; its checkpoints, losses and at the end its weights. A file "stop" in it ends the
            training where it next validates or writes a checkpoint.
        search_path: folder that the recipe's relative names count from.
        check: called before anything is written; it raises where this process may not write any more.
        crew: those who take each step together.
    """
    torch.set_num_threads(recipe.train.threads or DEFAULT_THREADS)
    with SEEDING:
        trainee = make_trainee(recipe, search_path)
    _resume(trainee, folder, crew)
    check()
    facts = describe(recipe.net, search_path)
    recipe.check_net(facts.out_channels, facts.scale, facts.intensity)
    sampler = Sampler(recipe, facts.scale, search_path)
    keeper = Keeper(recipe, facts, sampler, folder, check, crew)
    batches = ahead(_batches(recipe, sampler, trainee.step, crew), BATCHES_AHEAD)
    with contextlib.closing(batches), keeper.keeping(trainee):  # type: ignore[type-var]
        while trainee.step < recipe.train.steps:
            entry = take_step(trainee, recipe, facts.scale, batches, crew)
            if keeper.keep(trainee, entry):
                log.info("asked to stop after step %d", trainee.step)
                return trainee.step
    if crew.leads:
        save_weights(folder / WEIGHTS, trainee.average.state_dict())
    return trainee.step


@dataclass
class Keeper:
    """Keeps what a training leaves behind: its log, checkpoints, scores and predictions; rank 0 alone writes."""

    recipe: TrainRecipe
    facts: NetFacts
    sampler: Sampler
    folder: Path
    check: Callable[[], None]
    crew: Crew
    _write: Callable[[Mapping[str, float]], None] = lambda entry: None

    @contextlib.contextmanager
    def keeping(self, trainee: Trainee) -> Iterator[None]:
        """Have the log open meanwhile."""
        if not self.crew.leads:
            yield
            return
        with open_log(self.folder, trainee.step) as self._write:
            yield

    def keep(self, trainee: Trainee, entry: Mapping[str, float]) -> bool:
        """Write what is due after a step of which `entry` is logged; return whether the training is to stop here."""
        choice, step = self.recipe.train, trainee.step
        saves = step % choice.checkpoint_every == 0 or step == choice.steps
        pauses = saves or any(
            _is_due(step, every, choice.steps) for every in (choice.validate_every, choice.predict_every)
        )
        if not pauses:
            self._write(entry)
            return False
        stops = 0
        if self.crew.leads:
            self._write({**entry, **self.examiner.examine(trainee)})
            stops = int((self.folder / STOP).exists() and step < choice.steps)
            if saves or stops:
                self.check()
                save_checkpoint(self.folder / CHECKPOINTS, step, trainee.state(), choice.keep)
        return bool(self.crew.agree(f"stop at {step}", stops))

    @cached_property
    def examiner(self) -> Examiner:
        return Examiner(self.recipe, self.facts, self.sampler, self.folder)


@dataclass
class Examiner:
    """Looks at a net in training every so many steps, as its recipe says."""

    recipe: TrainRecipe
    facts: NetFacts
    sampler: Sampler
    folder: Path

    @cached_property
    def held(self) -> list[Held]:
        return hold(self.sampler, self.folder)

    def examine(self, trainee: Trainee) -> dict[str, float]:
        """Return the scores over what is held out, where due at this step; write predictions where they are."""
        choice = self.recipe.train
        found: dict[str, float] = {}
        if _is_due(trainee.step, choice.validate_every, choice.steps):
            found |= validate(trainee.average, self.facts, self.recipe, self.held, self.folder)
        if _is_due(trainee.step, choice.predict_every, choice.steps):
            predict(trainee.average, self.sampler, self.folder, self.facts.label, trainee.step)
        return found


def _is_due(step: int, every: int, last: int) -> bool:
    return every > 0 and (step % every == 0 or step == last)


def take_step(
    trainee: Trainee, recipe: TrainRecipe, scale: Triple, batches: Iterator[Batch], crew: Crew = ALONE
) -> dict[str, float]:
    """Take one step, and return what is logged of it: means over the ranks of `crew`."""
    choice, started, waited = recipe.train, time.perf_counter(), 0.0
    with SEEDING:
        torch.manual_seed(choice.seed * 1_000_003 + trainee.step)  # of dropout and its like
    rate = choice.rate(trainee.step)
    for group in trainee.optimiser.param_groups:
        group["lr"] = rate
    trainee.optimiser.zero_grad(set_to_none=True)
    sums: dict[str, float] = {}
    for _ in range(choice.accumulate):
        before = time.perf_counter()
        given, truth = (part.to(trainee.device, non_blocking=True) for part in next(batches))
        waited += time.perf_counter() - before
        for name, value in _learn(trainee, recipe, given, truth, scale).items():
            sums[name] = sums.get(name, 0.0) + value / choice.accumulate
    crew.average_gradients(trainee.net)  # before they are looked at for infinities, so that all ranks find the same
    norm = _update(trainee, choice)
    if trainee.judge is not None:
        crew.average_gradients(trainee.judge.net)
        trainee.judge.update()
    trainee.step += 1
    sums = crew.average_numbers(sums, trainee.device)
    if not math.isfinite(sums["loss"]):
        raise RunError(
            f"step {trainee.step}: the loss is {sums['loss']}; give a smaller train.learning_rate or train.clip, or "
            "precision float32"
        )
    took = time.perf_counter() - started
    times = {"seconds": took, "waited": waited, "time": time.time()}
    return {"step": trainee.step, **sums, "rate": rate, "norm": norm, **times}


def _learn(trainee: Trainee, recipe: TrainRecipe, given: Tensor, truth: Tensor, scale: Triple) -> dict[str, float]:
    """Add the gradient of one batch, and return its loss and the terms of it."""
    choice, weights = recipe.train, recipe.weights
    if choice.channels_last:
        given = given.contiguous(memory_format=torch.channels_last_3d)
    with torch.autocast(trainee.device, PRECISIONS[choice.precision], enabled=choice.precision != "float32"):
        out = trainee.net(given)
    margin = recipe.samples.margin
    out, truth = cropped(out.float(), margin, scale), cropped(truth, margin, scale)
    terms = loss_terms(weights, out, truth, logits=trainee.logits)
    if recipe.loss.consistency:
        terms["consistency"] = consistency(out, cropped(given, margin), scale)
    loss = sum((getattr(weights, name) * term for name, term in terms.items()), torch.zeros((), device=out.device))
    judge = trainee.judge
    if judge is not None and trainee.step >= judge.choice.start:
        terms["fooled"] = judge.fooled(out, cropped(given, margin), scale)
        loss = loss + judge.choice.weight * terms["fooled"]
    trainee.scaler.scale(loss / choice.accumulate).backward()
    found = {"loss": loss.item()} | ({name: term.item() for name, term in terms.items()} if len(terms) > 1 else {})
    if judge is not None:
        found["judge"] = judge.learn(out, truth, cropped(given, margin), scale, 1 / choice.accumulate)
    return found


def _update(trainee: Trainee, choice: Steps) -> float:
    """Change the weights by their gradient, then their running mean; return the gradient's norm."""
    trainee.scaler.unscale_(trainee.optimiser)
    norm = nn.utils.clip_grad_norm_(trainee.net.parameters(), choice.clip or math.inf)
    trainee.scaler.step(trainee.optimiser)
    trainee.scaler.update()
    # The mean forgets the first steps sooner: it is over the last tenth of them.
    decay = min(choice.ema, (1 + trainee.step) / (10 + trainee.step))
    with torch.no_grad():
        pairs = zip(trainee.average.state_dict().values(), trainee.net.state_dict().values(), strict=True)
        for mean, now in pairs:
            if mean.is_floating_point():
                mean.lerp_(now, 1 - decay)
            else:
                mean.copy_(now)
    return float(norm)


def _batches(recipe: TrainRecipe, sampler: Sampler, step: int, crew: Crew) -> Iterator[Batch]:
    """Yield the batches of all steps from `step` on, for ever; of n ranks, rank r has every n-th sample, from r on."""
    size = recipe.train.batch * crew.size
    number = step * size * recipe.train.accumulate
    while True:
        found = [sampler.sample(n) for n in range(number + crew.rank, number + size, crew.size)]
        given, truth = np.stack([s.given for s in found]), np.stack([s.truth for s in found])
        yield torch.from_numpy(given), torch.from_numpy(truth)
        number += size


def _resume(trainee: Trainee, folder: Path, crew: Crew) -> None:
    """Go on from the newest checkpoint in `folder`, if there is one; that which rank 0 finds."""
    found = checkpoints(folder / CHECKPOINTS)
    step = crew.agree("begin at", step_of(found[-1]) if found else 0)
    if step:
        trainee.load(load_checkpoint(checkpoint_at(folder / CHECKPOINTS, step)))
        log.info("going on from step %d", step)
        return
    judge = [] if trainee.judge is None else [trainee.judge.net]
    for net in (trainee.net, trainee.average, *judge):
        crew.share(list(net.state_dict().values()))  # not every net draws the same weights each time


@contextlib.contextmanager
def open_log(folder: Path, step: int) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Give what adds an entry to the losses in `folder`, lines of JSON, and to its event file, both cut at `step`."""
    path = folder / LOSSES
    kept = [line for line in read_log(path) if line["step"] <= step]
    write_events(folder / EVENTS, kept)
    with path.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(line) + "\n" for line in kept)
    with path.open("a", encoding="utf-8", buffering=1) as lines:

        def write(entry: Mapping[str, float]) -> None:
            lines.write(json.dumps(entry) + "\n")
            append_event(folder / EVENTS, entry)

        yield write


def read_log(path: Path) -> list[dict[str, float]]:
    """Return the lines that a training logged at `path`; one that was cut off is left out."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.endswith("\n")]
