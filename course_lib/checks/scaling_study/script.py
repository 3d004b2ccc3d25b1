"""Exercise 5 of 13_scaling_study, with its planted mistakes: a batch script to mend."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.cluster.lint.check import lint_job
from course_lib.cluster.lint.script import TORCHRUN, Script
from course_lib.cluster.slurm_time import read_time_s
from course_lib.core.errors import CourseError
from course_lib.scaling_study.lab import BROKEN_SCRIPT

PROGRAM = "cluster/exercises/06_ddp.py --turns 3"
HEAD = 'read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
EDITS = {
    "gpus": ("# SBATCH --gpus-per-node=2", "#SBATCH --gpus-per-node=2"),
    "time": ("--time=2:00 ", "--time=2:00:00 "),
    "output": ("study-$SLURM_JOB_ID.out", "study-%j.out"),
    "moved": ("#SBATCH --cpus", "#SBATCH --exclude=node7\n#SBATCH --cpus"),
    "late": ("pipefail\n#SBATCH --exclude=node7\n", "pipefail\n"),
    "srun": ("\ntorchrun", f"\n{HEAD}\nsrun torchrun"),
    "endpoint": ("localhost:29500", '"$head:29500"'),
}


def mended(script: str) -> str:
    """Mend the script: the right answer."""
    return _edited(script, EDITS)


def _edited(script: str, edits: dict[str, tuple[str, str]]) -> str:
    for wrong, right in edits.values():
        script = script.replace(wrong, right)
    return script


# --- the check


def check_script(answer: Any) -> str:
    """Check that no finding is left, and that the job still requests the same and runs the same."""
    text = answer(BROKEN_SCRIPT)
    if not isinstance(text, str):
        raise CheckFailed(f"need the script as a text; got {text!r}. Does your function return it?")
    for problem in _missing(Script(text, Path())):
        raise CheckFailed(problem)
    if found := lint_job(text):
        first, more = found[0], len(found) - 1
        rest = f" After it, {more} more." if more else ""
        raise CheckFailed(
            f"line {first.line}: {first.what}. Why it bites: {first.why}. {first.fix}{rest}"
        )
    return "Nothing is left to find, and the job does what it was to do."


def _missing(script: Script) -> Iterator[str]:
    """Return what the script no longer does, though it was requested."""
    yield from _launch(script)
    asked = script.option("nodes")
    if script.nodes != 2 or (asked and asked.value not in ("2", "2-2")):
        nodes = asked.value if asked else script.nodes
        yield f"the job asks for {nodes} nodes: two of them were to work."
    yield from _gpus(script)
    yield from _endpoint(script)
    time = script.option("time")
    if time is None:
        yield "the job no longer says how long it takes: two hours were meant."
    elif time.value != "2:00" and _time_s(time.value) not in (None, 7200):
        yield f"--time={time.value}: two hours were meant, 2:00:00."
    if not re.search(r"^#SBATCH\s+(--exclude[= ]|-x *)\S*\bnode7\b", script.text, re.M):
        yield "node7 is no longer left out: move the directive up, do not delete it."
    log = script.option("output")
    if log is None:
        yield "the log has no name any more: study- and the number of the job, %j."
    elif not re.search(r"%\d*[jA]|SLURM_JOB_ID", log.value):
        yield f"--output={log.value}: the next job writes over it; its number belongs in, %j."
    if not any(re.match(r"set\b.*\bpipefail", command.text) for command in script.commands):
        yield "set -euo pipefail is gone: a job that failed would be called COMPLETED."


def _launch(script: Script) -> Iterator[str]:
    """Return what is wrong with the start of the ranks, as far as lint does not tell."""
    program = re.compile(rf"{re.escape(PROGRAM)}(?!\S|\s+-)")
    started = [
        one for one in script.running(TORCHRUN) if program.search(script.spelt_out(one.text))
    ]
    if not started:
        yield f"the script no longer starts torchrun with {PROGRAM}: mend its lines, keep its work."
        return
    launch, text = started[0], script.spelt_out(started[0].text)
    if len(started) > 1:
        yield f"the script starts torchrun {len(started)} times: its work was to be done once."
    if not re.search(r"--nproc[-_]per[-_]node[= ]2\b", text):
        yield "torchrun no longer starts 2 ranks on each node: --nproc-per-node=2."
    if not re.search(r"--nnodes\b", text):
        yield 'torchrun no longer knows that there are two nodes: --nnodes="$SLURM_NNODES".'
    options = script.srun_options(launch) if launch in script.sruns else {}
    if "1" in (options.get("nodes"), options.get("ntasks")):
        yield "srun starts torchrun on one node only: without options, it does so on both."
    after = script.commands[script.commands.index(launch) + 1 :]
    if launch.end == "||" and after and after[0].name in ("true", ":"):
        yield f"|| {after[0].name} hides that torchrun failed: the job would be called COMPLETED."


def _time_s(text: str) -> int | None:
    """Return seconds; None for text that is not a time, which is lint's to report, as is 2:00."""
    try:
        return read_time_s(text)
    except CourseError:
        return None


