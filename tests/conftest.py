"""What all tests share."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from bucket import ACCESS_KEY, SECRET_KEY, Bucket, serving
from hypothesis import HealthCheck, settings
from warm import ADDRESS, FOR_ALL, SCRIPTS, warm

from volpipe.volumes.formats import hdf5_probe
from volpipe.volumes.storage.object_store import ROLES

if TYPE_CHECKING:
    from browser import Browser
    from command import Give

# No deadlines: how long an example takes says what else the machine does. `--hypothesis-profile drawn` draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("drawn", deadline=None, print_blob=True)
settings.load_profile("same")


def examples(few: int, many: int) -> settings:
    """Return how many examples of a law are tried: `few`, as each is a run; `many` of those that are drawn anew."""
    is_drawn = settings.get_current_profile_name() == "drawn"
    return settings(max_examples=many if is_drawn else few, suppress_health_check=[HealthCheck.function_scoped_fixture])


gc.disable()  # while modules are imported: what they make stays
os.environ.pop("COLUMNS", None)  # which pytest-xdist sets: tables would be as narrow
# Commands that tests start are interrupted, also where these tests run in the background or under nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "tests" / "support"
FOLDERS = (ROOT, ROOT / "tests", SUPPORT, *(SUPPORT / name for name in ("clusters", "faults", "screens")))
TEST_PATH = os.pathsep.join(map(str, FOLDERS))
# The longest first, by the time that they took on 2 cores.
LONGEST = tuple(
    f"test_{name}.py"
    for name in (
        "resume", "golden", "pages", "brought", "train_stage", "growth", "update_flow", "bioimageio",
        "everyday_nets", "several_outputs", "workflow", "roi", "sites", "odd_nets", "train", "laws", "placement",
        "identity", "try_net", "agreement", "slabs", "reports", "streams", "field", "k8s", "weights", "object_store",
        "block_stages", "output", "estimate", "slurm", "faults_of_works", "receptive_field", "batch", "workflow_s3",
        "measure_stage", "update", "fine_tuning", "nnunet", "segment", "names", "labels_of_a_part", "cli",
        "contract", "faults", "provenance", "compare_batches", "loaded", "watching", "workers_shown", "denoise",
        "convert", "site_check", "dead_links", "metrics", "workflow_commands",
    )
)  # fmt: skip
SHARED = ROOT.parent / "shared" / "data"


def pytest_configure(config: pytest.Config) -> None:
    """Let the processes of pytest-xdist share what commands are forked from: to import it takes each seconds."""
    if config.getoption("numprocesses", None):
        os.environ[FOR_ALL] = warm().address


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no process is left alone with one at the end."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_collection_finish() -> None:
    """Look for garbage from now on, but not among tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what volpipe remembers of nets out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let what killed processes leave of temporary files go with those of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
        patch.setattr(tempfile, "tempdir", None)  # which is chosen once
        yield


@pytest.fixture(scope="session", autouse=True)
def _warm(_own_temporary_files: None) -> Iterator[None]:
    """Let commands and Parsl's pools be forked from a process that has imported what they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(SCRIPTS), prepend=os.pathsep)
        patch.setenv(ADDRESS, warm().address)
        yield


@pytest.fixture(scope="session")
def _one_hdf5_process() -> Iterator[None]:
    """Look at all HDF5 files in one process: starting it takes a second on a busy machine."""
    with hdf5_probe.keep_process():
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from browser import chromium  # and selenium with it

    with chromium() as started:
        yield started


@pytest.fixture
def _pools_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Parsl's processes be started as users have them."""
    monkeypatch.delenv(ADDRESS)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real volumes."""
    if not SHARED.is_dir():
        pytest.skip("the shared data folder is not beside the project")
    return SHARED


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Let every test draw the weights and windows that it drew the last time."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    """A bucket that this process is told of, and may use."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", *ROLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no such file"))
    with serving() as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
        monkeypatch.setenv("AWS_REGION", "eu-west-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        yield served


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """The command line in this process, as if in a shell in the folder of the test."""
    from command import giver  # which imports this module

    return giver(tmp_path, monkeypatch, capsys)


@pytest.fixture
def _no_process_outlives_a_test(tmp_path: Path) -> Iterator[None]:
    from command import processes_in  # which imports this module

    yield
    for process in processes_in(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended since
            process.kill()
