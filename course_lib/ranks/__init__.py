"""Real ranks: real processes, real collectives, in a notebook or under torchrun.

ranks = Ranks(4)
ranks.run(lambda rank: rank * 10)        # [0, 10, 20, 30]
"""
# ruff: noqa: E402

from course_lib.ranks.fork_server import warm_up

warm_up()  # first of all, so that the server imports torch while this process does

from course_lib.ranks.hangs import Wait
from course_lib.ranks.launch import launch
from course_lib.ranks.magic import load_ipython_extension
from course_lib.ranks.pool import Ranks
from course_lib.ranks.recorder import record, span
from course_lib.ranks.report import RankError

__all__ = ["RankError", "Ranks", "Wait", "launch", "load_ipython_extension", "record", "span"]
