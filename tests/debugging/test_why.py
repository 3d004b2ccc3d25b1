"""Where the time of a run went: parts that add up, and the rank that the others wait for."""

import pytest
from typer.testing import CliRunner

from course_lib.cli.commands import app
from course_lib.core import CourseError
from course_lib.core.records import Event, RunRecord
from course_lib.core.specs import ModelSpec, spec_fields
from course_lib.debugging.time_report import time_report

RUN = {"strategy": "ddp", "dp": 3, "tp": 1, "pp": 1, "seq": 64, "num_micro_batches": 1}
RUN |= {"global_batch": 6, "dtype": "float32"}
RUN["model"] = spec_fields(
    ModelSpec(hidden=64, num_layers=2, num_heads=2, ffn_hidden=256, vocab=100, max_seq=64)
)


def record(rank, compute_s, *, begins_s=0.0, run=RUN, overlap_s=0.0):
    """Two steps of 1 s: computing, then an all-reduce that ends at 0.9 s on all ranks."""
    events = []
    for step in range(2):
        done_s = step + begins_s + compute_s
        events += [
            Event(rank=rank, kind="forward", start_s=step + begins_s, end_s=done_s),
            Event(
                rank=rank,
                kind="all_reduce",
                start_s=done_s - overlap_s,
                end_s=step + 0.9,
                group=(0, 1, 2),
            ),
            Event(rank=rank, kind="wait", start_s=done_s, end_s=step + 0.9),
        ]
    steps = [{"step": n, "start_s": float(n), "end_s": n + 1.0} for n in range(2)]
    return RunRecord(rank, 3, dict(run), steps=steps, events=events)


def written(folder, records):
    for one in records:
        one.write(folder / f"rank{one.rank}.jsonl")
    return folder


def test_a_slow_rank_is_the_one_that_the_others_wait_for(tmp_path):
    folder = written(tmp_path, [record(0, 0.3), record(1, 0.2), record(2, 0.8)])
    found = time_report(folder)
    assert [one.compute_s for one in found.ranks] == pytest.approx([0.3, 0.2, 0.8])
    assert [one.wait_s for one in found.ranks] == pytest.approx([0.5, 0.6, 0])
    assert [one.transfer_s for one in found.ranks] == pytest.approx([0.1] * 3)
    assert [one.other_s for one in found.ranks] == pytest.approx([0.1] * 3)
    assert found.straggler() == (2, pytest.approx(0.6))
    told = "\n".join(found.lines())
    assert "last to call 2 of 2 collectives, and ranks 0, 1 wait up to 600 ms a step" in told
    assert "It computes for 3.2 times as long as the others" in told
    assert "Bound by computing" in told


def test_a_rank_that_begins_late_computes_no_longer(tmp_path):
    late = record(1, 0.3, begins_s=0.5)
    told = "\n".join(time_report(written(tmp_path, [record(0, 0.3), late, record(2, 0.3)])).lines())
    assert "Rank 1 is waited for" in told
    assert "begins later: host, or data" in told
    assert "Bound by waiting for other ranks" in told


def test_a_transfer_beside_computing_is_not_exposed(tmp_path):
    found = time_report(written(tmp_path, [record(rank, 0.8, overlap_s=0.3) for rank in range(3)]))
    assert [one.transfer_s for one in found.ranks] == pytest.approx([0.1] * 3)
    assert found.straggler() is None


def test_the_command_sets_a_prediction_beside_it(tmp_path):
    written(tmp_path, [record(rank, 0.8) for rank in range(3)])
    done = CliRunner().invoke(app, ["why", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "Predicted for laptop: Bound by" in done.output
    assert "The largest part of what the prediction lacks: computing." in done.output
    other = {name: value for name, value in RUN.items() if name != "tp"}
    written(tmp_path, [record(rank, 0.8, run=other) for rank in range(3)])
    done = CliRunner().invoke(app, ["why", str(tmp_path)])
    assert "No prediction: need a run of course_lib.train; its record has no tp." in done.output


@pytest.mark.parametrize(
    ("ranks", "told"), [((), "got none"), ((0, 2), "got those of ranks 0, 2 of 3")]
)
def test_a_folder_without_all_ranks_is_one_sentence(ranks, told, tmp_path):
    written(tmp_path, [record(rank, 0.8) for rank in ranks])
    with pytest.raises(CourseError, match=told):
        time_report(tmp_path)


def test_a_run_that_was_resumed_is_joined_by_step(tmp_path):
    written(tmp_path, [record(0, 0.3), record(1, 0.2), record(2, 0.8)])
    for rank, compute_s in ((0, 0.5), (1, 0.4), (2, 0.2)):
        later = record(rank, compute_s)
        later.steps = [{**step, "step": step["step"] + 1} for step in later.steps]
        later.write(tmp_path / f"rank{rank}-from1.jsonl")
    found = time_report(tmp_path)  # step 1 is in both: that of the later part counts
    assert found.num_steps == 3
    assert [one.compute_s for one in found.ranks] == pytest.approx(
        [(0.3 + 2 * 0.5) / 3, (0.2 + 2 * 0.4) / 3, (0.8 + 2 * 0.2) / 3]
    )
    assert [one.step_s for one in found.ranks] == pytest.approx([1.0] * 3)
    assert found.ranks[0].waits_s == {2: pytest.approx(0.5 / 3)}
    assert found.ranks[2].waits_s == {0: pytest.approx(2 * 0.3 / 3)}
    assert (found.num_calls, found.last) == (3, {2: 1, 0: 2})
    (tmp_path / "other").mkdir()
    record(0, 0.8, run=RUN).write(tmp_path / "other" / "rank0.jsonl")
    with pytest.raises(CourseError, match="got those of ranks 0 of 3"):
        time_report(tmp_path)
    written(tmp_path / "other", [record(rank, 0.8) for rank in range(3)])
    with pytest.raises(CourseError, match="need the run records of one run; got those in"):
        time_report(tmp_path)
