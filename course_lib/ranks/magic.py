"""The cell magic `%%ranks`: the cell runs on every rank, and its names stay there.

The line magic `%ranks start 16 --cluster slurm --nodes 2` puts other ranks in the place of `ranks`,
and `%ranks close` ends them.
"""

import argparse
import itertools
import linecache
from typing import Any, NoReturn

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

    def start_ranks(line: str) -> Ranks | None:
        """`%ranks start 16 --cluster slurm --nodes 2`: other ranks as `ranks`; `%ranks close`."""
        wanted = vars(_line_parser().parse_args(line.split()))
        before = shell.user_ns.get("ranks")
        if wanted.pop("what") == "close":
            if isinstance(before, Ranks):
                before.close()
            return None
        made = Ranks(**{name: value for name, value in wanted.items() if value is not None})
        if isinstance(before, Ranks):
            before.close()
        shell.user_ns["ranks"] = made
        return made

    shell.register_magic_function(run_cell, "cell", "ranks")
    shell.register_magic_function(start_ranks, "line", "ranks")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CourseError(
            f"%ranks: need start with a number of ranks, or close; got {message}. "
            "Try %ranks start 16 --cluster slurm --nodes 2."
        )


def _line_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="%ranks", add_help=False)
    parser.add_argument("what", choices=("start", "close"))
    parser.add_argument("world_size", type=int, nargs="?", default=4)
    parser.add_argument("--cluster")
    parser.add_argument("--profile")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--minutes", type=int)
    parser.add_argument("--hosts", type=lambda text: text.split(","))
    return parser
