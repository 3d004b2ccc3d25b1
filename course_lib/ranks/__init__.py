"""Real ranks: processes with real collectives, in a notebook or under torchrun. Notebook 00_ranks.

ranks = Ranks(4)
ranks.run(lambda rank: rank * 10)        # [0, 10, 20, 30]

In the notebook's process:

    pool             `Ranks`: starts the ranks, sends them functions and cells; read this first
    fork_server      the process that has imported torch and from which ranks are forked
    scratch          folders for temporary files, removed once their owner is gone
    magic            the magics `%%ranks` and `%ranks`
    place            where ranks live: this machine, or what `cluster_ranks` has
    job              runs one job on the ranks and detects failures
    output           the ranks' printed output, in rank order
    report           `RankError`: what failed, on which line, which rank waits for which

In each rank:

    rank_process     the main loop of a rank, and its heartbeat
    held_up          tells a thread that sleeps from one that waits for a core
    launch           the same outside of notebooks, under torchrun
    world            joins the world: gloo (and NCCL) behind the tracing process group
    process_group    `TracedGroup`: PyTorch's collectives, send and recv, announced to the tracer
    tracer           `CallTracer`: posts every call, compares it with the other ranks', records it
    work_handle      the handle of an asynchronous call: `wait()`
    emulated_links   `LinkEmulator`: delays calls as a slower link would
    recorder         `record` and `span`: calls and computation as events

What both sides use:

    process_tree     ends a process with all that it has started
    call_board       `CallBoard`: the shared-memory log of calls (a flight recorder)
    hangs            finds hangs, lost messages and swapped collectives on the call board
    source_lines     the learner's line that made a call
    progress         `in_turns`: says in JupyterLab which of several measurements is next
    timing           measures several versions in turns: seconds, events, differences
    machine          the cores, memory, GPUs and tools of this machine; `course doctor`
    machine_report   the same and more in one anonymous text, with the links tried
"""
# ruff: noqa: E402

from course_lib.ranks.fork_server import warm_up

warm_up()  # first of all, so that the server imports torch while a notebook does

from course_lib.ranks.hangs import Wait
from course_lib.ranks.launch import launch
from course_lib.ranks.magic import load_ipython_extension
from course_lib.ranks.pool import Ranks
from course_lib.ranks.recorder import record, span
from course_lib.ranks.report import RankError

__all__ = ["RankError", "Ranks", "Wait", "launch", "load_ipython_extension", "record", "span"]
