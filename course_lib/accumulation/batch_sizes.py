"""Experiment of notebook 02_accumulation: steps to a loss by batch size, and the noise on the way.

The model is a small bigram language model: an embedding and an output matrix. Its data come from a
known distribution, so that loss, gradient and noise can also be computed exactly. Tokens have
frequencies like 1 / rank, as words do (Zipf's law); an example is a token and its successor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.accumulation.noise_scale import NoiseEstimate, accumulate_with_noise, noise_scale
from course_lib.models.data import mixed_seed

VOCAB, HIDDEN, INIT_STD = 64, 16, 0.1
FOLLOWS = 0.75  # probability that the next token is given by the rule
RATES = tuple(2.0**n for n in range(-3, 5))
SEEDS = (0, 1, 2, 3, 4)


class Bigram(nn.Module):
    """Bigram language model: logits of the next token from the present one alone."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        embedding, head = _initial(seed)
        self.embedding, self.head = nn.Parameter(embedding), nn.Parameter(head)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits: [batch] -> [batch, vocab]."""
        return F.embedding(tokens, self.embedding) @ self.head


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Steps to a loss by batch size and seed, each with the learning rate that needs fewest."""

    batches: tuple[int, ...]
    rates: tuple[float, ...]
    steps: tuple[tuple[float, ...], ...]

    def mean_steps(self) -> list[float]:
        """Return the mean number of steps over the seeds, by batch size."""
        return [sum(each) / len(each) for each in self.steps]

    def examples(self) -> list[list[float]]:
        """Return the number of examples by batch size and seed."""
        return [
            [batch * steps for steps in each]
            for batch, each in zip(self.batches, self.steps, strict=True)
        ]


