"""Exercise 3 of 13_scaling_study: steps are counted in one place, and a clock is read in time."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from course_lib.checks.cases import Case
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.scaling_study.parts import Part, Parts, numbers
from course_lib.scaling_study.lab import EmulatedDevice


class Watched(EmulatedDevice):
    """A device that is not new nor idle, slows down a little, and records what it does.

    Orders take no time here, so that the seconds are the same however often an answer waits.

    steps       the tokens of the micro-batches before each step
    unfinished  those after the last step
    """

    def __init__(self, backward_s: float, step_s: float) -> None:
        super().__init__(backward_s, step_s)
        self.steps, self.unfinished = list[list[int]](), list[int]()
        self.step()
        self.synchronize()
        self.step()
        self.steps.clear()

    def backward(self, num_tokens: int) -> None:
        super().backward(num_tokens)
        self.unfinished.append(num_tokens)

    def step(self) -> None:
        super().step()
        self.steps.append(self.unfinished)
        self.unfinished = []
        self.step_s *= 1.2

    def _order(self, name: str, takes_s: float) -> None:
        self.orders.append(name)
        self._free_s = max(self._free_s, self._now_s) + takes_s


FIRST = 100  # tokens of the first micro-batch; each has one more than the one before
MOST = 10_000  # micro-batches, of which no case needs more than 32
WITHOUT_END = Cause(
    "The micro-batches have no end: take each with next() when its turn has come, and put them in "
    "no list or loop of their own."
)


def _micro_batches() -> Iterator[int]:
    """Yield the tokens of micro-batches, as many as one wants. Raises: CheckFailed after MOST"""
    yield from range(FIRST, FIRST + MOST)
    raise failed(f"{MOST:,} micro-batches are drawn, and none of them is the last", WITHOUT_END)


def _cases() -> list[Case]:
    return [
        (
            f"{steps} steps of {accumulated} micro-batches, warm-up {warmup}",
            (Watched(*device), _micro_batches(), steps, warmup, accumulated),
        )
        for device, steps, warmup, accumulated in (
            ((0.03, 0.02), 6, 1, 2),
            ((0.03, 0.02), 8, 2, 4),
            ((0.01, 0.2), 4, 1, 1),
            ((0.05, 0.02), 4, 0, 2),
        )
    ]


PAIR = Cause("Return two numbers, the seconds and the tokens of the steps after the warm-up.")
WORK, BATCHES, DRAWN = "the work", "backward's tokens", "drawn"
TOKENS, SECONDS = "tokens", "time"


def _work_and_totals(result: Any, device: Watched, *case: Any) -> dict[str, Any]:
    """Return what the device did and what the answer returned."""
    totals = numbers(result, (SECONDS, TOKENS), PAIR)
    sizes = groupby(map(len, device.steps))
    work = [f"{len([*steps])} steps of {size} micro-batches" for size, steps in sizes]
    if device.unfinished:
        work.append(f"{len(device.unfinished)} micro-batches without a step")
    micro_batches, *_ = case
    return {
        WORK: ", then ".join(work),
        BATCHES: [number for step in device.steps for number in step],
        DRAWN: next(micro_batches) - FIRST,
        **totals,
    }


EARLY = Cause(
    "That is how long launching took, next to nothing: the device works on. synchronize() before "
    "the clock is read."
)
STARTED = Cause(
    "The clock starts while the device still works on the warm-up, or on what came before it: "
    "synchronize() before it, too."
)
TOO_OFTEN = Cause("The optimizer steps too often: step after every `accumulated` micro-batches.")
OF_STEPS = Cause("`steps` counts steps of the optimizer, and you count micro-batches.")
STEPS_ONCE = Cause("The optimizer steps only once: step after every `accumulated` micro-batches.")
DRAWN_TWICE = Cause("Each micro-batch is drawn once: keep what next() returns, and use it twice.")
WARMUP_TOKENS = Cause("The warm-up's tokens are counted: leave them out.")
MIDDLE = Cause("The warm-up ends in the middle of a step: count it by steps, not by micro-batches.")
NOT_TOKENS = Cause("Those are micro-batches: here each is just its number of tokens.")
UNLIKE = Cause("One micro-batch's tokens were multiplied: others may have more, so add up each.")
SWAPPED = Cause("Seconds first, then tokens.")
WITH_WARMUP = Cause("The warm-up's seconds are in it: start the clock after `warmup` steps.")
AHEAD = Cause("One more is drawn than the steps need, ahead of the next: its tokens are lost.")
OF_ONE = Cause("That is the time of one step or micro-batch: return that of all that count.")
FROM_THE_FIRST = Cause(
    "With a warm-up of 0 the clock starts before the first step: no step has ended then."
)

START = "start_s, num_tokens = device.now_s(), 0"
WAIT_1, WAIT_2 = f"device.synchronize()\n            {START}", "device.synchronize()\n    return"
AT_THE_BEGINNING = f"""\
        if step == warmup:
            {WAIT_1}
