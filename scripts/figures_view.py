"""Draw docs/figures/view.png: what `volpipe view` shows of an invented volume, its output and their difference.

Chromium without a screen draws it; without one, and its driver, the figure stays as it is.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "figures" / "view.png"
SIZE = (1280, 640)  # pixels
READY = "return document.body.dataset.fitted === 'yes' && viewer.isReady()"
SWITCHES = (
    "--headless=new", "--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
    "--hide-scrollbars", "--disable-dev-shm-usage",
)  # fmt: skip


def draw(path: Path) -> None:
    """Write the picture of a page with a sample, what the default recipe makes of it, and their difference."""
    import volpipe as vp
    from volpipe.synthetic.volume import SyntheticVolume, write_sample

    with tempfile.TemporaryDirectory() as folder:
        sample, out = Path(folder) / "sample.n5", Path(folder) / "restored.zarr"
        write_sample(sample, SyntheticVolume(shape=(32, 192, 192)))
        vp.run(f"{sample}/raw", out=str(out), site="threads", progress=False)
        with vp.view(str(out), f"{sample}/raw") as viewer:
            save(viewer.url, path)


def save(url: str, path: Path) -> None:
    """Write what the browser shows at `url`, when all of it is drawn, with few colours."""
    from PIL import Image
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for switch in SWITCHES:
        options.add_argument(switch)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        screen = {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        driver.get(url)
        end = time.monotonic() + 60
        while not driver.execute_script(READY) and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(2)  # the curves of the controls come after the voxels
        image = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    finally:
        driver.quit()
    image.quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    if shutil.which("chromium") and shutil.which("chromedriver"):
        draw(TARGET)
    else:
        print(f"no Chromium with its driver (make browser): {TARGET.relative_to(ROOT)} stays", file=sys.stderr)
