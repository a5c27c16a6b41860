"""Skeletons of neurons: read from files, or made of labels; nodes in nm, and the edges between them.

Not here: the labels at nodes, and scores (run_lengths). Files have positions x, y, z in nm, in the space in which the
centre of the volume's first voxel is its origin; a `Skeletons` has them as z, y, x. What is read::

    a.swc, or a folder of them    a neuron each, called like its file; lines `id type x y z radius parent`
    a.csv                         columns skeleton, node, parent, x, y, z, or CATMAID's names of them
    nodes.csv and edges.csv       in one folder; columns skeleton, node, x, y, z, and source, target
    a folder with `info`          Neuroglancer precomputed: skeletons, or a segmentation that names its own
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.errors import PlanError, VolumeError
from volpipe.geometry.grid import Box
from volpipe.geometry.labels import Ignore, is_ignored
from volpipe.text import decoded
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import Lengths, read_json
from volpipe.volumes.storage.paths import Location

KINDS = "an SWC file, a folder of SWC files, a CSV, nodes.csv and edges.csv, or precomputed skeletons"
CATMAID = {"skeleton_id": "skeleton", "treenode_id": "node", "parent_treenode_id": "parent", "parent_id": "parent"}
ROOTS = ("", "-1", "null")
MOST_BYTES = 1 << 30  # of a file
MOST_VOXELS = 1 << 28  # of labels of which skeletons are made: kimimaro takes about 35 bytes for each


@dataclass(frozen=True, eq=False)
class Skeletons:
    """Skeletons of neurons.

    Attributes:
        names: of the neurons.
        neurons: (nodes,), int64, the place in `names` of the neuron of each node.
        positions: (nodes, 3), float64, nm (z, y, x).
        edges: (edges, 2), int64, the two nodes of each.
    """

    names: tuple[str, ...]
    neurons: np.ndarray
    positions: np.ndarray
    edges: np.ndarray

    @classmethod
    def joined(cls, parts: Iterable[tuple[str, np.ndarray, np.ndarray]]) -> Skeletons:
        """Return the neurons of `parts`: name, positions and edges of each."""
        names, num = list[str](), 0
        neurons, positions, edges = [np.zeros(0, np.int64)], [np.zeros((0, 3))], [np.zeros((0, 2), np.int64)]
        for i, (name, nodes, pairs) in enumerate(parts):
            names.append(name)
            neurons.append(np.full(len(nodes), i))
            positions.append(nodes)
            edges.append(pairs.astype(np.int64) + num)
            num += len(nodes)
        return cls(tuple(names), np.concatenate(neurons), np.concatenate(positions), np.concatenate(edges))

    @property
    def fingerprint(self) -> str:
        """A hash of names, nodes and edges: equal skeletons have the same."""
        parts = ("\n".join(self.names).encode(), *(a.tobytes() for a in (self.neurons, self.positions, self.edges)))
        return hashlib.sha256(b"".join(parts)).hexdigest()


def read_skeletons(path: str) -> Skeletons:
    """Return the skeletons at `path`, on a disk or in a bucket.

    Raises:
        VolumeError: there are none, or they cannot be understood.
    """
    place = paths.locate(path)
    kind = place.name.lower()[-4:]
    if kind in (".swc", ".csv"):
        skeletons = (_read_csv if kind == ".csv" else _read_swc)([place])
    elif paths.is_file(place / "info"):
        skeletons = _read_precomputed(place)
    else:
        files = [] if paths.is_file(place) else paths.list_files(place)
        names = sorted(name for name, _ in files if "/" not in name)
        swc = [place / name for name in names if name.lower().endswith(".swc")]
        tables = [place / name for name in ("nodes.csv", "edges.csv") if name in names]
        if not swc and len(tables) < 2:
            raise VolumeError(f"there are no skeletons at {path}; name {KINDS}")
        skeletons = _read_swc(swc) if swc else _read_csv(tables)
    if not len(skeletons.positions):
        raise VolumeError(f"the skeletons at {path} have no nodes; name {KINDS}")
    if not np.isfinite(skeletons.positions).all():
        raise VolumeError(f"a skeleton at {path} has a node whose position is no number; correct it, or leave it out")
    return skeletons


def _skeleton_bytes(file: Location) -> bytes:
    data = paths.read(file, MOST_BYTES + 1)
    if data is None or len(data) > MOST_BYTES:
        why = "is not there" if data is None else f"is larger than {MOST_BYTES >> 20} MiB"
        raise VolumeError(f"{file} {why}; name {KINDS}")
    return data


def _linked(file: Location, ids: Sequence[Hashable], pairs: Iterable[tuple[Hashable, Hashable]]) -> np.ndarray:
    """Return edges (edges, 2) between numbers of nodes, from `pairs` of the nodes' `ids`."""
    numbers = {name: i for i, name in enumerate(ids)}
    if len(numbers) < len(ids):
        double = next(name for i, name in enumerate(ids) if numbers[name] != i)
        raise VolumeError(f"{file}: node {double} is there twice; give each node a number of its own")
    edges = []
    for a, b in pairs:
        if a not in numbers or b not in numbers or a == b:
            raise VolumeError(
                f"{file}: the edge from {a} to {b} leads to no other node that is there; add it, or leave the edge out "
                "(the parent of a root is -1)"
            )
        edges.append((numbers[a], numbers[b]))
    return np.array(edges, np.int64).reshape(-1, 2)


