"""Adam: torch's own steps, without torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch import nn
from trainings import make_folder

from volpipe.training.optimizer import Adam

TRAINED = """
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from volpipe.training.loop import train
from volpipe.recipes.training import load_training
train(load_training(Path("recipe.toml")), Path("t"))
print(sorted(name for name in sys.modules if name == "torch" or name.startswith("torch._dynamo")))
"""


def weights_after(make: Callable[..., torch.optim.Adam]) -> list[torch.Tensor]:
    """Return weights after steps of which the later ones go on from a state that was taken, and at another rate."""
    dice = torch.Generator().manual_seed(3)
    net = nn.Conv3d(1, 3, 3)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.rand(weight.shape, generator=dice) - 0.5)
    first, second = (make(net.parameters(), 1e-2, (0.8, 0.95)) for _ in range(2))
    for step in range(8):
        if step == 4:
            second.load_state_dict(first.state_dict())
        now = first if step < 4 else second
        now.param_groups[0]["lr"] = 1e-2 / (1 + step)
        now.zero_grad()
        (net(torch.rand(1, 1, 6, 6, 6, generator=dice)) ** 2).mean().backward()
        now.step()
    return [weight.detach() for weight in net.parameters()]


def test_its_steps_are_torchs_bit_for_bit() -> None:
    ours, theirs = weights_after(Adam), weights_after(partial(torch.optim.Adam, fused=True))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.long
def test_a_training_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    make_folder(tmp_path, "[adversary]\nweight = 0.01\nfeatures = 4\n")
    (tmp_path / "t").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", TRAINED], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "['torch']\n"), done.stderr
