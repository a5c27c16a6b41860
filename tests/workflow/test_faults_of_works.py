"""Faults of every kind of work: a run of a net, a segmentation, an evaluation and a flow meet them alike."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command import Ended, Give, giver
from disks import small_disk
from works import BAD, CHUNK_FILE, WORKS, Kind, prepare

from volpipe.blockwise import task as task_module
from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.blockwise.notes import DRIVER, read_note
from volpipe.evaluation import subject
from volpipe.geometry.grid import Box
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.storage.tensorstore import Index, TensorStoreArray
from volpipe.volumes.volume import View, open_volume

ALL = pytest.mark.parametrize("kind", WORKS.values(), ids=WORKS)
LATE = partial(pytest.param, marks=pytest.mark.long)
# A flow does what the others do, one after another.
QUICK = pytest.mark.parametrize(
    "kind", [LATE(WORKS[name]) if name == "flow" else WORKS[name] for name in WORKS], ids=WORKS
)


@dataclass
class Place:
    """A folder with what the works read, and the hashes of what nothing disturbs."""

    path: Path
    known: dict[str, dict[str, str]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("works")
    prepare(folder)
    return Place(folder)


@pytest.fixture
def folder(place: Place) -> Path:
    """The folder of all tests, with nothing made in it."""
    for kind in WORKS.values():
        kind.remove(place.path)
    return place.path


@pytest.fixture
def give(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    monkeypatch.setattr(subject, "BLOCK", (16, 16, 16))
    return giver(folder, monkeypatch, capsys)


@pytest.fixture
def whole(give: Give, place: Place, kind: Kind) -> dict[str, str]:
    """Return the hashes of what nothing disturbs, which is made once and deleted."""
    if kind.stage + kind.made[0] not in place.known:
        ended = give(*kind.command())
        assert ended.code == 0, ended.err
        place.known[kind.stage + kind.made[0]] = kind.fingerprints(place.path)
        kind.remove(place.path)
    return place.known[kind.stage + kind.made[0]]


def check_mended(give: Give, kind: Kind, folder: Path, whole: dict[str, str]) -> None:
    """Check that the same command again makes what nothing disturbs."""
    ended = give(*kind.command())
    assert ended.code == 0, ended.err
    assert kind.fingerprints(folder) == whole


def missing(text: str) -> list[tuple[str, Box]]:
    """Return stage and box of each row of a table of what is missing."""
    rows = re.findall(r"^([a-z]+)(?: \d+)? +\d+ +(\d+):(\d+),(\d+):(\d+),(\d+):(\d+) ", text, re.MULTILINE)
    return [(stage, Box(tuple(map(int, box[::2])), tuple(map(int, box[1::2])))) for stage, *box in rows]


def last_line(ended: Ended) -> str:
    return ended.err.splitlines()[-1]


@QUICK
def test_a_damaged_chunk_costs_what_reads_it_and_is_named_and_mended_gives_the_same_bytes(
    folder: Path, give: Give, kind: Kind, whole: dict[str, str]
) -> None:
    file = folder / CHUNK_FILE
    good = file.read_bytes()
    file.write_bytes(good[:-9])
    ended = give(*kind.command("threads", "--tolerate", "1"))
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert f"chunk (0, 1, 2) in {file}" in " ".join(ended.err.split())
    assert {box for stage, box in missing(ended.err) if stage == kind.stage} == kind.touching(BAD)
    done = {unit for run, stage, unit in kind.units(folder) if (run, stage) == (kind.folders[0], kind.stage)}
    num = int(np.prod([n // kind.block for n in (16, 32, 48)]))
    assert len(done) == num - len(kind.touching(BAD))
    file.write_bytes(good)
    check_mended(give, kind, folder, whole)


def test_what_a_flow_lacks_after_a_damaged_chunk_is_named_in_every_stage_and_the_rest_is_there(
    folder: Path, give: Give
) -> None:
    good = (folder / CHUNK_FILE).read_bytes()
    (folder / CHUNK_FILE).write_bytes(b"")
    ended = give(*WORKS["flow"].command("threads", "--tolerate", "1"))
    (folder / CHUNK_FILE).write_bytes(good)
    assert ended.code == 1
    rows = missing(ended.err)
    assert {box for stage, box in rows if stage == "infer"} == WORKS["run"].touching(BAD)
    assert {box for stage, box in rows if stage == "pieces"} == WORKS["segment"].touching(BAD)
    assert [box for stage, box in rows if stage == "graph"] == [Box((0, 0, 0), (16, 32, 48))]
    assert last_line(ended).startswith("not complete: first, objects")
    made, given = (
        open_volume(folder / name, view=View(incomplete=True)).open()[...] for name in ("out/first.zarr", "truth.n5")
    )
    inside = np.zeros(made.shape, bool)
    inside[BAD.slices] = True
    assert not made[inside].any()
    assert (np.abs(made[~inside].astype(int) - given[~inside]) < 64).all()


@pytest.mark.parametrize("kind", [WORKS[name] if name == "run" else LATE(WORKS[name]) for name in WORKS], ids=WORKS)
def test_strict_stops_at_the_first_that_fails(folder: Path, give: Give, kind: Kind, whole: dict[str, str]) -> None:
    file = folder / CHUNK_FILE
    good = file.read_bytes()
    file.write_bytes(good[:-9])
    ended = give(*kind.command("threads", "--strict"))
    assert ended.code == 1
    assert re.search(
        rf"^volpipe: (stage \w+: )?[a-z ]+ \({kind.stage} \d+\) failed, so the work stops: ", last_line(ended)
    )
    assert str(file) in last_line(ended)
    file.write_bytes(good)
    check_mended(give, kind, folder, whole)


@ALL
def test_where_everything_fails_alike_it_stops_at_once(
    folder: Path, give: Give, kind: Kind, whole: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TensorStoreArray.read

    def fail(array: TensorStoreArray, index: Index, look: Callable[[], None] | None = None) -> np.ndarray:
        if threading.current_thread() is threading.main_thread():
            return read(array, index, look)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(TensorStoreArray, "read", fail)
        ended = give(*kind.command())
    assert ended.code == 1
    assert f"({kind.stage}) failed for 3 parts and worked for none, so the work stops: " in last_line(ended)
    assert "Input/output error" in last_line(ended)
    log = (folder / kind.folders[0] / "volpipe.log").read_text()
    num_tried = len(re.findall(rf"{kind.stage} \d+ failed \(attempt \d\)", log))
    assert 3 * 3 <= num_tried <= 3 * 3 + 2 * 2 * 3  # three units three times, and what was in flight
    assert kind.units(folder) == []
    check_mended(give, kind, folder, whole)


@contextmanager
def meanwhile(monkeypatch: pytest.MonkeyPatch, kind: Kind, folder: Path, act: Callable[[], None]) -> Iterator[None]:
    """Do `act` in a task, once, as soon as a unit is marked; the task goes on."""
    acted, measured = list[str](), task_module.measured

    @contextmanager
    def acting(stage: str) -> Iterator[object]:
        if not acted and kind.units(folder):
            acted.append(stage)
            act()
        with measured(stage) as meter:
            yield meter

    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr(task_module, "measured", acting)
        patch.setattr(sys.stderr, "fileno", stack.enter_context(Path(os.devnull).open("w")).fileno)
        yield
    assert acted


@QUICK
def test_on_a_disk_that_is_full_it_ends_with_a_sentence_and_goes_on_when_there_is_room(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attributes say where the input lies, so that it is made on the disk once before."""
    with small_disk(tmp_path / "disk", "size=8m"):
        monkeypatch.setattr(subject, "BLOCK", (8, 8, 8))  # whose records fill what is left of a page
        place, filler = tmp_path / "disk", tmp_path / "disk" / "filler"
        prepare(place)
        give = giver(place, monkeypatch, capsys)
        assert give(*kind.command()).code == 0
        whole = kind.fingerprints(place)
        kind.remove(place)

        def fill() -> None:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

        with meanwhile(monkeypatch, kind, place, fill):
            ended = give(*kind.command())
        assert ended.code == 1, ended.err
        assert "No space left on device" in " ".join(ended.err.split())
        assert not last_line(ended).startswith(("Traceback", "OSError"))
        filler.unlink()
        check_mended(give, kind, place, whole)


