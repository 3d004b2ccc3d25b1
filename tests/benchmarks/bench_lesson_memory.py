"""The memory that each lesson takes: its solved notebook run from the first to the last cell.

    python -m tests.benchmarks.bench_lesson_memory 00 04

prints a row a lesson for docs/containers.md. Counted are the kernel, the fork server and the ranks,
at their peak: PSS, which shares pages out among those that map them, so that nothing counts twice.
"""

import contextlib
import os
import sys
import tempfile
import threading
import time

import nbformat
import psutil
from nbclient import NotebookClient

from course_lib.workbooks.lessons import Lesson, all_lessons, find_folder, find_lesson

EVERY_S = 0.2
BESIDE_MB = 200  # JupyterLab's server
LIMIT_MB = 2048


def tree_mb() -> float:
    """Memory of all that this process has started."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**20


def peak_mb(lesson: Lesson) -> tuple[float, float]:
    """Peak memory of a lesson's solved notebook, and its seconds."""
    notebook, done, peak = nbformat.read(lesson.solved, 4), threading.Event(), 0.0

    def watch() -> None:
        nonlocal peak
        while not done.wait(EVERY_S):
            peak = max(peak, tree_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            client = NotebookClient(notebook, timeout=600, kernel_name="python3", allow_errors=True)
            client.execute(cwd=folder)
    finally:
        done.set()
        watcher.join()
    return peak, time.monotonic() - start_s


def main() -> None:
    """Measure the lessons that are named, or all."""
    os.environ["COURSE_NO_WIDGETS"] = "1"
    folder = find_folder()
    lessons = [find_lesson(name, folder) for name in sys.argv[1:]] or all_lessons(folder)
    print("| lesson | peak, MB | seconds | in 2 GB |\n|---|---|---|---|")
    for lesson in lessons:
        mb, seconds = peak_mb(lesson)
        fits = "yes" if mb + BESIDE_MB < LIMIT_MB else "no"
        print(f"| {lesson.name} | {mb:.0f} | {seconds:.0f} | {fits} |", flush=True)


if __name__ == "__main__":
    main()
