"""The corpus: wrong answers that the checks have to reject and right ones to accept, as text.

An entry of corpus.json.gz has the key of an exercise, a name, the sentence of its cause (empty for
a right answer), and a text that defines `answer`. The text is enough by itself: it imports only
what an answer may import. `python -m tests.checks.corpus` adds the edits planted now, and entries
from the JSON files that it is given. An answer is taken out only together with its exercise: the
corpus outlives the planted mistakes that it came from.
"""

import ast
import gzip
import json
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Exercise
from course_lib.checks.right_answer import bound_names, needed_above

FILE = Path(__file__).with_name("corpus.json.gz")
Entry = dict[str, str]


def read() -> list[Entry]:
    """Return the entries, by their keys."""
    return json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else []


def run(text: str) -> Any:
    """Return the answer that a text defines, as a cell of a notebook would define it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    file = f"<cell {abs(hash(text)):x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), names)
    return names["answer"]


def edits(exercise: Exercise) -> Iterator[Entry]:
    """Yield the planted edits, each below what it uses of the cells above its own."""
    for wrong in exercise.wrong:
        if isinstance(wrong, Edit):
            tree = ast.parse(cell := wrong.cell(exercise))
            above = [ast.unparse(statement) for _, statement in needed_above(exercise.key, tree)]
            text = "\n\n".join([*above, cell, f"answer = {bound_names(tree.body[-1])[-1]}"])
            yield {
                "key": exercise.key,
                "name": wrong.name,
                "cause": wrong.cause.sentence,
                "text": text,
            }


def add(entries: list[Entry]) -> None:
    """Add those whose text is not there yet."""
    old = read()
    found = {(one["key"], one["text"]): one for one in [*entries, *old]}
    new = sorted(found.values(), key=lambda one: (one["key"], one["cause"] > "", one["text"]))
    if new != old:
        FILE.write_bytes(gzip.compress(json.dumps(new, indent=0).encode(), mtime=0))
    right = sum(not one["cause"] for one in new)
    print(f"{len(new)} answers, {right} of them right, {len(new) - len(old)} new")


if __name__ == "__main__":
    from tests.checks.test_planted_mistakes import EXERCISES

    given = [entry for one in EXERCISES for entry in edits(one)]
    for name in sys.argv[1:]:
        given += json.loads(Path(name).read_text())
    add(given)
