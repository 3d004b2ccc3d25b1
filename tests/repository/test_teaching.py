"""The page to plan a course with: its lessons, hours, exercises, readings and sections are real."""

import re
import shlex
import zipfile
from fractions import Fraction
from itertools import takewhile

import pytest

from course_lib.checks.exercise import exercises_of
from course_lib.checks.right_answer import SETTINGS
from course_lib.workbooks.assignment import Assignment
from course_lib.workbooks.lessons import all_lessons
from course_tools.grading.compose import _part, chosen, source_text
from tests.repository.test_exam import ASKED
from tests.terminal import ROOT, commands, run

PAGE, README, GUIDE = (
    (ROOT / name).read_text() for name in ("docs/teaching.md", "README.md", "docs/instructor.md")
)
LESSONS = {lesson.name.partition("_")[0]: lesson for lesson in all_lessons(ROOT / "notebooks")}
SOURCES = {number: lesson.source.read_text() for number, lesson in LESSONS.items()}
QUARTERS = {"¼": Fraction(1, 4), "½": Fraction(1, 2), "¾": Fraction(3, 4)}
SYLLABI = ("Two days", "Six weeks", "Fourteen weeks")
ELSEWHERE = ("make lab TORCH=cpu", "course doctor", "make slides")  # README's and test_readme.py's
READING = re.compile(r"^([A-Z][\w ]*?(?: &| and)? ?[\w ]*?)(?: et al\.)? (\d{4}), (.+)$")


def hours(text: str) -> Fraction:
    """35½ as a number."""
    whole, part = re.fullmatch(r"(\d*)([¼½¾]?)", text.strip("*")).groups()
    return int(whole or 0) + QUARTERS.get(part, Fraction(0))


def section(title: str, page: str = PAGE) -> str:
    """The text below a heading, up to the next one of its level."""
    level = re.search(rf"^(#+) {re.escape(title)}$", page, re.MULTILINE)[1]
    text = page.partition(f"{level} {title}\n")[2]
    return re.split(rf"^#{{1,{len(level)}}} ", text, flags=re.MULTILINE)[0]


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose first column has this title."""
    lines = text.partition(f"| {first} |")[2].splitlines()[2:]
    rows = takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def numbers(text: str) -> list[str]:
    """The lessons that a cell names."""
    return re.findall(r"\b(\d\d[a-z]?) [a-z]", text)


def keys(text: str) -> list[str]:
    return re.findall(r"`(\w+-\d)`", text)


def readings(text: str) -> list[str]:
    return [one.strip() for one in text.split(";") if one.strip()]


def plan(title: str) -> tuple[list[list[str]], list[str]]:
    """The rows of a syllabus, and its last row, the sum."""
    *rows, total = table(section(title), "day" if title == "Two days" else "week")
    return rows, total


EXAM = (ROOT / "docs/exam.md").read_text()
HOURS = {row[0][1:].split()[0]: hours(row[3]) for row in table(README, "lesson")}
AFTER = {
    row[0][1:].split()[0]: re.findall(r"\d\d[a-z]?", row[2]) for row in table(README, "lesson")
}
BY_LESSON = {row[0].split()[0]: row[1:] for row in table(section("Lesson by lesson"), "lesson")}


@pytest.mark.parametrize("title", SYLLABI)
def test_hours_add_up_and_nothing_comes_before_what_it_builds_on(title):
    rows, total = plan(title)
    seen = []
    for row in rows:
        lessons = numbers(row[1])
        for lesson in lessons:
            assert lesson in LESSONS
            assert set(AFTER[lesson]) <= set(seen)
            seen.append(lesson)
        assert sum(HOURS[lesson] for lesson in lessons) == hours(row[2]), row
    assert sorted(set(seen)) == sorted(seen)
    named = dict(re.findall(r"\[(\d\d[a-z]?) ([\w ]+)\]\(notebooks", README))
    for row in rows:
        assert row[1] == ", ".join(f"{lesson} {named[lesson]}" for lesson in numbers(row[1]))
    assert sum(hours(row[2]) for row in rows) == hours(total[2])


def test_the_overview_says_what_the_syllabi_say():
    rows = table(PAGE, "you have")
    assert [row[0] for row in rows] == ["2 days", "6 weeks", "14 weeks"]
    for row, title in zip(rows, SYLLABI, strict=True):
        weeks, total = plan(title)
        taught = sorted(lesson for week in weeks for lesson in numbers(week[1]))
        named = re.findall(r"\d\d[a-z]?", row[2])
        if " to " in row[2]:
            named = [lesson for lesson in LESSONS if named[0] <= lesson <= named[1]]
        assert taught == (named or [*LESSONS])
        assert hours(row[3].split()[0]) == hours(total[2])


def test_each_exercise_is_core_or_further_as_its_lesson_says():
    assert list(BY_LESSON) == list(LESSONS)
    for number, (core, further, _) in BY_LESSON.items():
        known = [exercise.key for exercise in exercises_of(LESSONS[number].word)]
        assert sorted(keys(core) + keys(further)) == sorted(known)
        heading = r"^# ### Exercise (\d)[^\n]*?\((core|further)\b"
        marks = dict(re.findall(heading, SOURCES[number], re.MULTILINE))
        if marks:
            word = LESSONS[number].word
            assert keys(core) == [f"{word}-{n}" for n, mark in marks.items() if mark == "core"]
        else:
            assert HOURS[number] <= 2


@pytest.mark.parametrize("title", SYLLABI)
def test_a_week_hands_in_exercises_of_its_own_lessons(title):
    for row in plan(title)[0]:
        words = [LESSONS[lesson].word for lesson in numbers(row[1])]
        known = {exercise.key for word in words for exercise in exercises_of(word)}
        assert keys(row[3])
        assert {key for cell in row[3:] for key in keys(cell)} <= known
        if title == "Fourteen weeks":
            core = [key for lesson in numbers(row[1]) for key in keys(BY_LESSON[lesson][0])]
            assert keys(row[3]) == core


def test_readings_have_author_year_and_section_and_the_lessons_cite_them():
    said = [(number, row[2]) for number, row in BY_LESSON.items()]
    for title in SYLLABI[:2]:
        said += [(row[1], row[-1]) for row in plan(title)[0]]
    for lessons, cell in said:
        assert readings(cell)
        for one in readings(cell):
            author, year, where = READING.match(one).groups()
            assert re.search(r"section|algorithm|abstract|rules|page", where), one
            names = re.findall(r"[A-Z]\w+", author)
            cited = "\n".join(SOURCES.values())
            assert re.search(rf"{names[0]}\b[^\n]{{0,60}}\D{year}", cited), (lessons, one)


def test_what_is_graded_adds_up():
    for title in SYLLABI[1:]:
        shares = [int(row[1].strip(" %")) for row in table(section(title), "**graded**")]
        assert sum(shares) == 100
    assert sum(int(row[1]) for row in table(PAGE, "a project's points")) == 20


def slide_minutes(lesson: str) -> dict[int, int]:
    """The minutes of each slide of a lesson's deck, by its number."""
    text = (ROOT / "slides" / f"{LESSONS[lesson].name}.md").read_text()
    minutes = re.findall(r"^<!--\n(\d) min\. ", text, re.MULTILINE)
    return {number: int(said) for number, said in enumerate(minutes, start=1)}