def token_pairs(num: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens and their successors: [num] twice."""
    tokens = torch.multinomial(_frequencies(), num, replacement=True, generator=random)
    follows = torch.rand(num, generator=random) < FOLLOWS
    other = torch.randint(VOCAB, (num,), generator=random)
    return tokens, torch.where(follows, _rule(tokens), other)


def exact_loss(embedding: Tensor, head: Tensor) -> Tensor:
    """Return the expected loss over the distribution of the data: [..., vocab, hidden] -> [...]."""
    log_p = torch.log_softmax(embedding @ head, dim=-1)
    return -(_joint() * log_p).sum(dim=(-2, -1))


def exact_noise(model: Bigram) -> NoiseEstimate:
    """Return |G|^2 and tr(Sigma) of one example's gradient, from the distribution of the data.

    An example with the embedding e and the error d = softmax - one-hot has the gradients d U^T of
    its embedding and e d^T of the output matrix U.
    """
    with torch.no_grad():
        embedding, head = model.embedding, model.head
        p = torch.softmax(embedding @ head, dim=-1)
        errors = p[:, None, :] - torch.eye(VOCAB)  # [token, successor, vocab]
        of_embedding = (errors @ head.T).pow(2).sum(-1)
        of_head = embedding.pow(2).sum(-1)[:, None] * errors.pow(2).sum(-1)
        mean_sq = (_joint() * (of_embedding + of_head)).sum()
        mean_error = (_joint()[..., None] * errors).sum(1)  # [token, vocab]
        grad_sq = (mean_error @ head.T).pow(2).sum() + (embedding.T @ mean_error).pow(2).sum()
    return NoiseEstimate(grad_sq=grad_sq.item(), noise=(mean_sq - grad_sq).item())


def steps_to_loss(
    target: float,
    batches: Sequence[int],
    *,
    rates: Sequence[float] = RATES,
    seeds: Sequence[int] = SEEDS,
    max_steps: int = 4000,
) -> Sweep:
    """Train with SGD until the exact loss is at the target; return the steps by batch size.

    For each batch size, all learning rates are tried with all seeds, and the rate with the smallest
    mean number of steps counts (inf if some seed does not arrive).
    """
    best_rates, best_steps = [], []
    for batch in batches:
        steps = _steps_of_rates(target, batch, rates, seeds, max_steps)
        best = int(steps.mean(dim=1).argmin())
        best_rates.append(rates[best])
        best_steps.append(tuple(steps[best].tolist()))
    return Sweep(batches=tuple(batches), rates=tuple(best_rates), steps=tuple(best_steps))


@dataclass(frozen=True, kw_only=True)
class NoisePoint:
    """Noise of one step: as micro-batches estimate it, as it truly is, and the exact loss."""

    estimate: NoiseEstimate
    exact: NoiseEstimate
    loss: float


def noise_on_the_way(
    target: float,
    *,
    seed: int = 0,
    batch: int = 256,
    num_micro_batches: int = 16,
    rate: float = 8.0,
    max_steps: int = 400,
) -> list[NoisePoint]:
    """Train with SGD until the exact loss is at the target; return the noise at every step."""
    model, random = Bigram(seed), torch.Generator().manual_seed(mixed_seed(seed, batch))
    optimizer, points = torch.optim.SGD(model.parameters(), lr=rate), list[NoisePoint]()
    for _ in range(max_steps):
        loss = exact_loss(model.embedding.detach(), model.head.detach()).item()
        if loss <= target:
            break
        exact, pairs = exact_noise(model), token_pairs(batch, random)
        estimate = accumulate_with_noise(model, F.cross_entropy, pairs, num_micro_batches)
        points.append(NoisePoint(estimate=estimate, exact=exact, loss=loss))
        optimizer.step()
    return points


def noise_windows(
    runs: Sequence[Sequence[NoisePoint]], steps: int = 5
) -> list[tuple[float, float, list[float]]]:
    """Return the middle step, the exact noise scale, and each run's estimate, by window of steps.

    Windows that the shortest run does not fill are left out.
    """
    windows = []
    for start in range(0, min(map(len, runs)) - steps + 1, steps):
        parts = [run[start : start + steps] for run in runs]
        exact = noise_scale(point.exact for part in parts for point in part)
        seen = [noise_scale(point.estimate for point in part) for part in parts]
        windows.append((start + (steps + 1) / 2, exact, seen))
    return windows


def _steps_of_rates(
    target: float, batch: int, rates: Sequence[float], seeds: Sequence[int], max_steps: int
) -> Tensor:
    """Return the steps of every rate and seed, [rates, seeds]; inf where the loss is not reached.

    All models train at once, as one batched matrix product; a slow rate is given up after 1.5 times
    the steps of the best one.
    """
    first = [_initial(seed) for seed in seeds] * len(rates)
    embedding = torch.stack([pair[0] for pair in first]).requires_grad_()
    head = torch.stack([pair[1] for pair in first]).requires_grad_()
    rate = torch.tensor(rates).repeat_interleave(len(seeds))[:, None, None]
    model = torch.arange(len(first))[:, None]
    random = torch.Generator().manual_seed(mixed_seed(seeds[0], batch))
    steps = torch.full((len(first),), torch.inf)
    for step in range(1, max_steps + 1):
        pairs = token_pairs(len(first) * batch, random)
        inputs, targets = (part.view(len(first), batch) for part in pairs)
        logits = embedding[model, inputs] @ head  # [model, batch, vocab]
        summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        grads = torch.autograd.grad(summed / batch, [embedding, head])
        with torch.no_grad():
            embedding -= rate * grads[0]
            head -= rate * grads[1]
            steps[(exact_loss(embedding, head) <= target) & steps.isinf()] = step
        if step >= 1.5 * steps.view(len(rates), -1).mean(dim=1).min():
            break
    return steps.view(len(rates), -1)


def _initial(seed: int) -> tuple[Tensor, Tensor]:
    """Return the embedding and the output matrix at the start."""
    random = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCAB, HIDDEN, generator=random) * INIT_STD
    return embedding, torch.randn(HIDDEN, VOCAB, generator=random) / HIDDEN**0.5


def _rule(tokens: Tensor) -> Tensor:
    return (5 * tokens + 1) % VOCAB


def _frequencies() -> Tensor:
    weights = 1 / torch.arange(1, VOCAB + 1)
    return weights / weights.sum()


def _joint() -> Tensor:
    """Return the probability of each pair of a token and its successor: [vocab, vocab]."""
    successor = torch.full((VOCAB, VOCAB), (1 - FOLLOWS) / VOCAB)
    successor[torch.arange(VOCAB), _rule(torch.arange(VOCAB))] += FOLLOWS
    return _frequencies()[:, None] * successor
