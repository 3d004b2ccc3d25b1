"""Rules about ranks: how many there are, on which nodes, and who gives them their numbers."""

import re
from collections.abc import Iterator
from itertools import pairwise

from course_lib.jobs.lint.script import LAUNCHERS, MEETING, TORCHRUN, LintFinding, Script, place
from course_lib.jobs.lint.shell import Command

OWN_ADDRESS = re.compile(
    rf"(?P<name>{MEETING.pattern})[= ]\"?\$(\(hostname|\{{?HOSTNAME|\{{?SLURMD_NODENAME)"
)
CONTAINERS = {"apptainer", "singularity", "docker", "podman", "shifter"}
LOCALHOST = re.compile(r"^(localhost|127\.0\.0\.1)(:|$)")
FIXED = re.compile(r"([A-Za-z][\w.-]*|\d+(\.\d+){3})(:\S*)?")
NODELIST = re.compile(r"\$\{?SLURM_(JOB_)?NODELIST\}?(:|$)")


def no_srun(script: Script) -> Iterator[LintFinding]:
    """Find torchrun started on the first node only, for which srun may stand too far right."""
    if script.nodes < 2:
        return
    for command in script.running(LAUNCHERS):
        if command.name in CONTAINERS and any(word.text == "srun" for word in command.called):
            yield LintFinding(
                command.line,
                "inside-out",
                f"srun inside of the container that {command.name} starts",
                "the container has no Slurm: srun is not found there, or runs outside of it",
                f"Write srun {command.name} exec IMAGE torchrun ..., with srun first.",
            )
        elif not script.reaches_nodes(command) and not _runs_alone(script, command):
            yield LintFinding(
                command.line,
                "no-srun",
                f"{command.name} without srun, in a job of {script.nodes} nodes",
                "a batch script runs on the first node only: the launcher waits there for peers "
                "that nobody starts, until it gives up",
                f"Write srun before {command.name}.",
            )


def _runs_alone(script: Script, command: Command) -> bool:
    return bool(re.search(r"--nnodes[= ]1\b", script.spelt_out(command.text)))


def idle_nodes(script: Script) -> Iterator[LintFinding]:
    """Find nodes or tasks that are requested and never used."""
    if any(script.reaches_nodes(command) for command in script.commands):
        return
    pythons = [one for one in script.commands if re.fullmatch(r"python[\d.]*", one.name)]
    if script.nodes > 1 and pythons and not list(script.running(LAUNCHERS)):
        yield LintFinding(
            pythons[0].line,
            "idle-nodes",
            f"{pythons[0].name} without srun, in a job of {script.nodes} nodes",
            "a batch script runs on the first node only: the others are paid for and do nothing",
            f"Write srun before {pythons[0].name}, or ask for --nodes=1.",
        )


def ranks_twice(script: Script) -> Iterator[LintFinding]:
    """Find a launcher for each rank, each of which starts all ranks."""
    for command in script.running(LAUNCHERS):
        tasks = script.tasks_of(command)
        per_node = re.search(
            r"nproc[-_]per[-_]node[= ]+(\S+)|num_processes[= ]+(\S+)",
            script.spelt_out(command.text),
        )
        if command in script.sruns and tasks > 1 and per_node and per_node[1] != "1":
            yield LintFinding(
                command.line,
                "ranks-twice",
                f"srun starts {tasks} launchers on each node, and each starts {per_node[1]} ranks",
                "there are too many ranks, and the launchers of one node quarrel about its port",
                "Ask for --ntasks-per-node=1: the launcher starts the ranks.",
            )


def alone_on_each_node(script: Script) -> Iterator[LintFinding]:
    """Find a torchrun on each of several nodes without a rendezvous endpoint."""
    for command in script.running(TORCHRUN):
        text = script.spelt_out(command.text)
        is_alone = "--standalone" in text
        is_lost = not MEETING.search(text) and not re.search(r"PET_|\[@\]|--nnodes[= ]1\b", text)
        if _is_on_all_nodes(script, command) and (is_alone or is_lost):
            how = "--standalone" if is_alone else "without --rdzv-endpoint"
            yield LintFinding(
                command.line,
                "alone",
                f"torchrun {how}, on {script.nodes} nodes",
                "each node trains by itself, the same thing, or waits for itself",
                "Use --nnodes, --rdzv-backend=c10d and --rdzv-endpoint as many_nodes.sbatch does.",
            )


