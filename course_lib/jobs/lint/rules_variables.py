"""Rules about variables: who sets them, when, and whether they have a value at all."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import pairwise

from course_lib.jobs.lint.script import MEETING, TELLS_ONLY, LintFinding, Script, place
from course_lib.jobs.lint.shell import Command, Word

PATHS = ("output", "error", "input", "chdir")
TASKS = ("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core")
SET_BY = {  # variables that are there only if one of these options is asked for
    "SLURM_CPUS_PER_TASK": ("cpus-per-task",),
    "SLURM_GPUS": ("gpus",),
    "SLURM_GPUS_PER_NODE": ("gpus-per-node",),
    "SLURM_GPUS_PER_TASK": ("gpus-per-task",),
    "SLURM_NTASKS_PER_NODE": ("ntasks-per-node",),
    "SLURM_NTASKS": TASKS,
    "SLURM_NPROCS": TASKS,
}
ALWAYS_SET = (
    "ARRAY_JOB_ID ARRAY_TASK_COUNT ARRAY_TASK_ID ARRAY_TASK_MAX ARRAY_TASK_MIN ARRAY_TASK_STEP "
    "CLUSTER_NAME CPUS_ON_NODE GPUS_ON_NODE GTIDS JOBID JOB_ACCOUNT JOB_CPUS_PER_NODE JOB_ID "
    "JOB_NAME JOB_NODELIST JOB_NUM_NODES JOB_PARTITION JOB_QOS LOCALID MEM_PER_CPU MEM_PER_GPU "
    "MEM_PER_NODE NNODES NODEID NODELIST PROCID RESTART_COUNT STEPID STEP_ID STEP_NODELIST "
    "STEP_NUM_NODES STEP_NUM_TASKS SUBMIT_DIR SUBMIT_HOST TASKS_PER_NODE TASK_PID TMPDIR"
)  # or by what srun starts, in an array, or by many sites
VARIABLES = {*SET_BY, *(f"SLURM_{name}" for name in ALWAYS_SET.split())}
USED = re.compile(r"\$(?:(?P<plain>SLURM_\w+)|\{(?P<braced>SLURM_\w+)\})")
PLAIN = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)\}|(?P<plain>[A-Za-z_]\w*))")
PEOPLE_KNOW = {"HOME", "HOST", "HOSTNAME", "PATH", "PWD", "RANDOM", "TMPDIR", "UID", "USER"}
LAUNCHED = re.compile(
    r"--(?:(?P<meeting>rdzv[-_]endpoint|master[-_]addr|main_process_ip)"
    r"|nnodes|nproc[-_]per[-_]node)[= ]+(?P<value>\S+)"
)
OWN = re.compile(r"\$\{?SLURM_(PROCID|LOCALID|NODEID)\b|\$\{?SLURMD_NODENAME\b|\$\(hostname[^)]*\)")
ADDRESS = re.compile(r"addr|endpoint|\bip\b|_ip\b|head|host=|tcp://", re.IGNORECASE)
RANK_NAME = re.compile(r"(RANK|LOCAL_RANK|NODE_RANK|GROUP_RANK|MACHINE_RANK)=")
RANK_OPTION = re.compile(rf"--(node|machine)[-_]rank[= ]\"?({OWN.pattern})")
C10D = re.compile(r"--rdzv[-_]backend[= ]+c10d")


def not_filled_in(script: Script) -> Iterator[LintFinding]:
    """Find variables in directives: sbatch does not expand them."""
    for one in script.directives:
        home = one.option in PATHS and one.value.startswith("~")
        if home or re.search(r"\$\{?\w|\$\(|`", one.value):
            number = "%j" if "JOB" in one.value else "%A" if "ARRAY" in one.value else "%u"
            yield LintFinding(
                one.line,
                "not-filled-in",
                f"--{one.option}={one.value}: sbatch fills in no variables",
                "the text is taken as it stands; if its folder does not exist, the job fails and "
                "leaves no log",
                f"Write it out, or use Slurm's own signs, here {number}: %j is the job, %x its "
                "name, %u the user, %A and %a array and task.",
            )


def nothing_in_it(script: Script) -> Iterator[LintFinding]:
    """Find variables that Slurm does not set in this job, or never sets.

    A script without directives may be what srun runs in a job of another script.
    """
    tested = " ".join(one.text for one in script.commands if one.name in ("[", "[[", "test"))
    for command in script.commands:
        for word in command.words:
            for found in USED.finditer(word.live):
                name = found["plain"] or found["braced"]
                is_looked_at = name in script.variables or name in tested
                if command.name not in TELLS_ONLY - {"export"} and not is_looked_at:
                    yield from _not_set(script, name, word.line)


def _not_set(script: Script, name: str, line: int) -> Iterator[LintFinding]:
    asked = SET_BY.get(name, ())
    near = get_close_matches(name, VARIABLES, n=1, cutoff=0.9)
    if asked and script.directives and not script.option(*asked):
        yield LintFinding(
            line,
            "nothing-in-it",
            f"${name} is empty: the job does not ask for --{asked[0]}",
            "Slurm sets the variable only where a directive asks for the option",
            f"Add #SBATCH --{asked[0]}=..., or write what you want in place of ${name}.",
        )
    elif name not in VARIABLES and near:
        yield LintFinding(
            line,
            "nothing-in-it",
            f"${name} is empty: Slurm has no such variable",
            "bash puts nothing in its place, and says nothing",
            f"Write ${near[0]}.",
        )


def never_set(script: Script) -> Iterator[LintFinding]:
    """Find variables in a launcher's options that are never set.

    Names in capitals may come from where sbatch is called; the host where ranks meet cannot.
    """
    if script.reads_others:
        return
    for command in script.commands:
        for before, word in pairwise((command.words[0], *command.words)):
            option = before.live if before.text.startswith("--") else ""
            found = LAUNCHED.search(f"{option} {word.live}")
            if not found or command.name in TELLS_ONLY - {"export"}:
                continue
            for used in PLAIN.finditer(found["value"]):
                is_host = bool(found["meeting"]) and used.start() == 0 and script.nodes > 1
                name = used["braced"] or used["plain"]
                if _is_never_set(script, name) and (is_host or not name.isupper()):
                    yield _never_set(name, word.line, is_host)


def _is_never_set(script: Script, name: str) -> bool:
    return not (name in script.filled or name in PEOPLE_KNOW or name.startswith("SLURM"))


def _never_set(name: str, line: int, is_host: bool) -> LintFinding:
    read = f'Try read -r {name} < <(scontrol show hostnames "$SLURM_JOB_NODELIST"), above it.'
    return LintFinding(
        line,
        "nothing-in-it",
        f"${name} is empty: nothing in this script sets it",
        "under set -u the job ends here within a second; without, the launcher gets nothing",
        read if is_host else f"Write {name}=..., above it.",
    )


def wrong_shell(script: Script) -> Iterator[LintFinding]:
    """Find a rank's own number that one shell computes for all of them."""
    if script.nodes < 2 and script.tasks_per_node < 2:
        return
    for command in script.commands:
        for word in command.words:
            if found := _own_number(script, command, word):
                yield LintFinding(
                    place(word, found),
                    "wrong-shell",
                    f"{found[0].rstrip('}')} is filled in here, before srun starts anything",
                    "this shell runs once, on the first node: every task gets its value, 0 or the "
                    "first node's name",
                    "Leave it to the task: srun bash -c '...' with single quotes, or \\$ within "
                    "double ones.",
                )


