"""Executors that hold: Parsl's for many workers, less the ways in which it lets a long run hang, leak or give up.

Not here: sites, which say how many workers of which kind (configs); the watch over those that run (watch). What of a
driver rests on parts of Parsl that it does not promise is here and in watch, what of its other processes in processes,
each with its reason; tests/apps/test_parsl.py, test_interchange.py and test_parsl_blocks.py look whether it is so.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from parsl.executors import HighThroughputExecutor
from parsl.executors.base import ParslExecutor
from parsl.executors.high_throughput import errors as lost
from parsl.executors.high_throughput.executor import DEFAULT_INTERCHANGE_LAUNCH_CMD
from parsl.executors.status_handling import BlockProviderExecutor
from parsl.jobs.error_handlers import windowed_error_handler
from parsl.launchers import SimpleLauncher
from parsl.providers import LocalProvider, SlurmProvider
from parsl.providers.base import ExecutionProvider

from volpipe.apps.htex.launch import OUT_OF_MEMORY, blocks_folder, grouped, launch_command
from volpipe.apps.htex.processes import INTERCHANGE, are_installed, port_file
from volpipe.errors import NOTICE, ManagerLost, SiteError, WorkerLost
from volpipe.volumes.storage.paths import atomic_write

# Where the system can tie them, the interchange ends with the driver, even when that is killed, but not by the
# terminal's Ctrl-C: the driver needs it to stop its workers. Without it, workers and their jobs end after the
# heartbeat's threshold.
TIED = ("setsid", "setpriv", "--pdeathsig", "TERM", "--")
FAILED_BLOCKS = 5
START_SECONDS = 60
SEND_MILLISECONDS = 500  # after which a task that no interchange took is sent again
TAKE_SECONDS = 5.0  # that an interchange may leave a task with us, once it has taken one
ANSWER_SECONDS = 15.0  # of an interchange, which answers within milliseconds where it is well
LISTEN_SECONDS = 120  # that an interchange may take to start
SIMPLE = SimpleLauncher()
# After a refusal the scheduler is asked again later, twice as late each time.
FIRST_BACK_OFF, MOST_BACK_OFF = 2.0, 300.0
BUSY_SECONDS = 1800.0  # that a scheduler which takes nothing for now is waited for
SHARED_SECONDS = 300.0  # the same for a limit that other executors may have used up, which give back idle blocks

log = logging.getLogger(__name__)


class ResilientExecutor(HighThroughputExecutor):
    """A HighThroughputExecutor for runs of days; arguments are those of Parsl's, and these.

    Blocks that have not connected yet are never taken for idle ones. A block that the scheduler refuses, for a quota
    above all, is no failure while others of the executor are accepted. The interchange ends with the driver, and blocks
    with the interchange. Traffic is encrypted, unless workers are on this machine. GPU workers of Slurm jobs use the
    GPUs that Slurm gave.

    Args:
        label: names the executor; "cpu", "gpu" or "gpu_..." get the stages of that kind.
        failed_blocks: after as many blocks in a row that failed, the executor is given up.
        longest_task: seconds; blocks take no task any more when what is left of their walltime is less, and end.
        start_seconds: of a block's walltime that pass before its workers are ready, and after they are done.
        shares_files: whether workers are on this machine and see the driver's files by the same paths: then they import
            what they need while the interchange starts, and read its port in a file.
        node_directory: on each node's own disk, where workers keep chunks of the input; it may hold variables that the
            shell of a block knows.

    Raises:
        SiteError: the walltime is too short for the longest task.
    """

    def __init__(
        self,
        label: str,
        provider: ExecutionProvider,
        *,
        failed_blocks: int = FAILED_BLOCKS,
        longest_task: float | None = None,
        start_seconds: float = START_SECONDS,
        shares_files: bool = False,
        node_directory: str | None = None,
        **arguments: Any,  # Any: those of Parsl's executor
    ) -> None:
        self.failed_blocks, self.longest_task, self.start_seconds = failed_blocks, longest_task, start_seconds
        self.node_directory = node_directory
        self._listening, self._listens = threading.Lock(), False
        self._sending, self._asking, self._is_closed = threading.Lock(), threading.Lock(), False
        self.siblings: Sequence[ParslExecutor] = ()  # the other executors of the site, with which it may share limits
        self.is_patient = True  # whether a refusal that may pass is waited for
        self._refusals, self._asks_at, self._has_told = 0, 0.0, False
        self._refused_since = 0.0
        self._num_wanted, self._elements = 0, dict[str, str]()  # blocks to start; jobs of an array by their blocks
        interchange = [INTERCHANGE] if are_installed() else DEFAULT_INTERCHANGE_LAUNCH_CMD
        chosen: dict[str, Any] = {  # Any: as above
            "interchange_launch_cmd": [*(TIED if all(map(shutil.which, TIED[:2])) else ()), *interchange],
            "encrypted": not isinstance(provider, LocalProvider),
            "block_error_handler": partial(windowed_error_handler, threshold=failed_blocks),
            "heartbeat_period": 15,
            "heartbeat_threshold": 60,
            "prefetch_capacity": 0,
        }
        if longest_task is not None:
            chosen["drain_period"] = drain_period(getattr(provider, "walltime", None), start_seconds, longest_task)
        accelerators = arguments.get("available_accelerators") if isinstance(provider, SlurmProvider) else None
        has_nets = label.partition("_")[0] != "cpu"
        chosen["launch_cmd"] = launch_command(has_nets=has_nets, given=accelerators or ())
        chosen |= arguments
        self.shares_files = shares_files and are_installed()
        # Other launchers change the command; those for pods have none.
        self._is_shell = isinstance(getattr(provider, "launcher", SIMPLE), SimpleLauncher)
        if self._is_shell:
            chosen["launch_cmd"] = grouped(chosen["launch_cmd"], node_directory)
        super().__init__(label=label, provider=provider, **chosen)

    def start(self) -> None:
        """Start the interchange; from then on no question to it is waited for without end, as Parsl does."""
        if self._is_shell:
            self.launch_cmd = blocks_folder(Path(self.run_dir, self.label).absolute()) + self.launch_cmd
        super().start()  # type: ignore[no-untyped-call]
        # Tasks that no interchange takes would else be waited for, when they are sent and when the executor closes.
        self.outgoing_q.zmq_socket.setsockopt(zmq.SNDTIMEO, SEND_MILLISECONDS)
        self.outgoing_q.zmq_socket.setsockopt(zmq.LINGER, 0)
        ask: Callable[..., object] = self.command_client.run
        send: Callable[[object], None] = self.outgoing_q.put
        has_taken = False

        def ask_in_time(question: object, max_retries: int = 3, timeout_s: float | None = None) -> object:
            if self.interchange_proc is None or self.interchange_proc.poll() is not None:
                raise lost.CommandClientBadError
            with self._asking:
                return ask(question, max_retries=max_retries, timeout_s=timeout_s or ANSWER_SECONDS)

        def send_while_open(task: object) -> None:
            nonlocal has_taken
            until = time.monotonic() + (TAKE_SECONDS if has_taken else LISTEN_SECONDS)
            while not self._send_once(send, task):
                if self.interchange_proc is None or self.interchange_proc.poll() is not None:
                    raise ConnectionError(f"the interchange of executor {self.label} has ended")
                if time.monotonic() > until:
                    raise ConnectionError(
                        f"the interchange of executor {self.label} takes no tasks; this machine may be too busy for it"
                    )
            has_taken = True

        self.command_client.run = ask_in_time  # type: ignore[method-assign]
        self.outgoing_q.put = send_while_open  # type: ignore[method-assign]

    def _send_once(self, send: Callable[[object], None], task: object) -> bool:
        """Return whether the interchange took `task`; it takes none before it has started."""
        with self._sending:
            if self._is_closed:
                raise ConnectionError(f"executor {self.label} is closed")
            try:
                send(task)
            except zmq.Again:
                return False
        return True

    def _start_local_interchange_process(self) -> None:
        """Start the interchange without waiting until it listens: those of other executors start meanwhile."""
        ask, self.command_client.run = self.command_client.run, lambda *question, **limits: 0  # type: ignore[method-assign]
        try:
            super()._start_local_interchange_process()
        finally:
            self.command_client.run = ask  # type: ignore[method-assign]

    def initialize_scaling(self) -> None:
        """Nothing yet: what starts a block names the interchange's port."""

    def _get_launch_command(self, block_id: str) -> str:
        with self._listening:
            if not self._listens:
                self._know_port()
                super().initialize_scaling()  # type: ignore[no-untyped-call]
                self._listens = True
        return str(super()._get_launch_command(block_id))

    def _know_port(self) -> None:
        """Ask the interchange for the port of workers; those that share our files start meanwhile."""
        if not self.shares_files:
            self.worker_port = self.command_client.run("WORKER_BINDS", timeout_s=LISTEN_SECONDS)
            return
        place = port_file(Path(self.run_dir, self.label).absolute())
        self.worker_port = place  # type: ignore[assignment]  # which Parsl formats
        threading.Thread(target=self._tell_port, args=[place], name="volpipe-port", daemon=True).start()

    def _tell_port(self, place: Path) -> None:
        """Write the port to `place`; without it workers would wait as long as this process is there."""
        try:
            port = self.command_client.run("WORKER_BINDS", timeout_s=LISTEN_SECONDS)
            atomic_write(place, str(port).encode())
        except Exception as error:  # a disk that is full, or no interchange
            if not self._is_closed:
                self.set_bad_state_and_fail_all(error)

    def scale_out_facade(self, n: int) -> list[str]:
        """Start up to `n` blocks and return their numbers; after a refusal none, until it is time to ask again."""
        started: list[str] = []
        while len(started) < n and time.monotonic() >= self._asks_at:
            before = set(self._simulated_status)
            self._num_wanted = n - len(started)
            block = super().scale_out_facade(1)
            started += block
            if block:
                self._refusals = 0
            for refused in set(self._simulated_status) - before:
                self._weigh(refused)
        return started

    def _launch_block(self, block_id: str) -> Any:  # Any: as Parsl has it
        """Start a block, and where the provider has arrays, those that are wanted with it; return its job."""
        if block_id not in self._elements and self._num_wanted > 1 and getattr(self.provider, "has_arrays", False):
            self._launch_array(int(block_id), self._num_wanted)
        return self._elements.pop(block_id, None) or super()._launch_block(block_id)

    def _launch_array(self, first: int, number: int) -> None:
        """Submit the blocks from `first` on as an array, of half as many each time that it is refused."""
        command = self._get_launch_command(f"$(({first}+SLURM_ARRAY_TASK_ID))")
        provider: Any = self.provider  # Any: of those that have arrays
        while number > 1:
            try:
                jobs = provider.submit_array(command, number, f"parsl.{self.label}.block-{first}")
            except SiteError:
                if provider.is_busy:
                    raise
                number //= 2  # of a limit of jobs, less may be left
            else:
                self._elements = {str(first + index): job for index, job in enumerate(jobs)}
                return

    def _weigh(self, block: str) -> None:
        """Forget the refusal of a block, which would count as a failure, where going on without it may help."""
        now, reason = time.monotonic(), self._simulated_status[block].message or ""
        if not self._refusals:
            self._refused_since = now
        self._refusals += 1
        self._asks_at = now + min(FIRST_BACK_OFF * 2 ** (self._refusals - 1), MOST_BACK_OFF)
        alive = num_alive(self)
        if not alive and now - self._refused_since >= self._waits():
            return
        del self._simulated_status[block]
        self._status.pop(block, None)
        if not self._has_told:
            self._has_told = True
            goes_on = f"continues with the {alive} that it has" if alive else "waits"
            text = reason.partition(": ")[2]  # less which block it was
            log.warning("executor %s gets no more blocks for now, and %s: %s", self.label, goes_on, text, extra=NOTICE)

    def _waits(self) -> float:
        """Return for how many seconds refusals are waited for though no block of this executor is accepted."""
        if not self.is_patient:
            return 0.0
        if getattr(self.provider, "is_busy", False):
            return BUSY_SECONDS
        return SHARED_SECONDS if any(map(num_alive, self.siblings)) else 0.0

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop, and let the provider delete what is left, if it can: Parsl leaves the blocks of a broken executor.

        Nothing is sent or asked meanwhile: a socket that one thread closes while another uses it aborts the process.
        """
        self._is_closed = True
        try:
            with self._sending, self._asking:
                super().shutdown(timeout)
        finally:
            close = getattr(self.provider, "close", None)
            if close is not None:
                close()

    def scale_in(self, blocks: int, max_idletime: float | None = None) -> list[str]:
        """Stop up to `blocks` blocks and return their numbers.

        Args:
            blocks: how many; Parsl's own takes 0 for all.
            max_idletime: seconds; only blocks that were idle for longer are stopped, and only connected ones can be.
                Without it, any.
        """
        if max_idletime is None:
            try:
                return super().scale_in(blocks)
            except (lost.CommandClientBadError, lost.CommandClientTimeoutError):  # nobody knows any more who is idle
                return BlockProviderExecutor.scale_in(self, blocks)
        idle = [block for block, seconds in self.idle_blocks().items() if seconds > max_idletime][: max(0, blocks)]
        for block in idle:
            self._hold_block(block)  # type: ignore[no-untyped-call]
        if not idle or self.provider is None:
            return []
        cancelled = self.provider.cancel([self.blocks_to_job_id[block] for block in idle])
        return [block for block, done in zip(idle, cancelled, strict=True) if done]

    def num_connected(self) -> int:
        """Return how many workers are connected now, 0 where the interchange does not say."""
        if self._is_closed:
            return 0
        try:
            return sum(int(manager["worker_count"]) for manager in self.connected_managers())
        except (lost.CommandClientBadError, lost.CommandClientTimeoutError, zmq.ZMQError):
            return 0

    def idle_blocks(self) -> dict[str, float]:
        """Return the seconds for which each connected block without a task has been idle, the longest first."""
        seconds: dict[str, float] = {}
        busy = set()
        for manager in self.connected_managers():
            block = manager["block_id"]
            if manager["active"]:
                seconds[block] = min(seconds.get(block, manager["idle_duration"]), manager["idle_duration"])
            if manager["tasks"]:
                busy.add(block)
        alive = {block for block, status in self.status_facade.items() if not status.terminal}
        idle = seconds.keys() & alive & self.blocks_to_job_id.keys() - busy
        return {block: seconds[block] for block in sorted(idle, key=lambda block: -seconds[block])}


def num_alive(executor: ParslExecutor) -> int:
    """Return how many blocks of `executor` its scheduler has accepted that have not ended."""
    return sum(not status.terminal for status in dict(getattr(executor, "status_facade", {})).values())


def drain_period(walltime: str | None, start_seconds: float, longest_task: float) -> int:
    """Return after how many seconds a block takes no task any more, so that none is cut off by its walltime.

    Args:
        walltime: of a block, HH:MM:SS.
        start_seconds: that pass before a block's workers are ready.
        longest_task: seconds.

    Raises:
        SiteError: nothing would be left of the walltime, or the provider knows none.
    """
    if walltime is None:
        raise SiteError(f"longest_task is {longest_task:g} s, but the provider has no walltime; leave longest_task out")
    hours, minutes, seconds = map(int, walltime.split(":"))
    whole = 3600 * hours + 60 * minutes + seconds
    left = int(whole - start_seconds - longest_task)
    if left <= 0:
        raise SiteError(
            f"walltime {walltime} is {whole} s, not more than a start's {start_seconds:g} s and the longest task's "
            f"{longest_task:g} s; ask for a walltime above {start_seconds + longest_task:g} s, or make tasks shorter"
        )
    return left


def translate_error(error: BaseException, executors: Sequence[ParslExecutor] = ()) -> BaseException:
    """Return the error for the loop of a run: the lost worker or block, where Parsl says so, and why if known."""
    if isinstance(error, lost.ManagerLost):
        words = filter(None, (_last_words(executor, error.hostname) for executor in executors))
        return ManagerLost(": ".join([f"{error.hostname} no longer answers, or its job has ended", *words]))
    if isinstance(error, lost.WorkerLost):
        return WorkerLost(f"worker {error.worker_id} on {error.hostname} {_death(error.hostname, executors)}")
    return error


def _last_words(executor: ParslExecutor, host: str) -> str:
    """Return the scheduler's message about the block on `host`, where it knows blocks by their hosts."""
    tell: Callable[[str], str] = getattr(getattr(executor, "provider", None), "last_words_of", lambda host: "")
    return tell(host)


def _death(host: str, executors: Sequence[ParslExecutor]) -> str:
    """Return how a worker on `host` died: for its memory, if its block has seen that."""
    for executor in executors:
        if not isinstance(executor, HighThroughputExecutor):
            continue
        if Path(executor.run_dir, executor.label, f"{OUT_OF_MEMORY}{host}").is_file():
            of_block = getattr(executor.provider, "mem_per_node", None)
            share = f"; {of_block:.3g} GB are for {executor.max_workers_per_node} workers there" if of_block else ""
            return f"was killed for want of memory{share}: ask for more, or for fewer workers"
    return "died"
