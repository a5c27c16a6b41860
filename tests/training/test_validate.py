"""What a training tells while it goes on: scores as of a run, predictions, event files; and the adversary."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from google_crc32c import value as crc32c
from safetensors.torch import load_file
from test_train import TRAIN, losses_in
from trainings import LEANING

from volpipe.errors import RecipeError, RunError
from volpipe.geometry.grid import Box
from volpipe.models.superres import superres
from volpipe.nets.load import describe
from volpipe.recipes.inference import load_recipe
from volpipe.recipes.training import EVENTS, LOSSES, WEIGHTS, TrainRecipe, load_training
from volpipe.resolve import shipped_recipe
from volpipe.training.data.samples import Sampler
from volpipe.training.logs import EVENT_FILE, read_log
from volpipe.training.loop import checkpoints, load_checkpoint, train
from volpipe.training.validate import INPUTS, NUM_WINDOWS, middle, prepare_held_out, validate
from volpipe.volumes.volume import open_volume
from volpipe.workflow.outcome import RUN_RECIPE, run_command

HELD = Box((4, 3, 5), (27, 36, 37))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe, and its volume of planes that lean, of which a box is held out."""
    z, y, x = np.mgrid[:60, :40, :40]
    planes = 127 + 100 * np.sin((z + y / 2 + x / 3) * 0.9)
    tifffile.imwrite(tmp_path / "v.tif", planes.astype(np.uint8))
    (tmp_path / "recipe.toml").write_text((LEANING + TRAIN).replace("0:8,:,:", str(HELD)))
    return tmp_path


def recipe(folder: Path, *settings: str) -> TrainRecipe:
    return load_training(folder / "recipe.toml", settings)


# ---- validation


def test_what_is_held_out_is_scored_as_if_it_had_been_run_in_one_piece(folder: Path) -> None:
    train(recipe(folder, "train.validate_every=5"), folder / "t", str(folder))
    scored = {line["step"]: line["psnr"] for line in read_log(folder / "t") if "psnr" in line}
    assert sorted(scored) == [5, 10, 12]

    truth = tifffile.imread(folder / "v.tif")[4:26, 3:36, 5:37].astype(np.float32)  # of whole pairs of slices
    given = np.rint(truth.reshape(11, 2, 33, 32).mean(1))
    net = superres(factor=2, features=4, num_blocks=1)
    net.load_state_dict(load_file(folder / "t" / WEIGHTS))
    around = np.pad(given, [(4, 5), (10, 11), (10, 10)], mode="reflect")  # more than the halo, of whole folds
    with torch.inference_mode():
        out = net(torch.from_numpy(around / 127.5 - 1)[None, None]).numpy()[0, 0, 8:30, 10:43, 10:42]
    made = np.clip(np.rint((out + 1) * 127.5), 0, 255)
    known = 10 * np.log10(255**2 / np.square(made - truth).mean())
    assert scored[12] == pytest.approx(known, abs=0.01)


def test_a_net_that_declares_no_intensity_is_scored_and_run_in_grey_levels(folder: Path) -> None:
    (folder / "net.py").write_text(
        "from torch import nn\n\n\ndef net():\n    layer = nn.Conv3d(1, 1, 1)\n"
        "    nn.init.constant_(layer.weight, 0.5)\n    nn.init.zeros_(layer.bias)\n    return layer\n"
    )
    settings = ("net.name=net.py:net", "net.options={}", "degrade.kind=none", "train.validate_every=12")
    chosen = recipe(folder, *settings, "samples.shape=[8,16,16]", "samples.margin=[0,0,0]", "train.learning_rate=1e-2")
    train(chosen, folder / "t", str(folder))
    truth = tifffile.imread(folder / "v.tif")[HELD.slices].astype(np.float32)
    weights = load_file(folder / "t" / WEIGHTS)
    made = (truth / 127.5 - 1) * weights["weight"].item() + weights["bias"].item()
    made = np.clip(np.rint((made + 1) * 127.5), 0, 255)
    known = 10 * np.log10(255**2 / np.square(made - truth).mean())
    assert [line["psnr"] for line in read_log(folder / "t") if "psnr" in line] == [pytest.approx(known, abs=0.01)]
    run_command(chosen, folder / "t", str(folder))
    assert load_recipe(folder / "t" / RUN_RECIPE).output.intensity == "same"


