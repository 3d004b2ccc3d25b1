"""From records to experiments: every number here was worked out by hand."""

import sys
from dataclasses import replace

import cloudpickle
import pytest

from course_lib.core import CourseError, ModelSpec, RunRecord
from course_lib.core.specs import spec_fields
from course_lib.scaling_study.aggregate import (
    RankTotals,
    against,
    aggregate,
    count_tokens,
    find_baseline,
    rank_totals,
    read_experiments,
)
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import train

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = ModelSpec(hidden=16, num_layers=2, num_heads=2, ffn_hidden=32, vocab=40, max_seq=8)
RUN = {
    "model": spec_fields(SPEC),
    "strategy": "ddp",
    "tp": 1,
    "pp": 1,
    "global_batch": 8,
    "num_micro_batches": 1,
    "seq": 8,
    "bucket_mib": 25.0,
    "dtype": "float32",
    "steps": 8,
    "warmup": 0,
}
ODD = {"memory_bytes": 10**9, "utilisation": 7.0}  # what no mean may show: the warm-up


def record(rank, world_size, step_s, tokens, memory, *, first=0, last=8, busy=0.5, **run):
    """A rank whose steps take `step_s`, but the first two of its process 100 s each."""
    steps = [
        {
            "step": n,
            "start_s": 50.0 * n,
            "end_s": 50.0 * n + (100.0 if n < first + 2 else step_s),
            "num_tokens": tokens,
            "loss": 5.0 - n,
            **(ODD if n < first + 2 else {"memory_bytes": memory[n], "utilisation": busy}),
        }
        for n in range(first, last)
    ]
    held = {"params": 3, "grads": 4, "optim_state": 5 + rank, "peak": 200 + 100 * rank}
    return RunRecord(rank, world_size, RUN | {"memory": held} | run, {"cores": 2}, steps)


GROWING = [0, 0, 10, 20, 30, 40, 50, 60]  # the mean of the last six is 35
FLAT = [100] * 8


def two_ranks():
    return [
        record(0, 2, 1.0, 10, GROWING, busy=0.5),
        record(1, 2, 1.5, 20, FLAT, busy=0.9),
    ]


def test_the_time_is_the_slowest_ranks_and_the_tokens_are_summed():
    found = aggregate(two_ranks())
    assert (found.num_steps, found.time_s, found.num_tokens) == (6, 9.0, 180)
    assert found.tokens_per_s == 20.0
    assert found.step_s == 1.5
    assert found.losses == (5, 4, 3, 2, 1, 0, -1, -2)


def test_memory_is_a_mean_of_means_a_sum_of_means_and_the_largest_peak():
    found = aggregate(two_ranks())
    assert (found.mean_bytes, found.sum_bytes, found.peak_bytes) == (67.5, 135, 300)
    assert found.utilisation == pytest.approx(0.7)
    assert found.held == {"params": 3, "grads": 4, "optim_state": 6}


def test_an_experiment_beside_one_rank():
    alone = aggregate([record(0, 1, 2.25, 30, FLAT, strategy="single")])
    found = against(aggregate(two_ranks()), alone)
    assert found.speed_up == pytest.approx(1.5)
    assert found.efficiency_percent == pytest.approx(75)
    assert (found.mean_memory_factor, found.sum_memory_factor) == (0.675, 1.35)
    assert found.peak_memory_factor == 1.5
    same = against(alone, alone)
    assert (same.speed_up, same.efficiency_percent) == (1, 100)


@pytest.mark.parametrize(
    ("tp", "pp", "tokens"),
    [
        (1, 1, 11_111_111),  # DP and ZeRO: all of them
        (1, 8, 10_000_000),  # PP: the last stage's
        (8, 1, 10_000_000),  # TP: the most
        (2, 2, 1_000 + 10_000_000),  # two copies: of each the last stage, and there the most
        (1, 4, 1_000 + 10_000_000),
        (4, 1, 1_000 + 10_000_000),
    ],
)
def test_tokens_of_a_copy_count_once(tp, pp, tokens):
    totals = [
        RankTotals(rank=r, num_steps=1, time_s=1.0, num_tokens=10**r, held={}) for r in range(8)
    ]
    assert count_tokens(totals, tp, pp) == tokens


