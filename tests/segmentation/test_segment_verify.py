"""What `volpipe status` and `volpipe verify` say of labels: how far they are, what failed, what is not as written."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import make
from command import THREADS, Ended, Give, giver, named_by_verify, set_each
from volumes import noise

from volpipe.errors import IncompleteError
from volpipe.segmentation import tasks
from volpipe.segmentation.method import Fragments
from volpipe.volumes.completeness import mark_incomplete
from volpipe.volumes.volume import open_volume
from volpipe.workflow.status import find_status

STAGES = ("pieces", "edges", "solve", "number", "name", "graph", "paint")
GRAPH = STAGES[2:6]
COMMAND = ("segment", "a.zarr", "-o", "l.zarr", *THREADS, *set_each("output.block=[8,8,8]", "output.chunk=[4,4,4]"))
BLOCKS = 2 * 2 * 2


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """The command; affinities of noise lie at a.zarr, each nearer to its end of 0 and 255, as nets give them."""
    data = noise((9, 13, 16, 11))
    make(tmp_path / "a.zarr", np.where(data < 128, data // 5, 255 - (255 - data) // 5), chunks=(9, 4, 4, 4))
    return giver(tmp_path, monkeypatch, capsys)


def done(ended: Ended) -> dict[str, str]:
    """Return what a status says is done, of how many, by stage."""
    return dict(re.findall(rf"^({'|'.join(STAGES)}) +(\d+ / \d+) ", ended.out, re.MULTILINE))


def test_a_status_tells_what_is_done_what_failed_and_when_labels_are_whole(tmp_path: Path, give: Give) -> None:
    chunk = tmp_path / "a.zarr" / "c" / "0" / "3" / "3" / "2"  # which two blocks read
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[: len(whole) // 2])
    ended = give(*COMMAND)
    assert ended.code == 1
    assert "3 parts are missing; run the same command again to compute them" in " ".join(ended.err.split())
    stopped = give("status", "l.zarr")
    assert stopped.code == 1
    assert done(stopped) == {"pieces": "6 / 8", "edges": "0 / 8", **dict.fromkeys(GRAPH, "0 / 1"), "paint": "0 / 8"}
    for text in (ended.err, stopped.out):
        missing = re.findall(rf"^({'|'.join(STAGES)}) +(\d) +(\d+:\S+) +(.*?) *$", text, re.MULTILINE)
        assert [entry[:3] for entry in missing] == [
            ("pieces", "6", "8:13,8:16,0:8"), ("pieces", "7", "8:13,8:16,8:11"), ("graph", "0", "0:13,0:16,0:11"),
        ]  # fmt: skip
        assert all(reason.startswith(f"{tmp_path}/a.zarr, voxels 0:3,5:13,5:16,") for *_, reason in missing[:2])
        assert missing[2][3] == "needs a part that failed"
    assert "l.zarr: not complete, 3 parts missing; nobody works on it. To continue: " in stopped.out
    assert (
        "&& volpipe segment a.zarr -o l.zarr" in stopped.out
        or "continue: volpipe segment a.zarr -o l.zarr" in stopped.out
    )

    strict = give(*COMMAND, "--strict")
    assert strict.code == 1
    (line,) = [line for line in strict.err.splitlines() if line.startswith("volpipe: ")]
    assert re.match(
        rf"volpipe: finding fragments \(pieces [67]\) failed, so .* stops: {tmp_path}/a\.zarr, voxels ", line
    )
    stopped = give("status", "l.zarr")
    assert (stopped.code, done(stopped)["pieces"]) == (1, "6 / 8")
    assert "l.zarr: stopped by an error, which its log has; nobody works on it. To continue: " in stopped.out
    refused = give("verify", "l.zarr")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "has not written anything yet" in refused.err

    chunk.write_bytes(whole)
    assert give(*COMMAND).code == 0
    ended = give("status", "l.zarr")
    assert (ended.code, "missing" in ended.out) == (0, False)
    assert done(ended) == {"pieces": "8 / 8", "edges": "8 / 8", **dict.fromkeys(GRAPH, "1 / 1"), "paint": "8 / 8"}
    highest = open_volume(tmp_path / "l.zarr").open()[...].max()
    assert f"l.zarr: complete, {highest:,} objects" in " ".join(ended.out.split())
    assert give("status", "l.zarr.run").out == ended.out

    shutil.rmtree(tmp_path / "l.zarr")
    gone = give("status", "l.zarr")
    assert gone.code == 1
    assert "its output is gone" in " ".join(gone.out.split())


def test_a_graph_without_room_is_among_what_failed(tmp_path: Path, give: Give) -> None:
    small = give(*COMMAND, "--set", "output.graph_gib=1e-5")
    assert small.code != 0
    found = find_status(str(tmp_path / "l.zarr"))
    assert not found.is_complete
    missing, kept_back = found.missing
    assert (missing.stage, missing.box.shape) == ("solve", (13, 16, 11))
    assert kept_back.stage == "graph"
    assert "output.graph_gib gives it 1e-05" in missing.reason
    assert give(*COMMAND, "--fresh").code == 0
    again = find_status(str(tmp_path / "l.zarr"))
    assert again.is_complete and again.missing == []


def test_labels_that_are_not_as_they_were_written_are_named(tmp_path: Path, give: Give) -> None:
    assert give(*COMMAND).code == 0
    out, table = tmp_path / "l.zarr", tmp_path / "l.zarr.run" / "objects.csv"
    files = sorted(path for path in out.rglob("*") if path.is_file())
    whole = give("verify", "l.zarr")
    assert (whole.code, whole.out) == (0, f"{len(files) + 1} files read, 0 not as they were written\n")

    dice = random.Random(2)
    for file in (*files, table):
        before = file.read_bytes()
        data = bytearray(before)
        if file.suffix == ".json":
            data += b" "
        else:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data)
        ended = give("verify", "l.zarr")
        named, counted = ended.out.splitlines()
        assert ended.code == 1 and counted.endswith("1 not as they were written")
        places = [int(n) for n in file.relative_to(out).parts[2:]] if file.parts[-4] == "c" else []
        box = ",".join(f"{8 * i}:{min(8 * i + 8, n)}" for i, n in zip(places, (13, 16, 11), strict=False))
        assert named == f"{file} differs" + (f" (s0 {box})" if places else "")
        file.write_bytes(before)

    (out / "s0" / "c" / "0" / "1" / "1").unlink()
    (out / "notes.txt").write_text("mine")
    table.unlink()
    assert named_by_verify(give, "l.zarr") == {
        f"{out}/s0/c/0/1/1 is missing (s0 0:8,8:16,8:11)",
        f"{out}/notes.txt is extra",
        f"{table} is missing",
    }


def test_what_was_changed_after_its_end_is_not_taken_for_written_by_the_same_command(
    tmp_path: Path, give: Give
) -> None:
    assert give(*COMMAND).code == 0
    file = tmp_path / "l.zarr" / "zarr.json"
    file.write_bytes(file.read_bytes() + b" ")
    assert "is complete already" in give(*COMMAND).out
    assert give("verify", "l.zarr").out.splitlines()[0] == f"{file} differs"


def test_a_driver_that_was_killed_while_it_closed_its_output_is_made_up_for(tmp_path: Path, give: Give) -> None:
    assert give(*COMMAND).code == 0
    run, said = tmp_path / "l.zarr.run", tmp_path / "l.zarr" / "run" / "zarr.json"
    known = {path.name for path in run.iterdir()}
    lines, told = (run / "sessions.jsonl").read_text().splitlines(keepends=True), said.read_bytes()
    assert len(lines) == 2
    (run / "sessions.jsonl").write_text(lines[0])
    said.unlink()
    (run / "edges").mkdir()
    mark_incomplete(tmp_path / "l.zarr", "zarr3", "volpipe segment")
    status = give("status", "l.zarr")
    assert status.code == 1
    assert re.search(r"incomplete; all is computed, and `volpipe segment .*` again closes the output", status.out)
    with pytest.raises(IncompleteError, match=r"`volpipe segment` completes it"):
        open_volume(tmp_path / "l.zarr").open()[...]
    assert "is complete already" in give(*COMMAND).out
    assert give("status", "l.zarr").code == 0
    assert open_volume(tmp_path / "l.zarr").open()[...].any()
    assert said.read_bytes() == told
    assert {path.name for path in run.iterdir()} == known
    assert give("verify", "l.zarr").code == 0


def test_a_task_whose_driver_is_replaced_while_it_computes_writes_nothing(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, run = tasks.find_fragments, tmp_path / "l.zarr.run"

    def replaced(*arguments: Any) -> Fragments:
        (run / "lock").write_text("another\n")
        return find(*arguments)

    monkeypatch.setattr(tasks, "find_fragments", replaced)
    stopped = give(*COMMAND)
    assert stopped.code != 0 and "no longer held" in stopped.err
    assert list((run / "pieces").iterdir()) == []
    assert not (run / "ids.zarr" / "c").exists()


def test_a_journal_that_cannot_be_read_is_named_and_fresh_starts_over(tmp_path: Path, give: Give) -> None:
    assert give(*COMMAND).code == 0
    journal, labels = tmp_path / "l.zarr.run" / "journal.jsonl", open_volume(tmp_path / "l.zarr").open()[...]
    lines = journal.read_text().splitlines(keepends=True)
    lines[1] = '{"stage":"pieces","done":[1],"result":[3,4]}\n'  # as once it was
    journal.write_text("".join(lines))
    for ended in (give(*COMMAND), give("status", "l.zarr"), give("verify", "l.zarr")):
        assert (ended.code, ended.err.count("\n")) == (2, 1)
        assert ended.err.startswith("volpipe: line 2 of ")
        assert (
            "l.zarr.run/journal.jsonl is damaged, or another version wrote it; restore the file to continue"
            in ended.err
        )
    again = give(*COMMAND, "--fresh")
    assert again.code == 0, again.err
    np.testing.assert_array_equal(open_volume(tmp_path / "l.zarr").open()[...], labels)
