"""A page in Chromium from a file, without a network: every text is text, every chart is drawn, nothing complains."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from browser import Browser
from conftest import ROOT
from PIL import Image

from volpipe.errors import VolumeError
from volpipe.reporting.page import (
    Chart,
    Draft,
    FactTable,
    Item,
    Page,
    PageSection,
    Picture,
    ReportLink,
    Sentence,
    Sheet,
    sections_of,
)
from volpipe.reporting.render import MOST_BYTES, render, write_page

EVIL = "<script>alert(1)</script>"
BREAKOUT = "</script><script>alert(2)</script>"


def png(shape: tuple[int, int], value: int = 200) -> bytes:
    """Return a picture (y, x) of one colour as a file."""
    file = io.BytesIO()
    Image.fromarray(np.full((*shape, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def lines(title: str = "losses", num: int = 10) -> Chart:
    data = {
        "x": np.arange(num),
        "y": np.linspace(0, 1, num),
        "series": [EVIL if i % 2 else BREAKOUT for i in range(num)],
    }
    return Chart(title, "", "lines", data)


def page_of(*items: Item, title: str = "out.zarr") -> Page:
    return Page(title, "complete", [PageSection("One", items)])


@pytest.mark.browser
def test_a_page_opens_from_its_file_without_a_network(browser: Browser, tmp_path: Path) -> None:
    rows = [["a", 1, 2.5, None], [ReportLink(EVIL, "b c/#1 <x>.html", png((4, 4))), 2, float("nan"), BREAKOUT]]
    items = [
        FactTable(EVIL, {"name": EVIL, "values": ["one", BREAKOUT]}), Sheet("table", ["a", "b", EVIL, "d"], rows, EVIL),
        Picture(EVIL, BREAKOUT, png((30, 40))), lines(BREAKOUT), Sentence(EVIL, "warning"),
    ]  # fmt: skip
    file = tmp_path / "a report.html"
    assert write_page(page_of(*items, title=EVIL), file) == file.stat().st_size < MOST_BYTES
    requests = browser.open_file(file)
    assert requests == [file.as_uri()]
    text = browser.driver.find_element("tag name", "body").text
    assert text.count(EVIL) >= 6 and text.count(BREAKOUT) >= 3
    assert browser.driver.title == f"{EVIL}: complete"
    assert browser.driver.find_element("link text", EVIL).get_attribute("href").endswith("/b%20c/%231%20%3Cx%3E.html")
    assert browser.driver.execute_script("return document.querySelector('figure.picture img').naturalWidth") == 40
    assert browser.drawn_pixels() > 100
    for number, scheme in ((0, "blob:"), (1, "data:image/png")):  # save as SVG, as PNG
        link = f"document.querySelectorAll('.vega-actions a')[{number}]"
        browser.driver.execute_script(f"{link}.dispatchEvent(new MouseEvent('mousedown'))")
        browser.wait(f"return {link}.href.startsWith('{scheme}')", 5)


@pytest.mark.browser
def test_the_browser_is_seen_to_ask_and_to_complain(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    file.write_text("<body data-drawn=yes><img src='http://127.0.0.1:9/a.png'><script>nothing.at.all</script>")
    with pytest.raises(AssertionError, match="nothing is not defined"):
        browser.open_file(file)
    assert "http://127.0.0.1:9/a.png" in browser.requests


def test_a_page_stays_small_whatever_it_is_given() -> None:
    rng = np.random.default_rng(0)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (300, 300, 3), np.uint8)).save(file, "PNG")
    items: list[Item] = [Picture(f"picture {i}", "", file.getvalue()) for i in range(20)]
    items += [lines(f"chart {i}", 3000) for i in range(20)]
    items += [
        Sheet("many", ["name", "link"], [[f"é{i}" * 50, ReportLink("a", "b", file.getvalue())] for i in range(9000)])
    ]
    items += [FactTable("long", {"a" * 10_000: ["b" * 10_000] * 500})]
    html = render(page_of(*items))
    assert len(html.encode()) < MOST_BYTES
    assert "picture 19: left out, as the page would be too large." in html
    assert "chart 19: left out" in html
    shown = len(re.findall("<tr><td>é", html))
    assert 0 < shown < 9000 and f"{9000 - shown:,} more lines are not shown" in html


def test_a_page_without_charts_has_no_script() -> None:
    assert "<script" not in render(page_of(Sentence("nothing ran")))


def test_columns_of_numpy_and_what_is_no_number_become_json() -> None:
    html = render(page_of(Chart("a", "", "lines", {"x": np.float32([1, np.nan]), "y": [float("inf"), None]})))
    assert '"columns": {"x": [1.0, null], "y": [null, null]}' in html


def test_changes_of_a_chart_are_merged_into_its_specification() -> None:
    chart = Chart("a", "", "lines", {"x": [1], "y": [2]}, changes={"encoding": {"x": {"title": "step"}}, "height": 99})
    html = render(page_of(chart))
    assert '"x": {"field": "x", "scale"' in html and '"title": "step"' in html and '"height": 99' in html


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.html"
    file.write_text("old")

    def fail(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space"):
        write_page(page_of(Sentence("new")), file)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert file.read_text() == "old"


def test_a_picture_that_cannot_be_made_leaves_a_sentence_and_the_others() -> None:
    def fail() -> list[Item]:
        raise VolumeError("the volume is gone")

    remark = Sentence("there it is")
    drafts = [Draft("slices", fail), Draft("none", list, "Empty"), Draft("histogram", lambda: [remark])]
    sentence = Sentence("slices: it cannot be made (the volume is gone).", "warning")
    assert sections_of(drafts) == [PageSection("Pictures", [sentence, remark])]


def test_the_charts_code_is_that_of_its_release_and_ends_no_element() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "vendor_vega", "--check"], check=True)
    files = list((ROOT / "volpipe" / "reporting" / "vega").iterdir())
    assert len(files) == 6  # each with its licence
    for file in files:
        text = file.read_text(encoding="utf-8").lower()
        assert "</script" not in text and "<!--" not in text
        assert file.suffix == ".js" or "*/" not in text
