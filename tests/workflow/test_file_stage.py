"""Stages whose output is a file of JSON: found once, and anew where keys or voxels are others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inline import Inline
from volumes import noise, write_volume

from volpipe.blockwise.work import Steps
from volpipe.recipes.toml import Section
from volpipe.recipes.workflow import VOLUME, Flow, FlowStage
from volpipe.runs.options import RunOptions
from volpipe.runs.stage_work import Listener
from volpipe.stages.file_stage import FileStage
from volpipe.workflow.execute import FlowReport
from volpipe.workflow.kinds import KINDS
from volpipe.workflow.plan import plan_flow
from volpipe.workflow.status import find_status
from volpipe.workflow.work_plan import execute


class Sum(Section):
    """What a stage of kind "sum" says."""

    times: int = 1
    """What the sum of all voxels is multiplied by."""


class SumStage(FileStage):
    kind = "sum"
    about = "the sum of all voxels."
    keys = Sum
    shown = "sum"

    def find(self, listener: Listener) -> Steps[int]:
        yield from ()
        return self.plan.choice.times * int(self.given.open()[...].sum(dtype=np.int64))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Voxels of the volume in.n5, in the folder of the test, where the kind is listed."""
    monkeypatch.setitem(KINDS, SumStage.kind, SumStage)  # type: ignore[arg-type]
    write_volume(tmp_path / "in.n5", noise((6, 8, 10)))
    return noise((6, 8, 10))


def run(folder: Path, times: int = 1, **options: Any) -> FlowReport:
    """Run a flow of one stage, of the kind "sum", over in.n5."""
    flow = Flow("flow.toml", (FlowStage("total", SumStage.kind, VOLUME, Sum(times=times)),))
    return execute(
        plan_flow(flow, str(folder / "in.n5/raw"), folder / "out", folder), Inline().start, RunOptions(**options)
    )


def found(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "out" / "total.json").read_text())
    return tree


def test_what_is_found_is_in_the_file_beside_what_it_is_of(tmp_path: Path, data: np.ndarray) -> None:
    report = run(tmp_path, times=3)
    assert report.is_complete and not report.was_complete
    assert found(tmp_path) == {
        "input": f"{tmp_path / 'in.n5'}:raw",
        "times": 3,
        "found": 3 * int(data.sum(dtype=np.int64)),
    }
    (line,) = report.stages[0].report.closing_lines()
    assert line.startswith(f"wrote {tmp_path / 'out' / 'total.json'} in ")
    assert "total.json" in (tmp_path / "out" / "total.json.run" / "report.html").read_text()


def test_it_is_not_found_again_unless_keys_voxels_or_options_ask_for_it(tmp_path: Path, data: np.ndarray) -> None:
    run(tmp_path)
    file = tmp_path / "out" / "total.json"
    file.write_text(file.read_text().replace(str(int(data.sum(dtype=np.int64))), "-1"))  # seen where it is kept
    assert run(tmp_path).was_complete and found(tmp_path)["found"] == -1
    assert not run(tmp_path, times=2).was_complete and found(tmp_path)["found"] == 2 * int(data.sum(dtype=np.int64))
    file.write_text(file.read_text().replace(str(found(tmp_path)["found"]), "-1"))
    assert not run(tmp_path, times=2, fresh=True).was_complete and found(tmp_path)["found"] > 0
    other = data // 2
    write_volume(tmp_path / "in.n5", other)
    assert not run(tmp_path, times=2).was_complete and found(tmp_path)["found"] == 2 * int(other.sum(dtype=np.int64))


def test_status_knows_whether_the_file_is_there(tmp_path: Path, data: np.ndarray) -> None:
    run(tmp_path)
    (part,) = find_status(str(tmp_path / "out")).parts
    assert (part.kind, part.name, part.state) == ("sum", "total", "complete")
    (tmp_path / "out" / "total.json").unlink()
    (part,) = find_status(str(tmp_path / "out")).parts
    assert not part.is_complete
