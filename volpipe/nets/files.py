"""Nets that come as files: TorchScript (.pt), torch.export (.pt2), ONNX (.onnx), packages of bioimage.io, and folders
of nnU-Net and MONAI.

Not here: weights alone (state_dicts). Weights and ONNX are data. TorchScript and torch.export are their maker's code,
and are loaded only if the recipe trusts them.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import itertools
import logging
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from volpipe.errors import VolpipeError
from volpipe.recipes.inference import NetChoice
from volpipe.resolve import describe_error, load_function
from volpipe.syntax import parse
from volpipe.text import check_no_text
from volpipe.user_code import home_of

if TYPE_CHECKING:
    from torch import nn

    from volpipe.nets.bioimageio_spec import Package, Weights

FUNCTION = "numpy:"  # before the name of a function on arrays
VARYING = ("instance_norm", "group_norm")

log = logging.getLogger(__name__)


class NetFile(ABC):
    """A kind of file or folder that is a net; `KINDS` lists them.

    Attributes:
        title: what is in it, as messages have it.
        what: the same with its article.
        suffixes: of files of this kind.
        maker: what stands before its folder in the name of a net; "" of files, which have a suffix.
        has_own_code: whether its files may run code of a user, which may open others.
        has_weights_file: whether one file has all of its weights, by whose hash it is known.
    """

    title: ClassVar[str]
    what: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    maker: ClassVar[str] = ""
    has_own_code: ClassVar[bool] = False
    has_weights_file: ClassVar[bool] = True

    @abstractmethod
    def load(self, choice: NetChoice, path: Path) -> nn.Module:
        """Return the net at `path`, which `choice` names, on the CPU.

        Raises:
            VolpipeError: it is not trusted, there is no such file, or it is of another kind.
        """

    def weights_file(self, choice: NetChoice, path: Path) -> Path:
        """Return the file with the weights of the net at `path`."""
        return path

    def sources(self, path: Path) -> list[Path]:
        """Return the files that are the code of the net at `path`."""
        if path.is_dir():
            return sorted(p for p in path.iterdir() if p.suffix in (".yaml", ".yml", ".py"))
        return [path] if path.is_file() else []


class TorchFile(NetFile):
    """A file of torch's, which is code of its maker's and is loaded only if the recipe trusts it."""

    def load(self, choice: NetChoice, path: Path) -> nn.Module:
        if not choice.trust_model:
            raise VolpipeError(
                f"net {choice.name} is {self.what}, which is code and runs with your rights; add --trust-model "
                "(net.trust_model = true) if you trust its maker, or take its weights as safetensors with a net of "
                "your own"
            )
        _check_file(choice, path, self)
        try:
            return self.read(path)
        except VolpipeError:
            raise
        except Exception as error:  # whatever torch raises for another file
            raise VolpipeError(
                f"{path} is no file of {self.title}: {describe_error(error)}; "
                "weights alone go to net.weights, and their net to net.name"
            ) from error

    @abstractmethod
    def read(self, path: Path) -> nn.Module:
        """Return the net in the file at `path`; torch raises what it likes for another file."""


class TorchScriptFile(TorchFile):
    """A program of TorchScript."""

    title, what, suffixes = "TorchScript", "a file of TorchScript", (".pt", ".pth", ".ts")

    def read(self, path: Path) -> nn.Module:
        import torch

        check_no_text(path, "file of TorchScript")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # to whoever makes such files
            net: nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        return net


class ExportedFile(TorchFile):
    """A program of torch.export."""

    title, what, suffixes = "torch.export", "a file of torch.export", (".pt2",)

    def read(self, path: Path) -> nn.Module:
        import torch

        from volpipe.nets.declared import Declaration

        check_no_text(path, "file of torch.export")
        program = torch.export.load(path)
        exported = program.module()
        windows = next(node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
        shape = [n if isinstance(n, int) else 0 for n in windows.meta["val"].shape]
        if shape[0] > 1:
            raise VolpipeError(
                f"net {path.name} takes {shape[0]} windows at once; export it with a free batch, or of 1"
            )
        exported.volpipe = Declaration(  # type: ignore[assignment]  # a module's attributes are tensors to its stubs
            slices=len(shape) == 4, one_by_one=shape[0] == 1, in_channels=shape[1] or None, fixed=tuple(shape[2:])
        )
        return exported


class OnnxFile(NetFile):
    """A graph of ONNX, which is data."""

    title, what, suffixes = "ONNX", "a file of ONNX", (".onnx",)

    def load(self, choice: NetChoice, path: Path) -> nn.Module:
        _check_file(choice, path, self)
        _check_no_weights(choice)
        from volpipe.nets.onnx import load_onnx

        return load_onnx(path)


class PackageFile(NetFile):
    """A package of bioimage.io: a zip, a description, or a folder with one; it says itself what is in it."""

    title, what, suffixes = "a bioimage.io package", "a bioimage.io package", (".zip", ".yaml", ".yml")
    has_own_code = True

    def load(self, choice: NetChoice, path: Path) -> nn.Module:
        from volpipe.nets.bioimageio import PackageNet
        from volpipe.nets.onnx import load_graph

        package, weights = self._open_package(choice, path)
        if weights.kind == "onnx":
            return PackageNet(package, weights.kind, load_graph(weights.file))
        if not choice.trust_model:
            raise VolpipeError(
                f"package {package.name} has its net as {weights.kind}, which is code and runs with your rights; add "
                "--trust-model (net.trust_model = true) if you trust its maker"
            )
        return PackageNet(package, weights.kind, self._load_code(package, weights).eval())

    def weights_file(self, choice: NetChoice, path: Path) -> Path:
        return self._open_package(choice, path)[1].file

    def _open_package(self, choice: NetChoice, path: Path) -> tuple[Package, Weights]:
        """Return the package that `choice` names, and its weights in the format that the recipe asks for."""
        from volpipe.nets.bioimageio_spec import open_package

        _check_no_weights(choice)
        if set(choice.options) - {"weights"}:
            raise VolpipeError(
                f"net {choice.name} is {self.what}, whose one option is the format of weights; leave out "
                f"{choice.options}"
            )
        if not path.exists():
            raise VolpipeError(f"no net at {path}")
        package, kind = open_package(path, choice.output), choice.options.get("weights")
        return package, package.weights_in(None if kind is None else str(kind))

    def _load_code(self, package: Package, weights: Weights) -> nn.Module:
        """Return the net of a package whose weights are TorchScript, or a state dict for code in the package."""
        from volpipe.nets.bioimageio import architecture
        from volpipe.nets.bioimageio_spec import resolve_file

        try:
            if weights.kind == "torchscript":
                return TorchScriptFile().read(weights.file)
            import torch

            source = architecture(weights)
            place = str(resolve_file(package.folder, source)) if "source" in source else source["import_from"]
            net: nn.Module = load_function(f"{place}:{source['callable']}")(**source["kwargs"])
            check_no_text(weights.file, "file of weights")
            net.load_state_dict(torch.load(weights.file, map_location="cpu", weights_only=True))
        except VolpipeError as error:
            raise VolpipeError(f"package {package.name}: {error}") from error
        except Exception as error:  # whatever torch and the package's code raise
            raise VolpipeError(
                f"package {package.name}: its {weights.kind} weights cannot be loaded: {describe_error(error)}"
            ) from error
        return net


class MakerFolder(NetFile):
    """A folder that another trainer wrote, whose name stands before it, as nnunet:FOLDER."""

    has_weights_file = False

    def load(self, choice: NetChoice, path: Path) -> nn.Module:
        _check_no_weights(choice)
        if not path.is_dir():
            raise VolpipeError(f"no folder at {path}, which net.name={choice.name} names")
        return self.read(choice, path)

    @abstractmethod
    def read(self, choice: NetChoice, path: Path) -> nn.Module:
        """Return the net in the folder at `path`."""

    def sources(self, path: Path) -> list[Path]:
        return sorted(p for p in (*path.glob("*.json"), *path.glob("configs/*")) if p.is_file())


class NnunetFolder(MakerFolder):
    """A folder of results of nnU-Net."""

    title, what, maker = "a folder of nnU-Net", "a folder of nnU-Net", "nnunet"

    def read(self, choice: NetChoice, path: Path) -> nn.Module:
        from volpipe.nets.nnunet import load_results

        return load_results(path, choice.options)


class MonaiFolder(MakerFolder):
    """A bundle of MONAI."""

    title, what, maker = "a MONAI bundle", "a MONAI bundle", "monai"

    def read(self, choice: NetChoice, path: Path) -> nn.Module:
        from volpipe.nets.monai_bundle import load_bundle

        return load_bundle(path, choice.options, trust=choice.trust_model)


PACKAGE = PackageFile()  # what a folder is, and a file of no suffix that another kind has
KINDS: tuple[NetFile, ...] = (TorchScriptFile(), ExportedFile(), OnnxFile(), PACKAGE, NnunetFolder(), MonaiFolder())
SUFFIXES = frozenset(suffix for kind in KINDS for suffix in kind.suffixes)


def _check_file(choice: NetChoice, path: Path, kind: NetFile) -> None:
    """Refuse options for a file that takes none, and a file that is not there."""
    if choice.options:
        raise VolpipeError(f"net {choice.name} is {kind.what}, which takes no options; leave out {choice.options}")
    if not path.is_file():
        raise VolpipeError(f"no net at {path}")


def _check_no_weights(choice: NetChoice) -> None:
    if choice.weights is not None:
        raise VolpipeError(f"net {choice.name} has its weights in it; leave out net.weights {choice.weights}")


def file_kind(name: str) -> NetFile | None:
    """Return what the net `name` is, by its maker or its suffix; None of a function, which is no file."""
    maker, colon, _ = name.partition(":")
    if colon:
        return next((kind for kind in KINDS if kind.maker and kind.maker == maker), None)
    suffix = PurePath(name).suffix
    known = next((kind for kind in KINDS if suffix in kind.suffixes), None)
    return known or (PACKAGE if "/" in name else None)


def is_program(name: str) -> bool:
    """Return whether the net `name` is a file, or a folder with a package, not a function."""
    return file_kind(name) is not None


def is_function(name: str) -> bool:
    """Return whether `name`, that of a net, names a function on arrays."""
    return name.startswith(FUNCTION)


def place_of(name: str) -> str:
    """Return the file or folder that the net `name`, a program, names."""
    kind = file_kind(name)
    return name.removeprefix(f"{kind.maker}:") if kind is not None and kind.maker else name


def label_of(name: str) -> str:
    """Return the net `name` as outputs are named after it: its function, file or folder."""
    path = PurePath(place_of(name))
    if not is_program(name):
        return name.rpartition(":")[2]
    if path.suffix in (".yaml", ".yml") and path.parent.name:
        path = path.parent
    # a file's name may hold any character
    return re.sub(r"[^\w.-]+", "_", path.stem if path.suffix in SUFFIXES else path.name).lstrip("_.-") or "net"


def load_program(choice: NetChoice, search_path: str) -> nn.Module:
    """Return the net in the file or folder that `choice` names, on the CPU; errors as of `NetFile.load`."""
    return _program(choice.name).load(choice, Path(search_path) / place_of(choice.name))


def _program(name: str) -> NetFile:
    kind = file_kind(name)
    assert kind is not None, "a net of a file has a kind"
    return kind


def file_hash(choice: NetChoice, search_path: str) -> str:
    """Return the SHA-256 of the file that `choice` names: of weights and code, and of the files with its tensors."""
    path = _program(choice.name).weights_file(choice, Path(search_path) / choice.name)
    if path.suffix == ".onnx":
        from volpipe.nets.onnx import onnx_hash

        return onnx_hash(path)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def code_hash(name: str, search_path: str) -> str:
    """Return the SHA-256 of the source of the net `name`: of its files and their names; "" where there are none."""
    digest = hashlib.sha256()
    files = _code_of(name, Path(search_path))
    for file in files:
        digest.update(f"{file.name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest() if files else ""


def code_hash_of(choice: NetChoice, search_path: str) -> str:
    """Return the SHA-256 of the source of the net of `choice`; of that of each net, in order, of an ensemble."""
    hashes = [code_hash(member.name, search_path) for member in choice.members]
    return hashes[0] if choice.ensemble is None else joined_hash(hashes)


def joined_hash(hashes: Iterable[str]) -> str:
    """Return the SHA-256 of several hashes in their order."""
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def code_files(name: str, search_path: str) -> tuple[list[Path], list[Path]]:
    """Return the source files of the net `name`, and the user's files elsewhere that they import.

    Those lie in folders of PYTHONPATH, or are installed from where they are edited.
    """
    own = [file for file in _code_of(name, Path(search_path)) if file.suffix == ".py"]
    known, folders = set(own), {home for file in own for home in _homes(file)}
    while True:
        files = set(_with_imports(own, folders))
        homes = {home for file in files - known for home in _homes(file)}
        known |= files
        if homes <= folders:
            return own, sorted(files - set(own))
        folders |= homes


def _homes(file: Path) -> Iterator[Path]:
    """Yield the user's folders from which the Python `file` imports modules."""
    for node in _import_statements(file):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for name in names:
            if (home := home_of(name.partition(".")[0])) is not None:
                yield Path(home)


