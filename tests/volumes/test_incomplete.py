"""An output that is not complete says so itself, and who would read zeros for voxels is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bucket import Bucket
from inline import Inline, Stopped
from volumes import fingerprint, noise, windowed, write_volume

import volpipe as vp
from volpipe.errors import PlanError, VolumeError
from volpipe.runs.run_folder import RunFolder
from volpipe.synthetic.volume import SyntheticVolume, write_sample
from volpipe.volumes.formats import container, precomputed
from volpipe.volumes.storage import metadata

SHAPE = (16, 16, 16)
SETTINGS = [
    "net.name=identity",
    *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"),
    "output.shard=[8,8,8]",
    "output.chunk=[8,8,8]",
]
FORMATS = {"o5.zarr": "ome-zarr-0.5", "o4.zarr": "ome-zarr-0.4", "z2.zarr": "zarr2", "o.n5": "n5", "o.precomputed": ""}
VOXEL_SIZE = "input.voxel_size_nm=8,8,8"


def run(out: str, *settings: str, site: Any = None, **options: Any) -> vp.Report:  # Any: a pool
    chosen = [*SETTINGS, VOXEL_SIZE, "output.levels=2", *settings]
    if FORMATS.get(out):
        chosen.append(f"output.format={FORMATS[out]}")
    report = vp.run("raw.n5/raw", out=out, site=site or Inline(), settings=chosen, **options)
    assert isinstance(report, vp.Report)
    return report


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    voxels = noise(SHAPE) | 1  # no voxel is 0
    write_volume(tmp_path / "raw.n5", voxels, 8)
    monkeypatch.chdir(tmp_path)
    return voxels


def interrupt(out: str, most_tasks: int = 4) -> None:
    with pytest.raises(Stopped):
        run(out, site=Inline(most_tasks=most_tasks))


@pytest.mark.parametrize("out", FORMATS)
def test_an_interrupted_output_is_not_read_until_it_is_complete(out: str, data: np.ndarray) -> None:
    interrupt(out)
    shutil.rmtree(f"{out}.run" if out == "o.n5" else "nothing", ignore_errors=True)  # the output knows by itself
    for level in range(2):
        volume = vp.open(out, level=level)
        assert "(incomplete" in repr(volume).partition("\n")[0]
        assert "(incomplete" in repr(vp.info(volume)).partition("\n")[0]
        with pytest.raises(VolumeError, match="what is missing would read as zeros"):
            volume[...]
    with pytest.raises(VolumeError, match="incomplete"):
        vp.convert(out, "copy.n5")
    accepted = vp.open(out, view=vp.View(incomplete=True))
    copy = vp.convert(accepted, "copy.zarr")
    np.testing.assert_array_equal(copy[...], accepted[...])
    assert np.isin(copy[...], [0, *np.unique(data)]).all()
    assert copy.attributes["volpipe"]["copied_from"]["view"]["incomplete"] is True
    if out != "o.n5":
        assert run(out).is_complete
        np.testing.assert_array_equal(vp.open(out)[...], data)
        assert "incomplete" not in repr(vp.open(out))
        run(f"whole_{out}", f"output.format={FORMATS[out]}" if FORMATS[out] else "net.name=identity")
        assert attributes_of(out) == attributes_of(f"whole_{out}")


def attributes_of(out: str) -> dict[str, Any]:  # Any: JSON
    """Return the attributes of an output less its name."""
    text = json.dumps(container.read_attributes(Path(out).absolute()))
    return dict(json.loads(text.replace("whole_", "")))


def test_the_name_that_viewers_show_says_it_as_long_as_it_is_so() -> None:
    import zarr

    def name() -> object:
        return zarr.open_group("o5.zarr", mode="r").attrs["ome"]["multiscales"][0]["name"]  # type: ignore[index, call-overload]

    interrupt("o5.zarr")
    assert name() == "o5 (incomplete)"
    run("o5.zarr")
    assert name() == "o5"


def test_a_part_is_read_within_it_and_joined_with_others(data: np.ndarray) -> None:
    run("o5.zarr", only="0:8,0:16,0:16")
    volume = vp.open("o5.zarr")
    assert "written: 0:8,0:16,0:16" in repr(volume)
    np.testing.assert_array_equal(volume.crop(vp.Box((0, 3, 0), (8, 16, 9)))[0], data[:8, 3:, :9])
    np.testing.assert_array_equal(volume[2, 1:3], data[2, 1:3])
    assert vp.evaluate("o5.zarr", "raw.n5/raw", roi="0:8,0:16,0:16", site=Inline()).scores is not None
    for read in (
        lambda: volume[:9],
        lambda: np.asarray(volume.dask()),
        lambda: volume.crop(vp.Box((7, 0, 0), (9, 1, 1))),
    ):
        with pytest.raises(VolumeError, match="only 0:8,0:16,0:16 is written"):
            read()
    with pytest.raises(VolumeError, match="incomplete"):  # each voxel of it is the mean of some that are missing
        vp.open("o5.zarr", level=1)[...]
    run("o5.zarr", only="8:16,0:8,0:16")
    np.testing.assert_array_equal(vp.open("o5.zarr")[:, :8], data[:, :8])
    with pytest.raises(VolumeError, match="reach beyond"):
        vp.open("o5.zarr")[...]
    assert run("o5.zarr").is_complete
    np.testing.assert_array_equal(vp.open("o5.zarr")[...], data)


def read_by(command: str) -> None:
    """Read the output o5.zarr, or use it, by `command`."""
    commands: dict[str, Callable[[], object]] = {
        "run": lambda: vp.run("o5.zarr", out="r.zarr", site=Inline(), settings=SETTINGS),
        "estimate": lambda: vp.estimate(vp.plan("o5.zarr", out="r.zarr", site=None, settings=SETTINGS)),
        "mask": lambda: run("m.zarr", "input.mask=o5.zarr"),
        "segment": lambda: vp.segment("o5.zarr", out="s.zarr", site=Inline(), settings=["input.kind=foreground"]),
        "evaluate": lambda: vp.evaluate("o5.zarr", "raw.n5/raw", site=Inline()),
        "reference": lambda: vp.evaluate("raw.n5/raw", "o5.zarr", site=Inline()),
        "compare": lambda: vp.compare("o5.zarr", "raw.n5/raw", any_input=True, site=Inline()),
        "train": lambda: vp.train(TRAINING, out="t", site=Inline()),
        "labels": lambda: vp.train(LEARNING_LABELS, out="t", site=Inline()),
    }
    commands[command]()


TRAINING: dict[str, Any] = {  # Any: TOML
    "net": {"name": "unet3d"},
    "data": [{"path": "o5.zarr"}],
    "samples": {"shape": [16, 16, 16]},
    "normalise": {"low": 0, "high": 255},
}
LEARNING_LABELS = TRAINING | {
    "net": {"name": "unet3d", "options": {"out_channels": 9, "output": "sigmoid"}},
    "data": [{"path": "raw.n5", "labels": "o5.zarr"}],
}


@pytest.mark.parametrize(
    "command", ["run", "estimate", "mask", "segment", "evaluate", "reference", "compare", "train", "labels"]
)
def test_nobody_takes_it_for_a_volume(command: str) -> None:
    interrupt("o5.zarr")
    before = sorted(path for path in Path.cwd().iterdir() if path.suffix != ".run")
    with pytest.raises((VolumeError, PlanError), match=r"o5.zarr:s0 is incomplete|A is not complete.*: o5.zarr;"):
        read_by(command)
    left = sorted(path for path in Path.cwd().iterdir() if path.suffix != ".run" and path.name != "t")
    assert left == before


def test_who_accepts_it_reads_it_and_says_so() -> None:
    interrupt("o5.zarr")
    report = vp.run("o5.zarr", out="r.zarr", site=Inline(), settings=[*SETTINGS, "input.incomplete=true"])
    assert isinstance(report, vp.Report)
    expected = vp.open("o5.zarr", view=vp.View(incomplete=True))[...]
    np.testing.assert_array_equal(vp.open("r.zarr")[...], expected)
    assert container.read_attributes(Path("r.zarr").absolute())["volpipe"]["recipe"]["input"]["incomplete"] is True
    scores = vp.evaluate("o5.zarr", "raw.n5/raw", incomplete=True, site=Inline())
    assert scores.to_json()["incomplete"] is True


@pytest.mark.parametrize("array_format", ["zarr", "n5", "precomputed"])
def test_wherever_a_session_dies_what_is_there_is_not_taken_for_complete(
    array_format: str, data: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file of metadata in turn is the last that is written; until the mark goes, nothing may be read."""
    out, write, written = f"out.{array_format}", metadata.write_json, 0

    def write_some(*arguments: Any) -> None:
        nonlocal written
        if written == most:
            raise Stopped
        written += 1
        write(*arguments)

    for module in (metadata, container, precomputed):
        monkeypatch.setattr(module, "write_json", write_some)
    for most in range(40):
        written = 0
        try:
            run(out, fresh=True)
        except Stopped:
            if Path(out).exists() and list(container.walk(Path(out).absolute(), enter_groups=False)):
                try:
                    voxels = vp.open(out)[...]
                except VolumeError as error:
                    assert "incomplete" in str(error), most
                else:
                    np.testing.assert_array_equal(voxels, data)
            continue
        break
    assert 5 < most < 39
    np.testing.assert_array_equal(vp.open(out)[...], data)


