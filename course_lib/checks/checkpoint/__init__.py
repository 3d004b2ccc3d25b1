"""The exercises of notebook 14_checkpoint: publish, reshard, resume, the best interval.

Each stands with its check in a file of its own: `publish`, `reshard`, `resume`, `interval`.
"""

from course_lib.checks.checkpoint.interval import INTERVAL
from course_lib.checks.checkpoint.publish import PUBLISH
from course_lib.checks.checkpoint.reshard import RESHARD
from course_lib.checks.checkpoint.resume import RESUME

EXERCISES = (PUBLISH, RESHARD, RESUME, INTERVAL)