def slides_of(cell: str, left_out: str) -> dict[str, list[int]]:
    """The slides that a session shows, by lesson: "01: 1 to 4; 02" less those left out."""
    found = {}
    for part in cell.split("; "):
        lesson, _, chosen_ones = part.partition(": ")
        all_of = [*slide_minutes(lesson)]
        if " to " in chosen_ones:
            first, last = map(int, chosen_ones.split(" to "))
            all_of = [*range(first, last + 1)]
        elif chosen_ones:
            all_of = [int(one) for one in chosen_ones.split(", ")]
        out = [int(one) for one in re.findall(r"\d+", left_out)]
        assert set(out) <= set(all_of)
        found[lesson] = [one for one in all_of if one not in out]
    return found


def test_sessions_of_six_weeks_fit_and_ask_what_was_taught():
    taught_in = {week[0]: numbers(week[1]) for week in plan("Six weeks")[0]}
    paper = re.search(r"^\| final of six weeks \|[^|]*\| ([\d, ]+) \|", EXAM, re.MULTILINE)[1]
    lesson_of = dict(re.findall(r"^### (\d+) .*\(lesson (\d\d[a-z]?)", EXAM, re.MULTILINE))
    seen: set[str] = set()
    shown: set[str] = set()
    rows = table(section("Session by session"), "session")
    assert [row[0] for row in rows] == [f"{week}{part}" for week in taught_in for part in "ab"]
    for session, decks, left_out, minutes, question, shows in rows:
        slides = slides_of(decks, left_out)
        total = sum(
            slide_minutes(one)[n] for one, chosen_ones in slides.items() for n in chosen_ones
        )
        assert total == int(minutes) <= (40 if session == "1a" else 30), session
        if question.isdigit():
            assert lesson_of[question] in seen
            assert question not in paper.split(", ")
        assert set(slides) <= set(taught_in[session[0]])
        seen |= set(slides)
        shown |= set(re.findall(r"\d", shows))
    assert seen == {lesson for week in taught_in.values() for lesson in week}
    assert shown == set(re.findall(r"^### Demonstration (\d)", PAGE, re.MULTILINE))