def _code_of(name: str, search_path: Path) -> list[Path]:
    """Return the source files of the net `name`: its own and its imports beside it; all of a package."""
    place = name.removeprefix(FUNCTION).rpartition(":")[0]
    if (kind := file_kind(name)) is not None:
        return kind.sources(search_path / place_of(name))
    if place.endswith(".py"):
        file = search_path / place
        return _with_imports([file], {search_path, file.parent})
    if not place:
        import volpipe.models

        return [Path(volpipe.models.__path__[0]) / f"{name}.py"]
    if is_beside(place, search_path):
        return _with_imports(_files_of(place, search_path), {search_path})
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        return []
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return []
    file = Path(spec.origin)
    return sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]


def is_beside(module: str, folder: Path) -> bool:
    """Return whether `folder` holds the module or package `module`."""
    path = folder.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _with_imports(files: Iterable[Path], folders: Collection[Path]) -> list[Path]:
    """Return `files` and all files that they import from their own folders and from `folders`, sorted."""
    known: set[Path] = set()
    waiting = list(files)
    while waiting:
        here = waiting.pop()
        if here in known or not here.is_file():
            continue
        known.add(here)
        waiting += _imported(here, {here.parent, *folders})
    return sorted(known)


def _files_of(module: str, folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` that importing `module` runs: its own, and `__init__.py` of the packages around it.

    The last part of a module may be "*", for all modules of a package.
    """
    for part in module.split("."):
        yield from folder.glob(f"{part}.py")
        yield from folder.glob(f"{part}/__init__.py")
        folder /= part


def functions_in(file: Path) -> list[str]:
    """Return the names of public functions and classes in a Python file, without running it; [] for other files."""
    try:
        body = parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [name for name in functions if not name.startswith("_")]


def _imported(file: Path, folders: Collection[Path]) -> Iterator[Path]:
    """Yield the files in `folders` that the Python file imports; none of one that cannot be parsed.

    Relative imports count from its own folder.
    """
    for node in _import_statements(file):
        package, level = (node.module, node.level) if isinstance(node, ast.ImportFrom) else (None, 0)
        places = file.parents[level - 1 : level] if level else folders
        for folder, alias in itertools.product(places, node.names):
            yield from _files_of(f"{package}.{alias.name}" if package else alias.name, folder)


def _import_statements(file: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return the statements of a Python file that import; none of one that cannot be parsed."""
    return _imports_of(file.read_bytes())


@lru_cache  # a net is built several times, and each time its files are asked for more than once
def _imports_of(source: bytes) -> tuple[ast.Import | ast.ImportFrom, ...]:
    try:
        tree = parse(source)
    except (SyntaxError, ValueError):  # whoever runs it says so
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def short_hash(digest: str) -> str:
    """Return the beginning of a hash, as messages have it."""
    return f"{digest[:8]}…" if digest else "none"


def inner_net(net: nn.Module) -> nn.Module:
    """Return a user's net as its maker wrote it; others as they are."""
    from volpipe.nets.adapter import Adapter

    return net.net if isinstance(net, Adapter) else net


def run_self_test(net: nn.Module) -> None:
    """Run the test that a package brings; nothing for other nets.

    Raises:
        VolpipeError: the net fails it.
    """
    from volpipe.nets.declared import ServedNet

    net = inner_net(net)
    if isinstance(net, ServedNet) and net.is_package:
        # Its import takes a second, which a worker that runs another net does not wait for.
        from volpipe.nets.bioimageio import PackageNet

        assert isinstance(net, PackageNet)
        outcome = net.check()
        log.info("package %s: its own test differs by %.3g at most", net.package.name, outcome.largest)


def num_parameters(net: nn.Module) -> int:
    """Return the number of a net's parameters."""
    from volpipe.nets.declared import ServedNet

    own = inner_net(net)
    count = own.num_numbers if isinstance(own, ServedNet) else None
    return count if count is not None else sum(p.numel() for p in net.parameters())


def normalising_layers(net: nn.Module) -> list[str]:
    """Return the operators of a loaded file that look at the whole window; [] for other nets."""
    import torch

    from volpipe.nets.declared import ServedNet

    if isinstance(net, ServedNet) and net.varying is not None:
        return list(net.varying)
    if isinstance(net, torch.jit.ScriptModule):
        graph: Any = net.inlined_graph  # Any: torch has no types for it
        return [name for name in VARYING if graph.findAllNodes(f"aten::{name}")]
    if isinstance(net, torch.fx.GraphModule):
        targets = " ".join(str(node.target) for node in net.graph.nodes)
        return [name for name in VARYING if name in targets]
    return []
