"""How a run tells how far it is: a bar on a terminal, plain lines anywhere else, on rank 0 only."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.progress
from rich.console import Console

from course_lib.train.checkpoint import Progress


class ProgressBar:
    """Shows progress while it is open: `with ProgressBar(...) as tell: tell.step(progress)`.

    every   steps between two lines where there is no terminal; 0: says nothing at all
    """

    def __init__(self, progress: Progress, num_steps: int, every: int) -> None:
        self.progress, self.num_steps, self.every = progress, num_steps, every
        self._first, self._start_s = Progress(**vars(progress)), time.perf_counter()
        console = Console(file=sys.stderr)
        self._bar: rich.progress.Progress | None = None
        if every and console.is_terminal:
            self._bar = _bar(console)
            self._task = self._bar.add_task("", total=num_steps, completed=progress.step, note="")

    def __enter__(self) -> "ProgressBar":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def step(self) -> None:
        """One more step is done."""
        if self._bar:
            self._bar.update(self._task, completed=self.progress.step)

    def loss(self, loss: float, accuracy: float | None = None) -> None:
        """The mean loss of the steps since the last call is known, and how many were guessed."""
        guessed = "" if accuracy is None else f"accuracy {accuracy:.1%}  "
        note = f"loss {loss:.4f}  {guessed}{self.tokens_per_s():,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, note=note)
        elif self.every:
            width = len(str(self.num_steps))
            print(f"step {self.progress.step:{width}}/{self.num_steps}  {note}", flush=True)

    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second of this process, everything included."""
        return (self.progress.tokens - self._first.tokens) / self.elapsed_s()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start_s


def _bar(console: Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("step"),
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.fields[note]}"),
        rich.progress.TextColumn("left"),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def download_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for a file on its way: call what it yields with (bytes there, bytes in all)."""
    console = Console(file=sys.stderr)
    with rich.progress.Progress(
        rich.progress.TextColumn(name),
        rich.progress.DownloadColumn(),
        rich.progress.BarColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
