"""The kit notices what it is there to notice."""

import sys
from contextlib import contextmanager
from unittest.mock import patch

import cloudpickle
import pytest
from torch import nn

from course_lib.data_parallel import NaiveDDP
from course_lib.ranks import RankError
from tests.law.law import Alone, Law, Replicas, assert_broken, assert_laws

cloudpickle.register_pickle_by_value(sys.modules[__name__])

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
