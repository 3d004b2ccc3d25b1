"""One job on the ranks, watched from the notebook until all have answered or none can proceed."""

import time
from multiprocessing import connection
from typing import Any

import cloudpickle

from course_lib.ranks.call_board import CallBoard, Flag, Post
from course_lib.ranks.hangs import (
    HangWatch,
    find_dropped,
    find_lost_wait,
    find_orphans,
    find_swap,
    find_unkept,
    find_wait,
)
from course_lib.ranks.output import MAX_OUTPUT_BYTES, Output
from course_lib.ranks.place import STOPPED, Member, Place
from course_lib.ranks.progress import ProgressLine
from course_lib.ranks.rank_process import RankFailure
from course_lib.ranks.report import (
    RankError,
    Report,
    dropped_words,
    find_disagreement,
    find_mismatch,
    orphan_words,
    told_once,
)

TICK_S = 0.1
GRACE_S = 2.0  # for which the other ranks may continue when one has failed


class RankJob:
    """Runner of one job: sends it, shows output, detects failures; `lost`: restart the ranks."""

    def __init__(self, call_board: CallBoard, place: Place, outputs: list[Output]) -> None:
        self.call_board, self.place, self.outputs = call_board, place, outputs
        self.members = place.members
        self.lost = False
        self._progress = ProgressLine()
        self._results: dict[int, bytes] = {}
        self._failures: dict[int, RankFailure] = {}
        self._start_s = time.perf_counter()
        self._stopped_since_s: dict[int, float] = {}
        self._hang = HangWatch(call_board)

    def run(self, kind: str, blob: bytes) -> list[Any]:
        """Run the job on all ranks; return their results in rank order.

        Raises: RankError with a report if a rank raises, dies, hangs or is stopped
        """
        try:
            self.place.send((kind, blob))
            self._watch()
        except KeyboardInterrupt:
            self._give_up("", stopped=True)  # Stop, or a time limit: it looks the same
        except BrokenPipeError:
            self._collect(TICK_S)
            self._give_up("")
        finally:
            self._progress.clear()
        self._show_rest()
        if self._failures or self._mismatch():
            self.lost = self._is_spoilt() or not self._failures
            raise RankError(self._report(""))
        self._warn()
        return [cloudpickle.loads(self._results[member.rank]) for member in self.members]

    @property
    def _unfinished(self) -> list[int]:
        done = self._results.keys() | self._failures.keys()
        return [member.rank for member in self.members if member.rank not in done]

    def _watch(self) -> None:
        failed_since_s = None
        while self._unfinished:
            self._collect(TICK_S)
            self._check_output()
            self._check_stopped()
            self.outputs[0].follow()
            if self._failures and failed_since_s is None:
                failed_since_s = time.perf_counter()
            out_of_grace = failed_since_s and time.perf_counter() - failed_since_s > GRACE_S
            hangs = self._hang.is_certain(self._unfinished, self.place.is_current())
            if self._unfinished and (hangs or out_of_grace or self._waits_differ()):
                self._give_up("")

    def _waits_differ(self) -> bool:
        """Return whether ranks that saw each other's calls too late wait in different ones."""
        if self.place.sees_at_once:
            return False
        board, states = self.call_board, map(self.call_board.state, self._unfinished)
        keys = {key for state in states if (key := state.blocked or state.oldest)}
        found = ((rank, board.find(rank, *key)) for key in keys for rank in range(board.world_size))
        return bool(find_disagreement((rank, post) for rank, post in found if post))

    def _mismatch(self) -> list[tuple[int, Post]]:
        """Return (rank, call) of calls that do not match."""
        if any(failure.name == "MismatchError" for failure in self._failures.values()):
            return find_mismatch(self.call_board, len(self.members))
        if self.place.sees_at_once:
            return []
        history = self.call_board.history
        ranks = range(self.call_board.world_size)
        return find_disagreement(
            (rank, post) for rank in ranks for post in history(rank, since_s=self._start_s)
        )

    def _collect(self, timeout_s: float) -> None:
        unfinished = [self.members[rank] for rank in self._unfinished]
        signals = [signal for member in unfinished for signal in member.signals]
        ready = connection.wait(signals, timeout_s)
        for member in unfinished:
            if member.jobs in ready or member.jobs.poll():
                self._take_answer(member)
            elif any(signal in ready for signal in member.signals):
                self._failures[member.rank] = member.death()

    def _take_answer(self, member: Member) -> None:
        try:
            what, value = member.jobs.recv()
        except (EOFError, ConnectionResetError):
            self._failures[member.rank] = member.death()
            return
        if what == "progress":
            self._progress.tell(value)
        elif what == "done":
            self._results[member.rank] = value
        else:
            self._failures[member.rank] = value

    def _check_output(self) -> None:
        for output in self.outputs:
            if output.num_bytes() > MAX_OUTPUT_BYTES:
                limit = MAX_OUTPUT_BYTES // 2**20
                self._give_up(f"rank {output.rank} printed more than {limit} MiB; is it in a loop?")

    def _check_stopped(self) -> None:
        """Take ranks that have been stopped for a while for failed: nothing will continue them."""
        now_s = time.perf_counter()
        stopped = [rank for rank in self._unfinished if self.members[rank].is_stopped()]
        self._stopped_since_s = {r: self._stopped_since_s.get(r, now_s) for r in stopped}
        for rank, since_s in self._stopped_since_s.items():
            if now_s - since_s > GRACE_S:
                line = self.call_board.state(rank).line
                self._failures[rank] = RankFailure(
                    "RankDied", STOPPED, (line,) if line.file else ()
                )

    def _give_up(self, note: str, *, stopped: bool = False) -> None:
        self.lost = True
        self.place.kill()  # first: a rank in a loop prints gigabytes while others are shown
        report = self._report(note, stopped=stopped)
        self._show_rest()
        raise RankError(report) from None

    def _report(self, note: str, *, stopped: bool = False) -> Report:
        unfinished = self._unfinished
        gone = sorted(r for r, failure in self._failures.items() if failure.name == "RankDied")
        lost = [r for r, f in self._failures.items() if f.name == "ConnectionLostError"]
        certain = {wait.rank: wait for wait in self._hang.waits}
        waits = [
            *(certain.get(rank) or find_wait(self.call_board, rank) for rank in unfinished),
            *(find_lost_wait(self.call_board, rank, gone) for rank in lost),
        ]
        found = sorted((wait for wait in waits if wait), key=lambda wait: wait.rank)
        waiting = {wait.rank for wait in found}
        return Report(
            failures=self._failures,
            waits=found,
            computing={r: self.call_board.state(r).line for r in unfinished if r not in waiting},
            returned=sorted(self._results),
            mismatch=self._mismatch(),
            dropped=find_dropped(self.call_board, found),
            note=note,
            after=self.place.after_loss() if self.lost else "",
            stopped=stopped,
        )

    def _show_rest(self) -> None:
        for output in self.outputs:
            output.finish()

    def _is_spoilt(self) -> bool:
        """Return whether, after a failure, a rank has died or a call is left unmatched."""
        names = {failure.name for failure in self._failures.values()}
        if names & {"RankDied", "ConnectionLostError", "MismatchError"}:
            return True
        history, ranks = self.call_board.history, range(self.call_board.world_size)
        calls = [post for rank in ranks for post in history(rank, since_s=self._start_s)]
        return any(
            Flag.DONE not in post.flags
            or len(list(self.call_board.matching(post))) < len(post.members)
            for post in calls
        )

    def _warn(self) -> None:
        """Print what went wrong silently in a job that did not fail: swaps, and lost messages."""
        ranks = [member.rank for member in self.members]
        swap = find_swap(self.call_board, ranks, self._start_s)
        if swap:
            print(swap)
        unkept = find_unkept(self.call_board, ranks, self._start_s)
        orphans = find_orphans(self.call_board, ranks, self._start_s)
        for said in [*told_once(dropped_words, unkept), *told_once(orphan_words, orphans)]:
            print(said)
        if orphans or any(post.kind == "send" for _, post in unkept):
            self.lost = True
            print(self.place.after_loss())
