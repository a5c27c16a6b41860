"""Every command and every Python block of README.md and docs/ runs, and prints what the page shows of it.

`scripts/pages` writes the outputs that pages show anew. How a page says what a block is: markdown_page.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
from markdown_page import RUN, Block, blocks_of, fixtures_of, name_of, pages
from runner import WRITE, Page, PageError, faults_of, rewrite, run_page
from shell import Shell
from shown import is_shown
from slurm import lacking

import volpipe

MARKS = {"slurm": pytest.mark.slurm}  # of pages with a fixture
PAGES = [
    pytest.param(
        path, id=name_of(path), marks=[mark for name, mark in MARKS.items() if name in fixtures_of(path.read_text())]
    )
    for path in pages()
]
# Pages of the long form alone: of each kind of their blocks another page runs in the short one.
LONG_PAGES = {
    "docs/batches.md", "docs/bring-your-net.md", "docs/compare.md", "docs/concepts/halo.md", "docs/fail.md",
    "docs/flows.md", "docs/notebooks.md", "docs/runs.md", "docs/slurm.md", "docs/training.md",
    "docs/tutorials/batch.md", "docs/tutorials/first-volume.md", "docs/tutorials/notebook.md",
    "docs/tutorials/segmentation.md", "docs/tutorials/super-resolution.md", "docs/tutorials/your-net.md",
}  # fmt: skip
RUN_PAGES = [page for page in PAGES if any(block.is_run for block in blocks_of(page.values[0].read_text()))]


@pytest.mark.parametrize("path", PAGES)
def test_every_block_is_run_or_says_why_not(path: Path) -> None:
    assert not faults_of(path.read_text(encoding="utf-8"))


def difference(path: Path, folder: Path, *, is_long: bool) -> str:
    """Return where a page shows something else than its blocks print, "" for nowhere; a block that fails raises."""
    if "slurm" in fixtures_of(path.read_text()) and (missing := lacking()):
        pytest.skip(f"no {', '.join(missing)} here; `make test` installs them where it may")
    page = run_page(path, folder, is_long=is_long)
    if os.environ.get(WRITE):
        rewrite(page)
        return ""
    if not page.texts:
        return ""
    block, printed = page.texts[0]
    return str(page.error(block, f"shows\n{block.text}\nbut this is printed (scripts/pages writes it):\n{printed}"))


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is not there yet, with a short path: tables break their lines by the length of paths."""
    return tmp_path_factory.mktemp("p") / "page"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [page for page in RUN_PAGES if page.id not in LONG_PAGES])
def test_every_block_of_a_page_runs(path: Path, folder: Path) -> None:
    assert difference(path, folder, is_long=False) == ""


@pytest.mark.long
@pytest.mark.usefixtures("_pools_start_anew")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", RUN_PAGES)
def test_every_block_of_a_page_runs_in_processes_of_its_own(path: Path, folder: Path) -> None:
    assert difference(path, folder, is_long=True) == ""


@pytest.mark.parametrize(("shown", "found"), [("cells", ""), ("nuclei", "page.md:1: shows\n$ echo cells\nnuclei\n")])
def test_a_page_that_shows_what_is_not_printed_is_named_with_its_line(tmp_path: Path, shown: str, found: str) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"```console\n$ echo cells\n{shown}\n```\n")
    told = difference(path, tmp_path / "page", is_long=False)
    assert (told == "") == (found == "") and told.startswith(found)


def kind_of(block: Block) -> str:
    if block.not_run:
        return f"not run: {block.not_run}"
    return ("run by -m long alone" if block.is_long else "run") if block.is_run else ""


def test_few_blocks_are_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block for page in PAGES for block in blocks_of(page.values[0].read_text())]
    kinds = Counter(kind for block in blocks if block.language in RUN and (kind := kind_of(block)))
    with capsys.disabled():
        print(f"\nblocks of README.md and docs/: {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}")
    assert sum(n for kind, n in kinds.items() if kind.startswith("not run")) < 0.2 * kinds.total()


def run_text(text: str, folder: Path) -> Page:
    path = folder / "page.md"
    path.write_text(text)
    return run_page(path, folder / "page")


def test_blocks_share_a_folder_variables_and_names(tmp_path: Path) -> None:
    text = """
```bash
mkdir below; cd below; NAME=cells
```
```toml
# made.toml: a file
key = 1
```
```bash
echo "$NAME" > name.txt
```
```python
from pathlib import Path
name = Path("below/name.txt").read_text()
```
```python
print(name, Path("made.toml").read_text(), end="")
len(name)
```
```text
cells
…
6
```
"""
    assert not run_text(text, tmp_path).texts


