"""The caller's own objects in exercise 3 of 08_pipeline, watched for changes by the engine.

A change is a pair: a word, and what was observed. Each word has its cause.
"""

import torch

from course_lib.checks.ddp.parts import count_hooks, modes_of
from course_lib.checks.exercise import Cause
from course_lib.checks.on_ranks import At
from course_lib.checks.pipeline.stages import MicroBatches, SampleStage, StepSetup, batch_of

Change = tuple[str, str]
ACTIONS = Cause("It belongs to the caller: read it, and remove nothing from it.")
PAIRS = Cause(
    "The list of micro-batches belongs to the caller: read it, and replace nothing in it."
)
BATCH = Cause(
    "The batch belongs to the caller: receive into a new tensor, torch.empty_like(x), and call "
    "requires_grad_() only on what was received."
)
WEIGHTS = Cause("Only the optimizer changes weights: leave the gradients in param.grad.")
FROZEN = Cause(
    "The caller decides what is frozen: do not change requires_grad, and leave grad None there."
)
MODE = Cause(
    "The caller sets train() and eval(): a stage, or a part of it, may be in eval mode on purpose."
)
HOOKED = Cause("A hook acts in all later steps, too: register none on the stage.")
RANDOM = Cause(
    "Other code draws from the global random state: do not use it, or use your own generator."
)


CAUSES = {
    "actions": ACTIONS,
    "pairs": PAIRS,
    "batch": BATCH,
    "weights": WEIGHTS,
    "frozen": FROZEN,
    "mode": MODE,
    "hooks": HOOKED,
    "random": RANDOM,
}


def untouched(at: At) -> None:
    """Demand that everything of the caller's is as it was."""
    for word, what in at.seen.changed:
        at.fail(what, CAUSES[word])


class Belongings:
    """What one rank's engine is given; `changes()` tells afterwards what became of it."""

    def __init__(self, rank: int, p: int, setup: StepSetup) -> None:
        self.rank, self.p, self.setup = rank, p, setup
        self.stage, self.batch = SampleStage(rank, setup), self._batch()
        self.actions = setup.make(p, setup.m)[rank]
        self._actions, self._pairs = list(self.actions), list(self.batch)
        self._hooks, self._random_state = count_hooks(self.stage), torch.get_rng_state()

    def changes(self) -> list[Change]:
        """Return what is no longer as it was."""
        seen = self._changes_of_batch() + self._changes_of_stage()
        if self.actions != self._actions:
            seen.append(("actions", "the list of actions has changed"))
        if not self._random_state.equal(torch.get_rng_state()):
            seen.append(("random", "the global random state has changed"))
        return seen

    def _batch(self) -> MicroBatches:
        return batch_of(self.setup, first=self.rank == 0, last=self.rank == self.p - 1)

    def _changes_of_batch(self) -> list[Change]:
        if len(self.batch) != len(self._pairs):
            return [("pairs", f"micro_batches has {len(self.batch)} items in the end")]
        seen: list[Change] = [
            ("pairs", f"micro_batches[{i}] is no longer the (x, target) that it was")
            for i, (pair, given) in enumerate(zip(self.batch, self._pairs, strict=True))
            if pair is not given
        ]
        for i, (pair, old_pair) in enumerate(zip(self._pairs, self._batch(), strict=True)):
            for name, now, old in zip(("x", "target"), pair, old_pair, strict=True):
                if now.requires_grad:
                    seen.append(("batch", f"{name} of micro-batch {i} now requires a gradient"))
                if not torch.equal(now.detach().nan_to_num(9.0), old.nan_to_num(9.0)):
                    seen.append(("batch", f"{name} of micro-batch {i} has changed"))
        return seen

    def _changes_of_stage(self) -> list[Change]:
        stage, fresh = self.stage, SampleStage(self.rank, self.setup)
        seen = list[Change]()
        for (name, now), old in zip(stage.named_parameters(), fresh.parameters(), strict=True):
            if now.requires_grad != old.requires_grad:
                is_now = "requires" if now.requires_grad else "no longer requires"
                seen.append(("frozen", f"the stage's {name} {is_now} a gradient"))
            elif not old.requires_grad and now.grad is not None:
                seen.append(("frozen", f"the stage's {name} is frozen, and has a gradient"))
            if not torch.equal(now, old):
                seen.append(("weights", f"the stage's {name} has changed"))
        if stage.other_modes or modes_of(stage) != stage.modes:
            when = "computed in another mode" if stage.other_modes else "is left in another mode"
            seen.append(("mode", f"the stage {when} than it was given in"))
        if count_hooks(stage) > self._hooks:
            seen.append(("hooks", "a hook stays on the stage"))
        return seen
