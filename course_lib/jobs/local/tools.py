"""The Slurm commands that batch scripts call, for local jobs: `srun`, and some of `scontrol`.

The nodes of a local job are played: `srun` starts their tasks side by side on this machine, with
the variables by which each finds its place.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from course_lib.jobs.local.job import MARK, POLL_S

ALONE = {"--label", "-l", "--unbuffered", "-u", "--exclusive", "--overlap", "-K", "-v", "-Q"}
WITH_VALUE = {"-n": "--ntasks", "-N": "--nodes", "-c": "--cpus-per-task", "-w": "--nodelist"}


def main() -> None:
    """Run the tool that is named first."""
    tool, *words = sys.argv[1:]
    sys.exit(srun(words) if tool == "srun" else scontrol(words))


def read_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return srun's options and the command after them."""
    options, rest = {}, list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if word == "--":
            break
        if word[:2] in WITH_VALUE and not word.startswith("--"):
            options[WITH_VALUE[word[:2]]] = word[2:] or rest.pop(0)
        elif value or word in ALONE or word == "--kill-on-bad-exit":
            options[name] = value
        elif rest:
            options[name] = rest.pop(0)
    return options, rest


def srun(words: list[str]) -> int:
    """Run a command once per task; return the highest exit code of all tasks."""
    options, command = read_options(words)
    nodes = int(options.get("--nodes", os.environ["SLURM_NNODES"]))
    per_node = int(options.get("--ntasks-per-node", os.environ["SLURM_NTASKS_PER_NODE"]))
    num_tasks = int(options.get("--ntasks", nodes * per_node))
    if not command:
        print("srun: need a command to run; got none.", file=sys.stderr)
        return 1
    tasks = [_task(command, k, num_tasks, nodes) for k in range(num_tasks)]
    ends_all = options.get("--kill-on-bad-exit") in ("", "1") or "-K" in options
    while any(task.poll() is None for task in tasks):
        if ends_all and any(task.poll() for task in tasks):
            for task in tasks:
                task.terminate()
        time.sleep(POLL_S)
    return max(code if code >= 0 else 128 - code for code in (task.wait() for task in tasks))


def _task(command: list[str], k: int, num_tasks: int, nodes: int) -> "subprocess.Popen[bytes]":
    per_node = -(-num_tasks // nodes)
    place = {"PROCID": k, "LOCALID": k % per_node, "NODEID": k // per_node, "NTASKS": num_tasks}
    variables = {f"SLURM_{name}": str(value) for name, value in place.items()}
    return subprocess.Popen(
        command, env=os.environ | variables, stdin=subprocess.DEVNULL, start_new_session=True
    )


def scontrol(words: list[str]) -> int:
    """Run `show hostnames [LIST]` or `requeue ID`."""
    if words[:2] == ["show", "hostnames"]:
        names = (words[2:] or [os.environ["SLURM_JOB_NODELIST"]])[0].split(",")
        os.write(1, "".join(f"{name}\n" for name in names).encode())  # at once: head may not wait
        return 0
    if words[:1] == ["requeue"]:
        array_task = Path(os.environ[MARK])
        (array_task.parents[1] / f"requeue-{array_task.name}").touch()
        return 0
    print(f"scontrol: a local job knows show hostnames and requeue; got {words}.", file=sys.stderr)
    return 1
