"""A training is what a plain loop of torch does with the same windows: losses, norms, rates, weights and their mean."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainings import made, make_folder

from volpipe.models.superres import superres
from volpipe.recipes.training import WEIGHTS, load_training
from volpipe.training.data.samples import Sampler
from volpipe.training.logs import read_log
from volpipe.training.loop import train

TRAIN = """
[train]
steps = 5
batch = 2
accumulate = 3
warm_up = 2
learning_rate = 2e-3
betas = [0.8, 0.95]
clip = 0.05
ema = 0.15
threads = 1
seed = 11
[loss]
l1 = 1.0
l2 = 0.5
charbonnier = 0.25
gradient = 2.0
consistency = 3.0
"""


def inner(data: torch.Tensor, z: int) -> torch.Tensor:
    return data[:, :, z : data.shape[2] - z, 2:-2, 2:-2]


def plain_loss(net: torch.nn.Module, inputs: torch.Tensor, truth: torch.Tensor) -> dict[str, torch.Tensor]:
    whole = net(inputs)
    out, error = inner(whole, 2), inner(whole, 2) - inner(truth, 2)
    steps = [(error.narrow(a, 1, error.shape[a] - 1) - error.narrow(a, 0, error.shape[a] - 1)).abs() for a in (2, 3, 4)]
    n, _, z, y, x = out.shape
    terms = {
        "l1": error.abs().mean(), "l2": (error**2).mean(), "charbonnier": torch.sqrt(error**2 + 1e-6).mean(),
        "gradient": sum(step.mean() for step in steps) / 3,
        "consistency": (out.reshape(n, 1, z // 2, 2, y, x).mean(3) - inner(inputs, 1)).abs().mean(),
    }  # fmt: skip
    weights = {"l1": 1.0, "l2": 0.5, "charbonnier": 0.25, "gradient": 2.0, "consistency": 3.0}
    return terms | {"loss": sum(weights[name] * term for name, term in terms.items())}  # type: ignore[dict-item]


def net_of() -> torch.nn.Module:
    return superres(factor=2, features=4, num_blocks=1, keep_mean=False)


def test_a_training_takes_the_steps_of_a_plain_loop(tmp_path: Path) -> None:
    make_folder(tmp_path, train=TRAIN)
    recipe = load_training(tmp_path / "recipe.toml", ["net.options.keep_mean=false"])
    train(recipe, tmp_path / "t", str(tmp_path))
    sampler, net = Sampler(recipe, (2, 1, 1), str(tmp_path)), net_of().train()
    mean, adam, number = copy.deepcopy(net), torch.optim.Adam(net.parameters(), 1.0, (0.8, 0.95)), 0
    entries = list(read_log(tmp_path / "t"))
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5]
    for step, entry in enumerate(entries):
        rate = 2e-3 * min(1.0, (step + 1) / 2) * 0.5 * (1 + math.cos(math.pi * step / 5))
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        sums = dict[str, float]()
        for _ in range(3):
            pairs = [made(sampler, number), made(sampler, number + 1)]
            inputs = torch.stack([torch.from_numpy(pair.inputs) for pair in pairs])
            truth = torch.stack([torch.from_numpy(pair.truth) for pair in pairs])
            number += 2
            terms = plain_loss(net, inputs, truth)
            (terms["loss"] / 3).backward()
            sums = {name: sums.get(name, 0.0) + float(term.detach()) / 3 for name, term in terms.items()}
        norm = float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05))
        assert norm > 0.05  # so that it counts
        adam.step()
        decay = min(0.15, (1 + step) / (10 + step))
        with torch.no_grad():
            for average, now in zip(mean.parameters(), net.parameters(), strict=True):
                average.mul_(decay).add_(now, alpha=1 - decay)
        assert (entry["rate"], entry["norm"]) == (pytest.approx(rate), pytest.approx(norm, rel=1e-3))
        assert {name: entry[name] for name in sums} == pytest.approx(sums, rel=1e-3, abs=1e-7)
    tensors = load_file(tmp_path / "t" / WEIGHTS)
    assert set(tensors) == set(mean.state_dict())
    for name, values in mean.state_dict().items():
        torch.testing.assert_close(tensors[name], values, rtol=1e-3, atol=1e-5)
