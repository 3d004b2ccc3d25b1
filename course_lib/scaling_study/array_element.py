"""One run of a study as a task of a job array: the task id picks it from a list.

torchrun ... -m course_lib.scaling_study.array_element runs/study/lists/4-ranks.json
"""

import os
import sys

from course_lib.scaling_study.study_run import read_list
from course_lib.train.launcher import work


def main() -> None:
    """Run one rank of the run in this array task's line."""
    listed = read_list(sys.argv[1])[int(os.environ["SLURM_ARRAY_TASK_ID"])]
    if code := work(listed.run.config(listed.out)):
        sys.exit(code)


if __name__ == "__main__":
    main()
