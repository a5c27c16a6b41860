"""Workers that meet with accidents: in processes of a command, told by files in its folder; for tests."""

from __future__ import annotations

from pathlib import Path

# As sitecustomize.py in a folder on PYTHONPATH: in worker processes, tasks of volpipe meet the accidents that lie in
# FAULTS, a folder. Each file `accident.stage` there happens to one task of that stage alone: whoever removes it has it.
SITECUSTOMIZE = """
import importlib.abc, importlib.util, multiprocessing, os, pathlib, sys, time

FAULTS = pathlib.Path(os.environ.get("FAULTS_FOLDER", "."))

def disturb(task):
    work = task.work
    def disturbed(stage, units, outcomes, *rest):
        if multiprocessing.parent_process() is None:
            return work(stage, units, outcomes, *rest)
        if stage == "evaluate":
            sys.modules["volpipe.evaluation.evaluate"].BLOCK = (8, 8, 8)
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

class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "volpipe.blockwise.task":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            disturb(module)
        spec.loader.exec_module = exec_module
        return spec

if "FAULTS_FOLDER" in os.environ:
    sys.meta_path.insert(0, Hook())
"""


def lay(folder: Path, *accidents: str, seconds: float = 0.0) -> dict[str, str]:
    """Return the environment of a command in `folder` whose workers meet `accidents`; a unit takes `seconds` more."""
    faults = folder / "faults"
    faults.mkdir(exist_ok=True)
    (faults / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (faults / "seconds").write_text(str(seconds))
    for accident in accidents:
        (faults / accident).touch()
    return {"FAULTS_FOLDER": str(faults)}


def happened(folder: Path) -> set[str]:
    """Return the accidents that tasks have met."""
    return {path.name.removesuffix(".happened") for path in (folder / "faults").glob("*.happened")}
