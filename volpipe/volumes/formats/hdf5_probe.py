"""HDF5 metadata, probed in a process of its own first: damaged metadata can crash or hang the library.

Not here: voxels, which workers read in their own processes. Run as a module, this is the probing process.
Found by scripts/fuzz with HDF5 2.0: crashes by labels of dimensions, hours for a mapping of a virtual dataset.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from volpipe.errors import VolumeError
from volpipe.process import environment, module_command
from volpipe.volumes.storage import paths

SECONDS = 60.0  # for a file with the most objects that are looked at, far away
MORE_BYTES = 2**28  # that the metadata may take

_passed: dict[Path, tuple[object, ...]] = {}
_idle: list[subprocess.Popen[bytes]] = []
_keeping = False


def check(file: Path) -> None:
    """Raise unless the objects in the HDF5 file can be listed and described; once for each state of it.

    Raises:
        VolumeError: they cannot, or that process crashed, took too long or too much memory.
    """
    state = paths.state(file.parent, [file.name])
    if _passed.get(file) == state:
        return
    process = _idle.pop() if _idle else _start_probe()
    try:
        answer = _ask_probe(process, file)
    except BaseException:
        _end_probe(process)
        raise
    if _keeping and process.poll() is None:
        _idle.append(process)
    else:
        _end_probe(process)
    if answer:
        raise VolumeError(answer)
    _passed[file] = state


@contextlib.contextmanager
def keep_process() -> Iterator[None]:
    """Keep the process alive between files inside the `with`: for many small files."""
    global _keeping
    _keeping = True
    try:
        yield
    finally:
        _keeping = False
        while _idle:
            _end_probe(_idle.pop())


def _start_probe() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        module_command(__name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment() | {"OPENBLAS_NUM_THREADS": "1"},
        bufsize=0,
    )


def _ask_probe(process: subprocess.Popen[bytes], file: Path) -> str:
    """Return what is wrong with the file, "" for nothing."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(str(file)).encode() + b"\n")
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(SECONDS):
            process.kill()
            return f"{file} kept the HDF5 library busy for {SECONDS:.0f} s: it is damaged, or has too many objects"
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        return f"{file} crashes the HDF5 library, with code {process.wait()}: it is damaged; copy it again"
    return str(json.loads(line))


def _end_probe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.kill()
    process.stdin.close()
    process.stdout.close()
    process.wait()


def _fault_of(file: Path) -> str:
    """Return what is wrong with the whole file, "" for nothing; an unreadable object is not."""
    hdf5 = import_module("volpipe.volumes.formats.hdf5")  # which imports this module
    try:
        keys = list(hdf5.walk(file, "", enter_groups=True))
    except VolumeError as error:
        return str(error)
    hdf5.read_attributes(file, "")
    for key in keys:
        try:
            hdf5.read_header(file, key)
        except VolumeError as error:
            if isinstance(error.__cause__, MemoryError):
                return str(error)
    return ""


def _serve() -> None:
    """Answer for one file after another until the input ends."""
    import h5py  # noqa: F401  # before the limit

    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MORE_BYTES, size + MORE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        file = Path(json.loads(line))
        try:
            answer = _fault_of(file)
        except MemoryError:
            answer = f"{file} asks for more than {MORE_BYTES >> 20} MiB for its metadata: it is damaged"
        except Exception as error:  # sent to the asking process
            answer = f"{file} is damaged: {type(error).__name__}: {error}"
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