def test_assignments_of_six_weeks_can_be_composed():
    made = [line for line in commands(section("Six weeks")) if line.startswith("course assign")]
    rows = plan("Six weeks")[0]
    assert len(made) == len(rows)
    for number, (line, row) in enumerate(zip(made, rows, strict=True), start=1):
        words = shlex.split(line)
        assert words[:4] == ["course", "assignment", "new", f"hw{number}"]
        points = dict(one.split("=") for one in words[words.index("--points") + 1].split(","))
        found = chosen(words[words.index("--from") + 1 :], ROOT / "notebooks")
        assert [key for _, key in found] == keys(row[3]) == list(points)
        assert sum(map(int, points.values())) == 10
        items = tuple((key, float(points[key])) for key in points)
        assignment = Assignment(name=words[3], title="", items=items)
        assert source_text(assignment, [_part(lesson, key) for lesson, key in found])


def test_every_section_that_is_named_is_in_its_lesson():
    pairs = re.findall(r"(\d\d[a-z]?): ((?:\*[^*|]+\*(?:; )?)+)", " ".join(PAGE.split()))
    pairs += re.findall(r"lesson (\d\d[a-z]?), (\*[^*|]+\*)", " ".join(PAGE.split()))
    assert len(pairs) > 30
    for number, titles in pairs:
        there = re.findall(r"^# #{2,3} (?:\d+ )?(.+)$", SOURCES[number], re.MULTILINE)
        for title in re.findall(r"\*([^*]+)\*", titles):
            assert title in there, (number, title)


def test_demonstrations_have_all_they_need():
    shown = re.split(r"^### Demonstration \d: ", section("3 Demonstrations"), flags=re.MULTILINE)[
        1:
    ]
    assert len(shown) == 7
    assert "seven\ndemonstrations" in PAGE or "seven demonstrations" in PAGE
    for one in shown:
        words = re.findall(r"^- \*\*([\w ]+):\*\*", one, re.MULTILINE)
        assert words == ["Where", "Ask", "Do", "They see", "Say"]
        assert 5 <= int(re.search(r"(\d+) ?\n? *minutes", one)[1]) <= 10
        lessons = re.findall(r"(\d\d[a-z]?): \*", one)
        for code in re.findall(r"`(\w[\w.]*(?:\(\)|=\d)?)`", one):
            name = code.removesuffix("()")
            assert any(name in SOURCES[number] for number in lessons) or " " in name, code


def test_what_the_explorer_shows_is_what_the_page_says():
    from course_lib.pipeline.live import SCHEDULE

    def said(schedule: str, m: int, message: float) -> str:
        times = {"backward_input": 1.0, "backward_weight": 1.0, "message": message}
        return SCHEDULE.finding(schedule=schedule, p=4, m=m, chunks=2, **times)

    assert (
        said("GPipe", 6, 0)
        == "GPipe: a bubble of 50% of the computing time, 6 micro-batches in flight at most"
    )
    assert (
        said("1F1B", 6, 0)
        == "1F1B: a bubble of 50% of the computing time, 4 micro-batches in flight at most"
    )
    assert "17%" in said("ZB-H1", 6, 0)
    assert "19%" in said("1F1B", 16, 0)
    assert "77%" in said("1F1B", 16, 1)
    assert "31%" in said("GPipe", 16, 1)


def test_commands_of_the_page_are_known():
    before = table(section("Once, a week before"), "type")
    typed = [re.findall(r"`([^`]+)`", row[0])[0] for row in before]
    known = [*ELSEWHERE, *commands(README), "course assignment new", "course grade"]
    assert set(typed) <= set(known)


def test_the_papers_are_those_of_the_exam():
    exam = (ROOT / "docs/exam.md").read_text()
    for paper, minutes in re.findall(r'"((?:final|short)[^"]+)"[^"]*?(\d+)\s+minutes', PAGE):
        assert re.search(rf"^\| {paper} \|.*\| {minutes} \|$", exam, re.MULTILINE), paper
    assert f"{len(ASKED)} questions" in PAGE


def test_what_students_get_has_no_exam(tmp_path):
    new = "course assignment new hw1 --from 01_memory:memory-1"
    run(f"{new} --folder {tmp_path}", ROOT)
    run(f"course assignment release {tmp_path / 'hw1'}", ROOT)
    with zipfile.ZipFile(tmp_path / "hw1/release/hw1.zip") as made:
        names = made.namelist()
        assert f"hw1/{SETTINGS}" in names
        assert not [name for name in names if "docs/" in name or "exam" in name.rpartition("/")[2]]
        answers = re.findall(r"\*\*Answer\.\*\* (.{30})", (ROOT / "docs/exam.md").read_text())
        texts = "\n".join(made.read(name).decode("utf-8", "ignore") for name in names)
    assert len(answers) == len(ASKED)
    assert not [answer for answer in answers if answer in texts]


def test_the_page_is_found():
    assert "(docs/teaching.md)" in section("For instructors", README)
    assert "(teaching.md)" in GUIDE
    assert "(exam.md)" in PAGE
    assert "docs/exam.md" not in README  # students begin there
