"""Exercise 3 of 13_scaling_study, with its planted mistakes: steps are counted in one place."""

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.scaling_study.parts import near, shown
from course_lib.scaling_study.lab import EmulatedDevice

Tokens = Iterator[int]
Totals = tuple[float, int]


def timed_loop(
    device: EmulatedDevice, micro_batches: Tokens, steps: int, warmup: int, accumulated: int
) -> Totals:
    """Train with a timed loop: the right answer."""
    start_s, num_tokens = 0.0, 0
    for step in range(steps):
        if step == warmup:
            device.synchronize()
            start_s, num_tokens = device.now_s(), 0
        for tokens in islice(micro_batches, accumulated):
            device.backward(tokens)
            num_tokens += tokens
        device.step()
    device.synchronize()
    return device.now_s() - start_s, num_tokens


# --- planted mistakes


def _one_step(device: EmulatedDevice, micro_batches: Tokens, accumulated: int) -> int:
    """Run a step of accumulated micro-batches; return their tokens."""
    tokens = [*islice(micro_batches, accumulated)]
    for number in tokens:
        device.backward(number)
    device.step()
    return sum(tokens)


def _every_micro_batch_steps(
    device: EmulatedDevice, micro_batches: Tokens, steps: int, warmup: int, accumulated: int
) -> Totals:
    return timed_loop(device, micro_batches, steps * accumulated, warmup * accumulated, 1)


