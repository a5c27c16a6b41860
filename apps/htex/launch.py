"""The shell command of a block: it starts Parsl's pool of workers, sees that nothing of it stays, and ends it in time.

Not here: who gives the command (executor). Parsl formats it twice, once for an executor and once for each block, so
that it has no braces but those that Parsl fills; bash runs it, on Slurm, in pods and here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parsl.executors.high_throughput.executor import DEFAULT_LAUNCH_CMD

from volpipe.apps.htex.processes import SOCKETS, WITH_NETS, WORKERS, are_installed
from volpipe.process import SAFE_PATH

# Workers count their GPUs from 0 whatever Slurm has given their job; these are the ones that it has. Braces are doubled
# for each of the two times that Parsl formats the command.
GIVEN_GPUS = "$(echo ${{{{CUDA_VISIBLE_DEVICES:-GPUS}}}} | tr , ' ')"

PARSLS = "process_worker_pool.py"
OUT_OF_MEMORY = "out-of-memory."  # and the name of a node or pod: a file that says that a process was killed there

# A pool that is registering waits for its interchange without end (its `ix_sock.recv()`, Parsl 2026.10.26): when the
# driver dies just then, the job would idle until its walltime. So its interchange's port is tried beside it, from when
# it could be reached at all; a pool that never reached it ends by itself.
GUARD = """
reached= missed=0
while kill -0 $pool 2>/dev/null; do
  answered=
  port=$(cat {worker_port} 2>/dev/null || echo {worker_port})
  for address in $(echo {addresses} | tr , ' '); do
    timeout 5 bash -c ": > /dev/tcp/$address/$port" 2>/dev/null && answered=1 && break
  done
  if [ $answered ]; then reached=1 missed=0
  elif [ $reached ]; then missed=$((missed + {heartbeat_period})); fi
  if [ $missed -ge {heartbeat_threshold} ]; then
    echo "no driver listens at {addresses} port $port any more, for $missed s; these workers end" >&2
    kill -TERM -- -$pool
    break
  fi
  sleep {heartbeat_period}
done
"""

# A kernel that kills a single process for its memory tells nobody: under cgroup v1 the pod or job lives on, and Parsl
# knows only that a worker died. So the count of such kills is looked at each second, of the block's own cgroup where it
# is seen (Slurm), else of what is mounted (a container's). Once it has grown, a file in the executor's folder says so.
MEMORY_FILES = (
    "/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/memory.events",
    "/sys/fs/cgroup/memory$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)/memory.oom_control",
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
)
MEMORY = f"""
counter=
for file in {" ".join(MEMORY_FILES)}; do
  if [ -z "$counter" ] && [ -r "$file" ]; then counter=$file; fi
done
before=
while [ "$counter" ] && kill -0 $pool 2>/dev/null; do
  while read -r what times; do
    [ "$what" = oom_kill ] || continue
    if [ "$before" ] && [ "$times" -gt "$before" ]; then echo "$times" > "$VOLPIPE_BLOCKS/{OUT_OF_MEMORY}$HOSTNAME"; fi
    before=$times
  done < "$counter"
  sleep 1
done
"""

# What workers kept on their node's disk (volpipe.volumes.node_cache), or among its temporary files, is deleted when
# nobody holds it any more. Where there is no flock, the next worker there does that.
SWEEP = """
for folder in "$VOLPIPE_NODE_DIRECTORY" "$TMPDIR" /tmp; do
  for lock in "$folder"/volpipe-$(id -u)-*/lock; do
    [ -e "$lock" ] && flock --wait 0.5 "$lock" rm -rf "$(dirname "$lock")"
  done
done
"""

# What a killed pool leaves, its queues' process above all, ends with it, and so does what was started beside it. One of
# its processes deletes the semaphores of the queues, which are files in memory, when all others have ended: that is
# waited for, by what /proc says of the group, zombies (Z, X) left out, which a container may not reap. The sockets are
# in /tmp, as their paths may have 107 letters, and those of users' own temporary folders have more. Once the pool has
# ended, signals to end are ignored: one would hit a command that deletes, which is in this group when it is forked.
IN_A_GROUP = f"""set -m
exec 3>&2 2>/dev/null  # the last words are the pool's, not this shell's on what ended
export {SOCKETS}=$(mktemp -d /tmp/vp.XXXX || mktemp -dt vp.XXXX)
trap 'kill -TERM -- -$pool' TERM
POOL 2>&3 & pool=$!
({GUARD}) 2>&3 & guard=$!
({MEMORY}) 2>/dev/null & memory=$!
wait $pool; code=$?
trap '' TERM
kill -TERM -- -$pool
for try in $(seq 50); do cat /proc/[0-9]*/stat | grep -q ") [^ZX] [0-9]* $pool " || break; sleep 0.04; done
kill -KILL -- -$pool -$guard -$memory
rm -rf "${SOCKETS}"
{SWEEP}
exit $code
"""


def grouped(command: str, node_directory: str | None = None) -> str:
    """Return the shell script that starts a pool by `command` in a group that ends with it or with its driver.

    Args:
        command: as Parsl formats it.
        node_directory: where its workers may keep files; a shell's variables in it are those of the block's node.
    """
    directory = _twice_formatted(node_directory or "")
    variable = f'export VOLPIPE_NODE_DIRECTORY="{directory}"\n' if directory else ""
    return variable + IN_A_GROUP.replace("POOL", command)


def launch_command(*, has_nets: bool, given: int | Sequence[str] = ()) -> str:
    """Return the command that starts workers, as Parsl formats it.

    Args:
        has_nets: whether tasks on them may run nets.
        given: their GPUs where Slurm gave none to the job; without, those of the executor.
    """
    ours = [WORKERS, *([WITH_NETS] if has_nets else [])] if are_installed() else ["env", f"{SAFE_PATH}=1", PARSLS]
    command = DEFAULT_LAUNCH_CMD.replace(PARSLS, " ".join(ours))
    names = ",".join(map(str, range(given) if isinstance(given, int) else given))
    return command.replace("{accelerators}", GIVEN_GPUS.replace("GPUS", names)) if names else command


def blocks_folder(folder: Path) -> str:
    """Return the line that gives a block the folder for its notes of killed processes; it comes before `grouped`."""
    return f'export VOLPIPE_BLOCKS="{_twice_formatted(str(folder))}"\n'


def _twice_formatted(text: str) -> str:
    """Return the text that Parsl, which formats it twice, turns into `text`."""
    return text.replace("{", "{{{{").replace("}", "}}}}")
