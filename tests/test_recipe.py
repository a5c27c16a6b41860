"""Recipes: what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT

from volpipe.errors import RecipeError
from volpipe.recipe import Recipe, differences, load_recipe, set_value


def test_without_a_file_the_shipped_default_is_meant_whatever_lies_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "default.toml").write_text('[net]\nname = "identity"\n')
    assert load_recipe(None) == load_recipe(ROOT / "configs" / "default.toml")
    assert load_recipe(None).net.weights == "volpipe:unet3d_denoise.safetensors"
    other = load_recipe(None, ["net.name=superres"]).net
    assert (other.weights, other.options) == (None, {})


def test_an_untrained_net_leaves_the_weights_of_the_file_behind() -> None:
    net = load_recipe(None, ["net.untrained=true"]).net
    assert (net.name, net.weights, net.untrained) == ("unet3d", None, True)
    assert load_recipe(None, ["net.untrained=false"]).net.weights is not None
    with pytest.raises(RecipeError, match=r"untrained = true and weights 'w.pt' exclude each other"):
        load_recipe(None, ["net.untrained=true", "net.weights=w.pt"])
    with pytest.raises(RecipeError, match="weights_key 'ema' is a part of weights, and there are none"):
        load_recipe(None, ["net.untrained=true", "net.weights_key=ema"])


def test_settings_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[windows]\nshape = [32, 64, 64]\nblend = "hann"\n[net]\nname = "identity"\n')
    recipe = load_recipe(path, ["windows.blend=bump", "net.options.channels=2", "infer.batch=4"])
    assert recipe.windows.shape == (32, 64, 64)
    assert (recipe.windows.blend, recipe.net.name, recipe.net.options, recipe.infer.batch) == (
        "bump",
        "identity",
        {"channels": 2},
        4,
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("windows.blent=hann", "unknown key windows.blent .did you mean 'blend'?"),
        ("window.blend=hann", "unknown key window .did you mean 'windows'?"),
        ("windows.blend=cosine", "windows.blend: .*'hann'.*got 'cosine'"),
        ("windows.shape=[1,2]", "windows.shape"),
        ("infer.batch=0", "infer.batch: .*greater than or equal to 1"),
        ("output.levels=-1", "output.levels: .*greater than or equal to 0"),
        ("normalise.low=3", "low and high together"),
        ("normalise.percentiles=[60,40]", "ascend"),
        ("windows", "write key=value"),
        ("net.name.x=1", "name holds a value, not a section"),
    ],
)
def test_a_mistake_is_named(setting: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(None, [setting])


def test_a_number_in_a_key_is_a_place_in_a_list() -> None:
    tree = {"data": [{"path": "a"}, {"path": "b"}]}
    set_value(tree, "data.1.path=c")
    set_value(tree, "data.0.level=2")
    assert tree == {"data": [{"path": "a", "level": 2}, {"path": "c"}]}
    for setting, words in (
        ("data.2.path=c", "2 is none of the 2 there, counted from 0"),
        ("data.path=c", "data is a list; say which of it, such as data.0.path"),
        ("data.first.path=c", "first is none of the 2 there"),
        ("data.0.path.z=c", "path holds a value, not a section"),
    ):
        with pytest.raises(RecipeError, match=words):
            set_value(tree, setting)


def test_another_net_leaves_the_options_of_the_files_behind(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[net]\nname = "unet3d"\nweights = "w.safetensors"\noptions = { features = [4, 8] }\n')
    assert load_recipe(path, ["net.name=unet3d"]).net.weights == "w.safetensors"
    other = load_recipe(path, ["net.name=upsample", "net.options.scale=[2,2,2]"]).net
    assert (other.weights, other.options) == (None, {"scale": [2, 2, 2]})


def test_a_file_that_is_not_there_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no recipe at .*none\.toml"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("windows = [")
    with pytest.raises(RecipeError, match=r"bad\.toml is not valid TOML"):
        load_recipe(tmp_path / "bad.toml")


def test_differences_name_keys_and_both_values() -> None:
    new = load_recipe(Path("/dev/null"), ["windows.blend=hann", "net.options.seed=3"])
    assert differences(Recipe(), new) == ["net.options.seed: None -> 3", "windows.blend: 'crop' -> 'hann'"]
