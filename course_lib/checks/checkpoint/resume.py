"""Exercise 3 of 14_checkpoint: save all of a trainer's state, and continue bit for bit."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from course_lib.checkpoint.small_trainer import (
    BATCH,
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    SmallTrainer,
    snapshot,
)
from course_lib.checks.edits import Edit, Own
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


@dataclass(frozen=True)
class Resumed:
    """The outcome of one answer: parts that differ after loading, and the next steps' losses."""

    text: str
    differing: tuple[str, ...]
    differing_if_copied: tuple[str, ...]
    losses: tuple[float, ...]
    need: tuple[float, ...]
    disturbed: tuple[float, ...]
    replaced: tuple[str, ...] = ()
    second: str = ""  # what a second load of the same state has led to
    no_state: bool = False


class ContinuesBitEqual:
    """Stops a training, resumes it in a new trainer, and compares with one that never stopped."""

    def observe(self, answer: Callable[[], Any]) -> Iterator[Resumed]:
        """Save after some steps, train on, and load what was saved into another trainer."""
        for after, num_samples in SAVED_AT:
            with _own_random_numbers(), little_memory():
                seen = _resumed(answer, after, num_samples)
            yield seen

    def judge(self, observed: Iterable[Resumed], exercise: Exercise) -> str:
        """Demand equal bits after loading, and of the losses that follow."""
        del exercise
        for seen in observed:
            if seen.no_state:
                raise failed(f"{seen.text}: save returns None", NO_STATE)
            if seen.disturbed != seen.need:
                raise failed(f"{seen.text}: the losses after the save differ", DISTURBED)
            if seen.differing and not seen.differing_if_copied:
                raise failed(f"{seen.text}: {seen.differing[0]} of a later step came back",
                             OVERWRITTEN)  # fmt: skip
            if seen.differing:
                what = ", ".join(seen.differing)
                raise failed(
                    f"{seen.text}: after loading, these differ: {what}", MISSING[seen.differing[0]]
                )
            if seen.replaced:
                raise failed(f"{seen.text}: after another save, this differs: {seen.replaced[0]}",
                             ELSEWHERE)  # fmt: skip
            if seen.second:
                raise failed(f"{seen.text}: loaded a second time, {seen.second}", LOADED_ONCE)
            if seen.losses != seen.need:
                raise failed(f"{seen.text}: all is there, yet the losses differ", CONNECTED)
        return "Stopped within an epoch, at its end and after one step: the same bits."


def _resumed(answer: Callable[[], Any], after: int, num_samples: int) -> Resumed:
    need = _losses(_trained(after, num_samples), MORE)
    trainer, resume = _trained(after, num_samples), answer()
    right = snapshot(trainer)
    state = resume.save(trainer)
    copied = deepcopy(state)
    disturbed = _losses(trainer, MORE)
    text = f"saved after {after} steps, {num_samples} samples"
    if state is None:
        return Resumed(text, (), (), (), need, need, no_state=True)
    differing, losses = _loaded(answer(), state, right, num_samples)
    second = "" if differing else _loaded_again(answer(), state, right, num_samples)
    if_copied, _ = _loaded(answer(), deepcopy(copied), right, num_samples)
    answer().save(trainer)  # of a later step
    replaced, _ = _loaded(answer(), copied, right, num_samples)
    return Resumed(text, differing, if_copied, losses, need, disturbed, replaced, second)


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


class _Nothing:
    def save(self, trainer: SmallTrainer) -> None:
        """Return nothing."""

    def load(self, trainer: SmallTrainer, state: None) -> None:
        """Do nothing."""


def _forgets(line: str, part: str) -> Edit:
    """Return the right answer without one line of load."""
    return Edit(line, "pass", MISSING[part])


GIVEN = "state = copy.deepcopy(state)", "given, state = state, copy.deepcopy(state)"

RESUME = Exercise(
    key="checkpoint-3",
    title="which state is missing",
    check=ContinuesBitEqual(),
    wrong=(
        _forgets('trainer.model.load_state_dict(state["model"])', "weights"),
        _forgets('trainer.optimizer.load_state_dict(state["optimizer"])', "momentum"),
        _forgets('trainer.scheduler.load_state_dict(state["scheduler"])', "schedule"),
        _forgets('torch.set_rng_state(state["torch"])', "PyTorch's random numbers"),
        _forgets('random.setstate(state["python"])', "Python's random numbers"),
        Edit(
            'trainer.epoch, trainer.position, trainer.step = state["counts"]',
            'trainer.epoch, _, trainer.step = state["counts"]',
            MISSING["position"],
        ),
        Edit(
            'trainer.epoch, trainer.position, trainer.step = state["counts"]',
            '_, trainer.position, trainer.step = state["counts"]',
            MISSING["epoch"],
        ),
        Edit(
            'trainer.epoch, trainer.position, trainer.step = state["counts"]',
            'trainer.epoch, trainer.position, _ = state["counts"]',
            MISSING["step"],
        ),
        Edit(
            'torch.set_rng_state(state["torch"])',
            "torch.manual_seed(0)",
            MISSING["PyTorch's random numbers"],
        ),
        Edit("return copy.deepcopy(state)", "return state", OVERWRITTEN),
        Edit("return copy.deepcopy(state)", "return dict(state)", OVERWRITTEN),
        Edit("state = copy.deepcopy(state)", "pass", LOADED_ONCE),
        Edit("state = copy.deepcopy(state)", "state = dict(state)", LOADED_ONCE),
        Edit('state["python"])', 'given.pop("python"))', LOADED_ONCE, also=(GIVEN,)),
        Edit(
            'trainer.epoch, trainer.position, trainer.step = state["counts"]',
            'trainer.epoch, _, trainer.step = state["counts"]\n'
            "trainer.position = 3 * (trainer.step % 4)",
            MISSING["position"],
        ),
        Edit(
            "return copy.deepcopy(state)",
            "torch.manual_seed(0)\nreturn copy.deepcopy(state)",
            DISTURBED,
        ),
        Edit(
            'trainer.optimizer.load_state_dict(state["optimizer"])',
            'trainer.optimizer = state["optimizer"]',
            BROKEN,
        ),
        Own(_Nothing, NO_STATE),
        Edit(
            "return copy.deepcopy(state)",
            "type(self).kept = copy.deepcopy(state)\nreturn {}",
            ELSEWHERE,
            also=(("state = copy.deepcopy(state)", "state = copy.deepcopy(type(self).kept)"),),
        ),
    ),
)
