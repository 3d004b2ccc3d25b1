"""Batches of a training run: inputs and targets for a GPT or a BERT, from the chosen data.

Batch n, with its masked tokens, is a function of (seed, n) and nothing else, so every rank makes
the same whole batch and takes its part of it.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from course_lib.models import mask_tokens, next_tokens
from course_lib.models.data import mixed_seed
from course_lib.models.dialogues import MASK, SPECIAL, Dialogues, load_dialogues
from course_lib.models.text import Synthetic, Text, load_shakespeare, read_text
from course_lib.train.config import TrainConfig
from course_lib.train.progress import download_bar

AnySource = Text | Synthetic | Dialogues
Batch = tuple[Tensor, Tensor]  # inputs and targets, both [batch, seq]
HIDES = 1  # what is hidden in a batch is drawn from another seed than the batch


@dataclass(frozen=True)
class Examples:
    """A stream of batches: for a GPT the target of each token is the one after it.

    masked   for a BERT: some tokens are masked, and are the targets. Dialogues have a mask token;
             other data get one more token for that, the last one
    """

    source: AnySource
    masked: bool = False

    @property
    def identity(self) -> str:
        """A description of the data and of the training task."""
        return f"{self.source.identity}, masked" if self.masked else self.source.identity

    @property
    def vocab(self) -> int:
        """The size of the vocabulary, including a mask token."""
        return self.source.vocab + (self.masked and not isinstance(self.source, Dialogues))

    @property
    def num_tokens(self) -> int | None:
        """Tokens in an epoch; None for data without an end."""
        return None if isinstance(self.source, Synthetic) else len(self.source.tokens)

    def batch(self, n: int, *, batch: int, seq: int, seed: int = 0) -> Batch:
        """Return the inputs and targets of batch n. Shapes: [batch, seq] each"""
        tokens = self.source.batch(n, batch=batch, seq=seq, seed=seed)
        if not self.masked:
            return next_tokens(tokens)
        has_mask = isinstance(self.source, Dialogues)
        return mask_tokens(
            tokens[:, :seq],
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
    sources = held_out(source) if validates else [source]
    found = [Examples(one, config.masked) for one in sources]
    for examples in found:
        examples.batch(0, batch=1, seq=config.seq)  # a text that is too short is told now
    return found[0], found[-1]


def held_out(source: AnySource) -> tuple[AnySource, AnySource]:
    """Return what is trained on, and what validates it: of a text or dialogues the last tenth.

    Synthetic tokens have no end: for validation they come from batches that no training reaches.
    """
    if isinstance(source, Synthetic):
        return source, source
    cut, more = len(source.tokens) * 9 // 10, list[dict[str, Any]]([{}, {}])
    if isinstance(source, Dialogues):
        number = len(source.starts) * 9 // 10
        cut = int(source.starts[number])
        first, last = source.starts.tensor_split([number])
        more = [{"starts": first}, {"starts": last - cut}]
    tokens = source.tokens.tensor_split([cut])
    names = f"{source.name}, first 9/10", f"{source.name}, last 1/10"
    first_part, last_part = (
        replace(source, name=names[n], tokens=tokens[n], **more[n]) for n in range(2)
    )
    return first_part, last_part


def steps_of_an_epoch(examples: Examples, config: TrainConfig) -> int | None:
    """Return the optimizer steps of one pass over all tokens of the data; None if it has no end."""
    if examples.num_tokens is None:
        return None
    return max(1, round(examples.num_tokens / (config.global_batch * config.seq)))
