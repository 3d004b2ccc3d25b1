"""Puzzles of schedules by hand, each with a par, and what a text of moves builds and takes.

A game is a level and a text of moves, such as `0F 1F 0F 1B`: a rank, the kind of action by its
letter, and the model chunk where there are two. The micro-batch is the next one of that kind.
`live_by_hand.py` draws it. Notebook 08_pipeline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from course_lib.pipeline.actions import (
    LETTERS,
    Action,
    Schedule,
    ScheduleError,
    depths_of,
    in_flight,
    placement_of,
)
from course_lib.pipeline.bound import schedule_bound
from course_lib.pipeline.live import PLAIN
from course_lib.pipeline.schedules import (
    breadth_first,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
)
from course_lib.pipeline.simulation import simulate
from course_lib.pipeline.times import PipelineTimes
from course_lib.pipeline.v_schedules import zero_bubble_v

KIND_OF = {letter: kind for kind, letter in LETTERS.items()}
EQUAL = PipelineTimes(forward_s=1.0, backward_input_s=0.5, backward_weight_s=0.5)  # F = B
UNEVEN = (1.0, 1.0, 2.0)
Clock = dict[Action, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Level:
    """One puzzle; `par` is what the course's own schedule for it, `reference`, reaches.

    task        what is different here, in a sentence
    limit       most chunks of micro-batches that each rank may hold; None: any number
    gather_s    seconds in which a rank gathers the parameters of another model chunk than the one
                that it used last; it computes nothing then
    hints       two sentences, which help shows one after the other
    """

    task: str
    reference: Schedule
    hints: tuple[str, str]
    limit: Sequence[int] | None = None
    times: PipelineTimes = field(default_factory=PipelineTimes)
    gather_s: float = 0.0

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step."""
        return 1 + max(action.micro_batch for action in self.reference[0])

    @cached_property
    def placement(self) -> list[int]:
        """The rank of each model chunk, by depth."""
        return placement_of(self.reference)

    @property
    def num_model_chunks(self) -> int:
        """Model chunks on each rank."""
        return len(self.placement) // len(self.reference)

    @property
    def par(self) -> float:
        """Seconds of a step of the reference."""
        placed = read_moves(self, " ".join(moves_of(self, self.reference)))
        return max(end_s for _, end_s in clock_of(self, placed).values())

    @property
    def bound(self) -> float:
        """Seconds that no schedule with this placement can beat; a whole backward stays whole."""
        most = max(self.limit) / self.num_model_chunks if self.limit else None
        ranks, m = len(self.reference), self.num_micro_batches
        times = self.times
        if "backward" in self.kinds:
            parts = times.by_depth(self.placement)
            times = PipelineTimes(
                forward_s=parts["forward"],
                backward_input_s=parts["backward"],
                backward_weight_s=0.0,
            )
        whole_s = schedule_bound(ranks, m, most, times, self.placement)
        return max(whole_s, *map(self._gathering_s, range(ranks))) if self.gather_s else whole_s

    def _gathering_s(self, rank: int) -> float:
        """Return seconds of its work, of fill and drain, and of gathers: up to its last chunk, and
        back; before the first forward reaches it, rank 0 has gathered, too."""
        parts = self.times.by_depth(self.placement)
        mine = depths_of(rank, self.placement)
        work_s = sum(parts["forward"][d] + parts["backward"][d] for d in mine)
        around_s = sum(parts["forward"][: mine[0]]) + sum(parts["backward"][: mine[0]])
        gathers = 2 * self.num_model_chunks - 1
        return self.num_micro_batches * work_s + around_s + gathers * self.gather_s

    @property
    def kinds(self) -> list[str]:
        """Kinds of actions: backward whole, or in its two parts."""
        used = {action.kind for actions in self.reference for action in actions}
        return [kind for kind in LETTERS if kind in used]

    def action(self, schedule: Schedule, rank: int, kind: str, chunk: int) -> Action:
        """Return the next action of this kind on a rank: of the first micro-batch without it."""
        done = sum(one.kind == kind and one.model_chunk == chunk for one in schedule[rank])
        depth = depths_of(rank, self.placement)[chunk]
        return Action(kind, depth % len(self.reference), done, chunk)

    def needs(self, action: Action) -> list[Action]:
        """Return the actions that have to end before this one starts."""
        p = len(self.reference)
        kind, depth = action.kind, action.depth(p)

        def at(other: str, place: int) -> Action:
            return Action(other, place % p, action.micro_batch, place // p)

        if kind == "forward":
            return [at(kind, depth - 1)] if depth else []
        if kind == "backward_weight":
            return [at("backward_input", depth)]
        later = [at(kind, depth + 1)] if depth + 1 < len(self.placement) else []
        return [at("forward", depth), *later]

    def refusal(self, schedule: Schedule, rank: int, action: Action) -> str:
        """Return why the action cannot come next on a rank; "" if it can."""
        if action.micro_batch >= self.num_micro_batches:
            return f"all {self.num_micro_batches} micro-batches are placed"
        placed = {one for actions in schedule for one in actions}
        for other in self.needs(action):
            if other not in placed:
                holder = self.placement[other.depth(len(schedule))]
                return f"it needs {other.label} of rank {holder}, which is not placed yet"
        held = in_flight([*schedule[rank], action])[-1]
        if self.limit and action.kind == "forward" and held > self.limit[rank]:
            return (
                f"rank {rank} has memory for {self.limit[rank]} in flight, and holds them already"
            )
        return ""


LEVELS: dict[str, Level] = {
    "1 GPipe": Level(
        task="Backward takes as long as forward, and memory is free.",
        reference=gpipe(3, 3),
        hints=("A rank can start as soon as its input is there: pass forwards on at once.",
         "All forwards, then all backwards: nobody waits longer than for the first and the last."),
        times=EQUAL,
    ),
    "2 memory wall": Level(
        task="Each rank has memory for 3 micro-batches in flight, and there are 5.",
        reference=one_f_one_b(3, 5),
        hints=("A backward frees what its forward holds.",
         "Once the last rank has a forward, let it do its backward at once."),
        limit=(3, 3, 3),
        times=EQUAL,
    ),
    "3 1F1B": Level(
        task="Backward takes twice as long as forward; rank r may hold 4 - r micro-batches.",
        reference=one_f_one_b(4, 6),
        hints=("Rank r begins with as many forwards as it may hold.",
         "Then one backward and one forward in turn, until only backwards are left."),
        limit=(4, 3, 2, 1),
    ),
    "4 few micro-batches": Level(
        task="There are 4 ranks, but only 2 micro-batches.",
        reference=one_f_one_b(4, 2),
        hints=("The bubble is (p - 1) / m: it cannot be small here.",
         "Every rank does its forwards as they come, then its backwards as they come."),
    ),
    "5 interleaved": Level(
        task="Each rank has two chunks of layers, .1 after all of chunk 0, each half as long.",
        reference=interleaved(2, 4, 2),
        hints=("Pass the first micro-batches through chunk 1 before you take on more.",
         "Two forwards in chunk 0, two in chunk 1, and so on: in rounds of p micro-batches."),
    ),
    "6 zero bubble": Level(
        task="Backward has two parts: I sends its gradient on, W can wait. 3 in flight on a rank.",
        reference=zero_bubble_h1(3, 5),
        hints=("Others wait for I, nobody waits for W.",
         "Do as in 1F1B, and keep some W for the end, where ranks would wait."),
        limit=(3, 3, 3),
    ),
    "7 ZB-V": Level(
        task="The layers go to the last rank and back: rank 0 has both ends. 4 chunks in flight.",
        reference=zero_bubble_v(2, 4),
        hints=("The last rank can run F.1 directly after its F.",
         "Fill each wait with a W; a forward that others wait for comes before a W."),
        limit=(4, 4),
    ),
    "8 uneven stages": Level(
        task="The last stage takes twice as long as each other.",
        reference=one_f_one_b(3, 4),
        hints=("The slowest stage sets the pace: it should never wait.",
         "It cannot start before the first forward arrives, nor end before its last backward."),
        times=PipelineTimes(forward_s=UNEVEN, backward_input_s=UNEVEN, backward_weight_s=UNEVEN),
    ),
    "9 FSDP and pipeline": Level(
        task="Two chunks on each rank, sharded by FSDP: a rank holds the whole parameters of one "
        "chunk, and gathers the other in 0.5, computing nothing, whenever it changes chunks.",
        reference=breadth_first(2, 4, 2),
        hints=("Count the gathers: each change between a chunk and the other costs one.",
         "Pass all micro-batches through chunk 0, then all through chunk 1, and so back."),
        gather_s=0.5,
    ),
}  # fmt: skip


def read_moves(level: Level, moves: str) -> list[tuple[int, Action]]:
    """Return the rank and action of each move.

    Raises: ScheduleError for a move that is none, or that is refused
    """
    schedule: Schedule = [[] for _ in level.reference]
    found = []
    for number, word in enumerate(moves.split(), 1):
        rank, kind, chunk = word[:1], KIND_OF.get(word[1:2]), word[2:].removeprefix(".") or "0"
        if kind not in level.kinds or not (rank + chunk).isdecimal():
            raise ScheduleError(f"move {number}: need one such as 0F; got {word[:20]!r}.")
        if int(rank) >= len(schedule) or int(chunk) >= level.num_model_chunks:
            raise ScheduleError(f"move {number}: there is no rank or chunk {word[:20]!r}.")
        action = level.action(schedule, int(rank), kind, int(chunk))
        if reason := level.refusal(schedule, int(rank), action):
            raise ScheduleError(f"move {number}, {action.label} on rank {rank}: {reason}.")
        schedule[int(rank)].append(action)
        found.append((int(rank), action))
    return found


def moves_of(level: Level, schedule: Schedule) -> list[str]:
    """Return the moves that build a schedule, in the order of its simulated starts."""
    starts_s = simulate(schedule, level.times).starts_s
    timed = [
        (start_s, rank, action)
        for rank, actions in enumerate(schedule)
        for action, start_s in zip(actions, starts_s[rank], strict=True)
    ]
    return [move_text(rank, action) for _, rank, action in sorted(timed)]


def move_text(rank: int, action: Action) -> str:
    chunk = f".{action.model_chunk}" if action.model_chunk else ""
    return f"{rank}{LETTERS[action.kind]}{chunk}"


def clock_of(level: Level, moves: Sequence[tuple[int, Action]]) -> Clock:
    """Return start and end of each action: as soon as its rank is free and its input is there.

    A rank that needs another chunk gathers it when it is free; the input may arrive meanwhile.
    """
    seconds, clock = level.times.by_depth(level.placement), Clock()
    free_s, chunks = [0.0] * len(level.reference), [-1] * len(level.reference)
    for rank, action in moves:
        if action.model_chunk != chunks[rank]:
            free_s[rank] += level.gather_s
            chunks[rank] = action.model_chunk
        start_s = max([free_s[rank], *(clock[one][1] for one in level.needs(action))])
        free_s[rank] = start_s + seconds[action.kind][action.depth(len(free_s))]
        clock[action] = (start_s, free_s[rank])
    return clock


def name_of(schedule: Schedule, num_micro_batches: int) -> str:
    """Return the name of the known schedule that this is, or ""."""
    known: Mapping[str, Callable[[int, int], Schedule]] = {
        **PLAIN,
        "interleaved 1F1B": lambda p, m: interleaved(p, m, 2),
        "breadth-first": lambda p, m: breadth_first(p, m, 2),
    }
    for name, build in known.items():
        try:
            if build(len(schedule), num_micro_batches) == schedule:
                return name
        except ScheduleError:  # not for so few micro-batches
            continue
    return ""
