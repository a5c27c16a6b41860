"""Recipes: what is refused, and with which words."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from conftest import ROOT

from volpipe.errors import RecipeError
from volpipe.recipes.complaints import keys
from volpipe.recipes.inference import Recipe, load_recipe
from volpipe.recipes.toml import differences, set_values

FOREIGN = ("Input", "Value error", "Path(", "<class", "datetime", "None", "True", "NaN", "validator", "such a value")


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
    recipe = load_recipe(path, ["windows.blend=hann", "net.options.channels=2", "infer.batch=4"])
    assert recipe.windows.shape == (32, 64, 64)
    assert (recipe.windows.blend, recipe.net.name, recipe.net.options, recipe.infer.batch) == (
        "hann",
        "identity",
        {"channels": 2},
        4,
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("windows.blent=hann", "unknown key windows.blent .did you mean 'blend'?"),
        ("window.blend=hann", "unknown key window .did you mean 'windows'?"),
        ("windows.blend=cosine", "^--set windows.blend=cosine: 'cosine' is neither one of crop, .*hann, .* nor auto"),
        ("windows.shape=[1,2]", r"^--set .*: \[1, 2\] is neither a list of three whole numbers \[z, y, x\] nor auto$"),
        ("infer.batch=two", "^--set infer.batch=two: 'two' is neither a whole number from 1 nor auto$"),
        ("blend=hann", "unknown key blend .did you mean 'windows.blend'?"),
        ("infer.compile=maybe", "'maybe' is not true or false$"),
        ("normalise.std=-1", "-1 is not a number above 0"),
        ("windows=5", "5 is not a section, which has the keys shape, overlap, blend, placement, block$"),
        ("net.options=3", "3 is not a table$"),
        ("output.codec_level=99", "99 is not a whole number from 0 to 22$"),
        ("input.empty=nan", "nan is neither missing nor a finite number$"),
        ("infer.batch=0", "0 is neither a whole number from 1 nor auto$"),
        ("output.levels=-1", "-1 is neither a whole number from 0 nor auto$"),
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
    set_values(tree, ["data.1.path=c", "data.0.level=2"])
    assert tree == {"data": [{"path": "a", "level": 2}, {"path": "c"}]}
    for setting, words in (
        ("data.2.path=c", "2 is none of the 2 there, counted from 0"),
        ("data.path=c", "data is a list; say which of it, such as data.0.path"),
        ("data.first.path=c", "first is none of the 2 there"),
        ("data.0.path.z=c", "path holds a value, not a section"),
    ):
        with pytest.raises(RecipeError, match=words):
            set_values(tree, [setting])


@pytest.mark.parametrize("form", ["[24,16,8]", "24,16,8", " 24, 16, 8 "])
def test_a_list_of_numbers_needs_no_brackets_which_zsh_would_read(form: str) -> None:
    recipe = load_recipe(None, [f"net.halo={form}", f"input.voxel_size_nm={form.replace('8', '4.5')}"])
    assert (recipe.net.halo, recipe.input.voxel_size_nm) == ((24, 16, 8), (24.0, 16.0, 4.5))
    with pytest.raises(RecipeError, match=r"'1,2,x' is not a list of three"):
        load_recipe(None, ["net.halo=1,2,x"])


def test_another_net_leaves_the_options_of_the_files_behind(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[net]\nname = "unet3d"\nweights = "w.safetensors"\noptions = { features = [4, 8] }\n')
    assert load_recipe(path, ["net.name=unet3d"]).net.weights == "w.safetensors"
    other = load_recipe(path, ["net.name=upsample", "net.options.scale=[2,2,2]"]).net
    assert (other.weights, other.options) == (None, {"scale": [2, 2, 2]})


@pytest.mark.parametrize("recipe", [None, Path("none")])
def test_the_order_of_settings_does_not_matter(recipe: Path | None) -> None:
    """Another name dropped what had been set before it, so that a net of chances wrote grey levels as float32."""
    settings = [
        "net.name=mine.py:net", "net.intensity=unit", "net.offsets=[[-1,0,0]]", "net.options.depth=3",
        "net.options={ width = 4 }", "net.weights=w.pt",
    ]  # fmt: skip
    found = [load_recipe(recipe, order).net for order in itertools.permutations(settings)]
    assert {net.model_dump_json() for net in found} == {found[0].model_dump_json()}
    assert (found[0].name, found[0].intensity, found[0].offsets) == ("mine.py:net", "unit", ((-1, 0, 0),))
    assert (found[0].options, found[0].weights) == ({"width": 4, "depth": 3}, "w.pt")
    for order in itertools.permutations(["net.untrained=true", "net.weights=w.pt"]):
        with pytest.raises(RecipeError, match=r"untrained = true and weights 'w.pt' exclude each other"):
            load_recipe(recipe, order)


def test_of_a_key_set_twice_the_last_value_counts() -> None:
    settings = ["net.name=superres", "net.untrained=true", "net.untrained=false", "net.name=unet3d"]
    assert load_recipe(None, settings).net == load_recipe(None).net.model_copy(update={"untrained": False})


def test_a_file_that_is_not_there_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no recipe at .*none\.toml"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("windows = [")
    with pytest.raises(RecipeError, match=r"bad\.toml is not valid TOML"):
        load_recipe(tmp_path / "bad.toml")


def test_differences_name_keys_and_both_values() -> None:
    new = load_recipe(Path("none"), ["windows.blend=hann", "net.options.seed=3"])
    assert differences(Recipe(), new) == ["net.options.seed: not set -> 3", "windows.blend: 'auto' -> 'hann'"]


def test_a_mistake_is_blamed_on_whoever_made_it(tmp_path: Path) -> None:
    """A file as it was typed, a setting by its option, a shipped recipe by its name; both where both may have erred."""
    path = tmp_path / "mine.toml"
    path.write_text("[infer]\nbatch = 0\n[normalise]\nlow = 3\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path, ["windows.shpe=[8,8,8]", "normalise.eps=1"])
    assert str(error.value) == (
        f"{path} with --set normalise.eps=1: normalise: give low and high together, and mean and std together; "
        "--set windows.shpe=[8,8,8]: unknown key windows.shpe (did you mean 'shape'?); "
        f"{path}: infer.batch: 0 is neither a whole number from 1 nor auto"
    )


def test_shipped_recipes_have_names_and_none_is_no_file() -> None:
    assert load_recipe(Path("superres_z4")) == load_recipe(Path("superres_z4.toml"))
    assert load_recipe(Path("superres_z4")).net.name == "superres"
    assert load_recipe(Path("none"), ["net.name=shift"]).net.name == "shift"
    with pytest.raises(RecipeError) as error:
        load_recipe(Path("superres_z3"))
    assert "(did you mean 'superres_z4'?)" in str(error.value)
    assert "affinities, default, labels_to_objects, segment" in str(error.value)
    with pytest.raises(RecipeError, match=r"^the shipped recipe superres_z4 with --set normalise\.low=3: "):
        load_recipe(Path("superres_z4"), ["normalise.low=3"])


def test_no_complaint_shows_how_python_writes_a_value() -> None:
    """Every key of a recipe is given a value of each kind that TOML has: what is refused is refused in our words."""
    values = ("'x'", "-7", "1.5", "nan", "true", "[]", "[1, 'x']", "{ x = 1 }", "2026-01-02", "[[1]]", "[{ x = 1 }]")
    refused = 0
    for key in (*keys(Recipe), *Recipe.model_fields):
        for value in values:
            try:
                load_recipe(None, [f"{key}={value}"])
            except RecipeError as error:
                refused += 1
                sentence = str(error).partition(": ")[2]
                assert [word for word in FOREIGN if word in sentence] == []
    assert refused > 200
