"""The kit notices what it is there to notice."""

import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import cloudpickle
import pytest
from torch import nn

from course_lib.data_parallel import NaiveDDP
from course_lib.ranks import RankError
from tests.law.exceptions import EXCEPTIONS
from tests.law.law import Alone, Law, Replicas, alone, assert_broken, assert_laws
from tests.law.modules import HARD

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).resolve().parents[2]
ONE_LAYER = Law("one layer")
REFUSED = "parallelize: need an unsplit GPT; got Linear."


def law_holds(method, *found):
    """Do ranks that report these have the numbers of one process?"""
    assert_laws(lambda *_: [[one] for one in found], method, [ONE_LAYER])


class Naive(Replicas):
    name = "NaiveDDP"

    def wrap(self, module):
        return NaiveDDP(module)


class Splits(Alone):
    name = "tensor parallel"


@pytest.mark.parametrize("other", ["another error", {}])
def test_every_rank_refuses(other):
    law_holds(Splits, REFUSED, REFUSED)
    with pytest.raises(AssertionError, match="one layer: need Refused"):
        law_holds(Splits, REFUSED, other)


@contextmanager
def fault(place, name):
    """Half of what a function computes."""
    own = getattr(place, name)
    with patch.object(place, name, lambda *args: own(*args) / 2):
        yield


def test_a_fault_that_cannot_be_planted_is_no_proof(pools):
    assert_broken(pools(2), Naive, ONE_LAYER, lambda: fault(nn.Linear, "forward"))
    with pytest.raises(RankError, match="has no attribute 'backward'"):
        assert_broken(pools(2), Naive, ONE_LAYER, lambda: fault(nn.Linear, "backward"))


def test_every_rank_reports_everything():
    whole = {key: x for key, x in alone(ONE_LAYER).items() if key[1] in Replicas.reports}
    law_holds(Naive, whole, whole)
    for key in whole:
        silent = {other: x for other, x in whole.items() if other != key}
        with pytest.raises(AssertionError, match=r"ranks \[1\] report nothing of this name"):
            law_holds(Naive, whole, silent)


def test_a_method_that_may_leave_out_every_law_is_told():
    with pytest.raises(AssertionError, match="NaiveDDP: every law is left out"):
        assert_laws(lambda *_: [], Naive, [Law("dropout")])


def test_every_exception_is_one_of_a_method_and_a_module_that_there_are():
    for path in (ROOT / "tests").glob("*/test_*.py"):
        if "from tests.law.law import" in path.read_text():
            import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    methods = [Alone]
    for method in methods:
        methods += method.__subclasses__()
    names = {method.name for method in methods if method.__module__ != __name__}
    assert {name for name, _ in EXCEPTIONS} <= names
    assert {module for _, module in EXCEPTIONS} <= HARD.keys()