def test_under_tp_the_most_of_any_rank_counts_even_if_it_is_not_the_first():
    totals = [
        RankTotals(rank=r, num_steps=1, time_s=1.0, num_tokens=n, held={})
        for r, n in enumerate([3, 70, 5])
    ]
    assert count_tokens(totals, tp=3) == 70


def test_a_resumed_run_warms_up_twice():
    first = record(0, 1, 1.0, 10, GROWING, last=4)
    second = record(0, 1, 3.0, 10, FLAT, first=4)
    found = aggregate([second, first])
    assert (found.num_steps, found.time_s, found.num_tokens) == (4, 1 + 1 + 3 + 3, 40)
    assert found.mean_bytes == (10 + 20 + 100 + 100) / 4
    assert len(found.losses) == 8


def test_without_samples_nothing_is_made_up():
    records = two_ranks()
    for step in records[1].steps:
        del step["memory_bytes"], step["utilisation"]
    found = aggregate(records)
    assert (found.mean_bytes, found.sum_bytes, found.utilisation) == (None, None, None)
    assert found.peak_bytes == 300


def broken(change):
    records = two_ranks()
    change(records)
    return records


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rs: rs.pop(), "need one of each of 2 ranks; got those of 1"),
        (lambda rs: rs[1].steps.pop(), "rank 1: need 8 steps, each once; got 7"),
        (lambda rs: rs[0].steps.append(rs[0].steps[-1]), "rank 0: need 8 steps.*got 9"),
        (lambda rs: rs.append(rs[0]), "rank 0: need 8 steps.*got 16"),
        (lambda rs: rs[0].run.pop("tp"), "need those of course_lib.train"),
        (lambda rs: setattr(rs[0], "world_size", 3), "need one of each of 2 or 3 ranks"),
    ],
)
def test_what_is_no_whole_run_is_refused(change, said):
    with pytest.raises(CourseError, match=said):
        aggregate(broken(change))


def test_a_run_that_is_all_warm_up_is_refused():
    with pytest.raises(CourseError, match="need a step after 2 of warm-up"):
        rank_totals([record(0, 1, 1.0, 10, FLAT, last=2)])


def test_the_baseline_has_the_same_batch_accumulated_alike():
    alone = aggregate([record(0, 1, 1.0, 10, FLAT, strategy="single")])
    parts = replace(alone, run=replace(alone.run, num_micro_batches=4))
    many = replace(alone.run, strategy="zero1", ranks=2, num_micro_batches=4)
    assert find_baseline(many, [alone, parts]) is parts
    assert find_baseline(replace(many, seq=4), [alone, parts]) is None
    stages = replace(alone.run, ranks=2, pp=2, num_micro_batches=4)
    assert find_baseline(stages, [parts, alone]) is alone


def test_what_is_cut_short_is_left_out_and_said(tmp_path):
    for one in two_ranks():
        one.write(tmp_path / "whole" / f"rank{one.rank}.jsonl")
        one.write(tmp_path / "torn" / f"rank{one.rank}.jsonl")
    torn = tmp_path / "torn" / "rank1.jsonl"
    torn.write_text(torn.read_text()[:-30])
    found, left_out = read_experiments(tmp_path)
    assert [one.num_tokens for one in found] == [180]
    assert list(left_out) == [str(tmp_path / "torn")]
    assert "rank 1: need 8 steps" in left_out[str(tmp_path / "torn")]


SPLITS = [{"strategy": "ddp"}, {"strategy": "zero3"}, {"tp": 2}, {"pp": 2, "micro_batch": 2}]