def _read_swc(files: Sequence[Location]) -> Skeletons:
    def parts() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        for file in files:
            text = decoded(_skeleton_bytes(file), errors="replace")
            lines = [line.partition("#")[0].split() for line in text.splitlines()]
            rows = [line for line in lines if line]
            try:
                positions = np.array([[float(row[i]) for i in (4, 3, 2)] for row in rows]).reshape(-1, 3)
                links = [(int(row[0]), int(row[6])) for row in rows]
            except (ValueError, IndexError) as error:
                raise VolumeError(f"{file}: a line is not `id type x y z radius parent`: {error}") from error
            pairs = (link for link in links if link[1] >= 0)
            yield file.name[:-4], positions, _linked(file, [link[0] for link in links], pairs)

    return Skeletons.joined(parts())


def _csv_rows(file: Location, *columns: str) -> Iterator[dict[str, str]]:
    """Yield the lines of a CSV by its columns, which must be there."""
    reader = csv.DictReader(io.StringIO(decoded(_skeleton_bytes(file), errors="replace")), skipinitialspace=True)
    header = [CATMAID.get(name.strip(), name.strip()) for name in reader.fieldnames or ()]
    missing = [name for name in columns if name not in header]
    if missing:
        raise VolumeError(f"{file} has no column {missing[0]}; it needs {', '.join(columns)}, and has {header}")
    reader.fieldnames = header
    for row in reader:
        if any(row[name] is None for name in columns):
            raise VolumeError(f"{file}: line {reader.line_num} is cut short")
        yield {name: row[name].strip() for name in columns}


def _read_csv(files: Sequence[Location]) -> Skeletons:
    """Return the skeletons of one table, whose nodes name their parents, or of nodes and edges."""
    parent = ("parent",) if len(files) == 1 else ()
    rows = list(_csv_rows(files[0], "skeleton", "node", *parent, "x", "y", "z"))
    try:
        positions = np.array([[float(row[axis]) for axis in "zyx"] for row in rows]).reshape(-1, 3)
    except ValueError as error:
        raise VolumeError(f"{files[0]}: a position is no number: {error}") from error
    numbers = {name: i for i, name in enumerate(dict.fromkeys(row["skeleton"] for row in rows))}
    neurons = np.array([numbers[row["skeleton"]] for row in rows], np.int64)
    pairs: Iterable[tuple[str, str]]
    if parent:
        pairs = ((row["node"], row["parent"]) for row in rows if row["parent"].lower() not in ROOTS)
    else:
        pairs = ((row["source"], row["target"]) for row in _csv_rows(files[1], "source", "target"))
    edges = _linked(files[-1], [row["node"] for row in rows], pairs)
    if (neurons[edges[:, 0]] != neurons[edges[:, 1]]).any():
        raise VolumeError(f"{files[-1]} has an edge between two skeletons; give both one name, or leave it out")
    return Skeletons(tuple(numbers), neurons, positions, edges)


