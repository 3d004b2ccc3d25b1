"""The exercises of notebook 01_memory: parameters, states, weighing, a layer, what fits, MFU.

Each of the first three stands with its planted mistakes in a file of its own: `count`, `states`
and `weigh`. The others are in `formulas`.
"""

from course_lib.checks.memory.count import COUNT
from course_lib.checks.memory.formulas import EXERCISES as FORMULAS
from course_lib.checks.memory.states import STATES
from course_lib.checks.memory.weigh import WEIGH

EXERCISES = (COUNT, STATES, WEIGH, *FORMULAS)
