"""What the lesson reads and draws: a hang, a slow job, and a case between right runs."""

from course_lib.clinic.jobs import write_dumps, write_records
from course_lib.clinic.pictures import curves_picture, distance
from course_lib.debugging.flight_recorder import read_dumps
from course_lib.debugging.hang_report import find_waits, hang_report
from course_lib.debugging.time_report import time_report


def test_the_job_that_hangs_waits_for_the_rank_that_waits_for_nobody(tmp_path):
    dumps = read_dumps(write_dumps(tmp_path))
    assert {one.rank: one.waits_for for one in find_waits(dumps)} == {0: (2, 3), 1: (2, 3), 2: (3,)}
    assert hang_report(dumps).startswith("rank 3 is behind: its last call was all_reduce")


def test_the_slow_rank_waits_for_nobody(tmp_path):
    report = time_report(write_records(tmp_path))
    late, _ = report.straggler()
    assert late == 2
    assert report.ranks[late].wait_s == 0 < min(report.ranks[rank].wait_s for rank in (0, 1, 3))


def test_a_case_is_drawn_between_right_runs():
    right, case, others = [3.0, 2.0], [3.0, 2.5], [[4.0, 3.0], [1.0, 2.0]]
    assert distance(right, case) == 0.25
    figure, alt = curves_picture("a case", right, case, others)
    assert (
        alt == "a case: 0.25 from the right run on average; right runs with other seeds: at least 1"
    )
    assert len(figure.axes[0].lines) == 4
