"""Trials of how volumes are used, and not of their bytes: names, links, tables of colours, streams, options.

Not here: damaged bytes (mutations, trial). Each trial draws one case from a seed and states a law; what breaks it is
"wrong". Other programs say what is right: Pillow, zarr-python, the file system.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import traceback
import unicodedata
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing.originals import Original, make
from fuzzing.trial import Outcome, lay

Rng = np.random.Generator
VOLPIPE = (sys.executable, "-m", "volpipe")
SECONDS = 120.0  # of a command
NAMED = ("n5 raw", "n5 gzip", "zarr2 zlib", "zarr3 gzip", "zarr3 shards", "tiff plain", "hdf5 gzip", "mrc plain",
         "npy plain")  # fmt: skip
ODD_LETTERS = "\\%#?*[]{}:;!$&'\"`|<>~ +=@,\t\n"
FILE_OPTIONS = (  # FILE is a file that the option writes
    ("evaluate", "--config", "threads", "a.npy", "b.npy", "--json", "FILE"),
    ("evaluate", "--config", "threads", "a.npy", "b.npy", "--picture", "FILE"),
    ("evaluate", "--config", "threads", "a.npy", "b.npy", "--report", "FILE"),
    ("compare", "--config", "threads", "a.npy", "b.npy", "--json", "FILE"),
    ("run", "--config", "threads", "--set", "net.name=identity", "a.npy", "-o", "o.zarr", "--log-json", "FILE"),
    ("run", "--config", "threads", "--set", "net.name=identity", "a.npy", "-o", "o.zarr", "--metrics", "FILE"),
)


@dataclass(frozen=True)
class Place:
    """Where a trial works, an empty folder, and the command that it gives for `volpipe`."""

    folder: Path
    command: Sequence[str] = VOLPIPE


def names(rng: Rng, place: Place) -> Outcome:
    """A volume, and a copy, in a folder of any name are read and written there, or refused."""
    from volpipe.volumes.convert import convert
    from volpipe.volumes.volume import open_volume

    name = draw_name(rng)
    original = make(str(rng.choice(NAMED)))
    lay(original, dict(original.files), place.folder, place.folder / name)
    volume = open_volume(place.folder / name / original.location, _key(original))
    if not np.array_equal(volume.open()[...], original.data):
        return Outcome("wrong", f"{original.name} in {name!r} reads otherwise")
    before = {path.name for path in place.folder.iterdir()}
    copy = convert(volume, place.folder / f"{name}{rng.choice(['.zarr', '.n5', '.npy'])}")
    added = {path.name for path in place.folder.iterdir()} - before
    if added != {Path(copy.path).name} or not np.array_equal(copy.open()[...], original.data):
        return Outcome("wrong", f"a copy at {Path(copy.path).name!r} reads otherwise, or made {sorted(added)}")
    if (chunks := Path(copy.path)).is_dir() and not _num_chunks(chunks):
        return Outcome("wrong", f"the chunks of {copy.path!r} are elsewhere")
    return Outcome("same")


def _key(original: Original) -> str | None:
    return "volumes/raw" if original.format == "hdf5" else None


def _num_chunks(folder: Path) -> int:
    """Return how many files in `folder` are no metadata."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.suffix != ".json" and not path.name.startswith(".z") for path in files)


def draw_name(rng: Rng) -> str:
    """Return a name that Linux allows: of plain letters, of those with a meaning somewhere, and of all of Unicode."""
    letters = []
    for _ in range(int(rng.integers(1, 9))):
        kind = rng.random()
        odd = ODD_LETTERS[int(rng.integers(len(ODD_LETTERS)))]
        letters.append(odd if kind < 0.4 else "abcXYZ019"[int(rng.integers(9))] if kind < 0.8 else _letter(rng))
    return "n" + "".join(letters)


def _letter(rng: Rng) -> str:
    while True:
        letter = chr(int(rng.integers(0x21, 0x2FFFF)))
        if unicodedata.category(letter)[0] in "LMNPS" and letter != "/":
            return letter


def links(rng: Rng, place: Place) -> Outcome:
    """A volume of which a chunk is a link that leads nowhere is refused when it is read: what is there is not known."""
    from volpipe.volumes.volume import open_volume

    original = make(str(rng.choice([name for name in NAMED if make(name).chunks is not None])))
    lay(original, dict(original.files), place.folder, place.folder / "in")
    chunks = sorted(name for name in original.files if Path(name).name.strip("0123456789.c") == "")
    for name in rng.choice(chunks, int(rng.integers(1, len(chunks) + 1)), replace=False):
        file = place.folder / "in" / str(name)
        file.unlink()
        file.symlink_to(f"/nonexistent/annex/{file.name}")
    data = open_volume(place.folder / "in" / original.location, _key(original)).open()[...]
    return Outcome("wrong", f"{original.name}: {np.mean(data != original.data):.0%} of the voxels are made up")


