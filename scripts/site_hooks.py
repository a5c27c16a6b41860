"""What MkDocs does for the site beside building docs/: pages and files of the repository that pages link to.

Model cards and the changelog lie where their readers in the repository look for them. The site shows them as pages, and
offers notebooks and configurations for download. Links between all of them work in both places.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md",
    "scripts/benchmarks/RESULTS.md": "bench.md",
}  # fmt: skip
PACKAGES = {"volpipe": "volpipe", "apps": "volpipe/apps", "models": "volpipe/models", "configs": "volpipe/configs"}
NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.safetensors", "vega")
TREE = tempfile.TemporaryDirectory(prefix="volpipe-site-")
CARDS = "models/*.md"
DOWNLOADS = ("notebooks/*.ipynb", "configs/*.json", "configs/*.py", "configs/*.toml")
LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def site_places() -> dict[str, str]:
    """Return the site's path of each file outside docs/ that the site holds, by its path in the repository."""
    cards = {f"models/{path.name}": f"cards/{path.name}" for path in ROOT.glob(CARDS)}
    names = [str(path.relative_to(ROOT)) for pattern in DOWNLOADS for path in ROOT.glob(pattern)]
    return (
        {name: place for name, place in PAGES.items() if (ROOT / name).exists()}
        | cards
        | {n: f"files/{n}" for n in names}
    )


def place_of(path: str) -> str | None:
    """Return the site's path of the file at `path` of the repository; None where the site does not hold it."""
    return path.removeprefix("docs/") if path.startswith("docs/") else site_places().get(path)


def moved_links(text: str, source: str, target: str) -> str:
    """Return the Markdown `text` of the repository's file `source`, with links as the site's page `target` has them."""

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        place = place_of(path)
        return (
            link[0] if place is None else link[1] + posixpath.relpath(place, posixpath.dirname(target) or ".") + link[3]
        )

    fences = FENCE.findall(text)
    parts = [LINK.sub(moved, part) for part in FENCE.split(text)]
    return "".join(part + fence for part, fence in zip(parts, [*fences, ""], strict=True))


@event_priority(100)  # before mkdocstrings, which reads the path
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay the packages out as they install, apps, models and configs inside volpipe, where mkdocstrings looks."""
    for name, place in PACKAGES.items():
        shutil.copytree(ROOT / name, Path(TREE.name) / place, ignore=NOT_SOURCES, dirs_exist_ok=True)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [TREE.name]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return `files` with those that lie outside docs/."""
    for source, place in site_places().items():
        if place.endswith(".md"):
            text = moved_links((ROOT / source).read_text(encoding="utf-8"), source, place)
            files.append(File.generated(config, place, content=text))
        else:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the Markdown of a page of docs/ with links out of docs/ as they are on the site."""
    name = page.file.src_uri
    return markdown if page.file.generated_by else moved_links(markdown, f"docs/{name}", name)
