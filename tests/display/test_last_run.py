"""What a job on a cluster left behind is found, added up and drawn in its lesson's notebook."""

import os

import pytest

from course_lib.core import CourseError, Event, Link, RunRecord
from course_lib.cost.network import ring_all_reduce_s
from course_lib.display.last_run import BUILT_IN, MESSAGE, OUR_RING, last_run, wire_run
from course_lib.display.last_run import marked_times_s as times_s

WIRE = Link(latency_s=1.5e-3, bytes_per_s=1e8)
SIZES = (1000, 10_000, 1_000_000)


def marked(rank, name, num_bytes, took_s):
    words = {"kind": "compute", "label": name, "num_bytes": num_bytes}
    return Event(rank=rank, start_s=1.0, end_s=1.0 + took_s, **words)


def race(p=4, slower=2.0):
    """Records of a run on this wire, whose ring takes `slower` times the formula's time."""
    cost_s = {
        MESSAGE: lambda n: 2 * WIRE.time_s(n),
        OUR_RING: lambda n: slower * ring_all_reduce_s(n, p, WIRE),
        BUILT_IN: lambda n: ring_all_reduce_s(n, p, WIRE),
    }
    calls = [(name, n, turn) for turn in range(3) for name in cost_s for n in SIZES]
    return [
        RunRecord(
            rank=rank,
            world_size=p,
            events=[
                marked(rank, name, n, cost_s[name](n) * (50 if turn == 0 else 0.1 ** (rank > 0)))
                for name, n, turn in calls
            ],
        )
        for rank in range(p)
    ]


def leave(folder, value, age_s=0):
    path = RunRecord(rank=0, world_size=1, run={"value": value}).write(folder / "rank0.jsonl")
    os.utime(path, (path.stat().st_mtime - age_s,) * 2)


def test_the_newest_run_that_was_brought_home_is_found_from_the_notebooks(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    runs = tmp_path / "runs"
    leave(runs / "04_collectives-1", "older", age_s=50)
    leave(runs / "04_collectives-10", "newest", age_s=10)
    leave(runs / "04_collectives-2" / "7", "an element", age_s=20)
    leave(runs / "06_ddp-1", "of another lesson")
    leave(runs / "cluster" / "04_collectives-11" / "records" / "0.0", "still running")
    assert [found.run["value"] for found in last_run("04_collectives")] == ["newest"]
    leave(runs / "04_collectives-2" / "7", "an element")
    assert [found.run["value"] for found in last_run("04_collectives")] == ["an element"]


def test_where_there_is_none_it_says_what_to_type(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert last_run("06_ddp") == []
    (said,) = capsys.readouterr().out.splitlines()
    assert "course submit 06;" in said
    assert said.endswith("course collect.")


def test_each_time_is_that_of_the_slowest_rank_and_the_first_warms_up():
    found = [
        RunRecord(rank=r, world_size=2, events=[marked(r, "a", 8, s) for s in times])
        for r, times in enumerate([(9.0, 1.0, 2.0), (9.0, 3.0, 0.5)])
    ]
    assert times_s(found) == {"a": {8: pytest.approx([3.0, 2.0])}}
    found[1].events.pop()
    assert times_s(found) == {"a": {8: pytest.approx([3.0])}}


@pytest.mark.parametrize("p", [2, 4])
def test_the_picture_has_alpha_and_beta_of_that_run(p):
    figure, finding = wire_run(race(p))
    assert finding.startswith(f"977 KiB on {p} ranks: our ring took 2 times its formula; ")
    assert "1.5 ms, 100 MB/s" in finding
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata()) > len(SIZES)]
    (formula,) = lines
    paper_s = [ring_all_reduce_s(n, p, WIRE) for n in formula.get_xdata()]
    assert list(formula.get_ydata()) == pytest.approx(paper_s)


@pytest.mark.parametrize(
    "records", [[], race(1), [RunRecord(rank=r, world_size=2) for r in (0, 1)]]
)
def test_what_is_no_race_is_told(records):
    with pytest.raises(CourseError, match=r"wire_run: need the records of .* Try course submit 04"):
        wire_run(records)
