"""Pipeline schedules in a V: ZB-V and DualPipeV, with two model chunks on each rank.

Chunk 0 goes from the first rank to the last, chunk 1 back to the first (`v_placement`). The last
rank hands a micro-batch on to itself, and the first one computes the loss, so a backward can begin
there as soon as the forward has ended. Notebook 08_pipeline.
"""

from collections.abc import Sequence

from course_lib.pipeline.actions import LETTERS, Action, Schedule, ScheduleError
from course_lib.pipeline.schedules import check_counts

KINDS = {letter: kind for kind, letter in LETTERS.items()}


def zero_bubble_v(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return ZB-V: from its first action to its last no rank waits, if F = I = W and m >= 2p.

    At most 2p chunks of micro-batches in flight on a rank, as much memory as 1F1B on its first
    rank: two chunks are one whole stage. With other times, or fewer micro-batches, ranks wait.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), section 6
    """
    check_counts("zero_bubble_v", num_stages, num_micro_batches)
    p, fewest = num_stages, 2 * num_stages - 1
    # fewer micro-batches: the same order, without the actions of those that there are not
    num_planned = max(num_micro_batches, fewest)
    schedule = []
    for rank in range(p):
        later = p - 1 - rank
        order = [
            *["F0"] * (2 * later + 1),
            *["F1", "F0"] * rank,
            *["F1", "I1", "W1"] * (later + 1),
            *["F0", "I0", "W0", "F1", "I1", "W1"] * (num_planned - fewest + rank),
            *["I0", "W0", "F1", "I1", "W1"] * later,
            *["I0", "I1"] * rank,
            *["I0", "W0"] * (later + 1),
            *["W1"] * rank,
            *["W0"] * rank,
        ]
        actions = _numbered(order, p, rank)
        schedule.append([one for one in actions if one.micro_batch < num_micro_batches])
    return schedule


def dual_pipe_v(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return DualPipeV: pairs of a forward and a backward that may overlap; m >= 2p.

    DeepSeek's DualPipe cut in half. In the steady state each forward is followed by the backward of
    another micro-batch in the other chunk, so that the communication inside the one (of experts,
    for example) can hide behind the computation of the other: `PipelineTimes.overlap`. At most
    2p + 1 chunks of micro-batches in flight on a rank.

    Raises:  ScheduleError for fewer than 2p micro-batches
    Source:  DeepSeek-AI 2024 (DeepSeek-V3), section 3.2.1; cut in half by Sea AI Lab 2025
    """
    check_counts("dual_pipe_v", num_stages, num_micro_batches)
    p, m = num_stages, num_micro_batches
    if m < 2 * p:
        raise ScheduleError(
            f"dual_pipe_v: need num_micro_batches >= 2 * num_stages; got {m} and {p}. Try {2 * p}."
        )
    schedule = []
    for rank in range(p):
        later = p - 1 - rank
        order = [
            *["F0"] * (2 * later),
            *["F0", "F1"] * (rank + 1),
            *["I1", "W", "F1"] * later,
            *["F0", "B1", "F1", "B0"] * (m - 2 * p + rank + 1),
            *["B1", "F1", "B0"] * later,
            *(["B1", "B0"] * (rank + 1))[: rank + 1],  # one half of these whole, the other split
            *(["I1", "I0"] * (rank + 1))[rank + 1 :],
            *["W", "I0"] * later,
            *["W"] * (rank + 1),
        ]
        schedule.append(_numbered(order, p, rank))
    return schedule


def _numbered(order: Sequence[str], num_stages: int, rank: int) -> list[Action]:
    """Return a rank's actions from names: the nth F0 is the forward of micro-batch n in chunk 0.

    I and B are the nth backward in their chunk; W0 is the weight half of the first I0 that still
    lacks it, and W that of the first I in either chunk.
    """
    stages = (rank, num_stages - 1 - rank)
    begun = {(letter, chunk): 0 for letter in "FB" for chunk in (0, 1)}
    halves: list[Action] = []  # input halves whose weight half is still to come
    actions: list[Action] = []
    for name in order:
        letter, of_chunk = name[0], name[1:]
        if letter == "W":
            half = next(one for one in halves if of_chunk in ("", str(one.model_chunk)))
            halves.remove(half)
            actions.append(half._replace(kind=KINDS[letter]))
            continue
        chunk = int(of_chunk)
        counter = ("F" if letter == "F" else "B", chunk)
        action = Action(KINDS[letter], stages[chunk], begun[counter], chunk)
        begun[counter] += 1
        actions.append(action)
        if letter == "I":
            halves.append(action)
    return actions
