"""A net's weights: none without a word, the same on every worker, and found in checkpoints as people save them."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from command import THREADS, Ended, Give, begin, finish, giver, set_each
from inline import Inline
from volumes import noise, write_volume
from zoo import Smooth, scripted

from volpipe.apps.pool import on_site
from volpipe.errors import PlanError, RunStopped, VolpipeError
from volpipe.inference import infer as infer_module
from volpipe.inference import runner as runner_module
from volpipe.inference.plan import Plan
from volpipe.nets.files import code_hash
from volpipe.nets.load import build_net
from volpipe.nets.state_dicts import load_weights
from volpipe.recipes.inference import NetChoice, load_recipe
from volpipe.runs import provenance
from volpipe.runs.provenance import read_provenance
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

SMALL = ("net.options={features=[2,3]}", "windows.shape=[24,24,24]", "net.untrained=true")
NETS = """
import torch
class Net(torch.nn.Module):
    volpipe = dict(scale=(1, 1, 1), stride=(1, 1, 1), halo=(1, 1, 1), out_channels=1, window=(12, 12, 12))
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv3d(1, 1, 3, padding=1)
    def forward(self, x):
        return self.conv(x)
def seeded():
    torch.manual_seed(3)
    return Net()
def unseeded():
    return Net()
def drawn_by_process():
    import os
    torch.manual_seed(os.getpid())
    return Net()
