"""Put the lessons into the wheel; all else stands in pyproject.toml.

A wheel holds packages only, so `notebooks`, `cluster` and the pages for learners go into
`course_lib/course_files`. In a clone (`pip install --editable`) they stay where they are.
"""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
BROUGHT = (
    *("notebooks/*.ipynb", "notebooks/solved/*.ipynb", "notebooks/solved/conftest.py"),
    *("notebooks/source/*.py", "cluster/**/*.*", "LICENSE"),
    *("docs/glossary.md", "docs/cluster_student.md", "docs/checkpoints.md", "docs/engines.md"),
    "docs/debugging.md",
    *("docs/planner.md", "docs/models.md", "docs/ai_policy.md"),
)
NOT_OURS = ("cluster/profiles/site.toml", "__pycache__", ".ipynb_checkpoints")
BUTTONS = "course_lib/workbooks/lab_extension"
LAB = "share/jupyter/labextensions/distributed-training-course"


class BuildWithLessons(build_py):
    """Copy the lessons beside the package's own files."""

    def run(self):
        """Build the package, then bring the lessons."""
        super().run()
        if self.editable_mode:
            return
        for path in sorted(path for pattern in BROUGHT for path in HERE.glob(pattern)):
            name = path.relative_to(HERE).as_posix()
            if path.is_file() and not any(part in name for part in NOT_OURS):
                to = Path(self.build_lib, "course_lib", "course_files", name)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to)


def buttons():
    """The buttons of JupyterLab, by the folder that Jupyter looks into."""
    found = {}
    for path in sorted((HERE / BUTTONS).rglob("*.*")):
        folder = path.parent.relative_to(HERE / BUTTONS)
        found.setdefault((Path(LAB) / folder).as_posix(), []).append(
            path.relative_to(HERE).as_posix()
        )
    return list(found.items())


is_wheel = "editable_wheel" not in sys.argv  # there, make links the buttons
setup(cmdclass={"build_py": BuildWithLessons}, data_files=buttons() if is_wheel else [])
