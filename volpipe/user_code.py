"""Running a user's own Python: what it imports from beside it, its command line, and the files that it opens.

Not here: finding the function that a name stands for (resolve). Modules beside a user's file come after Python's own
and installed ones, so that a file `random.py` there takes the place of neither. Those of another folder are out of the
way meanwhile: two nets that each import a `blocks` from beside them do not share one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery as machinery
import importlib.util
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

FILE = "volpipe_file_"  # before the names of modules that are loaded by their paths, each time anew
OWN = "volpipe"  # whose modules are nobody else's
OF_SYSTEM = ("/proc", "/sys", "/etc")
CACHES = ("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Larger files are known by their size and their two ends: weights, which are compared as the net has them.
WHOLE, END = 2**24, 2**20
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_lock = threading.RLock()
_record: ContextVar[Opened | None] = ContextVar("files that a user's code opens", default=None)


class AsItIs(SourceFileLoader):
    """Reads a file itself: its bytecode, known by second and size alone, may be that of the file before an edit."""

    def path_stats(self, path: str | os.PathLike[str]) -> Mapping[str, Any]:  # Any: as importlib has it
        raise OSError("without which importlib neither takes bytecode nor writes any")


@dataclass
class Opened:
    """The files that a user's code opened and did not write, and modules that it imported from beside it.

    Attributes:
        folders: that it imports from.
    """

    folders: tuple[str, ...] = ()
    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)

    def hashes(self, source: Collection[Path], imported: Collection[Path]) -> dict[str, str]:
        """Return the SHA-256 of these files, but for the `source`, and of those `imported`, by name.

        Names count from the folder that they were found in.
        """
        of_modules = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
        data = {path for path in self.read - self.written - of_modules if not path.endswith(".pyc")}
        found: dict[str, list[str]] = {}
        files = {*filter(is_foreign, data), *self.modules, *map(_absolute, imported)}
        for file in sorted(files - set(map(_absolute, source))):
            with contextlib.suppress(OSError):  # which is gone, or was not there
                if Path(file).is_file():
                    found.setdefault(self._name_of_file(file), []).append(_digest(file))
        return {
            name: each[0] if len(each) == 1 else hashlib.sha256(" ".join(sorted(each)).encode()).hexdigest()
            for name, each in sorted(found.items())
        }

    def _name_of_file(self, file: str) -> str:
        for folder in (*self.folders, *foreign_paths()):
            if _is_in(file, folder):
                return os.path.relpath(file, folder)
        return Path(file).name


def _digest(file: str) -> str:
    with Path(file).open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= WHOLE:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        first = stream.read(END)
        stream.seek(size - END)
        return hashlib.sha256(first + stream.read(END) + str(size).encode()).hexdigest()


@cache
def _installed() -> tuple[str, ...]:
    """Return the folders of Python, of installed packages, of the system and of caches."""
    places = [
        str(Path(__file__).parent),
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        site.getusersitepackages(),
    ]
    caches = [str(Path("~/.cache").expanduser()), *(os.environ[name] for name in CACHES if os.environ.get(name))]
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix]
    return tuple({os.path.realpath(place) for place in (*places, *prefixes, *caches, *OF_SYSTEM) if place} - {"/"})


def _absolute(path: str | Path) -> str:
    """Return the whole `path`, without following links."""
    # Of thousands of modules, several times for each net that is built: by Path it takes ten times as long.
    return os.path.abspath(path)  # noqa: PTH100


def _is_in(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


@cache
def is_foreign(path: str) -> bool:
    """Return whether the file `path` is a user's: neither Python's, an installed package's nor the system's."""
    real = os.path.realpath(path)
    return not any(_is_in(real, folder) for folder in _installed())


def foreign_paths() -> list[str]:
    """Return the folders that Python imports from and that are a user's, such as those of PYTHONPATH."""
    folders = (_absolute(entry) for entry in sys.path)
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir() and is_foreign(f"{folder}/x")]


def _note_opened_file(event: str, arguments: tuple[Any, ...]) -> None:  # Any: of whatever event
    """Note a file that is opened, while that is asked for; Python calls this for every event of any kind."""
    if event != "open" or (record := _record.get()) is None or not isinstance(arguments[0], str):
        return
    path, _, flags = arguments
    kind = record.written if isinstance(flags, int) and flags & WRITING else record.read
    kind.add(_absolute(path))


@cache
def _hook_opening() -> None:
    """Have Python tell which files are opened; that cannot be taken back."""
    sys.addaudithook(_note_opened_file)


class _UserModuleFinder(MetaPathFinder):
    """Finds modules in the folders of the user's code that runs, or ran last.

    Args:
        is_first: whether it is asked before others: for modules that a recipe names, and parts of packages beside.
    """

    def __init__(self, *, is_first: bool) -> None:
        self.is_first = is_first

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folders = _world.folders
        if fullname.partition(".")[0] == OWN or not folders:
            return None
        if path is not None:
            own = [
                place for place in path if is_foreign(f"{place}/x") and any(_is_in(f"{place}/x", f) for f in folders)
            ]
            return self._find(fullname, own) if self.is_first and own else None
        if self.is_first:
            return self._find(fullname, folders) if fullname in _world.named else None
        spec = self._find(fullname, folders) if _world.depth or _is_asked_from(folders) else None
        # A folder without code, such as one of data, is a package of the user's own code alone.
        return spec if spec is None or spec.loader is not None or _is_asked_from(folders) else None

    def _find(self, fullname: str, places: Sequence[str]) -> ModuleSpec | None:
        kinds = (
            (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES), (AsItIs, machinery.SOURCE_SUFFIXES),
        )  # fmt: skip
        specs = (machinery.FileFinder(place, *kinds).find_spec(fullname) for place in places)
        return next((spec for spec in specs if spec is not None), None)


