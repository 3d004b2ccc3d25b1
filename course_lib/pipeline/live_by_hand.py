"""The schedule by hand: place one action after another, and beat a par. Notebook 08_pipeline.

A game is a level and a text of moves, such as `0F 1F 0F 1B`: a rank, the kind of action by its
letter, and the model chunk where there are two. The micro-batch is the next one of that kind.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from course_lib.core.live import Bars, Drawing, Lanes, Live, Panel
from course_lib.pipeline.actions import (
    LETTERS,
    Action,
    Schedule,
    ScheduleError,
    as_text,
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
UNIT_S = 0.02  # of a forward on real ranks, which wait instead of computing
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
    return [_move(rank, action) for _, rank, action in sorted(timed)]


def _move(rank: int, action: Action) -> str:
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


# --- what is drawn


def by_hand_drawing(level: str, moves: str, help: int) -> Drawing:
    """Return the actions on a clock, what each rank holds at most, and a button for each move."""
    puzzle = LEVELS[level]
    placed = read_moves(puzzle, moves)
    p, total = len(puzzle.reference), sum(map(len, puzzle.reference))
    schedule = [[action for at, action in placed if at == rank] for rank in range(p)]
    clock = clock_of(puzzle, placed)
    rows = {f"rank {rank}": _lane(puzzle, one, clock) for rank, one in enumerate(schedule)}
    held = {
        f"rank {rank}": {"activations": max([0, *in_flight(actions)])}
        for rank, actions in enumerate(schedule)
    }
    most = (max(puzzle.limit), f"at most {max(puzzle.limit)}") if puzzle.limit else None
    panels: list[Panel] = [
        Lanes(rows=rows, x_label="time (forwards of a whole stage)"),
        Bars(rows=held, x_label="most in flight (forwards)", limit=most),
    ]
    if help > 3:
        solved = clock_of(puzzle, read_moves(puzzle, " ".join(moves_of(puzzle, puzzle.reference))))
        lanes = {
            f"par, rank {rank}": _lane(puzzle, actions, solved)
            for rank, actions in enumerate(puzzle.reference)
        }
        panels.append(Lanes(rows=lanes, x_label="the course's own schedule"))
    return Drawing(
        finding=_finding(puzzle, schedule, clock, total),
        panels=panels,
        note="\n".join([puzzle.task, *_help(puzzle, schedule, help)]),
        command=_command(puzzle, schedule) if len(placed) == total else "",
        buttons=_buttons(puzzle, schedule, moves, help),
    )


def _lane(
    level: Level, actions: Sequence[Action], clock: Clock
) -> list[tuple[float, float, str, str]]:
    """Return the boxes of a rank: its actions, and a gather before each that changes chunks."""
    lane, free_s, chunk = list[tuple[float, float, str, str]](), 0.0, -1
    for action in actions:
        if level.gather_s and action.model_chunk != chunk:
            lane.append((free_s, free_s + level.gather_s, "all_gather", "g"))
        lane.append((*clock[action], action.kind, action.label))
        free_s, chunk = clock[action][1], action.model_chunk
    return lane


def _finding(level: Level, schedule: Schedule, clock: Clock, total: int) -> str:
    step_s = max((end_s for _, end_s in clock.values()), default=0.0)
    best = "which no order can beat" if level.par == level.bound else f"none beats {level.bound:g}"
    goal = f"par is {level.par:g}, {best}"
    if len(clock) < total:
        return f"{len(clock)} of {total} placed, up to {step_s:g}; {goal}."
    idle = len(schedule) * step_s / sum(end_s - start_s for start_s, end_s in clock.values()) - 1
    result = "par" if step_s == level.par else "above par" if step_s > level.par else "below par"
    name = name_of(schedule, level.num_micro_batches)
    known = f"This is {name}." if name else "This order has no name here."
    return f"Done in {step_s:g}, {result}: a bubble of {idle:.0%} of the computing; {goal}. {known}"


def _help(level: Level, schedule: Schedule, step: int) -> list[str]:
    """Return the help up to a step: two hints, then the next move of par, then all of it."""
    said = [f"Help {number}: {words}" for number, words in enumerate(level.hints[:step], 1)]
    if step < 3:
        return said
    for rank, (mine, par) in enumerate(zip(schedule, level.reference, strict=True)):
        for place, (one, other) in enumerate(zip(mine, par, strict=False)):
            if one != other:
                where = f"on rank {rank} has {other.label} in place {place + 1}; you have"
                return [*said, f"Help 3: par {where} {one.label}."]
    for move in moves_of(level, level.reference):
        rank, kind, chunk = int(move[0]), KIND_OF[move[1]], int(move[3:] or 0)
        action = level.action(schedule, rank, kind, chunk)
        following = level.reference[rank][len(schedule[rank]) :][:1]
        if [action] == following and not level.refusal(schedule, rank, action):
            return [*said, f"Help 3: par goes on with {action.label} on rank {rank}."]
    return said


def _buttons(
    level: Level, schedule: Schedule, moves: str, step: int
) -> dict[str, list[tuple[str, str, str | int, str]]]:
    rows: dict[str, list[tuple[str, str, str | int, str]]] = {}
    for rank in range(len(schedule)):
        row = rows[f"rank {rank}"] = []
        for chunk in range(level.num_model_chunks):
            for kind in level.kinds:
                action = level.action(schedule, rank, kind, chunk)
                reason = level.refusal(schedule, rank, action)
                longer = f"{moves} {_move(rank, action)}".strip()
                done = action.micro_batch >= level.num_micro_batches
                label = f"no {LETTERS[kind]}{f'.{chunk}' * bool(chunk)}" if done else action.label
                row.append((label, "moves", longer, reason))
    shorter = " ".join(moves.split()[:-1])
    rows["game"] = [
        ("undo", "moves", shorter, "" if moves else "nothing is placed"),
        ("start again", "moves", "", "" if moves else "nothing is placed"),
        ("help", "help", step + 1, "" if step < 4 else "this is all the help there is"),
        ("no help", "help", 0, "" if step else "no help is shown"),
    ]
    return rows


def _command(level: Level, schedule: Schedule) -> str:
    """Return a cell for notebook 08_pipeline: the schedule, on real ranks and simulated."""
    p, times = len(schedule), level.times
    kinds = ("forward_s", "backward_input_s", "backward_weight_s")
    seconds = {kind: getattr(times, kind) for kind in kinds}
    scaled = [
        f"{kind}={[UNIT_S * one for one in got] if isinstance(got, Sequence) else UNIT_S * got}"
        for kind, got in seconds.items()
    ]
    return f'''from course_lib.pipeline import PipelineTimes, lab, read_schedule, simulate
from course_lib.ranks import Ranks

schedule = read_schedule("""
{as_text(schedule)}
""", {placement_of(schedule)})
times = PipelineTimes({", ".join(scaled)})
made = lab.measure(Ranks({p}), {{"mine": lab.emulated(schedule, times)}})["mine"]
print(f"{{made.least_s:.3f}} s on {p} ranks, {{simulate(schedule, times).step_s:.3f}} s simulated")'''


BY_HAND = Live(
    name="schedule_by_hand",
    lesson="08_pipeline",
    question="Can you build 1F1B, and then something better, by hand?",
    choices={"level": [*LEVELS], "moves": "", "help": (0, 4, 0)},
    compute=by_hand_drawing,
    hidden=("moves", "help"),
)
