"""Nets that compute otherwise have no facts, run or resume in common; the same net is one wherever it is built."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from inline import Inline
from volumes import write_volume

import volpipe.inference.runner as runner_module
from volpipe.errors import RecipeError, RunError, RunStopped, VolpipeError
from volpipe.inference.plan import Plan
from volpipe.models.unet3d import unet3d
from volpipe.nets.facts import NetFacts
from volpipe.nets.identity import NetIdentity, fixed_output
from volpipe.nets.load import build, cached_geometry, describe
from volpipe.recipes.inference import NetChoice, load_recipe
from volpipe.recipes.training import TrainRecipe
from volpipe.training.task import Training
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

NET = """
import torch
from torch.nn import functional
class Net(torch.nn.Module):
    def __init__(self, factor=1, dilation=1):
        super().__init__()
        self.factor, self.dilation = factor, dilation
        self.layer = torch.nn.Conv3d(1, 1, 3)
    def forward(self, x):
        wide = functional.conv3d(x, self.layer.weight, self.layer.bias, padding=self.dilation, dilation=self.dilation)
        return self.factor * wide
def made(**options):
    torch.manual_seed(0)
    return Net(**options)
"""
WAYS: dict[str, tuple[str, Callable[[Path, int, pytest.MonkeyPatch], object]]] = {
    "a file of JSON": (
        "import json, pathlib\nfile = pathlib.Path(__file__).with_name('net.json')\n"
        "def build(): return made(**json.loads(file.read_text()))\n",
        lambda folder, n, _: (folder / "net.json").write_text(json.dumps({"factor": n})),
    ),
    "a wider kernel from a text": (
        "def build():\n    with open('net.txt') as file:\n        return made(dilation=int(file.read()))\n",
        lambda folder, n, _: (folder / "net.txt").write_text(str(n)),
    ),
    "code that is executed": (
        "import pathlib\nnames = {}\nexec(pathlib.Path('arch.py').read_text(), names)\n"
        "def build(): return made(factor=names['FACTOR'])\n",
        lambda folder, n, _: (folder / "arch.py").write_text(f"FACTOR = {n}\n"),
    ),
    "numbers of numpy": (
        "import numpy\ndef build(): return made(factor=float(numpy.load('factor.npy')))\n",
        lambda folder, n, _: np.save(folder / "factor.npy", np.array(n)),
    ),
    "a module beside it": (
        "import parts\ndef build(): return made(factor=parts.FACTOR)\n",
        lambda folder, n, _: (folder / "parts.py").write_text(f"FACTOR = {n}\n"),
    ),
    "a module that is named at run time": (
        "import importlib\ndef build(): return made(factor=importlib.import_module('pa' + 'rts').FACTOR)\n",
        lambda folder, n, _: (folder / "parts.py").write_text(f"FACTOR = {n}\n"),
    ),
    "an option in the environment": (
        "import os\ndef build(): return made(factor=float(os.environ['FACTOR']))\n",
        lambda _, n, monkeypatch: monkeypatch.setenv("FACTOR", str(n)),
    ),
    "a dilation from the environment": (
        "import os\ndef build():\n    d = int(os.environ['FACTOR'])\n    torch.manual_seed(0)\n"
        "    return torch.nn.Conv3d(1, 1, 3, padding=d, dilation=d)\n",
        lambda _, n, monkeypatch: monkeypatch.setenv("FACTOR", str(n)),
    ),
}  # fmt: skip
# A file that is read, or a variable, as in another: with -m long.
ALIKE = {
    "a file of JSON", "code that is executed", "numbers of numpy", "a module that is named at run time",
    "an option in the environment",
}  # fmt: skip
SMALL = ("net.name=nets.py:build", "net.untrained=true", "normalise.method=none", "output.dtype=float32")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a volume, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_volume(tmp_path / "in.n5", np.random.default_rng(0).random((24, 24, 24)).astype(np.float32))
    monkeypatch.setattr(runner_module, "_loaded", {})
    return tmp_path


def facts(folder: Path, name: str = "nets.py:build") -> NetFacts:
    return describe(NetChoice(name=name, untrained=True), str(folder))


def planned(folder: Path, *settings: str) -> Plan:
    windows = ("windows.shape=[16,16,16]", "windows.block=[1,1,1]", "output.levels=0")
    return prepare(str(folder / "in.n5"), load_recipe(None, [*SMALL, *windows, *settings]), folder / "out.zarr", folder)


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.long] * (way in ALIKE)) for way in WAYS])
def test_a_net_that_computes_otherwise_is_another_whatever_makes_it_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """By its facts, in a run that goes on, and on a worker that builds it later than the plan did."""
    code, give = WAYS[way]
    (folder / "nets.py").write_text(NET + code)
    give(folder, 1, monkeypatch)
    first, again = facts(folder), facts(folder)
    assert first.identity.differences(again.identity) == []
    assert first.identity.digest == again.identity.digest
    plan = planned(folder)
    assert execute(plan, Inline().start).missing == []
    give(folder, 3, monkeypatch)
    other = facts(folder)
    assert other.identity.digest != first.identity.digest
    is_wider = "dilation" in code
    assert (first.halo, other.halo) == (((1, 1, 1), (3, 3, 3)) if is_wider else ((1, 1, 1), (1, 1, 1)))
    source = way == "a module beside it"  # which is known by the source already
    assert source or first.identity.differences(other.identity)
    runner_module._loaded.clear()
    with pytest.raises(RunError, match=r"another recipe or input \(.*; take that back to continue"):
        execute(planned(folder), Inline().start)
    with pytest.raises(RunStopped, match=r"is another one on |code of net"):
        execute(plan.changed(out=str(folder / "other.zarr")), Inline().start)


def test_a_module_on_the_path_that_is_edited_is_another_net(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which Python knows by second and size alone
    library = folder / "library"
    library.mkdir()
    monkeypatch.syspath_prepend(library)
    (library / "layers_of_mine.py").write_text("FACTOR = 1\n")
    (folder / "work").mkdir()
    (folder / "work" / "nets.py").write_text(
        f"{NET}import layers_of_mine as m\ndef build(): return made(factor=m.FACTOR)\n"
    )
    before = facts(folder / "work").identity
    (library / "layers_of_mine.py").write_text("FACTOR = 1  # and no more\n")
    after = facts(folder / "work").identity
    assert before.differences(after) == ["layers_of_mine.py, from which it is built, changed"]


def test_weights_that_are_drawn_anew_each_time_make_no_other_net(folder: Path) -> None:
    """Their hash tells them apart; what the net is built of does not change."""
    (folder / "nets.py").write_text("import torch\ndef build(): return torch.nn.Conv3d(1, 1, 3, padding=1)\n")
    one, other = facts(folder), facts(folder)
    assert one.weights_sha256 != other.weights_sha256
    assert one.identity == other.identity
    assert len(list((folder / "cache" / "volpipe").iterdir())) == 1  # and is measured once


def test_the_last_bits_of_an_output_make_no_other_net() -> None:
    """Another machine sums in another order; files that only one of two machines knows say nothing."""
    rng = np.random.default_rng(1)
    output = rng.normal(size=136)
    one = NetIdentity(layers="a", files={"net.json": "1", "here": "2"}, output=tuple(output))
    noise = 1e-4 * rng.normal(size=136)
    assert (
        one.differences(NetIdentity(layers="a", files={"net.json": "1", "there": "3"}, output=tuple(output + noise)))
        == []
    )
    assert one.differences(NetIdentity(layers="b", files=one.files, output=one.output)) == ["its layers are others"]
    assert one.differences(NetIdentity(layers="a", files={"net.json": "2"}, output=one.output)) == [
        "net.json, from which it is built, changed"
    ]
    for factor in (1.1, -1):
        assert one.differences(NetIdentity(layers="a", output=tuple(factor * output)))


def test_a_run_goes_on_with_a_net_that_another_machine_rounds_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "nets.py").write_text(NET + "def build(): return made()\n")
    assert execute(planned(folder), Inline().start).missing == []
    exact = runner_module.Built.identified

    def rounded(self: object, *arguments: object) -> NetIdentity:
        identity = exact(self, *arguments)  # type: ignore[arg-type]  # as it is called
        return identity.model_copy(update={"output": tuple(1.00001 * value for value in identity.output)})

    monkeypatch.setattr(runner_module.Built, "identified", rounded)
    report = execute(planned(folder), Inline().start)
    assert report.was_complete


def test_the_same_command_from_another_folder_goes_on(folder: Path) -> None:
    plan = planned(folder, "net.name=identity")
    assert execute(plan, Inline().start).missing == []
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    again = prepare(str(folder / "in.n5"), plan.recipe, folder / "out.zarr", elsewhere)
    assert again.search_path != plan.search_path
    assert again.identity == plan.identity
    assert execute(again, Inline().start).was_complete


def test_a_function_on_arrays_is_another_where_what_it_reads_is_edited(folder: Path) -> None:
    (folder / "filters.py").write_text(
        "import pathlib\ndef above(block): return block > float(pathlib.Path('level.txt').read_text())\n"
    )
    (folder / "level.txt").write_text("0.5")
    settings = ("net.name=numpy:filters.py:above", "output.dtype=auto")
    assert execute(planned(folder, *settings), Inline().start).missing == []
    (folder / "level.txt").write_text("0.7")
    runner_module._loaded.clear()
    with pytest.raises(RunError, match=r"level.txt, from which it is built, changed"):
        execute(planned(folder, *settings), Inline().start)


def test_a_training_does_not_go_on_with_another_net(folder: Path) -> None:
    """Its weights would fit: the kernels are as large, and lie further apart."""
    code, _ = WAYS["a wider kernel from a text"]
    (folder / "nets.py").write_text(NET + code)
    tree = {"net": {"name": "nets.py:build"}, "data": [{"path": "in.n5"}], "train": {"steps": 4}}
    trainings = []
    for dilation in (1, 1, 3):
        (folder / "net.txt").write_text(str(dilation))
        trainings.append(Training.begin(TrainRecipe.model_validate(tree), folder))
    first, again, other = trainings
    first.check_same(again, 2)
    with pytest.raises(RecipeError, match=r"another net nets.py:build: net.txt, from which it is built, changed"):
        first.check_same(other, 2)


# --- what a net declares

OWN_NAMES = (
    "bare", "window", "margin", "fixed", "in_channels", "out_channels", "scale", "stride", "halo", "context", "planes",
    "slice_axis", "is_flat", "one_by_one", "varying", "num_parameters", "num_numbers", "draws_weights", "declaration",
    "with_random_weights", "intensity", "tile_invariant", "integers", "remainder", "shrink", "normalise", "package",
    "is_package", "logits", "taken", "uneven", "of_maker", "is_strict",
)  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        "(9, 9, 9)",
        "lambda **more: None",
        *(pytest.param(value, marks=pytest.mark.long) for value in ("7", "0.125", "True", "'all'", "torch.zeros(3)")),
    ],
)
def test_what_a_net_has_for_itself_is_no_fact(folder: Path, value: str) -> None:
    """Whatever its name and its value: the net is measured as any other."""
    (folder / "nets.py").write_text(
        f"{NET}def build(): return made()\ndef own():\n    net = made()\n"
        + "".join(f"    object.__setattr__(net, {name!r}, {value})\n" for name in OWN_NAMES)
        + "    return net\n"
    )
    plain, own = facts(folder), facts(folder, "nets.py:own")
    alike = {"label": "", "identity": NetIdentity()}
    assert own.model_copy(update=alike) == plain.model_copy(update=alike)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{'hallo': (1, 1, 1)}", r"unknown key hallo \(did you mean 'halo'\?\)"),
        ("{'halo': 3}", "halo: 3 is not a list"),
        ("{'halo': (1, 1)  + (1, 1)}", "halo: "),
        ("{'stride': (1, 0, 1)}", "stride: "),
        ("{'in_channels': True}", "in_channels: "),
        ("{'scale': (0.5, 1, 1)}", "scale: "),
        ("{'tile_invariant': 'no'}", "tile_invariant: "),
        ("{'intensity': 'grey'}", "intensity: "),
        ("7", "has int; give a dictionary"),
        ("torch.zeros(3)", "has Tensor; give a dictionary"),
    ],
)
def test_a_declaration_that_says_nothing_is_refused_by_its_key(folder: Path, value: str, words: str) -> None:
    (folder / "nets.py").write_text(f"{NET}def build():\n    net = made()\n    net.volpipe = {value}\n    return net\n")
    with pytest.raises(VolpipeError, match=f"net nets.py:build, in its attribute volpipe.*{words}"):
        facts(folder)


def test_numbers_of_other_libraries_are_declared_as_pythons(folder: Path) -> None:
    sizes = "'halo': numpy.array([2, 2, 2]), 'stride': torch.Size([2, 2, 2]), 'in_channels': numpy.int64(1)"
    code = f"import numpy\ndef build():\n    net = made()\n    net.volpipe = {{{sizes}}}\n    return net\n"
    (folder / "nets.py").write_text(NET + code)
    assert (facts(folder).halo, facts(folder).stride) == ((2, 2, 2), (2, 2, 2))


# --- a user's code

NEEDS_BLOCKS = "import torch\nfrom blocks import FACTOR\ndef build(): return torch.nn.Upsample(scale_factor=FACTOR)\n"


def test_nets_of_two_folders_do_not_share_a_module_of_one_name(folder: Path) -> None:
    for name, factor in (("one", 2), ("two", 3)):
        (folder / name).mkdir()
        (folder / name / "nets.py").write_text(NEEDS_BLOCKS)
        (folder / name / "blocks.py").write_text(f"FACTOR = {factor}\n")
    for _ in range(2):
        assert facts(folder, "one/nets.py:build").scale == (2, 2, 2)
        assert facts(folder, "two/nets.py:build").scale == (3, 3, 3)
    (folder / "two" / "blocks.py").write_text("FACTOR = 4\n")  # of as many bytes, perhaps in the same second
    assert facts(folder, "two/nets.py:build").scale == (4, 4, 4)
    assert "blocks" not in sys.modules or sys.modules["blocks"].__file__ == str(folder / "two" / "blocks.py")


def test_a_file_beside_a_net_takes_the_place_of_no_module_of_python_or_of_a_package(folder: Path) -> None:
    for name in ("random", "queue", "colorsys", "torch", "yaml"):
        (folder / f"{name}.py").write_text("raise RuntimeError('the wrong one')\n")
    code = "import random, queue, colorsys, torch, yaml\ndef build(): return torch.nn.Identity()\n"
    (folder / "nets.py").write_text(code)
    assert facts(folder).halo == (0, 0, 0)
    assert str(folder) not in sys.path


def test_a_module_is_found_in_the_folder_of_the_command(folder: Path) -> None:
    (folder / "my_nets").mkdir()
    (folder / "my_nets" / "__init__.py").write_text("from .parts import build\n")
    (folder / "my_nets" / "parts.py").write_text(NEEDS_BLOCKS)
    (folder / "blocks.py").write_text("FACTOR = 2\n")
    assert facts(folder, "my_nets:build").scale == (2, 2, 2)


def test_a_net_that_reads_the_command_line_sees_none_of_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["volpipe", "run", "--set", "x=1"])
    parser = "import argparse\nparser = argparse.ArgumentParser(); parser.add_argument('--gpu'); parser.parse_args()\n"
    (folder / "nets.py").write_text(f"{NET}{parser}def build():\n    parser.parse_args()\n    return made()\n")
    assert facts(folder).halo == (1, 1, 1)
    assert sys.argv == ["volpipe", "run", "--set", "x=1"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys\nsys.exit('no data')\n", r"nets.py cannot be loaded: it ends the program by sys.exit\(no data\)"),
        ("def build(): raise SystemExit(3)\n", r"nets.py:build cannot be built: it ends the program by sys.exit\(3\)"),
        (
            "class N(torch.nn.Module):\n    def forward(self, x): raise SystemExit(0)\ndef build(): return N()\n",
            "build",
        ),
    ],
)
def test_a_net_that_ends_the_program_is_refused_by_name(folder: Path, code: str, words: str) -> None:
    (folder / "nets.py").write_text(f"import torch\n{code}")
    with pytest.raises(VolpipeError, match=words):
        facts(folder)


def test_a_net_that_threads_share_is_not_called_by_who_looks_up_its_geometry(folder: Path) -> None:
    """Its weights are fixed ones in such a call, and a thread that computes meanwhile would compute with those."""
    noting = "    def __call__(self, x):\n        self.calls += 1\n        return super().__call__(x)\n"
    calls = "class Noting(Net):\n    calls = 0\n"
    (folder / "nets.py").write_text(
        f"{NET}{calls}{noting}def build():\n    torch.manual_seed(0)\n    return Noting()\n"
    )
    choice = NetChoice(name="nets.py:build")
    shared = build(choice, str(folder))
    shared.identified()
    called = shared.net.net.calls
    assert called > 0
    assert cached_geometry(choice, str(folder), shared).halo == (1, 1, 1)
    assert shared.net.net.calls == called


def test_an_identity_is_the_same_whatever_the_number_of_threads() -> None:
    net, before, found = unet3d(features=(4, 6), seed=2).eval(), torch.get_num_threads(), set()
    for num in (1, 2, 3, 4):
        torch.set_num_threads(num)
        found.add(fixed_output(net, (1,), (0, 0, 0)))
        assert torch.get_num_threads() == num
    torch.set_num_threads(before)
    assert len(found) == 1 and len(found.pop()) > 100
