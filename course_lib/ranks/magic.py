"""The cell magic `%%ranks`: the cell runs on every rank, and its names stay there."""

import itertools
import linecache
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.ranks.pool import Ranks


def load_ipython_extension(shell: Any) -> None:
    """Define `%%ranks` and `ranks = Ranks(4)` in the notebook: `%load_ext course_lib.ranks`."""
    counter = itertools.count(1)
    if not isinstance(shell.user_ns.get("ranks"), Ranks):
        shell.user_ns["ranks"] = Ranks(4)

    def run_cell(line: str, cell: str) -> None:
        """Run the cell on all ranks of `ranks`; after `%%ranks NAME`, on those of `NAME`."""
        name = line.strip() or "ranks"
        pool = shell.user_ns.get(name)
        if not isinstance(pool, Ranks):
            raise CourseError(
                f"%%ranks: need a variable that holds ranks; {name!r} does not. "
                f"Try: {name} = Ranks(4)"
            )
        file = f"<ranks cell {next(counter)}>"
        source = "\n" + cell  # the magic's own line counts, as it does in the notebook
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        pool.cell(source, file)

    shell.register_magic_function(run_cell, "cell", "ranks")
