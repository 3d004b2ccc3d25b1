"""Progress of measurements in turns: a line below the cell in JupyterLab, gone when they end.

Other programs that run notebooks see nothing of it, so saved outputs stay as they are.
"""

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from course_lib.ranks.recorder import current_recorder

EVERY_S = 1.0
JUPYTER_SERVER = "JPY_SESSION_NAME"  # in the environment of the kernels that it starts

Thing = TypeVar("Thing")


def in_turns(things: Iterable[Thing], turns: int) -> Iterator[Thing]:
    """Yield all things once per turn; say which is next, at most once a second.

    On ranks, rank 0 says it. It is said between two things, so that none is measured meanwhile.
    """
    all_things, recorder, line = list(things), current_recorder(), ProgressLine()
    tell = recorder.tell if recorder else line.tell
    told_s = time.monotonic()
    for turn in range(1, turns + 1):
        for number, thing in enumerate(all_things, 1):
            if time.monotonic() - told_s >= EVERY_S:
                tell(f"measuring: {number} of {len(all_things)}, turn {turn} of {turns}")
                told_s = time.monotonic()
            yield thing
    line.clear()


class ProgressLine:
    """A line of text in JupyterLab that the next one replaces."""

    def __init__(self) -> None:
        self._shown: Any = None

    def tell(self, text: str) -> None:
        """Show a text in the place of the last one."""
        if self._shown:
            self._shown.update({"text/plain": text}, raw=True)
        elif JUPYTER_SERVER in os.environ:
            from IPython.display import display  # takes a while to import, and is there already

            self._shown = display({"text/plain": text}, raw=True, display_id=True)

    def clear(self) -> None:
        """Show nothing."""
        if self._shown:
            self._shown.update({}, raw=True)
