"""The exercises of notebook 05_data_parallel: equal start to staleness, and DiLoCo's outer step."""

from course_lib.checks.data_parallel.equal import EQUAL
from course_lib.checks.data_parallel.mean import MEAN
from course_lib.checks.data_parallel.outer import OUTER
from course_lib.checks.data_parallel.sampler import SAMPLER
from course_lib.checks.data_parallel.staleness import STALENESS
from course_lib.checks.data_parallel.weight import WEIGHT

EXERCISES = (EQUAL, MEAN, SAMPLER, WEIGHT, STALENESS, OUTER)
