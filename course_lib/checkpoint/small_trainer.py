"""A training with all the kinds of state that real ones have, small enough to compare bit by bit.

What is not in a checkpoint starts again after a resume, and mostly no error is raised: the loss
goes on, with other numbers. `snapshot` says which part differs. Notebook 14_checkpoint.
"""

import random
from hashlib import sha256

import torch
from torch import nn

NUM_SAMPLES, BATCH = 12, 3
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH


class SmallTrainer:
    """Trains a network on 12 samples, or another number of them.

    model            has dropout, which draws from PyTorch's random numbers
    optimizer        SGD with momentum
    scheduler        halves the learning rate every 3 steps
    epoch, position  of the sampler: an epoch's order is drawn from its number, and `position`
                     samples of it have been used
    step             steps taken
    """

    def __init__(self, seed: int, num_samples: int = NUM_SAMPLES) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.epoch = self.position = self.step = 0
        data = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(num_samples, 4, generator=data)
        self._targets = self._inputs.sum(1, keepdim=True).sin()

    def train_step(self) -> float:
        """Train on the next batch, stretched by up to 10 % at random; return the loss."""
        shuffled = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self._inputs), generator=shuffled)
        batch = order[self.position : self.position + BATCH]
        stretched = self._inputs[batch] * (1 + 0.1 * random.random())
        loss = nn.functional.mse_loss(self.model(stretched), self._targets[batch])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step, self.position = self.step + 1, self.position + BATCH
        if self.position == len(self._inputs):
            self.epoch, self.position = self.epoch + 1, 0
        return loss.item()


def snapshot(trainer: SmallTrainer) -> dict[str, str]:
    """Return a fingerprint of each part of the state, by name; equal ones have equal bits."""
    state = trainer.optimizer.state
    momentum = [state[param].get("momentum_buffer") for param in trainer.model.parameters()]
    parts = {
        "weights": [param.tolist() for param in trainer.model.parameters()],
        "momentum": [None if one is None else one.tolist() for one in momentum],
        "schedule": (trainer.scheduler.last_epoch, trainer.scheduler.get_last_lr()),
        "epoch": trainer.epoch,
        "position": trainer.position,
        "PyTorch's random numbers": torch.get_rng_state().tolist(),
        "Python's random numbers": random.getstate(),
        "step": trainer.step,
    }
    return {name: sha256(repr(value).encode()).hexdigest()[:8] for name, value in parts.items()}
