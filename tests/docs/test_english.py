"""What `scripts/english` names, and what it lets pass: the pages and the help themselves are read by scripts/check."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def english() -> ModuleType:
    loader = SourceFileLoader("english", str(ROOT / "scripts" / "english"))
    module = module_from_spec(spec_from_loader("english", loader))  # type: ignore[arg-type]  # there is one
    sys.modules["english"] = module  # dataclasses look there
    loader.exec_module(module)
    return module


def reasons(english: ModuleType, page: str) -> list[str]:
    return [fault.reason for fault in english.faults_of_page(page, "page.md")]


@pytest.mark.parametrize(
    ("page", "word"),
    [
        ("The same command goes on from where the journal is.", "goes on"),
        ("The same\ncommand goes\non.", "goes on"),
        ("Labels are told apart by a hash.", "told"),
        ("What is wanted comes out byte for byte.", "wanted"),
        ("A limit of these is refused.", "of these"),
        ("It trains nets on such volumes.", "such"),
        ("Work comes back from the workers.", "comes back"),
        ("The line shows differences across the faces of windows by those inside.", "divided by"),
        ("Prints how much differs.", "without a subject"),
        ("brings matplotlib, which draws.", "without a beginning"),
        ("Of 8 bits the normalisation is known.", "begin with the noun"),
        ("| a | what is wanted |", "wanted"),
        ("- The run goes on.", "goes on"),
        ("1. The run goes on.", "goes on"),
        ("The net takes 1 channels.", "singular"),
        ("Word" + " word" * 35 + ".", "36 words"),
        ("It is read, is changed, and is written again by nobody.", "passive"),
    ],
)
def test_what_readers_stumble_over_is_named(english: ModuleType, page: str, word: str) -> None:
    faults = list(english.faults_of_page(f"# Title\n\n{page}\n", "page.md"))
    assert len(faults) == 1 and word in str(faults[0]) and faults[0].place == "page.md:3"


@pytest.mark.parametrize(
    "page",
    [
        "The same command again continues where the run stopped.",
        "Formats with compression, such as Zarr, are smaller.",
        "```bash\nvolpipe status of these goes on\n```",
        "Write `what is wanted` into the recipe.",
        "<!-- not run: goes on,\nof these -->\nAfter it.",
        "- one item without a capital",
        "| brings |\n|---|\n| " + " ".join(["word"] * 60) + " |",
        "Word" + " word" * 20 + ". Word" + " word" * 20 + ".",
        "[A link](goes_on_of_these.md) and ![a picture](told.png)",
        "It is read, and is written again.",
        "Copies lie in one folder. Runs of one net are simple. Reports are pages.",
        "The ratio is the difference at the face, divided by that inside.",
        "The run takes 1 channel and 11 channels, in 21 files.",
    ],
)
def test_good_sentences_code_and_tables_pass(english: ModuleType, page: str) -> None:
    assert reasons(english, f"# Title\n\n{page}\n") == []


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ('raise RunError("the run goes on without it")', "goes on"),
        ('raise RunError(f"run {name} go" f"es on without it")', "goes on"),
        ('raise RunError("run " + name + " goes on without it")', "goes on"),
        ('log.warning("%s cannot be told from it", name)', "told"),
        ('out.print(f"{volume} holds\\nvoxels that are wanted here")', "wanted"),
        ('REASON = "every part of it fails alike"', "fails alike"),
        ('TEXT = "run it so that it tries them once more"', "once more"),
        ('"""The run."""\nTEXT = "%s"' % ("word " * 36), "36 words"),
    ],
)
def test_sentences_of_the_program_are_read(english: ModuleType, code: str, word: str) -> None:
    faults = list(english.faults_of_strings(code, "code.py"))
    assert len(faults) == 1 and word in faults[0].reason and faults[0].place.startswith("code.py:")


@pytest.mark.parametrize(
    "code",
    [
        '"""What is wanted goes on here."""',
        'def run():\n    """Prints what is wanted here."""',
        'raise RunError("wanted")',
        'key = tree["such a key"]',
        "raise RunError(f\"{name} is {told('wanted')}\")",
        'raise RunError("begins with a small letter; prints no capital")',
        f'raise RunError("{"word " * 30}; {"word " * 30}")',
    ],
)
def test_docstrings_and_keys_of_the_program_are_not_read(english: ModuleType, code: str) -> None:
    assert list(english.faults_of_strings(code, "code.py")) == []


def test_the_help_of_every_command_and_option_is_read(english: ModuleType) -> None:
    helps = dict(english.helps())
    assert "Box" in helps["volpipe run --roi"] and helps["volpipe k8s manifest -h"]
    assert len(helps) > 150 and [str(fault) for fault in english.faults_of_help()] == []
