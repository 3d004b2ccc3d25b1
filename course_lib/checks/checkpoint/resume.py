"""Exercise 3 of 14_checkpoint: save all of a trainer's state, and continue bit for bit."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from course_lib.checkpoint.small_trainer import (
    BATCH,
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    SmallTrainer,
    snapshot,
)
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, described, failed
from course_lib.checks.limits import little_memory

# steps before the save, and samples: within an epoch first, then its end, then longer epochs
SAVED_AT = (
    (STEPS_PER_EPOCH + 1, NUM_SAMPLES),
    (1, NUM_SAMPLES),
    (2 * STEPS_PER_EPOCH, NUM_SAMPLES),
    (STEPS_PER_EPOCH, NUM_SAMPLES + BATCH),
)
MORE = 3  # steps that are compared

MISSING = {
    "weights": Cause("The new trainer has other weights: the model's state is missing."),
    "momentum": Cause("The momentum is another one: the optimizer has a state_dict of its own."),
    "schedule": Cause("The learning rate's schedule goes on elsewhere: save the scheduler."),
    "epoch": Cause("The order of the samples is drawn from the epoch's number: save the epoch."),
    "position": Cause(
        "The epoch goes on at another sample: it repeats some, or leaves some out. Save the "
        "sampler's position; the number of steps alone does not tell it."
    ),
    "PyTorch's random numbers": Cause(
        "Dropout would draw other masks: save torch.get_rng_state(), and restore it last in load."
    ),
    "Python's random numbers": Cause(
        "The samples would be stretched by other factors: save random.getstate(), and restore it "
        "last in load."
    ),
    "step": Cause("The number of steps is another one: it says when to save and when to stop."),
}
OVERWRITTEN = Cause(
    "The saved state has changed while training went on: state_dict() refers to the tensors that "
    "the next step overwrites. Copy them, as an asynchronous save has to."
)
DISTURBED = Cause("Saving changes the training itself: read the state, and leave it as it is.")
LOADED_ONCE = Cause(
    "load leaves the saved state as it is, for the next load: take nothing out of it, and load a "
    "copy (an optimizer keeps the tensors that it is given, and training overwrites them)."
)
BROKEN = Cause(
    "Let the trainer keep its own model, optimizer and scheduler, which load_state_dict fills; "
    "epoch, position and step are numbers."
)
ELSEWHERE = Cause(
    "A later save has replaced what this one saved: keep all of the state in what save returns."
)
NO_STATE = Cause("save has to return the state, because load gets what save returned.")
CONNECTED = Cause(
    "Does the optimizer update this model (in train mode), and the scheduler this optimizer?"
)


Complaint = tuple[str, Cause] | None


class ContinuesBitEqual:
    """Stops a training, resumes it in a new trainer, and compares with one that never stopped."""

    def observe(self, answer: Callable[[], Any]) -> Iterator[Complaint]:
        """Save after some steps, train on, load into another trainer; yield what is wrong."""
        for after, num_samples in SAVED_AT:
            with _own_random_numbers(), little_memory():
                complaint = _complaint(answer, after, num_samples)
            where = f"saved after {after} steps, {num_samples} samples"
            yield complaint and (f"{where}: {complaint[0]}", complaint[1])

    def judge(self, observed: Iterable[Complaint], exercise: Exercise) -> str:
        """Demand equal bits after loading, and of the losses that follow."""
        del exercise
        for complaint in observed:
            if complaint:
                raise failed(*complaint)
        return "Stopped within an epoch, at its end and after one step: the same bits."


def _complaint(answer: Callable[[], Any], after: int, num_samples: int) -> Complaint:
    """Return the first thing that is wrong with an answer, and its cause."""
    need = _losses(_trained(after, num_samples), MORE)
    trainer = _trained(after, num_samples)
    right = snapshot(trainer)
    state = answer().save(trainer)
    copied = deepcopy(state)
    if state is None:
        return "save returns None", NO_STATE
    if _losses(trainer, MORE) != need:
        return "the losses after the save differ", DISTURBED
    differing, losses = _loaded(answer(), state, right, num_samples)
    if differing:
        if not _loaded(answer(), deepcopy(copied), right, num_samples)[0]:
            return f"{differing[0]} of a later step came back", OVERWRITTEN
        return f"after loading, these differ: {', '.join(differing)}", MISSING[differing[0]]
    second = _loaded_again(answer(), state, right, num_samples)
    answer().save(trainer)  # of a later step
    replaced, _ = _loaded(answer(), copied, right, num_samples)
    if replaced:
        return f"after another save, this differs: {replaced[0]}", ELSEWHERE
    if second:
        return f"loaded a second time, {second}", LOADED_ONCE
    return None if losses == need else ("all is there, yet the losses differ", CONNECTED)


def _loaded(
    resume: Any, state: Any, right: dict[str, str], num_samples: int
) -> tuple[tuple[str, ...], Any]:
    new = SmallTrainer(seed=1, num_samples=num_samples)  # other weights, other random numbers
    resume.load(new, state)
    try:
        found, losses = snapshot(new), _losses(new, MORE)
    except Exception as error:
        raise failed(f"after load, training raised {described(error)}", BROKEN) from None
    return tuple(name for name in right if found[name] != right[name]), losses


def _loaded_again(resume: Any, state: Any, right: dict[str, str], num_samples: int) -> str:
    """Return what is wrong after a second load of the same state; empty where nothing is."""
    try:
        differing, _ = _loaded(resume, state, right, num_samples)
    except Exception as error:
        return f"your code raised {described(error)}"
    return f"these differ: {', '.join(differing)}" if differing else ""


def _trained(steps: int, num_samples: int) -> SmallTrainer:
    trainer = SmallTrainer(0, num_samples)
    _losses(trainer, steps)
    return trainer


def _losses(trainer: SmallTrainer, steps: int) -> tuple[float, ...]:
    return tuple(trainer.train_step() for _ in range(steps))


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Leave the random numbers of the caller as they are."""
    before = random.getstate()
    with torch.random.fork_rng(devices=()):
        yield
    random.setstate(before)


