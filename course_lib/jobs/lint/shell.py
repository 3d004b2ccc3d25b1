"""A parser for batch scripts: enough of bash to know which command runs what, and where.

Quotes matter: what stands in single quotes is left for the task, everything else this shell fills
in before anything is started. A word knows both readings.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Parentheses, three deep; *+ never goes back, so that no text takes long.
INSIDE = r"(?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\))*+"
PIECE = re.compile(
    r"(?P<joined>\\\n)"
    r"|\\(?P<escaped>.)"
    r"|\$?'(?P<single>[^']*)'"
    rf'|"(?P<double>(?:\\.|\$\({INSIDE}\)|[^"\\])*+)"'
    rf"|(?P<filled>[$<>]\({INSIDE}\)|`[^`]*`|\$\{{[^}}]*\}}|[^\s;&|()<>\"'\\`])",
    re.DOTALL,
)
BLANK = re.compile(r"[ \t\r]+|\\\n")
COMMENT = re.compile(r"#[^\n]*")
HERE = re.compile(r"<<-?[ \t]*(['\"]?)(?P<mark>\w+)\1")
REDIRECT = re.compile(r"<<<|&>>?|[<>]&-?|>\||>>|[<>]")
END = re.compile(r"&&|\|\||;;&?|;&|\|&|[;&|\n()]")
ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)\+?=(?P<value>.*)", re.DOTALL)
BLOCKS = {"if", "then", "elif", "else", "while", "until", "do", "!", "{"}
BEFORE = BLOCKS | {"time", "exec", "nohup", "env", "command", "eval"}


@dataclass(frozen=True)
class Word:
    """`text` is the word without its quotes; `live` only what this shell itself fills in.

    `bare` is what stands outside of quotes: filled in, it falls into words at its blanks.
    """

    line: int
    text: str
    live: str
    bare: str


@dataclass(frozen=True)
class Command:
    """The words of one command and the sign after it: newline, ;, |, &, && or ||."""

    words: tuple[Word, ...]
    end: str

    @property
    def line(self) -> int:
        """The line where it begins."""
        return self.words[0].line

    @property
    def assigned(self) -> dict[str, Word]:
        """The variables that it sets, with or without export."""
        found = {}
        for word in self.words:
            if match := ASSIGNMENT.fullmatch(word.text):
                found[match["name"]] = word
            elif word.text not in BEFORE | {"export", "declare", "local", "readonly", "-x"}:
                break
        return found

    @property
    def called(self) -> tuple[Word, ...]:
        """The words that it runs: without `if`, `time` or variables set before it."""
        words = list(self.words)
        while words and (words[0].text in BEFORE or ASSIGNMENT.fullmatch(words[0].text)):
            words.pop(0)
        return tuple(words)

    @property
    def name(self) -> str:
        """The program that it runs, without its folder; empty if it only sets variables."""
        return self.called[0].text.rpartition("/")[2] if self.called else ""

    @property
    def text(self) -> str:
        """All words, separated by blanks."""
        return " ".join(word.text for word in self.words)


def read_commands(text: str) -> list[Command]:
    """Return the commands of a script in order; comments and here-documents are left out."""
    return list(_Reader(text).commands())


def without_here_documents(text: str) -> str:
    """Return the script with its here-documents empty: they are data, whatever they contain."""
    reader = _Reader(text)
    for _ in reader.commands():
        pass
    for start, end in reversed(reader.here_documents):
        text = text[:start] + "\n" * text.count("\n", start, end) + text[end:]
    return text


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.place, self.marks = text, 0, list[str]()
        self.here_documents: list[tuple[int, int]] = []

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.place)
        if found:
            self.place = found.end()
        return found

    def _line(self) -> int:
        return self.text.count("\n", 0, self.place) + 1

    def commands(self) -> Iterator[Command]:
        words: list[Word] = []
        while self.place < len(self.text):
            if self._take(BLANK) or self._take(COMMENT):
                continue
            if here := self._take(HERE):
                self.marks.append(here["mark"])
            elif (
                self.text[self.place] in "<>" and self.text[self.place + 1 : self.place + 2] == "("
            ):
                words.append(self._word())
            elif self._take(REDIRECT):
                continue
            elif end := self._take(END):
                if words:
                    yield Command(tuple(words), end[0])
                words = []
                if end[0] == "\n":
                    self._skip_here_documents()
            else:
                words.append(self._word())
        if words:
            yield Command(tuple(words), "\n")

    def _word(self) -> Word:
        line, text, live, bare, start = self._line(), "", "", "", self.place
        while piece := self._take(PIECE):
            if piece["double"] is not None:
                text += re.sub(r'\\([$"\\`])', r"\1", piece["double"])
                live += re.sub(r"\\.", "", piece["double"])
            else:
                text += piece["escaped"] or piece["single"] or piece["filled"] or ""
                live += piece["filled"] or ""
                bare += piece["filled"] or ""
        if self.place == start:  # a quote that never ends
            self.place += 1
        return Word(line, text, live, bare)

    def _skip_here_documents(self) -> None:
        for mark in self.marks:
            end = re.compile(rf"^\t*{mark}$", re.MULTILINE).search(self.text, self.place)
            place = end.end() if end else len(self.text)
            self.here_documents.append((self.place, place))
            self.place = place
        self.marks = []
