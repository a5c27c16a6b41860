"""Sites on Slurm, without one: what is asked of sbatch, arrays of jobs, and settings that are missing."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from conftest import ROOT

from volpipe.apps import capacity
from volpipe.apps.htex.executor import ResilientExecutor
from volpipe.errors import SiteError
from volpipe.sites.find import find_site


@pytest.mark.parametrize("name", ["slurm_htex.py", "slurm_htex"])
def test_slurm_without_its_commands_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SiteError, match=rf"^site {name} cannot be used here: .*no sbatch on the PATH; give"):
        find_site(name)(tmp_path)


@pytest.fixture
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the user's settings would be, and commands of a Slurm that does not answer."""
    for command in ("sbatch", "squeue", "scancel", "sacct"):
        (tmp_path / command).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for variable in [name for name in os.environ if name.startswith(("VOLPIPE_SLURM", "VOLPIPE_SITE"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "volpipe").mkdir()
    return tmp_path / "volpipe"


def test_slurm_asks_for_what_its_file_and_the_environment_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_settings: Path
) -> None:
    (no_settings / "slurm_htex.toml").write_text('partition = "a"\ngpus = 4\ncores = 16\naddress = "10.0.0.1"\n')
    monkeypatch.setenv("VOLPIPE_SLURM_GPU_PARTITION", "b")
    monkeypatch.setenv("VOLPIPE_SLURM_MAX_JOBS", "7")
    cpu, gpu = find_site("slurm_htex.py")(tmp_path).executors
    assert isinstance(cpu, ResilientExecutor)
    assert isinstance(gpu, ResilientExecutor)
    assert (cpu.label, cpu.provider.partition, capacity.count_workers(cpu)) == ("cpu", "a", 16 * 7)
    assert (gpu.label, gpu.provider.partition, capacity.count_workers(gpu)) == ("gpu", "b", 4 * 7)
    assert (cpu.provider.gpus_per_node, gpu.provider.gpus_per_node) == (None, 4)
    assert "CUDA_VISIBLE_DEVICES" in gpu.launch_cmd
    assert cpu.drain_period == gpu.drain_period == 4 * 3600 - 60 - 1440
    assert "--no-requeue" in cpu.provider.scheduler_options
    assert cpu.address == gpu.address == "10.0.0.1"


@pytest.mark.parametrize(
    ("says", "is_busy"),
    [
        ("Slurm temporarily unable to accept job, sleeping and retrying", True),
        ("Unable to contact slurm controller (connect failure)", True),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit)", False),
        ("Batch job submission failed: Invalid account or account/partition combination specified", False),
    ],
)
def test_a_slurm_that_takes_no_job_for_now_is_told_from_one_that_refuses(
    tmp_path: Path, no_settings: Path, monkeypatch: pytest.MonkeyPatch, says: str, is_busy: bool
) -> None:
    monkeypatch.setenv("VOLPIPE_SLURM_PARTITION", "a")
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho 'sbatch: error: {says}' >&2\nexit 1\n")
    (executor,) = find_site("slurm_single")(tmp_path).executors
    executor.provider.script_dir = str(tmp_path)
    with pytest.raises(SiteError) as refused:
        executor.provider.submit("true", 1)
    assert str(refused.value) == f"Slurm does not take a job: sbatch: error: {says}"
    assert executor.provider.is_busy == is_busy


