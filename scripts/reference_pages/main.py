"""All pages of the reference, written or compared."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from reference_pages import api, commands, formats, machines, recipes, runtime

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "docs" / "reference"


def pages() -> dict[str, str]:
    """Return the text of each page, by its file's name."""
    return {
        "commands.md": commands.page(),
        "recipes.md": recipes.page(),
        "api.md": api.page(),
        "exit-codes.md": runtime.exit_codes_page(),
        "run-folder.md": runtime.run_folder_page(),
        "machines.md": machines.page(),
        "../formats.md": formats.page(ROOT / "docs" / "formats.md"),
        "environment.md": runtime.environment_page(ROOT),
    }


def differences(path: Path, text: str) -> list[str]:
    """Return the lines of a diff from the file at `path`, which may be missing, to `text`."""
    old = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return list(
        difflib.unified_diff(
            old, text.splitlines(), f"{path.resolve().relative_to(ROOT)}", "the code", lineterm="", n=0
        )
    )


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit("scripts/reference [--check]")
    changed = 0
    for name, text in pages().items():
        lines = differences(FOLDER / name, text)
        changed += bool(lines)
        if lines and check:
            print("\n".join(lines))
        elif lines:
            (FOLDER / name).write_text(text, encoding="utf-8")
            print(f"wrote {(FOLDER / name).resolve().relative_to(ROOT)}")
    if check and changed:
        sys.exit(f"{changed} pages of the reference are not those of the code; run scripts/reference and commit them")
