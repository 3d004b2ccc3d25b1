"""One run of a study as a task of a job array: the task id picks it from a list.

torchrun ... -m course_lib.scaling_study.array_element runs/study/lists/4-ranks.json
"""

import json
import os
import sys
from pathlib import Path

from course_lib.scaling_study.study_run import read_run
from course_lib.train.launcher import work


def main() -> None:
    """Run one rank of the run in this array task's line."""
    lines = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    line = lines[int(os.environ["SLURM_ARRAY_TASK_ID"])]
    work(read_run(line["run"]).config(line["out"]))


if __name__ == "__main__":
    main()