def _is_asked_from(folders: Sequence[str]) -> bool:
    """Return whether code in `folders` asks for the module that is being looked for."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "importlib" not in file:
            return any(_is_in(_absolute(file), folder) for folder in folders) and is_foreign(file)
        frame = frame.f_back
    return False


@dataclass
class _World:
    """The folders that a user's code imports from, and its modules; those of other folders are kept apart.

    Attributes:
        named: modules that a recipe names, which come before installed ones.
        modules: of these folders, with the SHA-256 of each one's file.
        opened: files that modules of these folders opened so far.
        depth: how often code of it was begun and has not ended.
    """

    folders: tuple[str, ...] = ()
    named: set[str] = field(default_factory=set)
    modules: dict[str, tuple[ModuleType, str]] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    depth: int = 0

    @property
    def is_as_it_was(self) -> bool:
        """Whether no file of its modules was edited."""
        return all(_hash_of(module) == digest for module, digest in self.modules.values())

    def hide(self) -> None:
        """Take its modules out of Python's."""
        for name, (module, _) in self.modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def show(self) -> None:
        """Put its modules among Python's, if they are as they were."""
        if not self.is_as_it_was:
            self.modules, self.opened = {}, set()
        sys.modules.update({name: module for name, (module, _) in self.modules.items()})

    def take_aside(self) -> dict[str, ModuleType]:
        """Return modules of its folders that others imported, and put its own in their place."""
        own = {name: module for name, (module, _) in self.modules.items()}
        others = {
            name: module
            for name, module in list(sys.modules.items())
            if own.get(name) is not module and not _is_ours(name) and _lies_in(module, self.folders)
        }
        for name in others:
            del sys.modules[name]
        sys.modules.update(own)
        return others

    def own(self, modules: Mapping[str, ModuleType]) -> None:
        """Note those of `modules` that lie in its folders."""
        for name, module in modules.items():
            if not _is_ours(name) and _lies_in(module, self.folders):
                self.modules[name] = module, _hash_of(module)


_world = _World()
_worlds: dict[tuple[str, ...], _World] = {}


def _is_ours(name: str) -> bool:
    """Return whether the module `name` is volpipe's, or a file that it loaded by its path."""
    return name.partition(".")[0] in (OWN, "__main__") or name.startswith(FILE)


def _lies_in(module: ModuleType, folders: Sequence[str]) -> bool:
    spec = getattr(module, "__spec__", None)
    places = [getattr(module, "__file__", None), *(getattr(spec, "submodule_search_locations", None) or ())]
    files = [_absolute(place) for place in places if isinstance(place, str)]
    return any(_is_in(f"{file}/", folder) for file in files for folder in folders) and all(map(is_foreign, files))


def _hash_of(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    try:
        return _digest(file) if isinstance(file, str) else ""
    except OSError:
        return ""


def _enter(folders: tuple[str, ...]) -> None:
    """Have modules of `folders` in place of those of the code that ran before."""
    global _world
    if not any(isinstance(finder, _UserModuleFinder) for finder in sys.meta_path):
        sys.meta_path[:] = [_UserModuleFinder(is_first=True), *sys.meta_path, _UserModuleFinder(is_first=False)]
    if folders != _world.folders or not _world.is_as_it_was:
        _world.hide()
        _world = _worlds.setdefault(folders, _World(folders))
        _world.show()


@contextlib.contextmanager
def running(reference: str, search_path: str) -> Iterator[Opened]:
    """Run code of the user's meanwhile: that of `reference`, ``module:function`` or ``file.py:function``.

    It can import from its folder and from `search_path`, sees no words of volpipe's command line, and what it opens is
    noted in what is given. One thread at a time does this.
    """
    place = reference.rpartition(":")[0]
    is_file = place.endswith(".py")
    own = [str(Path(_absolute(Path(search_path) / place)).parent)] if is_file else []
    folders = tuple(dict.fromkeys([*own, _absolute(search_path)]))
    with _lock:
        outer = _record.get()
        if outer is not None and outer.folders == folders:
            yield outer
            return
        _hook_opening()
        _enter(folders)
        world, argv = _world, sys.argv
        if not is_file and place.partition(".")[0] not in sys.stdlib_module_names:
            world.named.add(place.partition(".")[0])
        aside = world.take_aside()
        before = set(sys.modules)
        opened, world.depth = Opened(folders), world.depth + 1
        token = _record.set(opened)
        sys.argv = [place or reference]
        try:
            yield opened
        finally:
            sys.argv = argv
            _record.reset(token)
            world.depth -= 1
            world.own({name: module for name, module in sys.modules.items() if name not in before})
            sys.modules.update(aside)
            world.opened |= opened.read - opened.written
            opened.read |= world.opened
            files = (getattr(module, "__file__", None) for module, _ in world.modules.values())
            opened.modules |= {_absolute(file) for file in files if isinstance(file, str)}
            if outer is not None:
                outer.read |= opened.read
                outer.written |= opened.written
                outer.modules |= opened.modules
                _enter(outer.folders)


def home_of(module: str) -> str | None:
    """Return the folder from which Python imports the top-level `module`; None of one that is not a user's."""
    if not module or module in sys.stdlib_module_names or module == OWN:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or not isinstance(spec.origin, str) or not Path(spec.origin).is_file():
        return None
    if not is_foreign(spec.origin):
        return None
    folder = Path(spec.origin).parent
    return str(folder.parent if spec.submodule_search_locations else folder)
