"""The report of failed ranks: what failed, why, on which line, and which rank waits for which."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from course_lib.core.cycles import shortest_cycle
from course_lib.core.errors import CourseError
from course_lib.ranks.call_board import CallBoard, Flag, Post, unfit_split
from course_lib.ranks.hangs import Wait
from course_lib.ranks.rank_process import RankFailure
from course_lib.ranks.source_lines import Line

CONSEQUENCES = {"ConnectionLostError", "MismatchError"}  # reported as a wait, or as a mismatch


class RankError(CourseError):
    """A job on the ranks failed; `str(error)` is the whole report.

    `kind` is what happened: `raised`, `died`, `hang`, `mismatch` or `stopped`. `failures` has
    (exception name, message) by rank, `waits` one `Wait` per waiting rank, `tracebacks` the whole
    tracebacks by rank.
    """

    def __init__(self, report: "Report") -> None:
        self.report = report
        self.kind = report.kind
        self.waits = list(report.waits)
        self.failures = {r: (f.name, f.message) for r, f in sorted(report.failures.items())}
        self.tracebacks = {r: f.traceback for r, f in sorted(report.failures.items())}
        super().__init__(str(report))

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the report instead of a traceback."""
        return [f"RankError ({self.kind})", *str(self).splitlines()]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Facts about a failed job; `str(report)` puts them in words."""

    failures: Mapping[int, RankFailure] = field(default_factory=dict)
    waits: Sequence[Wait] = ()
    computing: Mapping[int, Line] = field(default_factory=dict)
    returned: Sequence[int] = ()
    mismatch: Sequence[tuple[int, Post]] = ()
    dropped: Sequence[tuple[int, Post]] = ()
    note: str = ""
    after: str = ""
    stopped: bool = False

    @property
    def kind(self) -> str:
        """One word for what happened; the root cause wins over its consequences."""
        names = {failure.name for failure in self.failures.values()}
        if self.stopped:
            return "stopped"
        if self.mismatch:
            return "mismatch"
        if "RankDied" in names:
            return "died"
        return "raised" if names - CONSEQUENCES else "hang"

    def __str__(self) -> str:
        parts = [
            self.note,
            *self._mismatch(),
            *self._failures(),
            *self._waits(),
            *told_once(dropped_words, self.dropped),
            *(f"rank {r} was computing\n    {line}" for r, line in sorted(self.computing.items())),
            f"{in_words(self.returned)} had returned" if self.returned else "",
            self.after,
        ]
        return "\n".join(part for part in parts if part)

    def _mismatch(self) -> list[str]:
        if not self.mismatch:
            return []
        p2p = self.mismatch[0][1].kind in ("send", "recv")
        unsent = "a send and its recv do not fit; nothing was sent"
        what = unfit_split(self.mismatch) or "the ranks made different calls"
        calls = [(r, f"{post.call}{post.sizes}\n    {post.line}") for r, post in self.mismatch]
        said = (f"{in_words(who)} {_verb('call', who)} {call}" for call, who in _grouped(calls))
        return [f"mismatch: {unsent if p2p else what}", *said]

    def _failures(self) -> list[str]:
        texts = []
        for rank, failure in sorted(self.failures.items()):
            if failure.name in CONSEQUENCES:
                continue
            name = "" if failure.name == "RankDied" else f"raised {failure.name}: "
            lines = (f"    {line}" for line in failure.lines)
            texts.append((rank, "\n".join([f"{name}{failure.message}", *lines])))
        return [f"{in_words(who)} {text}" for text, who in _grouped(texts)]

    def _waits(self) -> list[str]:
        if not self.waits or self.mismatch:
            return []
        title = ["hang: nothing can move any more"] if self.kind == "hang" else []
        waits = [
            (wait.rank, f"in {wait.kind} for {in_words(wait.waits_for)}\n    {wait.where}")
            for wait in self.waits
        ]
        said = [f"{in_words(who)} {_verb('wait', who)} {text}" for text, who in _grouped(waits)]
        cycle = shortest_cycle({wait.rank: wait.waits_for for wait in self.waits})
        if cycle:
            said.append("circle of waiting: " + " -> ".join(map(str, [*cycle, cycle[0]])))
        return [*title, *said]


def find_mismatch(call_board: CallBoard, world_size: int) -> list[tuple[int, Post]]:
    """Return (rank, call) of the calls that do not match, if a rank refused to make one."""
    for rank in range(world_size):
        for post in reversed(call_board.history(rank)):
            if Flag.REFUSED in post.flags:
                return sorted(call_board.matching(post), key=lambda pair: pair[0])
    return []


def find_disagreement(calls: Iterable[tuple[int, Post]]) -> list[tuple[int, Post]]:
    """Return (rank, call) of one call that the ranks made differently; [] where there is none."""
    by_call: dict[tuple[int, int], dict[int, Post]] = {}
    for rank, post in calls:
        by_call.setdefault((post.channel, post.seq), {})[rank] = post
    for made in by_call.values():
        if len({post.signature for post in made.values()}) > 1 or unfit_split(made.items()):
            return sorted(made.items())
    return []


def told_once(words: Callable[[int, Post], str], calls: Iterable[tuple[int, Post]]) -> list[str]:
    """Return the words for these calls in order; calls of a loop, which read alike, once."""
    return list(dict.fromkeys(words(rank, post) for rank, post in calls))


def dropped_words(rank: int, post: Post) -> str:
    """Return the sentence for a message whose handle was not kept."""
    if post.kind == "recv":
        what, so = "not waited for", "so nothing can wait for it"
    else:
        what, so = "lost", "and the message may have gone with it"
    return (
        f"{what}: rank {rank} did not keep the handle of its {post.kind}, {so}; "
        f"keep it, and call wait()\n    {post.line}"
    )


def orphan_words(rank: int, post: Post) -> str:
    """Return the sentence for a message of which only one rank made its side."""
    return f"orphan: rank {rank} calls {post.call}, and the other end never came\n    {post.line}"


def in_words(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _verb(verb: str, ranks: Sequence[int]) -> str:
    return verb if len(ranks) > 1 else f"{verb}s"


def _grouped(texts: Iterable[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    """Return each text once, with the ranks it is about."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts:
        groups.setdefault(text, []).append(rank)
    return list(groups.items())
