"""What shipped nets are described as is what they are, and is not believed of anything else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from volpipe.nets import facts as facts_module
from volpipe.nets.facts import FILE, NetFacts, facts_key, look_up, models_folder
from volpipe.nets.load import build_net, describe, examine
from volpipe.recipes.inference import NetChoice, load_recipe
from volpipe.resolve import shipped
from volpipe.volumes.volume import ArraySpec, create_array

RECIPES = (
    "affinities",
    "superres_z2",
    "superres_z4",
    "superres_z2_noisy",
    "superres_z4_noisy",
    "superres_z4_sharp",
    "default",
)  # what `run` may be given by name
CHOICES = [NetChoice(name=name) for name in shipped("volpipe.models")]
CHOICES += [load_recipe(ROOT / "configs" / f"{name}.toml", []).net for name in RECIPES]
LIMIT_BYTES = 300e6  # of the plan of a volume of 100,000³ voxels


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder of nets, which stands for the package's own."""
    folder = tmp_path / "models"
    shutil.copytree(models_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(facts_module, "models_folder", lambda: folder)
    return folder


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice.name}-{choice.weights}")
def test_descriptions_are_what_the_nets_say_of_themselves(choice: NetChoice) -> None:
    known = look_up(choice)
    assert known is not None, "scripts/describe was not run after a change"
    assert NetFacts.model_validate(known) == examine(choice)


def test_every_description_is_of_a_net_that_is_shipped_now() -> None:
    found = json.loads((models_folder() / FILE).read_text(encoding="utf-8"))
    assert set(found) == {facts_key(choice) for choice in CHOICES}


@given(index=st.integers(0, len(CHOICES) - 1), strides=st.tuples(*[st.integers(1, 3)] * 3))
@settings(max_examples=30)
def test_described_nets_take_any_window_of_whole_strides(index: int, strides: tuple[int, int, int]) -> None:
    choice = CHOICES[index]
    facts = describe(choice)
    window = tuple(
        2 * h // s * s + 2 * s * n for h, s, n in zip(facts.halo, facts.stride, strides, strict=True)
    )  # beyond its halo, as plans have it
    net = build_net(choice.model_copy(update={"weights": None})).to("meta")
    with torch.device("meta"), torch.inference_mode():
        out = tuple(net(torch.zeros((1, facts.in_channels, *window))).shape)
    assert out == (1, facts.out_channels, *(w * f for w, f in zip(window, facts.scale, strict=True)))


@pytest.mark.parametrize("change", ["code", "weights", "options", "halo", "own weights", "torch", "no file", "damage"])
def test_what_differs_is_built_and_asked(models: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = CHOICES[-1] if change != "torch" else NetChoice(name="srgan3d")
    assert look_up(choice) is not None
    if change == "code":
        (models / "unet3d.py").write_text((models / "unet3d.py").read_text() + "\n# other\n")
    elif change == "weights":
        (models / "unet3d_denoise.safetensors").write_bytes(b"other")
    elif change == "torch":
        monkeypatch.setattr(facts_module, "torch_version", lambda: "0.1")
    elif change == "no file":
        (models / FILE).unlink()
    elif change == "damage":
        (models / FILE).write_text("{")
    else:
        changes = {"options": {"options": {"features": [2, 4]}}, "halo": {"halo": (64, 64, 64)}}
        choice = choice.model_copy(update=changes.get(change, {"weights": str(models / "unet3d_denoise.safetensors")}))
    assert look_up(choice) is None


def test_what_a_run_is_allowed_to_do_changes_no_net() -> None:
    allowed = CHOICES[0].model_copy(update={"accept_tile_variance": True, "trust_model": True})
    assert look_up(allowed) == look_up(CHOICES[0]) is not None


def first_plan(folder: Path, edge: int) -> tuple[str, int, float, bool]:
    """Return what a first plan of a cube prints, its memory and processor time, and whether it loads torch."""
    create_array(folder / f"{edge}.zarr", "raw", ArraySpec((edge,) * 3, np.dtype("uint8"), (128,) * 3, (1024,) * 3))
    code = (
        "import resource, sys\nimport volpipe.apps.pool\nfrom volpipe.cli.app import main\n"
        "began = resource.getrusage(resource.RUSAGE_SELF)\n"
        "sys.argv = ['volpipe', 'plan', '--quick', '--set', 'output.shard=[256,256,256]',"
        f" '--set', 'windows.block=[4,4,4]', '{edge}.zarr']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    code = ended.code\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "peak = next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(peak * 1024, used.ru_utime + used.ru_stime - began.ru_utime - began.ru_stime,"
        " 'torch' in sys.modules, file=sys.stderr)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / f"empty {edge}")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    peak, seconds, has_torch = done.stderr.splitlines()[-1].split()
    return done.stdout, int(peak), float(seconds), has_torch == "True"


@pytest.mark.long
def test_the_first_plan_of_a_huge_volume_takes_little(tmp_path: Path) -> None:
    """Less than three times the processor's time of that of a small one, which the machine's speed does not change."""
    _, _, small_seconds, _ = first_plan(tmp_path, 1000)
    printed, peak, seconds, has_torch = first_plan(tmp_path, 100_000)
    assert "1.0 PiB" in printed
    assert not has_torch
    assert peak < LIMIT_BYTES
    assert seconds < 3 * small_seconds
