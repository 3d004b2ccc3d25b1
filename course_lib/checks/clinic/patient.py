"""The check of a patient of the clinic: a diagnosis, and a function that ends the fault.

The instruments examine the case while the check runs, and the diagnosis is held to what they say.
The function takes the fault's place in short runs in float64, which have to be those of one
process: of the case itself, and of a twin on more ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from course_lib.checks.exercise import Cause, CheckFailed, Exercise, NotDone, NotJudged, failed
from course_lib.checks.judge import ByExample, Difference
from course_lib.checks.on_ranks import Run, Trouble
from course_lib.clinic.cases import FaultyRun
from course_lib.clinic.ward import examine, find_case
from course_lib.debugging.comparing import ValueDifference as FirstDifference
from course_lib.debugging.gradient_types import MEAN, PARTIAL, UNKNOWN
from course_lib.ranks import RankError

FORM, MENDED = "what you return", "the first difference from one process"
FIELDS = ("step", "phase", "parameter", "kind")
A_PAIR = "four words and a function of yours"
AS_EXAMINED = "what the instruments say"
STEPS = 3

RETURN = Cause("Return (step, phase, parameter, kind), and then your function itself, not a call.")
STEP = Cause("Steps count from 0: the first number of the report.")
PHASE = Cause(
    "Phases are computed in the order start, gradient, parameter: what differs in an earlier one "
    "spoils the later ones. Take the first."
)
PARAMETER = Cause("Take the name that stands in the line `first difference`, letter by letter.")
KIND = Cause(
    'Read the lines below the first difference: `nobody sums it` is "not summed", `nobody '
    'averages it` "not averaged", `times the right one` "a multiple"; `another one` is "another '
    'gradient". Where no gradient differs, they are "right".'
)
STILL = Cause("Examine the case with your function in the fault's place: examine(case, function).")
RAISES = Cause("Take the same arguments as the faulty function, and return the same kind of value.")
LOOKS = (
    (FORM, RETURN),
    ("step", STEP),
    ("phase", PHASE),
    ("parameter", PARAMETER),
    ("kind", KIND),
    (MENDED, STILL),
    ("raised", RAISES),
)


def kind_of(first: FirstDifference) -> str:
    """Return what is wrong with the gradient that differs first, in one of the fixed words."""
    if first.kind is None:
        return "right"
    words = ((PARTIAL, "not summed"), (MEAN, "not averaged"), (UNKNOWN, "another gradient"))
    told = next((word for type_, word in words if type_ in first.kind.over.values()), "")
    is_multiple = first.kind.factor == first.kind.factor  # it is nan where it is none
    return told or ("a multiple" if is_multiple else "another gradient")


@cache
def _examined(name: str) -> tuple[int, str, str, str]:
    """Return what the instruments say about a case: step, phase, parameter and kind."""
    first = examine(find_case(name), steps=STEPS).first
    if first is None:
        raise NotJudged(f"{name}: this run is the right one.")
    return (*first.key[:3], kind_of(first))


def _runs_nowhere(*_arguments: Any) -> Mapping[str, Any]:
    raise NotJudged("A patient is examined as a whole, not on a rank.")


@dataclass(frozen=True, kw_only=True)
class Patient(ByExample):
    """A check of a diagnosis and a mend, `answer() -> ((step, phase, parameter, kind), function)`.

    case     its name
    twin     settings in which the twin, on four ranks, differs from the case
    padded   the twin's sequences are padded, so micro-batches have unequal shares
    """

    case: str
    twin: Mapping[str, Any] = field(default_factory=dict)
    padded: bool = False
    observe_on_rank: Callable[..., Mapping[str, Any]] = _runs_nowhere
    facets: Sequence[str] = (FORM, *FIELDS, MENDED)
    looks: Sequence[tuple[str, Cause]] = LOOKS

    def observe(self, answer: Callable[[], Any]) -> Iterator[Run]:
        """Yield the diagnosis as it compares with the instruments', then the mended runs."""
        case = find_case(self.case)
        diagnosis, function, form = _read(answer())
        right = _examined(self.case) if form == A_PAIR else ("",) * len(FIELDS)
        said = {
            name: AS_EXAMINED if given == wanted else repr(given)
            for name, given, wanted in zip(FIELDS, diagnosis, right, strict=True)
        }
        yield Run(case.ranks, {}, [{"your diagnosis": {FORM: form, **said}}])
        around = find_case("unequal micro-batches" if self.padded else self.case).circumstances
        settings = {**case.settings, **self.twin}
        twin = replace(case, ranks=4, settings=settings, circumstances=around)
        for one in (case, twin):
            yield _mended(one, function)

    def _failed(self, seen: Run, found: Difference, exercise: Exercise) -> CheckFailed | NotDone:
        if seen.trouble:
            return super()._failed(seen, found, exercise)
        return failed(f"{found.step}: {found.facet}: {found.words}", self._cause(found, exercise))


def _read(given: Any) -> tuple[Sequence[Any], Any, str]:
    """Return the diagnosis, the function, and whether that is what was asked for, in words."""
    nothing = (None,) * len(FIELDS)
    if not (isinstance(given, tuple | list) and len(given) == 2):
        return nothing, None, f"{type(given).__name__}, no pair"
    diagnosis, function = given
    if not (isinstance(diagnosis, tuple | list) and len(diagnosis) == len(FIELDS)):
        return nothing, None, f"a diagnosis of another form: {diagnosis!r}"
    if not callable(function):
        return nothing, None, f"no function, but {type(function).__name__}"
    if str(getattr(function, "__module__", "")).startswith("course_lib."):
        return nothing, None, "a function of the course"
    return diagnosis, function, A_PAIR


def _mended(case: FaultyRun, function: Callable[..., Any]) -> Run:
    """Return where a run with this function in the fault's place differs from one process."""
    try:
        first = examine(case, function, steps=STEPS).first
    except RankError as error:
        if error.kind == "stopped":
            raise NotJudged(f"the run had not ended.\n{error}") from None
        return Run(case.ranks, {}, trouble=Trouble(error.kind, error.failures, str(error)))
    told = f"step {first.key[0]}, {first}" if first else "none"
    return Run(case.ranks, {}, [{f"your function, on {case.ranks} ranks": {MENDED: told}}])
