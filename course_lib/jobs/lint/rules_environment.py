"""Rules about the environment of tasks: what reaches them, what is lost, and what collides."""

import re
from collections.abc import Iterator
from itertools import pairwise

from course_lib.jobs.lint.directives import options_of
from course_lib.jobs.lint.rules_variables import PEOPLE_KNOW, PLAIN
from course_lib.jobs.lint.script import LintFinding, Script, place
from course_lib.jobs.lint.shell import Command, Word

NOUNSET = re.compile(r"-[a-tv-z]*u[a-z]*$|nounset$")
BOUND_AGAIN = re.compile(r"\+[a-z]*u[a-z]*$")
ACTIVATES = ("conda activate", "mamba activate", "micromamba activate", "source activate")
OWN_POINT = re.compile(
    r"(?P<name>MASTER_PORT|(?:master|main_process)[-_]port|rdzv[-_](?:id|endpoint))"
    r"[= ][^;&|\n]{0,60}?(?P<draw>\$?\bRANDOM\b|\$\$|\bshuf\b)"
)
FIXED_PORT = re.compile(
    r"(?:MASTER_PORT=|(?:master|main_process)[-_]port[= ]|rdzv[-_]endpoint[= ]\S*:)(?P<port>\d+)$"
)
LOCAL_RANK = re.compile(r"LOCAL_RANK=[\"']?\$\{?SLURM_LOCALID\b")
TASK_NUMBER = re.compile(r"\$\{?SLURM_(PROCID|LOCALID)\b")
ALWAYS_THERE = PEOPLE_KNOW | {"LD_LIBRARY_PATH", "PYTHONPATH"}  # and exported
EXPORTS = re.compile(r"(?:export|(?:declare|typeset) -\w*x\w*)\b")


def unbound_in_conda(script: Script) -> Iterator[LintFinding]:
    """Find `conda activate` under `set -u`."""
    is_strict = bool(re.match(r"#!\S*sh .*-\w*u", script.lines[0]))
    for command in script.commands:
        words = [word.text for word in command.called]
        if command.name == "set":
            is_strict = any(map(NOUNSET.match, words[1:])) or (
                is_strict and not any(map(BOUND_AGAIN.match, words[1:]))
            )
        elif is_strict and " ".join(words[:2]) in ACTIVATES:
            yield LintFinding(
                command.line,
                "unbound",
                f"{words[0]} activate under set -u",
                "its scripts read variables that are not set, which under set -u ends the job: "
                "unbound variable",
                "Activate first, and write set -u below it.",
            )


def devices_by_hand(script: Script) -> Iterator[LintFinding]:
    """Find a list of GPUs that replaces the one Slurm gives each task."""
    for command in script.commands:
        word = command.assigned.get("CUDA_VISIBLE_DEVICES")
        for_all = not command.called or command.name == "export"
        if word and for_all and script.asks_for_gpus and re.search(r"=[\d,]+$", word.text):
            yield LintFinding(
                word.line,
                "devices-by-hand",
                f"{word.text} replaces what Slurm sets",
                "the numbers may be another job's GPUs, and all tasks of a node see the same list",
                "Delete the line: Slurm sets the variable for each task.",
            )


def export_none(script: Script) -> Iterator[LintFinding]:
    """Find an `--export` without ALL, which srun inherits."""
    one = script.option("export")
    if not one or "ALL" in one.value.upper().split(",") or "SLURM_EXPORT_ENV" in script.text:
        return
    if any("export" not in script.srun_options(command) for command in script.sruns):
        yield LintFinding(
            one.line,
            "export-none",
            f"--export={one.value} also holds for srun in this script",
            "tasks see nothing that the script exports: no MASTER_ADDR, no module, no PATH",
            "Write export SLURM_EXPORT_ENV=ALL before srun, or srun --export=ALL.",
        )


def export_of_a_list(script: Script) -> Iterator[LintFinding]:
    """Find `srun --export` that names variables and leaves the others out."""
    for command in script.sruns:
        words = [word.text for word in command.called[1:]]
        values = []
        for one in options_of(command.line, words):
            if not one.is_known and not one.option.startswith("-"):
                break
            values += [one.value] if one.option == "export" else []
        if values and not set(values[-1].upper().split(",")) & {"ALL", "NONE", "NIL"}:
            again = ", and only the last --export counts" if len(values) > 1 else ""
            yield LintFinding(
                command.line,
                "export-list",
                f"--export={values[-1]} leaves out everything else{again}",
                "tasks get these variables alone: no PATH, no module, nothing that was exported",
                f"Write --export=ALL,{','.join(values)}.",
            )


