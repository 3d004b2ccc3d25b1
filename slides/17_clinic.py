"""The pictures of the deck 17_clinic, drawn by the functions that the notebook calls."""

from course_lib.clinic.cases import CASES
from course_lib.clinic.pictures import curves_picture
from course_lib.clinic.ward import examine, run_case, run_right
from course_lib.debugging.pictures import where_runs_differ


def curves():
    """A case's loss between those of right runs."""
    case = CASES["norms apart"]
    others = [run_right(case, seed=seed) for seed in (1, 2)]
    return curves_picture("norms apart", run_right(case), run_case(case), others)[0]


def norms():
    """Where the case of the norms differs first."""
    return where_runs_differ(examine(CASES["norms apart"], steps=3))[0]


def resume():
    """Where the resumed run differs first."""
    return where_runs_differ(examine(CASES["a resume"], steps=6))[0]


def ruler():
    """Where the run with clipping differs first."""
    return where_runs_differ(examine(CASES["norm of norms"], steps=3))[0]


def pictures():
    """All pictures by the names the deck calls them."""
    return {draw.__name__: draw() for draw in (curves, norms, resume, ruler)}