def _own_number(script: Script, command: Command, word: Word) -> re.Match[str] | None:
    """Return where a word for several tasks holds a number that differs between them."""
    found = OWN.search(word.text) if OWN.search(word.live) else None
    is_address = ADDRESS.search(word.text) and not RANK_OPTION.search(word.text)
    if not found or (is_address and "PROCID" not in found[0]):
        return None
    told = script.spelt_out(command.text)
    if RANK_OPTION.search(command.text) and C10D.search(told) and MEETING.search(told):
        return None  # there the launchers number themselves
    assigned = command.assigned and word in command.assigned.values()
    if assigned and (RANK_NAME.match(word.text) or RANK_OPTION.search(word.live)):
        return found
    name = word.text.partition("=")[0]
    hands_over = command in script.sruns and not assigned
    before = command.words[command.words.index(word) - 1].text
    return found if hands_over and not ADDRESS.search(f"{name} {before}") else None


def unquoted_arguments(script: Script) -> Iterator[LintFinding]:
    """Find `$@` without quotes."""
    for command in script.commands:
        for word in command.words:
            found = re.search(r"\$[@*]|\$\{[@*]\}", re.sub(r'"[^"]*"', "", word.bare))
            if found and command.name not in TELLS_ONLY:
                yield LintFinding(
                    word.line,
                    "unquoted-arguments",
                    f"{found[0]} stands without quotes",
                    "an argument with a blank in it falls into two",
                    'Write "$@".',
                )


RULES = (not_filled_in, nothing_in_it, never_set, wrong_shell, unquoted_arguments)
