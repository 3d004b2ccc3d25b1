"""Exercise 5 of 13_scaling_study: what a batch script asks for, as sbatch reads it."""

from typing import Any

from course_lib.checks.cases import Case, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.scaling_study.parts import Part, Parts
from course_lib.scaling_study.lab import BROKEN_SCRIPT

MENDED = """\
#!/bin/bash
#SBATCH --job-name=study
#SBATCH --nodes=2 --gpus-per-node=4

# a comment, and an empty line above it
#SBATCH --time=2:00:00                  # it was --time=1-0, with --nodes=9
  # indented
#SBATCH --output=study-%j.out

set -euo pipefail
srun torchrun cluster/exercises/06_ddp.py
"""
TWICE = """\
#!/bin/bash
#SBATCH --nodes=4 --time=30
#SBATCH --gpus-per-node=8
#SBATCH --nodes=3
#SBATCH --time=1:30:00
date
#SBATCH --nodes=16
#SBATCH --gpus-per-node=1
#SBATCH --time=7-0
"""
NOT_READ = """\
#!/bin/bash
# SBATCH --nodes=4
\t#SBATCH --nodes=5
#sbatch --nodes=6
#SBATCH --gpus-per-node=2
##SBATCH --gpus-per-node=4
#SBATCH --time=90
echo "#SBATCH --nodes=7"
"""
NOTHING = "#!/bin/bash\nsrun hostname\n"
TIMES = ("45", "2:00", "2:00:00", "0:30", "1-12", "1-2:30", "2-0:15:10", "100:30", "00:05:00")


def _cases() -> list[Case]:
    scripts = {
        "the script above": BROKEN_SCRIPT,
        "two options on a line, comments, an empty line": MENDED,
        "options given twice, and after the first command": TWICE,
        "lines that only look like directives": NOT_READ,
        "a script that says nothing": NOTHING,
    }
    timed = {
        f"--time={time}": f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=3\n"
        f"#SBATCH --time={time}\nsrun hostname\n"
        for time in TIMES
    }
    return [(name, (script,)) for name, script in {**scripts, **timed}.items()]


NODES, GPUS, SECONDS = "nodes", "GPUs of a node", "seconds"
THREE = Cause("Return three whole numbers: nodes, GPUs of a node, seconds.")
A_TEXT = Cause("That is the text of the script, not a number: int(...).")
COMMENTS = Cause(
    "A comment was read as a directive: sbatch reads lines that begin with #SBATCH, in these "
    "letters, from the first column."
)
LATE = Cause("Directives after the first command were read: sbatch stops there.")
SHORT = Cause(
    "Without days, one number is minutes, and two are minutes:seconds: 2:00 is two minutes."
)


def _three(result: Any, *_case: Any) -> dict[str, Any]:
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise failed(f"got {result!r}", THREE)
    if any(isinstance(one, str) for one in result):
        raise failed(f"got {result!r}", A_TEXT)
    return dict(zip((NODES, GPUS, SECONDS), map(whole, result), strict=True))


DEFAULTS = 'said = {"--nodes": "1", "--gpus-per-node": "0", "--time": "0"}'
COMMAND = 'if line.strip() and not line.strip().startswith("#"):'
DIRECTIVE = 'if line.startswith("#SBATCH "):'
WORDS = 'line.split(" #")[0].split()[1:]'
FIT = "[*parts, 0, 0] if days or len(parts) == 3 else [0, *parts, 0]"
RETURN = 'return int(said["--nodes"]), int(said["--gpus-per-node"]), seconds'
CROSS_OUT = "Cross out every line that sbatch does not read: what is left?"
ALL_GPUS = 'int(said["--nodes"]) * int(said["--gpus-per-node"])'
NOT_GIVEN = """if "=" in word) if name not in given)
given.update(word.split("=")[0] for word in words)"""

EMPTY_LINES = Cause("An empty line or an indented comment is no command: sbatch reads on.")
BEHIND = Cause("What follows a # in a directive is a comment: its options were read.")
ALL_WORDS = Cause("A directive may hold several options: read all of its words.")
FIRST_WINS = Cause("Of an option that is given twice, the first was taken: the later one counts.")
ONE_NODE = Cause("A job that names no number of nodes gets one.")
NO_GPUS = Cause("A job that asks for no GPUs gets none.")
AFTER_DAYS = Cause("After days come hours: 1-12 is a day and twelve hours.")
MINUTES = Cause("Those are minutes: return seconds.")
OF_ONE_NODE = Cause("Those are the GPUs of all nodes: return those of one.")

ASKED_FOR = Exercise(
    key="scaling_study-5",
    title="what a batch script asks for",
    check=Parts(
        cases=_cases,
        show=_three,
        parts={
            NODES: Part(CROSS_OUT),
            GPUS: Part(CROSS_OUT),
            SECONDS: Part("Which of the six forms is this time written in?", " s"),
        },
        success="Nodes, GPUs and time as sbatch reads them, not as they were meant.",
    ),
    wrong=(
        Edit("break", "continue", LATE),
        Edit(COMMAND, 'if not line.startswith("#"):', EMPTY_LINES),
        Edit(DIRECTIVE, 'if "#SBATCH " in line:', COMMENTS),
        Edit(DIRECTIVE, 'if line.replace("# ", "#").startswith("#SBATCH "):', COMMENTS),
        Edit(WORDS, "line.split()[1:]", BEHIND),
        Edit(WORDS, f"{WORDS}[:1]", ALL_WORDS),
        Edit(
            "said.update(",
            "said.update((name, value) for name, value in (",
            FIRST_WINS,
            also=(('if "=" in word)', NOT_GIVEN), (DEFAULTS, f"{DEFAULTS}\ngiven = set()")),
        ),
        Edit('"--nodes": "1"', '"--nodes": "0"', ONE_NODE),
        Edit('"--gpus-per-node": "0"', '"--gpus-per-node": "1"', NO_GPUS),
        Edit(FIT, "[*parts, 0, 0]", SHORT),
        Edit(FIT, "[*parts, 0, 0] if len(parts) == 3 else [0, *parts, 0]", AFTER_DAYS),
        Edit(RETURN, f"{RETURN} // 60", MINUTES),
        Edit('int(said["--gpus-per-node"])', ALL_GPUS, OF_ONE_NODE),
        Edit(RETURN, 'return said["--nodes"], said["--gpus-per-node"], seconds', A_TEXT),
        Edit(RETURN, 'return int(said["--nodes"]), seconds', THREE),
    ),
)
