"""Exercise 3 of 13_scaling_study: steps are counted in one place, and a clock is read in time."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isclose, nan
from numbers import Real
from typing import Any

from course_lib.checks.cases import Case
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.scaling_study.parts import Part, Parts
from course_lib.scaling_study.lab import EmulatedDevice


class Watched(EmulatedDevice):
    """A device that is not new nor idle, slows down a little, and records what it does.

    Orders take no time here, so that the seconds are the same however often an answer waits.

    steps       the tokens of the micro-batches before each step
    unfinished  those after the last step
    read_busy   after how many steps the clock was read while the device was working
    """

    def __init__(self, backward_s: float, step_s: float) -> None:
        super().__init__(backward_s, step_s)
        self.steps, self.unfinished, self.read_busy = list[list[int]](), list[int](), set[int]()
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

    def now_s(self) -> float:
        if self._now_s < self._free_s:
            self.read_busy.add(len(self.steps))
        return super().now_s()


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
    """Return what the device did and what the answer returned; `busy` is no part of the answer."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise failed(f"need seconds and tokens; got {result!r}", PAIR)
    if any(isinstance(one, bool) or not isinstance(one, Real) for one in result):
        raise failed(f"need seconds and tokens; got {result!r}", PAIR)
    sizes = groupby(map(len, device.steps))
    work = [f"{len([*steps])} steps of {size} micro-batches" for size, steps in sizes]
    if device.unfinished:
        work.append(f"{len(device.unfinished)} micro-batches without a step")
    micro_batches, _, warmup, _ = case
    return {
        WORK: ", then ".join(work),
        BATCHES: [number for step in device.steps for number in step],
        DRAWN: next(micro_batches) - FIRST,
        TOKENS: result[1],
        SECONDS: result[0],
        "busy": warmup in device.read_busy,
    }


def _seconds(one: Any) -> float:
    """Return the seconds of a case; nan where the answer raised an error in it."""
    return one[SECONDS] if isinstance(one, dict) else nan


def _swapped(got: Sequence[Any], need: Sequence[Any]) -> bool:
    pairs = zip(got, need, strict=True)
    return any(
        isinstance(one, dict) and isclose(one[TOKENS], right[SECONDS]) for one, right in pairs
    )


def _divided(got: Sequence[Any], need: Sequence[Any]) -> bool:
    """Return whether all seconds are a half of the right ones, or a third, or a quarter ..."""
    parts = [right[SECONDS] / (_seconds(one) or nan) for one, right in zip(got, need, strict=True)]
    return all(part > 1.5 and isclose(part, round(part)) for part in parts)


def _started_busy(got: Sequence[Any], need: Sequence[Any]) -> bool:
    """Return whether too many seconds come only where the clock starts on a busy device."""
    slow = [
        one["busy"]
        for one, right in zip(got, need, strict=True)
        if isinstance(one, dict) and one[SECONDS] > 1.001 * right[SECONDS]
    ]
    return any(slow) and all(slow)


EARLY = Cause(
    "That is how long launching took, next to nothing: the device works on. synchronize() before "
    "the clock is read."
)
STARTED = Cause(
    "The clock starts while the device still works on the warm-up, or on what came before it: "
    "synchronize() before it, too."
)
WITH_WARMUP = Cause(
    "The warm-up's seconds are in it: start the clock when `warmup` steps are done."
)
OF_ONE = Cause(
    "That is the time of one step, or of one micro-batch: return the time of all that count."
)
SWAPPED = Cause("Seconds first, then tokens.")
UNLIKE = Cause(
    "The tokens of one micro-batch were multiplied: the others may have more or fewer, so add up "
    "those of each."
)
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
STEP = "        device.step()\n"


def _before_the_loop(line: str) -> tuple[str, str]:
    return "for step in", f"{line}\nfor step in"


