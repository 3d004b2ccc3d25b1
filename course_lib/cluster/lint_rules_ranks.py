"""Rules about ranks: how many there are, on which nodes, and in which shell they learn it."""

import re
from collections.abc import Iterator
from itertools import pairwise

from course_lib.cluster.script import LAUNCHERS, TORCHRUN, Finding, Script, place
from course_lib.cluster.shell import Command, Word

OWN = re.compile(r"\$\{?SLURM_(PROCID|LOCALID|NODEID)\b|\$\{?SLURMD_NODENAME\b|\$\(hostname[^)]*\)")
ADDRESS = re.compile(r"addr|endpoint|\bip\b|_ip\b|head|host=|tcp://", re.IGNORECASE)
RANK_NAME = re.compile(r"(RANK|LOCAL_RANK|NODE_RANK|GROUP_RANK|MACHINE_RANK)=")
RANK_OPTION = re.compile(rf"--(node|machine)[-_]rank[= ]\"?({OWN.pattern})")
C10D = re.compile(r"--rdzv[-_]backend[= ]c10d.*--rdzv[-_]endpoint|--rdzv[-_]endpoint.*=c10d")
LOCALHOST = re.compile(r"^(localhost|127\.0\.0\.1)(:|$)")
NODELIST = re.compile(r"\$\{?SLURM_(JOB_)?NODELIST\}?(:|$)")
MEETING = re.compile(r"--(rdzv[-_]endpoint|master[-_]addr|main_process_ip)|MASTER_ADDR")


def no_srun(script: Script) -> Iterator[Finding]:
    """torchrun on the first node only."""
    if script.nodes < 2:
        return
    for command in script.running(LAUNCHERS):
        if not script.reaches_nodes(command) and not _runs_alone(script, command):
            yield Finding(
                command.line,
                "no-srun",
                f"{command.name} without srun, in a job of {script.nodes} nodes",
                "a batch script runs on the first node only: the launcher waits there for peers "
                "that nobody starts, until the time is over",
                f"Write srun before {command.name}.",
            )


def _runs_alone(script: Script, command: Command) -> bool:
    return bool(re.search(r"--nnodes[= ]1\b", script.spelt_out(command.text)))


def idle_nodes(script: Script) -> Iterator[Finding]:
    """Nodes or tasks that are asked for and never used."""
    if any(script.reaches_nodes(command) for command in script.commands):
        return
    pythons = [one for one in script.commands if re.fullmatch(r"python[\d.]*", one.name)]
    if script.nodes > 1 and pythons and not list(script.running(LAUNCHERS)):
        yield Finding(
            pythons[0].line,
            "idle-nodes",
            f"{pythons[0].name} without srun, in a job of {script.nodes} nodes",
            "a batch script runs on the first node only: the others are paid for and do nothing",
            f"Write srun before {pythons[0].name}, or ask for --nodes=1.",
        )


def ranks_twice(script: Script) -> Iterator[Finding]:
    """A launcher for each rank, each of which starts all ranks."""
    for command in script.running(LAUNCHERS):
        tasks = script.tasks_of(command)
        per_node = re.search(
            r"nproc[-_]per[-_]node[= ]+(\S+)|num_processes[= ]+(\S+)",
            script.spelt_out(command.text),
        )
        if command in script.sruns and tasks > 1 and per_node and per_node[1] != "1":
            yield Finding(
                command.line,
                "ranks-twice",
                f"srun starts {tasks} launchers on each node, and each starts {per_node[1]} ranks",
                "there are too many ranks, and the launchers of one node quarrel about its port",
                "Ask for --ntasks-per-node=1: the launcher starts the ranks.",
            )


def alone_on_each_node(script: Script) -> Iterator[Finding]:
    """`--standalone` on several nodes."""
    for command in script.running(TORCHRUN):
        if script.nodes > 1 and command in script.sruns and "--standalone" in command.text:
            yield Finding(
                command.line,
                "alone",
                f"torchrun --standalone, on {script.nodes} nodes",
                "each node trains by itself, the same thing; no error tells you",
                "Use --nnodes, --rdzv-backend=c10d and --rdzv-endpoint as many_nodes.sbatch does.",
            )


def other_number_of_nodes(script: Script) -> Iterator[Finding]:
    """`--nnodes` that is not the job's."""
    for command in script.running(TORCHRUN):
        found = re.search(r"--nnodes[= ]+(\d+)(?![\d:])", script.spelt_out(command.text))
        is_on_all = command in script.sruns and "nodes" not in script.srun_options(command)
        if found and is_on_all and int(found[1]) != script.nodes:
            yield Finding(
                command.line,
                "nnodes",
                f"torchrun expects {found[1]} nodes, and the job has {script.nodes}",
                "it waits for nodes that never come, or leaves some out",
                'Write --nnodes="$SLURM_NNODES", which is always right.',
            )


def wrong_shell(script: Script) -> Iterator[Finding]:
    """A rank's own number, worked out once for all of them."""
    if script.nodes < 2 and script.tasks_per_node < 2:
        return
    for command in script.commands:
        for word in command.words:
            if found := _own_number(script, command, word):
                yield Finding(
                    place(word, found),
                    "wrong-shell",
                    f"{found[0].rstrip('}')} is filled in here, before srun starts anything",
                    "this shell runs once, on the first node: every task gets its value, 0 or the "
                    "first node's name",
                    "Leave it to the task: srun bash -c '...' with single quotes, or \\$ within "
                    "double ones.",
                )


def _own_number(script: Script, command: Command, word: Word) -> re.Match[str] | None:
    """Where a word that is handed to tasks has a number that differs between them."""
    found = OWN.search(word.text) if OWN.search(word.live) else None
    is_address = ADDRESS.search(word.text) and not RANK_OPTION.search(word.text)
    if not found or (is_address and "PROCID" not in found[0]):
        return None
    if RANK_OPTION.search(command.text) and C10D.search(script.spelt_out(command.text)):
        return None  # there the launchers number themselves
    assigned = command.assigned and word in command.assigned.values()
    if assigned and (RANK_NAME.match(word.text) or RANK_OPTION.search(word.live)):
        return found
    name = word.text.partition("=")[0]
    hands_over = command in script.sruns and not assigned
    before = command.words[command.words.index(word) - 1].text
    return found if hands_over and not ADDRESS.search(f"{name} {before}") else None


def meets_itself(script: Script) -> Iterator[Finding]:
    """A meeting point that is another machine for each node, or none at all."""
    if script.nodes < 2:
        return
    for command in script.commands:
        for name, value, line in _meeting_points(command):
            host = script.spelt_out(value)
            if LOCALHOST.match(host):
                rule, what = "meets-itself", "on each node, that is the node itself"
            elif NODELIST.match(host):
                rule, what = "no-host", "a list like node[1-2] is no host's name"
            else:
                continue
            yield Finding(
                line,
                rule,
                f"{name} is {value[:40]}: {what}",
                "the ranks of the nodes never find each other, and wait until they give up",
                'Try read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST").',
            )


def _meeting_points(command: Command) -> Iterator[tuple[str, str, int]]:
    """Name, value and line of each word that says where ranks meet: `--name=value`, or apart."""
    for before, word in pairwise((command.words[0], *command.words)):
        name, equals, value = word.text.partition("=")
        if equals and MEETING.fullmatch(name):
            yield name, value, word.line
        elif not equals and before.text.startswith("-") and MEETING.fullmatch(before.text):
            yield before.text, word.text, word.line


RULES = (
    no_srun,
    idle_nodes,
    ranks_twice,
    alone_on_each_node,
    other_number_of_nodes,
    wrong_shell,
    meets_itself,
)
