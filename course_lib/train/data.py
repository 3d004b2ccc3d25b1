"""Batches of a training run: inputs and targets for a GPT or a BERT, from the chosen data.

Batch n, with its masked tokens, is a function of (seed, n) and nothing else, so every rank makes
the same whole batch and takes its part of it.
"""

from dataclasses import dataclass, replace
from functools import partial
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

AnySource = Text | Synthetic | Dialogues
Batch = tuple[Tensor, Tensor]  # inputs and targets, both [batch, seq]
HIDES = 1  # what is hidden in a batch is drawn from another seed than the batch


class Examples(Protocol):
    """A stream of batches."""

    @property
    def identity(self) -> str:
        """A description of the data and of the training task."""

    @property
    def vocab(self) -> int:
        """The size of the vocabulary."""

    @property
    def num_tokens(self) -> int | None:
        """Tokens in an epoch; None for data without an end."""

    def batch(self, n: int, *, batch: int, seq: int, seed: int = 0) -> Batch:
        """Return the inputs and targets of batch n. Shapes: [batch, seq] each"""


@dataclass(frozen=True)
class NextTokens:
    """Next-token prediction, for a GPT: the target of each token is the one after it."""

    source: Text | Synthetic

    @property
    def identity(self) -> str:
        """A description of the data."""
        return self.source.identity

    @property
    def vocab(self) -> int:
        """The size of the vocabulary."""
        return self.source.vocab

    @property
    def num_tokens(self) -> int | None:
        """Tokens in the text; None for synthetic data."""
        return None if isinstance(self.source, Synthetic) else len(self.source.tokens)

    def batch(self, n: int, *, batch: int, seq: int, seed: int = 0) -> Batch:
        """Return the inputs and targets of batch n. Shapes: [batch, seq] each"""
        return next_tokens(self.source.batch(n, batch=batch, seq=seq, seed=seed))


@dataclass(frozen=True)
class HiddenTokens:
    """Masked-token prediction, for a BERT: some tokens are masked, and are the targets.

    Dialogues have a mask token; other data get one more token for that, the last one.
    """

    source: Text | Synthetic | Dialogues

    @property
    def identity(self) -> str:
        """A description of the data, with the word `masked`."""
        return f"{self.source.identity}, masked"

    @property
    def vocab(self) -> int:
        """The size of the vocabulary, including the mask token."""
        return self.source.vocab + (not isinstance(self.source, Dialogues))

    @property
    def num_tokens(self) -> int | None:
        """Tokens in the data; None for synthetic data."""
        return None if isinstance(self.source, Synthetic) else len(self.source.tokens)

    def batch(self, n: int, *, batch: int, seq: int, seed: int = 0) -> Batch:
        """Return the inputs and targets of batch n. Shapes: [batch, seq] each"""
        has_mask = isinstance(self.source, Dialogues)
        tokens = self.source.batch(n, batch=batch, seq=seq, seed=seed)[:, :seq]
        return mask_tokens(
            tokens,
            torch.Generator().manual_seed(mixed_seed(seed + HIDES, n)),
            vocab=self.source.vocab,
            mask=MASK if has_mask else self.source.vocab,
            num_special=len(SPECIAL) if has_mask else 0,
        )


def open_data(config: TrainConfig) -> tuple[Examples, Examples]:
    """Open the data of a run as a stream of batches, and another one for validation.

    Raises: CourseError for a text that cannot be read, or is too short; ShapeError
    """
    source: AnySource
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
    validates = bool(config.eval_every or config.eval_only)
    found = tuple(map(partial(_examples, config), held_out(source) if validates else [source]))
    for examples in found:
        examples.batch(0, batch=1, seq=config.seq)  # a text that is too short is told now
    return found[0], found[-1]


def held_out(source: AnySource) -> tuple[AnySource, AnySource]:
    """Return what is trained on, and what validates it: of a text or dialogues the last tenth.

    Synthetic tokens have no end: for validation they come from batches that no training reaches.
    """
    if isinstance(source, Synthetic):
        return source, source
    names = f"{source.name}, first 9/10", f"{source.name}, last 1/10"
    if isinstance(source, Text):
        cut = len(source.tokens) * 9 // 10
        parts: list[AnySource] = [
            replace(source, name=name, tokens=tokens)
            for name, tokens in zip(names, source.tokens.tensor_split([cut]), strict=True)
        ]
    else:
        number = len(source.starts) * 9 // 10
        cut = int(source.starts[number])
        ends = source.starts.tensor_split([number])
        parts = [
            replace(source, name=name, tokens=tokens, starts=starts - first)
            for name, tokens, starts, first in zip(
                names, source.tokens.tensor_split([cut]), ends, (0, cut), strict=True
            )
        ]
    return parts[0], parts[1]


def _examples(config: TrainConfig, source: AnySource) -> Examples:
    if config.masked:
        return HiddenTokens(source)
    if isinstance(source, Dialogues):
        raise CourseError("--data dialogues: need a BERT. Try --model bert-dialogues.")
    return NextTokens(source)


def steps_of_an_epoch(examples: Examples, config: TrainConfig) -> int | None:
    """Return the optimizer steps of one pass over all tokens of the data; None if it has no end."""
    if examples.num_tokens is None:
        return None
    return max(1, round(examples.num_tokens / (config.global_batch * config.seq)))