def test_an_sbatch_that_tries_again_and_again_is_killed_lest_it_submit_a_job_that_nobody_knows(
    tmp_path: Path, no_settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOLPIPE_SLURM_PARTITION", "a")
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nsleep 2\ntouch {tmp_path}/submitted\n")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/cancelled\n')
    (executor,) = find_site("slurm_single")(tmp_path).executors
    executor.provider.script_dir, executor.provider.cmd_timeout = str(tmp_path), 1
    with pytest.raises(SiteError, match=r"Slurm does not take a job: .*sbatch does not answer within 1 s"):
        executor.provider.submit("true", 1, "mine")
    assert executor.provider.is_busy
    assert (tmp_path / "cancelled").read_text().startswith("--name=mine.")
    time.sleep(1.5)
    assert not (tmp_path / "submitted").exists()


@pytest.fixture
def array_executor(tmp_path: Path, no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> ResilientExecutor:
    """An executor on a Slurm that takes at most three jobs at a time, in an array or not."""
    monkeypatch.setenv("VOLPIPE_SLURM_PARTITION", "a")
    monkeypatch.setenv("VOLPIPE_SLURM_ARRAY", "yes")
    monkeypatch.setenv("VOLPIPE_SLURM_MAX_JOBS", "9")
    (tmp_path / "sbatch").write_text(
        f"""#!/bin/sh
        cp "$1" {tmp_path}/script
        last=$(sed -n 's/^#SBATCH --array=0-//p' "$1")
        left=$(cat {tmp_path}/left)
        if [ "${{last:-0}}" -ge "$left" ]; then echo "error: AssocMaxSubmitJobLimit" >&2; exit 1; fi
        echo $((left - ${{last:-0}} - 1)) > {tmp_path}/left
        echo "${{last:-0}}" >> {tmp_path}/submitted
        echo "Submitted batch job $(wc -l < {tmp_path}/submitted)"
        """
    )
    (tmp_path / "left").write_text("3\n")
    (executor,) = find_site("slurm_single")(tmp_path).executors
    assert isinstance(executor, ResilientExecutor)
    monkeypatch.setattr(executor, "_get_launch_command", lambda block_id: f"start {block_id}")
    executor.provider.script_dir = str(tmp_path)
    return executor


def test_jobs_that_are_wanted_together_are_one_array_of_as_many_as_slurm_takes(
    tmp_path: Path, array_executor: ResilientExecutor
) -> None:
    assert array_executor.scale_out_facade(5) == [
        "0",
        "1",
        "2",
    ]  # 5 are refused, 2 are taken, 3 are refused, 1 is taken
    assert array_executor.blocks_to_job_id == {"0": "1_0", "1": "1_1", "2": "2"}
    assert (tmp_path / "submitted").read_text().split() == ["1", "0"]
    assert array_executor._asks_at > time.monotonic()  # and later asks again


def test_each_job_of_an_array_has_a_block_and_logs_of_its_own(
    tmp_path: Path, array_executor: ResilientExecutor
) -> None:
    assert array_executor.scale_out_facade(1) == ["0"]
    assert "--array" not in (tmp_path / "script").read_text()
    assert array_executor.scale_out_facade(2) == ["1", "2"]
    assert array_executor.blocks_to_job_id == {"0": "1", "1": "2_0", "2": "2_1"}
    script = (tmp_path / "script").read_text()
    assert "start $((1+SLURM_ARRAY_TASK_ID))" in script.splitlines()
    resources = array_executor.provider.resources
    for index in (0, 1):
        logs = {resources[f"2_{index}"][name] for name in ("job_stdout_path", "job_stderr_path")}
        written = re.findall(r"^#SBATCH --(?:output|error)=(.*)$", script, re.MULTILINE)
        assert logs == {path.replace("%a", str(index)) for path in written}
    alive = [job for job, found in resources.items() if not found["status"].terminal]
    assert alive == ["1", "2_0", "2_1"]  # what is asked for, and cancelled at the end


def test_slurm_of_one_executor_serves_all_stages(tmp_path: Path, no_settings: Path) -> None:
    (no_settings / "slurm_single.toml").write_text('partition = "a"\ngpus = 2\nmax_jobs = 3\n')
    (executor,) = find_site("slurm_single")(tmp_path).executors
    assert isinstance(executor, ResilientExecutor)
    assert (executor.provider.partition, executor.provider.gpus_per_node, capacity.count_workers(executor)) == (
        "a",
        2,
        6,
    )
    assert capacity.labels_for([executor], "cpu") == capacity.labels_for([executor], "gpu") == ["slurm"]


@pytest.mark.parametrize("site", ["slurm_htex", "slurm_single"])
def test_slurm_names_what_is_missing_and_where_to_write_it(tmp_path: Path, no_settings: Path, site: str) -> None:
    with pytest.raises(SiteError) as refused:
        find_site(site)(tmp_path)
    assert str(refused.value) == (
        f'site {site} cannot be used here: partition is not set; write partition = "..." in {no_settings}/{site}.toml, '
        "or set VOLPIPE_SLURM_PARTITION"
    )


def test_a_copy_of_a_site_reads_settings_of_its_own_name(tmp_path: Path, no_settings: Path) -> None:
    (tmp_path / "ours.py").write_text((ROOT / "configs/slurm_single.py").read_text())
    (no_settings / "ours.toml").write_text('partition = "ours"\n')
    (executor,) = find_site(str(tmp_path / "ours.py"))(tmp_path).executors
    assert isinstance(executor, ResilientExecutor)
    assert executor.provider.partition == "ours"


def test_a_cluster_that_refuses_mem_is_asked_for_no_memory_and_gives_nobody_knows_how_much(
    tmp_path: Path, no_settings: Path
) -> None:
    (no_settings / "slurm_htex.toml").write_text('partition = "a"\nmem_gb = 0\n')
    for executor in find_site("slurm_htex")(tmp_path).executors:
        assert isinstance(executor, ResilientExecutor)
        assert executor.provider.mem_per_node is None  # for which Parsl writes no --mem
        assert capacity.memory_of_worker(executor) is None
