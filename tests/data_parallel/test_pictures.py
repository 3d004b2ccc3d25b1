"""The lesson's measurements and pictures: pieces of work at once, stragglers, published scaling."""

import sys
import time

import cloudpickle
import pytest
from matplotlib.figure import Figure

from course_lib.core import Event
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


def test_the_title_tells_what_threads_and_processes_take():
    times = {"Python, threads": [[1.0], [2.1, 1.9]], "Python, processes": [[1.0], [1.2, 1.1]]}
    figure, finding = pictures.at_once(times, [1, 2], 2)
    assert isinstance(figure, Figure)
    assert finding.startswith("In threads, two Python loops take 1.9 times as long as one; ")
    assert "in processes, 1.1;" in finding


def updates(order, staleness):
    return [
        Update(workers=(who,), staleness=age, loss=1.0, time_s=0.1 * number)
        for number, (who, age) in enumerate(zip(order, staleness, strict=True))
    ]


def test_the_mean_staleness_is_that_of_one_worker():
    run = updates([1, 3, 2, 3], [0, 1, 2, 5])
    assert pictures.mean_staleness(run, 3) == 3
    run = updates([1, 2, 3] * 4, [0, 1, 2] * 4)
    _, finding = pictures.staleness([1, 2], 0.02, [run, run])
    assert "sleeps 2 times as long, its gradients are 2.0 updates old" in finding


def test_pictures_of_runs_tell_their_numbers():
    run = updates([1, 2, 3], [0, 1, 2])
    assert "after 3 updates: BSP 1.00, asynchronous 1.00" in pictures.losses_by_update(run, run)[1]
    assert "after 0.2 s: BSP 1.00" in pictures.losses_by_time(run, run, [0.1, 0.2])[1]
    figure, finding = pictures.local_sgd([1, 4], {"a": [1, 2], "b": [1, 1.5]})
    assert isinstance(figure, Figure)
    assert finding.startswith("Loss at H = 4: a 2.0, b 1.5")


def test_rounds_are_counted_by_the_steps_of_the_server():
    server = [Event(rank=0, kind="optimizer", start_s=t, end_s=t + 0.01) for t in (0.1, 0.2)]
    worker = [Event(rank=3, kind="compute", start_s=0.0, end_s=0.1)]
    figure, finding = pictures.rounds({"BSP": [*server, *worker], "asynchronous": worker})
    assert isinstance(figure, Figure)
    assert "BSP waits for rank 3: 2 rounds take 210 ms" in finding


def test_a_straggler_slows_rounds_by_formula_and_as_measured():
    _, finding = pictures.pace([1, 8], step_s=0.02)
    assert "a round 8.0 times as long, 3 asynchronous updates 1.4 times" in finding
    _, finding = pictures.pace([1, 8], 0.02, bsp_s=[[0.02, 0.02], [0.1, 0.14]], free_s=[0.02, 0.03])
    assert "a round 6.0 times as long, 3 asynchronous updates 1.5 times" in finding


def test_the_server_sends_more_than_a_rank_of_a_ring():
    assert "On 8 ranks, a server sends 7 n" in pictures.busiest_link([2, 8])[1]
    assert "a rank of a ring 1.75 n" in pictures.busiest_link([2, 8])[1]
    assert "a rank of a ring 1.5 n" in pictures.busiest_link([2, 4], [1, 1.5], [1, 3])[1]


def test_published_scaling_is_relative_to_one_node():
    gpus, speed, bandwidth = pictures.published_scaling()
    assert gpus == [8, 16, 32, 64, 128, 256]
    assert speed[0] == bandwidth[0] == 100
    assert speed == sorted(speed, reverse=True)
    assert (speed[-1], bandwidth[-1]) == pytest.approx((39.1, 14.9), abs=0.05)
    assert pictures.scaling_on_gpus()[1].startswith("On 256 GPUs: speed per GPU 39 % of that on 8")