def test_the_command_of_a_block_is_ours_with_pipes_and_exit_codes(tmp_path: Path) -> None:
    text = """
```bash
volpipe nets | grep unet3d > nets.txt
volpipe info nothing.n5 2> error.txt || echo "code $?"
cat error.txt nets.txt
```
```text
code 2
volpipe: …nothing.n5…
unet3d …
```
"""
    assert not run_text(text, tmp_path).texts


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```bash\nfalse\n```", "page.md:1: ended with 1, not 0"),
        ("```bash\nvolpipe nothing\n```", "No such command"),
        ("```bash\ntrue | false | true\n```", "ended with 1"),
        ("<!-- fixture: none_such -->\n```bash\ntrue\n```", "no fixture none_such"),
        ("<!-- ends with: 2 -->\n```bash\ntrue\n```", "ended with 0, not 2"),
    ],
)
def test_a_block_that_fails_is_named(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PageError, match=reason):
        run_text(text, tmp_path)


def test_a_python_block_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_text("```python\n1 / 0\n```", tmp_path)
    assert caught.traceback[-1].path == Path("page.md:1") or "page.md:1" in str(caught.traceback[-1])


def test_a_text_that_is_not_printed_is_noticed_and_rewritten(tmp_path: Path) -> None:
    text = (
        "1. A list\n\n   ```bash\n   echo 12 blocks; echo 3.5 s\n   ```\n   ```text\n   13 blocks\n   ```\n\nAfter.\n"
    )
    page = run_text(text, tmp_path)
    assert [(block.line, printed) for block, printed in page.texts] == [(6, "12 blocks\n3.5 s")]
    rewrite(page)
    assert page.path.read_text() == text.replace("   13 blocks\n", "   12 blocks\n   3.5 s\n")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```\nvolpipe run cells.n5\n```", "no language"),
        ("```sh\nvolpipe run cells.n5\n```", "a block of sh"),
        ("<!-- not run: too slow -->\n```bash\nvolpipe run cells.n5\n```", "'too slow' is no reason"),
        ("```text\nwrote cells.zarr\n```", "no block above it prints"),
        ("<!-- not run: needs a GPU -->\n```bash\ntrue\n```\n```text\nwrote\n```", "no block above it prints"),
        ("```toml\nkey = \n```", "cannot be read as toml"),
        ("```python\nprint(\n```", "cannot be read as python"),
    ],
)
def test_a_block_that_says_too_little_is_a_fault(text: str, fault: str) -> None:
    assert [fault in sentence for sentence in faults_of(text)] == [True]


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("wrote out.zarr in 3.4 s", "wrote  out.zarr in 1 min 12 s", True),
        ("wrote out.zarr", "wrote other.zarr", False),
        ("64 blocks", "65 blocks", False),
        ("seams z 0.95", "seams z 0.96", True),
        ("seams z 0.95", "seams z 1.30", False),
        ("stage\n…\nwrote out", "stage\na\nb\nwrote out", True),
        ("…\nwrote out", "a\nb", False),
        ("one\ntwo", "one", False),
        ("hash … of 12", "hash 1f2e of 12", True),
        ("hash … of 12", "hash 1f2e of 13", False),
        ("since 2026-11-23 06:51:45 by process 4711 on login1", "since 2026-11-24 01:00:00 by process 3 on n2", True),
    ],
)
def test_outputs_are_compared_but_for_what_varies(shown: str, printed: str, expected: bool) -> None:
    assert is_shown(shown, printed) == expected


def test_a_command_in_this_process_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "t").mkdir()
    before, environment = Path.cwd(), dict(os.environ)
    code, printed = Shell(tmp_path / "page", tmp_path / "t").run("export VOLPIPE_WORKERS=1; volpipe --version")
    assert code == 0 and printed.startswith(volpipe.__version__)
    assert (Path.cwd(), dict(os.environ)) == (before, environment)


def test_a_block_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "t").mkdir()
    started = time.monotonic()
    with pytest.raises(AssertionError, match="still runs after 0 s"):
        Shell(tmp_path / "page", tmp_path / "t").run("sleep 60", seconds=0.2)
    assert time.monotonic() - started < 30
