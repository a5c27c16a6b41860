"""A site, tried out: one block of each executor is started, one worker of each looks about, and all is stopped again.

Not here: what a worker looks at (volpipe.sites.node_facts), or what is made of its answer (volpipe.sites.findings).
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path

from parsl import python_app
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.executors.base import ParslExecutor
from parsl.executors.high_throughput.errors import VersionMismatch

import volpipe
from volpipe.apps.htex.executor import ResilientExecutor, translate_error
from volpipe.apps.htex.watch import first_words, has_lost_interchange, last_words
from volpipe.apps.pool import load_parsl
from volpipe.errors import ManagerLost, RunError, SiteError, WorkerLost
from volpipe.estimation.limits import unwritable
from volpipe.resolve import describe_error, homes_known
from volpipe.sites import node_facts
from volpipe.sites.find import find_site
from volpipe.sites.findings import PACKAGES, Answer, Checked, Gpus
from volpipe.sites.node_facts import NodeFacts, Question, VolumeBox
from volpipe.volumes.volume import Volume, open_volume

# Evaluated where the worker is. Python alone is needed for that: the volpipe there may be another one, or none.
ASK = "exec(source, names) or names['examine'](question)"
MARK = "mark"
LOOK_SECONDS = 0.5
POLL_SECONDS = 1
DELETE_SECONDS = 5.0
LONGEST_EDGE = 128  # voxels; what some formats call a chunk is the whole volume

OnAnswer = Callable[[Answer], None]
Asked = tuple[ParslExecutor, Future[NodeFacts]]  # and the future answer of its worker


@homes_known
def check_site(
    site: str | Path,
    folder: str | Path = ".",
    volume: str | Path | None = None,
    *,
    wait_seconds: float = 300.0,
    on_start: Callable[[], None] = lambda: None,
    on_answer: OnAnswer = lambda answer: None,
) -> Checked:
    """Return what one worker of each executor of a site finds, and the driver; nothing is left running.

    Args:
        site: a shipped name (see `volpipe sites`) or a Python file.
        folder: folder of the output, which workers should be able to write. Where it does not exist, the nearest above.
        volume: a volume that workers should be able to read. A chunk is read.
        wait_seconds: seconds to wait for workers.
        on_start: called when nothing is left to refuse, before workers are started.
        on_answer: called with each answer as it comes.

    Returns:
        Its `findings()` name each fault: what would fail a run.

    Raises:
        SiteError: no such site, or it cannot be used here.
        VolumeError: there is no such volume here.
    """
    if str(folder).startswith(("s3:", "http:", "https:")):
        raise SiteError(f"--out {folder}: only folders are tried; give the one that the run's folder would be in")
    configure, whole = find_site(str(site)), Path(folder).absolute()
    folder = next(parent for parent in (whole, *whole.parents) if parent.is_dir())
    chosen = open_volume(volume) if volume is not None else None
    with place_in(folder) as place:
        config = configure(place)
        question: Question = {
            "packages": list(PACKAGES),
            "version": volpipe.__version__,
            "mark": str(place / MARK),
            "part": None if chosen is None else _middle(chosen),
            "try_gpus": True,
        }
        here = node_facts.examine({**question, "try_gpus": False})
        checked = Checked(str(folder), str(chosen or ""), here)
        if here["folder_error"]:  # which Parsl needs as well
            return checked
        on_start()
        answers = ask_each(config, question, wait_seconds, on_answer)
        if all(answer.facts is not None for answer in answers):
            return Checked(checked.folder, checked.volume, here, answers)
        kept = folder / f"volpipe-check-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        place.rename(kept)
    return Checked(checked.folder, checked.volume, here, answers, str(kept))


def ask_each(config: Config, question: Question, wait_seconds: float, on_answer: OnAnswer) -> list[Answer]:
    """Return the answer of one worker of each executor of `config`, of which one block each is started and stopped."""
    for executor in config.executors:
        limit(executor)
    config.strategy = "none"  # starts the first blocks, and no more whatever becomes of them
    config.strategy_period = POLL_SECONDS  # within which Parsl's own thread starts them; two at it would start two
    began = time.monotonic()
    with load_parsl(config):
        asked = [(executor, _ask_worker(executor, question)) for executor in config.executors]
        answers = {answer.label: answer for answer in _answers(asked, began, wait_seconds, on_answer)}
    return [answers[executor.label] for executor in config.executors]


def _ask_worker(executor: ParslExecutor, question: Question) -> Future[NodeFacts]:
    source = Path(node_facts.__file__).read_text(encoding="utf-8")
    app = python_app(eval, executors=[executor.label])
    future: Future[NodeFacts] = app(ASK, {"source": source, "names": {"__name__": "checkup"}, "question": question})
    return future


def _answers(asked: Sequence[Asked], began: float, wait_seconds: float, on_answer: OnAnswer) -> Iterator[Answer]:
    """Yield answers as they come, and at the end one for each worker that gave none."""
    left, suspects = list(asked), set[str]()
    while left:
        wait([future for _, future in left], LOOK_SECONDS, FIRST_COMPLETED)
        is_late = time.monotonic() > began + wait_seconds
        for executor, future in list(left):
            label, gpus = executor.label, gpus_of(executor)
            answer = _received_answer(executor, future, began) if future.done() else None
            if answer is None and is_late:
                answer = Answer(label, gpus, trouble=why_late(executor, wait_seconds))
            elif answer is None and (trouble := trouble_of(executor)):
                if label in suspects:  # its answer, or a better reason, may be on its way
                    answer = Answer(label, gpus, trouble=trouble)
                suspects.add(label)
            if answer is not None:
                left.remove((executor, future))
                on_answer(answer)
                yield answer


def _received_answer(executor: ParslExecutor, future: Future[NodeFacts], began: float) -> Answer:
    """Return the answer that has come."""
    label, gpus, error = executor.label, gpus_of(executor), future.exception()
    if error is not None:
        return Answer(label, gpus, trouble=_in_words(executor, error))
    facts = future.result()
    return Answer(label, gpus, facts, start_seconds=time.monotonic() - began - facts["seconds"])


def _in_words(executor: ParslExecutor, error: BaseException) -> str:
    """Return why a worker could not answer."""
    is_given_up = isinstance(executor, HighThroughputExecutor) and executor.bad_state_is_set
    if isinstance(executor, HighThroughputExecutor) and executor.executor_exception is not None:
        error = executor.executor_exception
    if isinstance(error, VersionMismatch):
        theirs, ours = (
            text.replace("py.v=", "Python ").replace(" parsl.v=", " and Parsl ")
            for text in (error.manager_version, error.interchange_version)
        )
        return (
            f"its workers run {theirs}, and this command {ours}, which do not understand each other; let the site "
            "start workers in an environment like this one (worker_init, or the image)"
        )
    if is_given_up:
        return f"it was given up: {first_words(error if isinstance(error, Exception) else None)}"
    error = translate_error(error, [executor])
    if isinstance(error, WorkerLost):
        return f"{error} while it looked about: give it more memory, or mend the package that kills it"
    if isinstance(error, ManagerLost):
        return f"{error}; {_last_of(executor)}"
    return f"its worker could not report: {describe_error(error) if isinstance(error, Exception) else error}"


def trouble_of(executor: ParslExecutor) -> str:
    """Return why no answer can come any more, "" while one can."""
    if not isinstance(executor, HighThroughputExecutor):
        return ""
    if any(status.terminal for status in dict(executor.status_facade).values()):
        return f"no worker could start, or none could report: {_last_of(executor)}"
    if has_lost_interchange(executor):
        return "its interchange ended, so that no answer can come"
    return ""


def why_late(executor: ParslExecutor, wait_seconds: float) -> str:
    waited = f"no answer within {wait_seconds:g} s"
    if not isinstance(executor, HighThroughputExecutor):
        return waited
    if executor.connected_managers():
        return f"{waited}, although a worker runs: something that it reads hangs, such as a mount that does not answer"
    return f"{waited}, for no worker has started; {_last_of(executor)}; wait longer with --wait, or ask for less"


def _last_of(executor: ParslExecutor) -> str:
    """Return the state of an executor's block, and its last message."""
    statuses = list(dict(getattr(executor, "status_facade", {})).values())
    if not statuses:
        return "it has no block"
    return f"its block is {statuses[-1].status_name} and last said: {last_words(statuses[-1])}"


