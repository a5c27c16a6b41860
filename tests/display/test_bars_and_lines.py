"""Bars and plain lines of progress, letter by letter."""

from __future__ import annotations

import time

import pytest
from rich.progress import Progress as Bar

from volpipe.blockwise.phase import Progress
from volpipe.blockwise.stage import Stage
from volpipe.display.console import Bars, LastingStream
from volpipe.display.progress import bar_counts, progress_line


def stage(name: str, done: int, units: int = 12, failed: int = 0) -> Stage:
    made = Stage(name, units)
    for unit in range(done):
        made.mark(unit)
    made.failed |= set(range(done, done + failed))
    return made


def texts(shown: Bars) -> list[tuple[object, ...]]:
    return [
        (task.description, task.completed, task.total, *(task.fields[name] for name in ("count", "speed", "left")))
        for task in shown.progress.tasks
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("seconds", "done", "speed"),
    [
        (10.0, 50, "5.0 boxes/s"), (10.0, 11, "1.1 boxes/s"), (10.0, 9, "54.0 boxes/min"), (100.0, 1, "36.0 boxes/h"),
        (600.0, 11, "1.1 boxes/min"), (10.0, 0, ""),
    ],
)  # fmt: skip
def test_a_bar_has_its_speed_in_the_unit_of_which_there_is_one(
    clock: list[float], seconds: float, done: int, speed: str
) -> None:
    shown = Bars(Bar(disable=True))
    shown.show_with("convert", 3, 30_000, "box", seconds_left=None)
    clock[0] += seconds
    shown.show_with("convert", 3 + done, 30_000, "box", seconds_left=None, words="2 lost")
    assert texts(shown) == [("convert", 3 + done, 30_000, f"{3 + done:,} of 30,000 boxes, 2 lost", speed, "")]


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        (None, ""), (0.0, "1 s left"), (59.4, "59 s left"), (60.0, "1 min left"), (7140.0, "119 min left"),
        (7200.0, "2 h left"), (3.6e7, "10,000 h left"),
    ],
)  # fmt: skip
def test_a_time_left_is_no_more_precise_than_it_is_known(clock: list[float], seconds: float | None, left: str) -> None:
    shown = Bars(Bar(disable=True))
    shown.show_with("infer", 1.5, 2, "window", seconds_left=seconds)
    assert texts(shown) == [("infer", 1.5, 2, "1 of 2 windows", "", left)]
    shown.show_with("infer", 2, 2, "window", seconds_left=seconds)
    assert texts(shown) == [("infer", 2, 2, "2 of 2 windows", "", "")]
    shown.show_with("train", 0, 1, "step", seconds_left=None)
    assert texts(shown)[1] == ("train", 0, 1, "0 of 1 step", "", "")


def test_a_bar_that_begins_in_the_midst_counts_its_speed_from_there(clock: list[float]) -> None:
    shown = Bars(Bar(disable=True))
    shown.show("convert", 10, 110, "box")
    clock[0] += 100.0
    shown.show("convert", 60, 110, "box")
    (row,) = texts(shown)
    assert row[3:5] == ("60 of 110 boxes", "30.0 boxes/min")


def test_bars_count_windows_of_the_net_and_blocks_of_others() -> None:
    progress = Progress(
        [stage("measure", 12), stage("infer", 3), stage("reassemble", 1), stage("train", 5), stage("empty", 0, 0)], 0.0,
        num_windows=240, parts={"infer": 0.5, "reassemble": 0.25},
    )  # fmt: skip
    assert list(bar_counts(progress)) == [
        ("measure", 12.0, 12.0, "block"), ("infer", 70.0, 240.0, "window"), ("reassemble", 1.25, 12.0, "shard"),
        ("train", 5.0, 12.0, "step"), ("empty", 0.0, 0.0, "shard"),
    ]  # fmt: skip
    progress.num_windows = 0
    assert list(bar_counts(progress))[1] == ("infer", 3.5, 12.0, "block")


def test_a_plain_line_names_stages_that_were_begun_and_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 75.0)
    progress = Progress([stage("measure", 12), stage("infer", 2, failed=1), stage("pyramid 1", 0)], 10.0)
    assert progress_line(progress, 0.0) == "1 min 05 s: measure 12/12, infer 2/12 (1 failed); 0 tasks in flight"
    progress.running["pyramid 1"], progress.seconds_left = 3, 90.0
    assert progress_line(progress, 0.0) == (
        "1 min 05 s: measure 12/12, infer 2/12 (1 failed), pyramid 1 0/12; 3 tasks in flight, 1 min 30 s left"
    )
    training = Progress([stage("train", 4)], 10.0, words="loss 0.25")
    assert progress_line(training, 0.0) == "1 min 05 s: train 4/12; loss 0.25"
    training.words = ""
    assert progress_line(training, 0.0) == "1 min 05 s: train 4/12"


class Ascii:
    """A stream that takes ASCII alone, then nothing."""

    encoding = "ascii"

    def __init__(self) -> None:
        self.text, self.error = "", None

    def write(self, text: str) -> None:
        if self.error is not None:
            raise self.error
        text.encode("ascii")
        self.text += text

    def flush(self) -> None:
        pass


def test_letters_that_a_stream_lacks_are_written_as_others() -> None:
    under = Ascii()
    stream = LastingStream(under)  # type: ignore[arg-type]
    assert stream.write("8 × 4 ≤ 3 µm ✓ ü\n") == 17
    assert under.text == "8 x 4 <= 3 um ok \\xfc\n"
    assert not stream.is_unread and stream.fault == ""


def test_what_cannot_be_written_is_noted_with_its_reason() -> None:
    under = Ascii()
    stream = LastingStream(under)  # type: ignore[arg-type]
    under.error = OSError(28, "No space left on device")  # type: ignore[assignment]
    stream.write("a")
    assert (stream.fault, stream.is_unread) == ("No space left on device", False)
    closed = LastingStream(None)
    closed.flush()
    assert closed.fault == ""
    closed.write("a")
    assert closed.fault == "it is closed"
    closed.close()
