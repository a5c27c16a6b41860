"""JupyterLab in Chromium: a notebook runs, shows its progress, and draws the voxels that numpy gives."""

from __future__ import annotations

import io
import json
import math
import os
import secrets
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from arrays import in_greys
from browser import Browser
from conftest import TEST_PATH
from PIL import Image
from volumes import noise, write_volume

pytestmark = pytest.mark.browser

SHAPE, AT = (8, 40, 40), (3, 20, 20)
CELLS = ("import volpipe as vp\ncopy = vp.convert('in.n5', 'out.zarr')", f"vp.explore('in.n5', copy, at={AT})")
RUN = "jupyterapp.commands.execute('notebook:run-all-cells')"
STARTED = f"""return window.jupyterapp && document.querySelectorAll(".jp-CodeCell").length === {len(CELLS)}
  && document.querySelector("#jp-bottom-panel, #jp-main-statusbar").textContent.includes("Idle")"""
READY = "return document.querySelectorAll('.volpipe-explore[data-state=ready] canvas').length === 6"
WHEEL = """const canvas = document.querySelector('.volpipe-explore canvas[data-row="0"][data-plane=xy]');
const { left, top, width, height } = canvas.getBoundingClientRect();
const place = { clientX: left + width / 2, clientY: top + height / 2 };
canvas.dispatchEvent(new WheelEvent("wheel", { ...place, deltaY: -150, bubbles: true, cancelable: true }));"""
CANVAS = """const canvas = document.querySelector(`.volpipe-explore canvas[data-row="${arguments[0]}"][data-plane=xy]`);
canvas.scrollIntoView();
return [canvas.toDataURL("image/png"), canvas.width, canvas.height];"""


def write_notebook(path: Path) -> None:
    empty = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    cells = [empty | {"id": f"cell-{number}", "source": source} for number, source in enumerate(CELLS)]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    path.write_text(json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))


@contextmanager
def jupyterlab(folder: Path, home: Path) -> Iterator[str]:
    """Give the address of a JupyterLab of `folder`, its own files in `home`; none of its processes is left."""
    token = secrets.token_hex(16)
    places = {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "RUNTIME", "DATA")}
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
        "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={folder}",
        f"--IdentityProvider.token={token}", "--LabApp.news_url=None", "--LabApp.check_for_updates_class="
        "jupyterlab.NeverCheckForUpdate", f"--LabApp.workspaces_dir={home}", f"--LabApp.user_settings_dir={home}",
    ]  # fmt: skip
    environment = os.environ | places | {"PYTHONPATH": TEST_PATH, "IPYTHONDIR": str(home / "ipython")}
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        port = wait_for_port(server, home)
        yield f"http://127.0.0.1:{port}/lab/tree/look.ipynb?token={token}"
    finally:
        family = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        server.wait(timeout=30)
        _, alive = psutil.wait_procs(family, timeout=15)
        for process in alive:
            process.kill()
        assert alive == []


def wait_for_port(server: subprocess.Popen[bytes], home: Path) -> int:
    end = time.monotonic() + 60
    while True:
        assert server.poll() is None and time.monotonic() < end, (home / "log").read_text()
        for file in (home / "RUNTIME").glob("jpserver-*.json"):
            if text := file.read_text():
                return int(json.loads(text)["port"])
        time.sleep(0.1)


def shown_slice(browser: Browser, row: int, zoom: float = 1.0) -> np.ndarray:
    """Return the greys (y, x) that the plane xy of a row shows of each voxel, in its middle; at its edge of others."""
    url, width, height = browser.driver.execute_script(CANVAS, row)
    pixels = np.asarray(Image.open(io.BytesIO(b64decode(url.partition(",")[2]))).convert("RGB"))
    assert pixels.shape == (height, width, 3)
    scale = zoom * min(height, width) / (2 * 20.5)  # of a voxel: the farthest face is 20.5 from the middle
    rows, columns = (n / 2 + (np.arange(40) - 20) * scale for n in (height, width))
    greys = pixels[np.clip(rows, 0, height - 1).astype(int)][:, np.clip(columns, 0, width - 1).astype(int)]
    assert (greys == greys[..., :1]).all()
    return greys[..., 0]


@pytest.mark.long
def test_a_notebook_runs_and_shows_voxels_as_they_are(browser: Browser, tmp_path: Path) -> None:
    folder, home = tmp_path / "notebooks", tmp_path / "home"
    folder.mkdir()
    (home / "RUNTIME").mkdir(parents=True)
    data = noise(SHAPE)
    write_volume(folder / "in.n5", data)
    write_notebook(folder / "look.ipynb")
    with jupyterlab(folder, home) as url:
        browser.driver.get(url)
        browser.wait(STARTED)
        browser.driver.execute_script(f"{RUN};")
        browser.wait(READY, 90)
        text = browser.driver.find_element("tag name", "body").text
        greys = [shown_slice(browser, row) for row in (0, 1)]
        browser.driver.execute_script(WHEEL)
        browser.wait(READY)
        near = [shown_slice(browser, row, math.exp(0.5)) for row in (0, 1)]
        browser.driver.execute_script("console.error('the last');")
        messages = [entry["message"] for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"]
        browser.driver.get("about:blank")
    assert "100 % 1 of 1 box" in text
    expected = in_greys(data[AT[0]])
    for shown in greys:
        np.testing.assert_allclose(shown[:-6], expected[:-6], atol=0.51)  # a scale bar covers the rest
    for shown in near:  # both are nearer, though the wheel turned over one
        np.testing.assert_allclose(shown[12:28, 12:28], expected[12:28, 12:28], atol=0.51)
    assert len(messages) == 1 and "the last" in messages[0]