def palettes(rng: Rng, place: Place) -> Outcome:
    """A picture with a palette is the numbers that Pillow reads, and a note says that no colour is applied."""
    from PIL import Image

    from volpipe.volumes.volume import open_volume

    bits, suffix = int(rng.choice([1, 2, 4, 8])), str(rng.choice([".png", ".tif"]))
    numbers = rng.integers(0, 2**bits, rng.integers(1, 40, 2)).astype(np.uint8)
    picture = Image.fromarray(numbers, "P")
    picture.putpalette(rng.integers(0, 256, 3 * 2**bits, dtype=np.uint8).tobytes())
    settings: dict[str, Any] = {"bits": bits} if suffix == ".png" else {}  # Any: Pillow's own
    if suffix == ".png" and rng.random() < 0.3:
        settings["transparency"] = rng.bytes(2**bits)
    file = place.folder / f"a{suffix}"
    picture.save(file, **settings)
    expected = np.asarray(Image.open(file))
    volume = open_volume(file)
    if not np.array_equal(volume.open()[...].reshape(expected.shape), expected):
        return Outcome("wrong", f"{bits} bits {suffix}: {volume.shape}, and not the numbers of Pillow")
    is_said = any("palette" in note for note in volume.notes)
    return Outcome("same" if is_said else "wrong", "" if is_said else "no note says palette")


def streams(rng: Rng, place: Place) -> Outcome:
    """A command whose output is closed or full ends without traceback or signal; its copy is whole if it says so."""
    data = _two_volumes(place.folder)
    command = [*place.command, "convert", "a.npy", "c.npy"]
    kinds = [str(rng.choice(["pipe", "closed", "/dev/full"])) for _ in range(2)]
    redirect = "".join(
        f" {number}>{'&-' if kind == 'closed' else kind}"
        for number, kind in zip((1, 2), kinds, strict=True)
        if kind != "pipe"
    )
    ended = _give(["sh", "-c", f'"$@"{redirect}', "sh", *command], place.folder)
    if isinstance(ended, Outcome):
        return ended
    if "Traceback" in ended.stdout + ended.stderr or ended.returncode < 0 or ended.returncode > 128:
        return Outcome("wrong", f"{kinds}: exit code {ended.returncode}: {(ended.stdout + ended.stderr)[-300:]}")
    copy = place.folder / "c.npy"
    if ended.returncode == 0 and not (copy.is_file() and np.array_equal(np.load(copy), data)):
        return Outcome("wrong", f"{kinds}: exit code 0, and no whole copy")
    return Outcome("refused" if ended.returncode else "same")


def options(rng: Rng, place: Place) -> Outcome:
    """No option that names a file to write changes a file that was there, or what it leads to."""
    _two_volumes(place.folder)
    targets = ["b.npy", "labels.csv", "folder", "link.npy"]
    (place.folder / "labels.csv").write_text("id,name\n1,mine\n")
    (place.folder / "folder").mkdir()
    (place.folder / "folder/kept.txt").write_text("kept")
    (place.folder / "link.npy").symlink_to("a.npy")
    before = _contents(place.folder)
    command = FILE_OPTIONS[int(rng.integers(len(FILE_OPTIONS)))]
    target = targets[int(rng.integers(len(targets)))]
    ended = _give([*place.command, *(target if part == "FILE" else part for part in command)], place.folder)
    if isinstance(ended, Outcome):
        return ended
    lost = [name for name, text in before.items() if _contents(place.folder).get(name) != text]
    if lost:
        return Outcome("wrong", f"{' '.join(command[-2:])} as {target}: {', '.join(lost)} changed")
    return Outcome("refused" if ended.returncode else "same")


def _two_volumes(folder: Path) -> np.ndarray:
    """Write two volumes, a.npy and b.npy, into `folder`, and return the first."""
    data = np.random.default_rng(0).integers(1, 256, (4, 16, 16), dtype=np.uint8)
    np.save(folder / "a.npy", data)
    np.save(folder / "b.npy", data // 2)
    return data


def _contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file in `folder`, and where each link leads."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {
        name: str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        for name, path in paths.items()
        if path.is_symlink() or path.is_file()
    }


def _give(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str] | Outcome:
    """Return how a command in `folder` ended, or that it did not."""
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome("hang", f"no answer for {SECONDS:.0f} s: {' '.join(command)}")


TRIALS: Mapping[str, Callable[[Rng, Place], Outcome]] = {
    "names": names, "links": links, "palettes": palettes, "streams": streams, "options": options,
}  # fmt: skip
COMMANDS = ("streams", "options")  # trials that start a process each


def attempt(name: str, seed: int, number: int, command: Sequence[str] = VOLPIPE) -> Outcome:
    """Return what comes of case `number` of the trial `name`, in a folder of its own."""
    from volpipe.errors import VolpipeError

    rng = np.random.default_rng([zlib.crc32(name.encode()), seed, number])
    with tempfile.TemporaryDirectory(prefix="usage-") as folder:
        try:
            return TRIALS[name](rng, Place(Path(folder), command))
        except VolpipeError as error:
            return Outcome("refused", str(error))
        except Exception:  # the point of it all
            return Outcome("error", traceback.format_exc())
