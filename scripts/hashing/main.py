"""Hash what volpipe writes, to show that a change of its code changed no data.

    scripts/hashes > before.txt              # a line for each output: name, SHA-256; some minutes
    scripts/hashes > after.txt               # with the changed code
    diff before.txt after.txt

    scripts/hashes --begin FOLDER            # runs, a labelling, trainings and a copy, each killed part way
    scripts/hashes --continue FOLDER         # with the changed code: they go on, and end as if nobody had killed them

Both speak to the command line alone, of the code that lies beside this script. Outputs must be made on one machine,
with one environment: packages and processors sum in orders of their own.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from hashing.commands import give, prepare
from hashing.contents import lines_of
from hashing.interruptions import begin, go_on
from hashing.records import record_lines
from hashing.steps import INPUTS, NETS, TRAININGS, copies, objects


def print_hashes(folder: Path) -> None:
    """Make every output in `folder`, and print what is hashed of each."""
    prepare(folder)
    for step in (*INPUTS, *NETS, *objects(), *TRAININGS, *copies()):
        give(folder, step)
        for line in lines_of(folder, step):
            print(line, flush=True)
    for line in record_lines(folder):
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="an empty one for the outputs, which stay; else they are deleted")
    parser.add_argument("--begin", type=Path, metavar="FOLDER", help="begin, and kill, in a new FOLDER")
    parser.add_argument("--continue", type=Path, metavar="FOLDER", dest="go_on", help="go on with what was begun there")
    choice = parser.parse_args()
    for folder in (choice.folder, choice.begin):
        if folder is not None and folder.exists() and any(folder.iterdir()):
            parser.error(f"{folder} is not empty; name another folder")
    if choice.begin is not None:
        begin(choice.begin.resolve())
    elif choice.go_on is not None:
        go_on(choice.go_on.resolve())
    elif choice.folder is not None:
        print_hashes(choice.folder.resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="volpipe-hashes-") as name:
            print_hashes(Path(name).resolve())
