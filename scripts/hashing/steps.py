"""The steps whose outputs are hashed: inputs, runs, objects, trainings and copies."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from hashing.commands import Step, environment, python

THREADS = ("--config", "threads")
CROP = ("--roi", "16:80,64:192,40:168")
SMALL_CROP = ("--roi", "8:40,16:80,24:88")
CODECS = {
    **dict.fromkeys(("zarr2", "zarr3", "ome-zarr-0.4", "ome-zarr-0.5", "ome-zarr-0.6", "n5"), ("zstd", "gzip", "raw")),
    "hdf5": ("gzip", "raw"),
    "tiff": ("raw", "gzip", "zstd"),
    "mrc": ("raw",),
    "npy": ("raw",),
    "precomputed": ("gzip", "raw", "compressed_segmentation"),
}
SUFFIXES = {
    "n5": ".n5",
    "precomputed": ".precomputed",
    "hdf5": ".h5",
    "tiff": ".tif",
    "mrc": ".mrc",
    "npy": ".npy",
}  # or .zarr


def settings(*pairs: str) -> tuple[str, ...]:
    """Return settings of a recipe as options."""
    return tuple(part for pair in pairs for part in ("--set", pair))


def run(out: str, *options: str, volume: str = "sample.n5/raw", site: tuple[str, ...] = THREADS) -> Step:
    """Return the step that makes `out`, with its window tensors where they are kept: which sums stay hangs on order."""
    suffix = "zarr" if "tensors.format=zarr3" in options else "n5"
    tensors = [f"{out}.run/tensors.{suffix}/tensors/source"] if "--keep-tensors" in options else []
    return Step(("run", *site, *options, "-o", out, volume), (out, *tensors))


def segment(out: str, *pairs: str, volume: str = "affinities.zarr", site: tuple[str, ...] = THREADS) -> Step:
    """Return the step that makes objects, and a table of them."""
    return Step((segmenting(), *site, *settings(*pairs), "-o", out, volume), (out, f"{out}.run/objects.csv"))


def training(out: str, recipe: str, *options: str, site: tuple[str, ...] = THREADS) -> Step:
    names = ["weights.safetensors", "losses.jsonl", "run.toml", "training.json", "curve.png", "checkpoints"]
    names += ["tensors.n5"] if recipe == "superres.toml" else []  # predictions
    return Step(("train", *site, *options, "-o", out, recipe), tuple(f"{out}/{name}" for name in names))


def several(out: str, site: tuple[str, ...] = ()) -> Step:
    """Return the step of several stages: two nets, objects and scores."""
    names = ("restore.zarr", "affinities.zarr", "labels.zarr", "labels.zarr.run/objects.csv", "scores.json")
    return Step(("run", *site, "--recipe", "flow.toml", "-o", out, "small.n5/raw"), tuple(f"{out}/{n}" for n in names))


def segmenting() -> str:
    """Return the command that makes objects of affinities, `segment` or, before it was named so, `label`."""
    told = subprocess.run([*python(), "--help"], check=True, capture_output=True, text=True, env=environment()).stdout
    return next(word for word in ("segment", "label") if f"  {word} " in told)


INPUTS = (
    Step(("sample", "sample.n5", "--shape", "96,256,256", "--workers", "2"), ("sample.n5",)),
    Step(("sample", "small.n5", "--shape", "32,72,72", "--seed", "1"), ("small.n5",)),
)
NETS = (
    # make demo
    run("restored.zarr", "--fresh", *settings("tensors.mode=stored"), site=()),
    run("identity.zarr", *CROP, *settings("net.name=identity")),
    run("default.zarr", *CROP),
    run("hann.zarr", *SMALL_CROP, *settings("windows.blend=hann", "windows.shape=[32,48,48]")),
    run("gaussian.zarr", *SMALL_CROP, *settings("windows.blend=gaussian", "output.dtype=float32")),
    run(
        "constant.zarr", *CROP, "--keep-tensors",
        *settings("net.name=upsample", "net.options.scale=[2,1,3]", "net.options.mode=linear"),
        *settings("windows.blend=constant", "tensors.mode=stored", "windows.shape=[32,48,48]"),
    ),
    # and what else decides how an output is stored, or which part of it
    run("constant.n5", *CROP, *settings("net.name=shift", "windows.blend=constant", "output.format=n5")),
    run("zarr2.zarr", *CROP, *settings("net.name=identity", "output.format=zarr2", "normalise.method=zscore")),
    run(
        "ome4.zarr", *CROP, "--keep-tensors",
        *settings("net.name=identity", "output.format=ome-zarr-0.4", "tensors.mode=stored", "tensors.format=zarr3"),
    ),
    run("masked.zarr", "--mask", "mask.npy", *settings("net.name=identity", "input.empty=0")),
    run("superres_z4.zarr", "--recipe", "superres_z4", *SMALL_CROP),
    run("affinities.zarr", "--recipe", "affinities", *CROP),
)  # fmt: skip


def objects() -> tuple[Step, ...]:
    """Return the steps that make objects, recipes of several stages, and scores."""
    return (
        segment("labels.zarr", "output.block=[64,64,64]"),
        segment("components.zarr", "objects.method=components", "objects.threshold=0.8"),
        segment("mutex.zarr", "objects.agglomerate=mutex", "objects.min_voxels=50"),
        several("flow", THREADS),
        Step(
            ("evaluate", *THREADS, "--json", "image.json", "--picture", "image.png", "restored.zarr", "sample.n5/raw"),
            ("image.json", "image.png"),
        ),
        Step(("evaluate", *THREADS, "--json", "finer.json", "--roi", "0:96,0:48,0:48", "superres_z4.zarr",
              "superres_z4.zarr"), ("finer.json",)),
        Step(("evaluate", *THREADS, "--labels", "--json", "labels.json", "labels.zarr", "components.zarr"),
             ("labels.json",)),
    )  # fmt: skip


TRAININGS = (
    training("superres.train", "superres.toml"),
    training("gan.train", "superres.toml", *settings("adversary.weight=0.01", "adversary.features=4", "train.steps=4")),
    training("affinities.train", "affinities.toml"),
    Step(
        ("sweep", *THREADS, "-o", "superres.sweep", "superres.toml"),
        ("superres.sweep/000/weights.safetensors", "superres.sweep/001/weights.safetensors"),
    ),
)


def copies() -> Iterator[Step]:
    """Yield the steps that copy to every format with every codec, and the first of each back."""
    for format, codecs in CODECS.items():
        for codec in codecs:
            out = f"{format}.{codec}{SUFFIXES.get(format, '.zarr')}"
            source = "labels.zarr" if codec == "compressed_segmentation" else "identity.zarr"
            yield Step(("convert", "--format", format, "--codec", codec, source, out), (out,))
        again = f"{format}.again.npy"
        yield Step(("convert", f"{format}.{codecs[0]}{SUFFIXES.get(format, '.zarr')}", again), (again,))
    yield Step(("convert", "gaussian.zarr", "float.ome.tif"), ("float.ome.tif",))
    yield Step(("convert", "affinities.zarr", "channels.tif"), ("channels.tif",))
    yield Step(("convert", "--chunk", "32", "--shard", "64", "affinities.zarr", "channels.zarr"), ("channels.zarr",))