"""
AT_THE_END = AT_THE_BEGINNING.replace("step ==", "step + 1 ==")
STEP, TIME = "        device.step()\n", "device.now_s() - start_s"


def _before(line: str) -> tuple[str, str]:
    """Return the change that puts a line before the loop."""
    return "for step in", f"{line}\nfor step in"


ALL_0 = _before("start_s = num_tokens = 0")
COUNTS_ALL = ((START, "start_s = device.now_s()"), _before("num_tokens = 0"))


STEPS = Exercise(
    key="scaling_study-3",
    title="steps in one place",
    check=Parts(
        cases=_cases,
        show=_work_and_totals,
        parts={
            WORK: Part("A step is `accumulated` backward passes, then one step of the optimizer."),
            BATCHES: Part("Each is drawn once: device.backward(next(micro_batches))."),
            DRAWN: Part("Draw each when its turn has come, and no more.", " micro-batches"),
            TOKENS: Part("Add up those of each micro-batch from step `warmup` on.", " tokens"),
            SECONDS: Part("Read the clock before and after what counts, on an idle device.", " s"),
        },
        success="Steps, warm-up and tokens per step, and a clock that waits for the device.",
    ),
    wrong=(
        Edit(f"tokens\n{STEP}", f"tokens\n    {STEP}", TOO_OFTEN),
        Edit("range(steps)", "range(steps // accumulated)", OF_STEPS, also=(ALL_0,)),
        Edit(STEP, STEP[4:], STEPS_ONCE),
        Edit("device.backward(tokens)", "device.backward(next(micro_batches))", DRAWN_TWICE),
        Edit("if step >= warmup:", "if True:", WARMUP_TOKENS, also=COUNTS_ALL),
        Edit(
            "if step >= warmup:",
            "if step * accumulated + number >= warmup:",
            MIDDLE,
            also=(("for _ in", "for number in"), *COUNTS_ALL),
        ),
        Edit("+= tokens", "+= 1", NOT_TOKENS),
        Edit("+= tokens", "= tokens * accumulated * (steps - warmup)", UNLIKE),
        Edit(f"return {TIME}, num_tokens", f"return num_tokens, {TIME}", SWAPPED),
        Edit(f"return {TIME}, num", "return num", PAIR),
        Edit(WAIT_1, START, EARLY, also=((WAIT_2, "return"),)),
        Edit(WAIT_2, "return", EARLY),
        Edit(
            START,
            "num_tokens = 0",
            WITH_WARMUP,
            also=(_before("device.synchronize()\nstart_s = device.now_s()"),),
        ),
        Edit(WAIT_1, START, STARTED),
        Edit(
            "tokens = next(micro_batches)",
            "tokens, following = following, next(micro_batches)",
            AHEAD,
            also=(_before("following = next(micro_batches)"),),
        ),
        Edit(
            "next(micro_batches)",
            "drawn.pop(0)",
            WITHOUT_END,
            also=(_before("drawn = list(micro_batches)"),),
        ),
        Edit(TIME, f"({TIME}) / (steps - warmup)", OF_ONE),
        Edit(AT_THE_BEGINNING, "", FROM_THE_FIRST, also=((STEP, STEP + AT_THE_END),)),
    ),
)