def test_an_update_that_stops_leaves_its_output_as_it_was_or_incomplete(data: np.ndarray) -> None:
    run("o5.zarr", update=True)
    changed = noise(SHAPE, seed=3)
    write_volume(Path("raw.n5"), changed, 8)
    num_refused = 0
    for most_tasks in range(1, 60):
        try:
            run("o5.zarr", site=Inline(most_tasks=most_tasks), update=True)
        except Stopped:
            try:
                np.testing.assert_array_equal(vp.open("o5.zarr")[...], data)
            except VolumeError:
                num_refused += 1
        else:
            break
    assert num_refused
    np.testing.assert_array_equal(vp.open("o5.zarr")[...], changed)


def test_an_output_with_holes_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    voxels = noise((16, 16, 16), "float32")
    voxels[0, 0, 0] = np.nan  # the block that has it fails
    write_volume(Path("holes.n5"), voxels, 8)
    report = vp.run(
        "holes.n5/raw",
        out="o5.zarr",
        site=Inline(),
        tolerate=1,
        settings=[*SETTINGS, "normalise.low=0", "normalise.high=9"],
    )
    assert isinstance(report, vp.Report)
    assert report.missing
    with pytest.raises(VolumeError, match="incomplete"):
        vp.open("o5.zarr")[...]


