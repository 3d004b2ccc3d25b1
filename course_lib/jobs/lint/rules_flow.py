"""Rules about the order of ends: lost work, lost exit codes, signals without a handler."""

import re
from collections.abc import Iterator

from course_lib.jobs.lint.script import LAUNCHERS, TELLS_ONLY, TORCHRUN, LintFinding, Script

QUICK = TELLS_ONLY | {"", "cd", "date", "disown", "exit", "sleep", "done", "fi", "}"}
HANDLED = {"TERM", "SIGTERM", "INT", "SIGINT", "HUP", "SIGHUP", "QUIT", "SIGQUIT", "15", "2"}
NUMBERS = {"10": "USR1", "12": "USR2", "15": "TERM"}


def nobody_waits(script: Script) -> Iterator[LintFinding]:
    """Find work in the background of a script that ends before it."""
    works = {*script.sruns, *script.running(LAUNCHERS)}
    works |= {one for one in script.commands if one.name.startswith("python")}
    stays = [one.line for one in script.commands if one.end != "&" and one.name not in QUICK]
    for command in works:
        if command.end == "&" and not any(line >= command.line for line in stays):
            yield LintFinding(
                command.line,
                "no-wait",
                f"{command.name} runs in the background, and nothing waits for it",
                "the script ends at once, and Slurm ends the rest with it: COMPLETED, in a second",
                "Take the & away, or write wait at the end.",
            )


def lost_exit_code(script: Script) -> Iterator[LintFinding]:
    """Find `srun ... | tee log`, which reports the exit code of tee."""
    safe = [
        one.line
        for one in script.commands
        if one.name in ("set", "shopt") and "pipefail" in one.text
    ]
    for command in script.commands:
        works = re.fullmatch(
            r"srun|torchrun|python[\d.]*|accelerate|deepspeed|mpirun", command.name
        )
        if command.end not in ("|", "|&") or not works or "PIPESTATUS" in script.text:
            continue
        if not any(line <= command.line for line in safe) and _is_work(script, command.text):
            yield LintFinding(
                command.line,
                "lost-exit-code",
                f"{command.name} in a pipe, without set -o pipefail",
                "the exit code is that of the last command of the pipe: a job that failed is "
                "called COMPLETED, and what depends on it starts",
                "Write set -o pipefail near the top.",
            )


def _is_work(script: Script, text: str) -> bool:
    """Return whether the command computes; a list of hosts or versions may be piped anywhere."""
    return not re.match(r"srun( -\S+)* (hostname|nvidia-smi|env|echo|lscpu)|python\S* -c", text)


def signal_unheard(script: Script) -> Iterator[LintFinding]:
    """Find a `--signal` without a handler."""
    one = script.option("signal")
    if not one:
        return
    flags, _, rest = one.value.rpartition(":")
    name = NUMBERS.get(rest.partition("@")[0], rest.partition("@")[0]).removeprefix("SIG")
    traps = [
        command
        for command in script.commands
        if command.name == "trap" and any(name == w.text.removeprefix("SIG") for w in command.words)
    ]
    if "B" in flags and not traps and name not in ("KILL",):
        yield LintFinding(
            one.line,
            "no-trap",
            f"--signal={one.value} goes to this script, which has no trap for {name}",
            "the signal ends the script then and there, long before the time is over",
            f"Write trap 'scontrol requeue \"$SLURM_JOB_ID\"' {name} before the work begins.",
        )
    elif "B" in flags and traps:
        yield from _deaf_while_working(script, name)
    elif name not in HANDLED and not re.search(rf"trap\s+(''|\"\")\s+\w*{name}", script.text):
        yield from _ends_torchrun(script, name, one.line)


def _deaf_while_working(script: Script, name: str) -> Iterator[LintFinding]:
    work = [one for one in script.commands if one in script.sruns or one.name == "torchrun"]
    if work and not any(one.end == "&" for one in work):
        yield LintFinding(
            work[-1].line,
            "deaf",
            f"{work[-1].name} runs in the foreground, and {name} should be heard meanwhile",
            "bash runs a trap only when the command before it has ended: too late",
            f"Write {work[-1].name} ... & and then wait $!, which a signal interrupts.",
        )


def _ends_torchrun(script: Script, name: str, line: int) -> Iterator[LintFinding]:
    for command in script.running(TORCHRUN):
        if command in script.sruns and "signals-to-handle" not in command.text:
            yield LintFinding(
                line,
                "ends-torchrun",
                f"{name} also reaches torchrun, which does not handle it",
                "torchrun dies of it, and takes the ranks along before they can save",
                f'Ignore it there: srun bash -c \'trap "" {name}; exec torchrun "$@"\' _ ...',
            )
            return


def cores_not_handed_on(script: Script) -> Iterator[LintFinding]:
    """Find steps that get exactly the cores they request, and request none."""
    if script.number("cpus-per-task", 1) < 2 or "SRUN_CPUS_PER_TASK" in script.text:
        return
    for command in script.sruns:
        options = set(script.srun_options(command))
        if options & {"--exact", "exclusive"} and "cpus-per-task" not in options:
            yield LintFinding(
                command.line,
                "cores",
                "this srun takes exactly what it asks for, and asks for no --cpus-per-task",
                "since Slurm 22.05 it does not take the job's over: each task gets a single core",
                'Write srun --cpus-per-task="$SLURM_CPUS_PER_TASK".',
            )
            return


RULES = (nobody_waits, lost_exit_code, signal_unheard, cores_not_handed_on)
