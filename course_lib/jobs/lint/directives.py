"""Read the `#SBATCH` lines of a batch script as sbatch does.

A directive starts at the first column; sbatch stops looking at the first command. A `#` after it
begins a comment, and a long name may be cut short as long as it means one option only.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PREFIX = "#SBATCH"
SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint",
    "c": "cpus-per-task", "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile",
    "G": "gpus", "H": "hold", "h": "help", "i": "input", "J": "job-name", "k": "no-kill",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks",
    "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos",
    "S": "core-spec", "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose",
    "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip
FLAG_NAMES = (
    "contiguous exclusive get-user-env help hold ignore-pbs no-kill no-requeue nice overcommit "
    "oversubscribe parsable propagate quiet reboot requeue spread-job stepmgr test-only usage "
    "use-min-nodes verbose version wait"
)  # those of them that take a value take it after = only
VALUE_NAMES = (
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment "
    "constraint container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu "
    "cpus-per-task deadline delay-boot dependency distribution error exclude export export-file "
    "extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket "
    "gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type "
    "mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist "
    "nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket "
    "ntasks-per-tres oom-kill-step open-mode output partition power prefer priority profile qos "
    "reservation resv-ports segment signal sockets-per-node switches thread-spec threads-per-core "
    "time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap"
)
PLUGINS = re.compile(r"--((no-)?container-[a-z-]+|image|module|volume|uenv|view)")  # containers
FLAGS, VALUES = frozenset(FLAG_NAMES.split()), frozenset(VALUE_NAMES.split())
NAMES = FLAGS | VALUES


@dataclass(frozen=True)
class Directive:
    """One option on a line; `option` is its long name, or as written where sbatch knows none."""

    line: int
    option: str
    value: str = ""

    @property
    def is_known(self) -> bool:
        """Whether sbatch knows the option, by itself or through a plugin that many sites have."""
        return self.option in NAMES or bool(PLUGINS.fullmatch(self.option))


def head_lines(text: str) -> list[tuple[int, str]]:
    """Yield the numbered lines before the first command, where sbatch looks for directives."""
    head = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        head.append((number, line))
    return head


def read_directives(text: str) -> list[Directive]:
    """Return all options of the directives in order; of two alike, the later one counts.

    What follows `#SBATCH hetjob` is asked for by another component of the job, and left out.
    """
    found: list[Directive] = []
    for number, line in head_lines(text):
        if re.match(rf"{PREFIX}\s+(hetjob|packjob)\b", line):
            break
        if line.startswith(PREFIX):
            found += options_of(number, split_words(line[len(PREFIX) :]))
    return found


def split_words(text: str) -> list[str]:
    """Return the words of a directive up to a comment; an unclosed quote takes in the rest."""
    text = text.rstrip().removesuffix("\\")
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def options_of(line: int, words: Sequence[str]) -> Iterator[Directive]:
    """Return the options in the words of one directive, or of an srun command."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            option = full_name(name[2:])
            if not equals and option in VALUES and rest:
                value = rest.pop(0)
        elif re.match(r"-[A-Za-z]", word):
            option, value = SHORT.get(word[1], word), word[2:]
            if not value and option in VALUES and rest:
                value = rest.pop(0)
        else:
            option = word
        yield Directive(line, option, value)


def full_name(name: str) -> str:
    """Return the option that a shortened long name means; with its dashes if none or several."""
    if name.startswith("task") and "tasks-per-node".startswith(name):
        return "ntasks-per-node"  # which it is another name of
    meant = [name] if name in NAMES else [known for known in NAMES if known.startswith(name)]
    return meant[0] if len(meant) == 1 else f"--{name}"
