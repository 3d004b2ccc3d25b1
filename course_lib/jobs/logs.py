"""Read and follow the logs of jobs, with characters that could control the terminal replaced."""

import codecs
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from course_lib.core.plain_text import printable
from course_lib.jobs.failures import has_failed, told
from course_lib.jobs.launcher_lines import GrowingLog, WithoutLauncher
from course_lib.jobs.submissions import FOLDER, Submission, refresh

PAUSE_S = 0.5
MOST_S = 5.0  # a class that follows should not keep the scheduler busy


class Tail:
    """A file that grows: `read` gives the whole lines that are new, as text for a terminal.

    Bytes that are no text, and characters that would steer the terminal, are shown as a mark. A
    file that begins anew, as that of a restarted job may, is read anew.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._offset, self._rest = path, 0, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, *, last: bool = False) -> str:
        """Return the new text; with `last`, also a line that is not ended."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset, self._rest = 0, ""
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            new = b""
        self._offset += len(new)
        text = self._rest + self._decoder.decode(new, final=last).replace("\r", "\n")
        whole, end, self._rest = text.rpartition("\n")
        if last:
            whole, end, self._rest = text, "\n" if self._rest else "", ""
        return printable(whole + end)


def follow(
    one: Submission,
    array_task: int | None,
    *,
    until_over: bool,
    whole: bool = False,
    say: Callable[[str], object] = lambda state: None,
    folder: Path = FOLDER,
) -> Iterator[str]:
    """Yield what is added to the logs; of several, each piece begins with the log's name.

    Without `until_over`: what they say by now. With `whole`: also what only the launcher says.
    `say` is told each state before the last, with what a job waits for; where the job has ended
    already and has failed, that, before anything else.
    Raises: SchedulerError where the scheduler does not answer any more
    """
    tails: dict[str, GrowingLog] = {}
    said, state_said, gap_s, ask_at_s = "", "", PAUSE_S, 0.0
    while True:
        if time.monotonic() >= ask_at_s:
            one = refresh(one, folder)
            gap_s = min(gap_s * 1.3, MOST_S)
            ask_at_s = time.monotonic() + gap_s
        chosen = [state for state in one.seen if array_task in (None, state.array_task)]
        is_last = not until_over or (bool(chosen) and all(state.is_final for state in chosen))
        is_told = not is_last or (not tails and has_failed(chosen))
        if chosen and is_told and (now := told(chosen)) != state_said:
            say(now)
            state_said = now
        for state in chosen:
            if state.log and state.state != "PENDING" and state.log not in tails:
                tail = Tail(Path(state.log))
                tails[state.log] = tail if whole else WithoutLauncher(tail)
        for path, log in tails.items():
            if text := log.read(last=is_last):
                yield (f"==> {path}\n" if len(chosen) > 1 and path != said else "") + text
                said = path
        if is_last:
            return
        time.sleep(PAUSE_S)
