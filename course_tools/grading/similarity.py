"""Find answers of a class that are alike, whatever their names, comments and formatting.

An answer becomes tokens, tokens become overlapping runs of RUN tokens, and of each WINDOW runs in a
row the one with the smallest hash is a fingerprint, so that any common stretch of RUN + WINDOW - 1
tokens is found (Schleimer, Wilkerson and Aiken 2003, "Winnowing: local algorithms for document
fingerprinting", SIGMOD). What the exercise hands out, and what many of the class wrote, is left
out. Likeness proves nothing: two people can find the same answer, and a person has to read both.
"""

import builtins
import hashlib
import io
import keyword
import re
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median_low

RUN, WINDOW = 8, 4  # tokens in a run, runs in a window
SHORT = 40  # tokens beyond the stub; what has fewer has few ways to be written
FEW = 4  # fingerprints; fewer are no basis for a share
OWN_WORDS = 12  # different words and signs that a short text adds to the stub, to be compared
SEVERAL = 3  # in a small class, what so many wrote is not yet common
MOST_CHARACTERS = 50_000  # of one text; an answer has some thousand
COMMON = {*keyword.kwlist, *dir(builtins)}
DROPPED = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
NAME, TEXT = "name", "'text'"  # what stands for every name of the author's own, and every string
PIECES = re.compile(
    r"""(?x) ([rbfuRBFU]{0,2}(?:"[^"\n]*"|'[^'\n]*')) | (\d[\w.]*) | (\w+)
    | ([-+*/%@&|^=<>!:]=|->|\*\*|//|<<|>>|[^\w\s])"""
)
WORDS = re.compile(r"\w+|[^\w\s]")

Codes = Mapping[str, str]  # the code of each exercise, by key


@dataclass(frozen=True, kw_only=True)
class SimilarPair:
    """Two answers to one exercise that are alike.

    share    fraction of the fingerprints of the smaller one that the other one has, too
    mark     "short" or "common" where the structure says little (a short answer, or one that much
             of the class wrote) and the texts are equal to the letter; otherwise empty
    others   number of other students who wrote (the median fingerprint of) what the two share
    source   `right` is no student but a source: the library, the solved notebook
    The lines (from 1) are those that hold shared fingerprints.
    """

    key: str
    left: str
    right: str
    share: float
    mark: str = ""
    others: int = 0
    source: bool = False
    left_code: str = ""
    right_code: str = ""
    left_lines: frozenset[int] = field(default=frozenset(), repr=False)
    right_lines: frozenset[int] = field(default=frozenset(), repr=False)


@dataclass(frozen=True)
class _Token:
    text: str
    line: int


@dataclass
class _Answer:
    """One text: its fingerprints with the lines of each, and what is left to compare of them."""

    who: str
    code: str
    exact: str
    num_beyond: int  # tokens beyond the stub
    own_words: int
    prints: dict[int, tuple[int, int]]  # fingerprint -> first and last line
    rare: frozenset[int] = frozenset()

    @property
    def mark(self) -> str:
        """Why its structure says little; empty where it says enough."""
        if self.num_beyond < SHORT:
            return "short"
        return "" if len(self.rare) >= FEW else "common"


def similar(
    submissions: Mapping[str, Codes],
    sources: Mapping[str, Codes],
    stubs: Codes,
    at_least: float = 0.6,
    students: Mapping[str, str] | None = None,
) -> list[SimilarPair]:
    """Return the pairs of answers that are alike, the most alike first; no student with oneself.

    submissions  the code of each submission, by key
    sources      further texts that students may have pasted, by name: they are compared with the
                 students' code, not with each other
    stubs        what the exercise hands out, by key
    at_least     smallest share of fingerprints that is reported, above 0 to 1
    students     whose each submission is; without it, each is a student's
    """
    keys = sorted({key for codes in submissions.values() for key in codes})
    pairs = [
        pair
        for key in keys
        for pair in _alike(
            key,
            *(_of(submissions, key), _of(sources, key), stubs.get(key, "")),
            *(at_least, students or {}),
        )
    ]
    return sorted(
        pairs, key=lambda one: (-one.share, one.mark, one.others, one.key, one.left, one.right)
    )