STEPS = Exercise(
    key="scaling_study-3",
    title="steps in one place",
    check=Parts(
        cases=_cases,
        show=_work_and_totals,
        parts={
            WORK: Part(
                look="A step is `accumulated` backward passes, then one step of the optimizer."
            ),
            BATCHES: Part(
                look="backward gets the micro-batch that was drawn, and each is drawn once: "
                "device.backward(next(micro_batches)).",
            ),
            DRAWN: Part(
                unit=" micro-batches",
                look="Draw one when its turn has come, and none after the last step: the caller "
                "goes on with the next one.",
            ),
            TOKENS: Part(
                unit=" tokens",
                symptoms=((_swapped, SWAPPED),),
                look="Add up the tokens of every micro-batch of the steps that count, from step "
                "`warmup` on (the first step is 0): which are missing, and which too many?",
            ),
            SECONDS: Part(
                unit=" s",
                symptoms=(
                    (lambda got, _: not any(map(_seconds, got)), EARLY),
                    (_started_busy, STARTED),
                    (_divided, OF_ONE),
                ),
                look="Read the clock twice, each time after synchronize(): when `warmup` steps are "
                "done, and after the last step.",
            ),
        },
        success="Steps, warm-up and tokens per step, and a clock that waits for the device.",
    ),
    wrong=(
        Edit(
            f"tokens\n{STEP}",
            f"tokens\n    {STEP}",
            Cause("The optimizer steps too often: step after every `accumulated` micro-batches."),
        ),
        Edit(
            "range(steps)",
            "range(steps // accumulated)",
            Cause("`steps` counts steps of the optimizer, and you count micro-batches."),
            also=(_before_the_loop("start_s = num_tokens = 0"),),
        ),
        Edit(
            "range(steps)",
            "range(steps + warmup)",
            Cause("The warm-up is the first of the steps, not more of them."),
        ),
        Edit(
            "range(accumulated)",
            "range(1)",
            Cause("One micro-batch a step: it needs `accumulated` of them."),
        ),
        Edit(
            STEP,
            STEP[4:],
            Cause("The optimizer steps only once: step after every `accumulated` micro-batches."),
        ),
        Edit(STEP, "", Cause("The optimizer never steps: device.step() ends each step.")),
        Edit(
            "device.backward(tokens)",
            "device.backward(next(micro_batches))",
            Cause("Each micro-batch is drawn once: keep what next() returns, and use it twice."),
        ),
        Edit(
            "if step >= warmup:",
            "if True:",
            Cause("The warm-up's tokens are counted: leave them out."),
            also=((START, "start_s = device.now_s()"), _before_the_loop("num_tokens = 0")),
        ),
        Edit(
            "if step >= warmup:",
            "if step * accumulated + number >= warmup:",
            Cause(
                "The warm-up ends in the middle of a step: count it by steps, not by micro-batches."
            ),
            also=(
                ("for _ in", "for number in"),
                (START, "start_s = device.now_s()"),
                _before_the_loop("num_tokens = 0"),
            ),
        ),
        Edit(
            "+= tokens",
            "+= 1",
            Cause("Those are micro-batches: here each is just its number of tokens."),
        ),
        Edit("+= tokens", "= tokens * accumulated * (steps - warmup)", UNLIKE),
        Edit(
            "+= tokens",
            "+= tokens * accumulated * (number == accumulated - 1)",
            UNLIKE,
            also=(("for _ in", "for number in"),),
        ),
        Edit(
            "return device.now_s() - start_s, num_tokens",
            "return num_tokens, device.now_s() - start_s",
            SWAPPED,
        ),
        Edit("return device.now_s() - start_s, num", "return num", PAIR),
        Edit(WAIT_1, START, EARLY, also=((WAIT_2, "return"),)),
        Edit(WAIT_2, "return", EARLY),
        Edit(
            START,
            "num_tokens = 0",
            WITH_WARMUP,
            also=(_before_the_loop("start_s = device.now_s()"),),
        ),
        Edit(
            START,
            "num_tokens = 0",
            WITH_WARMUP,
            also=(_before_the_loop("device.synchronize()\nstart_s = device.now_s()"),),
        ),
        Edit(WAIT_1, START, STARTED),
        Edit(
            WAIT_1,
            f"if warmup:\n                device.synchronize()\n            {START}",
            STARTED,
        ),
        Edit(
            "tokens = next(micro_batches)",
            "tokens, following = following, next(micro_batches)",
            Cause("One more is drawn than the steps need, ahead of the next: its tokens are lost."),
            also=(_before_the_loop("following = next(micro_batches)"),),
        ),
        Edit(
            "next(micro_batches)",
            "drawn.pop(0)",
            WITHOUT_END,
            also=(_before_the_loop("drawn = list(micro_batches)"),),
        ),
        Edit(
            "for _ in range(accumulated):",
            "for tokens in micro_batches:",
            WITHOUT_END,
            also=(("            tokens = next(micro_batches)\n", ""),),
        ),
        Edit(
            "device.now_s() - start_s",
            "round(device.now_s() - start_s, 3)",
            Cause(
                "The seconds are rounded: return what the clock says, and round where you print."
            ),
        ),
        Edit(
            " - start_s",
            "",
            Cause("That is what the clock says at the end: subtract what it said at the start."),
        ),
        Edit(
            " - start_s,",
            " - start_s) / (steps - warmup),",
            OF_ONE,
            also=(("return ", "return ("),),
        ),
        Edit(
            " - start_s,",
            " - start_s) / ((steps - warmup) * accumulated),",
            OF_ONE,
            also=(("return ", "return ("),),
        ),
        Edit(AT_THE_BEGINNING, "", FROM_THE_FIRST, also=((STEP, STEP + AT_THE_END),)),
        Edit(
            AT_THE_BEGINNING,
            "",
            FROM_THE_FIRST,
            also=((STEP, STEP + AT_THE_END), _before_the_loop("start_s = num_tokens = 0")),
        ),
        Edit(
            "device.now_s() - start_s",
            "(steps - warmup) * (accumulated * device.backward_s + device.step_s)",
            Cause("Read the clock: no formula knows how long a device takes in truth."),
        ),
    ),
)
