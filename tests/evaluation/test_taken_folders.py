"""Folders of scores and comparisons, which go in the end, while other commands take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from inline import Inline, Stopped
from volumes import noise, write_volume

import volpipe as vp
from volpipe.blockwise.loop import perform
from volpipe.errors import RunError
from volpipe.evaluation import driver, subject
from volpipe.evaluation.driver import EvaluationWork
from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.storage import lock
from volpipe.workflow import compare

SHAPE = (16, 16, 16)


@contextmanager
def ending_with(on_end: Callable[[RunFolder], object]) -> Iterator[None]:
    """Call `on_end` once with the folder of a work that has ended, before its command has."""

    def perform_and_end(work: Any, start: Any) -> Any:
        result = perform(work, start)
        patch.undo()
        on_end(work.folder)
        return result

    with pytest.MonkeyPatch.context() as patch:
        for module in (driver, compare):
            patch.setattr(module, "perform", perform_and_end)
        yield


@pytest.fixture(autouse=True)
def _volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subject, "BLOCK", (8, 8, 8))
    for seed, name in enumerate(("one", "two", "truth")):
        write_volume(tmp_path / f"{name}.n5", noise(SHAPE, seed=seed))


def score(name: str, site: Inline) -> float:
    """Return a score of the volume `name`; that of another one uses the same folder."""
    result = driver.finish(
        EvaluationWork(plan_evaluation(f"{name}.n5", "truth.n5"), RunFolder(Path("scores.run"))), site.start
    )
    assert result.scores is not None
    return float(result.scores["output"].psnr)  # type: ignore[index, union-attr]


def compare_stages() -> None:
    """Compare the outputs of two batches of one volume."""
    settings = ("net.name=identity", "windows.shape=[8,8,8]", "windows.overlap=0")
    for out in ("old", "new"):
        vp.batch("one.n5/raw", out=out, settings=settings, site=Inline())
    vp.compare("old", "new", site=Inline())


@pytest.mark.parametrize(
    "command",
    [lambda: score("one", Inline()), lambda: vp.compare("one.n5", "two.n5", site=Inline()), compare_stages],
    ids=["evaluate", "compare", "batches"],
)
def test_a_folder_that_another_command_holds_stays_until_that_ends(command: Callable[[], object]) -> None:
    taken: list[RunFolder] = []
    with ExitStack() as stack:

        def take(folder: RunFolder) -> None:
            stack.enter_context(folder.locked())
            taken.append(folder)
            folder.log.write_text("of the other command")

        with ending_with(take):
            command()
        assert taken[0].log.read_text() == "of the other command"
    command()
    assert not taken[0].path.exists()


def test_what_another_evaluation_has_left_meanwhile_stays() -> None:
    whole, second = Inline(), Inline()
    expected = score("two", whole)

    def interrupted(folder: RunFolder) -> None:
        with pytest.raises(Stopped):
            score("two", Inline(most_tasks=whole.num_tasks - 1))

    with ending_with(interrupted):
        score("one", Inline())
    assert score("two", second) == expected and 0 < second.num_tasks < whole.num_tasks
    assert not Path("scores.run").exists()


def test_a_folder_that_goes_while_its_lock_is_awaited_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, take = RunFolder(Path("scores.run")), lock._take

    def late(descriptor: int) -> None:
        (folder.path / lock.LOCK_FILE).unlink()
        take(descriptor)

    with folder.locked():
        pass
    monkeypatch.setattr(lock, "_take", late)
    with pytest.raises(RunError, match=r"was deleted by process .*; give the command again"), folder.locked():
        pass