def test_real_runs_come_to_the_same_tokens_and_losses_under_every_strategy(pools, tmp_path):
    config = TrainConfig(model=SPEC, steps=8, global_batch=8, seq=8, dtype="float64", every=0)
    for n, split in enumerate(SPLITS):
        pools(2).run(train, replace(config, out=str(tmp_path / str(n)), **split))
    pools(1).run(train, replace(config, out=str(tmp_path / "alone")))
    found, left_out = read_experiments(tmp_path)
    assert not left_out
    assert [one.run.label for one in found] == ["ddp", "zero3", "tp", "pp", "single"]
    for one in found:
        assert (one.num_steps, one.num_tokens) == (6, 6 * 8 * 8)
        assert one.losses == pytest.approx(found[-1].losses, rel=1e-9)
        assert one.peak_bytes >= sum(one.held.values()) > 0
        assert one.mean_bytes is not None
        assert one.utilisation is not None
        assert one.utilisation >= 0
        assert find_baseline(one.run, found) is found[-1]


def step_with(**values):
    def spoil(records):
        records[1].steps[3] |= values

    return spoil


def run_with(**values):
    def spoil(records):
        for one in records:
            one.run = one.run | values

    return spoil


def machine_with(**values):
    def spoil(records):
        records[0].machine = values

    return spoil


def instant(records):
    for one in records:
        for step in one.steps:
            step["end_s"] = step["start_s"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (step_with(end_s="later"), "rank1.jsonl, line 5: need a line of a run record; got"),
        (step_with(end_s=float("nan")), "step.end_s: need a number; got nan."),
        (step_with(num_tokens=10**30), "num_tokens: need a whole number; got a number beyond"),
        (step_with(num_tokens=True), "num_tokens: need a whole number; got True."),
        (step_with(step=None), "step.step: need a whole number; got None."),
        (step_with(loss="low"), "a step's loss: need a number; got 'low'."),
        (step_with(memory_bytes=-(10**9)), "and bytes from 0; got"),
        (run_with(steps=2**62), "need 4611686018427387904 steps, each once; got 8"),
        (run_with(steps="8"), "need 8 steps, each once; got 8"),
        (run_with(seq=0), "seq: need 1 to 1,000,000"),
        (run_with(num_micro_batches=2**60), "num_micro_batches: need 1 to 1,000,000"),
        (run_with(tp=[2]), "run.tp: need a whole number; got list."),
        (run_with(dtype="int3"), "dtype: need float32 or float64 or bfloat16"),
        (run_with(bucket_mib=1e-12), "bucket_mib: need at least 1 KiB"),
        (run_with(strategy="../../etc"), "need a short name each"),
        (run_with(model=[1]), "run.spec: need names with values; got list."),
        (run_with(model=RUN["model"] | {"x": 1}), "run.spec: need name, hidden"),
        (run_with(memory={"params": "3"}), "memory.params: need a whole number; got '3'."),
        (machine_with(usable_cores=0), "machine.usable_cores: need more than 0; got 0."),
        (machine_with(usable_gpus=1, gpus=[{}]), "machine.gpus, name: need a text; got None."),
        (instant, "need steps, tokens and seconds above 0"),
    ],
)
def test_a_spoilt_record_is_left_out_and_says_why(tmp_path, spoil, says):
    for folder in ("spoilt", "whole"):
        records = two_ranks()
        if folder == "spoilt":
            spoil(records)
        for one in records:
            one.write(tmp_path / folder / f"rank{one.rank}.jsonl")
    found, left_out = read_experiments(tmp_path)
    assert len(found) == 1
    assert list(left_out) == [str(tmp_path / "spoilt")]
    assert says in left_out[str(tmp_path / "spoilt")]
    assert len(left_out[str(tmp_path / "spoilt")].splitlines()) == 1


def test_a_loss_that_diverged_is_no_spoilt_file():
    records = two_ranks()
    records[0].steps[7]["loss"] = float("nan")
    assert repr(aggregate(records).losses[-1]) == "nan"
