"""The findings of a check of a site: where its workers differ from the driver, and what would fail a run.

Not here: how workers are asked (apps.site_check), or what they look at (node_facts).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from volpipe.sites.node_facts import NodeFacts

PACKAGES = ("volpipe", "parsl", "torch", "tensorstore", "numpy", "zarr", "z5py")
EXACT = ("volpipe", "parsl")  # what travels between them has no version of its own
FEWEST_BYTES, FEWEST_FILES = 1 << 30, 1000
MIB = 1 << 20


class Gpus(Enum):
    """Whether an executor is meant to have GPUs: it is not; it is; it would be, but asks for none."""

    NONE = "none"
    NEEDED = "needed"
    WAIVED = "waived"


@dataclass(frozen=True)
class Answer:
    """The answer of the one worker of an executor that was asked.

    Attributes:
        gpus: whether it is meant to have any.
        facts: what the worker found, None where none answered.
        trouble: why none did.
        start_seconds: from the command to the worker's first step.
    """

    label: str
    gpus: Gpus
    facts: NodeFacts | None = None
    trouble: str = ""
    start_seconds: float = 0.0


@dataclass(frozen=True)
class Checked:
    """A site that was checked.

    Attributes:
        folder: where output and scratch would be.
        volume: what was read, "" if nothing.
        here: what the driver found about itself.
        answers: one per executor; none where the driver itself cannot run.
        kept: the folder of logs that was left, for a look at what went wrong; "" if none was.
    """

    folder: str
    volume: str
    here: NodeFacts
    answers: Sequence[Answer] = ()
    kept: str = ""

    def findings(self) -> list[Finding]:
        """Return the findings, the driver's first."""
        findings = list(_of_place("here", self.here, self))
        for answer in self.answers:
            findings += _of_answer(answer, self)
        return findings


@dataclass(frozen=True)
class Finding:
    """One sentence; a fault would fail a run, or change its bytes."""

    sentence: str
    is_fault: bool = True


def release(version: str) -> str:
    """Return major and minor number of a version."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def differs(name: str, here: NodeFacts, there: NodeFacts) -> bool:
    """Return whether a package has another version there; a build's name, as in 2.13.0+cpu, does not count."""
    own, other = here["versions"].get(name), there["versions"].get(name)
    return own is None or other is None or own.partition("+")[0] != other.partition("+")[0]


def _of_answer(answer: Answer, checked: Checked) -> Iterator[Finding]:
    if answer.facts is None:
        logs = f" (logs: {checked.kept})" if checked.kept else ""
        yield Finding(f"{answer.label}: {answer.trouble}{logs}")
        return
    label, here, there = answer.label, checked.here, answer.facts
    remedy = "let the site start workers in an environment like this one (worker_init, or the image)"
    where = f"on {there['host']} ({there['executable']})"
    if release(here["python"]) != release(there["python"]):
        yield Finding(f"{label}: Python is {there['python']} {where} and {here['python']} here; {remedy}")
    for name, other in there["versions"].items():
        own = here["versions"].get(name)
        if own is not None and differs(name, here, there):
            is_fault = name in EXACT or release(own) != release(other)
            yield Finding(f"{label}: {name} is {other} {where} and {own} here; {remedy}", is_fault)
    if here["versions"].get("volpipe") == there["versions"].get("volpipe") and here["code"] != there["code"]:
        yield Finding(f"{label}: volpipe is other code {where} than here, under the same version; {remedy}")
    yield from _of_place(label, there, checked)
    yield from _of_gpus(answer, there)


def _of_place(label: str, facts: NodeFacts, checked: Checked) -> Iterator[Finding]:
    where = "here" if facts is checked.here else f"on {facts['host']}"
    for name, why in facts["broken"].items():
        yield Finding(f"{label}: {name} cannot be imported {where}: {why}; install it for {facts['executable']}")
    if facts["volume_error"]:
        yield Finding(
            f"{label}: {checked.volume} cannot be read {where}: {facts['volume_error']}; it must be at the same path "
            "for all, and readable"
        )
    elif facts["voxels"] and facts["voxels"] != checked.here["voxels"]:
        yield Finding(f"{label}: {checked.volume} has other voxels {where} than here; mount the same volume there")
    if facts["folder_error"]:
        yield Finding(
            f"{label}: {checked.folder} cannot be written {where}: {facts['folder_error']}; choose an --out that is "
            "the same folder for all, with room"
        )
        return
    free, files = facts["free_bytes"], facts["free_files"]
    if free is not None and free < FEWEST_BYTES:
        yield Finding(
            f"{label}: {checked.folder} has {free / MIB:.1f} MiB free {where}, less than 1 GiB; free some, or choose "
            "another --out"
        )
    if files is not None and files < FEWEST_FILES:
        yield Finding(
            f"{label}: {checked.folder} has room for {files:,} files {where}, less than {FEWEST_FILES:,}; delete some, "
            "or choose another --out"
        )


def _of_gpus(answer: Answer, there: NodeFacts) -> Iterator[Finding]:
    if there["gpus"] or answer.gpus is Gpus.NONE:
        return
    if answer.gpus is Gpus.WAIVED:
        yield Finding(f"{answer.label}: its site asks for no GPU, so nets run on CPUs there", is_fault=False)
        return
    visible = "not set" if there["visible"] is None else repr(there["visible"])
    yield Finding(
        f"{answer.label}: no GPU is seen on {there['host']}: {there['gpu_error']} (CUDA_VISIBLE_DEVICES is {visible}); "
        "ask for nodes with GPUs, and start workers with a torch for CUDA"
    )
