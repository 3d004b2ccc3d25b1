"""A progress bar on a terminal for the cells of a notebook."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

CellEnded = Callable[[int, int], None]


@contextmanager
def cell_bar(what: str) -> Iterator[CellEnded]:
    """Show a bar for the notebook `what`; call what it yields with (cells done, cells in all).

    It is on stderr while the block runs and gone afterwards; without a terminal there is none.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from course_lib.train.progress import terminal_bar

    columns = (TextColumn("{task.description}: cell"), MofNCompleteColumn(), BarColumn())
    with terminal_bar(*columns, TimeElapsedColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
