"""The glossary is sorted and names lessons that there are; README orders them by what they need."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*_*.ipynb"))
TEXT = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"- \*\*(?P<term>[^*]+)\*\* \(\[(?P<lesson>\d\d[a-z]?)\]\): (?P<words>\S.*[.)])")
LINK = re.compile(r"^\[(\d\d[a-z]?)\]: (\S+)$", re.MULTILINE)


def entries() -> list[re.Match[str]]:
    lines = [line for line in TEXT.splitlines() if line.startswith("- ")]
    found = [ENTRY.fullmatch(line) for line in lines]
    assert None not in found, lines[found.index(None)]
    return [entry for entry in found if entry]


def test_entries_are_sorted_and_each_term_stands_once():
    terms = [entry["term"].casefold() for entry in entries()]
    assert terms == sorted(terms)
    assert len(set(terms)) == len(terms) > 80


def test_every_lesson_named_exists_and_every_lesson_is_named():
    links = dict(LINK.findall(TEXT))
    lessons = {path.stem.partition("_")[0]: path for path in NOTEBOOKS}
    assert {entry["lesson"] for entry in entries()} == set(links) == set(lessons)
    for number, target in links.items():
        assert (ROOT / "docs" / target).resolve() == lessons[number]


def test_readme_lets_a_lesson_build_on_earlier_ones_only():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \[(\d\d[a-z]?) [^|]+\|[^|]+\| ([^|]+) \| ([^|]+) \|$", readme, re.MULTILINE
    )
    lessons = sorted(path.stem.partition("_")[0] for path in NOTEBOOKS)
    assert [number for number, _, _ in rows] == lessons
    for number, after, hours in rows:
        needed = re.findall(r"\d\d[a-z]?", after)
        assert set(needed) <= {one for one in lessons if one < number}
        assert needed == sorted(needed)
        assert re.fullmatch(r"[123][¼½¾]?", hours)