def _counts_micro_batches(
    device: EmulatedDevice, micro_batches: Tokens, steps: int, warmup: int, accumulated: int
) -> Totals:
    return timed_loop(device, micro_batches, steps // accumulated, warmup, accumulated)


def _warmup_besides(
    device: EmulatedDevice, micro_batches: Tokens, steps: int, warmup: int, accumulated: int
) -> Totals:
    return timed_loop(device, micro_batches, steps + warmup, warmup, accumulated)


def _never_steps(
    device: EmulatedDevice, micro_batches: Tokens, steps: int, warmup: int, accumulated: int
) -> Totals:
    tokens = [*islice(micro_batches, steps * accumulated)]
    for number in tokens:
        device.backward(number)
    device.step()
    device.synchronize()
    return device.now_s(), sum(tokens[warmup * accumulated :])


def _one_micro_batch(
    device: EmulatedDevice, micro_batches: Tokens, steps: int, warmup: int, accumulated: int
) -> Totals:
    return timed_loop(device, micro_batches, steps, warmup, 1)


def _timed(before: bool, after: bool) -> Callable[..., Totals]:
    """Return a loop that waits for the device before and after the timed steps, or not."""

    def loop(
        device: EmulatedDevice, micro_batches: Tokens, steps: int, warmup: int, accumulated: int
    ) -> Totals:
        for _ in range(warmup):
            _one_step(device, micro_batches, accumulated)
        if before:
            device.synchronize()
        start_s = device.now_s()
        tokens = [_one_step(device, micro_batches, accumulated) for _ in range(steps - warmup)]
        if after:
            device.synchronize()
        return device.now_s() - start_s, sum(tokens)

    return loop


def _clock_from_the_start(
    device: EmulatedDevice, micro_batches: Tokens, steps: int, warmup: int, accumulated: int
) -> Totals:
    _, tokens = timed_loop(device, micro_batches, steps, warmup, accumulated)
    return device.now_s(), tokens


def _tokens_of_the_warmup(
    device: EmulatedDevice, micro_batches: Tokens, steps: int, warmup: int, accumulated: int
) -> Totals:
    counted: list[int] = []

    def noting() -> Tokens:
        for number in micro_batches:
            counted.append(number)
            yield number

    time_s, _ = timed_loop(device, noting(), steps, warmup, accumulated)
    return time_s, sum(counted)


def _warmup_by_micro_batch(
    device: EmulatedDevice, micro_batches: Tokens, steps: int, warmup: int, accumulated: int
) -> Totals:
    start_s, num_tokens, seen = 0.0, 0, 0
    for _ in range(steps):
        for tokens in islice(micro_batches, accumulated):
            if seen == warmup:
                device.synchronize()
                start_s = device.now_s()
            device.backward(tokens)
            num_tokens += tokens * (seen >= warmup)
            seen += 1
        device.step()
    device.synchronize()
    return device.now_s() - start_s, num_tokens


# --- the check

LAUNCHED = (
    "That is how long it took to give orders: the device works on. synchronize() before the clock "
    "is read."
)
STARTED = (
    "The clock starts while the device still works on the warm-up: synchronize() before it, too."
)
WHOLE = "The warm-up's seconds are in it: start the clock when `warmup` steps are done."
CASES = ((8, 2, 4), (6, 1, 2), (4, 1, 1))  # steps, warmup, accumulated


class _Watched(EmulatedDevice):
    """A device that records how many orders it had when its clock was read too early."""

    def __init__(self) -> None:
        super().__init__()
        self.read_busy: list[int] = []

    def now_s(self) -> float:
        if self._now_s < self._free_s:
            self.read_busy.append(len(self.orders))
        return super().now_s()


def check_steps(answer: Any) -> str:
    """Check the orders that the device got, then the tokens, then the time."""
    for steps, warmup, accumulated in CASES:
        device, batches = _Watched(), (100 + n for n in count())
        got = answer(device, batches, steps, warmup, accumulated)
        where = f"{steps} steps of {accumulated} micro-batches, warm-up {warmup}"
        _expect_orders(device.orders, steps, warmup, accumulated, where)
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise CheckFailed(f"{where}: need seconds and tokens; got {got!r}.")
        _expect_tokens(got[1], steps, warmup, accumulated, where)
        _expect_time(got[0], steps, warmup, accumulated, device, where)
    return "Steps, warm-up and tokens by the step, and a clock that waits for the device."


def _expect_orders(orders: list[str], steps: int, warmup: int, accumulated: int, at: str) -> None:
    done, passes = orders.count("step"), orders.count("backward")
    if orders == (["backward"] * accumulated + ["step"]) * steps:
        return
    says = "A step is `accumulated` backward passes, then one step of the optimizer."
    if done == steps * accumulated > steps:
        says = "The optimizer steps after each micro-batch: once after `accumulated` of them."
    elif done == steps // accumulated < steps:
        says = "`steps` counts steps of the optimizer, and you count micro-batches."
    elif done == steps + warmup:
        says = "The warm-up is the first of the steps, not more of them."
    elif passes == steps < steps * accumulated:
        says = "One micro-batch a step: it needs `accumulated` of them."
    elif done == 1 < steps:
        says = "The optimizer steps once in the whole run: once after `accumulated` micro-batches."
    raise CheckFailed(
        f"{at}: need {steps} optimizer steps and {steps * accumulated} backward passes; got "
        f"{done} and {passes}. {says}"
    )


def _sum_from(first: int, last: int) -> int:
    return sum(100 + number for number in range(first, last))


def _expect_tokens(got: Any, steps: int, warmup: int, accumulated: int, at: str) -> None:
    last = steps * accumulated
    wanted = _sum_from(warmup * accumulated, last)
    if near(got, wanted):
        return
    says = ""
    if near(got, _sum_from(0, last)):
        says = "The warm-up's tokens are counted: its seconds are not."
    elif near(got, _sum_from(warmup, last)):
        says = "The warm-up ends in the middle of a step: count it by steps, not by micro-batches."
    raise CheckFailed(f"{at}: need {wanted} tokens; got {got}. {says}".rstrip())


def _expect_time(
    got: Any, steps: int, warmup: int, accumulated: int, device: _Watched, at: str
) -> None:
    one_s = accumulated * device.backward_s + device.step_s
    wanted = (steps - warmup) * one_s
    if near(got, wanted, rel=0.02):
        return
    says = ""
    if isinstance(got, int | float):
        is_short = got < 0.05 * wanted or near(got, -warmup * one_s, rel=0.05)
        is_whole = near(got, steps * one_s, rel=0.02)
        too_early = warmup * (accumulated + 1) in device.read_busy
        whole = STARTED if too_early else WHOLE
        says = LAUNCHED if is_short else whole if is_whole else ""
    raise CheckFailed(f"{at}: need {wanted:.2f} s; got {shown(got)}. {says}".rstrip())


STEPS = Exercise(
    key="scaling_study-3",
    title="steps in one place",
    check=check_steps,
    reference=timed_loop,
    mistakes=(
        Mistake("a step each micro-batch", _every_micro_batch_steps, "steps after each micro"),
        Mistake("counts micro-batches", _counts_micro_batches, "you count micro-batches"),
        Mistake("warm-up besides", _warmup_besides, "not more of them"),
        Mistake("one micro-batch a step", _one_micro_batch, "One micro-batch a step"),
        Mistake("never steps", _never_steps, "once in the whole run"),
        Mistake("never waits", _timed(False, False), "how long it took to give orders"),
        Mistake("waits before only", _timed(True, False), "how long it took to give orders"),
        Mistake("waits after only", _timed(False, True), "still works on the warm-up"),
        Mistake("clock from the start", _clock_from_the_start, "start the clock when"),
        Mistake("tokens of the warm-up", _tokens_of_the_warmup, "warm-up's tokens are counted"),
        Mistake("warm-up by micro-batch", _warmup_by_micro_batch, "in the middle of a step"),
    ),
)
