"""What a run reads: inputs and targets, from the data and for the model that were asked for.

Batch n is a function of (seed, n) and nothing else, hidden tokens too, so every rank makes the same
whole batch and takes its part of it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from course_lib.core.errors import CourseError
from course_lib.models import mask_tokens, next_tokens
from course_lib.models.data import mixed_seed
from course_lib.models.dialogues import MASK, SPECIAL, Dialogues, load_dialogues
from course_lib.models.text import Synthetic, Text, load_shakespeare, read_text
from course_lib.train.config import TrainConfig
from course_lib.train.progress import download_bar

Batch = tuple[Tensor, Tensor]  # inputs and targets, both [batch, seq]
HIDES = 1  # what is hidden in a batch is drawn from another seed than the batch


class Examples(Protocol):
    """A stream of batches."""

    @property
    def identity(self) -> str:
        """Which data they are, and what is asked of them."""

    @property
    def vocab(self) -> int:
        """How many kinds of tokens there are."""

    @property
    def num_tokens(self) -> int | None:
        """How many tokens an epoch has; None for data without an end."""

    def batch(self, n: int, *, batch: int, seq: int, seed: int = 0) -> Batch:
        """Inputs and targets of the n-th batch."""


@dataclass(frozen=True)
class NextTokens:
    """Each token is asked for after those before it: for a GPT."""

    source: Text | Synthetic

    @property
    def identity(self) -> str:
        """Which data they are."""
        return self.source.identity

    @property
    def vocab(self) -> int:
        """How many kinds of tokens there are."""
        return self.source.vocab

    @property
    def num_tokens(self) -> int | None:
        """How many tokens the text has."""
        return None if isinstance(self.source, Synthetic) else len(self.source.tokens)

    def batch(self, n: int, *, batch: int, seq: int, seed: int = 0) -> Batch:
        """Inputs and targets of the n-th batch."""
        return next_tokens(self.source.batch(n, batch=batch, seq=seq, seed=seed))


@dataclass(frozen=True)
class HiddenTokens:
    """Some tokens are hidden, and asked for: for a BERT.

    Dialogues have a token that hides others; other data get one more for that, the last one.
    """

    source: Text | Synthetic | Dialogues

    @property
    def identity(self) -> str:
        """Which data they are, and that some of them are hidden."""
        return f"{self.source.identity}, masked"

    @property
    def vocab(self) -> int:
        """How many kinds of tokens there are, with the one that hides others."""
        return self.source.vocab + (not isinstance(self.source, Dialogues))

    @property
    def num_tokens(self) -> int | None:
        """How many tokens the data have."""
        return None if isinstance(self.source, Synthetic) else len(self.source.tokens)

    def batch(self, n: int, *, batch: int, seq: int, seed: int = 0) -> Batch:
        """Inputs and targets of the n-th batch."""
        has_mask = isinstance(self.source, Dialogues)
        tokens = self.source.batch(n, batch=batch, seq=seq, seed=seed)[:, :seq]
        return mask_tokens(
            tokens,
            torch.Generator().manual_seed(mixed_seed(seed + HIDES, n)),
            vocab=self.source.vocab,
            mask=MASK if has_mask else self.source.vocab,
            num_special=len(SPECIAL) if has_mask else 0,
        )


def open_data(config: TrainConfig) -> Examples:
    """The stream of batches that a run reads.

    Raises: CourseError for a text that cannot be read, or is too short; ShapeError
    """
    source: Text | Synthetic | Dialogues
    if config.data == "synthetic":
        source = Synthetic(config.model.vocab - config.masked)
    elif config.data == "dialogues":
        with download_bar("dialogues") as tell:
            source = load_dialogues(print, vocab=config.model.vocab, tell=tell)
    elif config.data == "shakespeare":
        with download_bar("shakespeare") as tell:
            source = load_shakespeare(print, tell=tell)
    else:
        source = read_text(config.data)
    examples: Examples
    if config.masked:
        examples = HiddenTokens(source)
    elif isinstance(source, Dialogues):
        raise CourseError("--data dialogues: need a BERT. Try --model bert-dialogues.")
    else:
        examples = NextTokens(source)
    examples.batch(0, batch=1, seq=config.seq)  # a text that is too short is told now
    return examples


def steps_of_an_epoch(examples: Examples, config: TrainConfig) -> int | None:
    """OptimizerAdapter until a run has read as many tokens as there are; None for data without an end."""
    if examples.num_tokens is None:
        return None
    return max(1, round(examples.num_tokens / (config.global_batch * config.seq)))
