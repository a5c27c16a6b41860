"""The pages of exit codes, of the files in a run's folder, and of environment variables.

Numbers, names and defaults are those of the code. A code, a file or a variable that the code has and this module does
not describe stops it, and so does one that is described and not there.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

from reference_pages.commands import cell
from volpipe.blockwise import interrupts
from volpipe.display import console
from volpipe.runs.run_folder import RunFolder

CODE_NAMES = re.compile(r"^(DONE, [A-Z_, ]+) = ", re.MULTILINE)
CODES = {
    "DONE": "Done. `volpipe status`: everything is complete.",
    "INCOMPLETE": "Not complete: the command names what is missing, or the work stopped with an error. "
    "`volpipe compare`: a `--limit` is violated. `verify`, `net` and `sites check`: a fault was found.",
    "REFUSED": "Refused before the start: the sentence says what is wrong and what to do. Nothing was written.",
    "AT_WORK": "`volpipe status`: not complete, and somebody is at work on it.",
    "INTERRUPTED": "Interrupted, by Ctrl-C, TERM or a closed terminal. The same command continues.",
}
FILES = {
    "journal": "What every task did: block, attempt, times, bytes, checksums, a line of JSON each. Resume rests on it.",
    "sessions": "A line for each time that a driver worked on the run, and the output's metadata when it left.",
    "log": "The log, with the tracebacks of what failed.",
    "parsl": "Logs of Parsl and of the workers.",
    "discards": "Exists once scratch tensors may have been discarded.",
    "calibration": "Blocks that the plan tried, while it tries them.",
    "rates_file": "What trying blocks measured; later plans for the same workers take times and compression from it.",
    "next_selection": "Which windows an update selects, until its record is in the journal.",
    "uncompared": "Is there while an earlier stage changes what this one reads, until the two are compared.",
    "clearing": "Is there while the folder and its output are deleted: nothing in them counts.",
    "selection_file": "Which windows are selected, where a mask or empty space says so.",
    "inputs": "What identifies the volume and the mask, as they were at the start.",
    "plan_file": "The plan: recipe, grids, windows and types. The same command is compared with it.",
}
OTHER_FILES = {
    "lock": "Held by the driver that is at work.",
    "planned.json": "What was planned in bytes, files, memory and time, for the report.",
    "report.html": "The report, one file ([Runs](../runs.md#the-report)).",
    "next_plan.json": "The plan of a volume that has grown, until the journal follows it.",
    "progress.json": "Who is at work, since when, and how far; `volpipe status` reads it.",
    "beats": "A file for each worker: its CPU, memory, GPU and task now; `volpipe status --workers` reads them. `over` "
    "once the run was asked to stop.",
    "tensors.n5": "Scratch: window tensors and block sums. Deleted as the run goes, unless `--keep-tensors` is given.",
    "tensors.zarr": "The same, where `tensors.format` is zarr3.",
}
VARIABLES = {
    "VOLPIPE_WORKERS": "Number of workers of the sites `local` and `threads`, at most 64 for each core.",
    "VOLPIPE_THREADS": "Threads that read and decode in a process; without it one per core.",
    "VOLPIPE_NODE_DIRECTORY": "A folder on a node's own disk that keeps chunks of a slow input ([Slurm](../slurm.md)).",
    "VOLPIPE_SOCKETS": "Set by volpipe for its workers: the folder of their sockets, in `/tmp`, deleted when they end.",
    "VOLPIPE_SITE": "The file of settings of the site, in place of `~/.config/volpipe/SITE.toml`.",
    "VOLPIPE_LINKS": "Folders, separated by colons, that symbolic and external links inside a volume may lead to.",
    "VOLPIPE_NOTIFY": "As `--notify`: an address that gets one JSON object when a command ends.",
    "VOLPIPE_SERVICE": "Set in pods by volpipe: the Kubernetes service that gives a rank of a training its name.",
    "AWS_ACCESS_KEY_ID": "With `AWS_SECRET_ACCESS_KEY`: keys for S3.",
    "AWS_PROFILE": "The profile of the credentials file; without it `default`.",
    "AWS_SHARED_CREDENTIALS_FILE": "The credentials file, in place of `~/.aws/credentials`.",
    "AWS_REGION": "The region of buckets.",
    "AWS_DEFAULT_REGION": "The same, where `AWS_REGION` is not set.",
    "AWS_ENDPOINT_URL": "A server other than Amazon's.",
    "AWS_ENDPOINT_URL_S3": "The same, before `AWS_ENDPOINT_URL`.",
    "AWS_EC2_METADATA_DISABLED": "`false`: ask EC2 for a role too.",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "Set by Amazon in containers: a role is asked for.",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "The same.",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "Set by Amazon in pods: a role is asked for.",
    "CUDA_VISIBLE_DEVICES": "GPUs that may be used. Empty or -1: none.",
    "HDF5_EXTFILE_PREFIX": "Where HDF5 looks for external files.",
    "HDF5_VDS_PREFIX": "Where HDF5 looks for the sources of virtual datasets.",
    "XDG_CACHE_HOME": "Where measured facts of nets are kept, in place of `~/.cache`.",
    "XDG_CONFIG_HOME": "Where settings of sites are, in place of `~/.config`.",
    "KUBECONFIG": "The cluster of `k8s_htex`, as for kubectl.",
    "KUBERNETES_SERVICE_HOST": "Set by Kubernetes: the command runs in a pod, whose root user is not the machine's.",
    "POD_IP": "Set in pods by the manifest: the driver's address.",
    "POD_NAME": "Set in pods by the manifest: the driver's pod, which owns the pods of its workers.",
    "POD_UID": "The same.",
    "SSH_CONNECTION": "Set by ssh: `volpipe view` then opens no browser, and prints how to look from your machine.",
    "DISPLAY": "Set where there is a display: `volpipe view` then opens a browser.",
    "WAYLAND_DISPLAY": "The same.",
    "COLUMNS": "Width of tables and help, where the output is not a terminal.",
    "LOGNAME": "Given by volpipe to a user without a name, as in a pod.",
    "HOME": "Given by volpipe to a user without a home, as in a pod.",
    "PATH": "volpipe adds the folder of its Python, for Parsl's workers.",
    "PYTHONPATH": "volpipe adds its own folder, for Parsl's workers.",
    "PYTHONWARNINGS": "Of these, `error` is not heeded: a warning ends no command.",
}
READ = re.compile(
    r'environ(?:\.get|\.setdefault|\.pop)?\s*[([]\s*"([A-Z][A-Z0-9_]+)"|'
    r'"([A-Z][A-Z0-9_]+)"\s+(?:not )?in os\.environ'
)
NAMED = re.compile(r'"((?:VOLPIPE|AWS|KUBE\w*|POD|HDF5|XDG|SSH|WAYLAND)_[A-Z0-9_]*[A-Z0-9]|DISPLAY)"')
FIELD = re.compile(r"^    (\w+): (.*?)(?=^    \w|\Z)", re.MULTILINE | re.DOTALL)  # of a dataclass
PREFIXES = ("VOLPIPE_K8S", "VOLPIPE_SLURM")  # of the settings of sites
NOT_READ = ("HDF5_PLUGIN_PATH",)
SITES = ("slurm_htex", "slurm_single", "k8s_htex", "k8s_nautilus")


def check_described(what: str, described: Mapping[str, str], actual: set[str]) -> None:
    """Stop where what is described is not what there is."""
    if missing := sorted(actual - set(described)):
        raise SystemExit(f"{what} not described in scripts/reference_pages: {', '.join(missing)}")
    if surplus := sorted(set(described) - actual):
        raise SystemExit(f"{what} described in scripts/reference_pages, and not there: {', '.join(surplus)}")


def exit_codes_page() -> str:
    """Return the page of exit codes."""
    declared = CODE_NAMES.search(Path(console.__file__).read_text(encoding="utf-8"))
    assert declared is not None
    names = [*declared[1].split(", "), "INTERRUPTED"]
    check_described("exit codes", CODES, set(names))
    modules: dict[str, ModuleType] = {"INTERRUPTED": interrupts}
    codes = sorted((getattr(modules.get(name, console), name), name) for name in names)
    rows = [f"| {code} | {CODES[name]} |" for code, name in codes]
    head = "# Exit codes\n\nEvery command ends with one of five codes.\n"
    grace = (
        f"The first Ctrl-C gives running tasks {interrupts.GRACE_SECONDS:.0f} s to finish, the second stops the run at "
        "once. The same command continues either way.\n"
    )
    pipes = (
        "A command whose output is cut off, as by `volpipe run … | head -n 1`, drops the rest of it, works on to its "
        "end, and ends with its own code. `volpipe status --watch` ends when nobody reads it any more. Where standard "
        "output is closed or its disk is full, a command whose result is in files ends with its own code too. One that "
        "is asked to print something, as `volpipe info`, ends with 1. Letters that a terminal lacks are printed as "
        "others.\n"
    )
    return "\n".join([head, "| code | |", "|---|---|", *rows, "", grace, pipes])


def run_folder_page() -> str:
    """Return the page of the files in a run's folder."""
    paths = {
        key: getattr(RunFolder(Path("OUT.run")), key)
        for key, value in vars(RunFolder).items()
        if hasattr(value, "name")
    }
    check_described("files of a run's folder", FILES, set(paths))
    named = {path.name: FILES[key] for key, path in paths.items()} | OTHER_FILES
    rows = [f"| `{name}` | {text} |" for name, text in sorted(named.items())]
    head = (
        "# Files of a run\n\nThe run that writes `OUT` keeps its books in the folder `OUT.run` beside it. For an "
        "output in S3, the folder is in\nthe current one. Delete it when you need neither resume, `verify`, `status` "
        "nor the report any more: the output\nstands alone. A file is there when the run needed it.\n"
    )
    return "\n".join([head, "| file | |", "|---|---|", *rows, ""])