"""


class Seen(torch.nn.Module):
    """A net that is saved whole."""

    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    write_volume(tmp_path / "in.n5", noise((12, 24, 12)))
    (tmp_path / "nets.py").write_text(NETS)
    return giver(tmp_path, monkeypatch, capsys)


@pytest.fixture(autouse=True)
def _no_net_is_kept() -> Iterator[None]:
    yield
    runner_module._loaded.clear()


def run(give: Give, *settings: str, command: str = "run") -> Ended:
    return give(command, *THREADS, *set_each(*settings), "-o", "out.zarr", "in.n5")


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("net", "words"),
    [
        ("unet3d", "has 353,281 parameters and no weights, so that its output would be noise; set net.weights to a "
         "file of them, take --recipe affinities or --recipe default, which have weights for it, or set net.untrained"),
        ("superres", "take --recipe superres_z2 or --recipe superres_z2_noisy or --recipe superres_z4 or --recipe "
         "superres_z4_noisy or --recipe superres_z4_sharp, which have"),
        ("srgan3d", "set net.weights to a file of them, or set net.untrained=true to try it without"),
        ("nets.py:seeded", "net seeded has 28 parameters and no weights, so that its output would be noise; save its "
         "state dict with torch.save, and set net.weights to that file, or set net.untrained=true if its code sets"),
    ],
)  # fmt: skip
def test_a_net_without_weights_is_refused_with_the_ways_out(
    tmp_path: Path, give: Give, command: str, net: str, words: str
) -> None:
    (tmp_path / "recipe.toml").write_text(f'[net]\nname = "{net}"\n')
    ended = give(command, *THREADS, "--recipe", "recipe.toml", "-o", "out.zarr", "in.n5")
    assert ended.code == 2
    (sentence,) = ended.err.splitlines()
    assert words in sentence
    assert not (tmp_path / "out.zarr").exists()


def test_a_stage_without_weights_is_refused_by_name(tmp_path: Path, give: Give) -> None:
    (tmp_path / "flow.toml").write_text('[[stage]]\nname = "restore"\n[stage.net]\nname = "unet3d"\n')
    ended = give("run", *THREADS, "--recipe", "flow.toml", "-o", "out", "in.n5")
    assert ended.code == 2
    assert "volpipe: stage restore: net unet3d has " in ended.err
    assert "parameters and no weights" in ended.err


def test_in_a_notebook_too_and_there_the_default_recipe_has_weights(tmp_path: Path, give: Give) -> None:
    (tmp_path / "r.toml").write_text("[windows]\nblend = 'hann'\n")
    with pytest.raises(PlanError, match="no weights"):
        prepare(str(tmp_path / "in.n5"), load_recipe(tmp_path / "r.toml"), tmp_path / "out.zarr", tmp_path)
    plan = prepare(str(tmp_path / "in.n5"), load_recipe(None), tmp_path / "out.zarr", tmp_path)
    assert plan.net.num_parameters == 43_201


def test_an_untrained_net_runs_with_a_warning_that_the_log_and_the_output_keep(tmp_path: Path, give: Give) -> None:
    ended = run(give, *SMALL)
    assert ended.code == 0, ended.err
    warning = "parameters that its code makes (net.untrained=true): without training, its output is noise"
    assert ended.err.startswith("warning: net unet3d runs with the ")
    assert warning in ended.err
    assert warning in (tmp_path / "out.zarr.run" / "volpipe.log").read_text()
    assert read_provenance(tmp_path / "out.zarr")["recipe"]["net"]["untrained"] is True


def test_nets_without_parameters_and_files_need_no_word(tmp_path: Path, give: Give) -> None:
    for name in ("identity", "shift", "upsample"):
        recipe = load_recipe(None, [f"net.name={name}"])
        assert prepare(str(tmp_path / "in.n5"), recipe, tmp_path / "out.zarr", tmp_path).net.num_parameters == 0


# --- the same on every worker

FINE = ("normalise.method=none", "output.dtype=float32", "windows.block=[1,1,1]")


def save_weights(path: Path, value: float) -> None:
    torch.save({"conv.weight": torch.full((1, 1, 3, 3, 3), value), "conv.bias": torch.zeros(1)}, path)


def planned(folder: Path, *settings: str) -> Plan:
    recipe = load_recipe(None, ["net.name=nets.py:seeded", *FINE, *settings])
    return prepare(str(folder / "in.n5"), recipe, folder / "out.zarr", folder)


@pytest.mark.usefixtures("give")
def test_processes_that_draw_other_weights_stop_the_run_at_once(tmp_path: Path) -> None:
    settings = set_each("net.name=nets.py:drawn_by_process", "net.untrained=true", *FINE)
    process = begin(
        tmp_path, "run", "--config", "local", *settings, "-o", "out.zarr", "in.n5",
        VOLPIPE_WORKERS="2", XDG_CACHE_HOME=str(tmp_path),
    )  # fmt: skip
    ended = finish(tmp_path, process)
    assert ended.code == 1
    assert "wrote" not in ended.out
    last = ended.err.splitlines()[-1]
    assert "the weights of net drawn_by_process are " in last
    assert "its code draws others at each call; call torch.manual_seed in it, or save its state dict" in last
    assert "Traceback" not in ended.err


def test_weights_that_are_exchanged_after_the_plan_stop_the_run_at_once(tmp_path: Path, give: Give) -> None:
    save_weights(tmp_path / "w.pt", 0.5)
    plan = planned(tmp_path, "net.weights=w.pt")
    save_weights(tmp_path / "w.pt", 0.25)
    with pytest.raises(RunStopped, match=r"weights of net seeded are \w{8}… on .*, in the plan they are \w{8}…: w.pt"):
        execute(plan, on_site("local"))
    save_weights(tmp_path / "w.pt", 0.5)
    assert execute(plan, Inline().start).missing == []


def test_one_worker_with_other_weights_stops_the_run_whatever_others_did(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_weights(tmp_path / "w.pt", 0.5)
    plan = planned(tmp_path, "net.weights=w.pt")
    ran: list[int] = []
    compute = infer_module.infer

    def exchanged(*arguments: Any, **more: Any) -> Any:
        ran.append(1)
        if len(ran) == 4:  # as a worker that starts late
            save_weights(tmp_path / "w.pt", 0.25)
            runner_module._loaded.clear()
        return compute(*arguments, **more)

    monkeypatch.setattr(infer_module, "infer", exchanged)
    with pytest.raises(RunStopped, match="the work stops: the weights of net seeded are"):
        execute(plan, Inline().start)
    assert len(ran) < 6


@pytest.mark.parametrize("file", ["nets.py", "helper.py", "parts/__init__.py", "parts/blocks.py"])
def test_code_that_is_edited_after_the_plan_stops_the_run_at_once(
    tmp_path: Path, give: Give, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets.py").write_text("import helper\n" + NETS)
    (tmp_path / "helper.py").write_text("from parts import factor\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from .blocks import factor\n")
    (tmp_path / "parts" / "blocks.py").write_text("factor = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    plan = planned(tmp_path, "net.untrained=true")
    (tmp_path / file).write_text((tmp_path / file).read_text() + "# edited\n")
    sentence = r"code of net seeded is \w{8}… on .*make it the same there, or start over with --fresh"
    with pytest.raises(RunStopped, match=sentence):
        execute(plan, Inline().start)
    for module in ("helper", "parts", "parts.blocks"):
        sys.modules.pop(module)


def test_the_code_of_a_net_is_its_file_and_those_beside_it_that_it_imports(tmp_path: Path) -> None:
    for name, text in {"net": "from a import b\nimport torch\n", "a": "import c.d", "e": "x = 1"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "c").mkdir()
    hashes = []
    for name in ("net", "a", "c/d", "e"):
        (tmp_path / f"{name}.py").write_text(f"from a import b\nimport c.d\n# {name}\n")
        hashes.append(code_hash("net.py:net", str(tmp_path)))
    assert hashes[0] != hashes[1] != hashes[2] == hashes[3]
    assert code_hash("net:net", str(tmp_path)) == hashes[3]


PACKAGES = {
    "net.py": "import parts.deep.block",
    "parts/__init__.py": "from .star import *",
    "parts/star/__init__.py": "__all__ = ['listed']",
    "parts/star/listed.py": "",
    "parts/deep/__init__.py": "",
    "parts/deep/block.py": "from . import sibling\nfrom ..aside import x\nfrom parts.far import y\n"
    f"from {'.' * 40} import z",
    "parts/deep/sibling.py": "",
    "parts/aside.py": "x = 1",
    "parts/far/__init__.py": "from .y import y",
    "parts/far/y.py": "y = 1",
}


@pytest.mark.parametrize("name", ["net.py:net", "src/net.py:net", "net:net", "parts.deep.block:net", "parts:net"])
def test_the_code_of_a_net_is_in_packages_too(tmp_path: Path, name: str) -> None:
    root = tmp_path / "src" if name.startswith("src/") else tmp_path

    def write(file: str, text: str) -> None:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)

    others = ("aside.py", "parts/unused.py", "parts/deep/aside.py", "block.py")
    for file, text in {**PACKAGES, **dict.fromkeys(others, "")}.items():
        write(file, text)
    whole = code_hash(name, str(tmp_path))
    changing = set()
    for file, text in PACKAGES.items():
        write(file, f"{text}\n# edited")
        if code_hash(name, str(tmp_path)) != whole:
            changing.add(file)
        write(file, text)
    is_outer = name.startswith("parts:")  # which imports nothing but its part `star`
    runs = {file for file in PACKAGES if file == "parts/__init__.py" or "star" in file} if is_outer else set(PACKAGES)
    assert changing == runs - ({"net.py"} if name.startswith("parts") else set())
    for file in others:
        write(file, "# edited")
    assert code_hash(name, str(tmp_path)) == whole


def test_a_run_that_goes_on_with_other_weights_or_code_is_refused_in_a_few_words(tmp_path: Path, give: Give) -> None:
    save_weights(tmp_path / "w.pt", 0.5)
    settings = ("net.name=nets.py:seeded", "net.weights=w.pt", *FINE)
    assert run(give, *settings).code == 0
    save_weights(tmp_path / "w.pt", 0.25)
    (tmp_path / "nets.py").write_text(NETS + "# edited\n")
    ended = run(give, *settings)
    assert ended.code == 2
    due = r"\(net\.weights_sha256: H -> H: the weights changed; code_sha256: H -> H: the code of the net changed\); t"
    assert re.search(due.replace("H", r"\w{8}…"), ended.err), ended.err
    write_volume(tmp_path / "other.n5", noise((12, 24, 16)))
    ended = give("run", *THREADS, *set_each(*settings), "-o", "out.zarr", "other.n5")
    assert "source.shape: 12 × 24 × 12 -> 12 × 24 × 16" in ended.err
    assert "='" not in ended.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("weights", "why: the weights of net seeded changed: SHA-256 "),
        ("code", "why: the code of net seeded changed: SHA-256 "),
        ("input", "in.n5 changed since"),
        ("torch", "why: torch is 2."),
    ],
)
def test_verify_says_why_what_it_recomputes_differs(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch, change: str, words: str
) -> None:
    save_weights(tmp_path / "w.pt", 0.5)
    settings = ("net.name=nets.py:seeded", "net.weights=w.pt", *FINE)
    with monkeypatch.context() as patch:
        if change == "torch":
            patch.setattr(provenance, "_version", lambda package: "0.1" if package == "torch" else None)
        assert run(give, *settings).code == 0
    assert give("verify", "out.zarr", "--recompute", "1").code == 0
    if change == "input":
        write_volume(tmp_path / "in.n5", noise((12, 24, 12), seed=1))
    elif change == "code":
        (tmp_path / "nets.py").write_text(NETS.replace("self.conv(x)", "self.conv(x) + 1"))
    else:
        save_weights(tmp_path / "w.pt", 0.25)
    runner_module._loaded.clear()
    command = ("verify", "out.zarr", "--recompute", "1")
    is_new = change == "input"  # else this process has its chunks in memory
    ended = finish(tmp_path, begin(tmp_path, *command)) if is_new else give(*command)
    assert ended.code == 1
    assert "voxels differ" in ended.out
    assert words in ended.out


# --- checkpoints as people save them

STATE = {"conv.weight": torch.arange(27.0).reshape(1, 1, 3, 3, 3), "conv.bias": torch.tensor([5.0])}
HALF = {name: tensor / 2 for name, tensor in STATE.items()}
OPTIMISER = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(1, 1, 3, 3, 3)}},
    "param_groups": [{"lr": 0.1}],
}


def prefixed(prefix: str, state: Mapping[str, torch.Tensor] = STATE) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def loaded(folder: Path, content: object, **choice: Any) -> Mapping[str, torch.Tensor]:
    torch.save(content, folder / "w.pt")
    return build_net(NetChoice(name="nets.py:seeded", weights="w.pt", **choice), str(folder)).state_dict()


LIGHTNING = {
    "epoch": 3,
    "pytorch-lightning_version": "2.5",
    "optimizer_states": [OPTIMISER],
    "hyper_parameters": {"lr": 1},
}
SAVED = {
    "plain": STATE,
    "state_dict": {"epoch": 3, "state_dict": STATE, "optimizer": OPTIMISER},
    "model_state_dict": {"epoch": 3, "model_state_dict": STATE, "optimizer_state_dict": OPTIMISER, "loss": 0.1},
    "model": {"model": STATE, "args": {"lr": 0.1}},
    "nnU-Net": {"network_weights": STATE, "optimizer_state": OPTIMISER, "grad_scaler_state": None, "trainer_name": "t"},
    "Lightning, model": LIGHTNING | {"state_dict": prefixed("model.")},
    "Lightning, net beside a loss": LIGHTNING | {"state_dict": prefixed("net.") | {"loss.weight": torch.ones(2)}},
    "DataParallel": prefixed("module."),
    "torch.compile": prefixed("_orig_mod."),
    "compiled part": {name.replace("conv.", "conv._orig_mod."): tensor for name, tensor in STATE.items()},
    "all of it": {"state_dict": prefixed("model._orig_mod.module.")},
    "in a list": {"models": [STATE]},
    "parameters": {name: torch.nn.Parameter(tensor) for name, tensor in STATE.items()},
}


@pytest.mark.usefixtures("give")
@pytest.mark.parametrize("name", SAVED)
def test_checkpoints_load_as_people_save_them(tmp_path: Path, name: str) -> None:
    state = loaded(tmp_path, SAVED[name])
    assert all(torch.equal(state[key], tensor) for key, tensor in STATE.items())


@pytest.mark.usefixtures("give")
def test_of_several_that_fit_one_must_be_named(tmp_path: Path) -> None:
    both = {"model": STATE, "ema": {"shadow": prefixed("module.", HALF)}}
    with pytest.raises(
        VolpipeError, match=r"model and ema\.shadow\.module in .* both fit the net; .*net\.weights_key=m"
    ):
        loaded(tmp_path, both)
    for key, due in (("model", STATE), ("ema", HALF), ("ema.shadow.module", HALF)):
        state = loaded(tmp_path, both, weights_key=key)
        assert all(torch.equal(state[name], tensor) for name, tensor in due.items())
    with pytest.raises(VolpipeError, match=r"no tensors under net\.weights_key 'emma'; it has some under model, ema"):
        loaded(tmp_path, both, weights_key="emma")


NO_BIAS = {"state_dict": {"conv.weight": STATE["conv.weight"]}, "optimizer": OPTIMISER}
MORE = {"model": prefixed("model.") | {"model.more": torch.ones(1)}}
OTHER = {"state_dict": {"first.weight": torch.zeros(3), "first.bias": torch.zeros(1)}, "epoch": 1}
LACKING = [
    (NO_BIAS, r"w\.pt, state_dict, do not fit the net: missing: conv\.bias; give the net\.options that they were"),
    (
        MORE,
        r"w\.pt, model\.model, do not fit the net: too many: more, which the net has no part for; let its",
    ),
    (
        OTHER,
        r"missing: conv\.weight and 1 more, too many: first\.weight and 1 more; give the net\.name and the net",
    ),
    (torch.zeros(3), r"w\.pt holds no tensors by name, but Tensor; save the net's state dict: torch\.save\(net\.stat"),
    ({"epoch": 3}, r"w\.pt holds no tensors by name, but dict"),
    (
        Seen(torch.nn.Conv3d(1, 1, 3)),
        r"a whole net, .*save_file\(net\.state_dict\(\), 'w\.|Seen would.*file\.state",
    ),
    (
        {"state_dict": STATE, "args": argparse.Namespace(a=1)},
        r"alone: argparse\.Namespace would be made, which is",
    ),
]


@pytest.mark.usefixtures("give")
@pytest.mark.parametrize("content", [b"{}", b"hello there", b"\x93NUMPY", b""])
def test_a_file_that_is_no_checkpoint_is_refused_without_the_advice_of_torch(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(VolpipeError, match=r"w\.pth (is no file of weights|holds no plain)") as caught:
        build_net(NetChoice(name="nets.py:seeded", weights="w.pth"), str(tmp_path))
    assert "weights_only" not in str(caught.value)


@pytest.mark.usefixtures("give")
@pytest.mark.parametrize(("content", "words"), LACKING)
@pytest.mark.parametrize("is_old", [False, True])
def test_what_a_checkpoint_lacks_is_said_in_our_words(
    tmp_path: Path, content: object, words: str, is_old: bool
) -> None:
    torch.save(content, tmp_path / "w.pt", _use_new_zipfile_serialization=not is_old)
    with pytest.raises(VolpipeError) as caught:
        build_net(NetChoice(name="nets.py:seeded", weights="w.pt"), str(tmp_path))
    sentence = str(caught.value)
    assert re.search(words, sentence), sentence
    assert "\x1b" not in sentence
    assert "\n" not in sentence


@pytest.mark.usefixtures("give")
def test_a_program_given_as_weights_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(scripted(Smooth))
    with pytest.raises(VolpipeError, match=r"w\.pt is a program of TorchScript, not weights; name it as net\.name=w"):
        build_net(NetChoice(name="nets.py:seeded", weights="w.pt"), str(tmp_path))


@pytest.mark.usefixtures("give")
def test_batch_norms_of_files_without_counters_load(tmp_path: Path) -> None:
    net = torch.nn.BatchNorm3d(2)
    state = {name: tensor for name, tensor in net.state_dict().items() if name != "num_batches_tracked"}
    torch.save({"state_dict": state | {"weight": torch.tensor([2.0, 3.0])}}, tmp_path / "w.pt")
    load_weights(net, tmp_path / "w.pt")
    assert net.weight.tolist() == [2.0, 3.0]


def _parametrised(norm: str) -> torch.nn.Module:
    torch.manual_seed(5)
    layer = torch.nn.Conv3d(1, 2, 3, padding=1)
    normed: torch.nn.Module = getattr(torch.nn.utils.parametrizations, norm)(layer)
    return torch.nn.Sequential(normed, torch.nn.Conv3d(2, 1, 1)).eval()


def _of_old(norm: str) -> torch.nn.Module:
    torch.manual_seed(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a form that torch no longer makes, and still reads
        normed: torch.nn.Module = getattr(torch.nn.utils, norm)(torch.nn.Conv3d(1, 2, 3, padding=1))
    return torch.nn.Sequential(normed, torch.nn.Conv3d(2, 1, 1)).eval()


def _compiled_in_part() -> torch.nn.Module:
    parts = (torch.nn.Conv3d(1, 2, 3, padding=1), torch.nn.Conv3d(2, 1, 1))
    return torch.nn.Sequential(torch.compile(parts[0], backend="eager"), parts[1])


def _compiled() -> torch.nn.Module:
    made: torch.nn.Module = torch.compile(_compiled_in_part(), backend="eager")  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("place", ["", "state_dict"])
@pytest.mark.parametrize(
    ("net", "saved"),
    [
        (lambda: _parametrised("weight_norm"), lambda: _of_old("weight_norm")),
        (lambda: _parametrised("weight_norm"), lambda: _parametrised("weight_norm")),
        (lambda: _parametrised("spectral_norm"), lambda: _parametrised("spectral_norm")),
        (lambda: _of_old("weight_norm"), lambda: _of_old("weight_norm")),
        (_compiled, _compiled),
        (_compiled_in_part, _compiled_in_part),
    ],
    ids=["old weight_norm", "weight_norm", "spectral_norm", "both old", "compiled", "compiled in part"],
)
def test_what_torch_loads_is_loaded(
    tmp_path: Path, net: Callable[[], torch.nn.Module], saved: Callable[[], torch.nn.Module], place: str
) -> None:
    """To the tensor: as torch itself loads the same file."""
    state, torchs, ours = saved().state_dict(), net(), net()
    torch.save({place: state} if place else state, tmp_path / "w.pt")
    torchs.load_state_dict(state)
    load_weights(ours, tmp_path / "w.pt")
    expected, loaded = torchs.state_dict(), ours.state_dict()
    assert list(expected) == list(loaded)
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a' * 16}\nsize 12345678\n"
PAGE = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"


@pytest.mark.parametrize(
    ("text", "words"), [(POINTER, "git lfs pull"), (PAGE, "a web page"), ("no weights\n", "a text")]
)
@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("w.pt", ["net.name=nets.py:seeded", "net.weights=w.pt"]),
        ("w.safetensors", ["net.name=nets.py:seeded", "net.weights=w.safetensors"]),
        ("w.pth", ["net.name=unet3d", "net.weights=w.pth"]),
        ("net.onnx", ["net.name=net.onnx"]),
        ("net.ts", ["net.name=net.ts", "net.trust_model=true"]),
        ("net.pt2", ["net.name=net.pt2", "net.trust_model=true"]),
        ("net.zip", ["net.name=net.zip"]),
    ],
)
def test_a_text_in_the_place_of_a_file_is_named_as_one(
    tmp_path: Path, give: Give, file: str, settings: list[str], text: str, words: str
) -> None:
    (tmp_path / file).write_text(text)
    ended = give("run", *THREADS, *set_each(*settings), "-o", "out.zarr", "in.n5")
    assert ended.code == 2
    assert file in ended.err and "looks like a text" in ended.err and words in ended.err
    assert not (tmp_path / "out.zarr").exists()


@pytest.mark.parametrize(("text", "words"), [(POINTER, "git lfs pull"), (PAGE, "a web page")])
def test_a_recipe_and_a_description_that_were_not_fetched_are_named(
    tmp_path: Path, give: Give, text: str, words: str
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "rdf.yaml").write_text(text)
    for chosen in (["--recipe", "mine.toml"], set_each("net.name=./package")):
        ended = give("run", *THREADS, *chosen, "-o", "out.zarr", "in.n5")
        assert ended.code == 2
        assert words in ended.err
