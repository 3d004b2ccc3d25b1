"""Find in the log of a failed job what failed first: the rank, its line and its error.

A rank that fails ends its torchrun, the other ranks lose their connection to it, and Slurm ends the
rest: most of a log is about what followed.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.core.plain_text import one_line
from course_lib.core.units import MIB
from course_lib.jobs.launcher_lines import CHAINED, LAUNCHER, LINE, NOT_MET
from course_lib.jobs.scheduler import JobState, in_words

LAST_BYTES = 4 * MIB  # of a log that are looked at
LONGEST = 300  # characters of a sentence
WITH_CAUSE = ("FAILED", "OUT_OF_MEMORY", "TIMEOUT")
OUT_OF_TIME = "it ran until its time limit. Try course submit with a longer --time"
PREFIX = re.compile(r"(?:\s*(\d+): )?(?:\[rank(\d+)\]: ?)?(.*)")
FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
NOT_THEIRS = re.compile(r"(site|dist)-packages/|/lib/python3|/course_lib/|^<")
CONSEQUENCE = re.compile(  # of another rank that has gone, or of the end of the job
    r"ConnectionLostError|Connection (closed|reset) by peer|Broken pipe|remote process exited"
    r"|got 0 bytes|SignalException|ChildFailedError"
)
REFUSED = re.compile(r"^(?:\d+: )?(?P<said>\S+\.py: error: .+|(?:mismatch|hang): .+)", re.MULTILINE)
ROOT_CAUSE = re.compile(
    r"Root Cause.{0,200}?host +: (?P<host>\S+).{0,200}?rank +: (?P<rank>\d+)"
    r".{0,200}?exitcode +: (?P<code>-?\d+) \(pid: \d+\)(?: +\((?P<signal>\w+)\))?",
    re.DOTALL,
)
KILLED = re.compile(
    r"^srun: error: \S+: (?P<who>tasks? \S+): (?!Exited|Terminated)(?P<how>.+)", re.M
)
OF_SLURM = re.compile(r"srun: |slurmstepd\S* error: \*\*\*")
END_OF_RANK = {"SIGKILL": "killed (SIGKILL), often because memory ran out"}


@dataclass
class Traceback:
    """A traceback in a log: who printed it, its frames (file, line, function), and its error."""

    who: str
    frames: list[tuple[str, str, str | None]] = field(default_factory=list)
    error: str = ""

    @property
    def is_launchers(self) -> bool:
        """Whether torchrun itself raised it."""
        return any(LAUNCHER.search(f'  File "{file}"') for file, _, _ in self.frames)

    @property
    def is_consequence(self) -> bool:
        """Whether something else had failed before."""
        return bool(CONSEQUENCE.search(self.error))

    def __str__(self) -> str:
        own = [frame for frame in self.frames if not NOT_THEIRS.search(frame[0])]
        file, line, function = (own or self.frames)[-1]
        place = f"{Path(file).name} line {line}"
        inside = f", in {function}" if function and function != "<module>" else ""
        return f"{f'{self.who}, ' if self.who else ''}{place}{inside}: {self.error}"


def told(states: Sequence[JobState]) -> str:
    """Return the states in words; of the first that failed, also why."""
    failed = next((state for state in states if state.state in WITH_CAUSE), None)
    why = why_failed(failed) if failed else ""
    if not failed or not why:
        return in_words(states)
    of = f" array task {failed.array_task}," if len(states) > 1 else ""
    return f"{in_words(states)}:{of} {why}"


def has_failed(states: Iterable[JobState]) -> bool:
    """Return whether a log may say why one of them failed."""
    return any(state.state in WITH_CAUSE for state in states)


def why_failed(state: JobState) -> str:
    """Return what failed first, by the job's log: `rank 2, a.py line 8, in work: ValueError: b`."""
    if state.state == "TIMEOUT":
        return OUT_OF_TIME
    try:
        with Path(state.log).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LAST_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:  # Slurm could not write it, or somebody deleted it
        return ""
    return one_line(find_failure(text))[:LONGEST]


def find_failure(text: str) -> str:
    """Return the first failure in a log that is no consequence of another; empty if it has none."""
    return next(_candidates(text, _tracebacks(text.splitlines())), "")


def _candidates(text: str, tracebacks: Sequence[Traceback]) -> Iterator[str]:
    """Yield what may have failed first, the most certain before."""
    ranks = [one for one in tracebacks if not one.is_launchers]
    speaks = {one.who for one in ranks}
    ends = [found.groupdict() for found in ROOT_CAUSE.finditer(text)]
    yield from (str(one) for one in ranks if not one.is_consequence)
    yield from (found["said"] for found in REFUSED.finditer(text))
    for end in ends:
        if end["signal"] not in (None, "SIGTERM"):
            how = END_OF_RANK.get(end["signal"], f"ended by {end['signal']}")
            yield f"rank {end['rank']} on {end['host']}: {how}"
    yield from (f"{found['who']}: {found['how']}" for found in KILLED.finditer(text))
    for end in ends:
        if not end["signal"] and f"rank {end['rank']}" not in speaks:
            yield f"rank {end['rank']} on {end['host']}: ended with exit code {end['code']}"
    yield from (
        f"torchrun: {NOT_MET.sub('the nodes did not meet: ', one.error)}".rstrip(": ")
        for one in tracebacks
        if one.is_launchers and not one.is_consequence
    )
    yield from map(str, ranks)
    for line in reversed(text.splitlines()):
        if line.strip() and not OF_SLURM.match(line) and not LINE.match(line):
            yield f"its log ends: {line}"


def _tracebacks(lines: Iterable[str]) -> list[Traceback]:
    """Return the tracebacks in the order of their ends; of a chain of exceptions, the last one.

    Where torchrun's nodes did not meet, the first one says why.
    """
    found: list[Traceback] = []
    begun: dict[str, Traceback] = {}
    for line in lines:
        task, rank, text = PREFIX.findall(line)[0]
        who = f"rank {rank}" if rank else f"task {task}" if task else ""
        frame = FRAME.match(text)
        if text.startswith(CHAINED):
            earlier = [one for one in found if one.who == who][-1:]
            found = [one for one in found if one not in earlier or NOT_MET.match(one.error)]
        elif text.startswith("Traceback (most recent call last)") or (frame and who not in begun):
            begun[who] = Traceback(who)
        if frame:
            begun[who].frames.append((frame["file"], frame["line"], frame["function"]))
        elif who in begun and text.strip() and not text.startswith((" ", "Traceback (")):
            begun[who].error = text
            found.append(begun.pop(who))
    return found
