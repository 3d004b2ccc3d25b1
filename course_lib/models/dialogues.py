"""Film dialogues, one token per word: the Cornell movie-dialogs corpus, or generated ones.

304,713 utterances of 617 films (Danescu-Niculescu-Mizil and Lee 2011). The corpus names no license,
so it is downloaded into the learner's own cache, and no line of it is part of this course. Batch n
is a function of (seed, n) and nothing else, as for `Text`. Notebook 10_fsdp.
"""

import hashlib
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from course_lib.core.errors import CourseError, ShapeError
from course_lib.models.data import mixed_seed
from course_lib.models.download import Tell, WebFile, fetch

# size and SHA-256 as other public loaders of the corpus have them written down
CORNELL = WebFile(
    name="cornell_movie_dialogs_corpus.zip",
    urls=(
        "https://www.cs.cornell.edu/~cristian/data/cornell_movie_dialogs_corpus.zip",
        "https://people.mpi-sws.org/~cristian/data/cornell_movie_dialogs_corpus.zip",
    ),
    num_bytes=9_916_637,
    sha256="3bde8a571f615201bc2d2453e22878090719638592f774720eddec739de8c900",
)
FOLDER, SEPARATOR, ENCODING = "cornell movie-dialogs corpus", " +++$+++ ", "latin-1"
SPECIAL = ("[UNK]", "[MASK]", "[CLS]", "[SEP]")  # the first tokens
UNK, MASK, CLS, SEP = range(len(SPECIAL))
VOCAB = 17_200  # of the preset bert-dialogues

Conversation = list[str]  # its utterances, in order


@dataclass(frozen=True)
class Dialogues:
    """Conversations as one sequence of tokens: [CLS] before each, [SEP] after each utterance.

    Token i is `words[i]`: first the special ones, then words by descending frequency. A word that
    is not among them is [UNK].
    """

    name: str
    digest: str  # the first digits of the SHA-256 of all words
    words: tuple[str, ...] = field(repr=False)
    tokens: Tensor = field(repr=False)  # [length]
    starts: Tensor = field(repr=False)  # where utterances begin, [utterances]

    @classmethod
    def of(
        cls, conversations: Iterable[Conversation], name: str = "own", vocab: int = VOCAB
    ) -> "Dialogues":
        """Tokenize conversations, with a vocabulary of at most `vocab` tokens.

        Raises: CourseError without an utterance; ShapeError for a vocabulary without a word
        """
        if vocab <= len(SPECIAL):
            raise ShapeError(f"Dialogues: need a vocab above {len(SPECIAL)}; got {vocab}.")
        split = [[words_of(utterance) for utterance in one] for one in conversations]
        counts = Counter(chain.from_iterable(chain.from_iterable(split)))
        if not counts:
            raise CourseError(f"{name}: need conversations with words; there are none.")
        known = sorted(counts, key=lambda word: (-counts[word], word))[: vocab - len(SPECIAL)]
        words = (*SPECIAL, *known)
        number = {word: token for token, word in enumerate(words)}
        tokens: list[int] = []
        starts: list[int] = []
        for one in split:
            for index, utterance in enumerate(filter(None, one)):
                starts.append(len(tokens))
                tokens += [CLS] * (index == 0)
                tokens += [number.get(word, UNK) for word in utterance] + [SEP]
        digest = hashlib.sha256(repr(split).encode()).hexdigest()[:12]
        return cls(name, digest, words, torch.tensor(tokens), torch.tensor(starts))

    @property
    def identity(self) -> str:
        """Name and digest, by which a restarted run recognizes the same data."""
        return f"{self.name} {self.digest}"

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return len(self.words)

    def batch(self, n: int, *, batch: int, seq: int, seed: int = 0) -> Tensor:
        """Return the n-th batch: sequences that begin at random utterances.

        Shapes:  -> [batch, seq]; `mask_tokens` chooses what to predict
        Raises:  ShapeError for a size below 1, a negative n, or fewer than seq tokens in all
        """
        if min(batch, seq) < 1 or n < 0:
            raise ShapeError(
                f"Dialogues.batch: need batch, seq >= 1 and n >= 0; got {batch, seq} and {n}."
            )
        if len(self.tokens) < seq:
            raise ShapeError(
                f"{self.name}: need at least seq = {seq} tokens; got {len(self.tokens)}. "
                "Try a shorter seq."
            )
        random = torch.Generator().manual_seed(mixed_seed(seed, n))
        chosen = torch.randint(len(self.starts), (batch, 1), generator=random)
        first = self.starts[chosen].clamp(max=len(self.tokens) - seq)  # the last ones: from the end
        return self.tokens[first + torch.arange(seq)]

    def decode(self, tokens: Tensor) -> str:
        """Return the words of tokens [length]."""
        return " ".join(self.words[token] for token in tokens.tolist())


