"""Exercise 5 of 01_memory: the peak of a step, from the bytes of its layers."""

from random import Random

from course_lib.checks.cases import Case, Cases, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise


def _cases() -> list[Case]:
    # activations in powers of 10, gradients in odd ones: a sum tells which layers are in it
    return _described(
        (1000, [70], [3], 1),
        (1000, [3], [70], 1),
        (1000, [100, 20, 3], [7, 5, 1], 1),
        (1000, [1, 20, 300], [5, 400, 2], 1),  # inside backward: layer 2 frees 300, keeps 2
        (1000, [20, 1, 30], [900, 5, 2], 1),  # at the end of backward
        (1000, [20, 50, 4], [3, 11, 90], 1),  # inside backward, after the last layer
        (0, [100, 20, 3], [7, 5, 1], 2),
        (1000, [1, 20, 300], [5, 400, 2], 2),
        (1000, [100, 20, 3], [7, 5, 1], 5),
        (20, [3, 3, 3], [50, 60, 70], 3),
        (0, [3, 5], [7, 7], 1),  # equal gradients belong to different layers
        (0, [0, 5], [40, 7], 1),  # a layer that keeps nothing has gradients, too
        (0, [5, 30, 30], [60, 0, 0], 1),  # a frozen layer frees its activations, too
        (16 * 10**9, [400_000_001] * 32, [436_000_003] * 32, 8),
    )


def _described(*several: tuple[int, list[int], list[int], int]) -> list[Case]:
    return [
        (
            f"states {states:,}, {_short('activations', acts)}, {_short('gradients', grads)}, "
            f"{count} micro-batch{'es' if count > 1 else ''}",
            (states, acts, grads, count),
        )
        for states, acts, grads, count in several
    ]


def _short(what: str, sizes: list[int]) -> str:
    many = len(sizes) > 4
    return f"{what} {len(sizes)} times {sizes[0]:,}" if many else f"{what} {sizes}"


def _drawn(random: Random) -> list[Case]:
    def one(count: int) -> tuple[int, list[int], list[int], int]:
        layers = random.randint(3, 7)
        acts, grads = ([random.randint(1, 999) for _ in range(layers)] for _ in range(2))
        return random.randint(1, 9999), acts, grads, count

    return _described(*(one(count) for count in (1, 1, 3)))


BEGIN = Cause("That is the start of backward, but memory may still grow: count after each layer.")
ONE_MICRO_BATCH = Cause("A layer's gradients come when its activations are freed: not all at once.")
STAY = Cause("Gradients stay until the step: later micro-batches run beside all of the first's.")
START = Cause("The start of backward counts: all activations are there, no gradient yet.")
SAME_MEMORY = Cause("The second micro-batch adds to the same gradients: they take no new memory.")
BACKWARDS = Cause("Backward goes from the last layer to the first.")
ONE_AT_A_TIME = Cause("Each backward frees its activations before the next forward.")
STATES = Cause("The states are there all the time.")
NO_GRADIENTS = Cause("The gradients are missing: they come in backward, and stay until the step.")
ALL_LAYERS = Cause("At the end of forward the activations of all layers are there.")
EACH_LAYER = Cause("Go by number: sizes may be equal, or 0 (a frozen layer has no gradients).")
UNCHANGED = Cause("The lists belong to the caller: reversed(acts) leaves them as they are.")
MOST, FREED = "            most = max(most, kept + held)\n", "            kept -= act\n"
GROWS, RETURN = "            held += new if micro_batch == 0 else 0\n", "return states + most"

PEAK = Exercise(
    key="memory-5",
    title="where the peak is",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=whole,
        rtol=0.0,
        unit=" bytes",
        unchanged=UNCHANGED,
        look="Write down what is held after each layer, forward and backward, for this case.",
        success="1 micro-batch: where backward begins, or later; more: where backward 2 begins.",
    ),
    wrong=(
        Edit(MOST, "", BEGIN),
        Edit(MOST[4:] + "        for", "        for", START),
        Edit("new if micro_batch == 0 else 0", "new", SAME_MEMORY),
        Edit("reversed(acts), reversed(grads)", "acts, grads", BACKWARDS),
        Edit("range(num_micro_batches)", "range(1)", STAY),
        Edit("kept = sum(acts)", "kept = sum(acts) * num_micro_batches", ONE_AT_A_TIME),
        Edit(RETURN, "return most", STATES),
        Edit(RETURN, "return states + sum(acts) + sum(grads)", ONE_MICRO_BATCH),
        Edit(FREED, "", ONE_MICRO_BATCH),
        Edit(GROWS, "", NO_GRADIENTS),
        Edit("        kept = sum(acts)", "        kept, held = sum(acts), 0", STAY),
        Edit("kept = sum(acts)", "kept = max(acts)", ALL_LAYERS),
        Edit(FREED, "            kept -= act if new else 0\n", EACH_LAYER),
        Edit(FREED, "            kept -= acts[grads.index(new)]\n", EACH_LAYER),
        Edit("reversed(acts)", "(acts.reverse() or acts)", UNCHANGED),
    ),
)
