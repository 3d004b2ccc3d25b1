"""The exercises of notebook 05_data_parallel: equal start, mean gradient, sampler, weight, age."""

from course_lib.checks.data_parallel.data import SAMPLER, WEIGHT
from course_lib.checks.data_parallel.replicas import EQUAL, MEAN
from course_lib.checks.data_parallel.staleness import STALENESS

EXERCISES = (EQUAL, MEAN, SAMPLER, WEIGHT, STALENESS)
