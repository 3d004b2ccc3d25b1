"""The files that grade on another platform: an autograder for Gradescope, and a class on GitHub.

Both run `course_tools.platforms.autograder` with the course and the assignment, solutions and
hidden cases included: this is for instructors, and never goes to students.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path

from course_lib.core import CourseError
from course_lib.workbooks.assignment import Assignment, read_assignment
from course_lib.workbooks.pack import Files
from course_tools.grading.release import COURSE, release

PARTS = ("course_lib", "course_tools", "tools", "notebooks/source")
ALONE = ("pyproject.toml", "requirements.lock", "Makefile", "setup.py", "LICENSE", "README.md")
OF_ASSIGNMENT = ("assignment.toml", "hidden.py", "source", "checks")
RUNS = 0o755 << 16  # of a zip's entry: everybody may run it

SETUP = """\
#!/usr/bin/env bash
# What the platform runs once: bubblewrap, a Python, and the course's environment.
set -euo pipefail
home="${AUTOGRADER:-/autograder}"
as_root="$(test "$(id -u)" = 0 || echo sudo)"
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq
$as_root apt-get install -qq -y --no-install-recommends \\
  bubblewrap ca-certificates make procps python3 python3-venv
python=""
for one in python3.13 python3.12 python3.11 python3; do
  if "$one" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python="$one"
    break
  fi
done
if test -z "$python"; then
  export UV_PYTHON_INSTALL_DIR="$home/python"
  python3 -m venv "$home/uv"
  "$home/uv/bin/pip" install -q uv
  "$home/uv/bin/uv" python install -q 3.12
  python="$("$home/uv/bin/uv" python find 3.12)"
fi
cd "$home/source/course"
make environment VENV="$home/env" TORCH=cpu PYTHON="$python"
"""
RUN = """\
#!/usr/bin/env bash
# What the platform runs for each submission; it writes results/results.json.
home="${{AUTOGRADER:-/autograder}}"
cd "$home/source/course" || exit 1
exec "$home/env/bin/python" -m course_tools.platforms.autograder \\
  "assignments/{name}" "$home/submission" "$home/results"{trust}
"""
WORKFLOW = """\
# Grades each push in the sandbox of `course grade`, and tells GitHub Classroom. The solutions are
# in another repository, which GRADER_TOKEN may read.
name: Autograding Tests
on: [push, workflow_dispatch]
permissions:
  checks: write
  actions: read
  contents: read
jobs:
  grade:
    runs-on: ubuntu-24.04
    timeout-minutes: 60
    if: github.actor != 'github-classroom[bot]'
    env:
      AUTOGRADER: ${{ github.workspace }}/autograder
    steps:
      - uses: actions/checkout@v4
        with:
          path: autograder/submission
          persist-credentials: false
      - uses: actions/checkout@v4
        with:
          repository: ${{ vars.GRADER_REPOSITORY }}
          token: ${{ secrets.GRADER_TOKEN }}
          path: autograder/source
          persist-credentials: false
      - name: allow user namespaces, which bubblewrap needs
        run: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0
      - name: build the environment
        run: autograder/source/setup.sh
      - name: grade
        id: grade
        run: autograder/source/run_autograder
      - uses: classroom-resources/autograding-grading-reporter@v1
        env:
          GRADE_RESULTS: ${{ steps.grade.outputs.result }}
        with:
          runners: grade
"""


def demand_unseeded(assignment: Assignment) -> None:
    """Check that all students have the same cases: a platform does not know the course's ids.

    Raises: CourseError for a seeded assignment
    """
    if assignment.seeded:
        raise CourseError(
            f"{assignment.name}: need seeded = false in assignment.toml for a platform, which does "
            "not know whose cases to draw; or grade what it has collected with course grade."
        )


def autograder_files(folder: Path, *, trust: bool = False) -> Files:
    """Return the files of an autograder by name: setup.sh, run_autograder, the course.

    Raises: CourseError for a seeded assignment
    """
    assignment = read_assignment(folder)
    demand_unseeded(assignment)
    run = RUN.format(name=assignment.name, trust=" --trust" if trust else "")
    files: Files = {"setup.sh": SETUP.encode(), "run_autograder": run.encode()}
    sources = [(COURSE / part, f"course/{part}") for part in (*PARTS, *ALONE)]
    home = f"course/assignments/{assignment.name}"
    sources += [(folder / part, f"{home}/{part}") for part in OF_ASSIGNMENT]
    for source, name in sources:
        for path in _files_in(source):
            inner = path.relative_to(source).as_posix()
            files[name if inner == "." else f"{name}/{inner}"] = path.read_bytes()
    return files


def _files_in(path: Path) -> Iterator[Path]:
    """Yield the files of a folder, but for caches and hidden ones; or the file itself."""
    for one in [path] if path.is_file() else sorted(path.rglob("*")):
        parts = one.relative_to(path).parts
        if one.is_file() and not any(part.startswith((".", "__pycache__")) for part in parts):
            yield one


def write_autograder(path: Path, files: Files) -> None:
    """Write Gradescope's zip, in which its two scripts may be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = RUNS if "/" not in name else 0o644 << 16
            archive.writestr(entry, content)


def write_classroom(folder: Path, out: Path) -> list[Path]:
    """Write the two repositories of a class on GitHub: the starter, and the grader; return both.

    Raises: CourseError where the assignment cannot be released
    """
    files = autograder_files(folder)
    name = read_assignment(folder).name
    (zipped,) = release(folder, out)
    starter, grader = out / f"{name}-starter", out / f"{name}-grader"
    with zipfile.ZipFile(zipped) as archive:
        inside = {one: archive.read(one) for one in archive.namelist()}
    own: Files = {one.removeprefix(f"{name}/"): content for one, content in inside.items()}
    own[".github/workflows/classroom.yml"] = WORKFLOW.encode()
    for repository, content in ((starter, own), (grader, files)):
        for inner, text in content.items():
            path = repository / inner
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
            if repository == grader and "/" not in inner:
                path.chmod(0o755)
    zipped.unlink()
    return [starter, grader]
