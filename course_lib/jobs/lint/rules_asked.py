"""Rules about requested resources: values that Slurm accepts, and that mean something else."""

import re
from collections.abc import Iterator
from pathlib import Path

from course_lib.jobs.lint.directives import Directive
from course_lib.jobs.lint.script import GPU_OPTIONS, TORCHRUN, LintFinding, Script, place
from course_lib.jobs.slurm_time import FORMS, write_time
from course_lib.jobs.slurm_time import read_time_s as seconds_of

COUNTS_GPUS = re.compile(r"(^|nproc[-_]per[-_]node[= ]+)(gpu|\$\{?SLURM_GPUS_(ON|PER)_NODE\}?)$")
HOURS = {12, 24, 36, 48, 72, 96}  # that look like hours, and are minutes
NO_END = {"UNLIMITED", "INFINITE", "-1"}
HOUR_S = 3600
GIB_OF = {"": 2**-10, "K": 2**-20, "M": 2**-10, "G": 1, "T": 2**10}  # as Slurm counts
FIVE_MINUTES_S = 300  # that people do mean, for a job that tries something out


def missing_folder(script: Script) -> Iterator[LintFinding]:
    """Find logs in a folder that does not exist."""
    for name in ("output", "error"):
        one = script.option(name)
        if not one or re.search(r"[$~`]", one.value) or "/" not in one.value:
            continue
        chdir = script.option("chdir")
        folder = script.folder / (chdir.value if chdir else "") / Path(one.value).parent
        if not folder.is_dir() and _is_known_here(folder):
            yield LintFinding(
                one.line,
                "no-log-folder",
                f"--{name}: there is no folder {Path(one.value).parent}",
                "Slurm makes no folders: the job fails at once, and leaves no output that says "
                "why. A mkdir in the script comes too late",
                f"mkdir -p {Path(one.value).parent}, before sbatch.",
            )


def _is_known_here(folder: Path) -> bool:
    """Return whether this machine can tell that a path of the cluster is missing."""
    top = Path(*folder.absolute().parts[:2])
    return top.is_dir()


def short_time(script: Script) -> Iterator[LintFinding]:
    """Find hours that are minutes, and times that are not times."""
    one = script.option("time")
    if not one or one.value.upper() in NO_END or re.search(r"[$~`=]", one.value):
        return
    if not any(re.fullmatch(form, one.value, re.ASCII) for form in FORMS):
        yield LintFinding(
            one.line,
            "no-time",
            f"--time={one.value} is no time that Slurm reads",
            "sbatch refuses the script",
            "Write hours:minutes:seconds, as in 1:30:00, or days-hours:minutes:seconds.",
        )
        return
    parts = one.value.split(":")
    comment = script.lines[one.line - 1].partition(one.value)[2].lower()
    number = int(parts[0]) if parts[0].isdigit() else 0
    is_short = number in HOURS or (number < 10 and seconds_of(one.value) != FIVE_MINUTES_S)
    if "-" in one.value or len(parts) > 2 or "min" in comment:
        return
    seconds = seconds_of(one.value)
    is_told = re.search(r"\bhours?\b|\d\s*h\b", comment)
    if is_short or (is_told and seconds < HOUR_S):
        yield LintFinding(
            one.line,
            "short-time",
            f"--time={one.value} is {write_time(seconds)}, in hours:minutes:seconds",
            "a job that is over its time is ended, finished or not",
            f"Write --time={number}:{(*parts, '00')[1]}:00 for hours, "
            f"--time={write_time(seconds)} if you do mean minutes.",
        )


def no_gpus(script: Script) -> Iterator[LintFinding]:
    """Find ranks that want a GPU each in a job without GPUs."""
    if script.asks_for_gpus:
        return
    for command in script.running(TORCHRUN):
        for word in command.called:
            found = COUNTS_GPUS.search(script.spelt_out(word.text))
            if found and not set(GPU_OPTIONS) & set(script.srun_options(command)):
                yield LintFinding(
                    place(word, found),
                    "no-gpus",
                    f"{word.text} counts GPUs, and no directive asks for any",
                    "Slurm hands out only what is asked for: the job sees no GPU and fails",
                    "Add #SBATCH --gpus-per-node=2, or as many as you want on each node.",
                )


def too_few_gpus(script: Script) -> Iterator[LintFinding]:
    """Find nodes with more ranks than GPUs."""
    asked = script.option("gpus-per-node", "gres", "gpus")
    gpus = gpus_on_a_node(script, asked) if asked else None
    if not asked or not gpus:
        return
    for command in script.running(TORCHRUN):
        text = script.spelt_out(command.text)
        ranks = re.search(r"nproc[-_]per[-_]node[= ]+(\d{1,9})\b", text)
        if ranks and int(ranks[1]) > gpus:
            yield LintFinding(
                command.line,
                "too-few-gpus",
                f"{ranks[1]} ranks on each node, and --{asked.option}={asked.value}",
                "ranks without a GPU of their own fail: invalid device ordinal, or NCCL says "
                "that two of them use the same one",
                "Ask for as many GPUs as there are ranks on a node.",
            )


def gpus_on_a_node(script: Script, asked: Directive) -> int | None:
    """Return the GPUs per node of a directive, if they can be read from it: gpu:a100 is one."""
    found = re.fullmatch(r"(gpu:?)?([A-Za-z][\w.-]*)?:?(\d{1,9})?", asked.value)
    if not found or (asked.option == "gres" and not found[1]):
        return None
    count = int(found[3] or 1)
    return -(-count // script.nodes) if asked.option == "gpus" else count


def memory_on_a_node(script: Script, asked: Directive) -> float | None:
    """Return the GiB of memory on a node that a directive asks for, if they can be read from it."""
    found = re.fullmatch(r"(\d{1,12})([KMGT]?)", asked.value, re.ASCII | re.IGNORECASE)
    times: int | None = 1
    if asked.option == "mem-per-cpu":
        times = script.tasks_per_node * script.number("cpus-per-task", 1)
    if asked.option == "mem-per-gpu":
        gpus = script.option("gpus-per-node", "gres", "gpus")
        times = gpus_on_a_node(script, gpus) if gpus else None
    return int(found[1]) * GIB_OF[found[2].upper()] * times if found and times else None


def one_log_for_all(script: Script) -> Iterator[LintFinding]:
    """Find array tasks that write into one file."""
    output = script.option("output")
    shared = output and not re.search(r"%\d*[ajJ]|^/dev/", output.value)
    if script.option("array") and output and shared:
        yield LintFinding(
            output.line,
            "one-log",
            f"--output={output.value}: all tasks of the array write into this file",
            "they run at the same time, and write over each other",
            "Use %A_%a, the number of the array and of the task.",
        )


def log_cut_off(script: Script) -> Iterator[LintFinding]:
    """Find jobs that are requeued and then empty their log."""
    requeue, mode = script.option("requeue"), script.option("open-mode")
    if requeue and (not mode or mode.value != "append"):
        yield _log_cut_off(requeue)


def _log_cut_off(requeue: Directive) -> LintFinding:
    return LintFinding(
        requeue.line,
        "log-cut-off",
        "the job may start again, and --open-mode=append is missing",
        "each start empties the log, so what happened before is lost",
        "Add #SBATCH --open-mode=append.",
    )


RULES = (
    missing_folder,
    short_time,
    no_gpus,
    too_few_gpus,
    one_log_for_all,
    log_cut_off,
)