def gpus_of(executor: ParslExecutor) -> Gpus:
    """Return whether `executor` is meant to have GPUs, by its accelerators, label and provider."""
    if getattr(executor, "available_accelerators", None):
        return Gpus.NEEDED
    if executor.label != "gpu" and not executor.label.startswith("gpu_"):
        return Gpus.NONE
    provider = getattr(executor, "provider", None)
    shape = getattr(provider, "shape", provider)
    asked = [getattr(shape, name) for name in ("gpus", "gpus_per_node") if hasattr(shape, name)]
    return Gpus.WAIVED if asked and not any(asked) else Gpus.NEEDED


def limit(executor: ParslExecutor) -> None:
    """Let `executor` have one block."""
    provider = getattr(executor, "provider", None)
    if provider is not None:
        provider.init_blocks = provider.min_blocks = provider.max_blocks = 1
    if isinstance(executor, ResilientExecutor):
        executor.is_patient = False


def _middle(volume: Volume) -> VolumeBox:
    """Return the chunk in the middle of a volume, or a part of it where it is large."""
    edges = [min(edge, LONGEST_EDGE) for edge in volume.spatial_chunks]
    start = [n // 2 // edge * edge for n, edge in zip(volume.spatial_shape, edges, strict=True)]
    stop = [min(a + edge, n) for a, edge, n in zip(start, edges, volume.spatial_shape, strict=True)]
    return {"path": volume.path, "key": volume.key, "start": start, "stop": stop}


@contextmanager
def place_in(folder: Path, instead: str = "choose another --out") -> Iterator[Path]:
    """Give a new folder with a mark in `folder`, as open to others as a run's, and delete it.

    Args:
        instead: what a user does where nothing can be made there.

    Raises:
        RunError: nothing can be made in `folder`.
    """
    place = folder / f".volpipe-check-{uuid.uuid4().hex[:12]}"
    try:
        place.mkdir()
    except OSError as error:
        if isinstance(error, PermissionError):
            raise RunError(f"{folder} {unwritable(folder)}; {instead}") from error
        raise RunError(f"{folder} cannot be written here: {describe_error(error)}; {instead}") from error
    try:
        (place / MARK).touch()
        yield place
    finally:
        _delete_place(place)


def _delete_place(place: Path) -> None:
    """Delete a folder to which a block that ends may still write."""
    until = time.monotonic() + DELETE_SECONDS
    while place.exists():
        shutil.rmtree(place, ignore_errors=True)
        if time.monotonic() > until:
            return
        time.sleep(0.05)
