"""The bar on a terminal that says how far a notebook has run."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

CellEnded = Callable[[int, int], None]


@contextmanager
def cell_bar(what: str) -> Iterator[CellEnded]:
    """A bar for the notebook `what`; call what it yields with (cells done, cells in all).

    It is on stderr while the block runs and gone afterwards; without a terminal there is none.
    """
    columns = (TextColumn("{task.description}: cell"), MofNCompleteColumn(), BarColumn())
    console = Console(file=sys.stderr)
    hidden = not console.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
