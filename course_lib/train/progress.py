"""Progress of a run on rank 0: a bar on a terminal, plain lines anywhere else."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import rich.progress
from rich.console import Console


@dataclass
class Progress:
    """How far a run is: the one count that bar, record and checkpoint read."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens trained on, all ranks together
    validation_loss: float | None = None  # the last one

    def step_done(self, num_tokens: int) -> None:
        """Count one step of that many tokens."""
        self.step += 1
        self.tokens += num_tokens


class ProgressBar:
    """Shows progress while it is open: `with ProgressBar(...) as bar: bar.step()`.

    every   steps between two lines where there is no terminal; 0: says nothing at all

    is_unread   whether the reader of the lines has gone, as in `... | head`
    """

    def __init__(self, progress: Progress, num_steps: int, every: int) -> None:
        self.progress, self.num_steps, self.every = progress, num_steps, every
        self._first, self._start_s = Progress(**vars(progress)), time.perf_counter()
        self._bar: rich.progress.Progress | None = None
        self.is_unread = False
        if every and (bar := _step_bar()).console.is_terminal:
            self._bar = bar
            self._task = self._bar.add_task("", total=num_steps, completed=progress.step, note="")

    def __enter__(self) -> "ProgressBar":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def step(self) -> None:
        """Show one more step."""
        if self._bar:
            self._bar.update(self._task, completed=self.progress.step)

    def loss(self, loss: float, accuracy: float | None = None) -> None:
        """Show the mean loss since the last call, the accuracy if any, and the throughput."""
        guessed = "" if accuracy is None else f"accuracy {accuracy:.1%}  "
        note = f"loss {loss:.4f}  {guessed}{self.tokens_per_s():,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, note=note)
        elif self.every:
            width = len(str(self.num_steps))
            self.say(f"step {self.progress.step:{width}}/{self.num_steps}  {note}")

    def say(self, lines: str) -> None:
        """Print lines, if somebody reads them."""
        try:
            print(lines, flush=True)
        except BrokenPipeError:
            self.is_unread = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that flushing at exit does not fail

    def tokens_per_s(self) -> float:
        """Return the tokens of all ranks per second of this process, everything included."""
        return (self.progress.tokens - self._first.tokens) / self.elapsed_s()

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._start_s


def terminal_bar(*columns: rich.progress.ProgressColumn) -> rich.progress.Progress:
    """Return a progress bar of these columns on stderr, which vanishes when it ends.

    It shows nothing where stderr is no terminal.
    """
    console = Console(file=sys.stderr)
    return rich.progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )


def _step_bar() -> rich.progress.Progress:
    return terminal_bar(
        rich.progress.TextColumn("step"),
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.fields[note]}"),
        rich.progress.TextColumn("left"),
        rich.progress.TimeRemainingColumn(),
    )


@contextmanager
def download_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar for a download: call what it yields with (bytes so far, bytes in all)."""
    columns = (rich.progress.DownloadColumn(), rich.progress.BarColumn())
    with terminal_bar(rich.progress.TextColumn(name), *columns) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
