"""Text, one token per character: Shakespeare's plays from the web, or any text file.

Batch n is a function of (seed, n) and nothing else, as for `token_batch`: any number of ranks reads
the same batches, and a restarted run continues exactly where it stopped. Without a network,
`load_shakespeare` generates text instead, and says so.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from course_lib.core.errors import CourseError, ShapeError
from course_lib.models.data import mixed_seed, token_batch
from course_lib.models.download import Tell, WebFile, fetch

# 40,000 lines of the plays (public domain), as prepared for char-rnn; the commit never changes
_COMMIT = "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
_PLACE = f"karpathy/char-rnn/{_COMMIT}/data/tinyshakespeare/input.txt"
SHAKESPEARE = WebFile(
    name="tinyshakespeare.txt",
    urls=(
        f"https://raw.githubusercontent.com/{_PLACE}",
        f"https://cdn.jsdelivr.net/gh/{_PLACE.replace('char-rnn/', 'char-rnn@')}",
    ),
    num_bytes=1_115_394,
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)


@dataclass(frozen=True)
class Text:
    """A text from which batches are drawn; token i is the i-th of its sorted characters."""

    name: str
    digest: str  # the first digits of its SHA-256
    characters: str
    tokens: Tensor = field(repr=False)  # [length]

    @classmethod
    def of(cls, text: str, name: str = "text") -> "Text":
        """Tokenize a text.

        Raises: CourseError for an empty text
        """
        if not text:
            raise CourseError(f"{name}: need a text; it is empty.")
        points = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.int64)
        characters, tokens = torch.from_numpy(points).unique(return_inverse=True)  # sorted
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return cls(name, digest, "".join(map(chr, characters.tolist())), tokens)

    @property
    def identity(self) -> str:
        """Name and digest, by which a restarted run recognizes the same text."""
        return f"{self.name} {self.digest}"

    @property
    def vocab(self) -> int:
        """Number of different characters."""
        return len(self.characters)

    def batch(self, n: int, *, batch: int, seq: int, seed: int = 0) -> Tensor:
        """Return the n-th batch: sequences that start at random characters of the text.

        Shapes:  -> [batch, seq + 1]; the targets are the inputs shifted by one (see `next_tokens`)
        Raises:  ShapeError for a size below 1, a negative n, or a text of seq characters or less
        """
        if min(batch, seq) < 1 or n < 0:
            raise ShapeError(
                f"Text.batch: need batch, seq >= 1 and n >= 0; got {batch, seq} and {n}."
            )
        starts = len(self.tokens) - seq
        if starts < 1:
            raise ShapeError(
                f"{self.name}: need more than seq = {seq} characters; got {len(self.tokens)}. "
                "Try a shorter seq."
            )
        random = torch.Generator().manual_seed(mixed_seed(seed, n))
        first = torch.randint(starts, (batch, 1), generator=random)
        return self.tokens[first + torch.arange(seq + 1)]

    def decode(self, tokens: Tensor) -> str:
        """Return the text of tokens [length]."""
        return "".join(self.characters[token] for token in tokens.tolist())


@dataclass(frozen=True)
class Synthetic:
    """Generated tokens (`token_batch`) with the methods of a `Text`."""

    vocab: int
    identity: str = "synthetic"

    def batch(self, n: int, *, batch: int, seq: int, seed: int = 0) -> Tensor:
        """Return the n-th batch of tokens.

        Shapes:  -> [batch, seq + 1]
        Raises:  ShapeError for a size below 1, or a negative n
        """
        return token_batch(n, batch=batch, seq=seq, vocab=self.vocab, seed=seed)


def read_text(path: str | Path) -> Text:
    """Read and tokenize a text file in UTF-8.

    Raises: CourseError for a file that cannot be read
    """
    path = Path(path)
    try:
        return Text.of(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as problem:
        what = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8"
        raise CourseError(f"{path}: need a text file that can be read ({what}).") from problem


def load_shakespeare(
    say: Callable[[str], None],
    *,
    file: WebFile = SHAKESPEARE,
    folder: Path | None = None,
    tell: Tell = lambda *_: None,
) -> Text:
    """Load the plays; without a network generate text, and tell `say` so in one line.

    `tell(bytes so far, bytes in all)` is called during the download.
    """
    try:
        path = fetch(file, folder=folder, tell=tell)
    except CourseError as problem:
        say(f"{problem} Going on with generated text instead.")
        return Text.of(generated_text(), "generated")
    return Text.of(path.read_text(encoding="utf-8"), file.name)


_WHO = ("the king", "a fool", "my lord", "the widow", "thy brother", "a soldier", "the night")
_DOES = ("loves", "fears", "will forgive", "hath forgot", "must follow", "doth call", "mourns")
_HOW = ("no more", "in haste", "with a heavy heart", "ere the morning", "for a penny", "alone")
_SPEAKERS = ("FIRST CLERK", "SECOND CLERK", "OLD MAN", "MESSENGER")


def generated_text(num_speeches: int = 4000, seed: int = 0) -> str:
    """Generate speeches from a few words, about 80 characters each; one seed, one text."""
    random = Random(seed)
    speeches = []
    for _ in range(num_speeches):
        sentence = f"{random.choice(_WHO)} {random.choice(_DOES)} {random.choice(_WHO)}"
        ending = random.choice(_HOW) + random.choice(".!?")
        speeches.append(f"{random.choice(_SPEAKERS)}:\n{sentence.capitalize()} {ending}\n")
    return "\n".join(speeches)
