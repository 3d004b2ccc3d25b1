"""One run of a study, as an element of a job array: the element's number picks it from a list.

torchrun ... -m course_lib.study.element runs/study/lists/4-ranks.json
"""

import json
import os
import sys
from pathlib import Path

from course_lib.study.run import TRAIN


def main() -> None:
    """Become the training script, with the words of this element's line."""
    lines = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    words = lines[int(os.environ["SLURM_ARRAY_TASK_ID"])]
    os.execv(sys.executable, [sys.executable, "-m", TRAIN, *words])


if __name__ == "__main__":
    main()
