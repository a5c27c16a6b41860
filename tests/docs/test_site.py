"""The site is built from docs/ and the code: no link of it is broken, and it needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

# What a browser loads by itself: anything but the targets of links.
LOADED = re.compile(
    r"""(?:src|srcset|action)\s*=\s*["'](https?:[^"']+)|<link[^>]+href=["'](https?:[^"']+)|url\((https?:[^)]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does: strictly, so that broken links, anchors and pages beside the nav fail."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 20
    loaded = [(page.name, match[0]) for page in pages for match in LOADED.finditer(page.read_text(encoding="utf-8"))]
    assert loaded == []


def test_every_page_of_the_site_has_a_heading_and_more_than_a_line(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name != "404.html":
            body = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL)
            assert body is not None, page
            assert "<h1" in body[0], page
            assert len(re.sub(r"<[^>]+>|\s+", "", body[0])) > 300, page