def test_labels_that_are_not_painted_are_not_read(data: np.ndarray) -> None:
    settings = ["input.kind=foreground", "objects.method=components", "output.block=[8,8,8]", "output.chunk=[4,4,4]"]
    num = 0
    while True:  # each time a task more is done
        num += 1
        try:
            vp.segment("raw.n5/raw", out="s.zarr", site=Inline(most_tasks=num), settings=settings, fresh=True)
        except Stopped:
            if not Path("s.zarr").exists():
                continue
            with pytest.raises(VolumeError, match=r"s.zarr:s0 is incomplete"):
                vp.open("s.zarr")[...]
            continue
        break
    assert num > 4
    assert vp.open("s.zarr")[...].any()


def test_an_output_of_a_complete_run_keeps_its_bytes_when_it_is_asked_for_again() -> None:
    run("o5.zarr")
    before = fingerprint("o5.zarr")
    assert run("o5.zarr").was_complete
    assert fingerprint("o5.zarr") == before
    assert RunFolder(Path("o5.zarr.run")).journal.is_file()


def test_an_output_in_a_bucket_says_so_too(bucket: Bucket, data: np.ndarray) -> None:
    out = "s3://cells/o5.zarr"
    with pytest.raises(Stopped):
        vp.run("raw.n5/raw", out=out, site=Inline(most_tasks=4), settings=SETTINGS)
    with pytest.raises(VolumeError, match="incomplete"):
        vp.open(out)[...]
    vp.run("raw.n5/raw", out=out, site=Inline(), settings=SETTINGS)
    np.testing.assert_array_equal(vp.open(out)[...], data)


def test_a_sample_that_is_not_finished_is_not_read() -> None:
    def stop(done: int, num_boxes: int) -> None:
        raise Stopped

    sample = SyntheticVolume((48, 16, 16))
    with pytest.raises(Stopped):
        write_sample(Path("s.n5"), sample, chunk=8, on_progress=stop)
    for key in ("raw", "labels"):
        with pytest.raises(VolumeError, match="incomplete"):
            vp.open("s.n5", key)[...]
    write_sample(Path("s.n5"), sample, chunk=8)
    np.testing.assert_array_equal(vp.open("s.n5", "raw")[...], sample.raw(vp.Box.from_shape(sample.shape)))
    assert "volpipe" not in vp.open("s.n5", "raw").attributes