def test_all_channels_are_scored(folder: Path) -> None:
    planes = tifffile.imread(folder / "v.tif")
    np.save(folder / "two.npy", np.stack([planes, 255 - planes]))
    (folder / "net.py").write_text(
        "from torch import nn\n\n\ndef net():\n    layer = nn.Conv3d(2, 2, 1, bias=False)\n"
        "    nn.init.constant_(layer.weight, 0.25)\n    return layer\n"
    )
    settings = ("net.name=net.py:net", "net.options={}", "degrade.kind=none", "data.0.path=two.npy")
    chosen = recipe(folder, *settings, "train.validate_every=12", "samples.margin=[0,0,0]", "train.predict_every=12")
    train(chosen, folder / "t", str(folder))
    truth = np.load(folder / "two.npy")[:, *HELD.slices].astype(np.float32)
    weights = load_file(folder / "t" / WEIGHTS)["weight"].numpy()[..., 0, 0, 0]
    made = np.clip(np.rint((np.einsum("oi,izyx->ozyx", weights, truth / 127.5 - 1) + 1) * 127.5), 0, 255)
    known = 10 * np.log10(255**2 / np.square(made - truth).mean())
    assert [line["psnr"] for line in read_log(folder / "t") if "psnr" in line] == [pytest.approx(known, abs=0.01)]


def test_the_score_of_volumes_of_floats_is_the_same_in_any_order(folder: Path) -> None:
    planes = tifffile.imread(folder / "v.tif").astype(np.float32)
    tifffile.imwrite(folder / "v.tif", planes)
    tifffile.imwrite(folder / "w.tif", planes / 100)
    text = (folder / "recipe.toml").read_text()
    entry = text[text.index("[[data]]") : text.index("[degrade]")]
    (folder / "recipe.toml").write_text(text.replace(entry, entry + entry.replace("v.tif", "w.tif")))
    chosen = recipe(folder, "normalise.low=0", "normalise.high=255")
    held = prepare_held_out(Sampler(chosen, (2, 1, 1), str(folder)), folder)
    facts, net = describe(chosen.net, str(folder)), superres(factor=2, features=4, num_blocks=1)
    one, other = (validate(net, facts, chosen, order, folder)["psnr"] for order in (held, held[::-1]))
    assert one == pytest.approx(other) and len(held) == 2


