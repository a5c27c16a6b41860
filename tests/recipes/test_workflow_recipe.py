"""Recipes of several stages: their order, and what each says on top of the recipe that it names."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from conftest import ROOT

from volpipe.errors import RecipeError
from volpipe.recipes.inference import Recipe
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.recipes.workflow import Flow
from volpipe.resolve import shipped_recipe
from volpipe.workflow.recipe import find_flow

TWO = """
[[stage]]
name = "first"
recipe = "default"

[[stage]]
name = "second"
recipe = "default"
"""
SCORED = TWO + '[[stage]]\nname = "scores"\nkind = "evaluate"\nreference = "truth.n5"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where recipes lie, and the command is given."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[[stage]]\nname = "a"\ninput = "b"\nrecipe = "default"\n', r"stage a, input: there is no stage b"),
        ('[[stage]]\nname = "a"\ninput = "a"\nrecipe = "default"\n', r"stage a, input: it reads itself"),
        (
            TWO.replace('name = "first"', 'name = "first"\ninput = "second"'),
            r"first, input: stages read each other in a ci",
        ),
        (
            TWO.replace('name = "first"', 'name = "first"\ninput = "second"').replace(
                'name = "second"', 'name = "second"\ninput = "volume"'
            ),
            r"first, input: second comes after it; move",
        ),
        (TWO.replace('"second"', '"first"'), r"2 stages are named first; give each"),
        (TWO.replace('"second"', '"volume"'), r"no stage may be named volume"),
        (TWO.replace('"second"', '"../second"'), r"stage 2: name: "),
        ('[[stage]]\nname = "a"\n', r"stage a: it names no net"),
        ('[[stage]]\nname = "a"\nkind = "segment"\nrecipe = "default"\n', r"stage 1: kind: .*'segment'"),
        ('[[stage]]\nname = "a"\nnet = { nam = "x" }\n', r"stage a: unknown key net.nam .did you mean 'name'"),
        ('[net]\nname = "identity"\n' + TWO, r"net stands beside the stages; write it into one, as \[stage.net\]"),
        ('[[stage]]\nname = ["a"]\nrecipe = "default"\n', r"stage 1: name: "),
        ('[[stage]]\nname = "a"\ninput = ["b"]\nrecipe = "default"\n', r"stage 1: input: "),
        ('[[stage]]\nname = "a"\ninput = { stage = 3 }\nrecipe = "default"\n', r"stage 1: input: "),
        ('[[stage]]\nname = "a"\nnet = 3\n', r"stage a: net: "),
        ("stage = []", r"it declares no stage"),
        ('stage = "a"', r"begin each stage with \[\[stage\]\]"),
        (
            SCORED + '[[stage]]\nname = "last"\ninput = "scores"\nrecipe = "default"\n',
            r"stage last, input: scores makes scores and no volume; name a stage that does, or volume",
        ),
        (
            SCORED.replace('reference = "truth.n5"', ""),
            r"stage scores: reference is missing; give a text, or skeletons in files$",
        ),
        ('[[stage]]\nname = "a"\nrecipe = "flow.toml"\n', r"stage a: the recipe flow.toml has stages itself"),
    ],
)
def test_stages_without_an_order_or_with_unknown_keys_are_refused(folder: Path, text: str, sentence: str) -> None:
    (folder / "flow.toml").write_text(text)
    with pytest.raises(RecipeError, match=sentence):
        find_flow(folder / "flow.toml")


def test_the_examples_in_the_documentation_are_understood(folder: Path) -> None:
    text = (ROOT / "docs" / "flows.md").read_text(encoding="utf-8")
    flows = list[Flow]()
    for example in re.findall(r"```toml\n(?!\[stage\.)(.*?)```", text, re.DOTALL):  # not what goes into one
        (folder / "flow.toml").write_text(example)
        found = find_flow(folder / "flow.toml")
        assert found is not None
        flows.append(found)
    flow, *others = flows
    assert {stage.kind for each in others for stage in each.stages} >= {"convert", "function", "compare"}
    change = next(each.stages[-1] for each in others if each.stages[-1].kind == "compare")
    assert (change.kind, change.reads, change.beside) == ("compare", "fine", ("coarse",))
    assert {stage.name: stage.reads for stage in flow.stages} == {
        "finer": "volume", "restore": "finer", "affinities": "restore", "labels": "affinities", "scores": "labels",
        "psnr": "restore",
    }  # fmt: skip
    assert isinstance(flow.stages[1].choice, Recipe)
    assert flow.stages[1].choice.windows.block == (2, 2, 2)
    assert flow.stages[1].choice.net.options["residual"] is True  # of the recipe below
    (learned,) = (each for each in others if each.stages[0].kind == "train")
    assert [(stage.name, stage.reads, stage.beside) for stage in learned.stages] == [
        ("learn", "volume", ()), ("affinities", "volume", ("learn",)), ("labels", "affinities", ()),
        ("scores", "labels", ("learn",)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("own", "name", "weights"),
    [("options = { features = [8] }", "unet3d", "w.pt"), ('name = "identity"', "identity", None)],
)
def test_what_a_stage_says_goes_on_top_of_its_recipe_and_another_net_takes_nothing_of_the_first(
    folder: Path, own: str, name: str, weights: str | None
) -> None:
    (folder / "base.toml").write_text(
        '[net]\nname = "unet3d"\nweights = "w.pt"\n[net.options]\ndepth = 3\n[windows]\nblend = "hann"\noverlap = 4'
    )
    text = f'[[stage]]\nname = "a"\nrecipe = "base.toml"\nnet = {{ {own} }}\nwindows = {{ overlap = 8 }}\n'
    (folder / "flow.toml").write_text(text)
    flow = find_flow(folder / "flow.toml", ["a.infer.batch=3"])
    assert flow is not None
    choice = flow.stages[0].choice
    assert isinstance(choice, Recipe)
    assert (choice.net.name, choice.net.weights) == (name, weights)
    assert choice.net.options == ({} if name == "identity" else {"depth": 3, "features": [8]})
    assert (choice.windows.blend, choice.windows.overlap, choice.infer.batch) == ("hann", 8, 3)


def test_the_order_of_settings_does_not_matter(folder: Path) -> None:
    (folder / "flow.toml").write_text(TWO)
    settings = [
        "second.net.name=mine.py:net",
        "second.net.intensity=unit",
        "second.input=volume",
        "second.input.level=1",
    ]
    for order in itertools.permutations(settings):
        flow = find_flow(folder / "flow.toml", order)
        assert flow is not None
        stage = flow.stages[1]
        assert isinstance(stage.choice, Recipe)
        assert (stage.reads, stage.choice.input.level) == ("volume", 1)
        assert (stage.choice.net.name, stage.choice.net.intensity) == ("mine.py:net", "unit")
        assert stage.choice.net.weights is None


def test_an_untrained_net_of_a_stage_leaves_the_weights_of_its_recipe_behind(folder: Path) -> None:
    (folder / "flow.toml").write_text(TWO)
    flow = find_flow(folder / "flow.toml", ["second.net.untrained=true"])
    assert flow is not None
    nets = [stage.choice.net for stage in flow.stages if isinstance(stage.choice, Recipe)]
    assert [(net.name, net.untrained, net.weights is None) for net in nets] == [
        ("unet3d", False, False), ("unet3d", True, True),
    ]  # fmt: skip


def test_the_shipped_stages_lead_from_an_image_to_labels() -> None:
    flow = find_flow(shipped_recipe(Path("segment")))
    assert flow is not None
    assert [(stage.name, stage.kind, stage.reads) for stage in flow.stages] == [
        ("affinities", "run", "volume"), ("labels", "label", "affinities"),
    ]  # fmt: skip
    run_of, labels = (stage.choice for stage in flow.stages)
    assert isinstance(run_of, Recipe)
    assert isinstance(labels, SegmentRecipe)
    assert run_of.net.options["out_channels"] == len(labels.input.offsets)


def test_a_setting_without_its_stage_is_refused(folder: Path) -> None:
    (folder / "flow.toml").write_text(TWO)
    with pytest.raises(RecipeError, match=r"begin with the name of a stage, of first, second, such as first\.windows"):
        find_flow(folder / "flow.toml", ["windows.blend=hann"])


def test_a_recipe_of_one_net_is_no_flow(folder: Path) -> None:
    (folder / "one.toml").write_text('[net]\nname = "identity"\n')
    assert find_flow(folder / "one.toml") is None
