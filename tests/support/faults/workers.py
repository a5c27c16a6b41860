"""Workers that meet with accidents: in processes of a command, told by files in its folder; for tests."""

from __future__ import annotations

from pathlib import Path

# Python imports it before all else, from a folder on PYTHONPATH; `disturb` is called with a module once that is loaded,
# and functions in MORE with others, by their names.
HOOK = """
import importlib.abc, importlib.util, sys

class Hook(importlib.abc.MetaPathFinder):
    def __init__(self, name, function):
        self.name, self.function = name, function
    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            self.function(module)
        spec.loader.exec_module = exec_module
        return spec

for name, function in {MODULE: disturb, **globals().get("MORE", {})}.items():
    sys.meta_path.insert(0, Hook(name, function))
"""
# In worker processes, tasks of volpipe meet the accidents that lie in FAULTS, a folder. Each file `accident.stage`
# there happens to one task of that stage alone: whoever removes it has it. Scores are taken in small blocks.
ACCIDENTS = """
import multiprocessing, os, pathlib, sys, time

FAULTS = pathlib.Path(os.environ.get("FAULTS_FOLDER", "."))
MORE = {"volpipe.evaluation.subject": lambda subject: setattr(subject, "BLOCK", (8, 8, 8))}

def disturb(task):
    work = task.work
    def disturbed(stage, units, outcomes, *rest):
        if multiprocessing.parent_process() is None or "FAULTS_FOLDER" not in os.environ:
            return work(stage, units, outcomes, *rest)
        for accident in (killed, without_memory):
            if take(f"{accident.__name__}.{stage}"):
                outcomes = accident(outcomes)
                break
        time.sleep(len(units) * float((FAULTS / "seconds").read_text()))
        return work(stage, units, outcomes, *rest)
    task.work = disturbed

def take(name):
    try:
        (FAULTS / name).rename(FAULTS / f"{name}.happened")
    except FileNotFoundError:
        return False
    return True

def killed(outcomes):
    os.kill(os.getpid(), 9)  # as the system does where memory is short
    yield from outcomes

def without_memory(outcomes):
    import resource, numpy
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (16 << 20), resource.RLIM_INFINITY))
    try:
        numpy.ones(64 << 20)
        yield from outcomes
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def put_hook(folder: Path, module: str, code: str) -> None:
    """Let processes that have `folder` on PYTHONPATH call `disturb` of `code` with that `module` of volpipe."""
    (folder / "sitecustomize.py").write_text(f"MODULE = {module!r}\n{code}{HOOK}")


def lay(folder: Path, *accidents: str, seconds: float = 0.0) -> dict[str, str]:
    """Return the environment of a command in `folder` whose workers meet `accidents`; a unit takes `seconds` more."""
    faults = folder / "faults"
    faults.mkdir(exist_ok=True)
    put_hook(faults, "volpipe.blockwise.task", ACCIDENTS)
    (faults / "seconds").write_text(str(seconds))
    for accident in accidents:
        (faults / accident).touch()
    return {"FAULTS_FOLDER": str(faults)}


def happened(folder: Path) -> set[str]:
    """Return the accidents that tasks have met."""
    return {path.name.removesuffix(".happened") for path in (folder / "faults").glob("*.happened")}