@pytest.mark.parametrize("whole", ["true", "false"])
def test_the_input_of_a_validation_is_rounded_and_clipped_as_a_volume_is(folder: Path, whole: str) -> None:
    dark = tifffile.imread(folder / "v.tif") // 8
    tifffile.imwrite(folder / "v.tif", dark)  # noise takes many of its voxels below 0
    chosen = recipe(folder, "degrade.noise=30", f"degrade.whole={whole}", "train.validate_every=12")
    (held,) = prepare_held_out(Sampler(chosen, (2, 1, 1), str(folder)), folder)
    given = open_volume(folder / INPUTS, held.key).open()[...].astype(int)
    shape = held.truth.shape
    coarse = held.truth.reshape(1, shape[1] // 2, 2, *shape[2:]).mean(2)
    assert given.min() == 0
    assert np.abs(given - coarse).max() < 150  # 255 less 31, where voxels below 0 became bright


def test_looking_on_changes_no_loss(folder: Path) -> None:
    train(recipe(folder), folder / "plain", str(folder))
    train(recipe(folder, "train.validate_every=3", "train.predict_every=4"), folder / "watched", str(folder))
    assert losses_in(folder / "watched") == losses_in(folder / "plain")
    assert (folder / "watched" / WEIGHTS).read_bytes() == (folder / "plain" / WEIGHTS).read_bytes()


def test_the_middle_of_a_box_is_of_whole_coarse_voxels() -> None:
    assert middle(Box((0, 10, 4), (30, 18, 205)), 16, (4, 1, 3)) == Box((7, 10, 97), (23, 18, 112))
    assert middle(Box((5, 0, 0), (8, 4, 4)), 16, (2, 1, 1)) == Box((5, 0, 0), (7, 4, 4))


@pytest.mark.parametrize("key", ["validate_every", "predict_every"])
def test_looking_on_needs_something_held_out(folder: Path, key: str) -> None:
    (folder / "recipe.toml").write_text((LEANING + TRAIN).replace('held_out = "0:8,:,:"', ""))
    with pytest.raises(RecipeError, match=r"need a volume with held_out; give data.held_out"):
        recipe(folder, f"train.{key}=2")


# ---- predictions


def test_predictions_are_tensors_by_iteration(folder: Path) -> None:
    train(recipe(folder, "train.predict_every=6"), folder / "t", str(folder))
    store = folder / "t" / "tensors.n5"
    given, truth = (open_volume(store, f"tensors/{name}").open()[...] for name in ("source", "truth"))
    assert given.shape == (NUM_WINDOWS, 1, 4, 16, 16)
    assert truth.shape == (NUM_WINDOWS, 1, 8, 16, 16)
    last = open_volume(store, "tensors/superres/12")
    assert last.attributes["volpipe"]["iteration"] == 12  # type: ignore[index]
    assert last.attributes["volpipe"]["dimensions"][1] == "iteration"  # type: ignore[index]
    net = superres(factor=2, features=4, num_blocks=1)
    net.load_state_dict(load_file(folder / "t" / WEIGHTS))
    with torch.inference_mode():
        np.testing.assert_allclose(last.open()[...], net(torch.from_numpy(given)).numpy(), atol=1e-5)
    sooner = open_volume(store, "tensors/superres/6").open()[...]
    assert np.abs(sooner - last.open()[...]).max() > 1e-4
    volume = tifffile.imread(folder / "v.tif")[HELD.slices]
    corners = np.lib.stride_tricks.sliding_window_view(volume, (8, 16, 16))
    for window in truth:  # each is a part of what is held out, not turned
        assert (np.abs(corners - (window[0] + 1) * 127.5) < 1e-3).all(axis=(3, 4, 5)).any()


# ---- event files


def messages(path: Path) -> Iterator[bytes]:
    """Yield the messages of an event file, whose checksums are looked at."""

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return (((crc >> 15) | (crc << 17 & 0xFFFFFFFF)) + 0xA282EAD8) % 2**32

    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        message, data = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("<I", data[:4])[0] == masked(message)
        data = data[4:]
        yield message


def fields(message: bytes) -> dict[int, list[int | bytes]]:
    """Return the fields of a message of protocol buffers, by number."""
    found: dict[int, list[int | bytes]] = {}
    while message:
        key, message = varint(message)
        content: int | bytes
        if key & 7 == 0:
            content, message = varint(message)
        else:
            size = {1: 8, 5: 4}.get(key & 7)
            if size is None:
                size, message = varint(message)
            content, message = message[:size], message[size:]
        found.setdefault(key >> 3, []).append(content)
    return found


def varint(data: bytes) -> tuple[int, bytes]:
    value = shift = 0
    for i, byte in enumerate(data):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, data[i + 1 :]
    raise AssertionError("a number without an end")


def scalars(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return step and scalars of each event but the first, which has the version."""
    first, *others = [fields(message) for message in messages(path)]
    assert first[3] == [b"brain.Event:2"]
    found = []
    for event in others:
        (summary,), (step,) = event[5], event[2]
        assert isinstance(summary, bytes) and isinstance(step, int)
        values = [fields(each) for each in fields(summary)[1] if isinstance(each, bytes)]
        told = {v[1][0].decode(): struct.unpack("<f", v[2][0])[0] for v in values}  # type: ignore[union-attr,arg-type]
        found.append((step, told))
    return found


def test_event_files_hold_what_was_logged_once_also_after_an_interruption(folder: Path) -> None:
    calls = iter(range(100))

    def interrupt() -> None:
        if next(calls) == 2:
            raise RunError("interrupted")

    with pytest.raises(RunError, match="interrupted"):
        train(recipe(folder, "train.validate_every=6"), folder / "t", str(folder), interrupt)
    train(recipe(folder, "train.validate_every=6"), folder / "t", str(folder))
    logged = read_log(folder / "t")
    found = scalars(folder / "t" / EVENTS / EVENT_FILE)
    assert [step for step, _ in found] == list(range(1, 13))
    for (_, told), line in zip(found, logged, strict=True):
        assert told == pytest.approx({name: v for name, v in line.items() if name not in ("step", "time")}, rel=1e-6)
    assert "psnr" in found[5][1] and "psnr" not in found[4][1]


def test_large_steps_take_several_bytes(tmp_path: Path) -> None:
    from volpipe.training.logs import write_events

    write_events(tmp_path, [{"step": 1_000_000, "time": 3.0, "loss": 0.5}])
    assert scalars(tmp_path / EVENT_FILE) == [(1_000_000, {"loss": 0.5})]


# ---- the adversary

GAN = """
[net]
name = "srgan3d"
options = { variant = "z2", features = 2, num_blocks = 1 }

[[data]]
path = "v.tif"

[degrade]
kind = "bin"

[samples]
shape = [4, 16, 16]

[loss]
l1 = 1.0
gradient = 0.1

[adversary]
weight = 0.005
start = 4
features = 2
conditional = true

[train]
steps = 8
warm_up = 1
learning_rate = 1e-3
checkpoint_every = 2
threads = 1
"""


@pytest.fixture
def gan(folder: Path) -> Path:
    (folder / "recipe.toml").write_text(GAN)
    return folder


def test_the_adversary_joins_when_the_warm_start_is_over(gan: Path) -> None:
    train(recipe(gan), gan / "with", str(gan))
    train(recipe(gan, "adversary.weight=0"), gan / "without", str(gan))
    both, alone = losses_in(gan / "with"), losses_in(gan / "without")
    assert both[:4] == alone[:4]
    assert both[5][1] != alone[5][1]
    lines = read_log(gan / "with")
    assert ["fooled" in line for line in lines] == [False] * 4 + [True] * 4
    assert all("judge" in line and line["gradient"] > 0 for line in lines)
    told = [line["l1"] + 0.1 * line["gradient"] + 0.005 * line.get("fooled", 0) for line in lines]
    np.testing.assert_allclose([loss for _, loss in both], told, rtol=1e-5)


def test_the_adversary_learns_to_tell_an_interpolation_from_the_truth(gan: Path) -> None:
    """The net stands still, so that its adversary has an easy time."""
    settings = ["train.steps=60", "train.learning_rate=1e-12", "adversary.start=100", "adversary.learning_rate=1e-2"]
    train(recipe(gan, *settings, "adversary.features=4"), gan / "t", str(gan))
    judged = [line["judge"] for line in read_log(gan / "t")]
    assert np.mean(judged[-10:]) < 0.7 * np.mean(judged[:5])


def test_stopped_and_gone_on_net_and_adversary_come_to_the_same(gan: Path) -> None:
    train(recipe(gan), gan / "whole", str(gan))
    calls = iter(range(100))

    def interrupt() -> None:
        if next(calls) == 4:
            raise RunError("interrupted")

    with pytest.raises(RunError, match="interrupted"):
        train(recipe(gan), gan / "cut", str(gan), interrupt)
    train(recipe(gan), gan / "cut", str(gan))
    lines = [
        [{k: v for k, v in line.items() if k not in ("time", "seconds", "waited")} for line in map(json.loads, text)]
        for text in ((gan / name / LOSSES).read_text().splitlines() for name in ("cut", "whole"))
    ]
    assert lines[0] == lines[1]
    assert (gan / "cut" / WEIGHTS).read_bytes() == (gan / "whole" / WEIGHTS).read_bytes()


def test_the_gradient_of_fooling_leaves_the_adversary_alone(gan: Path) -> None:
    for name, weight in (("hard", 1000), ("soft", 0.001)):  # of step 5, the first in which the net fools
        train(recipe(gan, f"adversary.weight={weight}", "train.steps=5", "train.keep=1"), gan / name, str(gan))
    states = [load_checkpoint(*checkpoints(gan / name / "checkpoints")) for name in ("hard", "soft")]
    hard, soft = (state["judge"]["net"] for state in states)
    assert all((hard[name] == soft[name]).all() for name in hard)
    assert any((states[0]["net"][name] != states[1]["net"][name]).any() for name in states[0]["net"])


def test_float16_is_refused_with_an_adversary(gan: Path) -> None:
    with pytest.raises(RecipeError, match=r"adversary needs train.precision float32 or bfloat16, not float16"):
        recipe(gan, "train.precision=float16")


def test_windows_of_predictions_lie_in_what_is_held_out(folder: Path) -> None:
    from volpipe.training.validate import _held_out_windows

    boxes = [box for _, box in _held_out_windows(Sampler(recipe(folder), (2, 1, 1), str(folder)))]
    assert len(set(boxes)) == NUM_WINDOWS
    assert all(HELD.contains(box) and box.shape == (8, 16, 16) for box in boxes)
    narrow = recipe(folder, "data.0.held_out=56:60,:,:")
    boxes = [box for _, box in _held_out_windows(Sampler(narrow, (2, 1, 1), str(folder)))]
    assert [box.start[0] for box in boxes] == [52] * NUM_WINDOWS


@pytest.mark.parametrize(
    "name",
    [
        "train_superres_z4",
        "train_superres_z2",
        "train_superres_z2_noisy",
        "train_superres_z4_sharp",
        "train_srgan3d_z4",
    ],
)
def test_shipped_training_recipes_are_right(name: str) -> None:
    path = shipped_recipe(Path(name))
    assert path.is_file()
    assert load_training(path).data[0].held_out == ":,:,200:250"