def _read_precomputed(folder: Location) -> Skeletons:
    """Return Neuroglancer's skeletons (github.com/google/neuroglancer, src/datasource/precomputed/skeletons.md)."""
    info = read_json(folder / "info") or {}
    if info.get("@type") != "neuroglancer_skeletons":
        if not isinstance(info.get("skeletons"), str):
            raise VolumeError(f"{folder} is a volume without skeletons; name {KINDS}")
        folder = folder / str(info["skeletons"])
        info = read_json(folder / "info") or {}
    if info.get("sharding") is not None:
        raise VolumeError(f"the skeletons at {folder} are sharded, which is not read; store them one file for each")
    transform = np.array(info.get("transform") or np.eye(3, 4), np.float64).reshape(3, 4)
    names = sorted(name for name, _ in paths.list_files(folder) if name.removesuffix(".gz").isdigit())

    def parts() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        for name in names:
            try:
                data = _skeleton_bytes(folder / name)
                data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
                num_nodes, num_edges = np.frombuffer(data, "<u4", 2).tolist()
                nodes = np.frombuffer(data, "<f4", 3 * num_nodes, 8).reshape(-1, 3)
                edges = np.frombuffer(data, "<u4", 2 * num_edges, 8 + 12 * num_nodes).reshape(-1, 2)
            except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise VolumeError(f"{folder / name} is no precomputed skeleton, or is cut short: {error}") from error
            if edges.size and int(edges.max()) >= num_nodes:
                raise VolumeError(f"{folder / name} has an edge to node {int(edges.max())} of {num_nodes}")
            places = nodes.astype(np.float64) @ transform[:, :3].T + transform[:, 3]
            yield name.removesuffix(".gz"), places[:, ::-1], edges

    return Skeletons.joined(parts())


def skeletons_of(labels: np.ndarray, size_nm: Lengths, start_nm: Lengths, ignore: Ignore = None) -> Skeletons:
    """Return a skeleton of each label but 0 and those that `ignore` names, by kimimaro (TEASAR, Sato et al. 2000).

    Args:
        labels: (z, y, x), whole numbers. Objects below 1000 voxels have no skeleton.
        size_nm, start_nm: size of a voxel, and the centre of the first (z, y, x).

    Raises:
        PlanError: kimimaro is not installed.
    """
    try:
        import kimimaro
    except ImportError as error:
        raise PlanError(
            "skeletons of labels are made by kimimaro: pip install 'volpipe[skeletons]', or name files of skeletons"
        ) from error
    known = np.where(is_ignored(labels, ignore), labels.dtype.type(0), labels)
    made = kimimaro.skeletonize(known, anisotropy=size_nm, progress=False, parallel=1)
    origin = np.array(start_nm)
    return Skeletons.joined((str(name), made[name].vertices + origin, made[name].edges) for name in sorted(made))


def check_makeable(box: Box) -> None:
    """Refuse labels that are too many for skeletons to be made of them in one process.

    Raises:
        PlanError: with both numbers, and what to do.
    """
    if box.num_voxels > MOST_VOXELS:
        raise PlanError(
            f"skeletons of labels are made in memory, of up to {MOST_VOXELS:,} voxels, and box {box} has "
            f"{box.num_voxels:,}; give a smaller --roi, or make skeletons block by block (igneous does) and name them"
        )