def not_exported(script: Script) -> Iterator[LintFinding]:
    """Find variables of the script that only the tasks fill in, and that are not exported."""
    if re.search(r"\bset\s+(-\w*a|-o allexport)\b", script.text):
        return
    exported = {name for one in script.commands for name in _exported(one)}
    for command in script.sruns:
        for word in _shell_texts(command):
            live = {found[1] or found[2] for found in PLAIN.finditer(word.live)}
            used = dict.fromkeys(found[1] or found[2] for found in PLAIN.finditer(word.text))
            empty = [
                f"${name}"
                for name in used
                if name in script.variables
                and name not in exported | live | ALWAYS_THERE | set(command.assigned)
                and not name.startswith("SLURM_")
                and not re.search(rf"\b{name}=|\b(for|read)\b[^;\n]*\b{name}\b", command.text)
            ]
            if empty:
                yield LintFinding(
                    word.line,
                    "not-exported",
                    f"{', '.join(empty)}: set in this script and not exported",
                    "single quotes leave it to the tasks, which see only what is exported: it is "
                    "empty there",
                    f"Write export {' '.join(name[1:] for name in empty)} before srun.",
                )


def _exported(command: Command) -> Iterator[str]:
    if EXPORTS.match(command.text):
        yield from (word.text.partition("=")[0] for word in command.words[1:])


def _shell_texts(command: Command) -> Iterator[Word]:
    """Yield the texts that a command runs in a shell of its own: `bash -c TEXT`."""
    shells = [
        index
        for index, word in enumerate(command.words)
        if re.fullmatch(r"(\S*/)?(ba|da|z|k)?sh", word.text)
    ]
    for index in shells[:1]:
        for option, word in pairwise(command.words[index + 1 :]):
            if re.fullmatch(r"-\w*c", option.text):
                yield word


def own_meeting_point(script: Script) -> Iterator[LintFinding]:
    """Find a port or an id that each task draws for itself, in what srun runs or will run."""
    is_task = not (script.directives or script.sruns) and TASK_NUMBER.search(script.text)
    for command in script.commands if is_task else script.sruns:
        for word in command.words if is_task else _shell_texts(command):
            found = OWN_POINT.search(word.text)
            if found and (is_task or found["draw"] not in word.live):
                yield LintFinding(
                    place(word, found),
                    "own-port",
                    f"each task draws its own {found['name']}",
                    "the ranks look for each other in different places, and never meet",
                    "Work it out before srun, in the batch script, and export it.",
                )


def port_of_an_array(script: Script) -> Iterator[LintFinding]:
    """Find a fixed port in the tasks of an array; the first one."""
    array = script.option("array")
    if not array or array.value.endswith("%1") or script.option("exclusive"):
        return
    for command in script.commands:
        for before, word in pairwise((command.words[0], *command.words)):
            found = FIXED_PORT.search(f"{before.text} {word.text}")
            if found and found.end("port"):
                yield LintFinding(
                    word.line,
                    "array-port",
                    f"port {found['port']} in every task of the array",
                    "two tasks on one node want the same port: the second one fails, or its ranks "
                    "join the first",
                    "Write $((20000 + SLURM_JOB_ID % 12000)); on one node, torchrun --standalone.",
                )
                return


def one_gpu_seen(script: Script) -> Iterator[LintFinding]:
    """Find ranks that take the GPU of their local rank, and see only one."""
    for command in script.sruns:
        options = script.srun_options(command)
        asked = script.option("gpus-per-task") or "gpus-per-task" in options
        bound = script.option("gpu-bind") or "gpu-bind" in options
        for word in command.words if asked and not bound and script.tasks_of(command) > 1 else ():
            if found := LOCAL_RANK.search(word.text):
                yield LintFinding(
                    place(word, found),
                    "one-gpu-seen",
                    "LOCAL_RANK counts the tasks of a node, and --gpus-per-task shows each its own",
                    "each task sees its GPU as device 0: cuda:1 is an invalid device ordinal there",
                    "Use device 0 in the program, or ask for --gpus-per-node instead.",
                )
                return


RULES = (
    unbound_in_conda,
    devices_by_hand,
    export_none,
    export_of_a_list,
    not_exported,
    own_meeting_point,
    port_of_an_array,
    one_gpu_seen,
)