def words_of(utterance: str) -> list[str]:
    """Split into lower-case words, numbers and signs: "Don't, Zoë!" has don't , zoë !."""
    plain = re.sub(r"</?\w+>", "", utterance).lower()  # a few lines hold <i> and </i>
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+|[^\w\s]|_+", plain)


def load_dialogues(
    say: Callable[[str], None],
    *,
    vocab: int = VOCAB,
    file: WebFile = CORNELL,
    folder: Path | None = None,
    tell: Tell = lambda *_: None,
) -> Dialogues:
    """Load the corpus; without a network generate dialogues, and tell `say` so in one line.

    `tell(bytes so far, bytes in all)` is called during the download.
    """
    try:
        path = fetch(file, folder=folder, tell=tell)
    except CourseError as problem:
        say(f"{problem} Going on with generated dialogues instead.")
        return Dialogues.of(generated_dialogues(), "generated", vocab)
    return Dialogues.of(read_corpus(path), file.name, vocab)


def read_corpus(path: Path) -> list[Conversation]:
    """Read the conversations in the corpus' zip file, in its order.

    Raises: CourseError for a file of another format
    """
    try:
        with zipfile.ZipFile(path) as corpus:
            lines = _fields(corpus, "movie_lines.txt", num_fields=5)
            exchanges = _fields(corpus, "movie_conversations.txt", num_fields=4)
        text = {line[0]: line[4] for line in lines}
        return [[text[number] for number in re.findall(r"L\d+", one[3])] for one in exchanges]
    except (OSError, zipfile.BadZipFile) as problem:
        raise CourseError(f"{path}: need a zip file that can be read ({problem}).") from problem
    except KeyError as missing:
        raise CourseError(
            f"{path}: need the line {missing.args[0]} that a conversation names; it is not there."
        ) from missing


def _fields(corpus: zipfile.ZipFile, name: str, num_fields: int) -> list[list[str]]:
    """Split each line of a file in the corpus into fields; the last may hold a separator."""
    if f"{FOLDER}/{name}" not in corpus.namelist():
        raise CourseError(
            f"{corpus.filename}: need {FOLDER}/{name} in it; it is not there. "
            f"Try {CORNELL.urls[0]}."
        )
    text = corpus.read(f"{FOLDER}/{name}").decode(ENCODING)
    found = [
        line.rstrip("\r").split(SEPARATOR, num_fields - 1) for line in text.split("\n") if line
    ]
    for number, row in enumerate(found, start=1):
        if len(row) != num_fields:
            raise CourseError(
                f"{name}, line {number}: need {num_fields} fields with {SEPARATOR!r} between them; "
                f"got {len(row)}."
            )
    return found


_WHO = ("the captain", "my sister", "the doctor", "your friend", "the old man", "the girl")
_WHERE = ("in the garden", "at the station", "on the roof", "behind the house", "by the river")
_WHY = ("because it rains", "for the money", "to see the sea", "because i asked", "for no reason")


def generated_dialogues(num_conversations: int = 4000, seed: int = 0) -> list[Conversation]:
    """Generate questions and answers from a few words; one seed always gives the same ones.

    An answer repeats the person and the place of its question, so both sides of a masked word tell
    something about it.
    """
    random = Random(seed)
    found = []
    for _ in range(num_conversations):
        who, where, why = random.choice(_WHO), random.choice(_WHERE), random.choice(_WHY)
        utterances = [f"Where is {who}?", f"{who.capitalize()} is {where}."]
        if random.random() < 0.7:
            utterances += [f"Why {where}?", f"{who.capitalize()} went there {why}."]
        found.append(utterances)
    return found
