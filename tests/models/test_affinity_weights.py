"""The shipped affinities: what their card says, and that they tell neurons apart where grey levels do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from cards import card, checked_facts
from command import giver
from inline import Inline
from trainings import made

from volpipe.geometry.affinities import OFFSETS
from volpipe.recipes.inference import load_recipe
from volpipe.recipes.training import load_training
from volpipe.resolve import shipped_recipe
from volpipe.synthetic.volume import SyntheticVolume, write_sample
from volpipe.training.data.samples import Sampler
from volpipe.training.data.targets import histograms, roc_auc, targets
from volpipe.volumes.volume import open_volume
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

RECIPE = shipped_recipe(Path("affinities"))
TRAINING = shipped_recipe(Path("train_affinities"))
CARD = card("affinities_fibsem")


def grey(raw: np.ndarray) -> np.ndarray:
    """Return what takes no net: of each pair the darker voxel, of means of 3 x 3 x 3; membranes are dark."""
    means = np.lib.stride_tricks.sliding_window_view(np.pad(raw, 1, mode="edge"), (3, 3, 3)).mean((3, 4, 5))
    pairs = [np.minimum(means, np.roll(means, tuple(-o for o in offset), (0, 1, 2))) for offset in OFFSETS]
    return np.stack(pairs).astype(np.uint8)


def test_the_card_has_the_sums_and_sizes_of_the_file() -> None:
    facts = checked_facts("affinities_fibsem", RECIPE)
    assert (facts.out_channels, facts.intensity, facts.tile_invariant) == (len(OFFSETS), "unit", True)


def test_the_card_has_every_channel_and_the_steps_of_the_recipe_that_made_it() -> None:
    training = load_training(TRAINING)
    assert training.net.options == load_recipe(RECIPE).net.options
    assert training.affinities.offsets == OFFSETS
    assert f"{training.train.steps:,} steps" in CARD
    for channel, offset in enumerate(OFFSETS):
        assert f"| {channel} | {', '.join(map(str, offset))} |" in CARD


def test_it_learned_from_nothing_that_may_not_be_shipped() -> None:
    paths = {path for data in load_training(TRAINING).data for path in (data.path, str(data.labels))}
    folders = {path.partition("/")[0] for path in paths}
    assert folders == {"gala_tinyfib", "fibsem_medulla"}
    assert all(folder in CARD for folder in folders)


def test_the_command_gives_nine_channels_of_a_byte_that_tell_invented_cells_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sample(tmp_path / "v.zarr", SyntheticVolume((24, 40, 48), 77, (8.0, 8.0, 8.0)), chunk=24, format="zarr3")
    ended = giver(tmp_path, monkeypatch, capsys)("run", "--recipe", "affinities", "--config", "threads", "v.zarr/raw")
    assert ended.code == 0, ended.err
    made = open_volume(tmp_path / "v_raw_unet3d.zarr")
    assert made.shape == (len(OFFSETS), 24, 40, 48) and made.dtype == np.uint8
    truth = targets(open_volume(tmp_path / "v.zarr", "labels").open()[...], OFFSETS)
    assert roc_auc(histograms(made.open()[...], truth)) > 0.9


@pytest.mark.long
@pytest.mark.real
@pytest.mark.slow
def test_on_columns_that_it_never_saw_it_beats_grey_levels(tmp_path: Path, shared: Path) -> None:
    """The held-out part of gala's test volume; the card has the scores of all of it."""
    box = np.s_[:, 20:80, 120:200]
    raw, bodies = (tifffile.imread(shared / "gala_tinyfib" / f"test_{name}.tif")[box] for name in ("image", "gt"))
    tifffile.imwrite(tmp_path / "v.tif", raw)
    plan = prepare(str(tmp_path / "v.tif"), load_recipe(RECIPE), tmp_path / "out.zarr", tmp_path)
    assert execute(plan, Inline(slots=2).start).missing == []
    truth = targets(bodies, OFFSETS, ignore=0)
    outputs = open_volume(tmp_path / "out.zarr").open()[...]
    by_net, by_grey = (roc_auc(histograms(maps, truth)) for maps in (outputs, grey(raw)))
    assert by_net > by_grey + 0.04
    assert by_net > 0.97


@pytest.mark.real
def test_the_recipe_finds_its_volumes_and_labels(tmp_path: Path, shared: Path) -> None:
    for folder in ("gala_tinyfib", "fibsem_medulla"):
        (tmp_path / folder).symlink_to(shared / folder)
    recipe = load_training(TRAINING, ["samples.shape=[24,32,32]"])
    sample = made(Sampler(recipe, (1, 1, 1), str(tmp_path)), 0)
    assert sample.truth.shape == (len(OFFSETS), 24, 32, 32)
