"""Mistakes as people make them, in a table: each is refused in a sentence that names it, and names nothing of ours."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from command import Give, giver
from conftest import ROOT
from volumes import noise, write_volume

from volpipe.volumes.volume import open_volume

SHAPE = (16, 24, 16)
FOREIGN = (
    r"Input should|Value error|PosixPath|<class|np\.\w+\(|Traceback|unable to parse|validat|object at 0x"
    r"| b'[^ ]|configs/"
)
FILES = {
    "notes.txt": "hello\n",
    "bad.toml": "[windows\n",
    "mine.toml": '[windows]\nshape = "big"\n',
    "section.toml": "windows = 3\n",
    "flow.toml": '[[stage]]\nname = "a b"\nnet = { name = "identity" }\n',
    "train.toml": '[net]\nname = "superres"\n[[data]]\npth = "in.n5"\n',
    "empty.tif": "",
    "cut.tif": "II*\0\x08\0",
    "broken.py": "x = 1\ny = x / 0\n",
    "wrong.py": "def f(:\n",
    "empty.py": "y = 2\n",
    "three.py": "config = 3\n",
    "raising.py": "def config(run_dir):\n    return {}['queue']\n",
    "unbuilt.py": "def build():\n    raise KeyError('conv1')\n",
    "binary.toml": "\udcff",
}
IDENTITY = "run in.n5 --config threads --set net.name=identity"
FOLDER_OF_CHUNKS = "which is a folder of chunks, OME-Zarr (.zarr), N5 (.n5) or Neuroglancer's (.precomputed)"

MISTAKES = [
    # volumes
    ("run notes.txt",
     "notes.txt is a file of 6 bytes in no format that volpipe knows, and looks like a text: it reads"),
    ("run empty.tif", "0 bytes in no format that volpipe knows, for it is empty"),
    ("run cut.tif", "is damaged or cut short"),
    ("run in.n5/rww", "in.n5 holds raw"),
    ("info in.n5 --level 7", "has no level 7; name the group that it is in"),
    ("info in.n5 --level x", "Invalid value for '--level': x is not a whole number from 0"),
    ("info in.n5 --fast --codecs", "--codecs reads voxels, which --fast leaves alone; give one of the two"),
    # where the output goes
    ("run in.n5 -o out.tif",
     f".tif is no format of an output, {FOLDER_OF_CHUNKS}; give --out out.zarr; `volpipe convert"),
    ("run in.n5 -o o.zar", "--out o.zar: .zar is no format; do you mean o.zarr?"),
    ("run in.n5 -o o.ome.zrr", "do you mean o.ome.zarr?"),
    ("plan in.n5 -o O.N55", "do you mean O.n5?"),
    ("segment in.n5 -o l.precomputd", "do you mean l.precomputed?"),
    ("run --recipe segment in.n5 -o seg.zar", "do you mean seg.zarr?"),
    ("batch in.n5 -o many.zar", "out many.zar: .zar is no format; do you mean many.zarr?"),
    ("run in.n5 -o out.png", f".png is no format of an output, {FOLDER_OF_CHUNKS}; give --out out.zarr"),
    ("run in.n5 -o out.h5", "`volpipe convert out.zarr out.h5` then makes a file of it"),
    ("plan in.n5 -o out.MRC", ".mrc is no format of an output"),
    ("run in.n5 -o no/such/out.zarr", "no/such; make it first, or give --parents"),
    ("plan in.n5 -o no/out.n5/raw", "/no; make it first, or give --parents"),
    ("run in.n5 -o x.n5 --set output.format=ome-zarr-0.5", "a name that ends in .zarr, or output.format=n5"),
    ("run in.n5 -o x.zarr --set output.format=n5", "a name that ends in .n5, or output.format=ome-zarr-0.5"),
    ("run --recipe segment in.n5 -o seg.zarr", "writes a folder with an output of each; give a name without .zarr"),
    ("run --recipe segment in.n5 -o no/seg", "/no; make it first, or give --parents"),
    ("plan --recipe segment in.n5 -o seg.tif", ".tif is no format of an output"),
    ("segment in.n5 -o l.tif", ".tif is no format of an output"),
    ("segment in.n5 -o l.precomputed --set output.codec=gzip",
     "--out l.precomputed: output.codec gzip is for OME-Zarr"),
    ("segment in.n5 -o l.zarr --set output.format=precomputed",
     "its name is that of ome-zarr-0.5, and output.format is"),
    ("segment in.n5 -o l.n5", "labels are written as OME-Zarr or precomputed; give a name that ends in .zarr or"),
    ("segment in.n5 -o no/l.zarr", "/no; make it first, or give --parents"),
    ("segment in.n5 --json no/x.json", "there is no folder no; make it first, or give --parents"),
    ("evaluate in.n5 in.n5 --json no/x.json", "there is no folder no; make it first, or give --parents"),
    ("evaluate in.n5 in.n5 --json in.n5", "volpipe: --json in.n5: it is a folder"),
    ("evaluate in.n5 in.n5 --picture no/x.png", "there is no folder no; make it first, or give --parents"),
    ("evaluate in.n5 in.n5 --picture x.jpg", "a PNG is written; give a name that ends in .png"),
    ("convert in.n5 no/out.tif", "/no; make it first, or give --parents"),
    ("convert in.n5 no/out.h5/raw", "/no; make it first, or give --parents"),
    ("sample no/s.n5", "there is no folder no; make it first, or give --parents"),
    ("sample s.tif", "a sample is an N5 container; give a name that ends in .n5"),
    ("train train_superres_z4 -o no/x", "there is no folder no; make it first, or give --parents"),
    ("sweep train.toml -o no/x", "there is no folder no; make it first, or give --parents"),
    # recipes and settings
    ("run --recipe superres_z3 in.n5",
     "no recipe at superres_z3 (did you mean 'superres_z4'?); give a TOML file, or the"),
    ("segment in.n5 --recipe superes_z4", "(did you mean 'superres_z4'?)"),
    ("train superres", "no recipe at superres (did you mean 'superres_z4'?)"),
    ("run --recipe bad.toml in.n5", "volpipe: bad.toml is not valid TOML"),
    ("run --recipe mine.toml in.n5",
     "volpipe: mine.toml: windows.shape: 'big' is neither a list of three whole numbers"),
    ("run --recipe section.toml in.n5", "section.toml: windows: 3 is not a section, which has the keys shape, overlap"),
    ("run --recipe flow.toml in.n5", "flow.toml, stage 1: name: 'a b' is not a text of letters, digits, - and _"),
    ("run --recipe train_superres_z4 in.n5",
     "train_superres_z4 is a recipe of `volpipe train`; give it to that command"),
    ("train segment", "segment is a recipe of `volpipe run`; give it to that command"),
    ("train default", "default: data is missing; give a list of sections, each begun as [[data]]"),
    ("train train.toml",
     "train.toml: data.0.path is missing; give a text; unknown key data.0.pth (did you mean 'path'?)"),
    ("tune default", "the shipped recipe default has no [tune]; add one"),
    ("sweep train.toml", "train.toml has no [sweep]; add one"),
    ("run in.n5 --set windows.shpe=[8,8,8]", "volpipe: --set windows.shpe=[8,8,8]: unknown key windows.shpe (did you"),
    ("run in.n5 --set overlap=8", "--set overlap=8: unknown key overlap (did you mean 'windows.overlap'?)"),
    ("run in.n5 --set infer.batch=two", "--set infer.batch=two: 'two' is neither a whole number from 1 nor auto"),
    ("run in.n5 --set windows.shape=64", "64 is neither a list of three whole numbers [z, y, x] nor auto"),
    ("run in.n5 --set normalise.low=3", "default with --set normalise.low=3: normalise: give low and high together"),
    ("run in.n5 --set normalise.percentiles=[99,1]", "percentiles [99.0, 1.0] must ascend within 0..100"),
    ("run in.n5 --set output.dtype=float", "'float' is not one of auto, uint8, uint16"),
    ("run in.n5 --set net.name=5", "--set net.name=5: 5 is not a text"),
    ("run in.n5 --set net.trust_model=perhaps", "'perhaps' is not true or false"),
    ("run --recipe segment in.n5 --set affinities.windows.shpe=3", "--set affinities.windows.shpe=3: unknown key"),
    ("run --recipe segment in.n5 --set labels.objects.threshold=2", "=2: 2 is not a number from 0 to 1"),
    ("segment in.n5 --set objects.treshold=1", "objects.treshold=1: unknown key objects.treshold (did you mean 't"),
    # nets and weights
    ("run in.n5 --set net.name=unet4d", "no net 'unet4d' (did you mean 'unet3d'?)…identity"),
    ("run in.n5 --set net.name=mine.py:net", "mine.py"),
    ("run in.n5 --set net.weights=w.pt", "no weights at"),
    ("run in.n5 --set net.options.featurs=[1]",
     "net unet3d has no option featurs (did you mean 'features'?); it takes"),
    ("net in.n5", "no net 'in.n5'"),
    # sites
    ("run in.n5 --config k8s_htx", "no site 'k8s_htx' (did you mean 'k8s_htex'?)…local_gpu, slurm_htex, slurm_single"),
    ("run in.n5 --config slurm_htex", "site slurm_htex cannot be used here: partition is not set; write partition"),
    ("sites check nowhere", "no site 'nowhere'"),
    ("slurm script nothing.n5", "no volume at"),
    ("slurm script in.n5 --recipe superres_z3", "(did you mean 'superres_z4'?)"),
    ("slurm script in.n5 --set net.name=unet4d", "no net 'unet4d' (did you mean 'unet3d'?)"),
    ("slurm script in.n5 --config slurm_htx", "no site 'slurm_htx' (did you mean 'slurm_htex'?)"),
    ("slurm script in.n5 -o no/out.zarr", "/no; make it first, or give --parents"),
    ("slurm script in.n5 -o out.tif", ".tif is no format of an output"),
    # what a browser shows
    ("view nothing.zarr", "no volume at"),
    ("view in.n5 nothing.zarr", "no volume at"),
    ("view in.n5 --at 1,2", "write three whole numbers, z,y,x, such as 24,512,512"),
    ("view in.n5 --at 1,2,99", "lies outside of in raw, which has 16 × 24 × 16 voxels (z, y, x), from 0"),
    ("view in.n5 --bind here", "write a port, such as 8765, or an address and a port"),
    # files of users, and outputs that are in the way
    ("run in.n5 --config mine/site.py", "no site 'mine/site.py'…or give a Python file"),
    ("run in.n5 --config broken.py", "site broken.py cannot be loaded: ZeroDivisionError…(broken.py, line 2)"),
    ("run in.n5 --config wrong.py", "site wrong.py cannot be loaded: SyntaxError…(wrong.py, line 1)"),
    ("run in.n5 --config empty.py", "site empty.py has no `config`; define config(run_dir) or config = Config("),
    ("sites check three.py", "site three.py: `config` gives int, not a parsl.config.Config"),
    ("run in.n5 --config raising.py", "site raising.py cannot be used here: KeyError: 'queue' (raising.py, line"),
    ("run in.n5 --set windows.blend=han", "windows.blend…'han'…'hann'"),
    ("run in.n5 --set windows.blend", "--set 'windows.blend': write key=value"),
    ("run in.n5 --recipe in.n5", "in.n5 cannot be read"),
    ("run in.n5 --recipe binary.toml", "binary.toml is not valid TOML"),
    ("run in.n5 --set net.name=nofile.py:build", "no Python file at…nofile.py"),
    ("run in.n5 --set net.name=nomodule:build", "no module 'nomodule'"),
    ("run in.n5 --set net.name=broken.py:build", "broken.py cannot be loaded: ZeroDivisionError…line 2)"),
    ("run in.n5 --set net.name=empty.py:build", "empty.py has no function 'build'; it has y"),
    ("run in.n5 --set net.name=unbuilt.py:build", "cannot be built: KeyError: 'conv1' (unbuilt.py, line 2)"),
    ("run in.n5 --set net.name=unet3d --set windows.shape=[48,48,51]", "axis x: window 51…use 50 or 52"),
    (f"{IDENTITY} -o theirs.zarr", "theirs.zarr exists and no run in…choose another --out"),
    (f"{IDENTITY} -o theirs.zarr --fresh", "theirs.zarr exists and no run in…--out"),
    (f"{IDENTITY} -o in.n5", "in.n5 would overwrite the volume…choose another --out"),
    (f"{IDENTITY} -o in.n5/s0", "s0 would lie inside the volume…choose another --out"),
    (f"{IDENTITY} -o in.n5/attributes.json/x", "would lie inside the volume"),
    (f"{IDENTITY} -o broken.py/x.zarr", "broken.py is a file, and no folder; choose another place"),
    # numbers and boxes
    ("run in.n5 --tolerate 5", "Invalid value for '--tolerate': 5 is not a number from 0 to 1"),
    ("run in.n5 --tolerate many", "many is not a number"),
    ("sample s.n5 --workers 0", "0 is not a whole number from 1"),
    ("sample s.n5 --voxel-size-nm 8,8", "--voxel-size-nm '8,8': write three lengths z,y,x in nm, such as 16,8,8"),
    ("sample s.n5 --voxel-size-nm 16x8x8furlong", "write three lengths z,y,x in nm, such as 16,8,8"),
    ("convert in.n5 out.zarr --voxel-size-nm 8,8", "--voxel-size-nm '8,8': write three lengths z,y,x in nm, such as"),
    ("sample s.n5 --voxel-size-nm 0,8,8", "sample voxel size is 0.0 nm on axis z; give a length above 0"),
    ("convert in.n5 out.zarr --bin 2,0,1", "--bin '2,0,1': write one number above 0, or three, z,y,x"),
    ("convert in.n5 out.zarr --bin 5", "axis z of"),
    ("net unet3d --error -1", "-1 is not a number from 0"),
    ("evaluate in.n5 in.n5 --margin 99,0,0", "which has 16 × 24 × 16 voxels"),
    ("evaluate in.n5 in.n5 --data-range big", "big is not a number"),
    # outputs that are none
    ("verify nothing", "there is nothing at nothing; name an output of `volpipe run` or `volpipe segment`"),
    ("reproduce in.n5", "says nothing of where it comes from"),
    ("status nothing", "no run of nothing was started"),
]  # fmt: skip


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, errors="surrogateescape")
    (tmp_path / "theirs.zarr").mkdir()
    (tmp_path / "theirs.zarr/precious").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("VOLPIPE_SITE", "VOLPIPE_SLURM_PARTITION"):
        monkeypatch.delenv(name, raising=False)
    return giver(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_named_and_leaves_nothing_behind(tmp_path: Path, give: Give, line: str, words: str) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    ended = give(*shlex.split(line))
    assert (ended.code, ended.out) == (2, "")
    assert [part for part in words.split("…") if part not in ended.err] == []
    assert re.findall(FOREIGN, ended.err) == [] and str(ROOT) not in ended.err
    if not ended.err.startswith("Usage: "):
        assert ended.err.startswith("volpipe: ") and ended.err.count("\n") == 1
    after = sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".run"))
    assert after == [name for name in before if not name.endswith(".run")]
    assert (tmp_path / "theirs.zarr/precious").exists()
    assert np.array_equal(open_volume(tmp_path / "in.n5").open()[...], noise(SHAPE))


def test_the_suffix_of_an_output_chooses_its_format(tmp_path: Path, give: Give) -> None:
    run = ("run", "--config", "threads", "--set", "net.name=identity", "in.n5")
    assert give(*run, "-o", "out.n5").code == 0
    assert give(*run, "-o", "plain").code == 0
    assert give(*run, "--parents", "-o", "new/folder/out.zarr").code == 0
    formats = {name: open_volume(tmp_path / name).format for name in ("out.n5", "plain", "new/folder/out.zarr")}
    assert formats == {"out.n5": "n5", "plain": "zarr3", "new/folder/out.zarr": "zarr3"}
    assert np.array_equal(open_volume(tmp_path / "out.n5").open()[...], noise(SHAPE))


def test_parents_makes_folders_in_every_command(tmp_path: Path, give: Give) -> None:
    assert give("convert", "--parents", "in.n5", "a/b/out.tif").code == 0
    assert give("sample", "--parents", "--shape", "8,8,8", "c/d/s.n5").code == 0
    scores = ("--json", "e/f/x.json", "--picture", "g/h/x.png")
    assert give("evaluate", "--config", "threads", "--parents", "in.n5", "in.n5", *scores).code == 0
    made = ("a/b/out.tif", "c/d/s.n5", "e/f/x.json", "g/h/x.png")
    assert [name for name in made if not (tmp_path / name).exists()] == []


def test_a_script_of_a_job_warns_of_what_cannot_be_seen_and_stays_a_script(give: Give) -> None:
    alone, away = (
        give("slurm", "script", "in.n5"),
        give("slurm", "script", "--config", "slurm_htex", "/far/off/v/in.n5"),
    )
    assert (alone.code, away.code) == (0, 0)
    assert "you gave no --config: site local computes all blocks in the driver's own job, on its 2 cores" in alone.err
    mount, site = away.err.splitlines()
    assert mount == "volpipe: warning: /far/off/v is not here; whether in.n5 is in it was not checked"
    assert site.startswith("volpipe: warning: site slurm_htex cannot be used here: ")
    assert site.endswith("; whether the job can use it was not checked")
    for ended in (alone, away):
        assert ended.out.startswith("#!/bin/bash\n") and "warning" not in ended.out


def test_a_command_that_reproduces_needs_no_file(tmp_path: Path, give: Give) -> None:
    """The word none stands for a recipe without a file, so that a change of the default recipe changes nothing."""
    run = ("run", "--config", "threads", "--set", "net.name=shift", "--set", "windows.blend=hann", "in.n5")
    assert give(*run, "-o", "out.zarr").code == 0
    printed = give("reproduce", "out.zarr").out
    assert "--recipe none" in printed and "/dev/null" not in printed
    _, _, command = printed.partition(" && volpipe ")
    assert give(*shlex.split(command)).code == 0
    first, again = (open_volume(tmp_path / name).open()[...] for name in ("out.zarr", "out_again.zarr"))
    assert np.array_equal(first, again)
