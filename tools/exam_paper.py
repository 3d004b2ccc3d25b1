"""Print an exam paper of docs/exam.md without its answers: `python tools/exam_paper.py NAME`.

Without a name it lists the papers. The numbers are still those of the page: change them before you
hand the paper out.
"""

import re
import sys
from pathlib import Path

EXAM = Path(__file__).resolve().parents[1] / "docs" / "exam.md"
HEADING = re.compile(r"^### (\d+) (.+) \(lesson \d\d[a-z]?, [a-z ]+, (\d+) points\)$", re.MULTILINE)


def papers(page: str) -> dict[str, list[int]]:
    """Return the numbers of the questions of each paper."""
    rows = re.findall(r"^\| ([a-z][^|]*) \|[^|]*\| ([\d, ]+) \| \d+ \|$", page, re.MULTILINE)
    return {name: [int(number) for number in numbers.split(", ")] for name, numbers in rows}


def questions(page: str) -> dict[int, tuple[str, int, str]]:
    """Return title, points and text of each question, by its number, without the answer."""
    found = {}
    for match in HEADING.finditer(page):
        asked = page[match.end() :].partition("**Answer.**")[0].strip()
        asked = re.sub(r"^```python .+$", "```python", asked, flags=re.MULTILINE)
        found[int(match[1])] = match[2], int(match[3]), asked
    return found


def paper(name: str, page: str) -> str:
    """Return a paper as Markdown: its questions, numbered from 1, and their points.

    Raises: SystemExit for a name that no paper has, or a question that builds on a missing one
    """
    known = papers(page)
    if name not in known:
        raise SystemExit(f"exam_paper.py: need one of {', '.join(known)}; got {name!r}.")
    asked = questions(page)
    new = {number: place for place, number in enumerate(known[name], start=1)}
    total = sum(asked[number][1] for number in new)
    parts = [f"# Exam: {name}\n\n{total} points; a point is about a minute."]
    for number, place in new.items():
        title, points, text = asked[number]
        for needed in map(int, re.findall(r"\bquestion (\d+)\b", text)):
            if needed not in new:
                raise SystemExit(
                    f"exam_paper.py: question {number} of {name!r} needs question {needed}: add it."
                )
        text = re.sub(r"\bquestion (\d+)\b", lambda m: f"question {new[int(m[1])]}", text)
        parts.append(f"## {place} {title} ({points} points)\n\n{text}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    written = EXAM.read_text(encoding="utf-8")
    print(paper(" ".join(sys.argv[1:]), written) if sys.argv[1:] else "\n".join(papers(written)))
