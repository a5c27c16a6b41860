"""Works that are done side by side have a log each; a line goes to that of its work and of those that it belongs to."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from volpipe.blockwise.logs import logging_to, speaker, speaking, warned
from volpipe.errors import FullDiskError, RunError, RunStopped

log = logging.getLogger("volpipe.test")


def told(file: Path) -> list[str]:
    return [line.split(" ", 4)[-1].rpartition(" ")[2] for line in file.read_text().splitlines()]


def test_a_line_goes_to_its_work_and_to_those_that_it_belongs_to(tmp_path: Path) -> None:
    assert speaker() == ()
    with logging_to(tmp_path / "flow"), speaking((1,)), logging_to(tmp_path / "first"):
        log.info("one")
        with speaking((2,)):
            assert speaker() == (2,)
            with logging_to(tmp_path / "second"):
                log.info("two")
        with speaking((1, 5)):
            log.info("part")
    log.info("after")
    assert told(tmp_path / "flow") == ["one", "two", "part"]
    assert told(tmp_path / "first") == ["one", "part"]
    assert told(tmp_path / "second") == ["two"]


def test_the_level_of_the_logger_is_as_before_when_the_last_log_is_closed(tmp_path: Path) -> None:
    logger = logging.getLogger("volpipe")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with logging_to(tmp_path / "a"):
            assert logger.level == logging.INFO
            with logging_to(tmp_path / "b"):
                pass
            assert logger.level == logging.INFO
        assert logger.level == logging.ERROR and not logger.handlers
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize(
    ("error", "raised", "sentence", "line"),
    [
        (KeyboardInterrupt("now"), KeyboardInterrupt, "now", "interrupted; run the same command again to continue"),
        (RunError("no plan"), RunError, "no plan", "the work stopped"),
        (FullDiskError("no room"), RunStopped, "no room", "the work stopped"),
        (
            ZeroDivisionError("odd"),
            RunStopped,
            r"odd.* \(traceback: .*log\); run the same command again",
            "the work sto",
        ),
    ],
)
def test_an_end_is_logged_and_told_in_a_sentence(
    tmp_path: Path, error: BaseException, raised: type[BaseException], sentence: str, line: str
) -> None:
    with pytest.raises(raised, match=sentence), logging_to(tmp_path / "log"):
        raise error
    assert line in (tmp_path / "log").read_text()


def test_what_a_complete_output_lacks_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with warned("no picture"):
        raise RunError("it is gone")
    assert [record.getMessage() for record in caplog.records] == ["no picture: it is gone"]
