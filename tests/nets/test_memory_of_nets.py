"""What is remembered of shipped nets: it spares importing torch, and never outlives what it was made from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file

from volpipe.nets.load import build_net, check_shapes, describe, weights_hash
from volpipe.recipes.inference import NetChoice

SMALL = NetChoice(name="unet3d", options={"features": [2, 4]})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/volpipe"


def test_a_net_that_was_described_once_needs_no_torch() -> None:
    check_shapes(SMALL, describe(SMALL), (32, 32, 32))
    code = (
        "import sys\nfrom volpipe.nets.load import check_shapes, describe\n"
        "from volpipe.recipes.inference import NetChoice\n"
        f"choice = NetChoice(**{SMALL.model_dump()!r})\nfacts = describe(choice)\n"
        "check_shapes(choice, facts, (32, 32, 32))\nassert 'torch' not in sys.modules\nprint(facts.weights_sha256)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == weights_hash(build_net(SMALL))


def test_other_options_and_other_weights_are_other_nets(tmp_path: Path) -> None:
    larger = SMALL.model_copy(update={"options": {"features": [3, 4]}})
    assert describe(SMALL).num_parameters != describe(larger).num_parameters
    state = build_net(SMALL).state_dict()
    weighted = SMALL.model_copy(update={"weights": str(tmp_path / "w.safetensors")})
    hashes = []
    for number in (0.5, 0.25):
        save_file({name: torch.full_like(tensor, number) for name, tensor in state.items()}, tmp_path / "w.safetensors")
        hashes.append(describe(weighted).weights_sha256)
        assert hashes[-1] == weights_hash(build_net(weighted))
    assert hashes[0] != hashes[1]


def test_a_memory_that_was_cut_off_is_made_again(cache: Path) -> None:
    before = describe(SMALL)
    (file,) = cache.iterdir()
    file.write_text(file.read_text()[:40])
    assert describe(SMALL) == before
    assert describe(SMALL) == before


def test_where_nothing_can_be_remembered_facts_are_found_all_the_same(cache: Path) -> None:
    cache.parent.mkdir()
    cache.touch()  # a file, where the folder would be
    assert describe(SMALL).in_channels == 1


def test_a_users_net_that_was_edited_is_another(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor as bytecode: of two edits in a second, of as many bytes, that of the first would pass for the second's."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "net.py"
    for halo in (1, 2):
        file.write_text(
            "import torch\ndef net():\n    made = torch.nn.Identity()\n"
            f"    made.volpipe = dict(halo=[{halo}] * 3)\n    return made\n"
        )
        assert describe(NetChoice(name=f"{file}:net")).halo == (halo,) * 3
    assert len(list(cache.iterdir())) == 2  # what was measured of each, by a hash of its code
    assert list(tmp_path.glob("**/*.pyc")) == []