@ALL
def test_ctrl_c_lets_tasks_finish_and_the_same_command_goes_on(
    folder: Path, give: Give, kind: Kind, whole: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with meanwhile(monkeypatch, kind, folder, lambda: os.kill(os.getpid(), signal.SIGINT)):
        ended = give(*kind.command())
    assert ended.code == INTERRUPTED, ended.err
    assert last_line(ended) == "volpipe: interrupted; run the same command again to continue"
    before = kind.units(folder)
    assert before
    notes = [read_note(folder / name / DRIVER) for name in kind.folders]
    assert {note.ended for note in notes if note is not None} == {"interrupted"}
    with monkeypatch.context() as patch:  # the folder of an evaluation or a comparison goes when all is done
        patch.setattr(RunFolder, "remove", lambda folder, mark, content: None)
        check_mended(give, kind, folder, whole)
    after = kind.units(folder)
    assert after[: len(before)] == before or set(before) <= set(after)
    assert len(after) == len(set(after))  # nothing was done twice


@pytest.mark.long
@ALL
def test_a_second_driver_is_refused_by_the_name_of_the_first(
    folder: Path, give: Give, kind: Kind, whole: dict[str, str]
) -> None:
    held = ["out.run", *kind.folders] if len(kind.folders) > 1 else kind.folders
    for name in held:
        (folder / name).mkdir(parents=True, exist_ok=True)
        with RunFolder(folder / name).locked() as session:
            ended = give(*kind.command())
        assert ended.code == 2, ended.err
        assert f"{folder / name} is in use by {session}" in last_line(ended)
    check_mended(give, kind, folder, whole)