def read_variables(root: Path) -> set[str]:
    """Return the names of the environment that the code reads, or gives."""
    names = set()
    for folder in ("volpipe", "apps", "configs"):
        for file in (root / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            names |= {first or second for first, second in READ.findall(text)} | set(NAMED.findall(text))
    return names - set(PREFIXES) - set(NOT_READ)


def environment_page(root: Path) -> str:
    """Return the page of environment variables."""
    check_described("environment variables", VARIABLES, read_variables(root))
    parts = ["# Environment variables\n", "| variable | |", "|---|---|"]
    parts += [f"| `{name}` | {cell(text)} |" for name, text in VARIABLES.items()]
    parts += [
        "\n## Settings of sites\n",
        "A setting is a line of `~/.config/volpipe/SITE.toml`, such as `cores = 32`. The variable has the last word. "
        "In it, lists\nare written with commas, and tables as `key=value,key=value`.",
    ]
    for site in SITES:
        parts += [
            f"\n### {site}\n",
            "| setting | variable | type | default | |",
            "|---|---|---|---|---|",
            *_settings(site),
        ]
    return "\n".join([*parts, ""])


def _settings(site: str) -> Iterator[str]:
    """Yield a row for each setting of a site, with the comment behind it in the code."""
    kind = import_module(f"volpipe.configs.{site}").Settings
    prefix = "VOLPIPE_K8S" if site.startswith("k8s") else "VOLPIPE_SLURM"
    comments = _comments(kind)
    for field in dataclasses.fields(kind):
        value = field.default_factory() if callable(field.default_factory) else field.default
        default = "required" if value is dataclasses.MISSING else "" if value is None else f"`{json.dumps(value)}`"
        variable = f"`{prefix}_{field.name.upper()}`"
        yield f"| `{field.name}` | {variable} | {cell(str(field.type))} | {default} | {cell(comments[field.name])} |"


def _comments(kind: type) -> dict[str, str]:
    """Return the comment behind each field of a dataclass and of those that it derives from."""
    comments: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        for name, text in FIELD.findall(inspect.getsource(base)):
            comments[name] = (
                " ".join(text.rpartition("  # ")[2].removesuffix("    )\n").split())
                if "  # " in text
                else comments.get(name, "")
            )
    return comments