def _of(codes: Mapping[str, Codes], key: str) -> dict[str, str]:
    return {who: code[key] for who, code in codes.items() if code.get(key, "").strip()}


def _alike(
    key: str,
    codes: Codes,
    sources: Codes,
    stub: str,
    at_least: float,
    students: Mapping[str, str],
) -> Iterator[SimilarPair]:
    """Yield the pairs of one exercise; a student counts once, whatever was handed in how often."""
    given = _Given(stub)
    answers = [given.answer(who, code) for who, code in codes.items()]
    others = [given.answer(who, code) for who, code in sources.items()]
    whose = {who: students.get(who, who) for who in codes}
    num_students = len(set(whose.values()))
    held = {(whose[answer.who], one) for answer in answers for one in answer.prints}
    holders = Counter(one for _, one in held)
    most = max(num_students / 2, SEVERAL)
    for answer in (*answers, *others):
        answer.rare = frozenset(one for one in answer.prints if holders[one] <= most)
    wrote = {(whose[answer.who], answer.exact) for answer in answers}
    texts = Counter(exact for _, exact in wrote)
    known = max(num_students // 20, SEVERAL)  # a short text that more wrote is the obvious one
    for a, b in combinations(answers, 2):
        if whose[a.who] == whose[b.who]:
            continue
        share, mark = _likeness(a, b)
        if share >= at_least and (not mark or texts[a.exact] <= known):
            yield _pair(key, a, b, share, mark, holders, is_source=False)
    for a in answers:
        for b in others:
            share, mark = _likeness(a, b)
            if share >= at_least:
                yield _pair(key, a, b, share, mark, holders, is_source=True)


def _likeness(a: _Answer, b: _Answer) -> tuple[float, str]:
    """Return the share of fingerprints, and the mark; 1 or 0 where only the text can say it."""
    mark = a.mark or b.mark
    if mark:
        is_same = a.exact == b.exact and a.own_words >= OWN_WORDS
        return float(is_same), mark
    return len(a.rare & b.rare) / min(len(a.rare), len(b.rare)), ""


def _pair(
    key: str,
    a: _Answer,
    b: _Answer,
    share: float,
    mark: str,
    holders: Mapping[int, int],
    *,
    is_source: bool,
) -> SimilarPair:
    shared = a.prints.keys() & b.prints.keys() if mark else a.rare & b.rare
    held = median_low([holders[one] for one in shared]) if shared else 0
    return SimilarPair(
        key=key,
        left=a.who,
        right=b.who,
        share=share,
        mark=mark,
        others=max(0, held - (1 if is_source else 2)),
        source=is_source,
        left_code=a.code,
        right_code=b.code,
        left_lines=_lines(a, shared),
        right_lines=_lines(b, shared),
    )


def _lines(answer: _Answer, shared: Iterable[int]) -> frozenset[int]:
    spans = (answer.prints[one] for one in shared)
    return frozenset(line for first, last in spans for line in range(first, last + 1))


class _Given:
    """Code that an exercise hands out: names that are kept, runs of tokens that do not count."""

    def __init__(self, stub: str) -> None:
        self.words = set(WORDS.findall(stub))
        self.runs = set(_runs(tokens(stub, self.words)))

    def answer(self, who: str, code: str) -> _Answer:
        """Return the fingerprints of a text, beyond what is handed out."""
        code = code[:MOST_CHARACTERS].replace("\r\n", "\n").replace("\r", "\n")
        found = tokens(code, self.words)
        runs = _runs(found)
        covered = {i + k for i, run in enumerate(runs) if run in self.runs for k in range(RUN)}
        prints = {
            run: (found[i].line, found[min(i + RUN, len(found)) - 1].line)
            for i, run in _winnow(runs)
            if run not in self.runs
        }
        return _Answer(
            who=who,
            code=code,
            exact="\n".join(line.rstrip() for line in code.strip().splitlines()),
            num_beyond=len(found) - len(covered),
            own_words=len(set(WORDS.findall(code)) - self.words),
            prints=prints,
        )


def tokens(code: str, given: Collection[str] = ()) -> list[_Token]:
    """Return the tokens of Python code, without what a change of form changes.

    Comments, docstrings, line ends, parentheses that only group, and commas before a closing
    bracket are dropped. A name that is not `given` is replaced, unless it is Python's own, or an
    attribute that the text does not define itself (`dist.all_reduce`); so is every string. Text
    that Python cannot split into tokens is split line by line.
    """
    try:
        raw = list(_python_tokens(code))
    except (tokenize.TokenError, SyntaxError, ValueError, RecursionError):
        raw = list(_pieces_of_lines(code))
    return _without_form(list(_renamed(raw, given)))


def _python_tokens(code: str) -> Iterator[_Token]:
    """Yield what stands in the code; raises what `tokenize` raises."""
    depth = 0  # of f-strings, which newer Pythons split into parts
    is_new = True  # a string that begins a statement, and is all of it, is a docstring
    found = list(tokenize.generate_tokens(io.StringIO(code).readline))
    for i, token in enumerate(found):
        kind = tokenize.tok_name[token.type]
        if kind in ("FSTRING_START", "FSTRING_END"):
            depth += 1 if kind == "FSTRING_START" else -1
            if kind == "FSTRING_END" and not depth:
                yield _Token(TEXT, token.start[0])
        elif not depth and token.type == tokenize.STRING:
            after = next((one for one in found[i + 1 :] if one.type != tokenize.COMMENT), token)
            if not (is_new and after.type in (tokenize.NEWLINE, tokenize.ENDMARKER)):
                yield _Token(TEXT, token.start[0])
        elif not depth and token.type not in DROPPED and token.string != ";":
            yield _Token(token.string, token.start[0])
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            is_new = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def _pieces_of_lines(code: str) -> Iterator[_Token]:
    for number, line in enumerate(code.split("\n"), start=1):
        for string, numeral, name, sign in PIECES.findall(line):
            if sign == "#":
                break
            if sign != ";":
                yield _Token(TEXT if string else numeral or name or sign, number)


def _renamed(raw: Sequence[_Token], given: Collection[str]) -> Iterator[_Token]:
    """Yield the tokens with one word for all names that the author chose."""
    padded = [_Token("", 0), *raw, _Token("", 0)]
    defined = {
        token.text
        for before, token, after in zip(padded, raw, padded[2:], strict=False)
        if before.text in ("def", "class") or (before.text == "." and after.text == "=")
    }
    for before, token in zip(padded, raw, strict=False):
        is_others = token.text not in defined if before.text == "." else token.text in COMMON
        if is_others or token.text in given or not token.text.isidentifier():
            yield token
        else:
            yield _Token(NAME, token.line)


def _without_form(found: Sequence[_Token]) -> list[_Token]:
    """Return the tokens without grouping parentheses and trailing commas."""
    left: list[_Token] = []
    is_call: list[bool] = []  # for each open parenthesis
    before = ""
    for token in found:
        if token.text == "(":
            ends = before.isidentifier() and not keyword.iskeyword(before)
            is_call.append(ends or before in (")", "]", TEXT))
        if token.text in (")", "]", "}") and left and left[-1].text == ",":
            left.pop()
        is_kept = token.text not in ("(", ")") or not is_call or is_call[-1]
        if token.text == ")" and is_call:
            is_call.pop()
        if is_kept:
            left.append(token)
        before = token.text
    return left


def _runs(found: Sequence[_Token]) -> list[int]:
    """Return the hash of each RUN tokens in a row; one of all tokens where there are fewer."""
    words = [token.text for token in found]
    starts = range(max(1, len(words) - RUN + 1)) if words else ()
    return [_hash("\0".join(words[i : i + RUN])) for i in starts]


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _winnow(runs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield place and hash of the smallest run in each window, the last one of equals."""
    last = -1
    for start in range(max(1, len(runs) - WINDOW + 1)) if runs else ():
        window = range(start, min(start + WINDOW, len(runs)))
        place = min(window, key=lambda i: (runs[i], -i))
        if place != last:
            yield place, runs[place]
            last = place
