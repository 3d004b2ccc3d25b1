"""The exercises of notebook 17_clinic: four patients to diagnose and to mend, and a hang to read.

`patient` is the check of a patient, `patients` has the four, `hang` the fifth exercise.
"""

from course_lib.checks.clinic.hang import HANG
from course_lib.checks.clinic.patients import PATIENTS

EXERCISES = (*PATIENTS, HANG)