LOAD_MODEL = 'trainer.model.load_state_dict(state["model"])'
LOAD_OPTIMIZER = 'trainer.optimizer.load_state_dict(state["optimizer"])'
LOAD_SCHEDULER = 'trainer.scheduler.load_state_dict(state["scheduler"])'
COUNTS = 'trainer.epoch, trainer.position, trainer.step = state["counts"]'
SET_TORCH, SET_PYTHON = 'torch.set_rng_state(state["torch"])', 'random.setstate(state["python"])'
FROM_STEP = "trainer.position = 3 * (trainer.step % 4)"
RETURN, TAKES = "return copy.deepcopy(state)", "state = copy.deepcopy(state)"

RESUME = Exercise(
    key="checkpoint-3",
    title="which state is missing",
    check=ContinuesBitEqual(),
    wrong=(
        Edit(LOAD_MODEL, "pass", MISSING["weights"]),
        Edit(LOAD_OPTIMIZER, "pass", MISSING["momentum"]),
        Edit(LOAD_SCHEDULER, "pass", MISSING["schedule"]),
        Edit(SET_TORCH, "pass", MISSING["PyTorch's random numbers"]),
        Edit(SET_PYTHON, "pass", MISSING["Python's random numbers"]),
        Edit(COUNTS, COUNTS.replace("trainer.position", "_"), MISSING["position"]),
        Edit(COUNTS, COUNTS.replace("trainer.epoch", "_"), MISSING["epoch"]),
        Edit(COUNTS, COUNTS.replace("trainer.step", "_"), MISSING["step"]),
        Edit(COUNTS, f"{COUNTS}\n{FROM_STEP}", MISSING["position"]),
        Edit(RETURN, "return state", OVERWRITTEN),
        Edit(TAKES, "pass", LOADED_ONCE),
        Edit(RETURN, f"torch.manual_seed(0)\n{RETURN}", DISTURBED),
        Edit(LOAD_OPTIMIZER, 'trainer.optimizer = state["optimizer"]', BROKEN),
        Edit(RETURN, "pass", NO_STATE),
        Edit(
            RETURN,
            "type(self).kept = copy.deepcopy(state)\nreturn {}",
            ELSEWHERE,
            also=((TAKES, "state = copy.deepcopy(type(self).kept)"),),
        ),
    ),
)
