"""A real Prometheus, Debian's, scrapes runs under way and answers queries; its promtool checks the text."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import wait_until
from conftest import ROOT
from inline import Inline
from scrapes import free_port
from test_notify import SETTINGS
from volumes import write_volume

import volpipe as vp
from volpipe.blockwise.phase import Progress

CONFIG = """
global: {{ scrape_interval: 200ms, evaluation_interval: 1h }}
scrape_configs:
  - job_name: volpipe
    static_configs: [ {{ targets: ["127.0.0.1:{port}"] }} ]
"""


def installed(name: str) -> str:
    """Return where a command is; skip where Debian's package is not installed, which `make test` does where it may."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}: apt-get install prometheus")
    return path


@dataclass
class Prometheus:
    port: int

    def get(self, path: str, **parameters: str) -> Any:  # Any: JSON
        url = f"http://127.0.0.1:{self.port}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.loads(answer.read())

    def query(self, expression: str) -> dict[str, float]:
        """Return the values of an expression now, by the labels that the series have, as JSON."""
        answer = self.get("/api/v1/query", query=expression)
        assert answer["status"] == "success"
        return {
            json.dumps(each["metric"], sort_keys=True): float(each["value"][1]) for each in answer["data"]["result"]
        }

    def total(self, expression: str) -> float:
        return sum(self.query(expression).values())

    @property
    def is_ready(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=10).close()
        except (urllib.error.URLError, ConnectionError):
            return False
        return True


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[Prometheus]:
    """Give a Prometheus on loopback that scrapes `port`."""
    binary = installed("prometheus")
    (folder / "prometheus.yml").write_text(CONFIG.format(port=port))
    server = Prometheus(free_port())
    options = (
        f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address=127.0.0.1:{server.port}",
    )  # fmt: skip
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([binary, *options], cwd=folder, stdout=log, stderr=log)
    try:
        wait_until(lambda: server.is_ready, 60)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def board_queries() -> list[str]:
    """Return what the dashboard asks, with its variables filled in."""
    board = json.loads((ROOT / "configs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return [query.replace("$output", ".*").replace("$__rate_interval", "5s") for query in queries]


def test_prometheus_follows_a_run_and_answers_what_the_dashboard_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_volume(tmp_path / "in.n5", np.full((8, 16, 32), 9, np.uint8), 8)
    port, done, asked = free_port(), list[int](), list[int]()

    with prometheus(tmp_path, port) as server:

        def ask(progress: Progress) -> None:
            """Ask about the run, which waits for the answer; observers were told what was done at the call before."""
            done.append(progress.stages[0].num_done)
            before = done[-2] if len(done) > 1 else 0
            if not 0 < before < 8 or before in asked or len(asked) == 2:
                return
            asked.append(before)
            wait_until(lambda: server.total('volpipe_units{state="done", stage="infer"}') == before, 30)
            assert server.query('up{job="volpipe"}') and server.total('volpipe_state{state="running"}') == 1
            assert server.total('volpipe_units{stage="infer"}') == 8
            assert f"{tmp_path}/o.zarr" in next(iter(server.query("volpipe_info")))

        settings = ["net.name=identity", *SETTINGS]
        vp.run("in.n5", out="o.zarr", settings=settings, site=Inline(), metrics=port, on_progress=ask)
        assert len(asked) == 2
        for query in board_queries():
            server.query(query)
        worked = 'max_over_time(volpipe_units{state="done", stage="infer"}[1m])'
        assert asked[1] <= server.total(worked) <= 8
        wait_until(lambda: not server.total("up"), 30)  # by which Prometheus sees the end, or a driver that was killed


def test_promtool_finds_nothing_to_say_about_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    promtool = installed("promtool")
    monkeypatch.chdir(tmp_path)
    write_volume(tmp_path / "in.n5", np.full((8, 8, 16), 1, np.uint8), 8)
    vp.run("in.n5", out="o.zarr", settings=["net.name=identity", *SETTINGS], site=Inline(), metrics="m.prom")
    with (tmp_path / "m.prom").open("rb") as text:
        ended = subprocess.run([promtool, "check", "metrics"], stdin=text, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
    assert b"volpipe_units" in (tmp_path / "m.prom").read_bytes()
