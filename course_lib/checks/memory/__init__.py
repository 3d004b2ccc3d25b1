"""The exercises of notebook 01_memory, each with its planted mistakes in a file of its own.

Parameters (`count`), weighing what autograd saves (`weigh`), the bytes of a layer
(`layer`), and the peak of a step (`peak`).
"""

from course_lib.checks.memory.count import COUNT
from course_lib.checks.memory.layer import LAYER
from course_lib.checks.memory.peak import PEAK
from course_lib.checks.memory.weigh import WEIGH

EXERCISES = (COUNT, WEIGH, LAYER, PEAK)