def _endpoint(script: Script) -> Iterator[str]:
    """Return what keeps the ranks from the head node's name; lint reports a name never set."""
    text = re.sub(r"\\\n\s*", " ", script.text)  # [one command a line]
    start = re.search(r"^.*\btorchrun\b.*$", text, re.M)
    endpoint = re.search(r"--rdzv[-_]endpoint[= ](\S+)", start[0]) if start else None
    if not (start and endpoint):
        return
    if re.match(r"'[^']*\$", endpoint[1]):
        yield (
            f"--rdzv-endpoint={endpoint[1]}: single quotes keep $ and the name as they are, so "
            "torchrun looks for a node of that name. Use double quotes."
        )
    name = re.match(r"[\"']?\$\{?(\w+)", endpoint[1])
    sets = rf"(\bread\b[^#\n]*\b|^\s*(?:export +)?){name[1]}\b(?=\s*[=<]|$)" if name else ""
    if (
        name
        and re.search(sets, text[start.end() :], re.M)
        and not re.search(sets, text[: start.start()], re.M)
    ):
        yield f"${name[1]} is set after torchrun has started with it: set it before."


def _gpus(script: Script) -> Iterator[str]:
    """Return GPUs that are not requested; the comment that was meant to is lint's to report."""
    asked = script.option("gpus-per-node", "gres", "gpus", "gpus-per-task")
    number = re.search(r"\d+$", asked.value) if asked else None
    if asked is None and "# SBATCH --gpus" not in script.text:
        yield "the job asks for no GPUs: two on each node were meant."
    if asked and number and int(number[0]) != (4 if asked.option == "gpus" else 2):
        yield f"--{asked.option}={asked.value}: two GPUs on each of two nodes were meant."


# --- planted mistakes


def _without(name: str) -> Callable[[str], str]:
    """Mend all mistakes but one."""
    edits = {key: edit for key, edit in EDITS.items() if key != name}
    return lambda script: _edited(script, edits)


def _besides(wrong: str, right: str) -> Callable[[str], str]:
    """Mend all mistakes, and lose something else."""
    return lambda script: mended(script).replace(wrong, right)


def _head_last(script: str) -> str:
    return mended(script).replace(HEAD + "\n", "") + HEAD + "\n"


SCRIPT = Exercise(
    key="scaling_study-5",
    title="a batch script to mend",
    check=check_script,
    reference=mended,
    mistakes=(
        Mistake("as it was", lambda script: script, "is a comment for sbatch"),
        Mistake("gpus still a comment", _without("gpus"), "is a comment for sbatch"),
        Mistake("still two minutes", _without("time"), "--time=2:00 is 0:02:00"),
        Mistake("variable in a directive", _without("output"), "sbatch fills in no variables"),
        Mistake("late directive", _without("late"), "a directive after the first command"),
        Mistake("no srun", _without("srun"), "torchrun without srun"),
        Mistake("meets itself", _without("endpoint"), "on each node, that is the node itself"),
        Mistake("head never set", _besides(HEAD, ""), "$head is empty: nothing in this script"),
        Mistake(
            "no backend", _besides("--rdzv-backend=c10d", ""), "--rdzv-endpoint without --rdzv-back"
        ),
        Mistake("one host for ever", _besides("$head:", "node1:"), "Slurm picks the nodes"),
        Mistake("on one node", _besides("--nodes=2", "--nodes=1"), "two of them were to work"),
        Mistake("GPUs deleted", _besides("#SBATCH --gpus-per-node=2\n", ""), "asks for no GPUs"),
        Mistake(
            "one GPU", _besides("gpus-per-node=2", "gpus-per-node=1"), "two GPUs on each of two"
        ),
        Mistake("time deleted", _besides("#SBATCH --time", "## --time"), "how long it takes"),
        Mistake("two minutes, spelled out", _besides("2:00:00", "0:02:00"), "two hours were meant"),
        Mistake("exclude in a comment", _besides("#SBATCH --exc", "##SBATCH --exc"), "node7 is no"),
        Mistake("head read too late", _head_last, "is set after torchrun has started"),
        Mistake("single quotes", _besides('"$head:29500"', "'$head:29500'"), "Use double quotes"),
        Mistake("too long", _besides("2:00:00", "2-00:00:00"), "two hours were meant"),
        Mistake("two days", _besides("2:00:00", "2-0"), "two hours were meant"),
        Mistake("exclude deleted", _besides("#SBATCH --exclude=node7\n", ""), "node7 is no longer"),
        Mistake("log deleted", _besides("#SBATCH --output=study-%j.out", ""), "has no name"),
        Mistake("program deleted", _besides(PROGRAM, "--version"), "no longer starts torchrun"),
        Mistake("30 turns", _besides("--turns 3", "--turns 30"), "no longer starts torchrun with"),
        Mistake(
            "more options", _besides("--turns 3", "--turns 3 --lr 1"), "no longer starts torch"
        ),
        Mistake("log without number", _besides("study-%j", "study"), "writes over it"),
        Mistake("twice", lambda script: mended(script) * 2, "torchrun 2 times"),
        Mistake("no --nnodes", _besides('--nnodes="$SLURM_NNODES" ', ""), "there are two nodes"),
        Mistake("srun -N 1", _besides("srun t", "srun -N 1 t"), "on one node only"),
        Mistake("srun -n 1", _besides("srun t", "srun --ntasks=1 t"), "on one node only"),
        Mistake("failure hidden", _besides("--turns 3", "--turns 3 || true"), "hides that"),
        Mistake("two to four nodes", _besides("--nodes=2", "--nodes=2-4"), "two of them were to"),
        Mistake(
            "pipefail said", _besides("set -euo", "echo set -euo"), "set -euo pipefail is gone"
        ),
        Mistake("one rank a node", _besides("node=2 \\", "node=1 \\"), "2 ranks on each node"),
        Mistake("pipefail deleted", _besides("set -euo pipefail", ""), "set -euo pipefail is gone"),
        Mistake("nothing returned", lambda script: None, "Does your function return it?"),
    ),
)
