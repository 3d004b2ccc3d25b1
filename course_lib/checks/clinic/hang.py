"""Exercise 5 of 17_clinic: which rank a stuck job waits for, and in which calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

Calls = Sequence[tuple[str, int, str, bool]]
ALL, TP, DP = "world", "tp", "dp"
DONE, OPEN = True, False


def _upto(number: int, group: str = ALL, *, opened: bool = False) -> list[Any]:
    """Return a rank's calls of a group up to a number; the last one may be open."""
    calls = [(group, n, "all_reduce", DONE) for n in range(1, number + 1)]
    return [*calls[:-1], (group, number, "all_reduce", OPEN)] if opened else calls


JOBS: Mapping[str, tuple[Mapping[int, Calls], Mapping[str, Sequence[int]]]] = {
    "rank 2 stays behind": (
        {rank: _upto(6) if rank == 2 else _upto(7, opened=True) for rank in range(4)},
        {ALL: [0, 1, 2, 3]},
    ),
    "rank 0 waits for 1, and 1 for 3": (
        {
            0: [*_upto(3), (TP, 5, "all_gather", OPEN)],
            1: [*_upto(3), (TP, 4, "all_gather", DONE), (DP, 2, "all_reduce", OPEN)],
            3: [*_upto(3), (DP, 1, "all_reduce", DONE)],
        },
        {ALL: [0, 1, 3], TP: [0, 1], DP: [1, 3]},
    ),
    "two ranks behind, in two groups": (
        {
            0: [(TP, 9, "broadcast", OPEN)],
            1: [(TP, 8, "broadcast", DONE), (DP, 3, "all_reduce", DONE)],
            2: [(DP, 4, "all_reduce", OPEN)],
            3: [(DP, 3, "all_reduce", DONE)],
        },
        {TP: [0, 1], DP: [1, 2, 3]},
    ),
    "nobody waits": ({rank: _upto(4) for rank in range(3)}, {ALL: [0, 1, 2]}),
    "all have called, and the network is stuck": (
        {rank: _upto(2, opened=True) for rank in range(3)},
        {ALL: [0, 1, 2]},
    ),
    "a rank that left no dump": ({0: _upto(5, opened=True)}, {ALL: [0, 1]}),
    "a rank that is two calls behind": (
        {0: _upto(8, opened=True), 1: _upto(6)},
        {ALL: [0, 1]},
    ),
    "the buffer keeps the last calls only": (
        {0: [(ALL, 90, "all_reduce", OPEN)], 1: [(ALL, 91, "all_reduce", OPEN)]},
        {ALL: [0, 1]},
    ),
    "two open calls, of which the first counts": (
        {0: [(TP, 4, "all_gather", OPEN), (ALL, 4, "all_reduce", OPEN)], 1: _upto(3, TP)},
        {TP: [0, 1], ALL: [0, 1]},
    ),
}


def _cases() -> list[Case]:
    return [
        (what, ({rank: [*made] for rank, made in calls.items()}, {**members}))
        for what, (calls, members) in JOBS.items()
    ]


A_DICT = Cause("Return a dict: for each rank that is behind, a sorted list of (group, number).")
LARGEST = Cause("Who is behind has made fewer calls: look for a smaller number, not a larger one.")
MEMBER = Cause("Only the ranks of the group make its calls: others are not missing.")
BY_GROUP = Cause("Each group counts its own calls: numbers of different groups say nothing.")
WAITS_TOO = Cause("A rank that waits itself is not the cause: follow it to the one it waits for.")
FIRST = Cause("A rank waits in its oldest open call; those after it are only queued.")
NO_DUMP = Cause("A rank without a dump has made no call that we know of: calls.get(rank, ()).")
ENDED = Cause("A call that has ended waits for nobody.")


def _by_rank(found: Any, *_arguments: Any) -> dict[str, Any]:
    """Return the calls by rank. Raises: CheckFailed for what is no such dict"""
    try:
        return {
            str(rank): [[str(group), int(number)] for group, number in sorted(found[rank])]
            for rank in sorted(found)
        }
    except (TypeError, ValueError, KeyError, IndexError):
        raise failed(f"got {found!r}", A_DICT) from None


HANG = Exercise(
    key="clinic-5",
    title="who is behind",
    check=Cases(
        cases=_cases,
        show=_by_rank,
        look="For each rank, write down its oldest open call and the members who have not made it.",
        success="Right for one rank behind, for two, for a chain, and where nobody waits.",
    ),
    wrong=(
        Edit("n >= number", "n <= number", LARGEST),
        Edit("n >= number", "n == number", LARGEST),
        Edit("for other in members[group]", "for other in calls", MEMBER),
        Edit("g == group and n >= number", "n >= number", BY_GROUP),
        Edit("if other not in waits", "if True", WAITS_TOO),
        Edit("[call for call in made if not call[3]][:1]",
             "[call for call in made if not call[3]]", FIRST),
        Edit("[call for call in made if not call[3]][:1]",
             "[call for call in made if not call[3]][-1:]", FIRST),
        Edit("calls.get(other, ())", "calls.get(other, calls[rank])", NO_DUMP),
        Edit("if not call[3]]", "if call[3]]", ENDED),
    ),
)  # fmt: skip
