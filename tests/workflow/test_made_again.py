"""Outputs that are made again, by a command that is killed while it deletes the old ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import FLOW, SHAPE, endings, give
from deletions import Deletions
from inline import Inline, Stopped
from volumes import fingerprint, noise, windowed, write_volume

import volpipe as vp
from volpipe.errors import RunError
from volpipe.runs.run_folder import RunFolder

MASKED = (
    "net.name=identity",
    "input.mask=mask.n5",
    "output.levels=1",
    *windowed((8, 8, 8), (0, 0, 0), (2, 3, 1), "crop"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flow.toml").write_text(FLOW)
    return tmp_path


def write_inputs(seed: int, half: slice) -> None:
    """Write a volume, and a mask that selects a half of it."""
    mask = np.zeros(SHAPE, np.uint8)
    mask[half] = 1
    for name, data in (("raw/a.n5", np.maximum(noise(SHAPE, seed=seed), 1)), ("mask.n5", mask)):
        shutil.rmtree(name, ignore_errors=True)
        write_volume(Path(name), data, chunk=8)


def made() -> dict[str, str]:
    """Return a hash of each output."""
    return {str(path): fingerprint(path) for path in Path("done").rglob("*.zarr")}


def after_kills(begin: Callable[[Inline], object], go_on: Callable[[], object], step: int) -> list[dict[str, str]]:
    """Return what `go_on` makes after `begin` was killed at every `step`-th deletion before its first task, or at that.

    Each time the folder `done` is as it is now.
    """
    shutil.copytree("done", "before")
    results = []
    for number in count(1, step):
        shutil.rmtree("done")
        shutil.copytree("before", "done")
        deletions = Deletions(number)
        with deletions.counted(), pytest.raises(Stopped):
            begin(Inline(most_tasks=0))
        go_on()
        results.append(made())
        if deletions.count < number:
            return results
    raise AssertionError


STEPS = pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])


@pytest.mark.long
@STEPS
@pytest.mark.parametrize(
    "options", [{"settings": MASKED}, {"settings": (), "recipe": "flow.toml"}], ids=["run", "flow"]
)
def test_a_batch_that_is_killed_at_any_deletion_goes_on_to_the_bytes_of_a_fresh_one(
    options: dict[str, Any], step: int
) -> None:
    def replace(site: Inline | None = None) -> None:
        report = give("raw/a.n5", **options, replace=True, site=site or Inline())
        assert endings(report) == ["done"], report.rows[0].reason

    write_inputs(0, np.s_[:8])
    give("raw/a.n5", **options)
    write_inputs(1, np.s_[8:])
    *results, undisturbed = after_kills(replace, replace, step)
    assert len(results) > 20 / step and all(result == undisturbed for result in results)


@pytest.mark.long
@STEPS
def test_a_fresh_run_that_is_killed_at_any_deletion_goes_on_without_the_option(step: int) -> None:
    def run(site: Inline | None = None, **options: Any) -> None:
        vp.run("raw/a.n5", out="done/a.zarr", settings=MASKED, site=site or Inline(), **options)

    write_inputs(0, np.s_[:8])
    Path("done").mkdir()
    run()
    write_inputs(1, np.s_[8:])
    with pytest.raises(RunError, match="has changed since"):
        run()
    *results, undisturbed = after_kills(partial(run, fresh=True), run, step)
    assert len(results) > 20 / step and all(result == undisturbed for result in results)


@pytest.mark.long
@STEPS
def test_stages_of_another_recipe_are_made_anew_whenever_an_update_is_killed(step: int) -> None:
    def run(site: Inline | None = None, bits: str = "first.output.dtype=uint16", **options: Any) -> None:
        settings = (bits, "first.output.levels=0")
        vp.run("raw/a.n5", recipe="flow.toml", out="done", settings=settings, site=site or Inline(), **options)

    write_inputs(0, np.s_[:8])
    run()
    again = partial(run, bits="first.output.dtype=float32", update=True)
    *results, undisturbed = after_kills(again, again, step)
    assert len(results) > 10 / step and all(result == undisturbed for result in results)


@pytest.mark.parametrize(
    ("deleted", "seed"),
    [(["journal.jsonl"], 0), (["plan.json", "wanted.npy", "inputs.json"], 1)],
    ids=["journal", "plan"],
)
def test_of_a_folder_that_is_half_deleted_nothing_counts(
    monkeypatch: pytest.MonkeyPatch, deleted: list[str], seed: int
) -> None:
    """Each of these left an output of the old mask, or of zeros, that counted as done."""

    def killed(folder: RunFolder) -> None:
        for name in deleted:
            (folder.path / name).unlink(missing_ok=True)
        raise Stopped

    write_inputs(0, np.s_[:8])
    give("raw/a.n5", settings=MASKED)
    write_inputs(seed, np.s_[8:] if seed == 0 else np.s_[:8])
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(RunFolder, "clear", killed)
        give("raw/a.n5", settings=MASKED, replace=True)
    assert endings(give("raw/a.n5", settings=MASKED, replace=True)) == ["done"]
    expected = vp.open("raw/a.n5")[...] * vp.open("mask.n5")[...]
    np.testing.assert_array_equal(vp.open("done/a.zarr")[...], expected)
