"""Leave the launcher's own lines out of a log: torchrun's report, and frames of its store.

When a rank fails, and also when the nodes of a job that has succeeded leave one after the other,
torchrun and its TCPStore write dozens of lines that say nothing about the program.
"""

import re
from typing import Protocol

LABEL = re.compile(r"\s*\d+: ")  # of `srun --label`
LINE = re.compile(
    r"(?:\[[WE]\d+ [\d:.]+ TCPStore\.cpp"
    r"|Exception raised from \w+ at \S*c10d/"
    r"|frame #\d+: |<omitting python frames>"
    r"|[WEI]\d{4} [\d:.]+ \d+ torch/distributed/(?:elastic/|run\.py))"
)
FRAMES = re.compile(r"(?:frame #\d+: |Exception raised)")
TRACEBACK = re.compile(r"Traceback \(most recent call last\):$")
LAUNCHER = re.compile(
    r'  File ".*(?:torch/distributed/(?:run\.py|launcher/|elastic/rendezvous/)|/torchrun")'
)
NOT_MET = re.compile(r"torch\.distributed\.(?:elastic\.\S*Rendezvous\w+Error|Dist\w+Error)(?:: |$)")
ENDED = re.compile(
    rf"torch\.distributed\.elastic\.\S*(?:ChildFailedError|SignalException)|{NOT_MET.pattern}"
)
CHAINED = ("The above exception was the direct", "During handling of the above")
BAR = re.compile(r"={20,}$")
REPORT = re.compile(
    r"(?:[=-]{20,}$|.* FAILED$|Failures:$|Root Cause |\[\d+\]:$|  <NO_OTHER_FAILURES>$"
    r"|  (?:time|host|rank|exitcode|error_file|traceback) *: )"
)


class GrowingLog(Protocol):
    """A log that may still grow."""

    def read(self, *, last: bool = False) -> str:
        """Return the new text; with `last`, also a line that is not ended."""


class WithoutLauncher:
    """A log without the launcher's lines; where some were, one line says how many."""

    def __init__(self, source: GrowingLog) -> None:
        self._source, self._left_out, self._bars = source, 0, 0
        self._held: list[str] = []  # a traceback that may turn out to be the launcher's
        self._after_left_out = False  # frames, or a traceback of the launcher

    def read(self, *, last: bool = False) -> str:
        """Return the new text; with `last`, also a line that is not ended."""
        shown: list[str] = []
        for line in self._source.read(last=last).splitlines(keepends=True):
            shown += self._shown(line.rstrip("\n"))
        if last:
            shown += [*self._told(), *self._held]
            self._held = []
        return "".join(f"{line}\n" for line in shown)

    def _shown(self, line: str) -> list[str]:
        """Return what is to be shown by now: nothing, or this line after those held back."""
        label = LABEL.match(line)
        text = line[label.end() :] if label else line
        follows = self._after_left_out and (not text or text.startswith(CHAINED))
        if LINE.match(text) or follows or self._is_report(text):
            self._after_left_out = follows or bool(FRAMES.match(text))
            self._left_out += 1
            return []
        self._after_left_out = False
        if TRACEBACK.match(text) or (self._held and text.startswith("  ")):
            self._held.append(line)
            return []
        if not self._held or text.startswith("[rank"):  # a rank's own line in between
            return [*self._told(), line]
        held, self._held = [*self._held, line], []
        if ENDED.match(text) and any(map(LAUNCHER.search, held)):
            self._bars = 2 if "ChildFailedError" in text else 0
            self._left_out += len(held)
            self._after_left_out = True
            return []
        return [*self._told(), *held]

    def _is_report(self, text: str) -> bool:
        """Return whether this is a line of torchrun's report, which stands between two bars."""
        is_one = bool(self._bars and REPORT.match(text))
        self._bars -= bool(is_one and BAR.match(text))
        return is_one

    def _told(self) -> list[str]:
        count, self._left_out = self._left_out, 0
        said = f"[left out: {count} lines of torchrun and its store; --whole shows them]"
        return [said] if count else []
