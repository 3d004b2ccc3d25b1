"""The structure of a batch script, for the rules of `lint`: its directives and its commands."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from course_lib.jobs.lint.directives import Directive, options_of, read_directives
from course_lib.jobs.lint.shell import Command, Word, read_commands, without_here_documents

SHELL = re.compile(r"\b(bash|sh|dash|ksh|zsh)\b")
TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b")
LAUNCHERS = re.compile(rf"{TORCHRUN.pattern}|\baccelerate[\s-]launch\b")
REACH_NODES = {"srun", "mpirun", "mpiexec", "prun", "ssh", "pdsh", "clush", "parallel", "ray"}
MEETING = re.compile(r"--(rdzv[-_]endpoint|master[-_]addr|main_process_ip)|MASTER_ADDR")
FILLS = {"declare", "export", "for", "getopts", "local", "mapfile", "read", "readarray"}
FILLS |= {"readonly", "select", "typeset"}
HARMLESS = re.compile(r"activate|profile|bashrc|conda|mamba|module")  # set nothing of the job
TELLS_ONLY = {"echo", "export", "printf", "which", "type", "[", "[["}
LONGEST = 2000  # characters of a command, and of a value, that are looked at in full
GPU_NAME = re.compile(r"gpu|dgx|[avhbl]\d{2,3}\b|gh200|mi\d{3}|[-_]g$", re.IGNORECASE)
GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-task")


@dataclass(frozen=True)
class LintFinding:
    """A mistake in a line: what is written, why it is wrong, and what to write instead."""

    line: int
    rule: str
    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class Script:
    """A batch script; `folder` is where sbatch is called."""

    text: str
    folder: Path

    @cached_property
    def lines(self) -> list[str]:
        """All lines, with here-documents left empty; line 1 is `lines[0]`."""
        text = self.text.removeprefix("\ufeff").replace("\r\n", "\n")
        return without_here_documents(text).split("\n")

    @property
    def is_bash(self) -> bool:
        """Whether it is for bash or a similar shell; sbatch also takes scripts for Python."""
        first = self.lines[0]
        return not first.startswith("#!") or bool(SHELL.search(first))

    @cached_property
    def directives(self) -> list[Directive]:
        """The directives that sbatch reads."""
        return read_directives("\n".join(self.lines))

    @cached_property
    def commands(self) -> list[Command]:
        """The commands that bash runs; none in a script for something else."""
        return read_commands(self.text.replace("\r\n", "\n")) if self.is_bash else []

    @cached_property
    def variables(self) -> dict[str, str]:
        """The values of variables as written; of several, the first."""
        found: dict[str, str] = {}
        for command in self.commands:
            for name, word in command.assigned.items():
                found.setdefault(name, word.text.partition("=")[2])
        return found

    @cached_property
    def filled(self) -> set[str]:
        """The variables that the script sets, or tests for a value."""
        found = set(self.variables) | set(re.findall(r"\$\{(\w+):?[-=?+]", self.text))
        for command in self.commands:
            words = [word.text for word in command.called]
            if command.name in FILLS or words[:2] == ["printf", "-v"]:
                found |= {word.partition("=")[0] for word in words[1:]}
            if command.name in ("[", "[[", "test"):
                found |= set(re.findall(r"\w+", command.text))
            if words[1:2] == ["="]:  # ((name = 1))
                found.add(words[0])
        return found

    @property
    def reads_others(self) -> bool:
        """Whether it sources a file, which may set variables."""
        return any(
            (command.name in ("source", ".") or command.words[0].text == "eval")
            and not HARMLESS.search(command.text)
            for command in self.commands
        )

    def option(self, *names: str) -> Directive | None:
        """Return the directive that counts, of those with one of these names."""
        return next((one for one in reversed(self.directives) if one.option in names), None)

    def number(self, name: str, default: int) -> int:
        """Return the value of a directive as a number; of a range, its least."""
        one = self.option(name)
        found = re.match(r"[0-9]{1,9}", one.value) if one else None
        return int(found[0]) if found else default

    @property
    def nodes(self) -> int:
        """The requested nodes, as far as the script tells."""
        tasks, per_node = self.number("ntasks", 0), self.number("ntasks-per-node", 0)
        return self.number("nodes", -(-tasks // per_node) if tasks and per_node else 1)

    @property
    def tasks_per_node(self) -> int:
        """The tasks that srun starts on each node unless its own options say otherwise."""
        return self.number("ntasks-per-node", -(-self.number("ntasks", 1) // self.nodes))

    @property
    def asks_for_gpus(self) -> bool:
        """Whether a directive requests GPUs, whole nodes, or a partition named after GPUs."""
        asked = (self.option(*GPU_OPTIONS), self.option("exclusive"))
        places = map(self.option, ("partition", "constraint", "qos", "account", "nodelist"))
        return any(one and (one.option != "gres" or "gpu" in one.value) for one in asked) or any(
            one and GPU_NAME.search(one.value) for one in places
        )

    def spelt_out(self, text: str) -> str:
        """Return the text with the script's own variables expanded."""
        for _ in range(3):
            if len(text) < LONGEST:  # a variable may have itself in it, many times
                text = re.sub(r"\$\{?(\w+)\}?", self._value_of, text)
        return text

    def _value_of(self, name: re.Match[str]) -> str:
        return self.variables.get(name[1], name[0])[:LONGEST]

    def running(self, program: re.Pattern[str]) -> Iterator[Command]:
        """Return the commands that run this program, directly or through srun."""
        for command in self.commands:
            words = [word.text for word in command.called]
            runs = words and words[0] not in TELLS_ONLY
            if runs and program.search(self.spelt_out(" ".join(words))):
                yield command

    def reaches_nodes(self, command: Command) -> bool:
        """Whether it starts anything on nodes other than the first."""
        called = self.spelt_out(" ".join(word.text for word in command.called[:2]))
        return any(Path(word).name in REACH_NODES for word in called.split()[:2])

    @cached_property
    def sruns(self) -> list[Command]:
        """The commands that srun runs."""
        return [
            command
            for command in self.commands
            if self.spelt_out(command.name).split()[:1] == ["srun"]
        ]

    def srun_options(self, command: Command) -> dict[str, str]:
        """Return the options of an srun, by their long names."""
        found = {}
        for one in options_of(command.line, [word.text for word in command.called[1:]]):
            if not one.is_known and not one.option.startswith("-"):
                break
            found[one.option] = one.value
        return found

    def tasks_of(self, command: Command) -> int:
        """Return the number of tasks that this srun starts on each node."""
        options = self.srun_options(command)
        nodes = options.get("nodes", "")
        on = _count(nodes) or self.nodes
        for name, share in (("ntasks-per-node", 1), ("ntasks", on)):
            value = self.spelt_out(options.get(name, ""))
            if (count := _count(value)) is not None:
                return -(-count // share)
            if value.lstrip("$").strip("{}") == "SLURM_NNODES":
                return 1
        return self.tasks_per_node


def _count(text: str) -> int | None:
    """Return the whole number that a text is, or None; of a very long one, the first digits."""
    return int(text[:9]) if re.fullmatch(r"[0-9]+", text) else None


def place(word: Word, found: re.Match[str]) -> int:
    """Return the line of something that was found in a word."""
    return word.line + word.text.count("\n", 0, found.start())
