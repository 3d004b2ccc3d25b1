"""The exercises of notebook 15_context_parallel, from two partial softmaxes to a choice of form.

Each stands with its check in a file of its own: `parts`, `ring`, `zigzag`, `ulysses`, `forms`.
"""

from course_lib.checks.context_parallel.forms import FORMS
from course_lib.checks.context_parallel.parts import PARTS
from course_lib.checks.context_parallel.ring import RING
from course_lib.checks.context_parallel.ulysses import ULYSSES
from course_lib.checks.context_parallel.zigzag import ZIGZAG

EXERCISES = (PARTS, RING, ZIGZAG, ULYSSES, FORMS)
