"""Chromium without a screen, for tests: what it draws as numbers, and where Neuroglancer draws which voxel."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless=new", "--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
    "--hide-scrollbars", "--force-device-scale-factor=1", "--disable-dev-shm-usage",
)  # fmt: skip
WINDOW = (1280, 800)
PANELS = """return [...document.querySelectorAll(".neuroglancer-rendered-data-panel")].map((panel) => {
  const box = panel.getBoundingClientRect();
  return [box.top + panel.clientTop, box.left + panel.clientLeft, panel.clientHeight, panel.clientWidth];
});"""


@dataclass(frozen=True)
class Browser:
    """A browser of 1280 × 800.

    Attributes:
        requests: addresses that the file which was opened last asked for, data in the address itself left out.
    """

    driver: Any  # selenium's, which is imported where there is one
    requests: list[str] = field(default_factory=list)

    def open(self, url: str, *, seconds: float = 60) -> None:
        """Show `url`, without bars and names of axes upon it, when all of it is drawn."""
        self.driver.get("about:blank")
        self.driver.get(url)
        self.wait("return window.viewer !== undefined && viewer.layerManager.managedLayers.length > 0", seconds)
        self.wait("return document.body.dataset.fitted === 'yes'", seconds)
        self.driver.execute_script("viewer.showAxisLines.value = false; viewer.showScaleBar.value = false;")
        self.driver.execute_script("""for (const name of document.querySelectorAll(
            ".neuroglancer-display-dimensions-widget")) name.style.visibility = "hidden";""")
        self.settle(seconds)

    def open_file(self, file: Path, *, seconds: float = 30) -> list[str]:
        """Show a report whose charts are drawn, and return what it asked for; fail on an error in the console."""
        self.driver.get("about:blank")
        self._take_logs()
        self.driver.get(file.as_uri())
        self.wait("return document.body.dataset.drawn === 'yes' || !document.scripts.length", seconds)
        complaints = self._take_logs()
        assert complaints == [], complaints
        return self.requests

    def _take_logs(self) -> list[str]:
        """Return the errors of the console since the last call, and keep what was asked for since then."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        self.requests[:] = [url for url in asked if not url.startswith("data:")]
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def drawn_pixels(self) -> int:
        """Return how many pixels the emptiest of the charts has."""
        return int(
            self.driver.execute_script("""return Math.min(...[...document.querySelectorAll(".drawing")].map((place) => {
              const canvas = place.querySelector("canvas");
              const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
              return data.filter((value, i) => i % 4 === 3 && value > 0).length;
            }));""")
        )

    def settle(self, seconds: float = 60) -> None:
        """Wait until everything is loaded and drawn."""
        self.wait("return viewer.isReady()", seconds)
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]));")

    def wait(self, script: str, seconds: float = 60) -> None:
        """Wait until `script` returns something true."""
        end = time.monotonic() + seconds
        while not self.driver.execute_script(script):
            assert time.monotonic() < end, f"still not so after {seconds} s: {script}"
            time.sleep(0.05)

    def picture(self) -> np.ndarray:
        """Return what is shown, (y, x, 3), uint8."""
        return np.array(Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB"))

    def state(self) -> Any:  # Any: Neuroglancer's JSON
        return self.driver.execute_script("return JSON.parse(JSON.stringify(viewer.state.toJSON()));")

    def slice(
        self, panel: int, shape: tuple[int, int], size: tuple[float, float], origin: tuple[float, float]
    ) -> np.ndarray:
        """Return the colours of the voxels of a slice, (y, x, 3), each at its centre.

        Args:
            panel: number of the panel of the plane xy.
            shape: voxels (y, x) of the slice, all of which are in the panel.
            size, origin: of a voxel, and the centre of the first, in nm (y, x).
        """
        state = self.state()
        unit = {axis: n * (1e9 if name == "m" else 1) for axis, (n, name) in state["dimensions"].items()}
        x, y, _ = (place * unit[axis] for place, axis in zip(state["position"], "xyz", strict=True))
        pixel_nm = state["crossSectionScale"] * min(unit.values())
        top, left, height, width = self.driver.execute_script(PANELS)[panel]
        rows = top + height / 2 + (origin[0] + size[0] * np.arange(shape[0]) - y) / pixel_nm
        columns = left + width / 2 + (origin[1] + size[1] * np.arange(shape[1]) - x) / pixel_nm
        assert top < rows[0] and rows[-1] < top + height and left < columns[0] and columns[-1] < left + width
        return self.picture()[np.floor(rows).astype(int)][:, np.floor(columns).astype(int)]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Give a browser; skip the test where none is installed."""
    binary = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with its driver: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = binary
    for switch in SWITCHES:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        command = "Emulation.setDeviceMetricsOverride"
        size = {"width": WINDOW[0], "height": WINDOW[1], "deviceScaleFactor": 1, "mobile": False}
        started.execute_cdp_cmd(command, size)
        yield Browser(started)
    finally:
        started.quit()
