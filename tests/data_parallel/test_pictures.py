"""The lesson's measurements and pictures: pieces of work at once, stragglers, published scaling."""

import sys
import time

import cloudpickle
import pytest
from matplotlib.figure import Figure

from course_lib.data_parallel import Update, lab, pictures

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def sleep():
    time.sleep(0.02)


def hold_the_lock():
    """Keep the interpreter busy for 20 ms of processor time of this thread."""
    end_s = time.thread_time() + 0.02
    while time.thread_time() < end_s:
        pass


def test_work_that_waits_is_done_at_once_and_python_is_not_in_threads(pools):
    works = {"waits": sleep, "Python": hold_the_lock}
    found = lab.at_once(works, {1: pools(1), 2: pools(2)}, turns=3)
    assert list(found) == [f"{name}, {way}" for name in works for way in ("threads", "processes")]
    assert all(len(ratios) == 2 and len(ratios[1]) == 3 for ratios in found.values())
    assert min(found["waits, threads"][1]) < 1.5
    if sys.version_info < (3, 13) or sys._is_gil_enabled():
        assert max(found["Python, threads"][1]) > 1.5  # the turn whose work alone was undisturbed
    assert isinstance(pictures.at_once(found, [1, 2], lab.num_cores(), "title"), Figure)


def updates(order, staleness):
    return [
        Update(workers=(who,), staleness=age, loss=1.0, time_s=0.1 * number)
        for number, (who, age) in enumerate(zip(order, staleness, strict=True))
    ]


def test_the_mean_staleness_is_that_of_one_worker():
    run = updates([1, 3, 2, 3], [0, 1, 2, 5])
    assert pictures.mean_staleness(run, 3) == 3
    run = updates([1, 2, 3] * 4, [0, 1, 2] * 4)
    figure = pictures.staleness([1, 2], lambda k: [1, 1, k], [run, run], "title")
    assert isinstance(figure, Figure)


def test_pictures_of_runs_are_drawn():
    run = updates([1, 2, 3], [0, 1, 2])
    assert isinstance(pictures.pace([1, 2], lambda k: [1, 1, k], [[1], [2]], [1, 1.2], "t"), Figure)
    assert isinstance(pictures.losses_by_update(run, run, "title"), Figure)
    assert isinstance(pictures.losses_by_time(run, run, [0.1, 0.2], "title"), Figure)
    assert isinstance(pictures.busiest_link([2, 4], [1, 1.5], [1, 3], "title"), Figure)
    assert isinstance(pictures.local_sgd([1, 4], {"a": [1, 2], "b": [1, 1.5]}, "title"), Figure)


def test_published_scaling_is_relative_to_one_node():
    gpus, speed, bandwidth = pictures.published_scaling()
    assert gpus == [8, 16, 32, 64, 128, 256]
    assert speed[0] == bandwidth[0] == 100
    assert speed == sorted(speed, reverse=True)
    assert (speed[-1], bandwidth[-1]) == pytest.approx((39.1, 14.9), abs=0.05)
    assert isinstance(pictures.scaling_on_gpus("title"), Figure)
