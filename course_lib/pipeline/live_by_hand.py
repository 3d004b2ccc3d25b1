"""The schedule by hand: place one action after another, and beat a par. Notebook 08_pipeline."""

from collections.abc import Sequence

from course_lib.core.live import Bars, Drawing, Lanes, Live, Panel
from course_lib.pipeline.actions import (
    LETTERS,
    Action,
    Schedule,
    as_text,
    in_flight,
    placement_of,
)
from course_lib.pipeline.levels import (
    KIND_OF,
    LEVELS,
    Clock,
    Level,
    clock_of,
    move_text,
    moves_of,
    name_of,
    read_moves,
)

UNIT_S = 0.02  # of a forward on real ranks, which wait instead of computing
DrawnAction = tuple[float, float, str, str]


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


def _lane(level: Level, actions: Sequence[Action], clock: Clock) -> list[DrawnAction]:
    """Return the boxes of a rank: its actions, and a gather before each that changes chunks."""
    lane, free_s, chunk = list[DrawnAction](), 0.0, -1
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
                longer = f"{moves} {move_text(rank, action)}".strip()
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
played = simulate(schedule, times)
print(f"{{made.least_s:.3f}} s on {p} ranks, {{played.step_s:.3f}} s simulated")'''


BY_HAND = Live(
    name="schedule_by_hand",
    lesson="08_pipeline",
    question="Can you build 1F1B, and then something better, by hand?",
    choices={"level": [*LEVELS], "moves": "", "help": (0, 4, 0)},
    compute=by_hand_drawing,
    hidden=("moves", "help"),
)