def no_backend(script: Script) -> Iterator[LintFinding]:
    """Find torchruns without `--rdzv-backend` that are all node 0."""
    for command in script.running(TORCHRUN):
        text = script.spelt_out(command.text)
        is_told = re.search(r"rdzv[-_]backend|node[-_]rank[= ]\D|\[[@*]\]|--nnodes[= ]1\b", text)
        is_lone = "--standalone" in text or "PET_" in script.text
        endpoint = re.search(r"--node[-_]rank[= ]\d+|--(rdzv[-_]endpoint|master[-_]addr)", text)
        if _is_on_all_nodes(script, command) and endpoint and not is_told and not is_lone:
            yield LintFinding(
                command.line,
                "no-backend",
                f"{endpoint[0]} without --rdzv-backend",
                "torchrun's default is static, where --node-rank numbers the nodes, 0 by default: "
                "each one takes itself for the first, and waits for the others",
                "Write --rdzv-backend=c10d and --rdzv-endpoint=HOST:PORT.",
            )


def _is_on_all_nodes(script: Script, command: Command) -> bool:
    return (
        script.nodes > 1
        and command in script.sruns
        and not {"nodes", "nodelist"} & set(script.srun_options(command))
    )


def other_number_of_nodes(script: Script) -> Iterator[LintFinding]:
    """Find `--nnodes` that differs from the job's number of nodes."""
    for command in script.running(TORCHRUN):
        found = re.search(r"--nnodes[= ]+(\d{1,9})(?![\d:])", script.spelt_out(command.text))
        is_one_of_all = _is_on_all_nodes(script, command) and "--standalone" not in command.text
        if found and is_one_of_all and int(found[1]) != script.nodes:
            yield LintFinding(
                command.line,
                "nnodes",
                f"torchrun expects {found[1]} nodes, and the job has {script.nodes}",
                "it waits for nodes that never come, or leaves some out",
                'Write --nnodes="$SLURM_NNODES", which is always right.',
            )


def meets_itself(script: Script) -> Iterator[LintFinding]:
    """Find a rendezvous endpoint that is another machine on each node, or none at all."""
    if script.nodes < 2:
        return
    for command in script.commands:
        for name, value, line in _meeting_points(command):
            host = script.spelt_out(value)
            if LOCALHOST.match(host):
                rule, what = "meets-itself", "on each node, that is the node itself"
            elif NODELIST.match(host):
                rule, what = "no-host", "a list like node[1-2] is no host's name"
            elif FIXED.fullmatch(host) and not _is_known_before(script):
                rule, what = "fixed-host", "Slurm picks the nodes, and need not pick this one"
            else:
                continue
            yield LintFinding(
                line,
                rule,
                f"{name} is {value[:40]}: {what}",
                "the ranks of the nodes never find each other, and wait until they give up",
                'Set it by read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST"); '
                "then write $MASTER_ADDR here.",
            )


def _is_known_before(script: Script) -> bool:
    """Return whether the script names its nodes, or the endpoint is a server outside the job."""
    on = [
        script.option("nodelist"),
        *(script.srun_options(one).get("nodelist") for one in script.sruns),
    ]
    return any(on) or "etcd" in script.text


def each_names_itself(script: Script) -> Iterator[LintFinding]:
    """Find a rendezvous endpoint that each task computes for itself."""
    for command in script.sruns if script.nodes > 1 else ():
        for word in command.words:
            found = OWN_ADDRESS.search(word.text)
            if found and not OWN_ADDRESS.search(word.live):
                yield LintFinding(
                    place(word, found),
                    "meets-itself",
                    f"{found['name']} is worked out by each task: its own node",
                    "the ranks of the nodes never find each other, and wait until they give up",
                    "Work it out before srun, in the batch script, and export it.",
                )


def _meeting_points(command: Command) -> Iterator[tuple[str, str, int]]:
    """Yield name, value and line of each rendezvous option: `--name=value`, or in two words."""
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
    no_backend,
    meets_itself,
    each_names_itself,
)
